"""Energies from samples whose true energy is known in closed form."""

import json

import numpy as np
import pytest

from energynn.measure import energy

T0 = 1_000_000_000_000


def write(path, sensors, times_s, readings, host="h", period_s=0.1):
    lines = [{"header": "energynn-samples/1", "host": host, "period_s": period_s, "sensors": sensors}]
    lines += [{"t": T0 + int(t * 1e9), "w": int(t * 1e9), "v": row} for t, row in zip(times_s, readings, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sensor(kind, **more):
    return {"id": kind, "component": "cpu", "device": "0", "kind": kind, "provenance": "simulated", "to_SI": 1.0,
            "wraps_at": None, "primary": True, "model": None, **more}  # fmt: skip


def joules(samples, start_s, end_s):
    return energy.energy_of_sensors(samples, T0 + int(start_s * 1e9), T0 + int(end_s * 1e9))


def test_a_counter_is_differenced_and_its_edges_interpolated(tmp_path):
    t = np.arange(0, 20.05, 0.1)
    counter = [[int(300e6 * s)] for s in t]  # 300 W in microjoules
    samples = energy.read_samples(write(tmp_path / "s", [sensor("energy", to_SI=1e-6)], t, counter))
    (entry,) = joules(samples, 3.33, 13.33)
    assert entry["energy_J"] == pytest.approx(3000.0, rel=1e-6)
    assert entry["samples"] == 100 and entry["coverage"] == pytest.approx(1.0)


def test_a_counter_that_wraps_around_loses_nothing(tmp_path):
    t = np.arange(0, 10.05, 0.1)
    counter = [[int(s * 100e6 + 262.0e9) % 262_143_328_850] for s in t]
    samples = energy.read_samples(
        write(tmp_path / "s", [sensor("energy", to_SI=1e-6, wraps_at=262143328850.0)], t, counter)
    )
    assert joules(samples, 0, 10)[0]["energy_J"] == pytest.approx(1000.0, rel=1e-9)


def test_power_is_integrated(tmp_path):
    t = np.arange(0, 30.05, 0.1)
    power = [[200 + 100 * np.sin(2 * np.pi * s / 7)] for s in t]
    samples = energy.read_samples(write(tmp_path / "s", [sensor("power")], t, power))
    true = lambda s: 200 * s - 700 / 2 / np.pi * np.cos(2 * np.pi * s / 7)  # noqa: E731
    assert joules(samples, 5.05, 25.05)[0]["energy_J"] == pytest.approx(true(25.05) - true(5.05), rel=1e-3)


def test_the_estimate_is_idle_power_plus_busy_time(tmp_path):
    model = {"idle_W_per_core": 3.0, "full_W_per_core": 8.0, "cores": 4}
    t = np.arange(0, 10.05, 0.1)
    busy = [[100 + 2 * s] for s in t]  # two of four cores busy
    samples = energy.read_samples(write(tmp_path / "s", [sensor("busy", model=model, provenance="estimated")], t, busy))
    (entry,) = joules(samples, 0, 10)
    assert entry["energy_J"] == pytest.approx(10 * (4 * 3.0 + 2 * 5.0))
    assert energy.totals([entry], 10.0)["energy_total_provenance"] == "estimated"


def test_failed_reads_are_gaps_not_zeros(tmp_path):
    t = np.arange(0, 10.05, 0.1)
    power = [[None] if 4 < s < 5 else [100.0] for s in t]
    samples = energy.read_samples(write(tmp_path / "s", [sensor("power")], t, power))
    (entry,) = joules(samples, 0, 10)
    assert entry["energy_J"] == pytest.approx(1000.0)
    assert entry["failed_reads"] == 9
    assert entry["coverage"] == pytest.approx(0.9, abs=0.011)


def test_a_cut_line_is_skipped_and_counted(tmp_path):
    path = write(tmp_path / "s", [sensor("power")], [0, 1, 2], [[1.0]] * 3)
    path.write_text(path.read_text()[:-9])
    samples = energy.read_samples(path)
    assert len(samples.t_ns) == 2 and samples.unreadable_lines == 1
    path.write_text("")
    with pytest.raises(ValueError, match="no header"):
        energy.read_samples(path)


def test_a_total_is_as_weak_as_its_weakest_part_and_without_cross_checks():
    entries = [
        {"component": "gpu", "provenance": "measured", "energy_J": 100.0, "primary": True},
        {"component": "gpu", "provenance": "measured", "energy_J": 101.0, "primary": False},
        {"component": "cpu", "provenance": "estimated", "energy_J": 50.0, "primary": True},
    ]
    total = energy.totals(entries, 10.0)
    assert total["energy_total_J"] == 150.0 and total["energy_total_provenance"] == "estimated"
    assert total["energy_gpu_provenance"] == "measured" and total["mean_power_total_W"] == 15.0
    assert "energy_ram_J" not in total
    assert energy.totals([], 10.0) == {}
