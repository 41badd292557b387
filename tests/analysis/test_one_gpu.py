"""What one GPU can tell, before there is one: on simulated records with known truth the notebook and ledger find it."""

import json
import tomllib

import numpy as np
import pandas as pd
import pytest

from energynn import config, studies
from energynn.analysis import claims, results
from energynn.config import replace
from tests.analysis import one_gpu
from tests.analysis.notebook import execute
from tests.analysis.one_gpu import Gpu, step_s
from tests.analysis.test_claims_worlds import configurations

LEDGER = tomllib.loads(claims.CLAIMS.read_text())
ENTRIES = {entry["id"]: entry for entry in LEDGER["claim"]}
PAPER, FAST = "ResNet50, paper, gpu-study", "ResNet50, fast, gpu-study"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The records of the grid by an imagined GPU, notebook 45 executed on them, and its figures and numbers."""
    folder = tmp_path_factory.mktemp("grid")
    one_gpu.write_grid(folder / "runs", samples=True)
    return folder, execute("45_one_gpu", runs_dir=str(folder / "runs"), build_dir=str(folder))


def test_the_notebook_finds_what_a_sample_and_an_update_cost(study):
    folder, shown = study
    found = shown["coefficients"]
    of_paper = found[found["name"] == PAPER]
    for term, truth in (("samples", 0.1), ("updates", 2.0)):
        row = of_paper.loc[term]
        assert row["low"] < truth < row["high"], term
        assert row["high"] - row["low"] < 0.6 * truth, "narrow enough to tell"
    assert FAST not in shown["fitted"], "a sweep of local batch sizes alone"
    numbers = json.loads((folder / "numbers/45_one_gpu.json").read_text())
    assert numbers["one_gpu_sample"]["provenance"] == "measured"
    assert shown["found"].startswith(f"{PAPER} (measured): A sample costs")
    assert numbers["one_gpu_sample"]["value"] == pytest.approx(of_paper.loc["samples", "value"])
    assert numbers["one_gpu_runs"]["value"] == len(studies.gpu_grid())


def test_the_notebook_finds_what_each_choice_saves(study):
    _, shown = study
    savings = shown["savings"].set_index("choice")
    by_itself = {"precision", "channels_last", "fused_optimizer"}
    assert set(savings.index) == by_itself | {"all of fast", "all of fast, compiled", "sampled every 0.2 s"}
    anchor = studies.gpu_grid()[0]

    def joules(run):
        return one_gpu.power_W(run, Gpu(), 0.5) * one_gpu.step_s(run) / run.global_batch_size

    truths = {"precision": replace(anchor, precision="bfloat16"), "channels_last": replace(anchor, channels_last=True)}
    truths |= {"sampled every 0.2 s": anchor}
    for choice, run in truths.items():
        truth = 100 * (1 - joules(run) / joules(anchor))
        assert savings.loc[choice, "low"] - 1 < truth < savings.loc[choice, "high"] + 1, choice  # drift is in the base


def test_the_figures_have_all_panels(study):
    folder, shown = study
    drawn = (folder / "figures/one_gpu.svg").read_text() + (folder / "figures/one_gpu_costs.svg").read_text()
    for title in "A  power and samples", "B  power and updates", "C  energy per sample", "D  the loader":
        assert title in drawn
    assert "E  energy by phase" in drawn and "F  saved by one choice" in drawn and "pil-12" in drawn
    assert set(shown["phases"]["phase"]) == set(one_gpu.PHASES)


def test_without_such_runs_a_clear_word_stands_there(synthetic, tmp_path):
    synthetic.write_study(tmp_path / "runs")
    shown = execute("45_one_gpu", runs_dir=str(tmp_path / "runs"), build_dir=str(tmp_path))
    assert not len(shown["table"]) and "no own run on one GPU" in (tmp_path / "figures/one_gpu.svg").read_text()
    numbers = json.loads((tmp_path / "numbers/45_one_gpu.json").read_text())
    assert numbers["one_gpu_sample"]["value"] is None and numbers["one_gpu_sample"]["reason"]


def test_a_sweep_of_local_batch_sizes_alone_fails(tmp_path, capsys):
    sweep = [run for run in studies.gpu_grid() if not run.step_period_s and run.accumulation_steps == 1]
    one_gpu.write_grid(tmp_path / "runs", runs=[run for run in sweep if run.workload == "resnet50"])
    shown = execute("45_one_gpu", runs_dir=str(tmp_path / "runs"), build_dir=str(tmp_path))
    assert not shown["fitted"] and "cannot tell samples from updates" in capsys.readouterr().out


@pytest.fixture(scope="module")
def ledger(study):
    names = [*one_gpu.STATEMENTS, "fcn-more-compute-intensive", "abstract-linear", "interval-fcn-h100"]
    return one_gpu.judged(study[0] / "runs", names)


def test_a_measured_gpu_counts_beside_an_estimated_cpu(ledger):
    found = ledger
    ours = "gpu-study H100"
    for name in ("abstract-influence-of-samples", "throughput-raises-power", "data-loading-hypothesis"):
        assert found[name][ours]["verdict"] == "supported", (name, found[name])
    assert found["h100-stays-above-baseline"][ours]["verdict"] == "supported"
    assert found["abstract-influence-of-samples"][ours]["quantity"] == "mean_power_gpu_W"
    assert found["lbs-limit-resnet50"][ours]["verdict"] == found["lbs-limit-fcn"][ours]["verdict"] == "supported"
    assert found["interval-fcn-h100"][ours]["verdict"] == "by construction", "totals stay estimated"
    for name in ("abstract-linear", "fcn-more-compute-intensive"):  # of times and energies: not on these data
        assert {judged["verdict"] for judged in found[name].values()} == {"no data"}, name


def test_recipes_are_not_pooled(study, ledger):
    judged = ledger["abstract-influence-of-samples"]
    table = results.load(study[0] / "runs").to_dataframe().reset_index(drop=True).set_index("run_id")
    used = [name for names in judged["gpu-study H100"]["runs"] for name in names.split(", ")]
    assert table.loc[used, "recipe_at_any_pace"].nunique() == 1 and set(table.loc[used, "preset"]) == {"paper"}
    assert set(table.loc[used, "loader"]) == {"device"}


GRID = studies.gpu_grid()
SWEPT = [run for run in GRID if one_gpu.loader(run) == "device" and run.preset == "paper" and one_gpu.speed(run) == 1]
SWEPT = [run for run in SWEPT if run.repeat == 0 and run.sampling_period_s == 0.02]


def world(gpu, seed, runs=SWEPT):
    """What the ledger would know of the grid's configurations, if this GPU had made them."""
    random = np.random.default_rng(seed)
    rows = pd.DataFrame([one_gpu.describe(run) for run in runs])
    places = random.permutation(len(runs)) / len(runs)
    powers_W = [one_gpu.power_W(run, gpu, place) for run, place in zip(runs, places, strict=True)]
    rows["mean_power_gpu_W"] = powers_W * (1 + random.normal(0, gpu.noise, len(runs)))
    rows["memory_gpu_peak_GB"] = [one_gpu.memory_GB(run, gpu) * (1 + random.normal(0, gpu.noise / 4)) for run in runs]
    about = {"stage": "pretrain", "hardware": "H100", "series": "", "devices": 1, "origin": "own", "recipe": "a"}
    about |= {"recipe_at_any_pace": "a", "sockets_per_gpu": 1.0, "epochs": 1, "preset": "paper"}
    rows = rows.assign(run=[f"run {number}" for number in range(len(rows))], **about)
    return configurations(rows, gpu.noise * rows[["mean_power_gpu_W", "memory_gpu_peak_GB"]])


# Statement -> GPUs on which it is right, and on which it is wrong.
TRUTHS = {
    "abstract-influence-of-samples": (Gpu(), Gpu(sample_J=0.0)),
    "abstract-influence-of-updates": (Gpu(), Gpu(update_J=0.0)),
    "samples-dominate-passes": (Gpu(sample_J=0.15, update_J=0.5), Gpu(sample_J=0.0)),
    "throughput-raises-power": (Gpu(), Gpu(sample_J=-0.05)),
    "lbs-limit-resnet50": (Gpu(), Gpu(image_GB=0.06)),
    "lbs-limit-fcn": (Gpu(image_GB=0.09), Gpu(image_GB=0.06)),
}


MEMORY = ("lbs-limit-resnet50", "lbs-limit-fcn")  # which a sweep tells


def verdicts(name, gpu, worlds, runs=SWEPT):
    return [claims.judge(ENTRIES[name], LEDGER, world(gpu, seed, runs))["verdict"] for seed in range(worlds)]


@pytest.mark.parametrize("name", TRUTHS)
def test_what_is_right_is_supported_and_what_is_wrong_is_not(name):
    right, wrong = TRUTHS[name]
    assert verdicts(name, right, 3).count("supported") >= 2
    assert "supported" not in verdicts(name, wrong, 3)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRUTHS)
def test_in_a_hundred_worlds(name):
    right, wrong = TRUTHS[name]
    assert verdicts(name, right, 100).count("supported") >= 90
    assert verdicts(name, wrong, 100).count("supported") <= 5


def test_memory_that_ends_too_soon_or_too_late_contradicts_and_two_sizes_tell_nothing():
    for name in MEMORY:
        for image_GB in (0.06, 0.2):
            assert set(verdicts(name, Gpu(image_GB=image_GB), 3)) == {"contradicted"}, (name, image_GB)
        two = [run for run in SWEPT if run.local_batch_size in (1, 4, 32, 256)]
        assert set(verdicts(name, Gpu(), 2, two)) == {"no data"}


def test_a_sweep_alone_proves_nothing():
    sweep = [run for run in SWEPT if not run.step_period_s and run.accumulation_steps == 1]
    for name in set(TRUTHS) - set(MEMORY):
        assert set(verdicts(name, Gpu(), 2, sweep)) <= {"no data", "inconclusive"}


def test_the_grids_pace_is_the_only_difference_within_a_recipe():
    settings = [config.to_dict(run) for run in SWEPT]
    loose = {results._recipe({"config": one}, results._varied_with_pace(one)) for one in settings}
    assert len(loose) == 2, "one of each network"


def test_every_run_of_the_grid_is_long_enough_for_its_sensors():
    """By what an H100 is expected to do, whichever choice of ``fast`` makes its steps shorter."""
    for run in studies.gpu_grid():
        per_epoch = (getattr(run, "training_samples", 0) or config.SYNTHETIC_STATES) // run.global_batch_size
        assert 20 <= run.epochs * per_epoch * step_s(run) < 80, run
