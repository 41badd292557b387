"""Thresholds of the batch size are marked, and the critical one is found or said to be open."""

import numpy as np
import pytest

from energynn import config
from energynn.forecast import accuracy, predict


def world(seed: int, sizes=(16, 64, 256, 1024), critical: float = 150.0):
    """Batch sizes, three trainings each, and steps between which each reached an error."""
    chance = np.random.default_rng(seed)
    batches = np.repeat(sizes, 3).astype(float)
    needed = 250 * (1 + critical / batches) * np.exp(0.1 * chance.standard_normal(len(batches)))
    of_epoch = np.maximum(1, 5000 // batches)
    by = np.ceil(needed / of_epoch) * of_epoch
    return batches, by - of_epoch, by


def test_intervals_hold_the_truth():
    held = []
    for seed in range(10):
        found = accuracy.critical_batch_size(*world(seed))
        held.append(0 < found["low"] < 150 < found["high"] < np.inf)
    assert sum(held) >= 8


@pytest.mark.parametrize("critical, end", [(2.0, "low"), (90_000.0, "high")])
def test_where_all_batches_lie_on_one_side_it_is_open(critical, end):
    found = accuracy.critical_batch_size(*world(1, (128, 256, 512), critical))
    assert found[end] == (0 if end == "low" else np.inf) and found["low"] <= critical <= found["high"]


def test_what_tells_nothing_is_refused():
    batches, after, by = world(0)
    for of in ((batches * 0 + 64, after, by), (batches, after, by * np.inf)):
        with pytest.raises(ValueError, match="needs runs of two sizes, some of which reach it"):
            accuracy.critical_batch_size(*of)


def test_a_batch_beyond_the_threshold_is_marked_with_its_source(fitted):
    sizes = [config.make("resnet50", preset="paper", devices=n, local_batch_size=256) for n in (32, 64)]
    free, marked = ([words for words in row["outside"] if "batch" in words] for row in predict.rows(fitted, sizes))
    assert not free and marked[0].startswith("global batch size: beyond 8192") and "(Section" in marked[0]
    (row,) = predict.rows(fitted, sizes[:1], 4096)
    assert any("beyond the 4096 that you gave" in words for words in row["outside"])
    paper = config.make("fourcastnet", preset="paper")
    assert accuracy.threshold(paper) == 64 and len(accuracy.beyond(paper, 128)) == 3
    assert accuracy.threshold(config.make("fourcastnet")) == 0  # the study tells nothing of other data
