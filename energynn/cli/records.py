"""Commands on records: check, recompute, import-perun."""

from __future__ import annotations

from pathlib import Path

from energynn.cli.options import (
    add_command,
    add_flag,
    add_json,
    add_run_dir,
    add_runs_dir,
    number,
    require_folder,
)


def add_check(commands) -> None:
    parser = add_command(commands, check, "derive every number of the records again and compare")
    parser.add_argument("runs_dir", type=Path, nargs="?", default=Path("runs"))
    add_flag(parser, "--recover", "first write records for runs whose launcher died")
    text = "write the SHA-256 of every file of every run, to sign or publish, instead of checking"
    parser.add_argument("--write-anchor", type=Path, metavar="FILE", help=text)
    parser.add_argument("--anchor", type=Path, metavar="FILE", help="compare with such a list, too")


def check(options) -> int:
    from energynn import records

    require_folder(options.runs_dir)
    if options.write_anchor:
        files = records.write_anchor(options.runs_dir, options.write_anchor)
        print(f"{options.write_anchor}: SHA-256 of {files} files; sign or publish it, and compare with --anchor")
        return 0
    changed, new = records.check_anchor(options.runs_dir, options.anchor) if options.anchor else ([], [])
    for name in new:
        print(f"NEW {name}: not in {options.anchor}")
    if options.recover:
        for line in records.recover(options.runs_dir):
            print(line)
    faults = changed + records.check(options.runs_dir)
    for fault in faults:
        print(f"FAULT {fault}")
    there = [record for record in map(records.read, records.run_dirs(options.runs_dir)) if record]
    simulated = sum(record.get("launcher") == "simulated" for record in there)  # by `energynn forecast simulate`
    valid = sum(record["valid"] and record.get("launcher") != "simulated" for record in there)
    words = f"{valid} of them valid as evidence" + (f", {simulated} simulated" if simulated else "")
    print(f"{len(there)} records below {options.runs_dir}, {words}; {len(faults)} faults")
    return 1 if faults else 0


def add_recompute(commands) -> None:
    parser = add_command(commands, recompute, "derive every energy anew from the raw samples; compare with perun")
    add_run_dir(parser)
    add_json(parser)
    needed = "with --source and --date: "
    parser.add_argument("--carbon", type=number, metavar="G_PER_KWH", help=f"{needed}CO2 equivalents")
    parser.add_argument("--price", type=number, metavar="PER_KWH", help=f"{needed}what it costs")
    parser.add_argument("--source", help="where the factor comes from")
    parser.add_argument("--date", help="of the factor, YYYY-MM-DD")


RECOMPUTED = ("energy_", "mean_power_", "idle_power_", "coverage")  # how the names of these fields begin


def recompute(options) -> int:
    import json

    from energynn import records
    from energynn.measure import comparison
    from energynn.reading import one_fault

    if not (options.run / "run.json").exists():
        raise ValueError(f"recompute: {options.run} is no run; give a folder with a run.json")
    with one_fault(options.run):
        intent = records.read_intent(options.run)
        old = records.read_record(options.run) if (options.run / "record.json").exists() else {}
        new = records.derive(options.run, intent)
        if old and old.get("accounting", 1) != records.ACCOUNTING:
            new = records.with_intervals_of(old, new)
        by_perun = comparison.against_perun(options.run)
    names = [name for name in records.FIELDS if name.startswith(RECOMPUTED) and (name in old or name in new)]
    identical = {name: old.get(name) == new.get(name) for name in names}
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
