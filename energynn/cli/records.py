"""Commands on records: check, recompute, footprint, import-perun, merge, ignore."""

from __future__ import annotations

from pathlib import Path

from energynn.cli.options import (
    add_command,
    add_flag,
    add_json,
    add_run,
    add_run_dir,
    add_runs_dir,
    find_run,
    number,
    reply,
    require_folder,
    runs_dir,
    tell,
)


def add_check(commands) -> None:
    text = "derive every number of the records again and compare"
    parser = add_command(commands, check, text, "energynn check runs")
    default = runs_dir()
    parser.add_argument("runs_dir", type=Path, nargs="?", default=default, metavar="DIR", help="default: runs")
    add_flag(parser, "--recover", "first write records for runs whose launcher died")
    text = "write the SHA-256 of every file of every run, to sign or publish, instead of checking"
    parser.add_argument("--write-anchor", type=Path, metavar="FILE", help=text)
    parser.add_argument("--anchor", type=Path, metavar="FILE", help="compare with such a list, too")


def check(options) -> int:
    from energynn import records

    require_folder(options.runs_dir)
    if options.write_anchor:
        files = records.write_anchor(options.runs_dir, options.write_anchor)
        tell(f"{options.write_anchor}: SHA-256 of {files} files; sign or publish it, and compare with --anchor")
        return 0
    changed, new = records.check_anchor(options.runs_dir, options.anchor) if options.anchor else ([], [])
    for name in new:
        print(f"NEW {name}: not in {options.anchor}")
    if options.recover:
        for line in records.recover(options.runs_dir):
            print(line)
    faults, counts = records.check_and_count(options.runs_dir)
    for fault in changed + faults:
        print(f"FAULT {fault}")
    words = [f"{counts['readable']} records below {options.runs_dir}, {counts['valid']} of them valid as evidence"]
    words += [f"{counts[kind]} {kind}" for kind in ("simulated", "ignored") if counts[kind]]
    tell(f"{', '.join(words)}; {len(changed + faults)} faults")
    return 1 if changed + faults else 0


def add_recompute(commands) -> None:
    text = "derive every energy anew from the raw samples; compare with perun"
    parser = add_command(commands, recompute, text, "energynn recompute runs/measured/20260801-120000-17-python")
    add_run_dir(parser)
    add_json(parser)
    _add_factors(parser)


def _add_factors(parser) -> None:
    """No factor has a default: they differ by grid, contract and year."""
    needed = "with --source and --date: "
    names, text = ("--gCO2-per-kWh", "--carbon"), f"{needed}g of CO2 equivalents"
    parser.add_argument(*names, type=number, metavar="G", dest="carbon", help=text)
    names, text = ("--cost-per-kWh", "--price"), f"{needed}what it costs"
    parser.add_argument(*names, type=number, metavar="X", dest="price", help=text)
    parser.add_argument("--source", help="where the factor comes from")
    parser.add_argument("--date", help="of the factor, YYYY-MM-DD")


def _factors(options) -> tuple:
    return options.carbon, options.price, options.source, options.date


def add_footprint(commands) -> None:
    text = "energy, CO2 equivalents and cost of any runs, by factors that you give with source and date"
    example = "energynn footprint smoke --cost-per-kWh 0.3 --source 'our contract' --date 2026-01-01"
    parser = add_command(commands, footprint, text, example)
    text = "a study, a system, a run's folder or name, or the beginning of its name; default: all"
    parser.add_argument("chosen", nargs="*", metavar="STUDY_OR_RUN", help=text)
    _add_factors(parser)
    add_json(parser)
    add_runs_dir(parser)


def footprint(options) -> int:
    """Sums by provenance: what was measured and what was estimated are not one number."""
    from energynn import records
    from energynn.measure import comparison
    from energynn.measure.energy import SECOND_PER_HOUR
    from energynn.progress import energy_words

    require_folder(options.runs_dir)
    sums: dict[str, dict] = {}
    left_out = []
    for folder, record, why_not in records.counting(_chosen(options.chosen, options.runs_dir)):
        if why_not or record is None or "energy_total_J" not in record:
            left_out.append({"run": folder.name, "reason": why_not or "no energy is recorded"})
            continue
        provenance = record["energy_total_provenance"]
        of = sums.setdefault(provenance, {"provenance": provenance, "runs": 0, "energy_J": 0.0})
        of["runs"] += 1
        of["energy_J"] += record["energy_total_J"]
    rows = [row | comparison.footprint(row["energy_J"], *_factors(options)) for row in sums.values()]
    lines = []
    for row in rows:
        words = [f"{row['provenance']}: {row['runs']} runs", energy_words(row["energy_J"] / SECOND_PER_HOUR)]
        words += [f"{row['carbon_g']:.4g} g CO2eq"] if "carbon_g" in row else []
        words += [f"cost {row['price']:.4g}"] if "price" in row else []
        lines.append(", ".join(words))
    lines += [f"left out: {row['run']}: {row['reason']}" for row in left_out]
    lines += [f"factors: {options.source}, {options.date}"] if options.source and rows else []
    lines.append("of GPUs, CPUs and RAM, while the runs went on; nothing else is counted")
    reply(options, {"sums": rows, "left_out": left_out}, "\n".join(lines))
    return 0


def _chosen(names: list[str], runs_dir: Path) -> list[Path]:
    """Folders of the runs of studies, systems, or runs that are named; without names of all but earlier attempts.

    Raises ValueError where a name stands for no run.
    """
    from energynn import records, studies
    from energynn.cluster import status

    runs_dir = runs_dir.absolute()
    every = [folder for folder in records.run_dirs(runs_dir) if folder.parent.name != "superseded"]
    if not names:
        return every
    found = []
    for name in names:
        of_name = [folder for folder in every if folder.parent.name == name]  # a system
        if name in studies.STUDIES or name in studies.GROUPS or name.endswith(".py"):
            of_name += status.folders(runs_dir, [name])
            if not of_name:
                raise ValueError(
                    f"{name}: none of its runs is below {runs_dir}; `energynn status` lists those that are"
                )
        found += of_name or [find_run(name, runs_dir)]
    return list(dict.fromkeys(found))


RECOMPUTED = ("energy_", "mean_power_", "idle_power_", "coverage")  # how the names of these fields begin


def recompute(options) -> int:
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
    costs = comparison.footprint(new.get("energy_total_J", 0.0), *_factors(options))
    recomputed = {name: new.get(name) for name in names}
    lines = [_line(name, old, new) for name in names] + [_difference(entry) for entry in by_perun]
    lines += [f"{name:34} {f'{value:.6g}' if isinstance(value, float) else value}" for name, value in costs.items()]
    answer = {"recomputed": recomputed, "identical": identical, "perun": by_perun, **costs}
    reply(options, answer, "\n".join(lines))
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
    text = "read a perun HDF5 file (0.8 to 1.0) into our records"
    parser = add_command(commands, import_perun, text, "energynn import-perun perun_results/train.hdf5")
    parser.add_argument("file", type=Path, metavar="FILE", help="perun's .hdf5")
    add_runs_dir(parser)
    add_json(parser)


def import_perun(options) -> int:
    from energynn import records
    from energynn.launch import command, perun_import

    folders = perun_import.import_file(options.file, options.runs_dir)
    imported = [records.read(folder) for folder in folders]
    lines = []
    for folder, record in zip(folders, imported, strict=True):
        lines += [command.report(record), f"  method: {record['method']}", f"  record: {folder}"]
    reply(options, {"runs": imported}, "\n".join(lines))
    return 0


def add_merge(commands) -> None:
    text = "take in records of others: checked on the way in, no machine taken for another, nothing overwritten"
    parser = add_command(commands, merge, text, "energynn merge ~/from-anna/runs --machine anna")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with run folders, at any depth")
    text = "what their machine is to be called; default: the host that the records name"
    parser.add_argument("--machine", default="", metavar="NAME", help=text)
    add_json(parser)
    add_runs_dir(parser)


def merge(options) -> int:
    import json
    from collections import Counter

    from energynn.launch import merge
    from energynn.progress import entry

    require_folder(options.folder)
    arrivals = merge.merge(options.folder, options.runs_dir, options.machine)
    counts = Counter(arrival.state for arrival in arrivals)
    if options.json:
        print(json.dumps({"runs": [vars(arrival) for arrival in arrivals]}, indent=1))
    else:
        for arrival in arrivals:
            print(entry(arrival.state, arrival.run, arrival.words))
        print(f"{counts['came']} came, {counts['here']} were here already, {counts['refused']} refused")
    return 1 if counts["refused"] else 0


def add_ignore(commands) -> None:
    text = "leave a run out of figures, tables and fits, where its name stands with the reason; nothing is deleted"
    parser = add_command(commands, ignore, text, 'energynn ignore resnet50-photographs-n2 --why "a backup ran, too"')
    add_run(parser, dest="run")
    reason = parser.add_mutually_exclusive_group(required=True)
    reason.add_argument("--why", metavar="TEXT", help="the reason, for all who read")
    add_flag(reason, "--undo", "use the run again")
    add_runs_dir(parser)


def ignore(options) -> int:
    from energynn import records

    run_dir = find_run(options.run, options.runs_dir)
    if options.undo:
        (run_dir / records.IGNORED).unlink(missing_ok=True)
        print(f"{run_dir.name}: counts again")
        return 0
    if not options.why.strip():
        raise ValueError("why: give the reason in words, for all who read")
    (run_dir / records.IGNORED).write_text(f"{options.why.strip()}\n")
    tell(f"{run_dir.name}: ignored; {run_dir / records.IGNORED} holds the reason, and --undo takes it back")
    return 0
