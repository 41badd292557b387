"""Scripts of one's own, measured two or three times with `measure`, and what is forecast of them."""

import numpy as np
import pytest

from energynn import config
from energynn.cluster import systems
from energynn.forecast import fit as fits
from energynn.forecast import plan, predict, runs

GPUS = {"gpus": ["a GPU"] * 8, "cores": 64}


def record(devices, samples, time_s, power_W, **more) -> dict:
    """A record of a command as `measure` leaves it, with what a forecast reads."""
    return {
        "workload": "command",
        "name": "mine",
        "run_id": f"mine-{devices}-{samples}",
        "system": "measured",
        "device_kind": "gpu",
        "device_name": "a GPU",
        "devices": devices,
        "machine": GPUS,
        "config": {"command": "train", "training_samples": samples},
        "training_time_s": time_s,
        "mean_power_total_W": power_W,
        "energy_total_provenance": "measured",
    } | more


def world(seed):
    """A script whose truth is known: its time in s and power in W by another law than the model's.

    It starts once, shares gradients in a ring, and does a part of its work on one device alone.
    """
    chance = np.random.default_rng(seed)
    start_s, sample_s = chance.uniform(2, 20), 10 ** chance.uniform(-4, -2)
    shared, alone = chance.uniform(0, 0.4), chance.uniform(0, 0.05)
    node_W, idle_W, busy_W = chance.uniform((100, 40, 150), (400, 90, 350))

    def takes(devices, samples):
        part = (1 - alone) / devices + alone + shared * (1 - 1 / devices) / devices
        work_s = samples * sample_s * part
        time_s = (start_s + work_s) * np.exp(0.02 * chance.standard_normal())
        busy = work_s / (start_s + work_s)
        return time_s, node_W + devices * (idle_W + busy * (busy_W - idle_W))

    return takes, round(20 / sample_s)


def seen_of(takes, sizes, provenance="measured") -> runs.Runs:
    known = {"energy_total_provenance": provenance}
    found = [record(*size, *takes(*size), **known) for size in sizes]
    return runs.own(found, "mine", systems.site("local"), runs.ANY)


def test_three_runs_tell_of_more_samples_and_devices_with_honest_intervals():
    """Inside the 90 % intervals, of 25 worlds: of four times the devices most, else nearly all."""
    inside = []
    for seed in range(25):
        takes, samples = world(seed)
        fit = fits.make(
            seen_of(takes, [(1, samples), (1, 4 * samples), (2, 4 * samples)])
        )
        asked = plan.base_run(fit, {"training_samples": 10 * samples, "epochs": 4})
        asked = [config.replace(asked, devices=devices) for devices in (1, 4, 8)]
        for row in predict.rows(fit, asked):
            time_s, power_W = takes(row["devices"], 40 * samples)
            truth = {"time_h": time_s / 3600, "energy_kWh": time_s * power_W / 3.6e6}
            for of, value in truth.items():
                inside.append(row[of]["low"] < value < row[of]["high"])
                assert row[of]["high"] < 1.6 * row[of]["value"], "says nothing"
    shares = np.mean(np.reshape(inside, (25, 3, 2)), axis=0)
    assert (shares[:2] > 0.9).all() and (shares > 0.8).all()


def test_two_runs_on_one_device_tell_of_one_device():
    takes, samples = world(1)
    fit = fits.make(seen_of(takes, [(1, samples), (1, 5 * samples)]))
    run = plan.base_run(fit, {"training_samples": 50 * samples})
    answer = plan.text(plan.make(fit, plan.grid(fit, run), {}))
    assert "devices: no run varied it, so it is not forecast" in answer
    with pytest.raises(
        ValueError,
        match="devices: 1 in every run of mine, nothing tells of 4; measure others",
    ):
        predict.rows(fit, [config.replace(run, devices=4)])


def test_runs_that_tell_nothing_are_refused_with_the_remedy():
    takes, samples = world(1)
    for sizes in ([(1, samples)], [(2, samples)] * 3):
        with pytest.raises(ValueError, match="one configuration; .*--samples"):
            fits.check(seen_of(takes, sizes))
    untold = record(1, samples, 9.0, 300.0, config={"command": "train"})
    site = systems.site("local")
    with pytest.raises(
        ValueError, match="mine-1-.*: its samples are not known; .* --samples N"
    ):
        runs.own([untold], "mine", site)
    with pytest.raises(ValueError, match="no valid run of yours on local; .*status"):
        runs.own([untold], "yours", site)


def test_estimated_energies_are_forecast_as_such():
    takes, samples = world(1)
    sizes = [(1, samples), (2, samples), (1, 5 * samples)]
    took = {size: takes(*size) for size in sizes}
    seen = {
        each: fits.make(seen_of(lambda *size: took[size], sizes, each))
        for each in ("measured", "estimated")
    }
    told = {
        each: predict.rows(fit, [fit.runs.longest])[0] for each, fit in seen.items()
    }
    assert "whose energies are estimates" in told["estimated"]["provenance"]
    assert "estimates" not in told["measured"]["provenance"]
    high, known = (
        told[each]["energy_kWh"]["high"] for each in ("estimated", "measured")
    )
    assert high > 1.5 * told["estimated"]["energy_kWh"]["value"] > known
    assert told["estimated"]["time_h"] == told["measured"]["time_h"]
