"""Power over time of a run: reading, summary numbers, and thinning that keeps peaks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from energynn.measure import energy
from energynn.measure.samples import segments
from energynn.reading import json_table, one_fault
from energynn.records import read_record

NEAR = 0.15  # near the baseline: within this part of the way from it to the 95th percentile
BACK_UP = 0.5  # only what was as high as this before has fallen back
LEAST_SHARE_OF_VARIANCE = 0.1  # a peak of the spectrum with less is no dominant period


def available(runs_dir: str | Path) -> pd.DataFrame:
    """All valid runs that have a trace, trainings, measured commands and imported perun files alike: one row each.

    ``component`` is "gpu" where a GPU has an energy, else "cpu"; ``idle_W`` its idle power per sensor, NaN if unknown.
    """
    rows, faults = [], []
    for path in sorted(Path(runs_dir).glob("*/*/record.json")):
        with one_fault(path.parent, faults):  # told where records are loaded
            rows += _rows_of(path)
    names = ["run", "run_dir", "component", "system", "workload", "stage", "devices", "local_batch_size", "idle_W"]
    return pd.DataFrame(rows, columns=[*names, "device_name", "training_time_s", "provenance"])


def _rows_of(path: Path) -> list[dict]:
    """The row of one record; none where it is not valid or has no trace."""
    record = read_record(path.parent)
    component = "gpu" if "energy_gpu_J" in record else "cpu"
    if not record["valid"] or not _sensors(record, component) or not list(path.parent.rglob("samples-*.jsonl")):
        return []
    config = record.get("config", {})
    row = {name: record.get(name, "") for name in ("system", "workload", "device_name", "training_time_s")}
    row |= {"run": record["run_id"], "run_dir": str(path.parent), "component": component}
    row |= {"stage": config.get("stage", ""), "devices": record.get("devices", 1)}
    row |= {"local_batch_size": config.get("local_batch_size", np.nan), "idle_W": idle_W(record, component)}
    return [{**row, "provenance": record[f"energy_{component}_provenance"]}]


def _sensors(record: dict, component: str) -> list[dict]:
    every = record.get("sensors", [])
    return [sensor for sensor in every if sensor.get("component") == component and sensor.get("primary", True)]


def idle_W(record: dict, component: str = "gpu") -> float:
    """Idle power in W of one sensor of a component, measured before the run; NaN if it was not."""
    return record.get(f"idle_power_{component}_before_W", np.nan) / max(len(_sensors(record, component)), 1)


def load(run_dir: str | Path, component: str = "gpu", period_s: float = 1.0) -> pd.DataFrame:
    """Mean power of every primary sensor of a component in steps of ``period_s``: time_s, device, power_W.

    Time counts from the start of the training, only within it; segments of a resumed run follow one another without the
    gaps between them. Empty if the run has no such sensor or no samples. Works on own runs and on imported perun files.
    Samples of a long run are thinned, as a warning says: the steps are longer, and peaks within them are not seen.
    """
    run_dir = Path(run_dir)
    record = json_table(run_dir / "record.json")
    sensors = _sensors(record, component)
    names = {sensor["id"] for sensor in sensors} | {f"{sensor.get('host')}:{sensor['id']}" for sensor in sensors}
    lengths_s = [part.get("training_time_s", 0.0) for part in record.get("segments", [])] or [record["training_time_s"]]
    parts, begin_s = [], 0.0
    for folder, length_s in zip(segments(run_dir) or [run_dir], lengths_s, strict=False):
        for device, (t_s, power_W) in energy.power_trace(folder, period_s).items():
            inside = (t_s > 0) & (t_s < length_s) & (device in names)
            parts.append(pd.DataFrame({"time_s": begin_s + t_s, "device": device, "power_W": power_W})[inside])
        begin_s += length_s
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["time_s", "device", "power_W"])


def summary(profile: pd.DataFrame, idle_W: float | None = None) -> dict:
    """Numbers of one profile, means over its devices; empty without samples.

    ``mean_W`` and ``spread_W`` over time; ``relative_spread``; ``baseline_W``: ``idle_W`` per device if given and below
    the profile, else its 1st percentile; ``near_baseline``: share of the time near it; ``fallbacks_per_h``: how often
    power comes down there from above half of its range; ``period_s``: of the strongest periodic part, NaN without one;
    ``period_share``: its share of the variance.
    """
    parts = [part for _, part in profile.groupby("device")]
    rows = [_of_device(part["time_s"].to_numpy(), part["power_W"].to_numpy(), idle_W) for part in parts]
    return pd.DataFrame(rows).mean().to_dict() if rows else {}


def _of_device(t_s: np.ndarray, power_W: np.ndarray, idle_W: float | None) -> dict:
    lowest, high = np.percentile(power_W, [1, 95])
    baseline = idle_W if idle_W is not None and idle_W < high else lowest
    width = high - baseline
    is_flat = width <= 0.05 * high  # hardly any fluctuation: nothing to fall back from
    near = (power_W < baseline + NEAR * width) & (not is_flat)
    # Up (1) and near (-1), with what is between taken from before: a fall-back is a step from 1 to -1.
    state = pd.Series(np.where(near, -1.0, np.where(power_W > baseline + BACK_UP * width, 1.0, np.nan))).ffill()
    falls = int(((state.shift() == 1) & (state == -1)).sum())
    period_s, share = (np.nan, np.nan) if is_flat else _period(t_s, power_W)
    spread, duration_s = power_W.std(), max(np.ptp(t_s), np.finfo(float).tiny)
    return {
        "mean_W": power_W.mean(),
        "spread_W": spread,
        "relative_spread": spread / power_W.mean(),
        "baseline_W": baseline,
        "near_baseline": near.mean(),
        "fallbacks_per_h": energy.SECOND_PER_HOUR * falls / duration_s,
        "period_s": period_s,
        "period_share": share,
    }


def _period(t_s: np.ndarray, power_W: np.ndarray) -> tuple[float, float]:
    """Period of the largest peak of the spectrum that repeats at least three times, and its share of the variance."""
    if len(t_s) < 12:
        return np.nan, np.nan
    even_s = np.linspace(t_s[0], t_s[-1], len(t_s))
    even_W = np.interp(even_s, t_s, power_W)
    trend = np.polynomial.Polynomial.fit(even_s, even_W, 1)(even_s)
    spectrum = np.abs(np.fft.rfft((even_W - trend) * np.hanning(len(even_s)))) ** 2
    spectrum[:3] = 0
    if not spectrum.sum():
        return np.nan, np.nan
    peak = int(spectrum.argmax())
    share = spectrum[max(peak - 2, 0) : peak + 3].sum() / spectrum.sum()
    length_s = np.ptp(even_s) * len(even_s) / (len(even_s) - 1)
    return (length_s / peak if share >= LEAST_SHARE_OF_VARIANCE else np.nan), share


def thin(profile: pd.DataFrame, points: int = 1000) -> pd.DataFrame:
    """At most ``points`` rows per device: the lowest and the highest of each stretch of time: no peak is lost."""
    kept = []
    for _, part in profile.groupby("device"):
        if len(part) > points:
            stretch = np.arange(len(part)) * (points // 2) // len(part)
            power = part["power_W"].groupby(stretch)
            part = part.loc[sorted({*power.idxmin(), *power.idxmax()})]
        kept.append(part)
    return pd.concat(kept) if kept else profile
