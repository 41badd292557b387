"""The Python interface: runs as one table, power over time, comparisons."""

import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

from energynn import records
from energynn.analysis import observations, profiles, results
from energynn.host.files import default_runs_dir, require_writable_path
from energynn.host.texts import spreadsheet_cell
from energynn.measure.energy import JOULE_PER_KWH

# Ends of the names of quantities, and their units.
UNIT_OF_NAME_ENDING = {name: name for name in ("Wh", "kWh", "kW", "W", "h", "m")} | {
    "hours": "h",
    "percent": "%",
}
TEXT_COLUMNS = [
    *observations.RUN_FACTS,
    "label",
    "provenance",
    *results.COMPONENT_PROVENANCES,
    "run_dir",
]
# In a table of runs what is of the whole machine and the training has short names.
SHORT_COLUMN_NAMES = {
    "training_time_s": "time_s",
    "energy_total_J": "energy_J",
    "energy_total_bound_J": "energy_bound_J",
    "energy_total_systematic_J": "energy_systematic_J",
    "energy_total_provenance": "energy_provenance",
    "mean_power_total_W": "power_W",
}
# in which repeats do not differ
REPEATED_COLUMNS = [
    "recipe",
    "command",
    "system",
    "device_name",
    "devices",
    "local_batch_size",
    "global_batch_size",
    "epochs",
]
ROW_WITHOUT_RECORD = {"valid": False, "why": "no record; `energynn status` says why"}
# of a record, in a table of runs
RECORD_COLUMNS = [
    "started_at",
    "name",
    "command",
    "run_id",
    "workload",
    "system",
    "devices",
    "device_name",
    "nodes",
    "local_batch_size",
    "global_batch_size",
    "epochs",
    "repeat",
    "starts",
    "status",
    "valid",
    "why",
    "note",
    "training_time_s",
    "device_hours_training",
    "cpu_time_s",
    "cpu_time_others_s",
    "energy_gpu_J",
    "energy_cpu_J",
    "energy_ram_J",
    "energy_total_J",
    "energy_total_bound_J",
    "energy_total_systematic_J",
    "energy_total_provenance",
    *results.COMPONENT_PROVENANCES,
    "mean_power_total_W",
    "samples_trained",
    "optimizer_steps",
]


def load(runs_dir: str | Path = "") -> xr.Dataset:
    """Load all runs, own (of $ENERGYNN_RUNS, else runs) and published, as one Dataset with
    dimension ``run``.

    Coordinates say what was run, ``label`` in which series; ``origin`` is "published", "own" (our
    trainers), "command" (`energynn measure`) or "imported" (perun's files). ``provenance`` is that
    of the energies, of a part of them ``energy_<part>_provenance``. Own energies and hours are
    perun's where all of it was measured, to be set beside published ones; ``table`` has those of
    the training. Data variables carry ``units``: kWh, h, W, %; ``<quantity>_std`` is the scatter
    over repeats, where it is known. NaN: the run has none. Records that cannot be used stand with
    the reason in ``attrs["excluded"]``.

        >>> runs = load()
        >>> a100 = runs.sel(run=(runs.origin == "published"))
    """
    runs_dir = runs_dir or default_runs_dir()
    long = observations.load(runs_dir)
    others = observations.runs_without_training(runs_dir)
    table = pd.concat([observations.distinct_runs(long), others], ignore_index=True)
    quantities = [
        name + end for name in observations.QUANTITIES for end in ("", "_std")
    ]
    table = (
        table.rename(columns={"name": "label", "given_name": "name"})
        .set_index("run")
        .reindex(columns=[*TEXT_COLUMNS, *quantities])
        .dropna(axis="columns", how="all")
    )
    texts = table.select_dtypes(exclude="number").columns
    table[texts] = table[texts].fillna("")
    runs = xr.Dataset.from_dataframe(table)
    for name in map(str, runs):
        unit = name.removesuffix("_std").rsplit("_", 1)[-1]
        runs[name].attrs["units"] = UNIT_OF_NAME_ENDING.get(unit, "1")
    return runs.set_coords(runs.keys() & {*TEXT_COLUMNS}).assign_attrs(
        # a record that cannot be read is of neither kind
        excluded=[*dict.fromkeys(long.attrs["excluded"] + others.attrs["excluded"])]
    )


def table(runs_dir: str | Path = "") -> pd.DataFrame:
    """Tabulate own runs, one row each, the newest first: also what failed or is not valid, and why;
    of copies the first.

    Columns have the names of a record's fields, shorter for the whole (``energy_J``, ``time_s``,
    ``power_W``), and are always there. Then metrics, and the parameters in which runs differ. NaN:
    not known.

        >>> runs = table()
        >>> list(runs.columns[:5])
        ['started_at', 'name', 'command', 'run_id', 'workload']
    """
    runs_dir = Path(runs_dir or default_runs_dir())
    folders = records.list_run_folders(runs_dir)
    if not folders:
        warnings.warn(f"table: no run below {runs_dir.absolute()}", stacklevel=2)
    made = records.read_records_by_folder(runs_dir)
    rows = {folder: {"run_id": folder.name} | ROW_WITHOUT_RECORD for folder in folders}
    for folder, record in made.items():
        rows[folder] = results.row_of_record(record)
        if folder.parent.name == "superseded":
            rows[folder]["why"] = "superseded: the run has begun anew"
    for copy in records.find_copies(made):
        del rows[copy]
    return (
        _table_of_runs([*rows.values()])
        .rename(columns=SHORT_COLUMN_NAMES)
        .sort_values("started_at", ascending=False, ignore_index=True)
    )


def _table_of_runs(rows: list[dict]) -> pd.DataFrame:
    """Make a table of what was said of each run."""
    runs = pd.DataFrame(rows, columns=RECORD_COLUMNS)
    for part in ("metrics", "config"):
        more = pd.DataFrame([row.get(part, {}) for row in rows])
        texts = more.astype(str).where(more.notna())
        differs = texts.nunique() > (part == "config")
        is_new = ~more.columns.isin([*runs, *SHORT_COLUMN_NAMES.values()])
        runs = runs.join(more.loc[:, differs & is_new])
    return runs


def export_csv(
    runs_dir: Path,
    csv: Path,
    factors: list,
    own: bool,
    name: str,
) -> pd.DataFrame:
    """Write ``load(runs_dir)``, or ``table(runs_dir)``, of a name, as CSV, and return it.

    With ``predict.Conversion`` factors also columns ``CO2_g`` and ``price``.
    """
    if csv.is_dir() or not csv.exists():  # a pipe may take it
        require_writable_path(csv)
    if own or name:
        runs = table(runs_dir).set_index("started_at")
        runs = runs.query("name == @name") if name else runs
        if name and runs.empty:
            raise ValueError(
                f"export: no run has the name {name}; `energynn status` tells them"
            )
        kWh = runs["energy_J"] / JOULE_PER_KWH
    else:
        runs = load(runs_dir).to_dataframe()
        kWh = runs["energy_total_kWh"]
    if factors:
        from energynn.forecast import predict

        made = {"energy_kWh": kWh}
        predict.add_conversions(made, factors)
        runs = runs.assign(**made)
    csv.parent.mkdir(parents=True, exist_ok=True)
    runs.reset_index().rename(columns=spreadsheet_cell).map(spreadsheet_cell).to_csv(
        csv, index=False, errors="backslashreplace"
    )
    return runs


def _mean_of_repeats(column: pd.Series):
    """Take the mean of repeats, of what is no number the values that there are."""
    if column.dtype.kind in "if":
        return column.mean()
    values = column.dropna().unique()
    return values[0] if len(values) == 1 else ", ".join(map(str, values))


def trace(run: str | Path, period_s: float = 0.5) -> xr.DataArray:
    """Return mean power in W, dimensions ``sensor`` and ``time`` (s from the training's start).

    Starts of a run follow one another without the time between them.
    ``run`` is a run's folder, or whatever `energynn show` takes. NaN before the first and after the
    last sample of a host. Raises ValueError where that is no run, or one without record or samples.

        >>> from energynn.analysis.interface import load, trace
        >>> runs = load()
        >>> power = trace(runs.run_dir.values[runs.origin.values == "own"][0])
        >>> power.dims, power.attrs["units"]
        (('sensor', 'time'), 'W')
    """
    run_dir = records.find_run(run, default_runs_dir())
    watts = profiles.read_power(run_dir, records.read_record(run_dir), period_s)
    if watts.empty:
        raise ValueError(f"trace: {run_dir} has no samples")
    watts = watts.rename(columns={"device": "sensor", "time_s": "time"})
    power = watts.set_index(["sensor", "time"])["power_W"].to_xarray()
    power["time"].attrs["units"] = "s"
    return power.assign_attrs(units="W", long_name="mean power of a step")


def epochs(run: str | Path) -> pd.DataFrame:
    """Tabulate what a training had taken at the end of each epoch (``elapsed_s``, and
    ``energy_so_far_J`` of all that was measured or estimated), and what it reached.

    ``run`` as ``trace`` takes it; empty for one that has no epochs. NaN: without samples.

        >>> table = epochs(runs.run_dir.values[runs.origin.values == "own"][0])
        >>> list(table.columns[:3])
        ['epoch', 'elapsed_s', 'energy_so_far_J']
    """
    table, _ = profiles.tabulate_epochs(records.find_run(run, default_runs_dir()))
    return table


def compare(*runs: str | Path, runs_dir: str | Path = "") -> pd.DataFrame:
    """Put runs side by side: a row for each fact, named as in a record, a column for each run,
    and the ratio of the last to the first.

    ``runs`` are folders, or whatever `energynn show` takes; repeats, which share a name, are one
    column, of their means; ``energy_total_spread_percent`` is their standard deviation.
    ``attrs["remarks"]`` says what speaks against a comparison, and where both have repeats the
    interval of the energies' ratio, in words.
    Raises ValueError for fewer than two runs, and where runs of one name are no repeats.
    """
    compared, remarks = _runs_to_compare(runs, Path(runs_dir or default_runs_dir()))
    made = [one.record for one in compared]
    columns = _column_labels(compared)
    rows = [*map(results.row_of_record, made)]
    _require_repeats([one.asked for one in compared], rows)
    if len({*columns}) < max(2, len(runs)):
        raise ValueError("compare: give the folders of two runs or more, each once")
    table = _table_of_runs(rows).drop(
        columns=["started_at", "run_id", "energy_total_systematic_J"]
    )
    if table["command"].notna().any():
        configs = [record.config for record in made]
        table["command"] = [
            records.differing_settings_text(one, configs) for one in configs
        ]
    table = (
        table.groupby(columns, sort=False)
        .agg(_mean_of_repeats)
        .T.rename_axis(columns="run_id")
    )
    values = table.drop(["valid", "command", "repeat"]).apply(
        pd.to_numeric, errors="coerce"
    )
    table["ratio"] = values.iloc[:, -1] / values.iloc[:, 0].replace(0, np.nan)
    energies_J = pd.Series([record.energy_total_J for record in made], dtype=float)
    of_run = energies_J.groupby(columns, sort=False)
    table.loc["energy_total_spread_percent"] = 100 * of_run.std() / of_run.mean()
    table = table.replace("", np.nan).dropna(how="all").rename_axis("quantity")
    remarks += _remarks_on_energies(columns, made)
    remarks.append(_scatter_text([joules.dropna() for _, joules in of_run]))
    table.attrs["remarks"] = [*dict.fromkeys(remarks)]
    return table


class ComparedRun(NamedTuple):
    """A run that is compared, and the name or folder by which it was asked for."""

    asked: str
    folder: Path
    record: records.Record


def _runs_to_compare(runs, runs_dir: Path) -> tuple[list[ComparedRun], list[str]]:
    """Find the runs that are compared, of one name the valid ones, else those that finished; and
    say of which name others are left out.
    """
    compared: dict[Path, ComparedRun] = {}
    remarks = []
    for run in map(str, runs):
        found = [
            ComparedRun(run, folder, records.read_record(folder))
            for folder in records.find_runs_of_name(run, runs_dir)
        ]
        valid = [one for one in found if one.record.valid]
        finished = [one for one in found if one.record.status == "finished"]
        best = valid or finished or found
        if left_out := len(found) - len(best):
            remarks.append(f"{run}: without {left_out} unfinished or not valid")
        compared |= {one.folder: one for one in best}
    return [*compared.values()], remarks


def _column_labels(compared: list[ComparedRun]) -> list[str]:
    """Name the column of each run: its run_id, or of repeats the name that they share."""
    repeats = Counter(one.asked for one in compared)
    known = Counter(one.record.run_id for one in compared)
    labels = []
    for asked, folder, record in compared:
        label = record.run_id
        if known[label] > 1:
            label = f"{folder.parent.name}/{folder.name}"
        if repeats[asked] > 1:
            label = f"{asked}, mean of {repeats[asked]}"
        labels.append(label)
    return labels


def _require_repeats(names: list[str], rows: list[dict]) -> None:
    """Raise ValueError where runs of one name differ in more than their number and their times."""
    kinds = pd.DataFrame(rows, columns=REPEATED_COLUMNS).groupby(names).nunique()
    if (kinds > 1).any(axis=None):
        name = kinds.max(axis="columns").idxmax()
        raise ValueError(
            f"compare: {name!r} names runs of several configurations, which have no mean; "
            f"give one of each, as `energynn show {name}` lists them"
        )


def _remarks_on_energies(columns: list[str], made: list[records.Record]) -> list[str]:
    """Say whose work the energies hold, too, and of which parts they are where these differ."""
    busy = zip(columns, map(records.work_of_others, made), strict=True)
    remarks = [f"{name}: {words}" for name, words in busy if words]
    ways = [records.ways_of_energy_text(record) for record in made]
    if len({*ways}) > 1:
        told = zip(columns, ways, strict=True)
        remarks += [f"{name}: its energy is {way}" for name, way in told]
    return remarks


def _scatter_text(energies_J: list[pd.Series]) -> str:
    """Say between what the ratio of the last energies to the first lies, by their repeats."""
    first, *_, last = energies_J
    if min(len(first), len(last)) < 2:
        return "repeats of both, each of one --name, tell how far runs scatter"
    low, high = ratio_interval(first, last)
    return f"ratio of the energies: {low:.3g} to {high:.3g} by the scatter of repeats (95 %)"


def ratio_interval(first: pd.Series, last: pd.Series) -> tuple[float, float]:
    """Return the 95 % interval of the ratio of two quantities, the last over the first, from two
    or more repeats of each: by Welch's t-test of their logarithms.
    """
    from scipy import stats

    test = stats.ttest_ind(np.log(last), np.log(first), equal_var=False)
    low, high = np.exp(test.confidence_interval())
    return float(low), float(high)
