"""Records become one table; what cannot be used is left out with its reason."""

import numpy as np
import pytest

import energynn
from energynn.analysis import results
from energynn.experiment import config
from tests.analysis.conftest import write_run


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"valid": False, "invalid_reasons": ["the run is killed"]},
            "the run is killed",
        ),
        ({"energy_total_J": float("nan")}, "record.json is no JSON"),
        ({"energy_total_J": "12 kWh"}, "energy_total_J"),
    ],
)
def test_a_bad_record_is_left_out_with_its_reason(synthetic_runs, changes, reason):
    write_run(synthetic_runs, config.make("resnet50", seed=5), **changes)
    runs = results.load_records(synthetic_runs)
    assert len(runs) == 9
    (told,) = energynn.load(synthetic_runs).attrs["excluded"]
    assert runs.attrs["excluded"] == [told] and reason in told


def test_series_are_selections_of_runs(synthetic_runs):
    table = results.load_records(synthetic_runs)
    series = results.select_scaling_series(table[table["workload"] == "resnet50"])
    assert set(series["series"]) == {"constant LBS = 16", "constant GBS = 16"}
    one_device = series[series["devices"] == 1]
    # the runs on one device belong to both
    assert one_device["run_id"].nunique() == 3 and len(one_device) == 6
    constant = series[series["series"] == "constant GBS = 16"]
    assert set(constant["global_batch_size"]) == {16}
    # each starts from another run
    tuned = results.select_scaling_series(table[table["stage"] == "finetune"])
    assert set(tuned["devices"]) == {1, 2}


def test_series_of_one_label_say_what_differs(tmp_path):
    for more in ({}, {"epochs": 6}, {"system": "other"}, {"seed": 1}):
        for devices in (1, 2):
            about = dict(devices=devices, local_batch_size=16) | more
            write_run(tmp_path, config.make("resnet50", **about))
    series = results.select_scaling_series(results.load_records(tmp_path))
    assert series.groupby("series")["devices"].agg(list).to_dict() == {
        f"constant LBS = 16, {words}": [1, 2]
        for words in (
            "on local, synthetic core; epochs 4",
            "on local, synthetic core; epochs 6",
            "on other, synthetic core; epochs 4",
            "seed 1",
        )
    }


def test_a_metric_with_the_name_of_an_energy_is_none(tmp_path):
    metrics = {"energy_gpu_J": 9e5, "energy_total_kWh": 1.0, "run": 7.0}
    write_run(tmp_path, config.make("resnet50"), metrics=metrics)
    row = results.load_records(tmp_path).iloc[0]
    assert row["energy_total_kWh"] == row["energy_total_J"] / 3.6e6
    assert np.isnan(row["energy_gpu_kWh"])
