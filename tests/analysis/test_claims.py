"""The ledger: plain entries, verdicts that follow the data, and no evidence from what was
assumed.
"""

import json

import numpy as np
import pandas as pd
import pytest

from energynn import cli
from energynn.analysis import claims, observations, published

ENTRIES = claims.read()
FIELDS = {
    "quantity",
    "series",
    "per",
    "from",
    "to",
    "a",
    "b",
    "match",
    "where",
    "range",
    "every",
}
ABOUT = {"id", "group", "place", "says", "base"}
A95 = 4.303  # Student's t at 95 % with two degrees of freedom


def verdicts(found):
    """List the verdicts on own runs by statement; of several systems, the first."""
    return {one["id"]: one["own"][0]["verdict"] for one in found["claims"]}


@pytest.fixture(scope="module")
def found(synthetic, tmp_path_factory):
    runs_dir = tmp_path_factory.mktemp("replica")
    return claims.evaluate(synthetic.write_replica(runs_dir, series="R1 R4 R6 F1 F4"))


@pytest.fixture(scope="module")
def judged(found):
    return {one["id"]: one["published"] for one in found["claims"]}


def test_entries_are_plain():
    ids = [one["id"] for one in ENTRIES]
    assert len(ids) == len(set(ids)) >= 140
    named = [
        name for erratum in published.errata() for name in erratum.get("claims", [])
    ]
    assert set(named) <= set(ids)
    for one in ENTRIES:
        ways = [name for name in ("restated", "reason", "quantity") if name in one]
        assert len(ways) == 1, one["id"]
        assert set(one) - ABOUT - set(ways) <= FIELDS | {"expect"}, one["id"]
        if "quantity" in one:
            assert one["quantity"] in observations.QUANTITIES
            assert ("range" in one) != ("expect" in one), one["id"]
            assert set(one.get("series", [])) <= set(published.series()), one["id"]


@pytest.mark.parametrize(
    ("claim", "verdict", "value", "low", "high"),
    [  # computed independently of this code, from the published values
        ("scaled-lbs-time-constant", "supported", 0.079, 0.068, 0.090),
        ("scaled-small-samples-constant", "contradicted", -0.277, -0.284, -0.269),
        ("abstract-factor-between-hardware", "supported", 0.326, 0.214, 0.448),
        ("hardware-impact-on-energy", "contradicted", -0.016, -0.073, 0.044),
        ("abstract-linear", "inconclusive", -0.06, -0.22, 0.10),
        ("fcn-gbs-sublinear", "inconclusive", 0.225, -0.014, 0.523),
        ("fcn-few-gpus-save-energy", "supported", 0.344, 0.141, 0.583),
        ("conclusion-a100-low-power", "inconclusive", -0.039, -0.133, 0.065),
    ],
)
def test_published_values_give_the_numbers_of_a_recomputation(
    judged, claim, verdict, value, low, high
):
    one = judged[claim]
    assert one["verdict"] == verdict
    assert [one["value"], one["low"], one["high"]] == pytest.approx(
        [value, low, high], abs=0.002
    )


def test_half_of_the_series_are_needed_and_restated_values_decide_nothing(
    judged, found
):
    few = judged["fixed-gbs-passes-increase"]
    assert few["verdict"] == "inconclusive" and few["coverage"]["with"] == ["F3", "F4"]
    # its neighbours are unknown
    assert judged["lbs-energy-minimum"]["verdict"] == "no data"
    assert judged["lbs-cpu-energy-falls"]["verdict"] == "restated"
    assert sum(found["counts"]["published"].values()) == len(ENTRIES)
    groups = {one.get("group", one["id"]) for one in ENTRIES}
    assert len(groups) <= sum(found["groups"]["published"].values()) < len(ENTRIES)


def test_own_runs_are_judged_in_a_column_of_their_own(found):
    verdict = verdicts(found)
    # Of the replica's formulas: rates fall as n^-0.04, power follows the rate, errors rise beyond
    # 8192.
    assert (
        verdict["lbs-error-rises-rapidly"]
        == verdict["lbs-speed-up-below-optimal"]
        == "supported"
    )
    assert verdict["lbs-speed-up-near-optimal"] == "contradicted"  # 32^0.04 is 1.149
    assert verdict["gbs-energy-minimum"] == "no data"
    (pairs,) = next(one["own"] for one in found["claims"] if one["id"] == "h100-time")
    assert pairs["on"] == "all" and pairs["value"] == pytest.approx(
        1 / 1.35 - 1, abs=0.01
    )


@pytest.mark.parametrize("provenance", ["estimated", "simulated"])
def test_what_is_not_measured_never_supports(synthetic, tmp_path, provenance):
    verdict = verdicts(
        claims.evaluate(synthetic.write_replica(tmp_path, provenance, series="R1 R4"))
    )
    of_energy = [one["id"] for one in ENTRIES if "energy" in one.get("quantity", "")]
    assert {verdict[name] for name in of_energy} == {"no data"}
    # Estimated energies leave times and errors alone; of a simulated run nothing is evidence.
    expected = {"estimated": "supported", "simulated": "no data"}
    assert verdict["lbs-error-rises-rapidly"] == expected[provenance]


def test_small_runs_on_a_cpu_are_no_evidence(synthetic, tmp_path):
    found = claims.evaluate(synthetic.write_study(tmp_path, "measured"))
    assert set(verdicts(found).values()) == {"no data"}


def test_the_command_prints_the_ledger(synthetic, tmp_path, capsys):
    runs = str(synthetic.write_replica(tmp_path, series="R1"))
    assert cli.main(["claims", "--data", runs, "--json"]) == 0
    one = json.loads(capsys.readouterr().out)["claims"][0]
    assert {"id", "says", "published", "own"} <= set(one)
    assert {"verdict", "value", "low", "high", "units"} <= set(one["published"])
    assert cli.main(["claims", "--data", runs]) == 0
    text = capsys.readouterr().out
    assert "lbs-speed-up-near-optimal (Section 3.2.2, second paragraph)" in text


def table_of(units, freedom):
    """Make the table of units that a world has: log ratios, errors, degrees of freedom."""
    values, errors = np.broadcast_arrays(*units)
    table = pd.DataFrame({"value": values, "error": errors, "freedom": freedom})
    return table.assign(unit="", series="")


def test_an_interval_is_from_units_or_from_repeats():
    own = claims.intervals(table_of(([0.1, 0.2, 0.3], 9.0), 2), every=False)
    assert (own["high"] - own["low"])[0] == pytest.approx(
        2 * A95 * 0.1 / 3**0.5, rel=1e-3
    )
    repeats = claims.intervals(table_of(([0.1, 0.2], 0.05), 2), every=False)
    assert (repeats["high"] - repeats["low"]).to_list() == pytest.approx(
        [2 * A95 * 0.05] * 2, rel=1e-3
    )


WORLDS = [
    pytest.param(400, id="400"),
    pytest.param(4000, id="4000", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("worlds", WORLDS)
@pytest.mark.parametrize(
    ("units", "freedom"), [(1, 2), (2, 2), (1, 68), (3, 2), (5, 2)]
)
def test_intervals_hold_95_percent_in_worlds_with_known_truth(worlds, units, freedom):
    """Scatter of 3.6 % is estimated with ``freedom``; of three and more units it is their own."""
    random = np.random.default_rng(units * 100 + freedom)
    held = []
    for _ in range(worlds):
        values = 0.3 + random.normal(0, 0.036, units)
        error = 0.036 * np.sqrt(random.chisquare(freedom) / freedom)
        ends = claims.intervals(table_of((values, error), freedom), every=False)
        held.append(((ends["low"] <= 0.3) & (ends["high"] >= 0.3)).mean())
    assert np.mean(held) == pytest.approx(0.95, abs=0.01 if worlds == 4000 else 0.035)


@pytest.mark.parametrize("worlds", WORLDS)
@pytest.mark.parametrize("expect", ["up", "same"])
@pytest.mark.parametrize("units", [1, 3])
def test_at_the_edge_of_the_range_verdicts_are_rarely_wrong(
    monkeypatch, worlds, expect, units
):
    edge = 0.0 if expect == "up" else claims.THRESHOLD
    random = np.random.default_rng(7)
    verdict = []
    for _ in range(worlds):
        error = 0.036 * np.sqrt(random.chisquare(2) / 2)
        table = table_of((edge + random.normal(0, 0.036, units), error), 2)
        monkeypatch.setattr(claims, "units", lambda claim, rows, table=table: table)
        verdict.append(
            claims.judge({"quantity": "gpu_hours", "expect": expect}, None)["verdict"]
        )
    for wrong in ("supported", "contradicted"):
        assert verdict.count(wrong) / worlds < (0.05 if worlds == 4000 else 0.07)
