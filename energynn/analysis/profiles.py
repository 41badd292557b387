"""Power over time of a run: reading, and thinning that keeps peaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from energynn.analysis import results
from energynn.measure import account, samples
from energynn.reading import json_table

PROFILE = ["time_s", "device", "power_W"]


def available(runs_dir: str | Path) -> pd.DataFrame:
    """List all valid runs that have a trace, also measured commands and imported perun files.

    ``component`` is "gpu" where a GPU has an energy, else "cpu"; ``provenance`` that of its energy.
    """
    trained = results.load(runs_dir)
    others = results.load(runs_dir, trained=False)
    runs = pd.concat([trained, others], ignore_index=True)
    files = [any(Path(run_dir).rglob("samples-*.jsonl")) for run_dir in runs["run_dir"]]
    runs = runs[np.array(files, bool)]
    is_gpu = runs["energy_gpu_J"].notna()
    of_gpu, of_cpu = (runs[f"energy_{name}_provenance"] for name in ("gpu", "cpu"))
    component = is_gpu.map({True: "gpu", False: "cpu"})
    provenance = of_gpu.where(is_gpu, of_cpu)
    return runs.assign(run=runs["run_id"], component=component, provenance=provenance)


def segments(run_dir: Path, record: dict) -> Iterator[tuple[Path, float, float]]:
    """For each segment of a run: its folder, the training time before it, and its own."""
    begin_s = 0.0
    parts = record["segments"] or [record]
    for folder, part in zip(samples.segments(run_dir), parts, strict=False):
        length_s = part.get("training_time_s", 0.0)
        yield folder, begin_s, length_s
        begin_s += length_s


def load(
    run_dir: str | Path, component: str = "gpu", period_s: float = 1.0
) -> pd.DataFrame:
    """Return mean power of each primary sensor of a component: time_s, device, power_W.

    In steps of ``period_s`` from the start of the training, only within it; segments of a resumed
    run follow one another without the gaps between them. Empty without such a sensor or samples.
    """
    run_dir = Path(run_dir)
    record = json_table(run_dir / "record.json")
    names = []
    for sensor in record["sensors"]:
        if sensor["component"] == component and sensor.get("primary", True):
            # as traces name them
            names += [sensor["id"], f"{sensor.get('host')}:{sensor['id']}"]
    rows = [pd.DataFrame(columns=PROFILE)]
    for folder, begin_s, length_s in segments(run_dir, record):
        for device, (t_s, power_W) in account.power_trace(folder, period_s).items():
            inside = (t_s > 0) & (t_s < length_s) & (device in names)
            values = begin_s + t_s[inside], device, power_W[inside]
            rows.append(pd.DataFrame(dict(zip(PROFILE, values, strict=True))))
    return pd.concat(rows, ignore_index=True).astype(
        {"time_s": float, "power_W": float}
    )


def thin(profile: pd.DataFrame, points: int = 1000) -> pd.DataFrame:
    """At most ``points`` rows per device: the lowest and the highest of each stretch of time: no
    peak is lost.
    """
    kept = []
    for _, part in profile.groupby("device"):
        if len(part) > points:
            stretch = np.arange(len(part)) * (points // 2) // len(part)
            power = part["power_W"].groupby(stretch)
            part = part.loc[sorted({*power.idxmin(), *power.idxmax()})]
        kept.append(part)
    return pd.concat(kept) if kept else profile
