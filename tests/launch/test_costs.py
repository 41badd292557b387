"""One price: what a run costs is one answer, whichever command is asked."""

import math

import pytest

from energynn.experiment import config, studies, systems
from energynn.forecast import costs, fits, predict
from energynn.launch import submit
from tests.processes import answer, told

PUBLISHED = ("published runs", "published GPU hours", "published kWh")


def priced(names, system, folder):
    """The runs of studies, what `forecast predict` tells of them, and their costs; every command
    names the same.
    """
    runs = studies.list_runs_of_studies(names, system)
    table = costs.cost_table(runs, systems.read_site(system))
    studied = f"{' '.join(names)} --system {system}"
    whole = told(f"forecast predict {studied}")
    for field, unit in predict.PRICED_QUANTITIES.items():
        assert whole["total"][field] == pytest.approx(table[unit].iloc[-1])
    dry = answer(f"submit {studied} --dry-run --runs-dir", folder)
    assert costs.cost_text(table) in dry
    for text in (answer(f"forecast predict {studied}"), dry):
        assert (", energies without memory" in text) == (system == "horeka-h100")
    return runs, whole, table


@pytest.mark.parametrize(
    "name, system",
    [("R1", "horeka-a100"), ("F1", "horeka-a100"), ("F5", "horeka-h100")],
)
def test_every_command_names_one_price(tmp_path, name, system):
    runs, _, table = priced([name], system, tmp_path)
    assert costs.cost_text(table) in answer(f"study show {name}")
    fit = tmp_path / "fit.json"
    fits.write_fit(fit, fits.published(runs[0].workload, system))
    rows = told(f"forecast predict {name} --fit", fit)["rows"]
    repeats, site = len(runs) // len(rows), systems.read_site(system)
    for field, unit in predict.PRICED_QUANTITIES.items():
        values = [repeats * row[field]["value"] for row in rows]
        assert table[unit].tolist() == pytest.approx([*values, sum(values)])
    for row, run in zip(rows, runs[::repeats], strict=True):
        longest_h = submit.LIMIT_MARGIN * row["time_h"]["high"] + submit.SPARE_H
        (job,) = submit.plan_jobs([run], site, tmp_path, set())
        assert job.minutes == math.ceil(60 * min(longest_h, site.max_hours))


def test_a_run_of_several_studies_counts_once(tmp_path):
    names, system = ["R1", "R2", "R3"], "horeka-a100"
    runs, whole, _ = priced(names, system, tmp_path)
    of_each = studies.find_studies(names, system).values()
    assert len(set(map(config.run_id, runs))) == len(runs) < sum(map(len, of_each))
    assert sum(row["runs"] for row in whole["rows"]) == len(runs)
    listed = {tuple(row["studies"]) for row in whole["rows"]}
    assert {("R1",), ("R1", "R2"), ("R1", "R3")} < listed
    # parameters make the runs of a study alike, but for their repeats
    alike = f"forecast predict R1 --system {system} -p devices=64"
    repeats = {run.repeat for run in runs}
    (row,) = told(alike)["rows"]
    assert row["runs"] == len(repeats)


def test_a_study_is_priced_at_ones_own_terms_on_the_nodes_that_there_are(tmp_path):
    own = tmp_path / "five.toml"
    is_like = 'published_as = "NVIDIA A100-40GB"'
    own.write_text(f"devices_per_node = 4\nnodes = 5\n{is_like}\n")
    words = f"forecast predict R1 R2 --system {own} --price-per-kwh 0.3"
    words += " --price-per-gpu-hour 2 --gco2-per-kwh 100 --pue 1.2"
    answered = told(words)
    rows, total = answered["rows"], answered["total"]
    assert {row["devices"] for row in rows} == {1, 2, 4, 8, 16}
    for row in rows:  # of an all-reduce whose bandwidth nobody told
        link = "gpu_link_GB_per_s" if row["devices"] <= 4 else "link_GB_per_s"
        unknown = f"what an all-reduce takes is not known without {link} of"
        assert any(unknown in said for said in row["outside"]) == (row["devices"] > 1)
    for name, added in total.items():
        values = [row["runs"] * row[name]["value"] for row in rows]
        assert added == pytest.approx(sum(values))
    paid_kWh = 1.2 * total["energy_kWh"]
    assert total["energy_centre_kWh"] == pytest.approx(paid_kWh)
    assert total["CO2_g"] == pytest.approx(100 * paid_kWh)
    assert total["price"] == pytest.approx(0.3 * paid_kWh + 2 * total["charged_hours"])
    submitted = f"submit --system {own} --dry-run --runs-dir {tmp_path}"
    for text in (answer(words), answer(submitted, "R1")):
        assert "left out: 20 run(s) on 32, 64, 128, 256 devices; five has 20" in text
        assert "published runs on NVIDIA A100-40GB" in text
        assert "\n45 runs: " in f"\n{text}" or "25 to make" in text
    refused = answer(f"{submitted} -p devices=24", status=2)
    assert "left out: 1 run(s) on 24 devices" in refused
    assert "these runs are of" not in answer(words)
    # R3 has no run for so few
    assert told("forecast predict R3 R1 --system", own)["rows"][0]["studies"] == ["R1"]
    # nodes of one's own are asked for, and change nothing that was learnt on the study's
    (mine,) = [row for row in rows if row["devices"] == 1]
    (study,) = told("forecast predict R1 --system horeka-a100")["rows"][:1]
    assert mine["gpu_hours"] == study["gpu_hours"]
    other = tmp_path / "other.toml"
    other.write_text(own.read_text() + 'gpu = "NVIDIA H100"\n')
    said = answer("forecast predict R1 --system", other)
    assert "calls them so; these runs are of NVIDIA A100-40GB" in said


@pytest.mark.parametrize("devices, nodes", [(1, 1), (4, 1), (6, 2), (9, 3), (256, 64)])
def test_whole_nodes_are_asked_for_and_charged(tmp_path, devices, nodes):
    site = systems.read_site("horeka-a100")
    run = config.make("fourcastnet", preset="paper", devices=devices, system=site.name)
    (job,) = submit.plan_jobs([run], site, tmp_path, set())
    assert f"#SBATCH --nodes={nodes}\n" in submit.render_job_script(job, site, "x")
    cost = costs.expected_cost(run, site.name)
    charged = 4 * nodes / devices
    assert cost["charged hours"] / cost["GPU hours"] == pytest.approx(charged)


@pytest.mark.parametrize(
    "system, name, devices, published",
    [
        ("horeka-a100", "T1", 4, (1, 559.68, 120.70)),
        ("horeka-h100", "T1", 4, (1, 421.26, 115.6)),
        ("horeka-a100", "R1", 1, (0, 0, 0)),
    ],
)
def test_a_published_value_stands_beside_the_forecast(system, name, devices, published):
    run = next(
        run for run in studies.find_studies([name])[name] if run.devices == devices
    )
    cost = costs.expected_cost(run, system)
    found = [cost[heading] for heading in PUBLISHED]
    assert found == pytest.approx(published, abs=0.05)
    if name == "T1":
        tuned = config.replace(run, stage="finetune", initial_run="x")
        two_steps = costs.expected_cost(tuned, system)
        assert 1.8 < two_steps["GPU hours"] / cost["GPU hours"] <= 2


@pytest.mark.parametrize(
    "system, changed",
    [
        ("horeka-h100", {}),  # nothing is published of ResNet50 on it
        ("slurm", {}),
        ("horeka-a100", {"image_size": 32}),
        ("horeka-a100", {"precision": "bfloat16"}),
        ("horeka-a100", {"image_loading": "device"}),
        ("horeka-a100", {"devices": 512}),
    ],
)
def test_no_other_price_stands_in_for_an_unknown_one(tmp_path, system, changed):
    site = systems.read_site(system)
    known = config.make("resnet50", preset="paper", devices=4)
    run = config.replace(known, **changed)
    (job,) = submit.plan_jobs([run], site, tmp_path, set())
    assert job.minutes == math.ceil(60 * site.default_hours)
    assert "2 runs, of unknown cost" in costs.cost_text(
        costs.cost_table([run, run], site)
    )
    table = costs.cost_table([run, known], systems.read_site("horeka-a100"))
    assert table["kWh"].isna().iloc[-1] == bool(changed)


def test_the_list_of_studies_makes_no_fit(monkeypatch):
    monkeypatch.delattr(fits, "fit_runs")
    assert "R1 " in answer("study list")
