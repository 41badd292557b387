"""Forecasts beside the fact: fitted to own runs on few devices, asked for those on more."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np

from energynn import config, records
from energynn.cluster.systems import Site
from energynn.forecast import calibration, fitting, predict, runs
from energynn.forecast.runs import Runs
from energynn.measure.energy import JOULE_PER_KWH, SECOND_PER_HOUR

QUANTITIES = {"time_h": "h", "gpu_hours": "device hours", "energy_kWh": "kWh"}


def rows(runs_dir: Path, site: Site, workload: str | None = None, most: int = 1) -> list[dict]:
    """For each recipe with valid runs on at most ``most`` devices and on more: the forecasts of these, and the facts.

    Where the few runs do not tell the parameters, ``cannot`` says which, and the run that would help. Raises ValueError
    where there are no such runs.
    """
    found = []
    for (of_runs, _), run_ids in _recipes(runs_dir, site, workload).items():
        seen = runs.own(runs_dir, of_runs, site, run_ids=run_ids)
        is_few = seen.observations.work.devices <= most
        if is_few.any() and not is_few.all():
            found.append(_row(seen, is_few, most))
    if not found:
        raise ValueError(f"{runs_dir}: no recipe has valid runs on {site.name} on {most} device(s) and on more")
    return found


def _recipes(runs_dir: Path, site: Site, workload: str | None) -> dict[tuple[str, str], set[str]]:
    """The runs' names by what a forecast does not account for: workload, and a digest of stage, data and the like."""
    found = defaultdict(set)
    for record in records.read_all(runs_dir):
        if not record["valid"] or record["system"] != site.name or "training_time_s" not in record:
            continue
        if record["config"] and workload in (None, record["workload"]):
            same = {*calibration.ACCOUNTED, "device"}  # that it had tells more than that it asked for
            kept = {name: value for name, value in record["config"].items() if name not in same}
            found[record["workload"], config.digest([record.get("device_name"), kept])].add(record["run_id"])
    return found


def _row(seen: Runs, is_few: np.ndarray, most: int) -> dict:
    few, asked = seen.only(is_few), seen.only(~is_few)
    row = {
        "workload": seen.workload,
        "stage": getattr(seen.configs[0], "stage", ""),
        "fitted_to_runs": len(few.configs),
    }
    row |= {"most_devices": most, "notes": seen.notes}
    try:
        made = calibration.make(few)
    except ValueError as error:
        return row | {"cannot": str(error), "forecasts": []}
    forecasts = [_beside(made, asked, index) for index in range(len(asked.configs))]
    return row | {"flags": fitting.flags(made.fit), "forecasts": forecasts}


def _beside(made: calibration.Calibration, asked: Runs, index: int) -> dict:
    """One configuration: each quantity with its interval, the fact, and whether that lies inside."""
    run, one = asked.configs[index], asked.observations[[index]]
    told = predict.quantities(made, one.work, runs.loading_workers(run))
    hours = float(one.time_s[0]) / SECOND_PER_HOUR
    facts = {"time_h": hours, "gpu_hours": hours * run.devices}
    facts["energy_kWh"] = float(one.power_W[0] * one.time_s[0]) * run.devices / JOULE_PER_KWH
    row = {name: getattr(run, name) for name in ("devices", "local_batch_size", "global_batch_size", "epochs")}
    for name, fact in facts.items():
        interval = predict.interval(told[name][0])
        if interval["low"] is not None and np.isfinite(fact):
            row[name] = interval | {"fact": fact, "is_inside": interval["low"] <= fact <= interval["high"]}
    return row
