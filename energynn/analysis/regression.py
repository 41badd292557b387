"""Least squares with intervals; a drawn line comes from the same object as the printed slope."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import statsmodels.formula.api as smf
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

    def line(self, x: np.ndarray) -> pd.DataFrame:
        """Fitted mean and its confidence band at x; columns: the regressor, mean, low, high."""
        at = pd.DataFrame({self.regressor: np.asarray(x, float)})
        frame = self.results.get_prediction(at).summary_frame(alpha=1 - self.level)
        return at.assign(mean=frame["mean"], low=frame["mean_ci_lower"], high=frame["mean_ci_upper"])

    def row(self) -> dict:
        """What a table of fits shows."""
        intercept = self.parameters["value"].get("Intercept", np.nan)
        return {
            "formula": self.formula, "n": self.observations,
            "slope": self.slope["value"], "standard_error": self.slope["standard_error"],
            "low": self.slope["low"], "high": self.slope["high"], "covariance": self.covariance, "intercept": intercept,
            "r_squared": self.r_squared, "r_squared_uncentred": self.r_squared_uncentred,
            "largest_leverage": self.leverage.max(),
        }  # fmt: skip


def fit(
    formula: str, data: pd.DataFrame, weights: np.ndarray | None = None, covariance: str = "auto", level: float = 0.95
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
    if weights is None:
        model = smf.ols(formula, data, missing="raise")
    else:
        model = smf.wls(formula, data, weights=np.asarray(weights, float), missing="raise")
    freedom = len(data) - model.exog.shape[1]
    if freedom < 1:
        raise ValueError(f"{formula}: {len(data)} observations for {model.exog.shape[1]} parameters; give more rows")
    classical = model.fit()
    if covariance == "auto":
        determined = np.einsum("ij,ji->i", model.wexog, np.linalg.pinv(model.wexog)).max() > 0.95
        covariance = "HC3" if freedom >= HC3_LEAST_DEGREES_OF_FREEDOM and not determined else "classical"
    results = model.fit(cov_type="HC3", use_t=True) if covariance == "HC3" else classical
    interval = results.conf_int(1 - level)
    parameters = pd.DataFrame(
        {"value": results.params, "standard_error": results.bse, "low": interval[0], "high": interval[1]}
    )
    return Fit(formula=formula, data=data, results=results, covariance=covariance, level=level, parameters=parameters)


def describe(fits: dict[str, Fit]) -> pd.DataFrame:
    """Table of several fits, one row each, under their names."""
    return pd.DataFrame([{"fit": name, **one.row()} for name, one in fits.items()])
