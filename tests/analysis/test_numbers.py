"""Tables of numbers say for each row what it is; none is NaN, none stands twice."""

import json

import numpy as np
import pandas as pd
import pytest
import typst

from energynn.analysis import numbers, paper
from energynn.host.reading import read_json
from tests.processes import refused

ABOUT = dict(unit="kW", source="R4 n=4", provenance="published", holds_for="R4")


def saved(folder, table, notebook="10_a", **about) -> dict:
    numbers.save_tables(notebook, {"slope": table}, folder, **about)
    return read_json(folder / "numbers" / f"{notebook}.json")["slope"]


def test_tables_are_merged_in_order(tmp_path):
    numbers.save_tables("20_b", {"width": {"R4": {"value": 1}}}, tmp_path, **ABOUT)
    table = pd.DataFrame({"value": [np.float64(0.26583)]}, ["R4"])
    numbers.save_tables("10_a", {"slope": table}, tmp_path, **ABOUT)
    numbers.merge_tables(tmp_path)
    merged = read_json(tmp_path / "numbers.json")
    assert list(merged) == ["slope", "width"]
    expected = {"value": 0.26583, "notebook": "10_a"}
    assert merged["slope"] == {"R4": ABOUT | expected}


def test_a_rows_own_columns_count_before_the_common_ones(tmp_path):
    table = pd.DataFrame({"low": [0.5, np.nan], "source": ["R5", None]}, [4, "all"])
    rows = saved(tmp_path, table, **ABOUT)
    assert list(rows) == ["4", "all"]
    assert rows["4"]["source"] == "R5" and rows["all"]["source"] == "R4 n=4"
    assert rows["all"]["low"] is None


def test_whole_numbers_stay_whole_and_what_is_missing_is_null(tmp_path):
    table = {"a": {"runs": np.int64(3), "value": 1.0}, "b": {"value": float("nan")}}
    rows = saved(tmp_path, table, **ABOUT)
    assert (rows["a"]["runs"], type(rows["a"]["runs"])) == (3, int)
    assert type(rows["a"]["value"]) is float
    assert rows["b"]["runs"] is None and rows["b"]["value"] is None


@pytest.mark.parametrize("column", ABOUT)
def test_a_row_without_unit_source_provenance_or_condition_is_refused(tmp_path, column):
    about = {name: word for name, word in ABOUT.items() if name != column}
    refused(
        f"10_a, table slope.* no {column}; add",
        saved,
        tmp_path,
        {"R4": {"value": 1}},
        **about,
    )
    refused(
        f"no {column}; add",
        saved,
        tmp_path,
        {"R4": {"value": 1, column: "x"}, "R5": {"value": 2}},
        **about,
    )
    refused(
        "provenance guessed is unknown",
        saved,
        tmp_path,
        {"R4": {"value": 1}},
        **ABOUT | {"provenance": "guessed"},
    )


def test_the_least_certain_provenance_counts():
    assert (
        numbers.weakest_provenance(["measured", "estimated", "simulated"])
        == "simulated"
    )
    assert numbers.weakest_provenance(["measured", "estimated"]) == "estimated"
    assert numbers.weakest_provenance([]) == "measured"


def test_a_table_of_one_name_in_two_notebooks_is_an_error(tmp_path):
    for notebook in ("a", "b"):
        saved(tmp_path, {"R4": {"value": 1}}, notebook, **ABOUT)
    refused("b.json: slope is another's table; rename", numbers.merge_tables, tmp_path)


def test_colophon_names_commit_and_versions(tmp_path):
    numbers.write_colophon(tmp_path)
    numbers.merge_tables(tmp_path)
    written = (tmp_path / "numbers.json").read_bytes()
    build = json.loads(written)["colophon"]["build"]
    assert build["version_typst"] and build["build_cores"] >= 1
    assert "git_commit" in build
    numbers.write_colophon(tmp_path)
    numbers.merge_tables(tmp_path)
    assert (tmp_path / "numbers.json").read_bytes() == written


def test_a_sentence_is_filled_with_numbers():
    tables = {"slope": {"R4": {"low": -0.266, "runs": 9}}}
    sentence = "of {slope[R4][runs]} runs: {slope[R4][low]:.2f}–top-1"
    assert (
        numbers.fill_sentence(sentence, tables) == "of 9 runs: \N{MINUS SIGN}0.27–top-1"
    )


PRINTED = [
    (0.27, "digits: 3", "0.270"),
    (9.996, "digits: 3", "10.0"),
    (99.96, "digits: 3", "100"),
    (18, "digits: 3", "18"),
    (-0.4832, "digits: 2", "\N{MINUS SIGN}0.48"),
    (0.0, "digits: 3", "0"),
    (-0.04, "decimals: 1", "0.0"),
    (1e-7, "digits: 2", "0.00000010"),
    ("abc", "digits: 3", "abc"),
]


@pytest.fixture
def asked(tmp_path):
    """Make tables of numbers, and evaluate code of a manuscript on them."""
    rows = {str(number): {"value": case[0]} for number, case in enumerate(PRINTED)}
    rows["other"] = {
        "value": None,
        "low": 0.5,
        "high": 0.5,
        "runs": 3,
        "energy_Wh": 2.0,
    }
    rows["model"] = {"value": 1.5, "provenance": "simulated", "runs": 3}
    numbers.save_tables("a", {"slope": rows}, tmp_path, **ABOUT)
    numbers.merge_tables(tmp_path)

    def ask(code: str):
        manuscript = tmp_path / "asking.typ"
        source = paper.PAPER_FOLDER / "numbers.typ"
        manuscript.write_text(f'#import "{source}": *\n#metadata({code})<it>')
        options = dict(root="/", sys_inputs={"build": str(tmp_path)}, field="value")
        return json.loads(typst.query(manuscript, "<it>", **options))[0]

    return ask


def test_a_manuscript_prints_digits_or_decimals(asked):
    calls = [
        f'words-of(value("slope", "{number}", "value"), {case[1]})'
        for number, case in enumerate(PRINTED)
    ]
    assert asked(f"({', '.join(calls)})") == [case[2] for case in PRINTED]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ('num("slope", "0", "value")', "0.270\N{NARROW NO-BREAK SPACE}kW"),
        ('num("slope", "other", "value")', "not available"),
        ('num("slope", "other", "runs")', "3"),
        ('num("slope", "other", "energy_Wh")', "2.00\N{NARROW NO-BREAK SPACE}Wh"),
        ('ends("slope", "other", digits: 1)', "0.5"),
        ('range("slope", "other", digits: 1)', "0.5 to 0.5\N{NARROW NO-BREAK SPACE}kW"),
        ('num("slope", "model", "value")', "1.50\N{NARROW NO-BREAK SPACE}kWsim."),
        ('num("slope", "model", "runs")', "3"),
    ],
)
def test_a_number_has_its_unit_and_mark(asked, call, words):
    assert asked(f"plain({call})").replace("\u2060", "") == words


@pytest.mark.parametrize("place", ['"x", "R4", "value"', '"slope", "x", "value"'])
def test_a_place_that_is_missing_is_named(asked, place):
    with pytest.raises(RuntimeError, match="numbers.json has no table .*notebooks"):
        asked(f"value({place})")
