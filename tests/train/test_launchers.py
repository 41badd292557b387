"""The same trainer under mpirun, torchrun and srun: the same numbers, and an end in clear words if a rank is lost."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from energynn import config as configuration
from energynn import files
from energynn.measure.samples import read_events
from tests.processes import processes_of, wait_until
from tests.ranks import ENVIRONMENT, MPIRUN
from tests.train.conftest import HERE

TINY = dict(workload="fourcastnet", patch_size=6, embed_dim=32, depth=1, num_blocks=4, devices=2)
RESNET50 = dict(
    workload="resnet50",
    devices=2,
    local_batch_size=4,
    image_size=32,
    training_samples=80,
    validation_samples=8,
    evaluate_training_set=False,
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]
TIMEOUT_S = 4
NIGHTLY_MPIRUN = pytest.param("mpirun", marks=pytest.mark.nightly)


def slurm_is_up() -> bool:
    if not shutil.which("srun"):
        return False
    try:
        return subprocess.run(["timeout", "5", "sinfo", "-h"], capture_output=True).stdout.strip() != b""
    except OSError:
        return False


def start(launcher, run_dir, ranks=2, script="rank_main.py", base=TINY, **parameters) -> subprocess.Popen:
    """Ranks that print into ``<run_dir>/output``."""
    commands = {
        "mpirun": [MPIRUN, "-n", str(ranks)],
        "torchrun": TORCHRUN,
        "srun": ["srun", "--kill-on-bad-exit", "-n", str(ranks)],
    }
    if launcher == "mpirun" and not MPIRUN:
        pytest.skip("no mpirun")
    if launcher == "srun" and not slurm_is_up():
        pytest.skip("no Slurm: srun is not installed, or no cluster answers")
    run_dir.mkdir(exist_ok=True)
    settings = json.dumps(configuration.to_dict(configuration.make(**base | parameters)))
    command = [*commands[launcher], sys.executable, str(HERE / script), str(run_dir), settings, "float32"]
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
    begun = lambda: [e for e in read_events(run_dir) if e["event"] == "training_start"]  # noqa: E731
    wait_until(lambda: len(begun()) == 2, what="for the training to begin")
    return {event["rank"]: event["pid"] for event in read_events(run_dir) if event["event"] == "rank_start"}


def end(started, run_dir) -> None:
    """Nothing that a test started stays."""
    for process in processes_of(run_dir):
        process.kill()
    started.kill()
    started.wait()


@pytest.mark.slow
def test_launchers_start_the_same_trainer(tmp_path):
    """torchrun, srun's variables, and srun itself where there is a Slurm, against mpirun."""
    expected = None
    for launcher in ("mpirun", "torchrun", *(["srun"] if slurm_is_up() else [])):
        started = start(launcher, tmp_path / launcher, epochs=2)
        output = tmp_path / launcher / "output"
        assert started.wait(timeout=300) == 0, output.read_text()
        losses = sorted(re.findall(r"losses of rank \d (\[.*?\])", output.read_text()))
        assert len(losses) == 2 and losses == (expected := expected or losses)
        starts = [event for event in read_events(tmp_path / launcher) if event["event"] == "rank_start"]
        assert sorted((event["rank"], event["world_size"]) for event in starts) == [(0, 2), (1, 2)]


@pytest.mark.slow
def test_variables_of_srun_are_enough(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    settings = json.dumps(configuration.to_dict(configuration.make(**TINY, epochs=1)))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "rank_main.py"), str(tmp_path), settings, "float32"],
            cwd=files.REPOSITORY,
            env=os.environ
            | ENVIRONMENT
            | {
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": "2",
                "SLURM_LOCALID": str(rank),
                "SLURM_STEP_ID": "0",
                "MASTER_PORT": port,
            },
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=300) for process in ranks] == [0, 0]
    starts = [event for event in read_events(tmp_path) if event["event"] == "rank_start"]
    assert sorted((event["rank"], event["world_size"]) for event in starts) == [(0, 2), (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [NIGHTLY_MPIRUN, "torchrun", "srun"])
def test_another_number_of_ranks_than_asked_for_is_refused(tmp_path, launcher):
    started = start(launcher, tmp_path / "run", devices=3)
    assert started.wait(timeout=300) != 0
    assert "ValueError: devices: 3 asked for, but the launcher made a world of" in (tmp_path / "run/output").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, number, base",
    [
        ("mpirun", signal.SIGSTOP, TINY),
        ("torchrun", signal.SIGKILL, RESNET50),
        ("srun", signal.SIGKILL, TINY),
        ("srun", signal.SIGSTOP, TINY),
        pytest.param("mpirun", signal.SIGKILL, TINY, marks=pytest.mark.nightly),
        pytest.param("torchrun", signal.SIGKILL, TINY, marks=pytest.mark.nightly),
        pytest.param("torchrun", signal.SIGSTOP, TINY, marks=pytest.mark.nightly),
    ],
)
def test_a_lost_rank_ends_the_run_in_clear_words(tmp_path, launcher, number, base):
    """Silent: stopped, as behind a dead link; nobody is told, and only the timeout of a collective finds out."""
    run_dir = tmp_path / "run"
    started = start(launcher, run_dir, base=base, epochs=100_000, collective_timeout_s=TIMEOUT_S)
    try:
        lost = pids(run_dir)[1]
        time.sleep(1.0)
        os.kill(lost, number)
        killed = time.monotonic()
        # MPICH ends the other ranks as soon as it misses one, and says so itself; torchrun takes up to 30 s to kill
        # what does not answer, and srun needs --kill-on-bad-exit for it; but the line is there before.
        words = "another rank is lost|BAD TERMINATION"
        wait_until(lambda: re.search(words, (run_dir / "output").read_text()), TIMEOUT_S + 6, "for a clear line")
        said_s = time.monotonic() - killed
        assert started.wait(timeout=TIMEOUT_S + 40) != 0
        print(f"{launcher}, {number.name}: said after {said_s:.1f} s, ended after {time.monotonic() - killed:.1f} s")
        lines = [line for line in (run_dir / "output").read_text().splitlines() if "LostRank: another rank" in line]
        if launcher != "mpirun" or number == signal.SIGSTOP:
            assert lines and all("goes on from its checkpoint" in line for line in lines)
    finally:
        end(started, run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun", "srun"])
def test_sigusr1_to_one_rank_leaves_a_checkpoint_and_a_status_of_its_own(tmp_path, launcher):
    run_dir = tmp_path / "run"
    started = start(launcher, run_dir, epochs=100_000)
    try:
        rank = pids(run_dir)[1]
        os.kill(rank, signal.SIGUSR1)
        status = started.wait(timeout=300)
        output = (run_dir / "output").read_text()
        assert len(re.findall("interrupted: checkpoint after", output)) == 2, output
        # torchrun has one status for whatever its ranks ended with, but says theirs.
        assert status == 75 if launcher != "torchrun" else re.search(r"exitcode *: 75", output), output
        (mark,) = run_dir.glob("checkpoint/*.sha256")
        saved = torch.load(mark.with_suffix(".pt"), weights_only=True)
        assert saved["optimizer_steps"] > 0 and len(saved["ranks"]) == 2
    finally:
        end(started, run_dir)
