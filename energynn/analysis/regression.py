"""Least squares with intervals; a drawn line comes from the same object as the printed slope."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import statsmodels.formula.api as smf
from scipy import stats
from statsmodels.regression.linear_model import RegressionResultsWrapper

# With fewer degrees of freedom the robust HC3 covariance rests on too few residuals to be better than the classical.
HC3_LEAST_DEGREES_OF_FREEDOM = 5


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One fitted linear model.

    parameters: one row per term with value, standard_error, low, high (two-sided interval at ``level``, t
    distribution); covariance: which standard errors these are, "HC3" (robust) or "classical".
    """

    formula: str
    data: pd.DataFrame
    results: RegressionResultsWrapper
    covariance: str
    level: float
    parameters: pd.DataFrame

    @property
    def regressor(self) -> str:
        """The only term besides the intercept."""
        terms = [term for term in self.parameters.index if term != "Intercept"]
        assert len(terms) == 1, terms
        return terms[0]

    @property
    def slope(self) -> pd.Series:
        """Slope: value, standard_error, low, high."""
        return self.parameters.loc[self.regressor]

    @property
    def observations(self) -> int:
        return int(self.results.nobs)

    @property
    def r_squared(self) -> float:
        """Centred R2, 1 - residual / total sum of squares about the mean, for every model, so that models compare.

        Without an intercept the usual R2 is about zero, hence near 1 whatever the fit: see ``r_squared_uncentred``.
        """
        return 1 - self.results.ssr / self.results.centered_tss

    @property
    def r_squared_uncentred(self) -> float:
        return 1 - self.results.ssr / self.results.uncentered_tss

    @property
    def residuals(self) -> np.ndarray:
        """Observed minus fitted, in the response's unit."""
        return np.asarray(self.results.resid)

    @property
    def leverage(self) -> np.ndarray:
        """Diagonal of the hat matrix: what share of its own fitted value an observation determines."""
        design = self.results.model.wexog
        return np.einsum("ij,ji->i", design, np.linalg.pinv(design))

    def predict(self, at: pd.DataFrame) -> pd.DataFrame:
        """The rows of ``at`` with the fitted mean and its confidence band: mean, low, high."""
        frame = self.results.get_prediction(at).summary_frame(alpha=1 - self.level)
        return at.assign(mean=frame["mean"], low=frame["mean_ci_lower"], high=frame["mean_ci_upper"])

    def line(self, x: np.ndarray) -> pd.DataFrame:
        """The same along x for a model with one regressor, whose name the column has."""
        return self.predict(pd.DataFrame({self.regressor: np.asarray(x, float)}))

    def row(self) -> dict:
        """What a table of fits shows."""
        intercept = self.parameters["value"].get("Intercept", np.nan)
        return {
            "formula": self.formula,
            "n": self.observations,
            "slope": self.slope["value"],
            **self.slope[["standard_error", "low", "high"]].to_dict(),
            "covariance": self.covariance,
            "intercept": intercept,
            "r_squared": self.r_squared,
            "r_squared_uncentred": self.r_squared_uncentred,
            "largest_leverage": self.leverage.max(),
        }


def fit(
    formula: str, data: pd.DataFrame, weights: np.ndarray | float = 1.0, covariance: str = "auto", level: float = 0.95
) -> Fit:
    """Fit ``formula`` by (weighted) least squares.

    ``weights`` are inverse variances. ``covariance``: "HC3", "classical", or "auto", which takes HC3 where at least
    5 degrees of freedom are left and no observation alone determines its fit.

    Raises ValueError if there are not more observations than parameters, or a value is missing.
    """
    if covariance not in ("auto", "HC3", "classical"):
        raise ValueError(f"covariance: {covariance!r} is not known; choose auto, HC3 or classical")
    if not len(data):
        raise ValueError(f"{formula}: there are no observations; select rows that exist")
    model = smf.wls(formula, data, weights=np.asarray(weights, float), missing="raise")
    freedom = len(data) - model.exog.shape[1]
    if freedom < 1:
        raise ValueError(f"{formula}: {len(data)} observations for {model.exog.shape[1]} parameters; give more rows")
    classical = model.fit()
    if covariance == "auto":
        determined = np.einsum("ij,ji->i", model.wexog, np.linalg.pinv(model.wexog)).max() > 0.95
        covariance = "HC3" if freedom >= HC3_LEAST_DEGREES_OF_FREEDOM and not determined else "classical"
    results = model.fit(cov_type="HC3", use_t=True) if covariance == "HC3" else classical
    ends = results.conf_int(1 - level).set_axis(["low", "high"], axis=1)
    parameters = pd.DataFrame({"value": results.params, "standard_error": results.bse, **ends})
    return Fit(formula=formula, data=data, results=results, covariance=covariance, level=level, parameters=parameters)


def describe(fits: dict[str, Fit]) -> pd.DataFrame:
    """Table of several fits, one row each, under their names."""
    return pd.DataFrame([{"fit": name, **one.row()} for name, one in fits.items()])


def weights(data: pd.DataFrame, y: str, x: str, slope: float) -> np.ndarray:
    """Inverse variances of the means of y, with the variance of x carried over by the slope (effective variance).

    Needs the columns ``<y>_std``, ``<x>_std`` (divisor repeats - 1) and ``repeats``. Raises ValueError where a
    spread is not known or zero.
    """
    variance = (data[f"{y}_std"] ** 2 + (slope * data[f"{x}_std"]) ** 2) / data["repeats"]
    if not (variance > 0).all():
        raise ValueError(f"{y}: {int((~(variance > 0)).sum())} rows have no spread; fit them without weights")
    return 1 / variance.to_numpy(float)


def linearity(data: pd.DataFrame, y: str, x: str) -> dict:
    """Is y proportional to x, linear with an intercept, or neither?

    ``exponent`` of the power law y ~ x^exponent with its interval, and the probability of one at least as far from 1
    if y were proportional to x; ``curvature_p``, the same for a quadratic term beside intercept and slope (NaN with
    fewer than four rows); the largest deviation of a row from the line through the origin and from the line with
    intercept, in percent of the line.
    """
    power = fit(f"np.log({y}) ~ np.log({x})", data)
    exponent = power.slope
    t = (exponent["value"] - 1) / exponent["standard_error"]
    found = {"exponent": exponent["value"], "exponent_low": exponent["low"], "exponent_high": exponent["high"]}
    found |= {"proportional_p": 2 * stats.t.sf(abs(t), power.results.df_resid), "curvature_p": np.nan}
    if len(data) > 3:
        found["curvature_p"] = fit(f"{y} ~ {x} + I({x}**2)", data).results.pvalues.iloc[2]
    for name, formula in (("through_origin", f"{y} ~ 0 + {x}"), ("with_intercept", f"{y} ~ {x}")):
        line = fit(formula, data)
        found[f"deviation_{name}_percent"] = 100 * np.abs(line.residuals / line.results.fittedvalues).max()
    return found
