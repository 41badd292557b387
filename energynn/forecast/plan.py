"""Plan how many devices and which batch: what nothing beats in time, energy and GPU hours."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pandas as pd

from energynn import config
from energynn.config import RunConfig
from energynn.forecast import predict, runs
from energynn.forecast.fit import Fit
from energynn.forecast.predict import UNITS

JUDGED = tuple(UNITS)
OPTIONS = {
    "time_h": "--deadline-h",
    "energy_kWh": "--energy-kwh",
    "gpu_hours": "--gpu-hours",
    "global_batch_size": "--max-global-batch-size",
}
MOST_SHOWN = 12


@dataclass(frozen=True)
class Plan:
    """Configurations, (configurations,) each, what they take, and which of them matter.

    values: quantity -> (configurations, 3). pareto: indices of those that meet the limits and that
    no other beats in all of JUDGED. choices: name -> index and reason. power_share: power limit of
    the GPUs, of the greatest. per_kWh: names and factors, None where one is not given.
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

    most: devices; None: all that the system has, as far as forecasts are validated. size: the only
    local batch.
    """
    site, fitted = fit.runs.site, fit.runs.work.local_batch_size
    most = most or predict.most_devices(site)
    predict.check_devices(site, most)
    powers = (2**power for power in range(20))
    sizes = [each for each in powers if fitted.min() <= each <= fitted.max()]
    sizes = [size] if size else sizes or [int(fitted[0])]
    samples = runs.epoch_of(run, fit.runs.samples).training_samples
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
    """Judge configurations. limits: upper ones of JUDGED and of the batch; None: none.

    Raises ValueError with the limits and the least of each where no configuration meets them.
    """
    work = runs.works(fit.runs, asked)
    values = predict.quantities(fit, work, power_share)
    limits = {name: most for name, most in limits.items() if most is not None}
    costs = pd.DataFrame({name: values[name][:, 0] for name in JUDGED})
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
            f"plan: nothing on at most {work.devices.max():.0f} devices keeps {_words(limits)}; "
            f"the least of each alone: {least}"
        )
    # without powers, energies are not known, and not judged
    best = _unbeaten(able[list(JUDGED)].dropna(axis="columns")).sort_values("time_h")
    answer = np.array(best.index), _choices(best)
    return Plan(fit, asked, work, values, limits, *answer, power_share, per_kWh)


def _unbeaten(costs: pd.DataFrame) -> pd.DataFrame:
    """Keep the rows that no other row beats: no worse in any column, and better in one."""
    table = costs.to_numpy()
    no_worse = (table[:, None] <= table).all(axis=2)
    beats = no_worse & (table[:, None] < table).any(axis=2)
    return costs[~beats.any(axis=0)]


def _words(limits: dict[str, float]) -> str:
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
    reason = "{:.1f} times the least time, {:.0%} above the least {}"
    return {
        name: (
            at,
            reason.format(times["time_h"][at], times[spent][at] - 1, UNITS[spent]),
        )
        for name, at in found.items()
    }


def row(plan: Plan, index: int) -> dict:
    """Forecast one configuration of a plan, with its intervals and what lies outside."""
    (row,) = predict.rows(plan.fit, [plan.runs[index]], plan.power_share)
    for name, factor in plan.per_kWh:
        if factor is not None:
            row[name] = {
                end: kWh and factor * kWh for end, kWh in row["energy_kWh"].items()
            }
    for name in plan.limits.keys() & JUDGED:
        if row[name]["high"] > plan.limits[name]:
            odds = "about even odds, the interval ends beyond"
            row["outside"].append(f"{OPTIONS[name]} {plan.limits[name]:g}: {odds}")
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


def text(plan: Plan) -> str:
    """Show the plan to people: the choices and their reasons first, each configuration once."""
    names, reasons = defaultdict(list), []
    for name, (index, reason) in plan.choices.items():
        names[index].append(name)
        reasons.append(f"{name}: {reason}")
    others = [index for index in plan.pareto if index not in names]
    shown = [*names, *others[:: 1 + len(others) // MOST_SHOWN]]
    found = [
        row(plan, index) | {"choice": ", ".join(names.get(index, ()))}
        for index in shown
    ]
    lines = [predict.table(found), ""]
    if len(names) > 1:
        lines += reasons
    lines.append(
        f"nothing beats these in time, kWh and GPU hours, of {len(plan.runs)} configurations "
        f"with {found[0]['samples']:,} samples; limits: {_words(plan.limits)}"
    )
    return "\n".join(lines)
