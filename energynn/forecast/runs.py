"""Runs as the model sees them: what one GPU does by a configuration, and what published and own runs took for it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from energynn import config, published_values, records, studies
from energynn.cluster.systems import Site
from energynn.config import Epoch, RunConfig
from energynn.forecast import model
from energynn.forecast.calibrate import Observations
from energynn.forecast.model import Work
from energynn.measure.energy import COMPONENTS, SECOND_PER_HOUR

BYTES_PER_GB = 1e9
ENERGIES = {f"energy_{component}_J" for component in COMPONENTS}
WATTS_KNOWN = ("measured", "simulated")  # an energy estimated from time says nothing of power
MEMORY_GB_PER_S = 1.0  # between processes on cores, before their runs have told
ONE_OF_MANY = dict(seed=0, repeat=0, initial_run="")  # fields in which repeats of a run differ


@dataclass(frozen=True)
class Runs:
    """Configurations and what they took, repeats as their mean.

    samples: of the training and of the validation data. watts: power of a node's CPUs and memory where runs have
    measured them, ``{"cpu": W, "ram": W}``. notes: what was left out, in words.
    """

    workload: str
    site: Site
    configs: list[RunConfig]
    observations: Observations
    samples: tuple[int, int]
    provenance: str
    watts: dict[str, float]
    notes: list[str]

    @property
    def workers(self) -> int:
        """Loader processes of the runs that one calibrates with."""
        return loading_workers(self.configs[0])

    def only(self, chosen: np.ndarray) -> Runs:
        """The runs of a mask."""
        configs = [run for run, is_chosen in zip(self.configs, chosen, strict=True) if is_chosen]
        return dataclasses.replace(self, configs=configs, observations=self.observations[chosen])


def loading_workers(run: RunConfig) -> int:
    return run.loader_workers if run.data_staging else 0


def epoch_of(run: RunConfig, samples: tuple[int, int]) -> Epoch:
    """What an epoch does; ``samples`` stand in where only the data tell how many there are."""
    epoch = run.epoch()
    training, validation = epoch.training_samples or samples[0], epoch.validation_samples or samples[1]
    return dataclasses.replace(epoch, training_samples=training, validation_samples=validation)


def work(site: Site, run: RunConfig, samples: tuple[int, int], workers: int, **grid: np.ndarray) -> Work:
    """What one GPU does in a run on a system, (1,); ``grid``: arrays of devices and of local_batch_size instead.

    ``workers``: of the calibrated runs, in whose units tau is.
    """
    devices = np.atleast_1d(grid.get("devices", run.devices)).astype(float)
    local_size = np.broadcast_to(grid.get("local_batch_size", run.local_batch_size), devices.shape).astype(float)
    epoch = epoch_of(run, samples)
    nodes = np.ceil(devices / site.devices_per_node)
    trained = epoch.training_samples // devices
    seconds_of_GB = np.where(nodes > 1, _inverse(site.link_GB_per_s), _inverse(site.gpu_link_GB_per_s))
    own_workers = loading_workers(run)
    over_training = 2 if epoch.evaluates_training_set else 1  # passes over the training set
    passes = over_training + 1 if epoch.validation_samples else over_training
    if run.persistent_workers and own_workers:
        passes = passes / run.epochs
    waiting = 1.0 if own_workers else 0.0  # without workers nothing is fetched ahead, and nothing waited for
    if workers > 1 and own_workers:
        waiting = (own_workers - 1) / (workers - 1)
    ones = np.ones(devices.shape)
    evaluated = epoch.validation_samples // devices + (over_training - 1) * trained
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
        allreduce_s=2 * (devices - 1) / devices * epoch.gradient_bytes / BYTES_PER_GB * seconds_of_GB,
        workers=max(own_workers, 1) / max(workers, 1) * ones,
    )


def _inverse(bandwidth: float) -> float:
    """Seconds of a GB; none where the bandwidth is not known, which ``outside`` says."""
    return 1 / bandwidth if bandwidth else 0.0


def works(site: Site, runs: list[RunConfig], samples: tuple[int, int], workers: int) -> Work:
    return model.together([work(site, run, samples, workers) for run in runs])


# ----------------------------------------------------------------------------------------------------------- published


def published(workload: str, site: Site, max_devices: float = np.inf) -> Runs:
    """The study's runs of full length on a system, with the configurations that energynn/studies.py gives them.

    Raises ValueError where nothing is published of the system or the workload.
    """
    known = defaultdict(dict)
    for row in published_values.rows():
        if row["kind"] == "measurement" and row["workload"] == workload and row["device_name"] == site.published_as:
            key = tuple(row[name] for name in ("stage", *PRINTED))
            sizes = {name: int(row[name] or 0) for name in PRINTED}  # 0: the row has none
            known[key] |= {row["quantity"]: float(row["value"]), "series": row["series"], **sizes}
    rows = [row for row in known.values() if {"gpu_hours", "energy_total"} <= row.keys()]
    full_length = max((row["epochs"] for row in rows), default=0)
    rows = [row for row in rows if row["epochs"] == full_length]
    if not site.published_as or not rows:
        raise ValueError(
            f"{workload} on {site.name}: nothing is published of it; fit runs of your own (--runs-dir), or choose "
            "resnet50 or fourcastnet on horeka-a100, or fourcastnet on horeka-h100"
        )
    if (fewest := min(row["devices"] for row in rows)) > max_devices:
        raise ValueError(f"max-devices: nothing is published of {workload} with so few; give at least {fewest}")
    rows = [row for row in rows if row["devices"] <= max_devices]
    planned = [run for name in studies.PAPER for run in studies.PAPER[name](site.name) if run.workload == workload]
    configs = [_configuration(planned, row) for row in rows]
    observations = Observations(
        works(site, configs, (0, 0), loading_workers(configs[0])),
        np.array([row["gpu_hours"] / row["devices"] * SECOND_PER_HOUR for row in rows]),
        np.array([row["energy_total"] / row["gpu_hours"] * 1000 for row in rows]),
        tuple(row["series"] for row in rows),
    )
    return Runs(workload, site, configs, observations, (0, 0), "published", {}, [])


PRINTED = ("devices", "local_batch_size", "global_batch_size", "dataset_samples", "epochs")


def _configuration(planned: list[RunConfig], row: dict) -> RunConfig:
    """The run of a published row, which may leave out sizes that are those of the whole data set."""
    for run in planned:
        own = config.asdict(run) | {"dataset_samples": run.epoch().training_samples}
        if all(own[name] == row[name] for name in PRINTED if row[name]):
            return run
    raise AssertionError(f"no study has the published run {row}")


# ----------------------------------------------------------------------------------------------------------------- own


def own(
    runs_dir: Path, workload: str, site: Site, max_devices: float = np.inf, run_ids: set[str] | None = None
) -> Runs:
    """The valid records of a workload on a system, all or some; energies only where sensors measured them.

    Raises ValueError with the remedy where there are none, or where they do not belong together.
    """
    found = [record for record in records.read_all(runs_dir) if "training_time_s" in record and record["valid"]]
    chosen = [record for record in found if (record["workload"], record["system"]) == (workload, site.name)]
    chosen = [record for record in chosen if record["devices"] <= max_devices]
    chosen = [record for record in chosen if run_ids is None or record["run_id"] in run_ids]
    if not chosen:
        there = sorted({f"{record['workload']} on {record['system']}" for record in found})
        few = f" on at most {max_devices} devices" if np.isfinite(max_devices) else ""
        what = f"no valid run of {workload} on {site.name}{few}"
        raise ValueError(f"{runs_dir}: {what}; there are {', '.join(there) or 'none'}")
    for name, of in (("devices", "device_name"), ("stages", "stage"), ("data sets", "dataset")):
        values = sorted({str(record.get(of) or record["config"].get(of, "")) for record in chosen})
        if len(values) > 1:
            raise ValueError(f"{runs_dir}: runs of several {name}, {', '.join(values)}; put those of one into a folder")
    if site.scheduler == "local" and chosen[0]["launcher"] != "simulated":
        site = here(site, chosen[0]["machine"], chosen[0]["device_kind"] == "gpu")
    notes = _why_no_watts(chosen)
    grouped = defaultdict(list)
    for record in chosen:
        grouped[without_repeats(as_made(record))].append(record)
    configs = list(grouped)
    samples = _samples(chosen[0], configs[0])
    observations = Observations(
        works(site, configs, samples, loading_workers(configs[0])),
        np.array([_mean(group, "training_time_s") for group in grouped.values()]),
        np.array([_mean(group, "mean_power_total_W") / group[0]["devices"] for group in grouped.values()]),
        tuple(str(number) for number in range(len(grouped))),
    )
    if notes:
        watts, observations = {}, dataclasses.replace(observations, power_W=np.full(len(configs), np.nan))
    else:
        watts = {c: _mean(chosen, f"mean_power_{c}_W", "nodes") for c in ("cpu", "ram") if f"energy_{c}_J" in chosen[0]}
    simulated = any(record.get("energy_total_provenance") == "simulated" for record in chosen)
    return Runs(workload, site, configs, observations, samples, "simulated" if simulated else "measured", watts, notes)


def as_made(record: dict) -> RunConfig:
    """The configuration of a record, with the kind of device that it had, not the one that was asked for.

    Of an earlier version, too: what that did not have is as it is by default.
    """
    plain = record["config"]
    known = set(config.types(type(config.make(plain["workload"]))))
    made = {name: value for name, value in plain.items() if name in known}
    return config.make(**made | {"device": "gpu" if record["device_kind"] == "gpu" else "cpu"})


def without_repeats(run: RunConfig) -> RunConfig:
    """The configuration that a run's repeats share."""
    return config.replace(run, **{name: same for name, same in ONE_OF_MANY.items() if hasattr(run, name)})


def times_s(runs_dir: Path, workload: str, system: str, but: set[str]) -> dict[RunConfig, list[float]]:
    """Training times of valid records by what their repeats share; ``but``: names of runs that are left out."""
    found = defaultdict(list)
    for record in records.read_all(runs_dir):
        is_asked = (record["workload"], record["system"]) == (workload, system) and record["run_id"] not in but
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
    if not provenances <= set(WATTS_KNOWN):
        return [f"energies are {', '.join(sorted(provenances))}: a fit of the time alone"]
    return ["energies are of different components: a fit of the time alone"] if len(components) > 1 else []


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
