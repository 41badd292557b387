"""Energies of whole runs written by hand, every number known: ranks, phases, idle power,
segments, hosts.
"""

from functools import partial

import numpy as np
import pytest

from energynn.measure.account import HostAccount, read_power_trace
from energynn.measure.devices import device_differences
from energynn.measure.energy import SensorEnergy
from tests.measure.worlds import Load, sensor
from tests.run_files import (
    judged,
    letters,
    nanoseconds,
    read_lines,
    rewrite,
    write_lines,
    write_marks,
    write_samples,
)

HOST_W, GPU_W = 100.0, (200.0, 300.0)
S = 10**9


def write_run(folder, gpus_W, told):
    """Write a run of one host, idle at half power before and after 10 s of training.

    told: what each rank tells of its GPUs.
    """
    t_s = np.arange(160) / 10 - 3
    columns = []
    for number, watts in enumerate([HOST_W, *gpus_W]):
        load = Load("constant", 0.0, watts, 1.0, watts / 2, 0.0, 10.0)
        about = sensor("cpu_0", "energy", "cpu", update_s=0.001)
        if number:
            notes = {"uuid": f"GPU-{number - 1}"}
            about |= {"id": f"gpu_{number - 1}", "component": "gpu", "notes": notes}
            about |= {"device": str(number - 1)}
        columns.append((about, 1.5 * watts + load.energy_J(t_s)))
    write_samples(folder, t_s, columns, period_s=0.1)
    for rank, gpus in enumerate(told):
        marks = [
            ("idle_start", -2.5, {"when": "before"}),
            ("idle_end", -0.5, {"when": "before"}),
            ("rank_start", -0.4, gpus),
            ("training_start", 0, {}),
            ("training_end", 10, {}),
            ("idle_start", 10.2, {"when": "after"}),
            ("idle_end", 12.2, {"when": "after"}),
        ]
        write_marks(folder, marks, rank)


@pytest.fixture
def two_gpus(tmp_path):
    """Two ranks with a GPU each on one host."""
    write_run(tmp_path, GPU_W, [{"gpu_uuid": "0"}, {"gpu_uuid": "1"}])
    spans = {
        "phase": [0, 1],
        "gap_us": [1_000_000, 0],
        "length_us": [3_000_000, 5_000_000],
    }
    phases = [{"names": ["forward", "backward"]}, {"t": nanoseconds(0)} | spans]
    for rank in range(2):
        write_lines(tmp_path / f"phases-rank{rank}.jsonl", phases)
    return tmp_path


def test_what_the_ranks_of_a_host_did_not_use_others_did(two_gpus):
    """Two ranks: 3 and 4 s of CPU time, of 10 on their host; a mark without tells nothing."""
    assert "cpu_time_s" not in judged(two_gpus)
    for rank in range(2):

        def used(event, rank=rank):
            at = event["event"] == "training_end"
            if event["event"].startswith("training"):
                event |= {"cpu_own_s": 5 + at * (3 + rank), "cpu_host_s": 100 + 10 * at}

        rewrite(two_gpus / f"events-rank{rank}.jsonl", used)
    found = judged(two_gpus)
    assert (found["cpu_time_s"], found["cpu_time_others_s"]) == (7, 3)
    cut = two_gpus / "segment-2"
    copied(two_gpus, cut, by_s=100, wall_s=100)
    for path in cut.glob("events-*"):
        lines = read_lines(path)
        write_lines(path, [one for one in lines if one["event"] != "training_end"])
    assert "cpu_time_s" not in judged(two_gpus), "a start that did not tell its end"


def copied(folder, target, host="h", by_s=0, wall_s=0, **header):
    """Copy the raw files of a run, of another host or a later start, whose clocks tell more."""
    target.mkdir(exist_ok=True)
    for path in list(folder.glob("*.jsonl")):
        lines = read_lines(path)
        for line in lines:
            for name in line.keys() & {"t", "t_mono_ns"}:
                line[name] += by_s * S
            for name in line.keys() & {"w", "t_wall_ns"}:
                line[name] += wall_s * S
            line |= {"host": host} if "host" in line else {}
            line |= header if "header" in line else {}
        name = path.name
        if host != "h":
            name = name.replace("-h", f"-{host}").replace("rank", "rank1")
        write_lines(target / name, lines)


def test_a_rank_has_its_own_gpu_and_its_part_of_the_host(two_gpus):
    found = judged(two_gpus)
    assert found["doubts"] == [] and found["coverage"] == 1
    assert found["energy_gpu_J"] == pytest.approx(5000, rel=1e-3)
    assert found["energy_cpu_J"] == pytest.approx(1000, rel=1e-3)
    by_key = {(one["rank"], one["phase"]): one for one in found["energy_phases"]}
    for rank, watts in enumerate(GPU_W):
        for phase, seconds in (("forward", 3.0), ("backward", 5.0), ("idle", 2.0)):
            of_phase = by_key[rank, phase]
            assert of_phase["time_s"] == pytest.approx(seconds)
            assert of_phase["energy_gpu_J"] == pytest.approx(seconds * watts, rel=1e-2)
            host_J = seconds * HOST_W / 2
            assert of_phase["energy_cpu_J"] == pytest.approx(host_J, rel=1e-2)
    for name in ("energy_gpu_J", "energy_cpu_J"):
        total_J = sum(one[name] for one in found["energy_phases"])
        assert total_J == pytest.approx(found[name], rel=1e-9)
        assert abs(by_key[None, "unattributed"][name]) < 1e-3 * found[name]


def test_what_belongs_to_no_rank_is_unattributed(two_gpus):
    (two_gpus / "phases-rank1.jsonl").unlink()
    rest = judged(two_gpus)["energy_phases"][-1]
    assert rest["phase"] == "unattributed"
    assert rest["energy_gpu_J"] == pytest.approx(3000, rel=1e-3)
    assert rest["energy_cpu_J"] == pytest.approx(500, rel=1e-3)


def test_idle_power(two_gpus):
    found = judged(two_gpus)
    assert found["idle_power_gpu_before_W"] == pytest.approx(250, rel=1e-3)
    assert found["idle_power_gpu_after_W"] == pytest.approx(250, rel=1e-3)

    def idle_late(line):
        if line["event"] == "idle_start":
            line["t_mono_ns"] += 19 * 10**8

    rewrite(two_gpus / "events-rank1.jsonl", idle_late)  # 0.1 s in which both are idle
    assert "idle_power_gpu_before_W" not in judged(two_gpus)


@pytest.mark.parametrize(
    "told, counted",
    [
        ([{"gpu_uuid": "0"}, {"gpu_uuid": "0"}], 1),
        ([{"gpus": ["GPU-0"]}, {"gpus": ["GPU-1"]}], 2),
        ([{"gpus": ["GPU-2"]}, {"gpus": ["GPU-2"]}], 1),
        ([{"gpus": ["GPU-3", "GPU-1"]}, {"gpus": ["GPU-1"]}, {"gpu_uuid": "0"}], 3),
        ([{}, {"gpus": ["GPU-1"]}], 4),
    ],
)
def test_a_gpu_that_no_rank_may_see_is_in_no_sum(tmp_path, told, counted):
    write_run(tmp_path, [200.0, 201.0, 202.0, 203.0], told)
    found = judged(tmp_path)
    assert found["energy_gpu_J"] == pytest.approx(2000 * counted, rel=0.01)
    assert found["doubts"] == []
    assert len([one for one in found["sensors"] if one.primary]) == 1 + counted


def test_a_gpu_without_a_uuid_is_no_ranks_own(two_gpus):
    """As where ranks train on CPUs: each of them once had the whole GPU's energy."""

    def unnamed(line):
        line.pop("gpu_uuid", None)
        for one in line.get("sensors", []):
            one["notes"] = {}

    for path in two_gpus.glob("*.jsonl"):
        rewrite(path, unnamed)
    *of_ranks, rest = judged(two_gpus)["energy_phases"]
    assert len(of_ranks) == 6 and not any("energy_gpu_J" in one for one in of_ranks)
    assert rest["energy_gpu_J"] == pytest.approx(5000, rel=1e-3)


def test_a_host_trains_from_its_first_rank_to_its_last(two_gpus):
    def late(line):
        by_s = {"training_start": 1, "training_end": -1}.get(line["event"], 0)
        line["t_mono_ns"] += by_s * S

    rewrite(two_gpus / "events-rank1.jsonl", late)
    found = judged(two_gpus)
    assert found["training_time_s"] == 10
    assert found["energy_gpu_J"] == pytest.approx(5000, rel=1e-3)


def test_a_dead_run_has_its_energy_until_its_last_sample(two_gpus):
    lost = [{"training_end"}, {"training_end", "rank_start"}]
    for rank, events in enumerate(lost):
        path = two_gpus / f"events-rank{rank}.jsonl"
        rewrite(path, lambda line, events=events: line["event"] not in events)
    assert judged(two_gpus)["training_time_s"] == pytest.approx(12.9)
    (two_gpus / "samples-h.jsonl").write_text("")
    assert "training_time_s" not in judged(two_gpus)


def test_segments_add_up_and_the_gap_between_them_does_not_count(two_gpus):
    alone = judged(two_gpus)
    copied(two_gpus, two_gpus / "segment-2", wall_s=3600)
    both = judged(two_gpus)
    times = dict.fromkeys(("energy_gpu_J", "energy_total_J", "training_time_s"), 2)
    times |= {"energy_total_bound_J": 2, "mean_power_gpu_W": 1}
    for name, factor in times.items():
        assert both[name] == pytest.approx(factor * alone[name], rel=1e-3), name
    for name in ("energy_total_J", "training_time_s"):
        parts = [getattr(part, name) for part in both["segments"]]
        assert both[name] == pytest.approx(sum(parts)), name
    first, second = both["segments"]
    assert second.start_wall_ns - first.start_wall_ns == 3600 * S
    assert {entry.segment for entry in both["sensors"]} == {1, 2}
    assert both["doubts"] == []
    total_J = sum(entry.get("energy_gpu_J", 0) for entry in both["energy_phases"])
    assert total_J == pytest.approx(both["energy_gpu_J"], rel=1e-9)


def test_hosts_add_up_each_on_its_own_clock(two_gpus):
    copied(two_gpus, two_gpus, host="g", by_s=5000)
    found = judged(two_gpus)
    assert found["nodes"] == 2 and found["training_time_s"] == 10
    total_J = 2 * 10 * (HOST_W + sum(GPU_W))
    assert found["doubts"] == []
    assert found["energy_total_J"] == pytest.approx(total_J, rel=1e-4)
    traces = read_power_trace(two_gpus)
    assert len(traces) == 2 * 3
    for t_s, power_W in (traces["h:gpu_1"], traces["g:gpu_1"]):
        assert power_W[(t_s > 0) & (t_s < 10)] == pytest.approx(300.0)
        assert power_W[t_s < 0] == pytest.approx(150.0)


def lacking(run_dir, kept=1):
    """Leave the first sensors only, and what ranks tell of their GPUs out."""

    def change(line):
        for name in line.keys() & {"sensors", "v"}:
            line[name] = line[name][:kept]
        line.pop("gpu_uuid", None)

    for path in run_dir.glob("*.jsonl"):
        rewrite(path, change)


def of_a_gpu_that_the_sampler_misses(run_dir):
    copied(run_dir, run_dir, unaccounted=["GPU 2"])


def of_a_second_start_that_lacks_a_gpu(run_dir):
    lacking(run_dir, kept=3)
    copied(run_dir, run_dir / "segment-2", wall_s=3600)
    lacking(run_dir / "segment-2", kept=2)


def of_a_host_without_gpus(run_dir):
    copied(run_dir, run_dir / "other", host="g")
    lacking(run_dir / "other")
    for path in (run_dir / "other").iterdir():
        path.rename(run_dir / path.name)


def of_a_host_without_samples(run_dir):
    copied(run_dir, run_dir, host="g")
    (run_dir / "samples-g.jsonl").unlink()


def of_a_machine_of_two_names(run_dir):
    copied(run_dir, run_dir, boot_id="b")
    copied(run_dir, run_dir, host="g")


def of_a_rank_on_a_namesake(run_dir):
    rewrite(run_dir / "events-rank1.jsonl", partial(dict.update, boot_id="c"))
    copied(run_dir, run_dir, boot_id="b")


def of_a_start_that_counts_twice(run_dir):
    copied(run_dir, run_dir / "segment-2", wall_s=1)


@pytest.mark.parametrize(
    "fault, says",
    [
        (of_a_gpu_that_the_sampler_misses, "GPU 2"),
        (of_a_second_start_that_lacks_a_gpu, "segment 2 has 1 gpu sensors"),
        (of_a_host_without_gpus, "g in segment 1 has 0 gpu sensors"),
        (of_a_host_without_samples, "no samples of g"),
        (of_a_machine_of_two_names, "(b): its energy counts twice"),
        (of_a_rank_on_a_namesake, "another machine is called h, too"),
        (of_a_start_that_counts_twice, "two segments overlap"),
    ],
)
def test_every_device_is_accounted_for_and_none_twice(two_gpus, fault, says):
    fault(two_gpus)
    found = judged(two_gpus)
    assert says in found["doubts"][0] and letters(found) == {"D"}


@pytest.mark.parametrize(
    "kinds, lacks",
    [
        (["busy"], ""),  # one estimate stands for all sockets
        (["energy"], "h in segment 2 has 1 cpu sensors, another start or host 2"),
        (["energy", "energy"], ""),
        ([], "h in segment 2 has 0 cpu sensors, another start or host 2"),
    ],
)
def test_a_start_has_the_sockets_of_another_or_an_estimate(kinds, lacks):
    starts = []
    for segment, of_start in enumerate([["energy", "energy"], kinds], start=1):
        own = [
            SensorEnergy(f"cpu_{number}", "cpu", str(number), kind, "measured")
            for number, kind in enumerate(of_start)
        ]
        starts.append([HostAccount("h", segment, sensors=own)])
    assert [
        text.partition(": ")[2][: len(lacks)] for text in device_differences(starts)
    ] == [each for each in [lacks] if each]


@pytest.mark.parametrize(
    "clocks, is_over",
    [
        (dict(by_s=100, wall_s=-3600, boot_id="b"), False),  # the clock is set back
        (dict(by_s=-95, wall_s=-3600, boot_id="another"), False),
        (dict(by_s=5, wall_s=3600, boot_id="b"), True),
    ],
)
def test_order_is_of_the_monotonic_clock_within_a_boot(two_gpus, clocks, is_over):
    copied(two_gpus, two_gpus, boot_id="b")
    copied(two_gpus, two_gpus / "segment-2", **clocks)
    assert letters(judged(two_gpus)) == ({"D"} if is_over else set())
