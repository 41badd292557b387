"""Figures are reproducible, fit a page, and keep provenances apart."""

import json

import altair as alt
import numpy as np
import pandas as pd

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


def test_a_notebook_shows_figures_without_network():
    theme.enable()
    table = pd.DataFrame({"x": [1.0, 2.0], "run_dir": pd.array(["here", np.nan], dtype="str")})
    shown = alt.Chart(table).mark_point().encode(x="x:Q")._repr_mimebundle_()
    assert set(shown) == {"application/vnd.vegalite.v5+json", "image/svg+xml"}
    spec = shown["application/vnd.vegalite.v5+json"]
    assert spec["config"]["mark"]["tooltip"] == {"content": "encoding"}
    json.dumps(spec, allow_nan=False)  # JupyterLab refuses a notebook with NaN in it
    assert "url" not in str(spec["datasets"]) and shown["image/svg+xml"].startswith("<svg")
