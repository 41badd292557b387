"""Each judge shown right and wrong by the files of a run: sensors and loads whose truth is known."""

import json
import re
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from energynn.launch import command
from energynn.measure import kernel, samples, stream
from energynn.measure.account import account as account_of
from energynn.measure.account import power_trace
from energynn.measure.energy import THRESHOLDS
from tests.measure import worlds
from tests.measure.worlds import Load, sensor

T0 = 10**12
LIMIT = {"limit_W": 700.0, "uuid": "GPU-0"}


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(folder, sensors, t_s, span_s, states=(), period_s=0.04, **header):
    """Write what sampler and rank leave; sensors: (description, readings); a failed one is None."""
    head = {"header": "energynn-samples/1", "host": "h", "period_s": period_s} | header
    head["sensors"] = [about for about, _ in sensors]
    columns = [np.where(np.isfinite(v), v, None) for _, v in sensors]
    lines = [head]
    lines += [
        {"t": T0 + int(t * 1e9), "states": {name: told}} for t, name, told in states
    ]
    for t, *values in zip(t_s, *columns, strict=True):
        lines.append({"t": T0 + int(t * 1e9), "v": values})
    write_lines(folder / "samples-h.jsonl", lines)
    marks = [("rank_start", 0.0), ("training_start", span_s[0])]
    marks += [("training_end", span_s[1])]
    clocks = [
        {"t_mono_ns": T0 + int(t * 1e9), "t_wall_ns": int(t * 1e9)} for _, t in marks
    ]
    events = [
        {"event": name, "host": "h", "rank": 0} | at
        for (name, _), at in zip(marks, clocks, strict=True)
    ]
    write_lines(folder / "events-rank0.jsonl", events)


def account(folder, thresholds=None):
    return account_of(samples.events_of_segments(folder), thresholds)


def letters(found):
    return {reason[0] for reason in found["doubts"]}


def gpu(kind, update_s=0.02, **more):
    about = {"update_s": update_s, "notes": LIMIT} | more
    return sensor(f"gpu_0_{kind}", kind) | about


def cpu(**more):
    return sensor("cpu_0", "energy", "cpu", **{"update_s": 0.001} | more)


def joules(watts, t_s):
    return np.append(0.0, np.cumsum(np.diff(t_s) * watts[1:]))


def beside(t_s):
    """A CPU of 100 W, which is healthy."""
    return cpu(), 100.0 * t_s


T = np.arange(0, 24, 0.04)
SPAN = (2.0, 22.0)
NOISE = np.random.default_rng(3).normal(0, 0.05, len(T)).round(3)


# ------------------------------------------------------------------------------------------- long


def mixed(random, t_s):
    """Four sensors under a changing load: a counter that wraps and fails for a while, its power,
    an averaged power and a busy time."""
    load = Load("square", 60.0, 400.0, 3.7)
    made = []
    for number, kind in enumerate(("counter", "power", "mean power", "busy")):
        about, values = worlds.readings_of(kind, load, t_s, random)
        about |= {"id": f"{number}", "device": f"{number}", "notes": {"limit_W": 700.0}}
        about |= (
            {"notes": about["notes"] | {"power": "an average over 1 s"}}
            if number == 2
            else {}
        )
        made.append((about, values / about["to_SI"]))
    about, values = made[0]
    about["wraps_at"] = 2e6
    fails = (t_s > 40) & (t_s < 47)
    made[0] = about, np.where(fails, np.nan, (values + 1.2e6) % 2e6)
    about, values = made[1]
    made[1] = about, np.where(np.arange(len(t_s)) % 50 == 0, np.nan, values)
    return made


@pytest.mark.parametrize("piece", [150, 400, 1111])
def test_a_file_read_in_pieces_gives_what_it_gives_at_once(
    tmp_path, monkeypatch, piece
):
    random = np.random.default_rng(piece)
    t_s = worlds.instants_s(random, 0.0, 120, 0.04)
    write_run(tmp_path, mixed(random, t_s), t_s, (5.0, 113.0))
    whole, traces = account(tmp_path), power_trace(tmp_path)
    monkeypatch.setattr(samples, "PIECE", piece)
    monkeypatch.setattr(stream, "PIECE", piece)
    monkeypatch.setattr(stream, "MARGIN", 100)
    parts = account(tmp_path)
    # of the power every 50th reading fails
    assert parts["sensors"][1]["coverage"] == pytest.approx(0.96, abs=0.01)
    assert parts["doubts"] == whole["doubts"]
    for one, other in zip(parts["sensors"], whole["sensors"], strict=True):
        assert one["samples"] == other["samples"]
        assert one["coverage"] == pytest.approx(other["coverage"], rel=1e-9)
        assert one["energy_J"] == pytest.approx(other["energy_J"], rel=1e-9)
        assert one["bound_J"] == pytest.approx(other["bound_J"], rel=1e-6)
    for name, (t, watts) in power_trace(tmp_path).items():
        assert t == pytest.approx(traces[name][0])
        assert watts == pytest.approx(traces[name][1], rel=1e-6)


def test_a_gap_of_years_costs_nothing(tmp_path):
    t_s = np.array([0, 1e8])
    write_run(
        tmp_path, [(gpu("power"), np.full(2, 100.5)), beside(t_s)], t_s, (1, 1e8 - 1)
    )
    tracemalloc.start()
    found, traces = account(tmp_path), power_trace(tmp_path)
    peak_B = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert letters(found) == {"G"} and found["energy_cpu_J"] == pytest.approx(
        1e10, rel=1e-6
    )
    assert peak_B < 3e8 and 1e5 < len(traces["cpu_0"][0]) <= 10**6


PEAK = """
import re, sys
from pathlib import Path
import energynn.cli, energynn.records
from energynn.measure.account import account
from energynn.measure.samples import events_of_segments
found = account(events_of_segments(Path(sys.argv[1])))
peak_kB = re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]
print(int(peak_kB) / 1024, found["energy_total_J"])
"""


@pytest.mark.slow
def test_four_times_the_samples_need_no_more_memory(tmp_path):
    peaks_MB = []
    for name, seconds in (("short", 6_000.0), ("long", 24_000.0)):
        folder = tmp_path / name
        folder.mkdir()
        t_s = np.arange(0, seconds, 0.04)
        many = [
            (gpu("energy", device=str(n), notes={}, id=f"{n}"), (300.0 + n) * t_s)
            for n in range(8)
        ]
        write_run(folder, many, t_s, (2.0, seconds - 2.0))
        done = subprocess.run(
            [sys.executable, "-c", PEAK, folder], capture_output=True, text=True
        )
        peak_MB, energy_J = map(float, done.stdout.split())
        assert energy_J == pytest.approx(8 * 303.5 * (seconds - 4.0), rel=1e-6), (
            done.stderr
        )
        peaks_MB.append(peak_MB)
    assert peaks_MB[1] < 1.1 * peaks_MB[0] and peaks_MB[1] < 300


def test_times_are_known_where_samples_cannot_be_read(tmp_path):
    write_run(tmp_path, [beside(T)], T, SPAN)
    (tmp_path / "samples-g.jsonl").write_text('{"host":"g"}\n')
    found = account(tmp_path)
    assert found["training_time_s"] == 20 and letters(found) == {"D"}
    assert "samples-g.jsonl" in found["doubts"][0]


# ---------------------------------------------------------------------- movement, and what is used

IDLE, BUSY = ({"is_busy": word} for word in (False, True))
UNKNOWN = None
IDLE_CARD = np.where(T < 7, 8.41, 8.50)  # fact 07
FROZEN = np.where(T < 12, 300 + NOISE, 301.23)
SLEEPING = np.where((T > 8) & (T < 14), 3.5, 100) + NOISE
STATES = {
    "idle": [(0, IDLE)],
    "busy": [(0, BUSY)],
    "untold": [],
    "later": [(0, IDLE), (9, BUSY)],
}
STATES |= {"only after": [(0, IDLE), (23, BUSY)], "only before": [(0, BUSY), (1, IDLE)]}


@pytest.mark.parametrize(
    "kind, values, states, is_doubted",
    [
        ("energy", 3.0 * T, "idle", False),
        ("energy", 1.5 * T, "only after", False),
        ("energy", 1.5 * T, "only before", False),
        ("energy", 3.0 * T, "busy", True),
        ("energy", 3.0 * T, "later", True),
        ("energy", 3.0 * T, "untold", True),
        ("power", 3 + NOISE, "idle", False),
        ("power", 0 * T, "idle", False),
        ("power", 0 * T, "busy", True),
        ("power", IDLE_CARD, "idle", False),
        ("power", IDLE_CARD, "untold", False),
        ("power", FROZEN, "untold", True),
        ("power", FROZEN, "busy", True),
        ("power", SLEEPING, "busy", False),
        (
            "power",
            np.where((T > 9) & (T < 10), 0, 200) + abs(NOISE) * (T < 9),
            "busy",
            True,
        ),
        ("energy", joules(np.where(T < 9, 1.5, 100), T), "later", False),
        ("energy", joules(np.where(T < 12, 300, 0), T), "busy", True),
        ("energy", joules(np.where(T < 12, 300, 0), T), "idle", False),
    ],
)
def test_movement_is_asked_of_what_is_used(tmp_path, kind, values, states, is_doubted):
    notes = {"limit_W": 300.0, "uuid": "GPU-0"}
    about = gpu(kind, notes=notes)
    told = [(t, about["id"], word) for t, word in STATES[states]]
    write_run(tmp_path, [(about, values), beside(T)], T, SPAN, told)
    found = account(tmp_path)
    assert letters(found) == ({"S"} if is_doubted else set()), found["doubts"]
    assert ("energy_total_J" in found) != is_doubted


def test_a_gpu_that_a_rank_names_is_used_whatever_it_says(tmp_path):
    about = gpu("energy")
    write_run(tmp_path, [(about, 3.0 * T)], T, SPAN, [(0, about["id"], IDLE)])
    assert letters(account(tmp_path)) == set()
    path = tmp_path / "events-rank0.jsonl"
    lines = [
        json.loads(line) | {"gpu_uuid": "0"} for line in path.read_text().splitlines()
    ]
    write_lines(path, lines)
    assert letters(account(tmp_path)) == {"S"}


# ------------------------------------------------------------------------------------------ power


@pytest.mark.parametrize(
    "about, watts, told_W, is_doubted",
    [
        (gpu("power", notes={"limit_W": 100.0}), 150 + NOISE, [], True),
        (gpu("power", notes={"limit_W": 100.0}), 150 + NOISE, [150.0], False),
        (gpu("power", notes={}), 150 + NOISE, [100.0, 140.0, 90.0], False),
        (gpu("power", notes={}), 150 + NOISE, [100.0, 110.0, 90.0], True),
        (cpu(notes={"limit_W": 15.0}), np.where(T < 14, 60, 14), [], False),
        (cpu(notes={"limit_W": 15.0}), 130 + 0 * T, [], True),
        (cpu(), 2500 + 0 * T, [], True),
    ],
)
def test_power_is_held_against_the_largest_limit_that_was_told(
    tmp_path, about, watts, told_W, is_doubted
):
    values = joules(watts, T) if about["kind"] == "energy" else watts
    told = [(5 * n, about["id"], {"limit_W": limit}) for n, limit in enumerate(told_W)]
    write_run(tmp_path, [(about, values)], T, SPAN, told)
    assert letters(account(tmp_path)) == ({"P"} if is_doubted else set())


@pytest.mark.parametrize("watts, is_doubted", [(15, False), (30, True)])
def test_half_a_minute_is_held_against_a_cpus_limit(tmp_path, watts, is_doubted):
    t_s = np.arange(0, 70, 0.1)
    short_W = np.where((t_s % 40) < 15, 2 * watts, 0) + (t_s % 40 >= 15) * watts / 5
    load_W = np.full(len(t_s), watts) if is_doubted else short_W
    about = cpu(notes={"limit_W": 15.0})
    write_run(tmp_path, [(about, joules(load_W, t_s))], t_s, (2, 68), period_s=0.1)
    assert letters(account(tmp_path)) == ({"P"} if is_doubted else set())


# ------------------------------------------------------------------------------------------- gaps


def late(by_s, every_s, until_s=62.0):
    t_s = np.arange(0, until_s, 0.04)
    return t_s[(t_s - 1) % every_s >= by_s]


@pytest.mark.parametrize(
    "by_s, every_s", [(0.3, 3.0), (0.6, 30.0), (0.4, 1.0), (2.0, 20.0)]
)
def test_a_counter_loses_nothing_in_a_gap_and_a_power_does(tmp_path, by_s, every_s):
    t_s = late(by_s, every_s)
    load = Load("square", 20.0, 300.0, 3.7)
    write_run(tmp_path, [(cpu(), load.energy_J(t_s))], t_s, (5.5, 58.5))
    found = account(tmp_path)
    true_J = load.energy_J(58.5) - load.energy_J(5.5)
    assert letters(found) == set()
    assert abs(found["energy_total_J"] - true_J) <= found["energy_total_bound_J"]
    assert found["energy_total_bound_J"] < 0.02 * true_J
    write_run(tmp_path, [(gpu("power"), load.power_W(t_s) + 0.5)], t_s, (5.5, 58.5))
    assert letters(account(tmp_path)) == {"G"}


@pytest.mark.parametrize(
    "from_s, to_s", [(1.4, 3.0), (21.5, 22.8), (20.0, 99.0), (0.0, 4.0)]
)
def test_a_gap_at_an_edge_counts_for_a_counter_too(tmp_path, from_s, to_s):
    t_s = T[(T < from_s) | (T > to_s)]
    write_run(tmp_path, [beside(t_s)], t_s, SPAN)
    assert letters(account(tmp_path)) == {"G"}


def test_a_counter_that_can_go_round_in_a_gap_is_not_believed(tmp_path):
    t_s = T[(T < 5) | (T > 15)]
    for wraps_at, doubts in ((1e6, set()), (1e4, {"G"})):
        write_run(tmp_path, [(cpu(wraps_at=wraps_at), 100 * t_s)], t_s, SPAN)
        assert letters(account(tmp_path)) == doubts


def test_slow_sensors_are_told_a_period_that_they_can_keep(tmp_path):
    """Eight GPUs of 20 ms for each reading: 0.32 s a sample, whatever was asked for."""
    t_s = np.arange(0, 200, 0.32)
    about = [gpu("power", notes={}, id=f"g{n}", device=f"{n}") for n in range(8)]
    watts = 300.5 + np.sin(np.arange(len(t_s)))
    write_run(tmp_path, [(one, watts) for one in about], t_s, (2, 198))
    (period_s,) = set(
        re.findall(r"--period (\S+) ", " ".join(account(tmp_path)["doubts"]))
    )
    t_s = np.arange(0, 200, max(float(period_s), 0.32))
    watts = 300.5 + np.sin(np.arange(len(t_s)))
    write_run(
        tmp_path,
        [(one, watts) for one in about],
        t_s,
        (2, 198),
        period_s=float(period_s),
    )
    found = account(tmp_path)
    assert letters(found) == set() and found["samples_in_training"] >= 60


@pytest.mark.parametrize(
    "time_s, samples, period_s, says",
    [
        (2.0, 50, 0.04, "--period 0.01"),
        (2.0, 7, 0.04, "run it for 22 s or longer"),
        (0.3, 8, 0.04, "run it for 2.9 s or longer"),
        (40.0, 40, 1.0, "--period 0.01"),
    ],
)
def test_too_few_samples_are_told_what_gives_more(time_s, samples, period_s, says):
    record = {"training_time_s": time_s, "sampling_period_s": period_s}
    assert says in command._more_samples(record, samples)


@pytest.mark.parametrize(
    "files, cpus",
    [
        ({"cpu.max": "20000 100000\n"}, 0.2),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_a_quota_is_named_where_readings_are_missing(
    tmp_path, monkeypatch, files, cpus
):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(kernel, "CGROUP", tmp_path)
    assert kernel.quota_cpus() == cpus
    t_s = late(0.5, 2.0, 24.0)
    watts = 300.5 + np.sin(t_s)
    write_run(tmp_path, [(gpu("power"), watts)], t_s, SPAN, quota_cpus=cpus)
    (reason,) = account(tmp_path)["doubts"]
    assert (f"quota of {cpus} CPUs" in reason) == (cpus is not None)


# -------------------------------------------------------------------------------------- agreement


@pytest.mark.parametrize(
    "seconds, share, is_doubted",
    [
        (5, 0.92, False),
        (5, 0.88, True),
        (8, 0.95, False),
        (8, 0.92, True),
        (8, 0.90, True),
        (8, 1.08, True),
        (20, 0.97, False),
        (20, 0.94, True),
    ],
)
def test_a_counter_may_differ_by_the_lag_of_its_power(
    tmp_path, seconds, share, is_doubted
):
    """The counter shows a share of the truth, the averaged power all of it."""
    t_s = np.arange(0, seconds + 8, 0.04)
    load = Load("sine", 60.0, 650.0, 9.0)
    random = np.random.default_rng(1)
    mean = gpu("power", primary=False, checks="gpu_0_energy")
    mean["notes"] = LIMIT | {"power": "an average over 1 s"}
    pair = [(gpu("energy"), share * load.energy_J(t_s))]
    pair.append((mean, worlds.averaged_W(random, load, t_s)))
    write_run(tmp_path, pair, t_s, (4.0, 4.0 + seconds))
    found = account(tmp_path)
    true_J = load.energy_J(4.0 + seconds) - load.energy_J(4.0)
    assert letters(found) == ({"C"} if is_doubted else set()), found["doubts"]
    off_J = abs(found["energy_gpu_J"] - true_J)
    assert off_J <= found["energy_gpu_bound_J"] + 0.02 * true_J


# -------------------------------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    "about, values, name, number",
    [
        (gpu("energy"), 6.0 * T, "least_share", 0.0),
        (gpu("energy"), 4.0 * T, "least_gpu_W", 1.0),
        (gpu("energy"), 100 * (T // 1), "counter_still_s", 9.0),
        (gpu("power"), FROZEN, "power_still_s", 30.0),
        (gpu("power"), 900 + NOISE, "over_limit_gpu", 2.0),
        (cpu(), 0.5 * T, "least_cpu_W", 0.1),
        (cpu(notes={"limit_W": 15.0}), 130.0 * T, "peak_over_limit", 9.0),
        (cpu(), 2500.0 * T, "most_cpu_W", 3000.0),
    ],
)
def test_a_refusal_names_the_threshold_that_ends_it(
    tmp_path, about, values, name, number
):
    write_run(tmp_path, [(about, values)], T, SPAN)
    others = {"least_share": 0.0} if name == "least_gpu_W" else {}
    (reason,) = account(tmp_path, others)["doubts"]
    assert (
        name in re.findall(r"\w+", reason[reason.rindex("(") :]) and name in THRESHOLDS
    )
    changed = {"least_gpu_W": 1.0} if name == "least_share" else {}
    assert account(tmp_path, others | changed | {name: number})["doubts"] == []
