"""The published values are what was published, and say so."""

import pandas as pd
import pytest

from energynn.analysis import published
from energynn.host.reading import read_checksums


def test_every_file_has_a_checksum():
    """`energynn check` compares the files with them: tests/test_records.py."""
    folder = published.PUBLISHED_FOLDER
    paths = [path for path in folder.rglob("*") if path.suffix in (".csv", ".toml")]
    listed = read_checksums(folder / "SHA256SUMS").keys()
    assert listed == {str(path.relative_to(folder)) for path in paths}


def test_every_value_says_what_it_is_and_where_it_stands():
    kinds = ("measurement", "statement", "setup", "picture")
    table = pd.concat(map(published.select_values, kinds))
    assert (table["provenance"] == "published").all()
    for column in ("quantity", "kind", "stands_in", "source_version"):
        assert table[column].str.len().gt(0).all(), column
    known = table[table["kind"] != "picture"]
    assert (known["value"].notna() | known["low"].notna() | known["high"].notna()).all()
    pictures = published.select_values("picture")
    # no invented point
    assert (
        pictures[["value", "low", "high", "spread"]].isna().all(axis=None)
        and len(pictures) > 50
    )


def test_derived_values_follow_from_published_ones():
    known = published.tabulate_runs().set_index(["series", "devices"])
    assert known.loc[("F3", 16), "energy_total_kWh_half"] == 0.5  # printed as 136
    table = published.tabulate_runs("derived").set_index(["series", "devices"])
    derived = table[table["provenance"] == "derived"]
    for key in (("R1 R2", 1), ("R1", 4)):  # the CPUs' energy over their share of it
        cpu, share = (
            known.loc[key, "energy_cpu_kWh"],
            known.loc[key, "share_cpu_percent"],
        )
        assert derived.loc[key, "energy_total_kWh"] == pytest.approx(
            100 * cpu / share, rel=1e-3
        )
    # On one GPU R4 and R5 differ in nothing but images: an epoch is a cost, and one for each image.
    few, many = known.loc[("R4", 1)], known.loc[("R5", 1)]
    epochs = (1281167 - few["dataset_samples"]) / (
        many["dataset_samples"] - few["dataset_samples"]
    )
    hours = few["gpu_hours"] + (many["gpu_hours"] - few["gpu_hours"]) * epochs
    one = derived.loc[("R1 R2", 1)]
    assert abs(hours - one["gpu_hours"]) <= one["gpu_hours_half"] * 1.001
    # R2's power is R5's, and says so
    for devices in (2, 4, 8):
        copied, source = derived.loc[("R2", devices)], known.loc[("R5", devices)]
        ratio = source["energy_total_kWh"] / source["gpu_hours"]
        assert copied["energy_total_kWh"] / copied["gpu_hours"] == pytest.approx(
            ratio, rel=1e-4
        )
        assert copied["copies"] == "energy_per_gpu_hour_kW"
