"""Planning: nothing beats what it shows, limits hold, and what cannot be had is said with the nearest that can."""

import re

import numpy as np
import pytest

from energynn import config
from energynn.forecast import plan

WHOLE = (1, 256)


@pytest.fixture(scope="module")
def made(fitted):
    run = plan.base_run(fitted, {})
    return plan.make(fitted, run, *plan.grid(fitted, run, WHOLE), {"global_batch_size": 8192})


def test_the_pareto_set_is_that_of_every_pair():
    """Against the definition: a row is beaten where another is no worse in each cost and better in one."""
    for costs in (2, 3):
        table = np.random.default_rng(costs).integers(0, 12, (300, costs)).astype(float)
        no_worse = (table[:, None] <= table).all(axis=2)
        better = (table[:, None] < table).any(axis=2)
        expected = ~(no_worse & better).any(axis=0)
        found = plan._pareto(table)
        assert {tuple(row) for row in table[found]} == {tuple(row) for row in table[expected]}


def test_choices_are_the_extremes_of_the_pareto_set(made):
    time_h, energy_kWh = (made.values[name][made.pareto, 0] for name in ("time_h", "energy_kWh"))
    chosen = {name: index for name, (index, _) in made.choices.items()}
    assert chosen["fastest"] == made.pareto[np.argmin(time_h)]
    assert chosen["most frugal"] == made.pareto[np.argmin(energy_kWh)]
    assert made.work.devices[chosen["most frugal"]] == 4 and made.work.devices[chosen["fastest"]] == 256
    assert 4 < made.work.devices[chosen["balanced"]] < 256
    assert (made.global_batch_size[made.pareto] <= 8192).all()


def test_limits_hold_and_every_row_is_a_configuration(fitted):
    run = plan.base_run(fitted, {})
    limits = {"time_h": 3.0, "energy_kWh": 29.0}
    told = plan.as_json(plan.make(fitted, run, *plan.grid(fitted, run, WHOLE), limits))
    for row in told["pareto"]:
        assert row["time_h"]["value"] <= 3 and row["energy_kWh"]["value"] <= 29
        assert row["time_h"]["low"] < row["time_h"]["value"] < row["time_h"]["high"]
        assert row["run_id"] == config.run_id(
            config.make(
                "resnet50",
                preset="paper",
                device="gpu",
                system="horeka-a100",
                devices=row["devices"],
                local_batch_size=row["local_batch_size"],
            )
        )
        beyond = [words for words in row["outside"] if "accuracy" in words]
        assert bool(beyond) == (row["global_batch_size"] > 8192)
    assert "published" in told["provenance"] and "model" in told["provenance"]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"time_h": 0.1}, r"time_h: nothing needs at most 0.1 h; the fastest needs 0.421 h, 256 devices"),
        ({"energy_kWh": 20}, r"energy_kWh: nothing needs at most 20 kWh; the most frugal needs 27.1 kWh, 4 devices"),
        (
            {"time_h": 1, "energy_kWh": 28},
            r"energy_kWh: at most 28 kWh contradicts at most 1 h; within 1 h the most frugal needs 28.6 kWh, 100 d",
        ),
        (
            {"time_h": 0.5, "global_batch_size": 1024},
            r"time_h: at most 0.5 h contradicts at most 1024 samples a batch; within 1024 samples a batch the fastest",
        ),
        ({"time_h": 0.0001, "global_batch_size": 4096}, "time_h: nothing needs .*; within 4096 samples a batch the f"),
        ({"time_h": 0.43, "global_batch_size": 8192}, "time_h: at most 0.43 h contradicts at most 8192 samples a b"),
        (
            {"time_h": 0.5, "energy_kWh": 28, "global_batch_size": 8192},
            "energy_kWh: at most 28 kWh contradicts at most 8192 samples a batch and at most 0.5 h; within 8192",
        ),
        ({"time_h": 3, "energy_kWh": 28, "gpu_hours": 1}, "gpu_hours: nothing needs .*; within 3 h and 28 kWh the one"),
        (
            {"time_h": 3, "global_batch_size": 7},
            r"nothing needs at most 7 samples a batch; within 3 h the smallest needs \d+ s",
        ),
    ],
)
def test_an_impossible_wish_names_the_limit_and_the_nearest(fitted, limits, words):
    """Following the hint is possible: with the least that it names, the same wish is planned."""
    run = plan.base_run(fitted, {})
    with pytest.raises(ValueError, match=words) as refused:
        plan.make(fitted, run, *plan.grid(fitted, run, WHOLE), limits)
    name, message = str(refused.value).split(": ", 1)
    least, devices, size = re.search(r" needs ([\d.]+) .*, (\d+) devices with a local batch of (\d+)", message).groups()
    found = plan.make(fitted, run, *plan.grid(fitted, run, WHOLE), limits | {name: float(least)})
    sizes = [(row["devices"], row["local_batch_size"]) for row in plan.as_json(found)["pareto"]]
    assert (int(devices), int(size)) in sizes
    with pytest.raises(ValueError, match="within|nothing"):  # and it is the least, to three digits
        plan.make(fitted, run, *plan.grid(fitted, run, WHOLE), limits | {name: 0.99 * float(least)})


def test_limits_that_contradict_each_other_twice_name_a_nearest_within_the_first(fitted):
    run = plan.base_run(fitted, {})
    limits = {"time_h": 0.5, "energy_kWh": 28, "gpu_hours": 80, "global_batch_size": 8192}
    with pytest.raises(ValueError, match="energy_kWh: .*; within 8192 samples a batch and 0.5 h the most frugal"):
        plan.make(fitted, run, *plan.grid(fitted, run, WHOLE), limits)


@pytest.mark.parametrize("name", ["devices", "local_batch_size", "global_batch_size"])
def test_what_a_plan_chooses_is_no_parameter_of_it(fitted, name):
    with pytest.raises(ValueError, match=f"{name}: a plan chooses it; limit it by --devices or --max-global-batch"):
        plan.base_run(fitted, {name: 64})
    assert plan.base_run(fitted, {"epochs": 9}).epochs == 9


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ((1, 1000), "devices: 1000 asked, horeka-a100 has 668; choose at most 668"),
        ((8, 4), "devices: 8-4 is no range; write it as 1-256"),
        ((0, 4), "devices: 0-4 is no range"),
        ((5, 7), "devices: 5-7 holds no whole nodes; choose a multiple of 4"),
    ],
)
def test_devices_that_a_system_does_not_have_are_refused(fitted, devices, words):
    with pytest.raises(ValueError, match=words):
        plan.grid(fitted, plan.base_run(fitted, {}), devices)


def test_beyond_256_devices_nothing_is_claimed(fitted):
    run = plan.base_run(fitted, {})
    rows = [plan.row(plan.make(fitted, run, np.array([n]), np.array([64]), {}), 0) for n in (256, 512)]
    assert rows[0]["time_h"]["low"] and rows[1]["time_h"]["low"] is None and rows[1]["time_h"]["value"]
    assert "more than 256 devices" in rows[1]["outside"][0]


def test_100000_configurations_are_planned(fitted):
    devices, sizes = np.array(np.meshgrid(np.arange(1, 401), np.arange(7, 257))).reshape(2, -1)
    found = plan.make(fitted, plan.base_run(fitted, {}), devices, sizes, {})
    assert len(found.work) == 100_000 and len(found.pareto) > 1000
