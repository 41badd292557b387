"""Published and own runs stand in one table, in the study's series where they belong there."""

import numpy as np
import pytest

from energynn.analysis import observations
from energynn.experiment import config
from tests.analysis.conftest import write_replica, write_run, write_study


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    return observations.load(
        write_replica(tmp_path_factory.mktemp("replica"), "R1 R4 R5 R6 F1")
    )


def own_runs(runs_dir):
    return observations.load(runs_dir).query("origin == 'own'")


def test_times_of_a_run_with_estimated_energy_are_measured(tmp_path):
    own = own_runs(write_study(tmp_path, "estimated"))
    expected = {"energy_total_kWh": "estimated", "mean_power_cpu_socket_W": "estimated"}
    expected |= {"training_time_h": "measured", "top1_error_percent": "measured"}
    for quantity, provenance in expected.items():
        assert set(observations.std_bounds(own, quantity)["provenance"]) == {provenance}


def test_published_runs_are_there_without_any_record(tmp_path):
    table = observations.load(tmp_path)
    assert set(table["origin"]) == {"published"} and set(table["provenance"]) == {
        "published"
    }
    counts = table.groupby("series").size()
    assert counts[["R4", "R5", "R6", "T1", "F1", "F3"]].to_list() == [9, 5, 4, 6, 3, 2]
    assert len(observations.distinct_runs(table)) == 28
    one = table[(table["series"] == "R4") & (table["devices"] == 256)].iloc[0]
    assert one["training_time_h"] == pytest.approx(113.48748437500001 / 256)
    assert one["energy_per_dataset_sample_Wh"] == pytest.approx(
        30207.4785 / 1281167, rel=1e-6
    )
    assert one["power_per_gpu_W"] == pytest.approx(1000 * 20.3 / 113.487484, rel=1e-6)
    # Five runs, population's standard deviation: the sample's is larger by sqrt(5 / 4).
    assert one["energy_total_kWh_std"] == pytest.approx(
        0.09984616597351016 * np.sqrt(1.25)
    )
    few = table[(table["series"] == "R4") & (table["devices"] <= 4)]
    assert sorted(few["sockets_per_gpu"]) == [0.5, 1.0, 2.0]


def test_own_runs_belong_to_the_studys_series(replica):
    own = replica.query("origin == 'own'")
    r1 = own[own["series"] == "R1"]
    devices = {
        name: sorted(set(rows["devices"])) for name, rows in own.groupby("series")
    }
    assert devices["R1"] == devices["R4"] == [2**k for k in range(9)]
    assert devices["R5"] == [1, 2, 4, 8, 16] and devices["R6"] == [32, 64, 128, 256]
    assert devices["F1"] == [4, 8, 16, 32, 64, 128, 256]
    assert set(own["hardware"]) == {"A100"}
    base = r1[r1["devices"] == 1]["training_time_h"].mean()
    largest = r1[r1["devices"] == 256]
    assert largest["speed_up"].to_list() == pytest.approx(
        base / largest["training_time_h"]
    )
    assert (largest["passes_per_gpu_hour"] * 256).to_list() == pytest.approx(
        largest["samples_per_gpu_hour"], rel=1e-3
    )


def test_means_over_repeats_and_their_spread(replica):
    means = observations.means_of_configurations(replica)
    alike = "origin == 'own' and series == 'R1' and devices == 8"
    runs = replica.query(alike)
    (one,) = means.query(alike).to_dict("records")
    assert one["repeats"] == len(runs) == 2
    assert one["training_time_h"] == pytest.approx(runs["training_time_h"].mean())
    assert one["training_time_h_std"] == pytest.approx(
        runs["training_time_h"].std(ddof=1)
    )
    bars = observations.std_bounds(means, "training_time_h")
    single = bars[bars["series"] == "F1"]
    # no error bar, which is not an error of zero
    assert (single["low"] == single["high"]).all()


@pytest.mark.parametrize(
    "changes, epochs, series",
    [
        ({}, 100, "R1"),
        ({}, 1, "constant LBS = 256"),
        ({"dataset_samples": 128116}, 100, "constant LBS = 256"),
        ({"device_name": "NVIDIA H200"}, 100, "constant LBS = 256"),
    ],
)
def test_runs_unlike_the_studys_are_a_series_of_their_own(
    tmp_path, changes, epochs, series
):
    about = {"dataset_samples": 1281167, "device_name": "NVIDIA A100"} | changes
    for n in (1, 2):
        sizes = {"devices": n, "local_batch_size": 256, "epochs": epochs}
        write_run(
            tmp_path,
            config.make("resnet50", preset="paper", **sizes),
            time_s=3600.0,
            parts_W={"gpu": 300.0 * n},
            samples=False,
            device_kind="gpu",
            **about,
        )
    assert own_runs(tmp_path)["series"].to_list() == [series, series]


def test_energies_by_perun_go_with_perun_s_hours(tmp_path):
    """Where all is measured, own energies are taken as the study took its own: over perun's
    longer window.
    """
    perun = {
        "energy_perun_total_J": 4000.0,
        "energy_perun_cpu_J": 4000.0,
        "device_hours_perun": 0.05,
    }
    write_run(tmp_path, config.make("resnet50"), provenance="measured", **perun)
    (row,) = own_runs(tmp_path).to_dict("records")
    assert row["gpu_hours"] == 0.05 and row["energy_total_kWh"] == pytest.approx(
        4000 / 3.6e6
    )


def test_what_was_trained_has_a_name_also_where_nothing_was(tmp_path):
    run = write_run(tmp_path, config.make("fourcastnet", stage="pretrain"))
    runs = own_runs(run.parents[1])
    assert [*observations.training_names(runs)] == ["FourCastNet pre-training"]
    assert [*observations.training_names(runs[:0])] == []
