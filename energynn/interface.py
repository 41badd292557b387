"""What people call in Python: runs as one table, power over time, comparisons, and a meter for any block of code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from energynn import records
from energynn.analysis import observations
from energynn.files import require_place
from energynn.measure import energy
from energynn.measure.window import Window, window

__all__ = ["Window", "compare", "load", "trace", "window"]

UNITS = {"Wh": "Wh", "kWh": "kWh", "kW": "kW", "W": "W", "h": "h", "hours": "h", "percent": "%", "m": "m"}
TEXTS = ("origin", "series", "name", "workload", "stage", "dataset", "system", "device_kind", "device_name")
TEXTS += ("recipe_at_any_pace", "preset", "loader", "provenance", "run_dir")


def load(runs_dir: str | Path = "runs") -> xr.Dataset:
    """All runs, own and published, as one Dataset with dimension ``run``, whose index is the run's name.

    Coordinates say what was run; ``origin`` is "published", "own" (our trainers), "command" (`energynn measure`) or
    "imported" (perun's files). ``provenance`` is that of the energies. Data variables carry ``units``: kWh, h, W, %;
    ``<quantity>_std`` is the scatter over repeats, where it is known. NaN: the run does not have it. Records that
    cannot be used stand with the reason in ``attrs["excluded"]``.

        >>> runs = load()
        >>> a100 = runs.sel(run=(runs.origin == "published") & (runs.device_name == "NVIDIA A100-40GB"))
    """
    long = observations.load(runs_dir)
    table = observations.distinct(observations.wide(long, "std"))
    others = observations.without_training(runs_dir)
    table = pd.concat([table, others], ignore_index=True)
    table[list(TEXTS)] = table.reindex(columns=TEXTS).fillna("").astype(object)  # before: a text that no run has stays
    table = table.dropna(axis="columns", how="all").set_index("run")
    runs = xr.Dataset.from_dataframe(table.drop(columns=["repeats"], errors="ignore"))
    for name in runs.data_vars:
        unit = UNITS.get(name.removesuffix("_std").rsplit("_", 1)[-1])
        runs[name].attrs |= {"units": unit} if unit else {}
    described = [name for name in (*observations.WHAT, "provenance", "run_dir") if name in runs]
    return runs.set_coords(described).assign_attrs(excluded=long.attrs["excluded"] + others.attrs["excluded"])


def export(runs_dir: Path, csv: Path | None, netcdf: Path | None, parquet: Path | None) -> tuple[Path, int]:
    """Write ``load(runs_dir)`` to one of the files; returns it and the number of runs.

    Raises ValueError where a package for the format is missing.
    """
    path = csv or netcdf or parquet
    if path.is_dir() or not path.exists():  # a pipe may take it
        require_place(path)
    runs = load(runs_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if csv:
            runs.to_dataframe().to_csv(path)
        elif netcdf:
            runs.attrs["excluded"] = "; ".join(runs.attrs["excluded"])
            runs.to_netcdf(path, engine="scipy")  # netCDF 3, which every program reads
        else:
            runs.to_dataframe().to_parquet(path)
    except ImportError as error:
        raise ValueError("export: parquet needs pyarrow: pip install pyarrow, or take --csv or --netcdf") from error
    return path, runs.sizes["run"]


def trace(run: str | Path, period_s: float = 0.5) -> xr.DataArray:
    """Mean power in W of every sensor of a run, dimensions ``sensor`` and ``time`` (s from the training's start).

    ``run`` is the run's folder. NaN before the first and after the last sample of a host. Raises ValueError where the
    folder holds no run.

        >>> from energynn.interface import load, trace
        >>> runs = load()
        >>> power = trace(runs.run_dir.values[runs.origin.values == "own"][0])
        >>> power.dims, power.attrs["units"]
        (('sensor', 'time'), 'W')
    """
    if not (Path(run) / "run.json").is_file():
        raise ValueError(f"trace: {run} is no run; give a folder with a run.json")
    found = energy.power_trace(Path(run), period_s)
    arrays = [xr.DataArray(watts, {"time": np.round(t_s, 6)}, name=name) for name, (t_s, watts) in found.items()]
    if not arrays:
        raise ValueError(f"trace: {run} has no samples of any sensor")
    names = pd.Index(list(found), name="sensor")
    power = xr.concat(arrays, names, join="outer", combine_attrs="drop").rename("power_W")
    power["time"].attrs["units"] = "s"
    return power.assign_attrs(units="W", long_name="mean power of a step")


COMPARED = (
    "training_time_s",
    "device_hours_training",
    *(f"energy_{part}_J" for part in ("gpu", "cpu", "ram", "total")),
)
COMPARED += ("energy_total_provenance", "mean_power_total_W", "samples_trained", "optimizer_steps")


def compare(*runs: str | Path) -> pd.DataFrame:
    """Two or more runs side by side: a row for each quantity, a column for each run, and its ratio to the first.

    ``runs`` are folders. ``ratio_low`` and ``ratio_high`` bound the ratio of the last run's energies by the statistical
    95 % intervals of both; what their sensors have in common is not in them. Fields of the configuration that differ
    stand below. Raises ValueError for fewer than two runs, and for a folder without a record.
    """
    if len(runs) < 2:
        raise ValueError("compare: give the folders of two runs or more")
    found = {}
    for run in runs:
        record = records.read(Path(run))
        if record is None:
            raise ValueError(f"compare: {run} has no record; `energynn check --recover` writes that of a dead run")
        found[record["run_id"]] = record
    if len(found) < len(runs):
        raise ValueError("compare: one run is given twice")
    first, *_, last = found.values()
    names = [*COMPARED, *sorted({*first.get("metrics", {}), *last.get("metrics", {})})]
    rows = [{"quantity": name, **_values(found, name), **_ratio(first, last, name)} for name in names]
    rows += [{"quantity": name, **_settings(found, name)} for name in first["config"] if _differs(found, name)]
    return pd.DataFrame(rows).set_index("quantity").dropna(how="all")


def _settings(found: dict[str, dict], name: str) -> dict:
    return {run_id: record["config"].get(name) for run_id, record in found.items()}


def _differs(found: dict[str, dict], name: str) -> bool:
    return len({repr(value) for value in _settings(found, name).values()}) > 1


def _value(record: dict, name: str):
    return record.get(name, record.get("metrics", {}).get(name))


def _values(found: dict[str, dict], name: str) -> dict:
    return {run_id: _value(record, name) for run_id, record in found.items()}


def _ratio(first: dict, last: dict, name: str) -> dict:
    """Ratio of the last to the first, and its bounds where both have intervals."""
    a, b = _value(first, name), _value(last, name)
    if not a or b is None or isinstance(a, str):
        return {}
    spread_a, spread_b = (record.get(name.replace("_J", "_statistical_J")) for record in (first, last))
    if not name.endswith("_J") or spread_a is None or spread_b is None or not b:
        return {"ratio": b / a}
    relative = np.hypot(spread_a / a, spread_b / b)
    return {"ratio": b / a, "ratio_low": b / a * (1 - relative), "ratio_high": b / a * (1 + relative)}
