"""Ask Slurm by its own commands, each with a time limit: its controller may be down."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PATIENCE_S = 20
REQUEUE_S = 60  # in which Slurm ends a job that it has queued again
ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "DEADLINE",
)


class NoAnswer(ValueError):
    """A command of Slurm has not answered in time; it may still take effect."""


class Queued(NamedTuple):
    """A job in the queue, as squeue shows it."""

    state: str
    reason: str


def submit(script: Path, *options: str) -> str:
    """Queue a script; returns the job's number."""
    return call("sbatch", "--parsable", *options, str(script)).strip().split(";")[0]


def find(comment: str) -> str:
    """Find the number of the user's job with this comment; empty if there is none."""
    lines = call("squeue", "--me", "--noheader", "--format=%F %k").splitlines()
    found = [line.split()[0] for line in lines if line.split()[1:] == [comment]]
    return "".join(found[:1])


def queue(jobs: Iterable[str]) -> dict[str, Queued]:
    """Ask which jobs (ARRAY_TASK) are queued or running. Raises ValueError without an answer."""
    numbers = sorted({job.split("_")[0] for job in jobs if job})
    if not numbers:
        return {}
    command = ["squeue", "--array", "--noheader", "--format=%F_%K|%T|%r"]
    try:
        lines = call(*command, f"--jobs={','.join(numbers)}").splitlines()
    except ValueError as error:
        if "nvalid job id specified" not in str(error):
            # says Slurm if it remembers none of them
            raise
        return {}
    queued = {}
    for line in lines:
        job, state, reason = line.split("|", 2)
        if state not in ENDED:
            queued[job] = Queued(state, reason)
    return queued


def cancel(jobs: list[str]) -> None:
    """Cancel jobs."""
    call("scancel", *jobs)


def this_task() -> str:
    """Name the array task that this process belongs to; empty outside of one."""
    number, task = (
        os.environ.get("SLURM_ARRAY_JOB_ID"),
        os.environ.get("SLURM_ARRAY_TASK_ID"),
    )
    return f"{number}_{task}" if number else ""


def queue_again(script: Path) -> str:
    """Queue this task again, or a new job where the site forbids that; returns its name.

    Raises ValueError where neither is possible.
    """
    job = this_task()
    for patience_s in (5, 20, 60, 120):
        try:
            # by task: the job's own number may name the array
            call("scontrol", "requeue", job)
            time.sleep(REQUEUE_S)
            return job
        except ValueError as error:
            if "isabled" in str(error):
                break
            time.sleep(patience_s)  # the controller may be down
    task = job.split("_")[1]
    return f"{submit(script, f'--dependency=afterany:{job}', f'--array={task}')}_{task}"


def call(*command: str) -> str:
    """Return what a command of Slurm prints; raises ValueError if it is missing, fails or hangs."""
    name = command[0]
    if shutil.which(name) is None:
        raise ValueError(
            f"{name}: not found; submit from a login node of a Slurm cluster"
        )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(
            f"{name}: no answer in {PATIENCE_S} s; try again later"
        ) from None
    if done.returncode:
        raise ValueError(f"{' '.join(command[:3])}: {' '.join(done.stderr.split())}")
    return done.stdout
