"""Plan how many devices and which batch: what nothing beats in time, energy and GPU hours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from energynn import config
from energynn.config import RunConfig
from energynn.forecast import predict, runs
from energynn.forecast.fit import Fit
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
    work: np.recarray
    global_batch_size: np.ndarray
    values: dict[str, np.ndarray]
    limits: dict[str, float]
    pareto: np.ndarray
    choices: dict[str, tuple[int, str]]


def base_run(fit: Fit, parameters: dict) -> RunConfig:
    """Take the fitted run with the most samples, on one device, with parameters of one's own.

    Raises ValueError for a parameter that a plan chooses.
    """
    for name in ("devices", "local_batch_size", "global_batch_size"):
        if name in parameters:
            limit = "limit it by --devices or --max-global-batch-size"
            raise ValueError(f"{name}: a plan chooses it; {limit}")
    one = {"devices": 1, "accumulation_steps": 1, "global_batch_size": None}
    return config.make(**config.to_dict(fit.runs.longest) | one | parameters)


def grid(fit: Fit, run: RunConfig, most: int | None) -> tuple[np.ndarray, np.ndarray]:
    """List devices and local batch sizes: parts of a node, whole nodes; powers of two.

    most: devices; None: all that the system has, as far as forecasts are validated.
    """
    site, seen = fit.runs.site, fit.runs.work.local_batch_size
    most = most or predict.most_devices(site)
    predict.check_devices(site, most)
    numbers = np.arange(1, most + 1)
    is_whole = (numbers < site.devices_per_node) | (numbers % site.devices_per_node == 0)
    powers = 2.0 ** np.arange(20)
    powers = powers[(powers >= seen.min()) & (powers <= seen.max())]
    sizes = powers if len(powers) else seen[:1]
    devices, local_batch_size = map(np.ravel, np.meshgrid(numbers[is_whole], sizes))
    samples = runs.epoch_of(run, fit.runs.samples).training_samples
    enough = devices * local_batch_size * run.accumulation_steps <= samples
    return devices[enough], local_batch_size[enough]


def make(fit: Fit, run: RunConfig, devices, local_batch_size, limits: dict[str, float]) -> Plan:
    """Judge configurations, arrays of devices and local batch sizes.

    limits: upper ones of JUDGED and of the batch; None: none. Raises ValueError with the limits
    and the least of each where no configuration meets them.
    """
    work = runs.work(fit.runs, run, devices, local_batch_size)
    values = predict.quantities(fit, work)
    limits = {name: most for name, most in limits.items() if most is not None}
    costs = {name: values[name][:, 0] for name in JUDGED}
    batch = work.devices * work.local_batch_size * run.accumulation_steps
    bounded = costs | {"global_batch_size": batch}
    meets = [bounded[name] <= most for name, most in limits.items()]
    inside = np.flatnonzero(np.all([costs["time_h"] > 0, *meets], axis=0))
    if not len(inside):
        least = " or ".join(f"{OPTIONS[name]} {bounded[name].min():.4g}" for name in limits)
        raise ValueError(
            f"plan: no configuration keeps {_words(limits)}; the least of each: {least}"
        )
    judged = JUDGED if fit.has_power else ("time_h", "gpu_hours")
    table = np.stack([costs[name][inside] for name in judged], axis=1)
    no_worse = (table[:, None] <= table).all(axis=2)
    is_beaten = (no_worse & (table[:, None] < table).any(axis=2)).any(axis=0)
    best = inside[~is_beaten]
    best = best[np.argsort(costs["time_h"][best])]
    spent = "energy_kWh" if fit.has_power else "gpu_hours"
    choices = _choices(best, costs["time_h"][best], costs[spent][best], UNITS[spent])
    return Plan(fit, run, work, batch, values, limits, best, choices)


def _words(limits: dict[str, float]) -> str:
    return " and ".join(f"{OPTIONS[name]} {most:g}" for name, most in limits.items()) or "no limit"


def _choices(best: np.ndarray, time: np.ndarray, spent: np.ndarray, unit: str) -> dict:
    """Choose the fastest, the most frugal and the balanced of the Pareto set, with reasons."""
    slower, more = time / time.min(), spent / spent.min()
    # How far each is from the least time and the least cost, on the way to the other end.
    logs = np.log([slower, more])
    balanced = np.argmin(np.hypot(*logs / np.maximum(logs.max(axis=1, keepdims=True), 1e-9)))
    found = {"fastest": np.argmin(time), "most frugal": np.argmin(spent), "balanced": balanced}
    choices = {}
    for name, at in found.items():
        above = f"{100 * (more[at] - 1):.0f} % above the least {unit}"
        choices[name] = int(best[at]), f"{slower[at]:.1f} times the least time, {above}"
    return choices


def row(plan: Plan, index: int) -> dict:
    """Forecast one configuration of a plan, with its intervals and what lies outside."""
    sizes = {name: int(plan.work[name][index]) for name in ("devices", "local_batch_size")}
    sizes["global_batch_size"] = int(plan.global_batch_size[index])
    (row,) = predict.rows(plan.fit, [config.replace(plan.base, **sizes)])
    for name in JUDGED:
        most = plan.limits.get(name, np.inf)
        if (row[name]["high"] or 0) > most:
            odds = "about even odds, the interval ends beyond"
            row["outside"].append(f"{OPTIONS[name]} {most:g}: {odds}")
    return row


def as_json(plan: Plan) -> dict:
    """Return the plan for a program: choices, Pareto set, limits and how it was found."""
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
    """Show the plan to people: the choices with their reasons, then the Pareto set."""
    answer = as_json(plan)
    chosen, pareto = answer["choices"], answer["pareto"]
    lines = [predict.table(list(chosen.values())), ""]
    lines += [f"{name}: {of['devices']} devices, {of['reason']}" for name, of in chosen.items()]
    lines.append("\nnothing beats these in time, kWh and GPU hours")
    lines.append(predict.table(pareto[:: -(-len(pareto) // MOST_SHOWN)]))
    lines.append(f"limits: {_words(plan.limits)}; {answer['configurations']} configurations")
    return "\n".join(lines)
