"""What is thought of the parameters before data are seen: of this system, of any loader, or from another fit."""

from __future__ import annotations

import numpy as np

from energynn.cluster.systems import Site
from energynn.config import RunConfig
from energynn.forecast import calibrate, runs
from energynn.forecast.calibrate import Fit, Observations, Prior
from energynn.forecast.model import NAMES

WEAK = "weak: any order of magnitude"
CORES = "weak: cores share memory, and two of them may be threads of one"
NO_WORKERS = "weak: no process starts where there are no workers"
GRADIENTS = "weak: of the size of the gradients, which go through memory"
# What an update on a core reads and writes, in sizes of the gradients: weights in both passes (2), gradients made anew
# (2) and copied for DDP (2), and what the optimizer does with weights, gradients and state (6); at so many B/s. The
# optimizer alone reaches 7 to 9 GB/s here, and weights that are brought into another order are not counted.
PASSES_OF_AN_UPDATE, MEMORY_B_PER_S = 12, 6e9
OF_SIZE = "weak: of the size of the measured power"
# Where the parameters of one system stand for another, hardware makes samples faster and GPUs hungrier.
HARDWARE = {"tau": 1.5, "host": 0.5, "fed": 0.5, "idle": 0.5}  # relative spread that is added


def make(seen: Observations, site: Site, run: RunConfig, storage: bool) -> dict[str, Prior]:
    """Priors of every parameter that the data may inform; of powers only where there are any.

    ``run``: one of those seen. ``storage``: whether further nodes slow each other down.
    """
    work, workers = seen.work, runs.loading_workers(run)
    sample_s = float(np.median(seen.time_s / work.epochs / (work.trained + work.evaluated)))
    priors = {
        "tau": Prior(sample_s, 2.0, "weak: of the size of the measured times"),
        "t_start": Prior(0.5, 1.5, WEAK) if workers else Prior(0.02, 1.5, NO_WORKERS),
        "t_update": Prior(3e-3, 1.5, WEAK),
        "efficiency": Prior(0.85, 0.15, "what all-reduces reach of a link"),
        "kappa": Prior(0.05, 1.0, WEAK),
    }
    if not site.gpu:
        update_s = PASSES_OF_AN_UPDATE * run.epoch().gradient_bytes / MEMORY_B_PER_S
        if update_s:
            priors["t_update"] = Prior(update_s, 1.0, GRADIENTS)
        priors |= {"efficiency": Prior(1.0, 1.0, CORES), "kappa": Prior(0.2, 1.0, CORES)}
    if workers > 1:
        priors["fill"] = Prior(workers - 1, 0.3, "workers - 1: a worker's first batch is ready when all have theirs")
    if storage:
        priors["kappa_storage"] = Prior(0.02, 1.5, WEAK)
    known = np.isfinite(seen.power_W)
    if known.any():
        priors |= _of_power(seen[known], site)
    return {name: priors[name] for name in NAMES if name in priors}


def _of_power(seen: Observations, site: Site) -> dict[str, Prior]:
    priors, work = {}, seen.work
    power_W = float(np.median(seen.power_W))
    rate = float(np.median(work.trained * work.epochs / seen.time_s))
    node_W = float(np.median(work.devices_of_node)) * power_W
    if site.cpu_W and site.ram_W:
        priors["host"] = Prior(site.cpu_W + site.ram_W, 60.0, f"{site.name}: its CPUs and memory")
    else:
        priors["host"] = Prior(0.4 * node_W, 0.4 * node_W, OF_SIZE)
    priors["fed"] = Prior(0.7 * power_W, 0.4 * power_W, OF_SIZE)
    if site.gpu_idle_W:
        priors["idle"] = Prior(site.gpu_idle_W, 5.0, f"{site.name}: an idle GPU")
    else:
        priors["idle"] = Prior(0.2 * power_W, 0.1 * power_W, OF_SIZE)
    priors["image_J"] = Prior(0.2 * power_W / rate, 0.2 * power_W / rate, OF_SIZE)
    return priors


def usual_reading(site: Site) -> str:
    """The reading that holds unless the data speak against it: a core takes longer to compute than to load."""
    return "loader-bound" if site.gpu else "GPU-bound"


def error(site: Site) -> float:
    """Relative error of the model before data are seen."""
    return calibrate.ERROR if site.gpu else calibrate.ERROR_ON_CORES


def like(other: Fit, system: str) -> tuple[dict[str, Prior], np.ndarray]:
    """Priors from the fit of another system, and their covariance: the hardware's parameters may differ more."""
    values, covariance = other.values, other.covariance.copy()
    for index, name in enumerate(other.priors):
        if name in HARDWARE:
            scale = 1.0 if name == "tau" else max(abs(values[name]), 1.0)
            covariance[index, index] += (HARDWARE[name] * scale) ** 2
    spreads = np.sqrt(np.diag(covariance))
    priors = {
        name: Prior(values[name], float(spread), f"the fit of {system}")
        for name, spread in zip(other.priors, spreads, strict=True)
    }
    return priors, covariance
