"""Time to accuracy: up to which batch size the study saw no loss, and the critical batch size that own runs tell.

A training that needs S steps of B samples to reach an error has seen E = S B samples. McCandlish et al. 2018 (An
Empirical Model of Large-Batch Training) describe the exchange of one for the other by (S / S_min - 1)(E / E_min - 1)
= 1. So S = S_min (1 + B_crit / B) and E = E_min (1 + B / B_crit), with the critical batch size B_crit = E_min / S_min.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import optimize, special, stats

from energynn import config, published_values, records
from energynn.config import RunConfig

LEVEL = 0.9
FEWEST_RUNS = 4
LEAST_SCATTER = 0.01  # relative, of the steps of a run; less is no run's
GRID = np.geomspace(1e-3, 1e3, 31)  # critical batch sizes tried, in units of the batches seen
# Fields in which runs of one recipe may differ: sizes, chance, and what only measures or costs time.
MAY_DIFFER = {
    "devices",
    "local_batch_size",
    "global_batch_size",
    "accumulation_steps",
    "seed",
    "repeat",
    "epochs",
}
MAY_DIFFER |= {
    "learning_rate",
    "system",
    "device",
    "initial_run",
    "save_weights",
    "checkpoint_period_s",
}
MAY_DIFFER |= {
    "sampling_period_s",
    "perun_sampling_period_s",
    "idle_baseline_s",
    "collective_timeout_s",
}
MAY_DIFFER |= {
    "loader_workers",
    "data_staging",
    "persistent_workers",
    "pinned_memory",
    "synchronous_phases",
}
MAY_DIFFER |= {"threads_per_device", "gradient_noise_steps", "idle_ready_s", "step_period_s"}
MAY_DIFFER |= {"setup_timeout_s", "gradient_buckets"}

# ------------------------------------------------------------------------------------------------------ the threshold


def thresholds(run: RunConfig) -> list[dict[str, str]]:
    """Rows of the published values that tell up to which global batch size the error stays, the smallest first.

    None where the run's data are not the study's.
    """
    if config.PAPER.get(run.workload, {}).get("dataset") != run.dataset:
        return []
    of = (run.workload, getattr(run, "stage", ""))
    rows = [row for row in published_values.rows() if row["quantity"] == "large_batch_threshold"]
    by_size = {
        int(row["value"]): row for row in reversed(rows) if (row["workload"], row["stage"]) == of
    }
    return [by_size[size] for size in sorted(by_size)]


def threshold(run: RunConfig) -> int:
    """The largest global batch size up to which the study saw no loss of accuracy; 0 where it says nothing of it."""
    return max((int(row["value"]) for row in thresholds(run)), default=0)


def beyond(run: RunConfig, global_batch_size: int, most: int | None = None) -> list[str]:
    """What a global batch size may cost in accuracy, in words with their source; ``most``: what the user calls free."""
    size, lines = f"global batch size {global_batch_size:g}", []
    if most and global_batch_size > most:
        lines.append(f"{size}: beyond the {most} that you gave; no accuracy is claimed")
    for row in thresholds(run):
        if global_batch_size > int(row["value"]):
            lines.append(
                f"{size}: accuracy may fall beyond {row['value']}, {row['note']} ({row['stands_in']})"
            )
    return lines


# -------------------------------------------------------------------------------------------- the critical batch size


@dataclass(frozen=True)
class Reached:
    """When runs reached an error, (runs,) each: after more than ``after`` steps, and by ``by``; inf: not at all."""

    batch: np.ndarray
    after: np.ndarray
    by: np.ndarray


@dataclass(frozen=True)
class Critical:
    """The critical batch size in samples with its 90 % interval, from 0 or to inf where the runs do not tell.

    steps_min: least steps that reach the error, however large the batch. scatter: relative, of a run's steps.
    """

    value: float
    low: float
    high: float
    steps_min: float
    scatter: float

    @property
    def is_identified(self) -> bool:
        return bool(self.low > 0 and np.isfinite(self.high))


def reached(histories: list[list[dict]], batches: list[int], metric: str, error: float) -> Reached:
    """Between which two evaluations each run first had at most this error."""
    after, by = [], []
    for history in histories:
        steps = [0, *(epoch["optimizer_steps"] for epoch in history)]
        first = next((place for place, epoch in enumerate(history) if epoch[metric] <= error), None)
        after.append(steps[-1] if first is None else steps[first])
        by.append(np.inf if first is None else steps[first + 1])
    return Reached(np.array(batches, float), np.array(after, float), np.array(by, float))


def critical(seen: Reached) -> Critical:
    """The critical batch size by the likelihood of when runs reached the error, whose steps scatter log-normally.

    The interval holds what an F test of the likelihoods does not refuse. Raises ValueError where runs cannot tell it.
    """
    different = len(set(seen.batch.tolist()))
    if different < 2 or len(seen.batch) < FEWEST_RUNS:
        raise ValueError(
            f"{len(seen.batch)} run(s) of {different} global batch size(s): the critical batch size needs at least two "
            f"sizes and {FEWEST_RUNS} runs; repeat each with another seed"
        )
    if np.isinf(seen.by).all():
        raise ValueError("no run reaches this error; give a larger one")
    tried = np.array([0.0, *GRID * np.exp(np.mean(np.log(seen.batch))), np.inf])
    likelihoods = np.array([_most_probable(seen, size)[0] for size in tried])
    best = int(np.argmax(likelihoods))
    value = float(tried[best])
    if 0 < best < len(tried) - 1:
        near = np.log(np.clip(tried[[best - 1, best + 1]], tried[1], tried[-2]))
        finer = optimize.minimize_scalar(
            lambda log: -_most_probable(seen, np.exp(log))[0], bounds=near
        )
        value = float(np.exp(finer.x))
    peak, log_steps, scatter, information = _most_probable(seen, value)
    number = max(information, 3.0)  # as many runs whose steps were known exactly would tell as much
    least = peak - number / 2 * np.log1p(stats.f.ppf(LEVEL, 1, number - 2) / (number - 2))
    below, above = (
        tried[(likelihoods < least) & (tried < value)],
        tried[(likelihoods < least) & (tried > value)],
    )
    low = _end(seen, least, below.max(), value) if len(below) else 0.0
    high = _end(seen, least, above.min(), value) if len(above) else np.inf
    return Critical(value, low, high, float(np.exp(log_steps)), scatter)


def _most_probable(seen: Reached, size: float) -> tuple[float, float, float, float]:
    """For a critical batch size: logarithm of the likelihood, of the least steps, the scatter, and the information.

    The information about the steps is in runs: one of which only wide bounds are known counts for little.
    """
    shape = np.log1p(size / seen.batch) if np.isfinite(size) else -np.log(seen.batch)
    with np.errstate(divide="ignore"):
        ends = np.log(np.stack([seen.after, seen.by])) - shape
    known = np.where(np.isfinite(ends[1]), ends[1], ends[0])

    def parts(at) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each run the probability, and its relative change with the steps' logarithm and the scatter's."""
        below, above = (ends - at[0]) / np.exp(at[1])
        mirrored = below > 0  # to the tail where differences are not lost in rounding
        below, above = np.where(mirrored, -above, below), np.where(mirrored, -below, above)
        part = np.maximum(special.ndtr(above) - special.ndtr(below), 1e-300)
        density = np.exp(-(np.stack([below, above]) ** 2) / 2) / np.sqrt(2 * np.pi)
        reach = np.where(np.isfinite([below, above]), [below, above], 0.0) * density
        by_middle = np.where(mirrored, -1, 1) * (density[1] - density[0]) / part
        return part, by_middle, (reach[1] - reach[0]) / part

    def unlikely(at) -> tuple[float, np.ndarray]:
        part, by_middle, by_scatter = parts(at)
        return -np.log(part).sum(), np.array([by_middle.sum() / np.exp(at[1]), by_scatter.sum()])

    begin = [known.mean(), np.log(max(known.std(), 0.1))]
    bounds = [(None, None), (np.log(LEAST_SCATTER), np.log(10.0))]
    answer = optimize.minimize(unlikely, begin, jac=True, bounds=bounds, method="L-BFGS-B")
    _, by_middle, by_scatter = parts(answer.x)
    information = float((by_middle**2 + by_scatter).sum())
    return -float(answer.fun), float(answer.x[0]), float(np.exp(answer.x[1])), information


def _end(seen: Reached, least: float, outside: float, inside: float) -> float:
    """Where the likelihood falls to the least that is accepted, between two critical batch sizes."""
    unit = float(np.median(seen.batch))
    ends = np.log(np.clip([outside, inside], GRID[0] * unit, GRID[-1] * unit))
    excess = [_most_probable(seen, np.exp(log))[0] - least for log in ends]
    if excess[0] * excess[1] >= 0:  # it falls beyond the sizes tried
        return float(np.exp(ends[0]))
    return float(
        np.exp(optimize.brentq(lambda log: _most_probable(seen, np.exp(log))[0] - least, *ends))
    )


# ---------------------------------------------------------------------------------------------------------- own runs


def of_runs(runs_dir: Path, workload: str, metric: str, error: float) -> dict:
    """What the finished runs of a workload tell of their critical batch size at an error, as the command shows it.

    Raises ValueError with the remedy where there are none, or where they are of several recipes.
    """
    found = records.read_all(runs_dir)
    chosen = [
        record for record in found if record["workload"] == workload and record.get("history")
    ]
    chosen = [record for record in chosen if record["status"] == "finished"]
    if not chosen:
        raise ValueError(
            f"{runs_dir}: no finished run of {workload} with a history; make some of two batch sizes"
        )
    check(chosen, metric)
    chosen = _different(chosen)
    histories, batches = (
        [record["history"] for record in chosen],
        [_batch(record) for record in chosen],
    )
    seen = reached(histories, batches, metric, error)
    answer = critical(seen)
    rows = [_row(seen, size, answer) for size in sorted(set(batches))]
    noise = [scale for scale in map(_noise_scale, chosen) if scale]
    return {
        "workload": workload,
        "metric": metric,
        "error": error,
        "runs": len(chosen),
        "critical_batch_size": {
            name: _or_none(getattr(answer, name)) for name in ("value", "low", "high")
        },
        "is_identified": answer.is_identified,
        "steps_min": answer.steps_min if answer.is_identified else None,
        "scatter_of_steps": answer.scatter,
        "gradient_noise_scale_samples": {"low": min(noise), "high": max(noise)} if noise else None,
        "batch_sizes": rows,
    }


def check(chosen: list[dict], metric: str) -> None:
    """Raise ValueError where runs cannot be compared, with what differs."""
    for record in chosen:
        if not all(metric in epoch for epoch in record["history"]):
            there = ", ".join(record["metrics"])
            raise ValueError(f"metric: {record['run_id']} has no {metric}; it has {there}")
    first, differ = chosen[0]["config"], set()
    for record in chosen:
        differ |= {
            name for name, value in record["config"].items() if value != first.get(name)
        } - set(MAY_DIFFER)
    if differ:
        raise ValueError(
            f"runs differ in {', '.join(sorted(differ))}; put those of one recipe into a folder"
        )
    rates: dict[int, set] = {}
    for record in chosen:
        rates.setdefault(_batch(record), set()).add(record["config"]["learning_rate"])
    several = [size for size, values in rates.items() if len(values) > 1]
    if several:
        raise ValueError(
            f"global batch size {several[0]}: several learning rates; keep the runs of the best"
        )


def _different(chosen: list[dict]) -> list[dict]:
    """Of runs with the same seed and sizes, which are one training made again, the longest."""
    longest: dict[tuple, dict] = {}
    for record in sorted(chosen, key=lambda record: record["history"][-1]["optimizer_steps"]):
        longest[_batch(record), record["config"]["local_batch_size"], record["config"]["seed"]] = (
            record
        )
    return list(longest.values())


def _batch(record: dict) -> int:
    return record["config"]["global_batch_size"]


def _row(seen: Reached, size: int, answer: Critical) -> dict:
    """One global batch size: runs, those that reached the error, their steps, and how many more samples it needs."""
    here = seen.batch == size
    steps = seen.by[here & np.isfinite(seen.by)]
    row = {"global_batch_size": size, "runs": int(here.sum()), "reached": len(steps)}
    row["steps"] = float(np.median(steps)) if len(steps) else None
    more = None
    if answer.is_identified:  # E / E_min = 1 + B / B_crit
        more = {
            "value": 1 + size / answer.value,
            "low": 1 + size / answer.high,
            "high": 1 + size / answer.low,
        }
    return row | {"samples_over_least": more}


def _noise_scale(record: dict) -> float | None:
    """The gradient noise scale of a run in samples, pooled over its epochs; None where it was not looked at."""
    epochs = [epoch for epoch in record["history"] if "gradient_norm2" in epoch]
    norm2 = sum(epoch["gradient_norm2"] for epoch in epochs)
    variance = sum(epoch["gradient_variance"] for epoch in epochs)
    return variance / norm2 if norm2 > 0 and variance > 0 else None


def _or_none(number: float) -> float | None:
    return number if np.isfinite(number) else None
