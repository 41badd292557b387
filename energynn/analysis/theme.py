"""Look of all figures: for screen and print, in colours that colour-blind readers tell apart,
provenance by shape.
"""

import itertools
import os
import textwrap
from pathlib import Path

import altair as alt
import msgspec
import pandas as pd
import vl_convert

from energynn.host.files import REPOSITORY, atomic_write
from energynn.host.texts import spreadsheet_cell

# Figures have the size of a screen; paper/template.typ prints 1 px as 0.625 pt. PAGE_WIDTH_px is
# the width of a page of the ACM format.
PAGE_WIDTH_px = 806
FONT_SIZE_px = 13  # 8 pt in print
# the converter carries the first, and browsers have the second, which is as wide
FONT_FAMILY = "Liberation Sans, Arial, sans-serif"

# Okabe and Ito (2008), "Color Universal Design"; yellow, which is weak on white, last.
COLOURS = [
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#F0E442",
]
GREY_COLOUR = "#6b6b6b"
# The study's series have fixed colours in all figures. Those of one workload share panels: each
# is lighter than the one before by at least 10 of 100 steps, so that they differ in grey, and
# with any kind of colour blindness.
SERIES_COLOURS = {
    "R1": "#03336D",
    "R4": "#9E046E",
    "R2": "#CC4216",
    "R3": "#09A570",
    "R5": "#EB9E14",
    "R6": "#82D7FD",
    "T1": "#000000",
    "F1": "#19247E",
    "F2": "#970246",
    "F4": "#9F40A7",
    "F3": "#10998D",
    "F5": "#B7AF16",
}
# For all else: from dark to light, and no yellow, which is weak on white.
COLOUR_RAMP = alt.SchemeParams("viridis", extent=[0, 0.93])

# provenance -> shape, drawn in the colour of its series. Hollow and filled shapes differ even in
# grey and when small. Lengths in a path are in units of the symbol's radius. The inner outline
# runs backwards: that leaves a hole.
PROVENANCE_SHAPES = {
    "published": "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0Z"
    "M0.68,0A0.68,0.68,0,1,0,-0.68,0A0.68,0.68,0,1,0,0.68,0Z",
    # where ResNet50 is there, too
    "published, FourCastNet": "M-0.9,-0.9H0.9V0.9H-0.9ZM-0.6,-0.6V0.6H0.6V-0.6Z",
    "published by others": "M0,-1.2L1.2,0L0,1.2L-1.2,0ZM0,-0.75L-0.75,0L0,0.75L0.75,0Z",
    "measured": "circle",
    "estimated": "M0,-1.2L1.15,0.85L-1.15,0.85ZM0,-0.5L-0.6,0.53L0.6,0.53Z",
    "simulated": "M-1,-0.7L-0.7,-1L0,-0.3L0.7,-1L1,-0.7L0.3,0"
    "L1,0.7L0.7,1L0,0.3L-0.7,1L-1,0.7L-0.3,0Z",
}

MENUS_ABOVE_CHART_CSS = """<style>div.vega-embed { display: flex; flex-direction: column; }
.vega-bindings { order: -1; } .vega-bind { display: inline-block; margin-right: 1.5em; }
</style>"""


@alt.theme.register("energynn", enable=False)
def _chart_theme() -> alt.theme.ThemeConfig:
    text = {
        "labelFontSize": FONT_SIZE_px,
        "titleFontSize": FONT_SIZE_px,
        "titleFontWeight": "normal",
    }
    axis = {
        "gridColor": "#e6e6e6",
        "domainColor": "#333333",
        "tickColor": "#333333",
        "titlePadding": 6,
        "labelLimit": 320,
        "titleLimit": 640,
        "labelSeparation": 6,
    }
    legend = {
        "symbolOpacity": 1,
        "symbolStrokeWidth": 2,
        "labelLimit": 640,
        "titleLimit": 640,
        "orient": "bottom",
        "layout": {
            "bottom": {"anchor": "start", "direction": "vertical", "margin": 10}
        },
    }
    return {
        "background": "white",
        "config": {
            "font": FONT_FAMILY,
            "view": {"continuousWidth": 290, "continuousHeight": 208, "stroke": None},
            "axis": text | axis,
            "axisX": {"labelFlush": False},
            "legend": text | legend,
            "title": {
                "fontSize": 14,
                "anchor": "start",
                "frame": "group",
                "offset": 10,
            },
            "range": {"category": COLOURS},
            "point": {"size": 100, "opacity": 1, "strokeWidth": 0},
            "text": {"fontSize": FONT_SIZE_px},
            "concat": {"spacing": 13},
            "mark": {"tooltip": {"content": "encoding"}},
        },
    }


def enable_theme() -> None:
    """Use this look for all charts, and show them as pictures in notebooks."""
    alt.theme.enable("energynn")
    alt.renderers.enable("svg")
    alt.data_transformers.disable_max_rows()
    pd.set_option("display.max_colwidth", 120)


def start_notebook() -> None:
    """Use this look, and paths from the repository: JupyterLab starts in a notebook's folder."""
    os.chdir(REPOSITORY)
    enable_theme()


def show_charts_at_top(screen, *widgets) -> None:
    """Show charts where a notebook's first cell has made room, with their menus above them."""
    import ipywidgets
    from IPython.display import Javascript, display

    screen.update(ipywidgets.VBox([ipywidgets.HTML(MENUS_ABOVE_CHART_CSS), *widgets]))
    # JupyterLab stands at the last cell where all are run.
    page = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer"
    display(Javascript(f"document.querySelector('{page}')?.scrollTo(0, 0)"))


def provenance_shape(
    table: pd.DataFrame,
    field: str = "provenance",
    title: str | None = "energy is",
    timed: bool = False,
) -> alt.Shape:
    """Make the channel ``shape`` for the provenances in a table's column, which the legend lists.

    ``timed``: there are times and metrics, too, which are measured where energy is estimated.

    For ``mark_point(filled=True)`` with the series as ``color``: published rings (by others: hollow
    diamonds), measured discs, estimated hollow triangles, simulated crosses.
    """
    words = set(table[field])
    if timed and "estimated" in words:
        words.add("measured")
    present = {
        word: shape for word, shape in PROVENANCE_SHAPES.items() if word in words
    }
    return alt.Shape(
        field,
        type="nominal",
        scale=alt.Scale(domain=list(present), range=list(present.values())),
        legend=alt.Legend(title=title, titleOrient="left"),
    )


def series_colour(table: pd.DataFrame, columns: int = 3) -> alt.Color:
    """Make the channel ``color`` for the series names in a table's column ``name``: "R4: ..." has
    the colour of R4.

    Other names beside these have further colours; alone they have those of the ramp. columns: of
    the legend, fewer where a name is longer.
    """
    names = sorted(set(table["name"]))
    name_px = 45 + FONT_SIZE_px // 2 * max(map(len, names), default=0)
    columns = min(columns, max(1, PAGE_WIDTH_px // name_px))
    known = [SERIES_COLOURS.get(name.split(":")[0]) for name in names]
    further = itertools.cycle(COLOURS)
    ours = [colour or next(further) for colour in known]
    colours = {"range": ours} if any(known) else {"scheme": COLOUR_RAMP}
    legend = alt.Legend(
        title=None,
        symbolType="circle",
        columns=columns,
        labelLimit=PAGE_WIDTH_px // columns - 45,
    )
    return alt.Color(
        "name", type="nominal", scale=alt.Scale(domain=names, **colours), legend=legend
    )


def chart_title(title: str, said: str, width: int = PAGE_WIDTH_px) -> alt.Title:
    """Make a title with grey lines below, broken to ``width`` px: what a run's number is worth."""
    # a character is half as wide as it is high, on average
    words = textwrap.wrap(said, 2 * width // FONT_SIZE_px)
    return alt.Title(
        title,
        subtitle=words,
        subtitleColor=GREY_COLOUR,
        subtitleFontSize=FONT_SIZE_px,
        subtitlePadding=3,
    )


def log_axis(
    channel: alt.X | alt.Y, values, base: float = 10.0, padding: int = 16
) -> alt.X | alt.Y:
    """Give a channel a logarithmic axis with round ticks.

    It is a linear one from zero where values span no decade.
    """
    known = [value for value in values if value > 0] or [1.0]
    low = min(known)
    high = max(known)
    if base == 10 and high < 8 * low:
        return channel.scale(zero=True, domainMax=1.15 * high, nice=False).axis(
            tickCount=4
        )
    powers = [base**power for power in range(-12, 12)]
    ticks = [tick for tick in powers if low <= tick <= high]
    if base == 10 and (high < 50 * low or len(ticks) < 2):
        ticks = [step * power for power in powers for step in (1, 2, 5)]
        ticks = [tick for tick in ticks if low <= tick <= high]
    ticks = ticks[:: 1 + len(ticks) // 7]
    channel = channel.scale(type="log", domain=[low, high], nice=False, padding=padding)
    return channel.axis(values=ticks, format="~g")


def placeholder_chart(message: str) -> alt.Chart:
    """Draw the words that say why there is nothing to see."""
    return (
        alt.Chart(alt.InlineData([{}]), width=384, height=96)
        .mark_text(color=GREY_COLOUR, lineBreak="\n")
        .encode(text=alt.datum(message))
    )


def save_chart(
    chart: alt.TopLevelMixin, name: str, build_dir: str | Path
) -> alt.TopLevelMixin:
    """Write a chart, after ``enable_theme``, as SVG, as PDF and as PNG of 2.5 times its pixels.

    Files lie in ``build_dir``/figures; the same data give the same SVG, byte for byte. Returns the
    chart, which a notebook then shows.
    """
    spec = chart.to_dict()
    path = save_chart_specification(spec, name, build_dir).with_suffix(".svg")
    svg = vl_convert.vegalite_to_svg(spec)
    path.write_text(svg)
    path.with_suffix(".png").write_bytes(vl_convert.svg_to_png(svg, scale=2.5))
    path.with_suffix(".pdf").write_bytes(vl_convert.svg_to_pdf(svg))
    return chart


def save_chart_specification(spec: dict, name: str, build_dir: str | Path) -> Path:
    """Write a chart's Vega-Lite specification for the interactive report, and its data as CSV.

    The column ``table`` says which of the chart's tables a row is of.
    """
    path = Path(build_dir, "figures", f"{name}.json")
    # msgspec writes null for NaN, which a browser would refuse
    with atomic_write(path) as file:
        file.write(msgspec.json.encode(spec, enc_hook=float, order="sorted"))
    if data := spec.get("datasets"):
        tables = dict(enumerate(map(pd.DataFrame, data.values())))
        rows = pd.concat(tables, names=["table"]).droplevel(1).map(spreadsheet_cell)
        rows.to_csv(path.with_suffix(".csv"), errors="backslashreplace")
    return path


def draw_points_with_error_bars(
    chart: alt.Chart,
    x: alt.X,
    y: alt.Y,
    color: alt.Color,
    shape: alt.Shape,
) -> alt.LayerChart:
    """Draw points with a bar from ``low`` to ``high``, and a thin dashed line through those of one
    origin, system, recipe and colour.
    """
    base = chart.encode(x, color=color)
    line = base.mark_line(strokeDash=[3, 3], strokeWidth=1.1).encode(
        y, detail=["origin:N", "system:N", "recipe:N"]
    )
    bars = base.mark_rule(strokeWidth=1.6, clip=True).encode(y="low:Q", y2="high:Q")
    return alt.layer(line, bars, base.mark_point(filled=True).encode(y, shape=shape))


def grey_bars(rows: pd.DataFrame, x: str) -> alt.Chart:
    """Draw grey bars from ``low`` to ``high`` at the column ``x``: what a text implies, which is
    never drawn as a point.
    """
    return (
        alt.Chart(rows)
        .mark_rule(strokeWidth=5, color=GREY_COLOUR, opacity=0.6)
        .encode(x=f"{x}:Q", y="low:Q", y2="high:Q")
    )


MODEL_LABEL = "model, fitted to the published values [90 %]"


def draw_model_curves(
    rows: pd.DataFrame, x: alt.X, y: alt.Y, color: alt.Color
) -> list[alt.Chart]:
    """Draw a band from ``low`` to ``high`` and a line of dashes and dots for each series: what a
    model says, no evidence.

    None where ``rows`` has none.
    """
    if rows.empty:
        return []
    base = alt.Chart(rows.assign(curve=MODEL_LABEL)).encode(x, color=color)
    dashes = alt.StrokeDash(
        "curve:N",
        scale=alt.Scale(domain=[MODEL_LABEL], range=[[6, 2.5, 1.6, 2.5]]),
        legend=alt.Legend(title=None, symbolSize=770, labelLimit=480),
    )
    return [
        base.mark_area(opacity=0.16).encode(y="low:Q", y2="high:Q", detail="name:N"),
        base.mark_line(strokeWidth=1.4).encode(y, strokeDash=dashes),
    ]
