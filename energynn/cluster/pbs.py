"""What slurm.py does, with PBS (OpenPBS, PBS Professional): its commands, and the directives of a batch script.

It was tried with answers as its manuals have them, never on a server. A run's job is NUMBER_TASK as everywhere; PBS
writes 12[] for an array of number 12, and 12[3] for a task of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from energynn.cluster.slurm import call

MOST_TASKS = 10_000  # max_array_size, as PBS has it where nobody says otherwise
STATES = {"R": "RUNNING", "E": "COMPLETING", "S": "SUSPENDED", "U": "SUSPENDED"}
WAITS = "QHWTM"
TASK = "ENERGYNN_TASK"  # tells a job that takes another's place which run of the script is its own


def directives(needs: dict, site) -> list[str]:
    """The first lines of a batch script; its last line warns the job of its time limit, as PBS itself does not."""
    select = f"select={needs['nodes']}:mpiprocs={needs['per_node']}" + (f":{site.select}" if site.select else "")
    options = [f"-N {needs['title'][:15]}", f"-l {select}", f"-l walltime={60 * needs['minutes']}", "-S /bin/bash"]
    options += [
        "-r n",
        "-j oe",
        f'-o "{needs["log_folder"]}"',
        f"-v ENERGYNN_COMMENT={needs['comment'].replace(':', '_')}",
    ]
    for option in [*site.qsub, *needs["options"]]:
        name, _, value = option.partition("=")
        options.append({"--account": f"-A {value}", "--reservation": f"-q {value}"}.get(name, option))
    warned_s = 60 * needs["minutes"] - needs["warning_s"]
    return [*(f"#PBS {option}" for option in options), f"(sleep {warned_s}; kill -USR1 $$) > /dev/null 2>&1 &"]


def submit(script: Path, tasks: int, after: str) -> str:
    """Queue a script, its tasks after another job has ended well; returns the job's number."""
    array = ["-J", f"0-{tasks - 1}"] if tasks > 1 else []
    dependency = ["-W", f"depend=afterok:{_whole(after)}"] if after else []
    return call("qsub", *array, *dependency, str(script)).strip().split(".")[0]


def most_tasks() -> int:
    """How many tasks an array may have here."""
    with contextlib.suppress(ValueError):
        if told := re.search(r"max_array_size = (\d+)", call("qstat", "-B", "-f")):
            return int(told[1])
    return MOST_TASKS


def number_of(comment: str) -> str:
    """The number of the job with a comment; nothing if there is none. Raises ValueError without an answer."""
    for name, job in _jobs(call("qstat", "-f", "-F", "json")).items():
        if job.get("Variable_List", {}).get("ENERGYNN_COMMENT") == comment.replace(":", "_"):
            return name.split(".")[0]
    return ""


def queue(jobs: Iterable[str]) -> dict[str, tuple[str, str]]:
    """State and reason of those of the jobs that are queued or run, by NUMBER_TASK, whoever has submitted them.

    Raises ValueError without an answer.
    """
    states, by_number = {}, {_whole(job): job for job in jobs if job}
    for name, job in _told(set(by_number)).items():
        state = "PENDING" if job["job_state"] in WAITS else STATES.get(job["job_state"])
        if state:
            states[_task(name, by_number)] = (state, job.get("comment", ""))
    return states


def depend(job: str, on: str) -> None:
    """Let a queued job wait for another one than before."""
    call("qalter", "-W", f"depend=afterok:{_whole(on)}", _whole(job))


def cancel(jobs: list[str]) -> None:
    """Cancel jobs."""
    call("qdel", *map(_name, jobs))


def last_words(jobs: list[str]) -> dict[str, str]:
    """What PBS still knows of jobs that have left the queue."""
    states, by_number = {}, {_whole(job): job for job in jobs}
    with contextlib.suppress(ValueError):
        for name, job in _told(set(by_number)).items():
            if "Exit_status" in job:
                states[_task(name, by_number)] = f"exit status {job['Exit_status']}"
    return states


def this_task() -> str:
    """The job that this process belongs to; empty where it is in none."""
    number, task = os.environ.get("PBS_JOBID", "").split(".")[0], os.environ.get(TASK, "0")
    if array := re.fullmatch(r"(\d+)\[(\d+)\]", number):
        return f"{array[1]}[]_{array[2]}"
    return f"{number}_{task}" if number else ""


def queue_again(script: str) -> str:
    """Queue a job that takes this one's place; returns its number. Only operators may requeue one (qrerun)."""
    job = this_task()
    task = job.split("_")[1]
    words = ["-v", f"{TASK}={task}", "-W", f"depend=afterany:{_name(job)}"]
    return f"{call('qsub', *words, script).strip().split('.')[0]}_{task}"


def _told(numbers: set[str]) -> dict[str, dict]:
    """What PBS knows of jobs and their tasks, also of those that have ended; asked one by one where one is unknown."""
    if not numbers:
        return {}
    try:
        return _jobs(call("qstat", "-x", "-t", "-f", "-F", "json", *sorted(numbers)))
    except ValueError as error:
        if "nknown Job" not in str(error):
            raise
    told = {}
    for number in numbers if len(numbers) > 1 else ():
        told |= _told({number})
    return told


def _jobs(told: str) -> dict[str, dict]:
    """The jobs of an answer in JSON."""
    try:
        return json.loads(told or "{}").get("Jobs", {})
    except ValueError as error:
        raise ValueError(f"qstat: no JSON as PBS 14 and newer write it ({error})") from error


def _whole(job: str) -> str:
    """The job as PBS calls it, with all its tasks."""
    return job.split("_")[0]


def _name(job: str) -> str:
    """The task as PBS calls it."""
    number, task = job.split("_")
    return number.replace("[]", f"[{task}]")


def _task(name: str, jobs: dict[str, str]) -> str:
    """NUMBER_TASK of what PBS calls a task, or of a job without tasks, by its number among ours."""
    array, number = re.match(r"(\d+)\[(\d+)\]", name), name.split(".")[0]
    return f"{array[1]}[]_{array[2]}" if array else jobs.get(number, number)
