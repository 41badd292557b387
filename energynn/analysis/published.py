"""What the study published, as tables; each value says where it stands, and its provenance."""

from __future__ import annotations

import tomllib

import numpy as np
import pandas as pd

from energynn.experiment import published_values
from energynn.experiment.published_values import PUBLISHED

NUMBERS = [
    "devices",
    "local_batch_size",
    "global_batch_size",
    "epochs",
    "repeats",
    "dataset_samples",
    "low",
    "high",
    "decimals",
    "spread",
]


def values(
    kind: str | None = None, quantity: str | None = None, name: str = "values"
) -> pd.DataFrame:
    """Select rows of ``name``.csv; ``value`` is text as printed, ``low`` and ``high`` numbers.

    Kinds: measurement (of one configuration), statement (about several), setup (chosen), picture
    (not known).
    """
    table = pd.DataFrame(published_values.rows(name))
    table = table.mask(table == "")
    table[NUMBERS] = table[NUMBERS].apply(pd.to_numeric)
    for column, wanted in (("kind", kind), ("quantity", quantity)):
        table = table if wanted is None else table[table[column] == wanted]
    return table


def runs(name: str = "values") -> pd.DataFrame:
    """Make one row per run of ``name``.csv: what was run, and the value of each quantity.

    ``name`` is "values" (printed) or "derived" (it follows from printed values; ``copies`` names
    the quantity that its derivation takes from another series). Columns are those of
    ``published_values.runs``.
    """
    table = pd.DataFrame(published_values.runs(name))
    table["run"] = table["provenance"] + " " + table.index.astype(str)
    table["dataset_samples"] = table["dataset_samples"].replace(0, np.nan)
    return table.set_index("run", drop=False).rename_axis(None)


def series() -> dict[str, dict]:
    """The study's scaling series: the conditions by which runs belong to them."""
    table = _toml("series")
    del table["data_sets"]
    return table


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
