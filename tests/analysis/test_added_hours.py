"""What notebooks 20 and 60 say of added GPU hours, on worlds of known truth."""

import numpy as np
import pandas as pd
import pytest

from tests.analysis.notebook import execute


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    return execute("60_energy_against_gpu_hours", tmp_path_factory.mktemp("added"))


def test_each_rule_and_price_is_right_in_its_world_alone(left):
    h = np.array([100.0, 200.0])
    worlds = {"waiting": 30 + left["job_kW"] * (h - 100), "half": 15 + 0.15 * h}
    worlds |= {"root": 3 * h**0.5, "factor": 0.3 * h}
    prices = {}
    for rule, energy_kWh in worlds.items():
        world = pd.DataFrame({"gpu_hours": h, "energy_kWh": energy_kWh})
        prices[rule] = left["exponent"](world)["price"]
        errors = left["errors"](world.iloc[0], world.iloc[1])
        assert errors.pop(rule) == pytest.approx(0)
        assert min(map(abs, errors.values())) > 0.5
    truth = [left["job_kW"] / 0.3, 0.5, 2**0.5 - 1, 1]
    assert list(prices.values()) == pytest.approx(truth)


def test_table_1_stands_among_the_rules_from_bound_to_bound(left):
    tables = left["told"]
    # CPU energy over its share, rounding included, over R1's hours in derived.csv
    kW = np.array([6.65 / 0.275 / 85.8054, 6.75 / 0.265 / 81.1498])
    said = tables["bracket"]["R1 to R3"]
    ends = [said["factor_min"], said["factor_max"]]
    assert ends == pytest.approx(100 * (kW * 113.976016 / 33.257303 - 1), abs=0.01)
    # F1's run on 64 GPUs is asked for twice, and counts once
    counts = {name: row["runs"] for name, row in tables["bracketed"].items()}
    assert counts == {"published": 5, "derived": 2}
    # by the job's mean powers, not by its energy
    job = tables["starved"]["job_1507471"]
    assert job["kW"] == pytest.approx((287.144 + 31.725 + 2 * 137.393) / 4000, rel=2e-3)


def test_costs_of_an_epoch_are_found_and_scatter_widens_the_bounds(tmp_path):
    left = execute("20_resnet50_scaling", tmp_path)
    assert left["costs_s"](3 + 0.002 * left["samples"]) == pytest.approx((0.002, 3))
    (low, high), (least, most) = left["faster"], left["faster_scatter"]
    assert least < low < high < most
