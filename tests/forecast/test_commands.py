"""energynn forecast as a person uses it: fit, predict, plan, probe, simulate; one line for
refusals.
"""

import json
import re
import shutil

import pandas as pd
import pytest
from msgspec.structs import replace

from energynn import records
from energynn.analysis import results
from energynn.experiment import config, studies
from energynn.forecast import fits, predict, runs, simulate
from energynn.host.files import REPOSITORY
from energynn.host.reading import read_json
from tests.forecast.conftest import holds
from tests.processes import answer, refusal, told
from tests.run_files import edit

RESNET50 = "--workload resnet50 --system horeka-a100"


@pytest.fixture(scope="module")
def fit_file(fitted, tmp_path_factory):
    path = tmp_path_factory.mktemp("fit") / "fit.json"
    fits.write_fit(path, fitted)
    return path


@pytest.fixture(scope="module")
def simulated(fitted, tmp_path_factory):
    """Records of R4 and R5 on up to eight GPUs."""
    out = tmp_path_factory.mktemp("simulated")
    asked = [
        run
        for name in ("R4", "R5")
        for run in studies.PAPER_STUDIES[name]("horeka-a100")
    ]
    simulate.write_simulated_runs(
        fitted, [run for run in asked if run.repeat == 0 and run.devices <= 8], out
    )
    return out


def test_fit_then_predict(tmp_path):
    fitted = told(f"forecast fit {RESNET50} --out", tmp_path / "fit.json")
    seen = fitted["runs"]
    assert seen["provenance"] == "published" and len(seen["taken"]) == 17
    for known in fitted["parameters"].values():
        assert holds(known, known["value"])
        assert known["unit"] and known["meaning"]
    rows = told("forecast predict R4 --fit", tmp_path / "fit.json")["rows"]
    assert [row["devices"] for row in rows] == [2**power for power in range(9)]
    parts = ("gpu", "cpu", "ram")
    for row in rows:
        for name in (*predict.UNITS, *(f"energy_{part}_kWh" for part in parts)):
            assert holds(row[name], row[name]["value"])
        shares = pd.DataFrame(row["time_share_percent"]).T
        assert shares["value"].sum() == pytest.approx(100)
        assert (shares["low"] <= shares["value"]).all()
        assert (shares["value"] <= shares["high"]).all()
        energies = [row[f"energy_{part}_kWh"]["value"] for part in parts]
        assert sum(energies) == pytest.approx(row["energy_kWh"]["value"])
        assert row["provenance"].startswith(
            "estimated by a model fitted to 17 published runs"
        )


@pytest.mark.parametrize(
    "words",
    [
        "predict -p devices=256 --fit FIT",
        f"plan {RESNET50} --fit FIT --deadline-h 3",
        "predict --held-out --runs-dir RUNS --system horeka-a100 --max-devices 4",
        f"fit --runs-dir RUNS {RESNET50} --out OUT --details",
    ],
)
def test_answers_are_tables_that_begin_at_once(fit_file, simulated, tmp_path, words):
    places = {"FIT": fit_file, "RUNS": simulated, "OUT": tmp_path / "own.json"}
    text = answer("forecast", *(places.get(word, word) for word in words.split()))
    assert text.count("\n") > 2 and "nan" not in text
    table = text.split("\n\n")[0].splitlines()[:3]
    assert max(map(len, table)) <= 100, text


def test_what_no_fitted_run_had_is_marked(fit_file):
    sizes = f"forecast predict -p devices=64 -p local_batch_size=16 --fit {fit_file}"
    (plain,) = told(sizes)["rows"]
    assert plain["outside"] == []
    changed = "-p accumulation_steps=8 -p persistent_workers=True"
    (row,) = told(f"{sizes} {changed}")["rows"]
    assert [words.partition(":")[0] for words in row["outside"]] == [
        "persistent_workers True",
    ]


def test_simulated_records_pass_the_check_as_what_they_are(simulated, fitted):
    assert "valid: 0, faults: 0" in answer("check", simulated)
    found = [
        records.read_record_if_any(folder)
        for folder in records.list_run_folders(simulated)
    ]
    asked = [config.config_from_dict(record.config) for record in found]
    rows = {row["run_id"]: row for row in predict.forecasts(fitted, asked)}
    assert len(found) == 8
    for record in found:
        assert record.valid
        assert record.energy_total_provenance == record.launcher == "simulated"
        assert "Nobody made this run" in record.method
        assert "simulated" in record.device_name
        assert record.forward_backward_passes == record.optimizer_steps
        ratio = record.device_hours_training / rows[record.run_id]["gpu_hours"]["value"]
        assert 0.9 < ratio < 1.1 and ratio != pytest.approx(1, abs=1e-6)  # with scatter


def test_forecasts_stand_beside_the_facts(simulated):
    words = f"forecast predict --held-out --runs-dir {simulated} --system"
    few = f"{words} horeka-a100 --max-devices 4"
    found = told(few)
    rows, each = found["rows"], found["from_others"]
    assert len(each) == 12 and max(row["devices"] for row in each) == 4
    assert "12 values inside" in answer(few)
    assert {row["devices"] for row in rows} == {
        8
    } and "fitted to 6 simulated runs" in rows[0]["provenance"]
    for row in rows:
        for name in ("time_h", "gpu_hours", "energy_kWh"):
            assert row[name]["is_inside"] and row[name]["value"] == pytest.approx(
                row[name]["fact"], rel=0.15
            )
    table = answer(words, "horeka-a100").partition("\n\n")[0]
    lines = [line.split() for line in table.splitlines()[1:]]
    assert [int(line[1]) for line in lines] == [2, 2, 4, 4, 8, 8]
    assert lines[0][-1] == "simulated"  # not called a fact
    assert "no recipe has valid runs" in refusal(words, "local")


@pytest.mark.parametrize("workload", config.CONFIGS)
def test_two_runs_have_one_recipe_in_both_rooms_or_in_none(workload):
    """For each parameter by itself: a table's recipe, and that of a fit."""
    plain = config.asdict(config.make(workload))
    alike = dict(run_id="", workload=workload, system="", started_at="", devices=1)
    record = records.RunIntent(**alike, machine={}, device_name="A100", config=plain)
    counted = set()
    for name in plain.keys() - {"workload"}:
        changed = replace(record, config=plain | {name: "another"})
        is_one = config.recipe(plain) == config.recipe(changed.config)
        in_tables = results.recipe_digest(record) == results.recipe_digest(changed)
        in_fits = runs.recipe_of_record(record) == runs.recipe_of_record(changed)
        assert in_tables == is_one, name
        if in_fits != is_one:
            counted.add(name)
    assert counted == runs.PARAMETERS_THAT_MAY_DIFFER & plain.keys() - {"workload"}
    older = {name: plain[name] for name in plain if name != "gradient_buckets"}
    assert runs.recipe_of_record(record) == runs.recipe_of_record(
        replace(record, config=older)
    )


def test_however_runs_were_watched_they_are_repeats_in_a_fit(fitted, a100, tmp_path):
    """One waited longer for others, and its repeat for an idle machine."""
    asked = studies.PAPER_STUDIES["R1"](a100.name)
    chosen = [run for run in asked if run.repeat == 0 and run.devices in (4, 8, 16)]
    chosen[-1] = config.replace(chosen[-1], collective_timeout_s=600.0)
    simulate.write_simulated_runs(fitted, chosen, tmp_path)
    found = runs.valid_records(tmp_path, a100)
    again = [
        replace(record, config=record.config | {"idle_ready_s": 9.0})
        for record in found
    ]
    seen = runs.own_runs(found + again, "resnet50", a100)
    assert sorted(run.devices for run in seen.configs) == [4, 8, 16]
    assert {run.repeats for run in seen.taken} == {2}


def test_simulate_makes_the_same_again_and_spares_runs(fit_file, tmp_path):
    words = f"forecast simulate R4 --fit {fit_file} --out"
    first, again = (
        records.read_all(told(words, tmp_path / out) and tmp_path / out)
        for out in ("first", "again")
    )
    energies = [[of.energy_total_J for of in made] for made in (first, again)]
    assert energies[0] == energies[1] and len(set(energies[0])) == len(first) == 9
    assert "is there; choose another --out" in refusal(words, tmp_path / "first")


def test_a_fit_that_is_none_is_refused_in_one_line(fit_file, tmp_path):
    path = tmp_path / "fit.json"
    words = f"forecast predict R4 --fit {path}"
    assert "fit.json" in refusal(words)
    content = read_json(fit_file)
    content["runs"]["taken"][0]["time_s"] = "long"
    for text in ("{}", "no JSON", json.dumps(content)):
        path.write_text(text)
        assert refusal(words)
    other = "forecast plan --workload fourcastnet --system horeka-a100 --fit"
    assert "is of resnet50 on horeka-a100; give another, which `energynn" in refusal(
        other, fit_file
    )


def test_a_changed_record_is_not_fitted(simulated, tmp_path):
    shutil.copytree(simulated, tmp_path / "runs")
    own = (
        f"forecast fit --runs-dir {tmp_path}/runs {RESNET50} --out {tmp_path}/fit.json"
    )
    path = next((tmp_path / "runs").rglob("record.json"))
    other = config.make("fourcastnet", preset="paper", device="gpu", devices=4)
    simulate.write_simulated_runs(
        fits.published("fourcastnet", "horeka-a100"), [other], tmp_path / "runs"
    )
    assert "1 run(s) left out:\n  1 of fourcastnet: fourcastnet-" in answer(own)
    edit(path, training_time_s=3.0)
    assert "record_sha256 differs" in refusal(own)


def test_what_cannot_be_is_refused_with_the_remedy(fit_file, simulated, tmp_path):
    predicted = f"forecast predict --fit {fit_file}"
    assert "choose at most 256" in refusal(f"{predicted} -p devices=1000")
    few = f"{predicted} -p training_samples=100"
    assert "choose a smaller one" in refusal(few)
    assert "say what: a study, or parameters" in refusal(predicted)
    assert "fit fourcastnet" in refusal(predicted, "F1")
    limited = f"{predicted} R4 --power-limit"
    assert "power limit 0.7 of the greatest: time x" in answer(limited, "0.7")
    assert "give 0.5 to 1" in refusal(limited, "0.3")
    planned = f"forecast plan {RESNET50} --fit {fit_file}"
    assert "nan is no number" in refusal(f"{planned} --deadline-h nan")
    assert "cheapest" in answer(f"{planned} --price-per-kwh 0"), "power of the sun"
    own = f"forecast fit --runs-dir {simulated} --workload fourcastnet"
    said = refusal(f"{own} --system horeka-a100 --out {tmp_path}/fit.json")
    assert "there are: of resnet50; a command counts with" in said


def test_what_waiting_draws_follows_from_runs_of_a_real_gpu(tmp_path):
    """Of runs at full rate and at 30 % of it the fit says what that GPU drew, by its meter, in a
    run with a slow loader and in an idle one.
    """
    own, kept = tmp_path / "gpu-h200.toml", REPOSITORY / "runs"
    own.write_text('scheduler = "local"\ngpu = "H200"\ndevices_per_node = 1\n')
    place = f"--system {own} --runs-dir {kept}"
    words = f"forecast fit --workload resnet50 {place} --out {tmp_path}/fit.json"
    assert "those of one, by parameters, as -p preset=paper" in refusal(words)
    of_study = f"forecast fit {RESNET50} --out {tmp_path}/fit.json -p preset=paper"
    assert "give --runs-dir" in refusal(of_study)
    text = answer(f"{words} -p preset=paper -p image_loading=device")
    (ends,) = re.findall(r"\(no kernel runs\) draws \d+ W \((\d+)-(\d+)\), alone", text)
    made = records.read_all(kept)
    drawn_W = {record.config.get("kind"): record.mean_power_gpu_W for record in made}
    low_W, high_W = map(float, ends)
    assert low_W < drawn_W["idle"] < drawn_W["starved"] < high_W < low_W + 20
