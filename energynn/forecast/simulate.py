"""Records of runs that nobody made: what the model forecasts, with its scatter, so labelled."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np

from energynn import config, records
from energynn.config import RunConfig
from energynn.files import utc_now, write_json
from energynn.forecast import fit as fits
from energynn.forecast import predict, runs
from energynn.forecast.fit import Fit
from energynn.forecast.model import Work
from energynn.reading import json_or_nothing

METHOD = "Nobody made this run: its time and powers are those of a model, with its scatter."
READINGS_OF_A_RUN = 64  # power does not vary in the model; a record asks for 60 at least
BEGIN_NS = 1_000_000_000
AT_REST = {"missed_deadlines": 0, "thread_cpu_s": 0.0, "process_cpu_s": 0.0, "ended": True}


def write(fit: Fit, asked: list[RunConfig], out: Path) -> list[Path]:
    """Write a run folder with a record for each run below ``out``; returns the folders.

    The scatter of a run follows from its name, so that a second call makes the same. Raises
    ValueError for a fit without powers, a run that cannot be, and a folder of a real run.
    """
    if not fit.has_power:
        raise ValueError(
            "fit: of the time alone; records need energies, fit runs with measured ones"
        )
    asked = [config.replace(run, system=fit.runs.site.name) for run in asked]
    works = [predict.checked_work(fit, run) for run in asked]
    folders = [out / run.system / config.run_id(run) for run in asked]
    for run, work, folder in zip(asked, works, folders, strict=True):
        is_simulated = json_or_nothing(folder / "run.json").get("launcher") == "simulated"
        if any(folder.glob("[!.]*")) and not is_simulated:
            raise ValueError(f"{folder}: is there and was not simulated; choose another --out")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _write_run(fit, run, work, folder)
        record = records.build(folder, "finished", "")
        if not record["valid"]:
            why = [*record["flags"], *record["invalid_reasons"]][0]
            raise ValueError(f"{folder}: {why}; correct the system's file and fit again")
    return folders


def _write_run(fit: Fit, run: RunConfig, work: Work, folder: Path) -> None:
    """Write the raw files of one run: intent, events of all ranks, and samples of each node."""
    time_s, watts = _drawn(fit, run, work)
    end_ns, per_node = BEGIN_NS + round(time_s * 1e9), fit.runs.site.devices_per_node
    hosts = [f"node{rank // per_node:03}" for rank in range(run.devices)]
    write_json(folder / "run.json", _intent(fit, run))
    events = _events(fit, run, work, hosts, end_ns)
    _write_lines(folder / "events-rank0.jsonl", events)
    moments = np.linspace(BEGIN_NS, end_ns, READINGS_OF_A_RUN + 1).round().astype(int).tolist()
    period_s = time_s / READINGS_OF_A_RUN
    for host, number in Counter(hosts).items():
        header = {"header": "energynn-samples/1", "host": host, "pid": 0, "period_s": period_s}
        header |= {"sensors": [_sensor("gpu", str(device)) for device in range(number)]}
        header["sensors"] += [_sensor(part, "all") for part in watts if part != "gpu"]
        of_host = [of * number for part, of in watts.items() if part != "gpu"]
        powers = [round(of, 3) for of in [watts["gpu"]] * number + of_host]
        lines = [{"t": moment, "w": moment, "d": 0, "v": powers} for moment in moments]
        lines = [header | {"problems": []}, *lines, {"status": AT_REST}]
        _write_lines(folder / f"samples-{host}.jsonl", lines)


def _write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def _drawn(fit: Fit, run: RunConfig, work: Work) -> tuple[float, dict[str, float]]:
    """Time in s, and power of a GPU and of its part of a node in W by component, with scatter."""
    chance = np.random.default_rng(int(config.digest(config.to_dict(run))[:16], 16))
    logs = fits.outcomes(fit.names, fit.point, work)[:, 0]
    time_s, power_W = np.exp(logs + fit.errors * chance.standard_normal(2)).tolist()
    hosts = predict.host_powers_W(fit, work, runs.loading_workers(run))
    watts = {part: float(of[0]) for part, of in hosts.items() if np.isfinite(of[0])}
    if not watts:  # nothing tells CPUs from memory
        watts = {"cpu": float(fit.values["host"] / work.devices_of_node[0])}
    return time_s, {"gpu": power_W - sum(watts.values()), **watts}


def _intent(fit: Fit, run: RunConfig) -> dict:
    plain, site = config.to_dict(run), fit.runs.site
    sockets = {"sockets": site.sockets_per_node, "gpus": []}
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
        "machine": {"hostname": "simulated", "cpu": "simulated"} | sockets,
    }


def _events(fit: Fit, run: RunConfig, work: Work, hosts: list[str], end_ns: int) -> list[dict]:
    epoch, steps = runs.epoch_of(run, fit.runs.samples), int(work.updates[0]) * run.epochs
    passes_over_training = 1 if epoch.evaluates_training_set else 0
    evaluated = epoch.validation_samples + passes_over_training * epoch.training_samples
    counts = {
        "samples_trained": steps * run.global_batch_size,
        "samples_evaluated": evaluated * run.epochs,
        "optimizer_steps": steps,
        "forward_backward_passes": steps * run.devices * run.accumulation_steps,
    }
    begin, end = ({"t_mono_ns": at, "t_wall_ns": at} for at in (BEGIN_NS, end_ns))
    begun = {"event": "training_start", "dataset_samples": epoch.training_samples}
    events = []
    for rank, host in enumerate(hosts):
        of_rank = [
            begin | {"event": "rank_start", "host": host, "device": "simulated"},
            begin | begun,
            end | {"event": "training_end", "metrics": {}, **counts},
            end | {"event": "rank_end", "status": "finished"},
        ]
        events += [event | {"rank": rank} for event in of_rank]
    return events


def _sensor(component: str, device: str) -> dict:
    known = dict(id=f"{component}_{device}_simulated", component=component, device=device)
    known |= dict(kind="power", provenance="simulated", to_SI=1.0, primary=True, notes={})
    return known | dict.fromkeys(("wraps_at", "checks", "update_s", "model"))
