"""What the study published, as tables; each value says where it stands, and its provenance."""

import numpy as np
import pandas as pd

from energynn.experiment import published_values
from energynn.experiment.published_values import PUBLISHED_FOLDER
from energynn.host.reading import read_toml


def select_values(kind: str, quantity: str = "") -> pd.DataFrame:
    """Select rows of values.csv; ``value`` is text as printed, ``low`` and ``high`` numbers.

    Kinds: measurement (of one configuration), statement (about several), setup (chosen), picture
    (not known).
    """
    table = pd.read_csv(PUBLISHED_FOLDER / "values.csv", dtype={"value": str})
    table = table[table["kind"] == kind]
    return table[table["quantity"] == quantity] if quantity else table


def tabulate_runs(name: str = "values") -> pd.DataFrame:
    """Make one row per run of ``name``.csv: what was run, and the value of each quantity.

    ``name`` is "values" (printed) or "derived" (it follows from printed values; ``copies`` names
    the quantity that its derivation takes from another series). Columns are those of
    ``published_values.printed_runs``.
    """
    table = pd.DataFrame(published_values.printed_runs(name))
    table["run"] = table["provenance"] + " " + table.index.astype(str)
    table["dataset_samples"] = table["dataset_samples"].replace(0, np.nan)
    return table.set_index("run", drop=False).rename_axis(None)


def read_errata() -> list[dict]:
    """Read where paper, table and repository contradict themselves or each other."""
    return read_toml(PUBLISHED_FOLDER / "errata.toml")["erratum"]
