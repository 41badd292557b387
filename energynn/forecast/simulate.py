"""Write records of runs that nobody made: what the model forecasts, with scatter, so labelled."""

from pathlib import Path

import numpy as np
import pandas as pd

from energynn import records
from energynn.experiment import config
from energynn.experiment.config import RunConfig
from energynn.forecast import predict
from energynn.forecast.fits import Fit
from energynn.host.files import utc_time_text, write_json
from energynn.measure.energy import COMPONENTS, SECOND_PER_HOUR
from energynn.measure.samples import Channel, write_host_files

SIMULATION_METHOD_TEXT = (
    "Nobody made this run: its time and powers are those of a model, with its scatter."
)
READINGS_PER_RUN = 65  # a record asks for 60 at least
TRAINING_BEGIN_NS = 1_000_000_000


def write_simulated_runs(fit: Fit, asked: list[RunConfig], out: Path) -> list[Path]:
    """Write a run folder with a record for each run below ``out``; returns the folders.

    The scatter of a run follows from its name, so that another call makes the same. Raises
    ValueError for a fit without powers, a run that cannot be, and a run that is there.
    """
    if not fit.has_power:
        raise ValueError(
            "fit: of times alone; records need energies, fit runs with measured ones"
        )
    site = fit.runs.site
    return [
        _write_run_folder(fit, config.replace(run, system=site.name), out)
        for run in asked
    ]


def _write_run_folder(fit: Fit, run: RunConfig, out: Path) -> Path:
    folder = config.folder(run, out)
    of_node = fit.runs.site.devices_per_node
    if folder.exists():
        raise ValueError(f"{folder}: is there; choose another --out")
    time_s, powers_W = _draw_time_and_powers(fit, run)
    times_s = np.linspace(0, time_s, READINGS_PER_RUN)
    times_ns = (TRAINING_BEGIN_NS + 1e9 * times_s).astype(int).tolist()
    sensors = [
        Channel(f"{part}_simulated", part, "all", "energy", "simulated")
        for part in powers_W.index
    ]
    counts = _training_counts(fit, run)
    write_json(folder / "run.json", _intent_of_run(fit, run))
    for node, before in enumerate(range(0, run.devices, of_node)):
        # counters, one for all GPUs of a node, which are alike
        node_W = min(of_node, run.devices - before) * powers_W.to_numpy()
        readings = np.outer(times_s, node_W).tolist()
        write_host_files(
            folder, node, f"node{node:03}", sensors, times_ns, readings, **counts
        )
    records.save_record(folder, "finished", "")
    return folder


def _draw_time_and_powers(fit: Fit, run: RunConfig) -> tuple[float, pd.Series]:
    """Draw time in s, and mean power in W of a GPU and of its parts of a node, with scatter."""
    chance = np.random.default_rng(int(config.json_digest(config.run_id(run))[:16], 16))
    (row,) = predict.forecasts(fit, [run])
    energies_kWh = pd.Series(
        {part: row[f"energy_{part}_kWh"]["value"] for part in COMPONENTS}
    )
    if energies_kWh.isna().any():  # nothing tells its parts
        energies_kWh = pd.Series({"gpu": row["energy_kWh"]["value"]})
    by_time, by_power = np.exp(fit.errors * chance.standard_normal(2))
    powers_W = by_power * 1000 * energies_kWh / row["gpu_hours"]["value"]
    return by_time * row["time_h"]["value"] * SECOND_PER_HOUR, powers_W


def _intent_of_run(fit: Fit, run: RunConfig) -> dict:
    plain = config.asdict(run)
    site = fit.runs.site
    number = site.devices_per_node
    return {
        "run_id": config.run_id(run),
        "workload": run.workload,
        "system": run.system,
        "started_at": utc_time_text(),
        "config": plain,
        "config_digest": config.json_digest(plain),
        "launcher": "simulated",
        "device_kind": "gpu" if site.gpu else "cpu core",
        "device_name": f"{site.gpu or 'core'} of {site.name}, simulated",
        "devices": run.devices,
        "method": SIMULATION_METHOD_TEXT,
        "machine": {
            "hostname": "simulated",
            "cpu": "simulated",
            "cores": number,
            "gpus": [{}] * number if site.gpu else [],
            "sockets": site.sockets_per_node,
        },
    }


def _training_counts(fit: Fit, run: RunConfig) -> dict:
    """Count what a run's trainer would have counted."""
    epoch = fit.runs.epoch(run)
    batches = int(fit.runs.work_of([run])["updates"][0]) * run.epochs
    steps = batches // run.accumulation_steps
    evaluated = (
        epoch.validation_samples + epoch.evaluates_training_set * epoch.training_samples
    )
    return {
        "dataset_samples": epoch.training_samples,
        "samples_trained": steps * run.global_batch_size,
        "samples_evaluated": evaluated * run.epochs,
        "optimizer_steps": steps,
        "forward_backward_passes": batches,
    }
