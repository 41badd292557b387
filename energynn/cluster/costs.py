"""Expect what a run costs from the nearest run that the paper publishes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from math import log2
from typing import NamedTuple

from energynn import published_values
from energynn.config import PAPER, RunConfig, run_id
from energynn.progress import entry
from energynn.studies import GROUPS, IMAGES, STUDIES

SIZES = ("local_batch_size", "devices", "epochs")


class Cost(NamedTuple):
    """GPU hours and kWh of runs.

    source: ``published``, ``scaled from published runs``, or ``unknown``.
    """

    gpu_hours: float
    energy_kWh: float
    source: str


def expect(run: RunConfig, gpu: str = "A100") -> Cost:
    """Scale the published run that is nearest in GPUs, local batch size and samples.

    Recipes that differ from the paper's have no cost. GPU hours are in proportion to samples x
    epochs, and to the two steps of fine-tuning. gpu: A100 or H100, for other models A100.
    """
    sizes = PAPER.get(run.workload, {})
    fixed = sizes.keys() - {"epochs", "local_batch_size"}
    if not sizes or any(getattr(run, name) != sizes[name] for name in fixed):
        return Cost(0.0, 0.0, "unknown")
    samples = getattr(run, "training_samples", 0) or IMAGES

    def distance(row: dict) -> tuple:
        octaves = [abs(log2(getattr(run, name) / row[name])) for name in SIZES]
        octaves.append(abs(log2(samples / (row["dataset_samples"] or IMAGES))))
        is_other_gpu = (gpu == "H100") != ("H100" in row["device_name"])
        # Where several runs are equally near, the local batch size decides: power depends on it.
        return is_other_gpu, sum(octaves), octaves[0]

    rows = published_values.costs()
    row = min((row for row in rows if row["workload"] == run.workload), key=distance)
    steps = run.epoch().forward_steps
    share = samples / (row["dataset_samples"] or IMAGES)
    factor = share * run.epochs / row["epochs"] * steps
    is_the_same = distance(row)[1] == 0 and steps == 1
    source = "published" if is_the_same else "scaled from published runs"
    return Cost(row["gpu_hours"] * factor, row["energy_total_kWh"] * factor, source)


def total(costs: Iterable[Cost]) -> Cost:
    """Add costs; the source is that of the least certain one."""
    gpu_hours, energies_kWh, sources = zip(*costs, strict=True)
    # in the order of the alphabet
    return Cost(sum(gpu_hours), sum(energies_kWh), max(sources))


def report(runs_by_study: dict[str, list[RunConfig]], each_run: bool) -> str:
    """Describe studies and their costs; ``each_run``: every run of them as well."""
    lines = []
    for name, runs in runs_by_study.items():
        is_h100 = name in GROUPS["paper-h100"] and name not in GROUPS["paper-a100"]
        costs = {
            run_id(run): expect(run, "H100" if is_h100 else "A100") for run in runs
        }
        noun = "run" if len(costs) == 1 else "runs"
        sums = f"{len(costs)} {noun}, {in_words(total(costs.values()))}"
        text = inspect.getdoc(STUDIES[name]) if name in STUDIES else name
        if each_run:
            lines += [
                text,
                *(f"{run}: {in_words(cost)}" for run, cost in costs.items()),
                sums,
            ]
        else:
            lines.append(entry(f"{name:15}", sums, text.splitlines()[0]))
    if not each_run:
        lines += [
            f"{name:15} stands for {', '.join(members)}"
            for name, members in GROUPS.items()
        ]
    return "\n".join(lines)


def in_words(cost: Cost) -> str:
    """Write a cost for people."""
    if not cost.gpu_hours:
        return "of unknown cost"
    return (
        f"{cost.gpu_hours:,.1f} GPU hours, {cost.energy_kWh:,.1f} kWh ({cost.source})"
    )
