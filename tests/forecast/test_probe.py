"""Probes are chosen by what they tell, made in time, and their fit forecasts the long run; remedies come as ranges."""

import dataclasses
import itertools

import numpy as np
import pytest

from energynn import config, studies
from energynn.cluster import local, systems
from energynn.forecast import advise, predict, probe, simulate


@pytest.fixture(scope="module")
def long_run():
    return config.make("resnet50", preset="paper", device="gpu", devices=256, system="horeka-a100")


def test_probes_vary_and_each_makes_the_forecast_surer(a100, fitted, long_run):
    found = probe.before(long_run, a100, (0, 0), fitted)
    probes = probe.expect(found, probe.options(long_run, a100, (0, 0)), minutes=5)
    assert 2 <= len(probes) <= 4 and sum(one.seconds for one in probes) <= 300
    spreads = [one.spread_after for one in probes]
    assert all(before > after for before, after in itertools.pairwise(spreads))
    for name in ("devices", "training_samples"):
        assert len({getattr(one.run, name) for one in probes}) > 1
    assert max(one.run.devices for one in probes) == 4  # one node
    with pytest.raises(ValueError, match="minutes: 0.5 are too few for two probes"):
        probe.expect(found, probe.options(long_run, a100, (0, 0)), minutes=0.5)


def test_probes_of_an_unknown_machine_forecast_the_long_run(fitted, monkeypatch, tmp_path):
    """Runs are simulated by the published fit; the probes know nothing of it."""
    site = dataclasses.replace(systems.site("local"), devices_per_node=4)
    truth = dataclasses.replace(fitted, site=dataclasses.replace(fitted.site, name="local"))

    def simulated(runs, runs_dir):
        simulate.write(truth, runs, runs_dir, print)
        return []

    monkeypatch.setattr(local, "run_study", simulated)
    run = config.make("resnet50", preset="paper", device="gpu", devices=4)
    found = probe.before(run, site, (0, 0), None)
    probes = probe.make_here(found, probe.options(run, site, (0, 0)), tmp_path, site, minutes=15)
    row = probe.outcome(probes, tmp_path, run, site)
    (expected,) = predict.rows(truth, [run])
    for name in ("time_h", "energy_kWh"):
        assert row[name]["value"] == pytest.approx(expected[name]["value"], rel=0.15)
    assert row["measured_time_h"] is None and "simulated" in row["provenance"]
    simulated([run], tmp_path)
    measured = probe.outcome(probes, tmp_path, run, site)["measured_time_h"]
    assert measured == pytest.approx(expected["time_h"]["value"], rel=0.1)


def test_probes_become_a_study_that_can_be_submitted(a100, fitted, long_run, tmp_path):
    found = probe.before(long_run, a100, (0, 0), fitted)
    probes = probe.expect(found, probe.options(long_run, a100, (0, 0)), minutes=5)
    probe._write_study(tmp_path / "probes.py", probes)
    (runs,) = studies.find([str(tmp_path / "probes.py")], "horeka-a100").values()
    assert runs == [one.run for one in probes]


def test_remedies_are_ranges_over_both_readings(fitted):
    run = config.make("resnet50", preset="paper", device="gpu", devices=4, local_batch_size=256, system="horeka-a100")
    rows = {row["remedy"]: row for row in advise.rows(fitted, run)}
    once = rows["no second pass over the training set"]
    assert once["time_saving"]["high"] == pytest.approx(0.49, abs=0.02)  # loader-bound
    assert once["time_saving"]["low"] == pytest.approx(0.25, abs=0.03)  # GPU-bound
    assert all(row["probe"] and row["time_saving"]["low"] <= row["time_saving"]["high"] for row in rows.values())
    assert rows["workers that persist"]["time_saving"]["low"] == 0
    middles = [np.mean(list(row["time_saving"].values())) for row in rows.values()]
    assert middles == sorted(middles, reverse=True)
    many = dataclasses.replace(run, devices=256, global_batch_size=65_536, persistent_workers=True)
    rows = {row["remedy"]: row for row in advise.rows(fitted, many)}
    assert "workers that persist" not in rows
    assert 0 < rows["compressed gradients"]["time_saving"]["high"] < 0.02  # half of what the all-reduce takes


def test_no_probe_asks_for_more_samples_than_there_are():
    run = config.make("resnet50", preset="smoke", devices=2)
    asked = [short.training_samples for short in probe.candidates(run, systems.site("local"))]
    assert 900 < max(asked) <= 1000 and min(asked) > 0
    run = config.make("resnet50", preset="paper", system="horeka-a100")
    asked = [short.training_samples for short in probe.candidates(run, systems.site("horeka-a100"))]
    assert max(asked) == max(probe.BATCHES) * run.local_batch_size, "ImageNet has enough for all"
