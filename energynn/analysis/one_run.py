"""Draw one run: its power over time, and the energy, the loss and the error that came of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

from energynn import records
from energynn.analysis import profiles, results, theme
from energynn.files import require_place
from energynn.measure import samples
from energynn.measure.energy import SECOND_PER_HOUR

FORMATS = (".svg", ".html", ".png", ".pdf")
STEPS = 600  # of time: more than a line has pixels
TITLES = {"time_s": "time (s)", "power_W": "power (W)", "energy_Wh": "energy (Wh)"}


def save(run_dir: Path, path: Path) -> None:
    """Write the picture of a run as SVG, HTML that needs no network, PNG or PDF.

    Raises ValueError for another ending, and for a run without power samples of a training.
    """
    if path.suffix not in FORMATS:
        raise ValueError(f"plot: {path} must end with one of {', '.join(FORMATS)}")
    require_place(path)
    with alt.theme.enable("energynn"):
        chart = draw(run_dir)
        path.parent.mkdir(parents=True, exist_ok=True)
        chart.save(path, inline=path.suffix == ".html")


def draw(run_dir: Path) -> alt.HConcatChart:
    """Draw power, loss and error over time; beside them energy over time and error over energy.

    What is known of one epoch only is no curve, and left out.
    """
    record = records.read_record(run_dir)
    power = _powers(run_dir, record)
    if power.empty:
        raise ValueError(f"plot: {run_dir} has no power samples of a training")
    energy = power.groupby("time_s", as_index=False)["energy_Wh"].max()
    watts = _curve(power, "power_W").encode(alt.Color("component:N", title=None))
    phases = _phases(run_dir, record)
    over_time = [watts if phases.empty else _shade(phases) + watts]
    beside = [_curve(energy, "energy_Wh")]
    epochs = _epochs(run_dir, record)
    if len(epochs) > 1:
        epochs["energy_Wh"] = np.interp(epochs["time_s"], *energy.to_numpy().T)
        known = [name for name in record["metrics"] if name in epochs]
        reached = ["training_loss", *known[:1]]
        over_time += [_curve(epochs, name) for name in reached]
        beside.append(_curve(epochs, reached[-1], "energy_Wh"))
    what = record["config"].get("command", record["run_id"])
    against = "; ".join(record["invalid_reasons"])
    said = f"Its energy is {record['energy_total_provenance']}. "
    title = theme.titled(what, said + (against and f"Not valid as evidence: {against}"))
    return alt.hconcat(alt.vconcat(*over_time), alt.vconcat(*beside), title=title)


def _curve(table: pd.DataFrame, name: str, over: str = "time_s") -> alt.Chart:
    is_sparse = name not in TITLES
    y = alt.Y(f"{name}:Q", title=TITLES.get(name, name.replace("_", " ")))
    chart = alt.Chart(table, width=370, height=150)
    line = chart.mark_line(strokeWidth=1.4, color=theme.COLOURS[0], point=is_sparse)
    return line.encode(
        alt.X(f"{over}:Q", title=TITLES[over]).scale(zero=True, nice=False),
        y.scale(zero=not is_sparse).axis(format="~g", tickCount=5),
    )


def _shade(phases: pd.DataFrame) -> alt.Chart:
    fill = alt.Fill("phase:N", title=None).scale(range=theme.COLOURS[1:])
    rectangles = alt.Chart(phases).mark_rect(opacity=0.3)
    return rectangles.encode(alt.X("time_s:Q"), alt.X2("end_s:Q"), fill)


def _powers(run_dir: Path, record: dict) -> pd.DataFrame:
    """Tabulate the mean power of each component: time_s, component with its provenance, power_W,
    and energy_Wh, of all together since the start.
    """
    time_s, least_s = (
        record.get(name, 0.0) for name in ("training_time_s", "sampling_period_s")
    )
    period_s = max(time_s / STEPS, least_s)
    parts = []
    for component in results.COMPONENTS[:3]:
        known = record.get(f"energy_{component}_provenance", "")
        part = profiles.load(run_dir, component, period_s)
        parts.append(part.assign(component=f"{component}, {known}"))
    power = pd.concat(parts).astype({"time_s": float, "power_W": float})
    power = power.round({"time_s": 6}).groupby(["time_s", "component"], as_index=False)
    power = power["power_W"].sum()
    energy_Wh = power["power_W"].cumsum() * period_s / SECOND_PER_HOUR
    return power.assign(energy_Wh=energy_Wh)


def _epochs(run_dir: Path, record: dict) -> pd.DataFrame:
    """Tabulate what each epoch reached, and ``time_s``, its end; of a repeated one the last."""
    rows = {}
    for _, events, zero_ns in _starts(run_dir, record):
        for event in samples.events_of_kind(events, "epoch"):
            time_s = (event["t_mono_ns"] - zero_ns) / 1e9
            rows[event["epoch"]] = event | {"time_s": time_s}
    return pd.DataFrame(rows.values())


def _phases(run_dir: Path, record: dict) -> pd.DataFrame:
    """Tabulate the phases of rank 0 that are long enough to be seen: phase, time_s and end_s."""
    parts = [pd.DataFrame(columns=["phase", "time_s", "end_s"])]
    for folder, _, zero_ns in _starts(run_dir, record):
        found = samples.read_phases(folder)
        if 0 in found:
            kind, *ends_ns, names = found[0]
            begin_s, end_s = (np.stack(ends_ns) - zero_ns) / 1e9
            part = pd.DataFrame({"time_s": begin_s, "end_s": end_s})
            part["phase"] = np.array(names)[kind]
            parts.append(part[end_s - begin_s > record["training_time_s"] / STEPS])
    return pd.concat(parts).replace("_", " ", regex=True)


def _starts(run_dir: Path, record: dict) -> Iterator[tuple[Path, list[dict], float]]:
    """For each start of a run: folder, events of rank 0, and when time is 0 on its clock in ns."""
    begin_s = 0.0
    parts = record["segments"] or [record]
    for folder, part in zip(samples.segments(run_dir), parts, strict=False):
        events = [each for each in samples.read_events(folder) if each["rank"] == 0]
        for start in samples.events_of_kind(events, "training_start"):
            yield folder, events, start["t_mono_ns"] - 1e9 * begin_s
        begin_s += part["training_time_s"]
