"""Worlds whose truth is known: systems, loaders, parameters by chance; runs on one node, and
what more nodes take.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

from energynn.experiment import config
from energynn.experiment.systems import Site
from energynn.forecast import model
from energynn.forecast.runs import Runs, Taken

# parameters like those of the study's cluster
CLUSTER = dict(tau=1e-3, evaluation=1.0, t_start=0.5, fill=3.0, t_update=3e-3)
CLUSTER |= dict(efficiency=0.85, kappa=0.05, kappa_nodes=0.0)
CLUSTER |= dict(host=220.0, fed=190.0, idle=60.0, image_J=0.15)
CLUSTER |= dict.fromkeys(model.TERMS, 0.0)
IMAGES = 5004  # of a device in an epoch, and sixteen times as many


@dataclass(frozen=True)
class World:
    """What was seen on one node, and what is asked of several; the scatter of a run is part of
    the truth.
    """

    seen: Runs
    asked: Runs


# What hides behind which least and greatest part of the time of samples: a loader is a little
# slower than the GPU, or much; an all-reduce runs beside two thirds of the computing, or all.
HIDDEN = {
    "nothing": ((), 0.0, 0.0),
    "in a pipeline": (("updates", "allreduce"), 0.0, 0.1),
    "behind the loader": (("updates", "allreduce"), 0.1, 0.7),
    "behind computing": (("allreduce",), 0.4, 0.67),
    "wholly": (("allreduce",), 99.0, 99.0),
}


def draw(seed: int, hidden: str) -> World:
    """A world by chance, with what its pipelines hide, one of HIDDEN."""
    chance = np.random.default_rng(seed)
    per_node, workers = int(chance.choice([4, 8])), int(chance.choice([2, 4, 8]))
    link = float(chance.choice([25, 12.5, 5]))
    node_W, idle_W = chance.uniform(150, 400), chance.uniform(40, 90)
    site = Site(
        name="world",
        file="",
        scheduler="slurm",
        devices_per_node=per_node,
        link_GB_per_s=link,
        gpu_link_GB_per_s=float(chance.choice([50, 300])),
        cpu_W=0.9 * node_W,
        ram_W=0.1 * node_W,
        gpu_idle_W=idle_W,
    )
    values = {
        "evaluation": 1.0,
        "kappa_nodes": 0.0,
        "tau": np.exp(chance.uniform(np.log(3e-4), np.log(5e-3))),
        "t_start": 0.5 * np.exp(0.7 * chance.standard_normal()),
        "fill": (workers - 1) * np.exp(0.3 * chance.standard_normal()),
        "t_update": 3e-3 * np.exp(0.7 * chance.standard_normal()),
        "efficiency": 0.85 * np.exp(0.15 * chance.standard_normal()),
        "kappa": 0.05 * np.exp(0.7 * chance.standard_normal()),
        "host": node_W + chance.uniform(-90, 90),
        "fed": chance.uniform(120, 300),
        "idle": idle_W,
    }
    values |= dict.fromkeys(model.TERMS, 0.0)
    values["image_J"] = chance.uniform(20, 120) * values["tau"] * 2
    causes, least, greatest = HIDDEN[hidden]
    part = chance.uniform(least, greatest)

    def runs_of(configs) -> Runs:
        seen = taken("resnet50", site, configs, values)
        time_s = seen.time_s
        times = model.times_s(values, seen.work)
        beside = sum((times[cause] for cause in causes), 0.0)
        time_s = time_s - np.minimum(beside, part * times["images"])
        by_chance = np.exp(0.015 * chance.standard_normal((2, len(configs))))
        return with_results(seen, time_s * by_chance[0], seen.power_W * by_chance[1])

    seen = runs_of(_configs([n for n in (1, 2, 4, 8) if n <= per_node], workers))
    return World(
        seen, runs_of(_configs([n for n in (8, 16, 64, 256) if n > per_node], workers))
    )


def taken(workload: str, site: Site, configs: list, values: dict, **more) -> Runs:
    """Say by the model what runs take, with parameters that are given; made several times each."""
    seen = Runs(
        workload,
        site,
        [Taken(config.asdict(run), 1.0, repeats=5) for run in configs],
        **more,
    )
    return with_results(seen, *model.predict(values, seen.work)[:2])


def unlike_the_model(seen: Runs, scatter: np.ndarray | float = 1.0) -> Runs:
    """Give the same runs times that each update makes shorter, which the model cannot say."""
    work = seen.work
    samples = work.trained * (1e-3 + 2e-4 * np.log2(work.nodes))
    time_s = work.epochs * (samples - 1.5e-2 * work.updates + 9)
    return with_results(seen, time_s * scatter, seen.power_W)


def with_results(seen: Runs, times_s, powers_W) -> Runs:
    """Give the same runs other times and powers."""
    results = zip(seen.taken, map(float, times_s), powers_W, strict=True)
    taken = [
        msgspec.structs.replace(run, time_s=s, power_W=W and float(W))
        for run, s, W in results
    ]
    return msgspec.structs.replace(seen, taken=taken)


def _configs(devices: list[int], workers: int) -> list:
    made = []
    for n in devices:
        for images, local_size in ((IMAGES, 256), (16 * IMAGES, max(16, 256 // n))):
            sizes = dict(
                training_samples=images * n,
                validation_samples=195 * n,
                local_batch_size=local_size,
            )
            make = dict(preset="paper", devices=n, loader_workers=workers)
            made.append(config.make("resnet50", **make, **sizes))
    return made
