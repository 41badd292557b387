"""Thresholds of the batch size are marked with their source."""

from energynn import config
from energynn.forecast import accuracy, predict


def test_a_batch_beyond_the_threshold_is_marked_with_its_source(fitted):
    sizes = [config.make("resnet50", preset="paper", devices=n, local_batch_size=256) for n in (32, 64)]
    free, marked = ([words for words in row["outside"] if "batch" in words] for row in predict.rows(fitted, sizes))
    assert not free and marked[0].startswith("global batch size: beyond 8192") and "(Section" in marked[0]
    paper = config.make("fourcastnet", preset="paper")
    assert accuracy.threshold(paper) == 64 and len(accuracy.thresholds(paper)) == 3
    assert accuracy.threshold(config.make("fourcastnet")) == 0  # the study tells nothing of other data
