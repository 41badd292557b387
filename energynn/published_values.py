"""The rows of runs/published/values.csv as text: what the study printed, read once, without
pandas.
"""

from __future__ import annotations

import csv
import functools

from energynn.files import shipped

PUBLISHED = shipped("runs/published")


@functools.cache
def rows() -> list[dict[str, str]]:
    """Every row by its column names; "" where nothing is given."""
    with open(PUBLISHED / "values.csv", newline="") as file:
        return list(csv.DictReader(file))
