"""Make short runs that tell most about a long one: after them its forecast is least uncertain."""

from __future__ import annotations

import itertools
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
CORE_OPERATIONS_PER_S = 1.1e10  # multiply-adds of ResNet50 on a core of an AMD EPYC
START_S = 15.0  # of a run, before and after its training
ONCE_S = 1.0  # by which the model may be wrong however long a training is: its first steps
BATCHES = (6, 12, 24, 48, 96)  # of a device in an epoch
PART_OF_BATCH = 4  # of the local batch, for a second size
PASSES_OF_A_SAMPLE = 3  # forward and backward
# Before the first probe: time of a sample where nothing tells it, its relative spread, and that on
# cores, where the size of the network tells; samples of data of unknown size.
UNKNOWN_SAMPLE_S, SPREAD_UNKNOWN, SPREAD_OF_CORES, UNKNOWN_SAMPLES = 0.01, 2.0, 0.5, 200


@dataclass(frozen=True)
class Probe:
    """A run, what it takes by what is known before it, and the spread of the forecast after it."""

    run: RunConfig
    seconds: float
    spread_after: float


def target(workload: str, site: Site, parameters: dict) -> RunConfig:
    """Make the run to forecast: one of the preset, with parameters of one's own."""
    is_here = site.scheduler == "local"
    preset = {"preset": "smoke" if is_here else "paper", "system": site.name}
    preset["device"] = "cpu" if is_here and not machine.gpus() else "gpu"
    return config.make(workload, **preset | parameters)


def candidates(run: RunConfig, site: Site) -> list[RunConfig]:
    """Make short versions of a run on one node: devices, batch sizes, small and large epochs."""
    most_samples = run.epoch().training_samples or UNKNOWN_SAMPLES
    plain = config.to_dict(run) | {"accumulation_steps": 1, "epochs": 1, "save_weights": False}
    plain["global_batch_size"] = None
    sizes = {run.local_batch_size, max(1, run.local_batch_size // PART_OF_BATCH)}
    devices = {1, min(run.devices, site.devices_per_node)}
    found = []
    for number, size, batches in itertools.product(sorted(devices), sorted(sizes), BATCHES):
        changed = {"devices": number, "local_batch_size": size}
        of_a_step = size * number
        if "training_samples" in plain:
            samples = min(batches, most_samples // of_a_step) * of_a_step
            changed |= {"training_samples": samples, "validation_samples": of_a_step}
        else:  # its data cannot be cut: it runs longer instead
            changed["epochs"] = batches // BATCHES[0]
        found.append(config.make(**plain | changed))
    return list(dict.fromkeys(found))


def before(run: RunConfig, site: Site) -> Fit:
    """Say what is known before the first probe: little.

    On cores the size of the network tells the order of magnitude.
    """
    sample_s, spread = UNKNOWN_SAMPLE_S, SPREAD_UNKNOWN
    if not site.gpu and (operations := run.epoch().operations):
        per_s = CORE_OPERATIONS_PER_S * run.threads_per_device
        sample_s, spread = PASSES_OF_A_SAMPLE * operations / per_s, SPREAD_OF_CORES
    samples = (UNKNOWN_SAMPLES, UNKNOWN_SAMPLES // 10)
    taken = [Taken(config.to_dict(run), sample_s)]
    fit = fits.unfitted(Runs(run.workload, site, taken, samples=samples))
    fit.point[0], fit.covariance[0, 0] = np.log(sample_s), spread**2
    return fit


def choose(fit: Fit, run: RunConfig, minutes: float, done=(), most: int = MOST) -> list[Probe]:
    """Choose the next probes: each leaves the forecast of ``run`` least uncertain.

    minutes: for all; the first takes half of them at most. Each fits in though it takes a
    standard deviation more than expected. done: probes that were made.
    """
    precision, made, left_s, probes = np.linalg.inv(fit.covariance), list(done), 60 * minutes, []
    short = candidates(run, fit.runs.site)
    work, long = runs.works(fit.runs, short), runs.works(fit.runs, [run])
    times_s = np.exp(fits.outcomes(fit.names, fit.point, work)[0])
    of_data = fits.jacobian(fit.names, fit.point, work)[0]
    of_data /= np.hypot(fit.errors[0], ONCE_S / times_s)[:, None]
    after = of_data[:, :, None] * of_data[:, None, :]  # what each adds to the precision
    while len(made) < most:
        longest_s = START_S + times_s * np.exp(_spreads(fit, precision, work))
        able = np.flatnonzero(longest_s <= left_s / max(FEWEST - len(made), 1))
        able = [index for index in able if short[index] not in made]
        if not able:
            break
        spreads = [_spreads(fit, precision + after[index], long)[0] for index in able]
        best = able[np.argmin(spreads)]
        made.append(short[best])
        probes.append(Probe(short[best], START_S + float(times_s[best]), float(min(spreads))))
        precision, left_s = precision + after[best], left_s - probes[-1].seconds
    if len(made) < FEWEST:
        raise ValueError(f"minutes: {minutes:g} are too few for two probes; give more")
    return probes


def _spreads(fit: Fit, precision: np.ndarray, work: np.recarray) -> np.ndarray:
    """Find the relative deviations of forecast times, without the model's own error."""
    slopes = fits.jacobian(fit.names, fit.point, work)[0]
    return np.sqrt(((slopes @ np.linalg.inv(precision)) * slopes).sum(axis=1))


def make_here(
    fit: Fit, run: RunConfig, runs_dir: Path, minutes: float, most: int = MOST
) -> tuple[list[Probe], Fit]:
    """Make probes on this machine, each chosen by what those before it have told, and fit them.

    Raises ValueError where one fails, or where the minutes were too few for two.
    """
    begun, probes = time.monotonic(), []
    while True:
        left_min = minutes - (time.monotonic() - begun) / 60
        chosen = choose(fit, run, left_min, [probe.run for probe in probes], most)
        if not chosen:
            return probes, fit
        if failed := local.run_study([chosen[0].run], runs_dir.absolute()):
            raise ValueError(f"probe: {failed[0]}")
        probes.append(chosen[0])
        names = {config.run_id(probe.run) for probe in probes}
        found = [of for of in runs.valid(runs_dir, fit.runs.site) if of["run_id"] in names]
        fit = fits.make(runs.own(found, run.workload, fit.runs.site))


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
    own = f"--workload {workload} --system {site.file} --runs-dir runs --out build/fit.json"
    return f"energynn submit {study} --system {site.file}\nenergynn forecast fit {own}"


def as_json(probes: list[Probe]) -> list[dict]:
    """Return the probes for a program, in the order in which they tell most."""
    names, rows = ("devices", "local_batch_size", "training_samples", "epochs"), []
    for probe in probes:
        row = {name: getattr(probe.run, name, None) for name in names}
        row |= {"run_id": config.run_id(probe.run), "expected_s": probe.seconds}
        rows.append(row | {"relative_spread_after": probe.spread_after})
    return rows


def text(probes: list[Probe]) -> str:
    """Show the probes to people, with what each adds."""
    chosen = pd.DataFrame(as_json(probes)).drop(columns="run_id").round(3)
    return chosen.to_string(index=False)
