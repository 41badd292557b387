"""Killed and resumed trainings end with the very weights of one that was left alone."""

import json
import os
import signal
import struct
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from energynn.experiment import config as configuration
from energynn.measure.samples import events_of_kind, read_events
from energynn.train import checkpoint, distributed
from energynn.train.batches import Shard
from energynn.train.session import Session
from tests.processes import refused, wait_until
from tests.ranks import Ranks
from tests.train.conftest import ALONE, HERE, IMAGES, ranks_of

RESNET50 = IMAGES | dict(
    workload="resnet50", epochs=3, training_samples=40, loader_workers=1
)
STEP_KILL, STEP_STOP = ("killed after a step", 1), ("asked to stop after a step", 1)
HALF_A_FILE = "killed with half a file"
UNFINISHED = "killed between weights and checksum"
WRITE_KILLS = [(HALF_A_FILE, 0), (UNFINISHED, 0), ("killed after the checksum", 0)]
CASES = {  # parameters, and where which rank ends
    "fourcastnet on two ranks": (
        dict(workload="fourcastnet", devices=2, embed_dim=32, depth=1, epochs=4),
        [STEP_KILL, *WRITE_KILLS, STEP_STOP],
    ),
    "resnet50 on two ranks with loader workers": (
        RESNET50 | dict(devices=2),
        [STEP_STOP, STEP_KILL],
    ),
    "resnet50 as fast as it can, gradients added up": (
        RESNET50 | dict(preset="fast", dataset="photographs", global_batch_size=8),
        [STEP_KILL, STEP_STOP],
    ),
}
STOPPED_IN_EVALUATION = """
import pathlib, runpy, sys
from energynn.train import resnet50
original = resnet50.evaluate_images
def evaluate(*given):
    (pathlib.Path(sys.argv[1]) / "evaluating").touch()
    return original(*given)
resnet50.evaluate_images = evaluate
runpy.run_path(%r)
"""


def start(run_dir, config, script=HERE / "rank_main.py", **environment):
    words = script, run_dir, json.dumps(configuration.asdict(config)), "float32"
    return Ranks(config.devices, *words, extra=environment)


def newest(run_dir) -> int:
    """Optimizer steps of the newest checkpoint that is whole."""
    return max(
        (int(mark.stem) for mark in run_dir.glob("checkpoint/*.sha256")), default=0
    )


def outcome(run_dir, output):
    """Weights and losses of a training that came to its end."""
    assert not (run_dir / "checkpoint").exists(), "of no use after the end"
    # of each rank its own
    losses = sorted(line for line in output.splitlines() if line.startswith("losses "))
    return torch.load(run_dir / "weights.pt", weights_only=True)["state_dict"], losses


def assert_same(one, other):
    (weights, losses), (other_weights, other_losses) = one, other
    assert all(torch.equal(weights[key], other_weights[key]) for key in weights), (
        "weights differ"
    )
    assert losses == other_losses


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_kills_at_named_points_change_no_bit(tmp_path, name):
    """After a step, and within and between the writes of a checkpoint; each start goes on from
    the newest whole one.
    """
    parameters, points = CASES[name]
    parameters = parameters | dict(save_weights=True, checkpoint_period_s=0.001)
    config = configuration.make(**parameters)
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    unbroken.mkdir()
    broken.mkdir()
    undisturbed = start(unbroken, config)
    expected = [0]
    for point, rank in points:
        about = dict(DIES_AT=point, DYING_RANK=str(min(rank, config.devices - 1)))
        script = HERE / "killed_rank.py"
        ended = start(broken, config, script, **about).wait()
        assert ended.returncode != 0
        assert (ended.returncode == 75) == point.startswith("asked"), ended.stdout
        assert "Traceback" not in ended.stdout, ended.stdout
        expected.append(newest(broken))
        assert expected[-1] > expected[-2], f"{point}: {ended.stdout}"
        temporary = list(broken.glob("checkpoint/.*"))
        assert bool(temporary) == (point == HALF_A_FILE), temporary
        newest_file = max(broken.glob("checkpoint/*.pt")).stem
        assert (int(newest_file) > expected[-1]) == (point == UNFINISHED)
    last = start(broken, config)
    outputs = [started.wait().stdout for started in (undisturbed, last)]
    starts = events_of_kind(read_events(broken), "training_start")
    done = sorted(event["samples_done"] for event in starts)
    steps = config.global_batch_size
    assert done == sorted(config.devices * [n * steps for n in expected])
    assert_same(outcome(unbroken, outputs[0]), outcome(broken, outputs[1]))


@pytest.mark.slow
def test_a_stop_during_an_evaluation_does_not_wait_for_its_end(tmp_path):
    """The evaluation is most of this training; afterwards it is made anew, and counted once."""
    sizes = IMAGES | dict(epochs=1, training_samples=20, validation_samples=120)
    sizes |= dict(evaluate_training_set=True, checkpoint_period_s=0, save_weights=True)
    config = configuration.make("resnet50", **sizes)
    (tmp_path / "program.py").write_text(
        STOPPED_IN_EVALUATION % str(HERE / "rank_main.py")
    )
    outcomes = []
    for stopped in (False, True):
        run_dir = tmp_path / str(stopped)
        run_dir.mkdir()
        if stopped:
            started = start(run_dir, config, script=tmp_path / "program.py")
            wait_until((run_dir / "evaluating").exists, pause_s=0.01)
            os.kill(ranks_of(run_dir)[0], signal.SIGTERM)
            ended = started.wait()
            assert ended.returncode == 75, ended.stdout
            assert "interrupted: checkpoint after 5 of 5 steps" in ended.stdout
        output = start(run_dir, config).wait().stdout
        assert ("goes on after 5 optimizer steps" in output) == stopped
        outcomes.append(outcome(run_dir, output))
        (end,) = events_of_kind(read_events(run_dir), "training_end")
        assert end["samples_evaluated"] == 120 + 20 and len(end["metrics"]) == 4, output
    assert_same(*outcomes)


def saved(checkpoints) -> list[int]:
    return sorted(int(path.stem) for path in checkpoints.folder.glob("*.pt"))


def checkpoints_in(folder, world):
    parts = {"model": torch.nn.Linear(1, 1)}
    return checkpoint.Checkpoints(folder, world, 0, parts)


def test_runs_that_share_a_folder_of_checkpoints_leave_all_others_alone(
    tmp_path, alone
):
    shared = tmp_path / "scratch"
    shared.mkdir()
    others = ["thesis.txt", "other.pt", "000000000001.pt", "000000000001.sha256"]
    for name in others:
        (shared / name).write_text("years of work")
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "checkpoint").symlink_to(shared)
    one, two = (checkpoints_in(tmp_path / run, alone) for run in ("one", "two"))
    assert one.load() is None, "another run's"
    two.save(5)
    (two.folder / "mine.txt").touch()
    (two.folder / "000000000007.pt").symlink_to(shared / "thesis.txt")
    for steps in (10, 20, 30, 40):
        one.save(steps)
    one.remove()
    assert not one.folder.exists() and two.load() == (5, {})
    two.remove()
    assert [path.name for path in two.folder.iterdir()] == ["mine.txt"]
    assert sorted(path.name for path in shared.glob("*.*")) == sorted(others)
    assert {(shared / name).read_text() for name in others} == {"years of work"}


@pytest.mark.parametrize("ranks, steps", [(2, 10), (1, 10**9), (1, "many")])
def test_a_checkpoint_of_another_run_is_one_sentence(tmp_path, alone, ranks, steps):
    ours = checkpoints_in(tmp_path, alone)
    ours.save(10)
    name, saved = ours._read_newest_checkpoint()
    other = {"ranks": ranks * saved["ranks"], "optimizer_steps": steps}
    ours._read_newest_checkpoint = lambda: (name, saved | other)
    refused("is not of this run; remove it: .*", ours.load, most_steps=100)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, capsys, alone):
    checkpoints = checkpoints_in(tmp_path, alone)
    model = checkpoints.parts["model"]
    assert checkpoints.load() is None
    for steps in (10, 20, 30):
        model.weight.data[:] = steps
        checkpoints.save(steps, losses=[1.0 * steps])
    drawn = torch.rand(3).tolist()
    assert saved(checkpoints) == [20, 30]
    model.weight.data[:] = 0
    assert checkpoints.load() == (30, {"losses": [30.0]}) and model.weight.item() == 30
    assert torch.rand(3).tolist() == drawn, "random generators come back"
    newest = checkpoints.folder / "000000000030.pt"
    whole = newest.read_bytes()
    # torch would load it
    newest.write_bytes(whole.replace(struct.pack("<f", 30.0), struct.pack("<f", 31.0)))
    assert (
        checkpoints.load()[0] == 20 and "its SHA-256 differs" in capsys.readouterr().out
    )
    newest.write_bytes(whole[:-3])
    assert checkpoints.load() == (20, {"losses": [20.0]}) and model.weight.item() == 20
    assert "checkpoint 000000000030.pt is damaged" in capsys.readouterr().out
    # killed before its SHA-256 was written
    (checkpoints.folder / "000000000040.pt").write_bytes(b"half")
    assert checkpoints.load()[0] == 20
    capsys.readouterr()
    # going on from there: the whole one before stays, not the damaged one
    checkpoints.save(25, losses=[])
    assert saved(checkpoints) == [20, 25]


@pytest.mark.parametrize(
    "period_s, elapsed_s, due", [(0, 1e9, False), (600, 599, False), (600, 601, True)]
)
def test_a_checkpoint_is_due_after_its_period_and_never_where_there_is_none(
    tmp_path, monkeypatch, period_s, elapsed_s, due
):
    checkpoints = checkpoint.Checkpoints(tmp_path, ALONE, period_s, {})
    begun = checkpoints.last_s
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: begun + elapsed_s)
    assert checkpoints.is_due() == due


def test_ranks_that_see_different_checkpoints_do_not_go_on(tmp_path, monkeypatch):
    """As over a shared disk that is late, or damaged for one host: some would wait for the
    others for ever.
    """
    monkeypatch.setattr(distributed, "all_gather", lambda own, world: [own, "x"])
    message = "ranks see different checkpoints .*'', 'x'.*; start again"
    refused(message, checkpoint.Checkpoints(tmp_path, ALONE, 0, {}).load)


def test_opening_a_loader_draws_nothing_from_the_trainings_numbers(alone):
    """A resumed epoch opens it once more: dropout goes on as if it had not."""
    samples = TensorDataset(torch.arange(6.0))
    sampler = Shard(samples, shuffle=True)
    session = Session.__new__(Session)
    session.config = configuration.make(local_batch_size=2, global_batch_size=2)
    session.loader = DataLoader(samples, 2, sampler=sampler)
    session.phase = SimpleNamespace(loading=iter)
    session.steps_per_epoch, session.optimizer_steps, session.next_step = 3, 0, 0.0
    before = torch.get_rng_state()
    assert sum(len(list(batches)) for _, batches in session.steps(0)) == 3
    assert torch.equal(before, torch.get_rng_state())
