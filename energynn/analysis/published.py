"""What the study published, as tables; each value says where it stands, and that it is ``published``."""

from __future__ import annotations

import functools
import tomllib

import pandas as pd

from energynn import published_values
from energynn.published_values import PUBLISHED

WHOLE = ["devices", "local_batch_size", "global_batch_size", "epochs", "repeats"]
NUMBERS = [*WHOLE, "dataset_samples", "low", "high", "decimals", "spread"]
RUN = ["workload", "stage", "dataset", "device_name", "devices", "local_batch_size", "global_batch_size"]
RUN += ["dataset_samples", "epochs"]


def values(kind: str | None = None, quantity: str | None = None) -> pd.DataFrame:
    """Rows of values.csv, all or of one kind and quantity; ``value`` is text as printed, ``low`` and ``high`` numbers.

    Kinds: measurement (of one configuration), statement (about several), setup (chosen), picture (not known).
    Raises ValueError for a kind or a quantity that does not occur.
    """
    table = _all_values()
    for column, wanted in (("kind", kind), ("quantity", quantity)):
        if wanted is not None:
            if wanted not in set(table[column]):
                known = ", ".join(sorted(set(table[column])))
                raise ValueError(f"{column}: {wanted!r} does not occur; choose one of {known}")
            table = table[table[column] == wanted]
    return table.copy()


@functools.cache
def _all_values() -> pd.DataFrame:
    table = pd.DataFrame(published_values.rows())
    table = table.mask(table == "")
    table[NUMBERS] = table[NUMBERS].apply(pd.to_numeric)
    return table


def measurements(with_derived: bool = False) -> pd.DataFrame:
    """One row per published run and quantity: what was run, ``quantity`` with its unit in the name, and its value.

    With ``with_derived`` also those of ``derived``. ``std`` is over ``repeats`` (divisor repeats - ``std_ddof``),
    ``half`` half a unit of the last printed digit (0 for full precision), ``place`` where the value stands. ``series``
    names all series of the run, separated by spaces.
    """
    return _measurements(with_derived).copy()


@functools.cache
def _measurements(with_derived: bool) -> pd.DataFrame:
    table = values("measurement").dropna(subset="workload")
    table["half"] = (0.5 * 10.0 ** -table["decimals"]).fillna(0.0)
    if with_derived:
        table = pd.concat([table, derived()], ignore_index=True)
    table["stage"] = table["stage"].fillna("")
    runs = table.groupby(RUN, dropna=False, sort=False)
    table["run"] = "published " + runs.ngroup().astype(str)
    table["repeats"] = runs["repeats"].transform("first")
    table["local_batch_size"] = table["local_batch_size"].fillna(table["global_batch_size"] / table["devices"])
    with_unit = table["quantity"] + "_" + table["unit"].replace("%", "percent")
    table["quantity"] = with_unit.where(table["quantity"] != "gpu_hours", "gpu_hours")
    table["value"] = table["value"].map(float)
    table = table.rename(columns={"spread": "std", "spread_ddof": "std_ddof", "stands_in": "place"})
    described = ["run", "series", *RUN, "repeats"]
    measured = ["quantity", "value", "std", "std_ddof", "half", "provenance", "place"]
    return table[[*described, *measured]].astype(dict.fromkeys(WHOLE, int)).assign(origin="published")


def derived() -> pd.DataFrame:
    """What derived.toml derives, as rows of ``values``; ``half`` is half the width of the interval around ``value``."""
    table = values("measurement").dropna(subset="workload").assign(series=lambda rows: rows["series"].str.split())
    table = table.explode("series")
    rows = []
    for entry in _toml("derived")["derived"]:
        for devices in entry["devices"]:
            found = _source(table, entry["from"], devices)
            bounds = STEPS[entry["step"]](entry, found, table)
            for quantity in entry["quantities"]:
                low, high = bounds[quantity]
                row = _target(table, entry["series"], devices) | {"quantity": quantity, "unit": UNITS[quantity]}
                row |= {"value": str((low + high) / 2), "half": (high - low) / 2, "provenance": "derived"}
                rows.append(row | {"stands_in": f"derived: {entry['step']} from {entry['from']}"})
    return pd.DataFrame(rows)


def _source(table: pd.DataFrame, name: str, devices: int) -> pd.DataFrame:
    """What is known of the run of a series: rows by quantity; ``low`` and ``high`` are its number's rounding."""
    rows = table[(table["series"] == name) & (table["devices"] == devices)].set_index("quantity")
    half = (0.5 * 10.0 ** -rows["decimals"]).fillna(0.0)
    value = rows["value"].map(float)
    return rows.assign(value=value, low=value - half, high=value + half)


def _target(table: pd.DataFrame, names: str, devices: int) -> dict:
    """What was run in the series that share the run on so many GPUs."""
    about = _toml("series")[names.split()[0]]
    like = table[table["series"] == names.split()[0]].iloc[0]
    row = {field: like[field] for field in ("workload", "dataset", "device_name", "epochs", "repeats")}
    local = about.get("local_batch_size") or about["global_batch_size"] // devices
    row |= {"local_batch_size": local, "global_batch_size": local * devices, "devices": devices, "series": names}
    return row | {"dataset_samples": float(about["samples"])}


def _epoch_s(run: pd.DataFrame) -> float:
    hours = run.loc["gpu_hours"]
    return 3600 * hours["value"] / hours["devices"] / hours["epochs"]


def _scaled(entry: dict, run: pd.DataFrame, table: pd.DataFrame) -> dict[str, tuple[float, float]]:
    small, large = (_source(table, name, 1) for name in ("R4", "R5"))
    images = [one.loc["gpu_hours", "dataset_samples"] for one in (small, large)]
    image_s = (_epoch_s(large) - _epoch_s(small)) / (images[1] - images[0])
    start_s = _epoch_s(small) - images[0] * image_s
    about, hours = _toml("series")[entry["series"].split()[0]], run.loc["gpu_hours"]
    epoch_s, share = _epoch_s(run), hours["dataset_samples"] / about["samples"]
    longer_s = epoch_s - image_s * hours["dataset_samples"] / hours["devices"]
    fixed_s = {"at most": (0.0, start_s), "at least": (start_s, longer_s)}[entry["fixed"]]
    low, high = sorted((one + (epoch_s - one) / share) / epoch_s for one in fixed_s)
    values = run.loc[entry["quantities"], "value"]
    return {quantity: (value * low, value * high) for quantity, value in values.items()}


def _whole(entry: dict, run: pd.DataFrame, table: pd.DataFrame) -> dict[str, tuple[float, float]]:
    cpu, share = run.loc["energy_cpu"], run.loc["share_cpu"]
    return {"energy_total": (100 * cpu["low"] / share["high"], 100 * cpu["high"] / share["low"])}


def _rest(entry: dict, run: pd.DataFrame, table: pd.DataFrame) -> dict[str, tuple[float, float]]:
    cpu, gpu, share = (run.loc[name] for name in ("energy_cpu", "energy_gpu", "share_cpu"))
    most = share["high"] * (1 + gpu["high"] / cpu["low"])
    return {"share_ram": (100 - most, 100 - share["low"] * (1 + gpu["low"] / cpu["high"]))}


STEPS = {"scaled": _scaled, "whole": _whole, "rest": _rest}
UNITS = {"gpu_hours": "h", "energy_total": "kWh", "share_ram": "%"}


def series() -> dict[str, dict]:
    """The study's scaling series: the conditions by which runs belong to them."""
    return {name: conditions for name, conditions in _toml("series").items() if name != "data_sets"}


def data_set_samples(dataset: str) -> float:
    """Samples of a data set where the paper does not state them; NaN for one that it does, or an unknown one."""
    return _toml("series")["data_sets"].get(dataset, {}).get("samples", float("nan"))


def errata() -> list[dict]:
    """Where paper, table and repository contradict themselves or each other."""
    return _toml("errata")["erratum"]


@functools.cache
def _toml(name: str) -> dict:
    return tomllib.loads((PUBLISHED / f"{name}.toml").read_text())
