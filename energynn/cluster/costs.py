"""Expect what a run costs from the nearest run that the paper publishes."""

from __future__ import annotations

import functools
import inspect
import json
import textwrap
from dataclasses import dataclass
from math import log2

from energynn import published_values
from energynn.config import PAPER, RunConfig, run_id, to_dict
from energynn.progress import entry
from energynn.studies import GROUPS, IMAGES, STUDIES


@dataclass(frozen=True)
class Cost:
    """GPU hours and kWh of runs; ``source`` is ``published``, ``scaled`` from published runs, or ``unknown``."""

    gpu_hours: float
    energy_kWh: float
    source: str

    def __str__(self) -> str:
        if not self.gpu_hours:
            return "of unknown cost"
        return f"{self.gpu_hours:,.1f} GPU hours, {self.energy_kWh:,.1f} kWh ({self.source})"


def expect(run: RunConfig, gpu: str = "A100") -> Cost:
    """Scale the published run that is nearest in GPUs, local batch size and samples; other recipes have no cost.

    GPU hours are in proportion to samples x epochs, and to the two steps of fine-tuning. ``gpu``: A100 or H100, for
    other models A100.
    """
    sizes = PAPER.get(run.workload, {})
    fixed = sizes.keys() - {"epochs", "local_batch_size"}
    if not sizes or any(getattr(run, name) != sizes[name] for name in fixed):
        return Cost(0.0, 0.0, "unknown")
    published = [row for row in _published() if row["workload"] == run.workload]
    of_gpu = [row for row in published if gpu in row["device_name"]]
    of_gpu = of_gpu or [row for row in published if "A100" in row["device_name"]]
    samples = getattr(run, "training_samples", 0) or IMAGES

    def distance(row: dict) -> tuple[float, float]:
        batch = abs(log2(run.local_batch_size / row["batch"]))
        octaves = abs(log2(run.devices / row["devices"])) + abs(log2(samples / row["samples"]))
        # Where several runs are equally near, the local batch size decides: power depends on it.
        return octaves + batch + 0.5 * (run.epochs != row["epochs"]), batch

    row = min(of_gpu, key=distance)
    steps = 2 if getattr(run, "stage", "") == "finetune" else 1
    factor = samples / row["samples"] * run.epochs / row["epochs"] * steps
    source = "published" if distance(row)[0] == 0 and steps == 1 else "scaled"
    return Cost(row["gpu_hours"] * factor, row["energy_total"] * factor, source)


@functools.cache
def _published() -> list[dict]:
    """Read GPU hours and energies of the published runs; without pandas, which takes long to import."""
    runs: dict[tuple, dict] = {}
    for row in published_values.rows():
        if row["kind"] != "measurement" or not row["devices"]:
            continue
        devices = int(row["devices"])
        run = {
            "workload": row["workload"],
            "device_name": row["device_name"],
            "devices": devices,
            "epochs": int(row["epochs"]),
            "samples": int(row["dataset_samples"] or IMAGES),
            "batch": int(row["local_batch_size"] or int(row["global_batch_size"]) // devices),
        }
        runs.setdefault(tuple(run.values()), run)[row["quantity"]] = float(row["value"])
    return [run for run in runs.values() if {"gpu_hours", "energy_total"} <= set(run)]


def total(costs: list[Cost]) -> Cost:
    """Add costs; the source is the least certain one of them."""
    sources = {cost.source for cost in costs}
    worst = next((source for source in ("unknown", "scaled") if source in sources), "published")
    hours = sum(cost.gpu_hours for cost in costs)
    return Cost(hours, sum(cost.energy_kWh for cost in costs), worst)


def of_study(name: str, runs: list[RunConfig]) -> dict[RunConfig, Cost]:
    """Expect the cost of each run of a study, on the GPUs that the paper used for it."""
    is_h100 = name in GROUPS["paper-h100"] and name not in GROUPS["paper-a100"]
    return {run: expect(run, "H100" if is_h100 else "A100") for run in runs}


def report(runs_by_study: dict[str, list[RunConfig]], each_run: bool) -> str:
    """Describe studies and their costs; ``each_run``: every run of them as well."""
    lines = []
    for name, runs in runs_by_study.items():
        text = inspect.getdoc(STUDIES[name]) if name in STUDIES else name
        costs = of_study(name, runs)
        sums = f"{len(costs)} runs, {total(list(costs.values()))}"
        if each_run:
            lines += [textwrap.fill(part, 79) for part in text.split("\n\n")]
            lines += [f"{run_id(run)}: {cost}" for run, cost in costs.items()]
            lines.append(f"together {sums}")
        else:
            lines.append(entry(f"{name:15}", sums, text.splitlines()[0]))
    if not each_run:
        lines += [f"{name:15} stands for {', '.join(members)}" for name, members in GROUPS.items()]
    return "\n".join(lines)


def as_json(runs_by_study: dict[str, list[RunConfig]]) -> str:
    """List the runs of studies and their costs for a program."""
    table = {}
    for name, runs in runs_by_study.items():
        costs = of_study(name, runs)
        each = [{"run_id": run_id(run), **to_dict(run), "expected": vars(costs[run])} for run in costs]
        table[name] = {"total": vars(total(list(costs.values()))), "runs": each}
    return json.dumps(table, indent=1)
