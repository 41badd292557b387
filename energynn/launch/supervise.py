"""What guards a run and a measured command alike: alone on its host, heard, and nothing left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

from energynn import processes
from energynn.measure import machine

HOST_LOCK = "ENERGYNN_HOST_LOCK"  # another name for this host, for tests
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
IN_JOB = "another measured run goes on here, and this one waits; --exclusive in sbatch avoids it"


def alone_on_host() -> socket.socket | None:
    """Take what the one measured run of this host holds; None while another one goes on.

    It is a name without a file: it is free when its process ends.
    """
    name = os.environ.get(HOST_LOCK, os.uname().nodename)
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0energynn-measured-run-on-{name}")
    except OSError:
        held.close()
        return None
    return held


def require_host() -> str:
    """Return a warning where this run will have to wait; ValueError outside of a batch job."""
    if held := alone_on_host():
        held.close()
        return ""
    if not machine.job_of_process():
        raise ValueError("another measured run goes on on this machine; one at a time")
    return IN_JOB


def take_host(stopped: list[int], parent: int | None = None) -> socket.socket | None:
    """Wait for the host; None where a signal came, or the parent process ended, meanwhile."""
    parent = parent or os.getppid()
    while (held := alone_on_host()) is None and not stopped and os.getppid() == parent:
        time.sleep(0.2)
    return held


def make_folder(path: Path, name: str) -> None:
    """Make a folder and try to write to it; raises ValueError with the remedy."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        fault = f"cannot write to {path} ({error.strerror})"
        raise ValueError(f"{name}: {fault}; choose a folder you own") from error


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


def no_record(run_dir: Path, error: OSError) -> str:
    """Say that the record of a run could not be written, and what to do."""
    remedy = f"mend that, then `energynn check --recover {run_dir.parent}`"
    return f"energynn: {run_dir.name}: no record written ({error.strerror}); {remedy}"


def signal_name(number: int) -> str:
    """Name a signal; those without a name, as of real time, by their number."""
    known = {each.value for each in signal.Signals}
    return signal.Signals(number).name if number in known else f"signal {number}"
