"""Power over time: within the training, and as one picture of one run."""

import pytest

import energynn
from energynn.analysis import one_run, profiles
from energynn.experiment import config
from energynn.host.reading import read_json
from tests.analysis.conftest import POWER_W, write_run
from tests.processes import answer
from tests.run_files import write_marks


def test_own_traces_lie_within_the_training(tmp_path):
    run_dir = write_run(
        tmp_path, config.make("resnet50", devices=2, local_batch_size=16)
    )
    profile = profiles.load_power_profile(run_dir, 0.5)
    length_s = read_json(run_dir / "record.json")["training_time_s"]
    assert (
        0 < profile["time_s"].min()
        and length_s - 1 < profile["time_s"].max() < length_s
    )
    # its dips come every five seconds
    assert profile["power_W"].min() == pytest.approx(5, abs=0.1)
    assert set(profile["component"]) == {"cpu"}


ENERGY = {"time (s)", "energy (Wh)"}


def drawn(run_dir):
    """Return the tables of the picture of a run by the columns that they have."""
    tables = one_run.draw_run(run_dir).to_dict()["datasets"].values()
    return {frozenset(table[0]): table for table in tables}


def test_the_picture_of_a_run_has_its_energy_and_the_error_at_each_epoch(tmp_path):
    # as the record joins them
    history = [
        {"epoch": number, "training_loss": 1 / number, "top1_error": error}
        for number, error in ((1, 0.9), (2, 0.7))
    ]
    run = write_run(tmp_path, config.make("resnet50"), time_s=30.0, history=history)
    # the second epoch was made again, from a checkpoint
    ends = [("epoch", s, dict(epoch=n)) for n, s in ((1, 10), (2, 18), (2, 20))]
    write_marks(run, [("training_start", 0, {}), *ends, ("training_end", 30, {})])
    tables = drawn(run)
    (epochs,) = [table for names, table in tables.items() if "epoch" in names]
    assert [row["top1_error"] for row in epochs] == [0.9, 0.7]
    assert [row["time (s)"] for row in epochs] == [10, 20]
    energy = tables[frozenset(ENERGY)]
    watts = POWER_W[1]
    # 5 W for half a second of every five
    mean_W = 0.9 * watts + 0.1 * 5
    assert energy[-1]["energy (Wh)"] == pytest.approx(mean_W * 30 / 3600, rel=0.02)
    assert epochs[0]["energy (Wh)"] == pytest.approx(mean_W * 10 / 3600, rel=0.03)
    (run / "run.json").write_text("{}")
    table = energynn.epochs(run)
    assert table["energy_so_far_J"].to_list() == pytest.approx(
        [mean_W * 10, mean_W * 20], 0.02
    )
    assert table["top1_error"].to_list() == [0.9, 0.7]
    assert set(table["provenance"]) == {"simulated"}


def test_a_picture_is_one_command(tmp_path):
    told = ("cpu_bound", "cpu_systematic", "total_bound", "total_systematic")
    about = {f"energy_{name}_J": 1.0 for name in told} | {"flags": []}
    run = write_run(tmp_path, config.make("resnet50"), **about)
    without = write_run(tmp_path, config.make("resnet50", seed=1), samples=False)
    said = ""
    for run_dir, name in ((run, "a.gif"), (without, "a.svg")):
        (run_dir / "run.json").write_text("{}")
        said += answer(f"show {run_dir} --plot", tmp_path / name, status=2)
    assert "must end with one of .svg" in said
    assert not list(tmp_path.glob("a.*"))
    for name in ("a.svg", "a.html"):
        answer(f"show {run} --plot", tmp_path / name)
        text = (tmp_path / name).read_text()
        assert (
            "power (W)" in text and "energy (Wh)" in text and "cpu, simulated" in text
        )
        assert "e+308" not in text  # a width without an end
        assert "training loss" not in text and 'src="http' not in text
