"""A sampler process of our own for each host, where perun has none: under any launcher, and where perun is missing."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from energynn.files import is_locked, lock
from energynn.measure import perun_adapter
from energynn.measure.perun_adapter import die_with_parent
from energynn.measure.samples import has_begun, read_events

READY_S = 60.0  # for the first sample; Python starts slowly from a cluster's file system


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
        preexec_fn=die_with_parent,
    )
    answers, _, _ = select.select([sampler.stdout], [], [], READY_S)
    if not answers or sampler.stdout.readline() != b"ready\n":
        sampler.kill()
        raise ValueError("the sampler does not start; see its lines above, and `energynn doctor`")

    def stop() -> None:
        ours.close()
        patience = time.monotonic() + READY_S
        while size > 1 and not stopped:
            begun = {event["rank"] for event in read_events(folder)}
            if not is_locked(folder / f".ranks-{host}") and (len(begun) == size or time.monotonic() > patience):
                break
            time.sleep(0.1)
        sampler.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            sampler.wait(timeout=30)
        sampler.kill()
        sampler.wait()
        owner.close()

    return stop


def sample(folder: str) -> None:
    """The sampler process: sample this host until the parent closes the pipe or dies."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sampler = perun_adapter.make_sampler(Path(folder))
    sampler.start()
    print("ready", flush=True)
    sys.stdin.read()
    sampler.stop()


def until(condition, what: str) -> None:
    deadline = time.monotonic() + READY_S
    while not condition():
        if time.monotonic() > deadline:
            raise ValueError(f"waited {READY_S:.0f} s for {what}")
        time.sleep(0.02)
