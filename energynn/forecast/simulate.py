"""Write records of runs that nobody made: what the model forecasts, with scatter, so labelled."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np

from energynn import config, records
from energynn.config import RunConfig
from energynn.files import utc_now, write_json
from energynn.forecast import predict, runs
from energynn.forecast.fit import Fit
from energynn.measure.energy import COMPONENTS, SECOND_PER_HOUR
from energynn.reading import json_or_nothing

METHOD = "Nobody made this run: its time and powers are those of a model, with its scatter."
READINGS_OF_A_RUN = 64  # a record asks for 60 at least
BEGIN_NS = 1_000_000_000
SENSOR = dict(
    device="all", kind="energy", provenance="simulated", to_SI=1.0, primary=True, notes={}
)
SENSOR |= dict.fromkeys(("wraps_at", "checks", "update_s", "model"))


def write(fit: Fit, asked: list[RunConfig], out: Path) -> list[Path]:
    """Write a run folder with a record for each run below ``out``; returns the folders.

    The scatter of a run follows from its name, so that a second call makes the same. Raises
    ValueError for a fit without powers, a run that cannot be, and a folder of a real run.
    """
    if not fit.has_power:
        raise ValueError("fit: of times alone; records need energies, fit runs with measured ones")
    folders = []
    for run in asked:
        run = config.replace(run, system=fit.runs.site.name)
        folder = out / run.system / config.run_id(run)
        is_simulated = json_or_nothing(folder / "run.json").get("launcher") == "simulated"
        if folder.exists() and not is_simulated:
            raise ValueError(f"{folder}: is there and was not simulated; choose another --out")
        time_s, powers_W = _drawn(fit, run)
        end_ns = BEGIN_NS + round(time_s * 1e9)
        hosts = [f"node{rank // fit.runs.site.devices_per_node:03}" for rank in range(run.devices)]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(folder / "run.json", _intent(fit, run))
        _write_lines(folder / "events-rank0.jsonl", _events(fit, run, hosts, end_ns))
        for host, number in Counter(hosts).items():
            lines = _samples(host, {part: W * number for part, W in powers_W.items()}, end_ns)
            _write_lines(folder / f"samples-{host}.jsonl", lines)
        records.build(folder, "finished", "")
        folders.append(folder)
    return folders


def _drawn(fit: Fit, run: RunConfig) -> tuple[float, dict[str, float]]:
    """Draw time in s, and mean power of a GPU and of its part of a node in W, with scatter."""
    chance = np.random.default_rng(int(config.digest(config.to_dict(run))[:16], 16))
    of_time, of_power = np.exp(fit.errors * chance.standard_normal(2))
    (row,) = predict.rows(fit, [run])
    energies_kWh = {part: row[f"energy_{part}_kWh"]["value"] for part in COMPONENTS}
    if None in energies_kWh.values():  # nothing tells its parts
        energies_kWh = {"gpu": row["energy_kWh"]["value"]}
    W_per_kWh = 1000 * of_power / row["gpu_hours"]["value"]
    powers_W = {part: float(kWh * W_per_kWh) for part, kWh in energies_kWh.items()}
    return float(row["time_h"]["value"] * of_time) * SECOND_PER_HOUR, powers_W


def _write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _samples(host: str, powers_W: dict[str, float], end_ns: int) -> list[dict]:
    """Make the samples of a node: counters, one for all of its GPUs, which are alike."""
    moments = np.linspace(BEGIN_NS, end_ns, READINGS_OF_A_RUN + 1).astype(int).tolist()
    sensors = [{"id": f"{part}_simulated", "component": part} | SENSOR for part in powers_W]
    lines = [{"header": "energynn-samples/1", "host": host, "pid": 0, "problems": []}]
    lines[0] |= {"period_s": (moments[1] - moments[0]) / 1e9, "sensors": sensors}
    for moment in moments:
        counters = [watts * moment / 1e9 for watts in powers_W.values()]
        lines.append({"t": moment, "w": moment, "v": counters})
    return lines


def _intent(fit: Fit, run: RunConfig) -> dict:
    plain, site = config.to_dict(run), fit.runs.site
    machine = {"hostname": "simulated", "cpu": "simulated", "gpus": []}
    return {
        "run_id": config.run_id(run),
        "workload": run.workload,
        "system": run.system,
        "started_at": utc_now(),
        "config": plain,
        "config_digest": config.digest(plain),
        "launcher": "simulated",
        "device_kind": "gpu" if site.gpu else "cpu core",
        "device_name": f"{site.gpu or 'core'} of {site.name}, simulated",
        "devices": run.devices,
        "method": METHOD,
        "machine": machine | {"sockets": site.sockets_per_node},
    }


def _events(fit: Fit, run: RunConfig, hosts: list[str], end_ns: int) -> list[dict]:
    epoch = runs.epoch_of(run, fit.runs.samples)
    steps = int(runs.works(fit.runs, [run]).updates[0]) * run.epochs
    evaluated = epoch.validation_samples + epoch.evaluates_training_set * epoch.training_samples
    counts = {
        "metrics": {},
        "samples_trained": steps * run.global_batch_size,
        "samples_evaluated": evaluated * run.epochs,
        "optimizer_steps": steps,
        "forward_backward_passes": steps * run.devices * run.accumulation_steps,
    }
    about = {
        "rank_start": (BEGIN_NS, {"device": "simulated"}),
        "training_start": (BEGIN_NS, {"dataset_samples": epoch.training_samples}),
        "training_end": (end_ns, counts),
        "rank_end": (end_ns, {"status": "finished"}),
    }
    events = []
    for name, (at, facts) in about.items():
        for rank, host in enumerate(hosts):
            event = {"event": name, "t_mono_ns": at, "t_wall_ns": at, "rank": rank, "host": host}
            events.append(event | facts)
    return events
