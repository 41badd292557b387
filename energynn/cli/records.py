"""Commands on records: show, compare, export, check, import-perun, claims."""

from collections import defaultdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from energynn.cli.options import (
    DEFAULT_RUNS_DIR,
    DetailsOption,
    FactorOption,
    JsonOption,
    PueOption,
    RunsDirOption,
    print_answer,
    print_json_or_text,
    require_runs_dir,
)

BUILD_FOLDER = Path("build")  # where the paper lies
CELL_WIDTH = 12  # of a comparison: three runs have a line of 80 columns


def show(
    run: Annotated[
        str,
        Argument(
            metavar="RUN", help="a folder, run_id, name, unique part of either, or last"
        ),
    ] = "last",
    details: DetailsOption = False,
    plot: Annotated[
        Path | None,
        Option(
            metavar="FILE", help="draw power, energy, error: .svg, .html, .png, .pdf"
        ),
    ] = None,
    as_json: JsonOption = False,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Show one run: energy, time, error, and whether they are valid."""
    from energynn import records
    from energynn.host.reading import join_faults
    from energynn.launch import command

    run_dir = records.find_run(run, runs_dir)
    with join_faults(run_dir.name):  # its files may be anybody's
        if plot:
            from energynn.analysis import one_run

            one_run.save_picture(run_dir, plot)
        record = records.read_record(run_dir)
        text = command.report_text(record, run_dir, details)
        if details:
            from energynn.analysis import profiles

            text += profiles.phases_and_epochs_text(run_dir, record)
    print_json_or_text(as_json, record, f"{text}\n  wrote {plot}" if plot else text)


def compare(
    runs: Annotated[list[str], Argument(metavar="RUN...", help="folders or names")],
    as_json: JsonOption = False,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Put runs side by side: times, energies, metrics, and the parameters that differ."""
    import json

    from energynn.analysis import interface

    table = interface.compare(*runs, runs_dir=runs_dir)
    rows = json.loads(
        table.reset_index().to_json(orient="records", double_precision=15)
    )
    *names, _ = table
    numbers = {name: f"run {number}" for number, name in enumerate(names, 1)}
    lines = [f"{number}  {name}" for name, number in numbers.items()]
    lines.append(f"ratio  run {len(names)} to run 1")

    def format_cell(value) -> str:
        if isinstance(value, float):
            return f"{value:.4g}".replace("nan", "")
        return str(value)

    shown = table.rename(columns=numbers).map(format_cell)
    lengths = shown.map(len).max(axis="columns")
    long = shown.loc[lengths > CELL_WIDTH, [*numbers.values()]]
    shown.loc[long.index, long.columns] = "below"
    lines.append(shown.to_string())
    if len(long):
        lines.append(long.T.to_string())
    remarks = table.attrs["remarks"]
    print_json_or_text(
        as_json, {"rows": rows, "remarks": remarks}, "\n".join([*lines, *remarks])
    )


def export(
    csv: Annotated[Path, Option(metavar="FILE")],
    gco2_per_kwh: FactorOption = None,
    price_per_kwh: FactorOption = None,
    pue: PueOption = 1.0,
    own: Annotated[
        bool, Option("--own", help="own runs alone, failed ones too, in J and s")
    ] = False,
    name: Annotated[str, Option(help="own runs of this name alone")] = "",
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Write all runs, own and published, as one table for other programs."""
    from energynn.analysis import interface
    from energynn.forecast import predict

    factors = predict.conversion_factors(gco2_per_kwh, price_per_kwh, pue=pue)
    folder = require_runs_dir(runs_dir)
    runs = interface.export_csv(folder, csv, factors, own, name)
    kind = "" if own or name else "valid own and published "
    print_answer(f"{csv}: {len(runs)} {kind}runs; each says how good its energy is")
    for name, total in (
        runs.filter(["energy_centre_kWh", "CO2_g", "price"]).sum().items()
    ):
        print_answer(f"{name} of all, where energies are known: {total:.4g}")


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

    folder = Path(runs) if runs else require_runs_dir(default_runs_dir())
    if runs and not folder.is_dir():
        folder = records.find_run(runs, default_runs_dir())
    if reference:
        from energynn.analysis import reference
        from energynn.host.reading import join_faults

        with join_faults(BUILD_FOLDER):
            lines, passed = reference.compare_with_reference(folder, BUILD_FOLDER)
        print_answer("\n".join(lines))
        return 0 if passed else 1
    for line in records.recover(folder) if recover else []:
        print_answer(line)
    faults = records.check(folder)
    for fault in faults:
        print_answer(f"FAULT {fault}")
    readable = records.read_all(folder)
    names = defaultdict(list)
    for run_dir, record in records.read_records_by_folder(folder).items():
        for remark in records.remarks_on_record(record, run_dir):
            names[remark].append(record.run_id)
    for remark, (first, *more) in names.items():
        others = f" and {len(more)} more" if more else ""
        print_answer(f"NOTE {first}{others}: {remark}")
    valid = sum(map(records.is_valid_evidence, readable))
    print_answer(
        f"records below {folder}: {len(readable)}, valid: {valid}, faults: {len(faults)}"
    )
    return 1 if faults else 0


def import_perun(
    file: Annotated[Path, Argument(metavar="FILE", help="perun's .hdf5")],
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> int:
    """Read a perun HDF5 file (0.8 to 1.0) into our records."""
    from energynn import records
    from energynn.launch import command, perun_import

    folders, faults = perun_import.import_perun_file(file, runs_dir)
    for folder in folders:
        print_answer(command.report_text(records.read_record(folder), folder))
    for fault in faults:
        print_answer(f"not imported: {fault}")
    return 1 if faults else 0


def claims(
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Judge the study's statements on published values and on own runs."""
    from energynn.analysis import claims

    verdicts = claims.evaluate_claims(require_runs_dir(runs_dir))
    print_json_or_text(as_json, verdicts, claims.ledger_text(verdicts))
