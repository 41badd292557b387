"""Write records of runs that nobody made: what the model forecasts, with scatter, so labelled."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

from energynn import config, records
from energynn.config import RunConfig
from energynn.files import utc_now, write_json
from energynn.forecast import predict, runs
from energynn.forecast.fit import Fit
from energynn.measure.energy import COMPONENTS, SECOND_PER_HOUR

METHOD = (
    "Nobody made this run: its time and powers are those of a model, with its scatter."
)
READINGS_OF_A_RUN = 64  # a record asks for 60 at least
BEGIN_NS = 1_000_000_000
SENSOR = dict(
    device="all",
    kind="energy",
    provenance="simulated",
    to_SI=1.0,
    primary=True,
    notes={},
)
SENSOR |= dict.fromkeys(("wraps_at", "checks", "update_s", "model"))


def write(fit: Fit, asked: list[RunConfig], out: Path) -> list[Path]:
    """Write a run folder with a record for each run below ``out``; returns the folders.

    The scatter of a run follows from its name, so that another call makes the same. Raises
    ValueError for a fit without powers, a run that cannot be, and a run that is there.
    """
    if not fit.has_power:
        raise ValueError(
            "fit: of times alone; records need energies, fit runs with measured ones"
        )
    folders = []
    for run in asked:
        run = config.replace(run, system=fit.runs.site.name)
        folder = out / run.system / config.run_id(run)
        if folder.exists():
            raise ValueError(f"{folder}: is there; choose another --out")
        time_s, powers_W = _drawn(fit, run)
        end_ns = BEGIN_NS + round(time_s * 1e9)
        hosts = [
            f"node{rank // fit.runs.site.devices_per_node:03}"
            for rank in range(run.devices)
        ]
        folder.mkdir(parents=True)
        write_json(folder / "run.json", _intent(fit, run))
        _write_lines(folder / "events-rank0.jsonl", _events(fit, run, hosts, end_ns))
        for host, number in Counter(hosts).items():
            _write_lines(
                folder / f"samples-{host}.jsonl",
                _samples(host, number * powers_W, end_ns),
            )
        records.build(folder, "finished", "")
        folders.append(folder)
    return folders


def _drawn(fit: Fit, run: RunConfig) -> tuple[float, pd.Series]:
    """Draw time in s, and mean power in W of a GPU and of its parts of a node, with scatter."""
    chance = np.random.default_rng(int(config.digest(config.to_dict(run))[:16], 16))
    (row,) = predict.rows(fit, [run])
    energies_kWh = pd.Series(
        {part: row[f"energy_{part}_kWh"]["value"] for part in COMPONENTS}
    )
    if energies_kWh.isna().any():  # nothing tells its parts
        energies_kWh = pd.Series({"gpu": row["energy_kWh"]["value"]})
    by_time, by_power = np.exp(fit.errors * chance.standard_normal(2))
    powers_W = by_power * 1000 * energies_kWh / row["gpu_hours"]["value"]
    return by_time * row["time_h"]["value"] * SECOND_PER_HOUR, powers_W


def _write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _samples(host: str, powers_W: pd.Series, end_ns: int) -> list[dict]:
    """Make the samples of a node: counters, one for all of its GPUs, which are alike."""
    moments = np.linspace(BEGIN_NS, end_ns, READINGS_OF_A_RUN + 1).astype(int).tolist()
    header = {"header": "energynn-samples/1", "host": host, "pid": 0, "problems": []}
    header["period_s"] = (moments[1] - moments[0]) / 1e9
    header["sensors"] = [
        {"id": f"{part}_simulated", "component": part} | SENSOR
        for part in powers_W.index
    ]
    readings = [
        {"t": moment, "w": moment, "v": list(powers_W * moment / 1e9)}
        for moment in moments
    ]
    return [header, *readings]


def _intent(fit: Fit, run: RunConfig) -> dict:
    plain, site = config.to_dict(run), fit.runs.site
    machine = {"hostname": "simulated", "cpu": "simulated"}
    machine["cores"] = site.devices_per_node
    machine["gpus"] = [{}] * site.devices_per_node if site.gpu else []
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
    evaluated = (
        epoch.validation_samples + epoch.evaluates_training_set * epoch.training_samples
    )
    counts = {
        "metrics": {},
        "samples_trained": steps * run.global_batch_size,
        "samples_evaluated": evaluated * run.epochs,
        "optimizer_steps": steps,
        "forward_backward_passes": steps * run.accumulation_steps,
    }
    facts = {
        "rank_start": {"device": "simulated"},
        "training_start": {"dataset_samples": epoch.training_samples},
        "training_end": counts,
        "rank_end": {"status": "finished"},
    }
    events = []
    for (name, about), (rank, host) in itertools.product(
        facts.items(), enumerate(hosts)
    ):
        at = end_ns if name.endswith("end") else BEGIN_NS
        about = about | {"rank": rank, "host": host, "t_mono_ns": at, "t_wall_ns": at}
        events.append({"event": name} | about)
    return events
