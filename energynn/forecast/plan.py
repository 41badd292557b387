"""Plan how many devices and which batch: what nothing beats in time, energy and GPU hours."""

import itertools
from dataclasses import dataclass

import numpy as np
import pandas as pd

from energynn.experiment import config
from energynn.experiment.config import RunConfig
from energynn.forecast import predict
from energynn.forecast.fit import Fit
from energynn.forecast.predict import UNITS

OPTIONS = {
    "time_h": "--deadline-h",
    "energy_kWh": "--energy-kwh",
    "gpu_hours": "--gpu-hours",
    "global_batch_size": "--max-global-batch-size",
}


@dataclass(frozen=True)
class Plan:
    """Configurations, (configurations,) each, what they take, and which of them matter.

    values: quantity -> (configurations, 3). pareto: indices of those that meet the limits and that
    no other beats in time, energy and GPU hours. choices: name -> index and reason. power_share:
    power limit of the GPUs, of the greatest. per_kWh: names and factors, None where one is not
    given.
    """

    fit: Fit
    runs: list[RunConfig]
    work: np.recarray
    values: dict[str, np.ndarray]
    limits: dict[str, float]
    pareto: np.ndarray
    choices: dict[str, tuple[int, str]]
    power_share: float
    per_kWh: tuple


def base_run(fit: Fit, parameters: dict) -> RunConfig:
    """Take the fitted run with the most samples, on one device, with parameters of one's own.

    Raises ValueError for a parameter that a plan chooses.
    """
    if chosen := {"devices", "local_batch_size", "global_batch_size"} & {*parameters}:
        raise ValueError(
            f"{chosen.pop()}: a plan chooses it; use --devices, --local-batch-size or "
            "--max-global-batch-size"
        )
    (run,) = predict.asked(fit, None, {"devices": 1} | parameters)
    return run


def grid(
    fit: Fit, run: RunConfig, most: int | None = None, size: int | None = None
) -> list[RunConfig]:
    """Vary a run: on parts of a node and whole nodes; local batches that are powers of two.

    most: devices; None: all that ``predict.most_planned`` allows. size: the only local batch.
    """
    site, fitted = fit.runs.site, fit.runs.work.local_batch_size
    most = predict.most_planned(fit, run, most)
    least, greatest = fitted.min(), fitted.max()
    sizes = [2**power for power in range(20) if least <= 2**power <= greatest]
    sizes = [size] if size else sizes or [int(fitted[0])]
    samples = fit.runs.epoch(run).training_samples
    found = []
    for devices, size in itertools.product(range(1, most + 1), sizes):
        batch = devices * size * run.accumulation_steps
        if devices % min(devices, site.devices_per_node) == 0 and batch <= samples:
            changed = {"local_batch_size": size, "global_batch_size": batch}
            found.append(config.replace(run, devices=devices, **changed))
    if not found:
        raise ValueError(f"local_batch_size: choose at most the {samples} samples")
    return found


def make(
    fit: Fit,
    asked: list[RunConfig],
    limits: dict[str, float | None],
    power_share: float = 1.0,
    per_kWh: tuple = (),
) -> Plan:
    """Judge configurations. limits: upper ones of UNITS and of the batch; None: none.

    Raises ValueError with the limits and the least of each where no configuration meets them.
    """
    work = fit.runs.works(asked)
    values = predict.quantities(fit, work, power_share)
    limits = {name: most for name, most in limits.items() if most is not None}
    costs = pd.DataFrame({name: values[name][:, 0] for name in UNITS})
    costs["global_batch_size"] = [run.global_batch_size for run in asked]
    limited = costs[list(limits)]
    if limited.isna().any(axis=None):
        raise ValueError(
            "--energy-kwh: energies are not known, as not all were measured"
        )
    able = costs[(limited <= list(limits.values())).all(axis="columns")]
    if able.empty:
        least = limited.min().items()
        least = " or ".join(f"{OPTIONS[name]} {value:.4g}" for name, value in least)
        raise ValueError(
            f"plan: nothing on at most {work.devices.max():.0f} devices keeps {in_words(limits)}; "
            f"the least of each alone: {least}"
        )
    # without powers, energies are not known, and not judged
    best = _unbeaten(able[list(UNITS)].dropna(axis="columns")).sort_values("time_h")
    pareto, choices = np.array(best.index), _choices(best)
    return Plan(fit, asked, work, values, limits, pareto, choices, power_share, per_kWh)


def _unbeaten(costs: pd.DataFrame) -> pd.DataFrame:
    """Keep the rows that no other row beats: no worse in any column, and better in one."""
    table = costs.to_numpy()
    no_worse = (table[:, None] <= table).all(axis=2)
    beats = no_worse & (table[:, None] < table).any(axis=2)
    return costs[~beats.any(axis=0)]


def in_words(limits: dict[str, float]) -> str:
    """Write limits as the options that give them."""
    words = [f"{OPTIONS[name]} {most:g}" for name, most in limits.items()]
    return " and ".join(words) or "no limit"


def _choices(best: pd.DataFrame) -> dict[str, tuple[int, str]]:
    """Choose the fastest, the most frugal and the balanced of the Pareto set, with reasons."""
    spent = best.columns[-1]  # kWh where they are known, else GPU hours
    times = best[["time_h", spent]] / best[["time_h", spent]].min()
    # How far each is from the least time and the least cost, on the way to the other end.
    far = np.log(times) / np.log(times).max().clip(lower=1e-9)
    found = {
        "fastest": times["time_h"].idxmin(),
        "most frugal": times[spent].idxmin(),
        "balanced": (far**2).sum(axis="columns").idxmin(),
    }
    choices = {}
    for name, at in found.items():
        slower, dearer = times.loc[at]
        reason = f"{slower:.1f} times the least time, {dearer - 1:.0%} above the least "
        choices[name] = at, reason + UNITS[spent]
    return choices


def row(plan: Plan, index: int) -> dict:
    """Forecast one configuration of a plan, with its intervals and what lies outside."""
    (row,) = predict.rows(plan.fit, [plan.runs[index]], plan.power_share)
    for name, factor in plan.per_kWh:
        if factor is not None:
            row[name] = {
                end: kWh and factor * kWh for end, kWh in row["energy_kWh"].items()
            }
    for name in plan.limits.keys() & UNITS.keys():
        if row[name]["high"] > plan.limits[name]:
            limit = f"{OPTIONS[name]} {plan.limits[name]:g}"
            row["outside"].append(f"{limit}: the interval ends beyond")
    return row


def as_json(plan: Plan) -> dict:
    """Return the plan for a program: choices, Pareto set, limits and how it was found."""
    choices = {
        name: row(plan, index) | {"reason": reason}
        for name, (index, reason) in plan.choices.items()
    }
    return {
        "workload": plan.fit.runs.workload,
        "system": plan.fit.runs.site.name,
        "choices": choices,
        "pareto": [row(plan, index) for index in plan.pareto],
        "limits": plan.limits,
        "configurations": len(plan.runs),
        "provenance": choices["fastest"]["provenance"],
    }
