"""A sampler process of our own for each host: under any launcher, and where perun is missing."""

import contextlib
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from energynn.host.files import lock
from energynn.host.launchers import buffer_output_by_line, count_ranks_of_this_host
from energynn.host.processes import OWN_PYTHON, end_marked, own_environment
from energynn.host.reading import read_json
from energynn.measure import devices, kernel, sensors
from energynn.measure.amd import add_amd_sensors
from energynn.measure.samples import has_samples, run_dir_of

STOP_TIMEOUT_S = 30.0
PARENT_POLL_PERIOD_S = 1.0  # whether the parent lives
# For a sampler process, and for ranks that wait for each other's files on a slow file system.
READY_LIMIT_S = 60.0


def start_sampler(
    folder: Path,
    size: int,
    stopped: list[int],
    take_host: Callable = contextlib.ExitStack,
) -> tuple[Callable[[], None], int]:
    """Start this host's sampler, or wait for the one that another rank of this host has started.

    ``size`` ranks take part on all hosts. Returns a function that a rank calls at its end, and the
    number of the process, 0 of another rank's; the sampler continues until the last rank of this
    host has ended, or a signal is in ``stopped``.
    ``take_host``: called once on each host before its sampler; what it returns is kept.
    """
    host = platform.node()
    ranks = folder / f".ranks-{host}"
    ours = lock(ranks, shared=True)
    assert ours  # who waits has it
    owner = lock(folder / f".sampler-{host}")
    if owner is None:
        wait_until(
            lambda: has_samples(folder, host), f"the first sample of {host} in {folder}"
        )
        return ours.close, 0
    held = take_host()
    held.enter_context(owner)
    here = min(size, count_ranks_of_this_host(size))
    program = "from energynn.measure.sampler_process import sample_for_parent; "
    sampler = subprocess.Popen(
        [*OWN_PYTHON, "-c", f"{program}sample_for_parent({str(folder)!r}, {here})"],
        stdin=subprocess.PIPE,
        stdout=2,
        env=own_environment(),
        start_new_session=True,  # a terminal's Ctrl-C is for the ranks
    )
    wait_until(
        lambda: sampler.poll() is not None or has_samples(folder, host),
        "the sampler's start",
    )
    if sampler.poll() is not None and not any(stopped):
        raise ValueError(
            "the sampler does not start; see its lines above, and `energynn doctor`"
        )

    def stop_sampler_process() -> None:
        ours.close()
        while not stopped and lock(ranks) is None:
            time.sleep(0.5)
        with contextlib.suppress(subprocess.TimeoutExpired):
            sampler.communicate(b"stop\n", timeout=STOP_TIMEOUT_S)
        sampler.kill()
        sampler.wait()
        held.close()

    return stop_sampler_process, sampler.pid


def sample_for_parent(folder: str, ranks: int) -> None:
    """Sample this host until the parent says a word; where it dies, end what it has started.

    A fork of the parent may live on, and hold the pipe open.
    """
    parent = os.getppid()
    buffer_output_by_line()
    sampler = begin_sampling(Path(folder), ranks)
    while os.getppid() == parent:
        if not sampler.thread.is_alive():  # a full disk; a later window starts another
            return
        if select.select([sys.stdin], [], [], PARENT_POLL_PERIOD_S)[0]:
            break
    is_orphan = os.getppid() != parent or not sys.stdin.readline()
    if is_orphan:
        end_marked(Path(folder))
    sampler.stop()
    # a window's is no run, and nobody else removes it
    if is_orphan and "run_id" not in read_json(run_dir_of(Path(folder)) / "run.json"):
        shutil.rmtree(folder, ignore_errors=True)


def begin_sampling(folder: Path, ranks: int) -> sensors.Sampler:
    """Sample this host from now on, for the run or segment whose raw files lie in a folder.

    ``ranks``: of this host. One rank has the GPUs of CUDA_VISIBLE_DEVICES; of several, each may see
    its own only, so that all are read. Those that no rank names as its own enter no sum.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        # this process must not end before its ranks
        signal.signal(number, signal.SIG_IGN)
    intent = read_json(run_dir_of(folder) / "run.json")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if ranks == 1 else None
    inventory = find_sensors(intent, visible)
    path = folder / f"samples-{platform.node()}.jsonl"
    sampler = sensors.Sampler(path, inventory, intent["config"]["sampling_period_s"])
    sampler.start()
    for line in inventory.problems + inventory.unaccounted:
        print(f"energynn: {line}", file=sys.stderr, flush=True)
    return sampler


def find_sensors(intent: dict, visible: str | None) -> sensors.SensorInventory:
    """List the sensors that this host may have; the sampler finds out which of them work.

    ``intent`` is of a run, or a system as ``machine.load_system`` gives it; ``visible`` a value of
    CUDA_VISIBLE_DEVICES, None for all GPUs. The CPU's estimate comes last: it counts where nothing
    else does. Raises ValueError where all are left out.
    """
    inventory = sensors.SensorInventory(
        sensors.list_rapl_sensors() + sensors.list_grace_sensors()
    )
    read = sum(one.component == "cpu" for one in inventory.sensors)
    sockets = kernel.count_cpu_sockets()
    if 0 < read < sockets:
        inventory.problems.append(
            f"{sockets - read} of {sockets} CPU sockets have no counter: their energy is missing"
        )
    if intent.get("uses_gpus", True):
        sensors.add_nvidia_sensors(inventory, visible)
        add_amd_sensors(inventory)
        inventory.unaccounted += devices.devices_without_sensor(inventory.sensors)
    elif kernel.list_training_devices():
        inventory.problems.append("the GPUs of this host are left out, as asked for")
    inventory.sensors.append(sensors.cpu_estimate_sensor(intent["cpu_model"]))
    sensors.drop_left_out_sensors(inventory, intent.get("left_out", []))
    if not inventory.sensors:
        raise ValueError("left_out in system.toml leaves no sensor; leave one in")
    return inventory


def wait_until(condition: Callable[[], bool], what: str, pause_s: float = 0.2) -> None:
    """Wait for what others write. Raises ValueError after ``READY_LIMIT_S``."""
    deadline_s = time.monotonic() + READY_LIMIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise ValueError(f"waited {READY_LIMIT_S:.0f} s for {what}")
        time.sleep(pause_s)  # hundreds of ranks ask one disk
