"""The fit: parameters of the model from runs, times first and powers then, and what they forecast.

The most probable parameters under weak normal priors, their covariance by Laplace's approximation,
and an error of the model that the residuals tell, with Student's t for the few that there are.
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
from scipy import optimize, stats

from energynn.experiment import config
from energynn.forecast import command, model, runs
from energynn.forecast.model import LINEAR, OF_POWER, OF_TIME
from energynn.forecast.runs import Runs
from energynn.host.files import write_json
from energynn.host.reading import json_table

SCHEMA = "energynn-forecast/5"
# relative error of the model before data are seen, for times and for powers
ERROR = 0.015
ERROR_ON_CORES = 0.08  # where others use the machine, too
ERROR_WEIGHT = 4.0  # as many observations that counts
TURNS = 4  # until a fit's error and its parameters agree
SCATTER = 0.06  # of single jobs, as the study prints it: the least error of an interval
LEVEL = 0.9
UPPER = (1 + LEVEL) / 2  # quantile at the high end of an interval
FEWEST_NODES = 4  # numbers of them that tell a limit of storage from a slow link
# on a core, of the gradients, which it moves through memory a dozen times
UPDATE_S_PER_B = 2e-9
# What another machine changes: relative spreads that are added where its fit gives the priors. Link
# and full node stay: widened by 0.5, FourCastNet's errors grow from 3 to 11 % (median, A100).
HARDWARE = {"tau": 1.5} | dict.fromkeys(("t_start", "t_update", *OF_POWER), 0.5)


@dataclass(frozen=True)
class Fit:
    """Parameters as they are fitted (times by their logarithm) with covariances and errors.

    Arrays are (parameters,) in the order of ``names``. errors: relative ones of the model, of
    times and of powers; freedom: degrees of freedom that these were learnt with.
    """

    runs: Runs
    names: tuple[str, ...]
    prior_covariance: np.ndarray
    point: np.ndarray
    covariance: np.ndarray
    errors: np.ndarray
    freedom: np.ndarray

    @property
    def values(self) -> dict[str, float]:
        """The parameters in their units; of those that it has not, NaN, or what changes nothing."""
        return to_values(self.names, self.point)

    @property
    def has_power(self) -> bool:
        return "fed" in self.names


def to_values(names: tuple[str, ...], point: np.ndarray) -> dict[str, float]:
    """Parameters in their units from a point of the space where they are fitted."""
    values = dict.fromkeys(OF_TIME, 0.0) | {"efficiency": 1.0, "evaluation": 1.0}
    values |= dict.fromkeys(OF_POWER, np.nan) | {"host": 0.0}  # none: GPUs alone
    for name, at in zip(names, point, strict=True):
        values[name] = at if name in LINEAR else np.exp(at)
    return values


def outcomes(
    names: tuple[str, ...], point: np.ndarray, work: np.recarray
) -> np.ndarray:
    """Logarithms of times in s and powers in W, (2, configurations)."""
    return np.log(np.stack(model.predict(to_values(names, point), work)))


# --------------------------------------------------------------------------------------- priors


def usual_priors(seen: Runs, storage: bool) -> dict[str, tuple[float, float]]:
    """Centre and spread of each parameter, of any loader and of this system.

    Spreads are relative for what is fitted as a logarithm; 1 and more is any order of magnitude.
    storage: whether nodes that share it slow each other down.
    """
    work, run = seen.work, seen.configs[0]
    workers = work.workers[0]
    sample_s = np.median(seen.time_s / work.epochs / (work.trained + work.evaluated))
    found = {
        "tau": (sample_s, 2.0),
        "evaluation": (1.0, 0.5),  # a loader that is the limit is so in all passes
        "t_start": (0.5 if workers else 0.02, 1.5),
        "t_update": (3e-3, 1.5),
        "efficiency": (0.85, 0.5),  # no two networks are alike
        "kappa": (0.05, 1.0),
        # Stragglers, congestion. Chosen knowing R4 to R6: without it their GPU hours on many
        # nodes are forecast 1.4 % too low.
        "kappa_nodes": (0.005, 0.006),
    }
    if not seen.site.gpu:  # cores share memory, and two of them may be threads of one
        update_s = UPDATE_S_PER_B * run.epoch().gradient_bytes or 3e-3
        found |= {"evaluation": (1 / 3, 0.15), "t_update": (update_s, 1.0)}
        found |= {"efficiency": (1.0, 0.8), "kappa": (0.2, 1.0)}
    if isinstance(run, command.Config):
        found["t_start"] = 5.0, 1.5  # a whole command begins
    if workers > 1:
        found["fill"] = workers - 1, 0.3  # all first batches come together
    if storage:
        found["kappa_storage"] = 0.0005, 2.5
    known = np.isfinite(seen.power_W)
    if known.any():
        power_W = np.median(seen.power_W[known])
        trained_s = (seen.time_s / work.trained / work.epochs)[known]
        image_J = 0.2 * power_W * np.median(trained_s)
        node_W = power_W * np.median(work.devices_of_node[known])
        host_W = seen.site.cpu_W + seen.site.ram_W
        if seen.scope == "total":
            found["host"] = (host_W, 60.0) if host_W else (0.4 * node_W, 0.4 * node_W)
        found["fed"] = 0.7 * power_W, 0.4 * power_W
        idle_W = seen.site.gpu_idle_W
        found["idle"] = (idle_W, 5.0) if idle_W else (0.2 * power_W, 0.1 * power_W)
        found["image_J"] = image_J, image_J
    return found


def unfitted(seen: Runs, storage: bool = False) -> Fit:
    """What is known before the runs are: the priors alone, from another system's runs if given."""
    if seen.like:
        fit = _fit(seen.like, storage)
        names, point = fit.names, fit.point
        wider = np.array([HARDWARE.get(name, 0.0) for name in names])
        scales = np.where(np.isin(names, LINEAR), point, 1.0)
        covariance = fit.covariance + np.diag((wider * scales) ** 2)
    else:
        priors = usual_priors(seen, storage)
        names = tuple(priors)
        centres, spreads = np.array(list(priors.values())).T
        point = np.where(np.isin(names, LINEAR), centres, np.log(centres))
        covariance = np.diag(spreads**2)
    errors = np.full(2, ERROR if seen.site.gpu else ERROR_ON_CORES)
    freedom = np.full(2, ERROR_WEIGHT)
    return Fit(seen, names, covariance, point, covariance, errors, freedom)


# ------------------------------------------------------------------------------------------ fit


def make(seen: Runs) -> Fit:
    """Fit the model to runs; with a limit of shared storage where they are on enough nodes."""
    nodes = {*seen.work.nodes, *(seen.like.work.nodes if seen.like else ())}
    return _fit(seen, storage=len(nodes) >= FEWEST_NODES)


def _fit(seen: Runs, storage: bool) -> Fit:
    """Fit times first and powers then: these do not move the parameters of time."""
    fit = unfitted(seen, storage)
    for row, (names, taken) in enumerate(
        ((OF_TIME, seen.time_s), (OF_POWER, seen.power_W))
    ):
        moves, known = np.isin(fit.names, list(names)), np.isfinite(taken)
        if moves.any() and known.any():
            fit = _with_row(fit, row, moves, seen.work[known], np.log(taken[known]))
    return fit


def _with_row(
    before: Fit, row: int, moves: np.ndarray, work: np.recarray, measured: np.ndarray
) -> Fit:
    """Fit the parameters that move to one row of the outcomes, and learn the model's error."""
    whiten = np.linalg.cholesky(np.linalg.inv(before.covariance)).T
    at, error, number = before.point, before.errors[row], len(measured)

    def residuals(at: np.ndarray) -> np.ndarray:
        moved = np.where(moves, at, before.point)
        off = outcomes(before.names, moved, work)[row] - measured
        return np.append(off / error, whiten @ (at - before.point))

    for _ in range(TURNS):
        # parameters for an error, and the error for these parameters
        answer = optimize.least_squares(residuals, at, jac="cs", x_scale="jac")
        at = answer.x
        of_data = answer.jac[:number]
        covariance = np.linalg.inv(answer.jac.T @ answer.jac)
        freedom = number - np.trace(of_data @ covariance @ of_data.T) + ERROR_WEIGHT
        squares = (answer.fun[:number] * error) ** 2
        error = np.sqrt(
            (squares.sum() + ERROR_WEIGHT * before.errors[row] ** 2) / freedom
        )
    errors, freedoms = before.errors.copy(), before.freedom.copy()
    errors[row], freedoms[row] = error, freedom
    return dataclasses.replace(
        before, point=at, covariance=covariance, errors=errors, freedom=freedoms
    )


def varies(seen: Runs) -> bool:
    """Say whether runs tell the parameters: of several configurations, or with those of another."""
    work = seen.work[["devices", "local_batch_size", "trained", "updates"]]
    return seen.like is not None or len(np.unique(work)) > 1


def check(seen: Runs) -> None:
    """Raise ValueError for runs of one configuration, and where a plain sum fits times better.

    Better: it misses at most half as much as the model does, also by the 90 % limit of its error.
    Where the model misses no more than was expected before, it is right.
    """
    subject = f"{seen.workload} on {seen.site.name}"
    if not varies(seen):
        raise ValueError(
            f"{subject}: {len(seen)} run(s) of one configuration; tau and t_start cannot be told "
            "apart. Add a run with another number of training_samples, devices or local_batch_size"
        )
    error, work = make(seen).errors[0], seen.work
    costs = work.trained, work.trained * np.log2(work.nodes), work.updates, 1
    terms = np.stack(np.broadcast_arrays(*costs), axis=1)
    terms = terms * (work.epochs / seen.time_s)[:, None]
    solution, _, rank, _ = np.linalg.lstsq(terms, np.ones(len(seen)))
    squares = ((terms @ solution - 1) ** 2).sum()
    most = stats.chi2.ppf(0.1, len(seen) - rank) * (error / 2) ** 2
    if error > unfitted(seen).errors[0] and squares < most:
        raise ValueError(
            f"{subject}: the model misses these times by {error:.0%}, a sum of four terms by less "
            "than half of it; they are not of one training and machine, or unlike the model"
        )


# ------------------------------------------------------------------------------------ intervals


def forecast(fit: Fit, work: np.recarray) -> dict[str, np.ndarray]:
    """Forecast time_s, power_W and energy_J of one GPU, (configurations, 3) each.

    Value, and low and high end of the 90 % interval; NaN: not known. The energy is the product of
    the others.
    """
    middle = outcomes(fit.names, fit.point, work)
    steps = fit.point + 1e-20j * np.eye(len(fit.point))
    # derivatives by the parameters, (2, configurations, parameters)
    slopes = [outcomes(fit.names, step, work).imag / 1e-20 for step in steps]
    slopes = np.stack(slopes, axis=-1)
    is_single = all(run.repeats == 1 for run in fit.runs.taken)
    errors2 = np.maximum(fit.errors, SCATTER if is_single else 0.0) ** 2
    # How wide priors are is known; only what follows from the errors needs Student's t.
    of_priors = fit.covariance @ np.linalg.inv(fit.prior_covariance) @ fit.covariance
    # Updates and all-reduces may hide behind a loader or a backward pass, if runs do not tell.
    hides = np.isin(fit.names, ["t_update", "efficiency"])
    untold = np.sqrt(np.diag(fit.covariance) / np.diag(fit.prior_covariance))
    hidden = np.log(1 - np.abs(slopes[0]) @ (hides * untold))
    rows = {"time_s": [0], "power_W": [1], "energy_J": [0, 1]}
    result = {}
    for name, parts in rows.items():
        slope, error2 = slopes[parts].sum(axis=0), errors2[parts]
        freedom = fit.freedom[parts].min()
        variance = ((slope @ fit.covariance) * slope).sum(axis=1) + error2.sum()
        learnt = variance - ((slope @ of_priors) * slope).sum(axis=1)
        freedom = freedom * (variance / np.maximum(learnt, 1e-12)) ** 2
        half = stats.t.ppf(UPPER, freedom) * np.sqrt(variance)
        below = half if name == "power_W" else np.hypot(half, hidden)
        off = np.stack([0 * half, -below, half], axis=1)
        result[name] = np.exp(middle[parts].sum(axis=0)[:, None] + off)
    return result


def describe(fit: Fit) -> dict[str, dict]:
    """Describe every parameter: value, 90 % interval, unit, meaning, how much the data tell of it.

    told_by_data: 1: they tell all of it; 0: only the prior speaks.
    """
    spreads = np.sqrt(np.diag(fit.covariance))
    half = stats.t.ppf(UPPER, fit.freedom.min()) * spreads
    points = {"value": fit.point, "low": fit.point - half, "high": fit.point + half}
    known = {end: to_values(fit.names, point) for end, point in points.items()}
    table = pd.DataFrame(known).loc[list(fit.names)]
    table["told_by_data"] = 1 - spreads**2 / np.diag(fit.prior_covariance)
    about = pd.DataFrame(OF_TIME | OF_POWER, index=["unit", "meaning"]).T
    return table.join(about).to_dict("index")


def gpu_power_W(fit: Fit, of_gpu: str = "idle") -> dict[str, float]:
    """Power in W of a GPU that waits for its loader, or is ``fed``, with its part of a node."""
    names = np.array(fit.names)
    parts = (names == of_gpu) + (names == "host") / fit.runs.site.devices_per_node
    value = parts @ fit.point
    spread = np.sqrt(parts @ fit.covariance @ parts)
    half = stats.t.ppf(UPPER, fit.freedom[1]) * spread
    return {"value": value, "low": value - half, "high": value + half}


# -------------------------------------------------------------------------------------- on disk


def write(path: Path, fit: Fit) -> dict:
    """Write the runs that were fitted, and the parameters for people; returns them."""
    content = {
        "schema": SCHEMA,
        "runs": msgspec.to_builtins(fit.runs),
        "parameters": describe(fit),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    return content


def read(path: Path, workload: str = "", system: str = "") -> Fit:
    """Fit again what a file has; ValueError where it is no fit, or of something else."""
    content = json_table(path) if path.exists() else {}
    if content.get("schema") != SCHEMA:
        raise ValueError(
            f"{path}: is no fit of this version, or not there; `energynn forecast fit` writes one"
        )
    seen = msgspec.convert(content.get("runs"), Runs)
    if workload not in ("", seen.workload) or system not in ("", seen.site.name):
        raise ValueError(
            f"{path}: is of {seen.workload} on {seen.site.name}; give another, which "
            "`energynn forecast fit` writes of that workload with that --system"
        )
    for run in seen.taken[:1]:
        config.from_dict(run.config, workload)  # the others' module is this one
    return make(seen)


@functools.cache
def published(workload: str, system: str) -> Fit:
    """The fit of all that is published of a workload on a system, made on the spot."""
    return make(runs.published(workload, system))
