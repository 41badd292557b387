"""Processes as the tests that kill them see them."""

import contextlib
import io
import os
import subprocess
import sys
import time

import psutil

from energynn import cli
from energynn.measure import perun_adapter

ENERGYNN = [sys.executable, "-m", "energynn.cli"]


def energynn(*words, **more):
    """Execute a command of ours in a process of its own, and wait for its end."""
    return subprocess.run(
        [*ENERGYNN, *map(str, words)], capture_output=True, text=True, **more
    )


def said(*words) -> tuple[int, str, str]:
    """Return exit status, output and errors of a command, within this process."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = cli.main([str(word) for word in words])
    return status, out.getvalue(), errors.getvalue()


def wait_until(condition, timeout_s=180, what="", pause_s=0.05):
    """Wait for a condition, or fail; a look may cost CPU time that others need."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain {what}"
        time.sleep(pause_s)


def processes_of(folder):
    """Everything that carries a folder in its command line or its run's variable, except this
    test.
    """
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline()) + process.environ().get(
                perun_adapter.RUN_DIR_VARIABLE, ""
            )
            alive = process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if str(folder) in words and process.pid != os.getpid() and alive:
            found.append(process)
    return found


def lives(number):
    """Whether a process of this host has not ended."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
