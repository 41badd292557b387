"""Numbers have names, units and provenance; none is NaN, none stands twice."""

import json

import numpy as np
import pandas as pd
import pytest

from energynn.analysis import numbers


@pytest.fixture
def book(tmp_path):
    return numbers.Numbers("n", tmp_path)


def test_numbers_are_merged_in_order(tmp_path):
    for notebook, name in (("20_b", "slope"), ("10_a", "width")):
        book = numbers.Numbers(notebook, tmp_path)
        book.add(name, np.float64(0.26583), "kW", 3, "runs/published", "published")
        book.save()
    numbers.merge(tmp_path)
    merged = json.loads((tmp_path / "numbers.json").read_text())
    assert list(merged) == ["slope", "width"]
    expected = {
        "value": 0.26583,
        "unit": "kW",
        "digits": 3,
        "text": "0.266",
        "provenance": "published",
    }
    assert merged["slope"] == expected | {
        "source": "runs/published",
        "notebook": "20_b",
    }


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.27, 3, "0.270"),
        (1034.2, 3, "1034"),
        (99.96, 3, "100"),
        (18, 3, "18"),
        (-0.4832, 2, "\N{MINUS SIGN}0.48"),
        (0.0, 3, "0"),
        (1e-7, 2, "0.00000010"),
        ("abc", 3, "abc"),
        (np.int64(7), 3, "7"),
    ],
)
def test_text_has_significant_digits(book, value, digits, text):
    book.add("name", value, digits=digits)
    assert book.entries["name"]["text"] == text


def test_nan_is_not_available_with_a_reason(book):
    book.add("error", float("nan"), "m", reason="there are no own runs")
    book.add("other", None)
    entry = json.loads(book.save().read_text())["error"]
    assert entry["value"] is None and entry["text"] == "not available"
    assert entry["reason"] == "there are no own runs"
    assert book.entries["other"]["reason"]


def test_a_name_that_is_taken_and_a_guessed_provenance_are_refused(book):
    book.add("taken", 1)
    with pytest.raises(ValueError, match="already"):
        book.add("taken", 2)
    with pytest.raises(ValueError, match="provenance"):
        book.add("x", 1, provenance="guessed")


def test_the_least_certain_provenance_counts():
    assert numbers.weakest(["measured", "estimated", "simulated"]) == "simulated"
    assert numbers.weakest(["measured", "estimated"]) == "estimated"
    assert numbers.weakest([]) == "measured"


def test_one_name_in_two_notebooks_is_an_error(tmp_path):
    for notebook in ("a", "b"):
        book = numbers.Numbers(notebook, tmp_path)
        book.add("slope", 1)
        book.save()
    with pytest.raises(ValueError, match="slope: in both a and b"):
        numbers.merge(tmp_path)


def test_colophon_names_commit_and_versions(tmp_path):
    numbers.colophon(tmp_path)
    numbers.merge(tmp_path)
    merged = json.loads((tmp_path / "numbers.json").read_text())
    assert merged["version_typst"]["value"] and merged["build_cores"]["value"] >= 1
    assert "git_commit" in merged
    again = (tmp_path / "numbers.json").read_bytes()
    numbers.colophon(tmp_path)
    numbers.merge(tmp_path)
    assert (tmp_path / "numbers.json").read_bytes() == again


def test_a_table_gives_a_number_for_each_cell(book):
    columns = {"value": [1.0, 2.0], "low": [0.5, np.nan], "source": ["R4", "R5"]}
    table = pd.DataFrame(columns, ["a", "b"])
    about = dict(digits=2, reason="none")
    book.add_table(table, "kW", "published", "slope_{row}_{column}", **about)
    book.add_table(pd.DataFrame({"n": [3, 4]}, ["a", "b"]), "", names="rows_{row}")
    slopes = ["slope_a", "slope_b", "slope_a_low", "slope_b_low"]
    assert list(book.entries) == [*slopes, "rows_a", "rows_b"]
    expected = {
        "value": 2.0,
        "unit": "kW",
        "digits": 2,
        "text": "2.0",
        "source": "R5",
        "provenance": "published",
    }
    assert book.entries["slope_b"] == expected | {"notebook": "n"}
    assert book.entries["slope_b_low"]["reason"] == "none"
    assert book.entries["rows_b"]["text"] == "4"
