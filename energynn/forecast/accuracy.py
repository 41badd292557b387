"""Batch size and accuracy: up to where the study saw no loss, and what own runs tell.

A training that needs S steps of B samples to reach an error obeys S = S_min (1 + B_crit / B), with
a critical batch size B_crit (McCandlish et al. 2018, An Empirical Model of Large-Batch Training).
"""

from __future__ import annotations

import numpy as np
from scipy import stats

from energynn import config, published_values
from energynn.config import RunConfig

LEVEL = 0.9


def thresholds(run: RunConfig) -> dict[int, dict[str, str]]:
    """Global batch sizes up to which the error stays, with their published rows, rising.

    None where the run's data are not the study's.
    """
    if config.PAPER.get(run.workload, {}).get("dataset") != run.dataset:
        return {}
    of = ("large_batch_threshold", run.workload, getattr(run, "stage", ""))
    rows = [
        row
        for row in published_values.rows()
        if (row["quantity"], row["workload"], row["stage"]) == of
    ]
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


def critical_batch_size(batches, after, by) -> dict[str, float]:
    """The critical batch size in samples with its 90 % interval, from 0 or to inf if it is open.

    batches: of each run; after, by: optimizer steps between which it first had the error, by: inf
    where it never had. Steps scatter log-normally; the interval holds what a likelihood-ratio test
    does not refuse.
    """
    batches, ends = np.asarray(batches, float), np.array([after, by], float)
    if len(set(batches)) < 2 or np.isinf(ends[1]).all():
        raise ValueError("the critical batch size needs runs of two sizes, some of which reach it")
    tried = np.exp(np.log(batches).mean()) * np.geomspace(1e-3, 1e3, 121)
    likelihoods = []
    for size in tried:
        with np.errstate(divide="ignore"):
            low, high = np.log(ends) - np.log1p(size / batches)
        never, at_once = np.isinf(high), np.isinf(low)
        between = np.stack([low, high], axis=1)[~never & ~at_once]
        seen = stats.CensoredData(interval=between, right=low[never], left=high[at_once])
        mean, scatter = stats.norm.fit(seen)
        shares = np.diff(stats.norm.cdf([low, high], mean, max(scatter, 0.01)), axis=0)
        likelihoods.append(np.log(np.maximum(shares, 1e-300)).sum())
    freedom = len(batches) - 2
    most = np.log1p(stats.f.ppf(LEVEL, 1, freedom) / freedom) * len(batches) / 2
    held = np.flatnonzero(np.array(likelihoods) > max(likelihoods) - most)
    is_open = held[0] == 0, held[-1] == len(tried) - 1
    low, high = (0.0 if is_open[0] else tried[held[0]]), (np.inf if is_open[1] else tried[held[-1]])
    return {"value": tried[np.argmax(likelihoods)], "low": low, "high": high}
