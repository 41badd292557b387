"""Probes are chosen by what they tell, made in time, and their fit forecasts the long run."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from energynn import config, records, studies
from energynn.cluster import local, systems
from energynn.forecast import fit as fits
from energynn.forecast import predict, probe, runs, simulate
from tests.forecast import worlds


@pytest.fixture(scope="module")
def long_run():
    return config.make(
        "resnet50", preset="paper", device="gpu", devices=256, system="horeka-a100"
    )


def test_probes_vary_within_the_minutes(a100, long_run):
    probes = probe.planned(probe.before(long_run, a100), long_run, minutes=5)
    assert 2 <= len(probes) <= 4 and sum(one.seconds for one in probes) <= 300
    assert len({one.run for one in probes}) == len(probes)
    assert max(one.run.devices for one in probes) == 4  # one node
    assert (
        max(one.run.training_samples for one in probes)
        <= long_run.epoch().training_samples
    )


@pytest.mark.parametrize("minutes", [0.1, 0.55])
def test_too_few_minutes_are_refused(minutes):
    site = systems.site("horeka-h100")
    asked = probe.target("fourcastnet", site, {})
    with pytest.raises(ValueError, match="are too few for two probes; give more"):
        probe.planned(probe.before(asked, site), asked, minutes)


CORES = dict(
    tau=3e-2,
    evaluation=1 / 3,
    t_start=0.05,
    t_update=0.2,
    efficiency=0.4,
    kappa=0.25,
    kappa_nodes=0.0,
)
CORES |= dict(kappa_storage=0.0, fill=0.0, host=8.0, fed=3.0, idle=2.0, image_J=0.1)


@pytest.mark.parametrize("workload", ["resnet50", "fourcastnet"])
def test_probes_of_100_s_forecast_the_default_study(monkeypatch, tmp_path, workload):
    """On two cores, where the model makes the records in place of the runs, each with a scatter
    of 6 %.
    """
    site = runs.here(systems.site("local"), {"cores": 2}, on_gpu=False)
    asked = probe.target(workload, systems.site("local"), {"devices": 2})
    values = CORES | dict(t_update=0.2 if workload == "resnet50" else 5e-3)
    truth = fits.unfitted(
        worlds.taken(workload, site, [asked], values, samples=(160, 16))
    )
    at = np.array(
        [
            np.log(values[of]) if fits.PARAMETERS[of].is_log else values[of]
            for of in truth.names
        ]
    )
    truth = dataclasses.replace(truth, point=at, errors=np.array([0.06, 1e-9]))
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda: clock.now_s))

    def run_study(short, runs_dir):
        (made,) = simulate.write(truth, short, runs_dir)
        clock.now_s += probe.START_S + records.read(made)["training_time_s"]
        return []

    monkeypatch.setattr(local, "run_study", run_study)
    probes, fit = probe.make_here(
        probe.before(asked, site), asked, tmp_path, minutes=100 / 60
    )
    assert len(probes) >= 2 and clock.now_s <= 140  # a run may be slower than expected
    (told,), (fact,) = predict.rows(fit, [asked]), predict.rows(truth, [asked])
    told, fact = told["time_h"], fact["time_h"]["value"]
    assert told["low"] <= fact <= told["high"] and told["value"] == pytest.approx(
        fact, rel=0.15
    )


def test_probes_are_handed_to_the_cluster_as_a_study(
    a100, fitted, long_run, monkeypatch, tmp_path
):
    """From the commands to the forecast; in place of the jobs, the model makes the records."""
    monkeypatch.setattr(probe, "REPOSITORY", tmp_path)
    probes = probe.planned(probe.before(long_run, a100), long_run, 5)
    submit, fit = (line.split() for line in probe.hand_over(probes, a100).splitlines())
    assert submit[:2] == ["energynn", "submit"] and fit[1:3] == ["forecast", "fit"]
    (submitted,) = studies.find([submit[2]], a100.name).values()
    assert submitted == [one.run for one in probes]
    simulate.write(fitted, submitted, tmp_path / "own")
    seen = runs.own(runs.valid(tmp_path / "own", a100), "resnet50", a100)
    (row,), (expected,) = (
        predict.rows(of, [long_run]) for of in (fits.make(seen), fitted)
    )
    assert row["time_h"]["value"] == pytest.approx(expected["time_h"]["value"], rel=0.3)
