"""energynn forecast as a person uses it: fit, predict, plan, simulate; and one line for what cannot be done."""

import contextlib
import dataclasses
import functools
import json
import re
import sys

import pytest

from energynn import cli, config, records
from energynn.cluster import systems
from energynn.files import REPOSITORY
from energynn.forecast import calibration, predict, report, simulate
from tests.test_bad_input import ILL_TYPED, spoil

QUANTITIES = ("time_h", "gpu_hours", "energy_kWh", "energy_gpu_kWh", "energy_cpu_kWh", "energy_ram_kWh")
RESNET50 = ("--workload", "resnet50", "--system", "horeka-a100")


@pytest.fixture(scope="module")
def fit_file(fitted, tmp_path_factory):
    path = tmp_path_factory.mktemp("fit") / "fit.json"
    calibration.write(path, fitted, {})
    return path


def answer(capsys, *words) -> dict:
    """What a command prints with --json."""
    assert cli.main(["forecast", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *words) -> str:
    """The line with which a command refuses."""
    assert cli.main(["forecast", *map(str, words)]) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("energynn: ")]
    assert len(lines) == 1
    return lines[0]


def test_fit_then_predict(capsys, tmp_path):
    told = answer(capsys, "fit", "--published", *RESNET50, "--max-devices", "4", "--out", tmp_path / "fit.json")
    parameters = told["fits"]["loader-bound"]["parameters"]
    assert told["provenance"] == "published" and told["number_of_runs"] == 6 and len(parameters) == 10
    for known in parameters.values():
        assert known["low"] < known["value"] < known["high"] and known["unit"] and known["source"] and known["meaning"]
    assert set(told["errors"]) == {"model", "constant per sample", "four coefficients"}
    rows = answer(capsys, "predict", "R4", "--fit", tmp_path / "fit.json")["rows"]
    assert [row["devices"] for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    for row in rows:
        assert {"local_batch_size", "global_batch_size", "outside", "time_causes_h", "power_causes_W"} <= set(row)
        for name in QUANTITIES:
            assert row[name]["low"] < row[name]["value"] < row[name]["high"]
        assert sum(row["time_causes_h"].values()) == pytest.approx(row["time_h"]["value"])
        parts = [row[f"energy_{part}_kWh"]["value"] for part in ("gpu", "cpu", "ram")]
        assert sum(parts) == pytest.approx(row["energy_kWh"]["value"])
        watts = 1000 * row["energy_kWh"]["value"] / row["gpu_hours"]["value"]
        assert sum(row["power_causes_W"].values()) == pytest.approx(watts)
        assert row["provenance"] == "estimated by a model fitted to published runs"
        assert any(words.startswith("devices ") for words in row["outside"]) == (row["devices"] > 4)


def test_tables_have_the_answer_first(capsys, fit_file):
    assert cli.main(["forecast", "predict", "R2", "--fit", str(fit_file)]) == 0
    head, first, *rest, last = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["devices", "LBS", "GBS"] and first.split()[:3] == ["1", "256", "256"]
    assert last == "estimated by a model fitted to published runs, intervals at 90 %"
    assert rest[-1] == "of 100 epochs of 1,281,167 samples"
    assert cli.main(["forecast", "plan", *RESNET50, "--fit", str(fit_file), "--deadline-h", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[row].split(":")[0].strip() for row in (2, 4, 6)] == ["fastest", "most frugal", "balanced"]
    assert "of 100 epochs of 1,281,167 samples" in lines


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "R1", "--fit", "FIT"),
        ("predict", "-p", "devices", "512", "--fit", "FIT"),
        ("plan", *RESNET50, "--fit", "FIT", "--deadline-h", "3"),
        ("advise", *RESNET50, "--fit", "FIT", "-p", "devices", "4"),
        ("probe", *RESNET50, "--dry-run"),
        ("held-out", "--runs-dir", "RUNS", "--system", "horeka-a100"),
        ("fit", "--runs-dir", "RUNS", *RESNET50, "--out", "own.json"),
    ],
)
def test_answers_fit_a_terminal_of_80_columns(capsys, fit_file, simulated, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)  # so that no path is long
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    places = {"FIT": tmp_path / "fit.json", "RUNS": tmp_path / "runs"}
    places["FIT"].symlink_to(fit_file)
    places["RUNS"].symlink_to(simulated)
    assert cli.main(["forecast", *(places[word].name if word in places else word for word in words)]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") > 3 and max(map(len, said.splitlines())) <= 80, said


def test_plan_answers_on_a_fresh_clone(capsys):
    told = answer(capsys, "plan", *RESNET50, "--devices", "1-64")
    assert set(told["choices"]) == {"fastest", "most frugal", "balanced"} and told["limits"] == {
        "global_batch_size": 8192
    }
    assert all(choice["reason"] for choice in told["choices"].values())
    assert max(row["devices"] for row in told["pareto"]) == 64


def test_predict_parameters_and_remedies(capsys, fit_file):
    words = ("predict", "-p", "devices", "4", "-p", "local_batch_size", "256", "--fit", fit_file)
    (plain,) = answer(capsys, *words)["rows"]
    (once,) = answer(capsys, *words, "-p", "evaluate_training_set", "False")["rows"]
    saved = [1 - once["time_h"][end] / plain["time_h"]["value"] for end in ("low", "high")]
    # Loader-bound the second pass is half of the time, GPU-bound a quarter: a range, and it says so.
    assert saved[0] > 0.45 and saved[1] < 0.3
    assert "the interval covers loader-bound and GPU-bound" in " ".join(once["outside"])
    (fewer,) = answer(capsys, *words, "-p", "loader_workers", 2)["rows"]  # twice the time, or as before
    assert fewer["time_h"]["low"] < 1.05 * plain["time_h"]["value"]
    assert fewer["time_h"]["high"] > 1.8 * plain["time_h"]["value"]
    (other,) = answer(capsys, "predict", "-p", "precision", "bfloat16", "--fit", fit_file)["rows"]
    assert "precision bfloat16: calibrated float32; its effect is not known" in other["outside"]


@pytest.mark.parametrize("is_earlier", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "mark"),
    [
        ("accumulation_steps", 8, "accumulation_steps 8: calibrated 1 to 1"),
        ("gradient_compression", "bfloat16", "gradient_compression bfloat16: calibrated none; the all-reduce is "),
        ("gradient_noise_steps", 1, "gradient_noise_steps 1: calibrated 0; what it takes is left out"),
        ("checkpoint_period_s", 1.0, "checkpoint_period_s 1.0: calibrated 600.0; what checkpoints take is left out"),
    ],
)
def test_what_no_calibrated_run_had_is_marked(capsys, fitted, tmp_path, is_earlier, name, value, mark):
    """By predict and by plan, also with a fit that was written before it told of them."""
    if is_earlier:
        ranges = {of: ends for of, ends in fitted.ranges.items() if of != "accumulation_steps"}
        fields = {of: values for of, values in fitted.fields.items() if of not in calibration.ASSUMED}
        assert len(ranges) == len(fitted.ranges) - 1 and len(fields) == len(fitted.fields) - 3
        fitted = dataclasses.replace(fitted, ranges=ranges, fields=fields)
    calibration.write(tmp_path / "fit.json", fitted, {})
    sizes = ("-p", "devices", 64, "-p", "local_batch_size", 16, "--fit", tmp_path / "fit.json")
    (plain,) = answer(capsys, "predict", *sizes)["rows"]
    (changed,) = answer(capsys, "predict", *sizes, "-p", name, value)["rows"]
    assert plain["outside"] == [] and [words.startswith(mark) for words in changed["outside"]] == [True]
    if name == "gradient_noise_steps":  # a plan begins with one local batch, which has none to compare with
        return
    changes = ("-p", name, value, "--fit", tmp_path / "fit.json", "--devices", "64")
    for choice in answer(capsys, "plan", *RESNET50, *changes)["choices"].values():
        assert any(words.startswith(mark) for words in choice["outside"])


def test_what_calibrated_runs_had_is_not_marked(published, fitted):
    """A fit to runs of several accumulation steps, with compression, tells of those, and of none else."""
    had = {"accumulation_steps": 4, "gradient_compression": "bfloat16", "checkpoint_period_s": 30.0}
    sizes = {"global_batch_size": 4 * published.configs[0].global_batch_size}
    configs = [config.replace(published.configs[0], **had, **sizes), *published.configs[1:]]
    seen = dataclasses.replace(published, configs=configs)
    made = dataclasses.replace(calibration.make(seen), fits=fitted.fits)
    plain = {"devices": 16, "local_batch_size": 64}
    for given in ({}, had, {"accumulation_steps": 2}):
        (row,) = predict.rows(made, predict.asked(made, None, plain | given))
        assert row["outside"] == []
    (row,) = predict.rows(made, predict.asked(made, None, plain | {"accumulation_steps": 8}))
    assert row["outside"] == ["accumulation_steps 8: calibrated 1 to 4"]


def test_persistent_workers_are_marked_in_both_directions(fitted):
    """With them and without them, where the calibrated runs had the other."""
    plain = {"devices": 16, "local_batch_size": 64}
    for before, asked in ((False, True), (True, False)):
        made = dataclasses.replace(fitted, config=config.replace(fitted.config, persistent_workers=before))
        (row,) = predict.rows(made, predict.asked(made, None, plain | {"persistent_workers": asked}))
        assert "persistent workers: all of a start is taken as saved" in " ".join(row["outside"])


def test_forecasts_from_short_runs_say_of_which_training_they_are(capsys, fitted, tmp_path):
    """The calibrated run has four epochs, and its data set says how many samples there are."""
    short = config.replace(fitted.config, dataset="photographs", epochs=4, training_samples=0)
    made = dataclasses.replace(fitted, config=short, samples=(640_000, 64_000))
    calibration.write(tmp_path / "fit.json", made, {})
    fit = ("--fit", tmp_path / "fit.json")
    planned = answer(capsys, "plan", *RESNET50, *fit)
    (row,) = answer(capsys, "predict", "-p", "devices", 64, *fit)["rows"]
    for each in (row, *planned["pareto"], *planned["choices"].values()):
        assert (each["epochs"], each["dataset_samples"]) == (4, 640_000)
    for words in (("plan", *RESNET50), ("predict", "-p", "devices", 64)):
        assert cli.main(["forecast", *map(str, (*words, *fit))]) == 0
        assert "of 4 epochs of 640,000 samples\n" in capsys.readouterr().out
    assert cli.main(["forecast", "predict", "R4", *map(str, fit), "-p", "epochs", "100"]) == 0
    assert "of 100 epochs of 5,004 to 1,281,167 samples\n" in capsys.readouterr().out


@pytest.fixture(scope="module")
def simulated(fitted, tmp_path_factory):
    """Records of R5, and of R4 on up to four GPUs."""
    from energynn import studies

    out = tmp_path_factory.mktemp("simulated")
    runs = [run for name in ("R4", "R5") for run in studies.PAPER[name]("horeka-a100")]
    few = [run for run in runs if run.repeat == 0 and run.devices <= 8]
    simulate.write(fitted, few, out, print)
    return out


def test_simulated_records_pass_the_check_as_what_they_are(simulated, fitted, capsys):
    assert cli.main(["check", str(simulated)]) == 0
    assert (
        "8 records" in (line := capsys.readouterr().out)
        and "0 of them valid as evidence, 8 simulated; 0 faults" in line
    )
    found = [records.read(folder) for folder in records.run_dirs(simulated)]
    assert len(found) == 8 and all(record["valid"] for record in found)
    for record in found:
        assert record["energy_total_provenance"] == "simulated" and record["launcher"] == "simulated"
        assert "Nobody made this run" in record["method"] and "simulated" in record["device_name"]
        assert record["nodes"] == -(-record["devices"] // 4) and record["sockets"] == 2 * record["nodes"]
    rows = {
        row["run_id"]: row for row in predict.rows(fitted, [config.from_dict(record["config"]) for record in found])
    }
    ratios = [record["device_hours_training"] / rows[record["run_id"]]["gpu_hours"]["value"] for record in found]
    assert all(0.9 < ratio < 1.1 and ratio != pytest.approx(1, abs=1e-6) for ratio in ratios)  # with scatter


def test_own_records_are_fitted_and_say_where_they_come_from(simulated, capsys, tmp_path):
    told = answer(capsys, "fit", "--runs-dir", simulated, *RESNET50, "--out", tmp_path / "own.json")
    assert told["provenance"] == "simulated" and told["number_of_runs"] == 8
    assert told["fits"]["loader-bound"]["parameters"]["tau"]["value"] == pytest.approx(1.09e-3, rel=0.1)
    (row,) = answer(capsys, "predict", records.run_dirs(simulated)[0], "--fit", tmp_path / "own.json")["rows"]
    assert row["provenance"].endswith("simulated runs") and row["energy_cpu_kWh"]["value"] > 0


def test_forecasts_stand_beside_the_facts(simulated, capsys, tmp_path):
    words = ("held-out", "--runs-dir", simulated, "--system", "horeka-a100")
    (row,) = answer(capsys, *words, "--max-devices", "4")["recipes"]
    assert row["fitted_to_runs"] == 6 and {of["devices"] for of in row["forecasts"]} == {8}
    for of in row["forecasts"]:
        for name in ("time_h", "gpu_hours", "energy_kWh"):
            assert of[name]["is_inside"] == (of[name]["low"] <= of[name]["fact"] <= of[name]["high"])
            assert of[name]["value"] == pytest.approx(of[name]["fact"], rel=0.15)
        assert of["gpu_hours"]["fact"] == pytest.approx(8 * of["time_h"]["fact"])
    assert cli.main(["forecast", *map(str, words)]) == 0
    text = capsys.readouterr().out
    assert text.split()[:3] == ["forecast", "(90", "%)"] and "fitted to 2 configuration(s) on at most 1" in text
    assert "kappa: hardly informed" in text and "a full node would tell" in text


def test_runs_on_one_device_that_do_not_vary_are_no_failure(simulated, capsys, tmp_path):
    """It says which parameters they leave open and which run would help; the reproduction goes on."""
    import shutil

    shutil.copytree(simulated, tmp_path / "runs")
    for folder in records.run_dirs(tmp_path / "runs"):
        record = records.read(folder)
        if record["devices"] > 2 or record["config"]["training_samples"] > 5005 * record["devices"]:
            shutil.rmtree(folder)
    assert cli.main(["forecast", "held-out", "--runs-dir", str(tmp_path / "runs"), "--system", "horeka-a100"]) == 0
    text = capsys.readouterr().out
    assert "tau and t_start cannot be told apart. Add a run with another number of training_samples" in text
    assert "no recipe has valid runs on local on 1 device(s) and on more" in refusal(
        capsys, "held-out", "--runs-dir", tmp_path / "runs", "--system", "local"
    )


def test_simulate_makes_the_same_again_and_spares_real_runs(capsys, fit_file, tmp_path):
    study = tmp_path / "one.py"
    study.write_text(
        "from energynn import config\n"
        "def study(system):\n"
        "    return [config.make('resnet50', preset='paper', device='gpu', devices=8, system=system)]\n"
    )
    words = ("simulate", study, "--fit", fit_file, "--out", tmp_path / "out")
    (folder,) = answer(capsys, *words)["runs"]
    before = records.read(tmp_path / folder)
    answer(capsys, *words)
    assert records.read(tmp_path / folder)["training_time_s"] == before["training_time_s"]
    for path in (tmp_path / folder).iterdir():  # as where the call was killed before it wrote anything
        path.unlink()
    answer(capsys, *words)
    assert records.read(tmp_path / folder)["training_time_s"] == before["training_time_s"]
    intent = tmp_path / folder / "run.json"
    intent.write_text(intent.read_text().replace('"launcher": "simulated"', '"launcher": "mpirun"'))
    assert "is there and was not simulated; choose another --out" in refusal(capsys, *words)


def test_simulate_writes_all_runs_or_none(capsys, fitted, tmp_path):
    """Where the system is too small for the last ones, the first are not made either, and no folder is left."""
    site = dataclasses.replace(fitted.site, nodes=8)
    calibration.write(tmp_path / "fit.json", dataclasses.replace(fitted, site=site), {})
    words = ("simulate", "R4", "--fit", tmp_path / "fit.json", "--out", tmp_path / "out")
    for _ in range(2):
        assert "devices: 64 asked, horeka-a100 has 32" in refusal(capsys, *words)
        assert not (tmp_path / "out").exists()


def test_a_simulated_node_has_a_sensor_for_each_gpu(fitted, tmp_path, monkeypatch):
    """Eight GPUs may draw more together than a sensor can show; what no record can have is not written."""
    eight = dataclasses.replace(fitted, site=dataclasses.replace(fitted.site, devices_per_node=8))
    runs = [config.make("resnet50", preset="paper", device="gpu", devices=devices) for devices in (1, 8, 12)]
    monkeypatch.setattr(simulate, "_drawn", lambda *of: (3600.0, {"gpu": 500.0, "cpu": 100.0}))
    for run, folder in zip(runs, simulate.write(eight, runs, tmp_path / "out", print), strict=True):
        record = records.read(folder)
        assert record["valid"] and record["energy_gpu_J"] == pytest.approx(run.devices * 500 * 3600)
        assert record["energy_cpu_J"] == pytest.approx(run.devices * 100 * 3600)
    assert records.check(tmp_path / "out") == []
    few_W, many_W = (3600.0, {"gpu": 500.0, "cpu": 100.0}), (3600.0, {"gpu": 4000.0, "cpu": 100.0})
    monkeypatch.setattr(simulate, "_drawn", lambda made, run, work: many_W if run.devices == 8 else few_W)
    with pytest.raises(ValueError, match="none/horeka-a100/.*-n8-.*: gpu_0_.* more than 3000 W.*; correct the powers"):
        simulate.write(eight, runs, tmp_path / "none", print)


def test_a_fit_may_go_into_a_folder_that_is_not_there_yet(fitted, tmp_path):
    calibration.write(tmp_path / "build" / "fits" / "fit.json", fitted, {})
    assert calibration.read(tmp_path / "build" / "fits" / "fit.json").number_of_runs == fitted.number_of_runs


@pytest.mark.parametrize("workload, others", [("resnet50", False), ("fourcastnet", True)])
def test_published_runs_of_a_copied_system_count_once(tmp_path, workload, others):
    """A file of one's own for the same system: its published runs are not another system's."""
    (tmp_path / "mine.toml").write_text((REPOSITORY / "systems" / "horeka-a100.toml").read_text())
    seen, other = calibration.published(workload, systems.site(str(tmp_path / "mine.toml")))
    assert seen.site.name == "mine" and (other is not None) == others
    assert not others or other.site.name == "horeka-h100"


def test_energies_that_are_estimates_are_not_fitted(capsys, tmp_path):
    """The committed runs of one machine have no sensors; they differ in their updates only."""
    (tmp_path / "large-batch.toml").write_text('scheduler = "local"\ndevices_per_node = 2\n')
    words = ("--runs-dir", REPOSITORY / "runs", "--workload", "resnet50", "--system", tmp_path / "large-batch.toml")
    told = answer(capsys, "fit", *words, "--out", tmp_path / "fit.json")
    assert told["notes"] == ["energies are estimated: a fit of the time alone"]
    assert "fed" not in told["fits"]["loader-bound"]["parameters"]
    assert any("t_start: hardly informed" in line for line in told["fits"]["loader-bound"]["flags"])
    parameters = ("-p", "training_samples", "960", "-p", "epochs", "4")
    (row,) = answer(capsys, "predict", *parameters, "--fit", tmp_path / "fit.json")["rows"]
    assert row["energy_kWh"]["value"] is None and row["time_h"]["low"] < row["time_h"]["value"]
    line = refusal(capsys, "simulate", "R1", "--fit", tmp_path / "fit.json", "--out", tmp_path / "out")
    assert "of the time alone" in line
    # Records of an earlier version are taken as the fit took them.
    folders = records.run_dirs(REPOSITORY / "runs" / "large-batch")
    for folder in folders:
        (row,) = answer(capsys, "predict", folder, "--fit", tmp_path / "fit.json")["rows"]
        assert row["global_batch_size"] == records.read(folder)["config"]["global_batch_size"] and not row["outside"]
    of = ("--workload", "resnet50", "--system", tmp_path / "large-batch.toml", "--fit", tmp_path / "fit.json")
    assert len(folders) == 24 and answer(capsys, "advise", *of, folders[0])["remedies"]
    # Their machine has two cores, and is one.
    assert {row["devices"] for row in answer(capsys, "plan", *of)["pareto"]} == {1, 2}
    of_more = ("predict", "-p", "devices", "64", "--fit", tmp_path / "fit.json")
    assert "devices: 64 asked, large-batch has 2; choose at most 2" in refusal(capsys, *of_more)
    assert "devices: 1000 asked, large-batch has 2" in refusal(capsys, "plan", *of, "--devices", "1-1000")


def test_damaged_and_foreign_fits_are_refused(capsys, fit_file, tmp_path):
    other = tmp_path / "other.json"
    for text, words in (
        (fit_file.read_text()[:500], "cannot be read as a fit"),
        (fit_file.read_text().replace("loader-bound", "loader-bond"), "was damaged or changed after it was written"),
        ('{"schema": "energynn-record/2"}', "is no fit of this version"),
        ("[]", "is no fit of this version"),
    ):
        other.write_text(text)
        assert words in refusal(capsys, "predict", "R1", "--fit", other)
    assert "there is no such fit; `energynn forecast fit` writes one" in refusal(
        capsys, "predict", "R1", "--fit", tmp_path / "missing.json"
    )
    words = ("plan", "--workload", "fourcastnet", "--system", "horeka-a100", "--fit", fit_file)
    assert "is a fit of resnet50, not of fourcastnet" in refusal(capsys, *words)
    words = ("plan", "--workload", "resnet50", "--system", "slurm", "--fit", fit_file)
    assert "is a fit of resnet50 on horeka-a100, not on slurm" in refusal(capsys, *words)
    assert "the fit is of resnet50, the run of fourcastnet" in refusal(capsys, "predict", "F1", "--fit", fit_file)


@pytest.mark.parametrize("what", ILL_TYPED)
def test_an_ill_typed_file_is_one_line(capsys, fit_file, tmp_path, what):
    """A fit, one of another system's, the file of a run to forecast, and of one to simulate anew."""
    path, run = tmp_path / "fit.json", tmp_path / "run" / "run.json"
    run.parent.mkdir()
    for file in (path, run):
        file.touch()
        spoil(file, what, ILL_TYPED[what])
    line = refusal(capsys, "predict", "R1", "--fit", path)
    assert str(path) in line and len(line) < 500 and "`energynn forecast fit` writes one" in line
    words = ("fit", "--published", *RESNET50, "--like", path, "--out", tmp_path / "out.json")
    assert str(path) in refusal(capsys, *words)
    line = refusal(capsys, "predict", run.parent, "--fit", fit_file)
    assert str(run.parent) in line and len(line) < 500 and "give a" in line
    assert str(run.parent) in refusal(capsys, "advise", *RESNET50, "--fit", fit_file, run.parent)
    with pytest.raises(ValueError, match="was not simulated; choose another --out"):
        simulate._make_room(run.parent)


FOR_PEOPLE = {"flags", "value", "low", "high", "unit", "prior_is_relative", "contraction", "meaning"}


def parts(values: dict, at=()):
    """Where each part of a fit lies that is read again."""
    for name, value in values.items():
        if name not in FOR_PEOPLE and (*at, name) != ("errors",):
            yield (*at, name)
            yield from parts(value, (*at, name)) if isinstance(value, dict) else ()


def write_changed(path, content: dict, at: tuple, *value) -> None:
    """Write a fit with one part of another type, or without it, and with the right checksum."""
    content = json.loads(json.dumps(content))
    *folders, last = at
    place = functools.reduce(lambda of, name: of[name], folders, content)
    place.pop(last)
    if value:
        (place[last],) = value
    path.write_text(json.dumps(content | {"sha256": config.digest(content)}))


def test_every_part_of_a_fit_is_there_and_of_its_type(fit_file, tmp_path):
    content = json.loads(fit_file.read_text())
    del content["sha256"]
    path, defaults = tmp_path / "fit.json", {"fields", "site", "watts"}  # may lack some of what a fit tells of them
    needed = {"name", "scheduler", "devices_per_node"}
    line = re.escape(str(path)) + ".*; `energynn forecast fit` writes one(: .+)?$"
    for at in parts(content):
        write_changed(path, content, at)
        if len(at) == 2 and at[0] in defaults and at[1] not in needed or at[-1] == "accumulation_steps":
            with contextlib.suppress(ValueError):
                assert calibration.read(path)
        else:
            with pytest.raises(ValueError, match=line):
                calibration.read(path)
        value = content
        for name in at:
            value = value[name]
        write_changed(path, content, at, 1 if isinstance(value, str | list | dict) else "x")
        with pytest.raises(ValueError, match=line):
            calibration.read(path)


@pytest.mark.parametrize(
    "at, value, says",
    [
        (("fits",), {}, "loader-bound must be of the kind table, is absent"),
        (("fits", "GPU-bound", "point"), ["x"] * 10, 'point must be 10 numbers, is ["x", '),
        (("fits", "loader-bound", "covariance"), [[1.0]], "covariance must be 10 x 10 numbers, is [[1.0]]"),
        (("fits", "loader-bound", "covariance"), [[0.0] * 10] * 10, "Matrix is not positive definite"),
        (("fits", "loader-bound", "errors"), [0.1, float("inf")], "errors must be 2 numbers"),
        (("fits", "loader-bound", "freedom"), [0, 1], "errors and freedom must be more than 0"),
        (("fits", "loader-bound", "errors"), [0.1, 1e3], "errors at most 10"),
        (("fits", "loader-bound", "point"), [1e308] * 10, "point: logarithms of parameters must be -100 to 100"),
        (("ranges", "local_batch_size"), [256.0, -1e308], "ranges: local_batch_size must be from 0 on and rise"),
        (("workers",), 1e308, "workers must be 0 to 1024"),
        (
            ("ranges",),
            {},
            "ranges: devices, evaluated per trained sample, local_batch_size, nodes, samples of a device",
        ),
        (("config", "epochs"), 0, "epochs: must be at least 1"),
        (("site", "devices_per_node"), 0, "devices_per_node: must be more than 0"),
        (("workload",), "fourcastnet", "workload: the fit is of fourcastnet, its run of resnet50"),
    ],
)
def test_a_fit_that_is_made_by_hand_is_one_line_in_every_command(capsys, fit_file, tmp_path, at, value, says):
    content = json.loads(fit_file.read_text())
    del content["sha256"]
    path = tmp_path / "fit.json"
    write_changed(path, content, at, value)
    for words in (
        *(("predict", "R4", "--fit", path), ("plan", *RESNET50, "--fit", path), ("advise", *RESNET50, "--fit", path)),
        ("simulate", "R4", "--fit", path, "--out", tmp_path / "out"),
        ("fit", "--published", *RESNET50, "--like", path, "--out", tmp_path / "other.json"),
        ("probe", *RESNET50, "--like", path, "--dry-run"),
    ):
        line = refusal(capsys, *words)
        assert str(path) in line and says in line and len(line) < 500
    assert not (tmp_path / "out").exists() and not (tmp_path / "other.json").exists()


def test_a_run_that_is_no_training_is_refused(capsys, fit_file, tmp_path):
    """`energynn measure` writes a run.json, too."""
    for content in ({"config": {"command": "true"}}, {"config": []}, {"config": {"workload": "resnet50"}}):
        (tmp_path / "run.json").write_text(json.dumps({"run_id": "run", "workload": "command"} | content))
        for words in (("predict", tmp_path), ("advise", *RESNET50, tmp_path)):
            line = refusal(capsys, *words, "--fit", fit_file)
            assert f"{tmp_path}/run.json: tells of no training; give another folder, or parameters: " in line


def test_what_cannot_be_done_is_one_line(capsys, fit_file, simulated, tmp_path):
    out = ("--out", tmp_path / "fit.json")
    words = refusal(
        capsys, "fit", "--runs-dir", simulated, "--workload", "fourcastnet", "--system", "horeka-a100", *out
    )
    assert "no valid run of fourcastnet on horeka-a100; there are resnet50 on horeka-a100" in words
    words = refusal(capsys, "fit", "--published", "--workload", "resnet50", "--system", "horeka-h100", *out)
    assert "nothing is published of it; fit runs of your own" in words
    too_few = ("--workload", "fourcastnet", "--system", "horeka-h100", "--max-devices", "1")
    words = refusal(capsys, "fit", "--published", *too_few, *out)
    assert "max-devices: nothing is published of fourcastnet with so few; give at least 4" in words
    with pytest.raises(SystemExit) as ended:
        cli.main(["forecast", "fit", "--published", *RESNET50, "--max-devices", "0", *map(str, out)])
    assert ended.value.code == 2 and "argument --max-devices: must be a whole number from 1" in capsys.readouterr().err
    assert "devices: 1000 asked, horeka-a100 has 668" in refusal(
        capsys, "predict", "-p", "devices", 1000, "--fit", fit_file
    )
    assert "predict: say what" in refusal(capsys, "predict", "--fit", fit_file)
    assert "study: 'R9' is not known" in refusal(capsys, "predict", "R9", "--fit", fit_file)
    assert "devices: '4 to 8' is no range" in refusal(capsys, "plan", *RESNET50, "--devices", "4 to 8")
    words = refusal(capsys, "plan", *RESNET50, "--fit", fit_file, "--deadline-h", "0.5", "--energy-kwh", "28")
    assert "contradicts" in words and "the most frugal needs" in words


def test_an_interval_without_an_end_is_none():
    """So wide that its end is no number; the forecast itself is told."""
    endless = {"value": 1.0, "low": 0.0, "high": None}
    assert (report._short_span(endless), report._span(endless)) == ("1.00", "1 (no interval)")


@pytest.mark.parametrize("given", ["0", "-1", "many"])
@pytest.mark.parametrize("action", [("predict", "R4"), ("plan", *RESNET50)])
def test_a_batch_limit_is_at_least_1(capsys, fit_file, action, given):
    with pytest.raises(SystemExit) as ended:
        cli.main(["forecast", *action, "--fit", str(fit_file), "--max-global-batch-size", given])
    assert ended.value.code == 2 and "argument --max-global-batch-size: " in capsys.readouterr().err


def test_what_cannot_be_is_not_simulated_advised_or_probed(capsys, fit_file, fitted, tmp_path):
    """As predict refuses it: a run of another workload, and more devices than there are."""
    out = tmp_path / "out"
    words = refusal(capsys, "simulate", "F1", "--fit", fit_file, "--out", out)
    assert "workload: the fit is of resnet50, the run of fourcastnet; fit fourcastnet" in words and not out.exists()
    other = tmp_path / "run"
    other.mkdir()
    run = config.to_dict(config.make("fourcastnet", preset="paper", device="gpu"))
    (other / "run.json").write_text(json.dumps({"config": run, "device_kind": "gpu"}))
    advise = ("advise", *RESNET50, "--fit", fit_file)
    assert "the fit is of resnet50, the run of fourcastnet" in refusal(capsys, *advise, other)
    assert "the fit is of resnet50, the run of fourcastnet" in refusal(capsys, "predict", other, "--fit", fit_file)
    assert "devices: 1000 asked, horeka-a100 has 668" in refusal(capsys, *advise, "-p", "devices", 1000)
    assert "devices: 1000 asked, horeka-a100 has 668" in refusal(
        capsys, "probe", *RESNET50, "-p", "devices", 1000, "--dry-run"
    )
    too_large = ("-p", "devices", 64, "-p", "local_batch_size", 30_000)
    assert "a device has fewer samples than one update takes" in refusal(capsys, *advise, *too_large)
    for none in ("R1", "R9", tmp_path):
        line = f"run: {none} is no run's folder; give one, or parameters (-p devices 4)"
        assert line in refusal(capsys, *advise, none)


def test_advice_names_causes_and_marks_what_lies_outside(capsys, fit_file):
    advise = ("advise", *RESNET50, "--fit", fit_file)
    rows = answer(capsys, *advise, "-p", "devices", 300)["remedies"]
    assert len(rows) == 7 and all("devices 300: calibrated 1 to 256" in row["outside"] for row in rows)
    rows = {row["remedy"]: row for row in answer(capsys, *advise, "-p", "devices", 16)["remedies"]}
    (mark,) = rows["compressed gradients"]["outside"]
    assert mark.startswith("gradient_compression bfloat16: calibrated none; the all-reduce is taken as proportional")
    assert "precision bfloat16: calibrated float32; its effect is not known" in rows["bfloat16"]["outside"]
    largest = ("-p", "devices", 64, "-p", "local_batch_size", 15_000)  # a device has 20,018 samples
    assert "twice the local batch" not in {row["remedy"] for row in answer(capsys, *advise, *largest)["remedies"]}
    assert cli.main(["forecast", *map(str, advise), "-p", "devices", "16"]) == 0
    said = capsys.readouterr().out
    assert "      loaders' starts; the same short run with and without it, few samples\n" in said
    assert "* precision bfloat16: calibrated float32; its effect is not known\n" in said


def test_runs_of_several_devices_do_not_make_one_fit(simulated, capsys, tmp_path):
    import shutil

    shutil.copytree(simulated, tmp_path / "runs")
    path = next((tmp_path / "runs").rglob("record.json"))
    path.write_text(path.read_text().replace("A100 of", "H100 of"))
    words = refusal(capsys, "fit", "--runs-dir", tmp_path / "runs", *RESNET50, "--out", tmp_path / "fit.json")
    assert "runs of several devices, A100 of horeka-a100, simulated, H100 of horeka-a100, simulated; put those" in words


def test_columns_of_short_runs_do_not_run_into_each_other():
    small = {"value": 0.00861, "low": 0.00673, "high": 0.011}
    spans = dict.fromkeys(("time_h", "gpu_hours"), small) | {"energy_kWh": dict.fromkeys(small)}
    line = report._line(spans | {"devices": 2, "local_batch_size": 16, "global_batch_size": 32, "outside": []})
    assert line.split()[2:5] == ["32", "0.0086", "(0.0067-0.011)"]
