"""The tables of runs/published as text: what the study printed, read once, without pandas."""

from __future__ import annotations

import csv
import functools

from energynn.files import shipped

PUBLISHED = shipped("runs/published")


@functools.cache
def rows(name: str = "values") -> list[dict[str, str]]:
    """Read the rows of ``name``.csv by column names; "" where nothing is given."""
    with open(PUBLISHED / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


SIZES = ("devices", "global_batch_size", "dataset_samples", "epochs", "repeats")


@functools.cache
def runs() -> list[dict]:
    """Group values by run: what was run, and ``gpu_hours`` and ``energy_total`` (kWh) among others.

    series: the first that it belongs to. A size that is not printed is 0; the local batch size
    follows from the others.
    """
    found = {}
    for row in rows():
        if row["kind"] == "measurement" and row["devices"]:
            run = {name: row[name] for name in ("workload", "device_name")}
            run |= {name: int(row[name] or 0) for name in SIZES}
            run["local_batch_size"] = run["global_batch_size"] // run["devices"]
            series = row["series"].partition(" ")[0]
            same = found.setdefault(tuple(run.values()), run | {"series": series})
            same[row["quantity"]] = float(row["value"])
    return [run for run in found.values() if {"gpu_hours", "energy_total"} <= {*run}]
