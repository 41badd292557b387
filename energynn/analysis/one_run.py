"""Draw one run: its power over time, and the energy, the loss and the error that came of it."""

import re
from pathlib import Path

import altair as alt
import pandas as pd

from energynn import records
from energynn.analysis import profiles, theme
from energynn.host.files import require_writable_path
from energynn.host.texts import ScriptEncoder
from energynn.measure.energy import SECOND_PER_HOUR

PICTURE_FORMATS = (".svg", ".html", ".png", ".pdf")
TIME_LABEL = "time (s)"
POWER_LABEL = "power (W)"
ENERGY_LABEL = "energy (Wh)"


def save_picture(run_dir: Path, path: Path) -> None:
    """Write the picture of a run as SVG, HTML that needs no network, PNG or PDF.

    Raises ValueError for another ending, and for a run without power samples of a training.
    """
    if path.suffix not in PICTURE_FORMATS:
        raise ValueError(
            f"plot: {path} must end with one of {', '.join(PICTURE_FORMATS)}"
        )
    require_writable_path(path)
    with alt.theme.enable("energynn"):
        chart = draw_run(run_dir)
        path.parent.mkdir(parents=True, exist_ok=True)
        chart.save(
            path, inline=path.suffix == ".html", json_kwds={"cls": ScriptEncoder}
        )


def draw_run(run_dir: Path) -> alt.HConcatChart:
    """Draw power, loss and error over time; beside them energy over time and error over energy.

    Of one epoch there is no curve of loss and error.
    """
    record = records.read_record(run_dir)
    epochs, power = profiles.tabulate_epochs(run_dir)
    if power.empty:
        raise ValueError(f"plot: {run_dir} has no power samples of a training")
    epochs[ENERGY_LABEL] = epochs.get("energy_so_far_J", 0.0) / SECOND_PER_HOUR
    names = dict.fromkeys(("time_s", "elapsed_s"), TIME_LABEL)
    names["power_W"] = POWER_LABEL
    energy = profiles.cumulate_energy_J(power) / SECOND_PER_HOUR
    energy = energy.rename(ENERGY_LABEL).rename_axis(TIME_LABEL).reset_index()
    power = power.rename(columns=names)
    epochs = epochs.rename(columns=names)
    power = power.groupby([TIME_LABEL, "component"], as_index=False)[POWER_LABEL].sum()
    for name in set(power["component"]):
        known = getattr(record, f"energy_{name}_provenance")
        power = power.replace(name, f"{name}, {known}")
    watts = _line_chart(power, TIME_LABEL, POWER_LABEL)
    over_time = [watts.encode(alt.Color("component:N", title=None))]
    beside = [_line_chart(energy, TIME_LABEL, ENERGY_LABEL)]
    if len(epochs) > 1:
        reached = dict.fromkeys(["training_loss", *record.metrics])
        reached = [name for name in reached if name in epochs][:2]
        over_time += [_line_chart(epochs, TIME_LABEL, name) for name in reached]
        beside += [_line_chart(epochs, ENERGY_LABEL, name) for name in reached[-1:]]
    left = alt.vconcat(*over_time).resolve_scale(x="shared")
    right = alt.vconcat(*beside)
    said = f"Its energy is {record.energy_total_provenance}. "
    if record.invalid_reasons:
        reasons = "; ".join(record.invalid_reasons)
        said += f"Not valid as evidence: {reasons}"
    name = record.config.get("command", record.run_id)
    return alt.hconcat(left, right, title=theme.chart_title(name, said))


def _line_chart(table: pd.DataFrame, x: str, y: str) -> alt.Chart:
    chart = alt.Chart(table, width=370, height=150)
    line = chart.mark_line(color=theme.COLOURS[0], point=len(table) < 50)
    # what Altair would take for a path, or a type
    field_x, field_y = (re.sub(r"([.:\[\]])", r"\\\1", name) for name in (x, y))
    title = y.replace("_", " ")
    return line.encode(alt.X(f"{field_x}:Q"), alt.Y(f"{field_y}:Q", title=title))
