"""What others published: unchanged, counted by rule, and never pooled over what was metered."""

import csv
import shutil
from collections import Counter

import pytest

from energynn import files
from energynn.analysis import others
from energynn.data import manifests

FOLDER = files.DATA_MANIFESTS / "others"


@pytest.fixture(scope="module")
def table():
    return others.load()


def lines(name: str) -> list[dict]:
    with open(FOLDER / name, newline="") as file:
        return list(csv.DictReader(file))


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
