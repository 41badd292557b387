"""What a run will probably cost, from what the paper's runs have cost."""

from __future__ import annotations

import functools
import inspect
import json
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import log2

from energynn import published_values
from energynn.config import PAPER, RunConfig, replace, run_id, to_dict
from energynn.progress import entry
from energynn.studies import GROUPS, IMAGES, STUDIES


@dataclass(frozen=True)
class Cost:
    """GPU hours and kWh of one run; ``source`` is ``published``, ``scaled`` from a published run, or ``unknown``."""

    gpu_hours: float
    energy_kWh: float
    source: str


def expect(run: RunConfig, gpu: str = "A100") -> Cost:
    """Cost of a run of the paper's recipe, from the published run nearest in GPUs, local batch size and samples.

    GPU hours are in proportion to samples x epochs, and to the two steps of fine-tuning; kWh per GPU hour are those
    of that published run. ``gpu``: A100 or H100, for other models A100. Runs of other recipes have no cost.
    """
    if run.workload not in PAPER:  # a module of one's own
        return Cost(0.0, 0.0, "unknown")
    sizes = PAPER[run.workload]
    if any(getattr(run, name) != sizes[name] for name in sizes if name not in ("epochs", "local_batch_size")):
        return Cost(0.0, 0.0, "unknown")
    rows = [row for row in _published() if row["workload"] == run.workload]
    rows = [row for row in rows if gpu in row["device_name"]] or [row for row in rows if "A100" in row["device_name"]]
    samples = getattr(run, "training_samples", 0) or IMAGES

    def distance(row: dict) -> float:
        pairs = (run.devices, row["devices"]), (run.local_batch_size, row["batch"]), (samples, row["samples"])
        octaves = sum(abs(log2(ours / theirs)) for ours, theirs in pairs)
        return octaves if run.epochs == row["epochs"] else octaves + 0.5

    # Where several rows are equally near, the local batch size decides: power depends on it.
    row = min(rows, key=lambda row: (distance(row), abs(log2(run.local_batch_size / row["batch"]))))
    steps = 2 if getattr(run, "stage", "") == "finetune" else 1
    factor = samples / row["samples"] * run.epochs / row["epochs"] * steps
    exact = distance(row) == 0 and steps == 1
    hours = row["gpu_hours"] * factor
    return Cost(hours, hours * row["energy_total"] / row["gpu_hours"], "published" if exact else "scaled")


def total(costs: Iterable[Cost]) -> dict:
    """Sums over runs and over the published ones among them, and how many are published, scaled and unknown."""
    costs = list(costs)
    published = [cost for cost in costs if cost.source == "published"]
    sources = Counter(cost.source for cost in costs)
    return {
        "runs": len(costs),
        "gpu_hours": sum(cost.gpu_hours for cost in costs),
        "published_gpu_hours": sum(cost.gpu_hours for cost in published),
        "energy_kWh": sum(cost.energy_kWh for cost in costs),
        "published_energy_kWh": sum(cost.energy_kWh for cost in published),
        **{source: sources[source] for source in ("published", "scaled", "unknown")},
    }


@functools.cache
def _published() -> list[dict]:
    """GPU hours and energy of the published runs; without pandas, which takes longer to import than a status."""
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


def report(found: dict[str, list[RunConfig]], each_run: bool) -> str:
    """Runs and cost of studies in words; ``each_run``: every configuration of them as well."""
    lines = []
    for name, runs in found.items():
        text = inspect.getdoc(STUDIES[name]) if name in STUDIES else name
        gpu = "H100" if name in GROUPS["paper-h100"] and name not in GROUPS["paper-a100"] else "A100"
        sums = total(expect(run, gpu) for run in dict.fromkeys(runs))
        if not each_run:
            cost = f"{sums['gpu_hours']:,.0f} GPU hours, {sums['energy_kWh']:,.0f} kWh"
            known = f", {cost}" if sums["gpu_hours"] else ""
            lines.append(entry(f"{name:15}", f"{sums['runs']} runs{known}", text.splitlines()[0]))
            continue
        lines += [*(textwrap.fill(part, 79) for part in text.split("\n\n")), "", _HEAD]
        repeats = Counter(replace(run, repeat=0, seed=0) for run in runs)
        lines += [_line(run, number, expect(run, gpu)) for run, number in repeats.items()]
        origin = f", from the paper's runs on {gpu}" if sums["gpu_hours"] else ""
        lines.append(f"together {sums['runs']} runs, {in_words(sums)}{origin}")
    if not each_run:
        lines += [f"{name:15} stands for {', '.join(members)}" for name, members in GROUPS.items()]
    return "\n".join(lines)


_HEAD = f"runs {'workload':11} devices {'LBS':>4} {'GBS':>6} epochs {'samples':>7} {'GPU h':>7} {'kWh':>9} from"


def _line(run: RunConfig, number: int, cost: Cost) -> str:
    """A configuration on 80 columns: how often, what, and what each run of it costs."""
    sizes = f"{run.devices:7} {run.local_batch_size:4} {run.global_batch_size:6} {run.epochs:6}"
    samples = getattr(run, "training_samples", 0) or "all"
    spent = f"{cost.gpu_hours:7,.1f} {cost.energy_kWh:9,.2f}" if cost.gpu_hours else f"{'?':>7} {'?':>9}"
    return f"{number:4} {getattr(run, 'stage', '') or run.workload:11} {sizes} {samples:>7} {spent} {cost.source}"


def in_words(sums: dict) -> str:
    """What ``total`` returns, for people, beside what the paper itself says."""
    if not sums["gpu_hours"]:
        return "of unknown cost"
    return (
        f"expected {sums['gpu_hours']:,.0f} GPU hours, {sums['energy_kWh']:,.0f} kWh (the paper's own numbers: "
        f"{sums['published_gpu_hours']:,.0f} GPU hours, {sums['published_energy_kWh']:,.0f} kWh for "
        f"{sums['published']} of the runs; {sums['scaled']} scaled from them, {sums['unknown']} unknown)"
    )


def as_json(found: dict[str, list[RunConfig]]) -> str:
    """The runs of studies and their cost for a program."""
    studies = {}
    for name, runs in found.items():
        costs = {run: expect(run) for run in runs}
        each = [{"run_id": run_id(run), **to_dict(run), "expected": vars(costs[run])} for run in runs]
        studies[name] = {"total": total(costs.values()), "runs": each}
    return json.dumps(studies, indent=1)
