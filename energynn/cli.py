"""The command line: thin, lazy, and one line for a person's mistake."""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit status: 0, 1 (something is not as it should be) or 2 (cannot be done so)."""
    parser = argparse.ArgumentParser(prog="energynn", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="make one run, as notebooks/run_training.ipynb does")
    run.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), dest="parameters",
                     help="a parameter of the run, as for papermill")  # fmt: skip
    run.add_argument("--runs-dir", type=Path, default=Path("runs"))

    study = commands.add_parser("study", help="run or list a study on this machine")
    study.add_argument("action", choices=["run", "list"])
    study.add_argument("name", nargs="?", default="smoke")
    study.add_argument("--runs-dir", type=Path, default=Path("runs"))

    doctor = commands.add_parser("doctor", help="what a run on this machine would measure, how well, and what to mend")
    doctor.add_argument("--devices", type=int, default=2, help="ranks of the MPI world to try")
    doctor.add_argument("--json", action="store_true")

    check = commands.add_parser("check", help="derive every number of the records again and compare")
    check.add_argument("runs_dir", type=Path, nargs="?", default=Path("runs"))
    check.add_argument("--recover", action="store_true", help="first write records for runs whose launcher died")

    manifest = commands.add_parser("manifest", help="verify the data sets, or describe one anew")
    manifest.add_argument("action", choices=["verify", "build"])
    manifest.add_argument("dataset", nargs="*")
    manifest.add_argument("--source", type=Path, help="build era5_ensemble: the NetCDF file it is packed from")

    manifest.add_argument("--root", type=Path, help="era5: the folder of the store")

    era5 = commands.add_parser("era5", help="write the store that FourCastNet trains on at full size; resumable")
    era5.add_argument("action", choices=["prepare"])
    era5.add_argument("--source", required=True, help="FourCastNet's HDF5 folder, or a Zarr store or NetCDF files")
    era5.add_argument("--out", type=Path, required=True)
    era5.add_argument("--years", default="1979-2017,2019", help="default: those of the paper, %(default)s")
    era5.add_argument("--workers", type=int, default=4, help="states that are read at the same time")

    paper = commands.add_parser("paper", help="merge the numbers of the notebooks and compile the paper")
    paper.add_argument("--build-dir", type=Path, default=Path("build"))

    compare = commands.add_parser("compare", help="compare the default study with the committed reference")
    compare.add_argument("--runs-dir", type=Path, default=Path("runs"))
    compare.add_argument("--build-dir", type=Path, default=Path("build"))

    options = parser.parse_args(arguments)
    try:
        return globals()[f"_{options.command}"](options)
    except (ValueError, OSError) as error:
        print(f"energynn: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nenergynn: interrupted; nothing is lost, the same command goes on from here", file=sys.stderr)
        return 130


def _run(options) -> int:
    from energynn import config, launch

    try:
        launch.run(config.make(**{name: _literal(value) for name, value in options.parameters}), options.runs_dir)
    except RuntimeError as error:  # the run began and did not end well; its record says more
        print(f"energynn: {error}", file=sys.stderr)
        return 1
    return 0


def _literal(text: str):
    """A number, True, False or None where the text is one, else the text; as papermill reads -p."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, int | float | bool | None) else text


def _study(options) -> int:
    from energynn import config, studies
    from energynn.cluster import local

    if options.name not in studies.STUDIES:
        raise ValueError(f"study: {options.name!r} is not known; choose one of {', '.join(studies.STUDIES)}")
    runs = studies.STUDIES[options.name]()
    if options.action == "list":
        print("\n".join(config.run_id(run) for run in runs))
        return 0
    failed = local.run_study(runs, options.runs_dir.absolute())
    print(
        "\n".join(
            [f"\n{len(runs) - len(failed)} of {len(runs)} runs have a valid record in {options.runs_dir}", *failed]
        )
    )
    return 1 if failed else 0


def _doctor(options) -> int:
    import json
    import os

    from energynn.measure import doctor, perun_adapter, sensors

    powercap = Path(os.environ.get(perun_adapter.POWERCAP_VARIABLE) or sensors.POWERCAP)
    findings = doctor.examine(options.devices, powercap)
    print(json.dumps(doctor.as_json(findings), indent=1) if options.json else doctor.report(findings))
    return doctor.exit_status(findings)


def _check(options) -> int:
    from energynn import records

    if not options.runs_dir.is_dir():
        raise ValueError(f"runs_dir: {options.runs_dir} is no folder")
    if options.recover:
        for line in records.recover(options.runs_dir):
            print(line)
    faults = records.check(options.runs_dir)
    for fault in faults:
        print(f"FAULT {fault}")
    folders = records.run_dirs(options.runs_dir)
    found = [record for record in map(records.read, folders) if record]
    valid = sum(record["valid"] for record in found)
    print(f"{len(found)} records below {options.runs_dir}, {valid} of them valid as evidence; {len(faults)} faults")
    return 1 if faults else 0


def _manifest(options) -> int:
    from energynn import manifests

    for name in options.dataset or manifests.DATASETS:
        if options.action == "build":
            manifests.build(name, options.source, options.root)
        root = manifests.verify(name, data_root=options.root or "")
        print(f"{name}: every file is there and has its SHA-256 ({root})")
    return 0


def _era5(options) -> int:
    from energynn.data import era5_store

    era5_store.prepare(options.source, options.out, era5_store.parse_years(options.years), options.workers)
    print(f"{options.out}: complete; `energynn manifest build era5 --root {options.out}` describes it")
    return 0


def _paper(options) -> int:
    from energynn.analysis import numbers, paper

    numbers.colophon(options.build_dir)
    numbers.merge(options.build_dir)
    print(f"wrote {paper.compile(options.build_dir)}")
    return 0


def _compare(options) -> int:
    from energynn.analysis import reference

    lines, passed = reference.compare(options.runs_dir, options.build_dir)
    print("\n".join(lines))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
