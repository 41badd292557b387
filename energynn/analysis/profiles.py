"""Power over time of a run: reading, and thinning that keeps peaks."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from energynn.measure import account, samples
from energynn.records import Record, read_record

PROFILE_COLUMNS = ["time_s", "device", "power_W"]


def times_of_segments(
    run_dir: Path, record: Record
) -> Iterator[tuple[Path, float, float]]:
    """For each segment of a run: its folder, the training time before it, and its own."""
    begin_s = 0.0
    for folder, part in zip(
        samples.segment_dirs(run_dir), record.segments or [record], strict=False
    ):
        length_s = part.training_time_s or 0.0
        yield folder, begin_s, length_s
        begin_s += length_s


def folders_with_samples(runs_dir: str | Path) -> set[str]:
    """Find the folders below ``runs_dir`` that hold samples."""
    return {str(path.parent) for path in Path(runs_dir).rglob("samples-*.jsonl")}


def load_power_profile(run_dir: str | Path, period_s: float = 1.0) -> pd.DataFrame:
    """Return mean power of each primary sensor: time_s, device, component, power_W.

    In steps of ``period_s`` from the start of the training, only within it; segments of a resumed
    run follow one another without the gaps between them. Empty without such a sensor or samples.
    """
    run_dir = Path(run_dir)
    record = read_record(run_dir)
    component = {}
    for sensor in record.sensors:
        if sensor.primary:
            # as traces name them
            names = sensor.id, f"{sensor.host}:{sensor.id}"
            component |= dict.fromkeys(names, sensor.component)
    rows = [pd.DataFrame(columns=PROFILE_COLUMNS, dtype=float)]
    for folder, begin_s, length_s in times_of_segments(run_dir, record):
        for device, (t_s, power_W) in account.read_power_trace(
            folder, period_s
        ).items():
            part = pd.DataFrame({"time_s": begin_s + t_s, "power_W": power_W})
            part = part[(t_s > 0) & (t_s < length_s)].assign(device=device)
            rows.append(part)
    profile = pd.concat(rows, ignore_index=True)
    profile["component"] = profile["device"].map(component)
    return profile.dropna(subset="component")


def thin_profile(profile: pd.DataFrame, points: int) -> pd.DataFrame:
    """At most ``points`` rows per device: the lowest and the highest of each stretch of time: no
    peak is lost.
    """
    devices = profile.groupby("device")["device"]
    stretch = devices.cumcount() * (points // 2) // devices.transform("size")
    power = profile.groupby(["device", stretch])["power_W"]
    return profile.loc[sorted({*power.idxmin(), *power.idxmax()})]
