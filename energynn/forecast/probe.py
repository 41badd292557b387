"""Make short runs that tell of a long one: few batches and many, a small local batch, one
device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from energynn import config
from energynn.cluster import local
from energynn.cluster.systems import Site
from energynn.config import RunConfig
from energynn.files import REPOSITORY
from energynn.forecast import fit as fits
from energynn.forecast import runs
from energynn.forecast.fit import Fit
from energynn.forecast.runs import Runs, Taken
from energynn.measure import machine

FEWEST, MOST = 2, 4  # probes
START_S = 15.0  # of a run, before and after its training
BATCHES = (6, 12, 24, 48, 96)  # of a device in an epoch
PART_OF_BATCH = 4  # of the local batch, for a second size
# Before the first probe: time of a sample, and samples of data of unknown size.
UNKNOWN_SAMPLE_S, UNKNOWN_SAMPLES = 0.01, 200


@dataclass(frozen=True)
class Probe:
    """A short run, and what it takes by what is known before it."""

    run: RunConfig
    seconds: float


def target(workload: str, site: Site, parameters: dict) -> RunConfig:
    """Make the run to forecast: one of the preset, with parameters of one's own."""
    is_here = site.scheduler == "local"
    preset = {"preset": "smoke" if is_here else "paper", "system": site.name}
    preset["device"] = "cpu" if is_here and not machine.gpus() else "gpu"
    return config.make(workload, **preset | parameters)


def shorter(run: RunConfig, site: Site, number: int) -> list[RunConfig]:
    """Make versions of the probe of this number, from few to many batches, on one node.

    0: as few batches as there are; 1: more of them; 2: with a small local batch; 3: on one device.
    """
    plain = config.to_dict(run) | {
        "accumulation_steps": 1,
        "epochs": 1,
        "save_weights": False,
    }
    size = (
        max(1, run.local_batch_size // PART_OF_BATCH)
        if number == 2
        else run.local_batch_size
    )
    devices = 1 if number == 3 else min(run.devices, site.devices_per_node)
    plain |= {"devices": devices, "local_batch_size": size, "global_batch_size": None}
    step = size * devices
    most = (run.epoch().training_samples or UNKNOWN_SAMPLES) // step
    found = []
    for batches in BATCHES if number else BATCHES[:1]:
        if "training_samples" in plain:
            changed = {
                "training_samples": min(batches, most) * step,
                "validation_samples": step,
            }
        else:  # its data cannot be cut: it runs longer instead
            changed = {"epochs": batches // BATCHES[0]}
        found.append(config.make(**plain | changed))
    return found


def before(run: RunConfig, site: Site) -> Fit:
    """Say what is known before the first probe: little."""
    samples = (UNKNOWN_SAMPLES, UNKNOWN_SAMPLES // 10)
    taken = [Taken(config.to_dict(run), 1.0)]
    fit = fits.unfitted(Runs(run.workload, site, taken, samples=samples))
    fit.point[0] = np.log(UNKNOWN_SAMPLE_S)
    return fit


def following(
    fit: Fit, run: RunConfig, left_s: float, done: list[Probe]
) -> Probe | None:
    """Choose the probe after others: the longest that takes at most half of the time left."""
    if len(done) == MOST:
        return None
    made = [probe.run for probe in done]
    new = [
        short for short in shorter(run, fit.runs.site, len(done)) if short not in made
    ]
    if not new:
        return None
    times_s = np.exp(fits.outcomes(fit.names, fit.point, runs.works(fit.runs, new))[0])
    expected = map(Probe, new, (START_S + times_s).tolist())
    able = [probe for probe in expected if probe.seconds <= left_s / 2]
    return max(able, key=lambda probe: probe.seconds, default=None)


def planned(fit: Fit, run: RunConfig, minutes: float) -> list[Probe]:
    """Choose all probes by what is known before them; ValueError for too few minutes."""
    left_s, probes = 60 * minutes, []
    while probe := following(fit, run, left_s, probes):
        probes.append(probe)
        left_s -= probe.seconds
    if len(probes) < FEWEST:
        raise ValueError(f"minutes: {minutes:g} are too few for two probes; give more")
    return probes


def make_here(
    fit: Fit, run: RunConfig, runs_dir: Path, minutes: float
) -> tuple[list[Probe], Fit]:
    """Make probes on this machine, each as long as those before it allow, and fit them.

    Raises ValueError where one fails.
    """
    ends_s, probes = time.monotonic() + 60 * minutes, []
    while probe := following(fit, run, ends_s - time.monotonic(), probes):
        if failed := local.run_study([probe.run], runs_dir.absolute()):
            raise ValueError(f"probe: {failed[0]}")
        probes.append(probe)
        names = {config.run_id(made.run) for made in probes}
        found = [
            of for of in runs.valid(runs_dir, fit.runs.site) if of["run_id"] in names
        ]
        fit = fits.make(runs.own(found, run.workload, fit.runs.site))
    return probes, fit


def hand_over(probes: list[Probe], site: Site) -> str:
    """Write the probes as a study of one's own; returns the commands that make and fit them."""
    workload = probes[0].run.workload
    study = REPOSITORY / "build" / f"probe_{workload}_{site.name}.py"
    plain = [config.to_dict(probe.run) for probe in probes]
    study.parent.mkdir(exist_ok=True)
    study.write_text(
        "from energynn import config\n\n\ndef study(system):\n"
        f"    runs = {plain!r}\n"
        "    return [config.from_dict(run | dict(system=system)) for run in runs]\n"
    )
    return (
        f"energynn submit {study} --system {site.file}\n"
        f"energynn forecast fit --workload {workload} --system {site.file} --runs-dir runs "
        "--out build/fit.json"
    )


def as_json(probes: list[Probe]) -> list[dict]:
    """Return the probes for a program, in the order in which they are made."""
    names, rows = ("devices", "local_batch_size", "training_samples", "epochs"), []
    for probe in probes:
        row = {name: getattr(probe.run, name, None) for name in names}
        rows.append(
            row | {"run_id": config.run_id(probe.run), "expected_s": probe.seconds}
        )
    return rows


def text(probes: list[Probe]) -> str:
    """Show the probes to people."""
    return (
        pd.DataFrame(as_json(probes))
        .drop(columns="run_id")
        .round()
        .to_string(index=False)
    )
