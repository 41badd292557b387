"""Probes are chosen by what they tell, made in time, and their fit forecasts the long run; remedies come as ranges."""

import dataclasses
import itertools
import json
import shlex
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from energynn import cli, config, records, studies
from energynn.cluster import local, slurm, systems
from energynn.forecast import advise, calibrate, predict, probe, report, runs, simulate

RESNET50 = ("--workload", "resnet50", "--system", "horeka-a100")


@pytest.fixture(scope="module")
def long_run():
    return config.make("resnet50", preset="paper", device="gpu", devices=256, system="horeka-a100")


def test_probes_vary_and_each_makes_the_forecast_surer(a100, fitted, long_run):
    found = probe.before(long_run, a100, (0, 0), fitted)
    probes = probe.expect(found, probe.options([long_run], a100, (0, 0)), minutes=5)
    assert 2 <= len(probes) <= 4 and sum(one.seconds for one in probes) <= 300
    spreads = [one.spread_after for one in probes]
    assert all(before > after for before, after in itertools.pairwise(spreads))
    for name in ("devices", "training_samples"):
        assert len({getattr(one.run, name) for one in probes}) > 1
    assert max(one.run.devices for one in probes) == 4  # one node
    with pytest.raises(ValueError, match="minutes: 0.5 are too few for two probes"):
        probe.expect(found, probe.options([long_run], a100, (0, 0)), minutes=0.5)


@pytest.mark.parametrize("workload, minutes", [("resnet50", 0), ("resnet50", 0.5), ("fourcastnet", 5)])
@pytest.mark.parametrize("most", [2, 4])
def test_the_minutes_that_a_refusal_names_are_enough(workload, minutes, most):
    site = systems.site("horeka-h100")
    asked = probe.targets(workload, site, [], {})
    samples = probe.samples_of(asked[0])
    found, among = probe.before(asked[0], site, samples, None), probe.options(asked, site, samples)
    with pytest.raises(ValueError, match="are too few for two probes; give ") as refused:
        probe.expect(found, among, minutes, most)
    enough = float(str(refused.value).split()[-1])
    made = probe.expect(found, among, enough, most)
    assert 2 <= len(made) <= most and sum(one.seconds for one in made) <= 60 * enough
    with pytest.raises(ValueError, match="the run is too small for two short ones that differ"):
        probe.expect(found, dataclasses.replace(among, runs=among.runs[:1]), enough, most)


@pytest.mark.parametrize("minutes", ["nan", "-5", "inf"])
def test_minutes_are_a_finite_number(capsys, minutes):
    with pytest.raises(SystemExit):
        cli.main(["forecast", "probe", *RESNET50, "--dry-run", "--minutes", minutes])
    assert f"argument --minutes: must be a finite number, at least 0, got {minutes}" in capsys.readouterr().err


def simulated(truth_of, monkeypatch, start_s=probe.START_S):
    """In place of the runs of this machine, and of its clock: records of the truth, which may change."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda: clock.now_s))

    def run_study(runs, runs_dir):
        (folder,) = simulate.write(truth_of(), runs, runs_dir, print)
        clock.now_s += start_s + records.read(folder)["training_time_s"]
        return []

    monkeypatch.setattr(local, "run_study", run_study)
    return clock


def test_probes_of_an_unknown_machine_forecast_the_long_run(fitted, monkeypatch, tmp_path):
    """Runs are simulated by the published fit; the probes know nothing of it."""
    site = dataclasses.replace(systems.site("local"), devices_per_node=4)
    truth = dataclasses.replace(fitted, site=dataclasses.replace(fitted.site, name="local"))
    simulated(lambda: truth, monkeypatch)
    run = config.make("resnet50", preset="paper", device="gpu", devices=4)
    probes = probe.make_here(probe.before(run, site, (0, 0), None), [run], tmp_path, site, minutes=15)
    told = probe.outcome(probes, tmp_path, [run], site)
    (row,), (expected,) = told["rows"], predict.rows(truth, [run])
    for name in ("time_h", "energy_kWh"):
        assert row[name]["value"] == pytest.approx(expected[name]["value"], rel=0.15)
    assert row["measured_time_h"] is None and "simulated" in row["provenance"] and not told["median_error_percent"]
    simulate.write(truth, [run], tmp_path, print)
    told = probe.outcome(probes, tmp_path, [run], site)
    (row,) = told["rows"]
    assert row["measured_time_h"] == pytest.approx(expected["time_h"]["value"], rel=0.1)
    assert told["median_error_percent"] == pytest.approx(abs(row["error_percent"]))


def test_minutes_that_were_too_few_here_are_named_and_enough(fitted, monkeypatch, tmp_path):
    """Starts take longer here than was thought: one probe is made, and its second would end too late."""
    site = dataclasses.replace(systems.site("local"), devices_per_node=4)
    truth = dataclasses.replace(fitted, site=dataclasses.replace(fitted.site, name="local"))
    run = config.make("resnet50", preset="paper", device="gpu", devices=4)
    found = probe.before(run, site, (0, 0), None)
    simulated(lambda: truth, monkeypatch, start_s=70)
    with pytest.raises(ValueError, match="minutes: 2 are too few for two probes here; give 3; what is made stays"):
        probe.make_here(found, [run], tmp_path, site, minutes=2)
    assert len(list((tmp_path / "local").iterdir())) == 1
    simulated(lambda: truth, monkeypatch, start_s=70)
    assert len(probe.make_here(found, [run], tmp_path, site, minutes=3)) == 2


CORES = dict(tau=3e-2, t_start=0.05, t_update=0.2, efficiency=0.4, kappa=0.25, host=8.0, fed=3.0, idle=2.0, image_J=0.1)


def cores(fitted, workload: str, seed: int):
    """A machine of two cores, of another speed by each seed; returns its truth, which differs by 6 % in each call."""
    chance = np.random.default_rng(seed)
    values = {name: value * np.exp(0.3 * chance.standard_normal()) for name, value in CORES.items()}
    values |= dict(t_update=values["t_update"] if workload == "resnet50" else 5e-3)
    given = {name: calibrate.Prior(value, 1.0, "known") for name, value in values.items()}
    site = runs.here(systems.site("local"), {"cores": 2}, on_gpu=False)
    samples = probe.samples_of(probe.targets(workload, site, [], {})[0])
    truth = dataclasses.replace(fitted, workload=workload, site=site, samples=samples, workers=0)

    def of_now():
        by = np.exp(0.06 * chance.standard_normal())
        times = {name: values[name] * by for name in ("tau", "t_start", "t_update")}
        point = calibrate.to_point(values | times | {"efficiency": values["efficiency"] / by})
        fit = dataclasses.replace(fitted.fit, reading="GPU-bound", priors=given, point=point, errors=np.zeros(2))
        return dataclasses.replace(truth, fits={"GPU-bound": fit})

    return of_now


def by_two_probes(fitted, workload: str, seed: int, monkeypatch, folder) -> dict:
    """What two probes of 100 s with their starts tell of the default study in a world, beside its facts."""
    truth_of = cores(fitted, workload, seed)
    site = truth_of().site
    asked = probe.targets(workload, site, [], {})
    assert len(asked) == {"resnet50": 4, "fourcastnet": 5}[workload] and {run.devices for run in asked} == {1, 2}
    clock = simulated(truth_of, monkeypatch)
    found = probe.before(asked[0], site, probe.samples_of(asked[0]), None)
    probes = probe.make_here(found, asked, folder, site, minutes=100 / 60, most=2)
    assert {one.run.devices for one in probes} == {1, 2} and clock.now_s <= 140  # a world may be slower than expected
    for run in asked:
        simulate.write(truth_of(), [run], folder, print)
    told = probe.outcome(probes, folder, asked, site)
    assert told["training_s"] <= 100 and all(row["measured_runs"] == 1 for row in told["rows"])
    said = report.probes({"forecast": told, "probes": probe.as_json(probes)})
    assert f"median error of the {len(asked)} configurations" in said
    return told


@pytest.mark.parametrize("workload", ["resnet50", "fourcastnet"])
@pytest.mark.parametrize("number", [1, pytest.param(40, marks=pytest.mark.nightly)])
def test_two_probes_of_100_s_forecast_the_default_study(fitted, monkeypatch, tmp_path, workload, number):
    """Nine worlds in ten are forecast within 15 % (median), and facts lie inside the intervals."""
    told = [by_two_probes(fitted, workload, seed, monkeypatch, tmp_path / str(seed)) for seed in range(number)]
    assert np.quantile([of["median_error_percent"] for of in told], 0.9) <= 15
    rows = [row for of in told for row in of["rows"]]
    inside = [row["time_h"]["low"] <= row["measured_time_h"] <= row["time_h"]["high"] for row in rows]
    assert np.mean(inside) >= 0.8


def test_a_probe_finds_the_fact_by_the_device_that_it_had(fitted, tmp_path):
    """A run that asked for any device is the fact of one that asks for a core, if it ran on one."""
    truth = cores(fitted, "resnet50", 0)()
    simulate.write(truth, [config.make("resnet50", device="auto", devices=2, repeat=3)], tmp_path, print)
    (found,) = runs.times_s(tmp_path, "resnet50", "local", set())
    assert found == config.make("resnet50", device="cpu", devices=2)
    assert runs.without_repeats(probe.targets("resnet50", truth.site, [], {"devices": 2})[0]).device in ("cpu", "gpu")


def test_named_studies_are_forecast_and_their_repeats_once(a100):
    asked = probe.targets("resnet50", a100, ["R4"], {})
    assert [run.devices for run in asked] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    with pytest.raises(ValueError, match="study: R4 has no run of fourcastnet"):
        probe.targets("fourcastnet", a100, ["R4"], {})
    (run,) = probe.targets("fourcastnet", a100, [], {"devices": 8})
    assert run.preset == "paper" and run.devices == 8
    asked = probe.targets("fourcastnet", systems.site("local"), [], {})
    assert [run.stage for run in asked] == ["pretrain"] * 3 + ["finetune"] * 2  # which probes cannot be


def test_probes_become_a_study_that_can_be_submitted(a100, fitted, long_run, tmp_path):
    found = probe.before(long_run, a100, (0, 0), fitted)
    probes = probe.expect(found, probe.options([long_run], a100, (0, 0)), minutes=5)
    probe._write_study(tmp_path / "probes.py", [one.run for one in probes])
    (runs,) = studies.find([str(tmp_path / "probes.py")], "horeka-a100").values()
    assert runs == [one.run for one in probes]


def test_probes_are_handed_to_slurm_and_the_commands_that_are_told_forecast(fitted, monkeypatch, tmp_path, capsys):
    """From the submission to the forecast of the long run; in place of the jobs, the model makes the records."""
    begun = []

    def slurm_says(*command):
        begun.append(command)
        return "41\n" if command[0] == "sbatch" else ""

    monkeypatch.setattr(slurm, "call", slurm_says)
    monkeypatch.setattr(probe, "REPOSITORY", tmp_path)
    given = {"dataset": "synthetic", "training_samples": 1000, "validation_samples": 200}
    given |= {"devices": 4, "local_batch_size": 64}
    parameters = [word for name, value in given.items() for word in ("-p", name, str(value))]
    words = ["probe", *RESNET50, "--runs-dir", str(tmp_path / "own runs"), *parameters, "--json"]
    assert cli.main(["forecast", *words]) == 0
    told = capsys.readouterr()
    probes = json.loads(told.out)["probes"]
    (submitted,) = studies.find([str(tmp_path / "build" / "probe_resnet50_horeka-a100.py")], "horeka-a100").values()
    assert [config.run_id(run) for run in submitted] == [one["run_id"] for one in probes]
    assert [command[0] for command in begun].count("sbatch") >= 1
    for one in probes:
        assert (tmp_path / "own runs" / "horeka-a100" / one["run_id"] / "job" / "submission.json").is_file()
    lines = told.err.splitlines()
    commands = lines[lines.index("when the jobs are done, these fit and forecast:") + 1 :]
    simulate.write(fitted, submitted, tmp_path / "made", print)
    for folder in (tmp_path / "made" / "horeka-a100").iterdir():
        shutil.copytree(folder, tmp_path / "own runs" / "horeka-a100" / folder.name, dirs_exist_ok=True)
    capsys.readouterr()
    for command in commands:
        assert cli.main([*shlex.split(command)[1:], "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
    (row,), (expected,) = told["rows"], predict.rows(fitted, probe.targets("resnet50", fitted.site, [], given))
    assert row["run_id"] == expected["run_id"] and row["time_h"]["low"] < row["time_h"]["high"]
    assert row["time_h"]["value"] == pytest.approx(expected["time_h"]["value"], rel=0.3)


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
    many = config.replace(run, devices=256, global_batch_size=65_536, persistent_workers=True)
    rows = {row["remedy"]: row for row in advise.rows(fitted, many)}
    assert "workers that persist" not in rows
    assert 0 < rows["compressed gradients"]["time_saving"]["high"] < 0.02  # half of what the all-reduce takes


def test_no_probe_asks_for_more_samples_than_there_are():
    run = config.make("resnet50", preset="smoke", devices=2)
    asked = [short.training_samples for short in probe.candidates([run], systems.site("local"))]
    assert 900 < max(asked) <= 1000 and min(asked) > 0
    run = config.make("resnet50", preset="paper", system="horeka-a100")
    asked = [short.training_samples for short in probe.candidates([run], systems.site("horeka-a100"))]
    assert max(asked) == max(probe.BATCHES) * run.local_batch_size, "ImageNet has enough for all"
