"""A sampler process of our own for each host: under any launcher, and where perun is missing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from energynn.files import is_locked, lock, write_json
from energynn.launchers import rank, ranks_of_this_host, write_whole_lines
from energynn.measure import sensors
from energynn.measure.perun_backends import add_backends
from energynn.measure.samples import has_begun, limit_s
from energynn.processes import end_marked, end_with_parent
from energynn.reading import json_table

STOPPING_S = 30.0


def start_sampler(folder: Path, size: int, stopped: list[int], take_host: Callable | None = None):
    """Start this host's sampler, or wait for the one that another rank of this host has started.

    ``size`` ranks take part on all hosts. Returns a function that a rank calls at its end; the
    sampler continues until the last rank of this host has ended, or a signal is in ``stopped``.
    ``take_host``: called once on each host before its sampler; what it returns is kept.
    """
    host = os.uname().nodename
    ranks = folder / f".ranks-{host}"
    ours = lock(ranks, shared=True, wait=True)
    announce_gpus(folder)
    owner = lock(folder / f".sampler-{host}")
    if owner is None:
        until(lambda: has_begun(folder, host), f"the first sample of {host} in {folder}")
        return ours.close
    held = [owner, take_host and take_host()]
    here = min(size, ranks_of_this_host())
    program = "from energynn.measure.sampler_process import sample; "
    sampler = subprocess.Popen(
        [sys.executable, "-c", f"{program}sample({str(folder)!r}, {here})"],
        stdin=subprocess.PIPE,
        stdout=2,
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGUSR1),
        start_new_session=True,  # a terminal's Ctrl-C is for the ranks
    )
    until(lambda: sampler.poll() is not None or has_begun(folder, host), "the sampler's start")
    if sampler.poll() is not None:
        raise ValueError("the sampler does not start; see its lines above, and `energynn doctor`")

    def stop() -> None:
        ours.close()
        while not stopped and is_locked(ranks):
            time.sleep(0.5)
        with contextlib.suppress(subprocess.TimeoutExpired):
            sampler.communicate(b"stop\n", timeout=STOPPING_S)
        sampler.kill()
        sampler.wait()
        held.clear()

    return stop


def sample(folder: str, ranks: int) -> None:
    """Sample this host until the parent says a word; where it dies, end what it has started."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    write_whole_lines()
    visible_gpus(Path(folder), ranks)  # until then SIGUSR1, the end of the parent, ends this one
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    sampler = begin(Path(folder), ranks)
    if not sys.stdin.readline():  # the parent has died
        end_marked(Path(folder))
    sampler.stop()


def begin(folder: Path, ranks: int) -> sensors.Sampler:
    """Sample this host from now on, for the run or segment whose raw files lie in a folder."""
    path = folder / "run.json"
    intent = json_table(path if path.exists() else folder.parent / "run.json")
    visible = visible_gpus(folder, ranks)
    inventory = find(intent["cpu_model"], visible, intent.get("uses_gpus", True))
    path = folder / f"samples-{os.uname().nodename}.jsonl"
    sampler = sensors.Sampler(path, inventory, intent["config"]["sampling_period_s"])
    sampler.start()
    for line in inventory.problems + inventory.unaccounted:
        print(f"energynn: {line}", file=sys.stderr, flush=True)
    return sampler


def find(cpu_model: dict, visible: str | None, gpus: bool = True) -> sensors.Inventory:
    """List the sensors that this host may have; the sampler finds out which of them work.

    ``visible`` is a value of CUDA_VISIBLE_DEVICES, None for all GPUs. Without ``gpus`` GPUs are
    left out. The CPU's estimate comes last: it counts where nothing else does.
    """
    inventory = sensors.Inventory(sensors.rapl_sensors())
    if gpus:
        sensors.add_nvidia(inventory, visible)
    elif sensors.nvidia_gpus():
        inventory.problems.append("the GPUs of this host are left out, as asked for")
    add_backends(inventory, gpus)
    inventory.sensors.append(sensors.cpu_estimate(cpu_model))
    return inventory


def announce_gpus(folder: Path) -> None:
    """Write down which GPUs this rank sees."""
    path = folder / f".gpus-{os.uname().nodename}-{rank()}"
    write_json(path, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(folder: Path, ranks: int) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of all ranks of this host together; None: one sees all GPUs."""
    pattern = f".gpus-{os.uname().nodename}-*"
    until(lambda: len(list(folder.glob(pattern))) >= ranks, f"{ranks} ranks in {folder}")
    values = [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]
    if None in values:
        return None
    return ",".join(value for value in values if value not in sensors.NOTHING_VISIBLE)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what a shared folder tells. Raises ValueError after ``ready_limit_s``."""
    most_s = limit_s("ready_limit_s")
    deadline_s = time.monotonic() + most_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise ValueError(f"waited {most_s:.0f} s for {what}")
        time.sleep(0.2)  # hundreds of ranks ask one disk
