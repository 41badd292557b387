"""Start one measured run, watch over its processes, and see that it ends in a record, however it ends.

Three processes stand between a person and the trainer, so that none of them can take the run's data with it:
the notebook (or shell) that calls ``run``; the supervisor, ``python -m energynn.launch RUN_DIR``, which starts mpirun,
relays its lines and writes the record; and mpirun with the ranks, each under perun.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import energynn
from energynn import config as configuration
from energynn import manifests, records
from energynn.cluster import systems
from energynn.config import REPOSITORY, RunConfig
from energynn.measure import perun_adapter, watch
from energynn.measure.samples import Silence, read_events, segments

LEAST_FREE_B = 16 * 2**20
RESERVE_B = 256 * 2**10  # kept back while a run goes on, so that its record can be written on a full disk
CHECKPOINT_S = 30.0  # for the ranks' checkpoint when the run is asked to stop
CAN_GO_ON = 75  # exit status of a run that was interrupted and can go on (EX_TEMPFAIL)
GRACE_S = 2.0  # between asking the ranks to stop and killing them
SRUN_VARIABLE = "ENERGYNN_SRUN"  # in a batch job: the options with which srun starts the ranks
LAST_WORDS = "energynn: rank "  # how train/rank.py begins the line that says why a rank ends
TRAIN_SCRIPT = Path(energynn.__file__).parent / "train" / "__main__.py"


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
    record = records.read(run_dir)
    if record and record["valid"]:
        print(f"{run_dir.name}: a valid record exists; not run again", flush=True)
        return run_dir
    for warning in preflight(config, runs_dir):
        print(f"energynn: warning: {warning}", flush=True)
    begin(config, run_dir)

    terminal = _papermills_terminal()
    view_ended = watch.in_notebook(run_dir)
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "energynn.launch", str(run_dir), str(os.getpid())],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,  # a Ctrl-C for the notebook must not reach the ranks before their supervisor
    )  # fmt: skip
    try:
        for line in supervisor.stdout:
            print(line, end="", flush=True)
            if terminal:
                terminal.write(line)
    except BaseException:  # the cell was interrupted: stop the run, but let its supervisor write the record
        supervisor.terminate()
        for line in supervisor.stdout:
            print(line, end="", flush=True)
        raise
    finally:
        supervisor.wait()
        if view_ended:
            view_ended.set()
    record = records.read(run_dir)
    if record and record["status"] == "interrupted":
        raise InterruptedError(f"{run_dir.name}: interrupted: {record['status_reason']}")
    if record is None:
        raise RuntimeError(f"{run_dir.name}: the supervisor died; `energynn check --recover {runs_dir}` says more")
    if record["status"] != "finished":
        raise RuntimeError(f"{run_dir.name}: {record['status']}: {record['status_reason']} (see {run_dir / 'log.txt'})")
    return run_dir


def preflight(config: RunConfig, runs_dir: Path) -> list[str]:
    """Warnings about a run that can work; raises ValueError with the remedy for one that cannot."""
    warnings = []
    manifests.verify(config.dataset)  # before anything is written
    free_B = _free_space(runs_dir)
    if free_B < LEAST_FREE_B:
        raise ValueError(
            f"runs_dir: {free_B / 2**20:.1f} MiB free in {runs_dir}; make room for {LEAST_FREE_B >> 20} MiB"
        )
    systems.load(runs_dir, config.system)
    if launcher(config.devices) in records.WITHOUT_PERUN:
        warnings.append("perun or MPI is missing: our own sampler measures alone, and perun's number will be absent")
    if config.device != "cpu" and not systems.gpus() and list(Path("/dev").glob("nvidia[0-9]*")):
        warnings.append("there are NVIDIA GPUs, but nvidia-ml-py is missing or fails: `energynn doctor` says more")
    nodes = int(os.environ.get("SLURM_NNODES", 1))
    gpus, cores = nodes * len(systems.gpus()), nodes * systems.usable_cores()
    on_gpu = device_kind(config, gpus) == "gpu"
    if on_gpu and config.devices > gpus:
        raise ValueError(
            f"devices: {config.devices} GPUs asked for, this machine or job has {gpus}; ask for fewer, or device cpu"
        )
    if not on_gpu and config.devices * config.threads_per_device > cores:
        warnings.append(f"{config.devices} devices on {cores} cores: they share cores, so time and energy mean little")
    initial_run = getattr(config, "initial_run", "")
    if initial_run and not (runs_dir / config.system / initial_run / "weights.pt").is_file():
        raise ValueError(
            f"initial_run: {runs_dir / config.system / initial_run} has no weights.pt; make that run first"
        )
    with open(_lock(runs_dir / config.system), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{runs_dir / config.system}: another measured run goes on; one at a time, or both are wrong"
            ) from None
    return warnings


def _lock(folder: Path) -> Path:
    """The file that the one measured run of this host holds locked."""
    return folder / f".lock-{os.uname().nodename}"


def device_kind(config: RunConfig, gpus: int) -> str:
    """What one device of a run is on a machine with so many GPUs: ``gpu`` or ``cpu core``."""
    return "gpu" if config.device == "gpu" or (config.device == "auto" and gpus > 0) else "cpu core"


def _free_space(runs_dir: Path) -> int:
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        probe = runs_dir / f".write-probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
        return shutil.disk_usage(runs_dir).free
    except OSError as error:
        raise ValueError(f"runs_dir: cannot write to {runs_dir} ({error.strerror}); choose a folder you own") from error


def launcher(devices: int) -> str:
    """``srun`` in a batch job, else ``mpirun``; where perun or MPI is missing ``torchrun``, or one device ``alone``.

    Ranks of srun and mpirun run under perun. Else only our own sampler measures, on this host; so in a batch job
    several devices need them: ValueError with the remedy.
    """
    try:
        if importlib.util.find_spec("perun") is None:
            raise ValueError("no perun found; `make train-env` installs it")
        if SRUN_VARIABLE in os.environ:
            return "srun"
        find_mpi()
    except ValueError:
        if devices > 1 and SRUN_VARIABLE in os.environ:
            raise
        return "torchrun" if devices > 1 else "alone"
    return "mpirun"


def find_mpi() -> tuple[str, str]:
    """Path of mpirun and its flavour, ``mpich`` or ``openmpi``; the environment's own comes before the site's.

    Raises ValueError with the remedy if there is no mpirun or mpi4py finds no MPI library.
    """
    remedy = "`make train-env` installs one, or load your site's module"
    own = Path(sys.executable).with_name("mpirun")
    mpirun = str(own) if own.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise ValueError(f"no MPI found: mpirun is not on PATH; {remedy}")
    probe = subprocess.run([sys.executable, "-c", "from mpi4py import MPI"], capture_output=True, text=True)
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["unknown error"])[-1]
        raise ValueError(f"no MPI library found by mpi4py ({last}); {remedy}")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    return mpirun, "openmpi" if "Open MPI" in version else "mpich"


def begin(config: RunConfig, run_dir: Path) -> None:
    """Write what is intended to run.json; an earlier attempt is moved aside, never overwritten.

    An attempt that left a checkpoint goes on instead, in a further segment; its record is kept beside the new one.
    """
    if (run_dir / "run.json").exists():
        if records.is_running(run_dir):
            raise ValueError(f"{run_dir.name}: this run goes on already")
        if list(run_dir.glob("checkpoint/*.sha256")):
            number = len(segments(run_dir))
            if (run_dir / "record.json").exists():
                (run_dir / "record.json").rename(run_dir / f"record-after-segment-{number}.json")
            (run_dir / f"segment-{number + 1}").mkdir()
            return
        aside = run_dir.parent / "superseded"
        aside.mkdir(exist_ok=True)
        attempt = 1 + sum(1 for _ in aside.glob(f"{run_dir.name}.*"))
        # The folder stays where it is: papermill may be writing its notebook there.
        (aside / f"{run_dir.name}.{attempt}").mkdir()
        for path in run_dir.iterdir():
            if path.name not in ("notebook.ipynb", "job"):
                path.rename(aside / f"{run_dir.name}.{attempt}" / path.name)
    run_dir.mkdir(parents=True, exist_ok=True)
    machine = systems.describe_machine()
    kind = device_kind(config, len(machine["gpus"]))
    commit, dirty = systems.git_state()
    data_root = manifests.root(config.dataset).absolute()
    records.write_json(run_dir / "run.json", {
        "run_id": run_dir.name,
        "workload": config.workload,
        "system": config.system,
        "started_at": records.utc_now(),
        "boot_id": machine["boot_id"],
        "config": configuration.to_dict(config),
        "config_digest": configuration.digest(configuration.to_dict(config)),
        "data_digest": configuration.manifest_digest(config.dataset),
        "data_root": str(data_root.relative_to(REPOSITORY) if data_root.is_relative_to(REPOSITORY) else data_root),
        "launcher": launcher(config.devices),
        "device_kind": kind,
        "device_name": machine["gpus"][0]["name"] if kind == "gpu" else machine["cpu"],
        "devices": config.devices,
        "cpu_model": systems.load(run_dir.parent.parent, config.system)["cpu_model"],
        "versions": systems.versions(),
        "machine": machine,
        "git_commit": commit,
        "git_dirty": dirty,
    })  # fmt: skip


# ------------------------------------------------------------------------------------------------- the supervisor


def supervise(run_dir: Path, parent: int) -> int:
    """Start the ranks, relay their lines, and write the record; ends them if the parent process ends or asks to."""
    stop_reasons: list[str] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # the last: Slurm's warning
        signal.signal(number, lambda n, _frame: stop_reasons.append(f"stopped by {signal.Signals(n).name}"))
    # Orphaned grandchildren become our children, so that none can be left behind (prctl PR_SET_CHILD_SUBREAPER).
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    _held = records.hold(run_dir)
    alone = open(_lock(run_dir.parent), "w")
    fcntl.flock(alone, fcntl.LOCK_EX)
    reserve = run_dir / ".reserve"
    reserve.write_bytes(b"\0" * RESERVE_B)

    intent = json.loads((run_dir / "run.json").read_text())
    folder = segments(run_dir)[-1]
    ranks = subprocess.Popen(
        ranks_command(folder, intent), env=rank_environment(folder, intent),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True, preexec_fn=perun_adapter.die_with_parent,
    )  # fmt: skip
    last_words: list[str] = []
    relay = threading.Thread(target=_relay, args=(ranks.stdout, folder / "log.txt", last_words), daemon=True)
    relay.start()
    silence = Silence()
    while ranks.poll() is None and not stop_reasons:
        if os.getppid() != parent:
            stop_reasons.append("the process that started the run ended")
        if silent := silence(folder):
            stop_reasons.append(silent)
        time.sleep(0.05)
    # Slurm's signals reach every process: papermill ends by them, and the ranks write their checkpoint.
    if stop_reasons and (os.getppid() == parent or SRUN_VARIABLE in os.environ) and not silence(folder):
        _wait_for_checkpoint(ranks, folder)
    _end_everything(ranks)
    relay.join(timeout=1.0)

    reserve.unlink()
    status, reason = verdict(folder, intent, ranks.returncode, stop_reasons, last_words)
    try:
        record = records.build(run_dir, status, reason)
    except OSError as error:
        print(f"energynn: {run_dir.name}: no record written ({error.strerror}); free some space, then "
              f"`energynn check --recover {run_dir.parent.parent}`", flush=True)  # fmt: skip
        return 1
    with contextlib.suppress(BrokenPipeError):  # who started us may be dead
        print(summary(record), flush=True)
    return {"finished": 0, "interrupted": CAN_GO_ON}.get(status, 1)


def _wait_for_checkpoint(ranks: subprocess.Popen, folder: Path) -> None:
    """Ask the ranks for a checkpoint, through a file that every launcher's ranks can see, and let them end."""
    if any(event["event"] == "training_start" for event in read_events(folder)):
        (folder / "stop").touch()
        deadline = time.monotonic() + CHECKPOINT_S
        while ranks.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)


def ranks_command(run_dir: Path, intent: dict) -> list[str]:
    """mpirun or srun with one rank per device, each under perun; or torchrun, or the one rank alone, without."""
    if intent["launcher"] in records.WITHOUT_PERUN:
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={intent['devices']}"]
        return [sys.executable, *(ranks if intent["launcher"] == "torchrun" else []), str(TRAIN_SCRIPT), str(run_dir)]
    period_s = intent["config"]["perun_sampling_period_s"]
    on_gpu = intent["device_kind"] == "gpu"
    gpus = [gpu["index"] for gpu in intent["machine"]["gpus"]][: intent["devices"]] if on_gpu else []
    perun_adapter.write_configuration(run_dir / "perun.ini", period_s, on_gpu, gpus)
    ranks = perun_adapter.command(TRAIN_SCRIPT, run_dir, run_dir / "perun.ini")
    if SRUN_VARIABLE in os.environ:
        options = shlex.split(os.environ[SRUN_VARIABLE])
        return ["srun", "--export=ALL", "--kill-on-bad-exit=1", f"--ntasks={intent['devices']}", *options, *ranks]
    return [*mpi_start(*find_mpi(), intent["devices"]), *ranks]


def mpi_start(mpirun: str, flavour: str, ranks: int) -> list[str]:
    """The beginning of an mpirun command; Open MPI has to be told that ranks may share and choose cores."""
    options = ["--oversubscribe", "--bind-to", "none"] if flavour == "openmpi" else []
    return [mpirun, *options, "-n", str(ranks)]


def mpi_environment() -> dict[str, str]:
    """This environment, with Open MPI content to be run by root, as containers do."""
    return os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def rank_environment(run_dir: Path, intent: dict) -> dict[str, str]:
    """Environment of the ranks: threads, and the GPUs that they use.

    GPUs that the run does not use are hidden from it, so that their energy is not counted either.
    """
    threads = str(intent["config"]["threads_per_device"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(gpu["index"]) for gpu in intent["machine"]["gpus"])
    used = visible.replace(" ", "").split(",")[: intent["devices"]] if intent["device_kind"] == "gpu" else []
    return perun_adapter.environment(run_dir, mpi_environment()) | {
        "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads,
        "CUDA_VISIBLE_DEVICES": ",".join(used), "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # CUDA's numbers are then NVML's
        "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip


def verdict(
    run_dir: Path, intent: dict, exit_status: int, stop_reasons: list[str], last_words: list[str]
) -> tuple[str, str]:
    """How the run ended, from what the ranks wrote; perun's exit status is no evidence (it is 0 after a SIGTERM).

    ``last_words`` are what ranks printed as their end; they count where the disk was too full for an event.
    """
    events = read_events(run_dir)
    ends = [event for event in events if event["event"] == "rank_end"]
    failures = [event for event in ends if event["status"] != "finished"]
    silent = [str(rank) for rank in range(intent["devices"]) if rank not in {event["rank"] for event in ends}]
    if not failures and not silent:
        return "finished", ""
    if not silent and all(event["status"] == "interrupted" for event in failures):
        return "interrupted", f"{(stop_reasons or ['asked to stop'])[0]}; {failures[0]['reason']}; it can go on"
    if stop_reasons:
        return "interrupted", f"{stop_reasons[0]}; {records.how_far(events)}"
    without_a_word = f"rank {', '.join(silent)} ended without a word, {intent['launcher']} with status {exit_status}"
    if failures:
        first = min(failures, key=lambda event: event["t_wall_ns"])
        return "failed", f"rank {first['rank']}: {first['reason']}" + (f"; {without_a_word}" if silent else "")
    if last_words:
        return "failed", last_words[-1]
    return "killed", f"{without_a_word}; {records.how_far(events)}"


def summary(record: dict) -> str:
    """The run in one or two lines."""
    if record["status"] != "finished":
        return f"energynn: {record['run_id']}: {record['status']}: {record['status_reason']}"
    energies = ", ".join(
        f"{part} {record[f'energy_{part}_J']:.0f} J ({record[f'energy_{part}_provenance']})"
        for part in ("gpu", "cpu", "ram") if f"energy_{part}_J" in record
    )  # fmt: skip
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in record["metrics"].items())
    doubts = "" if record["valid"] else f"; NOT VALID: {'; '.join(record['invalid_reasons'])}"
    return (f"energynn: {record['run_id']}: {record['training_time_s']:.1f} s, {energies or 'no energy'}, "
            f"{record.get('samples_in_training', 0)} power samples, {metrics}{doubts}")  # fmt: skip


def _relay(lines, log_path: Path, last_words: list[str]) -> None:
    """Pass the ranks' lines on and keep them; a full disk costs the log, not the run."""
    with open(log_path, "w", buffering=1) as log:
        for line in lines:
            print(line, end="", flush=True)
            if line.startswith(LAST_WORDS):
                last_words.append(line.removeprefix("energynn: ").strip())
            try:
                log.write(line)
            except OSError:
                continue


def _end_everything(ranks: subprocess.Popen) -> None:
    """End every process below this one: politely, then not."""
    if ranks.poll() is None:
        ranks.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while _descendants() and time.monotonic() < deadline:
        time.sleep(0.05)
        ranks.poll()
    for process in _descendants():
        with contextlib.suppress(ProcessLookupError):  # ended while we looked
            os.kill(process, signal.SIGKILL)
    ranks.wait()


def _descendants() -> list[int]:
    """Process numbers of all that live below this process."""
    parent_of = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended while we looked
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parent_of[int(path.parent.name)] = int(parent)
    found = [os.getpid()]
    for process in found:  # grows by its children
        found += [child for child, parent in parent_of.items() if parent == process]
    return found[1:]


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


if __name__ == "__main__":
    try:
        sys.exit(supervise(Path(sys.argv[1]), int(sys.argv[2])))
    except Exception:  # who started us may be dead, and nobody hear what went wrong
        if not (Path(sys.argv[1]) / "record.json").exists():  # which holds the log's SHA-256
            with open(Path(sys.argv[1]) / "log.txt", "a") as log:
                traceback.print_exc(file=log)
        raise
