"""Commands on records: show, compare, export, check, import-perun, claims."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from energynn.cli.options import (
    RUNS,
    Details,
    Factor,
    Json,
    Run,
    RunsDir,
    existing,
    reply,
    tell,
)

BUILD = Path("build")  # where the paper lies


def show(
    run: Run = "last",
    details: Details = False,
    plot: Annotated[
        Path | None,
        Option(
            metavar="FILE", help="draw power, energy, error: .svg, .html, .png, .pdf"
        ),
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Show one run: energy, time, error, and whether they are valid."""
    from energynn import records
    from energynn.host.reading import one_fault
    from energynn.launch import command

    run_dir = records.find(run, runs_dir)
    with one_fault(run_dir.name):  # its files may be anybody's
        if plot:
            from energynn.analysis import one_run

            one_run.save(run_dir, plot)
        record = records.read_record(run_dir)
        text = command.report(record, run_dir, details)
    reply(as_json, record, f"{text}\n  wrote {plot}" if plot else text)


def compare(
    runs: Annotated[list[str], Argument(metavar="RUN...", help="folders or names")],
    as_json: Json = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Put runs side by side: times, energies, metrics, and the parameters that differ."""
    import json

    from energynn.analysis import interface

    table = interface.compare(*runs, runs_dir=runs_dir)
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


def export(
    csv: Annotated[Path, Option(metavar="FILE")],
    gco2_per_kwh: Factor = None,
    price_per_kwh: Factor = None,
    own: Annotated[
        bool, Option("--own", help="own runs alone, failed ones too, in J and s")
    ] = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Write all runs, own and published, as one table for other programs."""
    from energynn.analysis import interface

    number = interface.export(existing(runs_dir), csv, gco2_per_kwh, price_per_kwh, own)
    tell(f"{csv}: {number} runs; each says how good its energy is")


def check(
    runs: Annotated[
        str, Argument(metavar="[DIR|RUN]", help="all below DIR [default: runs]")
    ] = "",
    recover: Annotated[
        bool,
        Option("--recover", help="first write records of runs whose launcher died"),
    ] = False,
    reference: Annotated[
        bool,
        Option("--reference", help="compare the default study with its reference"),
    ] = False,
) -> int:
    """Derive every number of the records again and compare."""
    from energynn import records
    from energynn.host.files import default_runs_dir

    folder = Path(runs) if runs else existing(default_runs_dir())
    if runs and not folder.is_dir():
        folder = records.find(runs, default_runs_dir())
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
    file: Annotated[Path, Argument(metavar="FILE", help="perun's .hdf5")],
    runs_dir: RunsDir = RUNS,
) -> int:
    """Read a perun HDF5 file (0.8 to 1.0) into our records."""
    from energynn import records
    from energynn.launch import command, perun_import

    faults = []
    for folder in perun_import.import_file(file, runs_dir, faults):
        tell(command.report(records.read_record(folder), folder))
    for fault in faults:
        tell(f"not imported: {fault}")
    return 1 if faults else 0


def claims(
    runs_dir: RunsDir = RUNS,
    as_json: Json = False,
) -> None:
    """Judge the study's statements on published values and on own runs."""
    from energynn.analysis import claims

    verdicts = claims.evaluate(existing(runs_dir))
    reply(as_json, verdicts, claims.report(verdicts))
