"""Invented clusters whose truth is known, each with something that the model does not say, and how
many intervals hold that truth: `make coverage` prints the table of docs/forecast.md.

A cluster's parameters are drawn by chance. Its runs on one node, or on one and two, are fitted; it
is asked for more nodes at the fitted local batch size (L) and at one global batch size (G).
"""

import itertools
import sys
from dataclasses import dataclass
from datetime import date

import numpy as np
import pandas as pd

from energynn.experiment import config
from energynn.experiment.systems import Site
from energynn.forecast import fits, model
from energynn.forecast.runs import ObservedRuns
from energynn.measure.machine import git_state
from tests.forecast import worlds

NOISE = 0.015  # of a run's time and power
GLOBAL_SIZE = 512


@dataclass
class Truth:
    """What a cluster's runs take, (runs,) each, before the scatter: causes of time, powers."""

    work: np.ndarray
    values: dict
    times: dict
    waits_s: np.ndarray  # of the time, that in which no kernel runs
    node_W: np.ndarray
    factor: np.ndarray


def cluster(seed: int) -> tuple[Site, dict, int, int, int]:
    """Draw a system, its parameters, loader workers, samples of an epoch, and epochs."""
    chance = np.random.default_rng(seed)
    workers = int(chance.choice([2, 4, 8]))
    node_W, idle_W = chance.uniform(150, 400), chance.uniform(40, 90)
    site = Site(
        name="world",
        file="",
        scheduler="slurm",
        gpu="A100",
        devices_per_node=int(chance.choice([4, 8])),
        link_GB_per_s=float(chance.choice([25, 12.5, 5])),
        gpu_link_GB_per_s=float(chance.choice([50, 300])),
        cpu_W=0.9 * node_W,
        ram_W=0.1 * node_W,
        gpu_idle_W=idle_W,
    )
    scatter = chance.standard_normal
    values = worlds.CLUSTER | {
        "tau": np.exp(chance.uniform(np.log(3e-4), np.log(5e-3))),
        "t_start": 0.5 * np.exp(0.7 * scatter()),
        "fill": (workers - 1) * np.exp(0.3 * scatter()),
        "t_update": 3e-3 * np.exp(0.7 * scatter()),
        "efficiency": 0.85 * np.exp(0.15 * scatter()),
        "kappa": 0.05 * np.exp(0.7 * scatter()),
        "host": node_W + chance.uniform(-90, 90),
        "fed": chance.uniform(120, 300),
        "idle": idle_W,
    }
    values["image_J"] = chance.uniform(20, 120) * values["tau"] * 2
    samples = int(np.exp(chance.uniform(np.log(1e5), np.log(2e6))))
    return site, values, workers, samples, int(chance.choice([30, 60, 90]))


def nothing(truth: Truth, chance) -> None:
    """What the model says is all there is."""


def hide(truth: Truth, causes: tuple, part: float) -> None:
    beside = sum((truth.times[cause] for cause in causes), 0.0)
    truth.times["hidden"] = -np.minimum(beside, part * truth.times["images"])


def pipeline(truth: Truth, chance) -> None:
    """Updates and all-reduces behind a loader up to a tenth slower than the GPU."""
    hide(truth, ("updates", "allreduce"), chance.uniform(0, 0.1))


def slow_loader(truth: Truth, chance) -> None:
    """The same behind a loader much slower, for which the GPU waits."""
    part = chance.uniform(0.1, 0.7)
    hide(truth, ("updates", "allreduce"), part)
    truth.waits_s += part * truth.times["images"] + truth.times["hidden"]


def overlap(truth: Truth, chance) -> None:
    """The all-reduce behind 40 to 67 % of the computing."""
    hide(truth, ("allreduce",), chance.uniform(0.4, 0.67))


def wholly(truth: Truth, chance) -> None:
    """All of the all-reduce is hidden."""
    hide(truth, ("allreduce",), 99.0)


def epochs_grow(truth: Truth, chance) -> None:
    """Each epoch costs so many seconds more on each further node."""
    growth_s = np.exp(chance.uniform(np.log(0.1), np.log(3)))
    truth.times["grown"] = truth.work["epochs"] * growth_s * (truth.work["nodes"] - 1)


def starts_grow(truth: Truth, chance) -> None:
    """Each pass starts later with each device."""
    growth_s = np.exp(chance.uniform(np.log(0.003), np.log(0.05)))
    passes = truth.work["epochs"] * truth.work["passes"]
    truth.times["grown"] = passes * growth_s * truth.work["devices"]


def every_rank_evaluates(truth: Truth, chance) -> None:
    """Every rank evaluates all validation data."""
    work = truth.work
    more = work["epochs"] * work["validated"] * (work["devices"] - 1)
    truth.times["grown"] = more * truth.values["evaluation"] * truth.values["tau"]


def storage_limit(truth: Truth, chance) -> None:
    """A storage that gives so many samples a second to all and no more."""
    devices_fed = np.exp(chance.uniform(np.log(10), np.log(150)))
    slower = truth.times["contention"] / truth.times["images"]
    longest = truth.times["images"] * truth.work["devices"] / devices_fed
    own = truth.times["images"] * (1 + slower)
    truth.times["stored"] = np.maximum(longest - own, 0)
    truth.waits_s += truth.times["stored"]


def slow_uplink(truth: Truth, chance) -> None:
    """Between groups of eight nodes the link is slower, by up to ten times."""
    slower = chance.choice([2, 4, 10])
    truth.times["allreduce"] *= np.where(truth.work["nodes"] > 8, slower, 1)


def slow_link(truth: Truth, chance) -> None:
    """The link between nodes reaches a part of what its file says."""
    slower = chance.uniform(2, 8)
    truth.times["allreduce"] *= np.where(truth.work["nodes"] > 1, slower, 1)


def congestion(truth: Truth, chance) -> None:
    """The all-reduce takes longer with each doubling of nodes."""
    growth = chance.uniform(0.1, 0.5)
    truth.times["allreduce"] *= 1 + growth * np.log2(truth.work["nodes"])


def latency(truth: Truth, chance) -> None:
    """Each step of a ring, 2 (n - 1) in each of ten buckets, costs microseconds."""
    step_s = chance.uniform(2e-6, 2e-5)
    updates = truth.work["epochs"] * truth.work["updates"]
    truth.times["latency"] = updates * 10 * step_s * 2 * (truth.work["devices"] - 1)


def page_cache(truth: Truth, chance) -> None:
    """From four nodes on the data fit into the nodes' memory, and samples come faster."""
    faster = chance.uniform(0.1, 0.3)
    truth.times["cached"] = -faster * truth.times["images"] * (truth.work["nodes"] >= 4)


def step_floor(truth: Truth, chance) -> None:
    """A GPU never takes less than so many ms for a step, however small its batch."""
    work = truth.work
    tau = truth.values["tau"]
    floor_s = tau * np.exp(chance.uniform(np.log(8), np.log(64)))
    trained = work["epochs"] * work["trained"] * tau
    truth.times["floor"] = np.maximum(
        work["epochs"] * work["updates"] * floor_s - trained, 0
    )


def slow_nodes(truth: Truth, chance) -> None:
    """Every eighth node is slower, and all wait for it."""
    slower = chance.uniform(0.05, 0.2)
    truth.factor *= np.where(truth.work["nodes"] >= 8, 1 + slower, 1)


def neighbours(truth: Truth, chance) -> None:
    """Some runs on several nodes are disturbed by others' jobs."""
    is_disturbed = chance.random(len(truth.work)) < 0.15
    truth.factor *= np.where(is_disturbed & (truth.work["nodes"] > 1), 1.2, 1)


def outlier(truth: Truth, chance) -> None:
    """One of the runs on one node took 1.25 to 2 times too long."""
    on_one = np.flatnonzero(truth.work["nodes"] == 1)
    if len(on_one):
        truth.factor[chance.choice(on_one)] *= chance.uniform(1.25, 2)


def scatter(truth: Truth, chance) -> None:
    """Runs scatter by 5 %."""
    truth.factor *= np.exp(0.05 * chance.standard_normal(len(truth.work)))


def idle_allreduce(truth: Truth, chance) -> None:
    """A GPU in an all-reduce draws as if idle."""
    truth.waits_s += truth.times["allreduce"]


def light_host(truth: Truth, chance) -> None:
    """A workstation's host, and its file says nothing of its powers."""
    truth.node_W[:] = chance.uniform(8, 60)


def busy_host(truth: Truth, chance) -> None:
    """CPUs draw more with each device in use."""
    truth.node_W += chance.uniform(5, 25) * truth.work["devices_of_node"]


GROUPS = {
    "nothing, or powers alone": [nothing, idle_allreduce, light_host, busy_host],
    "what hides": [pipeline, slow_loader, overlap, wholly],
    "what grows": [epochs_grow, starts_grow, every_rank_evaluates, storage_limit],
    "networks": [slow_uplink, slow_link, congestion, latency],
    "nodes": [page_cache, slow_nodes, neighbours],
    "runs that scatter, an odd one": [scatter, outlier],
    "least time of a step": [step_floor],
}
KINDS = sum(GROUPS.values(), [])
# What few runs on one or two nodes do not show, and no interval of a useful width holds.
NOT_COVERED = [epochs_grow, starts_grow, storage_limit, slow_link, congestion, latency]
NOT_COVERED += [step_floor, page_cache, slow_uplink]


def truth_of(kind, values: dict, seen: ObservedRuns, chance) -> ObservedRuns:
    """Give runs what they take in a cluster of a kind, with the scatter of a run."""
    work = seen.work
    times = model.times_by_cause_s(values, work)
    waits_s = times["starts"] + times["fill"]
    node_W = np.full(len(work), values["host"])
    truth = Truth(work, values, times, waits_s, node_W, np.ones(len(work)))
    kind(truth, chance)
    busy_s = sum(truth.times.values())
    power_W = values["idle"] + truth.node_W / work["devices_of_node"]
    power_W += (values["fed"] - values["idle"]) * (1 - truth.waits_s / busy_s)
    power_W += values["image_J"] * work["epochs"] * work["trained"] / busy_s
    noise = np.exp(NOISE * chance.standard_normal((2, len(work))))
    return worlds.with_results(
        seen, busy_s * truth.factor * noise[0], power_W * noise[1]
    )


def draw(kind, seed: int, nodes: int) -> dict[str, ObservedRuns]:
    """Draw a cluster: what is fitted, and what is asked at L and at G."""
    site, values, workers, samples, epochs = cluster(seed)
    chance = np.random.default_rng([seed, 1])
    per_node = site.devices_per_node

    def configs(sizes: list[tuple[int, int, int]]) -> list:
        make = dict(preset="paper", loader_workers=workers)
        make |= dict(validation_samples=max(256, samples // 25), epochs=epochs)
        return [
            config.make(
                "resnet50",
                devices=n,
                local_batch_size=size,
                training_samples=samples // less,
                **make,
            )
            for n, size, less in sizes
        ]

    few = [
        (1, 512, 1),
        (1, 128, 4),
        (2, 256, 1),
        (per_node, 512, 4),
        (per_node, 256, 1),
        (per_node, 128, 1),
    ]
    if nodes == 2:
        few += [(2 * per_node, 256, 1), (2 * per_node, 128, 1)]
    more = [n for n in (8, 16, 32, 64, 128, 256) if n > nodes * per_node]
    local = [(n, 256, 1) for n in more]
    of_all = [(n, GLOBAL_SIZE // n, 1) for n in more]
    sizes = few + local + of_all
    plain = worlds.taken("resnet50", site, configs(sizes), values)
    made = truth_of(kind, values, plain, chance)
    at = np.arange(len(sizes))
    ends = len(few), len(few) + len(local)
    return {
        "fitted": made.subset(at < ends[0]),
        "L": made.subset((ends[0] <= at) & (at < ends[1])),
        "G": made.subset(at >= ends[1]),
    }


def judged(kind, seed: int, nodes: int) -> pd.DataFrame:
    """Ask the fit of a cluster; a row for each value: its errors, its half-width in %."""
    world = draw(kind, seed, nodes)
    fit, rows = fits.fit_runs(world["fitted"]), []
    for batch in "LG":
        told = fits.forecast_errors(fit, world[batch])
        spans = told["high_percent"] - told["low_percent"]
        half = 50 * spans / (100 + told["value_percent"])
        rows.append(told.assign(batch=batch, seed=seed, nodes=nodes, half=half))
    return pd.concat(rows, ignore_index=True)


def coverage(number: int) -> tuple[pd.DataFrame, pd.Series]:
    """Ask so many clusters of each kind: values inside by group, and half-widths of plain ones, in
    %.
    """
    found = []
    for group, kinds in GROUPS.items():
        for kind in kinds:
            print(kind.__doc__, file=sys.stderr)
            for nodes, seed in itertools.product((1, 2), range(number)):
                told = judged(kind, seed, nodes)
                found.append(told.assign(group=group, kind=kind.__name__))
    every = pd.concat(found)
    every["quantity"] = every["quantity"].map({"time_s": "hours", "energy_J": "kWh"})
    columns = ["nodes", "batch", "quantity"]
    of_kind = every.groupby(["group", "kind", *columns], sort=False)["is_inside"].mean()
    inside = of_kind.unstack(columns)
    table = inside.groupby("group", sort=False).mean()
    table.loc["**all kinds**"] = inside.mean()
    plain = every[every["kind"] == nothing.__name__].groupby(columns, sort=False)
    return 100 * table, plain["half"].median()


if __name__ == "__main__":
    number = int(sys.argv[1])
    table, half = coverage(number)
    table.loc["half-width, nothing"] = half
    print(f"commit {git_state()[0][:8]}, {date.today()}, seeds 0 to {number - 1}\n")
    print("|", *(f"{n} {b} {q}" for n, b, q in table.columns), sep="|", end="|\n")
    print("|---" * (1 + len(table.columns)) + "|")
    for group, row in table.iterrows():
        print("", group, *(f"{value:.0f}" for value in row), sep="|", end="|\n")
