"""Intervals hold the truth of simulated worlds: other systems, other loaders, and a pipeline that the model has not."""

import dataclasses

import numpy as np
import pytest

from energynn.forecast import calibrate, calibration, fitting
from tests.forecast import worlds


def coverage(number: int, pipeline: bool) -> tuple[float, float]:
    """Share of truths within their 90 % interval, of times and of energies."""
    held = {"time_s": [], "energy_J": []}
    for seed in range(number):
        world = worlds.draw(seed, pipeline)
        found = fitting.fit(world.seen, None, "loader-bound")
        told, asked = calibrate.forecast(found, world.asked.work), world.asked
        truth = {"time_s": np.log(asked.time_s), "energy_J": np.log(asked.time_s * asked.power_W)}
        for name, (middle, half) in ((name, told[name]) for name in held):
            held[name].extend(np.abs(truth[name] - middle) < half)
    return np.mean(held["time_s"]), np.mean(held["energy_J"])


@pytest.mark.parametrize("pipeline", [False, True])
def test_intervals_hold_the_truth_of_some_worlds(pipeline):
    """A first look, with seeds that do not change; the share itself is uncertain by about five per cent."""
    for share in coverage(25, pipeline):
        assert 0.88 <= share <= 0.98


@pytest.mark.nightly
@pytest.mark.parametrize("pipeline", [False, True])
def test_intervals_hold_the_truth_of_200_worlds(pipeline):
    for share in coverage(200, pipeline):
        assert 0.86 <= share <= 0.94


@pytest.mark.parametrize("seed", range(4))
def test_parameters_of_a_world_without_scatter_are_found_again(seed):
    world = worlds.draw(seed, scatter=0.0)
    found = fitting.fit(world.seen, None, "loader-bound")
    contraction, intervals = found.contraction(), found.intervals()
    assert contraction["tau"] > 0.99 and found.values["tau"] == pytest.approx(world.values["tau"], rel=0.02)
    for name in [name for name in contraction if contraction[name] > 0.9]:
        low, high = intervals[name]
        assert low / 1.2 <= world.values[name] <= high * 1.2, name  # priors that miss by chance pull a little
    told = np.exp(calibrate.outcomes(found.priors, found.point, world.seen.observations.work, "loader-bound")[0])
    assert told == pytest.approx(world.seen.observations.time_s, rel=0.01)


def test_runs_that_do_not_vary_are_refused_or_flagged():
    seen = worlds.draw(0).seen
    first = np.arange(len(seen.configs)) == 0
    with pytest.raises(
        ValueError, match="tau and t_start cannot be told apart. Add a run with another number of train"
    ):
        calibration.make(seen.only(first))
    same = np.array(
        [run.local_batch_size == 256 and run.epoch().training_samples == 5004 * run.devices for run in seen.configs]
    )
    flags = " ".join(fitting.flags(fitting.fit(seen.only(same), None, "loader-bound")))
    assert "t_start: hardly informed" in flags and "few samples an epoch would tell" in flags


def test_times_alone_are_fitted_where_no_energy_is_known():
    seen = worlds.draw(0).seen
    blind = dataclasses.replace(seen.observations, power_W=np.full(len(seen.configs), np.nan))
    made = calibration.make(dataclasses.replace(seen, observations=blind))
    assert not made.fit.has_power and set(calibrate.forecast(made.fit, blind.work)) == {"time_s"}
    with_power = fitting.fit(seen, None, made.fit.reading)
    assert made.fit.values["tau"] == pytest.approx(with_power.values["tau"], rel=0.02)
