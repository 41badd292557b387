"""Commands on records: show, compare, export, check, import-perun, claims."""

from pathlib import Path
from typing import Annotated

import typer

from energynn.cli.options import (
    Details,
    Factor,
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
    details: Details = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="draw power, energy, loss and error: .svg or .html"
        ),
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> int:
    """Show one run: energy, time, error, and whether they are valid."""
    from energynn import records
    from energynn.host.reading import one_fault
    from energynn.launch import command

    run_dir = find_run(run, runs_dir)
    with one_fault(run_dir.name):  # its files may be anybody's
        if plot:
            from energynn.analysis import one_run

            one_run.save(run_dir, plot)
        record = records.read_record(run_dir)
        text = command.report(record, run_dir, details)
    reply(as_json, record, f"{text}\n  wrote {plot}" if plot else text)
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

    from energynn.analysis import interface

    folder = folder_of_runs(runs_dir)
    table = interface.compare(*runs, runs_dir=folder)
    rows = json.loads(
        table.reset_index().to_json(orient="records", double_precision=15)
    )
    names = [name for name in table if not name.startswith("ratio")]
    numbers = {name: f"run {number}" for number, name in enumerate(names, start=1)}
    lines = [f"{number}  {name}" for name, number in numbers.items()]
    # on a line of 80 columns, as far as it goes
    width = max(8, (62 - 11 * (table.shape[1] - len(names))) // len(names) - 2)

    def cell(value) -> str:
        if isinstance(value, float):
            return f"{value:.4g}".replace("nan", "")
        return str(value)[:width]

    side_by_side = table.rename(columns=numbers).map(cell).to_string()
    reply(as_json, {"rows": rows}, "\n".join([*lines, side_by_side]))
    return 0


def export(
    csv: Annotated[Path, typer.Option(metavar="FILE")],
    gco2_per_kwh: Factor = None,
    price_per_kwh: Factor = None,
    own: Annotated[
        bool, typer.Option("--own", help="own runs alone, failed ones too, in J and s")
    ] = False,
    runs_dir: RunsDir = None,
) -> int:
    """Write all runs, own and published, as one table for other programs."""
    from energynn.analysis import interface

    folder = folder_of_runs(runs_dir, must_exist=True)
    number = interface.export(folder, csv, gco2_per_kwh, price_per_kwh, own)
    tell(f"{csv}: {number} runs; each says how good its energy is")
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
    if runs and not folder.is_dir():
        folder = find_run(runs, None)
    if reference:
        from energynn.analysis import reference
        from energynn.host.reading import one_fault

        with one_fault(BUILD):
            lines, passed = reference.compare(folder, BUILD)
        tell("\n".join(lines))
        return 0 if passed else 1
    for line in records.recover(folder) if recover else []:
        tell(line)
    faults = records.check(folder)
    for fault in faults:
        tell(f"FAULT {fault}")
    readable = records.read_all(folder)
    for record in readable:
        where = folder if (folder / record.system).is_dir() else None
        for remark in records.remarks(record, where):
            tell(f"NOTE {record.run_id}: {remark}")
    valid = sum(map(records.is_evidence, readable))
    tell(
        f"records below {folder}: {len(readable)}, valid: {valid}, faults: {len(faults)}"
    )
    return 1 if faults else 0


def import_perun(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="perun's .hdf5")],
    runs_dir: RunsDir = None,
) -> int:
    """Read a perun HDF5 file (0.8 to 1.0) into our records."""
    from energynn import records
    from energynn.launch import command, perun_import

    faults: list[str] = []
    for folder in perun_import.import_file(file, folder_of_runs(runs_dir), faults):
        record = records.read_record(folder)
        tell(command.report(record, folder))
    for fault in faults:
        tell(f"not imported: {fault}")
    return 1 if faults else 0


def claims(
    data: RunsDir = None,
    as_json: Json = False,
) -> int:
    """Judge the study's statements on published values and on own runs."""
    from energynn.analysis import claims

    verdicts = claims.evaluate(folder_of_runs(data, must_exist=True))
    reply(as_json, verdicts, claims.report(verdicts))
    return 0
