"""From runs to fits: which terms and which reading the data ask for, and how well held-out runs are forecast."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from energynn import progress
from energynn.forecast import calibrate, priors
from energynn.forecast.calibrate import Fit, Observations
from energynn.forecast.model import BY_NAME, READINGS, Work
from energynn.forecast.runs import Runs

# By how much the logarithm of the evidence must grow for a further term, and for a reading that is not the usual one.
GAIN_OF_TERM, GAIN_OF_READING = 1.0, 2.0
LEAST_CONTRACTION, MOST_CORRELATION = 0.5, 0.95


def fits(runs: Runs, other: Runs | dict[str, Fit] | None = None) -> dict[str, Fit]:
    """A fit for each reading, the one to forecast with first.

    ``other``: runs, or fits, of the same workload on another system, which give the priors. The contention of shared
    storage is a parameter only where it makes the data more probable. Raises ValueError where there are too few runs.
    """
    check(runs, other)
    usual = priors.usual_reading(runs.site)
    plain = _ordered({reading: fit(runs, other, reading) for reading in READINGS}, usual)
    if isinstance(other, dict) or len(set(runs.observations.work.nodes)) == 1:
        return plain
    contended = _ordered({reading: fit(runs, other, reading, storage=True) for reading in READINGS}, usual)
    without, with_it = (next(iter(found.values())).evidence for found in (plain, contended))
    return contended if with_it > without + GAIN_OF_TERM else plain


def _ordered(found: dict[str, Fit], first: str) -> dict[str, Fit]:
    """The usual reading first, unless the other makes the data much more probable."""
    usual, *others = found[first], *(one for one in found.values() if one.reading != first)
    is_usual = all(one.evidence <= usual.evidence + GAIN_OF_READING for one in others)
    ordered = [usual, *others] if is_usual else [*others, usual]
    return {one.reading: one for one in ordered}


def fit(runs: Runs, other: Runs | dict[str, Fit] | None, reading: str, storage: bool = False) -> Fit:
    """One fit; the evidence counts the runs of ``other``, too."""
    seen, error = runs.observations, priors.error(runs.site)
    if other is None:
        return calibrate.fit(seen, priors.make(seen, runs.site, runs.configs[0], storage), reading, error=error)
    if isinstance(other, dict):
        before, name = other[reading], "another system"
    else:
        before, name = fit(other, None, reading, storage), other.site.name
    from_there, covariance = priors.like(before, name)
    found = calibrate.fit(seen, from_there, reading, covariance, error)
    return dataclasses.replace(found, evidence=found.evidence + before.evidence)


def check(runs: Runs, other: Runs | dict[str, Fit] | None) -> None:
    """Raise ValueError where runs cannot tell the parameters, with those that they cannot, and the run that would."""
    work = runs.observations.work
    varied = np.stack([work.devices, work.local_batch_size, work.trained, work.updates])
    different = np.unique(varied, axis=1).shape[1]
    if other is None and different < 2:
        raise ValueError(
            f"{runs.workload} on {runs.site.name}: {len(runs.configs)} run(s) of one configuration; tau and t_start "
            "cannot be told apart. Add a run with another number of training_samples, devices or local_batch_size"
        )


def flags(found: Fit) -> list[str]:
    """Parameters that the data hardly inform, and those that they cannot tell apart, in words."""
    lines = []
    for name, contraction in found.contraction().items():
        if contraction < LEAST_CONTRACTION:
            hardly = f"{name}: hardly informed (contraction {contraction:.2f}), its prior speaks"
            lines.append(f"{hardly}: {found.priors[name].source}; {BY_NAME[name].told_by} would tell")
    names, correlations = list(found.priors), found.correlations()
    for first, second in zip(*np.nonzero(np.triu(np.abs(correlations) > MOST_CORRELATION, 1)), strict=True):
        pair = f"{names[first]} and {names[second]}"
        lines.append(f"{pair}: cannot be told apart (correlation {correlations[first, second]:.2f}), only together")
    return lines


# ------------------------------------------------------------------------------------------------- held out, and toys

Predictor = Callable[[Observations, Work], tuple[np.ndarray, np.ndarray]]  # runs seen, work asked -> s, J of a GPU


def per_sample(seen: Observations, work: Work) -> tuple[np.ndarray, np.ndarray]:
    """A toy: every sample costs the same time and energy."""
    done = seen.work.trained * seen.work.epochs
    answers = [np.exp(np.mean(np.log(spent / done))) * work.trained * work.epochs for spent in _spent(seen)]
    return tuple(answers)


def four_coefficients(seen: Observations, work: Work) -> tuple[np.ndarray, np.ndarray]:
    """A toy: time and energy of an epoch linear in samples, updates and one by the GPUs of a node in use."""
    before, asked = _features(seen.work), _features(work)
    answers = []
    for spent in _spent(seen):
        each = spent / seen.work.epochs
        known = np.isfinite(each)
        slopes = np.linalg.lstsq(before[known] / each[known, None], np.ones(known.sum()), rcond=None)[0]
        answers.append(asked @ slopes * work.epochs if known.any() else np.full(len(work), np.nan))
    return tuple(answers)


def _features(work: Work) -> np.ndarray:
    return np.stack([np.ones(len(work)), work.trained, work.updates, 1 / work.devices_of_node], axis=1)


def _spent(seen: Observations) -> tuple[np.ndarray, np.ndarray]:
    return seen.time_s, seen.time_s * seen.power_W


def physical(runs: Runs, other, found: Fit, seen: Observations, work: Work) -> tuple[np.ndarray, np.ndarray]:
    """The model with the terms and the reading of a fit, fitted to the runs seen only."""
    again = fit(dataclasses.replace(runs, observations=seen), other, found.reading, "kappa_storage" in found.priors)
    time_s, power_W = np.exp(calibrate.outcomes(again.priors, again.point, work, again.reading))
    return time_s, time_s * power_W


def errors(predictor: Predictor, seen: Observations, asked: Observations) -> np.ndarray:
    """Errors in % of GPU hours and of energies, (2, runs asked); NaN where an energy is not known."""
    forecast = predictor(seen, asked.work)
    return 100 * np.stack([ours / spent - 1 for ours, spent in zip(forecast, _spent(asked), strict=True)])


def examine(runs: Runs, other, found: Fit, tell: Callable[[str], None]) -> dict[str, dict]:
    """Errors of the model and of the two toys: in the fit, with one run left out, and with a series left out.

    Returns predictor -> question -> GPU hours and kWh -> median and max of the absolute errors in %; toys that have
    fewer runs than coefficients are left out.
    """
    seen = runs.observations
    everything = np.arange(len(seen))
    series = sorted({name for names in seen.series for name in names.split()})
    parts = {"fit": [(everything, everything)]}
    parts["leave one out"] = [(everything[everything != i], everything[everything == i]) for i in everything]
    for name in series if 1 < len(series) < len(seen) else ():
        of_series = np.array([name in names.split() for names in seen.series])
        if 1 < of_series.sum() < len(seen):
            parts[f"leave {name} out"] = [(everything[~of_series], everything[of_series])]
    predictors = {"model": functools.partial(physical, runs, other, found)}
    predictors |= {"constant per sample": per_sample, "four coefficients": four_coefficients}
    result: dict[str, dict] = {}
    for name, predictor in predictors.items():
        advance = progress.meter(f"errors of {name}", sum(map(len, parts.values())), "fits", tell)
        result[name] = {}
        for question, pairs in parts.items():
            fewest = min(len(known) for known, _ in pairs)
            if fewest < (1 if other else 2) or (name == "four coefficients" and fewest < 4):
                continue
            off = []
            for known, asked in pairs:
                off.append(errors(predictor, seen[known], seen[asked]))
                advance(1)
            result[name][question] = summary(np.concatenate(off, axis=1))
    return result


def summary(off: np.ndarray) -> dict[str, dict[str, float] | None]:
    """Median and maximum of absolute errors in %, of GPU hours and of energies; None where none is known."""
    result = {}
    for name, values in zip(("gpu_hours", "energy"), np.abs(off), strict=True):
        known = values[np.isfinite(values)]
        result[name] = {"median": float(np.median(known)), "max": float(known.max())} if len(known) else None
    return result
