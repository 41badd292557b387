"""What others published: unchanged, counted by rule, and never pooled over what was metered."""

import shutil
import statistics
from collections import Counter

import numpy as np
import pandas as pd
import pytest

from energynn.analysis import others
from energynn.data import manifests
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
    """Execute notebook 75: its globals, and the numbers that it leaves."""
    folder = tmp_path_factory.mktemp("beyond")
    left = execute("75_beyond_the_study", build_dir=str(folder))
    return left, json_table(folder / "numbers" / "75_beyond_the_study.json")["beyond"]


def beyond_by_hand() -> dict[tuple[str, str], float]:
    kW, ratio, marginal = {}, {}, {}
    forecast, factor = {}, {}
    for name, ((e1, h1, w1), (e2, h2, w2)) in by_hand.pairs().items():
        e2, h2 = e2 * w1 / w2, h2 * w1 / w2
        kW[name] = (e2 - e1) / 3.6e6 / (h2 - h1)
        ratio[name] = e1 / 3.6e6, h1, e2 / 3.6e6, h2
        marginal[name] = (e2 / e1 - 1) / (h2 / h1 - 1)
    for name, (e1, h1, e2, h2) in ratio.items():
        rest = sum(kW[other] for other in kW if other != name) / 3
        forecast[name] = 100 * ((e1 + rest * (h2 - h1)) / e2 - 1)
        factor[name] = 100 * (e1 / h1 * h2 / e2 - 1)
    average, spread = statistics.fmean(kW.values()), statistics.stdev(kW.values())
    return {
        ("wait", "value"): average,
        ("wait", "high"): average + 3.182446305284 * spread / 2,
        ("exponent", "value"): statistics.fmean(by_hand.exponents()),
        ("marginal", "value"): statistics.fmean(marginal.values()),
        ("forecast", "most"): max(map(abs, forecast.values())),
        ("factor", "high"): max(factor.values()),
    }


def test_an_outsider_gets_the_same_digits(notebook):
    left, told = notebook
    expected = beyond_by_hand()
    marginal = expected.pop(("marginal", "value"))
    assert left["means"]["node_AC, marginal"]["value"] == pytest.approx(marginal)
    for (row, column), value in expected.items():
        assert told[row][column] == pytest.approx(value, rel=1e-9), (row, column)
    for row in told.values():
        assert "mlperf_power.csv" in row["source"]
        assert "mlcommons/training_results_v4.0 6fe95437" in row["source"]
        assert row["provenance"] == "published by others"
    epochs = [
        float(row["epochs_at_last_eval"])
        for row in lines("mlperf_resnet.csv")
        if row["system"] == "2xXE8545x4A100-SXM-40GB" and row["duplicate"] == "0"
    ]
    assert set(epochs) == {left["small"]["epochs"].median()}


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


def of_one_machine(smc: pd.DataFrame, kW: dict[str, float]) -> pd.DataFrame:
    """A world: its runs' work and GPU hours, 2 kWh for the mean work, and these waiting powers."""
    work = smc["work"] / smc.groupby("workload")["work"].transform("mean")
    waits = smc["workload"].map(kW).fillna(0.4) * smc["gpu_hours"]
    return smc.assign(energy_total_kWh=2.0 * work + waits)


@pytest.fixture
def measured(notebook, monkeypatch):
    """What the notebook finds in place of one machine's runs in a world."""
    left, _ = notebook

    def measured_in(world: pd.DataFrame) -> pd.DataFrame:
        monkeypatch.setitem(left["measure"].__globals__, "smc", world)
        return left["measure"]("node_AC").astype(float)

    return measured_in


def test_the_rule_is_right_where_waiting_is_the_machines(notebook, measured):
    left, _ = notebook
    found = measured(of_one_machine(left["smc"], {}))
    assert found["wait_value"].to_numpy() == pytest.approx([0.4] * 4)
    assert found["forecast"].to_numpy() == pytest.approx([0] * 4, abs=1e-9)
    assert (found["factor"] > 5).all()
    exponents = left["exponents"](found)
    assert (exponents["per work"] < 0.9).all() and (exponents["marginal"] < 0.9).all()


def test_the_rule_is_wrong_where_waiting_is_the_networks(notebook, measured):
    left, _ = notebook
    kW = {"llama2_70b_lora": 0.2, "resnet50": 0.4, "ssd": 0.4, "unet3d": 0.8}
    found = measured(of_one_machine(left["smc"], kW))
    for name, true in kW.items():
        row = found.loc[name]
        assert row["wait_value"] == pytest.approx(true)
        others_kW = (sum(kW.values()) - true) / 3
        added = row["gpu_hours_many"] - row["gpu_hours_few"]
        off = 100 * (others_kW - true) * added / row["energy_total_kWh_many"]
        assert row["forecast"] == pytest.approx(off) and abs(off) > 1


def test_where_energy_is_a_factor_the_factor_is_right(notebook, measured):
    left, _ = notebook
    scatter = np.random.default_rng(75).normal(0.9, 1e-4, len(left["smc"]))
    world = left["smc"].assign(energy_total_kWh=scatter * left["smc"]["gpu_hours"])
    found = measured(world)
    assert found["factor"].to_numpy() == pytest.approx([0] * 4, abs=0.1)
    exponents = left["exponents"](found)
    assert exponents.to_numpy(float) == pytest.approx(np.ones((4, 3)), abs=0.01)
    # A network that only the many nodes need makes it more than in proportion.
    with_network = left["exponents"](found, 0.2)
    assert (with_network.to_numpy(float) > 1.05).all()


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
