"""Scores of FourCastNet's forecasts, against the formulas of the published code written out with
NumPy.
"""

import dataclasses

import numpy as np
import pytest
import torch

from energynn.data import era5
from energynn.train import fourcastnet

LATITUDE_DEG = np.linspace(90, -67.5, 8)


def rmse_and_acc(forecast, truth, climatology):
    """Of one field (latitude, longitude), row by row."""
    cosine = np.cos(np.deg2rad(LATITUDE_DEG)).clip(min=0)
    weights = len(cosine) * cosine / cosine.sum()
    error = ours = theirs = both = 0.0
    for row, weight in enumerate(weights):
        f, t = forecast[row] - climatology[row], truth[row] - climatology[row]
        error += weight * ((forecast[row] - truth[row]) ** 2).sum()
        ours += weight * (f**2).sum()
        theirs += weight * (t**2).sum()
        both += weight * (f * t).sum()
    return np.sqrt(error / truth.size), both / np.sqrt(ours * theirs)


class Drift(torch.nn.Module):
    """A forecast that can be written down: half of the state, one column further east."""

    def forward(self, state):
        return 0.5 * state.roll(1, dims=-1)


@pytest.fixture
def split():
    generator = np.random.default_rng(1)
    sequences = generator.standard_normal((3, 3, 4, 8, 16)).astype(np.float32)
    climatology = 0.3 * generator.standard_normal((4, 8, 16)).astype(np.float32)
    std = np.array([2.0, 3.0, 500.0, 4.0], np.float32)
    weights = era5.latitude_weights(LATITUDE_DEG)
    return era5.TestSet(
        sequences,
        std,
        weights,
        climatology,
        lead_h=6,
        z500=2,
        scored_steps=(1, 2),
    )


def test_where_no_channel_is_a_height_there_is_none_in_metres(split, alone):
    random = dataclasses.replace(split, z500=None)
    metrics = fourcastnet.evaluate(Drift(), random, alone)
    assert metrics.keys() == {"rmse_6h", "acc_6h", "rmse_12h", "acc_12h"}
    assert metrics.items() <= fourcastnet.evaluate(Drift(), split, alone).items()


def test_scores_are_the_formulas(split, alone):
    metrics = fourcastnet.evaluate(Drift(), split, alone)
    for lead, step in (("6h", 1), ("12h", 2)):
        of = {}
        for name, forecast in (
            ("model", lambda s, n=step: 0.5**n * np.roll(s, n, -1)),
            ("persistence", lambda s: s),
        ):
            of[name] = np.mean(
                [
                    [
                        rmse_and_acc(
                            forecast(sequence[0])[c],
                            sequence[step, c],
                            split.climatology[c],
                        )
                        for c in range(4)
                    ]
                    for sequence in split.sequences.astype(np.float64)
                ],
                axis=0,
            )
        expected = {
            f"z500_rmse_{lead}_m": 500 * of["model"][2, 0] / 9.80665,
            f"z500_rmse_{lead}_persistence_m": 500 * of["persistence"][2, 0] / 9.80665,
            f"z500_acc_{lead}": of["model"][2, 1],
            f"z500_acc_{lead}_persistence": of["persistence"][2, 1],
            f"rmse_{lead}": of["model"][:, 0].mean(),
            f"acc_{lead}": of["model"][:, 1].mean(),
        }
        found = {name: metrics.pop(name) for name in expected}
        assert found == pytest.approx(expected, rel=1e-6)
    assert not metrics
