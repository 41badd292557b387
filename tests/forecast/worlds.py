"""Worlds whose truth is known: runs that take what the model says, or what they are given."""

import msgspec
import numpy as np

from energynn.experiment import config
from energynn.experiment.systems import Site
from energynn.forecast import model
from energynn.forecast.runs import Observation, ObservedRuns

# parameters like those of the study's cluster
CLUSTER = dict(tau=1e-3, evaluation=1.0, t_start=0.5, fill=3.0, t_update=3e-3)
CLUSTER |= dict(efficiency=0.85, kappa=0.05, kappa_nodes=0.0)
CLUSTER |= dict(host=220.0, fed=190.0, idle=60.0, image_J=0.15)
CLUSTER |= dict.fromkeys(model.TERMS, 0.0)


def taken(
    workload: str, site: Site, configs: list, values: dict, **more
) -> ObservedRuns:
    """Say by the model what runs take, with parameters that are given; made several times each."""
    seen = ObservedRuns(
        workload,
        site,
        [Observation(config.asdict(run), 1.0, repeats=5) for run in configs],
        **more,
    )
    return with_results(seen, *model.predict_times_and_powers(values, seen.work)[:2])


def unlike_the_model(
    seen: ObservedRuns, scatter: np.ndarray | float = 1.0
) -> ObservedRuns:
    """Give the same runs times that each update makes shorter, which the model cannot say."""
    work = seen.work
    samples = work["trained"] * (1e-3 + 2e-4 * np.log2(work["nodes"]))
    time_s = work["epochs"] * (samples - 1.5e-2 * work["updates"] + 9)
    return with_results(seen, time_s * scatter, seen.power_W)


def together(seen: ObservedRuns, more: ObservedRuns) -> ObservedRuns:
    return msgspec.structs.replace(seen, taken=[*seen.taken, *more.taken])


def with_results(seen: ObservedRuns, times_s, powers_W) -> ObservedRuns:
    """Give the same runs other times and powers."""
    results = zip(seen.taken, map(float, times_s), powers_W, strict=True)
    taken = [
        msgspec.structs.replace(run, time_s=s, power_W=W and float(W))
        for run, s, W in results
    ]
    return msgspec.structs.replace(seen, taken=taken)
