"""The published values are what was published, and say so."""

import hashlib

import pytest

from energynn.analysis import published


def test_files_are_those_of_the_checksums():
    lines = (published.PUBLISHED / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split() for line in lines)}
    assert set(listed) == {path.name for path in published.PUBLISHED.glob("*.csv")}
    for name, digest in listed.items():
        assert hashlib.sha256((published.PUBLISHED / name).read_bytes()).hexdigest() == digest, name


@pytest.mark.parametrize(("name", "rows"), [
    ("resnet50_scaled_dataset", 18), ("fourcastnet_table1", 6), ("fourcastnet_text", 3), ("stated_intervals", 6),
])  # fmt: skip
def test_every_row_says_where_it_stands(name, rows):
    table = published.read(name)
    assert len(table) == rows
    assert (table["provenance"] == "published").all()
    for column in ("stands_in", "source_version"):
        assert table[column].str.len().gt(0).all()
    spreads = [column for column in table if column.endswith("_std")]
    for column in spreads:  # a spread names its divisor
        assert table.loc[table[column].notna(), "std_ddof"].notna().all()


def test_the_shared_run_counts_once():
    table = published.measurements()
    resnet = table[table["workload"] == "resnet50"]
    assert len(resnet) == 18 and len(published.distinct(resnet)) == 17
    shared = resnet[(resnet["devices"] == 32)]
    assert set(shared["series"]) == {"R4", "R6"} and shared["energy_total_kWh"].nunique() == 1
    assert len(published.distinct(table)) == len(table) - 1


def test_values_agree_with_each_other():
    table1 = published.read("fourcastnet_table1")
    assert (table1["devices"] * table1["training_time_h"]).to_list() == pytest.approx(table1["gpu_hours"], rel=1e-3)
    for name in ("fourcastnet_table1", "resnet50_scaled_dataset"):
        table = published.read(name)
        assert (table["devices"] * table["local_batch_size"] == table["global_batch_size"]).all()
    resnet = published.read("resnet50_scaled_dataset")
    most = resnet["series"].map({"R4": 256, "R5": 16, "R6": 256})
    assert (resnet["dataset_samples"] == 1281167 * resnet["devices"] // most).all()
    stated = published.stated_intervals()
    assert (stated["low_kW"] < stated["high_kW"]).all()


def test_an_unknown_file_names_the_known_ones():
    with pytest.raises(ValueError, match="fourcastnet_table1"):
        published.read("table_9")
