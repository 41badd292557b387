"""Plan how many devices and which batch: what nothing beats in time, energy and GPU hours."""

import itertools
from dataclasses import dataclass

import numpy as np
import pandas as pd

from energynn.experiment import config, studies
from energynn.experiment.config import RunConfig
from energynn.forecast import fits, predict
from energynn.forecast.fits import Fit
from energynn.forecast.predict import UNITS, Conversion

LIMIT_OPTIONS = {
    "time_h": "--deadline-h",
    "energy_kWh": "--energy-kwh",
    "gpu_hours": "--gpu-hours",
    "global_batch_size": "--max-global-batch-size",
    "devices": "--devices",
}


@dataclass(frozen=True)
class Plan:
    """Configurations, (configurations,) each, what they take, and which of them matter.

    values: quantity -> (configurations, 3). pareto: indices of those that meet the limits and that
    no other beats in time, energy and GPU hours. choices: name -> index. power_share: power limit
    of the GPUs, of the greatest. factors: as ``predict.forecast_quantities`` takes them.
    """

    fit: Fit
    runs: list[RunConfig]
    work: np.ndarray
    values: dict[str, np.ndarray]
    limits: dict[str, float]
    pareto: np.ndarray
    choices: dict[str, int]
    power_share: float
    factors: list[Conversion]


def base_run(fit: Fit, parameters: dict) -> RunConfig:
    """Take the fitted run with the most samples, on one device, with parameters of one's own.

    Raises ValueError for a parameter that a plan chooses.
    """
    if chosen := {"devices", "local_batch_size", "global_batch_size"} & {*parameters}:
        raise ValueError(
            f"{chosen.pop()}: a plan chooses it; use --devices, --local-batch-size or "
            "--max-global-batch-size"
        )
    return predict.longest_run_changed(fit, {"devices": 1} | parameters)


def configuration_grid(
    fit: Fit, run: RunConfig, size: int | None = None, most: int = 0
) -> list[RunConfig]:
    """Vary a run: on parts of a node and whole nodes; by local batches that ran, and powers of two
    between them.

    size: the only local batch. most: of devices; else those of a plan.
    """
    site = fit.runs.site
    ran = {run.local_batch_size for run in fit.runs.configs} - {0} or {0}
    if not most:
        most, _ = predict.plan_devices(fit, run)
    powers = [2**power for power in range(20)]
    between = [each for each in powers if min(ran) <= each <= max(ran)]
    sizes = [size] if size else sorted(ran.union(between))
    samples = fit.runs.epoch(run).training_samples
    grid = []
    for devices, size in itertools.product(range(1, most + 1), sizes):
        batch = devices * size * run.accumulation_steps
        if devices % min(devices, site.devices_per_node) == 0 and batch <= samples:
            grid.append(
                config.replace(
                    run,
                    devices=devices,
                    local_batch_size=size,
                    global_batch_size=batch,
                )
            )
    if not grid:
        raise ValueError(f"local_batch_size: choose at most the {samples} samples")
    return grid


def make_plan(
    fit: Fit,
    asked: list[RunConfig],
    limits: dict[str, float | None],
    power_share: float = 1.0,
    factors: list[Conversion] = (),
) -> Plan:
    """Judge configurations. limits: upper ones by the names of LIMIT_OPTIONS; None: none.

    Raises ValueError with limits that can be kept where no configuration meets these.
    """
    work = fit.runs.work_of(asked)
    values = predict.forecast_quantities(fit, work, power_share, factors)
    limits = {name: most for name, most in limits.items() if most is not None}
    predict.require_devices(fit.runs.site, limits.get("devices", 1))
    costs = pd.DataFrame({name: of[:, 0] for name, of in values.items()})
    costs["devices"] = work["devices"]
    costs["global_batch_size"] = [run.global_batch_size for run in asked]
    limited = costs[list(limits)]
    if costs.filter([*limits, "price"]).isna().any(axis=None):
        raise ValueError(
            "energies are not known, as not all were measured; leave out --energy-kwh and "
            "--price-per-kwh"
        )
    exceeds = limited > list(limits.values())
    able = costs[~exceeds.any(axis="columns")]
    if able.empty:
        possible = _reachable_limits_text(
            limited[exceeds.sum(axis="columns") == 1].where(exceeds)
        )
        _, missing = predict.plan_devices(fit, asked[0])
        if missing:
            possible += (
                f" on no more devices than ran: an all-reduce is not known {missing}"
            )
        raise ValueError(
            f"plan: nothing keeps {limits_text(limits, asked[0])}; possible, with the others kept: "
            f"{possible}"
        )
    # without powers, energies are not known, and not judged
    known = able[list(UNITS)].dropna(axis="columns")
    best = able[~beats(known.to_numpy()).any(axis=0)].sort_values("time_h")
    pareto = np.array(best.index)
    choices = _choose_configurations(best)
    return Plan(fit, asked, work, values, limits, pareto, choices, power_share, factors)


def _reachable_limits_text(exceeded: pd.DataFrame) -> str:
    """Write the least of each limit with the others kept, rounded upward.

    exceeded: what configurations take of the only limit that they exceed, else NaN.
    """
    least = np.ceil(1e4 * exceeded.min().dropna()) / 1e4
    words = [f"{LIMIT_OPTIONS[name]} {taken:.10g}" for name, taken in least.items()]
    return " or ".join(words) or "none; leave one out"


def beats(costs: np.ndarray) -> np.ndarray:
    """Say which row beats which other: no worse in any column, and better in one, (rows, rows)."""
    no_worse = (costs[:, None] <= costs).all(axis=2)
    return no_worse & (costs[:, None] < costs).any(axis=2)


def limits_text(limits: dict[str, float], run: RunConfig) -> str:
    """Write limits as the options that give them, and which of them is the study's."""
    words = [f"{LIMIT_OPTIONS[name]} {most:g}" for name, most in limits.items()]
    text = " and ".join(words) or "no limit"
    if limits.get("global_batch_size") in studies.large_batch_thresholds(run):
        text += " (that batch is the study's, whose errors rise beyond)"
    return text


def _choose_configurations(best: pd.DataFrame) -> dict[str, int]:
    """Choose the most frugal, fastest and balanced of the Pareto set; with a price the cheapest."""
    best = best.dropna(axis="columns")
    spent = "energy_kWh" if "energy_kWh" in best else "gpu_hours"
    ends = best[["time_h", spent]]
    far = way_from_least(ends, ends.min(), ends.max())
    choices = {
        "most frugal": best[spent].idxmin(),
        "fastest": best["time_h"].idxmin(),
        "balanced": (far**2).sum(axis="columns").idxmin(),
    }
    if "price" in best:
        choices = {"cheapest": best["price"].idxmin()} | choices
    return choices


def way_from_least(value, least, most, log=np.log):
    """Tell how far a value is from the least, on the way to the most, by logarithms: 0 to 1.

    log: a browser's, of ``altair.expr``, makes its expression of this.
    """
    return log(value / least) / (log(most / least) + 1e-9)


def forecast_rows(plan: Plan, indices: list[int]) -> dict[int, dict]:
    """Forecast configurations of a plan: intervals, what lies outside, chances of limits."""
    asked = [plan.runs[at] for at in indices]
    rows = predict.forecasts(plan.fit, asked, plan.power_share, plan.factors)
    row_of = dict(zip(indices, rows, strict=True))
    for at, row in row_of.items():
        row["chance_percent"] = {
            name: fits.chance_percent(plan.fit, plan.values[name][at], most)
            for name, most in plan.limits.items()
            if name in UNITS
        }
    return row_of


def plan_as_json(plan: Plan) -> dict:
    """Return the plan for a program: choices, Pareto set, limits and how it was found."""
    rows = forecast_rows(plan, plan.pareto)
    choices = {name: rows[at] for name, at in plan.choices.items()}
    return {
        "workload": plan.fit.runs.workload,
        "system": plan.fit.runs.site.name,
        "choices": choices,
        "pareto": list(rows.values()),
        "limits": plan.limits,
        "configurations": len(plan.runs),
        "provenance": choices["fastest"]["provenance"],
    }
