"""The cost of scaling: what ResNet50 takes more on 256 GPUs than on four, at the same error."""

from __future__ import annotations

import numpy as np

from energynn.experiment import config, published_values
from energynn.forecast import predict
from energynn.forecast.fit import Fit


def _printed(series: str, devices: int) -> dict:
    runs = published_values.runs()
    return next(
        run for run in runs if series in run["series"] and run["devices"] == devices
    )


def stated_energy_kWh(devices: int) -> np.ndarray:
    """Bound the energy of R1 on one or four GPUs: low and high end of what section 3.2.2 implies.

    It prints the CPUs' energy and their share of the total, both rounded.
    """
    run, ends = _printed("R1", devices), np.array([-1, 1])
    cpu_kWh = run["energy_cpu_kWh"] + ends * run["energy_cpu_kWh_half"]
    return (
        cpu_kWh
        * 100
        / (run["share_cpu_percent"] - ends * run["share_cpu_percent_half"])
    )


def added_energy_percent(fit: Fit) -> dict[str, np.ndarray]:
    """Compare R3 on 256 GPUs with R1 on four: by the study's text low and high, by the model one.

    Empty where the fit is not that of the study's ResNet50.
    """
    if (fit.runs.workload, fit.runs.provenance) != ("resnet50", "published"):
        return {}
    by_text = _printed("R3", 256)["energy_total_kWh"] / stated_energy_kWh(4)[::-1]
    few = config.make("resnet50", preset="paper", devices=4, global_batch_size=1024)
    many = config.make("resnet50", preset="paper", devices=256, global_batch_size=8192)
    works = fit.runs.works([few, many])
    energy_kWh = predict.quantities(fit, works)["energy_kWh"][:, 0]
    by_model = energy_kWh[1:] / energy_kWh[0]
    return {"by_text": 100 * (by_text - 1), "by_model": 100 * (by_model - 1)}
