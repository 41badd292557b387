"""Intervals hold the truth of invented worlds: other systems, other loaders, broken assumptions."""

from functools import partial

import msgspec
import numpy as np
import pytest

from energynn.experiment import config
from energynn.forecast import fit as fits
from tests.forecast import worlds
from tests.forecast.conftest import inside, off_percent


@pytest.mark.parametrize("hidden", worlds.HIDDEN)
@pytest.mark.parametrize("number", [25, pytest.param(200, marks=pytest.mark.nightly)])
def test_intervals_hold_the_truth(hidden, number):
    """Also where updates and all-reduces hide, which the model does not have."""
    drawn = [worlds.draw(seed, hidden) for seed in range(number)]
    held = np.concatenate(
        [inside(fits.make(of.seen), of.asked) for of in drawn], axis=1
    )
    assert (held.mean(axis=1) >= 0.85).all()


def is_refused(seen) -> bool:
    try:
        fits.check(seen)
    except ValueError as error:
        return "a sum of four terms" in str(error)
    return False


@pytest.mark.parametrize("number", [10, pytest.param(100, marks=pytest.mark.nightly)])
def test_the_check_spares_good_runs_and_finds_odd_ones(number):
    """Of five and eight configurations on several nodes, and of all of one node."""
    spared, found = [], []
    for seed in range(number):
        chance, world = np.random.default_rng(seed), worlds.draw(seed, "nothing")
        taken = list(chance.permutation([*world.seen.taken, *world.asked.taken]))
        parts = (world.seen.taken, taken[:5], taken[:8])
        for seen in (msgspec.structs.replace(world.seen, taken=part) for part in parts):
            scatter = np.exp(0.01 * chance.standard_normal(len(seen)))
            spared.append(not is_refused(seen))
            found.append(is_refused(worlds.unlike_the_model(seen, scatter)))
    assert np.mean(spared) >= 0.99 and np.mean(found) >= 0.7


@pytest.fixture(scope="module")
def cluster(a100):
    """Parameters of the study's cluster, and runs there on 1 to 256 GPUs."""
    make, configs = partial(config.make, "resnet50", preset="paper"), []
    for n in (1, 2, 4, 8, 16, 64, 256):
        for images in (5004, 80064):
            samples = dict(training_samples=images * n, validation_samples=195 * n)
            configs.append(make(devices=n, local_batch_size=256, **samples))
    return worlds.CLUSTER, configs


def split(seen, most):
    few = seen.work.devices <= most
    return seen.only(few), seen.only(~few)


def test_a_slow_network_is_not_read_as_storage(a100, cluster):
    """A link that reaches an eighth of what its file says, seen on two nodes."""
    values, configs = cluster
    seen = worlds.taken("resnet50", a100, configs, values | {"efficiency": 0.12})
    few, many = split(seen, 8)
    fit = fits.make(few)
    assert "kappa_storage" not in fit.names
    assert off_percent(fit, many).max() < 5 and inside(fit, many).all()


def test_a_limit_of_storage_is_found_on_four_numbers_of_nodes(a100, cluster):
    values, configs = cluster
    values = values | {"kappa_storage": 0.05}
    few, many = split(worlds.taken("resnet50", a100, configs, values), 64)
    fit = fits.make(few)
    assert fit.values["kappa_storage"] == pytest.approx(0.05, rel=0.3)
    assert inside(fit, many).all()


def test_powers_do_not_move_times(a100, cluster):
    """Where the power is not as in the model, the times are forecast as without any power."""
    values, configs = cluster
    seen = worlds.taken("resnet50", a100, configs, values)
    strange = 300 * seen.power_W**2 / 260**2
    few, many = split(worlds.with_results(seen, seen.time_s, strange), 4)
    blind = fits.make(worlds.with_results(few, few.time_s, [None] * len(few)))
    assert not blind.has_power
    assert np.isnan(fits.forecast(blind, many.work)["energy_J"]).all()
    seeing_s, blind_s = (
        fits.forecast(fit, many.work)["time_s"][:, 0] for fit in (fits.make(few), blind)
    )
    assert seeing_s == pytest.approx(blind_s, rel=1e-6)
