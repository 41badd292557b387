"""Layers that figures of several notebooks share; the notebooks choose data, axes, colours and shapes."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from energynn.analysis import theme
from energynn.analysis.regression import Fit


def with_error_bars(
    chart: alt.Chart, x: alt.X, y: alt.Y, color: alt.Color, shape: alt.Shape, clip: bool = alt.Undefined
) -> alt.LayerChart:
    """Points with a bar from ``low`` to ``high``, and a thin dashed line through those of one origin and colour.

    ``clip``: whether bars end at the panel's edge.
    """
    base = chart.encode(x, color=color)
    line = base.mark_line(strokeDash=[3, 3], strokeWidth=1.1).encode(y, detail="origin:N")
    bars = base.mark_rule(strokeWidth=1.6, clip=clip).encode(alt.Y("low:Q"), alt.Y2("high:Q"))
    return alt.layer(line, bars, base.mark_point(filled=True).encode(y, shape=shape))


def fitted_lines(fits: list[Fit], x: alt.X, color: alt.Color) -> list[alt.Chart]:
    """A line for each fit, in the colour of its series, as far as the fit's observations reach."""
    lines = []
    for fit in fits:
        observed = fit.data[fit.regressor]
        line = fit.line(np.geomspace(observed.min(), observed.max(), 20)).assign(name=fit.data["name"].iloc[0])
        lines.append(alt.Chart(line).mark_line(strokeWidth=1.4).encode(x, alt.Y("mean:Q"), color=color))
    return lines


def ideal(ends: list[float], x: alt.X, y: alt.Y) -> alt.Chart:
    """The line on which the speed-up is the ratio of the numbers of devices."""
    line = alt.Chart(pd.DataFrame({"ratio": ends, "speed_up": ends}))
    return line.mark_line(color=theme.GREY, strokeWidth=1.3).encode(x, y)


def intervals(rows: pd.DataFrame, x: str) -> alt.Chart:
    """Grey bars from ``low`` to ``high`` at the column ``x``: what a text implies, which is never drawn as a point."""
    bar = alt.Chart(rows).mark_rule(strokeWidth=5, color=theme.GREY, opacity=0.6)
    return bar.encode(alt.X(f"{x}:Q"), alt.Y("low:Q"), alt.Y2("high:Q"))


MODEL = "model, fitted to the published values [90 %]"


def model_curves(rows: pd.DataFrame, x: alt.X, y: alt.Y, color: alt.Color) -> list[alt.Chart]:
    """A band from ``low`` to ``high`` and a line of dashes and dots for each series: what a model says, no evidence.

    None where ``rows`` has none.
    """
    if rows.empty:
        return []
    base = alt.Chart(rows.assign(curve=MODEL)).encode(x, color=color)
    scale = alt.Scale(domain=[MODEL], range=[[6, 2.5, 1.6, 2.5]])
    dashes = alt.StrokeDash("curve:N", scale=scale, legend=alt.Legend(title=None, symbolSize=770, labelLimit=480))
    band = base.mark_area(opacity=0.16).encode(alt.Y("low:Q"), alt.Y2("high:Q"), alt.Detail("name:N"))
    return [band, base.mark_line(strokeWidth=1.4).encode(y, strokeDash=dashes)]
