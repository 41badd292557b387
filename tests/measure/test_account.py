"""Energies of whole runs written by hand, every number known: ranks, phases, idle power, segments, hosts."""

import json

import numpy as np
import pytest

from energynn.measure.account import account as account_of
from energynn.measure.account import power_trace
from energynn.measure.samples import events_of_segments
from tests.measure.worlds import sensor

T0 = 10**12
HOST_W, GPU_W = 100.0, (200.0, 300.0)


def account(run_dir, thresholds=None):
    return account_of(events_of_segments(run_dir), thresholds)


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def rewrite(path, change):
    """Change the lines of a file, or leave one out where the change returns False."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [line for line in lines if change(line) is not False])


def joules(watts, t):
    """A load from 0 to 10 s, and half of it before and after."""
    return watts * (0.5 * (t + 3) if t < 0 else 1.5 + t if t < 10 else 11.5 + 0.5 * (t - 10))


@pytest.fixture
def two_gpus(tmp_path):
    """Two ranks with a GPU each on one host, idle at half power before and after 10 s of training."""
    sensors = [sensor("cpu_0", "energy", "cpu", update_s=0.001)]
    for n in range(2):
        about = {"device": str(n), "update_s": 0.001, "notes": {"uuid": f"GPU-{n}"}}
        sensors.append(sensor(f"gpu_{n}", "energy", **about))
    lines = [{"header": "energynn-samples/1", "host": "h", "period_s": 0.1, "sensors": sensors}]
    for step in range(160):
        t = step / 10 - 3
        readings = [joules(watts, t) for watts in (HOST_W, *GPU_W)]
        lines.append({"t": T0 + int(t * 1e9), "w": T0 + int(t * 1e9), "v": readings})
    write_lines(tmp_path / "samples-h.jsonl", lines)
    for rank in range(2):
        marks = [
            (-2.5, "idle_start", dict(when="before")),
            (-0.5, "idle_end", dict(when="before")),
            (-0.4, "rank_start", dict(host="h", gpu_uuid=str(rank))),
            (0, "training_start", {}),
            (10, "training_end", {}),
            (10.2, "idle_start", dict(when="after")),
            (12.2, "idle_end", dict(when="after")),
        ]
        clocks = [
            {"t_mono_ns": T0 + int(t * 1e9), "t_wall_ns": T0 + int(t * 1e9)} for t, *_ in marks
        ]
        events = [
            at | {"event": name} | more for at, (_, name, more) in zip(clocks, marks, strict=True)
        ]
        write_lines(tmp_path / f"events-rank{rank}.jsonl", events)
        spans = {"phase": [0, 1], "gap_us": [1_000_000, 0], "length_us": [3_000_000, 5_000_000]}
        phases = [{"names": ["forward", "backward"]}, {"t": T0} | spans]
        write_lines(tmp_path / f"phases-rank{rank}.jsonl", phases)
    return tmp_path


def copied(folder, target, host="h", later_ns=0):
    """Copy the raw files of a run, of another host or a later start."""
    target.mkdir(exist_ok=True)
    for path in list(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line |= {name: line[name] + later_ns for name in ("w", "t_wall_ns") if name in line}
            line |= {"host": host} if "host" in line else {}
        name = (
            path.name
            if host == "h"
            else path.name.replace("-h", f"-{host}").replace("rank", "rank1")
        )
        write_lines(target / name, lines)


def test_a_rank_has_its_own_gpu_and_its_part_of_the_host(two_gpus):
    found = account(two_gpus)
    assert found["energy_gpu_J"] == pytest.approx(5000, rel=1e-3) and found["doubts"] == []
    assert found["energy_cpu_J"] == pytest.approx(1000, rel=1e-3) and found["coverage"] == 1
    by_key = {(entry["rank"], entry["phase"]): entry for entry in found["energy_phases"]}
    for rank, watts in enumerate(GPU_W):
        assert by_key[rank, "forward"]["energy_gpu_J"] == pytest.approx(3 * watts, rel=1e-2)
        assert by_key[rank, "backward"]["energy_gpu_J"] == pytest.approx(5 * watts, rel=1e-2)
        assert by_key[rank, "backward"]["energy_cpu_J"] == pytest.approx(5 * HOST_W / 2, rel=1e-2)
        assert by_key[rank, "idle"]["time_s"] == pytest.approx(2.0)
        assert by_key[rank, "backward"]["time_s"] == pytest.approx(5.0)
    for name in ("energy_gpu_J", "energy_cpu_J"):
        assert sum(one[name] for one in found["energy_phases"]) == pytest.approx(
            found[name], rel=1e-9
        )
        assert abs(by_key[None, "unattributed"][name]) < 1e-3 * found[name]


def test_what_belongs_to_no_rank_is_unattributed(two_gpus):
    (two_gpus / "phases-rank1.jsonl").unlink()
    rest = account(two_gpus)["energy_phases"][-1]
    assert rest["phase"] == "unattributed" and rest["energy_gpu_J"] == pytest.approx(3000, rel=1e-3)
    assert rest["energy_cpu_J"] == pytest.approx(500, rel=1e-3)


def test_idle_power(two_gpus):
    found = account(two_gpus)
    assert found["idle_power_gpu_before_W"] == pytest.approx(250, rel=1e-3)
    assert found["idle_power_gpu_after_W"] == pytest.approx(250, rel=1e-3)

    def idle_late(line):
        if line["event"] == "idle_start":
            line["t_mono_ns"] += 19 * 10**8

    rewrite(two_gpus / "events-rank1.jsonl", idle_late)  # 0.1 s in which both are idle
    assert "idle_power_gpu_before_W" not in account(two_gpus)


def test_a_gpu_that_no_rank_uses_is_in_no_sum(two_gpus):
    def change(line):
        return line.update(gpu_uuid="0") if "gpu_uuid" in line else None

    rewrite(two_gpus / "events-rank1.jsonl", change)
    found = account(two_gpus)
    assert found["energy_gpu_J"] == pytest.approx(2000, rel=1e-3) and found["doubts"] == []
    assert [one["id"] for one in found["sensors"] if not one["primary"]] == ["gpu_1"]


def test_a_host_trains_from_its_first_rank_to_its_last(two_gpus):
    def late(line):
        line["t_mono_ns"] += {"training_start": 10**9, "training_end": -(10**9)}.get(
            line["event"], 0
        )

    rewrite(two_gpus / "events-rank1.jsonl", late)
    found = account(two_gpus)
    assert found["training_time_s"] == 10 and found["energy_gpu_J"] == pytest.approx(5000, rel=1e-3)


def test_a_dead_run_has_its_energy_until_its_last_sample(two_gpus):
    for rank in range(2):
        rewrite(two_gpus / f"events-rank{rank}.jsonl", lambda line: line["event"] != "training_end")
    rewrite(two_gpus / "events-rank1.jsonl", lambda line: line["event"] != "rank_start")
    found = account(two_gpus)
    assert found["training_time_s"] == pytest.approx(12.9)
    (two_gpus / "samples-h.jsonl").write_text("")
    assert "training_time_s" not in account(two_gpus)


def test_segments_add_up_and_the_gap_between_them_does_not_count(two_gpus):
    alone = account(two_gpus)
    copied(two_gpus, two_gpus / "segment-2", later_ns=3600 * 10**9)
    both = account(two_gpus)
    for name in (
        "energy_gpu_J",
        "energy_total_J",
        "energy_total_bound_J",
        "training_time_s",
    ):
        assert both[name] == pytest.approx(2 * alone[name], rel=1e-3), name
    assert both["mean_power_gpu_W"] == pytest.approx(alone["mean_power_gpu_W"], rel=1e-3)
    first, second = both["segments"]
    assert second["start_wall_ns"] - first["start_wall_ns"] == 3600 * 10**9
    assert {entry["segment"] for entry in both["sensors"]} == {1, 2} and both["doubts"] == []
    total_J = sum(entry.get("energy_gpu_J", 0) for entry in both["energy_phases"])
    assert total_J == pytest.approx(both["energy_gpu_J"], rel=1e-9)


def ahead(line):
    line |= {name: line[name] + 5000 * 10**9 for name in ("t", "t_mono_ns") if name in line}


def test_hosts_add_up_each_on_its_own_clock(two_gpus):
    copied(two_gpus, two_gpus, host="g")
    for path in [two_gpus / "samples-g.jsonl", *two_gpus.glob("*rank1?.jsonl")]:
        rewrite(path, ahead)
    found = account(two_gpus)
    assert found["nodes"] == 2 and found["training_time_s"] == 10 and found["doubts"] == []
    assert found["energy_total_J"] == pytest.approx(2 * 10 * (HOST_W + sum(GPU_W)), rel=1e-4)
    traces = power_trace(two_gpus)
    assert traces.keys() == {
        f"{host}:{name}" for host in "gh" for name in ("cpu_0", "gpu_0", "gpu_1")
    }
    for t_s, power_W in (traces["h:gpu_1"], traces["g:gpu_1"]):
        assert power_W[(t_s > 0) & (t_s < 10)] == pytest.approx(300.0) and power_W[
            t_s < 0
        ] == pytest.approx(150.0)


def without_gpus(line):
    if "sensors" in line:
        line["sensors"] = line["sensors"][:1]
    if "v" in line:
        line["v"] = line["v"][:1]
    line.pop("gpu_uuid", None)


def lacking(run_dir):
    for path in run_dir.glob("*.jsonl"):
        rewrite(path, without_gpus)


def of_an_unread_gpu(run_dir):
    rewrite(
        run_dir / "events-rank1.jsonl",
        lambda line: line.update(gpu_uuid="7") if "gpu_uuid" in line else None,
    )


def of_a_gpu_that_the_sampler_misses(run_dir):
    rewrite(
        run_dir / "samples-h.jsonl",
        lambda line: line.update(unaccounted=["GPU 2"]) if "header" in line else None,
    )


def of_a_second_start_without_gpus(run_dir):
    copied(run_dir, run_dir / "segment-2", later_ns=3600 * 10**9)
    lacking(run_dir / "segment-2")


def of_a_host_without_gpus(run_dir):
    copied(run_dir, run_dir / "other", host="g")
    lacking(run_dir / "other")
    for path in (run_dir / "other").iterdir():
        path.rename(run_dir / path.name)


def of_a_host_without_samples(run_dir):
    copied(run_dir, run_dir, host="g")
    (run_dir / "samples-g.jsonl").unlink()


def of_a_start_that_counts_twice(run_dir):
    copied(run_dir, run_dir / "segment-2", later_ns=10**9)


@pytest.mark.parametrize(
    "fault",
    [
        of_an_unread_gpu,
        of_a_gpu_that_the_sampler_misses,
        of_a_second_start_without_gpus,
        of_a_host_without_gpus,
        of_a_host_without_samples,
        of_a_start_that_counts_twice,
    ],
)
def test_every_device_is_accounted_for_and_none_twice(two_gpus, fault):
    fault(two_gpus)
    found = account(two_gpus)
    assert found["doubts"] and {reason[0] for reason in found["doubts"]} == {"D"}


def test_a_system_may_have_other_thresholds(two_gpus):
    assert account(two_gpus, thresholds={"most_gpu_W": 100.0})["doubts"][0].startswith(
        "P: gpu_0 showed 200 W"
    )
    assert np.isfinite(account(two_gpus)["energy_total_J"])
