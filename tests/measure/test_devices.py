"""GPUs that ranks may see count, others do not; starts and hosts have the same devices."""

import json
import os
import sys

import pytest

from energynn.measure import account, devices
from energynn.measure.samples import pieces
from tests.measure.test_sensors import fake_nvml, look, no_gpu, nvml, pci  # noqa: F401

S = 10**9


def gpu(number, kind="energy"):
    facts = {"component": "gpu", "device": str(number), "kind": kind, "primary": True}
    facts |= {"id": f"gpu_{number}_{kind}", "provenance": "simulated", "to_SI": 1.0}
    facts |= {"wraps_at": None, "checks": None, "update_s": 0.1, "model": None}
    return facts | {"notes": {"uuid": f"GPU-{number}"}}


def segment(folder, numbers, seen=None, begin_s=100, boot_id="b", wall_s=0, host="h"):
    """A start of 12 s on GPUs of 100 W each, of which the ranks of ``seen`` see some."""
    folder.mkdir(parents=True, exist_ok=True)
    header = {"header": "energynn-samples/1", "host": host, "period_s": 0.1}
    header |= {"boot_id": boot_id, "sensors": [gpu(number) for number in numbers]}
    lines = [header]
    for step in range(140):
        t, joules = begin_s * S + step * S // 10, [10.0 * step] * len(numbers)
        lines.append({"t": t, "w": t + wall_s * S, "v": joules})
    path = folder / f"samples-{host}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for rank, uuids in enumerate(seen or [None]):
        marks = []
        for name, at_s in (
            ("rank_start", 0),
            ("training_start", 1),
            ("training_end", 13),
        ):
            t = int((begin_s + at_s) * S)
            mark = {"event": name, "t_mono_ns": t, "t_wall_ns": t + wall_s * S}
            marks.append(mark | {"rank": rank, "host": host})
        if uuids is not None:
            marks[0]["gpus"] = uuids
        path = folder / f"events-rank{rank}.jsonl"
        path.write_text("".join(json.dumps(mark) + "\n" for mark in marks))
    return folder


def account_of(*folders):
    from energynn.measure.samples import read_events

    return account.account({folder: read_events(folder) for folder in folders})


@pytest.mark.parametrize(
    "seen, true_J",
    [
        ([["GPU-0"], ["GPU-1"]], 2400),
        ([["GPU-2"], ["GPU-2"]], 1200),
        ([["GPU-3", "GPU-1"], ["GPU-1"], ["GPU-0"]], 3600),
        ([None, ["GPU-1"]], 4800),
    ],
)
def test_what_no_rank_may_see_is_in_no_sum(tmp_path, seen, true_J):
    found = account_of(segment(tmp_path / "a", range(4), seen))
    assert found["energy_gpu_J"] == pytest.approx(true_J, rel=0.01)
    missed = account_of(segment(tmp_path / "b", range(2), [["GPU-0"], ["GPU-7"]]))
    assert any("no sensor of GPU 7" in doubt for doubt in missed["doubts"])


def test_a_start_that_lacks_a_gpu_is_doubted(tmp_path):
    first = segment(tmp_path / "a", range(2))
    lacking = segment(tmp_path / "b", range(1), begin_s=200)
    whole = segment(tmp_path / "c", range(2), begin_s=200)
    said = [text for text in account_of(first, lacking)["doubts"] if "sensors" in text]
    assert len(said) == 1 and "has 1 gpu" in said[0]
    assert "another start" not in " ".join(account_of(first, whole)["doubts"])


def test_order_is_of_the_monotonic_clock_within_a_boot(tmp_path):
    first = segment(tmp_path / "a", range(1), wall_s=3600)
    later = segment(tmp_path / "b", range(1), begin_s=200)  # the clock is set back
    other = segment(tmp_path / "c", range(1), begin_s=5, boot_id="another")
    at_once = segment(tmp_path / "d", range(1), begin_s=105, wall_s=7200)
    for second, is_over in ((later, False), (other, False), (at_once, True)):
        doubts = " ".join(account_of(first, second)["doubts"])
        assert ("overlap" in doubts) == is_over


def test_a_machine_of_two_names_counts_once(tmp_path):
    folder = segment(tmp_path / "a", range(1))
    segment(tmp_path / "b", range(1), host="other")
    for old, new in (
        ("samples-other", "samples-other"),
        ("events-rank0", "events-rank1"),
    ):
        os.rename(tmp_path / "b" / f"{old}.jsonl", folder / f"{new}.jsonl")
    assert "counts twice" in " ".join(account_of(folder)["doubts"])


def test_a_rank_tells_what_its_command_may_see(tmp_path, monkeypatch, nvml):  # noqa: F811
    seen = {None: ["GPU-0", "GPU-1"], "1": ["GPU-1"], "": [], "GPU-0": ["GPU-0"]}
    for value, uuids in seen.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value or "")
        if value is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        assert devices.visible({}) == {"gpus": uuids}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    assert devices.visible({}) == devices.visible({"uses_gpus": False}) == {}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert devices.visible({"left_out": ["gpu0"]}) == {"gpus": ["GPU-1"]}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert devices.visible({}) == {}


def test_samples_tell_limits_and_whether_a_gpu_is_busy(nvml):  # noqa: F811
    nvml.nvmlDeviceGetEnforcedPowerLimit = lambda gpu: 300_000
    nvml.nvmlDeviceGetUtilizationRates = lambda gpu: type("", (), {"gpu": 90 * gpu})
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda gpu: []
    look()
    samples = next(pieces(look.__globals__["Path"]("samples")))
    assert samples.header["boot_id"]
    told = {
        sensor["id"]: {
            (state.limit_W, state.is_busy) for _, state in samples.states_of(sensor)
        }
        for sensor in samples.header["sensors"]
        if sensor["component"] == "gpu"
    }
    assert told["gpu_0_energy"] == {(300.0, False)}
    assert told["gpu_1_energy"] == {(300.0, True)}
