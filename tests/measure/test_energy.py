"""Energies from samples whose true energy is known in closed form."""

import json

import numpy as np
import pytest

from energynn.measure import energy
from energynn.measure.samples import Reader, read_samples

T0 = 1_000_000_000_000


def write(path, sensors, times_s, readings, host="h", period_s=0.1):
    lines = [{"header": "energynn-samples/1", "host": host, "period_s": period_s, "sensors": sensors}]
    lines += [{"t": T0 + int(t * 1e9), "w": int(t * 1e9), "v": row} for t, row in zip(times_s, readings, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sensor(kind, **more):
    return {
        "id": kind,
        "component": "cpu",
        "device": "0",
        "kind": kind,
        "provenance": "simulated",
        "to_SI": 1.0,
        "wraps_at": None,
        "primary": True,
        "model": None,
        **more,
    }


def joules(samples, start_s, end_s):
    return energy.energy_of_sensors(energy.curves(samples), T0 + int(start_s * 1e9), T0 + int(end_s * 1e9))


def test_a_counter_is_differenced_and_its_edges_interpolated(tmp_path):
    t = np.arange(0, 20.05, 0.1)
    counter = [[int(300e6 * s)] for s in t]  # 300 W in microjoules
    samples = read_samples(write(tmp_path / "s", [sensor("energy", to_SI=1e-6)], t, counter))
    (entry,) = joules(samples, 3.33, 13.33)
    assert entry["energy_J"] == pytest.approx(3000.0, rel=1e-6)
    assert entry["samples"] == 100 and entry["coverage"] == pytest.approx(1.0)


def test_a_counter_that_wraps_around_loses_nothing(tmp_path):
    t = np.arange(0, 10.05, 0.1)
    counter = [[int(s * 100e6 + 262.0e9) % 262_143_328_850] for s in t]
    samples = read_samples(write(tmp_path / "s", [sensor("energy", to_SI=1e-6, wraps_at=262143328850.0)], t, counter))
    assert joules(samples, 0, 10)[0]["energy_J"] == pytest.approx(1000.0, rel=1e-9)


def test_power_is_integrated(tmp_path):
    t = np.arange(0, 30.05, 0.1)
    power = [[200 + 100 * np.sin(2 * np.pi * s / 7)] for s in t]
    samples = read_samples(write(tmp_path / "s", [sensor("power")], t, power))
    true = lambda s: 200 * s - 700 / 2 / np.pi * np.cos(2 * np.pi * s / 7)  # noqa: E731
    assert joules(samples, 5.05, 25.05)[0]["energy_J"] == pytest.approx(true(25.05) - true(5.05), rel=1e-3)


def test_the_estimate_is_idle_power_plus_busy_time(tmp_path):
    model = {"idle_W_per_core": 3.0, "full_W_per_core": 8.0, "cores": 4}
    t = np.arange(0, 10.05, 0.1)
    busy = [[100 + 2 * s] for s in t]  # two of four cores busy
    samples = read_samples(write(tmp_path / "s", [sensor("busy", model=model, provenance="estimated")], t, busy))
    (entry,) = joules(samples, 0, 10)
    assert entry["energy_J"] == pytest.approx(10 * (4 * 3.0 + 2 * 5.0))
    assert energy.totals([entry], 10.0)["energy_total_provenance"] == "estimated"


def test_failed_reads_are_gaps_not_zeros(tmp_path):
    t = np.arange(0, 10.05, 0.1)
    power = [[None] if 4 < s < 5 else [100.0] for s in t]
    samples = read_samples(write(tmp_path / "s", [sensor("power")], t, power))
    (entry,) = joules(samples, 0, 10)
    assert entry["energy_J"] == pytest.approx(1000.0)
    assert entry["failed_reads"] == 9
    assert entry["coverage"] == pytest.approx(0.9, abs=0.011)


def test_a_cut_line_is_skipped_and_counted(tmp_path):
    path = write(tmp_path / "s", [sensor("power")], [0, 1, 2], [[1.0]] * 3)
    path.write_text(path.read_text()[:-9])
    samples = read_samples(path)
    assert len(samples.t_ns) == 2 and samples.unreadable_lines == 1
    path.write_text("")
    with pytest.raises(ValueError, match="no header"):
        read_samples(path)


DAMAGED = [
    '{"t":5,"w":6,"d":1,"v":[1.5,2]}',
    '{"t":7,"w":8,"d":1,"v":[null,-3e2]}',
    '{"status":{"missed_deadlines":3}}',
    '{"t":9,"w":9,"d":1,"v":[1.5]}',
    '{"t":9,"w":9,"d":1,"v":[1.5,2,3]}',
    '{"t":9,"w":9,"d":1,"v":[1.5.1,2]}',
    '{"t":9,"w":9,"d":1,"v":["1",2]}',
    '{"t":9,"w":9,"v":[4,5]}',
    '{"t":10,"w{"t":11,"w":12,"d":1,"v":[6,7]}',
    '{"t":12,"w":1.5,"d":1,"v":[6,7]}',
    '{"t":13,"w":1764000000123456789,"d":1,"v":[262143328850,9007199254740993]}',
]


@pytest.mark.parametrize("left_out", [(), (3, 4, 5, 6, 7, 8), (2, 3, 5, 6, 7, 8)], ids=["all", "whole", "two short"])
@pytest.mark.parametrize("block_B", [60, 2**23])
def test_blocks_of_samples_are_read_as_their_lines_are(tmp_path, monkeypatch, left_out, block_B):
    path = write(tmp_path / "s", [sensor("power"), sensor("power")], [0], [[1.0, 1.0]])
    lines = [line for number, line in enumerate(DAMAGED) if number not in left_out]
    path.write_text(path.read_text() + "\n".join(lines) + "\n")
    monkeypatch.setattr("energynn.measure.samples.BLOCK_B", block_B)
    fast = read_samples(path)
    monkeypatch.setattr(Reader, "_take_at_once", lambda reader, block: False)
    slow = read_samples(path)
    for name in ("t_ns", "wall_ns", "readings", "duration_us"):
        assert np.array_equal(getattr(fast, name), getattr(slow, name), equal_nan=True), name
    assert (fast.unreadable_lines, fast.status) == (slow.unreadable_lines, slow.status)
    assert fast.t_ns[-1] == 13 and fast.wall_ns[-1] == 1764000000123456789


def test_lines_that_are_being_written_are_left_for_the_next_look(tmp_path):
    path = write(tmp_path / "s", [sensor("power")], [0, 1, 2], [[1.0]] * 3)
    text = path.read_text()
    path.write_text(text[:-9])
    reader = Reader(path)
    reader.read(to_the_end=False)
    assert len(reader.times) == 2
    path.write_text(text)
    reader.read(to_the_end=False)
    assert len(reader.times) == 3 and reader.unreadable == 0


def test_a_total_is_as_weak_as_its_weakest_part_and_without_cross_checks():
    entries = [
        {"component": "gpu", "provenance": "measured", "energy_J": 100.0, "primary": True},
        {"component": "gpu", "provenance": "measured", "energy_J": 101.0, "primary": False},
        {"component": "cpu", "provenance": "estimated", "energy_J": 50.0, "primary": True},
    ]
    total = energy.totals(entries, 10.0)
    assert total["energy_total_J"] == 150.0 and total["energy_total_provenance"] == "estimated"
    assert total["energy_gpu_provenance"] == "measured" and total["mean_power_total_W"] == 15.0
    assert total["energy_gpu_systematic_J"] == pytest.approx(5.0), "5 % of what is measured, half of an estimate"
    assert total["energy_total_systematic_J"] == pytest.approx(5.0 + 25.0)
    assert "energy_ram_J" not in total
    assert energy.totals([], 10.0) == {}


@pytest.mark.parametrize("wrong", [0, 10**15, 262_143_000_000, 3])
def test_one_misread_of_a_counter_costs_nothing(tmp_path, wrong):
    """perun makes 264,143 J of 2,000 J."""
    t = np.arange(0, 10.05, 0.1)
    counter = [[int(s * 200e6 + 5e9)] for s in t]
    counter[37] = [wrong]
    samples = read_samples(write(tmp_path / "s", [sensor("energy", to_SI=1e-6, wraps_at=262143328850.0)], t, counter))
    (entry,) = joules(samples, 0, 10)
    assert entry["energy_J"] == pytest.approx(2000, rel=1e-3)
    assert entry["failed_reads"] == 1 and entry["samples"] == 100


def test_a_counter_that_is_reset_goes_on_from_there(tmp_path):
    t = np.arange(0, 10.05, 0.1)
    counter = [[s * 200 + 5000 if s < 4.05 else (s - 4.05) * 200] for s in t]
    samples = read_samples(write(tmp_path / "s", [sensor("energy")], t, counter))
    assert joules(samples, 0, 10)[0]["energy_J"] == pytest.approx(2000, rel=0.01)


def sensors_of_a_gpu(**counter):
    return [
        sensor("energy", **{"id": "gpu_0_energy", "component": "gpu", **counter}),
        sensor("power", id="gpu_0_power", component="gpu", primary=False, checks="gpu_0_energy"),
    ]


def test_an_outage_is_bridged_by_the_counter_and_flagged_where_there_is_none(tmp_path):
    """2 s without NVML under a power that has a peak just then: 3300 J."""
    t = np.arange(0, 20.02, 0.04)
    watts = lambda s: 100.0 + 650.0 * ((s > 8.0) & (s < 10.0))  # noqa: E731
    true = lambda s: 100.0 * s + 650.0 * np.clip(s - 8.0, 0, 2)  # noqa: E731
    rows = [[None, None] if 8 <= s <= 10 else [float(true(s)), float(watts(s))] for s in t]
    with_counter = read_samples(write(tmp_path / "a", sensors_of_a_gpu(), t, rows, period_s=0.04))
    entry, check = joules(with_counter, 0, 20)
    assert entry["energy_J"] == pytest.approx(3300, rel=0.01)
    assert entry["coverage"] == pytest.approx(0.9, abs=0.01) and energy.cross_checks([entry, check])[0]["flagged"]
    alone = read_samples(write(tmp_path / "b", [sensor("power")], t, [row[1:] for row in rows], period_s=0.04))
    (entry,) = joules(alone, 0, 20)
    assert entry["energy_J"] == pytest.approx(2000, rel=0.01), "nobody can know of the peak"
    assert entry["coverage"] < 0.99 and entry["failed_reads"] >= 50


def test_counter_and_power_that_disagree_are_flagged(tmp_path):
    t = np.arange(0, 20.02, 0.04)
    rows = [[300.0 * s, 327.0] for s in t]
    samples = read_samples(write(tmp_path / "s", sensors_of_a_gpu(), t, rows, period_s=0.04))
    (check,) = energy.cross_checks(joules(samples, 2, 18))
    assert check["gap"] == pytest.approx(0.09) and check["flagged"]
    assert check["counter_J"] == pytest.approx(4800) and check["power_J"] == pytest.approx(327 * 16)
    none = [entry | {"energy_J": 0.0} if entry["primary"] else entry for entry in joules(samples, 2, 18)]
    (check,) = energy.cross_checks(none)
    assert check["flagged"] and check["counter_J"] == 0 and check["gap"] > 1000


@pytest.mark.parametrize(
    "period_s, rhythm_s, aliased",
    [(1.0, 0.5, True), (1.0, 1.0, True), (0.04, 0.5, False), (1.0, 60.0, False), (0.04, None, False)],
)
def test_a_square_wave_that_is_sampled_too_slowly_is_flagged(tmp_path, period_s, rhythm_s, aliased):
    """Sampled at the instants that our sampler chooses, which no rhythm of the load can follow."""
    index = np.arange(100)
    t = period_s * (index + ((index * 0.6180339887) % 1 - 0.5) / 2) + 1
    noise = np.random.default_rng(0).normal(0, 3, len(t))
    watts = 300.0 + noise if rhythm_s is None else np.where((t / rhythm_s) % 1 < 0.5, 500.0, 100.0) + noise
    samples = read_samples(write(tmp_path / "s", [sensor("power")], t, watts[:, None].tolist(), period_s=period_s))
    assert joules(samples, t[1], t[-2])[0]["aliased"] is aliased


def test_phases_share_the_energy_by_time_and_idle_is_the_rest(tmp_path):
    t = np.arange(0, 10.02, 0.02)
    samples = read_samples(write(tmp_path / "s", [sensor("energy")], t, [[100 * s + 50 * max(0, s - 5)] for s in t]))
    kinds, begin = np.array([0, 1, 0, 1]), T0 + np.array([1.0, 3.0, 6.0, 8.0]) * 1e9
    phases = kinds, begin.astype(np.int64), (begin + np.array([2, 1, 2, 0.5]) * 1e9).astype(np.int64), ["a", "b"]
    window = T0 + int(1e9), T0 + int(9e9)
    (curve,) = energy.curves(samples)
    found = {e["phase"]: e for e in energy.energy_of_phases(phases, window, {"cpu": [(curve, 0.5)]})}
    assert {name: entry["time_s"] for name, entry in found.items()} == pytest.approx({"a": 4, "b": 1.5, "idle": 2.5})
    assert found["a"]["energy_cpu_J"] == pytest.approx(0.5 * (200 + 300), rel=1e-3)
    assert found["b"]["energy_cpu_J"] == pytest.approx(0.5 * (100 + 75), rel=1e-3)
    assert sum(entry["energy_cpu_J"] for entry in found.values()) == pytest.approx(0.5 * (400 + 600), rel=1e-3)


@pytest.mark.parametrize("level", [0, 10**9])
def test_readings_that_are_false_for_a_second_cost_nothing(tmp_path, level):
    t = np.arange(0, 10.05, 0.1)
    counter = [[level if 4.05 < s < 5.0 else int(s * 200e6 + 50e9)] for s in t]
    samples = read_samples(write(tmp_path / "s", [sensor("energy", to_SI=1e-6, wraps_at=262143328850.0)], t, counter))
    assert joules(samples, 0, 10)[0]["energy_J"] == pytest.approx(2000, rel=0.12), "not 262 kJ"


def test_a_wrap_around_while_the_load_changes_loses_nothing(tmp_path):
    """A false step gets the mean power around it, which hides a wrong wrap-around unless that step alone has a load."""
    t = np.arange(0, 10.05, 0.1)
    true_J = 100 * t + 300 * np.clip(t - 1.4, 0, 0.1)
    counter = [[int(joules_ * 1e6 + 262.0e9) % 262_143_328_850] for joules_ in true_J]
    assert np.flatnonzero(np.diff(np.ravel(counter)) < 0) == [14], "it wraps around from 1.4 to 1.5 s"
    rapl = sensor("energy", to_SI=1e-6, wraps_at=262143328850.0, update_s=0.001)
    samples = read_samples(write(tmp_path / "s", [rapl], t, counter))
    (entry,) = joules(samples, 0, 10)
    assert entry["energy_J"] == pytest.approx(1030.0, rel=1e-4)
    assert joules(samples, 1.0, 1.9)[0]["energy_J"] == pytest.approx(120.0, rel=1e-3)


def test_one_failed_read_is_a_gap(tmp_path):
    t = np.arange(0, 20.05, 0.1)
    power = [[None if i == 100 else 200.0] for i in range(len(t))]
    (entry,) = joules(read_samples(write(tmp_path / "s", [sensor("power")], t, power)), 0, 20)
    assert entry["failed_reads"] == 1 and entry["coverage"] == pytest.approx(1 - 0.2 / 20)


def test_a_late_sample_is_no_gap_and_a_missing_one_is(tmp_path):
    """At most two periods or 0.2 s, whichever is longer, may lie between two readings."""
    for period_s, apart_s, covered in ((0.02, 0.15, 1.0), (0.02, 0.25, 0.0), (1.0, 1.9, 1.0), (1.0, 2.1, 0.0)):
        t = np.arange(0, 20, apart_s)
        path = write(tmp_path / "s", [sensor("power")], t, [[200.0]] * len(t), period_s=period_s)
        (entry,) = joules(read_samples(path), 0, t[-1])
        assert entry["coverage"] == pytest.approx(covered), (period_s, apart_s)
