"""Make one measured run: prepare it, start its supervisor, and report its record."""

import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from multiprocessing.connection import Listener
from pathlib import Path

from energynn import records
from energynn.data import manifests
from energynn.experiment import config as configuration
from energynn.experiment.config import RunConfig, parse_years
from energynn.host import launchers, processes
from energynn.host.files import (
    REPOSITORY,
    atomic_write,
    is_locked,
    newest_checkpoint_name,
    write_json,
)
from energynn.host.progress import print_lines
from energynn.launch import command, supervise
from energynn.measure import machine
from energynn.measure.samples import segment_dirs

SHARED_MEMORY = Path("/dev/shm")
START_WAIT_S = 60.0  # with another start of the run: its supervisor may be ending it


def make_run(
    config: RunConfig,
    runs_dir: str | Path = "runs",
    labels: dict | None = None,
) -> Path:
    """Make one run and return its folder; a run whose valid record exists is not made again.

    The trainer's lines are printed as they come. An earlier attempt without a valid record is moved
    to runs/<system>/superseded/. ``labels``: as ``records.check_labels`` gives them. Raises
    ValueError with the remedy before anything starts if the run cannot work, InterruptedError if it
    was stopped and can go on, RuntimeError with the reason if it failed or was killed.
    """
    if not str(runs_dir):
        raise ValueError("runs_dir: is empty; give a folder, as runs")
    runs_dir = Path(runs_dir).absolute()
    run_dir = configuration.folder(config, runs_dir)
    until_s = time.monotonic() + START_WAIT_S
    while records.is_run_locked(run_dir) and time.monotonic() < until_s:
        print_lines(f"{run_dir.name}: waits for the end of another start")
        time.sleep(2.0)
    if records.has_valid_record(run_dir):
        print_lines(
            f"{run_dir.name}: a valid record exists; not run again, nor named anew; "
            f"to make it again move {run_dir} elsewhere"
        )
        return run_dir
    intent = prepare_intent(config, run_dir) | (labels or {})
    require_initial_run(config, run_dir.parent)  # a study makes it before
    for warning in list_warnings(intent):
        print_lines(f"energynn: warning: {warning}")
    run_dir.mkdir(parents=True, exist_ok=True)
    # before anything is moved: it may be started twice at once
    with records.lock_run_file(run_dir, records.START_LOCK) as held:
        begin_run(intent, run_dir)
        _start_supervisor(run_dir, held.fileno())
    record = records.read_record_if_any(run_dir)
    if not record:
        raise RuntimeError(
            f"{run_dir.name}: the supervisor died; "
            f"`energynn check --recover {runs_dir}` says more"
        )
    print_lines(command.report_text(record, run_dir))
    if record.status != "finished":
        kind = InterruptedError if record.status == "interrupted" else RuntimeError
        why = f"{record.status}: {record.status_reason}"
        raise kind(f"{run_dir.name}: {why}; see its log.txt")
    return run_dir


def _start_supervisor(run_dir: Path, lock_file: int) -> None:
    """Start a supervisor, and print what its ranks write to the log.

    lock_file: number of the open lock, which it holds, too: it may outlive us.
    """
    log = segment_dirs(run_dir)[-1] / "log.txt"
    with open(log, "w") as written:
        supervisor = subprocess.Popen(
            [
                *processes.OWN_PYTHON,
                "-m",
                "energynn.launch.supervise",
                str(run_dir),
                str(os.getpid()),
            ],
            stdout=written,
            pass_fds=[lock_file],
            env=processes.own_environment(),
            **supervise.DETACHED_PROCESS_OPTIONS,
        )
    is_over = False
    with open(log, errors="replace") as lines:
        while not is_over:
            try:
                is_over = supervisor.poll() is not None
                if text := lines.read():
                    print(text, end="", flush=True)
                time.sleep(0.2)
            except KeyboardInterrupt as stop:  # the record will say so
                # the command line makes one of a SIGTERM, with its number
                number = stop.args[0] if stop.args else signal.SIGINT
                # before it listens, one would end it without a record
                while supervisor.poll() is None and not is_locked(run_dir / "run.json"):
                    time.sleep(0.1)
                supervisor.send_signal(number)


# ------------------------------------------------------------------------------ before it starts


def prepare_intent(config: RunConfig, run_dir: Path) -> dict:
    """Return what run.json will hold: the run on this machine, with these data and this code.

    A system without a file gets one, for a person to edit. Raises ValueError with the remedy if the
    run cannot work, as while another one has this machine.
    """
    runs_dir = run_dir.parent.parent
    launchers.require_no_slurm_step()
    launcher = launchers.find_launcher(config.devices)
    require_room_for_workers(config)
    manifests.verify_data_of_run(config)  # before anything is written
    described = machine.describe_machine()
    on_gpu = config.device == "gpu" or (
        config.device == "auto" and bool(described["gpus"])
    )
    if on_gpu:
        known = launchers.count_slurm_nodes() * len(described["gpus"])
        if config.devices > known:
            raise ValueError(
                f"devices: {config.devices} GPUs, this machine or job has {known}; ask for fewer, "
                "or device cpu"
            )
        for gpu in described["gpus"][: config.devices]:
            if "fault" in gpu:
                raise ValueError(f"device: {gpu['fault']}")
    data_root = manifests.root(config.dataset).absolute()
    if data_root.is_relative_to(REPOSITORY):
        data_root = data_root.relative_to(REPOSITORY)
    commit, dirty = machine.git_state()
    values = configuration.asdict(config)
    path = machine.system_file(runs_dir, config.system)
    if not path.exists():  # for a person to edit
        with atomic_write(path) as file:
            file.write(machine.SYSTEM_TOML_TEMPLATE.encode())
    supervise.lock_host().close()
    return supervise.start_facts(run_dir, path, described, uses_gpus=on_gpu) | {
        "workload": config.workload,
        "system": config.system,
        "config": values,
        "config_digest": configuration.json_digest(values),
        "data_digest": configuration.manifest_digest(config.dataset),
        "data_root": str(data_root),
        "launcher": launcher,
        "devices": config.devices,
        "git_commit": commit,
        "git_dirty": dirty,
    }


def list_warnings(intent: dict) -> list[str]:
    """Warn about a run that can work."""
    devices = intent["devices"]
    cores = launchers.count_slurm_nodes() * intent["machine"]["cores"]
    threads = devices * intent["config"]["threads_per_device"]
    if intent["device_kind"] == "gpu" or threads <= cores:
        return []
    return [
        f"{devices} devices on {cores} cores: "
        "they share cores, so time and energy mean little"
    ]


def require_initial_run(config: RunConfig, folder: Path) -> None:
    """Raise ValueError where fine-tuning has no weights to begin with in the ``folder`` of its
    system, or would be tested on years that they were trained on.
    """
    if not getattr(config, "initial_run", ""):
        return
    before = folder / config.initial_run
    if not (before / "weights.pt").is_file():
        raise ValueError(
            f"initial_run: {before} has no weights.pt; make that run with save_weights=true"
        )
    trained = records.read_intent_if_any(before).get("config", {})
    if config.dataset == trained.get("dataset") == "era5":
        years = trained["training_years"]
        tested = f"{config.validation_years},{config.test_years}"
        if {*parse_years(years)} & {*parse_years(tested)}:
            raise ValueError(
                f"initial_run: was trained on {years}, which {tested} must not overlap"
            )


def require_room_for_workers(config: RunConfig) -> None:
    """Raise ValueError where the loader's workers cannot hand over their batches.

    They name a socket below TMPDIR, and write to shared memory; each loads two batches ahead.
    """
    if not config.working_loader_workers:
        return
    try:
        Listener(family="AF_UNIX").close()
    except OSError as error:
        raise ValueError(
            f"TMPDIR: loader workers have no socket in {tempfile.gettempdir()} ({error}); "
            "`export TMPDIR=/tmp`"
        ) from error
    ranks = math.ceil(config.devices / launchers.count_slurm_nodes())
    samples = 2 * config.loader_workers * ranks * config.local_batch_size
    need_MB = samples * config.bytes_of_sample / 1e6
    free_MB = shutil.disk_usage(SHARED_MEMORY).free / 1e6
    if need_MB > free_MB:
        raise ValueError(
            f"loader_workers: their batches may take {need_MB:.1f} MB of {SHARED_MEMORY}, which "
            f"has {free_MB:.1f} MB; give a container --shm-size={math.ceil(need_MB)}m or more, or "
            "take loader_workers=0"
        )


def begin_run(intent: dict, run_dir: Path) -> None:
    """Write run.json; an earlier attempt is moved aside, never overwritten.

    An attempt that left a checkpoint goes on instead, in a further segment; the record then covers
    all of them. One that is moved has a record before.
    """
    if (run_dir / "run.json").exists():
        if newest_checkpoint_name(run_dir):
            before = records.read_intent(run_dir)
            if before["device_name"] != intent["device_name"]:
                raise ValueError(
                    f"device: this run began on {before['device_name']}, here is "
                    f"{intent['device_name']}; go on there, or move {run_dir} elsewhere"
                )
            supervise.make_segment_folder(run_dir)
            # its job may be another; its files differ from the commit that it began with
            is_other = before["git_commit"] != intent["git_commit"]
            kept = {name: before[name] for name in ("started_at", "git_commit")}
            kept["git_dirty"] = is_other or before["git_dirty"] or intent["git_dirty"]
            write_json(run_dir / "run.json", before | intent | kept)
            return
        if not (run_dir / "record.json").exists():  # its launcher was killed
            print_lines(records.recover_record(run_dir))
        aside = run_dir.parent / "superseded" / f"{run_dir.name}.{time.time_ns()}"
        aside.mkdir(parents=True)
        # not the folder itself: papermill may be writing its notebook there
        for path in run_dir.iterdir():
            if path.name not in ("notebook.ipynb", "job", records.START_LOCK):
                path.rename(aside / path.name)
    write_json(run_dir / "run.json", intent)
