"""Batch size and accuracy: up to where the study saw no loss."""

from __future__ import annotations

from energynn import config, published_values
from energynn.config import RunConfig


def thresholds(run: RunConfig) -> dict[int, dict[str, str]]:
    """Global batch sizes up to which the error stays, with their published rows, rising.

    None where the run's data are not the study's.
    """
    if config.PAPER.get(run.workload, {}).get("dataset") != run.dataset:
        return {}
    of = ("large_batch_threshold", run.workload, getattr(run, "stage", ""))
    names = ("quantity", "workload", "stage")
    rows = [row for row in published_values.rows() if tuple(map(row.get, names)) == of]
    return {int(row["value"]): row for row in sorted(rows, key=lambda row: int(row["value"]))}


def threshold(run: RunConfig) -> int:
    """The largest global batch size up to which the study saw no loss of accuracy; 0: unknown."""
    return max(thresholds(run), default=0)


def beyond(run: RunConfig, global_batch_size: int, most: int | None = None) -> list[str]:
    """What a global batch size may cost in accuracy, in words; ``most``: what the user calls free."""
    lines = []
    if most and global_batch_size > most:
        lines.append(f"global batch size: beyond the {most} that you gave; accuracy may fall")
    for free, row in thresholds(run).items():
        if global_batch_size > free:
            where = f"{row['note']} ({row['stands_in']})"
            lines.append(f"global batch size: beyond {free} accuracy may fall, {where}")
    return lines
