"""Commands on records: show, compare, export, check, import-perun, claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from energynn.cli.options import (
    BuildDir,
    Json,
    Run,
    RunsDir,
    find_run,
    folder_of_runs,
    reply,
    tell,
)


def show(run: Run, as_json: Json = False, runs_dir: RunsDir = None) -> int:
    """Show one run: energy, time, metrics, and whether they are valid."""
    from energynn import records
    from energynn.launch import command

    run_dir = find_run(run, runs_dir)
    record = records.read_record(run_dir)
    metrics = [f"  {name}: {value:.6g}" for name, value in record.get("metrics", {}).items()]
    reply(as_json, record, "\n".join([command.report(record), *metrics, f"  {run_dir}"]))
    return 0


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="folders or names")],
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> int:
    """Put runs side by side: times, energies, metrics, and the parameters that differ."""
    import json

    from energynn import interface

    table = interface.compare(*[find_run(run, runs_dir) for run in runs])
    rows = json.loads(table.reset_index().to_json(orient="records"))
    reply(as_json, {"rows": rows}, _side_by_side(table))
    return 0


def _side_by_side(table) -> str:
    runs = [name for name in table if not name.startswith("ratio")]
    numbers = {run: f"run {number}" for number, run in enumerate(runs, start=1)}
    names = [f"{number}  {run}" for run, number in numbers.items()]
    shown = table.dropna(axis="columns", how="all").rename(columns=numbers)
    rows = shown.to_string(float_format="{:.4g}".format, na_rep="", line_width=80, max_colwidth=24)
    return "\n".join([*names, rows, "low, high: what the sensors' readings leave open"])


def export(
    csv: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    netcdf: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    carbon: Annotated[float | None, typer.Option("--gco2-per-kwh", min=0)] = None,
    price: Annotated[float | None, typer.Option("--price-per-kwh", min=0)] = None,
    runs_dir: RunsDir = None,
) -> int:
    """Write all runs, own and published, as one table for other programs."""
    from energynn import interface

    if bool(csv) == bool(netcdf):
        raise ValueError("export: give one of --csv and --netcdf")
    folder = folder_of_runs(runs_dir, must_exist=True)
    number = interface.export(folder, csv, netcdf, carbon, price)
    tell(f"{csv or netcdf}: {number} runs; each says its origin and its provenance")
    return 0


def check(
    runs_dir: Annotated[Path | None, typer.Argument(metavar="DIR", help="default: runs")] = None,
    recover: Annotated[
        bool, typer.Option("--recover", help="first write records of runs whose launcher died")
    ] = False,
    reference: Annotated[
        bool, typer.Option("--reference", help="compare the default study with its reference")
    ] = False,
    build_dir: BuildDir = Path("build"),
) -> int:
    """Derive every number of the records again and compare."""
    from energynn import records

    folder = folder_of_runs(runs_dir, must_exist=True)
    if reference:
        return _reference(folder, build_dir)
    for line in records.recover(folder) if recover else []:
        print(line)
    faults = records.check(folder)
    for fault in faults:
        print(f"FAULT {fault}")
    readable = records.read_all(folder)
    simulated = sum(record.get("launcher") == "simulated" for record in readable)
    valid = sum(record["valid"] for record in readable) - simulated
    words = f"{len(readable)} records below {folder}, {valid} of them valid"
    words += f", {simulated} simulated" if simulated else ""
    tell(f"{words}; {len(faults)} faults")
    return 1 if faults else 0


def _reference(folder: Path, build_dir: Path) -> int:
    from energynn.analysis import reference
    from energynn.reading import one_fault

    with one_fault(build_dir):
        lines, passed = reference.compare(folder, build_dir)
    tell("\n".join(lines))
    return 0 if passed else 1


def import_perun(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="perun's .hdf5")],
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> int:
    """Read a perun HDF5 file (0.8 to 1.0) into our records."""
    from energynn import records
    from energynn.launch import command, perun_import

    folders = perun_import.import_file(file, folder_of_runs(runs_dir))
    imported = {str(folder): records.read_record(folder) for folder in folders}
    lines = []
    for folder, record in imported.items():
        lines += [command.report(record), f"  method: {record['method']}", f"  record: {folder}"]
    reply(as_json, {"runs": list(imported.values())}, "\n".join(lines))
    return 0


def claims(
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="own records")] = None,
    number: Annotated[
        str, typer.Option(metavar="NAME", help="where a number of the paper comes from")
    ] = "",
    as_json: Json = False,
    build_dir: BuildDir = Path("build"),
) -> int:
    """Judge the study's statements on published values and on own runs."""
    if number:
        tell(_number(number, build_dir))
        return 0
    from energynn.analysis import claims

    verdicts = claims.evaluate(folder_of_runs(data, must_exist=True))
    reply(as_json, verdicts, claims.report(verdicts))
    return 0


def _number(name: str, build_dir: Path) -> str:
    """Describe the numbers of the paper whose names contain this one."""
    from energynn.reading import json_table

    lines = []
    for known, entry in json_table(build_dir / "numbers.json").items():
        if name.lower() in known.lower():
            lines.append(f"{known} = {entry['text']} {entry['unit']} ({entry['provenance']})")
            lines.append(f"  from {entry['source']}")
            lines.append(f"  by notebooks/{entry['notebook']}.ipynb")
    if not lines:
        raise ValueError(f"number: the paper has none with {name!r} in its name")
    return "\n".join(lines)
