"""Records of runs that nobody made: what the model forecasts, with its scatter, labelled as simulated throughout."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from energynn import config, progress, records
from energynn.config import RunConfig
from energynn.files import utc_now, write_json
from energynn.forecast import model, predict, runs
from energynn.forecast.calibration import Calibration
from energynn.forecast.model import READINGS, Work
from energynn.reading import json_or_nothing

METHOD = "Nobody made this run: time and powers are those of a model (energynn forecast simulate), with its scatter."
READINGS_OF_A_RUN = 64  # power does not vary in the model; a record asks for 60 at least
BEGIN_NS = 1_000_000_000
AT_REST = {
    "missed_deadlines": 0,
    "thread_cpu_s": 0.0,
    "process_cpu_s": 0.0,
    "ended": True,
}  # what a sampler says last


def write(
    made: Calibration, asked: list[RunConfig], out: Path, tell: Callable[[str], None]
) -> list[Path]:
    """Write a run folder with a record for each run below ``out``; returns the folders.

    The scatter of a run follows from its name, so that a second call makes the same. A folder that is there is made
    anew if it is simulated; raises ValueError where it is a real run's, or a record is not valid. Nothing is written
    where the fit has no powers, or where one of the runs cannot be.
    """
    if not made.fit.has_power:
        raise ValueError(
            "fit: of the time alone; records need energies, fit runs with measured ones"
        )
    asked = [config.from_dict(config.to_dict(run) | {"system": made.site.name}) for run in asked]
    works = [predict.checked_work(made, run) for run in asked]
    folders = []
    advance = progress.meter("simulated", len(asked), "runs", tell)
    for run, work in zip(asked, works, strict=True):
        folder = Path(out) / made.site.name / config.run_id(run)
        _make_room(folder)
        _write_run(made, run, work, folder)
        record = records.build(folder, "finished", "")
        if not record["valid"]:
            why = [*record["flags"], *record["invalid_reasons"]][0]
            raise ValueError(
                f"{folder}: {why}; correct the powers in the system's file and fit again"
            )
        folders.append(folder)
        advance(1)
    return folders


def _make_room(folder: Path) -> None:
    is_simulated = json_or_nothing(folder / "run.json").get("launcher") == "simulated"
    if (
        any(folder.glob("[!.]*")) and not is_simulated
    ):  # a call that was killed early leaves an empty folder
        raise ValueError(f"{folder}: is there and was not simulated; choose another --out")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _write_run(made: Calibration, run: RunConfig, work: Work, folder: Path) -> None:
    """The raw files of one run: intent, events of all ranks, and samples of each node."""
    time_s, watts = _drawn(made, run, work)
    host_of_rank = {
        rank: f"node{rank // made.site.devices_per_node:03}" for rank in range(run.devices)
    }
    write_json(folder / "run.json", _intent(made, run))
    end_ns = BEGIN_NS + round(time_s * 1e9)
    events = [json.dumps(event) + "\n" for event in _events(made, run, work, host_of_rank, end_ns)]
    (folder / "events-rank0.jsonl").write_text("".join(events))
    moments_ns = np.linspace(BEGIN_NS, end_ns, READINGS_OF_A_RUN + 1).round().astype(int).tolist()
    on_node = Counter(host_of_rank.values())
    for number, (host, in_use) in enumerate(on_node.items()):
        header = {
            "header": "energynn-samples/1",
            "host": host,
            "pid": number,
            "period_s": time_s / READINGS_OF_A_RUN,
        }
        sensors = [_sensor("gpu", str(device)) for device in range(in_use)]
        sensors += [_sensor(component, "all") for component in watts if component != "gpu"]
        gpu_W, *host_W = watts.values()
        powers = json.dumps([round(gpu_W, 3)] * in_use + [round(W * in_use, 3) for W in host_W])
        lines = [json.dumps(header | {"sensors": sensors, "problems": []})]
        lines += [f'{{"t":{moment},"w":{moment},"d":0,"v":{powers}}}' for moment in moments_ns]
        lines.append(json.dumps({"status": AT_REST}))
        (folder / f"samples-{host}.jsonl").write_text("\n".join(lines) + "\n")


def _drawn(made: Calibration, run: RunConfig, work: Work) -> tuple[float, dict[str, float]]:
    """Time in s, and power of a GPU and of its part of a node in W by component, with the model's scatter."""
    found = made.fit
    chance = np.random.default_rng(int(config.digest(config.to_dict(run))[:16], 16))
    scatter = np.exp(found.errors * chance.standard_normal(2))
    times = model.times_s(found.values, work, READINGS[found.reading])
    powers = model.powers_W(found.values, work, times)
    total_W = float(sum(powers.values())[0] * scatter[1])
    cpu_W, ram_W, _ = predict.host_powers_W(made, work, runs.loading_workers(run))
    if not np.isfinite(cpu_W[0]):  # nothing tells CPUs from memory
        cpu_W, ram_W = powers["host"], np.array([np.nan])
    watts = {"cpu": float(cpu_W[0]), "ram": float(ram_W[0])}
    watts = {component: W for component, W in watts.items() if np.isfinite(W)}
    return float(sum(times.values())[0] * scatter[0]), {
        "gpu": total_W - sum(watts.values()),
        **watts,
    }


def _intent(made: Calibration, run: RunConfig) -> dict:
    plain = config.to_dict(run)
    machine = {
        "hostname": "simulated",
        "cpu": "simulated",
        "sockets": made.site.sockets_per_node,
        "gpus": [],
    }
    return {
        "run_id": config.run_id(run),
        "workload": run.workload,
        "system": run.system,
        "started_at": utc_now(),
        "config": plain,
        "config_digest": config.digest(plain),
        "launcher": "simulated",
        "device_kind": "gpu" if made.site.gpu else "cpu core",
        "device_name": f"{made.site.gpu or 'core'} of {made.site.name}, simulated",
        "devices": run.devices,
        "method": METHOD,
        "machine": machine,
    }


def _events(
    made: Calibration, run: RunConfig, work: Work, host_of_rank: dict[int, str], end_ns: int
) -> list[dict]:
    epoch = runs.epoch_of(run, made.samples)
    steps = int(work.updates[0]) * run.epochs
    evaluated = epoch.validation_samples
    if epoch.evaluates_training_set:
        evaluated += epoch.training_samples
    counts = {
        "samples_trained": steps * run.global_batch_size,
        "samples_evaluated": evaluated * run.epochs,
        "optimizer_steps": steps,
        "forward_backward_passes": steps * run.devices * run.accumulation_steps,
    }
    begin, end = ({"t_mono_ns": at, "t_wall_ns": at} for at in (BEGIN_NS, end_ns))
    events = []
    for rank, host in host_of_rank.items():
        events.append(
            begin | {"event": "rank_start", "rank": rank, "host": host, "device": "simulated"}
        )
        events.append(
            begin
            | {"event": "training_start", "rank": rank, "dataset_samples": epoch.training_samples}
        )
        events.append(end | {"event": "training_end", "rank": rank, "metrics": {}, **counts})
        events.append(end | {"event": "rank_end", "rank": rank, "status": "finished"})
    return events


def _sensor(component: str, device: str) -> dict:
    known = dict(
        id=f"{component}_{device}_simulated", component=component, device=device, kind="power"
    )
    known |= dict(
        provenance="simulated", to_SI=1.0, wraps_at=None, primary=True, checks=None, update_s=None
    )
    return known | dict(model=None, notes={})
