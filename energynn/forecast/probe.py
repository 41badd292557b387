"""Short runs that tell most about a long one: after them its forecast is least uncertain."""

from __future__ import annotations

import itertools
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from energynn import config, studies
from energynn.cluster import local, submit
from energynn.cluster.systems import Site
from energynn.config import RunConfig
from energynn.data import manifests
from energynn.files import DATA_MANIFESTS, REPOSITORY
from energynn.forecast import fit as fits
from energynn.forecast import predict, runs
from energynn.forecast.fit import Fit
from energynn.forecast.model import Work
from energynn.forecast.runs import Runs
from energynn.measure import machine
from energynn.measure.energy import SECOND_PER_HOUR

FEWEST = 2  # probes
CORE_OPERATIONS_PER_S = 1.1e10  # multiply-adds of ResNet50 on a core of an AMD EPYC
START_S = 15.0  # of a run, before and after its training
ONCE_S = 1.0  # by which the model may be wrong however long a training is: its first steps
BATCHES = (6, 12, 24, 48, 96)  # of a device in an epoch
PART_OF_BATCH = 4  # of a local batch, for a second size where the runs to forecast have one only
UNKNOWN_SAMPLE_S = 0.01  # of a sample, where nothing tells it: some order of magnitude
PASSES_OF_A_SAMPLE = 3  # forward and backward
SPREAD_UNKNOWN, SPREAD_OF_CORES = 2.0, 0.5  # of the time of a sample, relative
UNKNOWN_SAMPLES = 1000  # of a training set, where only the data tell its size
DEFAULT_STUDIES = ["smoke", "one-device"]  # which `make reproduce` makes here


@dataclass(frozen=True)
class Probe:
    """A run, what it takes by what is known before it, and the spread of the forecasts after it."""

    run: RunConfig
    seconds: float
    spread_after: float


def targets(workload: str, site: Site, named: list[str], parameters: dict) -> list[RunConfig]:
    """The runs to forecast, repeats once: of the named studies, else one of the preset.

    Without names and parameters, here those of the default studies. Runs that start from another
    run's weights come last. Raises ValueError where the studies have none of the workload.
    """
    is_here = site.scheduler == "local"
    of_studies = named or (DEFAULT_STUDIES if is_here and not parameters else [])
    found = itertools.chain(*studies.find(of_studies, site.name).values())
    found = [run for run in found if run.workload == workload]
    if named and not found:
        raise ValueError(f"study: {', '.join(named)} has no run of {workload}; name another")
    if not found:
        preset = {"preset": "smoke" if is_here else "paper", "system": site.name}
        if is_here:
            preset["device"] = "gpu" if machine.gpus() else "cpu"
        found = [config.make(workload, **preset | parameters)]
    distinct = dict.fromkeys(map(runs.without_repeats, found))
    return sorted(distinct, key=lambda run: getattr(run, "stage", "") == "finetune")


def candidates(asked: list[RunConfig], site: Site, most_samples: int) -> list[RunConfig]:
    """Short versions of runs on one node: their devices and batch sizes, small and large epochs."""
    run = asked[0]
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
            changed |= {"epochs": batches // BATCHES[0]}
        found.append(config.make(**plain | changed))
    return list(dict.fromkeys(found))


def samples_of(run: RunConfig) -> tuple[int, int]:
    """Training and validation samples, by the configuration or the data's manifest."""
    epoch = run.epoch()
    if (
        not epoch.training_samples
        and manifests.checksum_file(run.dataset, DATA_MANIFESTS).is_file()
    ):
        files = manifests.checksums(run.dataset)
        training = sum(name.startswith("train/") for name in files)
        return training or UNKNOWN_SAMPLES, epoch.validation_samples
    return epoch.training_samples or UNKNOWN_SAMPLES, epoch.validation_samples


def before(asked: list[RunConfig], site: Site, like: Runs | None = None) -> Fit:
    """What is known before the first probe: by the same workload on another system, or little.

    On cores the size of the network tells the order of magnitude.
    """
    run, samples = asked[0], samples_of(asked[0])
    sample_s, spread = UNKNOWN_SAMPLE_S, SPREAD_UNKNOWN
    if not site.gpu and (operations := run.epoch().operations):
        per_s = CORE_OPERATIONS_PER_S * run.threads_per_device
        sample_s, spread = PASSES_OF_A_SAMPLE * operations / per_s, SPREAD_OF_CORES
    named = {"series": [""], "samples": samples, "like": like, "repeats": [1]}
    guess = Runs(run.workload, site, [config.to_dict(run)], [1.0], [None], **named)
    work = guess.work
    seconds = float(work.epochs[0] * (work.trained + work.evaluated)[0]) * sample_s
    fit = fits.unfitted(Runs(run.workload, site, guess.plain, [seconds], [None], **named))
    if like is None:
        fit.covariance[0, 0] = spread**2
    return fit


def choose(
    fit: Fit, asked: list[RunConfig], seconds: float, most: int, done=(), start_s: float = START_S
) -> list[Probe]:
    """The next probes, one after the other: each leaves the forecasts of ``asked`` least uncertain.

    seconds: for all, though one takes a standard deviation more than expected; the first, of which
    least is known, takes its share of them if one can. done: probes that were made.
    """
    seen, precision, made, probes = fit.runs, np.linalg.inv(fit.covariance), list(done), []
    short = candidates(asked, seen.site, samples_of(asked[0])[0])
    work, target = runs.works(seen, short), runs.works(seen, asked)
    times_s = np.exp(fits.outcomes(fit.names, fit.point, work)[0])
    of_data = fits.jacobian(fit.names, fit.point, work)[: 2 if fit.has_power else 1]
    of_data /= np.hypot(fit.errors[: len(of_data), None], ONCE_S / times_s)[..., None]

    def after(index: int) -> np.ndarray:
        return precision + of_data[:, index].T @ of_data[:, index]

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
    return probes


def _spreads(fit: Fit, precision: np.ndarray, work: Work) -> np.ndarray:
    """Relative standard deviations of forecast times, without the model's own error."""
    slopes = fits.jacobian(fit.names, fit.point, work)[0]
    return np.sqrt(((slopes @ np.linalg.inv(precision)) * slopes).sum(axis=1))


def expect(fit: Fit, asked: list[RunConfig], minutes: float, most: int) -> list[Probe]:
    """The probes that would be made, by what is known now; ValueError where fewer than two fit."""
    probes = choose(fit, asked, 60 * minutes, most)
    if len(probes) >= FEWEST:
        return probes
    for enough in range(int(minutes) + 1, 600):
        if len(choose(fit, asked, 60 * enough, most)) >= FEWEST:
            raise ValueError(f"minutes: {minutes:g} are too few for two probes; give {enough}")
    raise ValueError("probe: the run is too small or too long for two short ones that differ")


def make_here(
    fit: Fit, asked: list[RunConfig], runs_dir: Path, minutes: float, most: int
) -> tuple[list[Probe], Fit]:
    """Make probes on this machine, each chosen by what those before it have told, and fit them.

    Raises ValueError where one fails, or where the minutes were too few for two.
    """
    begun, start_s, probes, site = time.monotonic(), START_S, [], fit.runs.site
    while True:
        left_s = 60 * minutes - (time.monotonic() - begun)
        done = [probe.run for probe in probes]
        if not (chosen := choose(fit, asked, left_s, most, done, start_s)):
            break
        at = time.monotonic()
        if failed := local.run_study([chosen[0].run], runs_dir.absolute()):
            raise ValueError(f"probe: {failed[0]}")
        probes.append(chosen[0])
        names = {config.run_id(probe.run) for probe in probes}
        found = [of for of in runs.valid(runs_dir, site) if of["run_id"] in names]
        fit = fits.make(runs.own(found, asked[0].workload, site, like=fit.runs.like))
        last = config.run_id(probes[-1].run)
        (taken_s,) = (of["training_time_s"] for of in found if of["run_id"] == last)
        start_s = max(0.0, time.monotonic() - at - taken_s)
    if len(probes) < FEWEST:
        raise ValueError(f"minutes: {minutes:g} are too few for two probes here; give more")
    return probes, fit


def outcome(fit: Fit, asked: list[RunConfig], runs_dir: Path) -> list[dict]:
    """Forecasts by the fit to probes, with the facts of those runs that were made, too.

    fact_h: the mean time of valid repeats, None where there are none; error_percent: of the time.
    """
    facts = {}
    for record in runs.valid(runs_dir, fit.runs.site):
        run = runs.without_repeats(runs.as_made(record))
        facts.setdefault(run, []).append(record["training_time_s"] / SECOND_PER_HOUR)
    rows = predict.rows(fit, asked)
    for run, row in zip(asked, rows, strict=True):
        hours = np.mean(facts[run]) if run in facts else None
        row |= {"stage": getattr(run, "stage", ""), "fact_h": hours, "error_percent": None}
        if hours:
            row["error_percent"] = 100 * (row["time_h"]["value"] / hours - 1)
    return rows


def hand_over(
    probes: list[Probe], asked: list[RunConfig], site: Site, runs_dir: Path, like: Path | None
) -> str:
    """Submit the probes as a study of one's own; returns the commands that then fit and predict."""
    of, build = f"{asked[0].workload}_{site.name}", REPOSITORY / "build"
    study, goal, out = build / f"probe_{of}.py", build / f"asked_{of}.py", build / f"fit_{of}.json"
    _write_study(study, [probe.run for probe in probes])
    _write_study(goal, asked)
    if submit.submit_studies([str(study)], site.file, runs_dir):
        raise ValueError("probe: Slurm did not take the probes")
    words = ["fit", "--runs-dir", runs_dir.absolute(), "--workload", asked[0].workload]
    words += ["--like", like.absolute()] if like else []
    fit = [*words, "--system", site.file, "--out", out]
    commands = [fit, ["predict", goal, "--fit", out]]
    return "\n".join(shlex.join(["energynn", "forecast", *map(str, of)]) for of in commands)


def _write_study(path: Path, asked: list[RunConfig]) -> None:
    """Write runs as a study of one's own, which ``submit`` and ``forecast predict`` take."""
    plain = [config.to_dict(run) for run in asked]
    lines = ["from energynn import config", "", "", "def study(system):"]
    lines.append(f"    runs = {plain!r}")
    lines.append("    return [config.from_dict(run | dict(system=system)) for run in runs]")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, ""]))


def as_json(probes: list[Probe]) -> list[dict]:
    """The probes for a program, in the order in which they tell most."""
    names, rows = ("devices", "local_batch_size", "training_samples", "epochs"), []
    for probe in probes:
        row = {name: getattr(probe.run, name, None) for name in names}
        row |= {"run_id": config.run_id(probe.run), "expected_s": probe.seconds}
        rows.append(row | {"relative_spread_after": probe.spread_after})
    return rows


def text(probes: list[Probe], rows: list[dict]) -> str:
    """The forecasts beside the facts if probes were made, then the probes with what each adds."""
    parts = [predict.text(rows)] if rows else []
    known = [row for row in rows if row["fact_h"]]
    facts = [{"devices": row["devices"], "LBS": row["local_batch_size"]} for row in known]
    for line, row in zip(facts, known, strict=True):
        seconds = {end: hours * SECOND_PER_HOUR for end, hours in row["time_h"].items()}
        line |= {"forecast in s": predict.span(seconds), "fact": row["fact_h"] * SECOND_PER_HOUR}
        line["off in %"] = row["error_percent"]
    parts += [pd.DataFrame(facts).round(1).to_string(index=False)] if facts else []
    chosen = pd.DataFrame(as_json(probes)).drop(columns="run_id").round(3)
    parts.append(
        f"probes, and the spread of the forecasts after each\n{chosen.to_string(index=False)}"
    )
    return "\n\n".join(parts)
