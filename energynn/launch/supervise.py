"""Supervise a run: start its ranks, watch over them, end what has to end, and write its record.

``python -m energynn.launch.supervise RUN_DIR PARENT`` does so for ``start.make_run``. A measured
command takes from here what it needs, too: its host for itself, signals heard, a verdict from its
ranks.
"""

import fcntl
import hashlib
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from energynn import records
from energynn.host import launchers, processes
from energynn.host.files import PACKAGE_FOLDER, newest_checkpoint_name, utc_time_text
from energynn.measure import kernel, machine, perun_adapter
from energynn.measure.sampler_process import find_sensors
from energynn.measure.samples import (
    events_of_kind,
    read_events,
    run_dir_of,
    segment_dirs,
)

HOST_LOCK_VARIABLE = "ENERGYNN_HOST_LOCK"  # another name for this host, for tests
HOST_TAKEN_TEXT = "another measured run has this machine"
LOCK_FOLDER = Path("/tmp")  # not TMPDIR, which differs
CHECKPOINT_TIMEOUT_S = 30.0  # for the ranks' checkpoint when the run is asked to stop
# ranks that wait for a dead process, as perun's sampler, never end
MAX_SILENCE_S = 300.0
# Lines that are no launcher's own: a rank's, which has a label, rulers and advice.
FOREIGN_LINE_PATTERN = re.compile(
    r"\s*(\[[\d,]+\]|\d+: ).*|\W*|This typically refers to.*|Please see the FAQ page.*"
)
FAULT_LINE_PATTERN = re.compile(r"\bAbort\(|[Ff]atal error|srun: error: ")
EAR_PATIENCE_S = 0.2  # after which a signal was for this process alone
POLL_PERIOD_S = 5.0  # between two looks at the ranks' files
TRAIN_SCRIPT = PACKAGE_FOLDER / "train" / "__main__.py"
# A Ctrl-C for a notebook reaches the supervisor only through who has started it.
DETACHED_PROCESS_OPTIONS = {"stdin": subprocess.DEVNULL, "start_new_session": True}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def lock_host(patience_s: float = 0.0) -> ExitStack:
    """Take what the one measured run of this host holds; ValueError while another one goes on.

    It is free when its process ends, however it does. patience_s: to wait for that; a batch job
    waits a minute for the end of the one before.
    """
    if "SLURM_JOB_ID" in os.environ:
        patience_s = max(patience_s, 60.0)
    until_s = time.monotonic() + patience_s
    # containers of one machine share its boot id, whatever they call themselves
    name = os.environ.get(HOST_LOCK_VARIABLE) or kernel.boot_id() or platform.node()
    mark = hashlib.sha256(name.encode()).hexdigest()[:32]
    while (held := _try_to_lock_host(f"energynn-measured-run-on-{mark}")) is None:
        if time.monotonic() > until_s:
            raise ValueError(
                f"{HOST_TAKEN_TEXT}; `pgrep -af energynn` shows it; one at a time; in a batch "
                "job give sbatch --exclusive"
            )
        time.sleep(1)
    return held


def _try_to_lock_host(name: str) -> ExitStack | None:
    """Hold a name in this network namespace and a locked file in /tmp; None where one is held."""
    with ExitStack() as held:
        ours = held.enter_context(socket.socket(socket.AF_UNIX))
        try:
            ours.bind(f"\0{name}")
        except OSError:
            return None
        try:
            file = held.enter_context(open(LOCK_FOLDER / name, opener=_open_lock_file))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError:  # no such folder, or no locks in it: the name alone
            pass
        return held.pop_all()


def _open_lock_file(path: str, _flags: int) -> int:
    """Open a file that every user may lock, and make it before; no link or pipe is waited for."""
    reading = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(FileExistsError):
        made = os.open(path, reading | os.O_CREAT | os.O_EXCL)
        os.fchmod(made, 0o444)
        return made
    # without O_CREAT, which the kernel refuses for another user's file in /tmp
    return os.open(path, reading)


def start_facts(
    run_dir: Path,
    system_file: Path,
    described: dict,
    uses_gpus: bool,
) -> dict:
    """Return what run.json tells of the place and the time of a run or a measured command.

    Raises ValueError where nothing would measure it.
    """
    gpus = described["gpus"] if uses_gpus else []
    system = machine.load_system(system_file) | {"uses_gpus": uses_gpus}
    find_sensors(system, None)  # refuses where all are left out
    return {
        "run_id": run_dir.name,
        "started_at": utc_time_text(),
        **system,
        "job": machine.describe_batch_job(),
        "device_kind": "gpu" if gpus else "cpu core",
        "device_name": gpus[0]["name"] if gpus else described["cpu"],
        "versions": machine.package_versions(),
        "machine": described,
    }


def status_and_reason(
    folder: Path,
    size: int,
    stop_reason: str,
    by: str,
) -> tuple[str, str]:
    """Return status and reason of a run, from the last event of each of ``size`` ranks.

    ``by``: what is known of a rank that ended without a word. The exit status of mpirun proves
    nothing: perun's is 0 after a SIGTERM.
    """
    events = read_events(folder)
    reached = records.progress_text(run_dir_of(folder))
    ends = events_of_kind(events, "rank_end")
    bad = [end for end in ends if end["status"] not in ("finished", "interrupted")]
    heard = [end["reason"] for end in ends if end["status"] == "interrupted"]
    silent = sorted(set(range(size)) - {end["rank"] for end in ends})
    if not bad and not silent:
        if not heard:
            return "finished", ""
        return (
            "interrupted",
            f"{stop_reason or 'asked to stop'}; {heard[0]}; it can go on",
        )
    if stop_reason:
        return "interrupted", f"{stop_reason}; {reached}"
    starts = events_of_kind(events, "rank_start")
    hosts = {start["rank"]: f" on {start['host']}" for start in starts}
    who = f"{len(silent)} of {size} ranks"
    # MPICH names the process that took the others with it
    log = kernel.read_text(folder / "log.txt")
    named = {one["rank"] for one in starts if f"PID {one.get('pid')} RUN" in log}
    silent = sorted(named & {*silent}) or silent
    if len(silent) == 1:
        who = f"rank {silent[0]}{hosts.get(silent[0], '')}"
    silence = f"{who} ended without a word{by}"
    if bad:
        # srun stops all where one has died
        told = [
            end
            for end in bad
            if not re.search(
                f"{launchers.LOST_RANK_TEXT}|stopped by SIG", end["reason"]
            )
        ]
        # who has the sampler of a command ends last, whatever came first
        ended = {
            one["rank"]: one["t_wall_ns"]
            for one in [*ends, *events_of_kind(events, "training_end")]
        }
        first = min(told or bad, key=lambda end: ended[end["rank"]])
        reason = first["reason"]
        if size > 1:
            reason = f"rank {first['rank']}: {reason}"
        if silent and not told:
            reason = f"{silence}; {reason}"  # who is lost, then who misses it
        return first["status"], reason
    return "killed", f"{silence}; {reached}"


def make_segment_folder(run_dir: Path) -> Path:
    """Make the folder of a further start of a run; the record of those before is not of it."""
    (run_dir / "record.json").unlink(missing_ok=True)
    folder = run_dir / f"segment-{len(segment_dirs(run_dir)) + 1}"
    folder.mkdir()
    return folder


def start_ear(command: str) -> subprocess.Popen:
    """Start a shell that reads what never comes, until this process ends, or what its group hears,
    as a Ctrl-C, or all that bear the command's words, as by `pkill -f`.
    """
    return subprocess.Popen(
        ["sh", "-c", "read -r _", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def forward_signals(
    children: list[subprocess.Popen] = (), ear: subprocess.Popen | None = None
) -> list[int]:
    """Note the numbers of signals in the list that is returned, and pass them on to children.

    Not those that the ear has heard, and so the children: a second one would interrupt the
    checkpoint that the first has asked for. What was ignored before, as SIGHUP under nohup, still
    is.
    """
    stopped = []

    def note_signal(number: int, _frame) -> None:
        nonlocal ear
        stopped.append(number)
        if ear is None:
            return
        asked = ear
        with suppress(subprocess.TimeoutExpired):
            asked.wait(EAR_PATIENCE_S)
        is_heard = asked.returncode is not None
        if is_heard and asked is ear:
            ear = start_ear(asked.args[-1])  # for the next one
        for child in children:
            # one of another user, as of sudo, hears a terminal
            with suppress(OSError):
                # and one with a group of its own, as `timeout`, nothing of this one
                if not is_heard or os.getpgid(child.pid) != os.getpgrp():
                    child.send_signal(number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, note_signal)
    return stopped


def start_process(
    words: list[str], folder: Path, environment: dict, ends_by: int, **pipes
):
    """Start a process that ends with this one, by a signal, and bears the mark of a folder."""
    environment = environment | {
        processes.MARK_VARIABLE: str(folder),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # CUDA's numbers are then NVML's
    }
    return subprocess.Popen(
        words,
        env=environment,
        preexec_fn=partial(processes.end_with_parent, os.getpid(), ends_by),
        **pipes,
    )


def missing_record_text(run_dir: Path, error: Exception) -> str:
    """Say that the record of a run could not be written, and what to do."""
    return (
        f"energynn: {run_dir.name}: no record written ({error}); "
        f"mend that, then `energynn check --recover {shlex.quote(str(run_dir.parent))}`"
    )


def first_signal_text(stopped: list[int]) -> str:
    """Say which signal came first; "" where none came."""
    return f"stopped by {signal.Signals(stopped[0]).name}" if stopped else ""


# ---------------------------------------------------------------------------------------- of a run


def supervise_run(run_dir: Path, parent: int) -> None:
    """Make the run of a run.json; end it if the parent process ends, or a signal asks for that."""
    stopped = forward_signals()
    _held = records.lock_run_file(run_dir)
    _alone = lock_host()
    intent = records.read_intent(run_dir)
    folder = segment_dirs(run_dir)[-1]
    ranks = start_process(
        ranks_command(folder, intent),
        folder,
        rank_environment(intent),
        signal.SIGKILL,
        stderr=subprocess.STDOUT,
        **DETACHED_PROCESS_OPTIONS,
    )
    looked_s = time.monotonic()
    reason = ""  # why they have to end
    while ranks.poll() is None and not reason:
        reason = first_signal_text(stopped)
        if os.getppid() != parent:
            reason = reason or "the process that started the run ended"
        if time.monotonic() > looked_s + POLL_PERIOD_S:
            looked_s = time.monotonic()
            with suppress(OSError):  # a disk that fails for a moment
                reason = reason or hang_reason(folder, intent["devices"])
        time.sleep(0.05)
    # A signal may reach papermill, too, which ends: the ranks still have time.
    if reason and events_of_kind(read_events(folder), "training_start"):
        # which the ranks of every launcher see; hidden, so that no record lists it
        (folder / ".stop").touch()
        with suppress(subprocess.TimeoutExpired):
            ranks.wait(CHECKPOINT_TIMEOUT_S)
    if ranks.poll() is None:
        ranks.terminate()
    processes.end_marked(folder)
    by = f", {intent['launcher']} with status {ranks.wait()}"
    if 128 < ranks.wait() < 193:  # 255 is an error of its own
        by += f" (signal {ranks.wait() - 128}; 9 is often a lack of memory)"
    by += _last_launcher_line(folder)
    status, why = status_and_reason(folder, intent["devices"], reason, by)
    if status in ("failed", "killed"):
        then = "begins anew, without a checkpoint"
        if newest_checkpoint_name(run_dir):
            then = "goes on from its checkpoint"
        why += f"; started again, it {then}"
    try:
        records.save_record(run_dir, status, why)
    except OSError as error:
        sys.exit(missing_record_text(run_dir, error))


def hang_reason(folder: Path, devices: int) -> str:
    """Say in words that ranks hang before their first event or after their last; "" else."""
    paths = list(folder.glob("events-rank*.jsonl"))
    silent_s = time.time() - max(path.stat().st_mtime for path in [folder, *paths])
    if silent_s < MAX_SILENCE_S:
        return ""
    if len(paths) == devices and not events_of_kind(read_events(folder), "rank_end"):
        return ""  # they train
    silent = f"its ranks were silent for {silent_s:.0f} s, before or after the training"
    return silent + _last_launcher_line(folder)


def _last_launcher_line(folder: Path) -> str:
    """Tell the first line of a log that names a fault, else the launcher's last; "" without one."""
    lines = kernel.read_text(folder / "log.txt").splitlines()
    own = [line.strip() for line in lines if not FOREIGN_LINE_PATTERN.fullmatch(line)]
    faults = [line.strip() for line in lines if FAULT_LINE_PATTERN.search(line)]
    where = "log.txt says" if faults else "its last line"
    told = faults[:1] or own[-1:]
    return f', {where}: "{told[0][:200]}"' if told else ""


def _gpu_indices(intent: dict) -> list[int]:
    """List the indices of this host's GPUs that a run uses; none where its devices are cores."""
    if intent["device_kind"] != "gpu":
        return []
    gpus = intent["machine"]["gpus"][: intent["devices"]]
    return [gpu["index"] for gpu in gpus]


def ranks_command(folder: Path, intent: dict) -> list[str]:
    """Return the command of all ranks: mpirun or srun, each rank under perun; or without perun."""
    devices = intent["devices"]
    train = [str(TRAIN_SCRIPT), str(folder)]
    if intent["launcher"] == "alone":
        return [*processes.OWN_PYTHON, *train]
    if intent["launcher"] == "torchrun":
        return [
            *processes.OWN_PYTHON,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={devices}",
            "--standalone",
            *train,
        ]
    perun_adapter.write_configuration(
        folder, intent["config"]["perun_sampling_period_s"], _gpu_indices(intent)
    )
    ranks = perun_adapter.command_under_perun(
        launchers.python_command_of_ranks(), train, folder
    )
    if intent["launcher"] == "srun":
        return [
            "srun",
            "--export=ALL",
            "--kill-on-bad-exit=1",
            "--label",
            f"--ntasks={devices}",
            *shlex.split(os.environ[launchers.SRUN_VARIABLE]),
            *ranks,
        ]
    return [*launchers.mpirun_command(devices), *ranks]


def rank_environment(intent: dict) -> dict[str, str]:
    """Return the ranks' environment: threads, and the GPUs that they use; others are hidden."""
    return launchers.mpi_environment() | {
        "OMP_NUM_THREADS": str(intent["config"]["threads_per_device"]),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, _gpu_indices(intent))),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        processes.STARTER_VARIABLE: processes.name_of_this_process(),
    }


if __name__ == "__main__":
    supervise_run(Path(sys.argv[1]), int(sys.argv[2]))
