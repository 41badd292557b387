"""Figures are reproducible, fit a page, and keep provenances apart."""

import itertools
import json

import altair as alt
import numpy as np
import pandas as pd
import pytest

from energynn.analysis import theme


def chart(width=240):
    table = pd.DataFrame({"x": range(5), "y": [1.0, 4.0, 9.0, 16.0, 25.0], "provenance": list(theme.PROVENANCE)})
    base = alt.Chart(table, width=width).mark_point(filled=True)
    return base.encode(x="x:Q", y="y:Q", color="provenance:N", shape=theme.provenance(table))


def test_the_same_data_give_the_same_svg(tmp_path):
    first = theme.save(chart(), "figure", tmp_path / "a").read_bytes()
    theme.save(chart(144), "between", tmp_path / "a")
    second = theme.save(chart(), "figure", tmp_path / "b").read_bytes()
    assert first == second
    assert {path.suffix for path in (tmp_path / "b" / "figures").iterdir()} == {".svg", ".png", ".pdf", ".json"}
    assert theme.FONT in first.decode()


# Linear sRGB to CIE XYZ, and to what a deuteranope sees (Machado et al. 2009, severity 1).
XYZ = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
ANYBODY = np.eye(3)
DEUTERANOPE = np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]])


def lab(colour: str, seen_by: np.ndarray = ANYBODY) -> np.ndarray:
    """Lightness, and the two axes of colour of CIE L*a*b*; a difference of about 2 can just be seen."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ np.clip(seen_by @ linear, 0, 1) / XYZ.sum(axis=1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


SHARED = {"ResNet50": theme.RESNET50.values(), "FourCastNet": theme.FOURCASTNET.values()}
SHARED |= {"verdicts": theme.VERDICTS.values(), "own series": theme.colours(5)}


@pytest.mark.parametrize("name", SHARED)
def test_colours_of_one_panel_differ_in_grey_and_for_a_deuteranope(name):
    for one, other in itertools.combinations(SHARED[name], 2):
        assert abs(lab(one)[0] - lab(other)[0]) >= 10, (one, other)
        assert np.linalg.norm(lab(one, DEUTERANOPE) - lab(other, DEUTERANOPE)) >= 15, (one, other)


def test_a_notebook_shows_figures_without_network():
    theme.enable()
    table = pd.DataFrame({"x": [1.0, 2.0], "run_dir": pd.array(["here", np.nan], dtype="str")})
    shown = alt.Chart(table).mark_point().encode(x="x:Q")._repr_mimebundle_()
    assert set(shown) == {"application/vnd.vegalite.v5+json", "image/svg+xml"}
    spec = shown["application/vnd.vegalite.v5+json"]
    assert spec["config"]["mark"]["tooltip"] == {"content": "encoding"}
    json.dumps(spec, allow_nan=False)  # JupyterLab refuses a notebook with NaN in it
    assert "url" not in str(spec["datasets"]) and shown["image/svg+xml"].startswith("<svg")
