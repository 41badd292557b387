"""Runs as the model sees them: what one GPU does by a configuration, and what runs took for it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np

from energynn import records
from energynn.experiment import config, published_values, studies, systems
from energynn.experiment.config import Epoch, RunConfig
from energynn.experiment.systems import Site
from energynn.forecast import command
from energynn.measure.energy import SECOND_PER_HOUR
from energynn.measure.window import SIZE_FILE

BYTES_PER_GB = 1e9
CPU_LINK_GB_PER_S = 8.0  # between processes on cores, before their runs have told
# where nobody tells: as fast as NVLink; runs tell the part of it that is reached
GUESSED_LINK_GB_PER_S = 450.0
GUESSED_GRADIENT_BYTES = 1e8
GUESSED_LOCAL_BATCH_SIZE = 32
# Of what energies are, where all of them were measured.
SCOPES = {
    "total": "",
    "gpu": ", energies of the GPUs alone",
    "gpu+cpu": ", energies without memory",
    "": "",
}
# Of a recipe, what runs of one fit may differ in: a forecast takes account of it, or it changes
# neither time nor power of a step.
PARAMETERS_THAT_MAY_DIFFER = {
    "command",
    "workload",
    "epochs",
    "seed",
    "learning_rate",
    "evaluate_training_set",
    "training_years",
    "validation_years",
    "test_years",
    "warmup_epochs",
    "plateau_patience",
    "on_bad_image",
    "step_period_s",
}


class Observation(msgspec.Struct, frozen=True):
    """What one configuration took, repeats as their mean.

    time_s: of the training. power_W: of one GPU, with its part of a node or alone, as the runs'
    scope says; power_gpu_W: of these the GPU alone; None: not known. spread: of the repeats' times,
    the longest over the shortest - 1.
    """

    config: dict
    time_s: float
    power_W: float | None = None
    repeats: int = 1
    spread: float = 0.0
    power_gpu_W: float | None = None


class ObservedRuns(msgspec.Struct, frozen=True, dict=True):
    """Configurations of a workload on a system and what they took.

    samples: of the training and of the validation data. like: runs on another system, which give
    the priors. scope: of their powers, one of SCOPES.
    """

    workload: str
    site: Site
    taken: list[Observation]
    samples: tuple[int, int] = (0, 0)
    provenance: str = "measured"
    like: ObservedRuns | None = None
    scope: str = "total"

    def __len__(self) -> int:
        return len(self.taken)

    @functools.cached_property
    def configs(self) -> list[RunConfig]:
        return [config.config_from_dict(each.config) for each in self.taken]

    @functools.cached_property
    def work(self) -> np.ndarray:
        return self.work_of(self.configs)

    @property
    def time_s(self) -> np.ndarray:
        return np.array([run.time_s for run in self.taken])

    @property
    def power_W(self) -> np.ndarray:
        return np.array([run.power_W for run in self.taken], float)

    @property
    def power_gpu_W(self) -> np.ndarray:
        return np.array([run.power_gpu_W for run in self.taken], float)

    @property
    def longest_run(self) -> RunConfig:
        """The run with the most samples, which stands for the training that people mean.

        Of several, that with the largest global batch, on the most devices.
        """
        return max(
            self.configs,
            key=lambda run: (
                self.epoch(run).training_samples,
                run.global_batch_size,
                run.devices,
            ),
        )

    def epoch(self, run: RunConfig) -> Epoch:
        """Describe an epoch; ``samples`` stand in where only the data tell how many there are."""
        epoch = run.epoch()
        training = epoch.training_samples or self.samples[0]
        return dataclasses.replace(
            epoch,
            training_samples=training,
            validation_samples=epoch.validation_samples or self.samples[1],
        )

    def work_of(self, asked: list[RunConfig]) -> np.ndarray:
        """Count what one GPU does in runs on this system: fields as the model's text says."""
        rows = [_work_of_run(self, run) for run in asked]
        fields = [(name, float) for name in rows[0]]
        return np.array([tuple(row.values()) for row in rows], fields)

    @functools.cached_property
    def where_made(self) -> ObservedRuns:
        """The same runs on the system that they were made on: published ones may stand for those of
        another, whose nodes and links a forecast asks for.
        """
        if self.provenance != "published" or self.site.name in PUBLISHED_SYSTEMS:
            return self
        homes = map(systems.read_site, PUBLISHED_SYSTEMS)
        by_gpu = {home.published_as: home for home in homes}
        return msgspec.structs.replace(self, site=by_gpu[self.site.published_as])

    def subset(self, chosen: np.ndarray) -> ObservedRuns:
        """Choose runs by a mask."""
        return msgspec.structs.replace(
            self, taken=list(itertools.compress(self.taken, chosen))
        )


def _work_of_run(seen: ObservedRuns, run: RunConfig) -> dict[str, float]:
    site = seen.site
    epoch = seen.epoch(run)
    nodes = site.nodes_of(run.devices)
    workers = run.loader_workers if run.data_staging else 0
    trained = epoch.training_samples // run.devices
    evaluated = validated = epoch.validation_samples // run.devices
    passes = 1 + bool(epoch.validation_samples)
    # Each local batch takes the time of an update, the last of those that add up the all-reduce.
    accumulated = run.accumulation_steps
    # Without workers nothing is fetched ahead, and nothing waited for.
    filled = min(run.local_batch_size, trained) if workers else 0
    if epoch.evaluates_training_set:
        evaluated += trained
        passes += 1
        filled *= 2
    if run.persistent_workers and workers or isinstance(run, command.Config):
        passes /= run.epochs  # it starts once
    # Of a command batch and gradients may be unknown: runs on several GPUs tell by how much a
    # guess is wrong. Of cores their contention stands for it.
    guessed = site.gpu != "" and any(each.devices > 1 for each in seen.configs)
    size = run.local_batch_size or guessed * GUESSED_LOCAL_BATCH_SIZE
    # one node cannot tell its own cores from a storage that all nodes share
    is_shared = any(site.nodes_of(each.devices) > 1 for each in seen.configs)
    updates = trained // (size * accumulated) * accumulated if size else 0
    gradient_bytes = epoch.gradient_bytes or guessed * GUESSED_GRADIENT_BYTES
    # Where it is not known, `outside` says so.
    link_GB_per_s = site.link_GB_per_s if nodes > 1 else site.gpu_link_GB_per_s
    allreduce_GB = 2 * (1 - 1 / run.devices) * gradient_bytes / BYTES_PER_GB
    return {
        "devices": run.devices,
        "nodes": nodes,
        "devices_of_node": run.devices / nodes,
        "sharers": run.devices / (1 if is_shared else nodes),
        "is_full": run.devices >= site.devices_per_node,
        "local_batch_size": run.local_batch_size,
        "workers": workers,
        "epochs": run.epochs,
        "trained": trained * epoch.forward_steps,
        "evaluated": evaluated * epoch.forward_steps,
        "validated": validated * epoch.forward_steps,
        "passes": passes,
        "begun": 1 - passes if isinstance(run, command.Config) else 0,
        "filled": filled,
        "updates": updates,
        "allreduce_s": allreduce_GB
        / (link_GB_per_s or GUESSED_LINK_GB_PER_S)
        / accumulated,
        "has_known_link": link_GB_per_s * epoch.gradient_bytes > 0,
        "step_period_s": run.step_period_s,
    }


# ------------------------------------------------------------------------------------ published

PUBLISHED_SYSTEMS = ("horeka-a100", "horeka-h100")


def published_runs(workload: str, system: str) -> ObservedRuns:
    """Read the study's runs of full length on a system; those of another one give the priors.

    Raises ValueError where nothing is published.
    """
    seen = _full_length_runs(printed_runs(workload, system))
    if not len(seen):
        hint = config.suggestion(workload, config.CONFIGS.keys() - {workload})
        raise ValueError(
            f"{workload} on {seen.site.name}: nothing is published of it{hint}; fit runs of "
            "your own (`energynn forecast fit --runs-dir`) and give --fit; what other GPUs take: "
            "resnet50 and fourcastnet by --system horeka-a100, fourcastnet by horeka-h100; or by a "
            'copy of this system\'s file with their published_as, as "NVIDIA A100-40GB"'
        )
    every = [printed_runs(workload, name) for name in PUBLISHED_SYSTEMS]
    published_as = seen.site.published_as
    others = [each for each in every if each.site.published_as != published_as]
    likes = map(_full_length_runs, others)
    return msgspec.structs.replace(seen, like=next(filter(len, likes), None))


@functools.cache
def printed_runs(workload: str, system: str) -> ObservedRuns:
    """Read the published runs on a system; there may be none."""
    site = systems.read_site(system)
    site = msgspec.structs.replace(site, gpu=site.gpu or site.published_as)
    rows = [
        row
        for row in published_values.printed_runs()
        if {"gpu_hours", "energy_total_kWh"} <= row.keys()
        and row["workload"] == workload
        and row["device_name"] == site.published_as
    ]
    taken = [_observation_of_printed_run(row, site) for row in rows]
    has_ram = all("ram" in row["components"] for row in rows)
    scope = "total" if has_ram else "gpu+cpu"
    return ObservedRuns(workload, site, taken, provenance="published", scope=scope)


def _full_length_runs(seen: ObservedRuns) -> ObservedRuns:
    """Choose the runs with the most epochs."""
    epochs = np.array([run.epochs for run in seen.configs])
    return seen.subset(epochs == epochs.max(initial=0))


def _observation_of_printed_run(row: dict, site: Site) -> Observation:
    """Take what a printed run took, with the configuration that its series has."""
    first, _, _ = row["series"].partition(" ")
    planned = studies.PAPER_STUDIES[first](site.name)
    run = next(run for run in planned if run.devices == row["devices"])
    time_s = SECOND_PER_HOUR * row["gpu_hours"] / run.devices
    power_W = 1000 * row["energy_total_kWh"] / row["gpu_hours"]
    return Observation(config.asdict(run), time_s, power_W, row["repeats"])


# ------------------------------------------------------------------------------------------ own


def valid_records(runs_dir: Path, site: Site) -> list[records.Record]:
    """Read the valid records of trainings on a system, and of measured commands with samples."""
    readable = records.read_all(runs_dir)
    return [record for record in readable if not _reason_to_leave_out(record, site)]


def _reason_to_leave_out(record: records.Record, site: Site) -> str:
    """Say why a record is none of ``valid_records``; "" of one that is."""
    if not record.valid:
        return "not valid"
    nodes = site.nodes_of(record.devices)
    if record.nodes and record.nodes > nodes:
        return f"on {record.nodes} nodes, not {nodes} as {site.file} has them"
    if "command" in record.config:
        return (
            "" if "training_samples" in record.config else "measured without --samples"
        )
    if record.system != site.name:
        return f"of system {record.system}"
    return "" if record.training_time_s is not None else "without a time"


def read_checked_runs(
    runs_dir: Path, workload: str, site: Site, parameters: dict
) -> tuple[ObservedRuns, dict[str, str]]:
    """Make runs from the valid records of a workload that have these parameters, as texts.

    Also says by its name why each other run is left out. Raises ValueError with the first fault of
    a record, and where no run is left.
    """
    if faults := records.check(runs_dir):
        raise ValueError(
            f"{faults[0]}; move this run out of {runs_dir}, or make it again"
        )
    chosen = []
    left_out = {}
    for folder, record in records.read_records_by_folder(runs_dir).items():
        reason = _reason_to_leave_out(record, site)
        if reason := reason or _difference(record, workload, parameters):
            left_out[folder.name] = reason
        else:
            chosen.append(record)
    if not chosen:
        there = ", ".join(sorted(set(left_out.values()))) or "none at all"
        raise ValueError(
            f"no valid run of {workload} on {site.name} in {runs_dir}; there are: {there}; a "
            "command counts with `energynn measure --name NAME --devices N --samples N`"
        )
    return own_runs(chosen, workload, site, workload), left_out


def _difference(record: records.Record, workload: str, parameters: dict) -> str:
    """Say what a record is of, where it is not of a workload with these parameters; else ""."""
    if (name := workload_name(record)) != workload:
        return f"of {name}"
    known = run_parameters(record) | {"device_name": record.device_name}
    others = [name for name in parameters if str(known.get(name)) != parameters[name]]
    return f"of another {min(others)}" if others else ""


def own_runs(
    chosen: list[records.Record], workload: str, site: Site, named: str = ""
) -> ObservedRuns:
    """Make runs from the records of a workload, or of commands of this name.

    ``named``: the workload that the caller means, as ``config.config_from_dict`` takes it. Powers
    are of what was measured in all of them: the whole, else the GPUs alone. Raises ValueError with
    the remedy where they do not belong together.
    """
    recipes = set(map(recipe_of_record, chosen))
    if kinds := frozenset.union(*recipes) - frozenset.intersection(*recipes):
        raise ValueError(
            f"{workload}: runs of several recipes or devices ({', '.join(sorted(kinds))}); choose "
            "those of one, by parameters, as -p preset=paper, or by what differs, or as --runs-dir"
        )
    # whose data stand in where only they tell how many samples there are
    first = max(chosen, key=lambda record: record.dataset_samples or 0)
    on_gpu = first.device_kind == "gpu"
    if site.gpu and not on_gpu:
        raise ValueError(
            f"{workload}: its runs were on {first.device_name}, {site.name} has GPUs; give "
            "runs made there, or a system of cores: --system local, or a file with "
            'scheduler = "local"'
        )
    if on_gpu:
        name = first.device_name
        site = msgspec.structs.replace(site, gpu=site.gpu or name, published_as=name)
    if site.scheduler == "local":
        # a job of a shared node sees a part of it
        sites = [site_of_this_machine(site, one.machine, on_gpu) for one in chosen]
        site = max(sites, key=lambda one: one.devices_per_node)
    groups = defaultdict(list)
    for record in chosen:
        groups[_config_of_record(record, named)].append(record)
    run = _config_of_record(first, named)
    scope = _measured_scope(chosen)
    provenances = {record.energy_total_provenance for record in chosen}
    training = first.dataset_samples or 0
    evaluated = (first.samples_evaluated or 0) // run.epochs
    evaluated -= training * run.epoch().evaluates_training_set
    return ObservedRuns(
        workload,
        site,
        [_mean_observation(run, group, scope) for run, group in groups.items()],
        samples=(training, evaluated),
        provenance="simulated" if provenances == {"simulated"} else "measured",
        scope=scope,
    )


def _measured_scope(chosen: list[records.Record], scopes=("total", "gpu")) -> str:
    """Say of what all energies were measured: the whole, else the GPUs alone, else nothing."""
    for scope in scopes:
        of = {getattr(record, f"energy_{scope}_provenance") for record in chosen}
        if of <= {"measured", "simulated"}:
            return scope
    return ""


def workload_name(record: records.Record) -> str:
    """Name what was trained: the workload, or the name that a measured command was given."""
    if "command" in record.config:
        return record.name or "command"
    return record.workload


def recipe_of_fit(values: dict) -> dict:
    """Select from a configuration what all runs of one fit share."""
    return config.recipe(values, PARAMETERS_THAT_MAY_DIFFER)


def run_parameters(record: records.Record) -> dict:
    """Read the parameters of a run; of a command also what its windows told of its network."""
    told = record.metrics if "command" in record.config else {}
    return {SIZE_FILE: told.get(SIZE_FILE, 0)} | record.config


def recipe_of_record(record: records.Record) -> frozenset[str]:
    """Say in words what runs share that one fit is made of: their recipe and devices."""
    shared = recipe_of_fit(run_parameters(record)).items()
    words = [f"{name} {value}" for name, value in shared]
    return frozenset([f"device_name {record.device_name}", *words])


def _config_of_record(record: records.Record, named: str) -> RunConfig:
    """Read what was made, whatever its seed and repeat, and however it was watched."""
    plain = record.config
    if "command" in plain:
        sizes = ("epochs", "local_batch_size", "training_samples", "gradient_bytes")
        return config.make(
            command.__name__,
            devices=record.devices,
            **{name: run_parameters(record).get(name) for name in sizes},
        )
    kept = {name: plain[name] for name in plain if name not in config.WATCH_FIELDS}
    kept["device"] = "gpu" if record.device_kind == "gpu" else "cpu"
    kept["seed"] = 0
    kept["repeat"] = 0
    return config.config_from_dict(kept, named)


def _mean_observation(
    run: RunConfig, group: list[records.Record], scope: str
) -> Observation:
    """Take the geometric mean of repeats: as much too long counts as too short."""
    times_s = [record.training_time_s for record in group]
    time_s = statistics.geometric_mean(times_s)
    spread = max(times_s) / min(times_s) - 1
    power_W = None
    if scope:
        powers_W = [_power_of_used_devices_W(record, scope) for record in group]
        power_W = statistics.geometric_mean(powers_W) / run.devices
        spread = max(spread, max(powers_W) / min(powers_W) - 1)
    power_gpu_W = None
    if scope == "total" and _measured_scope(group, ("gpu",)):
        powers_W = [_power_of_used_devices_W(record, "gpu") for record in group]
        power_gpu_W = statistics.geometric_mean(powers_W) / run.devices
    return Observation(
        config.asdict(run), time_s, power_W, len(group), spread, power_gpu_W
    )


def _power_of_used_devices_W(record: records.Record, scope: str) -> float:
    """Give the mean power without that of GPUs which only stood in the host, and were idle; NaN
    where that is not known.
    """
    primary = (sensor for sensor in record.sensors if sensor.primary)
    gpus = len({(one.host, one.id) for one in primary if one.component == "gpu"})
    unused = max(0, gpus - record.devices) / max(1, gpus)
    unused_W = 0.0
    if unused:
        idle_W = record.idle_power_gpu_before_W
        unused_W = unused * (math.nan if idle_W is None else idle_W)
    return getattr(record, f"mean_power_{scope}_W") - unused_W


def site_of_this_machine(site: Site, machine: dict, on_gpu: bool) -> Site:
    """Describe this machine: nodes and devices that its file leaves out are ``machine``'s.

    That is as a record has it. Cores are no GPU, and share their gradients through memory.
    """
    counted = max(len(machine["gpus"]) if on_gpu else machine["cores"], 1)
    changed = {} if on_gpu else {"gpu_link_GB_per_s": CPU_LINK_GB_PER_S}
    changed["devices_per_node"] = site.devices_per_node or counted
    return msgspec.structs.replace(site, nodes=site.nodes or 1, **changed)
