"""Runs as the model sees them: what one GPU does by a configuration, and what runs took for it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from energynn import config, published_values, records, studies
from energynn.cluster import systems
from energynn.cluster.systems import Site
from energynn.config import Epoch, RunConfig
from energynn.forecast.model import Work, together
from energynn.measure.energy import COMPONENTS, SECOND_PER_HOUR

BYTES_PER_GB = 1e9
MEMORY_GB_PER_S = 1.0  # between processes on cores, before their runs have told
ONE_OF_MANY = dict(seed=0, repeat=0, initial_run="")  # fields in which repeats of a run differ


class Runs(msgspec.Struct, frozen=True, dict=True):
    """Configurations of a workload on a system and what they took, repeats as their mean.

    times_s: of the training; powers_W: of one GPU with its part of a node, None: not known.
    series: those of the study that have it. samples: of the training and of the validation data.
    watts: mean power of a node's CPUs and memory, where measured. notes: what was left out. like:
    runs on another system, which give the priors.
    """

    workload: str
    site: Site
    plain: list[dict]
    times_s: list[float]
    powers_W: list[float | None]
    repeats: list[int]
    series: list[str]
    samples: tuple[int, int] = (0, 0)
    provenance: str = "measured"
    watts: dict[str, float] = {}
    notes: list[str] = []
    like: Runs | None = None

    def __len__(self) -> int:
        return len(self.plain)

    @cached_property
    def configs(self) -> list[RunConfig]:
        return [config.from_dict(plain) for plain in self.plain]

    @cached_property
    def work(self) -> Work:
        return works(self, self.configs)

    @property
    def time_s(self) -> np.ndarray:
        return np.array(self.times_s)

    @property
    def power_W(self) -> np.ndarray:
        return np.array(self.powers_W, float)

    @property
    def longest(self) -> RunConfig:
        """The run with the most samples, which stands for the training that people mean."""
        return max(self.configs, key=lambda run: epoch_of(run, self.samples).training_samples)

    def only(self, chosen: np.ndarray) -> Runs:
        """The runs of a mask."""
        where, changed = np.flatnonzero(chosen), {}
        for name in ("plain", "times_s", "powers_W", "repeats", "series"):
            changed[name] = [getattr(self, name)[index] for index in where]
        return msgspec.structs.replace(self, **changed)


def epoch_of(run: RunConfig, samples: tuple[int, int]) -> Epoch:
    """What an epoch does; ``samples`` stand in where only the data tell how many there are."""
    epoch = run.epoch()
    training = epoch.training_samples or samples[0]
    validation = epoch.validation_samples or samples[1]
    return dataclasses.replace(epoch, training_samples=training, validation_samples=validation)


def work(seen: Runs, run: RunConfig, devices=None, local_batch_size=None) -> Work:
    """What one GPU does in a run on the system of others, (1,).

    devices, local_batch_size: arrays instead of those of the run.
    """
    site, epoch = seen.site, epoch_of(run, seen.samples)
    devices = np.atleast_1d(run.devices if devices is None else devices).astype(float)
    ones = np.ones(devices.shape)
    size = ones * (run.local_batch_size if local_batch_size is None else local_batch_size)
    nodes = np.ceil(devices / site.devices_per_node)
    workers = run.loader_workers if run.data_staging else 0
    trained = epoch.training_samples // devices
    over_training = 1 + epoch.evaluates_training_set
    evaluated = epoch.validation_samples // devices + epoch.evaluates_training_set * trained
    passes = over_training + bool(epoch.validation_samples)
    if run.persistent_workers and workers:
        passes = passes / run.epochs
    GB_per_s = np.where(nodes > 1, site.link_GB_per_s, site.gpu_link_GB_per_s)
    GB_per_s[GB_per_s == 0] = np.inf  # `outside` says where it is not known
    is_waiting = workers > 0  # without workers nothing is fetched ahead, and nothing waited for
    return Work(
        devices=devices,
        nodes=nodes,
        devices_of_node=devices / nodes,
        is_full=(devices >= site.devices_per_node).astype(float),
        local_batch_size=size,
        workers=workers * ones,
        epochs=run.epochs * ones,
        trained=trained * epoch.forward_steps,
        evaluated=evaluated * epoch.forward_steps,
        passes=passes * ones,
        filled=is_waiting * over_training * np.minimum(size, trained),
        updates=trained // (size * run.accumulation_steps),
        allreduce_s=2 * (1 - 1 / devices) * epoch.gradient_bytes / BYTES_PER_GB / GB_per_s,
    )


def works(seen: Runs, asked: list[RunConfig]) -> Work:
    """What one GPU does in each of several runs."""
    return together([work(seen, run) for run in asked])


# ------------------------------------------------------------------------------------ published

PUBLISHED_SYSTEMS = ("horeka-a100", "horeka-h100")
PRINTED = ("epochs", "devices", "global_batch_size", "dataset_samples")


def published(workload: str, site: Site, max_devices: float = np.inf) -> Runs:
    """The study's runs of full length on a system; those of its other system give the priors.

    With ``max_devices`` they stand alone. Raises ValueError where nothing is published.
    """
    known = {of: row for of, row in _rows(workload, site).items() if of[1] <= max_devices}
    if not known:
        raise ValueError(
            f"{workload} on {site.name}: nothing is published of it; fit runs of your own "
            "(--runs-dir), or choose resnet50 or fourcastnet on horeka-a100, or fourcastnet on "
            "horeka-h100"
        )
    like = None
    for name in PUBLISHED_SYSTEMS if np.isinf(max_devices) else ():
        if name != site.name and _rows(workload, systems.site(name)):
            like = published(workload, systems.site(name), max_devices=1e9)
    planned = {}
    for study in studies.PAPER.values():
        for run in study(site.name):
            for samples in (0, run.epoch().training_samples):  # a row may leave them out
                sizes = (run.epochs, run.devices, run.global_batch_size, samples)
                planned.setdefault((run.workload, *sizes), config.to_dict(run))
    rows, devices = known.values(), [of[1] for of in known]
    hours = [row["gpu_hours"] for row in rows]
    return Runs(
        workload=workload,
        site=dataclasses.replace(site, file=""),
        plain=[planned[workload, *of] for of in known],
        times_s=(SECOND_PER_HOUR * np.divide(hours, devices)).tolist(),
        powers_W=[1000 * row["energy_total"] / row["gpu_hours"] for row in rows],
        repeats=[row["repeats"] for row in rows],
        series=[row["series"] for row in rows],
        provenance="published",
        like=like,
    )


def _rows(workload: str, site: Site) -> dict[tuple[int, ...], dict]:
    """Published runs of full length by the sizes that are PRINTED, 0 where one is not."""
    known = defaultdict(dict)
    asked = ("measurement", workload, site.published_as)
    for row in published_values.rows():
        if (row["kind"], row["workload"], row["device_name"]) == asked:
            sizes = tuple(int(row[name] or 0) for name in PRINTED)
            facts = {"series": row["series"], "repeats": int(row["repeats"] or 1)}
            known[sizes] |= {row["quantity"]: float(row["value"])} | facts
    known = {of: row for of, row in known.items() if "energy_total" in row}
    full = max(known, default=(0,))[0]
    return {of: row for of, row in known.items() if of[0] == full}


# ------------------------------------------------------------------------------------------ own


def valid(runs_dir: Path, site: Site) -> list[dict]:
    """The valid records of trainings on a system."""
    found = [record for record in records.read_all(runs_dir) if record["system"] == site.name]
    return [record for record in found if record["valid"] and "training_time_s" in record]


def own(
    found: list[dict], workload: str, site: Site, max_devices: float = np.inf, like=None
) -> Runs:
    """Runs from records of a workload; powers only where all were measured.

    Raises ValueError with the remedy where there are none, or they do not belong together.
    """
    chosen = [of for of in found if of["workload"] == workload and of["devices"] <= max_devices]
    if not chosen:
        there = ", ".join(sorted({of["workload"] for of in found})) or "none"
        raise ValueError(f"no valid run of {workload} on {site.name}; there are {there}")
    recipes = {recipe(record) for record in chosen}
    if len(recipes) > 1:
        raise ValueError(f"runs of several devices, stages or data: {recipes}; fit those of one")
    site, first = dataclasses.replace(site, file=""), chosen[0]
    if site.scheduler == "local" and first["launcher"] != "simulated":
        site = here(site, first["machine"], first["device_kind"] == "gpu")
    grouped = defaultdict(list)
    for record in chosen:
        grouped[without_repeats(as_made(record))].append(record)
    groups = list(grouped.values())
    kinds = {_energies(record) for record in chosen}
    provenance, *parts = next(iter(kinds))
    has_watts = len(kinds) == 1 and provenance in ("measured", "simulated")
    watts, powers_W = {}, [None] * len(groups)
    if has_watts:
        of_host = [part for part in parts if part != "gpu"]
        watts = {part: _mean(chosen, f"mean_power_{part}_W", "nodes") for part in of_host}
        powers_W = [_mean(group, "mean_power_total_W", "devices") for group in groups]
    return Runs(
        workload=workload,
        site=site,
        plain=[config.to_dict(run) for run in grouped],
        times_s=[_mean(group, "training_time_s") for group in groups],
        powers_W=powers_W,
        repeats=[len(group) for group in groups],
        series=[""] * len(groups),
        samples=_samples(first),
        provenance="simulated" if provenance == "simulated" else "measured",
        watts=watts,
        notes=[] if has_watts else ["energies are not all measured: times alone are fitted"],
        like=like,
    )


def _energies(record: dict) -> tuple[str, ...]:
    """Where the energies of a record come from, and the components that have some."""
    parts = [part for part in COMPONENTS if f"energy_{part}_J" in record]
    return record.get("energy_total_provenance", ""), *parts


def recipe(record: dict) -> tuple[str, ...]:
    """What runs share that one fit is made of."""
    plain = record["config"]
    return plain["workload"], plain.get("stage", ""), plain["dataset"], record["device_name"]


def as_made(record: dict) -> RunConfig:
    """The configuration of a record, with the kind of device that it had."""
    device = "gpu" if record["device_kind"] == "gpu" else "cpu"
    return config.from_dict(record["config"] | {"device": device})


def without_repeats(run: RunConfig) -> RunConfig:
    """The configuration that a run's repeats share."""
    same = {name: value for name, value in ONE_OF_MANY.items() if hasattr(run, name)}
    return config.replace(run, **same)


def here(site: Site, machine: dict, on_gpu: bool) -> Site:
    """This machine, one node with as many devices as it has: ``machine`` as a record has it.

    Cores are no GPU, and share their gradients through memory.
    """
    number = max(len(machine["gpus"]) if on_gpu else machine["cores"], 1)
    site = dataclasses.replace(site, nodes=1, devices_per_node=number)
    return site if on_gpu else dataclasses.replace(site, gpu="", gpu_link_GB_per_s=MEMORY_GB_PER_S)


def _mean(group: list[dict], name: str, per: str = "") -> float:
    """Geometric mean of a field over runs; ``per``: divided by another field."""
    values = [record[name] / (record[per] if per else 1) for record in group]
    return float(np.exp(np.mean(np.log(values))))


def _samples(record: dict) -> tuple[int, int]:
    """Sizes of the training and of the validation data, as a record counted them."""
    run, training = as_made(record), record.get("dataset_samples", 0)
    evaluated = record.get("samples_evaluated", 0) // run.epochs
    return training, evaluated - training * run.epoch().evaluates_training_set
