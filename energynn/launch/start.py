"""Make one measured run: prepare it, launch its ranks, watch over them, and write its record.

Three processes stand between a person and the trainer, so that none of them can take the run's data
with it: the notebook (or shell) that calls ``run``; the supervisor, which is this module executed
as ``python -m energynn.launch.start RUN_DIR PARENT``; and mpirun with the ranks under perun.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Listener
from pathlib import Path

import energynn
from energynn import config as configuration
from energynn import launchers, processes, records
from energynn.config import RunConfig
from energynn.data import manifests
from energynn.files import REPOSITORY, checkpoint_folder, is_locked, write_json
from energynn.launch import command, supervise
from energynn.launchers import SRUN_VARIABLE, WITHOUT_PERUN
from energynn.measure import machine, perun_adapter
from energynn.measure.samples import events_of_kind, read_events, segments
from energynn.progress import tell

CHECKPOINT_S = 30.0  # for the ranks' checkpoint when the run is asked to stop
# ranks that wait for a dead process, as perun's sampler, never end
SILENT_S = 300.0
SILENT_AT_END_S = 90.0  # when all have trained
SHARED_MEMORY = Path("/dev/shm")
# Lines that are no launcher's own: a rank's, which has a label, rulers and advice.
NOT_OWN = re.compile(
    r"\s*(\[[\d,]+\]|\d+: ).*|\W*|This typically refers to.*|Please see the FAQ page.*"
)
LOOK_S = 5.0  # between two looks at the ranks' files
TRAIN_SCRIPT = Path(energynn.__file__).parent / "train" / "__main__.py"
PATIENCE_S = 60.0  # with another start of the run: its supervisor may be ending it
# A Ctrl-C for a notebook reaches the supervisor only through who has started it.
APART = {"stdin": subprocess.DEVNULL, "start_new_session": True}


def run(
    config: RunConfig,
    runs_dir: str | Path = "runs",
    labels: dict | None = None,
) -> Path:
    """Make one run and return its folder; a run whose valid record exists is not made again.

    The trainer's lines are printed as they come. An earlier attempt without a valid record is moved
    to runs/<system>/superseded/. ``labels``: as ``records.labels`` gives them. Raises ValueError
    with the remedy before anything starts if the run cannot work, InterruptedError if it was
    stopped and can go on, RuntimeError with the reason if it failed or was killed.
    """
    if not str(runs_dir):
        raise ValueError("runs_dir: is empty; give a folder, as runs")
    runs_dir = Path(runs_dir).absolute()
    run_dir = runs_dir / config.system / configuration.run_id(config)
    until_s = time.monotonic() + PATIENCE_S
    while is_locked(run_dir / records.START_LOCK) and time.monotonic() < until_s:
        tell(f"{run_dir.name}: waits for the end of another start")
        time.sleep(2.0)
    if records.is_made(run_dir):
        tell(f"{run_dir.name}: a valid record exists; not run again, nor named anew")
        return run_dir
    intent = prepare(config, run_dir) | (labels or {})
    for warning in warnings_of(intent):
        tell(f"energynn: warning: {warning}")
    run_dir.mkdir(parents=True, exist_ok=True)
    # before anything is moved: it may be started twice at once
    with records.hold(run_dir, records.START_LOCK) as held:
        begin(intent, run_dir)
        _let_supervise(run_dir, held.fileno())
    record = records.read(run_dir)
    if not record:
        remedy = f"`energynn check --recover {runs_dir}` says more"
        raise RuntimeError(f"{run_dir.name}: the supervisor died; {remedy}")
    tell(command.report(record, runs_dir=runs_dir))
    reason = f"{run_dir.name}: {record.status}: {record.status_reason}"
    if record.status == "interrupted":
        raise InterruptedError(reason)
    if record.status != "finished":
        raise RuntimeError(f"{reason}; see its log.txt")
    return run_dir


def _let_supervise(run_dir: Path, lock_file: int) -> None:
    """Start a supervisor, and print what its ranks write to the log.

    lock_file: number of the open lock, which it holds, too: it may outlive us.
    """
    words = ["energynn.launch.start", str(run_dir), str(os.getpid())]
    log = segments(run_dir)[-1] / "log.txt"
    with open(log, "w") as written:
        supervisor = subprocess.Popen(
            [*processes.OWN_PYTHON, "-m", *words],
            stdout=written,
            pass_fds=[lock_file],
            env=processes.own_environment(),
            **APART,
        )
    is_over = False
    with open(log, errors="replace") as lines:
        while not is_over:
            try:
                is_over = supervisor.poll() is not None
                if text := lines.read():
                    print(text, end="", flush=True)
                time.sleep(0.2)
            except KeyboardInterrupt:  # the record will say so
                supervisor.terminate()


# ------------------------------------------------------------------------------ before it starts


def prepare(config: RunConfig, run_dir: Path) -> dict:
    """Return what run.json will hold: the run on this machine, with these data and this code.

    Raises ValueError with the remedy if the run cannot work.
    """
    runs_dir = run_dir.parent.parent
    launchers.require_no_step()
    require_room_for_workers(config)
    manifests.check_run(config)  # before anything is written
    described = machine.describe_machine()
    on_gpu = config.device == "gpu" or (
        config.device == "auto" and bool(described["gpus"])
    )
    if on_gpu:
        _require_gpus(config.devices, described["gpus"])
    data_root = manifests.root(config.dataset).absolute()
    if data_root.is_relative_to(REPOSITORY):
        data_root = data_root.relative_to(REPOSITORY)
    commit, dirty = machine.git_state()
    values = configuration.to_dict(config)
    path = machine.system_file(runs_dir, config.system)
    machine.write_usual(path)
    return supervise.facts(run_dir, path, described, uses_gpus=on_gpu) | {
        "workload": config.workload,
        "system": config.system,
        "config": values,
        "config_digest": configuration.digest(values),
        "data_digest": configuration.manifest_digest(config.dataset),
        "data_root": str(data_root),
        "launcher": launchers.find_launcher(config.devices),
        "devices": config.devices,
        "git_commit": commit,
        "git_dirty": dirty,
    }


def _gpus_of(intent: dict) -> list[dict]:
    """Return the GPUs of this host that a run uses; none where its devices are cores."""
    is_gpu = intent["device_kind"] == "gpu"
    return intent["machine"]["gpus"][: intent["devices"]] if is_gpu else []


def warnings_of(intent: dict) -> list[str]:
    """Warn about a run that can work; ValueError where another one has this machine."""
    supervise.take_host().close()
    devices, warnings = intent["devices"], []
    if intent["launcher"] in WITHOUT_PERUN:
        warnings.append("perun or MPI is missing: perun's number will be absent")
    if intent["device_kind"] != "gpu":
        cores = launchers.nodes() * intent["machine"]["cores"]
        if devices * intent["config"]["threads_per_device"] > cores:
            share = "they share cores, so time and energy mean little"
            warnings.append(f"{devices} devices on {cores} cores: {share}")
    return warnings


def require_room_for_workers(config: RunConfig) -> None:
    """Raise ValueError where the loader's workers cannot hand over their batches.

    They name a socket below TMPDIR, and write to shared memory; each loads two batches ahead.
    """
    if not config.loader_workers or not config.data_staging or config.stays_on_device:
        return
    try:
        Listener(family="AF_UNIX").close()
    except OSError as error:
        raise ValueError(
            f"TMPDIR: loader workers have no socket in {tempfile.gettempdir()} ({error}); "
            "`export TMPDIR=/tmp`"
        ) from error
    ranks = math.ceil(config.devices / launchers.nodes())
    samples = 2 * config.loader_workers * ranks * config.local_batch_size
    need_MB = samples * config.bytes_of_sample / 1e6
    memory = os.statvfs(SHARED_MEMORY)
    free_MB = memory.f_bavail * memory.f_frsize / 1e6
    if need_MB > free_MB:
        raise ValueError(
            f"loader_workers: their batches may take {need_MB:.1f} MB of {SHARED_MEMORY}, which "
            f"has {free_MB:.1f} MB; give a container --shm-size={math.ceil(need_MB)}m or more, or "
            "take loader_workers=0"
        )


def _require_gpus(devices: int, gpus: list[dict]) -> None:
    known = launchers.nodes() * len(gpus)
    if devices > known:
        less = "ask for fewer, or device cpu"
        raise ValueError(
            f"devices: {devices} GPUs, this machine or job has {known}; {less}"
        )
    for gpu in gpus[:devices]:
        if "fault" in gpu:
            raise ValueError(f"device: {gpu['fault']}")


def begin(intent: dict, run_dir: Path) -> None:
    """Write run.json; an earlier attempt is moved aside, never overwritten.

    An attempt that left a checkpoint goes on instead, in a further segment; the record then covers
    all of them. One that is moved has a record before.
    """
    if (run_dir / "run.json").exists():
        if list(checkpoint_folder(run_dir).glob("*.sha256")):
            supervise.next_segment(run_dir)
            # job and GPUs may be others now
            before = records.read_intent(run_dir)
            begun = {"started_at": before["started_at"]}
            write_json(run_dir / "run.json", before | intent | begun)
            return
        if not (run_dir / "record.json").exists():  # its launcher was killed
            tell(records.recover_one(run_dir))
        _move_aside(run_dir)
    write_json(run_dir / "run.json", intent)


def _move_aside(run_dir: Path) -> None:
    """Move an earlier attempt, but not its folder: papermill may be writing its notebook there."""
    superseded = run_dir.parent / "superseded"
    attempts = list(superseded.glob(f"{run_dir.name}.*"))
    aside = superseded / f"{run_dir.name}.{len(attempts) + 1}"
    aside.mkdir(parents=True)
    for path in run_dir.iterdir():
        if path.name not in ("notebook.ipynb", "job", records.START_LOCK):
            path.rename(aside / path.name)


# --------------------------------------------------------------------------------- the supervisor


def make(run_dir: Path, parent: int) -> None:
    """Make the run of a run.json; end it if the parent process ends, or a signal asks for that."""
    stopped = supervise.hear_signals()
    _held = records.hold(run_dir)
    _alone = supervise.take_host()
    intent = json.loads((run_dir / "run.json").read_text())
    folder = segments(run_dir)[-1]
    words, environment = ranks_command(folder, intent), rank_environment(folder, intent)
    pipes = APART | {"stderr": subprocess.STDOUT}
    ranks = supervise.start(words, folder, environment, signal.SIGKILL, **pipes)
    stop_reason = _wait_for_ranks(ranks, folder, intent["devices"], stopped, parent)
    by = f", {intent['launcher']} with status {ranks.wait()}{_last_line(folder)}"
    status, reason = supervise.verdict(folder, intent["devices"], stop_reason, by)
    try:
        records.build(run_dir, status, reason)
    except OSError as error:
        sys.exit(supervise.no_record(run_dir, error))


def _wait_for_ranks(
    ranks,
    folder: Path,
    devices: int,
    stopped: list[int],
    parent: int,
) -> str:
    """Wait until all ranks have ended, and end those that have to; returns why they had to."""
    looked_s, reason = time.monotonic(), ""
    while ranks.poll() is None and not reason:
        reason = supervise.stop_reason(stopped)
        if os.getppid() != parent:
            reason = reason or "the process that started the run ended"
        if time.monotonic() > looked_s + LOOK_S:
            looked_s = time.monotonic()
            reason = reason or _hang(folder, devices)
        time.sleep(0.05)
    # In a batch job Slurm's signal reaches papermill, too: the ranks still have time.
    is_heard = os.getppid() == parent or SRUN_VARIABLE in os.environ
    if reason and is_heard and events_of_kind(read_events(folder), "training_start"):
        # which the ranks of every launcher see; hidden, so that no record lists it
        (folder / ".stop").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            ranks.wait(CHECKPOINT_S)
    if ranks.poll() is None:
        ranks.terminate()
    processes.end_marked(folder)
    return reason


def _hang(folder: Path, devices: int) -> str:
    """Say in words that ranks hang before their first event or after their last; "" else."""
    paths = list(folder.glob("events-rank*.jsonl"))
    silent_s = time.time() - max(path.stat().st_mtime for path in [folder, *paths])
    if silent_s < SILENT_AT_END_S:
        return ""
    ends = events_of_kind(read_events(folder), "rank_end")
    is_training = len(paths) == devices and not ends
    if is_training or len(ends) < devices and silent_s < SILENT_S:
        return ""
    silent = f"its ranks were silent for {silent_s:.0f} s, before or after the training"
    return silent + _last_line(folder)


def _last_line(folder: Path) -> str:
    """Tell the last line of the launcher; "" where it has said nothing."""
    path = folder / "log.txt"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    own = [line.strip() for line in lines if not NOT_OWN.fullmatch(line)]
    return f', its last line: "{own[-1][:200]}"' if own else ""


def ranks_command(folder: Path, intent: dict) -> list[str]:
    """Return the command of all ranks: mpirun or srun, each rank under perun; or without perun."""
    devices = intent["devices"]
    train = [str(TRAIN_SCRIPT), str(folder)]
    if intent["launcher"] == "alone":
        return [*processes.OWN_PYTHON, *train]
    if intent["launcher"] == "torchrun":
        torchrun = ["torch.distributed.run", f"--nproc-per-node={devices}"]
        return [*processes.OWN_PYTHON, "-m", *torchrun, "--standalone", *train]
    gpus = [gpu["index"] for gpu in _gpus_of(intent)]
    ini = folder / "perun.ini"
    period_s = intent["config"]["perun_sampling_period_s"]
    perun_adapter.write_configuration(ini, period_s, gpus)
    ranks = perun_adapter.command(
        launchers.python_of_ranks(), TRAIN_SCRIPT, folder, ini
    )
    if SRUN_VARIABLE in os.environ:
        srun = ["srun", "--export=ALL", "--kill-on-bad-exit=1", "--label"]
        options = [f"--ntasks={devices}", *shlex.split(os.environ[SRUN_VARIABLE])]
        return [*srun, *options, *ranks]
    return [*launchers.mpi_start(devices), *ranks]


def rank_environment(folder: Path, intent: dict) -> dict[str, str]:
    """Return the ranks' environment: threads, and the GPUs that they use; others are hidden."""
    threads = str(intent["config"]["threads_per_device"])
    used = [str(gpu["index"]) for gpu in _gpus_of(intent)]
    return perun_adapter.environment(folder, launchers.mpi_environment()) | {
        "OMP_NUM_THREADS": threads,
        "CUDA_VISIBLE_DEVICES": ",".join(used),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # CUDA's numbers are then NVML's
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        processes.STARTER_VARIABLE: processes.name_of_this_process(),
    }


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
