"""Fits against closed forms."""

import numpy as np
import pandas as pd
import pytest

from energynn.analysis import regression
from tests.processes import refused

ORIGIN, AFFINE = "energy_kWh ~ 0 + gpu_hours", "energy_kWh ~ gpu_hours"


def observations(n=12):
    hours = np.linspace(1, 40, n)
    scatter = np.random.default_rng(7).normal(0, 0.05, n)
    return pd.DataFrame(
        {"gpu_hours": hours, "energy_kWh": 2.0 + 0.25 * hours + scatter}
    )


def test_known_line_is_recovered_and_hc3_is_the_closed_form():
    data = observations()
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
    few = regression.fit(ORIGIN, observations(n=4))
    assert few.covariance == "classical"
    # t distribution with 3 degrees of freedom, 97.5 %
    reach = 3.182446 * few.slope["standard_error"]
    assert few.slope["high"] - few.slope["value"] == pytest.approx(reach, rel=1e-6)
    assert regression.fit(ORIGIN, observations(n=6)).covariance == "HC3"


def test_too_few_rows_are_refused():
    refused(
        "1 observations are too few", regression.fit, ORIGIN, observations().head(1)
    )
