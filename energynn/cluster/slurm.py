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


class Queued(NamedTuple):
    """A job in the queue, as squeue shows it."""

    state: str
    reason: str


def submit(script: Path, *options: str) -> str:
    """Queue a script; returns the job's number."""
    return call("sbatch", "--parsable", *options, str(script)).strip().split(";")[0]


def queue(jobs: Iterable[str]) -> dict[str, Queued]:
    """Ask what this user has queued or running, by ARRAY_TASK; where there are no jobs, nobody.

    Raises ValueError without an answer.
    """
    if not any(jobs):
        return {}
    lines = call("squeue", "--me", "--array", "--noheader", "--format=%F_%K|%T|%r")
    fields = [line.split("|", 2) for line in lines.splitlines()]
    return {job: Queued(state, reason) for job, state, reason in fields}


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


def queue_again(job: str) -> None:
    """Queue a task again. Raises ValueError where the site forbids that, or Slurm is down."""
    for patience_s in (5, 20, 60, 0):
        try:
            # by task: the job's own number may name the array
            call("scontrol", "requeue", job)
            time.sleep(REQUEUE_S)
            return
        except ValueError:
            if not patience_s:
                raise
            time.sleep(patience_s)


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
        remedy = "see `squeue --me`, then try again"
        raise ValueError(f"{name}: no answer in {PATIENCE_S} s; {remedy}") from None
    if done.returncode:
        raise ValueError(f"{' '.join(command[:3])}: {' '.join(done.stderr.split())}")
    return done.stdout
