"""Power over time of a run, and what its phases and epochs took."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from energynn.measure import account, samples
from energynn.records import Record, read_record

PROFILE_COLUMNS = ["time_s", "device", "power_W"]
MAX_TIME_STEPS = 600  # of time: more than a line has pixels


def times_of_segments(
    run_dir: Path, record: Record
) -> Iterator[tuple[Path, float, float]]:
    """Give for each segment of a run: its folder, the training time before it, and its own."""
    begin_s = 0.0
    folders = samples.segment_dirs(run_dir)
    # a start may have died before it trained
    trained = sorted({one.segment for one in record.sensors}) or [1]
    for number, part in zip(trained, record.segments or [record], strict=False):
        length_s = part.training_time_s or 0.0
        yield folders[number - 1], begin_s, length_s
        begin_s += length_s


def folders_with_samples(runs_dir: str | Path) -> set[str]:
    """Find the folders below ``runs_dir`` that hold samples."""
    return {str(path.parent) for path in Path(runs_dir).rglob("samples-*.jsonl")}


def read_power(run_dir: Path, record: Record, period_s: float) -> pd.DataFrame:
    """Return mean power of each sensor: time_s from the start of the training, device, power_W.

    Starts of a run follow one another without the time between them; what lies before the first
    and after the last is there, too.
    """
    spans = list(times_of_segments(run_dir, record))
    rows = [pd.DataFrame(columns=PROFILE_COLUMNS, dtype=float)]
    for folder, begin_s, length_s in spans:
        for device, (t_s, power_W) in account.read_power_trace(
            folder, period_s
        ).items():
            is_after = (t_s > 0) | (folder == spans[0][0])
            is_before = (t_s < length_s) | (folder == spans[-1][0])
            at_s = (begin_s + t_s).round(6)  # the same on all hosts
            part = pd.DataFrame({"time_s": at_s, "device": device, "power_W": power_W})
            rows.append(part[is_after & is_before])
    return pd.concat(rows, ignore_index=True)


def load_power_profile(run_dir: str | Path, period_s: float) -> pd.DataFrame:
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
    profile = read_power(run_dir, record, period_s)
    profile["component"] = profile["device"].map(component)
    end_s = record.training_time_s or 0.0
    profile = profile[profile["time_s"].between(0, end_s, inclusive="neither")]
    return profile.dropna(subset="component")


def tabulate_epochs(run_dir: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tabulate elapsed_s and energy_so_far_J, from the start of the training to the end of each
    epoch, with what the epoch reached; of an epoch that was trained twice the second.

    Also returns the run's ``load_power_profile``, in at most ``MAX_TIME_STEPS``.
    """
    record = read_record(run_dir)
    step_s = (record.training_time_s or 0.0) / MAX_TIME_STEPS
    step_s = max(step_s, record.sampling_period_s or 0.0)
    table = pd.DataFrame(record.history)
    if len(table):
        first = ["epoch", "elapsed_s", "energy_so_far_J"]
        table = table.reindex(columns=dict.fromkeys([*first, *table]))
        table["elapsed_s"] = table["epoch"].map(_ends_of_epochs_s(run_dir, record))
    power = load_power_profile(run_dir, step_s) if step_s else pd.DataFrame()
    if len(table) and len(power):
        energy_J = cumulate_energy_J(power)
        table["energy_so_far_J"] = np.interp(
            table["elapsed_s"], [0.0, *energy_J.index], [0.0, *energy_J]
        )
    return table.assign(provenance=record.energy_total_provenance), power


def cumulate_energy_J(power: pd.DataFrame) -> pd.Series:
    """Add up the energy of a ``load_power_profile`` to the end of each step, by that time in s."""
    total_W = power.groupby("time_s")["power_W"].sum()
    # between two starts a step may be shorter or longer
    step_s = total_W.index.to_series().diff().median()
    total_W.index += step_s / 2
    return step_s * total_W.cumsum()


def _ends_of_epochs_s(run_dir: Path, record: Record) -> dict[float, float]:
    """Tell when each epoch ended, from the start of the training; the last time of those that were
    trained twice.
    """
    ends_s = {}
    for folder, begin_s, _ in times_of_segments(run_dir, record):
        events = [each for each in samples.read_events(folder) if each["rank"] == 0]
        start_ns = samples.event_ns(events, "training_start").get(0, 0)
        for event in samples.events_of_kind(events, "epoch"):
            ends_s[event["epoch"]] = begin_s + (event["t_mono_ns"] - start_ns) / 1e9
    return ends_s


def phases_and_epochs_text(run_dir: Path, record: Record) -> str:
    """Show what each phase took, over all ranks, and what each epoch took and reached."""
    tables = []
    if record.energy_phases:
        phases = pd.DataFrame(record.energy_phases).drop(columns="rank")
        phases = phases.rename(columns={"time_s": "time_of_ranks_s"}).groupby("phase")
        tables.append(phases.sum(numeric_only=True).reset_index())
    if record.history:
        epochs, _ = tabulate_epochs(run_dir)
        known = ["epoch", "elapsed_s", "energy_so_far_J", "provenance", "training_loss"]
        known += record.metrics
        tables.append(epochs.filter(dict.fromkeys(known)))
    form = {"index": False, "float_format": "{:.5g}".format}
    return "\n".join(["", *(table.to_string(**form) for table in tables)])
