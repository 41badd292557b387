"""Probes are chosen by what they tell, made in time, and their fit forecasts the long run."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from energynn import records
from energynn.experiment import config, studies, systems
from energynn.forecast import fits, model, next_run, predict, runs, simulate
from energynn.launch import local, probe
from tests.forecast import worlds
from tests.forecast.conftest import holds, study_run
from tests.processes import refused


@pytest.fixture(scope="module")
def long_run():
    return study_run(device="gpu", devices=256, system="horeka-a100")


def test_two_runs_begin_that_vary(a100, long_run, tmp_path):
    """Of few batches, on a node at most."""
    pair = probe.choose_next_runs(long_run, a100, tmp_path, minutes=5)
    sizes = [(run.devices, run.local_batch_size) for run in pair]
    assert sizes == [(4, 256), (1, 64)]
    assert (
        pair[0].training_samples == 4 * 256 * next_run.MIN_BATCHES
        and pair[0].epochs == 1
    )
    sizes = {"devices": 2, "training_samples": 480, "local_batch_size": 200}
    few = config.replace(long_run, **sizes)
    pair = probe.choose_next_runs(few, a100, tmp_path, minutes=5)
    # no more than there are
    assert [run.training_samples for run in pair] == [400, 300]
    words = "too few for a probe; give more"
    refused(words, probe.choose_next_runs, long_run, a100, tmp_path, minutes=0.4)


CORES = worlds.CLUSTER | dict(tau=3e-2, evaluation=1 / 3, t_start=0.05, fill=0.0)
CORES |= dict(efficiency=0.4, kappa=0.25, host=8.0, fed=3.0, idle=2.0, image_J=0.1)


def made_by_model(monkeypatch, truth) -> list[float]:
    """The model makes the records in place of the runs; returns their times to come, in s."""
    took_s = []

    def run_study(short, runs_dir):
        for run in short:
            (row,) = predict.forecasts(truth, [run])
            readings = row["time_h"]["value"] * 3600 / run.sampling_period_s
            monkeypatch.setattr(simulate, "READINGS_PER_RUN", 1 + int(readings))
            (made,) = simulate.write_simulated_runs(truth, [run], runs_dir)
            took_s.append(records.read_record_if_any(made).training_time_s)
        return []

    def now_s():
        return sum(took_s) + next_run.STARTUP_S * len(took_s)

    monkeypatch.setattr(local, "make_missing_runs", run_study)
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=now_s))
    return took_s


def of_truth(workload, site, run, values) -> fits.Fit:
    """A fit whose parameters are true; runs scatter by 6 %."""
    seen = worlds.taken(workload, site, [run], values, samples=(160, 16))
    truth = fits.prior_fit(seen)
    known = [values[of] for of in truth.names]
    is_linear = np.isin(truth.names, model.LINEAR)
    point = np.where(is_linear, known, np.log(np.maximum(known, 1e-99)))
    return dataclasses.replace(truth, point=point, errors=np.array([0.06, 1e-9]))


OWN = """
from energynn.experiment.config import Natural, Epoch, RunConfig

class Config(RunConfig, frozen=True, kw_only=True):
    workload: str = "own_SIZE"
    dataset: str = "synthetic"
    local_batch_size: int = 32
    global_batch_size: int = 32
    epochs: int = 20
    learning_rate: float = 0.1
    SIZE: Natural = 16_384

    def epoch(self):
        return Epoch(training_samples=self.SIZE, gradient_bytes=170_000)
"""


@pytest.mark.parametrize(
    "workload, tau, t_update",
    [
        ("resnet50", 3e-2, 0.2),
        ("fourcastnet", 3e-2, 5e-3),
        ("own_training_samples", 3e-5, 1e-4),
        ("own_training_samples", 3e-3, 1e-2),
        ("own_rows", 3e-5, 1e-4),
    ],
)
def test_probes_of_minutes_forecast_a_training(
    monkeypatch, tmp_path, workload, tau, t_update
):
    """On two cores, where the model makes the records in place of the runs, each with a scatter
    of 6 %; the shipped studies, and own workloads without validation data, whose first runs may be
    too short for their power samples. The same command again makes none that is there.
    """
    text = OWN.replace("SIZE", workload.removeprefix("own_"))
    (tmp_path / f"{workload}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    here = systems.read_site("local")
    site = runs.site_of_this_machine(here, {"cores": 2}, on_gpu=False)
    asked = probe.target_run(workload, here, {"devices": 2})
    values = CORES | dict(tau=tau, t_update=t_update, image_J=3 * tau)
    truth = of_truth(workload, site, asked, values)
    took_s = made_by_model(monkeypatch, truth)
    probes = probe.make_probe_runs(asked, site, tmp_path / "runs", minutes=2.2)
    # some once more, where they were too short
    assert 2 <= len(probes) == len(set(probes)) <= len(took_s) <= len(probes) + 2
    assert sum(took_s) + next_run.STARTUP_S * len(took_s) <= 2.2 * 60 * 1.4  # scatter
    fit = fits.fit_runs(probe.matching_runs(asked, site, tmp_path / "runs"))
    told, fact = (
        predict.forecasts(each, [asked])[0]["time_h"] for each in (fit, truth)
    )
    fact = fact["value"]
    assert holds(told, fact)
    assert told["value"] == pytest.approx(fact, rel=0.25)
    again = probe.make_probe_runs(asked, site, tmp_path / "runs", minutes=2.2)
    assert not set(again) & set(probes)


def test_probes_are_handed_to_the_cluster_as_a_study(
    a100, fitted, long_run, monkeypatch, tmp_path
):
    """From the commands to the forecast; in place of the jobs, the model makes the records."""
    monkeypatch.setattr(probe, "REPOSITORY", tmp_path)
    own, made = tmp_path / "own", []
    while probes := probe.choose_next_runs(long_run, a100, own, minutes=5):
        submit, fit = map(
            str.split, probe.write_probe_study(probes, a100, own).splitlines()
        )
        assert submit[:2] == ["energynn", "submit"]
        assert fit[1:3] == ["forecast", "fit"]
        (submitted,) = studies.find_studies([submit[2]], a100.name).values()
        assert submitted == probes
        simulate.write_simulated_runs(fitted, submitted, own)
        made += probes
    assert 3 <= len(made) == len(set(made)) <= 8
    fit = fits.fit_runs(probe.matching_runs(long_run, a100, own))
    (row,), (expected,) = (predict.forecasts(of, [long_run]) for of in (fit, fitted))
    told, expected = row["time_h"], expected["time_h"]["value"]
    assert told["value"] == pytest.approx(expected, rel=0.3) and holds(told, expected)


def waiting_W(fit):
    """Power of a GPU that waits, with its part of a node of four."""
    parts = np.isin(fit.names, "idle") + np.isin(fit.names, "host") / 4
    half_W = np.sqrt(parts @ fit.conditional_covariance @ parts)
    half_W *= stats.t.ppf(0.95, fit.freedom[1])
    value_W = parts @ fit.point
    return {"value": value_W, "low": value_W - half_W, "high": value_W + half_W}


def test_a_run_that_waits_tells_what_waiting_draws(a100):
    """A world whose GPUs draw more while they wait than priors say, asked for a training that
    waits: so do the short runs that it is foretold from.
    """
    truth = worlds.CLUSTER | dict(host=300.0, fed=260.0, idle=72.0, image_J=0.05)
    make = partial(study_run, device="gpu")
    made = [make(devices=n, training_samples=n * 25_600) for n in (1, 4)]
    asked = [make(devices=4, system=a100.name, step_period_s=2.0)]
    fit = fits.fit_runs(worlds.taken("resnet50", a100, made, truth))
    best = next_run.best_candidate(next_run.worth_of_runs(fit, asked))["run"]
    more = worlds.taken("resnet50", a100, [*made, best], truth)
    told, before = map(waiting_W, (fits.fit_runs(more), fit))
    assert holds(told, 300 / 4 + 72)
    assert told["high"] - told["low"] < 0.7 * (before["high"] - before["low"])
    waits = more.work[-1]
    assert more.time_s[-1] > 0.8 * waits["updates"] * waits["step_period_s"]
