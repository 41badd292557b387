"""The ledger: plain entries, verdicts that follow the data, and no evidence from what was
assumed.
"""

import numpy as np
import pandas as pd
import pytest

from energynn.analysis import claims, observations, published
from energynn.experiment import published_values
from tests.analysis import by_hand
from tests.analysis.conftest import write_replica, write_study
from tests.processes import answer, told

ENTRIES, RESTATED = claims.read_claims("claim"), claims.read_claims("restated")
ENTRY = {one["id"]: one for one in ENTRIES}
FIELDS = set(
    "id group kind place says base before why decides reason quantity series per from to "
    "a b match where range every needs expect verdict elsewhere reading restates "
    "as data alike".split()
)
LINE = {"quantity": "energy_total_kWh", "per": "gpu_hours", "match": ["series"]}
LINE |= {"every": True, "expect": "straight"}


def verdicts(found):
    """List the verdicts on own runs by statement that has one; of several systems, the first."""
    return {
        one["id"]: one["own"][0]["verdict"] for one in found["claims"] if one["own"]
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    runs_dir = tmp_path_factory.mktemp("replica")
    return claims.evaluate_claims(write_replica(runs_dir, "R1 R4 R6 F1 F4"))


def column(found, name):
    """What a column of the ledger says, by statement."""
    return {one["id"]: one[name] for one in found["claims"] if name in one}


@pytest.fixture(scope="module")
def judged(found):
    return column(found, "published")


def world(energy, hours, series="R4", **columns):
    """Rows of ``observations.means_of_configurations`` with known energies and hours, each on more
    GPUs.
    """
    rows = pd.DataFrame({"energy_total_kWh": energy, "gpu_hours": hours})
    rows["energy_per_gpu_hour_kW"] = rows["energy_total_kWh"] / rows["gpu_hours"]
    about = {"run": rows.index, "devices": 4 + rows.index, "repeats": 1, "copies": ""}
    about |= dict.fromkeys(("origin", "provenance", "recipe"), "published")
    about |= {"workload": "resnet50", "series": series}
    return rows.assign(**about | columns)


def test_entries_are_plain():
    ids = [one["id"] for one in [*ENTRIES, *RESTATED]]
    assert len(ids) == len(set(ids)) == 144
    named = [
        name
        for erratum in published.read_errata()
        for name in erratum.get("claims", [])
    ]
    assert set(named) <= set(ids)
    for one in ENTRIES:
        ways = [name for name in ("reason", "quantity") if name in one]
        assert len(ways) == 1, one["id"]
        for table in (one, one.get("elsewhere", {}), one.get("reading", {})):
            assert set(table) <= FIELDS, one["id"]
        # by hand nothing else is said
        assert one.get("verdict", "inconclusive") == "inconclusive"
        assert "before" not in one or one["why"], one["id"]
        assert set(one.get("restates", [])) <= {restated["id"] for restated in RESTATED}
        if "quantity" in one:
            assert one["quantity"] in observations.QUANTITIES
            assert ("range" in one) != ("expect" in one), one["id"]
            assert set(one.get("series", [])) <= set(published_values.SERIES), one["id"]


@pytest.mark.parametrize(
    ("told", "claim", "verdict", "ends"),
    [  # computed independently of this code, from the published values
        ("published", "scaled-lbs-time-constant", "supported", [0.079, 0.068, 0.090]),
        (
            "published",
            "scaled-small-samples-constant",
            "contradicted",
            [-0.277, -0.284, -0.269],
        ),
        (
            "published",
            "abstract-factor-between-hardware",
            "supported",
            [0.326, 0.214, 0.448],
        ),
        (
            "published",
            "hardware-impact-on-energy",
            "contradicted",
            [-0.016, -0.073, 0.044],
        ),
        ("published", "abstract-linear", "supported", [0.062, 0.062, 0.062]),
        ("reading", "abstract-linear", "inconclusive", [-0.060, -0.248, 0.128]),
        ("published", "h100-steeper", "supported", [0.384, 0.384, 0.384]),
        ("published", "fcn-gbs-sublinear", "inconclusive", [0.225, -0.014, 0.523]),
        # 2 and 8 GPUs are unknown
        ("derived", "lbs-energy-minimum", "inconclusive", [0.217, 0.178, 0.257]),
        (
            "derived",
            "fixed-lbs-samples-decrease",
            "supported",
            [-0.330, -0.461, -0.167],
        ),
    ],
)
def test_published_values_give_the_numbers_of_a_recomputation(
    found, judged, told, claim, verdict, ends
):
    one = column(found, told)[claim]
    if told == "derived":
        assert judged[claim]["verdict"] in ("no data", "inconclusive")
        (one,) = one
    assert one["verdict"] == verdict
    assert [one["value"], one["low"], one["high"]] == pytest.approx(ends, abs=0.002)


def test_a_derivation_is_not_judged_by_what_it_copies(found):
    derived = column(found, "derived")
    assert derived["fixed-gbs-resnet-power-decreases"] == []
    assert derived["gbs-energy-proportional"] == []
    (energy,) = derived["gbs-fewer-gpus-need-less"]  # R2's energies may be compared
    assert energy["coverage"]["with"] == ["R2"]


def test_what_others_measured_has_a_column_of_its_own(found):
    """MLPerf's four exponents, from the file by hand; an unknown scatter decides nothing."""
    exponents = by_hand.exponents()
    judged = column(found, "elsewhere")
    assert len(judged) >= 11
    linear = judged["proportional-everywhere"]
    assert linear["verdict"] == "otherwise" and "without network" in linear["data"]
    assert linear["value"] == pytest.approx(np.mean(exponents) - 1, rel=1e-5)
    reach = 3.182 * np.std(exponents, ddof=1) / 2  # t with three degrees of freedom
    assert linear["high"] - linear["value"] == pytest.approx(reach, rel=1e-3)
    single = judged["lbs-error-rises-rapidly"]
    assert single["verdict"] == "inconclusive" and single["low"] is None
    words = {one["verdict"] for one in judged.values()}
    assert words == {"likewise", "otherwise", "inconclusive"}
    assert judged["gbs-fewer-gpus-need-less"]["verdict"] == "likewise"


def test_a_contradiction_says_of_what_kind_it_is(judged):
    for name, one in judged.items():
        assert ("kind" in ENTRY[name]) == (one["verdict"] == "contradicted"), name


def test_a_line_with_an_intercept_is_straight_and_a_curve_is_not():
    """Of runs that scatter by 2 %. Over hours that span little, a curve passes for a line."""
    random = np.random.default_rng(36)
    wide, narrow = np.geomspace(2, 114, 13), np.linspace(550, 1034, 5)

    def verdicts_of(energy, hours, **test):
        noise = np.exp(random.normal(0, 0.02, (20, len(hours))))
        worlds = [world(energy * factors, hours) for factors in noise]
        return {claims.judge(LINE | test, rows)["verdict"] for rows in worlds}

    for hours in (wide, narrow):
        assert verdicts_of(36 + 0.154 * hours, hours) == {"supported"}
    proportional = {"every": False, "expect": "same", "series": ["R4"]}
    assert "supported" not in verdicts_of(36 + 0.154 * wide, wide, **proportional)
    assert verdicts_of(wide**0.5, wide) == verdicts_of(wide**1.5, wide)
    assert verdicts_of(wide**1.5, wide) == {"contradicted"}
    assert verdicts_of(narrow**1.5, narrow) == {"supported"}
    assert verdicts_of(wide[:2], wide[:2]) == {"no data"}


def test_a_table_is_decided_by_looking_at_every_value():
    """However much repeated runs scatter; what rounding leaves open stays open."""
    table = {"quantity": "energy_per_gpu_hour_kW", "range": [0.255, 0.285]}
    scatter = {"energy_per_gpu_hour_kW_std": 0.02, "repeats": 3}

    def judged(last, every=True, **columns):
        rows = world([0.26, 0.27, last], 1.0, **columns)
        return claims.judge({**table, "every": every}, rows)["verdict"]

    assert judged(0.284, **scatter) == "supported"
    assert judged(0.284, every=False, **scatter) == "inconclusive"
    assert judged(0.29, **scatter) == "contradicted"
    assert judged(0.284, energy_total_kWh_half=0.01) == "inconclusive"


def test_series_that_share_a_run_count_once():
    """F1 and F3 end with one run; the two ends of a minimum stay apart."""
    up = {"quantity": "energy_total_kWh", "expect": "up", "series": ["F1", "F3", "F4"]}
    pairs = {"devices": [16, 64] * 3, "series": list(np.repeat(up["series"], 2))}
    rows = world([100, 140, 110, 140, 100, 126], 1.0, **pairs)
    judged = claims.judge(up, rows.assign(run=list("abcbde")))
    mean = (1.4 * 140 / 110) ** 0.5 - 1
    assert list(judged["units"].values()) == pytest.approx([mean, 0.26], rel=1e-4)
    for runs, units in (("abcdef", 3), ("abacde", 2)):
        assert len(claims.judge(up, rows.assign(run=list(runs)))["units"]) == units
    least = up | {"series": ["R4"], "from": 4, "to": [5, 6]}
    assert len(claims.judge(least, world([6, 8, 9], 1.0))["units"]) == 2


def test_a_gradient_is_no_level():
    """Where H100 takes more for each hour, but no more for a further one, it is not steeper."""
    alike = {"local_batch_size": 1, "epochs": 80, "devices": [4, 16, 32] * 2}
    alike["hardware"] = ["H100"] * 3 + ["A100"] * 3
    hours = np.array([420.0, 516, 663, 560, 692, 909])
    worlds = (0, 0.2, "supported"), (100, 0.14, "contradicted")
    for intercept, slope, verdict in (*worlds, (500, -0.1, "contradicted")):
        energy = 0.15 * hours
        energy[:3] = intercept + slope * hours[:3]
        rows = world(energy, hours, "T1", **alike)
        assert claims.judge(ENTRY["h100-steeper"], rows)["verdict"] == verdict


def test_gpu_power_is_the_gpus_own():
    """In a world where the node's rises while the GPUs' falls, too."""
    of_power = {one.get("quantity") for one in ENTRIES if "GPU power" in one["says"]}
    assert of_power == {"power_per_gpu_W", None}
    gpu = {"power_per_gpu_W": [200.0, 190, 180], "power_per_gpu_W_std": 1.0}
    node = {"energy_per_gpu_hour_kW_std": 0.001, "repeats": 5}
    rows = world([6.0, 14, 30], [20.0, 40, 80], "R5", **gpu, **node)
    falls = ENTRY["scaled-small-power-decreases"]
    assert claims.judge(falls, rows)["verdict"] == "supported"
    assert claims.judge(falls | falls["reading"], rows)["verdict"] == "contradicted"


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
    assert "gbs-energy-minimum" not in verdict
    (pairs,) = next(one["own"] for one in found["claims"] if one["id"] == "h100-time")
    assert pairs["on"] == "all" and pairs["value"] == pytest.approx(1 / 1.35, abs=0.01)


@pytest.mark.parametrize("provenance", ["estimated", "simulated"])
def test_what_is_not_measured_never_supports(tmp_path, provenance):
    verdict = verdicts(
        claims.evaluate_claims(write_replica(tmp_path, "R1 R4", provenance))
    )
    of_energy = [one["id"] for one in ENTRIES if "energy" in one.get("quantity", "")]
    assert not set(verdict) & set(of_energy)
    # Estimated energies leave times and errors alone; of a simulated run nothing is evidence.
    expected = {"estimated": "supported", "simulated": None}
    assert verdict.get("lbs-error-rises-rapidly") == expected[provenance]


def test_small_runs_on_a_cpu_are_no_evidence(tmp_path):
    found = claims.evaluate_claims(write_study(tmp_path, "measured"))
    assert verdicts(found) == {}


def test_the_command_prints_the_ledger(tmp_path):
    words = f"claims --runs-dir {write_replica(tmp_path, 'R1')}"
    one = told(words)["claims"][0]
    assert {"id", "says", "published", "own"} <= set(one)
    assert {"verdict", "value", "low", "high", "units", "at"} <= set(one["published"])
    text = answer(words)
    assert "lbs-speed-up-near-optimal (Section 3.2.2, second paragraph)" in text


@pytest.mark.parametrize(
    ("units", "freedom"), [(1, 2), (2, 2), (1, 68), (3, 2), (5, 2)]
)
def test_in_worlds_with_known_truth_intervals_hold_95_percent_and_verdicts_are_rarely_wrong(
    units, freedom
):
    """Scatter of 3.6 % is estimated with ``freedom``; of three and more units it is their own."""
    random = np.random.default_rng(units * 100 + freedom)
    value = random.normal(0, 0.036, (4000, units))
    error = 0.036 * np.sqrt(random.chisquare(freedom, (4000, 1)) / freedom)
    _, low, high = claims.confidence_intervals(value, error, freedom)
    assert low.shape == (4000, units if units < 3 else 1)
    assert ((low <= 0) & (high >= 0)).mean() == pytest.approx(0.95, abs=0.01)
    if freedom == 2:  # what normal quantiles would have held
        assert (abs(value) < 1.96 * error).mean() == pytest.approx(0.81, abs=0.02)
    for expect, edge in (("up", 0), ("same", np.log(1.1)), ("much down", -np.log(1.1))):
        verdict = claims.decide(
            low + edge, high + edge, {"expect": expect}, claims.DIFFERENCE_THRESHOLD
        )
        for wrong in ("supported", "contradicted"):
            assert (verdict == wrong).mean() < 0.05
