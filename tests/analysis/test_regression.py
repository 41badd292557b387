"""Fits against closed forms."""

import numpy as np
import pandas as pd
import pytest

from energynn.analysis import regression
from tests.processes import refused

ORIGIN, AFFINE = "energy_kWh ~ 0 + gpu_hours", "energy_kWh ~ gpu_hours"


def observations(slope=0.3, intercept=0.0, n=12):
    hours = np.linspace(1, 40, n)
    scatter = np.random.default_rng(7).normal(0, 0.05, n)
    return pd.DataFrame(
        {"gpu_hours": hours, "energy_kWh": intercept + slope * hours + scatter}
    )


def test_slope_through_origin_is_the_closed_form():
    data = observations()
    x, y = data["gpu_hours"], data["energy_kWh"]
    fit = regression.fit(ORIGIN, data, covariance="classical")
    slope = (x * y).sum() / (x**2).sum()
    variance = ((y - slope * x) ** 2).sum() / (len(x) - 1) / (x**2).sum()
    assert fit.slope["value"] == pytest.approx(slope, rel=1e-12)
    assert fit.slope["standard_error"] == pytest.approx(variance**0.5, rel=1e-10)
    # t distribution with 11 degrees of freedom, 97.5 %
    assert fit.slope["high"] - slope == pytest.approx(
        2.200985 * variance**0.5, rel=1e-6
    )
    assert fit.leverage == pytest.approx(x**2 / (x**2).sum())


def test_known_line_is_recovered_and_hc3_is_the_closed_form():
    data = observations(slope=0.25, intercept=2.0)
    fit = regression.fit(AFFINE, data)
    assert fit.covariance == "HC3"
    assert fit.slope["low"] < 0.25 < fit.slope["high"]
    assert (
        fit.parameters.loc["Intercept", "low"]
        < 2.0
        < fit.parameters.loc["Intercept", "high"]
    )
    x = data["gpu_hours"] - data["gpu_hours"].mean()
    hc3 = (x**2 * (fit.results.resid / (1 - fit.leverage)) ** 2).sum() / (
        x**2
    ).sum() ** 2
    assert fit.slope["standard_error"] == pytest.approx(hc3**0.5, rel=1e-9)


def test_few_rows_get_classical_errors():
    assert regression.fit(ORIGIN, observations(n=4)).covariance == "classical"
    assert regression.fit(ORIGIN, observations(n=6)).covariance == "HC3"


def test_too_few_rows_are_refused():
    refused(
        "1 observations are too few", regression.fit, ORIGIN, observations().head(1)
    )
