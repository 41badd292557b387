"""Kills at random instants: nothing is left, nothing hangs, no record is wrong."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from unittest import mock

import psutil
import pytest
import torch
from msgspec.structs import replace

from energynn import records
from energynn.experiment import config, systems
from energynn.host.files import REPOSITORY
from energynn.launch import slurm, submit
from energynn.measure import samples
from tests.launch.test_launch import TINY, python_words, started_by
from tests.processes import (
    ENERGYNN,
    kill,
    processes_of,
    variables_without,
    wait_until,
    wait_until_gone,
)
from tests.run_files import last_sample_ns, newest_start

MARK = "ENERGYNN_TEST_MARK"  # in the environment of all that a test starts
SHORT = TINY | dict(epochs=4)
LATEST_S = {"measure": 5, "run": 8, "batch job": 12}  # until the sampler samples, about
# a run that takes as long to begin, or to end, hangs, however busy the machine is
NEVER_S = 1200
HANG_S = 400  # where perun's sampler was killed, a run is ended after 300 s of silence


def measure(folder):
    command = ["sh", "-c", "sleep 15; true"]
    return [*ENERGYNN, "measure", "--out", str(folder / "runs/run"), "--", *command]


def run(folder, devices, launcher):
    parameters = SHORT | dict(devices=devices)
    return python_words(folder / "runs", parameters, started_by(launcher))


def batch_job(folder, devices):
    """The job of one run, as Slurm starts it on one node, without Slurm."""
    made = config.make(**SHORT, devices=devices, device="cpu")
    run_dir = config.folder(made, folder / "runs")
    site = replace(systems.read_site("local"), devices_per_node=devices)
    with mock.patch.object(slurm, "call_slurm", return_value="1"):
        submit.submit_job_array(submit.JobArray({run_dir: made}, 10), site, "x")
    return ["bash", str(run_dir / "job" / "job.sh"), "0"]


WAYS = {
    "measure": (measure,),
    "run, 2, perun": (run, 2, "mpirun"),
    "run, 1, alone": (run, 1, "alone"),
    "run, 2, torchrun": (run, 2, "torchrun"),
    "batch job, 2": (batch_job, 2),
}


def start(folder, way):
    make, *given = WAYS[way]
    command = make(folder, *given)
    return started_in(folder, command, variables_without("PMI_", "PYTEST_"))


def started_in(folder, command, environment=os.environ):
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
        try:
            lines.append(
                f"{process.pid} (of {process.ppid()}): {' '.join(process.cmdline())[:200]}"
            )
        except psutil.Error:
            continue
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
    name = signal.Signals(number).name
    did = f"seed {seed}: {way}: {name} after {at_s:.2f} s to {told([victim])}"
    try:
        victim.send_signal(number)
        if victim.pid == started.pid and number == signal.SIGKILL:
            wait_until_gone(folder)
        started.wait(HANG_S)
        wait_until_gone(folder)
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


def marked(seed):
    """Each way once in `make test-all`, many times at night."""
    mark = pytest.mark.slow if seed < len(WAYS) else pytest.mark.nightly
    return pytest.param(seed, marks=mark)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", map(marked, range(40 * len(WAYS))))
def test_a_kill_in_the_first_seconds_leaves_nothing(tmp_path, seed):
    print(attack(tmp_path / "attack", seed))


KILLS = int(os.environ.get("ENERGYNN_TEST_KILLS", 50))
LONG = SHORT | dict(devices=2, epochs=36, save_weights=True)
CHECKPOINT_S = 0.3
KILLED_WITHIN_S = 2.5  # of a start's training


def go_on(folder, checkpoint_s):
    """`energynn run`: makes the run, or goes on with it."""
    words = ["run", "--runs-dir", str(folder / "runs")]
    given = LONG | {"checkpoint_period_s": checkpoint_s}
    words += [f"{name}={value}" for name, value in given.items()]
    return started_in(folder, [*ENERGYNN, *words])


def checkpoints(folder):
    return set((folder / "runs").glob("local/*/checkpoint/*.sha256"))


def kill_one(folder, started, before, drawn):
    """Kill one of all processes at an instant of the training; returns what it was, or "" if all
    was over before.
    """
    # The folder alone does not tell two starts apart: one killed before its first checkpoint is
    # moved aside.
    wait_until(
        lambda: (
            started.poll() is not None
            or newest_start(folder / "runs") not in (None, before)
        ),
        NEVER_S,
    )
    if drawn.random() < 0.5:  # go on for a checkpoint first
        old = checkpoints(folder)
        wait_until(
            lambda: started.poll() is not None or checkpoints(folder) - old, NEVER_S
        )
    time.sleep(drawn.uniform(0, KILLED_WITHIN_S))
    if started.poll() is not None:
        return ""
    (segment, _), victims = (
        newest_start(folder / "runs"),
        sorted(processes_of(folder), key=lambda each: each.pid),
    )
    if not victims:
        return ""
    victim = drawn.choice(victims)
    words, killed_at = told([victim]), time.monotonic_ns()
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.kill()
    started.wait(
        NEVER_S
        # it may have been one that is not missed, as a loader's worker at the end of an epoch
    )
    ends = samples.events_of_kind(samples.read_events(segment), "rank_end")
    # when all had, only the record was left to write
    had_ended = [end for end in ends if end["t_mono_ns"] < killed_at]
    assert len(had_ended) == 2 or last_sample_ns(segment) > killed_at - 0.3e9, (
        f"{words}: samples were lost"
    )
    return words


def make(folder, wanted, seed=0):
    """Make the run with so many kills at most; returns its weights and what was killed."""
    folder.mkdir()
    drawn, kills, status = random.Random(seed), [], None
    while status != 0:
        before = newest_start(folder / "runs")
        started = go_on(folder, CHECKPOINT_S if wanted else 0)
        if len(kills) < wanted and (words := kill_one(folder, started, before, drawn)):
            kills.append(words)
            print(f"{folder.name}, kill {len(kills)}: {words}", flush=True)
        status = started.wait(NEVER_S)
        wait_until_gone(folder)
        assert "is running" not in (folder / "output").read_text(), (
            "a start was blocked"
        )
        (run_json,) = (folder / "runs").glob("local/*/run.json")
    assert records.check(folder / "runs") == []
    return torch.load(run_json.with_name("weights.pt"), weights_only=True)[
        "state_dict"
    ], kills


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_kills_of_any_process_change_no_weight_and_lose_no_sample(tmp_path):
    """Through `energynn run`, which is started again at once after each kill, until it ends."""
    one, _ = make(tmp_path / "unbroken", 0)
    kills = []
    for seed in range(KILLS):
        if len(kills) < KILLS:
            other, more = make(tmp_path / f"broken-{seed}", KILLS - len(kills), seed)
            kills += more
            assert all(torch.equal(one[key], other[key]) for key in one), (
                "weights differ"
            )
            shutil.rmtree(tmp_path / f"broken-{seed}")
    assert len(kills) == KILLS
