"""Time to accuracy: thresholds are marked with their source, and the critical batch size is found or said not to be."""

import json
import shutil

import numpy as np
import pytest

from energynn import cli, config
from energynn.files import REPOSITORY
from energynn.forecast import accuracy, predict

REACH = 0.4  # the error that a simulated run reaches when it has made its steps


def world(seed: int, sizes=(16, 64, 256, 1024), critical: float | None = None) -> tuple[float, accuracy.Reached]:
    """Trainings of a known critical batch size, three a batch size, evaluated once an epoch with some noise."""
    chance = np.random.default_rng(seed)
    critical = critical or float(np.exp(chance.uniform(np.log(40), np.log(600))))
    least, samples = chance.uniform(150, 400), int(chance.choice([2000, 5000, 10_000]))
    histories, batches = [], []
    for size in sizes:
        for _ in range(3):
            of_epoch = max(1, samples // size)
            needed = least * (1 + critical / size) * np.exp(0.1 * chance.standard_normal())
            steps = of_epoch * np.arange(1, 2 + 1.5 * least * (1 + critical / size) // of_epoch)
            errors = 0.2 + 0.7 / (1 + 2.5 * steps / needed) + 0.003 * chance.standard_normal(len(steps))
            history = zip(steps.tolist(), errors.tolist(), strict=True)
            histories.append([{"optimizer_steps": done, "error": error} for done, error in history])
            batches.append(size)
    return critical, accuracy.reached(histories, batches, "error", REACH)


def held(number: int) -> list[bool]:
    """Whether the interval of each world holds its truth."""
    result = []
    for seed in range(number):
        truth, seen = world(seed)
        found = accuracy.critical(seen)
        assert found.is_identified and found.low < found.value < found.high
        result.append(found.low < truth < found.high)
    return result


def test_intervals_hold_the_truth_of_some_worlds():
    """A first look, with seeds that do not change."""
    assert sum(held(12)) >= 10


@pytest.mark.nightly
def test_intervals_hold_the_truth_of_200_worlds():
    assert 0.86 <= np.mean(held(200)) <= 0.94


@pytest.mark.parametrize("critical, end", [(3.0, "low"), (60_000.0, "high")])
def test_where_all_batches_lie_on_one_side_it_is_not_identified(critical, end):
    """Far above it every batch takes as many steps, far below it as many samples: one end of the interval is open."""
    _, seen = world(1, sizes=(128, 256, 512), critical=critical)
    found = accuracy.critical(seen)
    assert not found.is_identified
    assert found.low == 0 if end == "low" else found.high == np.inf
    assert found.low <= critical <= found.high


def test_a_run_counts_between_the_evaluations_that_surround_the_error():
    history = [{"optimizer_steps": step, "e": error} for step, error in ((10, 0.9), (20, 0.5), (30, 0.6))]
    seen = accuracy.reached([history, history, history], [8, 8, 8], "e", 0.5)
    assert (seen.after[0], seen.by[0]) == (10, 20)
    late, early = (accuracy.reached([history], [8], "e", error) for error in (0.1, 0.95))
    assert (late.after[0], late.by[0]) == (30, np.inf) and (early.after[0], early.by[0]) == (0, 10)


def test_the_committed_runs_leave_it_open(capsys, tmp_path):
    shutil.copytree(REPOSITORY / "runs" / "large-batch", tmp_path / "large-batch")  # without what this machine has made
    words = ["forecast", "accuracy", "--runs-dir", str(tmp_path), "--workload", "resnet50"]
    assert cli.main([*words, "--error", "0.55", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["runs"] == 12  # the first epochs of a seed's longer training are no further training
    assert not told["is_identified"] and told["critical_batch_size"]["low"] == 0
    assert 100 < told["critical_batch_size"]["high"] < 200
    assert cli.main([*words, "--error", "0.55"]) == 0
    assert capsys.readouterr().out.startswith("critical batch size: not identified; these 12 runs agree with 0 to 1")
    assert cli.main([*words, "--error", "0.1"]) == 2
    assert "no run reaches this error; give a larger one" in capsys.readouterr().err
    assert cli.main([*words, "--error", "0.5", "--metric", "z500"]) == 2
    assert "has no z500; it has top1_error, validation_loss" in capsys.readouterr().err


def test_an_identified_batch_size_is_json(capsys):
    words = ["--runs-dir", str(REPOSITORY / "runs" / "large-batch"), "--workload", "resnet50", "--error", "0.6"]
    assert cli.main(["forecast", "accuracy", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    size = told["critical_batch_size"]
    assert told["is_identified"] is True and 0 < size["low"] < size["value"] < size["high"]


def test_one_batch_size_tells_nothing():
    _, seen = world(0, sizes=(64,))
    with pytest.raises(ValueError, match="3 run.s. of 1 global batch size.s.: .* needs at least two sizes and 4 runs"):
        accuracy.critical(seen)


def test_recipes_and_learning_rates_are_not_mixed():
    plain = config.to_dict(config.make("resnet50"))
    records = [{"run_id": "a", "history": [], "metrics": {}, "config": plain | change} for change in ({}, {})]
    records[1]["config"]["momentum"] = 0.5
    with pytest.raises(ValueError, match="runs differ in momentum; put those of one recipe into a folder"):
        accuracy.check(records, "top1_error")
    records[1]["config"] |= {"momentum": 0.9, "learning_rate": 0.3}
    with pytest.raises(ValueError, match="global batch size 16: several learning rates; keep the runs of the best"):
        accuracy.check(records, "top1_error")


def test_a_batch_beyond_the_threshold_is_marked_with_its_source(fitted):
    sizes = [config.make("resnet50", preset="paper", devices=n, local_batch_size=256) for n in (32, 64)]
    free, marked = (row["outside"] for row in predict.rows(fitted, sizes))
    assert not [words for words in free if "global batch" in words]
    (words,) = [words for words in marked if "global batch" in words]
    assert words.startswith("global batch size 16384: accuracy may fall beyond 8192, ") and "(Section" in words
    (words,) = [words for words in predict.rows(fitted, sizes[:1], 4096)[0]["outside"] if "global batch" in words]
    assert words == "global batch size 8192: beyond the 4096 that you gave; no accuracy is claimed"


def test_the_study_tells_nothing_of_other_data():
    paper = config.make("fourcastnet", preset="paper")
    assert accuracy.threshold(paper) == 64 and len(accuracy.beyond(paper, 128)) == 3
    assert accuracy.threshold(config.make("fourcastnet")) == 0 and not accuracy.beyond(config.make("resnet50"), 2**20)
