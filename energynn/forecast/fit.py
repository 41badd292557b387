"""The fit: parameters of the model from runs, times first and powers then, and what they forecast.

The most probable parameters under weak normal priors, their covariance by Laplace's approximation,
and an error of the model that the residuals tell, with Student's t for the few that there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy import linalg, optimize, stats

from energynn import config
from energynn.cluster import systems
from energynn.files import write_json
from energynn.forecast import model, runs
from energynn.forecast.model import OF_POWER, OF_TIME, PARAMETERS, Work
from energynn.forecast.runs import Runs
from energynn.reading import json_table

SCHEMA = "energynn-forecast/2"
ERROR = 0.015  # relative error of the model before data are seen, for times and for powers
ERROR_ON_CORES = 0.08  # where others use the machine, too
ERROR_WEIGHT = 4.0  # as many observations that counts
SCATTER = 0.06  # of single jobs, as the study prints it: the least error of an interval
LEVEL = 0.9
FEWEST_NODES, GAIN_OF_STORAGE = 3, 1.0  # numbers of them; of the evidence's logarithm
# An update on a core moves so many times the gradients through memory, at so many B/s: weights and
# gradients in both passes (4), DDP's copies (2), the optimizer with its state (6).
PASSES_OF_AN_UPDATE, MEMORY_B_PER_S = 12, 6e9
# What another machine changes: relative spreads that are added where its fit gives the priors. Link
# and full node stay: widened by 0.5, FourCastNet's errors grow from 3 to 11 % (median, A100).
HARDWARE = {"tau": 1.5, "t_start": 0.5, "t_update": 0.5}
HARDWARE |= {"host": 0.5, "fed": 0.5, "idle": 0.5, "image_J": 0.5}


@dataclass(frozen=True)
class Prior:
    """A parameter before data are seen; ``spread`` is relative for what is fitted as a logarithm."""

    centre: float
    spread: float
    source: str


@dataclass(frozen=True)
class Fit:
    """Parameters as they are fitted (times by their logarithm) with covariances and errors.

    Arrays are (parameters,) in the order of ``priors``. errors: relative ones of the model, of
    times and of powers; freedom: degrees of freedom that these were learnt with. evidence:
    logarithm of how probable the runs are, to compare fits to the same runs.
    """

    runs: Runs
    priors: dict[str, Prior]
    prior_covariance: np.ndarray
    point: np.ndarray
    covariance: np.ndarray
    errors: np.ndarray
    freedom: np.ndarray
    evidence: float = 0.0

    @cached_property
    def values(self) -> dict[str, float]:
        """The parameters in their units; neutral for those that the fit has not."""
        return to_values(self.priors, self.point)

    @property
    def has_power(self) -> bool:
        return "fed" in self.priors


def to_values(names, point: np.ndarray) -> dict[str, float]:
    """Parameters in their units from a point of the space where they are fitted."""
    values = dict.fromkeys(PARAMETERS, 0.0) | {"efficiency": 1.0, "evaluation": 1.0}
    for name, at in zip(names, point, strict=True):
        values[name] = float(np.exp(at)) if PARAMETERS[name].is_log else float(at)
    return values


def to_point(values: dict[str, float]) -> np.ndarray:
    """The point where parameters are fitted, from their values."""
    return np.array([np.log(of) if PARAMETERS[name].is_log else of for name, of in values.items()])


def outcomes(names, point: np.ndarray, work: Work) -> np.ndarray:
    """Logarithms of times in s and powers in W, (2, configurations)."""
    time_s, power_W = model.predict(to_values(names, point), work)
    return np.log(np.maximum([time_s, power_W], 1e-9))


def jacobian(names, point: np.ndarray, work: Work) -> np.ndarray:
    """Derivatives of ``outcomes`` by the parameters, (2, configurations, parameters)."""
    columns = []
    for index, name in enumerate(names):
        step = np.zeros(len(point))
        step[index] = 1e-4 * (1 if PARAMETERS[name].is_log else max(abs(point[index]), 1e-3))
        up, down = outcomes(names, point + step, work), outcomes(names, point - step, work)
        columns.append((up - down) / (2 * step[index]))
    return np.stack(columns, axis=-1)


# --------------------------------------------------------------------------------------- priors


def usual_priors(seen: Runs, storage: bool = False) -> dict[str, Prior]:
    """What is thought of the parameters before data are seen, of any loader and of this system.

    storage: whether nodes that share it slow each other down.
    """
    work, site, run = seen.work, seen.site, seen.configs[0]
    on_gpu, workers = bool(site.gpu), runs.loading_workers(run)
    samples = work.trained + work.evaluated
    sample_s = float(np.median(seen.time_s / work.epochs / samples))
    update_s = PASSES_OF_AN_UPDATE * run.epoch().gradient_bytes / MEMORY_B_PER_S
    weak = "weak: any order of magnitude"
    found = {
        "tau": Prior(sample_s, 2.0, "weak: of the size of the measured times"),
        "evaluation": Prior(1.0, 0.5, "the loader is the limit, in both kinds of passes"),
        "t_start": Prior(0.5 if workers else 0.02, 1.5, weak),
        "t_update": Prior(3e-3, 1.5, weak),
        "efficiency": Prior(0.85, 0.5, "what all-reduces reach of a link; no two networks alike"),
        "kappa": Prior(0.05, 1.0, weak),
        # Chosen knowing R4 to R6, whose GPU hours on many nodes are 1.4 % above those without it.
        "kappa_nodes": Prior(0.005, 0.01, "stragglers and congestion: little"),
    }
    if not on_gpu:
        cores = "weak: cores share memory, and two of them may be threads of one"
        found["evaluation"] = Prior(1 / 3, 0.15, "forward pass of forward and backward passes")
        found |= {"efficiency": Prior(1.0, 1.0, cores), "kappa": Prior(0.2, 1.0, cores)}
        if update_s:
            found["t_update"] = Prior(update_s, 1.0, "weak: gradients go through memory")
    if workers > 1:
        found["fill"] = Prior(workers - 1, 0.3, "workers - 1: all first batches come together")
    if storage:
        found["kappa_storage"] = Prior(0.02, 1.5, "weak: storage that nodes share")
    if np.isfinite(seen.power_W).any():
        found |= _priors_of_power(seen)
    return found


def _priors_of_power(seen: Runs) -> dict[str, Prior]:
    known, site = np.isfinite(seen.power_W), seen.site
    power_W = float(np.median(seen.power_W[known]))
    rate = float(np.median((seen.work.trained * seen.work.epochs / seen.time_s)[known]))
    node_W = float(np.median(seen.work.devices_of_node[known])) * power_W
    size = "weak: of the size of the measured power"
    found = {
        "host": Prior(0.4 * node_W, 0.4 * node_W, size),
        "fed": Prior(0.7 * power_W, 0.4 * power_W, size),
        "idle": Prior(0.2 * power_W, 0.1 * power_W, size),
        "image_J": Prior(0.2 * power_W / rate, 0.2 * power_W / rate, size),
    }
    if site.cpu_W and site.ram_W:
        found["host"] = Prior(site.cpu_W + site.ram_W, 60.0, f"{site.name}: its CPUs and memory")
    if site.gpu_idle_W:
        found["idle"] = Prior(site.gpu_idle_W, 5.0, f"{site.name}: an idle GPU")
    return found


def _priors_from(other: Fit) -> tuple[dict[str, Prior], np.ndarray]:
    """Priors from the fit of another system, and their covariance: hardware differs."""
    covariance = other.covariance.copy()
    for index, name in enumerate(other.priors):
        scale = 1.0 if PARAMETERS[name].is_log else max(abs(other.values[name]), 1e-3)
        covariance[index, index] += (HARDWARE.get(name, 0.0) * scale) ** 2
    source, found = f"the fit of {other.runs.site.name}", {}
    for name, variance in zip(other.priors, np.diag(covariance), strict=True):
        found[name] = Prior(other.values[name], float(np.sqrt(variance)), source)
    return found, covariance


def unfitted(seen: Runs, storage: bool = False) -> Fit:
    """What is known before the runs are: the priors alone, from another system's runs if given."""
    evidence = 0.0
    if seen.like:
        other = _fit(seen.like, storage)
        (priors, covariance), evidence = _priors_from(other), other.evidence
    else:
        priors = usual_priors(seen, storage)
        covariance = np.diag([prior.spread**2 for prior in priors.values()])
    point = to_point({name: prior.centre for name, prior in priors.items()})
    errors, freedom = np.full(2, _error(seen)), np.full(2, ERROR_WEIGHT)
    return Fit(seen, priors, covariance, point, covariance, errors, freedom, evidence)


def _error(seen: Runs) -> float:
    return ERROR if seen.site.gpu else ERROR_ON_CORES


# ------------------------------------------------------------------------------------------ fit


def make(seen: Runs) -> Fit:
    """Fit the model to runs; with a limit of shared storage only where the runs ask for it.

    That takes three numbers of nodes: on two, a slow link looks the same.
    """
    plain = _fit(seen)
    nodes = {*seen.work.nodes, *(seen.like.work.nodes if seen.like else ())}
    if len(nodes) < FEWEST_NODES:
        return plain
    limited = _fit(seen, storage=True)
    return limited if limited.evidence > plain.evidence + GAIN_OF_STORAGE else plain


def _fit(seen: Runs, storage: bool = False) -> Fit:
    """Fit times first and powers then."""
    before = unfitted(seen, storage)
    evidence = before.evidence
    point, covariance = before.point.copy(), np.zeros_like(before.covariance)
    errors, freedom = before.errors.copy(), before.freedom.copy()
    measured = np.log([seen.time_s, seen.power_W])
    for row, names in enumerate((OF_TIME, OF_POWER)):
        own = np.array([name in names for name in before.priors])
        known = np.isfinite(measured[row])
        if not own.any() or not known.any():
            covariance[np.ix_(own, own)] = before.prior_covariance[np.ix_(own, own)]
            continue
        part = before.prior_covariance[np.ix_(own, own)]
        found = _most_probable(
            before.priors,
            point,
            own,
            part,
            seen.work[known],
            measured[row][known],
            row,
            errors[row],
        )
        point[own], covariance[np.ix_(own, own)], errors[row], freedom[row], gained = found
        evidence += gained
    given = before.priors, before.prior_covariance
    return Fit(seen, *given, point, covariance, errors, freedom, evidence)


def _most_probable(names, start, own, prior_covariance, work, measured, row, error):
    """Point and covariance of the parameters of a mask, error and freedom, evidence."""
    whiten = np.linalg.cholesky(np.linalg.inv(prior_covariance)).T
    centre, prior_error, point = start[own], error, start.copy()

    def off(at: np.ndarray) -> np.ndarray:
        point[own] = at
        return outcomes(names, point, work)[row] - measured

    def slopes(at: np.ndarray) -> np.ndarray:
        point[own] = at
        return jacobian(names, point, work)[row][:, own]

    at = centre
    for _ in range(6):  # parameters for an error, and the error for these parameters
        answer = optimize.least_squares(
            lambda at, error=error: np.append(off(at) / error, whiten @ (at - centre)),
            at,
            lambda at, error=error: np.vstack([slopes(at) / error, whiten]),
            x_scale="jac",
        )
        at = answer.x
        covariance = np.linalg.inv(answer.jac.T @ answer.jac)
        used = np.trace(slopes(at) @ covariance @ slopes(at).T) / error**2
        freedom = len(measured) - used + ERROR_WEIGHT
        squares = (off(at) ** 2).sum() + ERROR_WEIGHT * prior_error**2
        before, error = error, float(np.sqrt(squares / freedom))
        if np.isclose(before, error, rtol=0.01):
            break
    evidence = -answer.cost - len(measured) * np.log(before)
    evidence += np.linalg.slogdet(covariance)[1] / 2 - np.linalg.slogdet(prior_covariance)[1] / 2
    return at, covariance, error, freedom, float(evidence)


def check(seen: Runs) -> None:
    """Raise ValueError where runs of one configuration are all that there is."""
    work = seen.work
    varied = np.stack([work.devices, work.local_batch_size, work.trained, work.updates])
    if seen.like is None and np.unique(varied, axis=1).shape[1] < 2:
        raise ValueError(
            f"{seen.workload} on {seen.site.name}: {len(seen.configs)} run(s) of one configuration;"
            " tau and t_start cannot be told apart. Add a run with another number of"
            " training_samples, devices or local_batch_size"
        )


# ------------------------------------------------------------------------------------ intervals


def forecast(fit: Fit, work: Work) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of time_s, power_W and energy_J the logarithm of the value and half its 90 % interval.

    (configurations,) each. The energy is the product of the others: of one GPU.
    """
    middle = outcomes(fit.priors, fit.point, work)
    slopes = jacobian(fit.priors, fit.point, work)
    errors = np.maximum(fit.errors, SCATTER if fit.runs.are_single else 0.0)
    rows = {"time_s": [0], "power_W": [1], "energy_J": [0, 1]}
    # How wide priors are is known; only what follows from the errors needs Student's t.
    of_priors = fit.covariance @ linalg.pinvh(fit.prior_covariance) @ fit.covariance
    result = {}
    for name, of in rows.items():
        if 1 in of and not fit.has_power:
            continue
        slope = slopes[of].sum(axis=0)
        error2 = errors[of] ** 2
        freedom = error2.sum() ** 2 / (error2**2 / fit.freedom[of]).sum()
        variance = np.einsum("ij,jl,il->i", slope, fit.covariance, slope) + error2.sum()
        learnt = variance - np.einsum("ij,jl,il->i", slope, of_priors, slope)
        t = stats.t.ppf((1 + LEVEL) / 2, freedom * (variance / learnt) ** 2)
        result[name] = middle[of].sum(axis=0), t * np.sqrt(variance)
    return result


def draws(fit: Fit, work: Work, number: int) -> np.ndarray:
    """Logarithms of time and power with the model's scatter, (1 + number, 2, configurations).

    The first is of the most probable parameters; linear about them, as ``forecast`` is.
    """
    chance, freedom = np.random.default_rng(0), fit.freedom.min()
    wider = np.sqrt(freedom / chance.chisquare(freedom, number))
    steps = chance.multivariate_normal(np.zeros(len(fit.point)), fit.covariance, number)
    middle = outcomes(fit.priors, fit.point, work)
    moved = np.einsum("dp,kip->dki", steps, jacobian(fit.priors, fit.point, work))
    moved += chance.standard_normal(moved.shape) * fit.errors[:, None]
    return np.concatenate([middle[None], middle + wider[:, None, None] * moved])


def describe(fit: Fit) -> dict[str, dict]:
    """Every parameter with value, 90 % interval, unit, prior and how much the data tell of it.

    told_by_data: 1: they tell all of it; 0: only the prior speaks.
    """
    half = stats.t.ppf((1 + LEVEL) / 2, fit.freedom.min()) * np.sqrt(np.diag(fit.covariance))
    low, high = (to_values(fit.priors, fit.point + end * half) for end in (-1, 1))
    told = 1 - np.diag(fit.covariance) / np.diag(fit.prior_covariance)
    table = {}
    for (name, prior), share in zip(fit.priors.items(), told.tolist(), strict=True):
        known = PARAMETERS[name]
        row = {"value": fit.values[name], "low": low[name], "high": high[name], "unit": known.unit}
        row |= {"prior": prior.centre, "told_by_data": share, "source": prior.source}
        table[name] = row | {"meaning": known.meaning}
    return table


# -------------------------------------------------------------------------------------- on disk


def write(path: Path, fit: Fit) -> dict:
    """Write the runs that were fitted, the parameters for people, and a checksum; returns it."""
    content = {"schema": SCHEMA, "runs": runs.to_dict(fit.runs), "parameters": describe(fit)}
    content |= {"sha256": config.digest(content)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    return content


def read(path: Path, workload: str = "", system: str = "") -> Fit:
    """Fit again what a file has; ValueError where it is no fit, damaged, or of something else."""
    again = "`energynn forecast fit` writes one"
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such fit; {again}")
    content = json_table(path)
    digest = content.pop("sha256", "")
    if content.get("schema") != SCHEMA:
        raise ValueError(f"{path}: is no fit of this version ({SCHEMA}); {again}")
    if digest != config.digest(content):
        raise ValueError(f"{path}: was damaged or changed after it was written; {again}")
    seen = runs.from_dict(content["runs"])
    if workload not in ("", seen.workload) or system not in ("", seen.site.name):
        of = f"{seen.workload} on {seen.site.name}"
        asked = f"{workload} on {system}" if system else workload
        raise ValueError(f"{path}: is a fit of {of}, not of {asked}; give one of it")
    return make(seen)


def published(workload: str, system: str) -> Fit:
    """The fit of all that is published of a workload on a system, made on the spot."""
    return make(runs.published(workload, systems.site(system)))
