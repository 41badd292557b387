"""The table of the explorer: each run once, how it scatters, and whose it is."""

import pytest

from energynn.experiment import config
from energynn.measure import machine
from tests.analysis.conftest import write_run
from tests.analysis.notebook import execute

COMMAND = {"workload": "command", "system": "measured", "samples": False}


@pytest.fixture
def explored(tmp_path, monkeypatch):
    """Three repeats of one training, of which git has the first, beside a measured command."""
    folders = []
    for repeat, time_s in enumerate([60.0, 66.0, 72.0]):
        run = config.make("resnet50", repeat=repeat)
        about = {"run_id": f"{repeat}", "samples": False, "parts_W": {"cpu": 20.0}}
        folders.append(write_run(tmp_path, run, time_s=time_s, **about))
    run = config.make("resnet50", repeat=9)
    write_run(tmp_path, run, config={"command": "python a.py"}, run_id="a", **COMMAND)
    files = f"runs/README.md\nruns/local/{folders[0].name}/record.json"
    monkeypatch.setattr(machine, "call_git", lambda *words: files)
    build_dir = tmp_path / "build"
    return execute("90_explore", build_dir, runs_dir=str(tmp_path), live=False)


def test_each_run_is_one_point_and_mine_are_those_that_git_does_not_have(explored):
    points = explored["points"]
    published = points.query("origin == 'published'")
    assert len(published) == 28 and points["run"].is_unique
    assert (published["run_dir"] == "").all() and not published["is_mine"].any()
    # one run that two of the study's series share
    assert "R1|R4" in set(published["all_series"])
    # drawn on top: others' runs lie below one's own
    theirs, *mine = points["run"].tail(4)
    assert theirs == "0" and {*mine} == {"1", "2", "a"}
    assert [*points["is_mine"].tail(4)] == [False, True, True, True]
    command = points.iloc[-1]
    assert (command["kind"], command["command"]) == ("measured command", "python a.py")


def test_a_point_tells_the_scatter_of_its_repeats_in_small_units(explored):
    own = explored["points"].query("workload == 'resnet50' and run_dir != ''")
    # 20 W over 60, 66 and 72 s
    assert {*own["energy"]} == {"0.333 Wh", "0.367 Wh", "0.4 Wh"}
    assert {*own["repeats"]} == {"3: 0.367 Wh +- 9.1 %"}
    assert [*3.6e6 * own["low_kWh"]] == pytest.approx([1200] * 3, rel=1e-5)
    assert [*3.6e6 * own["high_kWh"]] == pytest.approx([1440] * 3, rel=1e-5)
