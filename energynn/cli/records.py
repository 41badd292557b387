"""Commands on records: check, import-perun."""

from __future__ import annotations

from pathlib import Path

from energynn.cli.options import (
    add_command,
    add_flag,
    add_json,
    add_runs_dir,
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


def check(options) -> int:
    from energynn import records

    require_folder(options.runs_dir)
    if options.recover:
        for line in records.recover(options.runs_dir):
            print(line)
    faults, counts = records.check_and_count(options.runs_dir)
    for fault in faults:
        print(f"FAULT {fault}")
    words = [f"{counts['readable']} records below {options.runs_dir}, {counts['valid']} of them valid as evidence"]
    words += [f"{counts['simulated']} simulated"] if counts["simulated"] else []
    tell(f"{', '.join(words)}; {len(faults)} faults")
    return 1 if faults else 0


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
