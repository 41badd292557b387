"""Figures are reproducible, fit a page, and keep provenances apart."""

import json
import re

import altair as alt
import numpy as np
import pandas as pd
import pytest

from energynn.analysis import theme
from energynn.host.reading import read_json


@pytest.fixture(autouse=True)
def _look():
    theme.enable_theme()


def chart(width=240):
    table = pd.DataFrame({"provenance": list(theme.PROVENANCE_SHAPES)})
    table = table.assign(x=table.index, y=table.index**2.0)
    base = alt.Chart(table, width=width).mark_point(filled=True)
    return base.encode(
        x="x:Q", y="y:Q", color="provenance:N", shape=theme.provenance_shape(table)
    )


def test_the_same_data_give_the_same_svg(tmp_path):
    theme.save_chart(chart(), "figure", tmp_path / "a")
    theme.save_chart(chart(144), "between", tmp_path / "a")
    theme.save_chart(chart(), "figure", tmp_path / "b")
    first = (tmp_path / "a" / "figures" / "figure.svg").read_bytes()
    assert first == (tmp_path / "b" / "figures" / "figure.svg").read_bytes()
    assert {path.suffix for path in (tmp_path / "b" / "figures").iterdir()} == {
        ".svg",
        ".png",
        ".pdf",
        ".json",
        ".csv",
    }
    rows = pd.read_csv(tmp_path / "b" / "figures" / "figure.csv")
    assert {"table", "x", "y", "provenance"} <= {*rows}
    assert theme.FONT_FAMILY in first.decode()
    width_px = re.search(r'width="([\d.]+)"', first.decode())[1]
    pdf = (tmp_path / "b" / "figures" / "figure.pdf").read_bytes()
    assert f"/MediaBox [0 0 {width_px} ".encode() in pdf


def test_figures_for_a_browser_hold_no_nan_and_need_no_network(tmp_path):
    table = pd.DataFrame(
        {"x": [1.0, 2.0], "run_dir": pd.array(["here", np.nan], dtype="str")}
    )
    theme.save_chart(alt.Chart(table).mark_point().encode(x="x:Q"), "figure", tmp_path)
    spec = read_json(tmp_path / "figures" / "figure.json")
    assert spec["config"]["mark"]["tooltip"] == {"content": "encoding"}
    json.dumps(spec, allow_nan=False)
    assert "url" not in str(spec["datasets"])


@pytest.mark.parametrize("low", [0.3, 1.0, 11.0, 70.0])
@pytest.mark.parametrize("ratio", [9, 52, 70, 1e4])
def test_a_logarithmic_axis_has_two_round_ticks_or_more(low, ratio):
    channel = theme.log_axis(alt.Y("y:Q"), [low, low * ratio])
    ticks = channel.to_dict()["axis"]["values"]
    assert 2 <= len(ticks) <= 7 and low <= min(ticks) and max(ticks) <= low * ratio


def test_a_series_more_leaves_those_of_the_study_their_colours():
    names = ["R4: constant LBS", "mine", "yours"]
    scale = theme.series_colour(pd.DataFrame({"name": names})).to_dict()["scale"]
    of = dict(zip(scale["domain"], scale["range"], strict=True))
    assert of[names[0]] == theme.SERIES_COLOURS["R4"] and len(set(of.values())) == 3
    alone = theme.series_colour(pd.DataFrame({"name": names[1:]})).to_dict()["scale"]
    assert "range" not in alone
