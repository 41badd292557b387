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
    manifest.add_argument("--root", type=Path, help="imagenet: its folder tree, the official archives, or a store")

    images = commands.add_parser("imagenet", help="write ImageNet as uint8 pixels, so that training decodes no JPEG")
    images.add_argument("action", choices=["prepare"])
    images.add_argument("--root", type=Path, required=True, help="ImageNet's folder tree or the official archives")
    images.add_argument("--out", type=Path, required=True)
    images.add_argument("--shorter-side", type=int, default=256, help="pixels; 0 keeps the original size (default 256)")

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
            given = options.source or options.root
            manifests.build(name, **({"source": given} if given else {}))
        if name == "imagenet":
            root = manifests.verify_imagenet(options.root or manifests.root(name))
        else:
            root = manifests.verify(name)
        print(f"{name}: every file is there and has its SHA-256 ({root})")
    return 0


def _imagenet(options) -> int:
    import time

    from energynn.cluster import systems
    from energynn.data import imagenet
    from energynn.measure import energy, sensors

    options.out.mkdir(parents=True, exist_ok=True)
    samples = options.out / f"samples-{time.time_ns()}.jsonl"
    sampler = sensors.Sampler(samples, sensors.find(systems.CPU_MODEL), period_s=1.0)
    sampler.start()
    try:
        bad = imagenet.prepare(options.root, options.out, options.shorter_side)
    finally:
        sampler.stop()
    cost = energy.cost_so_far(options.out)
    print(
        f"{options.out}: {sum(path.stat().st_size for path in options.out.glob('*.ppm')) / 1e9:.3g} GB in "
        f"{cost['seconds']:.1f} s with {cost['energy_total_J'] / 3.6e6:.3g} kWh ({cost['energy_total_provenance']}); "
        "other pixels than the originals', so training with them is another experiment"
    )
    for line in bad:
        print(f"cannot be decoded: {line}")
    return 1 if bad else 0


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
