"""Power over time of a run: reading, summary numbers, and thinning that keeps peaks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from scipy import signal

from energynn.analysis import results
from energynn.measure import account, energy
from energynn.measure.samples import segments
from energynn.reading import json_table

# near the baseline: within this part of the way from it to the 95th percentile
NEAR = 0.15
BACK_UP = 0.5  # only what was as high as this before has fallen back
PROFILE = ["time_s", "device", "power_W"]
LEAST_SHARE_OF_VARIANCE = 0.1  # a peak of the spectrum with less is no dominant period


def available(runs_dir: str | Path) -> pd.DataFrame:
    """List all valid runs that have a trace, also measured commands and imported perun files.

    ``component`` is "gpu" where a GPU has an energy, else "cpu"; ``idle_W`` the idle power of all
    of these, measured before the run, NaN if unknown.
    """
    trained = results.load(runs_dir)
    others = results.load(runs_dir, trained=False)
    runs = pd.concat([trained, others], ignore_index=True)
    files = [any(Path(run_dir).rglob("samples-*.jsonl")) for run_dir in runs["run_dir"]]
    runs = runs[np.array(files, bool)]
    is_gpu = runs["energy_gpu_J"].notna()
    idle_W, provenance = (
        runs[name.format("gpu")].where(is_gpu, runs[name.format("cpu")])
        for name in ("idle_power_{}_before_W", "energy_{}_provenance")
    )
    component = is_gpu.map({True: "gpu", False: "cpu"})
    return runs.assign(
        run=runs["run_id"], component=component, idle_W=idle_W, provenance=provenance
    )


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
    rows, begin_s = [], 0.0
    parts = record["segments"] or [record]
    for folder, part in zip(segments(run_dir), parts, strict=False):
        length_s = part.get("training_time_s", 0.0)
        for device, (t_s, power_W) in account.power_trace(folder, period_s).items():
            inside = (t_s > 0) & (t_s < length_s) & (device in names)
            values = begin_s + t_s[inside], device, power_W[inside]
            rows.append(pd.DataFrame(dict(zip(PROFILE, values, strict=True))))
        begin_s += length_s
    rows = [part for part in rows if len(part)]
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=PROFILE)


def summary(profile: pd.DataFrame, idle_W: float = np.nan) -> dict:
    """Numbers of one profile, means over its devices; empty without samples.

    ``mean_W`` and ``spread_W`` over time; ``relative_spread``; ``baseline_W``: a device's part of
    ``idle_W`` if given and below the profile, else its 1st percentile; ``near_baseline``: share
    of the time near it; ``fallbacks_per_h``: how often power comes down there from above half of
    its range; ``period_s``: of the strongest periodic part, NaN without one.
    """
    parts = [
        part[["time_s", "power_W"]].to_numpy().T
        for _, part in profile.groupby("device")
    ]
    rows = [_of_device(*part, idle_W / len(parts)) for part in parts]
    return pd.DataFrame(rows).mean().to_dict() if rows else {}


def _of_device(t_s: np.ndarray, power_W: np.ndarray, idle_W: float) -> dict:
    lowest, high = np.percentile(power_W, [1, 95])
    baseline = idle_W if idle_W < high else lowest
    width = high - baseline
    is_flat = width <= 0.05 * high  # hardly any fluctuation: nothing to fall back from
    is_near = (power_W < baseline + NEAR * width) & (not is_flat)
    is_up = power_W > baseline + BACK_UP * width
    levels = np.sign(is_up.astype(int) - is_near)[is_up | is_near]
    falls = int((np.diff(levels) < 0).sum())
    return {
        "mean_W": power_W.mean(),
        "spread_W": power_W.std(),
        "relative_spread": power_W.std() / power_W.mean(),
        "baseline_W": baseline,
        "near_baseline": is_near.mean(),
        "fallbacks_per_h": energy.SECOND_PER_HOUR * falls / max(np.ptp(t_s), 1e-9),
        "period_s": np.nan if is_flat else _period_s(t_s, power_W),
    }


def _period_s(t_s: np.ndarray, power_W: np.ndarray) -> float:
    """Find the period of the spectrum's largest peak that repeats at least three times."""
    if len(t_s) < 12:
        return np.nan
    even_s = np.linspace(t_s[0], t_s[-1], len(t_s))
    even_W = np.interp(even_s, t_s, power_W)
    rate_Hz = 1 / (even_s[1] - even_s[0])
    frequency_Hz, power = signal.periodogram(even_W, rate_Hz, "hann", detrend="linear")
    power[:3] = 0
    peak = int(power.argmax())
    share = power[max(peak - 2, 0) : peak + 3].sum() / max(power.sum(), 1e-300)
    return 1 / frequency_Hz[peak] if share >= LEAST_SHARE_OF_VARIANCE else np.nan


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
