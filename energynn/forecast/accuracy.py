"""Say up to which batch size the study saw no loss of accuracy."""

from __future__ import annotations

from energynn import config, published_values
from energynn.config import RunConfig


def thresholds(run: RunConfig) -> dict[int, str]:
    """Find the global batch sizes up to which the error stays, rising, and where that is printed.

    None where the run's data are not the study's.
    """
    if config.PAPER.get(run.workload, {}).get("dataset") != run.dataset:
        return {}
    asked = ("large_batch_threshold", run.workload, getattr(run, "stage", ""))
    known = {}
    for row in published_values.rows():
        if (row["quantity"], row["workload"], row["stage"]) == asked:
            known[int(row["value"])] = f"{row['note']} ({row['stands_in']})"
    return dict(sorted(known.items()))


def threshold(run: RunConfig) -> int:
    """Find the largest global batch size without loss of accuracy; 0: unknown."""
    return max(thresholds(run), default=0)
