"""A sampler process of our own for each host, where perun has none: under any launcher, and where perun is missing."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from energynn.files import is_locked, lock
from energynn.launchers import label_lines
from energynn.measure import perun_adapter
from energynn.measure.samples import has_begun, limit_s
from energynn.processes import end_with_parent


def start_sampler(folder: Path, size: int, stopped: list[int]):
    """Start this host's sampler, or wait until the one that another rank of this host has started samples.

    Returns a function that a rank calls at its end. The sampler goes on until the last rank of this host has ended.
    """
    host = os.uname().nodename
    ours = lock(folder / f".ranks-{host}", shared=True, wait=True)
    owner = lock(folder / f".sampler-{host}")
    if owner is None:
        until(lambda: has_begun(folder, host), f"the first sample of {host} in {folder}")
        return ours.close
    sampler = subprocess.Popen(
        [sys.executable, "-c", f"from energynn.measure.sampler_process import sample; sample({str(folder)!r})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=partial(end_with_parent, os.getpid()),
    )
    answers, _, _ = select.select([sampler.stdout], [], [], limit_s("ready_limit_s"))
    if not answers or sampler.stdout.readline() != b"ready\n":
        sampler.kill()
        raise ValueError("the sampler does not start; see its lines above, and `energynn doctor`")

    def stop() -> None:
        ours.close()
        patience = time.monotonic() + limit_s("ready_limit_s")
        while size > 1 and not stopped and is_locked(folder / f".ranks-{host}"):
            time.sleep(0.5)
        while size > 1 and not stopped and time.monotonic() < patience:
            if len(list(folder.glob("events-rank*.jsonl"))) == size and not is_locked(folder / f".ranks-{host}"):
                break  # there is none to come
            time.sleep(0.5)
        with contextlib.suppress(OSError):  # a word, for processes that were forked meanwhile may hold the pipe open
            sampler.stdin.write(b"stop\n")
            sampler.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            sampler.wait(timeout=150)  # it may have to wait for the disk
        sampler.kill()
        sampler.wait()
        owner.close()

    return stop


def sample(folder: str) -> None:
    """The sampler process: sample this host until the parent says a word, closes the pipe or dies."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    label_lines()
    sampler = perun_adapter.make_sampler(Path(folder))
    sampler.start()
    print("ready", file=sys.__stdout__, flush=True)  # for the program that has started this one: no label
    sys.stdin.readline()
    sampler.stop()


def until(condition, what: str) -> None:
    """Wait for what the shared folder tells: each of hundreds of ranks asks it ever more rarely."""
    most_s, pause_s = limit_s("ready_limit_s"), 0.1
    deadline = time.monotonic() + most_s
    while not condition():
        if time.monotonic() > deadline:
            raise ValueError(f"waited {most_s:.0f} s for {what}")
        time.sleep(pause_s)
        pause_s = min(1.3 * pause_s, 2.0)
