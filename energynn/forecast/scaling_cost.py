"""The cost of scaling: what ResNet50 takes more on 256 GPUs than on four, at the same error."""

from __future__ import annotations

import numpy as np
import pandas as pd

from energynn import config, published_values
from energynn.forecast import predict
from energynn.forecast.fit import Fit


def _published(series: str) -> pd.DataFrame:
    known = pd.DataFrame(published_values.runs())
    return known[known["series"].str.contains(series)].set_index("devices")


def stated_energies_kWh() -> pd.DataFrame:
    """Bound the energy of R1 by number of GPUs: low and high end of what section 3.2.2 implies.

    It prints the CPUs' energy and their share of the total, both rounded.
    """
    r1 = _published("R1").dropna(subset="share_cpu_percent")
    half_kWh, half_percent = r1["energy_cpu_kWh_half"], r1["share_cpu_percent_half"]
    low = (
        (r1["energy_cpu_kWh"] - half_kWh)
        * 100
        / (r1["share_cpu_percent"] + half_percent)
    )
    high = (
        (r1["energy_cpu_kWh"] + half_kWh)
        * 100
        / (r1["share_cpu_percent"] - half_percent)
    )
    return pd.DataFrame({"low": low, "high": high})


def added_energy_percent(fit: Fit) -> dict[str, list[float]]:
    """Compare R3 on 256 GPUs with R1 on four: by the study's text low and high, by the model one.

    Empty where the fit is not that of the study's ResNet50.
    """
    if (fit.runs.workload, fit.runs.provenance) != ("resnet50", "published"):
        return {}
    stated_kWh = stated_energies_kWh().loc[4, ["high", "low"]]
    by_text = 100 * (_published("R3").loc[256, "energy_total_kWh"] / stated_kWh - 1)
    pair = [
        config.make("resnet50", preset="paper", devices=devices, global_batch_size=size)
        for devices, size in ((4, 1024), (256, 8192))
    ]
    forecast = predict.quantities(fit, fit.runs.works(pair))["energy_kWh"][:, 0]
    return {
        "by_text": list(by_text),
        "by_model": list(100 * np.diff(forecast) / forecast[0]),
    }
