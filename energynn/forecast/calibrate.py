"""Calibration: parameters from times and powers by least squares, and how far the data inform each.

The most probable parameters under normal priors, their covariance by Laplace's approximation, and an error of the model
that is learnt from the residuals; Student's t makes up for the few residuals there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

from energynn.forecast import model
from energynn.forecast.model import BY_NAME, NAMES, READINGS, Work

ERROR = 0.015  # relative error of the model before data are seen, for times and for powers
ERROR_ON_CORES = 0.08  # there runs of one configuration scatter by so much: others use the machine, too
ERROR_WEIGHT = 4.0  # as many observations that counts
ERRORS_LEARNT = 6  # most rounds of parameters for an error, and the error for these parameters
LEVEL = 0.9


@dataclass(frozen=True)
class Prior:
    """What is thought of a parameter before data are seen; ``spread`` is relative for what is fitted as a logarithm."""

    centre: float
    spread: float
    source: str


@dataclass(frozen=True)
class Observations:
    """What one GPU did in runs, times in s, mean powers of a GPU with its part of a node in W; NaN: not known."""

    work: Work
    time_s: np.ndarray
    power_W: np.ndarray
    series: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.time_s)

    def __getitem__(self, index) -> Observations:
        series = tuple(np.array(self.series, dtype=object)[index])
        return Observations(self.work[index], self.time_s[index], self.power_W[index], series)


@dataclass(frozen=True)
class Fit:
    """Parameters as they are fitted (times by their logarithm), (parameters,), with covariances and errors.

    priors: in the order of the parameters; prior_covariance: theirs. errors: relative errors of the model, of times
    and of powers; freedom: degrees of freedom that these were learnt with. evidence: logarithm of how probable the
    data are, to compare fits to the same data.
    """

    reading: str
    priors: dict[str, Prior]
    prior_covariance: np.ndarray
    point: np.ndarray
    covariance: np.ndarray
    errors: np.ndarray
    freedom: np.ndarray
    evidence: float = 0.0

    @property
    def values(self) -> dict[str, float]:
        """The parameters in their units; 0 for those that the fit has not."""
        return to_values(self.priors, self.point)

    @property
    def has_power(self) -> bool:
        return "fed" in self.priors

    def contraction(self) -> dict[str, float]:
        """By how much the data shrink each parameter's variance: 1: they tell all; 0: only the prior speaks."""
        shrunk = 1 - np.diag(self.covariance) / np.diag(self.prior_covariance)
        return dict(zip(self.priors, shrunk.tolist(), strict=True))

    def correlations(self) -> np.ndarray:
        spread = np.sqrt(np.diag(self.covariance))
        return self.covariance / spread / spread[:, None]

    def intervals(self) -> dict[str, tuple[float, float]]:
        """90 % interval of each parameter, in its unit."""
        half = stats.t.ppf((1 + LEVEL) / 2, self.freedom.min()) * np.sqrt(np.diag(self.covariance))
        low, high = to_values(self.priors, self.point - half), to_values(self.priors, self.point + half)
        return {name: (low[name], high[name]) for name in self.priors}


def to_values(names, point: np.ndarray) -> dict[str, float]:
    """Parameters in their units from a point of the space where they are fitted; 0 for those that it has not."""
    values = dict.fromkeys(NAMES, 0.0) | {"efficiency": 1.0}
    for name, coordinate in zip(names, point, strict=True):
        values[name] = float(np.exp(coordinate)) if BY_NAME[name].is_log else float(coordinate)
    return values


def to_point(values: dict[str, float]) -> np.ndarray:
    return np.array([np.log(value) if BY_NAME[name].is_log else value for name, value in values.items()])


def outcomes(names, point: np.ndarray, work: Work, reading: str) -> np.ndarray:
    """Logarithms of times and powers, (2, configurations)."""
    time_s, power_W = model.predict(to_values(names, point), work, READINGS[reading])
    return np.log(np.stack([time_s, np.maximum(power_W, 1e-6)]))


def jacobian(names, point: np.ndarray, work: Work, reading: str) -> np.ndarray:
    """Derivatives of ``outcomes`` by the parameters, (2, configurations, parameters), by central differences."""
    columns = []
    for index, name in enumerate(names):
        step = np.zeros(len(point))
        step[index] = 1e-4 if BY_NAME[name].is_log else 1e-4 * max(abs(point[index]), 1e-3)
        up, down = outcomes(names, point + step, work, reading), outcomes(names, point - step, work, reading)
        columns.append((up - down) / (2 * step[index]))
    return np.stack(columns, axis=-1)


def fit(
    seen: Observations,
    priors: dict[str, Prior],
    reading: str,
    prior_covariance: np.ndarray | None = None,
    error: float = ERROR,
) -> Fit:
    """The most probable parameters, their covariance, and the model's error as the residuals show it.

    ``prior_covariance``: where priors are correlated, as those from another fit; else each has its spread. ``error``:
    relative, before data are seen.
    """
    centre = to_point({name: prior.centre for name, prior in priors.items()})
    if prior_covariance is None:
        prior_covariance = np.diag([prior.spread**2 for prior in priors.values()])
    precision = np.linalg.inv(prior_covariance)
    whiten = np.linalg.cholesky(precision).T
    known = np.stack([np.isfinite(seen.time_s), np.isfinite(seen.power_W)])
    measured = np.log(np.where(known, np.stack([seen.time_s, seen.power_W]), 1.0))
    errors, point = np.array([error, error]), centre
    for _ in range(ERRORS_LEARNT):
        weights = known / errors[:, None]

        def residuals(at, weights=weights):
            off = (outcomes(priors, at, seen.work, reading) - measured) * weights
            return np.concatenate([off.ravel(), whiten @ (at - centre)])

        def slopes(at, weights=weights):
            of_data = jacobian(priors, at, seen.work, reading) * weights[..., None]
            return np.concatenate([of_data.reshape(-1, len(at)), whiten])

        point = optimize.least_squares(residuals, point, slopes, x_scale="jac").x
        weighted = jacobian(priors, point, seen.work, reading) * weights[..., None]
        covariance = np.linalg.inv(np.einsum("kij,kil->jl", weighted, weighted) + precision)
        used = np.einsum("kij,jl,kil->k", weighted, covariance, weighted)  # observations that the parameters use up
        freedom = known.sum(axis=1) - used + ERROR_WEIGHT
        off = (outcomes(priors, point, seen.work, reading) - measured) * known
        before, errors = errors, np.sqrt(((off**2).sum(axis=1) + ERROR_WEIGHT * error**2) / freedom)
        if np.allclose(before, errors, rtol=0.01):
            break
    evidence = -((off / errors[:, None]) ** 2).sum() / 2 - known.sum(axis=1) @ np.log(errors)
    evidence -= ((whiten @ (point - centre)) ** 2).sum() / 2
    evidence += (np.linalg.slogdet(covariance)[1] - np.linalg.slogdet(prior_covariance)[1]) / 2
    return Fit(reading, priors, prior_covariance, point, covariance, errors, freedom, float(evidence))


def forecast(found: Fit, work: Work) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of time_s, power_W and energy_J the logarithm of the value and half its 90 % interval, (configurations,) each.

    The energy is the product of the others: of one GPU with its part of a node.
    """
    middle = outcomes(found.priors, found.point, work, found.reading)
    slopes = jacobian(found.priors, found.point, work, found.reading)
    error2 = found.errors**2
    # How wide priors are is known; only what follows from the errors, which are learnt, needs Student's t.
    of_priors = found.covariance @ np.linalg.inv(found.prior_covariance) @ found.covariance

    def half(slopes, error2, freedom):
        variance = np.einsum("ij,jl,il->i", slopes, found.covariance, slopes) + error2
        learnt = variance - np.einsum("ij,jl,il->i", slopes, of_priors, slopes)
        return stats.t.ppf((1 + LEVEL) / 2, freedom * (variance / learnt) ** 2) * np.sqrt(variance)

    result = {"time_s": (middle[0], half(slopes[0], error2[0], found.freedom[0]))}
    if found.has_power:
        of_sum = error2.sum() ** 2 / (error2**2 / found.freedom).sum()  # Welch and Satterthwaite
        result["power_W"] = (middle[1], half(slopes[1], error2[1], found.freedom[1]))
        result["energy_J"] = (middle.sum(axis=0), half(slopes.sum(axis=0), error2.sum(), of_sum))
    return result
