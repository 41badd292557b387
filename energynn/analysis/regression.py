"""Least squares with 95 % intervals; a drawn line comes from the same object as the printed
slope.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import statsmodels.formula.api as smf
from statsmodels.regression.linear_model import RegressionResultsWrapper

# With fewer degrees of freedom the robust HC3 covariance rests on too few residuals.
HC3_MIN_DEGREES_OF_FREEDOM = 5


@dataclass(frozen=True)
class Fit:
    """One fitted linear model.

    parameters: one row per term with value, standard_error, low, high (t distribution); covariance:
    which standard errors these are, "HC3" (robust) or "classical"; leverage: what share of its own
    fitted value each observation determines.
    """

    formula: str
    data: pd.DataFrame
    results: RegressionResultsWrapper
    covariance: str
    parameters: pd.DataFrame
    leverage: np.ndarray

    @property
    def slope(self) -> pd.Series:
        """Return the parameter of the only term besides the intercept."""
        (regressor,) = self.parameters.index.drop("Intercept", errors="ignore")
        return self.parameters.loc[regressor]

    @property
    def r_squared(self) -> float:
        """Compute the centred R2, also without an intercept, so that models compare."""
        return 1 - self.results.ssr / self.results.centered_tss

    def predict(self, at: pd.DataFrame) -> pd.DataFrame:
        """Add the fitted mean and its confidence band to the rows of ``at``: mean, low, high."""
        frame = self.results.get_prediction(at).summary_frame(alpha=0.05)
        return at.assign(
            mean=frame["mean"],
            low=frame["mean_ci_lower"],
            high=frame["mean_ci_upper"],
        )


def fit(
    formula: str,
    data: pd.DataFrame,
    weights: pd.Series | float = 1.0,
    covariance: str = "auto",
) -> Fit:
    """Fit ``formula`` by least squares; ``weights`` are inverse variances.

    ``covariance``: "HC3", "classical", or "auto", which takes HC3 where at least 5 degrees of
    freedom are left and no observation alone determines its fit. Raises ValueError if there are not
    more observations than parameters.
    """
    model = smf.wls(formula, data, weights=weights, missing="raise")
    if model.df_resid < 1:
        raise ValueError(
            f"{formula}: {len(data)} observations are too few; give more rows"
        )
    leverage = (model.wexog * np.linalg.pinv(model.wexog).T).sum(axis=1)
    if covariance == "auto":
        is_enough = (
            model.df_resid >= HC3_MIN_DEGREES_OF_FREEDOM and leverage.max() <= 0.95
        )
        covariance = "HC3" if is_enough else "classical"
    results = (
        model.fit(cov_type="HC3", use_t=True) if covariance == "HC3" else model.fit()
    )
    ends = results.conf_int().set_axis(["low", "high"], axis=1)
    errors = {"value": results.params, "standard_error": results.bse}
    return Fit(
        formula, data, results, covariance, pd.DataFrame({**errors, **ends}), leverage
    )
