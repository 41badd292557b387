"""Fits against closed forms."""

import numpy as np
import pandas as pd
import pytest

from energynn.analysis import regression

ORIGIN, AFFINE = "energy_kWh ~ 0 + gpu_hours", "energy_kWh ~ gpu_hours"


def observations(slope=0.3, intercept=0.0, noise=0.05, n=12):
    hours = np.linspace(1, 40, n)
    scatter = np.random.default_rng(7).normal(0, noise, n)
    return pd.DataFrame({"gpu_hours": hours, "energy_kWh": intercept + slope * hours + scatter})


def test_slope_through_origin_is_the_closed_form():
    data = observations()
    x, y = data["gpu_hours"], data["energy_kWh"]
    fit = regression.fit(ORIGIN, data, covariance="classical")
    slope = (x * y).sum() / (x**2).sum()
    variance = ((y - slope * x) ** 2).sum() / (len(x) - 1) / (x**2).sum()
    assert fit.slope["value"] == pytest.approx(slope, rel=1e-12)
    assert fit.slope["standard_error"] == pytest.approx(variance**0.5, rel=1e-10)
    # t distribution with 11 degrees of freedom, 97.5 %
    assert fit.slope["high"] - slope == pytest.approx(2.200985 * variance**0.5, rel=1e-6)
    assert fit.leverage == pytest.approx(x**2 / (x**2).sum())


def test_known_line_is_recovered_and_hc3_is_the_closed_form():
    data = observations(slope=0.25, intercept=2.0)
    fit = regression.fit(AFFINE, data)
    assert fit.covariance == "HC3"
    assert fit.slope["low"] < 0.25 < fit.slope["high"]
    assert fit.parameters.loc["Intercept", "low"] < 2.0 < fit.parameters.loc["Intercept", "high"]
    x = data["gpu_hours"] - data["gpu_hours"].mean()
    hc3 = (x**2 * (fit.residuals / (1 - fit.leverage)) ** 2).sum() / (x**2).sum() ** 2
    assert fit.slope["standard_error"] == pytest.approx(hc3**0.5, rel=1e-9)


def test_few_rows_get_classical_errors():
    assert regression.fit(ORIGIN, observations(n=4)).covariance == "classical"
    assert regression.fit(ORIGIN, observations(n=6)).covariance == "HC3"


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="1 observations are too few"):
        regression.fit(ORIGIN, observations().head(1))


def test_a_power_law_is_told_from_a_line_through_the_origin():
    data = observations(noise=0.0)
    curved = data.assign(energy_kWh=0.3 * data["gpu_hours"] ** 0.8 * (1 + 1e-3 * np.cos(data["gpu_hours"])))
    straight = data.assign(energy_kWh=data["energy_kWh"] * (1 + 1e-3 * np.cos(data["gpu_hours"])))
    for rows, exponent in ((curved, 0.8), (straight, 1.0)):
        found = regression.linearity(rows, "energy_kWh", "gpu_hours")
        assert found["exponent"] == pytest.approx(exponent, abs=1e-3)
        assert found["exponent_low"] < exponent < found["exponent_high"]
    assert regression.linearity(curved, "energy_kWh", "gpu_hours")["proportional_p"] < 1e-6
    assert regression.linearity(straight, "energy_kWh", "gpu_hours")["proportional_p"] > 0.05
    affine = regression.linearity(data.assign(energy_kWh=5 + 0.3 * data["gpu_hours"]), "energy_kWh", "gpu_hours")
    assert affine["deviation_through_origin_percent"] > 50


def test_weights_carry_both_errors():
    data = pd.DataFrame({"y": [1.0, 2.0], "x": [1.0, 2.0], "y_std": [0.3, 0.3], "x_std": [0.0, 0.4], "repeats": [9, 4]})
    assert regression.weights(data, "y", "x", 2.0) == pytest.approx([9 / 0.09, 4 / (0.09 + 0.64)])


def test_a_probability_is_that_of_both_sides():
    """In worlds where y is proportional to x it is anything from 0 to 1, here by cautious standard errors."""
    x, random = np.geomspace(1, 256, 9), np.random.default_rng(3)
    found = []
    for _ in range(60):
        data = pd.DataFrame({"x": x, "y": 0.3 * x * np.exp(random.normal(0, 0.02, len(x)))})
        found.append(regression.linearity(data, "y", "x")["proportional_p"])
    assert np.mean(np.array(found) < 0.5) == pytest.approx(0.45, abs=0.15) and max(found) > 0.9
