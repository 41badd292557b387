"""Forecasts of configurations: time, GPU hours and energies with 90 % intervals, causes, and what lies outside."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from energynn import config, studies
from energynn.cluster.systems import Site
from energynn.config import RunConfig
from energynn.forecast import accuracy, calibrate, model, runs
from energynn.forecast.calibrate import Fit
from energynn.forecast.calibration import ASSUMED, Calibration
from energynn.forecast.model import READINGS, Work
from energynn.measure.energy import JOULE_PER_KWH, SECOND_PER_HOUR
from energynn.reading import json_table, one_fault

QUANTITIES = ("time_h", "gpu_hours", "energy_kWh", "energy_gpu_kWh", "energy_cpu_kWh", "energy_ram_kWh")
# The published runs reach so far. Beyond, nothing tells of latency and of storage that many share: no interval then.
MOST_DEVICES, MOST_NODES = 256, 64
# Relative spread of the power of CPUs and memory: of memory that of the two reports of the study; of CPUs assumed.
SPREAD_CPU, SPREAD_RAM = 0.05, 0.09
AS_CALIBRATED = 0.05  # a relative difference that is none


def quantities(made: Calibration, work: Work, workers: int) -> dict[str, np.ndarray]:
    """Of each of QUANTITIES value, low and high at 90 %, (configurations, 3); NaN where nothing can be said.

    ``workers``: of the loader. Where a configuration differs from the calibrated runs in what the two readings
    disagree about, the interval covers both.
    """
    result = _by(made.fit, made, work, workers)
    matters = _readings_matter(made, work)
    for other in list(made.fits.values())[1:]:
        for name, (_value, low, high) in _by(other, made, work, workers).items():
            ours = result[name]
            ours[1] = np.where(matters, np.fmin(ours[1], low), ours[1])
            ours[2] = np.where(matters, np.fmax(ours[2], high), ours[2])
    beyond = (work.devices > MOST_DEVICES) | (work.nodes > MOST_NODES)
    for name in result:
        result[name][1:, beyond] = np.nan
    return {name: np.stack(list(values), axis=-1) for name, values in result.items()}


def _readings_matter(made: Calibration, work: Work) -> np.ndarray:
    """Whether loader-bound and GPU-bound forecast different things of a configuration, (configurations,)."""
    low, high = made.ranges["evaluated per trained sample"]
    ratio = work.evaluated / np.maximum(work.trained, 1)
    as_calibrated = (ratio > low - AS_CALIBRATED) & (ratio < high + AS_CALIBRATED)
    return ~as_calibrated | (np.abs(work.workers - 1) > AS_CALIBRATED)


def _by(found: Fit, made: Calibration, work: Work, workers: int) -> dict[str, np.ndarray]:
    """By one reading: of each quantity value, low and high, (3, configurations)."""
    logs = calibrate.forecast(found, work)
    ends = np.array([0.0, -1.0, 1.0])[:, None]
    time_h = np.exp(logs["time_s"][0] + ends * logs["time_s"][1]) / SECOND_PER_HOUR
    result = {name: np.full(time_h.shape, np.nan) for name in QUANTITIES}
    result |= {"time_h": time_h, "gpu_hours": time_h * work.devices}
    if "energy_J" not in logs:
        return result
    middle, half = logs["energy_J"]
    result["energy_kWh"] = np.exp(middle + ends * half) * work.devices / JOULE_PER_KWH
    power_W = np.exp(logs["power_W"][0])
    cpu_W, ram_W, spreads = host_powers_W(made, work, workers)
    gpu_W = power_W - cpu_W - ram_W
    z = 1.645  # of the normal distribution at 90 %
    apart = np.sqrt((power_W * logs["power_W"][1]) ** 2 + (z * spreads[0] * cpu_W) ** 2 + (z * spreads[1] * ram_W) ** 2)
    parts = {"gpu": (gpu_W, apart / gpu_W), "cpu": (cpu_W, z * spreads[0]), "ram": (ram_W, z * spreads[1])}
    gpu_kilohours = result["gpu_hours"][0] / 1000
    for name, (watts, relative) in parts.items():
        both = np.hypot(logs["time_s"][1], relative)
        result[f"energy_{name}_kWh"] = gpu_kilohours * watts * np.exp(ends * both)
    return result


def host_powers_W(made: Calibration, work: Work, workers: int) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """CPU and memory power for each GPU in W, and their relative spreads; NaN where neither file nor runs tell them."""
    site, of_node = made.site, work.devices_of_node
    if made.watts:
        return *(made.watts.get(part, np.nan) / of_node for part in ("cpu", "ram")), (SPREAD_CPU, SPREAD_RAM)
    unknown = np.full(len(work), np.nan)
    cpu_W = site.cpu_W / of_node + site.cpu_thread_W * (workers + 1) if site.cpu_W else unknown
    return cpu_W, site.ram_W / of_node if site.ram_W else unknown, (SPREAD_CPU, SPREAD_RAM)


def asked(made: Calibration, what: str | None, parameters: dict) -> list[RunConfig]:
    """The configurations that a person means: a study's, a run's, or the calibrated one's, with parameters changed.

    Raises ValueError with the remedy for what is none of them.
    """
    folder = Path(what) if what else None
    if folder and (folder / "run.json").is_file():
        with one_fault(f"{folder / 'run.json'}: tells of no training; give another folder, or parameters"):
            plain = [config.to_dict(runs.as_made(json_table(folder / "run.json")))]
    elif folder and folder.is_dir():
        raise ValueError(f"{folder}: there is no run.json; give a run's folder, or a study")
    elif what:
        of_studies = studies.find([what], made.site.name).values()
        plain = [config.to_dict(run) for run in itertools.chain(*of_studies)]
    elif parameters:
        plain = [config.to_dict(made.config) | {"devices": 1, "accumulation_steps": 1}]
    else:
        raise ValueError("predict: say what: a study, a run's folder, or parameters (-p devices 64)")
    sizes = ("global_batch_size", "local_batch_size", "accumulation_steps")
    # The sizes that are given, and the number of devices, make the global batch anew.
    anew = dict.fromkeys(sizes if "global_batch_size" in parameters else sizes[:1])
    return [config.make(**each | anew | parameters) if parameters else config.from_dict(each) for each in plain]


def rows(made: Calibration, asked: list[RunConfig], most: int | None = None) -> list[dict]:
    """One forecast for each configuration, repeats once, as ``energynn forecast predict --json`` shows it.

    ``most``: the global batch size up to which the user calls accuracy free.
    Raises ValueError for another workload, more devices than the system has, or too few samples for an update.
    """
    same = {"seed": 0, "repeat": 0, "system": made.site.name}
    distinct = dict.fromkeys(config.from_dict(config.to_dict(run) | same) for run in asked)
    result = []
    for run in distinct:
        work = checked_work(made, run)
        values = quantities(made, work, runs.loading_workers(run))
        times = model.times_s(made.fit.values, work, READINGS[made.fit.reading])
        row = {"run_id": config.run_id(run), "workload": run.workload, "system": made.site.name}
        row |= {name: getattr(run, name) for name in ("devices", "local_batch_size", "global_batch_size", "epochs")}
        row["dataset_samples"] = runs.epoch_of(run, made.samples).training_samples
        row |= {name: interval(values[name][0]) for name in QUANTITIES}
        row["time_causes_h"] = {name: float(of[0]) / SECOND_PER_HOUR for name, of in times.items()}
        if made.fit.has_power:
            powers = model.powers_W(made.fit.values, work, times)
            row["power_causes_W"] = {name: float(of[0]) for name, of in powers.items()}
        row["outside"] = outside(made, run, work, most)
        row["provenance"] = f"estimated by a model fitted to {made.provenance} runs"
        result.append(row)
    return result


def checked_work(made: Calibration, run: RunConfig) -> Work:
    """What one GPU does in a run; raises ValueError for another workload than the fit's, and for what cannot run."""
    if run.workload != made.workload:
        raise ValueError(f"workload: the fit is of {made.workload}, the run of {run.workload}; fit {run.workload}")
    check_devices(made.site, run.devices)
    work = runs.work(made.site, run, made.samples, made.workers)
    if work.updates[0] < 1:
        raise ValueError("local_batch_size: a device has fewer samples than one update takes; choose a smaller one")
    return work


def check_devices(site: Site, asked: float) -> None:
    """Raise ValueError for more devices than a system has, where that is known."""
    most = site.nodes * site.devices_per_node
    if most and asked > most:
        raise ValueError(f"devices: {asked:.0f} asked, {site.name} has {most}; choose at most {most}")


def interval(values: np.ndarray) -> dict[str, float | None]:
    """A value with its 90 % interval; None where nothing can be said."""
    named = zip(("value", "low", "high"), values.tolist(), strict=True)
    return {name: number if np.isfinite(number) else None for name, number in named}


def outside(made: Calibration, run: RunConfig, work: Work, most: int | None = None) -> list[str]:
    """What of one configuration lies beyond the calibrated runs, in words; ``most``: the largest batch that is free."""
    lines = []
    if work.devices[0] > MOST_DEVICES or work.nodes[0] > MOST_NODES:
        lines.append(f"more than {MOST_DEVICES} devices or {MOST_NODES} nodes: an extrapolation without an interval")
    values = {"devices": work.devices, "nodes": work.nodes, "local_batch_size": work.local_batch_size}
    values |= {"samples of a device": work.trained, "accumulation_steps": [run.accumulation_steps]}
    # A fit of an earlier version has neither these steps nor ASSUMED: one run of it stands for all.
    before, plain = config.asdict(made.config), config.asdict(run)
    ranges = {"accumulation_steps": (before["accumulation_steps"],) * 2} | made.ranges
    for name, of in values.items():
        low, high = ranges[name]
        if not low * 0.99 <= of[0] <= high * 1.01:
            lines.append(f"{name} {of[0]:g}: calibrated {low:g} to {high:g}")
    if made.ranges["nodes"][1] == 1 and work.nodes[0] > 1:
        lines.append("no calibrated run had several nodes: storage that nodes share is taken as no limit")
    if _readings_matter(made, work)[0]:
        lines.append("other workers or passes than calibrated: the interval covers loader-bound and GPU-bound")
    for name, occurred in ({name: [before[name]] for name in ASSUMED} | made.fields).items():
        is_any = name == "device" and "auto" in (run.device, *occurred)
        if plain.get(name) not in occurred and not is_any:
            effect = ASSUMED.get(name, "its effect is not known")
            lines.append(f"{name} {plain.get(name)}: calibrated {', '.join(map(str, occurred))}; {effect}")
    if run.persistent_workers or before["persistent_workers"]:
        lines.append("persistent workers: all of a start is taken as saved, which is the most that they can save")
    size = int(work.devices[0] * work.local_batch_size[0]) * run.accumulation_steps
    lines += accuracy.beyond(run, size, most)
    bandwidth = made.site.link_GB_per_s if work.nodes[0] > 1 else made.site.gpu_link_GB_per_s
    if work.devices[0] > 1 and not (bandwidth and work.allreduce_s[0]):
        lines.append("the all-reduce is left out: the bandwidth or the size of the gradients is not known")
    return lines


def loss_by_cause(made: Calibration, few: Work, many: Work, draws: int = 2000) -> dict[str, dict[str, float]]:
    """What makes GPU hours grow from one configuration to another: each cause's share of the loss with its interval.

    ``fixed``: starts and fill together. Causes that shrink have a negative share. By draws from the parameters.
    """
    shares = {name: [] for name in (*model.CAUSES_OF_TIME, "fixed")}
    points = np.random.default_rng(0).multivariate_normal(made.fit.point, made.fit.covariance, draws)
    for point in [made.fit.point, *points]:
        values = calibrate.to_values(made.fit.priors, point)
        before, after = (model.times_s(values, work, READINGS[made.fit.reading]) for work in (few, many))
        grown = {name: (many.devices * after[name] - few.devices * before[name]).item() for name in before}
        whole = sum(grown.values())
        grown["fixed"] = grown["starts"] + grown["fill"]
        for name, hours in grown.items():
            shares[name].append(hours / whole)
    result = {}
    for name, values in shares.items():
        low, high = np.quantile(values[1:], [0.05, 0.95])
        result[name] = {"value": values[0], "low": float(low), "high": float(high)}
    return result
