"""Each judge shown right and wrong by a run's files: sensors and loads whose truth is known."""

import sys
import tracemalloc

import numpy as np
import pytest

from energynn.launch import command
from energynn.measure import samples, stream
from energynn.measure.account import read_power_trace
from energynn.measure.energy import THRESHOLDS
from tests.conftest import record_of
from tests.measure import healthy_machines, worlds
from tests.measure.worlds import Load, sensor
from tests.processes import printed
from tests.run_files import judged, letters, write_samples, write_training

LIMIT = {"limit_W": 700.0, "uuid": "GPU-0"}
T = np.arange(0, 24, 0.04)
SPAN = (2.0, 22.0)
NOISE = np.random.default_rng(3).normal(0, 0.05, len(T)).round(3)


def judge(folder, *columns, t_s=T, span_s=SPAN, thresholds=None, **more):
    """Write a run on these sensors (description, readings): what our account makes of it."""
    write_samples(folder, t_s, columns, **more)
    write_training(folder, *span_s)
    return judged(folder, thresholds)


def gpu(kind, **more):
    about = {"update_s": 0.02, "notes": LIMIT} | more
    return sensor(f"gpu_0_{kind}", kind) | about


def cpu(**more):
    return sensor("cpu_0", "energy", "cpu", **{"update_s": 0.001} | more)


def joules(watts, t_s=T):
    return np.append(0.0, np.cumsum(np.diff(t_s) * watts[1:]))


def beside(t_s=T):
    """A CPU of 100 W, which is healthy."""
    return cpu(), 100.0 * t_s


# ------------------------------------------------------------------------------------------- long

BOTH = {"W": ["square", 60, 400, 3.7, 60], "limit_W": 700}
LONG = {  # a counter that goes round, its power, a mean power and a busy time
    "name": "long",
    "seconds": 108.0,
    "devices": [
        BOTH | {"on": "gpu", "has": ["counter", "power"], "wraps_J": 2000.0},
        BOTH | {"on": "gpu", "has": ["mean power"]},
        BOTH | {"on": "cpu", "has": ["busy"]},
    ],
}


@pytest.mark.parametrize(
    "piece, liar, fault",
    [
        (150, "gpu0", "lost for 2 s"),
        (400, "gpu1", "50 of every 500 ms fail"),
        (1111, "gpu0", "30 % of reads fail"),
    ],
)
def test_a_file_read_in_pieces_gives_what_it_gives_at_once(
    tmp_path, monkeypatch, piece, liar, fault
):
    healthy_machines.write(tmp_path, LONG, liar, fault)
    whole, traces = judged(tmp_path), read_power_trace(tmp_path)
    monkeypatch.setattr(samples, "PIECE_SAMPLES", piece)
    monkeypatch.setattr(stream, "PIECE_SAMPLES", piece)
    monkeypatch.setattr(stream, "MARGIN_READINGS", 100)
    parts = judged(tmp_path)
    assert parts["doubts"] == whole["doubts"] and parts["coverage"] < 1
    for one, other in zip(parts["sensors"], whole["sensors"], strict=True):
        assert one.samples == other.samples
        assert one.coverage == pytest.approx(other.coverage, rel=1e-9)
        assert one.energy_J == pytest.approx(other.energy_J, rel=1e-9)
        assert one.bound_J == pytest.approx(other.bound_J, rel=1e-6)
    for name, (t, watts) in read_power_trace(tmp_path).items():
        assert t == pytest.approx(traces[name][0])
        assert watts == pytest.approx(traces[name][1], rel=1e-6)


def test_a_gap_of_years_costs_nothing(tmp_path):
    t_s = np.array([0, 1e8])
    columns = (gpu("power"), np.full(2, 100.5)), beside(t_s)
    tracemalloc.start()
    found = judge(tmp_path, *columns, t_s=t_s, span_s=(1, 1e8 - 1))
    traces = read_power_trace(tmp_path)
    peak_B = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert letters(found) == {"G"}
    assert found["energy_cpu_J"] == pytest.approx(1e10, rel=1e-6)
    assert peak_B < 3e8 and 1e5 < len(traces["cpu_0"][0]) <= 10**6


PEAK = """
import re, sys
from pathlib import Path
import energynn.cli, energynn.records
from energynn.measure.account import account_for_run
from energynn.measure.samples import read_events_of_segments
found = account_for_run(read_events_of_segments(Path(sys.argv[1])), {})
peak_kB = re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]
print(int(peak_kB) / 1024, found["energy_total_J"])
"""


@pytest.mark.slow
def test_four_times_the_samples_need_no_more_memory(tmp_path):
    peaks_MB = []
    for seconds in (6_000.0, 24_000.0):
        t_s = np.arange(0, seconds, 0.04)
        many = [
            (gpu("energy", device=str(n), notes={}, id=f"{n}"), (300.0 + n) * t_s)
            for n in range(8)
        ]
        write_samples(tmp_path, t_s, many)
        write_training(tmp_path, 2.0, seconds - 2.0)
        told = printed(sys.executable, "-c", PEAK, tmp_path)
        peak_MB, energy_J = map(float, told.split())
        assert energy_J == pytest.approx(8 * 303.5 * (seconds - 4.0), rel=1e-6)
        peaks_MB.append(peak_MB)
    assert peaks_MB[1] < 1.1 * peaks_MB[0] and peaks_MB[1] < 300


def test_times_are_known_where_samples_cannot_be_read(tmp_path):
    (tmp_path / "samples-g.jsonl").write_text('{"host":"g"}\n')
    found = judge(tmp_path, beside())
    assert found["training_time_s"] == 20 and letters(found) == {"D"}
    assert "samples-g.jsonl" in found["doubts"][0]


# ---------------------------------------------------------------------- movement, and what is used

IDLE, BUSY = ({"is_busy": word} for word in (False, True))
IDLE_CARD = np.where(T < 7, 8.41, 8.50)  # fact 07
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
        ("power", 0 * T, "idle", False),
        ("power", 0 * T, "busy", True),
        ("power", IDLE_CARD, "untold", False),
        ("energy", joules(np.where(T < 9, 1.5, 100)), "later", False),
    ],
)
def test_movement_is_asked_of_what_is_used(tmp_path, kind, values, states, is_doubted):
    about = gpu(kind, notes={"limit_W": 300.0, "uuid": "GPU-0"})
    told = [(t, about["id"], word) for t, word in STATES[states]]
    found = judge(tmp_path, (about, values), beside(), states=told)
    assert letters(found) == ({"S"} if is_doubted else set()), found["doubts"]
    assert ("energy_total_J" in found) != is_doubted


def test_a_counter_that_fell_is_one_fault(tmp_path):
    """What follows from its sum is none: no threshold helps."""
    columns = (
        (gpu("energy"), 300.0 * (T % 15)),
        (gpu("power", checks="gpu_0_energy", primary=False), T),
    )
    assert letters(judge(tmp_path, *columns, beside())) == {"M"}


def test_a_gpu_that_a_rank_names_is_used_whatever_it_says(tmp_path):
    about = gpu("energy")
    write_samples(tmp_path, T, [(about, 3.0 * T)], [(0, about["id"], IDLE)])
    for told, doubts in (({}, set()), ({"gpu_uuid": "0"}, {"S"})):
        write_training(tmp_path, *SPAN, **told)
        assert letters(judged(tmp_path)) == doubts


# ------------------------------------------------------------------------------------------ power

LONGER = np.arange(0, 70, 0.1)
OF_100_W = gpu("power", notes={"limit_W": 100.0})
OF_15_W = cpu(notes={"limit_W": 15.0})


@pytest.mark.parametrize(
    "about, watts, told_W, is_doubted",
    [
        (OF_100_W, 150 + NOISE, [], True),
        (OF_100_W, 150 + NOISE, [150.0], False),
        (gpu("power", notes={}), 150 + NOISE, [100.0, 140.0, 90.0], False),
        (gpu("power", notes={}), 150 + NOISE, [100.0, 110.0, 90.0], True),
        (OF_15_W, np.where(T < 14, 60, 14), [], False),
        # the limits of CPUs are means of half a minute
        (OF_15_W, np.where(LONGER % 40 < 15, 30, 3), [], False),
        (OF_15_W, 30 + 0 * LONGER, [], True),
        # RAPL's word for none
        (cpu(notes={"limit_W": 40_950.0}), 100 + 0 * T, [], False),
    ],
)
def test_power_is_held_against_the_largest_limit_that_was_told(
    tmp_path, about, watts, told_W, is_doubted
):
    t_s = T if len(watts) == len(T) else LONGER
    values = joules(watts, t_s) if about["kind"] == "energy" else watts
    more = {"span_s": (2, t_s[-1] - 2), "period_s": t_s[1]}
    more["states"] = [
        (5 * n, about["id"], {"limit_W": limit}) for n, limit in enumerate(told_W)
    ]
    found = judge(tmp_path, (about, values), t_s=t_s, **more)
    assert letters(found) == ({"P"} if is_doubted else set())


# ------------------------------------------------------------------------------------------- gaps


@pytest.mark.parametrize(
    "by_s, every_s", [(0.3, 3.0), (0.6, 30.0), (0.4, 1.0), (2.0, 20.0)]
)
def test_a_counter_loses_nothing_in_a_gap_and_a_power_does(tmp_path, by_s, every_s):
    t_s = np.arange(0, 62, 0.04)
    t_s = t_s[(t_s - 1) % every_s >= by_s]  # late by so much, so often
    load = Load("square", 20.0, 300.0, 3.7)
    span = {"t_s": t_s, "span_s": (5.5, 58.5)}
    found = judge(tmp_path, (cpu(), load.energy_J(t_s)), **span)
    true_J = load.energy_J(58.5) - load.energy_J(5.5)
    assert letters(found) == set()
    assert abs(found["energy_total_J"] - true_J) <= found["energy_total_bound_J"]
    assert found["energy_total_bound_J"] < 0.003 * true_J
    power = gpu("power"), load.power_W(t_s) + 0.5
    found = judge(tmp_path, power, **span)
    assert letters(found) == {"G"} and found["energy_total_J"] > 0


@pytest.mark.parametrize(
    "from_s, to_s, wraps_at, doubts",
    [
        (1.4, 3.0, None, {"G"}),
        (21.5, 22.8, None, {"G"}),
        (20.0, 99.0, None, {"G"}),
        (0.0, 4.0, None, {"G"}),
        (5.0, 15.0, 1e6, set()),
        (5.0, 15.0, 1e4, {"G"}),
    ],
)
def test_a_gap_at_an_edge_or_in_which_it_can_go_round_counts_for_a_counter_too(
    tmp_path, from_s, to_s, wraps_at, doubts
):
    t_s = T[(T < from_s) | (T > to_s)]
    counter = cpu(wraps_at=wraps_at), 100 * t_s
    assert letters(judge(tmp_path, counter, t_s=t_s)) == doubts


@pytest.mark.parametrize("period_s, doubts", [(0.04, {"G"}), (0.32, set())])
def test_slow_sensors_are_judged_by_the_period_that_they_keep(
    tmp_path, period_s, doubts
):
    """Eight GPUs of 20 ms for each reading: 0.32 s a sample, as the sampler finds."""
    t_s = np.arange(0, 200, 0.32)
    watts = 300.5 + np.sin(np.arange(len(t_s)))
    gpus = [gpu("power", notes={}, id=f"g{n}", device=f"{n}") for n in range(8)]
    columns = [(one, watts) for one in gpus]
    found = judge(tmp_path, *columns, t_s=t_s, span_s=(2, 198), period_s=period_s)
    assert letters(found) == doubts and found["samples_in_training"] >= 60


@pytest.mark.parametrize(
    "until_s, words, remedy",
    [
        (17.0, "quota of CPUs (cpu.max)", "(gap_s, gap_share)"),
        (20.0, "it failed now and then", "(gap_s, gap_share)"),
        (99.0, "it failed, or its sampler was killed", ""),
    ],
)
def test_a_gap_names_its_cause_and_a_threshold_only_where_it_helps(
    tmp_path, until_s, words, remedy
):
    t_s = T[(T < 4) | (T > until_s)]
    power = gpu("power"), 300.5 + np.sin(t_s)
    (reason,) = judge(tmp_path, power, t_s=t_s)["doubts"]
    assert "no readings" in reason and words in reason and remedy in reason
    assert ("gap_s" in reason) == (until_s < 99)


def test_too_few_samples_are_told_how_much_longer_gives_enough(tmp_path):
    record = record_of(samples_in_training=8, training_time_s=0.3)
    assert "run it 9.8 times as long\n" in command.report_text(record, tmp_path)


# -------------------------------------------------------------------------------------- agreement


@pytest.mark.parametrize(
    "seconds, share, is_doubted",
    [
        (5, 0.92, False),
        (5, 0.88, True),
        (8, 0.95, False),
        (8, 0.92, True),
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
    counter = gpu("energy"), share * load.energy_J(t_s)
    power = mean, worlds.averaged_W(load, t_s) + random.normal(0, 0.5, len(t_s))
    found = judge(tmp_path, counter, power, t_s=t_s, span_s=(4.0, 4.0 + seconds))
    true_J = load.energy_J(4.0 + seconds) - load.energy_J(4.0)
    assert letters(found) == ({"C"} if is_doubted else set()), found["doubts"]
    off_J = abs(found["energy_gpu_J"] - true_J)
    assert off_J <= found["energy_gpu_bound_J"] + 0.02 * true_J


# -------------------------------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    "column, name, number",
    [
        ((gpu("energy"), 100 * (T // 1)), "counter_still_s", 9.0),
        ((OF_15_W, 130.0 * T), "peak_over_limit", 9.0),
        ((cpu(), 2500.0 * T), "most_cpu_W", 3000.0),
    ],
)
def test_a_refusal_names_the_threshold_that_ends_it(tmp_path, column, name, number):
    """Others do so in test_healthy_machines.py."""
    (reason,) = judge(tmp_path, column)["doubts"]
    assert reason.endswith(f" ({name})") and name in THRESHOLDS
    assert judge(tmp_path, column, thresholds={name: number})["doubts"] == []
