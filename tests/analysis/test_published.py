"""The published values are what was published, and say so."""

import hashlib

import pytest

from energynn.analysis import published

TABLE1 = {  # device, GPUs: energy, time, GPU hours, typed here once more from the paper
    ("H100", 4): (115.63, 105.32, 421.26),
    ("A100", 4): (120.70, 139.92, 559.70),
    ("H100", 16): (145.31, 32.26, 516.18),
    ("A100", 16): (144.87, 43.28, 692.55),
    ("H100", 32): (174.25, 20.72, 663.13),
    ("A100", 32): (175.72, 28.42, 909.31),
}


def test_files_are_those_of_the_checksums():
    lines = (published.PUBLISHED / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split() for line in lines)}
    assert set(listed) == {
        path.name
        for path in published.PUBLISHED.iterdir()
        if path.suffix in (".csv", ".toml")
    }
    for name, digest in listed.items():
        assert (
            hashlib.sha256((published.PUBLISHED / name).read_bytes()).hexdigest()
            == digest
        ), name


def test_every_value_says_what_it_is_and_where_it_stands():
    table = published.values()
    assert (table["provenance"] == "published").all()
    for column in ("quantity", "kind", "stands_in", "source_version"):
        assert table[column].str.len().gt(0).all(), column
    known = table[table["kind"] != "picture"]
    assert (known["value"].notna() | known["low"].notna() | known["high"].notna()).all()
    pictures = published.values("picture")
    assert (
        pictures[["value", "low", "high", "spread"]].isna().all(axis=None)
        and len(pictures) > 50
    )  # no invented point
    spreads = table[table["spread"].notna()]
    assert len(spreads) == 17 * 2 + 3 + 2 * 8 and spreads["spread_ddof"].notna().all()
    assert not table.duplicated([name for name in table if name != "note"]).any()
    of_repository = table[table["source_version"].str.contains("github.com")]
    assert (
        len(of_repository) > 80
        and of_repository["source_version"].str.contains(", commit [0-9a-f]{40}$").all()
    )


def test_table_1_and_the_text_are_there():
    runs = published.runs()
    runs["hardware"] = runs["device_name"].str.extract("(A100|H100)")[0]
    table1 = runs[runs["series"].str.contains("T1")].set_index(["hardware", "devices"])
    found = (
        table1[["energy_total_kWh", "training_time_h", "gpu_hours"]]
        .apply(tuple, axis=1)
        .to_dict()
    )
    assert found == TABLE1
    assert (
        table1.index.get_level_values("devices") * table1["training_time_h"]
    ).to_list() == pytest.approx(table1["gpu_hours"], rel=1e-3)
    one = runs[(runs["series"] == "R1 R2")].iloc[0]
    assert (one["energy_cpu_kWh"], one["energy_gpu_kWh"], one["share_cpu_percent"]) == (
        18.9,
        17.6,
        49,
    )
    assert runs[(runs["series"] == "R1") & (runs["devices"] == 4)][
        "repeats"
    ].to_list() == [4]  # one job is listed twice
    assert one["energy_cpu_kWh_half"] == pytest.approx(0.05)
