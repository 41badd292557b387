"""What a power limit does to time and energy of GPUs: by curves that others measured (Zeus)."""

import numpy as np
import pandas as pd

from energynn.data import manifests
from energynn.measure.energy import COMPONENTS

MIN_LIMIT_SHARE = 0.5  # of the greatest limit; below, times grow up to fourfold
MEASURED_COLUMNS = ["time_per_epoch_s", "energy_J_per_epoch"]
LIMIT_EFFECT_TEXT = (
    "; power limit {share:g} of the greatest: time x {time[0]:.2f} ({time[1]:.2f}-{time[2]:.2f}), "
    "energy of the GPUs x {energy[0]:.2f} ({energy[1]:.2f}-{energy[2]:.2f}), published by others "
    "(Zeus: one GPU of four types, five networks)"
)


def measured_ratios(share: float) -> pd.DataFrame:
    """Read time and GPU energy at a share of the greatest limit, relative to those at that limit.

    A row for each GPU and network: the median over batch sizes. Raises ValueError for a share that
    is not within MIN_LIMIT_SHARE and 1.
    """
    if not MIN_LIMIT_SHARE <= share <= 1:
        raise ValueError(
            f"power_limit: {share:g} is no share of the GPUs' greatest limit that is known of; "
            f"give {MIN_LIMIT_SHARE:g} to 1"
        )
    path = manifests.verify("others") / "zeus_power.csv"
    table = pd.read_csv(path).sort_values("power_limit_W")
    rows = []
    for group, curve in table.groupby(["gpu", "network", "batch_size"]):
        shares = curve["power_limit_W"] / curve["power_limit_W"].max()
        if shares.min() <= share:
            at = [np.interp(share, shares, curve[name]) for name in MEASURED_COLUMNS]
            rows.append([*group[:2], *at / curve[MEASURED_COLUMNS].iloc[-1]])
    return pd.DataFrame(rows).groupby([0, 1]).median()


def apply_power_limit(
    values: dict[str, np.ndarray], share: float
) -> dict[str, np.ndarray]:
    """Change forecasts, (configurations, 3) each, by what a limit does; ends multiply.

    CPUs and memory draw on for the changed time. Raises ValueError where the GPUs' part of the
    energy is not known.
    """
    if np.isnan(values["energy_gpu_kWh"]).any():
        raise ValueError(
            "power_limit: the GPUs' part of the energy is not known; fit runs whose energy was "
            "measured, and give cpu_W and ram_W of the system"
        )
    of_time, of_energy = limit_factors(share)
    result = {name: each * of_time for name, each in values.items()}
    result["energy_gpu_kWh"] = values["energy_gpu_kWh"] * of_energy
    parts = [result[f"energy_{part}_kWh"] for part in COMPONENTS]
    result["energy_kWh"] = np.nansum(parts, axis=0)  # of GPUs alone the others are NaN
    return result


def limit_factors(share: float) -> np.ndarray:
    """Find factors of time and GPU energy, (2, 3): median, 5 and 95 % of GPUs and networks."""
    return measured_ratios(share).quantile([0.5, 0.05, 0.95]).to_numpy().T
