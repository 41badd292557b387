import os
import sys
import threading
import time
import types

import numpy as np
import pytest

from energynn.measure import machine, sensors
from energynn.measure.samples import read_samples
from tests import powercap

MODEL = {"name": "m", "idle_W_per_core": 1.0, "full_W_per_core": 2.0, "source": "a test"}


def powercap_tree(root, packages=1):
    for package in range(packages):
        for zone, name in ((f"intel-rapl:{package}", f"package-{package}"), (f"intel-rapl:{package}:0", "dram")):
            folder = root / zone
            folder.mkdir(parents=True)
            (folder / "name").write_text(name + "\n")
            (folder / "energy_uj").write_text("1000000\n")
            (folder / "max_energy_range_uj").write_text("262143328850\n")
    return root


def test_packages_and_dram_are_found_and_said_to_be_simulated(tmp_path):
    found, problems = sensors.find(MODEL, powercap_tree(tmp_path, packages=2))
    assert problems == []
    assert [(s.component, s.device, s.kind, s.provenance) for s in found if s.kind == "energy"] == [
        ("cpu", "0", "energy", "simulated"),
        ("ram", "0", "energy", "simulated"),
        ("cpu", "1", "energy", "simulated"),
        ("ram", "1", "energy", "simulated"),
    ]
    assert found[0].read() == 1000000 and found[0].wraps_at == 262143328850.0


def test_the_cpu_is_estimated_only_where_it_has_no_sensor(tmp_path):
    (estimate,) = [s for s in sensors.find(MODEL, tmp_path / "nothing")[0] if s.component == "cpu"]
    assert estimate.provenance == "estimated" and estimate.model["idle_W_per_core"] == 1.0
    still = [s for s in sensors.find(MODEL, powercap_tree(tmp_path))[0] if s.component == "cpu"]
    assert [(s.provenance, s.primary) for s in still] == [("simulated", True), ("estimated", False)], "in reserve"


def test_beside_a_counter_that_moves_nothing_is_estimated(tmp_path):
    writer = powercap.constant_power(tmp_path, 100.0)
    try:
        time.sleep(0.3)
        found, _ = sensors.find(MODEL, tmp_path)
    finally:
        writer.kill()
        writer.wait()
    assert [sensor.kind for sensor in found if sensor.component == "cpu"] == ["energy"]


def test_busy_time_counts_what_this_machine_does(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 5000 600 7 8 9 0 0\ncpu0 1 1 1 1\n")
    assert sensors.busy_core_seconds(stat) == pytest.approx((100 + 20 + 30 + 7 + 8) / os.sysconf("SC_CLK_TCK"))
    before = sensors.busy_core_seconds()
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        pass
    assert sensors.busy_core_seconds() - before > 0.1


def fake_nvml(counter=True):
    nvml = types.ModuleType("pynvml")
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 2
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
    nvml.nvmlDeviceGetName = lambda handle: b"a GPU"
    nvml.nvmlDeviceGetPowerUsage = lambda handle: 250_000

    def energy_counter(handle):
        if not counter:
            raise RuntimeError("Not Supported")
        return 7_000

    nvml.nvmlDeviceGetTotalEnergyConsumption = energy_counter
    return nvml


def test_gpus_counter_first_and_only_those_of_the_job(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    found, _ = sensors.nvml_sensors("1")
    assert [(s.id, s.kind, s.primary) for s in found] == [
        ("gpu_1_energy", "energy", True),
        ("gpu_1_power", "power", False),
    ]
    assert found[0].read() * found[0].to_SI == 7.0 and found[1].read() * found[1].to_SI == 250.0
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(counter=False))
    assert [(s.id, s.primary) for s in sensors.nvml_sensors("1")[0]] == [("gpu_1_power", True)]


def test_what_a_gpu_does_not_say_leaves_the_rest(monkeypatch):
    """Name, UUID, limit and power are NVML's to refuse; the counter stays, and with it the GPU."""
    nvml = fake_nvml()
    for name in ("UUID", "Name", "PowerUsage"):
        monkeypatch.setattr(nvml, f"nvmlDeviceGet{name}", lambda handle: 1 / 0)
    nvml.nvmlSystemGetDriverVersion = lambda: 1 / 0
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found, problems = sensors.nvml_sensors("1")
    assert [(sensor.id, sensor.primary) for sensor in found] == [("gpu_1_energy", True)] and problems == []
    assert [gpu["index"] for gpu in machine.gpus()] == [0, 1]


def test_the_instant_power_stands_beside_the_averaged_one_or_before_it(monkeypatch):
    nvml = fake_nvml()
    answer = types.SimpleNamespace(nvmlReturn=0, value=types.SimpleNamespace(uiVal=300_000))
    nvml.nvmlDeviceGetFieldValues = lambda handle, fields: [answer] if fields == [186] else 1 / 0
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found, _ = sensors.nvml_sensors("0")
    assert [(sensor.id, sensor.primary, sensor.checks) for sensor in found] == [
        ("gpu_0_energy", True, None),
        ("gpu_0_power_instant", False, "gpu_0_energy"),
        ("gpu_0_power", False, "gpu_0_energy"),
    ]
    assert found[1].read() * found[1].to_SI == 300.0
    assert [sensor.notes.get("power") for sensor in found] == [None, "instantaneous", "an average over 1 s"]
    monkeypatch.setattr(nvml, "nvmlDeviceGetTotalEnergyConsumption", lambda handle: 1 / 0)
    assert [sensor.primary for sensor in sensors.nvml_sensors("0")[0]] == [True, False], "no counter"
    answer.nvmlReturn = 3  # NVML_ERROR_NOT_SUPPORTED
    assert [sensor.id for sensor in sensors.nvml_sensors("0")[0]] == ["gpu_0_power"]


def test_a_counter_that_moves_seldom_is_watched_for_longer():
    begun = time.monotonic()

    def every(period_s):
        return sensors.Sensor(
            f"{period_s}", "gpu", "0", "energy", "measured", lambda: (time.monotonic() - begun) // period_s
        )

    for period_s in (0.02, 0.1):
        assert sensors.watch_updates([every(period_s)])[f"{period_s}"] == pytest.approx(period_s, rel=0.1)
    still = sensors.Sensor("still", "gpu", "0", "energy", "measured", lambda: 7.0)
    before = time.monotonic()
    assert sensors.watch_updates([still]) == {} and time.monotonic() - before < 1.0


def test_all_parts_of_a_gpu_have_names_whatever_their_numbers():
    class Nvml:
        nvmlDeviceGetHandleByIndex = staticmethod(lambda index: "GPU-AA11")
        nvmlDeviceGetUUID = staticmethod(lambda handle: handle)
        nvmlDeviceGetMaxMigDeviceCount = staticmethod(lambda handle: 4)
        nvmlDeviceGetMigDeviceHandleByIndex = staticmethod(lambda handle, part: {1: "MIG-1", 3: "MIG-3"}[part])
        nvmlDeviceGetName = staticmethod(lambda part: {"MIG-3": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"}[part])

    names = {"gpu-aa11": "", "mig-gpu-aa11": "MIG", "mig-1": "MIG", "mig-3": "MIG 1g.10gb"}
    assert sensors.names_of_gpu(Nvml, 0) == names
    for value, part in {
        None: "",
        "0": "",
        "GPU-aa11": "",
        "MIG-1": "MIG",
        " MIG-3": "MIG 1g.10gb",
        "MIG-GPU-AA11/1/0": "MIG",
    }.items():
        assert sensors.name_of_part(names, value) == part


def test_a_part_of_a_gpu_is_another_device_than_the_whole(monkeypatch):
    nvml = fake_nvml()
    nvml.nvmlDeviceGetMaxMigDeviceCount = lambda handle: 1
    nvml.nvmlDeviceGetMigDeviceHandleByIndex = lambda handle, part: f"part {part}"
    nvml.nvmlDeviceGetUUID = lambda handle: "MIG-7" if handle == "part 0" else f"GPU-{handle}"
    nvml.nvmlDeviceGetName = lambda handle: "a GPU MIG 1g.10gb" if handle == "part 0" else b"a GPU"
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    named = {}
    for visible in ("GPU-0", "MIG-7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        named[visible] = machine.gpus()[0]["name"]
    assert named == {"GPU-0": "a GPU", "MIG-7": "a GPU MIG 1g.10gb"}


GPUS = [{"gpu-aa11", "mig-gpu-aa11"}, {"gpu-ab22", "mig-gpu-ab22", "mig-77"}, {"gpu-cc33", "mig-gpu-cc33"}]


@pytest.mark.parametrize(
    "value, chosen, wrong",
    [
        (None, [0, 1, 2], None),
        ("", [], None),
        ("2,0", [2, 0], None),
        (" 1 , 2 ", [1, 2], None),
        ("-1", [], None),
        ("0,-1,2", [0], None),
        ("0,7,1", [0], "7"),
        ("GPU-AB22", [1], None),
        ("GPU-c", [2], None),
        ("NoDevFiles", [], None),
        ("MIG-GPU-ab22/1/0,MIG-GPU-ab22/2/0", [1], None),
        ("MIG-77", [1], None),
        ("GPU-beef,0", [], "GPU-beef"),
    ],
)
def test_visible_devices_are_those_of_the_runtime(value, chosen, wrong):
    assert sensors.visible_devices(GPUS, value) == (chosen, wrong)


def test_a_variable_that_names_no_gpu_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    found, (problem,) = sensors.nvml_sensors("1,5,0")
    assert {sensor.device for sensor in found} == {"1"} and "names '5', no GPU of this host" in problem


def test_a_sensor_that_never_answers_is_named_and_nobody_waits_for_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sensors.Sampler, "FIRST_S", 0.2)
    monkeypatch.setattr(sensors.Sampler, "LAST_S", 0.2)
    answers, never = threading.Event(), threading.Event()
    answers.set()

    def read():
        if not answers.is_set():
            never.wait()
        return 1.0

    good = sensors.Sensor("good", "cpu", "0", "busy", "simulated", lambda: 5.0)
    mute = sensors.Sensor("mute", "gpu", "0", "busy", "simulated", read)
    sampler = sensors.Sampler(tmp_path / "s", [good, mute], 0.02)
    sampler.start()
    answers.clear()
    time.sleep(0.1)
    sampler.stop()
    assert any("mute does not answer" in problem for problem in read_samples(tmp_path / "s").problems)
    assert '"ended"' not in (tmp_path / "s").read_text()
    with pytest.raises(TimeoutError, match="no first sample"):
        sensors.Sampler(tmp_path / "t", [good, mute], 0.02).start()
    assert "mute does not answer" in capsys.readouterr().err
    never.set()


def test_the_sampler_writes_as_it_reads(tmp_path):
    readings = iter(range(10**6))

    def read():
        value = next(readings)
        if value == 3:
            raise OSError("a driver hiccup")
        return value

    sensor = sensors.Sensor("s", "cpu", "0", "busy", "simulated", read)
    sampler = sensors.Sampler(tmp_path / "samples.jsonl", [sensor], 0.02)
    begun = time.monotonic()
    sampler.start()
    assert len(read_samples(tmp_path / "samples.jsonl").t_ns) >= 1  # header and first sample, before all else
    time.sleep(0.5)
    sampler.note({"CPU_0": 5})
    assert sampler.lines.flush(60)  # another thread writes
    written = read_samples(tmp_path / "samples.jsonl")
    periods = (time.monotonic() - begun) / 0.02
    assert 15 <= len(written.t_ns) <= periods + 2  # of 25 periods, on a machine that does other things too
    assert written.readings[3, 0] != written.readings[3, 0]  # the failed read is a gap
    assert written.perun[0]["perun"] == {"CPU_0": 5}
    sampler.stop()
    again = read_samples(tmp_path / "samples.jsonl")
    assert again.status[-1]["missed_deadlines"] >= 0 and again.problems == [
        "s cannot be read (a driver hiccup); the gap is in the record"
    ]
    overhead = again.overhead()
    assert 0.01 < overhead["interval_p50_s"] < 0.03 and 0 < overhead["thread_cpu_s"] < 0.5


def test_a_late_sampler_leaves_out_what_it_has_missed(tmp_path):
    """It goes on in time: readings that follow each other at once would tell nothing."""
    waits = iter([0.0] * 5 + [0.5] + [0.0] * 10**6)
    sensor = sensors.Sensor("s", "cpu", "0", "busy", "simulated", lambda: time.sleep(next(waits)) or 1.0)
    sampler = sensors.Sampler(tmp_path / "samples.jsonl", [sensor], 0.01)
    sampler.start()
    time.sleep(0.9)
    sampler.stop()
    written = read_samples(tmp_path / "samples.jsonl")
    periods = (written.t_ns[-1] - written.t_ns[0]) / 1e7
    assert len(written.t_ns) < periods - 35


def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path, capsys):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    sampler = sensors.Sampler("/dev/full", [], 0.1)
    sampler.sample()
    sampler.sample()
    assert capsys.readouterr().err.count("No space left on device") == 1


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf")])
def test_what_cannot_be_true_is_a_gap(tmp_path, capsys, value):
    sampler = sensors.Sampler(tmp_path / "s", [sensors.Sensor("s", "gpu", "0", "power", "simulated", lambda: value)], 1)
    sampler.sample()
    sampler.sample()
    assert np.isnan(read_samples(tmp_path / "s").readings).all()
    assert capsys.readouterr().err.count("s cannot be read (it says") == 1


def test_a_wall_clock_that_is_set_shows_and_changes_no_reading(tmp_path):
    ahead_s = iter([*[0.0] * 10, 0.3, *[0.0] * 10, *[5000.0] * 10])  # once a lost core, once a clock that is set
    sampler = sensors.Sampler(tmp_path / "s", [], 1, wall_ns=lambda: time.monotonic_ns() + int(next(ahead_s) * 1e9))
    for _ in range(31):
        sampler.sample()
    steps = read_samples(tmp_path / "s").wall_clock_steps()
    assert [round(step["step_s"]) for step in steps] == [5000]


def test_an_nvml_that_does_not_start_is_said_and_its_absence_is_not(monkeypatch):
    class NVMLError_LibRmVersionMismatch(Exception):
        pass

    nvml = fake_nvml()

    def fail():
        raise NVMLError_LibRmVersionMismatch("Driver/library version mismatch")

    nvml.nvmlInit = fail
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found, (problem,) = sensors.nvml_sensors()
    assert found == [] and "version mismatch" in problem and "restart" in problem
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert sensors.nvml_sensors() == ([], [])


def test_a_gpu_that_is_lost_and_a_counter_that_may_not_be_read_are_said(tmp_path, monkeypatch):
    nvml = fake_nvml()
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index if index == 0 else 1 / 0
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    counter = powercap_tree(tmp_path) / "intel-rapl:0" / "energy_uj"
    counter.unlink()
    counter.mkdir()  # reading it fails, for root too
    found, problems = sensors.find(MODEL, tmp_path)
    assert {sensor.id for sensor in found} == {
        "ram_0_dram",
        "gpu_0_energy",
        "gpu_0_power",
        "gpu_1_energy",
        "cpu_estimate",
    }
    (lost,) = [sensor for sensor in found if sensor.id == "gpu_1_energy"]
    with pytest.raises(ZeroDivisionError):  # one of two GPUs is missing, and its sensor says so at each reading
        lost.read()
    assert "sudo chmod a+r" in problems[0] and "GPU 1 cannot be read" in problems[1]


def test_how_often_a_counter_changes_is_seen():
    fast = sensors.Sensor("f", "cpu", "0", "energy", "simulated", lambda: time.monotonic_ns())
    slow = sensors.Sensor("s", "gpu", "0", "energy", "simulated", lambda: int(time.monotonic() / 0.05))
    still = sensors.Sensor("0", "gpu", "1", "energy", "simulated", lambda: 7)
    sensors.watch_updates([fast, slow, still])
    assert fast.update_s < 0.01 and slow.update_s == pytest.approx(0.05, abs=0.02) and still.update_s is None


def test_how_often_a_power_is_renewed_is_seen_where_that_is_not_whenever_it_is_read():
    """By what it shows: one that mostly stays the same is renewed more often than it seems."""

    def power(read):
        return sensors.Sensor("p", "gpu", "0", "power", "simulated", read)

    held, coarse = power(lambda: int(time.monotonic() / 0.03)), power(lambda: int(time.monotonic() / 0.03) % 6 < 2)
    fresh, still = power(lambda: time.monotonic_ns()), power(lambda: 300.0)
    slow_to_read = power(lambda: time.sleep(0.02) or int(time.monotonic() / 0.01))
    for sensor in (held, coarse, fresh, still, slow_to_read):
        sensors.watch_updates([sensor])
    assert held.update_s == pytest.approx(0.03, abs=0.01) and coarse.update_s < 0.1
    assert fresh.update_s is None and still.update_s is None and slow_to_read.update_s is None


def test_a_power_that_is_slow_to_read_hides_no_counters_changes(tmp_path):
    """Without the mend the counter seems to change whenever it is looked at, every 30 ms."""
    counter = sensors.Sensor("e", "cpu", "0", "energy", "simulated", lambda: time.monotonic_ns() // 10**6)
    power = sensors.Sensor("p", "gpu", "0", "power", "simulated", lambda: time.sleep(0.03) or 300.0)
    sampler = sensors.Sampler(tmp_path / "samples.jsonl", [power, counter], 0.1)
    sampler.start()
    sampler.stop()
    assert counter.update_s < 0.015
    assert read_samples(tmp_path / "samples.jsonl").header["sensors"][1]["update_s"] == counter.update_s


def test_rapl_counts_microjoules(tmp_path):
    found, _ = sensors.rapl_sensors(powercap_tree(tmp_path))
    assert [sensor.read() * sensor.to_SI for sensor in found] == [1.0, 1.0]  # J


def test_one_of_two_sockets_that_may_not_be_read_is_missing_and_not_absent(tmp_path):
    counter = powercap_tree(tmp_path, packages=2) / "intel-rapl:1" / "energy_uj"
    counter.unlink()
    counter.mkdir()
    found, (problem,) = sensors.rapl_sensors(tmp_path)
    assert [sensor.device for sensor in found if sensor.component == "cpu"] == ["0", "1"] and "chmod" in problem
    with pytest.raises(OSError):
        found[-1].read()


def test_limits_are_noted_where_they_are_and_cost_nothing_where_not(tmp_path, monkeypatch):
    nvml = fake_nvml()
    nvml.nvmlDeviceGetPowerManagementLimit = lambda handle: 400_000 if handle == 0 else 1 / 0
    nvml.nvmlDeviceGetPowerUsage = lambda handle: 250_000 if handle == 0 else 1 / 0
    nvml.nvmlSystemGetDriverVersion = lambda: "580.1"
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found, problems = sensors.nvml_sensors()
    limits_W = {sensor.id: sensor.notes.get("limit_W") for sensor in found}
    assert problems == [] and limits_W["gpu_0_energy"] == 400.0 and limits_W["gpu_1_energy"] is None
    assert [gpu["power_limit_W"] for gpu in machine.gpus()] == [400.0, None]
    assert {gpu["driver"] for gpu in machine.gpus()} == {sensor.notes["driver"] for sensor in found} == {"580.1"}
    zone = powercap_tree(tmp_path) / "intel-rapl:0"
    (zone / "constraint_0_max_power_uw").write_text("270000000\n")
    (zone / "constraint_1_power_limit_uw").write_text("420000000\n")
    (zone / "constraint_1_max_power_uw").write_text("0\n")
    assert [sensor.notes for sensor in sensors.rapl_sensors(tmp_path)[0]] == [{"limit_W": 420.0}, {}]


def test_a_part_of_a_gpu_is_known_by_its_name_and_counts_as_its_whole(monkeypatch):
    """With MIG a job is shown a part by its UUID, and only the whole GPU has sensors."""
    nvml, parts = fake_nvml(), {1: ["MIG-p", "MIG-q"]}
    nvml.nvmlDeviceGetMaxMigDeviceCount = lambda handle: 7 if handle in parts else 0
    nvml.nvmlDeviceGetMigDeviceHandleByIndex = lambda handle, part: parts[handle][
        part
    ]  # IndexError where there is none
    nvml.nvmlDeviceGetUUID = lambda handle: handle if isinstance(handle, str) else f"GPU-{handle}"
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for shown in ("MIG-q", "MIG-GPU-1/2/0"):
        found, problems = sensors.nvml_sensors(shown)
        assert [sensor.device for sensor in found] == ["1", "1"] and len(problems) == 1, shown
        assert "what others do on that GPU counts, too" in problems[0]
    assert "names 'MIG-r', no GPU" in sensors.nvml_sensors("MIG-r")[1][0] and sensors.nvml_sensors("GPU-1")[1] == []
