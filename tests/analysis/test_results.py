"""Records become one table; what cannot be used is left out with its reason."""

import pytest

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
    assert len(runs.attrs["excluded"]) == 1 and reason in runs.attrs["excluded"][0]


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


def test_runs_with_another_seed_are_another_series(synthetic_runs):
    for devices in (1, 2):
        write_run(
            synthetic_runs,
            config.make("resnet50", devices=devices, local_batch_size=16, seed=1),
        )
    table = results.load_records(synthetic_runs)
    names = set(
        results.select_scaling_series(table[table["workload"] == "resnet50"])["series"]
    )
    assert {"constant LBS = 16", "constant LBS = 16, seed 1"} <= names
