"""Short runs that tell most about a long one: after them its forecast is least uncertain, within the minutes."""

from __future__ import annotations

import argparse
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from energynn import config, records
from energynn.cluster import local, submit
from energynn.cluster.systems import Site
from energynn.config import RunConfig
from energynn.data import manifests
from energynn.files import DATA_MANIFESTS, REPOSITORY
from energynn.forecast import calibrate, calibration, fitting, predict, priors, runs
from energynn.forecast.calibrate import Fit
from energynn.forecast.calibration import Calibration
from energynn.forecast.model import Work
from energynn.measure.energy import SECOND_PER_HOUR

FEWEST, MOST = 2, 4  # probes
START_S = 15.0  # of a run, before and after its training
BATCHES = (6, 24, 96)  # of a device in an epoch
BATCH_SIZES = (1, 4)  # the run's local batch size, and this part of it
UNKNOWN_SAMPLE_S = 0.01  # of a sample, where nothing tells it: some order of magnitude
UNKNOWN_SAMPLES = 1000  # of a training set, where only the data tell its size
SECONDS_OF_A_MINUTE = 60.0


@dataclass(frozen=True)
class Probe:
    """A run that tells something: what it takes by what is known so far, and the spread of the forecast after it."""

    run: RunConfig
    seconds: float
    spread_after: float


def candidates(run: RunConfig, site: Site) -> list[RunConfig]:
    """Short versions of a run on one node: one device and a full node, small and large epochs, two batch sizes."""
    plain = config.to_dict(run) | {"accumulation_steps": 1, "epochs": 1, "save_weights": False}
    plain.pop("global_batch_size")
    found = []
    for devices in sorted({1, min(run.devices, site.devices_per_node)}):
        for part in BATCH_SIZES:
            size = max(1, run.local_batch_size // part)
            for batches in BATCHES:
                changed = plain | {"devices": devices, "local_batch_size": size}
                if "training_samples" in plain:
                    samples = min(batches, most_samples(run) // (size * devices)) * size * devices
                    changed |= {"training_samples": samples, "validation_samples": size * devices}
                else:  # its data cannot be cut: it runs longer instead
                    changed |= {"epochs": max(1, batches // BATCHES[0])}
                found.append(config.make(**changed))
    return list(dict.fromkeys(found))


def most_samples(run: RunConfig) -> int:
    """How many training samples there are, by the workload or its data's manifest, else UNKNOWN_SAMPLES."""
    of_workload = dataclasses.replace(run, training_samples=0).epoch().training_samples
    if of_workload or not manifests.checksum_file(run.dataset, DATA_MANIFESTS).is_file():
        return of_workload or UNKNOWN_SAMPLES
    return sum(name.startswith("train/") for name in manifests.checksums(run.dataset)) or UNKNOWN_SAMPLES


def before(run: RunConfig, site: Site, samples: tuple[int, int], known: Calibration | None) -> Fit:
    """What is known before the first probe: from the same workload's fit on another system, or next to nothing."""
    if known:
        given, covariance = priors.like(known.fit, known.site.name)
    else:
        work = runs.work(site, run, samples, runs.loading_workers(run))
        seconds = UNKNOWN_SAMPLE_S * work.epochs * (work.trained + work.evaluated)
        seen = calibrate.Observations(work, seconds, np.array([np.nan]), ("",))
        given = priors.make(seen, site, runs.loading_workers(run), storage=False)
        covariance = np.diag([prior.spread**2 for prior in given.values()])
    point = calibrate.to_point({name: prior.centre for name, prior in given.items()})
    errors, freedom = np.full(2, calibrate.ERROR), np.full(2, calibrate.ERROR_WEIGHT)
    return Fit(fitting.USUAL_READING, given, covariance, point, covariance, errors, freedom)


def spread(found: Fit, covariance: np.ndarray, work) -> float:
    """Relative standard deviation of a forecast's time, without the model's own error."""
    slopes = calibrate.jacobian(found.priors, found.point, work, found.reading)[0]
    return float(np.sqrt(np.einsum("ij,jl,il->i", slopes, covariance, slopes)).max())


@dataclass(frozen=True)
class Options:
    """The runs to choose from, what one GPU does in each, and in the run that they are to forecast."""

    runs: list[RunConfig]
    works: list[Work]
    target: Work


def options(run: RunConfig, site: Site, samples: tuple[int, int]) -> Options:
    """What there is to choose from for a run on a system."""
    workers, short = runs.loading_workers(run), candidates(run, site)
    works = [runs.work(site, one, samples, workers) for one in short]
    return Options(short, works, runs.work(site, run, samples, workers))


def best(found: Fit, precision: np.ndarray, among: Options, done: list[RunConfig], left_s: float, start_s: float):
    """The probe that leaves a forecast least uncertain, and the precision after it; None where none fits the seconds.

    ``precision``: inverse covariance of the parameters, of what is known so far.
    """
    chosen = None
    for run, work in zip(among.runs, among.works, strict=True):
        seconds = start_s + float(np.exp(calibrate.outcomes(found.priors, found.point, work, found.reading)[0, 0]))
        if seconds > left_s or run in done:
            continue
        slopes = calibrate.jacobian(found.priors, found.point, work, found.reading)[:, 0] / found.errors[:, None]
        slopes = slopes if found.has_power else slopes[:1]
        after = precision + slopes.T @ slopes
        probe = Probe(run, seconds, spread(found, np.linalg.inv(after), among.target))
        if chosen is None or probe.spread_after < chosen[0].spread_after:
            chosen = probe, after
    return chosen


def expect(found: Fit, among: Options, minutes: float) -> list[Probe]:
    """The probes that would be made one after the other, by what is known now; ValueError where fewer than two fit."""
    left_s, precision, probes = minutes * SECONDS_OF_A_MINUTE, np.linalg.inv(found.covariance), []
    while len(probes) < MOST:
        chosen = best(found, precision, among, [probe.run for probe in probes], left_s, START_S)
        if chosen is None:
            break
        probes.append(chosen[0])
        precision, left_s = chosen[1], left_s - chosen[0].seconds
    if len(probes) < FEWEST:
        raise ValueError(f"minutes: {minutes:g} are too few for two probes; give {minutes + FEWEST:g}")
    return probes


def make_here(found: Fit, among: Options, runs_dir: Path, site: Site, minutes: float) -> list[Probe]:
    """Make probes on this machine, each chosen by what those before it have told; the shortest first.

    Raises ValueError where one fails, or where the minutes were too few for two.
    """
    begun, start_s, at_first, probes = time.monotonic(), START_S, found, []
    shortest = among.runs[int(np.argmin([work.trained[0] * work.epochs[0] for work in among.works]))]
    not_now = [run for run in among.runs if run is not shortest]
    while len(probes) < MOST:
        left_s = minutes * SECONDS_OF_A_MINUTE - (time.monotonic() - begun)
        chosen = best(found, np.linalg.inv(found.covariance), among, not_now, left_s, start_s)
        if chosen is None:
            break
        probe, at = chosen[0], time.monotonic()
        if failed := local.run_study([probe.run], runs_dir.absolute()):
            raise ValueError(f"probe: {failed[0]}")
        probes.append(probe)
        not_now = [one.run for one in probes]
        seen = runs.own(runs_dir, probe.run.workload, site, run_ids={config.run_id(one.run) for one in probes})
        record = records.read(runs_dir / probe.run.system / config.run_id(probe.run))
        start_s = max(0.0, time.monotonic() - at - record["training_time_s"])
        found = calibrate.fit(seen.observations, at_first.priors, at_first.reading, at_first.prior_covariance)
    if len(probes) < FEWEST:
        needed = FEWEST * (time.monotonic() - begun) / SECONDS_OF_A_MINUTE
        raise ValueError(f"minutes: {minutes:g} are too few for two probes here; give {needed:.0f}; what is made stays")
    return probes


def as_json(probes: list[Probe]) -> list[dict]:
    """The probes for a program, in the order in which they tell most."""
    names = ("devices", "local_batch_size", "training_samples", "epochs")
    rows = []
    for probe in probes:
        row = {"run_id": config.run_id(probe.run)} | {n: getattr(probe.run, n) for n in names if hasattr(probe.run, n)}
        rows.append(row | {"expected_s": probe.seconds, "relative_spread_after": probe.spread_after})
    return rows


def hand_over(probes: list[Probe], site: Site, runs_dir: Path) -> None:
    """Submit the probes as batch jobs, as a study of one's own."""
    path = REPOSITORY / "build" / f"probe_{probes[0].run.workload}_{site.name}.py"
    _write_study(path, probes)
    given = dict(studies=[str(path)], system=site.file, runs_dir=runs_dir)
    submit.main(argparse.Namespace(**given, dry_run=False, limit=None, yes=False, minutes=None))


def _write_study(path: Path, probes: list[Probe]) -> None:
    """Write the probes as a study of one's own, which ``energynn submit`` takes."""
    lines = ["from energynn import config", "", "", "def study(system):", "    runs = []"]
    for probe in probes:
        lines.append(f"    runs.append(config.from_dict({config.to_dict(probe.run)!r} | dict(system=system)))")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "    return runs", ""]))


def outcome(probes: list[Probe], runs_dir: Path, run: RunConfig, site: Site) -> dict:
    """The forecast of a run by the fit to probes that were made, with the fact beside it where there is one."""
    seen = runs.own(runs_dir, run.workload, site, run_ids={config.run_id(probe.run) for probe in probes})
    (row,) = predict.rows(calibration.make(seen), [run])
    fact = records.read(runs_dir / run.system / config.run_id(run))
    row["measured_time_h"] = fact["training_time_s"] / SECOND_PER_HOUR if fact and fact["valid"] else None
    return row
