"""What slurm.py does, on a machine without Slurm: a process in the background makes one run after the other."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import psutil

from energynn.files import REPOSITORY, write_json
from energynn.launchers import CAN_GO_ON
from energynn.processes import end_with_parent
from energynn.reading import json_or_nothing

MODULE = "energynn.cluster.background"


def submit(script: Path, tasks: int, _after: str) -> str:
    """Start a process in the background that makes the runs of a batch script, after those submitted before."""
    for old in script.parent.glob("cancelled-*"):
        old.unlink()
    (script.parent / "current.json").unlink(missing_ok=True)
    earlier = [str(worker) for worker in _workers()]
    command = [sys.executable, "-m", MODULE, str(script), str(tasks), *earlier]
    silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    return str(subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True, **silent).pid)


def most_tasks() -> int:
    """How many runs one process may make."""
    return 10**6


def number_of(_comment: str) -> str:
    """Nothing: a process has its number at once."""
    return ""


def depend(_job: str, _on: str) -> None:
    """Nothing: one run is made after the other."""


def last_words(_jobs: list[str]) -> dict[str, str]:
    """Nothing is remembered."""
    return {}


def this_task() -> str:
    """Nothing: the process that ``submit`` has started begins a run again by itself."""
    return ""


def queue(_jobs: Iterable[str] = ()) -> dict[str, tuple[str, str]]:
    """State and reason of each run that waits or goes on, by PROCESS_TASK."""
    states = {}
    for worker, (script, tasks) in _workers().items():
        now, _ = _current(script, tasks)
        for task in range(max(now, 0), tasks):
            if task == now:
                states[f"{worker}_{task}"] = ("RUNNING", "")
            elif not (script.parent / f"cancelled-{task}").exists():
                states[f"{worker}_{task}"] = ("PENDING", "one run at a time")
    return states


def cancel(jobs: list[str]) -> None:
    """Let runs stop with a checkpoint, or not begin."""
    workers = _workers()
    for job in jobs:
        worker, task = map(int, job.split("_"))
        script, tasks = workers[worker]
        (script.parent / f"cancelled-{task}").touch()
        now, pid = _current(script, tasks)
        if now == task:
            _end_child(worker, pid)


def _end_child(worker: int, pid: int) -> None:
    """Ask a process to end, if it is one of the worker's: a file has its number, and anything may stand in a file."""
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
        for child in psutil.Process(worker).children():
            if child.pid == pid:
                child.terminate()


def _current(script: Path, tasks: int) -> tuple[int, int]:
    """Task and process of the run that goes on; -1 where the file tells of none."""
    told = json_or_nothing(script.parent / "current.json")
    task, pid = told.get("task"), told.get("pid")
    are_numbers = type(task) is int and type(pid) is int  # a bool is none
    return (task, pid) if are_numbers and 0 <= task < tasks and pid > 1 else (-1, -1)


def _workers() -> dict[int, tuple[Path, int]]:
    """Script and number of runs of every process that ``submit`` has started and that is alive."""
    workers = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []  # none of a zombie
        if words[1:3] == ["-m", MODULE]:
            workers[process.pid] = (Path(words[3]), int(words[4]))
    return workers


def work(script: Path, tasks: int, earlier: list[int]) -> None:
    """What that process does: wait for those before it, then make one run after the other."""
    while any(psutil.pid_exists(worker) for worker in earlier):
        time.sleep(0.5)
    for task in range(tasks):
        exit_status = CAN_GO_ON
        while exit_status == CAN_GO_ON and not (script.parent / f"cancelled-{task}").exists():
            end_with_us = partial(end_with_parent, os.getpid())
            job = subprocess.Popen(["bash", str(script), str(task)], preexec_fn=end_with_us)
            write_json(script.parent / "current.json", {"task": task, "pid": job.pid})
            exit_status = job.wait()


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), [int(worker) for worker in sys.argv[3:]])
