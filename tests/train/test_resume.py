"""Killed and resumed trainings end with the very weights of one that was left alone."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from energynn import config as configuration
from energynn.measure.samples import read_events
from energynn.train import checkpoint, distributed
from energynn.train.distributed import World
from tests.train.conftest import ENVIRONMENT, HERE, MPIRUN

CASES = {
    "fourcastnet on two ranks": dict(workload="fourcastnet", devices=2, embed_dim=32, depth=1, epochs=60),
    "resnet50 with loader workers": dict(workload="resnet50", local_batch_size=4, image_size=32, epochs=3,
                                         training_samples=40, validation_samples=10, loader_workers=2),
    "resnet50 as fast as it can": dict(workload="resnet50", preset="fast", dataset="photographs", local_batch_size=4,
                                       image_size=32, epochs=3, training_samples=40, validation_samples=10,
                                       loader_workers=1),
}  # fmt: skip


def start(run_dir, settings, devices):
    ranks = [MPIRUN, "-n", str(devices)] if devices > 1 else []
    command = [*ranks, sys.executable, str(HERE / "rank_main.py"), str(run_dir), settings, "float32"]
    return subprocess.Popen(command, env=os.environ | ENVIRONMENT, cwd=configuration.REPOSITORY, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip


def ranks_of(run_dir):
    """Process numbers of the ranks that wrote the newest start."""
    return {event["rank"]: event["pid"] for event in read_events(run_dir) if event["event"] == "rank_start"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kills_at_random_instants_change_no_bit(tmp_path, name):
    """Ten instants each, every other one a kill -9 of a rank, the others a SIGTERM to one."""
    config = configuration.make(**CASES[name], save_weights=True, checkpoint_period_s=0.3)
    settings, seeded = json.dumps(configuration.to_dict(config)), random.Random(name)
    weights, losses = {}, {}
    for kills in (0, 10):
        run_dir = tmp_path / str(kills)
        run_dir.mkdir()
        begun = None
        while True:
            started = start(run_dir, settings, config.devices)
            if kills:
                before = begun
                deadline = time.monotonic() + 60
                while started.poll() is None and time.monotonic() < deadline:
                    texts = [path.read_text() for path in run_dir.glob("events-rank*.jsonl")]
                    begun = sum(text.count("training_start") for text in texts)
                    if begun >= (before or 0) + config.devices:
                        break
                    time.sleep(0.05)
                time.sleep(seeded.uniform(0.0, 1.2))
                number = signal.SIGKILL if kills % 2 else signal.SIGTERM
                victim = ranks_of(run_dir).get(seeded.randrange(config.devices))
                if started.poll() is None and victim:
                    os.kill(victim, number)
                    kills -= 1
            output = started.communicate(timeout=120)[0]
            if started.returncode == 0:
                break
            assert "Error" not in output or "BAD TERMINATION" in output or "Gloo" in output, output
        weights[run_dir] = torch.load(run_dir / "weights.pt", weights_only=True)["state_dict"]
        starts = [event["samples_done"] for event in read_events(run_dir) if event["event"] == "training_start"]
        assert starts[0] == 0 and all(done % config.global_batch_size == 0 for done in starts)
        assert max(starts) > 0 or run_dir.name == "0"
        losses[run_dir] = next(line for line in output.splitlines() if line.startswith("losses "))
        assert not (run_dir / "checkpoint").exists(), "of no use after the end"
    one, other = weights.values()
    assert all(torch.equal(one[key], other[key]) for key in one), "weights differ"
    assert len(set(losses.values())) == 1


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, capsys, monkeypatch):
    world = World(0, 1, 0, torch.device("cpu"), "h")
    monkeypatch.setattr(checkpoint.dist, "all_gather_object", lambda found, own: found.__setitem__(0, own))
    monkeypatch.setattr(checkpoint.distributed, "barrier", lambda world: None)
    model = torch.nn.Linear(1, 1)
    checkpoints = checkpoint.Checkpoints(tmp_path, world, 0, {"model": model})
    assert checkpoints.load() is None
    for steps in (10, 20, 30):
        model.weight.data[:] = steps
        checkpoints.save(steps, losses=[1.0 * steps])
    drawn = torch.rand(3).tolist()
    assert sorted(path.name for path in checkpoints.folder.glob("*.pt")) == ["000000000020.pt", "000000000030.pt"]
    model.weight.data[:] = 0
    assert checkpoints.load() == (30, {"losses": [30.0]}) and model.weight.item() == 30
    assert torch.rand(3).tolist() == drawn, "random generators come back"
    newest = checkpoints.folder / "000000000030.pt"
    newest.write_bytes(newest.read_bytes()[:-3])
    assert checkpoints.load() == (20, {"losses": [20.0]}) and model.weight.item() == 20
    assert "checkpoint 000000000030.pt is damaged" in capsys.readouterr().err
    (checkpoints.folder / "000000000040.pt").write_bytes(b"half")  # killed before its SHA-256 was written
    assert checkpoints.load()[0] == 20


def test_random_generators_come_back():
    state = distributed.random_state()
    first = random.random(), torch.rand(3).tolist()
    distributed.restore_random_state(state)
    assert (random.random(), torch.rand(3).tolist()) == first
