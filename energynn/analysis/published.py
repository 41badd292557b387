"""What the study published, as tables; each value says where it stands, and that it is ``published``."""

from __future__ import annotations

import tomllib

import pandas as pd

from energynn.files import shipped

PUBLISHED = shipped("runs/published")
RUN = ["workload", "stage", "dataset", "device_name", "devices", "local_batch_size", "global_batch_size"]
RUN += ["dataset_samples", "epochs"]


def values(kind: str | None = None, quantity: str | None = None) -> pd.DataFrame:
    """Rows of values.csv, all or of one kind and quantity; ``value`` is text as printed, ``low`` and ``high`` numbers.

    Kinds: measurement (of one configuration), statement (about several), setup (chosen), picture (not known).
    Raises ValueError for a kind or a quantity that does not occur.
    """
    table = pd.read_csv(PUBLISHED / "values.csv", dtype={"value": str, "spread_ddof": str})
    for column, wanted in (("kind", kind), ("quantity", quantity)):
        if wanted is not None:
            if wanted not in set(table[column]):
                known = ", ".join(sorted(set(table[column])))
                raise ValueError(f"{column}: {wanted!r} does not occur; choose one of {known}")
            table = table[table[column] == wanted]
    return table


def measurements() -> pd.DataFrame:
    """One row per published run: what was run, and each quantity with its unit in the name, NaN where not reported.

    Beside ``energy_total_kWh`` stand ``energy_total_kWh_std`` (over ``repeats``, divisor repeats - ``std_ddof``),
    ``..._half`` (half a unit of the last printed digit; 0 for full precision) and ``..._place``. ``series`` names all
    series that the run belongs to, separated by spaces.
    """
    table = values("measurement")
    table = table[table["workload"].notna()].assign(stage=table["stage"].fillna(""))
    rows = []
    for _, part in table.groupby(RUN, dropna=False, sort=False):
        row = part.iloc[0][[*RUN, "series", "source_version"]].to_dict()
        row |= {name: part[name].dropna().iloc[0] if part[name].notna().any() else None for name in ("repeats", "note")}
        row |= {"components": next(iter(part["components"].dropna()), "")}
        row |= {"std_ddof": next(iter(part["spread_ddof"].dropna()), None)}
        for one in part.itertuples():
            unit = {"%": "percent"}.get(one.unit, one.unit)
            name = "gpu_hours" if one.quantity == "gpu_hours" else f"{one.quantity}_{unit}"
            half = 0.0 if pd.isna(one.decimals) else 0.5 * 10.0**-one.decimals
            row |= {name: float(one.value), f"{name}_std": one.spread, f"{name}_half": half}
            row |= {f"{name}_place": one.stands_in}
        rows.append(row)
    wide = pd.DataFrame(rows).assign(provenance="published")
    wide["local_batch_size"] = wide["local_batch_size"].fillna(wide["global_batch_size"] / wide["devices"])
    whole = ["devices", "local_batch_size", "global_batch_size", "epochs", "repeats"]
    return wide.astype(dict.fromkeys(whole, int))


def series() -> dict[str, dict]:
    """The study's scaling series: the conditions by which runs belong to them."""
    return {name: one for name, one in _toml("series").items() if name != "data_sets"}


def data_set_samples(dataset: str) -> float:
    """Samples of a data set where the paper does not state them; NaN for one that it does, or an unknown one."""
    return _toml("series")["data_sets"].get(dataset, {}).get("samples", float("nan"))


def errata() -> list[dict]:
    """Where paper, table and repository contradict themselves or each other."""
    return _toml("errata")["erratum"]


def _toml(name: str) -> dict:
    return tomllib.loads((PUBLISHED / f"{name}.toml").read_text())
