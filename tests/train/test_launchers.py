"""The same trainer under mpirun and torchrun: the same numbers, and an end in clear words if a
rank is lost.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from energynn.experiment import config as configuration
from energynn.host import files
from energynn.measure.samples import events_of_kind, read_events
from tests.processes import kill, wait_until
from tests.ranks import ENVIRONMENT, MPIRUN
from tests.train.conftest import AFNO, HERE, IMAGES, ranks_of

TINY = AFNO | dict(workload="fourcastnet", devices=2)
RESNET50 = IMAGES | dict(
    workload="resnet50",
    devices=2,
    training_samples=80,
    validation_samples=8,
    evaluate_training_set=False,
)
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--no-python",
    "--nproc-per-node",
    "2",
]
TIMEOUT_S = 4


def start(launcher, run_dir, base=TINY, **parameters) -> subprocess.Popen:
    """Two ranks that print into ``<run_dir>/output``."""
    if launcher == "mpirun" and not MPIRUN:
        pytest.skip("no mpirun")
    run_dir.mkdir(exist_ok=True)
    made = configuration.make(**base | parameters)
    settings = json.dumps(configuration.asdict(made))
    starts = [MPIRUN, "-n", "2"] if launcher == "mpirun" else TORCHRUN
    script = [sys.executable, str(HERE / "rank_main.py")]
    command = [*starts, *script, str(run_dir), settings, "float32"]
    with open(run_dir / "output", "w") as output:
        return subprocess.Popen(
            command,
            env=os.environ | ENVIRONMENT,
            cwd=files.REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def pids(run_dir) -> dict[int, int]:
    """Rank -> process, once the training has begun on both."""
    wait_until(
        lambda: len(events_of_kind(read_events(run_dir), "training_start")) == 2,
        what="for the training to begin",
    )
    return ranks_of(run_dir)


def end(started, run_dir) -> None:
    """Nothing that a test started stays."""
    kill(run_dir)
    started.kill()
    started.wait()


@pytest.mark.slow
def test_launchers_start_the_same_trainer(tmp_path):
    expected = None
    for launcher in ("mpirun", "torchrun"):
        started = start(launcher, tmp_path / launcher, epochs=2)
        output = tmp_path / launcher / "output"
        assert started.wait(timeout=300) == 0, output.read_text()
        losses = sorted(re.findall(r"losses of rank \d (\[.*?\])", output.read_text()))
        assert len(losses) == 2 and losses == (expected := expected or losses)
        starts = events_of_kind(read_events(tmp_path / launcher), "rank_start")
        places = [(event["rank"], event["world_size"]) for event in starts]
        assert places == [(0, 2), (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, number, base",
    [
        ("mpirun", signal.SIGSTOP, TINY),
        ("torchrun", signal.SIGKILL, RESNET50),
    ],
)
def test_a_lost_rank_ends_the_run_in_clear_words(tmp_path, launcher, number, base):
    """Silent: stopped, as behind a dead link; nobody is told, and only the timeout of a
    collective finds out.
    """
    run_dir = tmp_path / "run"
    started = start(
        launcher, run_dir, base=base, epochs=100_000, collective_timeout_s=TIMEOUT_S
    )
    try:
        lost = pids(run_dir)[1]
        time.sleep(1.0)
        os.kill(lost, number)
        killed = time.monotonic()
        # MPICH ends the other ranks as soon as it misses one, and says so itself; torchrun takes
        # up to 30 s to kill what does not answer, but the line is there before.
        words = "another rank is lost|BAD TERMINATION"
        wait_until(
            lambda: re.search(words, (run_dir / "output").read_text()),
            TIMEOUT_S + 6,
            "for a clear line",
        )
        said_s = time.monotonic() - killed
        assert started.wait(timeout=TIMEOUT_S + 40) != 0
        ended_s = time.monotonic() - killed
        print(f"{number.name}: said after {said_s:.1f} s, ended after {ended_s:.1f} s")
        output = (run_dir / "output").read_text()
        lines = re.findall(".*LostRank: another rank.*", output)
        assert lines
        assert all("say why" in line and "GLHF" not in line for line in lines)
    finally:
        end(started, run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_sigusr1_to_one_rank_leaves_a_checkpoint_and_a_status_of_its_own(
    tmp_path, launcher
):
    run_dir = tmp_path / "run"
    started = start(launcher, run_dir, epochs=100_000)
    try:
        os.kill(pids(run_dir)[1], signal.SIGUSR1)
        status = started.wait(timeout=300)
        output = (run_dir / "output").read_text()
        assert len(re.findall("interrupted: checkpoint after", output)) == 2, output
        # torchrun has one status for whatever its ranks ended with, but says theirs.
        if launcher == "torchrun":
            status = int(re.search(r"exitcode *: (\d+)", output)[1])
        assert status == 75, output
        (mark,) = run_dir.glob("checkpoint/*.sha256")
        saved = torch.load(mark.with_suffix(".pt"), weights_only=True)
        assert saved["optimizer_steps"] > 0 and len(saved["ranks"]) == 2
    finally:
        end(started, run_dir)
