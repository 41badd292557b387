"""A run that stood still, as a suspended job does, in worlds of known energy; and what must not be taken for it."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from energynn.measure import accounting, stillness
from tests.measure import worlds

PERIOD_S = 0.04
AHEAD_S = 5000.0  # of the second host's clock
TRAINING_S, FORWARD_S = 12.0, 8.0  # without the suspensions; then comes the evaluation


@dataclass(frozen=True)
class Suspended:
    """A load that stands still from time to time, and goes on where it stopped; the machine is idle meanwhile.

    spans: (from, to) in s of this host.
    """

    load: worlds.Load
    spans: tuple
    idle_W: float = 60.0

    def still_s(self, t):
        """How long it has stood still until t."""
        return sum(np.clip(t, begin, end) - begin for begin, end in self.spans)

    def energy_J(self, t):
        return self.load.energy_J(t - self.still_s(t)) + self.idle_W * self.still_s(t)

    def power_W(self, t):
        is_still = sum((t >= begin) & (t < end) for begin, end in self.spans) > 0
        return np.where(is_still, self.idle_W, self.load.power_W(t - self.still_s(t)))


@pytest.fixture
def random(request):
    return np.random.default_rng(sum(request.node.name.encode()))


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def line(t, event, **more):
    return {"t_mono_ns": int(t * 1e9), "t_wall_ns": int(t * 1e9), "event": event, **more}


def write_host(folder, random, spans, kind="counter", host="h", ranks=(0, 1), sampled=None, told=None, **more):
    """The raw files of one host whose processes stood still; returns its load.

    sampled, told: when its sampler, and each of its ranks, did not run, where that is not ``spans``.
    """
    spans = tuple(spans)
    start_s, evaluation_s, end_s = (clock_s(t, spans) for t in (101.0, 101.0 + FORWARD_S, 101.0 + TRAINING_S))
    shape = dict(begin_s=101.0, end_s=101.0 + TRAINING_S)
    load = worlds.busy_load(random, **shape) if kind == "busy" else worlds.random_load(random, **shape)
    load = Suspended(load, spans, load.idle_W)
    ahead_s = AHEAD_S if host == "second" else 0.0
    _write_samples(folder, random, load, kind, host, end_s, ahead_s, spans if sampled is None else sampled, **more)
    for rank in ranks:
        own = spans if told is None else told[rank]
        events = [
            line(100.0, "rank_start", rank=rank, host=host, world_size=len(ranks)),
            line(start_s, "training_start"),
        ]
        for begin, end in own:
            cpu_s = more.get("cores_busy", 0.0) * (end - begin) + random.uniform(0, 0.15)
            from_ns = int((begin - random.uniform(0, 0.1) + ahead_s) * 1e9)
            events.append(line(end + random.uniform(0, 0.03), stillness.EVENT, from_ns=from_ns, cpu_s=cpu_s))
        events.append(line(end_s, "training_end", metrics={}))
        for event in events:
            event["t_mono_ns"] += int(ahead_s * 1e9)
        write_lines(folder / f"events-rank{rank}.jsonl", sorted(events, key=lambda event: event["t_mono_ns"]))
        lengths_us = [int((evaluation_s - start_s) * 1e6), int((end_s - evaluation_s) * 1e6)]
        phases = {"t": int((start_s + ahead_s) * 1e9), "phase": [0, 1], "gap_us": [0, 0], "length_us": lengths_us}
        write_lines(folder / f"phases-rank{rank}.jsonl", [{"names": ["forward", "evaluation"]}, phases])
    return load


def clock_s(t, spans):
    """What the clock shows after t s in which nothing stood still."""
    for begin, end in spans:
        t += end - begin if t >= begin else 0.0
    return t


def _write_samples(folder, random, load, kind, host, end_s, ahead_s, spans, reading=False, **_):
    t = worlds.instants_s(random, 100, end_s + 1 - 100, PERIOD_S)
    stopped = np.zeros(len(t), dtype=bool)
    for begin, end in spans:
        stopped |= (t >= begin) & (t < end)
    back_s = [end + random.uniform(0, 0.02) for _, end in spans]  # it is late, and reads at once
    t = np.sort(np.append(t[~stopped], back_s))
    (samples,) = worlds._read(kind, load, t, PERIOD_S, random)
    lines = [{**samples.header, "host": host, "header": "energynn-samples/1"}]
    lines.append({"t": int((100 + ahead_s) * 1e9), "w": 0, "clock": clock(host, ahead_s)})
    for instant, values in zip(t, samples.readings, strict=True):
        lines.append({"t": int((instant + ahead_s) * 1e9), "w": int(instant * 1e9), "d": 0, "v": list(values)})
    for begin, end in spans if reading else ():  # stopped between its first clock and its second
        half_s, middle = (end - begin) / 2, next(line for line in lines[2:] if line["t"] > begin * 1e9)
        lines.append({"t": int((begin + half_s) * 1e9), "w": 0, "d": int(2e6 * half_s), "v": middle["v"]})
    write_lines(folder / f"samples-{host}.jsonl", [*lines[:2], *sorted(lines[2:], key=lambda line: line["t"])])


def clock(host, ahead_s):
    return dict(host=host, reference="h", offset_ns=int(-ahead_s * 1e9), uncertainty_ns=1000, method="exchange")


def truth(found, load):
    """Energy of the load within the windows that a record tells, and outside of what is known to have stood still."""
    told_J = 0.0
    for segment in found["segments"]:
        begin_s = segment["start_wall_ns"] / 1e9
        told_J += float(np.diff(load.energy_J(np.array([begin_s, begin_s + segment["training_time_s"]])))[0])
    return told_J, load.load.energy_J(101 + TRAINING_S) - load.load.energy_J(101.0)


SPANS = {"once": [(105.0, 118.0)], "hours": [(104.0, 4 * 3600.0)], "twice": [(103.3, 106.0), (108.0, 131.5)]}
SPANS |= {"shortly after the start": [(101.3, 110.0)], "in the evaluation": [(110.6, 120.0)]}
SPANS |= {"shortly before the end": [(112.6, 120.0)]}


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("kind", worlds.KINDS)
def test_neither_time_nor_energy_of_a_suspension_counts(tmp_path, random, kind, spans):
    load = write_host(tmp_path, random, spans, kind)
    found = accounting.account(tmp_path)
    lost_s = 2 * PERIOD_S * len(spans)  # at most one period before and one after
    assert TRAINING_S - lost_s < found["training_time_s"] <= TRAINING_S
    told_J, all_J = truth(found, load)
    assert found["energy_total_J"] == pytest.approx(told_J, abs=2 * found["energy_total_statistical_J"] + 1e-6)
    high_W = load.load.high_W + 20
    assert found["energy_total_J"] == pytest.approx(
        all_J, abs=2 * found["energy_total_statistical_J"] + lost_s * high_W
    )
    assert found["coverage"] > 0.999 and found["samples_in_training"] > 0.9 * TRAINING_S / PERIOD_S
    for number, (begin, end) in enumerate(spans, start=1):
        (flag,) = [flag for flag in found["flags"] if flag.startswith(f"segment {number + 1}: the run stood still")]
        assert float(flag.split(" for ")[1].split(" s")[0]) == pytest.approx(end - begin, abs=2 * PERIOD_S + 0.06)
        assert found["segments"][number]["gap_before_s"] == pytest.approx(end - begin, abs=2 * PERIOD_S)
    assert [segment["finished"] for segment in found["segments"]] == [False] * len(spans) + [True]
    for phase, seconds in (("forward", FORWARD_S), ("evaluation", TRAINING_S - FORWARD_S)):
        of_ranks = [entry["time_s"] for entry in found["energy_phases"] if entry["phase"] == phase]
        assert of_ranks == pytest.approx([seconds] * 2, abs=lost_s)
        assert [rank[f"{phase}_s"] for rank in found["phases"]] == pytest.approx(of_ranks, abs=1e-5)


def test_a_suspension_before_the_training_costs_nothing(tmp_path, random):
    load = write_host(tmp_path, random, [(100.5, 110.5)])
    found = accounting.account(tmp_path)
    assert found["training_time_s"] == pytest.approx(TRAINING_S) and len(found["segments"]) == 1
    assert not found["flags"] and found["energy_total_J"] == pytest.approx(
        truth(found, load)[1], abs=2 * found["energy_total_statistical_J"]
    )


def test_what_runs_briefly_between_two_suspensions_does_not_count(tmp_path, random):
    load = write_host(tmp_path, random, [(105.0, 110.0), (110.3, 116.0)])
    found = accounting.account(tmp_path)
    assert len(found["segments"]) == 2 and found["coverage"] > 0.999
    assert found["training_time_s"] == pytest.approx(TRAINING_S - 0.3, abs=2 * PERIOD_S)
    assert found["energy_total_J"] == pytest.approx(truth(found, load)[0], abs=2 * found["energy_total_statistical_J"])


def test_a_run_that_ends_as_soon_as_it_runs_again_ends_where_it_was_suspended(tmp_path, random):
    load = write_host(tmp_path, random, [(105.0, 118.0)])
    for path, most in [
        (tmp_path / "samples-h.jsonl", 118.1),
        *((tmp_path / f"events-rank{n}.jsonl", 118.1) for n in (0, 1)),
    ]:
        rows = [json.loads(row) for row in path.read_text().splitlines()]
        write_lines(path, [row for row in rows if row.get("t", row.get("t_mono_ns", 0)) < most * 1e9])
    found = accounting.account(tmp_path)
    assert len(found["segments"]) == 1 and found["training_time_s"] == pytest.approx(4.0, abs=PERIOD_S)
    assert found["coverage"] > 0.999 and "doubtful_share" not in found
    assert found["energy_total_J"] == pytest.approx(truth(found, load)[0], abs=2 * found["energy_total_statistical_J"])


ONE = [(105.0, 118.0)]
ODD = ({}, {"from_ns": "x", "cpu_s": 0.0}, {"from_ns": 1, "cpu_s": None}, {"from_ns": 1 << 80, "cpu_s": -1e300})


@pytest.mark.parametrize("fields", ODD, ids=str)
def test_odd_marks_and_files_that_were_cut_excuse_nothing_and_break_nothing(tmp_path, random, fields):
    write_host(tmp_path, random, ONE, told={0: ONE, 1: []})
    with open(tmp_path / "events-rank1.jsonl", "a") as file:
        file.write(json.dumps(line(118.0, stillness.EVENT, **fields)) + "\n")
    assert accounting.account(tmp_path)["coverage"] < 0.8
    (tmp_path / "samples-h.jsonl").write_text('{"hea')
    assert "coverage" not in accounting.account(tmp_path)
    (tmp_path / "samples-h.jsonl").unlink()
    for path in tmp_path.glob("events-*"):
        path.write_text("".join(row for row in path.read_text().splitlines(True) if "rank_start" not in row))
    assert "coverage" not in accounting.account(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", worlds.KINDS)
def test_intervals_hold_for_suspended_runs(tmp_path, random, kind):
    inside, count = 0, 300
    for _ in range(count):
        begin = random.uniform(102, 110)
        load = write_host(tmp_path, random, [(begin, begin + random.uniform(2.5, 60))], kind, ranks=(0,))
        found = accounting.account(tmp_path)
        inside += abs(found["energy_total_J"] - truth(found, load)[0]) <= found["energy_total_statistical_J"] + 1e-6
    print(f"{kind}: {inside} of {count} within the interval")
    assert inside / count > 0.85  # of a load that ends with the window, as in test_uncertainty


NO_SUSPENSION = {
    "the sampler alone was stopped": dict(told={0: [], 1: []}),
    "the sampler and one of two ranks": dict(told={0: ONE, 1: []}),
    "the sampler stopped, the ranks another time": dict(told={0: [(107.0, 108.0)], 1: [(119.0, 125.0)]}),
    "the ranks computed, only their threads stood still": dict(cores_busy=0.9),
    "the sampler stopped far longer than the ranks": dict(told={rank: [(105.0, 107.5)] for rank in (0, 1)}),
}


@pytest.mark.parametrize("case", NO_SUSPENSION.values(), ids=NO_SUSPENSION)
def test_a_sampler_that_alone_stands_still_leaves_a_gap(tmp_path, random, case):
    write_host(tmp_path, random, ONE, sampled=ONE, **case)
    found = accounting.account(tmp_path)
    assert found["coverage"] < 0.8 and any("of the time is in gaps" in flag for flag in found["flags"])


def test_ranks_that_wait_for_a_disk_while_samples_are_taken_do_not_stand_still(tmp_path, random):
    write_host(tmp_path, random, ONE, sampled=[])
    found = accounting.account(tmp_path)
    assert found["training_time_s"] == pytest.approx(TRAINING_S + 13) and len(found["segments"]) == 1
    assert found["coverage"] > 0.999 and not found["flags"]


def test_a_sample_that_was_being_read_is_of_neither_side(tmp_path, random):
    load = write_host(tmp_path, random, ONE, reading=True)
    found = accounting.account(tmp_path)
    assert len(found["segments"]) == 2 and found["coverage"] > 0.999
    told_J = truth(found, load)[0]
    assert found["energy_total_J"] == pytest.approx(told_J, abs=2 * found["energy_total_statistical_J"])


@pytest.mark.parametrize("second", ["with it", "a second later", "not"])
def test_of_two_hosts_both_leave_out_the_same_time(tmp_path, random, second):
    """Where one host alone is stopped, the other waits for it: the run stood still."""
    own = {"with it": ONE, "a second later": [(106.0, 119.0)], "not": []}[second]
    for host, spans, rank in (("h", ONE, 0), ("second", own, 1)):
        waits = {"spans": spans, "ranks": (rank,), "host": host}
        if second == "not" and host == "second":
            waits |= {"spans": ONE, "sampled": [], "told": {rank: []}}
        write_host(tmp_path, random, **waits)
    found = accounting.account(tmp_path)
    still_s = 14 if second == "a second later" else 13
    assert found["training_time_s"] == pytest.approx(TRAINING_S + 13 - still_s, abs=3 * PERIOD_S)
    assert len(found["segments"]) == 2 and found["coverage"] > 0.999
    assert found["segments"][1]["gap_before_s"] == pytest.approx(still_s, abs=3 * PERIOD_S)
    times_s = [sum(e["time_s"] for e in found["energy_phases"] if e["rank"] == rank) for rank in (0, 1)]
    assert times_s == pytest.approx([found["training_time_s"]] * 2, abs=1e-3), "each host counts the same time"


def test_a_host_whose_clock_was_never_measured_excuses_nothing(tmp_path, random):
    for host, rank in (("h", 0), ("second", 1)):
        write_host(tmp_path, random, ONE, host=host, ranks=(rank,))
        path = tmp_path / f"samples-{host}.jsonl"
        path.write_text("".join(row for row in path.read_text().splitlines(True) if '"clock"' not in row))
    assert accounting.account(tmp_path)["coverage"] < 0.8
