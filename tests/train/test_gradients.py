"""Two ranks under DistributedDataParallel compute what one rank computes on the same global
batch: ResNet50. FourCastNet does so in test_traces.py.
"""

import numpy as np
import pytest

from tests.ranks import Ranks
from tests.train.conftest import HERE


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gradients")
    results = []
    for ranks in (1, 2):
        words = HERE / "rank_gradients.py", folder / f"{ranks}.npz"
        done = Ranks(ranks, *words).wait()
        assert done.returncode == 0, done.stdout
        results.append(dict(np.load(folder / f"{ranks}.npz")))
    return results


def test_gradients_of_two_ranks_are_those_of_one(both):
    alone, together = (
        {name: value for name, value in result.items() if "count/" not in name}
        for result in both
    )
    assert len(alone) == 161
    for name, gradient in alone.items():
        difference = np.linalg.norm(gradient - together[name])
        assert difference <= 1e-5 * np.linalg.norm(gradient), name
        assert np.linalg.norm(gradient) > 0, name


def test_every_sample_is_evaluated_once_whatever_the_number_of_ranks(both):
    alone, together = both
    assert alone["count/samples"] == together["count/samples"] == 8
    assert alone["count/wrong"] == together["count/wrong"]
