"""Make one measured run: check that it can work, write down what is intended, and start its supervisor.

Three processes stand between a person and the trainer, so that none of them can take the run's data with it:
the notebook (or shell) that calls ``run``; the supervisor, ``python -m energynn.launch.supervise RUN_DIR``, which
starts mpirun, relays its lines and writes the record; and mpirun with the ranks, each under perun.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from energynn import config as configuration
from energynn import records
from energynn.config import RunConfig
from energynn.data import manifests
from energynn.files import REPOSITORY, lock, shipped, utc_now, write_json
from energynn.launch import watch
from energynn.launch.supervise import APART, DELETED, alone_on_host
from energynn.launchers import WITHOUT_PERUN, Launcher, find_launcher
from energynn.measure import machine
from energynn.measure.energy import SECOND_PER_HOUR
from energynn.measure.samples import segments
from energynn.progress import energy_words, tell

START_LOCK = ".start"  # held from the start of a run to its end
LEAST_FREE_B = 16 * 2**20
POWER_S = 30.0  # between two lines of power and energy: each reads the new samples from the storage
CORE_OPERATIONS_PER_S = 1.1e10  # multiply-adds of ResNet50 in float32 on a core of an AMD EPYC, runs/large-batch


def run(config: RunConfig, runs_dir: str | Path = "runs") -> Path:
    """Make one run and return its folder; a run whose valid record exists is not made again.

    The trainer's lines are printed as they come. An earlier attempt without a valid record is moved to
    runs/<system>/superseded/. Raises ValueError with the remedy before anything starts if the run cannot work,
    InterruptedError if it was stopped and can go on, RuntimeError with the reason if it failed or was killed.
    """
    if not isinstance(runs_dir, str | Path) or not str(runs_dir):
        raise ValueError(f"runs_dir: must be the name of a folder, got {runs_dir!r}")
    runs_dir = Path(runs_dir).absolute()
    run_dir = runs_dir / config.system / configuration.run_id(config)
    if records.is_made(run_dir):
        tell(f"{run_dir.name}: a valid record exists; not run again")
        return run_dir
    intent = intend(config, run_dir)
    for warning in preflight(intent):
        tell(f"energynn: warning: {warning}")
    run_dir.mkdir(parents=True, exist_ok=True)
    held = lock(run_dir / START_LOCK)  # before anything is moved: the same run may be started twice in an instant
    if held is None:
        raise ValueError(f"{run_dir.name}: this run goes on already")
    try:
        if not records.is_made(run_dir):  # it may have ended since we looked
            begin(intent)
            _supervised(intent, held)
    finally:
        held.close()
    record = records.read(run_dir)
    if not (run_dir / "run.json").exists():
        raise RuntimeError(f"{run_dir.name}: {DELETED}; nothing of it is recorded")
    if record is None:
        raise RuntimeError(f"{run_dir.name}: the supervisor died; `energynn check --recover {runs_dir}` says more")
    if record["status"] == "interrupted":
        raise InterruptedError(f"{run_dir.name}: interrupted: {record['status_reason']}")
    if record["status"] != "finished":
        raise RuntimeError(f"{run_dir.name}: {record['status']}: {record['status_reason']} (see {run_dir / 'log.txt'})")
    return run_dir


def _supervised(intent: Intent, held: TextIO) -> None:
    """Let a supervisor make the run, and print its lines as they come; it holds the lock, too, and may outlive us."""
    terminal = _papermills_terminal()
    view_ended = watch.in_notebook(intent.run_dir)
    words = [str(intent.run_dir), str(os.getpid()), intent.launcher.mpirun, intent.launcher.flavour]
    command = [sys.executable, "-m", "energynn.launch.supervise", *words]
    supervisor = subprocess.Popen(command, pass_fds=[held.fileno()], **APART)
    try:
        for line in _with_power(supervisor.stdout, intent.run_dir, max(POWER_S, intent.config.devices / 4)):
            tell(line.removesuffix("\n"))
            if terminal:
                terminal.write(line)
    except BaseException:  # the cell was interrupted: stop the run, but let its supervisor write the record
        supervisor.terminate()
        for line in supervisor.stdout:
            tell(line.removesuffix("\n"))
        raise
    finally:
        supervisor.wait()
        if view_ended:
            view_ended.set()


def _with_power(lines: Iterable[str], run_dir: Path, every_s: float) -> Iterator[str]:
    """The lines; below one that tells of progress, now and then, what the run draws and has used so far."""
    looking, told = None, -math.inf
    for line in lines:
        yield line
        if " samples/s, " not in line or time.monotonic() - told < every_s:
            continue
        told = time.monotonic()
        try:
            looking = looking or watch.Watch(run_dir)
            state = looking.look()
        except Exception:  # a view that fails must not stop the run that it shows
            continue
        if state["devices"]:
            used = energy_words((state["energy_J"] + state["energy_before_J"]) / SECOND_PER_HOUR)
            known = ", ".join(sorted({device["provenance"] for device in state["devices"]}))
            yield f"  {state['power_W']:.0f} W, {used} so far ({known})\n"


@dataclass(frozen=True)
class Intent:
    """A run before it starts: what was found out for it, once, and what its run.json will hold."""

    run_dir: Path
    config: RunConfig
    launcher: Launcher
    run_json: dict


def intend(config: RunConfig, run_dir: Path) -> Intent:
    """What a run in this folder will be on this machine, with these data and this code.

    Raises ValueError with the remedy if the data are missing or nothing can be written.
    """
    _refuse_a_slip(run_dir.parent)
    manifests.verify(config.dataset, config=config)  # before anything is written
    runs_dir = run_dir.parent.parent
    free_B = _free_space(runs_dir)
    if free_B < LEAST_FREE_B:
        raise ValueError(
            f"runs_dir: {free_B / 2**20:.1f} MiB free in {runs_dir}; make room for {LEAST_FREE_B >> 20} MiB"
        )
    described = machine.describe_machine()
    system = machine.load(runs_dir, config.system, described)
    launcher = find_launcher(config.devices)
    on_gpu = config.device == "gpu" or (config.device == "auto" and bool(described["gpus"]))
    data_root = manifests.root(config.dataset).absolute()
    commit, dirty = machine.git_state()
    run_json = {
        "run_id": run_dir.name,
        "workload": config.workload,
        "system": config.system,
        "started_at": utc_now(),
        "config": configuration.to_dict(config),
        "config_digest": configuration.digest(configuration.to_dict(config)),
        "data_digest": configuration.manifest_digest(config.dataset),
        "data_root": str(data_root.relative_to(REPOSITORY) if data_root.is_relative_to(REPOSITORY) else data_root),
        "launcher": launcher.name,
        "devices": config.devices,
        "cpu_model": system["cpu_model"],
        "git_commit": commit,
        "git_dirty": dirty,
        "uses_gpus": on_gpu,
        **machine.facts_of_run(described, on_gpu),
    }
    return Intent(run_dir, config, launcher, run_json)


def preflight(intent: Intent) -> list[str]:
    """Warnings about a run that can work; raises ValueError with the remedy for one that cannot."""
    config, system_dir, described = intent.config, intent.run_dir.parent, intent.run_json["machine"]
    warnings = []
    if intent.launcher.name in WITHOUT_PERUN:
        warnings.append("perun or MPI is missing: our own sampler measures alone, and perun's number will be absent")
    if config.device != "cpu" and not described["gpus"] and list(Path("/dev").glob("nvidia[0-9]*")):
        warnings.append("there are NVIDIA GPUs, but nvidia-ml-py is missing or fails: `energynn doctor` says more")
    nodes = int(machine.job_of_process().get("nnodes", 1))
    gpus, cores = nodes * len(described["gpus"]), nodes * described["cores"]
    on_gpu = intent.run_json["device_kind"] == "gpu"
    if on_gpu and config.devices > gpus:
        raise ValueError(
            f"devices: {config.devices} GPUs asked for, this machine or job has {gpus}; ask for fewer, or device cpu"
        )
    for gpu in described["gpus"][: config.devices] if on_gpu else []:
        if fault := machine.fault_of_split(gpu):
            raise ValueError(f"device: {fault}")
    if not on_gpu and config.devices * config.threads_per_device > cores:
        warnings.append(f"{config.devices} devices on {cores} cores: they share cores, so time and energy mean little")
    if not on_gpu and (hours := _hours_on_cores(config)) >= 1:
        less = "the preset smoke with its own data takes minutes; Ctrl-C stops with a checkpoint"
        warnings.append(f"this will take about {hours:,.0f} hours on CPU cores, by the size of the network; {less}")
    initial_run = getattr(config, "initial_run", "")
    if initial_run and not (system_dir / initial_run / "weights.pt").is_file():
        raise ValueError(f"initial_run: {system_dir / initial_run} has no weights.pt; make that run first")
    held = alone_on_host()
    if held:
        held.close()
    elif machine.job_of_process():
        warnings.append("another measured run goes on here, and this one waits; --exclusive in sbatch avoids it")
    else:
        raise ValueError("another measured run goes on on this machine; one at a time, or both are wrong")
    return warnings


def _hours_on_cores(config: RunConfig) -> float:
    """How long the computing alone will take, a step back as long as two forward; 0 where nobody has said its size."""
    epoch = config.epoch()
    a_pass = 4 if epoch.evaluates_training_set else 3
    steps = config.epochs * (a_pass * epoch.training_samples + epoch.validation_samples) * epoch.forward_steps
    cores = config.devices * config.threads_per_device
    return steps * epoch.operations / (CORE_OPERATIONS_PER_S * cores * SECOND_PER_HOUR)


def _refuse_a_slip(system_dir: Path) -> None:
    """Raise ValueError for a system that is new here and nearly has the name of a known one."""
    known = {"local", *(path.stem for path in shipped("systems").glob("*.toml"))}
    near = configuration.suggestion(system_dir.name, known)
    if near and system_dir.name not in known and not system_dir.exists():
        raise ValueError(
            f"system: {system_dir.name} is not known{near} For a new one make the folder {system_dir}"
        )


def _free_space(runs_dir: Path) -> int:
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        probe = runs_dir / f".write-probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
        return shutil.disk_usage(runs_dir).free
    except OSError as error:
        raise ValueError(f"runs_dir: cannot write to {runs_dir} ({error.strerror}); choose a folder you own") from error


def begin(intent: Intent) -> None:
    """Write what is intended to run.json; an earlier attempt is moved aside, never overwritten.

    An attempt that left a checkpoint goes on instead, in a further segment; its record is kept beside the new one. One
    that is moved has a record before, whoever was killed.
    """
    run_dir = intent.run_dir
    if (run_dir / "run.json").exists():
        if records.is_running(run_dir):
            raise ValueError(f"{run_dir.name}: this run goes on already")
        if list(run_dir.glob("checkpoint/*.sha256")):
            _begin_segment(run_dir)
            return
        if not (run_dir / "record.json").exists():  # its launcher was killed, and nothing goes on from there
            tell(records.recover_one(run_dir))
        _move_aside(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "run.json", intent.run_json)


def _begin_segment(run_dir: Path) -> None:
    number = len(segments(run_dir))
    if (run_dir / "record.json").exists():
        (run_dir / "record.json").rename(run_dir / f"record-after-segment-{number}.json")
    (run_dir / f"segment-{number + 1}").mkdir()


def _move_aside(run_dir: Path) -> None:
    """Move an earlier attempt, but not its folder: papermill may be writing its notebook there."""
    superseded = run_dir.parent / "superseded"
    attempts = list(superseded.glob(f"{run_dir.name}.*"))
    aside = superseded / f"{run_dir.name}.{len(attempts) + 1}"
    aside.mkdir(parents=True)
    for path in run_dir.iterdir():
        if path.name not in ("notebook.ipynb", "job", START_LOCK):
            path.rename(aside / path.name)


def show_errors_in_one_line() -> None:
    """In a notebook: show a ValueError or RuntimeError as one line, which papermill then prints last."""
    from IPython import get_ipython

    def handler(shell, kind, error, _traceback, tb_offset=None):
        lines = [f"{kind.__name__}: {error}"]
        shell._showtraceback(kind, error, lines)
        return lines

    get_ipython().set_custom_exc((ValueError, RuntimeError, InterruptedError), handler)


def _papermills_terminal():
    """The terminal of a papermill without --log-output, which would show nothing while a cell runs; else None."""
    try:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
        kernel_keeps = sys.stderr._original_stdstream_copy  # ipykernel's copy of the file descriptor it captured
    except (OSError, AttributeError):
        return None
    if not any(b"papermill" in word for word in parent) or b"--log-output" in parent or kernel_keeps is None:
        return None
    return os.fdopen(os.dup(kernel_keeps), "w", buffering=1)
