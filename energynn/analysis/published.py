"""What the study published, as tables; each value says where it stands, and that it is ``published``."""

from __future__ import annotations

import functools
import tomllib

import pandas as pd

from energynn import published_values
from energynn.published_values import PUBLISHED

WHOLE = ["devices", "local_batch_size", "global_batch_size", "epochs", "repeats"]
NUMBERS = [*WHOLE, "dataset_samples", "low", "high", "decimals", "spread"]
RUN = [
    "workload",
    "stage",
    "dataset",
    "device_name",
    "devices",
    "local_batch_size",
    "global_batch_size",
]
RUN += ["dataset_samples", "epochs"]


def values(kind: str | None = None, quantity: str | None = None) -> pd.DataFrame:
    """Select rows of values.csv; ``value`` is text as printed, ``low`` and ``high`` numbers.

    Kinds: measurement (of one configuration), statement (about several), setup (chosen), picture
    (not known).
    """
    table = _all_values()
    for column, wanted in (("kind", kind), ("quantity", quantity)):
        table = table if wanted is None else table[table[column] == wanted]
    return table.copy()


@functools.cache
def _all_values() -> pd.DataFrame:
    table = pd.DataFrame(published_values.rows())
    table = table.mask(table == "")
    table[NUMBERS] = table[NUMBERS].apply(pd.to_numeric)
    return table


@functools.cache
def _measurements() -> pd.DataFrame:
    table = values("measurement").dropna(subset="workload")
    table["half"] = (0.5 * 10.0 ** -table["decimals"]).fillna(0.0)
    table["stage"] = table["stage"].fillna("")
    runs = table.groupby(RUN, dropna=False, sort=False)
    table["run"] = "published " + runs.ngroup().astype(str)
    table["repeats"] = runs["repeats"].transform("first")
    table["local_batch_size"] = table["local_batch_size"].fillna(
        table["global_batch_size"] / table["devices"]
    )
    with_unit = table["quantity"] + "_" + table["unit"].replace("%", "percent")
    table["quantity"] = with_unit.where(table["quantity"] != "gpu_hours", "gpu_hours")
    table["value"] = table["value"].map(float)
    table = table.rename(columns={"spread": "std", "spread_ddof": "std_ddof", "stands_in": "place"})
    described = ["run", "series", *RUN, "repeats"]
    measured = ["quantity", "value", "std", "std_ddof", "half", "provenance", "place"]
    return (
        table[[*described, *measured]].astype(dict.fromkeys(WHOLE, int)).assign(origin="published")
    )


def measurements() -> pd.DataFrame:
    """One row per published run and quantity: what was run, ``quantity`` with its unit in the name, and its value.

    ``std`` is over ``repeats`` (divisor repeats - ``std_ddof``), ``half`` half a unit of the last printed digit (0 for
    full precision), ``place`` where the value stands. ``series`` names all series of the run, separated by spaces.
    """
    return _measurements().copy()


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
