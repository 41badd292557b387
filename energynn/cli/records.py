"""Commands on records: show, compare, export, check, import-perun, claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from energynn.cli.options import (
    Json,
    Run,
    RunsDir,
    find_run,
    folder_of_runs,
    reply,
    tell,
)

BUILD = Path("build")  # where the paper lies


def show(
    run: Run = "last",
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="draw power, energy, loss and error: .svg or .html"
        ),
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> int:
    """Show one run: energy, time, metrics, and whether they are valid."""
    from energynn import records
    from energynn.launch import command

    run_dir = find_run(run, runs_dir)
    if plot:
        from energynn.analysis import one_run

        one_run.save(run_dir, plot)
    record = records.read_record(run_dir)
    metrics = [
        f"  {name}: {value:.6g}" for name, value in record.get("metrics", {}).items()
    ]
    reply(
        as_json, record, "\n".join([command.report(record), *metrics, f"  {run_dir}"])
    )
    return 0


def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="folders or names")
    ],
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
    rows = shown.to_string(
        float_format="{:.4g}".format, na_rep="", line_width=80, max_colwidth=24
    )
    return "\n".join([*names, rows, "low, high: what the sensors' readings leave open"])


def export(
    csv: Annotated[Path, typer.Option(metavar="FILE")],
    carbon: Annotated[float | None, typer.Option("--gco2-per-kwh", min=0)] = None,
    price: Annotated[float | None, typer.Option("--price-per-kwh", min=0)] = None,
    own: Annotated[
        bool, typer.Option("--own", help="own runs alone, failed ones too, in J and s")
    ] = False,
    runs_dir: RunsDir = None,
) -> int:
    """Write all runs, own and published, as one table for other programs."""
    from energynn import interface

    folder = folder_of_runs(runs_dir, must_exist=True)
    number = interface.export(folder, csv, carbon, price, own)
    what = "own runs, failed ones too" if own else "runs; each says its origin"
    tell(f"{csv}: {number} {what}, and how good its energy is")
    return 0


def check(
    runs: Annotated[
        str, typer.Argument(metavar="[DIR|RUN]", help="all below DIR [default: runs]")
    ] = "",
    recover: Annotated[
        bool,
        typer.Option(
            "--recover", help="first write records of runs whose launcher died"
        ),
    ] = False,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference", help="compare the default study with its reference"
        ),
    ] = False,
) -> int:
    """Derive every number of the records again and compare."""
    from energynn import records

    folder = Path(runs) if runs else folder_of_runs(None, must_exist=True)
    if not folder.is_dir():
        folder = find_run(runs, None)
    if reference:
        return _reference(folder)
    for line in records.recover(folder) if recover else []:
        print(line)
    faults = records.check(folder)
    for fault in faults:
        print(f"FAULT {fault}")
    readable = records.read_all(folder)
    valid = sum(
        each["valid"] and each.get("launcher") != "simulated" for each in readable
    )
    tell(
        f"{len(readable)} records below {folder}, {valid} of them valid; {len(faults)} faults"
    )
    return 1 if faults else 0


def _reference(folder: Path) -> int:
    from energynn.analysis import reference
    from energynn.reading import one_fault

    with one_fault(BUILD):
        lines, passed = reference.compare(folder, BUILD)
    tell("\n".join(lines))
    return 0 if passed else 1


def import_perun(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="perun's .hdf5")],
    runs_dir: RunsDir = None,
) -> int:
    """Read a perun HDF5 file (0.8 to 1.0) into our records."""
    from energynn import records
    from energynn.launch import command, perun_import

    for folder in perun_import.import_file(file, folder_of_runs(runs_dir)):
        record = records.read_record(folder)
        tell(
            f"{command.report(record)}\n  method: {record['method']}\n  record: {folder}"
        )
    return 0


def claims(
    data: RunsDir = None,
    number: Annotated[
        str, typer.Option(metavar="NAME", help="where a number of the paper comes from")
    ] = "",
    as_json: Json = False,
) -> int:
    """Judge the study's statements on published values and on own runs."""
    if number:
        tell(_number(number))
        return 0
    from energynn.analysis import claims

    verdicts = claims.evaluate(folder_of_runs(data, must_exist=True))
    reply(as_json, verdicts, claims.report(verdicts))
    return 0


def _number(name: str) -> str:
    """Say what a number of the paper is and where it comes from."""
    from energynn.config import suggestion
    from energynn.reading import json_table

    numbers = json_table(BUILD / "numbers.json")
    if name not in numbers:
        raise ValueError(f"number: the paper has no {name}{suggestion(name, numbers)}")
    entry = numbers[name]
    return (
        f"{name} = {entry['text']} {entry['unit']} ({entry['provenance']})\n"
        f"  from {entry['source']}\n"
        f"  by notebooks/{entry['notebook']}.ipynb"
    )
