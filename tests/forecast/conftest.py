"""Published runs and their fit, made once."""

import numpy as np
import pytest

from energynn.cluster import systems
from energynn.forecast import calibration


@pytest.fixture(scope="session")
def a100():
    return systems.site("horeka-a100")


@pytest.fixture(scope="session")
def published(a100):
    """The 17 distinct runs of R4 to R6."""
    seen, other = calibration.published("resnet50", a100)
    assert len(seen.configs) == 17 and other is None
    return seen


@pytest.fixture(scope="session")
def fitted(published):
    return calibration.make(published)


@pytest.fixture(scope="session")
def one_node(published):
    """The fit to runs on at most four GPUs, and the other runs."""
    few = published.observations.work.devices <= 4
    return calibration.make(published.only(few)), published.only(few), published.observations[~few]


def inside(intervals: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Whether intervals (runs, 3) hold the truth."""
    return (intervals[:, 1] < truth) & (truth < intervals[:, 2])
