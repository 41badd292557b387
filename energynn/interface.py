"""The Python interface: runs as one table, power over time, comparisons."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from energynn import records
from energynn.analysis import observations
from energynn.files import default_runs_dir, require_place
from energynn.measure import account

# Ends of the names of quantities, and their units.
UNITS = {name: name for name in ("Wh", "kWh", "kW", "W", "h", "m")} | {
    "hours": "h",
    "percent": "%",
}
TEXTS = [*observations.WHAT, "provenance", "run_dir"]
COMPARED = ["training_time_s", "device_hours_training", "energy_total_provenance"]
COMPARED += [f"energy_{part}_J" for part in ("gpu", "cpu", "ram", "total")]
COMPARED += ["mean_power_total_W", "samples_trained", "optimizer_steps"]


def load(runs_dir: str | Path = "runs") -> xr.Dataset:
    """Load all runs, own and published, as one Dataset with dimension ``run``.

    Coordinates say what was run; ``origin`` is "published", "own" (our trainers), "command"
    (`energynn measure`) or "imported" (perun's files). ``provenance`` is that of the energies. Data
    variables carry ``units``: kWh, h, W, %; ``<quantity>_std`` is the scatter over repeats, where
    it is known. NaN: the run does not have it. Records that cannot be used stand with the reason in
    ``attrs["excluded"]``.

        >>> runs = load()
        >>> a100 = runs.sel(run=(runs.origin == "published"))
    """
    long = observations.load(runs_dir)
    others = observations.without_training(runs_dir)
    table = pd.concat([observations.distinct(long), others], ignore_index=True)
    quantities = [
        name + end for name in observations.QUANTITIES for end in ("", "_std")
    ]
    table = table.set_index("run").reindex(columns=[*TEXTS, *quantities])
    table = table.dropna(axis="columns", how="all")
    texts = table.select_dtypes(exclude="number").columns
    table[texts] = table[texts].fillna("")
    runs = xr.Dataset.from_dataframe(table)
    for name in runs:
        unit = name.removesuffix("_std").rsplit("_", 1)[-1]
        runs[name].attrs["units"] = UNITS.get(unit, "1")
    excluded = long.attrs["excluded"] + others.attrs["excluded"]
    return runs.set_coords(runs.keys() & {*TEXTS}).assign_attrs(excluded=excluded)


def export(
    runs_dir: Path,
    csv: Path | None = None,
    netcdf: Path | None = None,
    gCO2_per_kWh: float | None = None,
    price_per_kWh: float | None = None,
) -> int:
    """Write ``load(runs_dir)`` as CSV or NetCDF; returns the number of runs.

    With factors, which have no default as they differ by grid, contract and year, also columns
    ``CO2_g`` and ``price``.
    """
    path = csv or netcdf
    if path.is_dir() or not path.exists():  # a pipe may take it
        require_place(path)
    runs = load(runs_dir)
    for name, factor in (("CO2_g", gCO2_per_kWh), ("price", price_per_kWh)):
        if factor is not None:
            runs[name] = factor * runs["energy_total_kWh"]
    path.parent.mkdir(parents=True, exist_ok=True)
    if csv:
        runs.to_dataframe().to_csv(path)
    else:
        runs.attrs["excluded"] = "; ".join(runs.attrs["excluded"])
        runs.to_netcdf(path, engine="scipy")  # netCDF 3, which every program reads
    return runs.sizes["run"]


def trace(run: str | Path, period_s: float = 0.5) -> xr.DataArray:
    """Return mean power in W, dimensions ``sensor`` and ``time`` (s from the training's start).

    ``run`` is a run's folder, or whatever `energynn show` takes. NaN before the first and after the
    last sample of a host. Raises ValueError where that is no run, or one without samples.

        >>> from energynn.interface import load, trace
        >>> runs = load()
        >>> power = trace(runs.run_dir.values[runs.origin.values == "own"][0])
        >>> power.dims, power.attrs["units"]
        (('sensor', 'time'), 'W')
    """
    run_dir = records.find(run, default_runs_dir())
    traces = account.power_trace(run_dir, period_s)
    if not traces:
        raise ValueError(f"trace: {run_dir} has no samples")
    powers = {
        name: pd.Series(watts, np.round(t_s, 6))
        for name, (t_s, watts) in traces.items()
    }
    table = pd.DataFrame(powers).rename_axis(index="time", columns="sensor").T
    power = xr.DataArray(table, name="power_W")
    power["time"].attrs["units"] = "s"
    return power.assign_attrs(units="W", long_name="mean power of a step")


def compare(*runs: str | Path) -> pd.DataFrame:
    """Put runs side by side: a row for each quantity, a column for each run, ratio to the first.

    ``runs`` are folders, or whatever `energynn show` takes. ``ratio_low`` and ``ratio_high`` bound
    the ratio of the last run's energies by the bounds of both; what their sensors have in common is
    not in them. Parameters that differ stand below. Raises ValueError for fewer than two runs, or
    one without a record.
    """
    known = {}
    for run in runs:
        record = records.read(records.find(run, default_runs_dir()))
        if record is None:
            remedy = "`energynn check --recover` writes that of a dead run"
            raise ValueError(f"compare: {run} has no record; {remedy}")
        known[record["run_id"]] = record | record["config"] | record["metrics"]
    configs = [each["config"] for each in known.values()]
    for each in known.values():
        if "command" in each:
            each["command"] = records.differing(each["config"], configs)
    if len(known) < max(2, len(runs)):
        raise ValueError("compare: give the folders of two runs or more, each once")
    first, *_, last = known.values()
    quantities = [*COMPARED, *sorted(first["metrics"] | last["metrics"])]
    everything = pd.DataFrame(known)
    table = everything.reindex(dict.fromkeys([*quantities, *first["config"]]))
    is_same = table.eq(table.iloc[:, 0], axis=0).all(axis=1)
    table = table[~is_same | table.index.isin(quantities)].dropna(how="all")
    numbers = (
        table.iloc[:, [0, -1]].apply(pd.to_numeric, errors="coerce").replace(0, np.nan)
    )
    ratio = numbers.iloc[:, 1] / numbers.iloc[:, 0]
    energies = table.index[table.index.str.endswith("_J")]
    bounds = everything.reindex(energies.str.replace("_J", "_bound_J")).set_axis(
        energies
    )
    relative = bounds[numbers.columns].astype(float) / numbers
    half = ratio * relative.sum(axis=1, min_count=2)
    ends = {"ratio_low": ratio - half, "ratio_high": ratio + half}
    return table.assign(ratio=ratio, **ends).rename_axis("quantity")
