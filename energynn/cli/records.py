"""Commands on records: check, recompute, import-perun."""

from __future__ import annotations

from pathlib import Path

from energynn.cli.options import add_command, add_flag, add_json, add_run_dir, add_runs_dir


def add_check(commands) -> None:
    parser = add_command(commands, check, "derive every number of the records again and compare")
    parser.add_argument("runs_dir", type=Path, nargs="?", default=Path("runs"))
    add_flag(parser, "--recover", "first write records for runs whose launcher died")


def check(options) -> int:
    from energynn import records

    if not options.runs_dir.is_dir():
        raise ValueError(f"runs_dir: {options.runs_dir} is no folder")
    if options.recover:
        for line in records.recover(options.runs_dir):
            print(line)
    faults = records.check(options.runs_dir)
    for fault in faults:
        print(f"FAULT {fault}")
    there = [record for record in map(records.read, records.run_dirs(options.runs_dir)) if record]
    valid = sum(record["valid"] for record in there)
    print(f"{len(there)} records below {options.runs_dir}, {valid} of them valid as evidence; {len(faults)} faults")
    return 1 if faults else 0


def add_recompute(commands) -> None:
    parser = add_command(commands, recompute, "derive every energy anew from the raw samples; compare with perun")
    add_run_dir(parser)
    add_json(parser)
    needed = "with --source and --date: "
    parser.add_argument("--carbon", type=float, metavar="G_PER_KWH", help=f"{needed}CO2 equivalents")
    parser.add_argument("--price", type=float, metavar="PER_KWH", help=f"{needed}what it costs")
    parser.add_argument("--source", help="where the factor comes from")
    parser.add_argument("--date", help="of the factor, YYYY-MM-DD")


RECOMPUTED = ("energy_", "mean_power_", "idle_power_", "coverage")  # how the names of these fields begin


def recompute(options) -> int:
    import json

    from energynn import records
    from energynn.measure import comparison

    intent = options.run / "run.json"
    if not intent.exists():
        raise ValueError(f"recompute: {options.run} is no run; give a folder with a run.json")
    old = records.read(options.run) or {}
    new = records.derive(options.run, json.loads(intent.read_text()))
    if old and old.get("accounting", 1) != records.ACCOUNTING:
        new = records.with_intervals_of(old, new)
    names = [name for name in records.FIELDS if name.startswith(RECOMPUTED) and (name in old or name in new)]
    identical = {name: old.get(name) == new.get(name) for name in names}
    by_perun = comparison.against_perun(options.run)
    factors = options.carbon, options.price, options.source, options.date
    costs = comparison.footprint(new.get("energy_total_J", 0.0), *factors)
    if options.json:
        recomputed = {name: new.get(name) for name in names}
        answer = {"recomputed": recomputed, "identical": identical, "perun": by_perun, **costs}
        print(json.dumps(answer, indent=1))
    else:
        for name in names:
            print(_line(name, old, new))
        for entry in by_perun:
            print(_difference(entry))
        for name, value in costs.items():
            print(f"{name:34} {value}")
    return 0 if all(identical.values()) else 1


def _line(name: str, old: dict, new: dict) -> str:
    """One field: what was derived, and whether the record has the same."""
    value = new.get(name)
    if isinstance(new.get(name, old.get(name)), list):
        value = f"{len(value or [])} entries"
    if not old:
        verdict = "no record yet"
    elif old.get(name) == new.get(name):
        verdict = "as in the record"
    else:
        verdict = f"NOT as in the record: {old.get(name)}"
    return f"{name:34} {value}  {verdict}"


def _difference(entry: dict) -> str:
    """One component: perun's energy, ours, and where each joule of the difference comes from."""
    ours_J, perun_J = entry["ours_J"], entry["perun_J"]
    lines = [
        f"\n{entry['component'].upper()} by perun's method, {entry['perun_from']}: {perun_J:.3f} J, "
        f"ours {ours_J:.3f} J; the difference of {perun_J - ours_J:+.3f} J is"
    ]
    lines += [f"  {joules:+14.3f} J  {cause}" for cause, joules in entry["causes"].items()]
    return "\n".join(lines)


def add_import_perun(commands) -> None:
    parser = add_command(commands, import_perun, "read a perun HDF5 file (0.8 to 1.0) into our records")
    parser.add_argument("file", type=Path, metavar="FILE")
    add_runs_dir(parser)
    add_json(parser)


def import_perun(options) -> int:
    import json

    from energynn import records
    from energynn.launch import command, perun_import

    folders = perun_import.import_file(options.file, options.runs_dir)
    imported = [records.read(folder) for folder in folders]
    if options.json:
        print(json.dumps({"runs": imported}, indent=1))
        return 0
    for folder, record in zip(folders, imported, strict=True):
        print(f"{command.report(record)}\n  method: {record['method']}\n  record: {folder}")
    return 0
