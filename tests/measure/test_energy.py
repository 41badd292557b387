"""Energies of windows from readings whose truth is known in closed form, their bounds, and the
six tests.
"""

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from energynn.measure import energy
from energynn.measure.samples import Channel
from tests.measure import worlds
from tests.measure.worlds import found, sensor


def test_a_reading_that_is_a_little_late_leaves_no_gap():
    """By more than two periods and less than 0.2 s."""
    t_s = np.arange(0, 100, 0.04)
    is_late = (t_s > 50) & (t_s < 50.1)
    t_s = t_s[~is_late]
    power = Channel(**sensor("s", "power"))
    late = energy.energy_curve(power, t_s, 100 + np.sin(t_s), 0.04)
    assert found([late], 1.0, 99.0)[0].coverage == 1


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.sampled_from(list(worlds.MACHINES)),
    st.sampled_from([0.01, 0.02, 0.04, 0.1]),
    st.sampled_from([0.0, 0.6, 0.8, 1.0, 1.05]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_the_bound_holds_and_nothing_is_doubted(
    machine, period_s, periods, is_aligned, seed
):
    """Readings have noise, which a bound does not know: 0.05 % of the energy."""
    random = np.random.default_rng(seed)
    load, t_s, begin_s, end_s = worlds.window(is_aligned, period_s, random)
    # A mean over 1 s hides what changes as fast: a stated limit.
    assume("mean" not in machine or load.shape == "constant" or load.rhythm_s > 2)
    curves = worlds.curves(machine, load, t_s, random, period_s, periods * period_s)
    true_J = load.energy_J(end_s) - load.energy_J(begin_s)
    each = found(curves, begin_s, end_s)
    assert abs(each[0].energy_J - true_J) <= each[0].bound_J + 0.0005 * true_J
    assert energy.judge_sensors(each) == []


def test_a_sum_is_no_better_than_its_weakest_part_and_absent_where_a_part_is():
    parts = [
        energy.SensorEnergy(
            f"{name}_energy",
            name,
            "0",
            "energy",
            provenance,
            energy_J=100.0,
            bound_J=1.0,
        )
        for name, provenance in (("gpu", "measured"), ("cpu", "estimated"))
    ]
    found = energy.total_energies(parts, 10.0)
    assert (
        found["energy_total_provenance"] == "estimated"
        and found["energy_total_J"] == 200.0
    )
    assert (
        found["energy_total_bound_J"] == 2.0
        and found["energy_total_systematic_J"] == 55.0
    )
    assert found["mean_power_gpu_W"] == 10.0 and "energy_ram_J" not in found
    parts[0].energy_J = None
    assert (
        energy.total_energies(parts, 10.0).keys() & {"energy_gpu_J", "energy_total_J"}
        == set()
    )
