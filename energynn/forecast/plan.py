"""How many devices and which batch: the configurations that nothing beats in time, energy and GPU hours together."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

import numpy as np

from energynn import config
from energynn.config import RunConfig
from energynn.forecast import calibration, fitting, predict, runs
from energynn.forecast.calibration import Calibration
from energynn.forecast.model import Work

JUDGED = ("time_h", "energy_kWh", "gpu_hours")
UNITS = {
    "time_h": "h",
    "energy_kWh": "kWh",
    "gpu_hours": "GPU hours",
    "global_batch_size": "samples a batch",
}
BEST = {
    "time_h": "the fastest",
    "energy_kWh": "the most frugal",
    "gpu_hours": "the one with the fewest GPU hours",
}
BEST |= {"global_batch_size": "the smallest"}


@dataclass(frozen=True)
class Plan:
    """Configurations, (configurations,) each, what they take, (configurations, 3), and which of them matter.

    pareto: that meet the limits and that no other beats in all of JUDGED; choices: name -> index and reason.
    """

    made: Calibration
    base: RunConfig
    work: Work
    values: dict[str, np.ndarray]
    pareto: np.ndarray
    choices: dict[str, tuple[int, str]]
    limits: dict[str, float]

    @property
    def global_batch_size(self) -> np.ndarray:
        return _global_batch_size(self.base, self.work)


def published_fit(workload: str, site) -> Calibration:
    """The fit of all that is published of a workload on a system, made on the spot."""
    return calibration.make(*calibration.published(workload, site))


def base_run(made: Calibration, parameters: dict) -> RunConfig:
    """The calibrated run with the most samples, on one device, with other parameters where they are given.

    Raises ValueError for a parameter that a plan chooses.
    """
    for name in ("devices", "local_batch_size", "global_batch_size"):
        if name in parameters:
            raise ValueError(
                f"{name}: a plan chooses it; limit it by --devices or --max-global-batch-size"
            )
    plain = config.to_dict(made.config) | {
        "devices": 1,
        "accumulation_steps": 1,
        "seed": 0,
        "repeat": 0,
    }
    return config.make(**plain | {"global_batch_size": None} | parameters)


def grid(
    made: Calibration, run: RunConfig, devices: tuple[int, int] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Devices and local batch sizes to choose from: parts of a node and whole nodes, powers of two as calibrated.

    ``devices``: least and most; without it all that the system has, as far as forecasts were validated.

    Raises ValueError where a number of devices is not what the system has.
    """
    per_node, of_system = made.site.devices_per_node, made.site.nodes * made.site.devices_per_node
    least, most = devices or (1, min(predict.MOST_DEVICES, of_system or predict.MOST_DEVICES))
    if not 1 <= least <= most:
        raise ValueError(f"devices: {least}-{most} is no range; write it as 1-256")
    predict.check_devices(made.site, most)
    numbers = [n for n in range(least, most + 1) if n < per_node or n % per_node == 0]
    if not numbers:
        raise ValueError(
            f"devices: {least}-{most} holds no whole nodes; choose a multiple of {per_node}"
        )
    low, high = made.ranges["local_batch_size"]
    sizes = [size for size in 2 ** np.arange(20) if low <= size <= high] or [int(high)]
    pairs = np.array(np.meshgrid(numbers, sizes)).reshape(2, -1)
    samples = runs.epoch_of(run, made.samples).training_samples
    enough = samples // pairs[0] >= pairs[1] * run.accumulation_steps
    if not enough.any():
        raise ValueError(
            f"devices: {samples} samples are too few for {least} devices; choose fewer"
        )
    return pairs[0][enough], pairs[1][enough]


def make(
    made: Calibration, run: RunConfig, devices, local_batch_size, limits: dict[str, float]
) -> Plan:
    """Judge configurations, arrays of devices and local batch sizes; ``limits``: upper ones of JUDGED and of the batch.

    Raises ValueError with the limit that binds and the nearest possible where none meets the limits.
    """
    work = runs.work(
        made.site,
        run,
        made.samples,
        made.workers,
        devices=devices,
        local_batch_size=local_batch_size,
    )
    values = predict.quantities(made, work, runs.loading_workers(run))
    judged = [name for name in JUDGED if made.fit.has_power or name != "energy_kWh"]
    table = {name: values[name][:, 0] for name in judged} | {
        "global_batch_size": _global_batch_size(run, work)
    }
    meets = _meeting(limits, table)
    if not meets.any():
        raise ValueError(_impossible(limits, table, work))
    inside = np.flatnonzero(meets)
    best = inside[_pareto(np.stack([table[name][inside] for name in judged], axis=1))]
    best = best[np.argsort(table["time_h"][best])]
    return Plan(made, run, work, values, best, _choices(best, table), limits)


def _global_batch_size(run: RunConfig, work: Work) -> np.ndarray:
    return work.devices * work.local_batch_size * run.accumulation_steps


def _meeting(limits: dict[str, float], table: dict[str, np.ndarray]) -> np.ndarray:
    meets = np.ones(len(table["time_h"]), bool)
    for name, most in limits.items():
        if name not in table:
            raise ValueError(
                f"{name}: a fit of the time alone forecasts none; leave this limit out"
            )
        meets &= table[name] <= most
    return meets


def _pareto(costs: np.ndarray) -> np.ndarray:
    """Indices of the rows of (rows, costs) that no other row beats in every cost.

    The first in the order of the costs is beaten by none; then those are left that are better than it in one.
    """
    kept, left = [], np.lexsort(costs.T[::-1])
    while len(left):
        kept.append(left[0])
        left = left[(costs[left] < costs[left[0]]).any(axis=1)]
    return np.array(kept)


def _impossible(limits: dict[str, float], table: dict[str, np.ndarray], work: Work) -> str:
    """Which limit nothing meets, or which contradict each other, and what comes nearest within the others.

    The batch is held first: up to it accuracy is free, so that the nearest is, too.
    """
    held: dict[str, float] = {}
    limits = dict(sorted(limits.items(), key=lambda item: item[0] != "global_batch_size"))
    for name, most in limits.items():
        if not _meeting(held | {name: most}, table).any():
            break
        held[name] = most
    others = {of: value for of, value in limits.items() if of != name}
    what = f"at most {most:g} {UNITS[name]}"
    what = (
        f"{what} contradicts {_words(held, 'at most ')}"
        if (table[name] <= most).any()
        else f"nothing needs {what}"
    )
    # Where the others contradict each other, too, those before.
    within = others if _meeting(others, table).any() else held
    place = f"within {_words(within)} " if within else ""
    return f"{name}: {what}; {place}{_nearest(name, _meeting(within, table), table, work)}"


def _words(limits: dict[str, float], before: str = "") -> str:
    return " and ".join(f"{before}{most:g} {UNITS[name]}" for name, most in limits.items())


def _nearest(name: str, meets: np.ndarray, table: dict[str, np.ndarray], work: Work) -> str:
    """The configuration of a mask that needs least; hours and kWh are rounded up, so that limits can be met."""
    index = np.flatnonzero(meets)[np.argmin(table[name][meets])]
    digits = 12 if name == "global_batch_size" else 3
    least = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(table[name][index])
    where = f"{work.devices[index]:.0f} devices with a local batch of {work.local_batch_size[index]:.0f}"
    return f"{BEST[name]} needs {least:f} {UNITS[name]}, {where}"


def _choices(best: np.ndarray, table: dict[str, np.ndarray]) -> dict[str, tuple[int, str]]:
    """The fastest, the most frugal and the balanced of the Pareto set, each with its reason."""
    cost = "energy_kWh" if "energy_kWh" in table else "gpu_hours"
    time_h, spent = table["time_h"][best], table[cost][best]
    fastest, frugal = np.argmin(time_h), np.argmin(spent)
    # How far each is from the least time and the least cost: 0 there, 1 at the other end, by logarithms.
    far = [
        np.log(of / of.min()) / max(np.log(of[end] / of.min()), 1e-9)
        for of, end in ((time_h, frugal), (spent, fastest))
    ]
    balanced = np.argmin(np.hypot(*far))
    dear, slow = spent[fastest] / spent[frugal] - 1, time_h[frugal] / time_h[fastest]
    reasons = {
        "fastest": (
            fastest,
            f"the least time; it needs {dear:.0%} more {UNITS[cost]} than the most frugal",
        ),
        "most frugal": (
            frugal,
            f"the least {UNITS[cost]}; it takes {slow:.1f} times as long as the fastest",
        ),
    }
    more, faster = spent[balanced] / spent[frugal] - 1, time_h[frugal] / time_h[balanced]
    words = f"nearest to both: {faster:.1f} times as fast as the most frugal for {more:.0%} more {UNITS[cost]}"
    reasons["balanced"] = (balanced, words)
    return {name: (int(best[index]), reason) for name, (index, reason) in reasons.items()}


def as_json(plan: Plan) -> dict:
    """The plan for a program: choices, Pareto set, limits and how it was found."""
    chosen = {
        name: row(plan, index) | {"reason": reason}
        for name, (index, reason) in plan.choices.items()
    }
    return {
        "workload": plan.made.workload,
        "system": plan.made.site.name,
        "choices": chosen,
        "pareto": [row(plan, index) for index in plan.pareto],
        "limits": plan.limits,
        "configurations": len(plan.work),
        "reading": plan.made.fit.reading,
        "flags": fitting.flags(plan.made.fit),
        "provenance": f"estimated by a model fitted to {plan.made.number_of_runs} {plan.made.provenance} runs",
    }


def row(plan: Plan, index: int) -> dict:
    """One configuration of a plan with its intervals, what lies outside, and the parameters that make it."""
    work = plan.work[index : index + 1]
    devices, local_size = int(work.devices[0]), int(work.local_batch_size[0])
    size = int(plan.global_batch_size[index])
    outside = predict.outside(plan.made, plan.base, work)
    changed = dict(devices=devices, local_batch_size=local_size, global_batch_size=size)
    run = config.replace(plan.base, **changed)
    samples = runs.epoch_of(run, plan.made.samples).training_samples
    training = {"epochs": run.epochs, "dataset_samples": samples}
    values = {name: predict.interval(plan.values[name][index]) for name in predict.QUANTITIES}
    return {**changed, **training, **values, "outside": outside, "run_id": config.run_id(run)}
