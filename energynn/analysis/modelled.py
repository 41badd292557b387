"""Forecast the study's series for the figures: estimates by the model of energynn.forecast, no
evidence.
"""

import pandas as pd

from energynn.analysis import published
from energynn.experiment import studies
from energynn.experiment.published_values import SERIES
from energynn.forecast import fits, predict


def load_forecasts(*workloads: str) -> pd.DataFrame:
    """Forecast the study's series of these workloads, within the devices and stages of the
    published runs.

    One row per series, number of GPUs and quantity (named as in ``observations``): value, low and
    high at 90 %, with gpu_hours and base_devices.
    """
    return pd.concat(
        [
            _forecast_of_series(name, about)
            for name, about in SERIES.items()
            if about["workload"] in workloads
        ],
        ignore_index=True,
    )


def _forecast_of_series(name: str, about: dict) -> pd.DataFrame:
    fit = fits.published(about["workload"], f"horeka-{about['hardware'].lower()}")
    seen = fit.runs.work["devices"]
    stages = {getattr(config, "stage", "") for config in fit.runs.configs}
    configs = [
        config
        for config in studies.PAPER_STUDIES[name](fit.runs.site.name)
        if config.repeat == 0
        and seen.min() <= config.devices <= seen.max()
        and getattr(config, "stage", "") in stages
    ]
    if not configs:
        return pd.DataFrame()
    work = fit.runs.work_of(configs)
    values = predict.forecast_quantities(fit, work)
    hours = values["gpu_hours"]
    time_h = values["time_h"]
    # speed-ups relate to the fewest devices that are published, else to the fewest
    runs = published.tabulate_runs().dropna(subset="gpu_hours")
    known = runs[runs["series"].str.contains(name)]["devices"]
    base = int(min(known if known.nunique() > 1 else work["devices"]))
    sizes = {
        "series": name,
        "name": f"{name}: {about['label']}",
        "workload": about["workload"],
        "devices": work["devices"].astype(int),
        "base_devices": base,
        "gpu_hours": hours[:, 0],
    }
    middle_h = hours[:, :1]
    base_h = time_h[work["devices"] == base, 0]
    samples = (work["trained"] * work["devices"] * work["epochs"])[:, None]
    sockets = (fit.runs.site.sockets_per_node * work["nodes"] / work["devices"])[
        :, None
    ]
    rate = samples / hours[:, predict.DIVISOR_ENDS]
    # (configurations, 3) each: value, low, high
    values |= {
        "training_time_h": time_h,
        "speed_up": base_h / time_h[:, predict.DIVISOR_ENDS],
        "energy_total_kWh": values["energy_kWh"],
        "energy_per_gpu_hour_kW": fits.forecast_outcomes(fit, work)["power_W"] / 1000,
        "power_per_gpu_W": 1000 * values["energy_gpu_kWh"] / middle_h,
        "mean_power_cpu_socket_W": 1000 * values["energy_cpu_kWh"] / middle_h / sockets,
        "samples_per_gpu_hour": rate,
        "passes_per_gpu_hour": rate / work["local_batch_size"][:, None],
    }
    parts = [
        pd.DataFrame(ends, columns=predict.INTERVAL_FIELDS).assign(
            quantity=name, **sizes
        )
        for name, ends in values.items()
    ]
    return pd.concat(parts).dropna(subset="value")
