"""Published runs and their fit, made once."""

from functools import partial

import pytest

from energynn.experiment import config, systems
from energynn.forecast import fits, plan, predict, runs


@pytest.fixture(scope="session")
def a100():
    return systems.read_site("horeka-a100")


@pytest.fixture(scope="session")
def published():
    """The 17 distinct runs of R4 to R6."""
    seen = runs.published_runs("resnet50", "horeka-a100")
    assert len(seen) == 17 and seen.like is None
    return seen


@pytest.fixture(scope="session")
def fitted(published):
    return fits.fit_runs(published)


# a training of ResNet50 as the study's
study_run = partial(config.make, "resnet50", preset="paper")


def grid(fit, **more) -> list:
    """All that a plan for a fit chooses from."""
    return plan.configuration_grid(fit, plan.base_run(fit, {}), **more)


def foretold(fit, **sizes) -> dict:
    """The forecast of the fitted training, with other sizes."""
    (row,) = predict.forecasts(fit, [predict.longest_run_changed(fit, sizes)])
    return row


def holds(told, fact) -> bool:
    """Whether an interval holds a value."""
    return told["low"] < fact < told["high"]
