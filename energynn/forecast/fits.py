"""The fit: parameters of the model from runs, times first and powers then, and what they forecast.

The most probable parameters under normal priors, some chosen knowing R4 to R6, their covariance by
Laplace's approximation, and an error of the model by the residuals; Student's t, as these are few.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
from scipy import optimize, special

from energynn.experiment import config
from energynn.experiment.systems import FORECAST_FIELDS, Site
from energynn.forecast import command, model, runs
from energynn.forecast.model import LINEAR, POWER_PARAMETERS, TERMS, TIME_PARAMETERS
from energynn.forecast.runs import ObservedRuns
from energynn.host.files import write_json
from energynn.host.reading import read_json

FIT_FILE_SCHEMA = "energynn-forecast/6"
# relative errors of the model before data are seen, of times and of powers
PRIOR_MODEL_ERRORS = 0.02, 0.016  # chosen knowing R4 to R6
PRIOR_ERROR_OF_SINGLE_RUNS = 0.03  # of times, where each configuration ran once
PRIOR_MODEL_ERROR_ON_CPU = 0.08  # where others use the machine, too
ERROR_WEIGHT = 4.0  # as many observations that counts
MAX_ERROR_ITERATIONS = 4  # until a fit's error and its parameters agree
MIN_GAIN = 1e-12  # of the sum of squares: less ends the search
SCATTER = 0.06  # of single jobs, as the study prints it, where no repeats tell
CONFIDENCE_LEVEL = 0.9
UPPER_QUANTILE = (1 + CONFIDENCE_LEVEL) / 2  # quantile at the high end of an interval
# logarithm of how much likelier the runs must be with a term for it to enter
MIN_LOG_EVIDENCE = 2.0
HINT_RATIO = 1.5  # runs hint at a term that is so many times its own error
ODD = 2.0  # half-widths by which the others' forecast is off where a run is odd
# logarithm of how much longer an exchange of unknown size may make a time
LOG_HALF_WIDTH_OF_UNKNOWN_EXCHANGE = 1.0
# steps of the search for the end of an interval, as parts of the quantile
INTERVAL_SEARCH_STEPS = 0.3, 0.6, 0.8, 1.0, 1.0
# of a time, for each doubling of nodes beyond the fitted ones
HALF_WIDTH_PER_DOUBLING = 0.01
# on a core, of the gradients, which it moves through memory a dozen times
CPU_UPDATE_TIME_S_PER_B = 2e-9
# What another machine changes: relative spreads that are added where its fit gives the priors. Link
# and full node stay: widened by 0.5, FourCastNet's errors grow from 3 to 11 % (median, A100).
SPREADS_OF_OTHER_HARDWARE = {"tau": 1.5} | dict.fromkeys(
    ("t_start", "t_update", *POWER_PARAMETERS), 0.5
)


@dataclass(frozen=True)
class Fit:
    """Parameters as they are fitted (times by their logarithm) with covariances and errors.

    Arrays are (parameters,) in the order of ``names``. errors: relative ones of the model, of
    times and of powers; freedom: degrees of freedom that these were learnt with. entered: terms
    that the runs ask for; the others are 0. neg_log_evidence: of the times, by
    Laplace's approximation, up to a constant. rivals: by how much the
    parameters differ in fits with one term more, times the square root of the chance that this fit
    is right, (fits, parameters).
    """

    runs: ObservedRuns
    names: tuple[str, ...]
    prior_point: np.ndarray
    prior_covariance: np.ndarray
    point: np.ndarray
    covariance: np.ndarray
    errors: np.ndarray
    freedom: np.ndarray
    entered: tuple[str, ...]
    neg_log_evidence: float = 0.0
    rivals: tuple = ()

    @property
    def open_terms(self) -> np.ndarray:
        """Terms that are left out of the value (0) and only widen the interval, (parameters,)."""
        return np.isin(self.names, list(TERMS.keys() - {*self.entered}))

    @property
    def conditional_covariance(self) -> np.ndarray:
        """The covariance given that these terms are 0."""
        return conditional_covariance(self.covariance, ~self.open_terms)

    @property
    def values(self) -> dict[str, float]:
        """The parameters in their units; of those that it has not, NaN, or what changes nothing."""
        return parameter_values(self.names, self.point)

    @property
    def has_power(self) -> bool:
        return "fed" in self.names


def parameter_values(names: tuple[str, ...], point: np.ndarray) -> dict[str, float]:
    """Return parameters in their units from a point of the space where they are fitted.

    Of several points, (points, parameters), each is (points,).
    """
    values = dict.fromkeys(POWER_PARAMETERS, np.nan)
    values |= {"fill": 0.0, "host": 0.0}  # no worker fetches ahead; GPUs alone
    for name, at in zip(names, np.moveaxis(point, -1, 0), strict=True):
        values[name] = at if name in LINEAR else np.exp(at)
    # A link reaches its bandwidth at most: the logarithm of 1/efficiency - 1 is fitted.
    values["efficiency"] = 1 / (1 + values["efficiency"])
    return values


def log_times_and_powers(
    names: tuple[str, ...], point: np.ndarray, work: np.ndarray
) -> np.ndarray:
    """Compute the logarithms of times in s, of powers and of the GPUs' powers in W, (3,
    configurations).

    Of several points, (points, parameters), they are (points, 3, configurations).
    """
    values = parameter_values(names, point[..., None, :])
    # A fit may try a point where a power is negative, and goes back.
    with np.errstate(invalid="ignore"):
        return np.log(np.stack(model.predict_times_and_powers(values, work), axis=-2))


def conditional_covariance(covariance: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Compute the covariance of the chosen parameters where all others are known, else 0."""
    result = np.zeros_like(covariance)
    part = np.ix_(chosen, chosen)
    result[part] = np.linalg.inv(np.linalg.inv(covariance)[part])
    return result


def value_and_slopes(
    function: Callable, point: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compute a function of the parameters at a point or several, and its slopes in each of them,
    (..., parameters).

    It is asked once, for all points with their imaginary steps, (parameters, points, parameters).
    """
    count = point.shape[-1]
    steps = np.eye(count).reshape(count, *[1] * (point.ndim - 1), count)
    values = function(point + 1e-20j * steps)
    return values[0].real, np.moveaxis(values.imag, 0, -1) / 1e-20


def replace_free(point: np.ndarray, is_free: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return the point with those parameters that are free elsewhere, at one place or several."""
    result = np.broadcast_to(point, (*at.shape[:-1], len(point))).astype(at.dtype)
    result[..., is_free] = at
    return result


def time_residuals(fit: Fit, point: np.ndarray) -> np.ndarray:
    """Compute relative errors of the times at a point or several, (points, runs)."""
    seen = fit.runs.where_made
    logs = log_times_and_powers(fit.names, point, seen.work)
    return logs[..., 0, :] - np.log(seen.time_s)


@np.errstate(invalid="ignore")  # a fit may try a negative power, and goes back
def power_residuals(fit: Fit, point: np.ndarray) -> np.ndarray:
    """Compute relative errors of the known powers: of the whole, or of parts, relative to it."""
    seen = fit.runs.where_made
    values = parameter_values(fit.names, point[..., None, :])
    _, whole_W, gpu_W = model.predict_times_and_powers(values, seen.work)
    gpu_residual = (gpu_W - seen.power_gpu_W) / seen.power_W
    host_residual = (whole_W - seen.power_W) / seen.power_W - gpu_residual
    has_parts = np.isfinite(seen.power_gpu_W)
    known = np.isfinite(seen.power_W) & ~has_parts
    whole_residual = np.log(whole_W[..., known]) - np.log(seen.power_W[known])
    parts = whole_residual, gpu_residual[..., has_parts], host_residual[..., has_parts]
    return np.concatenate(parts, axis=-1)


# --------------------------------------------------------------------------------------- priors


def default_priors(
    seen: ObservedRuns, entered: tuple[str, ...]
) -> dict[str, tuple[float, float]]:
    """Choose centre and spread of each parameter, of any loader and of this system.

    Of what is fitted as a logarithm, spreads are of the natural logarithm: 1 is a factor of 2.7.
    entered: terms that may be of any size.
    """
    work = seen.work
    run = seen.configs[0]
    workers = work["workers"][0]
    sample_s = seen.time_s / work["epochs"] / (work["trained"] + work["evaluated"])
    priors = {
        "tau": (np.median(sample_s), 2.0),
        "evaluation": (1.0, 0.5),  # a loader that is the limit is so in all passes
        "t_start": (0.5 if workers else 0.02, 2.0),
        "t_update": (3e-3, 0.8),
        # no two networks are alike; a guessed link is a fast one
        "efficiency": (
            (1 / 0.85 - 1, 1.7) if work["has_known_link"].all() else (9.0, 2.4)
        ),
        "kappa": (0.05, 1.0),
        # Stragglers, congestion. Chosen knowing R4 to R6: without it their GPU hours on many
        # nodes are forecast 1.4 % too low.
        "kappa_nodes": (0.005, 0.006),
    }
    if not seen.site.gpu:  # cores share memory, and two of them may be threads of one
        update_s = CPU_UPDATE_TIME_S_PER_B * run.epoch().gradient_bytes or 3e-3
        priors |= {
            "evaluation": (1 / 3, 0.15),
            "t_update": (update_s, 1.0),
            # chosen knowing what a network of our own took on two cores (docs/forecast.md)
            "efficiency": (7.0, 0.65),
            "kappa": (0.2, 1.0),
        }
    if isinstance(run, command.Config):
        priors["t_start"] = 5.0, 1.5  # a whole command begins
        if np.ptp(work["epochs"]):  # else nothing tells it from samples
            priors["t_epoch"] = 0.5, 2.0
    if workers > 1:
        priors["fill"] = workers - 1, 0.3  # all first batches come together
    units = {
        "storage": 1e6 * (sample_s / work["devices"]).min(),
        "start_device": priors["t_start"][0],
    }
    for name, term in TERMS.items():
        unit = units.get(name, 1.0)
        priors[name] = 0.0, unit * (term.most if name in entered else term.usual)
    known = np.isfinite(seen.power_W)
    if known.any():
        power_W = np.median(seen.power_W[known])
        trained_s = (seen.time_s / work["trained"] / work["epochs"])[known]
        image_J = 0.2 * power_W * np.median(trained_s)
        node_W = power_W * np.median(work["devices_of_node"][known])
        host_W = seen.site.cpu_W + seen.site.ram_W
        if seen.scope != "gpu":
            priors["host"] = (host_W, 60.0) if host_W else (0.4 * node_W, 0.4 * node_W)
        priors["fed"] = 0.7 * power_W, 0.4 * power_W
        idle_W = seen.site.gpu_idle_W
        priors["idle"] = (idle_W, 5.0) if idle_W else (0.2 * power_W, 0.1 * power_W)
        priors["image_J"] = image_J, image_J
    return priors


def scatter_of_runs(seen: ObservedRuns) -> float:
    """Tell how far single runs scatter, relatively: by their repeats, if there are any."""
    # as many as ten of one scatter lie about the square root of their number apart
    squares = [
        np.log1p(run.spread) ** 2 / run.repeats for run in seen.taken if run.repeats > 1
    ]
    return np.sqrt(np.mean(squares)) if squares else SCATTER


def prior_fit(seen: ObservedRuns, entered: tuple[str, ...] = ()) -> Fit:
    """Make the fit that is known before the runs are: the priors alone, from another system's runs
    if given.
    """
    if seen.like:
        fit = _fit_times_and_powers(seen.like, entered)
        names = fit.names
        point = fit.point
        wider = np.array([SPREADS_OF_OTHER_HARDWARE.get(name, 0.0) for name in names])
        scales = np.where(np.isin(names, LINEAR), point, 1.0)
        covariance = fit.conditional_covariance + np.diag((wider * scales) ** 2)
        covariance += np.diag(np.diag(fit.prior_covariance) * fit.open_terms)
    else:
        priors = default_priors(seen, entered)
        names = tuple(priors)
        centres, spreads = np.array(list(priors.values())).T
        point = np.array(centres)
        np.log(point, out=point, where=~np.isin(names, LINEAR))
        covariance = np.diag(spreads**2)
    errors = np.array(
        PRIOR_MODEL_ERRORS if seen.site.gpu else [PRIOR_MODEL_ERROR_ON_CPU] * 2
    )
    if all(run.repeats == 1 for run in seen.taken):
        errors[0] = max(errors[0], PRIOR_ERROR_OF_SINGLE_RUNS)
    freedom = np.full(2, ERROR_WEIGHT)
    prior = point, covariance
    return Fit(seen, names, *prior, *prior, errors, freedom, entered)


# ------------------------------------------------------------------------------------------ fit


def fit_runs(seen: ObservedRuns) -> Fit:
    """Fit the model to runs, with those terms that they ask for, the most asked for first.

    What terms they hint at, and neither ask for nor exclude, stays among the rivals of the fit.
    """
    best = _fit_times_and_powers(seen.where_made, ())
    trials = []
    for _ in TERMS:
        trials = _fits_with_one_more(seen, best, _candidate_terms(best))
        likeliest = min([*trials, best], key=lambda fit: fit.neg_log_evidence)
        if "storage" in likeliest.entered[len(best.entered) :]:
            # a limit is of what no cost explains as well, whether or not the runs hint at one
            costs = [name for name in TERMS if name not in likeliest.entered]
            trials += _fits_with_one_more(seen, best, costs)
            likeliest = min(trials, key=lambda fit: fit.neg_log_evidence)
        if likeliest.neg_log_evidence > best.neg_log_evidence - MIN_LOG_EVIDENCE:
            break
        best = likeliest
    rivals = []
    for rival in trials:
        chance = 1 / (1 + np.exp(rival.neg_log_evidence - best.neg_log_evidence))
        # a limit that was not reached says nothing of where it is
        if rival.entered[-1] != "storage":
            rivals.append(np.sqrt(chance) * (rival.point - best.point))
    return dataclasses.replace(best, runs=seen, rivals=tuple(rivals))


def _fits_with_one_more(seen: ObservedRuns, best: Fit, names: list[str]) -> list[Fit]:
    """Fit the runs with each of these terms beside those that have entered, where they show it."""
    trials = [_fit_times_and_powers(seen, (*best.entered, name)) for name in names]
    return [fit for fit in trials if _is_term_shown(fit)]


def _is_term_shown(fit: Fit) -> bool:
    """Tell whether the term that entered last is above 0; a limit is one that two runs reach, of
    which one may have been disturbed, and within a node two numbers of devices.
    """
    name = fit.entered[-1]
    work = fit.runs.where_made.work
    if fit.values[name] <= 0 or name != "storage":
        return fit.values[name] > 0
    limited = work["devices"][model.times_by_cause_s(fit.values, work)[name] > 0]
    return len(limited if work["nodes"].max() > 1 else np.unique(limited)) > 1


def _candidate_terms(fit: Fit) -> list[str]:
    """Name the terms of time that a fit lacks and its runs hint at.

    A term is hinted at if one Newton step makes it larger than HINT_RATIO times its error. The
    exchange's power has no slope. Nor has storage, which is tried where the times are missed by
    more than was expected. What hides within a node need not between nodes, where there are any.
    """
    names = []
    is_part = fit.runs.work["nodes"].max() == 1 != fit.runs.site.nodes
    residuals = functools.partial(time_residuals, fit)
    residual, slopes = value_and_slopes(residuals, fit.point)
    slope = -slopes.T @ residual / fit.errors[0] ** 2
    for index in np.flatnonzero(fit.open_terms):
        name = fit.names[index]
        if name == "overlap" and is_part:
            continue
        chosen = ~fit.open_terms
        chosen[index] = True
        term = TERMS[name]
        precision = 1 / conditional_covariance(fit.covariance, chosen)[index, index]
        less = (term.usual / term.most) ** 2 - 1
        precision += less / fit.prior_covariance[index, index]
        if slope[index] > HINT_RATIO * np.sqrt(precision):
            names.append(name)
    is_on_several = np.ptp(fit.runs.work["devices"]) > 0
    is_missed = is_on_several and fit.errors[0] > PRIOR_MODEL_ERRORS[0]
    if is_missed and "storage" not in fit.entered:
        names.append("storage")
    return names


def _fit_times_and_powers(seen: ObservedRuns, entered: tuple[str, ...]) -> Fit:
    """Fit times, then powers: they leave the values of the parameters of time, but narrow them."""
    fit = prior_fit(seen, entered)
    parts = (TIME_PARAMETERS, time_residuals), (POWER_PARAMETERS, power_residuals)
    for row, (names, misses) in enumerate(parts):
        is_free = np.isin(fit.names, [*names, *entered])
        if misses(fit, fit.point).size:
            fit = _fit_one_outcome(fit, row, is_free, functools.partial(misses, fit))
    return fit


def _fit_one_outcome(before: Fit, row: int, is_free: np.ndarray, data_residuals) -> Fit:
    """Fit the free parameters to times (row 0) or powers (1), and estimate the model's error."""
    prior = np.linalg.inv(before.covariance)
    whiten = np.linalg.cholesky(prior)
    error = before.errors[row]
    free = before.point[is_free]
    is_term = np.isin(before.names, list(TERMS))[is_free]
    free = np.where(is_term, np.sqrt(np.diag(before.covariance))[is_free], free)

    def residuals(free: np.ndarray) -> np.ndarray:
        point = replace_free(before.point, is_free, free)
        distance = (point - before.point) @ whiten
        return np.concatenate([data_residuals(point) / error, distance], axis=-1)

    for _ in range(MAX_ERROR_ITERATIONS):
        # parameters for an error, and the error for these parameters
        solution = optimize.least_squares(
            residuals,
            free,
            lambda at: value_and_slopes(residuals, at)[1],
            method="lm",
            ftol=MIN_GAIN,
        )
        free = solution.x
        slopes = solution.jac
        residual = data_residuals(replace_free(before.point, is_free, free))
        of_data = slopes[: len(residual)]
        covariance = np.linalg.inv(slopes.T @ slopes)
        freedom = (
            len(residual) - np.trace(of_data @ covariance @ of_data.T) + ERROR_WEIGHT
        )
        squares = (residual**2).sum() + ERROR_WEIGHT * before.errors[row] ** 2
        error = np.sqrt(squares / freedom)
    point = replace_free(before.point, is_free, free)
    distance = residuals(free)[len(residual) :]
    logdet_posterior = np.linalg.slogdet(slopes.T @ slopes)[1]
    logdet_prior = np.linalg.slogdet(prior[np.ix_(is_free, is_free)])[1]
    deviance = (len(residual) + ERROR_WEIGHT) * np.log(squares) + distance @ distance
    deviance += logdet_posterior - logdet_prior
    of_data = value_and_slopes(data_residuals, point)[1] / error
    precision = prior + of_data.T @ of_data
    errors = before.errors.copy()
    freedoms = before.freedom.copy()
    errors[row] = error
    freedoms[row] = freedom
    return dataclasses.replace(
        before,
        point=point,
        covariance=np.linalg.inv(precision),
        errors=errors,
        freedom=freedoms,
        neg_log_evidence=before.neg_log_evidence + (deviance / 2 if row == 0 else 0.0),
    )


def has_varied_runs(seen: ObservedRuns) -> bool:
    """Say whether runs tell the parameters: of several configurations, or with those of another."""
    work = seen.work[["devices", "local_batch_size", "trained", "updates", "passes"]]
    return seen.like is not None or len(np.unique(work)) > 1


def fit_usable_runs(seen: ObservedRuns) -> Fit:
    """Fit runs; ValueError for those of one configuration, or whose times a plain sum fits better.

    Better: the upper 90 % limit of the sum's error is below half the model's. A model that misses
    no more than its prior error passes.
    """
    subject = f"{seen.workload} on {seen.site.name}"
    if not has_varied_runs(seen):
        raise ValueError(
            f"{subject}: {len(seen)} run(s) of one configuration; tau and t_start cannot be told "
            "apart. Add a run with another number of training_samples, devices or local_batch_size"
        )
    fit = fit_runs(seen)
    work = seen.work
    error = fit.errors[0]
    costs = (
        work["trained"],
        work["trained"] * np.log2(work["nodes"]),
        work["updates"],
        1,
    )
    terms = np.stack(np.broadcast_arrays(*costs), axis=1)
    terms = terms * (work["epochs"] / seen.time_s)[:, None]
    solution, _, rank, _ = np.linalg.lstsq(terms, np.ones(len(seen)))
    squares = ((terms @ solution - 1) ** 2).sum()
    most = special.chdtri(len(seen) - rank, 0.9) * (error / 2) ** 2
    if error > prior_fit(seen).errors[0] and squares < most:
        raise ValueError(
            f"{subject}: the model misses these times by {error:.0%}, a sum of four terms by less "
            "than half of it; they are unlike the model, not of one training and machine, or too "
            "few: add one of another local batch size"
        )
    return fit


# ------------------------------------------------------------------------------------ intervals


def forecast_outcomes(fit: Fit, work: np.ndarray) -> dict[str, np.ndarray]:
    """Forecast time_s, power_W and energy_J of one GPU, (configurations, 3) each.

    Value, and low and high end of the 90 % interval; NaN: not known. The energy is the product of
    the others.
    """
    logs = functools.partial(log_times_and_powers, fit.names, work=work)
    middle, slopes = value_and_slopes(logs, fit.point)
    covariance = fit.conditional_covariance
    errors2 = np.maximum(fit.errors, scatter_of_runs(fit.runs)) ** 2
    # How wide priors are is known; only what follows from the errors needs Student's t.
    closed_prior = conditional_covariance(fit.prior_covariance, ~fit.open_terms)
    of_priors = covariance @ np.linalg.pinv(closed_prior) @ covariance
    # What follows is of times alone: nodes beyond the fitted ones, an exchange of unknown size,
    # what may come again in each epoch, and an all-reduce that may hide wholly: of unknown size, or
    # between nodes where no run was on several.
    most = fit.runs.where_made.work["nodes"].max()
    beyond = HALF_WIDTH_PER_DOUBLING * np.log2(work["nodes"] / most).clip(min=0)
    unknown = LOG_HALF_WIDTH_OF_UNKNOWN_EXCHANGE * has_unknown_exchange(fit, work)
    times = model.times_by_cause_s(fit.values, work)
    may_hide = (work["nodes"] > 1) & (most == 1) | (unknown > 0)
    hidden = np.log(1 - may_hide * times["allreduce"] / sum(times.values()))
    again = np.log1p(_starts_again_s(fit, work) / sum(times.values()))
    ends = unknown + again.clip(min=0), hidden + again.clip(max=0)
    of_time2 = beyond**2 + np.square(ends)
    steps = np.array([*steps_of_open_terms(fit), *fit.rivals])
    shifts = logs(fit.point + steps) - middle
    rows = {"time_s": [0], "power_W": [1], "energy_J": [0, 1]}
    result = {}
    for name, parts in rows.items():
        has_time = 0 in parts
        slope = slopes[parts].sum(axis=0)
        error2 = errors2[parts].sum()
        freedom = fit.freedom[parts].min()
        of_parameters = ((slope @ covariance) * slope).sum(axis=1)
        variance = of_parameters + error2
        learnt = variance - ((slope @ of_priors) * slope).sum(axis=1)
        freedom = freedom * (variance / np.maximum(learnt, 1e-12)) ** 2
        quantile = special.stdtrit(freedom, UPPER_QUANTILE)
        if name == "time_s":
            bends = (
                profile_half_widths(fit, work, quantile) ** 2 / quantile**2
                - of_parameters
            )
        half2 = quantile**2 * (variance + has_time * bends.clip(min=0))
        opened = special.ndtri(UPPER_QUANTILE) * shifts[:, parts].sum(axis=1)
        half2 += np.square([opened.clip(min=0), opened.clip(max=0)]).sum(axis=1)
        above, below = np.sqrt(half2 + has_time * of_time2)
        offsets = np.stack([0 * above, -below, above], axis=1)
        result[name] = np.exp(middle[parts].sum(axis=0)[:, None] + offsets)
    return result


def profile_half_widths(fit: Fit, work: np.ndarray, quantile: np.ndarray) -> np.ndarray:
    """Compute half-widths of the logarithm of a time, upward and downward, (2, configurations).

    By the profile likelihood, with priors: as far as parameters can go while the sum of squares, of
    residuals and distances from the priors, grows by at most the quantile squared. A linear
    approximation misses that a start of 0.5 s may well take 10 s, and is never negative.
    """
    is_free = np.isin(fit.names, [*TIME_PARAMETERS, *fit.entered])
    whiten = np.linalg.cholesky(
        np.linalg.inv(fit.prior_covariance[is_free][:, is_free])
    )
    questions = np.tile(work, 2)[:, None]
    signs = np.repeat([1.0, -1.0], len(work))

    def log_time_at(free: np.ndarray) -> np.ndarray:
        point = replace_free(fit.point, is_free, free)
        return log_times_and_powers(fit.names, point, questions)[..., 0, 0]

    def residuals(free: np.ndarray) -> np.ndarray:
        point = replace_free(fit.point, is_free, free)
        residual = time_residuals(fit, point) / fit.errors[0]
        distance = (free - fit.prior_point[is_free]) @ whiten
        return np.concatenate([residual, distance], axis=-1)

    free = np.tile(fit.point[is_free], (len(questions), 1))
    value = log_time_at(free)
    least = (residuals(free) ** 2).sum(axis=1)
    for part in INTERVAL_SEARCH_STEPS:
        residual, slope = value_and_slopes(residuals, free)
        uphill = (residual[:, None] @ slope)[:, 0]
        _, gradient = value_and_slopes(log_time_at, free)
        turned = np.swapaxes(slope, 1, 2)
        sides = np.stack([uphill, gradient], axis=2)
        to_best, direction = np.moveaxis(np.linalg.solve(turned @ slope, sides), 2, 0)
        # From the best parameters near here, in the direction in which the time grows most.
        room = (part * np.tile(quantile, 2)) ** 2 + least
        room -= (residual**2).sum(axis=1) - (uphill * to_best).sum(axis=1)
        square = np.maximum((gradient * direction).sum(axis=1), 1e-12)
        step = signs * np.sqrt(np.maximum(room, 0) / square)
        free = free + step[:, None] * direction - to_best
    return np.abs(log_time_at(free) - value).reshape(2, -1)


def _starts_again_s(fit: Fit, work: np.ndarray) -> np.ndarray:
    """Compute how much longer a command of other epochs takes if each begins as the command does,
    of which runs of as many epochs tell nothing.
    """
    if not isinstance(fit.runs.configs[0], command.Config) or "t_epoch" in fit.names:
        return np.zeros(len(work))
    more = work["epochs"] / fit.runs.work["epochs"].max() - 1
    return more * fit.values["t_start"]


def has_unknown_exchange(fit: Fit, work: np.ndarray) -> np.ndarray:
    """Say where the cost of an exchange is unknown: neither a like run tells it, nor its bytes, the
    local batch and the bandwidth.
    """
    sizes = ["devices", "local_batch_size"]
    is_new = ~np.isin(work[sizes], fit.runs.work[sizes])
    is_elsewhere = fit.runs.where_made is not fit.runs
    known = work["local_batch_size"] * work["has_known_link"]
    return (is_new | is_elsewhere) & (work["devices"] > 1) & (known == 0)


def steps_of_open_terms(fit: Fit) -> np.ndarray:
    """Compute how parameters move where a term left out is one standard deviation above 0.

    The others move with it, as the runs ask, (steps, parameters). A power may be larger or smaller.
    """
    steps = []
    for at in np.flatnonzero(fit.open_terms):
        chosen = ~fit.open_terms
        chosen[at] = True
        of_term = conditional_covariance(fit.covariance, chosen)[at]
        steps.append(of_term / np.sqrt(of_term[at]))
        if fit.names[at] == "exchange":
            steps.append(-steps[-1])
    return np.array(steps)


def forecast_errors(fit: Fit, facts: ObservedRuns) -> pd.DataFrame:
    """Set runs beside their forecast: how far off this is, and its interval, in %.

    A row for each run and quantity (time_s, energy_J) that is known. is_odd: the forecast is off by
    more than twice the half-width of its interval.
    """
    known = {"time_s": facts.time_s, "energy_J": facts.time_s * facts.power_W}
    parts = []
    work = fit.runs.work_of(facts.configs)
    told = forecast_outcomes(fit, work)
    for quantity, fact in known.items():
        value, low, high = np.log(told[quantity].T / fact)
        half = value - np.where(value > 0, low, high)
        part = {
            "devices": work["devices"],
            "quantity": quantity,
            "local_batch_size": work["local_batch_size"],
            "samples": work["trained"] * work["devices"],
            "value_percent": 100 * np.expm1(value),
            "low_percent": 100 * np.expm1(low),
            "high_percent": 100 * np.expm1(high),
            "is_inside": (low < 0) & (high > 0),
            "is_odd": value / half > ODD,
        }
        parts.append(pd.DataFrame(part))
    return pd.concat(parts).dropna()


def leave_one_out_errors(fit: Fit) -> pd.DataFrame:
    """Set each run beside the forecast of the others, with the terms that entered by all; empty
    where these are too few.
    """
    parts = [pd.DataFrame()]
    for at in range(len(fit.runs)):
        is_out = np.arange(len(fit.runs)) == at
        others = fit.runs.subset(~is_out)
        if len(others) and has_varied_runs(others):
            part = forecast_errors(
                _fit_times_and_powers(others, fit.entered), fit.runs.subset(is_out)
            )
            parts.append(part.assign(run=at))
    return pd.concat(parts, ignore_index=True)


def chance_percent(fit: Fit, ends: np.ndarray, most: float) -> float:
    """Compute the chance that a limit holds for what ``forecast_outcomes`` tells: ends are value,
    low and high.

    The logarithm has Student's t, on each side of the value as wide as the interval: 95 % keep
    a limit at the high end, 5 % one at the low end.
    """
    freedom = fit.freedom.min()
    far = special.stdtrit(freedom, UPPER_QUANTILE) * half_widths(most, *ends)
    return float(100 * special.stdtr(freedom, far))


def half_widths(limit, value, low, high, log=np.log, where=np.where):
    """Count the half-widths of an interval between its value and a limit, by logarithms.

    log, where: a browser's, of ``altair.expr``, make its expression of this.
    """
    room = log(limit / value)
    return room / where(room > 0, log(high / value), log(value / low))


def describe_parameters(fit: Fit) -> dict[str, dict]:
    """Describe every parameter: value, 90 % interval, unit, meaning, how much the data tell of it.

    told_by_data: 1: they tell all of it; 0: only the prior speaks.
    """
    spreads = np.sqrt(np.diag(fit.conditional_covariance))
    half = special.stdtrit(fit.freedom.min(), UPPER_QUANTILE) * spreads
    points = {"value": fit.point, "low": fit.point - half, "high": fit.point + half}
    known = {end: parameter_values(fit.names, point) for end, point in points.items()}
    table = pd.DataFrame(known).loc[list(fit.names)]
    # efficiency falls where what is fitted of it grows
    table[["low", "high"]] = np.sort(table[["low", "high"]])
    table["told_by_data"] = 1 - spreads**2 / np.diag(fit.prior_covariance)
    of_terms = {name: term[:2] for name, term in TERMS.items()}
    about = pd.DataFrame(
        TIME_PARAMETERS | POWER_PARAMETERS | of_terms, index=["unit", "meaning"]
    ).T
    return table[~fit.open_terms].join(about).to_dict("index")


# -------------------------------------------------------------------------------------- on disk


def write_fit(path: Path, fit: Fit) -> dict:
    """Write the runs that were fitted, and the parameters for people; returns them."""
    content = {
        "schema": FIT_FILE_SCHEMA,
        "runs": msgspec.to_builtins(fit.runs),
        "parameters": describe_parameters(fit),
    }
    write_json(path, content)
    return content


def read(path: Path, workload: str = "", site: Site | None = None) -> Fit:
    """Fit again what a file has; ValueError where it is no fit, or of something else."""
    content = read_json(path) if path.exists() else {}
    if content.get("schema") != FIT_FILE_SCHEMA:
        raise ValueError(
            f"{path}: is no fit of this version, or not there; `energynn forecast fit` writes one"
        )
    seen = msgspec.convert(content.get("runs"), ObservedRuns)
    is_others = site and site.name != seen.site.name
    if workload not in ("", seen.workload) or is_others or not seen.taken:
        raise ValueError(
            f"{path}: is of {seen.workload} on {seen.site.name}; give another, which "
            "`energynn forecast fit` writes of that workload with that --system"
        )
    others = [
        name
        for name in FORECAST_FIELDS
        if site and getattr(site, name) not in (0, getattr(seen.site, name))
    ]
    if others and seen.site.gpu:
        raise ValueError(
            f"{path}: is of {seen.site.name} with another {', '.join(others)}; "
            "`energynn forecast fit` makes it anew"
        )
    # imports the workload's module, if the caller named it; the other runs take the same
    config.config_from_dict(seen.taken[0].config, workload)
    return fit_runs(seen)


@functools.cache
def published(workload: str, system: str) -> Fit:
    """Fit all that is published of a workload on a system, made on the spot."""
    return fit_runs(runs.published_runs(workload, system))
