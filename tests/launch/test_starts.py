"""Kills at random instants: nothing is left, nothing hangs, no record is wrong."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from energynn import records
from energynn.experiment import config, systems
from energynn.host.files import REPOSITORY
from energynn.launch import slurm, submit
from tests.processes import ENERGYNN, kill, processes_of, wait_until

MARK = "ENERGYNN_TEST_MARK"  # with its folder, for processes_of
WITHOUT_PERUN = (
    "import importlib.util; find = importlib.util.find_spec\n"
    "importlib.util.find_spec = lambda name, *more: None if name == 'perun' else find(name, *more)\n"
)
SHORT = dict(workload="fourcastnet", embed_dim=32, depth=1, epochs=4)
LATEST_S = {"measure": 5, "run": 8, "batch job": 12}  # until the sampler samples, about
GONE_S = 5  # after which nothing is left of what was killed
HANG_S = 150  # no start takes as long, not even on a busy machine


def measure(folder):
    command = ["sh", "-c", "sleep 15; true"]
    return [*ENERGYNN, "measure", "--out", str(folder / "runs/run"), "--", *command]


def run(folder, devices, perun=True):
    program = "" if perun else WITHOUT_PERUN
    program += (
        "from energynn.experiment import config\nfrom energynn.launch import start\n"
    )
    made = f"config.make(**{SHORT | {'devices': devices}!r})"
    return [
        sys.executable,
        "-c",
        f"{program}start.run({made}, {str(folder / 'runs')!r})",
    ]


def batch_job(folder, devices):
    """The job of one run, as Slurm starts it on one node, without Slurm."""
    made = config.make(**SHORT, devices=devices, device="cpu")
    original, slurm.call = slurm.call, lambda *_: "1"
    try:
        run_dir = folder / "runs" / "local" / config.run_id(made)
        submit.submit(submit.Job({run_dir: made}, 10), systems.site("local"), "x")
    finally:
        slurm.call = original
    script = folder / "runs" / "local" / config.run_id(made) / "job" / "job.sh"
    return ["bash", str(script), "0"]


WAYS = {
    "measure": (measure,),
    "run, 2, perun": (run, 2),
    "run, 1, alone": (run, 1, False),
    "run, 2, torchrun": (run, 2, False),
    "batch job, 2": (batch_job, 2),
}


def start(folder, way):
    make, *given = WAYS[way]
    command = make(folder, *given)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PMI_", "PYTEST_"))
    }
    with open(folder / "output", "a") as output:
        return subprocess.Popen(
            command,
            env=environment | {MARK: str(folder), "OMP_NUM_THREADS": "1"},
            cwd=REPOSITORY,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def told(processes):
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())[:200]
            lines.append(f"{process.pid} (of {process.ppid()}): {words}")
    return "\n".join(lines)


def attack(folder, seed):
    """Start one way, kill one process at one instant, all drawn; then look what is left. Returns
    what was done.
    """
    drawn = random.Random(seed)
    way = list(WAYS)[seed % len(WAYS)]
    at_s = drawn.uniform(0, LATEST_S[way.split(",")[0]])
    number = drawn.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    folder.mkdir()
    started = start(folder, way)
    time.sleep(at_s)
    victims = processes_of(folder)
    if not victims:
        return f"seed {seed}: {way}: over after {at_s:.2f} s"
    # Half of the kills hit the process that a person started; the others any below it.
    is_root = drawn.random() < 0.5 or len(victims) == 1
    victim = (
        psutil.Process(started.pid)
        if is_root
        else drawn.choice(sorted(victims, key=lambda each: each.pid))
    )
    did = f"seed {seed}: {way}: {signal.Signals(number).name} after {at_s:.2f} s to {told([victim])}"
    try:
        victim.send_signal(number)
        if victim.pid == started.pid and number == signal.SIGKILL:
            wait_until(
                lambda: not processes_of(folder),
                GONE_S,
                "for what was killed to be gone",
            )
        started.wait(HANG_S)
        wait_until(lambda: not processes_of(folder), GONE_S, "for the rest to be gone")
        records.recover(folder / "runs")
        assert records.check(folder / "runs") == []
        return did
    except (AssertionError, subprocess.TimeoutExpired) as error:
        output = (folder / "output").read_text()[-3000:]
        raise AssertionError(
            f"{did}\n{error}\n--- left:\n{told(processes_of(folder))}\n--- output:\n{output}"
        ) from error
    finally:
        kill(folder)
        started.wait()


MARKS = [pytest.mark.slow] * len(WAYS) + [pytest.mark.nightly] * 39 * len(WAYS)
SEEDS = [pytest.param(seed, marks=mark) for seed, mark in enumerate(MARKS)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_kill_in_the_first_seconds_leaves_nothing(tmp_path, seed):
    print(attack(tmp_path / "attack", seed))
