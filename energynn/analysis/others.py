"""What others measured, in the names and units of our own tables (data_manifests/others)."""

import pandas as pd

from energynn.analysis import observations
from energynn.data import manifests
from energynn.host.reading import read_json

ORIGIN_LABELS = {"origin": "others", "provenance": "published by others"}
# What repeats of a configuration have in common.
CONFIGURATION_COLUMNS = [
    *ORIGIN_LABELS,
    "file",
    "commit",
    "submitter",
    "system",
    "workload",
    "hardware",
    "framework",
    "optimizer",
    "precision",
    "devices",
    "local_batch_size",
    "global_batch_size",
    "power_limit_W",
    "energy_scope",
]


def load() -> pd.DataFrame:
    """Read all runs into one table: ``file``, ``row`` (the header is row 1) and ``commit`` of each.

    Names and units are those of ``observations.load``. ``energy_scope`` says what was metered:
    "node_AC" (the node's input), "node_DC" (after its power supplies), "gpu" or "" (nothing). Rows
    that a rule of the manifest leaves out are counted in ``attrs["left_out"]``, each by the first
    rule that it meets. Raises ValueError for a damaged file.
    """
    folder = manifests.verify("others")
    tables = []
    left_out = []
    for file, about in read_manifest()["energynn:tables"].items():
        rows = pd.read_csv(folder / file)
        rows["row"] = rows.index + 2
        for reason, where in about["left_out"].items():
            met = rows.query(where, engine="python").index
            left_out.append({"file": file, "reason": reason, "rows": len(met)})
            rows = rows.drop(met)
        commits = about["commits"]
        named = {
            name: rows.eval(expression, engine="python")
            for name, expression in about["columns"].items()
        }
        tables.append(
            rows[["row"]].assign(
                file=file, commit=rows[commits["by"]].map(commits), **named
            )
        )
    table = (
        pd.concat(tables, ignore_index=True)
        .assign(**ORIGIN_LABELS)
        .astype({"devices": int, "global_batch_size": int})
    )
    table.attrs["left_out"] = left_out
    return table


def read_manifest() -> dict:
    """Read the manifest: rules, expressions and commits of each table."""
    return read_json(manifests.root("others") / "manifest.json")


def means(runs: pd.DataFrame) -> pd.DataFrame:
    """Reduce rows of ``load`` to one per configuration: means, and ``_std`` over ``repeats`` runs.

    Raises ValueError where energies that were metered differently would be pooled.
    """
    scopes = set(runs["energy_scope"]) - {""}
    if len(scopes) > 1:
        raise ValueError(
            f"energies of {sorted(scopes)} cannot be pooled; select one energy_scope"
        )
    numbers = runs.select_dtypes("number").columns.difference(
        [*CONFIGURATION_COLUMNS, "row"]
    )
    runs = runs.assign(run=runs["row"])
    table = observations.mean_of_repeats(runs, CONFIGURATION_COLUMNS, list(numbers))
    return table.assign(rows=table["run"], run=table.index, copies="", recipe="")


def make_series(table: pd.DataFrame, alike: list[str]) -> pd.DataFrame:
    """Select configurations that are ``alike`` in these columns on several numbers of devices.

    ``series`` names what they have in common.
    """
    groups = table.groupby(alike, dropna=False)
    several = table[groups["devices"].transform("nunique") > 1]
    return several.assign(
        series=several[alike].astype(str).agg(" ".join, axis=1)
    ).sort_values(["series", "devices"])
