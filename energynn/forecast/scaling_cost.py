"""The cost of scaling: what ResNet50 takes more on 256 GPUs than on four, at the same error."""

from __future__ import annotations

import numpy as np

from energynn import published_values, studies
from energynn.forecast import predict
from energynn.forecast.fit import Fit

FEW, MANY = 4, 256


def stated_energies_kWh() -> dict[int, np.ndarray]:
    """Bound the energy of R1 by number of GPUs: low and high end of what section 3.2.2 implies.

    It prints the CPUs' energy and their share of the total, both rounded.
    """
    energies_kWh = {}
    for run in published_values.runs():
        if "share_cpu_percent" in run and "R1" in run["series"].split():
            half_kWh, half_percent = (
                run["energy_cpu_kWh_half"],
                run["share_cpu_percent_half"],
            )
            cpu_kWh = run["energy_cpu_kWh"] + half_kWh * np.array([-1, 1])
            share_percent = run["share_cpu_percent"] + half_percent * np.array([1, -1])
            energies_kWh[run["devices"]] = cpu_kWh * 100 / share_percent
    return energies_kWh


def added_energy_percent(fit: Fit) -> dict[str, list[float]]:
    """Compare R3 on 256 GPUs with R1 on four: by the study's text low and high, by the model one.

    Empty where the fit is not that of the study's ResNet50.
    """
    if (fit.runs.workload, fit.runs.provenance) != ("resnet50", "published"):
        return {}
    stated = [
        run["energy_total_kWh"]
        for run in published_values.costs()
        if "R3" in run["series"].split() and run["devices"] == MANY
    ]
    by_text = 100 * (stated[0] / stated_energies_kWh()[FEW][::-1] - 1)
    series = {"R1": FEW, "R3": MANY}
    planned = [
        next(
            run
            for run in studies.PAPER[name](fit.runs.site.name)
            if run.devices == devices
        )
        for name, devices in series.items()
    ]
    few_kWh, many_kWh = predict.quantities(fit, fit.runs.works(planned))["energy_kWh"][
        :, 0
    ]
    return {"by_text": list(by_text), "by_model": [100 * (many_kWh / few_kWh - 1)]}
