"""The Python interface: a table of all runs, traces, comparisons, and a meter of known truth."""

import re
import shutil

import numpy as np
import pandas as pd
import pytest

import energynn
from energynn import records
from energynn.analysis import interface, profiles
from energynn.host import files
from energynn.host.reading import read_json
from tests.conftest import POWER_W, TRAINING_S, write_runs
from tests.processes import answer, refused
from tests.run_files import edit


@pytest.fixture
def two_runs(tmp_path):
    """Two valid runs of two systems below tmp_path/runs."""
    return write_runs(tmp_path / "runs", "local", "other")


def test_own_and_published_runs_are_one_table_with_units(two_runs):
    runs = energynn.load(two_runs[0].parent.parent)
    assert (
        set(runs.origin.values) == {"published", "own"}
        and runs.energy_total_kWh.attrs["units"] == "kWh"
    )
    own = runs.sel(run=(runs.origin == "own").values)
    assert own.sizes["run"] == 2 and runs.attrs["excluded"] == []
    assert float(own.energy_total_kWh[0]) == pytest.approx(
        POWER_W * TRAINING_S / 3.6e6, rel=1e-3
    )
    assert own.provenance.values[0] == "simulated"
    assert np.isnan(own.energy_gpu_kWh).all()  # absent, not zero


def test_a_measured_command_is_in_the_table_as_what_it_is(two_runs, tmp_path):
    folder, made = two_runs
    told = {"command": "sleep 1", "local_batch_size": 32}
    command = {"workload": "command", "config": told}
    edit(made / "record.json", run_id="sleep-1", **command)
    runs = energynn.load(tmp_path / "runs")
    measured = runs.sel(run="sleep-1")
    assert measured.hardware == runs.hardware.sel(run=folder.name)
    assert (measured.origin, measured.label) == ("command", "sleep 1")
    # on two devices, as in the other tables
    assert measured.global_batch_size == 64 and not measured.name


def test_a_name_is_the_run_s_and_no_run_is_faster_than_itself(two_runs, tmp_path):
    edit(two_runs[0] / "record.json", name="mine")
    runs = energynn.load(tmp_path / "runs").sel(run=two_runs[0].name)
    assert (runs.name, runs.label, runs.series) == ("mine", "no series", "")
    assert np.isnan(runs.speed_up)
    words = f"export --runs-dir {tmp_path}/runs --csv {tmp_path}/a.csv --name"
    assert "1 runs; each" in answer(words, "mine")
    (tmp_path / "a.csv").unlink()
    assert "no run has the name min" in answer(words, "min", status=2)
    assert not (tmp_path / "a.csv").exists()


def test_power_over_time_and_what_is_no_run(two_runs, tmp_path):
    power = energynn.trace(two_runs[0], period_s=1.0)
    assert power.dims == ("sensor", "time") and power.attrs["units"] == "W"
    inside = power.sel(time=slice(1, TRAINING_S - 1))
    np.testing.assert_allclose(inside.values, POWER_W, rtol=1e-6)
    refused("means 0 runs", energynn.trace, tmp_path)
    again = two_runs[0] / "segment-2"
    again.mkdir()
    for path in two_runs[0].glob("*.jsonl"):
        shutil.copy(path, again)
    part = read_json(two_runs[0] / "record.json")["segments"][0]
    edit(two_runs[0] / "record.json", segments=[part, part])
    # in steps of which one lies after the end of the first start, and does not count
    power = energynn.trace(two_runs[0], period_s=0.5)
    assert power.sel(time=TRAINING_S + 3, method="nearest") == pytest.approx(POWER_W)
    steps = pd.DataFrame({"time_s": [0.5, 1.5, 2.1, 3.1], "power_W": 10.0})
    assert profiles.cumulate_energy_J(steps).iloc[-1] == 40


def test_runs_lie_at_any_depth_and_others_have_runs_of_the_same_name(two_runs):
    runs_dir = two_runs[0].parents[1]
    deep = runs_dir / "her" / "paper" / two_runs[0].name
    shutil.copytree(two_runs[0], deep)
    edit(deep / "record.json", training_time_s=9.0, files={})
    for folder in (two_runs[0], deep):
        edit(folder / "run.json", name="both")
    names = set(energynn.load(runs_dir).run.values)
    assert {deep.name, f"local/{deep.name}"} < names
    assert records.find_runs_of_name("both", runs_dir) == [deep, two_runs[0]]
    assert f"paper/{deep.name}" in energynn.compare(deep, two_runs[0])


def test_two_runs_side_by_side_with_their_ratio(two_runs):
    for folder, joules in zip(two_runs, (50.0, 100.0), strict=True):
        about = dict(run_id=str(joules), energy_total_bound_J=joules)
        energy_J = POWER_W * TRAINING_S * joules / 50
        edit(folder / "record.json", energy_total_J=energy_J, **about)
    busy = dict(
        cpu_time_s=30.0, cpu_time_others_s=70.0, energy_ram_provenance="measured"
    )
    edit(two_runs[1] / "record.json", **busy)
    table = energynn.compare(*two_runs)
    crowded, less, more, alone = table.attrs["remarks"]
    assert less == "50.0: its energy is CPU simulated"
    assert more == f"100.0{less[4:]}, RAM measured"
    assert crowded.startswith("100.0: others used 70% of the busy CPU time")
    assert alone.startswith("repeats of both")
    row = table.loc["energy_total_J"]
    assert row["ratio"] == pytest.approx(2)
    assert set(table.loc["energy_total_provenance", ["50.0", "100.0"]]) == {"simulated"}
    assert table.loc["system", "100.0"] == "other"
    bad, good = two_runs
    for folder in two_runs:
        edit(folder / "run.json", name="again")
    edit(bad / "record.json", status="failed", valid=False)
    told = energynn.compare("again", bad, runs_dir=bad.parents[1]).attrs["remarks"]
    assert told[0] == "again: without 1 unfinished or not valid"


def test_the_commands_show_and_export(two_runs, tmp_path):
    runs = ["--runs-dir", tmp_path / "runs"]
    shown = answer("show", two_runs[0], *runs)
    assert "0.667 Wh, simulated, good to within" in shown
    idle = dict(idle_power_gpu_before_W=61.0, idle_power_cpu_before_W=12.34)
    edit(two_runs[0] / "record.json", **idle)
    shown = answer("show", two_runs[0], "--details", *runs)
    assert re.search(r"TOTAL +24\d\d\.\d\d J +simulated", shown)
    assert "  idle, before: GPU 61.0 W, CPU 12.3 W\n" in shown
    # what was spent before a run began anew is told, and not added
    aside = two_runs[0].parent / "superseded"
    shutil.copytree(two_runs[0], aside / f"{records.read_record(two_runs[0]).run_id}.1")
    shown = answer("show", two_runs[0], *runs)
    assert f"begun anew: 1 before, in {aside}, do not count" in shown
    record, hers = records.read_record(two_runs[0]), tmp_path / "her" / "run"
    assert "begun anew" not in str(records.remarks_on_record(record, hers))
    shutil.rmtree(aside)
    factors = "--gco2-per-kwh 400 --price-per-kwh 0.3 --pue 1.5"
    said = answer(f"export --csv {tmp_path}/runs.csv {factors}", *runs)
    table = pd.read_csv(tmp_path / "runs.csv")
    assert {"published", "own"} <= set(table["origin"])
    assert table["CO2_g"].sum() == pytest.approx(600 * table["energy_total_kWh"].sum())
    assert f"price of all, where energies are known: {table['price'].sum():.4g}" in said


def test_own_runs_are_a_table_a_row_each_also_those_that_failed(two_runs, tmp_path):
    good, bad = two_runs
    records.save_record(bad, "failed", "rank 1: the disk is full")
    dead = tmp_path / "runs" / "local" / "dead"
    dead.mkdir()
    files.write_json(dead / "run.json", {})
    path = tmp_path / "own.csv"
    words = f"export --own --csv {path} --runs-dir {tmp_path}/runs"
    words += " --gco2-per-kwh 400 --price-per-kwh 0.3"
    answer(words)
    table = pd.read_csv(path).set_index("run_id")
    assert len(table) == 3 and table.loc[bad.name, "why"] == "rank 1: the disk is full"
    assert table["valid"].sum() == 1 and "no record" in table.loc["dead", "why"]
    run = table.loc[good.name]
    energy_J = POWER_W * TRAINING_S
    open_J = run["energy_bound_J"] + run["energy_systematic_J"]
    assert abs(run["energy_J"] - energy_J) < open_J < 0.1 * energy_J
    assert run["power_W"] == pytest.approx(POWER_W, rel=1e-3)
    assert (run["time_s"], run["top1_error"]) == (TRAINING_S, 0.25)
    assert run["CO2_g"] == pytest.approx(400 * energy_J / 3.6e6, rel=1e-3)
    assert run["system"] == "local" and "learning_rate" not in table  # no run differs
    always = ["devices", "nodes", "local_batch_size", "global_batch_size", "epochs"]
    always += ["repeat", "starts"]
    assert run[always].tolist()[:4] == [2, 1, 16, 32] and run["starts"] == 1
    with pytest.warns(match="no run below"):
        assert {*always} <= {*energynn.table(tmp_path / "nothing")}
    shown = energynn.table(tmp_path / "runs")
    assert list(shown["run_id"]) == list(table.index)


def test_a_workload_of_ones_own_stands_beside_the_study(two_runs, tmp_path):
    """On one and two devices it is a series, which has its name; nothing else changes."""
    for folder, devices in zip(two_runs, (1, 2), strict=True):
        about = {"workload": "words", "system": "local", "devices": devices}
        config = read_json(folder / "record.json")["config"] | about
        edit(folder / "record.json", run_id=f"words-{devices}", config=config, **about)
    runs = energynn.load(tmp_path / "runs")
    own = runs.sel(run=["words-1", "words-2"])
    assert set(own.origin.values) == {"own"} and runs.attrs["excluded"] == []
    assert own.series.values[0] == "words, constant LBS = 16"


@pytest.mark.parametrize("repeats, scatter", [(2, 0.02), (3, 0.1), (5, 0.05)])
def test_a_ratio_of_repeats_is_judged_right_where_its_truth_is_known(repeats, scatter):
    """Equal runs differ by chance, and then the interval holds 1; what differs by more is seen."""
    chance = np.random.default_rng(repeats)
    held, seen = [], []
    for _ in range(400):
        first, last = np.exp(chance.normal(0, [[scatter], [3 * scatter]], (2, repeats)))
        low, high = interface.ratio_interval(first, last)
        held.append(low < 1 < high)
        low, high = interface.ratio_interval(first, np.exp(20 * scatter) * last)
        seen.append(low > 1)
    assert 0.915 <= np.mean(held) <= 0.995
    assert np.mean(seen) > (0.9 if repeats > 2 else 0.2)
