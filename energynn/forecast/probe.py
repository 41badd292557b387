"""Short runs that tell most about a long one: after them its forecast is least uncertain."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from energynn import config, studies
from energynn.cluster import local
from energynn.cluster.systems import Site
from energynn.config import RunConfig
from energynn.files import REPOSITORY
from energynn.forecast import fit as fits
from energynn.forecast import runs
from energynn.forecast.fit import Fit
from energynn.forecast.model import Work
from energynn.forecast.runs import Runs
from energynn.measure import machine

FEWEST = 2  # probes
CORE_OPERATIONS_PER_S = 1.1e10  # multiply-adds of ResNet50 on a core of an AMD EPYC
START_S = 15.0  # of a run, before and after its training
ONCE_S = 1.0  # by which the model may be wrong however long a training is: its first steps
BATCHES = (6, 12, 24, 48, 96)  # of a device in an epoch
PART_OF_BATCH = 4  # of a local batch, for a second size where the runs to forecast have one only
PASSES_OF_A_SAMPLE = 3  # forward and backward
# Before the first probe: time of a sample where nothing tells it, its relative spread, and that on
# cores, where the size of the network tells; samples of data of unknown size.
UNKNOWN_SAMPLE_S, SPREAD_UNKNOWN, SPREAD_OF_CORES, UNKNOWN_SAMPLES = 0.01, 2.0, 0.5, 200


@dataclass(frozen=True)
class Probe:
    """A run, what it takes by what is known before it, and the spread of the forecasts after it."""

    run: RunConfig
    seconds: float
    spread_after: float


def targets(workload: str, site: Site, named: list[str], parameters: dict) -> list[RunConfig]:
    """The runs to forecast, repeats once: of the named studies, else one of the preset.

    Raises ValueError where the studies have none of the workload. Only a first training counts:
    fine-tuning needs its weights.
    """
    found = itertools.chain(*studies.find(named, site.name).values()) if named else []
    found = [run for run in found if run.workload == workload]
    found = [run for run in found if not getattr(run, "initial_run", "")]
    if named and not found:
        raise ValueError(f"study: {', '.join(named)} has no run of {workload}; name another")
    if not found:
        is_here = site.scheduler == "local"
        preset = {"preset": "smoke" if is_here else "paper", "system": site.name}
        preset["device"] = "cpu" if is_here and not machine.gpus() else "gpu"
        found = [config.make(workload, **preset | parameters)]
    return list(dict.fromkeys(map(runs.without_repeats, found)))


def candidates(asked: list[RunConfig], site: Site) -> list[RunConfig]:
    """Short versions of runs on one node: their devices and batch sizes, small and large epochs."""
    run = asked[0]
    most_samples = run.epoch().training_samples or UNKNOWN_SAMPLES
    plain = config.to_dict(run) | {"accumulation_steps": 1, "epochs": 1, "save_weights": False}
    plain["global_batch_size"] = None
    sizes = {one.local_batch_size for one in asked}
    if len(sizes) == 1:
        sizes.add(max(1, run.local_batch_size // PART_OF_BATCH))
    devices = {1} | {min(one.devices, site.devices_per_node) for one in asked}
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


def before(asked: list[RunConfig], site: Site, like: Runs | None = None) -> Fit:
    """What is known before the first probe: by the same workload on another system, or little.

    On cores the size of the network tells the order of magnitude.
    """
    run = asked[0]
    sample_s, spread = UNKNOWN_SAMPLE_S, SPREAD_UNKNOWN
    if not site.gpu and (operations := run.epoch().operations):
        per_s = CORE_OPERATIONS_PER_S * run.threads_per_device
        sample_s, spread = PASSES_OF_A_SAMPLE * operations / per_s, SPREAD_OF_CORES
    samples = (UNKNOWN_SAMPLES, UNKNOWN_SAMPLES // 10)
    unknown = [config.to_dict(run)], [sample_s], [None], [1], [""]
    guess = Runs(run.workload, site, *unknown, samples=samples, like=like)
    fit = fits.unfitted(guess)
    if like is None:
        fit.point[0], fit.covariance[0, 0] = np.log(sample_s), spread**2
    return fit


def choose(
    fit: Fit, asked: list[RunConfig], minutes: float, most: int, done=(), start_s: float = START_S
) -> list[Probe]:
    """The next probes, one after the other: each leaves the forecasts of ``asked`` least uncertain.

    minutes: for all, though one takes a standard deviation more than expected; the first, of which
    least is known, takes its share of them if one can. done: probes that were made.
    """
    precision, made, seconds, probes = np.linalg.inv(fit.covariance), list(done), 60 * minutes, []
    short = candidates(asked, fit.runs.site)
    work, target = runs.works(fit.runs, short), runs.works(fit.runs, asked)
    times_s = np.exp(fits.outcomes(fit.names, fit.point, work)[0])
    of_data = fits.jacobian(fit.names, fit.point, work)[0]
    of_data /= np.hypot(fit.errors[0], ONCE_S / times_s)[:, None]

    def after(index: int) -> np.ndarray:
        return precision + np.outer(of_data[index], of_data[index])

    def spread(index: int) -> float:
        return float(_spreads(fit, after(index), target).mean())

    while len(made) < most:
        longest_s = start_s + times_s * np.exp(_spreads(fit, precision, work))
        new = [index for index, run in enumerate(short) if run not in made]
        able = [index for index in new if longest_s[index] <= seconds]
        in_share = [index for index in able if made or longest_s[index] <= seconds / most]
        if not able:
            break
        best = min(in_share or able, key=spread)
        probes.append(Probe(short[best], start_s + float(times_s[best]), spread(best)))
        made.append(short[best])
        precision, seconds = after(best), seconds - probes[-1].seconds
    if len(made) < FEWEST:
        raise ValueError(f"minutes: {minutes:g} are too few for two probes; give more")
    return probes


def _spreads(fit: Fit, precision: np.ndarray, work: Work) -> np.ndarray:
    """Relative standard deviations of forecast times, without the model's own error."""
    slopes = fits.jacobian(fit.names, fit.point, work)[0]
    return np.sqrt(((slopes @ np.linalg.inv(precision)) * slopes).sum(axis=1))


def make_here(
    fit: Fit, asked: list[RunConfig], runs_dir: Path, minutes: float, most: int
) -> tuple[list[Probe], Fit]:
    """Make probes on this machine, each chosen by what those before it have told, and fit them.

    Raises ValueError where one fails, or where the minutes were too few for two.
    """
    begun, start_s, probes, names = time.monotonic(), START_S, [], []
    while True:
        left_min = minutes - (time.monotonic() - begun) / 60
        done = [probe.run for probe in probes]
        chosen = choose(fit, asked, left_min, most, done, start_s)
        if not chosen:
            return probes, fit
        at = time.monotonic()
        if failed := local.run_study([chosen[0].run], runs_dir.absolute()):
            raise ValueError(f"probe: {failed[0]}")
        probes.append(chosen[0])
        names.append(config.run_id(chosen[0].run))
        found = {of["run_id"]: of for of in runs.valid(runs_dir, fit.runs.site)}
        of_probes = [found[name] for name in names]
        fit = fits.make(runs.own(of_probes, asked[0].workload, fit.runs.site, like=fit.runs.like))
        start_s = max(0.0, time.monotonic() - at - of_probes[-1]["training_time_s"])


def hand_over(probes: list[Probe], site: Site) -> str:
    """Write the probes as a study of one's own; returns the commands that make and fit them."""
    run = probes[0].run
    study = REPOSITORY / "build" / f"probe_{run.workload}_{site.name}.py"
    plain = [config.to_dict(probe.run) for probe in probes]
    lines = ["from energynn import config", "", "", "def study(system):"]
    lines.append(f"    runs = {plain!r}")
    lines.append("    return [config.from_dict(run | dict(system=system)) for run in runs]")
    study.parent.mkdir(exist_ok=True)
    study.write_text("\n".join([*lines, ""]))
    own = f"--workload {run.workload} --system {site.file} --runs-dir runs"
    commands = f"submit {study} --system {site.file}", f"forecast fit {own} --out build/fit.json"
    return "\n".join(f"energynn {command}" for command in commands)


def as_json(probes: list[Probe]) -> list[dict]:
    """The probes for a program, in the order in which they tell most."""
    names, rows = ("devices", "local_batch_size", "training_samples", "epochs"), []
    for probe in probes:
        row = {name: getattr(probe.run, name, None) for name in names}
        row |= {"run_id": config.run_id(probe.run), "expected_s": probe.seconds}
        rows.append(row | {"relative_spread_after": probe.spread_after})
    return rows


def text(probes: list[Probe]) -> str:
    """The probes with what each adds."""
    chosen = pd.DataFrame(as_json(probes)).drop(columns="run_id").round(3)
    return f"probes, and the spread of the forecasts after each\n{chosen.to_string(index=False)}"
