"""Short runs that tell most about a long one: after them its forecast is least uncertain, within the minutes."""

from __future__ import annotations

import itertools
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from energynn import config, records, studies
from energynn.cluster import local, submit
from energynn.cluster.systems import Site
from energynn.config import RunConfig
from energynn.data import manifests
from energynn.files import DATA_MANIFESTS, REPOSITORY
from energynn.forecast import calibrate, calibration, predict, priors, runs
from energynn.forecast.calibrate import Fit, Prior
from energynn.forecast.calibration import Calibration
from energynn.forecast.model import Work
from energynn.measure import machine
from energynn.measure.energy import SECOND_PER_HOUR

FEWEST, MOST = 2, 4  # probes
CORE_OPERATIONS_PER_S = 1.1e10  # multiply-adds of ResNet50 on a core of an AMD EPYC
START_S = 15.0  # of a run, before and after its training
ONCE_S = 1.0  # of a training, by which the model may be wrong however long it is: its first steps
BATCHES = (6, 12, 24, 48, 96)  # of a device in an epoch
PART_OF_BATCH = 4  # of a local batch, for a second one where the runs to forecast have one only
UNKNOWN_SAMPLE_S = 0.01  # of a sample, where nothing tells it: some order of magnitude
# Forward and backward pass of a sample; the relative spread of their rate over cores.
PASSES_OF_A_SAMPLE, SPREAD_OF_CORES = 3, 0.5
UNKNOWN_SAMPLES = 1000  # of a training set, where only the data tell its size
SECONDS_OF_A_MINUTE = 60.0
STEP_OF_MINUTES = 1.05  # of those tried, where the minutes are too few
DEFAULT_STUDIES = ["smoke", "one-device"]  # which `make reproduce` makes here


@dataclass(frozen=True)
class Probe:
    """A run that tells something: what it takes by what is known so far, and the spread of the forecasts after it."""

    run: RunConfig
    seconds: float
    spread_after: float


def targets(workload: str, site: Site, named: list[str], parameters: dict) -> list[RunConfig]:
    """The runs to forecast, repeats once: of the named studies, else one of the preset with these parameters.

    Without either, here those of the default study. Those that start from another run's weights come last. Raises
    ValueError where the named studies have none of the workload.
    """
    is_here = site.scheduler == "local"
    of_studies = named or (DEFAULT_STUDIES if is_here and not parameters else [])
    found = [run for of in studies.find(of_studies, site.name).values() for run in of if run.workload == workload]
    if named and not found:
        raise ValueError(f"study: {', '.join(named)} has no run of {workload}; name another study, or none")
    if not found:
        chosen = {"preset": "smoke" if is_here else "paper", "system": site.name} | parameters
        run = config.make(workload, **chosen)
        if is_here and run.device == "auto":
            run = config.replace(run, device="gpu" if machine.gpus() else "cpu")
        found = [run]
    distinct = {runs.without_repeats(run): run for run in reversed(found)}  # the first of its repeats
    return sorted(reversed(distinct.values()), key=lambda run: bool(getattr(run, "initial_run", "")))


def candidates(asked: list[RunConfig], site: Site) -> list[RunConfig]:
    """Short versions of runs, on one node: their numbers of devices and batch sizes, small and large epochs."""
    run = asked[0]
    plain = config.to_dict(run) | {"accumulation_steps": 1, "epochs": 1, "save_weights": False}
    plain.pop("global_batch_size")
    sizes = {one.local_batch_size for one in asked}
    if len(sizes) == 1:
        sizes.add(max(1, run.local_batch_size // PART_OF_BATCH))
    devices = {1} | {min(one.devices, site.devices_per_node) for one in asked}
    found = []
    for of_devices, size, batches in itertools.product(sorted(devices), sorted(sizes, reverse=True), BATCHES):
        changed = plain | {"devices": of_devices, "local_batch_size": size}
        if "training_samples" in plain:
            of_a_step = size * of_devices
            samples = min(batches, most_samples(run) // of_a_step) * of_a_step
            changed |= {"training_samples": samples, "validation_samples": of_a_step}
        else:  # its data cannot be cut: it runs longer instead
            changed |= {"epochs": batches // BATCHES[0]}
        found.append(config.make(**changed))
    return list(dict.fromkeys(found))


def most_samples(run: RunConfig) -> int:
    """How many training samples there are, by the workload or its data's manifest, else UNKNOWN_SAMPLES."""
    whole = config.replace(run, training_samples=0) if hasattr(run, "training_samples") else run
    of_workload = whole.epoch().training_samples
    if of_workload or not manifests.checksum_file(run.dataset, DATA_MANIFESTS).is_file():
        return of_workload or UNKNOWN_SAMPLES
    return sum(name.startswith("train/") for name in manifests.checksums(run.dataset)) or UNKNOWN_SAMPLES


def before(run: RunConfig, site: Site, samples: tuple[int, int], known: Calibration | None) -> Fit:
    """What is known before the first probe: from the same workload's fit on another system, or next to nothing.

    On cores the size of the network tells the order of magnitude.
    """
    if known:
        given, covariance = priors.like(known.fit, known.site.name)
    else:
        work = runs.work(site, run, samples, runs.loading_workers(run))
        seconds = UNKNOWN_SAMPLE_S * work.epochs * (work.trained + work.evaluated)
        seen = calibrate.Observations(work, seconds, np.array([np.nan]), ("",))
        given = priors.make(seen, site, run, storage=False)
        if not site.gpu and (operations := run.epoch().operations):
            sample_s = PASSES_OF_A_SAMPLE * operations / (CORE_OPERATIONS_PER_S * run.threads_per_device)
            given["tau"] = Prior(sample_s, SPREAD_OF_CORES, "operations of the network, on a core as many know it")
        covariance = np.diag([prior.spread**2 for prior in given.values()])
    point = calibrate.to_point({name: prior.centre for name, prior in given.items()})
    errors, freedom = np.full(2, priors.error(site)), np.full(2, calibrate.ERROR_WEIGHT)
    return Fit(priors.usual_reading(site), given, covariance, point, covariance, errors, freedom)


def spreads(found: Fit, covariance: np.ndarray, work: Work) -> np.ndarray:
    """Relative standard deviations of forecast times, (configurations,), without the model's own error."""
    slopes = calibrate.jacobian(found.priors, found.point, work, found.reading)[0]
    return np.sqrt(np.einsum("ij,jl,il->i", slopes, covariance, slopes))


@dataclass(frozen=True)
class Options:
    """The runs to choose from, what one GPU does in each, and in the runs that they are to forecast."""

    runs: list[RunConfig]
    works: Work
    target: Work


def options(asked: list[RunConfig], site: Site, samples: tuple[int, int]) -> Options:
    """What there is to choose from for runs on a system."""
    workers, short = runs.loading_workers(asked[0]), candidates(asked, site)
    return Options(short, runs.works(site, short, samples, workers), runs.works(site, asked, samples, workers))


def _times_s(found: Fit, precision: np.ndarray, works: Work) -> tuple[np.ndarray, np.ndarray]:
    """What each probe takes without its start as expected, and if it takes one standard deviation more."""
    times_s = np.exp(calibrate.outcomes(found.priors, found.point, works, found.reading)[0])
    return times_s, times_s * np.exp(spreads(found, np.linalg.inv(precision), works))


def best(found: Fit, precision: np.ndarray, among: Options, done: list[RunConfig], most_s: float, start_s: float):
    """The probe that leaves the forecasts least uncertain, and the precision after it; None where none fits.

    ``precision``: inverse covariance of the parameters, of what is known so far. ``most_s``: seconds that a probe may
    take if it takes one standard deviation more than expected.
    """
    chosen = None
    times_s, longest_s = _times_s(found, precision, among.works)
    errors = np.hypot(found.errors[:, None], ONCE_S / times_s)
    slopes = calibrate.jacobian(found.priors, found.point, among.works, found.reading) / errors[..., None]
    slopes = slopes if found.has_power else slopes[:1]
    for index, run in enumerate(among.runs):
        if start_s + longest_s[index] > most_s or run in done:
            continue
        after = precision + slopes[:, index].T @ slopes[:, index]
        spread = float(spreads(found, np.linalg.inv(after), among.target).mean())
        if chosen is None or spread < chosen[0].spread_after:
            chosen = Probe(run, start_s + float(times_s[index]), spread), after
    return chosen


def _next(found: Fit, precision: np.ndarray, among: Options, probes: list[Probe], left_s, start_s, most: int):
    """The best probe after others; the first, of which least is known, takes its share of the time if one can."""
    done, share_s = [probe.run for probe in probes], left_s if probes else left_s / most
    in_share = best(found, precision, among, done, share_s, start_s)
    return in_share or best(found, precision, among, done, left_s, start_s)


def expect(found: Fit, among: Options, minutes: float, most: int = MOST) -> list[Probe]:
    """The probes that would be made one after the other, by what is known now; ValueError where fewer than two fit."""
    if len(among.runs) < FEWEST:
        raise ValueError("probe: the run is too small for two short ones that differ; forecast one with more samples")
    probes, enough = _in_minutes(found, among, minutes, most), minutes
    if len(probes) >= FEWEST:
        return probes
    while len(_in_minutes(found, among, enough, most)) < FEWEST:
        enough = max(enough * STEP_OF_MINUTES, enough + 1) // 1
    raise ValueError(f"minutes: {minutes:g} are too few for two probes; give {enough:g}")


def _in_minutes(found: Fit, among: Options, minutes: float, most: int) -> list[Probe]:
    left_s, precision, probes = minutes * SECONDS_OF_A_MINUTE, np.linalg.inv(found.covariance), []
    while len(probes) < most:
        chosen = _next(found, precision, among, probes, left_s, START_S, most)
        if chosen is None:
            break
        probes.append(chosen[0])
        precision, left_s = chosen[1], left_s - chosen[0].seconds
    return probes


def make_here(
    found: Fit, asked: list[RunConfig], runs_dir: Path, site: Site, minutes: float, most: int = MOST
) -> list[Probe]:
    """Make probes on this machine, each chosen by what those before it have told; the first in its share of the time.

    Raises ValueError where one fails, or where the minutes were too few for two.
    """
    begun, start_s, at_first, probes = time.monotonic(), START_S, found, []
    among = options(asked, site, samples_of(asked[0]))
    while len(probes) < most:
        left_s = minutes * SECONDS_OF_A_MINUTE - (time.monotonic() - begun)
        chosen = _next(found, np.linalg.inv(found.covariance), among, probes, left_s, start_s, most)
        if chosen is None:
            break
        probe, at = chosen[0], time.monotonic()
        if failed := local.run_study([probe.run], runs_dir.absolute()):
            raise ValueError(f"probe: {failed[0]}")
        probes.append(probe)
        seen = runs.own(runs_dir, probe.run.workload, site, run_ids=names(probes))
        record = records.read(runs_dir / probe.run.system / config.run_id(probe.run))
        start_s = max(0.0, time.monotonic() - at - record["training_time_s"])
        among = options(asked, site, seen.samples)
        found = calibrate.fit(
            seen.observations, at_first.priors, at_first.reading, at_first.prior_covariance, priors.error(site)
        )
    if len(probes) < FEWEST:
        done = [probe.run for probe in probes]
        _, longest_s = _times_s(found, np.linalg.inv(found.covariance), among.works)
        another_s = min(seconds for run, seconds in zip(among.runs, longest_s, strict=True) if run not in done)
        needed = (time.monotonic() - begun + start_s + another_s) // SECONDS_OF_A_MINUTE + 1
        raise ValueError(f"minutes: {minutes:g} are too few for two probes here; give {needed:.0f}; what is made stays")
    return probes


def names(probes: list[Probe]) -> set[str]:
    return {config.run_id(probe.run) for probe in probes}


def samples_of(run: RunConfig) -> tuple[int, int]:
    """Training and validation samples of a run, by what its configuration and its data's manifest tell."""
    epoch = run.epoch()
    return epoch.training_samples or most_samples(run), epoch.validation_samples


def as_json(probes: list[Probe]) -> list[dict]:
    """The probes for a program, in the order in which they tell most."""
    names = ("devices", "local_batch_size", "training_samples", "epochs")
    rows = []
    for probe in probes:
        row = {"run_id": config.run_id(probe.run)} | {n: getattr(probe.run, n) for n in names if hasattr(probe.run, n)}
        rows.append(row | {"expected_s": probe.seconds, "relative_spread_after": probe.spread_after})
    return rows


def hand_over(probes: list[Probe], asked: list[RunConfig], site: Site, runs_dir: Path, like: Path | None) -> None:
    """Submit the probes as batch jobs, as a study of one's own, and say what then fits and forecasts."""
    of, build = f"{asked[0].workload}_{site.name}", REPOSITORY / "build"
    study, goal, fit = build / f"probe_{of}.py", build / f"asked_{of}.py", build / f"fit_{of}.json"
    _write_study(study, [probe.run for probe in probes])
    _write_study(goal, asked)
    submit.submit_studies([str(study)], site.file, runs_dir)
    words = ["fit", "--runs-dir", runs_dir.absolute(), "--workload", asked[0].workload, "--system", site.file]
    words += ["--like", like.absolute()] if like else []
    print("when the jobs are done, these fit and forecast:")
    for command in ([*words, "--out", fit], ["predict", goal, "--fit", fit]):
        print(shlex.join(["energynn", "forecast", *map(str, command)]), flush=True)


def _write_study(path: Path, asked: list[RunConfig]) -> None:
    """Write runs as a study of one's own, which ``energynn submit`` and ``energynn forecast predict`` take."""
    lines = ["from energynn import config", "", "", "def study(system):", "    runs = []"]
    for run in asked:
        lines.append(f"    runs.append(config.from_dict({config.to_dict(run)!r} | dict(system=system)))")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "    return runs", ""]))


def outcome(probes: list[Probe], runs_dir: Path, asked: list[RunConfig], site: Site, known=None) -> dict:
    """The forecasts of runs by the fit to probes that were made, the facts beside them, and the median error.

    A fact is the mean of a configuration's valid repeats, where there are any; errors are those of the time, in %.
    """
    seen = runs.own(runs_dir, asked[0].workload, site, run_ids=names(probes))
    rows = predict.rows(calibration.make(seen, known.fits if known else None), asked)
    facts = runs.times_s(runs_dir, asked[0].workload, site.name, names(probes))
    for run, row in zip(asked, rows, strict=True):
        row |= {name: getattr(run, name) for name in ("stage", "training_samples") if hasattr(run, name)}
        taken_s = facts.get(runs.without_repeats(run), [])
        row |= {"measured_runs": len(taken_s), "measured_time_h": None, "error_percent": None}
        if taken_s:
            row["measured_time_h"] = float(np.exp(np.mean(np.log(taken_s)))) / SECOND_PER_HOUR
            row["error_percent"] = 100 * (row["time_h"]["value"] / row["measured_time_h"] - 1)
    errors = [abs(row["error_percent"]) for row in rows if row["measured_runs"]]
    made_s = float(np.sum(seen.observations.time_s))
    return {"training_s": made_s, "median_error_percent": float(np.median(errors)) if errors else None, "rows": rows}
