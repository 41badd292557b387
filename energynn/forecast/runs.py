"""Runs as the model sees them: what one GPU does by a configuration, and what runs took for it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from energynn import config, published_values, records, studies
from energynn.cluster import systems
from energynn.cluster.systems import Site
from energynn.config import Epoch, RunConfig
from energynn.files import shipped
from energynn.forecast import model
from energynn.forecast.model import Work
from energynn.measure.energy import COMPONENTS, SECOND_PER_HOUR

BYTES_PER_GB = 1e9
ENERGIES = {f"energy_{component}_J" for component in COMPONENTS}
WATTS_KNOWN = {"measured", "simulated"}  # an energy estimated from time says nothing of power
MEMORY_GB_PER_S = 1.0  # between processes on cores, before their runs have told
ONE_OF_MANY = dict(seed=0, repeat=0, initial_run="")  # fields in which repeats of a run differ


@dataclass(frozen=True)
class Runs:
    """Configurations of a workload on a system and what they took; repeats as their mean.

    time_s: of the training; power_W: of one GPU with its part of a node, NaN: not known; both
    (configurations,). repeats: of each. series: those of the study that have it. samples: of the
    training and of the validation data. watts: mean power of a node's CPUs and memory, where
    measured. notes: what was left out. like: runs on another system, which give the priors.
    """

    workload: str
    site: Site
    configs: list[RunConfig]
    time_s: np.ndarray
    power_W: np.ndarray
    repeats: list[int]
    series: list[str]
    samples: tuple[int, int] = (0, 0)
    provenance: str = "measured"
    watts: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    like: Runs | None = None

    def __len__(self) -> int:
        return len(self.configs)

    @property
    def workers(self) -> int:
        """Loader processes of these runs."""
        return loading_workers(self.configs[0])

    @property
    def are_single(self) -> bool:
        """Whether each was made once, so that nothing tells how far jobs scatter."""
        return max(self.repeats) == 1

    @cached_property
    def work(self) -> Work:
        return works(self.site, self.configs, self.samples, self.workers)

    @property
    def longest(self) -> RunConfig:
        """The run with the most samples, which stands for the training that people mean."""
        return max(self.configs, key=lambda run: epoch_of(run, self.samples).training_samples)

    def only(self, chosen: np.ndarray) -> Runs:
        """The runs of a mask."""
        where = np.flatnonzero(chosen)
        lists = {name: [getattr(self, name)[i] for i in where] for name in OF_EACH}
        arrays = {"time_s": self.time_s[where], "power_W": self.power_W[where]}
        return dataclasses.replace(self, **lists, **arrays)

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Least and greatest of what varied."""
        work = self.work
        varied = {"devices": work.devices, "nodes": work.nodes}
        varied |= {"local_batch_size": work.local_batch_size, "samples of a device": work.trained}
        varied["accumulation_steps"] = np.array([run.accumulation_steps for run in self.configs])
        return {name: (float(of.min()), float(of.max())) for name, of in varied.items()}


OF_EACH = ("configs", "repeats", "series")


def to_dict(seen: Runs) -> dict:
    """Runs as JSON values, which ``from_dict`` takes."""
    plain = {each.name: getattr(seen, each.name) for each in dataclasses.fields(seen)}
    plain |= {"site": dataclasses.asdict(seen.site) | {"file": ""}}
    plain |= {"configs": [config.to_dict(run) for run in seen.configs]}
    plain |= {"time_s": seen.time_s.tolist(), "samples": list(seen.samples)}
    plain |= {"power_W": [None if np.isnan(W) else W for W in seen.power_W.tolist()]}
    return plain | {"like": to_dict(seen.like) if seen.like else None}


def from_dict(plain: dict) -> Runs:
    """Runs from what ``to_dict`` made of them."""
    plain = plain | {"site": systems.from_dict(plain["site"])}
    plain |= {"configs": [config.from_dict(run) for run in plain["configs"]]}
    plain |= {name: np.array(plain[name], float) for name in ("time_s", "power_W")}
    plain |= {"samples": tuple(plain["samples"])}
    return Runs(**plain | {"like": from_dict(plain["like"]) if plain["like"] else None})


def loading_workers(run: RunConfig) -> int:
    return run.loader_workers if run.data_staging else 0


def epoch_of(run: RunConfig, samples: tuple[int, int]) -> Epoch:
    """What an epoch does; ``samples`` stand in where only the data tell how many there are."""
    epoch = run.epoch()
    training = epoch.training_samples or samples[0]
    validation = epoch.validation_samples or samples[1]
    return dataclasses.replace(epoch, training_samples=training, validation_samples=validation)


def work(
    site: Site, run: RunConfig, samples: tuple[int, int], workers: int, **grid: np.ndarray
) -> Work:
    """What one GPU does in a run on a system, (1,).

    workers: of the fitted runs' loaders. grid: arrays of devices and local_batch_size instead.
    """
    devices = np.atleast_1d(grid.get("devices", run.devices)).astype(float)
    local_size = grid.get("local_batch_size", run.local_batch_size)
    local_size = np.broadcast_to(local_size, devices.shape).astype(float)
    epoch, own_workers = epoch_of(run, samples), loading_workers(run)
    nodes = np.ceil(devices / site.devices_per_node)
    trained = epoch.training_samples // devices
    over_training = 2 if epoch.evaluates_training_set else 1
    evaluated = epoch.validation_samples // devices + (over_training - 1) * trained
    passes = over_training + bool(epoch.validation_samples)
    if run.persistent_workers and own_workers:
        passes = passes / run.epochs
    waiting = bool(own_workers)  # without workers nothing is fetched ahead, and nothing waited for
    if workers > 1 and own_workers:
        waiting = (own_workers - 1) / (workers - 1)
    GB_per_s = np.where(nodes > 1, site.link_GB_per_s, site.gpu_link_GB_per_s)
    gradients_GB = epoch.gradient_bytes / BYTES_PER_GB
    known = np.where(GB_per_s > 0, GB_per_s, np.inf)  # `outside` says where it is not
    ones = np.ones(devices.shape)
    return Work(
        devices=devices,
        nodes=nodes,
        devices_of_node=devices / nodes,
        is_full=(devices >= site.devices_per_node).astype(float),
        local_batch_size=local_size,
        epochs=run.epochs * ones,
        trained=trained * epoch.forward_steps,
        evaluated=evaluated * epoch.forward_steps,
        passes=passes * ones,
        filled=waiting * over_training * np.minimum(local_size, trained),
        updates=trained // (local_size * run.accumulation_steps),
        allreduce_s=2 * (devices - 1) / devices * gradients_GB / known,
    )


def works(site: Site, asked: list[RunConfig], samples: tuple[int, int], workers: int) -> Work:
    """What one GPU does in each of several runs."""
    return model.together([work(site, run, samples, workers) for run in asked])


# ------------------------------------------------------------------------------------ published

PRINTED = ("devices", "local_batch_size", "global_batch_size", "dataset_samples", "epochs")


def published(workload: str, site: Site, max_devices: float = np.inf) -> Runs:
    """The study's runs of full length on a system; those of its other system give the priors.

    With ``max_devices`` they stand alone. Raises ValueError where nothing is published.
    """
    seen = _published(workload, site)
    if np.isfinite(max_devices):
        few = seen.work.devices <= max_devices
        if not few.any():
            fewest = int(seen.work.devices.min())
            raise ValueError(f"max-devices: nothing is published with so few; give {fewest}")
        return seen.only(few)
    for path in sorted(shipped("systems").glob("*.toml")):
        there = systems.site(path.stem)
        if there.published_as not in ("", site.published_as):
            try:
                return dataclasses.replace(seen, like=_published(workload, there))
            except ValueError:  # nothing is published of this workload there
                continue
    return seen


def _published(workload: str, site: Site) -> Runs:
    known = defaultdict(dict)
    for row in published_values.rows():
        asked = ("measurement", workload, site.published_as)
        if (row["kind"], row["workload"], row["device_name"]) == asked:
            key = tuple(row[name] for name in ("stage", *PRINTED))
            sizes = {name: int(row[name] or 0) for name in PRINTED}  # 0: the row has none
            facts = {"series": row["series"], "repeats": int(row["repeats"] or 1)}
            known[key] |= {row["quantity"]: float(row["value"]), **facts, **sizes}
    rows = [row for row in known.values() if {"gpu_hours", "energy_total"} <= row.keys()]
    full_length = max((row["epochs"] for row in rows), default=0)
    rows = [row for row in rows if row["epochs"] == full_length]
    if not site.published_as or not rows:
        raise ValueError(
            f"{workload} on {site.name}: nothing is published of it; fit runs of your own "
            "(--runs-dir), or choose resnet50 or fourcastnet on horeka-a100, or fourcastnet on "
            "horeka-h100"
        )
    planned = [run for study in studies.PAPER.values() for run in study(site.name)]
    planned = [run for run in planned if run.workload == workload]
    devices, gpu_hours, energy_kWh = np.array(
        [[row[name] for row in rows] for name in ("devices", "gpu_hours", "energy_total")]
    )
    return Runs(
        workload=workload,
        site=site,
        configs=[_configuration(planned, row) for row in rows],
        time_s=gpu_hours / devices * SECOND_PER_HOUR,
        power_W=energy_kWh / gpu_hours * 1000,
        repeats=[row["repeats"] for row in rows],
        series=[row["series"] for row in rows],
        provenance="published",
    )


def _configuration(planned: list[RunConfig], row: dict) -> RunConfig:
    """The run of a published row, which may leave out sizes that are those of the whole data."""
    for run in planned:
        own = config.asdict(run) | {"dataset_samples": run.epoch().training_samples}
        if all(own[name] == row[name] for name in PRINTED if row[name]):
            return run
    raise AssertionError(f"no study has the published run {row}")


# ------------------------------------------------------------------------------------------ own


def own(
    runs_dir: Path,
    workload: str,
    site: Site,
    max_devices: float = np.inf,
    run_ids: set[str] | None = None,
) -> Runs:
    """The valid records of a workload on a system, all or some; powers only where measured.

    Raises ValueError with the remedy where there are none, or they do not belong together.
    """
    found = [of for of in records.read_all(runs_dir) if of["valid"] and "training_time_s" in of]
    chosen = [of for of in found if (of["workload"], of["system"]) == (workload, site.name)]
    chosen = [of for of in chosen if of["devices"] <= max_devices]
    chosen = [of for of in chosen if run_ids is None or of["run_id"] in run_ids]
    if not chosen:
        there = sorted({f"{of['workload']} on {of['system']}" for of in found})
        few = f" on at most {max_devices} devices" if np.isfinite(max_devices) else ""
        what = f"no valid run of {workload} on {site.name}{few}"
        raise ValueError(f"{runs_dir}: {what}; there are {', '.join(there) or 'none'}")
    _require_alike(chosen, runs_dir)
    if site.scheduler == "local" and chosen[0]["launcher"] != "simulated":
        site = here(site, chosen[0]["machine"], chosen[0]["device_kind"] == "gpu")
    grouped = defaultdict(list)
    for record in chosen:
        grouped[without_repeats(as_made(record))].append(record)
    groups, configs = list(grouped.values()), list(grouped)
    notes, watts = _why_no_watts(chosen), {}
    power_W = [_mean(group, "mean_power_total_W") / group[0]["devices"] for group in groups]
    if notes:
        power_W = [np.nan] * len(groups)
    else:
        parts = [part for part in ("cpu", "ram") if f"energy_{part}_J" in chosen[0]]
        watts = {part: _mean(chosen, f"mean_power_{part}_W", "nodes") for part in parts}
    simulated = any(of.get("energy_total_provenance") == "simulated" for of in chosen)
    return Runs(
        workload=workload,
        site=site,
        configs=configs,
        time_s=np.array([_mean(group, "training_time_s") for group in groups]),
        power_W=np.array(power_W),
        repeats=[len(group) for group in groups],
        series=[""] * len(groups),
        samples=_samples(chosen[0], configs[0]),
        provenance="simulated" if simulated else "measured",
        watts=watts,
        notes=notes,
    )


def _require_alike(chosen: list[dict], runs_dir: Path) -> None:
    kinds = (("devices", "device_name"), ("stages", "stage"), ("data sets", "dataset"))
    for name, of in kinds:
        values = {str(record.get(of) or record["config"].get(of, "")) for record in chosen}
        if len(values) > 1:
            several = f"runs of several {name}, {', '.join(sorted(values))}"
            raise ValueError(f"{runs_dir}: {several}; put those of one into a folder")


def as_made(record: dict) -> RunConfig:
    """The configuration of a record, with the kind of device that it had.

    Of an earlier version, too: what that did not have is as it is by default.
    """
    plain = record["config"]
    known = set(config.types(type(config.make(plain["workload"]))))
    made = {name: value for name, value in plain.items() if name in known}
    return config.make(**made | {"device": "gpu" if record["device_kind"] == "gpu" else "cpu"})


def without_repeats(run: RunConfig) -> RunConfig:
    """The configuration that a run's repeats share."""
    return config.replace(
        run, **{name: same for name, same in ONE_OF_MANY.items() if hasattr(run, name)}
    )


def times_s(
    runs_dir: Path, workload: str, system: str, but: set[str]
) -> dict[RunConfig, list[float]]:
    """Training times of valid records by what their repeats share; ``but``: names left out."""
    found = defaultdict(list)
    for record in records.read_all(runs_dir):
        is_asked = (record["workload"], record["system"]) == (workload, system) and record[
            "run_id"
        ] not in but
        if is_asked and record["valid"]:
            found[without_repeats(as_made(record))].append(record["training_time_s"])
    return found


def here(site: Site, machine: dict, on_gpu: bool) -> Site:
    """This machine, one node, with as many devices as it has, which its file does not know.

    Cores are no GPU, and share their gradients through memory: ``machine`` as a record has it.
    """
    if on_gpu:
        return dataclasses.replace(site, nodes=1, devices_per_node=max(len(machine["gpus"]), 1))
    site = dataclasses.replace(site, nodes=1, devices_per_node=max(machine["cores"], 1), gpu="")
    return dataclasses.replace(site, gpu_link_GB_per_s=site.gpu_link_GB_per_s or MEMORY_GB_PER_S)


def _why_no_watts(chosen: list[dict]) -> list[str]:
    """Why only times are fitted; nothing where all energies are known, of the same components."""
    provenances = {record.get("energy_total_provenance", "missing") for record in chosen}
    components = {frozenset(ENERGIES & record.keys()) for record in chosen}
    if not provenances <= WATTS_KNOWN:
        return [f"energies are {', '.join(sorted(provenances))}: a fit of the time alone"]
    return (
        ["energies are of different components: a fit of the time alone"]
        if len(components) > 1
        else []
    )


def _mean(group: list[dict], name: str, per: str = "") -> float:
    """Geometric mean of a field over runs, NaN where one has none; ``per``: divided by another field."""
    values = [record.get(name, np.nan) / (record[per] if per else 1) for record in group]
    return float(np.exp(np.mean(np.log(values))))


def _samples(record: dict, run: RunConfig) -> tuple[int, int]:
    """Sizes of the training and of the validation data, as a record counted them."""
    training = record.get("dataset_samples", 0)
    evaluated = record.get("samples_evaluated", 0) / run.epochs
    if run.epoch().evaluates_training_set:
        evaluated -= training
    return training, round(max(0, evaluated))
