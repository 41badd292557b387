"""Look of all figures: sizes for print, colours that colour-blind readers tell apart, provenance by shape and fill."""

from __future__ import annotations

import json
import re
import textwrap
import warnings
from pathlib import Path

import altair as alt
import pandas as pd
import vl_convert

# Widths of a column and of a page of the ACM format in px; 1 px becomes 1 pt in the PDF.
COLUMN_px = 240
PAGE_px = 504
VEGA_LITE = alt.SCHEMA_VERSION.removeprefix("v").rsplit(".", 1)[0]
FONT = "Liberation Sans"  # the converter carries it: no system font is needed

# Okabe and Ito (2008), "Color Universal Design"; yellow, which is weak on white, last.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]
GREY = "#6b6b6b"
# The study's series have fixed colours in all figures; all other series get OTHERS, in order.
SERIES = dict(zip(("R1", "R2", "R3", "R4", "R5", "R6"), COLOURS, strict=False))
FOURCASTNET = ["#332288", "#882255", "#44AA99", "#AA4499", "#999933", "#88CCEE"]  # from Paul Tol's "muted"
SERIES |= dict(zip(("F1", "F2", "F3", "F4", "F5", "T1"), FOURCASTNET, strict=True))
OTHERS = ["#000000", "#7f7f7f", "#117733", "#661100", "#6699CC", "#DDCC77"]

# provenance -> shape, drawn in the colour of its series. Hollow and filled shapes differ even in grey and when small.
# Lengths in a path are in units of the symbol's radius. The inner outline runs backwards: that leaves a hole.
PROVENANCE = {
    "published": "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0ZM0.68,0A0.68,0.68,0,1,0,-0.68,0A0.68,0.68,0,1,0,0.68,0Z",
    "measured": "circle",
    "estimated": "M0,-1.2L1.15,0.85L-1.15,0.85ZM0,-0.5L-0.6,0.53L0.6,0.53Z",
    "simulated": "M-1,-0.7L-0.7,-1L0,-0.3L0.7,-1L1,-0.7L0.3,0L1,0.7L0.7,1L0,0.3L-0.7,1L-1,0.7L-0.3,0Z",
}

SCREEN = 1.6  # how much larger than in print, where a figure is made to be used on a screen
OPACITIES = ("opacity", "symbolOpacity")


def _scaled(value, by: float):
    """A configuration with all its sizes, however deep, times a factor; colours, names, flags and opacities stay."""
    if isinstance(value, dict):
        return {key: part if key in OPACITIES else _scaled(part, by) for key, part in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return value * by


@alt.theme.register("energynn-screen", enable=False)
def _screen() -> alt.theme.ThemeConfig:
    print_theme = _theme()
    return print_theme | {"config": _scaled(print_theme["config"], SCREEN)}


@alt.theme.register("energynn", enable=False)
def _theme() -> alt.theme.ThemeConfig:
    text = {"labelFont": FONT, "titleFont": FONT, "labelFontSize": 7, "titleFontSize": 7.5, "titleFontWeight": "normal"}
    axis = {"gridColor": "#e6e6e6", "gridWidth": 0.5, "domainColor": "#333333", "domainWidth": 0.7}
    axis |= {"tickColor": "#333333", "tickWidth": 0.7, "tickSize": 3, "labelPadding": 2, "titlePadding": 4}
    axis |= {"labelLimit": 200, "titleLimit": 400, "labelSeparation": 4}
    legend = {"symbolSize": 40, "symbolOpacity": 1, "rowPadding": 2, "columnPadding": 8, "labelLimit": 400}
    legend |= {"titleLimit": 400, "titlePadding": 3, "offset": 8, "orient": "bottom"}
    legend |= {"layout": {"bottom": {"anchor": "start", "direction": "horizontal", "margin": 16}}}
    title = {"font": FONT, "fontSize": 8, "fontWeight": "bold", "anchor": "start", "frame": "group", "offset": 6}
    config = {
        "font": FONT,
        "view": {"continuousWidth": 180, "continuousHeight": 130, "stroke": None},
        "axis": text | axis,
        # Labels at the ends of the y axis stay inside, so that the titles of neighbouring panels are level.
        "axisY": {"labelFlush": True},
        "axisX": {"labelFlush": False},
        "legend": text | legend,
        "title": title,
        "header": text,
        "range": {"category": COLOURS},
        "point": {"size": 40, "opacity": 1, "strokeWidth": 0},
        "line": {"strokeWidth": 1.2},
        "rule": {"strokeWidth": 0.8},
        "text": {"font": FONT, "fontSize": 7},
        "concat": {"spacing": 8},
    }
    return {"background": "white", "config": config}


def enable() -> None:
    """Use this look for all charts, and show them in notebooks as SVG, which needs no network and no plug-in."""
    alt.theme.enable("energynn")
    alt.renderers.enable("svg")
    alt.data_transformers.disable_max_rows()


def provenance(
    table: pd.DataFrame, field: str = "provenance", title: str | None = "energy is", also: tuple = ()
) -> alt.Shape:
    """The channel ``shape`` for the provenances in a table's column. The legend lists these and those in ``also``.

    For ``mark_point(filled=True)`` with the series as ``color``: published rings, measured discs, estimated hollow
    triangles, simulated crosses.
    """
    present = {word: shape for word, shape in PROVENANCE.items() if word in {*table[field], *also}}
    scale = alt.Scale(domain=list(present), range=list(present.values()))
    return alt.Shape(field, type="nominal", scale=scale, legend=alt.Legend(title=title, columns=1))


def series(table: pd.DataFrame, columns: int = 3) -> alt.Color:
    """The channel ``color`` for the series names in a table's column ``name``: "R4: ..." has the colour of R4."""
    ours = sorted(label for label in set(table["name"]) if label.split(":")[0] in SERIES)
    others = sorted(set(table["name"]) - set(ours))
    colours = [SERIES[label.split(":")[0]] for label in ours]
    colours += [OTHERS[i % len(OTHERS)] for i in range(len(others))]
    legend = alt.Legend(title=None, symbolType="circle", columns=columns, labelLimit=PAGE_px // columns - 28)
    return alt.Color("name", type="nominal", scale=alt.Scale(domain=[*ours, *others], range=colours), legend=legend)


def titled(title: str, said: str = "", width: int = PAGE_px, lines: int = 0) -> alt.Title:
    """A panel's title with small grey lines under it: what is known there, and what is not.

    ``said`` is broken to ``width`` px; with ``lines``, titles of neighbouring panels are level.
    """
    words = textwrap.wrap(said, int(width / 3.1))  # a character of 6.5 px is 3.1 px wide on average
    words += [""] * (lines - len(words))
    return alt.Title(title, subtitle=words, subtitleColor=GREY, subtitleFontSize=6.5, subtitlePadding=2)


def log_axis(channel: alt.X | alt.Y, values, base: float = 10.0, padding: int = 10) -> alt.X | alt.Y:
    """The channel with a logarithmic axis and round ticks, or a linear one from zero where values span no decade."""
    known = [value for value in values if value > 0]
    low, high = min(known, default=1.0), max(known, default=1.0)
    if base == 10 and high < 8 * low:
        return channel.scale(zero=True, domainMax=1.15 * high, nice=False).axis(tickCount=4)
    steps = (1, 2, 5) if base == 10 and high < 50 * low else (1,)
    ticks = [step * base**power for power in range(-12, 12) for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    ticks = ticks[:: 1 + (len(ticks) - 1) // 6]
    return channel.scale(type="log", domain=[low, high], nice=False, padding=padding).axis(values=ticks, format="~g")


def placeholder(message: str, width: int = COLUMN_px, height: int = 60) -> alt.Chart:
    """A figure that says why there is nothing to see; no invented point."""
    words = pd.DataFrame({"message": [message]})
    text = alt.Chart(words, width=width, height=height).mark_text(fontSize=8, color=GREY, lineBreak="\n")
    return text.encode(alt.Text("message:N"))


def save(chart: alt.TopLevelMixin, name: str, build_dir: str | Path = "build") -> Path:
    """Write the chart as SVG, PNG (4 pixels per px) and PDF to ``build_dir``/figures, and return the SVG's path.

    The same data give the same SVG, byte for byte. A figure can become wider than a page by long names of own series:
    it then warns, and the paper shows it smaller.
    """
    with alt.theme.enable("energynn"), alt.data_transformers.enable("default", max_rows=None):
        spec = chart.to_dict()
    path = save_spec(spec, name, build_dir).with_suffix(".svg")
    drawn = vl_convert.vegalite_to_vega(spec, vl_version=VEGA_LITE)
    path.write_text(vl_convert.vega_to_svg(drawn))
    path.with_suffix(".png").write_bytes(vl_convert.vega_to_png(drawn, scale=4, ppi=72))
    path.with_suffix(".pdf").write_bytes(vl_convert.vega_to_pdf(drawn))
    width = float(re.search(r'width="([\d.]+)"', path.read_text()).group(1))
    if width > PAGE_px:
        warnings.warn(f"{name}: {width:.0f} px wide, a page has {PAGE_px}; make its panels narrower", stacklevel=2)
    return path


def save_spec(spec: dict, name: str, build_dir: str | Path = "build") -> Path:
    """Write a chart's Vega-Lite specification for the interactive report, where marks have tooltips."""
    tooltips = {"mark": {"tooltip": {"content": "encoding"}}}
    path = Path(build_dir) / "figures" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spec | {"config": spec["config"] | tooltips}, sort_keys=True) + "\n")
    return path
