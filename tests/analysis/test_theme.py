"""Figures are reproducible, fit a page, and keep provenances apart."""

import altair as alt
import pandas as pd
import pytest

from energynn.analysis import theme


def chart(width=150):
    table = pd.DataFrame({"x": [1, 2, 3, 4], "y": [1.0, 4.0, 9.0, 16.0], "provenance": list(theme.PROVENANCE)})
    base = alt.Chart(table, width=width).mark_point(filled=True)
    return base.encode(x="x:Q", y="y:Q", color="provenance:N", shape=theme.provenance(table))


def test_the_same_data_give_the_same_svg(tmp_path):
    first = theme.save(chart(), "figure", tmp_path / "a").read_bytes()
    theme.save(chart(90), "between", tmp_path / "a")
    second = theme.save(chart(), "figure", tmp_path / "b").read_bytes()
    assert first == second
    assert {path.suffix for path in (tmp_path / "b" / "figures").iterdir()} == {".svg", ".png", ".pdf", ".json"}
    assert theme.FONT in first.decode()


def test_too_wide_a_figure_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="narrower"):
        theme.save(chart(600), "figure", tmp_path)


def test_legend_has_the_provenances_that_are_present():
    shape = theme.provenance(pd.DataFrame({"provenance": ["estimated", "published", "estimated"]})).to_dict()
    assert shape["scale"]["domain"] == ["published", "estimated"]
    assert len(set(theme.PROVENANCE.values())) == len(theme.PROVENANCE)
