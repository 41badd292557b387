"""How many devices and which batch: what nothing beats in time, energy and GPU hours together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from energynn import config
from energynn.config import RunConfig
from energynn.forecast import predict, runs
from energynn.forecast.fit import Fit
from energynn.forecast.model import Work
from energynn.forecast.predict import UNITS

JUDGED = tuple(UNITS)
OPTIONS = {"time_h": "--deadline-h", "energy_kWh": "--energy-kwh", "gpu_hours": "--gpu-hours"}
OPTIONS |= {"global_batch_size": "--max-global-batch-size"}
MOST_SHOWN = 12


@dataclass(frozen=True)
class Plan:
    """Configurations, (configurations,) each, what they take, and which of them matter.

    values: quantity -> (configurations, 3). pareto: indices of those that meet the limits and that
    no other beats in all of JUDGED. choices: name -> index and reason.
    """

    fit: Fit
    base: RunConfig
    work: Work
    values: dict[str, np.ndarray]
    limits: dict[str, float]
    pareto: np.ndarray
    choices: dict[str, tuple[int, str]]

    @property
    def global_batch_size(self) -> np.ndarray:
        return self.work.devices * self.work.local_batch_size * self.base.accumulation_steps


def base_run(fit: Fit, parameters: dict) -> RunConfig:
    """The fitted run with the most samples, on one device, with parameters of one's own.

    Raises ValueError for a parameter that a plan chooses.
    """
    for name in ("devices", "local_batch_size", "global_batch_size"):
        if name in parameters:
            limit = "limit it by --devices or --max-global-batch-size"
            raise ValueError(f"{name}: a plan chooses it; {limit}")
    one = {"devices": 1, "accumulation_steps": 1, "global_batch_size": None}
    return config.make(**config.to_dict(fit.runs.longest) | one | parameters)


def grid(fit: Fit, run: RunConfig, devices: tuple[int, int] | None) -> np.ndarray:
    """Devices and local batch sizes to choose from: parts of a node, whole nodes; powers of two.

    devices: least and most; without it all that the system has, as far as forecasts are validated.
    Raises ValueError where a number of devices is not what the system has.
    """
    site, sizes = fit.runs.site, fit.runs.work.local_batch_size
    per_node, most = site.devices_per_node, predict.MOST_DEVICES
    least, most = devices or (1, min(most, site.nodes * per_node or most))
    predict.check_devices(site, most)
    numbers = [n for n in range(max(least, 1), most + 1) if n < per_node or n % per_node == 0]
    powers = 2 ** np.arange(20)
    powers = powers[(powers >= sizes.min()) & (powers <= sizes.max())]
    pairs = np.array(np.meshgrid(numbers, powers if len(powers) else sizes[:1])).reshape(2, -1)
    samples = runs.epoch_of(run, fit.runs.samples).training_samples
    enough = pairs[0] * pairs[1] * run.accumulation_steps <= samples
    if not enough.any():
        raise ValueError(f"devices: {least}-{most} are no whole nodes, or more than the samples")
    return pairs[:, enough]


def make(fit: Fit, run: RunConfig, devices, local_batch_size, limits: dict[str, float]) -> Plan:
    """Judge configurations, arrays of devices and local batch sizes.

    limits: upper ones of JUDGED and of the batch; None: none. Raises ValueError with the limits
    that bind and what is possible where no configuration meets them.
    """
    work = runs.work(fit.runs, run, devices, local_batch_size)
    values = predict.quantities(fit, work)
    limits = {name: most for name, most in limits.items() if most is not None}
    plan = Plan(fit, run, work, values, limits, np.array([]), {})
    judged = [name for name in JUDGED if fit.has_power or name != "energy_kWh"]
    costs = {name: values[name][:, 0] for name in judged}
    costs["global_batch_size"] = plan.global_batch_size
    for name, most in limits.items():
        if name not in costs or not most > 0:
            raise ValueError(f"{OPTIONS[name]}: give more than 0, or leave it out: {most}")
    inside = np.flatnonzero(_meeting(limits, costs))
    if not len(inside):
        raise ValueError(_impossible(limits, costs, work))
    best = inside[_pareto(np.stack([costs[name][inside] for name in judged], axis=1))]
    best = best[np.argsort(costs["time_h"][best])]
    return replace(plan, pareto=best, choices=_choices(best, costs))


def _meeting(limits: dict[str, float], costs: dict[str, np.ndarray]) -> np.ndarray:
    meets = [costs[name] <= most for name, most in limits.items()]
    return np.all([np.isfinite(costs["time_h"]), *meets], axis=0)


def _pareto(costs: np.ndarray) -> np.ndarray:
    """Indices of the rows of (rows, costs) that no other row beats in every cost.

    The first in the order of the costs is beaten by none; then those are left that are better
    than it in one.
    """
    kept, left = [], np.lexsort(costs.T[::-1])
    while len(left):
        kept.append(left[0])
        left = left[(costs[left] < costs[left[0]]).any(axis=1)]
    return np.array(kept)


def _impossible(limits: dict[str, float], costs: dict[str, np.ndarray], work: Work) -> str:
    """That the limits cannot be kept together, and what each could be if the others are kept."""
    ways = []
    for name in limits:
        within = _meeting({of: most for of, most in limits.items() if of != name}, costs)
        if within.any():
            at = np.flatnonzero(within)[np.argmin(costs[name][within])]
            least = f"{costs[name][at] * 1.0005:.4g}"  # rounded up, so that it can be met
            ways.append(f"{OPTIONS[name]} {least} ({work.devices[at]:g} devices)")
    remedy = " or ".join(ways) or "leave one of them out"
    return f"plan: no configuration keeps {_words(limits)}; possible: {remedy}"


def _words(limits: dict[str, float]) -> str:
    return " and ".join(f"{OPTIONS[name]} {most:g}" for name, most in limits.items()) or "no limit"


def _choices(best: np.ndarray, costs: dict[str, np.ndarray]) -> dict[str, tuple[int, str]]:
    """The fastest, the most frugal and the balanced of the Pareto set, each with its reason."""
    name = "energy_kWh" if "energy_kWh" in costs else "gpu_hours"
    time, spent = costs["time_h"][best], costs[name][best]
    # How far each is from the least time and the least cost, on the way to the other end.
    logs = np.log(np.stack([time / time.min(), spent / spent.min()]))
    balanced = np.argmin(np.hypot(*logs / np.maximum(logs.max(axis=1, keepdims=True), 1e-9)))
    found = {"fastest": np.argmin(time), "most frugal": np.argmin(spent), "balanced": balanced}
    choices = {}
    for choice, at in found.items():
        slower, more = time[at] / time.min(), 100 * (spent[at] / spent.min() - 1)
        reason = f"{slower:.1f} times the least time, {more:.0f} % above the least {UNITS[name]}"
        choices[choice] = int(best[at]), reason
    return choices


def row(plan: Plan, index: int) -> dict:
    """One configuration of a plan with its intervals, what lies outside, and its name."""
    sizes = {name: int(getattr(plan.work, name)[index]) for name in ("devices", "local_batch_size")}
    sizes["global_batch_size"] = int(plan.global_batch_size[index])
    (row,) = predict.rows(plan.fit, [config.replace(plan.base, **sizes)])
    for name in UNITS:
        if (row[name]["high"] or 0) > (most := plan.limits.get(name, np.inf)):
            odds = "about even odds, the interval ends beyond"
            row["outside"].append(f"{OPTIONS[name]} {most:g}: {odds}")
    return row


def as_json(plan: Plan) -> dict:
    """The plan for a program: choices, Pareto set, limits and how it was found."""
    choices = {}
    for name, (index, reason) in plan.choices.items():
        choices[name] = row(plan, index) | {"reason": reason}
    return {
        "workload": plan.base.workload,
        "system": plan.fit.runs.site.name,
        "choices": choices,
        "pareto": [row(plan, index) for index in plan.pareto],
        "limits": plan.limits,
        "configurations": len(plan.work),
        "provenance": choices["fastest"]["provenance"],
    }


def text(plan: Plan) -> str:
    """The plan for people: the choices with their reasons, then the Pareto set."""
    answer = as_json(plan)
    chosen, pareto = answer["choices"], answer["pareto"]
    shown = pareto[:: -(-len(pareto) // MOST_SHOWN)]
    once = {of["run_id"]: of for of in chosen.values()}
    lines = [predict.table(list(once.values())), ""]
    lines += [f"{name}: {of['devices']} devices, {of['reason']}" for name, of in chosen.items()]
    lines.append("\nnothing beats these in time, kWh and GPU hours")
    lines += [predict.table(shown), ""]
    lines.append(predict.notes(list((once | {of["run_id"]: of for of in shown}).values())))
    lines.append(f"limits: {_words(plan.limits)}; {answer['configurations']} configurations")
    return "\n".join(lines)
