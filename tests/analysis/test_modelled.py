"""What the model says of the study's series has the intervals of a forecast, and is never taken for evidence."""

import numpy as np
import pytest

from energynn import studies
from energynn.analysis import modelled
from energynn.cluster import systems
from energynn.forecast import plan, predict


@pytest.fixture(scope="module")
def resnet50():
    return modelled.load("resnet50")


def test_bands_are_those_of_forecasts(resnet50):
    made = plan.published_fit("resnet50", systems.site("horeka-a100"))
    told = {row["devices"]: row for row in predict.rows(made, studies.PAPER["R1"]("horeka-a100"))}
    assert set(told) == {2**power for power in range(9)}
    names = {"gpu_hours": "gpu_hours", "energy_total_kWh": "energy_kWh", "energy_cpu_kWh": "energy_cpu_kWh"}
    for quantity, name in names.items():
        for row in resnet50.bands(quantity).query("series == 'R1'").itertuples():
            known = told[row.devices][name]
            assert row.value == pytest.approx(known["value"], rel=1e-9)
            width = np.log(row.high / row.low) / np.log(known["high"] / known["low"])
            assert 0.85 < width < 1.2, (quantity, row.devices)


def test_speed_ups_know_that_both_runs_share_their_parameters(resnet50):
    rows = resnet50.bands("speed_up").query("series == 'R1'").set_index("devices")
    assert rows.loc[1, ["value", "low", "high"]].tolist() == [1, 1, 1]
    hours = resnet50.bands("gpu_hours").query("series == 'R1'").set_index("devices").loc[256]
    apart = 2 * np.log(hours["high"] / hours["low"])
    assert np.log(rows.loc[256, "high"] / rows.loc[256, "low"]) < 0.8 * apart


def test_a_run_of_several_series_is_drawn_once(resnet50):
    rows = resnet50.rows
    of = [np.flatnonzero((rows["series"] == name) & (rows["devices"] == 256))[0] for name in ("R1", "R4", "R3")]
    hours = resnet50.drawn["gpu_hours"][:, of]
    assert (hours[:, 0] == hours[:, 1]).all() and (hours[:, 0] != hours[:, 2]).all()
    assert set(rows["provenance"]) == {"simulated"} and set(rows["origin"]) == {"model"}


def test_the_model_is_silent_where_no_published_run_tells():
    rows = modelled.load("fourcastnet").rows
    assert set(rows["series"]) == {"F1", "F3", "F4", "F5"}  # fine-tuning has another stage
    assert rows.groupby("hardware")["devices"].max().to_dict() == {"A100": 64, "H100": 32}
    assert rows.query("hardware == 'H100'")["mean_power_gpu_W"].isna().all()  # nobody knows its CPUs
