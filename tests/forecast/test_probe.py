"""Probes are chosen by what they tell, made in time, and their fit forecasts the long run."""

import dataclasses

import numpy as np
import pytest

from energynn import records
from energynn.experiment import config, studies, systems
from energynn.forecast import fit as fits
from energynn.forecast import model, predict, runs, simulate
from energynn.launch import local, probe
from tests.forecast import worlds
from tests.processes import refused


@pytest.fixture(scope="module")
def long_run():
    return config.make(
        "resnet50", preset="paper", device="gpu", devices=256, system="horeka-a100"
    )


def test_probes_vary_on_one_node(a100, long_run):
    probes = probe.planned(long_run, a100, minutes=5)
    assert len(set(probes)) == len(probes) == probe.PROBES
    assert {run.devices for run in probes} == {1, 4}
    assert {run.local_batch_size for run in probes} == {256, 64}
    assert [run.step_period_s > 0 for run in probes] == [False] * 4 + [True]
    samples = [run.training_samples for run in probes]
    assert samples[0] == 4 * 256 * probe.FEW < max(samples)
    slow = probe.planned(long_run, a100, minutes=5, batch_s=3.0)
    assert samples[1] > slow[1].training_samples
    assert slow[-1].step_period_s == probe.WAITING * 3.0
    fast = probe.planned(long_run, a100, minutes=5, batch_s=0.01)  # samples of power
    assert fast[0].training_samples == 4 * 256 * probe.LEAST_S / 0.01
    one = probe.planned(long_run.__replace__(devices=1), a100, minutes=5)
    assert len(one) == probe.PROBES - 1  # nothing is made twice


@pytest.mark.parametrize("minutes", [0.1, 1.4])
def test_too_few_minutes_are_refused(minutes):
    site = systems.site("horeka-h100")
    asked = probe.target("fourcastnet", site, {})
    refused(
        "are too few for the probes; give more", probe.planned, asked, site, minutes
    )


CORES = worlds.CLUSTER | dict(tau=3e-2, evaluation=1 / 3, t_start=0.05, fill=0.0)
CORES |= dict(efficiency=0.4, kappa=0.25, host=8.0, fed=3.0, idle=2.0, image_J=0.1)


@pytest.mark.parametrize("workload", ["resnet50", "fourcastnet"])
def test_probes_of_two_minutes_forecast_the_default_study(
    monkeypatch, tmp_path, workload
):
    """On two cores, where the model makes the records in place of the runs, each with a scatter
    of 6 %.
    """
    site = runs.here(systems.site("local"), {"cores": 2}, on_gpu=False)
    asked = probe.target(workload, systems.site("local"), {"devices": 2})
    values = CORES | dict(t_update=0.2 if workload == "resnet50" else 5e-3)
    truth = fits.unfitted(
        worlds.taken(workload, site, [asked], values, samples=(160, 16))
    )
    known = [values[of] for of in truth.names]
    is_linear = np.isin(truth.names, model.LINEAR)
    point = np.where(is_linear, known, np.log(np.maximum(known, 1e-99)))
    truth = dataclasses.replace(truth, point=point, errors=np.array([0.06, 1e-9]))
    took_s = []

    def run_study(short, runs_dir):
        for run in short:
            if not list(runs_dir.rglob(config.run_id(run))):
                (made,) = simulate.write(truth, [run], runs_dir)
                took_s.append(records.read(made).training_time_s)
        return []

    monkeypatch.setattr(local, "run_study", run_study)
    probes, fit = probe.make_here(asked, site, tmp_path, minutes=2.2)
    # the first once more where it was too short
    assert 4 <= len(probes) <= len(took_s) <= len(probes) + 1
    assert sum(took_s) + probe.START_S * len(took_s) <= 2.2 * 60 * 1.4  # scatter
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
    probes = probe.planned(long_run, a100, 5)
    submit, fit = (line.split() for line in probe.hand_over(probes, a100).splitlines())
    assert submit[:2] == ["energynn", "submit"] and fit[1:3] == ["forecast", "fit"]
    (submitted,) = studies.find([submit[2]], a100.name).values()
    assert submitted == probes
    simulate.write(fitted, submitted, tmp_path / "own")
    seen = runs.own(runs.valid(tmp_path / "own", a100), "resnet50", a100)
    (row,), (expected,) = (
        predict.rows(of, [long_run]) for of in (fits.make(seen), fitted)
    )
    assert row["time_h"]["value"] == pytest.approx(expected["time_h"]["value"], rel=0.3)


def test_a_run_that_waits_tells_what_waiting_draws(a100, long_run):
    """A world whose GPUs draw more while they wait than priors say; on one node."""
    truth = worlds.CLUSTER | dict(host=300.0, fed=260.0, idle=72.0, image_J=0.05)
    probes = probe.planned(long_run, a100, minutes=10, batch_s=0.4)
    blind = worlds.taken("resnet50", a100, probes[:-1], truth)
    seen = worlds.taken("resnet50", a100, probes, truth)
    fact_W = 300 / 4 + 72
    told, before = (fits.gpu_power_W(fits.make(of)) for of in (seen, blind))
    assert told["low"] < fact_W < told["high"]
    assert told["value"] == pytest.approx(fact_W, rel=0.03)
    assert told["high"] - told["low"] < 0.7 * (before["high"] - before["low"])
    waits = seen.work[-1]
    assert seen.time_s[-1] > 0.9 * waits.updates * waits.step_period_s
