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
