"""The ledger: precise entries, verdicts that follow the data, and no support from what was assumed."""

import json
import os
import tomllib

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import linprog

from energynn import cli, config
from energynn.analysis import claims, effects, observations, published
from tests.measure import worlds

LEDGER = tomllib.loads(claims.CLAIMS.read_text())


def verdicts(found, column="own"):
    """Verdict of each statement in one column; of own runs on several systems, the first."""
    return {
        one["id"]: (one["published"] if column == "published" else one["own"][0])["verdict"] for one in found["claims"]
    }


@pytest.fixture(scope="module")
def replica(synthetic, tmp_path_factory):
    return claims.evaluate(synthetic.write_replica(tmp_path_factory.mktemp("replica"), series="R1 R4 R6 F1 F4"))


@pytest.fixture(scope="module")
def without_own_runs(tmp_path_factory):
    return claims.evaluate(tmp_path_factory.mktemp("nothing"))


@pytest.fixture
def only(monkeypatch, tmp_path_factory):
    """Let the ledger have one statement only: to judge all of them takes seconds."""

    def keep(claim_id):
        head, *entries = claims.CLAIMS.read_text().split("[[claim]]\n")
        (entry,) = [entry for entry in entries if f'id = "{claim_id}"' in entry]
        path = tmp_path_factory.mktemp("ledger") / "claims.toml"
        path.write_text(f"{head}[[claim]]\n{entry}")
        monkeypatch.setattr(claims, "CLAIMS", path)

    return keep


def test_entries_are_precise():
    entries = LEDGER["claim"]
    assert len(entries) >= 100 and len({one["id"] for one in entries}) == len(entries)
    places = {one["place"].split(",")[0] for one in entries}
    assert places >= {
        "Abstract",
        "Section 3.2.2",
        "Section 3.2.3",
        "Section 3.3.2",
        "Section 3.4",
        "Section 3.5",
        "Section 4",
    }
    for one in entries:
        if one["test"] == "none":
            assert one["reason"]
            continue
        assert one["test"] in effects.TESTS, one["id"]
        assert one["word"] in LEDGER["tolerances"], one["id"]
        if "speed-up" in one["says"] or one["test"] == "change":
            assert one.get("base") or one["test"] != "change" or "profile" in one["quantity"], one["id"]
        known = {*observations.QUANTITIES, "profile_near_baseline", "profile_relative_spread"}
        assert set([one["quantity"]] if isinstance(one["quantity"], str) else one["quantity"]) <= known
        if "stated" in one:
            assert list(one["stated"]) == [str(n) for n in one["select"]["devices"]] and one["absolute"] == 1
        if isinstance(one.get("from"), dict):
            assert list(one["from"]) == one["select"]["series"], one["id"]
        if "linear" in one["says"] and one["test"] == "line":
            assert one["intercept"], one["id"]  # only "proportional" is a line through the origin
    ids = {one["id"] for one in entries}
    assert all(name in ids for erratum in published.errata() for name in erratum.get("claims", []))


def test_published_values_judge_the_text(without_own_runs):
    found = without_own_runs
    verdict = verdicts(found, "published")
    assert verdict["scaled-lbs-energy-per-sample"] == "supported"
    assert verdict["interval-resnet50"] == "supported" and verdict["interval-resnet50-all"] == "contradicted"
    assert verdict["scaled-small-samples-constant"] == "contradicted"  # the regimes are swapped in the text
    assert verdict["fcn-example-hours"] == verdict["lbs-cpu-energy-falls"] == "by construction"
    assert verdict["lbs-error-constant-to-8192"] == "no data"  # only a picture
    assert verdict["lbs-cpu-energy-values"] == verdict["fcn-example-time-values"] == "by construction"
    assert verdict["fcn-speed-up-diverges"] == "no data"  # known is 16 to 64, not 4 to 16
    assert set(verdicts(found).values()) == {"no data"}
    one = next(one for one in found["claims"] if one["id"] == "scaled-small-samples-constant")
    assert "regimes-swapped" in one["errata"]
    assert one["published"]["effect"] == pytest.approx(0.386, abs=1e-3)  # 1.5620 over 1.1272 million per GPU hour
    assert one["published"]["low"] < one["published"]["effect"] < one["published"]["high"]
    assert sum(found["counts"]["published"].values()) == len(LEDGER["claim"])
    groups = {one.get("group", one["id"]) for one in LEDGER["claim"]}
    assert len(groups) <= sum(found["groups"]["published"].values()) < len(LEDGER["claim"])


def test_numbers_are_judged_as_observed_and_beyond(without_own_runs):
    judged = {one["id"]: one["published"] for one in without_own_runs["claims"]}
    start = judged["scaled-small-energy-per-sample-start"]  # 0.02165 does not round to 0.0221, but is 2 % from it
    assert start["observed"]["verdict"] == "contradicted" and start["verdict"] == "inconclusive"
    assert start["observed"]["allowed"] == [0.02205, 0.02215]
    time = judged["h100-time"]  # -24.7 % rounds to -25 %; single runs scatter
    assert time["observed"]["verdict"] == "supported" and time["verdict"] == "inconclusive"
    linear = judged["abstract-linear"]
    assert len(linear["coverage"]["of"]) == 11 and linear["coverage"]["with"] == ["R4", "R6"]


@pytest.mark.parametrize("intercept", [True, False])
def test_the_line_is_the_best_by_the_criterion_that_judges_it(intercept):
    random = np.random.default_rng(1)
    x = random.uniform(1, 100, (20, 6))
    y = (5 + 2 * x) * random.uniform(0.8, 1.2, x.shape)
    for i, found in enumerate(effects.deviation(y, x, intercept)):
        ones = np.ones(6)
        columns = np.column_stack([ones, x[i]]) if intercept else x[i][:, None]
        # Smallest t with |line / y - 1| <= t. Scaled by 1 / (1 - t^2), the line has the same t for |y / line - 1|.
        above = np.column_stack([columns / y[i][:, None], -ones])
        below = np.column_stack([-columns / y[i][:, None], -ones])
        bounds = [(None, None)] * columns.shape[1] + [(0, None)]
        cost = np.r_[np.zeros(columns.shape[1]), 1]
        best = linprog(cost, np.vstack([above, below]), np.r_[ones, -ones], bounds=bounds)
        assert found == pytest.approx(best.fun, rel=1e-6)


def test_own_runs_are_judged_in_a_column_of_their_own(replica, without_own_runs):
    verdict = verdicts(replica)
    # What the replica's formulas say: rates fall as n^-0.04, power follows the rate, errors rise beyond 8192.
    assert verdict["lbs-error-constant-to-8192"] == verdict["lbs-error-rises-rapidly"] == "supported"
    assert verdict["fixed-lbs-samples-decrease"] == verdict["fixed-lbs-power-decreases"] == "supported"
    assert verdict["lbs-speed-up-near-optimal"] == "contradicted"  # 32^0.04 is 1.149
    assert verdict["conclusion-h100-higher-power"] == "supported"
    time = next(one for one in replica["claims"] if one["id"] == "h100-time")["own"][0]
    assert time["effect"] == pytest.approx(1 / 1.35 - 1, abs=0.01)  # within 25 % to 30 %, but from single runs
    assert time["verdict"] == "inconclusive" and "estimate lies inside" in time["reason"]
    assert verdict["gbs-energy-minimum"] == "no data"
    for one, other in zip(replica["claims"], without_own_runs["claims"], strict=True):
        assert one["published"] == other["published"], "own runs must not touch the published column"


def test_stated_values_are_compared_one_by_one(replica):
    one = next(one for one in replica["claims"] if one["id"] == "lbs-cpu-energy-values")["own"][0]
    # Two sockets of 110 W for 100 epochs at 430 n^-0.04 x 256 / 264 samples/s: as stated for n = 1, not for n = 4.
    hours = 128116700 / (430 * 4**-0.04 * 256 / 264) / 4 / 3600
    assert one["effect"] == pytest.approx(0.22 * hours / 6.7 - 1, abs=0.01) and one["effect_of"] == "R1 n = 4"
    assert one["verdict"] == "contradicted"
    assert one["allowed"] == [-0.05, 0.05] and one["effects"] == 2


def test_a_power_law_grows_faster_with_each_doubling():
    rows = pd.DataFrame({"devices": [16, 32, 64, 128, 256]})
    doublings = np.log2(rows["devices"].to_numpy())

    def bend(values, **against):
        y, x = (np.tile(numbers, (1 + effects.DRAWS, 1)) for numbers in (values, doublings))
        return effects.TESTS["bend"]({"at": 64} | against, rows, y, *([x] if against else []))["value"].item()

    assert bend(2 ** (0.3 * doublings)) == pytest.approx(0, abs=1e-9)
    assert bend(2 ** (0.3 * doublings), against="doublings") > 0.05
    assert bend(3 + doublings, against="doublings") == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("idle_W, verdict", [(40.0, "supported"), (None, "contradicted")])
def test_the_measured_idle_power_is_the_baseline(synthetic, tmp_path, only, idle_W, verdict):
    only("h100-stays-above-baseline")
    sensor = {
        "id": "gpu0",
        "component": "gpu",
        "device": "0",
        "kind": "power",
        "provenance": "measured",
        "to_SI": 1.0,
        "wraps_at": None,
        "primary": True,
        "model": None,
        "notes": {},
    }
    run_dir = synthetic.write_run(
        tmp_path,
        config.make("fourcastnet"),
        "measured",
        time_s=600.0,
        parts_W={"gpu": 270.0},
        samples=False,
        settings={"dataset": "era5"},
        device_kind="gpu",
        device_name="NVIDIA H100",
        sensors=[sensor],
        idle_power_gpu_before_W=idle_W,
    )
    second, start = 10**9, 10**12
    events = [{"event": "rank_start", "rank": 0, "host": "synthetic", "t_mono_ns": start}]
    events += [{"event": "training_start", "rank": 0, "t_mono_ns": start}]
    events += [{"event": "training_end", "rank": 0, "t_mono_ns": start + 600 * second}]
    (run_dir / "events-rank0.jsonl").write_text("\n".join(json.dumps({"t_wall_ns": 0, **one}) for one in events) + "\n")
    lines = [{"header": "energynn-samples/1", "host": "synthetic", "pid": 1, "period_s": 0.5, "sensors": [sensor]}]
    for step in range(1201):  # up and down between 200 W and 300 W every 10 s, always far above the idle power
        power_W = 300.0 if step % 20 < 14 else 200.0
        lines.append({"t": start + step * second // 2, "w": 0, "v": [power_W]})
    (run_dir / "samples-synthetic.jsonl").write_text("\n".join(json.dumps(one) for one in lines) + "\n")
    assert verdicts(claims.evaluate(tmp_path))["h100-stays-above-baseline"] == verdict


@pytest.mark.parametrize("content", ["pipe", "no header", "a header alone"])
def test_samples_that_cannot_be_read_are_one_line_and_the_ledger_goes_on(synthetic, tmp_path, only, content, capsys):
    only("h100-stays-above-baseline")
    about = {"device_kind": "gpu", "device_name": "NVIDIA H100", "settings": {"dataset": "era5"}, "samples": False}
    made = config.make("fourcastnet")
    sensor = worlds.sensor("gpu0", "power")
    run_dir = synthetic.write_run(tmp_path, made, "measured", 600.0, {"gpu": 270.0}, sensors=[sensor], **about)
    path = run_dir / "samples-h.jsonl"
    if content == "pipe":
        os.mkfifo(path)
    else:
        header = {"header": "energynn-samples/1", "host": "h", "period_s": 0.5, "sensors": [sensor]}
        path.write_text(json.dumps({"t": 1, "w": 1, "v": [1.0]} if content == "no header" else header) + "\n")
    assert cli.main(["claims", "--data", str(tmp_path)]) == 0
    output, errors = capsys.readouterr()
    assert "h100-stays-above-baseline" in output
    lines = [line for line in errors.splitlines() if run_dir.name in line]
    assert len(lines) == 1 and "Traceback" not in errors


@pytest.mark.parametrize("provenance", ["estimated", "simulated"])
def test_energy_that_is_not_measured_never_supports(synthetic, tmp_path, provenance):
    found = claims.evaluate(synthetic.write_replica(tmp_path, provenance, series="R1 R4"))
    of_energy = [
        one for one in LEDGER["claim"] if "energy" in str(one.get("quantity")) or "power" in str(one.get("quantity"))
    ]
    verdict = verdicts(found)
    assert {verdict[one["id"]] for one in of_energy} == {"by construction", "no data"}
    assert verdict["lbs-energy-increases"] == "by construction"
    # Estimated energies leave times and errors alone; of a simulated run nothing is evidence.
    expected = {"estimated": "supported", "simulated": "by construction"}
    assert verdict["lbs-error-constant-to-8192"] == expected[provenance]
    if provenance == "simulated":
        assert not {"supported", "contradicted"} & set(verdict.values())


def test_small_runs_on_a_cpu_are_no_evidence(synthetic, tmp_path):
    found = claims.evaluate(synthetic.write_study(tmp_path, "measured"))
    assert set(verdicts(found).values()) == {"no data"}
    reasons = {one["own"][0]["reason"] for one in found["claims"]}
    assert len(reasons) == 1 and "cpu core with era5_ensemble" in reasons.pop()


def test_scatter_makes_a_small_effect_undecided(synthetic, tmp_path, only):
    only("lbs-speed-up-below-optimal")
    for n, minutes in ((32, 60.0), (256, 60.0 * 0.125 * 1.03)):  # 3 % more GPU hours, single runs: scatter of 4 % each
        settings = {"dataset": "imagenet", "devices": n, "local_batch_size": 256, "global_batch_size": 256 * n}
        settings["epochs"] = 100
        synthetic.write_run(
            tmp_path,
            config.make("resnet50"),
            "measured",
            time_s=60 * minutes,
            samples=False,
            settings=settings,
            parts_W={"gpu": 200.0 * n},
            device_kind="gpu",
            device_name="NVIDIA A100",
            devices=n,
            run_id=f"n{n}",
            dataset_samples=1281167,
        )
    found = claims.evaluate(tmp_path)
    one = next(one for one in found["claims"] if one["id"] == "lbs-speed-up-below-optimal")["own"][0]
    assert one["verdict"] == "inconclusive" and "estimate lies inside" in one["reason"]
    assert one["effect"] == pytest.approx(0.03, abs=1e-6) and one["low"] < 0 < one["high"]


def test_command_line_prints_the_same_twice(synthetic, tmp_path, capsys, monkeypatch):
    runs = str(synthetic.write_replica(tmp_path, series="R1"))
    printed = []
    for _ in range(2):
        assert cli.main(["claims", "--data", runs, "--json"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    found = json.loads(printed[0])
    assert found["tolerances"] == LEDGER["tolerances"]
    monkeypatch.setattr(claims, "evaluate", lambda data: found)
    assert cli.main(["claims", "--data", runs]) == 0
    text = capsys.readouterr().out
    assert "lbs-speed-up-near-optimal (Section 3.2.2, second paragraph)" in text and "base: n = 1" in text
    assert "erratum regimes-swapped" in text
    monkeypatch.undo()
    assert cli.main(["claims", "--data", "/no/such/folder"]) == 2


def test_an_interval_holds_95_percent_of_the_draws():
    drawn = np.random.default_rng(0).standard_normal((40_001, 1))
    drawn[0] = 0
    (interval,) = effects._effects(["a"], drawn).to_dict("records")
    assert np.mean((drawn[1:] >= interval["low"]) & (drawn[1:] <= interval["high"])) == pytest.approx(0.95, abs=1e-3)


def test_a_tolerance_makes_every_range_wider():
    claim = {"expect": "at least", "value": 10.0}
    (exact, _), (lenient, _) = (claims.allowed(claim, tolerance) for tolerance in (0.0, 0.5))
    assert exact == 10.0 and lenient == 9.5
