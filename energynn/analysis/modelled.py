"""What the model says of the study's series: times, powers and energies as draws. They are estimates, no evidence."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pandas as pd

from energynn import studies
from energynn.analysis import published
from energynn.cluster import systems
from energynn.config import RunConfig
from energynn.forecast import calibrate, plan, predict, runs
from energynn.forecast.calibration import Calibration
from energynn.measure.energy import JOULE_PER_KWH, SECOND_PER_HOUR

DRAWS = 2000  # of the parameters, and of the scatter of each run
ENDS = (0.05, 0.95)  # of intervals, as those of forecasts
SYSTEMS = {"A100": "horeka-a100", "H100": "horeka-h100"}


@dataclass(frozen=True)
class Modelled:
    """Configurations of series, with the columns of ``observations.wide``, and what the model says of them.

    drawn: quantity -> (1 + DRAWS, configurations); the first row is of the most probable parameters.
    """

    rows: pd.DataFrame
    drawn: dict[str, np.ndarray]

    def bands(self, quantity: str) -> pd.DataFrame:
        """The configurations of which a quantity is known, with its ``value``, ``low`` and ``high`` at 90 %."""
        values = self.drawn[quantity]
        low, high = np.quantile(values[1:], ENDS, axis=0)
        return self.rows.assign(value=values[0], low=low, high=high).dropna(subset="value")


@functools.cache
def load(*workloads: str) -> Modelled:
    """The study's series of these workloads, as far as the model was calibrated with published runs.

    Left out are more or fewer devices than these had, and what has another stage.
    """
    parts = {}
    for name, about in published.series().items():
        if about["workload"] in workloads:
            parts.setdefault((about["workload"], SYSTEMS[about["hardware"]]), []).append((name, about))
    found = [_of_system(workload, system, series) for (workload, system), series in parts.items()]
    rows = pd.concat([each.rows for each in found], ignore_index=True)
    drawn = {}
    for name in found[0].drawn:
        drawn[name] = np.concatenate([each.drawn[name] for each in found], axis=1)
    return Modelled(rows.assign(**{name: values[0] for name, values in drawn.items()}), drawn)


def _of_system(workload: str, system: str, series: list[tuple[str, dict]]) -> Modelled:
    """The series that were run on one system; a run that several of them share is drawn once."""
    made = plan.published_fit(workload, systems.site(system))
    rows, configurations = [], {}
    for name, about in series:
        of_series = {
            run.devices: run for run in studies.PAPER[name](system) if run.repeat == 0 and _is_known(made, run)
        }
        base = {"base_devices": _base(name, of_series) if of_series else 0}
        for run in of_series.values():
            number = configurations.setdefault(run, len(configurations))
            rows.append(_row(name, about, made, run) | base | {"number": number})
    rows = pd.DataFrame(rows)
    asked = list(configurations)
    work = runs.works(made.site, asked, made.samples, made.workers)[rows["number"].to_numpy()]
    logs = _draw(made, asked)[:, :, rows["number"]]
    hosts = predict.host_powers_W(made, work, runs.loading_workers(asked[0]))
    return Modelled(rows, _quantities(rows, np.exp(logs[:, 0]), np.exp(logs[:, 1]), _host_W(*hosts)))


def _is_known(made: Calibration, run: RunConfig) -> bool:
    least, most = made.ranges["devices"]
    stages = made.fields.get("stage", [""])
    return least <= run.devices <= most and getattr(run, "stage", "") in stages


def _base(series: str, devices: dict[int, RunConfig]) -> int:
    """Devices that a speed-up relates to: those of the published points, where there are any, else the fewest."""
    known = published.measurements().query("quantity == 'gpu_hours'")
    known = known[known["series"].str.split().map(lambda names: series in names)]["devices"].unique()
    return min(known) if len(known) > 1 else min(devices)


def _row(name: str, about: dict, made: Calibration, run: RunConfig) -> dict:
    samples = runs.epoch_of(run, made.samples).training_samples
    known = {"origin": "model", "provenance": "simulated", "system": "HoreKa", "device_kind": "gpu", "recipe": "model"}
    known |= {"series": name, "name": f"{name}: {about['label']}", "stage": about.get("stage", ""), "repeats": 1}
    known |= {field: about[field] for field in ("workload", "dataset", "data", "hardware")}
    sizes = ("devices", "local_batch_size", "global_batch_size", "epochs", "seed")
    known |= {field: getattr(run, field) for field in sizes}
    identity = f"model {run.workload} {run.devices} {run.local_batch_size} {samples} {about['hardware']}"
    sockets = made.site.sockets_per_node * -(-run.devices // made.site.devices_per_node) / run.devices
    facts = {"run": identity, "device_name": made.site.published_as, "sockets_per_gpu": sockets}
    return known | facts | {"dataset_samples": float(samples), "doublings": np.log2(run.devices) + 1}


def _draw(made: Calibration, asked: list[RunConfig]) -> np.ndarray:
    """Logarithms of time and power of each configuration, (1 + DRAWS, 2, configurations), with the model's scatter.

    Linear about the most probable parameters, as the intervals of ``calibrate.forecast`` are.
    """
    found, chance = made.fit, np.random.default_rng(0)
    work = runs.works(made.site, asked, made.samples, made.workers)
    freedom = found.freedom.min()
    wider = np.sqrt(freedom / chance.chisquare(freedom, DRAWS))  # errors are learnt from few runs: Student's t
    steps = chance.multivariate_normal(np.zeros(len(found.point)), found.covariance, DRAWS)
    middle = calibrate.outcomes(found.priors, found.point, work, found.reading)
    slopes = calibrate.jacobian(found.priors, found.point, work, found.reading)
    moved = np.einsum("dp,kip->dki", steps, slopes)
    moved += chance.standard_normal(moved.shape) * found.errors[:, None]
    return np.concatenate([middle[None], middle + wider[:, None, None] * moved])


def _host_W(cpu_W: np.ndarray, ram_W: np.ndarray, spreads: tuple[float, float]) -> list[np.ndarray]:
    """Powers of CPUs and memory for each GPU, (1 + DRAWS, configurations) each: off by one factor in each draw."""
    chance = np.random.default_rng(1)
    parts = []
    for watts, spread in zip((cpu_W, ram_W), spreads, strict=True):
        factors = np.exp(spread * np.append(0.0, chance.standard_normal(DRAWS)))
        parts.append(factors[:, None] * watts)
    return parts


def _quantities(rows: pd.DataFrame, time_s: np.ndarray, power_W: np.ndarray, host_W: list[np.ndarray]) -> dict:
    """The quantities of ``observations`` from time and power of one GPU, (1 + DRAWS, configurations) each."""
    devices, sockets = rows["devices"].to_numpy(), rows["sockets_per_gpu"].to_numpy()
    samples = (rows["dataset_samples"] * rows["epochs"]).to_numpy()
    hours = time_s / SECOND_PER_HOUR * devices
    total_kWh = time_s * power_W * devices / JOULE_PER_KWH
    cpu_W, ram_W = host_W
    base = [
        np.flatnonzero((rows["series"] == row.series) & (devices == row.base_devices))[0] for row in rows.itertuples()
    ]
    return {
        "training_time_h": time_s / SECOND_PER_HOUR,
        "gpu_hours": hours,
        "speed_up": time_s[:, base] / time_s,
        "energy_total_kWh": total_kWh,
        "energy_gpu_kWh": hours * (power_W - cpu_W - ram_W) / 1000,
        "energy_cpu_kWh": hours * cpu_W / 1000,
        "energy_per_gpu_hour_kW": power_W / 1000,
        "energy_per_dataset_sample_Wh": 1000 * total_kWh / rows["dataset_samples"].to_numpy(),
        "mean_power_gpu_W": power_W - cpu_W - ram_W,
        "mean_power_cpu_socket_W": cpu_W / sockets,
        "share_cpu_percent": 100 * cpu_W / power_W,
        "share_ram_percent": 100 * ram_W / power_W,
        "samples_per_gpu_hour": samples / hours,
        "passes_per_gpu_hour": samples / hours / rows["local_batch_size"].to_numpy(),
    }
