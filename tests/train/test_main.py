"""Whole trainings in two ranks: what they tell the record, and how they refuse what cannot work."""

import re
import shutil

import pytest
import torch

from energynn.experiment import config as configuration
from tests.train.conftest import AFNO, IMAGES, phase_times

RESNET50 = IMAGES | dict(learning_rate=0.1, evaluate_training_set=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train):
    folder = tmp_path_factory.mktemp("runs")
    pretraining = AFNO | dict(epochs=3, save_weights=True)
    tuning = AFNO | dict(epochs=2, stage="finetune", initial_run="pretrain")
    trainings = {
        "resnet50": ("resnet50", RESNET50 | dict(epochs=2, warmup_epochs=1)),
        "pretrain": ("fourcastnet", pretraining),
        "finetune": ("fourcastnet", tuning),
    }
    return {
        name: train(folder / name, workload, devices=2, **parameters)
        for name, (workload, parameters) in trainings.items()
    }


# (samples trained, samples evaluated, optimizer steps, size of the training set): W = steps x n x
# LBS, paper section 3.
COUNTS = {
    "resnet50": (48, 68, 6, 24),
    "pretrain": (60, 30, 30, 20),
    "finetune": (20, 20, 10, 10),
}


@pytest.mark.parametrize("name", COUNTS)
def test_events_tell_the_whole_run(runs, name):
    run = runs[name]
    trained, evaluated, steps, dataset = COUNTS[name]
    for rank in range(2):
        once = [
            event
            for event in run.events(rank)
            if event["event"] not in ("epoch", "progress")
        ]
        names = [event["event"] for event in once]
        assert names == ["rank_start", "training_start", "training_end"]
        begun, start, end = once
        told = begun["rank"], begun["world_size"], begun["device"]
        assert told == (rank, 2, "cpu")
        assert start["dataset_samples"] == dataset and start["samples_done"] == 0
        assert end["samples_trained"] == trained
        assert end["samples_evaluated"] == evaluated
        assert end["optimizer_steps"] == end["forward_backward_passes"] == steps
        window_s = (end["t_mono_ns"] - start["t_mono_ns"]) / 1e9
        times_s = phase_times(run.run_dir)[rank]
        assert 0.5 * window_s < sum(times_s.values()) <= window_s
        assert times_s.pop("checkpoint") >= 0 and min(times_s.values()) > 0
    told, of_others = (
        [event["event"] for event in run.events(rank) if event["event"] != "progress"]
        for rank in range(2)
    )
    assert told[2] == "epoch" and told[-1] == "training_end"
    assert len(of_others) == len(run.events(1)) == 3


def test_history_counts_up_to_the_end(runs):
    epochs = runs["pretrain"].of_kind("epoch")
    counts = [(event["epoch"], event["epochs"]) for event in epochs]
    assert counts == [(1, 3), (2, 3), (3, 3)]
    assert [event["samples_trained"] for event in epochs] == [20, 40, 60]
    # Cosine annealing over the epochs, from 5e-4 (paper, section 3.3.1).
    assert [event["learning_rate"] for event in epochs] == pytest.approx(
        [5e-4, 3.75e-4, 1.25e-4]
    )
    (end,) = runs["pretrain"].of_kind("training_end")
    assert all(epochs[-1][name] == value for name, value in end["metrics"].items())


def test_learning_rate_of_resnet50_warms_up_per_epoch(runs):
    epochs = runs["resnet50"].of_kind("epoch")
    assert [event["learning_rate"] for event in epochs] == pytest.approx(
        [0.1, 0.1 * 8 / 256]
    )


@pytest.mark.parametrize(
    "parameters, message",
    [
        (dict(devices=2), "devices: 2 asked for, .* a world of 1.*--mpi=pmi2"),
        (
            dict(epochs=1, learning_rate=1e6),
            "loss is (nan|inf) in epoch 1, step [2-5]",
        ),
        (dict(local_batch_size=21), "local_batch_size: 20 samples on each device"),
        (
            dict(stage="finetune", initial_run="none"),
            "none/weights.pt is missing .*; move",
        ),
        (
            dict(RESNET50, workload="resnet50", training_samples=3),
            "local_batch_size: 3 samples on each device",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path, train, parameters, message):
    if "workload" not in parameters:
        parameters = AFNO | dict(workload="fourcastnet") | parameters
    run = train(tmp_path / "run", ranks=1, is_refused=True, **parameters)
    (line,) = re.findall("^ValueError: .*$", run.output, re.MULTILINE)
    assert re.search(message, line), line
    assert "Traceback" not in run.output


NOT_A_NUMBER = """
from energynn.train import fourcastnet
original, calls = fourcastnet.rollout_loss, []
def loss(*arguments):
    calls.append(1)
    # the first call is the warm-up
    return original(*arguments) * (float("nan") if len(calls) > 61 else 1.0)
fourcastnet.rollout_loss = loss
"""


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_last_checkpoint(
    tmp_path, train
):
    sizes = AFNO | dict(epochs=9, checkpoint_period_s=0.05)
    given = dict(patch=NOT_A_NUMBER, is_refused=True)
    run = train(tmp_path / "run", "fourcastnet", **given, **sizes)
    assert run.output.strip().endswith(
        "ValueError: loss is nan in epoch 4, step 1; lower learning_rate, or look at the data there"
    )
    newest = torch.load(max(run.run_dir.glob("checkpoint/*.pt")), weights_only=True)
    assert 0 < newest["optimizer_steps"] <= 60
    assert all(
        torch.isfinite(values).all() for values in newest["parts"]["model"].values()
    )
    assert len(newest["ranks"][0]["losses"]) == newest["optimizer_steps"]


def test_what_makes_it_faster_changes_little_of_what_is_learned(tmp_path, train):
    """bfloat16 in products and between ranks, one kernel for all updates, workers that live on."""
    usual = train(tmp_path / "usual", "fourcastnet", epochs=2, devices=2, **AFNO)
    fast = configuration.PRESETS["fast"]["fourcastnet"] | AFNO
    fast |= dict(loader_workers=1, gradient_compression="bfloat16", devices=2)
    faster = train(tmp_path / "fast", "fourcastnet", epochs=2, **fast)
    assert faster.losses == pytest.approx(usual.losses, rel=0.02)
    assert faster.losses != usual.losses


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("g++"), reason="torch.compile needs a C++ compiler"
)
def test_compiled_it_learns_the_same(tmp_path, train):
    usual = train(tmp_path / "usual", "fourcastnet", epochs=1, **AFNO)
    compiled = train(
        tmp_path / "compiled", "fourcastnet", epochs=1, compile=True, **AFNO
    )
    assert compiled.losses == pytest.approx(usual.losses, rel=1e-4)
