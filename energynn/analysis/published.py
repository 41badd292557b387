"""What the study published, as tables; each value says where it stands, and its provenance."""

from __future__ import annotations

import tomllib

import numpy as np
import pandas as pd

from energynn import published_values
from energynn.published_values import PUBLISHED

NUMBERS = ["devices", "local_batch_size", "global_batch_size", "epochs", "repeats"]
RUN = ["workload", "stage", "dataset", "device_name", *NUMBERS[:4], "dataset_samples"]


def values(
    kind: str | None = None, quantity: str | None = None, name: str = "values"
) -> pd.DataFrame:
    """Select rows of ``name``.csv; ``value`` is text as printed, ``low`` and ``high`` numbers.

    Kinds: measurement (of one configuration), statement (about several), setup (chosen), picture
    (not known).
    """
    table = pd.DataFrame(published_values.rows(name))
    table = table.mask(table == "")
    numbers = [*NUMBERS, "dataset_samples", "low", "high", "decimals", "spread"]
    table[numbers] = table[numbers].apply(pd.to_numeric)
    for column, wanted in (("kind", kind), ("quantity", quantity)):
        table = table if wanted is None else table[table[column] == wanted]
    return table


def runs(name: str = "values") -> pd.DataFrame:
    """Make one row per run of ``name``.csv: what was run, and the value of each quantity.

    ``name`` is "values" (printed) or "derived" (it follows from printed values; ``copies`` names
    the quantity that its derivation takes from another series).

    Units stand in names. ``<quantity>_std`` is over ``repeats`` (divisor repeats - 1), ``_half``
    half a unit of the last printed digit (0 for full precision), ``_place`` where the value
    stands. ``series`` names all series of the run, separated by spaces.
    """
    table = (
        values("measurement", name=name).dropna(subset="workload").fillna({"stage": ""})
    )
    groups = table.groupby([*RUN, "provenance"], dropna=False, sort=False)
    table["run"] = table["provenance"] + " " + groups.ngroup().astype(str)
    table["repeats"] = groups["repeats"].transform("first")
    local = table["global_batch_size"] / table["devices"]
    table["local_batch_size"] = table["local_batch_size"].fillna(local)
    unit = "_" + table["unit"].replace("%", "percent")
    table["quantity"] += unit.where(table["quantity"] != "gpu_hours", "")
    is_of_sample = table["spread_ddof"] != "0"
    divisor = table["repeats"] - (~is_of_sample)
    given = (table["high"] - table["low"]) / 2
    columns = {
        "": table["value"].map(float),
        "_std": table["spread"]
        * np.sqrt(table["repeats"] / divisor).mask(is_of_sample, 1.0),
        "_half": (0.5 * 10.0 ** -table["decimals"]).fillna(given).fillna(0.0),
        "_place": table["stands_in"],
    }
    described = ["run", "series", *RUN, "repeats", "provenance", "copies"]
    found = (
        table.drop_duplicates("run")
        .reindex(columns=described)
        .set_index("run", drop=False)
    )
    for suffix, column in columns.items():
        cells = table.assign(cell=column).pivot(
            index="run", columns="quantity", values="cell"
        )
        found = found.join(cells.add_suffix(suffix))
    return found.astype(dict.fromkeys(NUMBERS, int)).rename_axis(None)


def series() -> dict[str, dict]:
    """The study's scaling series: the conditions by which runs belong to them."""
    return {
        name: conditions
        for name, conditions in _toml("series").items()
        if name != "data_sets"
    }


def data_set_samples(dataset: str) -> float:
    """Samples of a data set where the paper does not state them; NaN for one that it does, or an
    unknown one.
    """
    return _toml("series")["data_sets"].get(dataset, {}).get("samples", float("nan"))


def errata() -> list[dict]:
    """Where paper, table and repository contradict themselves or each other."""
    return _toml("errata")["erratum"]


def _toml(name: str) -> dict:
    return tomllib.loads((PUBLISHED / f"{name}.toml").read_text())
