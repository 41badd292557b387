"""What others published: unchanged, counted by rule, and never pooled over what was metered."""

import shutil
import statistics
from collections import Counter

import numpy as np
import pandas as pd
import pytest

from energynn.analysis import others
from energynn.data import manifests
from energynn.host.files import REPOSITORY
from energynn.host.reading import read_json
from tests.analysis import by_hand
from tests.analysis.by_hand import FOLDER, lines
from tests.analysis.notebook import execute
from tests.processes import refused


@pytest.fixture(scope="module")
def table():
    return others.load()


def test_a_changed_digit_is_refused(tmp_path, monkeypatch):
    shutil.copytree(FOLDER, tmp_path / "others")
    monkeypatch.setattr(manifests, "DATA_MANIFESTS", tmp_path)
    path = tmp_path / "others" / "mlperf_power.csv"
    path.write_text(path.read_text().replace("277.048", "277.049"))
    refused(r"others: .*mlperf_power.csv differs.*git checkout", others.load)


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
    refused(
        "node_AC.*node_DC.*select one energy_scope",
        others.means,
        table[table["file"] == "mlperf_power.csv"],
    )
    one = others.means(table[table["energy_scope"] == "node_AC"])
    pair = one[(one["workload"] == "resnet50") & (one["devices"] == 8)].iloc[0]
    runs = [lines("mlperf_power.csv")[row - 2] for row in pair["rows"]]
    assert {run["kind"] for run in runs} == {"node_AC"} and len(runs) == pair["repeats"]
    energy_J = sum(float(run["energy_J"]) for run in runs) / len(runs)
    assert pair["energy_total_kWh"] == pytest.approx(energy_J / 3.6e6, rel=1e-12)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """Execute notebook 75 with the records of one H200."""
    folder = tmp_path_factory.mktemp("beyond")
    (folder / "runs").mkdir()
    (folder / "runs" / "gpu-h200").symlink_to(REPOSITORY / "runs" / "gpu-h200")
    return execute("75_beyond_the_study", folder, runs_dir=str(folder / "runs"))


def test_an_outsider_gets_the_same_errors_prices_and_exponents(left):
    told = left["told"]
    h100 = lines("h100_waiting.csv")
    share, W = ([float(row[of]) for row in h100] for of in ("share_at_work", "mean_W"))
    less_kW = statistics.linear_regression(share, W).slope / 1000
    prices, errors = [], {"waiting": [], "factor": []}
    for (e1, h1, w1), (e2, h2, w2) in by_hand.pairs().values():
        few, many, hours = e1 / 3.6e6, e2 * w1 / w2 / 3.6e6, h2 * w1 / w2
        kW, added = few / h1, hours - h1
        errors["waiting"].append(100 * (few + (kW - less_kW) * added) / many - 100)
        errors["factor"].append(100 * kW * hours / many - 100)
        prices.append((many - few) / added / kW)
    for row, values in (
        (told["nodes_forecast"]["waiting"], errors["waiting"]),
        (told["nodes_forecast"]["factor"], errors["factor"]),
        (told["added_hours"]["SMC"], prices),
    ):
        assert [row["low"], row["high"]] == pytest.approx([min(values), max(values)])
    exponent = statistics.fmean(by_hand.exponents())
    assert told["beyond"]["exponent"]["value"] == pytest.approx(exponent, rel=1e-9)
    for row in told["beyond"].values():
        assert "mlcommons/training_results_v4.0 6fe95437" in row["source"]


def power_W(network: str, batch: str) -> float:
    """Of the A40 at its highest limit."""
    asked = {"gpu": "a40", "network": network, "batch_size": batch}
    asked["power_limit_W"] = "300"
    found = [row for row in lines("zeus_power.csv") if asked.items() <= row.items()]
    return float(found[0]["average_power_W"])


def test_an_outsider_gets_the_same_watts(left):
    told = left["told"]
    of = told["waiting_watts"]
    watts = {name: (of[name]["low_W"], of[name]["high_W"]) for name in of}
    a40 = power_W("shufflenetv2", "8"), power_W("ncf", "8")
    assert watts["A40"] == pytest.approx(a40)
    assert of["A40"]["high"] == pytest.approx(a40[1] / power_W("resnet50", "128"))
    # two jobs of the study, as perun printed them
    assert watts["A100"] == pytest.approx((137.393 / 2, 289.331 / 4))
    kinds = {}
    for path in (REPOSITORY / "runs/gpu-h200").glob("gpu_minutes*/record.json"):
        record = read_json(path)
        of_run = record["energy_gpu_J"] / record["training_time_s"]
        kinds.setdefault(record["config"]["kind"], []).append(of_run)
    assert watts["H200"][0] <= kinds["idle"][0]
    assert watts["H200"][1] == pytest.approx(kinds["starved"][0])
    assert of["H200"]["at_work_W"] == pytest.approx(max(kinds["work"]))
    models = [told["waiting_all"][which]["models"] for which in ("published", "all")]
    assert models == [6, 7]


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


def test_host_bound_is_what_neither_batch_nor_limit_makes_slower(left):
    count = left["host_bound"]
    # the host takes 0.1 s, the GPU 1 ms for a sample: twice 32 samples still wait, twice 64 do not
    assert count(steps(0.1, 0.001, 0.0, 1.0), 10) == 4
    # by a limit that halves the GPU's pace the step of 64 samples is slower than the host
    assert count(steps(0.1, 0.001, 0.0, 2.0), 10) == 4
    assert count(steps(0.1, 0.001, 0.0, 5.0), 10) == 3
    # small kernels take as long for any batch, and nothing waits for the host
    assert count(steps(0.0, 0.001, 0.1, 1.3), 10) == 0
    # below the limit it is not told
    assert count(steps(0.0, 0.001, 0.1, 1.05), 10) == 4
    assert count(steps(0.0, 0.001, 0.0, 1.0), 10) == 0


def test_labels_are_exchanged_where_the_gpu_says_nothing(left):
    random = np.random.default_rng(46)
    of_gpu = np.array([[35.0], [70.0], [90.0], [150.0]])
    same = left["explained_share"](
        pd.DataFrame(of_gpu * random.lognormal(0, 0.02, (4, 2)))
    )
    assert same["share"] > 0.98 and same["as_large"] == 1 and same["orders"] == 24
    chance = [
        left["explained_share"](pd.DataFrame(random.lognormal(4, 0.5, (4, 2))))
        for _ in range(300)
    ]
    assert 0.4 < np.mean([one["share"] for one in chance]) < 0.6
    as_large = np.array([one["as_large"] for one in chance])
    assert 0.02 < (as_large <= 1).mean() < 0.07 and 11 < as_large.mean() < 14


def test_the_price_of_an_added_hour_is_the_slope_over_the_base(left):
    hours = np.array([13.0, 10.0, 15.0])
    runs = pd.DataFrame({"gpu_hours": hours, "energy_total_kWh": 3 + 0.2 * hours})
    found = left["price"](runs)
    assert found["kW"] == pytest.approx(0.2) and found["times"] == pytest.approx(1.5)
    assert found["price"] == pytest.approx(0.2 / 0.5)
    assert left["prices"](runs.assign(name="a"), ["name"], 1.6).empty


def test_where_the_waiting_power_is_known_its_intervals_hold_it(left):
    """Worlds: work of 3 kWh, networks whose waiting powers differ, runs of unlike length."""
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


@pytest.mark.parametrize(
    "rule, added_kW", [("waiting", 0.5), ("half", 0.45), ("factor", 0.9)]
)
def test_each_rule_is_right_in_its_own_world_alone(left, monkeypatch, rule, added_kW):
    """A world: one node draws 0.9 kW for each GPU hour, and further hours draw ``added_kW``."""
    smc = left["smc"]
    first = smc[smc["devices"] == 8].groupby("workload")[["gpu_hours", "work"]].mean()
    base_h = smc["workload"].map(first["gpu_hours"])
    work = smc["work"] / smc["workload"].map(first["work"])
    kWh = 0.9 * base_h * work + added_kW * (smc["gpu_hours"] - base_h * work)
    kWh = kWh.where(smc["devices"] > 8, 0.9 * smc["gpu_hours"])
    world = smc.assign(energy_total_kWh=kWh)
    monkeypatch.setitem(left["measure"].__globals__, "smc", world)
    nodes = left["measure"]("node_AC")
    assert nodes["wait_value"].to_numpy() == pytest.approx([added_kW] * 4, rel=0.01)
    errors = left["forecasts"](nodes, 0.4)
    assert errors.pop(rule).to_numpy() == pytest.approx([0] * 4, abs=0.3)
    assert (errors.drop(columns="root").abs() > 0.8).all(axis=None)
    # switches that only many nodes need raise the exponent
    alone, with_switches = (left["exponents"](nodes, kW) for kW in (0.0, 0.2))
    assert (alone < 0.99).all(axis=None) == (rule != "factor")
    assert (with_switches > alone + 0.1).all(axis=None)


@pytest.mark.parametrize("slower, is_right", [(1.0, True), (2.0, False)])
def test_the_forecast_of_time_is_judged_by_what_the_many_nodes_took(
    left, slower, is_right
):
    """A world of 10 s for each epoch, and 2500 images a second of each GPU; beyond two nodes as
    well, or all twice as slow.
    """
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
