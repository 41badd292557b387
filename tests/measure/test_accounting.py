"""Energies of whole runs written by hand: devices and phases, idle power, costs; every number known in closed form."""

import json
import os

import pytest

from energynn import records
from energynn.measure import accounting

T0 = 10**12
HOST_W, GPU_W = 100.0, (200.0, 300.0)


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def two_gpus(tmp_path):
    """Two ranks with a GPU each on one host, idle at half power for 2 s before and after 10 s of training."""
    sensors = [{"id": "cpu_0", "component": "cpu", "device": "0", "kind": "energy"}]
    gpu = {"component": "gpu", "kind": "energy"}
    sensors += [gpu | {"id": f"gpu_{n}", "device": str(n), "notes": {"uuid": f"GPU-{n}"}} for n in range(2)]
    common = {
        "provenance": "simulated",
        "to_SI": 1.0,
        "wraps_at": None,
        "primary": True,
        "checks": None,
        "update_s": 0.001,
        "model": None,
    }

    def joules(watts, t):  # half power outside of 0 to 10 s
        return watts * (0.5 * (t + 3) if t < 0 else 1.5 + t if t < 10 else 11.5 + 0.5 * (t - 10))

    lines = [{"header": "energynn-samples/1", "host": "h", "period_s": 0.1, "sensors": [common | s for s in sensors]}]
    for step in range(160):
        t = step / 10 - 3
        readings = [joules(watts, t) for watts in (HOST_W, *GPU_W)]
        lines.append({"t": T0 + int(t * 1e9), "w": int(t * 1e9), "d": 50, "v": readings})
    write_lines(tmp_path / "samples-h.jsonl", lines)
    for rank in range(2):
        marks = [
            (-2.5, "idle_start", dict(when="before")),
            (-0.5, "idle_end", dict(when="before")),
            (-0.4, "rank_start", dict(rank=rank, host="h", gpu_uuid=str(rank))),
            (0, "training_start", {}),
            (10, "training_end", {}),
            (10.2, "idle_start", dict(when="after")),
            (12.2, "idle_end", dict(when="after")),
        ]
        write_lines(
            tmp_path / f"events-rank{rank}.jsonl",
            [
                {"t_mono_ns": T0 + int(t * 1e9), "t_wall_ns": int(t * 1e9), "event": name, **more}
                for t, name, more in marks
            ],
        )
        write_lines(
            tmp_path / f"phases-rank{rank}.jsonl",
            [
                {"names": ["forward", "backward"]},
                {"t": T0, "phase": [0, 1], "gap_us": [1_000_000, 0], "length_us": [3_000_000, 5_000_000]},
            ],
        )
    return tmp_path


def test_a_rank_has_its_own_gpu_and_its_part_of_the_host(two_gpus):
    found = accounting.account(two_gpus)
    assert found["energy_gpu_J"] == pytest.approx(5000, rel=1e-3) and found["energy_cpu_J"] == pytest.approx(
        1000, rel=1e-3
    )
    by_key = {(entry["rank"], entry["phase"]): entry for entry in found["energy_phases"]}
    for rank, watts in enumerate(GPU_W):
        assert by_key[rank, "forward"]["energy_gpu_J"] == pytest.approx(3 * watts, rel=1e-2)
        assert by_key[rank, "backward"]["energy_gpu_J"] == pytest.approx(5 * watts, rel=1e-2)
        assert by_key[rank, "backward"]["energy_cpu_J"] == pytest.approx(5 * HOST_W / 2, rel=1e-2)
        assert by_key[rank, "idle"]["time_s"] == pytest.approx(2.0)
    for component in ("gpu", "cpu"):
        name = f"energy_{component}_J"
        assert sum(entry[name] for entry in found["energy_phases"]) == pytest.approx(found[name], rel=1e-9)
        assert abs(by_key[None, "unattributed"][name]) < 1e-3 * found[name]


def test_what_belongs_to_no_rank_is_said(two_gpus):
    (two_gpus / "phases-rank1.jsonl").unlink()
    rest = accounting.account(two_gpus)["energy_phases"][-1]
    assert rest["phase"] == "unattributed" and rest["energy_gpu_J"] == pytest.approx(3000, rel=1e-3)
    assert rest["energy_cpu_J"] == pytest.approx(500, rel=1e-3)


def rewrite(path, change):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [line for line in lines if change(line) is not False])


def test_a_gpu_that_no_rank_uses_is_in_no_sum(two_gpus):
    """A launcher that shows each rank its own GPU only: the sampler takes all, the ranks say which are theirs."""
    rewrite(two_gpus / "events-rank1.jsonl", lambda line: line.update(gpu_uuid="0") if "gpu_uuid" in line else None)
    found = accounting.account(two_gpus)
    assert found["energy_gpu_J"] == pytest.approx(2000, rel=1e-3) and found["coverage"] > 0.99
    assert {entry["id"]: entry.get("used", True) for entry in found["sensors"]} == {
        "cpu_0": True,
        "gpu_0": True,
        "gpu_1": False,
    }


def test_a_rank_whose_gpu_has_no_sensor_is_said_and_no_evidence(two_gpus):
    rewrite(two_gpus / "events-rank1.jsonl", lambda line: line.update(gpu_uuid="7") if "gpu_uuid" in line else None)
    found = accounting.account(two_gpus)
    assert "rank 1: no sensor of its GPU 7 on h; its energy is missing" in found["flags"] and found["coverage"] == 0


@pytest.mark.parametrize("nameless", [0, 1, 2])
def test_a_gpu_that_does_not_tell_its_uuid_is_the_one_that_no_other_sensor_reads(two_gpus, nameless):
    def forget(line):
        for sensor in line.get("sensors", [])[1 : 1 + nameless]:
            sensor["notes"] = {"name": "a GPU"}

    rewrite(two_gpus / "samples-h.jsonl", forget)
    found = accounting.account(two_gpus)
    if nameless == 2:  # which of them is which nobody knows
        assert "energy_gpu_J" not in found and found["coverage"] == 0 and len(found["flags"]) == 2
        return
    assert found["energy_gpu_J"] == pytest.approx(5000, rel=1e-3) and found["coverage"] > 0.99
    forward = {entry["rank"]: entry for entry in found["energy_phases"] if entry["phase"] == "forward"}
    assert [forward[rank]["energy_gpu_J"] for rank in range(2)] == pytest.approx([3 * w for w in GPU_W], rel=1e-2)


def test_a_rank_whose_start_was_cut_off_costs_no_record(two_gpus):
    rewrite(two_gpus / "events-rank1.jsonl", lambda line: line["event"] != "rank_start")
    assert accounting.account(two_gpus)["training_time_s"] == pytest.approx(10)


def test_idle_power_and_what_is_left_without_it(two_gpus):
    found = accounting.account(two_gpus)
    assert found["idle_power_gpu_before_W"] == pytest.approx(250, rel=1e-3)
    assert found["idle_power_gpu_after_W"] == pytest.approx(250, rel=1e-3)
    assert found["energy_net_gpu_J"] == pytest.approx(2500, rel=1e-2)
    assert found["energy_net_total_J"] == pytest.approx(3000, rel=1e-2)


def test_hosts_are_read_by_processes_of_their_own_with_the_same_result(two_gpus, monkeypatch):
    for path in list(two_gpus.glob("*.jsonl")):
        text = path.read_text().replace('"host": "h"', '"host": "g"').replace('"rank": ', '"rank": 1')
        other = path.name.replace("-h", "-g").replace("rank", "rank1")
        (two_gpus / other).write_text(text)
    alone = accounting.account(two_gpus)
    monkeypatch.setattr(accounting, "WORTH_A_PROCESS_B", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert accounting.account(two_gpus) == alone
    assert alone["nodes"] == 2 and alone["energy_total_J"] == pytest.approx(2 * 10 * (HOST_W + sum(GPU_W)), rel=1e-4)


def test_segments_add_up_and_the_gap_between_them_is_seen(two_gpus):
    alone = accounting.account(two_gpus)
    later = two_gpus / "segment-2"
    later.mkdir()
    for path in list(two_gpus.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:  # an hour later, on a machine that was started anew
            line |= {name: line[name] + 3_600_000_000_000 for name in ("w", "t_wall_ns") if name in line}
            line |= {name: line[name] - T0 // 2 for name in ("t", "t_mono_ns") if name in line}
        write_lines(later / path.name, lines)
    both = accounting.account(two_gpus)
    for name in ("energy_gpu_J", "energy_cpu_J", "energy_total_J", "training_time_s", "energy_net_gpu_J"):
        assert both[name] == pytest.approx(2 * alone[name], rel=1e-3), name
    assert both["mean_power_gpu_W"] == pytest.approx(alone["mean_power_gpu_W"], rel=1e-3)
    assert [s["gap_before_s"] for s in both["segments"]] == [None, pytest.approx(3590)]
    assert {entry["segment"] for entry in both["sensors"]} == {1, 2}
    assert sum(e["energy_gpu_J"] for e in both["energy_phases"]) == pytest.approx(both["energy_gpu_J"], rel=1e-9)


def test_a_perun_file_that_was_cut_off_costs_no_record(run_dir):
    path = next(run_dir.glob("perun/*.hdf5"))
    path.write_bytes(path.read_bytes()[:700])
    record = records.build(run_dir, "finished", "")
    assert record["energy_cpu_J"] > 0 and "energy_perun_total_J" not in record
    assert any("cut off while it wrote" in flag for flag in record["flags"])
    assert "perun's HDF5 is missing or cannot be read" in record["invalid_reasons"]
    assert records.check(run_dir.parent.parent) == []


def test_the_window_of_a_host_lasts_from_its_first_rank_to_its_last(two_gpus):
    def late(line):
        if line["event"] == "training_start":
            line["t_mono_ns"] += 10**9
        if line["event"] == "training_end":
            line["t_mono_ns"] -= 10**9

    rewrite(two_gpus / "events-rank1.jsonl", late)
    account = accounting.account(two_gpus)
    assert account["training_time_s"] == pytest.approx(10) and account["energy_gpu_J"] == pytest.approx(5000, rel=1e-3)
