"""What others published: unchanged, counted by rule, and never pooled over what was metered."""

import math
import shutil
import statistics
from collections import Counter

import numpy as np
import pandas as pd
import pytest

from energynn.analysis import others
from energynn.data import manifests
from energynn.host.files import REPOSITORY
from energynn.host.reading import json_table
from tests.analysis import by_hand
from tests.analysis.by_hand import FOLDER, lines
from tests.analysis.notebook import execute


@pytest.fixture(scope="module")
def table():
    return others.load()


def test_a_changed_digit_is_refused(tmp_path, monkeypatch):
    shutil.copytree(FOLDER, tmp_path / "others")
    monkeypatch.setattr(manifests, "DATA_MANIFESTS", tmp_path)
    path = tmp_path / "others" / "mlperf_power.csv"
    path.write_text(path.read_text().replace("277.048", "277.049"))
    with pytest.raises(
        ValueError, match=r"others: .*mlperf_power.csv differs.*git checkout"
    ):
        others.load()


def test_rows_are_left_out_by_the_first_rule_and_counted(table):
    counted = {}
    for one in table.attrs["left_out"]:
        counted.setdefault(one["file"], []).append(one["rows"])
    met = (
        lambda row: row["status"] != "success",
        lambda row: row["division"] != "closed",
        lambda row: row["duplicate"] == "1",
        lambda row: not row["devices"] or not row["global_batch_size"],
    )
    for name in ("mlperf_resnet.csv", "mlperf_hpc.csv"):
        first = Counter()
        for row in lines(name):
            rules = [number for number, rule in enumerate(met) if rule(row)]
            first[min(rules, default="kept")] += 1
        assert counted[name] == [first[number] for number in range(len(met))]
        assert (table["file"] == name).sum() == first["kept"]
    assert sum(counted["mlperf_resnet.csv"]) > 300


def test_each_row_names_its_line_and_commit(table):
    assert set(table["provenance"]) == {"published by others"}
    assert table["commit"].notna().all()
    of_file = {name: lines(name) for name in table["file"].unique()}
    for row in table.iloc[::97].itertuples():
        line = of_file[row.file][row.row - 2]
        batch = line.get("global_batch_size") or line.get("batch_size")
        assert float(batch or "nan") == pytest.approx(
            row.global_batch_size, nan_ok=True
        )
        seconds = line.get("time_to_train_s") or line.get("time_per_epoch_s")
        if seconds:
            assert float(seconds) == pytest.approx(3600 * row.training_time_h)


def test_what_was_metered_is_never_pooled(table):
    scopes = Counter(table["energy_scope"])
    assert (scopes["node_AC"], scopes["node_DC"]) == (198, 153)
    with pytest.raises(ValueError, match="node_AC.*node_DC.*select one energy_scope"):
        others.means(table[table["file"] == "mlperf_power.csv"])
    one = others.means(table[table["energy_scope"] == "node_AC"])
    pair = one[(one["workload"] == "resnet50") & (one["devices"] == 8)].iloc[0]
    runs = [lines("mlperf_power.csv")[row - 2] for row in pair["rows"]]
    assert {run["kind"] for run in runs} == {"node_AC"} and len(runs) == pair["repeats"]
    energy_J = sum(float(run["energy_J"]) for run in runs) / len(runs)
    assert pair["energy_total_kWh"] == pytest.approx(energy_J / 3.6e6, rel=1e-12)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """Execute notebook 75 with the records of one H200: its globals, and the numbers it leaves."""
    folder = tmp_path_factory.mktemp("beyond")
    (folder / "runs").mkdir()
    (folder / "runs" / "gpu-h200").symlink_to(REPOSITORY / "runs" / "gpu-h200")
    folders = {"runs_dir": str(folder / "runs"), "build_dir": str(folder)}
    left = execute("75_beyond_the_study", **folders)
    return left, json_table(folder / "numbers" / "75_beyond_the_study.json")


def rules_by_hand() -> dict[str, list[float]]:
    """Errors in % on the many nodes; 406 W by the line through the six runs of the H100."""
    h100 = lines("h100_waiting.csv")
    share, W = ([float(row[of]) for row in h100] for of in ("share_at_work", "mean_W"))
    less_kW = statistics.linear_regression(share, W).slope / 1000
    errors = {"waiting": [], "factor": [], "half": [], "root": []}
    for (e1, h1, w1), (e2, h2, w2) in by_hand.pairs().values():
        few, many, hours = e1 / 3.6e6, e2 * w1 / w2 / 3.6e6, h2 * w1 / w2
        kW, added = few / h1, hours - h1
        errors["waiting"].append(100 * (few + (kW - less_kW) * added) / many - 100)
        errors["factor"].append(100 * kW * hours / many - 100)
        errors["half"].append(100 * (few + kW / 2 * added) / many - 100)
        errors["root"].append(100 * few * math.sqrt(hours / h1) / many - 100)
    return errors


def test_an_outsider_gets_the_same_errors_and_exponents(notebook):
    _, told = notebook
    for rule, errors in rules_by_hand().items():
        row = told["nodes_forecast"][rule]
        assert [row["low"], row["high"]] == pytest.approx([min(errors), max(errors)])
        assert row["most"] == pytest.approx(max(map(abs, errors)))
        rms = math.sqrt(statistics.fmean(error**2 for error in errors))
        assert row["rms"] == pytest.approx(rms)
    exponent = statistics.fmean(by_hand.exponents())
    assert told["beyond"]["exponent"]["value"] == pytest.approx(exponent, rel=1e-9)
    for row in told["beyond"].values():
        assert "mlcommons/training_results_v4.0 6fe95437" in row["source"]
        assert row["provenance"] == "published by others"
    prices = []
    for (e1, h1, w1), (e2, h2, w2) in by_hand.pairs().values():
        prices.append((e2 * w1 / w2 - e1) / (h2 * w1 / w2 - h1) / (e1 / h1))
    assert told["added_hours"]["SMC"]["low"] == pytest.approx(min(prices))
    assert told["added_hours"]["SMC"]["high"] == pytest.approx(max(prices))


def power_W(gpu: str, network: str, batch: int, limit_W: int) -> list[float]:
    asked = {"gpu": gpu, "network": network, "batch_size": str(batch)}
    return [
        float(row["average_power_W"])
        for row in lines("zeus_power.csv")
        if asked.items() <= row.items() and row["power_limit_W"] == str(limit_W)
    ]


def test_an_outsider_gets_the_same_watts(notebook):
    _, told = notebook
    watts = told["waiting_watts"]
    waits = power_W("a40", "ncf", 8, 300) + power_W("a40", "shufflenetv2", 8, 300)
    (work,) = power_W("a40", "resnet50", 128, 300)
    a40 = [watts["A40"][name] for name in ("low_W", "high_W", "low", "high")]
    ends = min(waits), max(waits)
    assert a40 == pytest.approx([*ends, *(W / work for W in ends)], abs=1e-3)
    in_collective = [float(row["in_collective_W"]) for row in lines("h100_waiting.csv")]
    assert watts["H100"]["low_W"] == min(in_collective)
    # two jobs of the study, as perun printed them
    assert watts["A100"]["low_W"] == pytest.approx(137.393 / 2)
    assert watts["A100"]["high_W"] == pytest.approx(289.331 / 4)
    kinds = {"idle": [], "starved": [], "simulated_collective": [], "work": []}
    for path in (REPOSITORY / "runs/gpu-h200").glob("gpu_minutes*/record.json"):
        record = json_table(path)
        of_run = record["energy_gpu_J"] / record["training_time_s"]
        kinds[record["config"]["kind"]].append(of_run)
    assert watts["H200"]["high_W"] == pytest.approx(max(kinds["starved"]))
    assert watts["H200"]["at_work_W"] == pytest.approx(max(kinds["work"]))
    assert watts["H200"]["low_W"] <= min(kinds["idle"])
    assert watts["H200"]["provenance"] == "measured"
    every = told["waiting_all"]
    assert (every["published"]["models"], every["all"]["models"]) == (6, 7)


def steps(host_s: float, sample_s: float, kernel_s: float, slower: float):
    """A world: batches of 4 to 256; a step lasts as long as the host or the GPU takes, whose part
    the lowest power limit stretches.
    """
    batch = 2.0 ** np.arange(2, 9)
    gpu_s = np.maximum(kernel_s, sample_s * batch)
    times = {
        name: np.maximum(host_s, stretched * gpu_s) / batch
        for name, stretched in {"time_s": 1.0, "limited_s": slower}.items()
    }
    return pd.DataFrame({"global_batch_size": batch, **times})


def test_host_bound_is_what_neither_batch_nor_limit_makes_slower(notebook):
    left, _ = notebook
    count = left["host_bound"]
    # the host takes 0.1 s, the GPU 1 ms for a sample: twice 32 samples still wait, twice 64 do not
    assert count(steps(0.1, 0.001, 0.0, 1.0), 10) == 4
    # by a limit that halves the GPU's pace the step of 64 samples is slower than the host
    assert count(steps(0.1, 0.001, 0.0, 2.0), 10) == 4
    assert count(steps(0.1, 0.001, 0.0, 5.0), 10) == 3
    # small kernels take as long for any batch, and nothing waits for the host
    assert count(steps(0.0, 0.001, 0.1, 1.3), 10) == 0
    assert (
        count(steps(0.0, 0.001, 0.1, 1.05), 10) == 4
    )  # below the limit it is not told
    assert count(steps(0.0, 0.001, 0.0, 1.0), 10) == 0


def test_labels_are_exchanged_where_the_gpu_says_nothing(notebook):
    left, _ = notebook
    random = np.random.default_rng(46)
    of_gpu = np.array([[35.0], [70.0], [90.0], [150.0]])
    same = left["explained"](pd.DataFrame(of_gpu * random.lognormal(0, 0.02, (4, 2))))
    assert same["share"] > 0.98 and same["as_large"] == 1 and same["orders"] == 24
    chance = [
        left["explained"](pd.DataFrame(random.lognormal(4, 0.5, (4, 2))))
        for _ in range(300)
    ]
    assert 0.4 < np.mean([one["share"] for one in chance]) < 0.6
    as_large = np.array([one["as_large"] for one in chance])
    assert 0.02 < (as_large <= 1).mean() < 0.07 and 11 < as_large.mean() < 14


def test_the_price_of_an_added_hour_is_the_slope_over_the_base(notebook):
    left, _ = notebook
    hours = np.array([13.0, 10.0, 15.0])
    runs = pd.DataFrame({"gpu_hours": hours, "energy_total_kWh": 3 + 0.2 * hours})
    found = left["price"](runs)
    assert found["kW"] == pytest.approx(0.2) and found["times"] == pytest.approx(1.5)
    assert found["price"] == pytest.approx(0.2 / 0.5)
    short = left["prices"](runs.assign(name="a"), ["name"], 1.6)
    assert short.empty and list(short.columns) == ["name", "kW", "price", "times"]


def test_where_runs_scatter_as_assumed_the_range_holds_the_price(notebook):
    left, _ = notebook
    random, held = np.random.default_rng(8), []
    covariance = [[1, 0.8], [0.8, 1]]
    for _ in range(200):
        runs = []
        for hours in (100.0, 150.0):
            e, h = random.multivariate_normal([0, 0], covariance)
            kWh, hours_h = (
                (10 + 0.15 * hours) * (1 + e * 2 / 52),
                hours * (1 + h * 10 / 280),
            )
            values = {"energy_total_kWh": kWh, "gpu_hours": hours_h}
            rounding = {"energy_total_kWh_half": 0.005, "gpu_hours_half": 0.005}
            runs.append({"workload": "fourcastnet", **values, **rounding})
        ends = left["assumed"](*runs, draws=500)
        held.append(ends["low"] < 0.15 / 0.25 < ends["high"])
    assert 0.91 < np.mean(held) < 0.99


def test_where_the_waiting_power_is_known_its_intervals_hold_it(notebook):
    """Worlds: work of 3 kWh, networks whose waiting powers differ, runs of unlike length."""
    left, _ = notebook
    random = np.random.default_rng(34)
    held, mean_held = [], []
    for _ in range(400):
        found = []
        for true in random.normal(0.45, 0.04, 4):
            cells = []
            for hours in (3.0, 4.5):
                work = random.lognormal(0, 0.2, 8)
                of_run = hours * work * random.lognormal(0, 0.01, 8)
                energy = 3.0 * work + true * of_run + random.normal(0, 0.02, 8)
                columns = {"energy_total_kWh": energy, "gpu_hours": of_run}
                cells.append(pd.DataFrame(columns | {"work": work}))
            few, many = cells
            several = ["energy_total_kWh", "gpu_hours"]
            many[several] *= few["work"].mean() / many["work"].mean()
            kW = left["waiting"](few, many)
            held.append(kW["low"] < true < kW["high"])
            found.append(kW["value"])
        of_machine = left["mean_t"](found)
        mean_held.append(of_machine["low"] < 0.45 < of_machine["high"])
    assert 0.93 < np.mean(held) < 0.97
    assert 0.92 < np.mean(mean_held) < 0.98


@pytest.fixture
def measured(notebook, monkeypatch):
    """What the notebook finds in place of one machine's runs in a world: networks and errors."""
    left, _ = notebook

    def measured_in(added_kW, network_kW=0.0):
        """One node draws 0.9 kW for each GPU hour, and further hours draw ``added_kW``."""
        smc = left["smc"]
        first = smc[smc["devices"] == 8].groupby("workload")[["gpu_hours", "work"]]
        base_h = smc["workload"].map(first.mean()["gpu_hours"])
        work = smc["work"] / smc["workload"].map(first.mean()["work"])
        added_h = smc["gpu_hours"] / work - base_h
        kWh = work * (0.9 * base_h + added_kW * added_h)
        kWh = kWh.where(smc["devices"] > 8, 0.9 * smc["gpu_hours"])
        world = smc.assign(energy_total_kWh=kWh)
        monkeypatch.setitem(left["measure"].__globals__, "smc", world)
        nodes = left["measure"]("node_AC")
        return (
            nodes,
            left["forecasts"](nodes, 0.4),
            left["exponents"](nodes, network_kW),
        )

    return measured_in


@pytest.mark.parametrize(
    "rule, added_kW", [("waiting", 0.5), ("half", 0.45), ("factor", 0.9)]
)
def test_each_rule_is_right_in_its_own_world_alone(measured, rule, added_kW):
    nodes, errors, _ = measured(added_kW)
    assert nodes["wait_value"].to_numpy() == pytest.approx([added_kW] * 4, rel=0.01)
    assert errors[rule].to_numpy() == pytest.approx([0] * 4, abs=0.3)
    for other in {"waiting", "half", "factor"} - {rule}:
        assert (errors[other].abs() > 0.8).all()


def test_a_network_that_only_many_nodes_need_raises_the_exponent(measured):
    proportional, with_network = (measured(0.9, kW)[2] for kW in (0.0, 0.2))
    assert proportional.to_numpy() == pytest.approx(np.ones((4, 2)), abs=0.02)
    assert (with_network.to_numpy() > 1.05).all()
    assert (measured(0.4)[2]["per work"] < 0.9).all()


@pytest.mark.parametrize("slower, is_right", [(1.0, True), (2.0, False)])
def test_the_forecast_of_time_is_judged_by_what_the_many_nodes_took(
    notebook, slower, is_right
):
    """A world of 10 s for each epoch, and 2500 images a second of each GPU; beyond two nodes as
    well, or all twice as slow.
    """
    left, _ = notebook
    devices = np.array([8, 16, 32, 64])
    nodes = devices // 8
    epoch_s = 10 + 1281167 / (2500 * devices)
    epoch_s *= np.where(nodes > 2, slower, 1.0)
    columns = {"devices": devices, "nodes": nodes, "per_node": 8, "repeats": 5}
    of = pd.DataFrame(columns | {"local_batch_size": 256, "epoch_s": epoch_s})
    found = left["epochs_on_more_nodes"](of, 100)
    assert list(found["devices"]) == [32, 64]
    assert (found["inside"] == is_right).all()
    off = 100 / slower - 100
    assert found["error"].to_numpy() == pytest.approx([off] * 2, abs=8)
