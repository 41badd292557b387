"""Slurm's own commands, each with a time limit of its own: a controller that does not answer must not hang us.

Plain sbatch scripts, and not submitit: what a job executes is a notebook, not a pickled function, its state is the
run's folder, and people can read the script, change it, and submit it by hand.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

PATIENCE_S = 20
MOST_TASKS = 1000  # of one array, as Slurm has it where nobody says otherwise
KEPT = ("HOME", "USER", "LOGNAME", "LANG", "PATH")  # of the environment; the rest may hold secrets
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


class NoAnswer(ValueError):
    """A command of Slurm has not answered in time: what it was asked for may yet happen."""


def directives(needs: dict, site) -> list[str]:
    """The first lines of a batch script."""
    at_once = f"%{site.runs_at_once}" if site.runs_at_once else ""
    options = [
        f"--job-name={needs['title']}",
        f"--nodes={needs['nodes']}",
        f"--ntasks={needs['devices']}",
        f"--ntasks-per-node={needs['per_node']}",
        f"--time={needs['minutes']}",
        f"--array=0-{needs['tasks'] - 1}{at_once}",
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{needs['warning_s']}",
        f"--export={','.join(KEPT)}",
        f"--comment={needs['comment']}",
        f'--output="{needs["log_folder"] / "slurm-%A_%a.txt"}"',
    ]
    if "--no-requeue" in site.sbatch:
        options.remove("--requeue")
    return [f"#SBATCH {option}" for option in [*options, *site.sbatch, *needs["options"]]]


def submit(script: Path, tasks: int, after: str) -> str:
    """Queue a script, its tasks after another job has ended well; returns the job's number."""
    dependency = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=no"] if after else []
    return call("sbatch", "--parsable", *dependency, str(script)).strip().split(";")[0]


def most_tasks() -> int:
    """How many tasks an array may have here."""
    with contextlib.suppress(ValueError):
        if told := re.search(r"^MaxArraySize\s*=\s*(\d+)", call("scontrol", "show", "config"), re.MULTILINE):
            return max(int(told[1]) - 1, 1)
    return MOST_TASKS


def number_of(comment: str) -> str:
    """The number of the user's job with a comment; nothing if there is none. Raises ValueError without an answer."""
    for line in call("squeue", "--me", "--noheader", "--format=%F|%k").splitlines():
        number, _, told = line.partition("|")
        if told == comment:
            return number
    return ""


def queue(jobs: Iterable[str]) -> dict[str, tuple[str, str]]:
    """State and reason of those of the jobs that are queued or run, by JOB_TASK, whoever has submitted them.

    Raises ValueError without an answer.
    """
    numbers = ",".join(sorted({job.split("_")[0] for job in jobs if job}))
    if not numbers:
        return {}
    try:
        told = call("squeue", f"--jobs={numbers}", "--array", "--noheader", "--format=%F_%K|%T|%r")
    except ValueError as error:
        if "nvalid job id specified" not in str(error):  # the controller's words where it remembers none of them
            raise
        told = ""
    states = {}
    for line in told.splitlines():
        job, state, reason = line.split("|", 2)
        if state not in OVER:
            states[job] = (state, reason)
    return states


def depend(job: str, on: str) -> None:
    """Let a queued job wait for another one than before."""
    call("scontrol", "update", f"JobId={job}", f"Dependency=afterok:{on}")


def cancel(jobs: list[str]) -> None:
    """Cancel jobs."""
    call("scancel", *jobs)


def last_words(jobs: list[str]) -> dict[str, str]:
    """What Slurm still knows of jobs that have left the queue: accounting, where there is one, or its controller."""
    arrays = ",".join(sorted({job.split("_")[0] for job in jobs}))
    told = []
    with contextlib.suppress(ValueError):
        told = re.findall(r"(\d+)_(\S+?)\|(.*)", call("sacct", "-nXP", "-o", "JobID,State", "-j", arrays))
    if not told:
        with contextlib.suppress(ValueError):
            lines = call("scontrol", "show", "job", "-o")
            told = re.findall(r"ArrayJobId=(\d+) ArrayTaskId=(\S+) .*JobState=(\S+)", lines)
    states = {}
    for job, tasks, state in told:  # tasks that never began are told together, as [0-1,5]
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", tasks.partition("%")[0]):
            states |= {f"{job}_{task}": state for task in range(int(first), int(last or first) + 1)}
    return states


def this_task() -> str:
    """The task that this process belongs to, which is no task of an own script; SLURM_JOB_ID of one names its array."""
    number, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{number}_{task}" if number else ""


def queue_again(script: str) -> str:
    """Queue this job again; where the site forbids that, a new one that takes its place. Returns its number.

    Raises ValueError where neither is possible.
    """
    job = this_task()
    for patience_s in (5, 20, 60, 120):
        try:
            call("scontrol", "requeue", job)
            time.sleep(60)  # Slurm ends this start
            return job
        except ValueError as error:
            if "isabled" in str(error):
                break
            time.sleep(patience_s)  # the controller may be down
    task = job.split("_")[1]
    number = call("sbatch", "--parsable", f"--dependency=afterany:{job}", f"--array={task}", script)
    return f"{number.strip().split(';')[0]}_{task}"


def call(*command: str) -> str:
    """What a command of Slurm prints; raises ValueError in words where it is missing, fails, or does not answer."""
    if shutil.which(command[0]) is None:
        raise ValueError(f"{command[0]}: not found; this is no login node of such a cluster, or choose --system local")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]}: no answer in {PATIENCE_S} s; is the controller up? try again later") from None
    if done.returncode:
        raise ValueError(f"{' '.join(command[:3])}: {' '.join(done.stderr.split())}")
    return done.stdout
