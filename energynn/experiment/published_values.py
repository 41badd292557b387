"""The tables of runs/published as text: what the study printed, read once, without pandas."""

import csv
import functools
import math

from energynn.host.files import shipped_path
from energynn.host.reading import read_toml

PUBLISHED_FOLDER = shipped_path("runs/published")
# The study's scaling series: the conditions by which runs are made, and found.
SERIES = read_toml(PUBLISHED_FOLDER / "series.toml")
# Of data sets whose size the paper does not state.
ASSUMED_SAMPLES = SERIES.pop("assumed_samples")


@functools.cache
def read_rows(name: str = "values") -> list[dict[str, str]]:
    """Read the rows of ``name``.csv by column names; "" where nothing is given."""
    with open(PUBLISHED_FOLDER / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


TEXT_COLUMNS = ("workload", "stage", "dataset", "device_name", "provenance")
SIZE_COLUMNS = ("devices", "global_batch_size", "epochs", "dataset_samples")


@functools.cache
def printed_runs(name: str = "values") -> list[dict]:
    """Group the measurements of ``name``.csv by run: what was run, and the value of each quantity.

    Units stand in names. ``<quantity>_std`` is over ``repeats`` (divisor repeats - 1), ``_half``
    half a unit of the last printed digit (0 for full precision), ``_place`` where the value
    stands. ``components``: of which the energies are. ``series`` names all series of the run,
    separated by spaces. A size that is not printed is 0; the local batch size follows from the
    others.
    """
    runs = {}
    for row in read_rows(name):
        if row["kind"] == "measurement" and row["workload"]:
            run = {text: row[text] for text in TEXT_COLUMNS}
            run |= {size: int(row[size] or 0) for size in SIZE_COLUMNS}
            run["local_batch_size"] = run["global_batch_size"] // run["devices"]
            about = {
                "series": row["series"],
                "copies": row.get("copies", ""),
                "repeats": int(row["repeats"]),
            }
            runs.setdefault(tuple(run.values()), run | about).update(
                _value_with_spread(row)
            )
    return list(runs.values())


def _value_with_spread(row: dict[str, str]) -> dict[str, float | str]:
    """Read the value of a row, its spread, its rounding, its place and components."""
    quantity = row["quantity"]
    if quantity != "gpu_hours":
        quantity += "_" + row["unit"].replace("%", "percent")
    std = float(row["spread"] or "nan")
    if row["spread_ddof"] == "0":
        std *= math.sqrt(int(row["repeats"]) / (int(row["repeats"]) - 1))
    half = (float(row["high"] or 0) - float(row["low"] or 0)) / 2
    if row["decimals"]:
        half = 0.5 * 10.0 ** -int(row["decimals"])
    told = {"components": row["components"]} if row.get("components") else {}
    return told | {
        quantity: float(row["value"]),
        f"{quantity}_std": std,
        f"{quantity}_half": half,
        f"{quantity}_place": row["stands_in"],
    }
