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
    """Of each channel (..., latitude, longitude), the mean over sequences."""
    cosine = np.cos(np.deg2rad(LATITUDE_DEG)).clip(min=0)
    weights = (len(cosine) * cosine / cosine.sum())[:, None]

    def mean(values):
        return (weights * values).mean(axis=(-2, -1))

    ours, theirs = forecast - climatology, truth - climatology
    rmse = np.sqrt(mean((forecast - truth) ** 2))
    acc = mean(ours * theirs) / np.sqrt(mean(ours**2) * mean(theirs**2))
    return rmse.mean(axis=0), acc.mean(axis=0)


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
    start, *truths = split.sequences.astype(np.float64).swapaxes(0, 1)
    for lead, step in (("6h", 1), ("12h", 2)):
        compared = truths[step - 1], split.climatology
        drifted = 0.5**step * np.roll(start, step, -1)
        rmse, acc = rmse_and_acc(drifted, *compared)
        rmse_of_start, acc_of_start = rmse_and_acc(start, *compared)
        expected = {
            f"z500_rmse_{lead}_m": 500 * rmse[2] / 9.80665,
            f"z500_rmse_{lead}_persistence_m": 500 * rmse_of_start[2] / 9.80665,
            f"z500_acc_{lead}": acc[2],
            f"z500_acc_{lead}_persistence": acc_of_start[2],
            f"rmse_{lead}": rmse.mean(),
            f"acc_{lead}": acc.mean(),
        }
        found = {name: metrics.pop(name) for name in expected}
        assert found == pytest.approx(expected, rel=1e-6)
    assert not metrics
