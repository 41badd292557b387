"""What slurm.py does, on a machine without Slurm: a process in the background makes one run after the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from energynn.files import REPOSITORY


def submit(script: Path, tasks: int, _after: str) -> str:
    """Start a process in the background that makes the runs of a batch script, after those submitted before."""
    for old in script.parent.glob("cancelled-*"):
        old.unlink()
    (script.parent / "current.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "energynn.cluster.background", str(script), str(tasks), *map(str, _workers())]
    return str(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=REPOSITORY,
                                stderr=subprocess.DEVNULL, start_new_session=True).pid)  # fmt: skip


def queue() -> dict[str, tuple[str, str]]:
    """State and reason of each run that waits or goes on, by PROCESS_TASK."""
    found = {}
    for worker, (script, tasks) in _workers().items():
        now = _current(script)["task"]
        for task in range(max(now, 0), tasks):
            if not (script.parent / f"cancelled-{task}").exists() or task == now:
                found[f"{worker}_{task}"] = ("RUNNING", "") if task == now else ("PENDING", "one run at a time")
    return found


def cancel(jobs: list[str]) -> None:
    """Let runs stop with a checkpoint, or not begin."""
    workers = _workers()
    for worker, task in (map(int, job.split("_")) for job in jobs):
        script = workers[worker][0]
        (script.parent / f"cancelled-{task}").touch()
        if _current(script)["task"] == task:
            os.kill(_current(script)["pid"], signal.SIGTERM)


def _current(script: Path) -> dict:
    try:
        return json.loads((script.parent / "current.json").read_text())
    except OSError:
        return {"task": -1}


def _workers() -> dict[int, tuple[Path, int]]:
    """Script and number of runs of every process that ``submit`` has started and that is alive."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:  # ended while we looked
            continue
        if words[1:3] == ["-m", "energynn.cluster.background"]:
            found[int(path.parent.name)] = (Path(words[3]), int(words[4]))
    return found


def work(script: Path, tasks: int, earlier: list[int]) -> None:
    """What that process does: wait for those before it, then make one run after the other."""
    from energynn.files import write_json

    while any(Path(f"/proc/{worker}").exists() for worker in earlier):
        time.sleep(0.5)
    for task in range(tasks):
        while not (script.parent / f"cancelled-{task}").exists():
            job = subprocess.Popen(["bash", str(script), str(task)])
            write_json(script.parent / "current.json", {"task": task, "pid": job.pid})
            if job.wait() != os.EX_TEMPFAIL:  # launch.supervise.CAN_GO_ON
                break


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), list(map(int, sys.argv[3:])))
