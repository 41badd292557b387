"""What one GPU can tell, before there is one: on simulated records with known truth the notebook
and ledger find it.
"""

import pytest

from energynn.experiment import studies
from energynn.experiment.config import replace
from energynn.host.files import REPOSITORY
from tests.analysis import one_gpu
from tests.analysis.notebook import execute
from tests.analysis.one_gpu import gpu_grid, passes_s, step_s, steps_of

PAPER, FAST = "ResNet50, paper, gpu-study", "ResNet50, fast, gpu-study"


def executed_on(folder, *grid) -> dict:
    one_gpu.write_grid(folder / "runs", *grid)
    return execute("45_one_gpu", folder, runs_dir=str(folder / "runs"))


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Notebook 45 executed on the records of the grid by an imagined GPU."""
    folder = tmp_path_factory.mktemp("grid")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY / "examples")
        one_gpu.write_minute(folder / "runs", "idle", 120)
        one_gpu.write_minute(folder / "runs", "starved", 180)
    return executed_on(folder, gpu_grid())


def test_the_notebook_finds_what_a_sample_and_an_update_cost(study):
    found = study["coefficients"]
    of_paper = found[found["name"] == PAPER]
    for term, truth in (("samples", 0.1), ("updates", 2.0)):
        row = of_paper.loc[term]
        assert row["low"] < truth < row["high"], term
        assert row["high"] - row["low"] < 0.6 * truth, "narrow enough to tell"
    assert FAST not in study["fitted"], "a sweep of local batch sizes alone"
    tables = study["told"]
    sample = tables["one_gpu_energy"]["samples"]
    assert (sample["provenance"], sample["unit"]) == ("measured", "J")
    assert study["plane_sentence"].startswith(f"{PAPER} (measured): A sample costs")
    assert sample["value"] == pytest.approx(of_paper.loc["samples", "value"])
    assert tables["one_gpu"]["all"]["name"] == PAPER


def test_waiting_watts_and_time_give_the_energy_and_other_watts_do_not(study):
    """Runs of the grid draw the watts of idling while they wait: the minute called starved draws
    60 W more.
    """
    table = dict(study["told"]["phases_to_energy"])
    largest = table.pop("largest")
    waits = [run for run in gpu_grid() if step_s(run) > passes_s(run)]
    # no run of LBS 96 tells its power at work
    assert len(table) == sum(run.local_batch_size != 96 for run in waits) >= 9
    assert max(largest[rule] for rule in ("rate", "phases", "passes")) < 5
    for run in study["waiting"].to_dict("records"):
        row, at_work_W = table[run["run_id"]], run["power_W_at_work"]
        W_percent = 100 * (1 - run["rate"] / run["rate_at_work"]) / run["power_W"]
        assumed_W = {"rate_starved": 180, "half": at_work_W / 2, "work": at_work_W}
        for rule, watts in assumed_W.items():
            error = row["rate"] + W_percent * (watts - 120)
            assert row[rule] == pytest.approx(error), rule
    assert largest["rate"] == max(abs(row["rate"]) for row in table.values())
    assert f"{len(table)} runs that wait" in study["waiting_sentence"]


def test_an_estimate_from_time_is_not_set_beside_energy_from_time(tmp_path):
    shown = executed_on(tmp_path, studies.gpu(), "estimated")
    assert [*shown["errors"].index] == ["largest"] and not len(shown["table"])


def test_the_notebook_finds_what_each_choice_saves(study):
    savings = study["savings"].set_index("choice")
    others = {"all of fast", "all of fast, compiled", "sampled every 0.2 s"}
    assert set(savings.index) == others | one_gpu.SPEEDS.keys()
    anchor = gpu_grid()[0]

    def joules(run):
        return one_gpu.power_W(run, 0.5) * step_s(run) / run.global_batch_size

    truths = {
        "precision": replace(anchor, precision="bfloat16"),
        "channels_last": replace(anchor, channels_last=True),
        "sampled every 0.2 s": anchor,
    }
    for choice, run in truths.items():
        truth = 100 * (1 - joules(run) / joules(anchor))
        low, high = savings.loc[choice, ["low", "high"]]
        # drift is in the base
        assert low - 1 < truth < high + 1, choice


def test_a_sweep_of_local_batch_sizes_alone_fails(tmp_path, capsys):
    sweep = [
        run
        for run in gpu_grid()
        if run.workload == "resnet50"
        and not run.step_period_s
        and run.accumulation_steps == 1
    ]
    assert not executed_on(tmp_path, sweep)["fitted"]
    assert "cannot tell samples from updates" in capsys.readouterr().out


def test_every_run_of_the_grid_is_long_enough_for_its_sensors():
    """By what an H100 is expected to do, whichever choice of ``fast`` makes its steps shorter."""
    for run in gpu_grid():
        assert 20 <= run.epochs * steps_of(run) * step_s(run) < 80, run
