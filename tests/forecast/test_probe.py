"""Probes are chosen by what they tell, made in time, and their fit forecasts the long run."""

import dataclasses
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from energynn import config, records, studies
from energynn.cluster import local, systems
from energynn.forecast import fit as fits
from energynn.forecast import predict, probe, runs, simulate
from tests.forecast import worlds


@pytest.fixture(scope="module")
def long_run():
    return config.make("resnet50", preset="paper", device="gpu", devices=256, system="horeka-a100")


def test_probes_vary_within_the_minutes(a100, long_run):
    probes = probe.planned(probe.before(long_run, a100), long_run, minutes=5)
    assert 2 <= len(probes) <= 4 and sum(one.seconds for one in probes) <= 300
    assert len({one.run for one in probes}) == len(probes)
    assert max(one.run.devices for one in probes) == 4  # one node
    assert max(one.run.training_samples for one in probes) <= long_run.epoch().training_samples


@pytest.mark.parametrize("minutes", [0.1, 0.55])
def test_too_few_minutes_are_refused(minutes):
    site = systems.site("horeka-h100")
    asked = probe.target("fourcastnet", site, {})
    with pytest.raises(ValueError, match="are too few for two probes; give more"):
        probe.planned(probe.before(asked, site), asked, minutes)


CORES = dict(tau=3e-2, evaluation=1 / 3, t_start=0.05, t_update=0.2, efficiency=0.4, kappa=0.25, kappa_nodes=0.0)
CORES |= dict(kappa_storage=0.0, fill=0.0, host=8.0, fed=3.0, idle=2.0, image_J=0.1)


def cores(workload: str, seed: int):
    """A machine of two cores, of another speed by each seed; returns fits that differ by 6 %."""
    chance = np.random.default_rng(seed)
    values = {name: value * np.exp(0.3 * chance.standard_normal()) for name, value in CORES.items()}
    values |= dict(t_update=values["t_update"] if workload == "resnet50" else 5e-3)
    site = dataclasses.replace(runs.here(systems.site("local"), {"cores": 2}, on_gpu=False), file="")
    asked = probe.target(workload, systems.site("local"), {"devices": 2})
    seen = worlds.taken(workload, site, [asked], values, samples=(160, 16))
    whole = fits.unfitted(seen)
    at = np.array([np.log(values[of]) if fits.PARAMETERS[of].is_log else values[of] for of in whole.names])

    def of_now():
        by = 0.06 * chance.standard_normal()
        times = [by * (of in ("tau", "t_start", "t_update")) for of in whole.names]
        return dataclasses.replace(whole, point=at + times, errors=np.full(2, 1e-9))

    return asked, of_now


@pytest.mark.parametrize("workload", ["resnet50", "fourcastnet"])
@pytest.mark.parametrize("number", [2, pytest.param(40, marks=pytest.mark.nightly)])
def test_two_probes_of_100_s_forecast_the_default_study(monkeypatch, tmp_path, workload, number):
    """Nine worlds in ten are forecast within 15 % (median), and facts lie inside the intervals."""
    medians, held = [], []
    for seed in range(number):
        asked, of_now = cores(workload, seed)
        clock, folder = SimpleNamespace(now_s=0.0), tmp_path / str(seed)
        monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda clock=clock: clock.now_s))

        def run_study(short, runs_dir, of_now=of_now, clock=clock):
            (made,) = simulate.write(of_now(), short, runs_dir)
            clock.now_s += probe.START_S + records.read(made)["training_time_s"]
            return []

        monkeypatch.setattr(local, "run_study", run_study)
        before = probe.before(asked, of_now().runs.site)
        probes, fit = probe.make_here(before, asked, folder, minutes=100 / 60)
        assert len(probes) >= 2 and clock.now_s <= 140  # a world may be slower than expected
        off = []
        for row, run in zip(predict.rows(fit, [asked]), [asked], strict=True):
            (made,) = simulate.write(of_now(), [run], folder)
            told, fact = row["time_h"], records.read(made)["training_time_s"] / 3600
            off.append(abs(100 * (told["value"] / fact - 1)))
            held.append(told["low"] <= fact <= told["high"])
        medians.append(np.median(off))
    assert np.quantile(medians, 0.9) <= 15 and np.mean(held) >= 0.8


def test_the_preset_is_forecast(a100):
    run = probe.target("fourcastnet", a100, {"devices": 8})
    assert run.preset == "paper" and run.devices == 8


def test_probes_are_handed_to_the_cluster_as_a_study(a100, fitted, long_run, monkeypatch, tmp_path):
    """From the commands to the forecast; in place of the jobs, the model makes the records."""
    monkeypatch.setattr(probe, "REPOSITORY", tmp_path)
    probes = probe.planned(probe.before(long_run, a100), long_run, 5)
    submit, fit = (line.split() for line in probe.hand_over(probes, a100).splitlines())
    assert submit[:2] == ["energynn", "submit"] and fit[1:3] == ["forecast", "fit"]
    (submitted,) = studies.find([submit[2]], a100.name).values()
    assert submitted == [one.run for one in probes]
    simulate.write(fitted, submitted, tmp_path / "own")
    seen = runs.own(runs.valid(tmp_path / "own", a100), "resnet50", a100)
    (row,), (expected,) = (predict.rows(of, [long_run]) for of in (fits.make(seen), fitted))
    assert row["time_h"]["value"] == pytest.approx(expected["time_h"]["value"], rel=0.3)


def test_another_system_gives_the_priors(a100, fitted, published):
    seen = published.only(published.work.devices == 4)
    slower = worlds.with_results(seen, 2 * seen.time_s, seen.power_W)
    fit = fits.make(msgspec.structs.replace(slower, like=published))
    assert fit.values["tau"] == pytest.approx(2 * fitted.values["tau"], rel=0.1)
