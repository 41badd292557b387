"""What guards a run and a measured command alike: alone on its host, heard, and nothing left."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from energynn import processes, records
from energynn.files import utc_now
from energynn.measure import kernel, machine
from energynn.measure.samples import events_of_kind, read_events, segments

HOST_LOCK = "ENERGYNN_HOST_LOCK"  # another name for this host, for tests
LOCKS = Path("/tmp")  # not TMPDIR, which differs
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def take_host() -> ExitStack:
    """Take what the one measured run of this host holds; ValueError while another one goes on.

    It is free when its process ends, however it does. A batch job waits a minute for the end of the
    one before.
    """
    until_s = time.monotonic() + (60 if "SLURM_JOB_ID" in os.environ else 0)
    # containers of one machine share its boot id, whatever they call themselves
    name = os.environ.get(HOST_LOCK) or kernel.boot_id() or os.uname().nodename
    mark = hashlib.sha256(name.encode()).hexdigest()[:32]
    while (held := _hold_host(f"energynn-measured-run-on-{mark}")) is None:
        if time.monotonic() > until_s:
            raise ValueError(
                "another measured run has this machine; `pgrep -af energynn` shows it; "
                "one at a time; in a batch job give sbatch --exclusive"
            )
        time.sleep(1)
    return held


def _hold_host(name: str) -> ExitStack | None:
    """Hold a name in this network namespace and a locked file in /tmp; None where one is held."""
    with ExitStack() as held:
        ours = held.enter_context(socket.socket(socket.AF_UNIX))
        try:
            ours.bind(f"\0{name}")
        except OSError:
            return None
        try:
            file = held.enter_context(open(LOCKS / name, opener=_lock_file))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError:  # no such folder, or no locks in it: the name alone
            pass
        return held.pop_all()


def _lock_file(path: str, _flags: int) -> int:
    """Open a file that every user may lock, and make it before; no link or pipe is waited for."""
    reading = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(FileExistsError):
        made = os.open(path, reading | os.O_CREAT | os.O_EXCL)
        os.fchmod(made, 0o444)
        return made
    # without O_CREAT, which the kernel refuses for another user's file in /tmp
    return os.open(path, reading)


def facts(
    run_dir: Path,
    system_file: Path,
    described: dict,
    uses_gpus: bool,
) -> dict:
    """Return what run.json tells of the place and the time of a run or a measured command."""
    gpus = described["gpus"] if uses_gpus else []
    return {
        "run_id": run_dir.name,
        "started_at": utc_now(),
        **machine.load(system_file),
        "uses_gpus": uses_gpus,
        "job": machine.batch_job(),
        "device_kind": "gpu" if gpus else "cpu core",
        "device_name": gpus[0]["name"] if gpus else described["cpu"],
        "versions": machine.versions(),
        "machine": described,
    }


def verdict(
    folder: Path,
    size: int,
    stop_reason: str,
    by: str = "",
) -> tuple[str, str]:
    """Return status and reason of a run, from the last event of each of ``size`` ranks.

    ``by``: what is known of a rank that ended without a word. The exit status of mpirun proves
    nothing: perun's is 0 after a SIGTERM.
    """
    events = read_events(folder)
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
        return "interrupted", f"{stop_reason}; {records.how_far(events)}"
    if bad:
        first = min(bad, key=lambda end: end["t_wall_ns"])
        return first["status"], f"rank {first['rank']}: {first['reason']}"
    ranks = ", ".join(map(str, silent))
    return "killed", f"rank {ranks} ended without a word{by}; {records.how_far(events)}"


def next_segment(run_dir: Path) -> Path:
    """Make the folder of a further start of a run; the record of those before is not of it."""
    (run_dir / "record.json").unlink(missing_ok=True)
    folder = run_dir / f"segment-{len(segments(run_dir)) + 1}"
    folder.mkdir()
    return folder


def hear_signals(children: list[subprocess.Popen] | None = None) -> list[int]:
    """Note the numbers of signals in the list that is returned, and pass them on to children.

    They hear a Ctrl-C from the terminal. What was ignored before, as SIGHUP under nohup, still is.
    """
    stopped: list[int] = []

    def note(number: int, _frame) -> None:
        stopped.append(number)
        if number != signal.SIGINT:
            for child in children or []:
                child.send_signal(number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, note)
    return stopped


def start(words: list[str], folder: Path, environment: dict, ends_by: int, **pipes):
    """Start a process that ends with this one, by a signal, and bears the mark of a folder."""
    as_child = partial(processes.end_with_parent, os.getpid(), ends_by)
    marked = environment | {processes.MARK_VARIABLE: str(folder)}
    return subprocess.Popen(words, env=marked, preexec_fn=as_child, **pipes)


def no_record(run_dir: Path, error: Exception) -> str:
    """Say that the record of a run could not be written, and what to do."""
    remedy = f"mend that, then `energynn check --recover {run_dir.parent}`"
    why = getattr(error, "strerror", None) or error
    return f"energynn: {run_dir.name}: no record written ({why}); {remedy}"


def stop_reason(stopped: list[int]) -> str:
    """Say which signal came first; "" where none came."""
    return f"stopped by {signal.Signals(stopped[0]).name}" if stopped else ""
