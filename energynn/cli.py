"""The command line: thin, lazy, and one line for a person's mistake."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from pathlib import Path

FLAG, FOLDER, RUNS_DIR = dict(action="store_true"), dict(type=Path), dict(type=Path, default=Path("runs"))
JSON, RUNS = {"--json": FLAG}, {"--runs-dir": RUNS_DIR}
SOME = {"studies": dict(nargs="*", metavar="STUDY_OR_RUN", help="only these; default: all (cancel: --all)")}
LIMIT = {"--minutes": dict(type=int, help="time limit of each job; a run that needs more goes on in a next")}
RUN = {"run": dict(FOLDER, metavar="RUN")}
BUILD_DIR = {"--build-dir": dict(type=Path, default=Path("build"))}
FACTOR = "with --source and --date: "

# Help and arguments of each command; what it does is below, or in the module named in ELSEWHERE.
COMMANDS: dict[str, tuple[str, dict[str, dict]]] = {
    "run": ("make one run, as notebooks/run_training.ipynb does", {
        "-p": dict(nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), dest="parameters",
                   help="a parameter of the run, as for papermill"), **RUNS}),
    "study": ("run a study on this machine; list all of them; show one and its cost", {
        "action": dict(choices=["run", "list", "show"]),
        "name": dict(nargs="?", default="smoke", help="a study's name, or a file of your own"), **JSON, **RUNS,
        "--minutes": dict(type=float, default=float("inf"), help="begin no run that would end later"),
        "--archive": dict(FOLDER, metavar="FILE", help="pack the runs into a .tar.gz"),
        "--dry-run": dict(FLAG, help="of gpu: the same points in small, on CPU cores")}),
    "submit": ("make every missing run of studies by batch jobs, and see them through", {
        "studies": dict(nargs="+", metavar="STUDY", help="`energynn study list`, or a file of your own"),
        "--system": dict(required=True, help="`energynn system list`, or a file of your own (.toml)"),
        "--dry-run": dict(FLAG, help="print the scripts and the expected cost, submit nothing"),
        "--limit": dict(type=float, metavar="GPU_HOURS", help="ask before spending more; default: the system's"),
        "--yes": dict(FLAG, help="do not ask"), **LIMIT, **RUNS}),
    "resubmit": ("submit runs that failed or stopped again; they go on where they can", {
        "--failed": dict(FLAG, required=True), **LIMIT, **SOME, **RUNS}),
    "status": ("what has become of every run, queued, running or ended", {
        "--watch": dict(type=float, nargs="?", const=10.0, metavar="S", help="again and again"),
        **JSON, **SOME, **RUNS}),
    "cancel": ("cancel jobs of runs that are queued or go on", {
        "--all": dict(FLAG, help="of every study"), **SOME, **RUNS}),
    "system": ("the clusters that are known; check: prove one by a job of a minute", {
        "action": dict(choices=["list", "check"]), "name": dict(nargs="?", default="local")}),
    "doctor": ("what a run on this machine would measure, how well, and what to mend", {
        "--devices": dict(type=int, default=2, help="ranks of the MPI world to try"), **JSON}),
    "check": ("derive every number of the records again and compare", {
        "runs_dir": dict(RUNS_DIR, nargs="?"),
        "--recover": dict(FLAG, help="first write records for runs whose launcher died")}),
    "measure": ("measure any command as our own trainers are: measure -- COMMAND", {
        "--period": dict(type=float, default=0.04, metavar="S", help="seconds between two samples"),
        "--out": dict(FOLDER, metavar="DIR", help="the run's folder; a second start adds a segment"),
        "--json": dict(FLAG, help="print the record; the command's output goes to stderr"),
        "measured": dict(nargs=argparse.REMAINDER, metavar="-- COMMAND")}),
    "recompute": ("derive every energy anew from the raw samples; compare with perun", {
        **RUN, **JSON, "--carbon": dict(type=float, metavar="G_PER_KWH", help=f"{FACTOR}CO2 equivalents"),
        "--price": dict(type=float, metavar="PER_KWH", help=f"{FACTOR}what it costs"),
        "--source": dict(help="where the factor comes from"), "--date": dict(help="of the factor, YYYY-MM-DD")}),
    "import-perun": ("read a perun HDF5 file (0.8 to 1.0) into our records", {
        "file": dict(FOLDER, metavar="FILE"), **RUNS, **JSON}),
    "watch": ("power, energy and time left of a run that goes on, from any shell", {
        **RUN, "--every": dict(type=float, default=2.0, metavar="S", help="seconds between two looks"),
        "--once": dict(FLAG, help="look once; also where standard output is no terminal")}),
    "manifest": ("verify the data sets, or describe one anew", {
        "action": dict(choices=["verify", "build"]), "dataset": dict(nargs="*"),
        "--source": dict(FOLDER, help="build era5_ensemble: the NetCDF file it is packed from"),
        "--root": dict(FOLDER, help="where imagenet (tree, archives or store) or era5 (store) lies")}),
    "imagenet": ("write ImageNet as uint8 pixels, so that training decodes no JPEG", {
        "action": dict(choices=["prepare"]), "--out": dict(FOLDER, required=True),
        "--root": dict(FOLDER, required=True, help="ImageNet's folder tree or the official archives"),
        "--shorter-side": dict(type=int, default=256, help="pixels; 0 keeps the original size (default 256)")}),
    "era5": ("write the store that FourCastNet trains on at full size; resumable", {
        "action": dict(choices=["prepare"]), "--out": dict(FOLDER, required=True),
        "--source": dict(required=True, help="FourCastNet's HDF5 folder, or a Zarr store or NetCDF files"),
        "--years": dict(default="1979-2017,2019", help="default: those of the paper, %(default)s"),
        "--workers": dict(type=int, default=4, help="states that are read at the same time")}),
    "claims": ("judge the study's statements on published values and on own runs", {
        "--data": dict(RUNS_DIR, metavar="DIR", help="folder of own run records"), **JSON}),
    "paper": ("merge the numbers of the notebooks, compile paper and report", BUILD_DIR),
    "compare": ("compare the default study with the committed reference", {**RUNS, **BUILD_DIR}),
}  # fmt: skip
ELSEWHERE = {"submit": ("submit", "main"), "resubmit": ("submit", "again"), "status": ("status", "main")}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit status: 0, 1 (something is not as it should be) or 2 (cannot be done so)."""
    parser = argparse.ArgumentParser(prog="energynn", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (text, words) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        for word, facts in words.items():
            command.add_argument(word, **facts)
    options = parser.parse_args(arguments)
    try:
        if options.command in ELSEWHERE:
            module, function = ELSEWHERE[options.command]
            return getattr(importlib.import_module(f"energynn.cluster.{module}"), function)(options)
        return globals()[f"_{options.command.replace('-', '_')}"](options)
    except (ValueError, OSError) as error:
        print(f"energynn: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nenergynn: interrupted; nothing is lost, the same command goes on from here", file=sys.stderr)
        return 130


def _run(options) -> int:
    from energynn import config
    from energynn.launch import start, supervise

    try:
        start.run(config.make(**{name: _literal(value) for name, value in options.parameters}), options.runs_dir)
    except InterruptedError as error:
        print(f"energynn: {error}", file=sys.stderr)
        return supervise.CAN_GO_ON
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
    from energynn import studies
    from energynn.cluster import local

    if options.action != "run":
        from energynn.cluster import costs

        found = studies.find([options.name] if options.action == "show" else list(studies.STUDIES))
        print(costs.as_json(found) if options.json else costs.report(found, each_run=options.action == "show"))
        return 0
    runs = [run for found in studies.find([options.name]).values() for run in found]
    if options.dry_run and options.name != "gpu":
        raise ValueError(f"dry-run: the study {options.name} is small as it is; only gpu has one")
    runs = studies.gpu(dry_run=True) if options.dry_run else runs
    failed = local.run_study(runs, options.runs_dir.absolute(), options.minutes)
    if options.archive:
        local.archive(runs, options.runs_dir.absolute(), options.archive)
    made = len(runs) - len(failed)
    print(f"\n{made} of {len(runs)} runs have a valid record in {options.runs_dir}", *failed, sep="\n")
    return int(bool(failed))


def _cancel(options) -> int:
    from energynn.cluster import status, submit

    if not options.studies and not options.all:
        raise ValueError("cancel: say which studies or runs, or --all")
    number = submit.cancel(status.folders(options.runs_dir.absolute(), options.studies))
    print(f"{number} jobs cancelled; what goes on leaves a checkpoint if it can, and `energynn submit` goes on from it")
    return 0


def _system(options) -> int:
    from energynn.cluster import submit, systems

    if options.action == "check":
        return submit.check(systems.site(options.name))
    print(systems.known())
    return 0


def _doctor(options) -> int:
    import json
    import os

    from energynn.launch import doctor
    from energynn.measure import perun_adapter, sensors

    powercap = Path(os.environ.get(perun_adapter.POWERCAP_VARIABLE) or sensors.POWERCAP)
    findings = doctor.examine(options.devices, powercap)
    print(json.dumps(doctor.as_json(findings), indent=1) if options.json else doctor.report(findings))
    return doctor.exit_status(findings)


def _measure(options) -> int:
    import json

    from energynn.launch import command

    words = options.measured[1:] if options.measured[:1] == ["--"] else options.measured
    record, status = command.measure(words, options.out, options.period, quiet=options.json)
    if record:
        folder = options.out or Path("runs") / "measured" / record["run_id"]
        print(json.dumps(record, indent=1) if options.json else f"{command.report(record)}\n  record: {folder}")
    return status


def _recompute(options) -> int:
    import json

    from energynn import records
    from energynn.measure import comparison

    if not (options.run / "run.json").exists():
        raise ValueError(f"recompute: {options.run} is no run; give a folder with a run.json")
    old = records.read(options.run) or {}
    new = records.derive(options.run, json.loads((options.run / "run.json").read_text()))
    names = [name for name in records.FIELDS if name.startswith(("energy_", "mean_power_", "idle_power_", "coverage"))]
    names = [name for name in names if name in old or name in new]
    same = {name: old.get(name) == new.get(name) for name in names}
    compared = comparison.against_perun(options.run)
    factors = options.carbon, options.price, options.source, options.date
    costs = comparison.footprint(new.get("energy_total_J", 0.0), *factors)
    if options.json:
        print(json.dumps({"recomputed": {name: new.get(name) for name in names}, "identical": same, "perun": compared,
                          **costs}, indent=1))  # fmt: skip
        return int(not all(same.values()))
    for name in names:
        value = new.get(name)
        value = f"{len(value or [])} entries" if isinstance(new.get(name, old.get(name)), list) else value
        compare = "as in the record" if same[name] else f"NOT as in the record: {old.get(name)}"
        print(f"{name:34} {value}  {compare if old else 'no record yet'}")
    for entry in compared:
        ours_J, perun_J = entry["ours_J"], entry["perun_J"]
        print(f"\n{entry['component'].upper()} by perun's method, {entry['perun_from']}: {perun_J:.3f} J, "
              f"ours {ours_J:.3f} J; the difference of {perun_J - ours_J:+.3f} J is")  # fmt: skip
        for cause, joules in entry["causes"].items():
            print(f"  {joules:+14.3f} J  {cause}")
    for name, value in costs.items():
        print(f"{name:34} {value}")
    return 0 if all(same.values()) else 1


def _import_perun(options) -> int:
    import json

    from energynn import records
    from energynn.launch import command, perun_import

    folders = perun_import.import_file(options.file, options.runs_dir)
    found = [records.read(folder) for folder in folders]
    if options.json:
        print(json.dumps({"runs": found}, indent=1))
        return 0
    for folder, record in zip(folders, found, strict=True):
        print(f"{command.report(record)}\n  method: {record['method']}\n  record: {folder}")
    return 0


def _watch(options) -> int:
    from energynn.launch import watch

    watch.follow(options.run, options.every, options.once)
    return 0


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
    from energynn.data import manifests

    for name in options.dataset or manifests.DATASETS:
        if options.action == "build":
            manifests.build(name, options.root or options.source)
        root = manifests.verify(name, folder=options.root, every_byte=True)
        pixels = ", but for a prepared store's pixels, of which none is known" * (root / "train.ppm").is_file()
        print(f"{name}: every file is there and has its SHA-256{pixels} ({root})")
    return 0


def _claims(options) -> int:
    import json

    from energynn.analysis import claims

    if not options.data.is_dir():
        raise ValueError(f"data: {options.data} is no folder; give one with records, as runs/")
    found = claims.evaluate(options.data)
    print(json.dumps(found, indent=1) if options.json else claims.report(found))
    return 0


def _imagenet(options) -> int:
    import time

    from energynn.data import imagenet
    from energynn.measure import energy, machine, sensors

    options.out.mkdir(parents=True, exist_ok=True)
    samples = options.out / f"samples-{time.time_ns()}.jsonl"
    found, problems = sensors.find(machine.CPU_MODEL)
    sampler = sensors.Sampler(samples, found, 1.0, problems)
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


def _era5(options) -> int:
    from energynn.data import era5_store

    era5_store.prepare(options.source, options.out, era5_store.parse_years(options.years), options.workers)
    print(f"{options.out}: complete; `energynn manifest build era5 --root {options.out}` describes it")
    return 0


def _paper(options) -> int:
    from energynn.analysis import numbers, paper, report

    numbers.colophon(options.build_dir)
    numbers.merge(options.build_dir)
    print(f"wrote {paper.compile(options.build_dir)} and {report.build(options.build_dir)}")
    return 0


def _compare(options) -> int:
    from energynn.analysis import reference

    lines, passed = reference.compare(options.runs_dir, options.build_dir)
    print("\n".join(lines))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
