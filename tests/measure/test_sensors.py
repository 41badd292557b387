"""Which sensor of each device counts, what is missing, and what the sampler writes."""

import importlib
import itertools
import json
import re
import shutil
import sys
import time
import types
from pathlib import Path

import numpy as np
import psutil
import pytest

from energynn.launch import doctor
from energynn.measure import amd, devices, kernel, machine, sampler_process, sensors
from energynn.measure.samples import read_pieces
from energynn.measure.sensors import Sensor, SensorInventory
from tests import powercap
from tests.measure.test_amd import amdsmi  # noqa: F401
from tests.processes import refused

MODEL = machine.DEFAULT_CPU_MODEL
FAKES = Path(__file__).with_name("fake_sensors")
WATCH_TIMES_S = sensors.SENSOR_WATCH_TIMES_S  # without the short look of these tests


@pytest.fixture(autouse=True)
def no_gpu(tmp_path, monkeypatch):
    """A machine without a GPU, whatever runs these tests, and a short look at sensors."""
    monkeypatch.setattr(kernel, "NVIDIA_DRIVER_FOLDER", tmp_path / "driver")
    monkeypatch.setattr(kernel, "PCI_DEVICES_FOLDER", tmp_path / "pci")
    monkeypatch.setattr(sensors, "HWMON_FOLDER", tmp_path / "hwmon")
    monkeypatch.setattr(amd, "AMD_DRIVER_FOLDER", tmp_path / "amdgpu")
    monkeypatch.setattr(sensors, "SENSOR_WATCH_TIMES_S", (0.3,))
    monkeypatch.setattr(kernel, "POWERCAP_FOLDER", tmp_path / "powercap")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)


def powercap_tree(root, packages=1):
    for number in range(packages):
        zone = f"intel-rapl:{number}"
        powercap.zone(root / zone, f"package-{number}", energy_uJ=10**6)
        powercap.zone(root / f"{zone}:0", "dram", energy_uJ=10**6)


@pytest.fixture
def nvml(monkeypatch):
    """NVML of two GPUs that draw 250 W and have moving counters; a test changes what it says."""
    gpus = [{"high_W": 250.0, "update_s": 0.02, "averaged": True}] * 2
    monkeypatch.setenv("FAKE_GPUS", json.dumps(gpus))
    monkeypatch.delitem(sys.modules, "pynvml")
    monkeypatch.syspath_prepend(FAKES)
    fake = importlib.import_module("pynvml")
    fake.SIMULATED = False
    return fake


def look(visible=None, gpus=True, left_out=()):
    """What counts on this machine, found by its sampler."""
    intent = {"cpu_model": MODEL, "uses_gpus": gpus, "left_out": left_out}
    inventory = sampler_process.find_sensors(intent, visible)
    sampler = sensors.Sampler(Path("samples"), inventory, 0.05)
    sampler.start()
    sampler.stop()
    return inventory


def primary(inventory):
    return [sensor.id for sensor in inventory.sensors if sensor.primary]


# ------------------------------------------------------------------------------------------ CPU


def test_the_cpu_is_estimated_only_where_no_counter_moves(tmp_path, monkeypatch):
    assert primary(look()) == ["cpu_estimate"]
    powercap_tree(tmp_path / "powercap")
    dead = look()
    assert primary(dead) == ["cpu_estimate"] and dead.unaccounted == []
    assert "does not move" in dead.problems[0]
    monkeypatch.setattr(kernel, "POWERCAP_FOLDER", tmp_path / "alive")
    # The same counters by another way, which count once; and a limit.
    copy = tmp_path / "alive" / "intel-rapl-mmio:0"
    with powercap.constant_power(tmp_path / "alive", 100.0):
        copy.symlink_to(tmp_path / "alive" / "intel-rapl:0")
        (copy / "constraint_0_power_limit_uw").write_text("270000000\n")
        time.sleep(0.3)
        (package,) = look().sensors
        before_J, begun = package.read() * package.to_SI, time.monotonic()
        time.sleep(0.5)
        watts = (package.read() * package.to_SI - before_J) / (time.monotonic() - begun)
    assert (package.id, package.provenance) == ("cpu_0_package-0", "simulated")
    assert watts == pytest.approx(100, rel=0.1) and package.update_s < 0.02
    assert package.tell().limit_W == 270.0
    (copy / "constraint_1_power_limit_uw").write_text("300000000\n")  # on mains
    assert package.tell().limit_W == 300.0


@pytest.mark.parametrize(
    "file, content",
    [
        ("energy_uj", b"7" * 20),  # more than a file of samples can hold
        ("energy_uj", b"7" * 400),
        ("energy_uj", b"\xff\xfe"),
        ("energy_uj", None),
        ("name", b"package-\xff"),
        ("name", None),
        ("max_energy_range_uj", b"many"),
        ("", None),
    ],
)
def test_a_foreign_value_is_the_fault_of_its_zone_alone(
    tmp_path, monkeypatch, file, content
):
    powercap_tree(tmp_path / "powercap", packages=2)
    zone = tmp_path / "powercap" / "intel-rapl:1"
    if not file:
        shutil.rmtree(zone)
        zone.symlink_to("nowhere")
    elif content is None:
        (zone / file).unlink()
    else:
        (zone / file).write_bytes(content)
    counts, read = itertools.count(), sensors._read_number_file
    monkeypatch.setattr(
        sensors, "_read_number_file", lambda path: read(path) + next(counts)
    )
    (fault,) = look().unaccounted
    assert "cannot be read: " in fault and "chmod" not in fault
    without = look(left_out=[re.search(r'left_out = \["(.+)"\]', fault)[1]])
    assert without.unaccounted == [] and primary(without)[0] == "cpu_0_package-0"


@pytest.mark.parametrize("name", ["psys", "core", "uncore"])
def test_a_zone_that_does_not_count_may_be_broken(tmp_path, name):
    powercap.zone(tmp_path / "powercap" / "intel-rapl:1", name)
    (tmp_path / "powercap" / "intel-rapl:1" / "max_energy_range_uj").unlink()
    assert [
        one.id
        for one in sampler_process.find_sensors({"cpu_model": MODEL}, None).sensors
    ] == ["cpu_estimate"]


def test_a_socket_without_a_counter_is_told(tmp_path, monkeypatch):
    powercap_tree(tmp_path / "powercap")
    monkeypatch.setattr(kernel, "count_cpu_sockets", lambda: 9)
    assert "of 9 CPU sockets have no counter" in str(look().problems)


def test_a_counter_that_only_root_may_read_names_the_command(tmp_path, monkeypatch):
    powercap_tree(tmp_path / "powercap")

    def forbid(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", forbid)
    refused(
        r"^Permission denied; sudo chmod a\+r .*uj$",
        sensors._read_number_file,
        tmp_path / "powercap" / "intel-rapl:0" / "energy_uj",
    )


@pytest.mark.parametrize(
    "info, way", [("", "modprobe"), ("flags : fpu hypervisor", "host")]
)
def test_an_estimate_says_what_would_make_it_measured(tmp_path, monkeypatch, info, way):
    monkeypatch.setattr(kernel, "CPU_INFO_FILE", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(info)
    (estimate,) = look().sensors
    assert way in estimate.notes["measured_by"]
    powercap_tree(tmp_path / "powercap")
    assert "sudo chmod" in look().sensors[-1].notes["measured_by"]


@pytest.fixture
def grace(tmp_path):
    """A GH200's ACPI power meters: label -> file with microwatts."""
    files = {}
    for number, name in enumerate(["Module", "Grace", "CPU", "SysIO"]):
        device = tmp_path / "hwmon" / f"hwmon{number}" / "device"
        device.mkdir(parents=True)
        (device / "power1_oem_info").write_text(f"{name} Power Socket 0\n")
        files[name] = device / "power1_average"
        files[name].write_text(f"{(number + 1) * 50_000_000}\n")
    return files


def test_grace_counts_the_cpu_once(grace):
    inventory = look()
    assert inventory.problems == inventory.unaccounted == []
    (cpu,) = inventory.sensors
    told = "CPU Power Socket 0: power, measured, counts"
    assert doctor._finding_of_sensor(cpu) == doctor.Finding("CPU", doctor.GOOD, told)
    assert cpu.read() * cpu.to_SI == pytest.approx(150.0)
    for file in grace.values():
        file.with_name("power1_oem_info").write_text("Chassis\n")
    assert primary(look()) == ["cpu_estimate"], "other power meters are no CPU"


@pytest.mark.parametrize("text", ["", "-1\n", "no number\n", None])
def test_grace_that_cannot_be_read_is_unaccounted(grace, text):
    grace["CPU"].unlink()
    if text is None:
        grace["CPU"].mkdir()
    else:
        grace["CPU"].write_text(text)
    (fault,) = look().unaccounted
    assert fault.startswith("CPU Power Socket 0 cannot be read")


def test_waiting_for_a_disk_is_not_busy(monkeypatch):
    times = types.SimpleNamespace(
        user=1, nice=2, system=4, irq=8, softirq=16, iowait=32, idle=64
    )
    monkeypatch.setattr(psutil, "cpu_times", lambda: times)
    assert sensors.busy_core_seconds() == 31


# ------------------------------------------------------------------------------------------ GPUs


def test_a_gpu_counts_by_its_counter_and_without_one_by_its_power(nvml):
    inventory = look()
    assert primary(inventory) == ["gpu_0_energy", "gpu_1_energy", "cpu_estimate"]
    counter, power = inventory.sensors[:2]
    assert power.checks == "gpu_0_energy" and not power.primary
    assert counter.update_s == pytest.approx(0.02, rel=0.2)
    assert power.read() * power.to_SI == 250.0
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda gpu: 7_000  # it stands still
    still = look()
    del nvml.nvmlDeviceGetTotalEnergyConsumption  # an old binding
    for inventory in (still, look()):
        assert primary(inventory)[:2] == ["gpu_0_power", "gpu_1_power"]
        assert inventory.unaccounted == []


@pytest.mark.parametrize(
    "counter_W, power_W, counts, said",
    [
        (450, 300, ["CPU Power Socket 0", "gpu_0_power"], "gpu_0_energy is the whole"),
        (450, 450, ["gpu_0_energy"], "CPU Power Socket 0 is left out"),
        (0, 450, ["gpu_0_power"], "CPU Power Socket 0 is left out"),
    ],
)
def test_a_module_of_gpu_and_cpu_counts_once(
    grace, nvml, counter_W, power_W, counts, said
):
    nvml.nvmlDeviceGetCount = lambda: 1
    nvml.nvmlDeviceGetName = lambda gpu: "NVIDIA GH200 480GB"
    nvml.nvmlDeviceGetPowerUsage = lambda gpu: power_W * 1000
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda gpu: (
        int(time.monotonic() * 50) * counter_W * 20
    )
    inventory = look()
    assert primary(inventory) == counts and inventory.unaccounted == []
    assert said in inventory.problems[0]


@pytest.mark.parametrize(
    "powers, counts",
    [
        ([250, 0, 230, 0], [0, 2]),
        ([250, "N/A", 230, "N/A"], [0, 2]),
        ([250, 240], [0, 1]),
        ([0, 250], None),
    ],
)
def test_a_half_without_a_power_is_in_the_other_s(tmp_path, amdsmi, powers, counts):  # noqa: F811
    """Two modules, of which each second half tells nothing, or one that tells its own."""
    amdsmi.product_name = f"AMD INSTINCT {'MI250X' if powers[0] else 'MI200 (MCM)'}"
    amdsmi.watts = powers
    for handle in range(len(powers)):
        pci(tmp_path, f"0000:0{handle}:00.0", vendor="0x1002", kind="0x038000")
    inventory = look()
    if counts is None:
        assert "a failed reading: 0" in inventory.unaccounted[0]
    else:
        uuids = map(amdsmi.amdsmi_get_gpu_device_uuid, counts)
        names = [f"ROCM:{uuid}_POWER" for uuid in uuids]
        assert primary(inventory)[:-1] == names and inventory.unaccounted == []


@pytest.mark.parametrize(
    "visible, split, refused",
    [
        (None, [0], False),  # beside a whole one
        ("0,1", [0], False),
        ("0", [0], True),
        ("1", [0], False),
        (None, [0, 1], True),
        ("MIG-77", [0], True),
    ],
)
def test_a_gpu_in_parts_has_one_verdict(nvml, visible, split, refused, monkeypatch):
    nvml.nvmlDeviceGetMigMode = lambda gpu: (int(gpu in split), 0)
    inventory = look(visible)
    assert bool(inventory.unaccounted) == refused
    assert all("nvidia-smi" in text for text in inventory.unaccounted)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "0,1")
    states = [finding.state for finding in doctor._examine_gpus()]
    assert visible == "MIG-77" or (doctor.BAD in states) == refused


def test_a_gpu_that_is_lost_is_unaccounted(nvml):
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index if index == 0 else 1 / 0
    inventory = look()
    assert primary(inventory) == ["gpu_0_energy", "cpu_estimate"]
    (fault,) = inventory.unaccounted
    assert "gpu_1" in fault
    without = look(left_out=[re.search(r'left_out = \["(.+)"\]', fault)[1]])
    assert without.unaccounted == [], "neither its counter nor its power is missed"


def pci(tmp_path, address, vendor="0x10de", kind="0x030200"):
    (tmp_path / "pci" / address).mkdir(parents=True)
    (tmp_path / "pci" / address / "vendor").write_text(vendor + "\n")
    (tmp_path / "pci" / address / "class").write_text(kind + "\n")


def test_a_gpu_that_only_others_name_is_unaccounted(tmp_path):
    pci(tmp_path, "0000:03:00.0")
    (fault,) = look().unaccounted
    assert "0000:03:00.0" in fault and "--no-gpu" in fault and "nvidia-ml-py" in fault
    for hidden in ("", "-1"):
        assert look(visible=hidden).unaccounted == []
    without = look(gpus=False)
    assert without.unaccounted == [] and "left out" in without.problems[0]
    information = tmp_path / "driver" / "0000:03:00.0" / "information"
    information.parent.mkdir(parents=True)
    information.write_text("Device Minor: \t 1000000\n")
    assert look().unaccounted == [], "the device file is another job's"


@pytest.mark.parametrize(
    "told, left_out, missed",
    [
        (["41", "81"], [], []),
        (
            ["41"],
            [],
            ["81"],
        ),  # one card is a virtual machine's (vfio), or has another driver
        (["41"], ["0000:81:00.0"], []),
        (["81"], ["0000:81:00.0"], ["41"]),
        (["41", "01"], [], ["81"]),  # as many as there are, but another one
        (["", "41"], [], []),
        ([""], [], ["41", "81"]),
    ],
)
def test_gpus_on_the_bus_are_held_against_nvml_s_one_by_one(
    tmp_path, nvml, told, left_out, missed
):
    for bus in ("41", "81"):
        pci(tmp_path, f"0000:{bus}:00.0")
    nvml.nvmlDeviceGetCount = lambda: len(told)
    nvml.nvmlDeviceGetPciInfo = lambda gpu: types.SimpleNamespace(
        domain=0, bus=int(told[gpu], 16), device=0
    )
    assert [text[16:18] for text in look(left_out=left_out).unaccounted] == missed


GPUS = [{"uuid": "GPU-AA11"}, {"uuid": "GPU-AB22"}, {"uuid": "GPU-CC33"}]


@pytest.mark.parametrize(
    "value, chosen, unknown",
    [
        (None, [0, 1, 2], []),
        ("", [], []),
        ("2,0", [0, 2], []),
        (" 1 , 2 ", [1, 2], []),
        ("0,7,1", [0, 1], ["7"]),
        ("GPU-AB22", [1], []),
        ("GPU-A,GPU-C", [2], ["GPU-A"]),  # two begin so, and one
        ("MIG-77", [], ["MIG-77"]),
        ("0,0,1", [0, 1], ["0"]),
        ("1,GPU-AB22", [1], ["1", "GPU-AB22"]),
    ],
)
def test_visible_devices_are_those_of_the_runtime(value, chosen, unknown):
    assert sensors.parse_visible_devices(GPUS, value) == (chosen, unknown)


@pytest.mark.parametrize(
    "value, intent, told",
    [
        (None, {}, {"gpus": ["GPU-fake-0", "GPU-fake-1"]}),
        ("1", {}, {"gpus": ["GPU-fake-1"]}),
        ("", {}, {"gpus": []}),
        (None, {"left_out": ["gpu0"]}, {"gpus": ["GPU-fake-1"]}),
        (None, {"uses_gpus": False}, {}),
        ("MIG-1234", {}, {}),
    ],
)
def test_a_rank_tells_what_its_command_may_see(monkeypatch, nvml, value, intent, told):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert devices.visible_gpus(intent) == told


def test_a_rank_tells_nothing_where_there_is_no_nvml():
    assert devices.visible_gpus({}) == {}


def test_an_nvml_that_fails_is_no_absence(nvml, monkeypatch):
    monkeypatch.setattr(nvml, "nvmlInit", lambda: 1 / 0)
    assert "NVML does not start" in look().unaccounted[0]


def test_an_old_binding_tells_bytes(nvml):
    name, uuid = nvml.nvmlDeviceGetName, nvml.nvmlDeviceGetUUID
    new = sensors.list_nvml_gpus()
    nvml.nvmlDeviceGetName = lambda gpu: name(gpu).encode()
    nvml.nvmlDeviceGetUUID = lambda gpu: uuid(gpu).encode()
    assert sensors.list_nvml_gpus() == new and new[0]["uuid"] == "GPU-fake-0"


def test_samples_tell_limits_and_whether_a_gpu_is_busy(nvml):
    nvml.nvmlDeviceGetEnforcedPowerLimit = lambda gpu: 300_000
    nvml.nvmlDeviceGetUtilizationRates = lambda gpu: types.SimpleNamespace(gpu=90 * gpu)
    look()
    samples = next(read_pieces(Path("samples")))
    assert samples.header.boot_id
    gpus = [one for one in samples.header.sensors if one.kind == "energy"]
    for is_busy, one in enumerate(gpus):
        states = [line.states[one.id] for line in samples.states]
        told = {(state.limit_W, state.is_busy) for state in states}
        assert told == {(300.0, bool(is_busy))}


# ------------------------------------------------------------------------------------------ sampler


def simulated(read, kind="power"):
    return Sensor("s", "gpu", "0", kind, "simulated", read=read)


def sample(path, sensor, seconds=0.5):
    sampler = sensors.Sampler(path, SensorInventory([sensor]), 0.02)
    sampler.start()
    time.sleep(seconds)
    sampler.stop()
    return next(read_pieces(path))


def test_the_sampler_writes_as_it_reads(tmp_path):
    calls = itertools.count()

    def read():
        if next(calls) % 10 == 3:
            raise OSError("a driver hiccup")
        return time.monotonic_ns()

    samples = sample(tmp_path / "s", simulated(read, "energy"))
    assert 15 <= len(samples.t_ns) <= 40, "of 25, on a busy machine"
    is_good = np.isfinite(samples.readings[:, 0])
    assert 0 < (~is_good).sum() < 10, "a failed reading is a gap"
    assert np.abs(samples.readings[is_good, 0] - samples.t_ns[is_good]).max() < 5e7
    (sensor,) = samples.header.sensors
    assert sensor.primary and sensor.update_s < 0.05
    assert samples.header.unaccounted == []


@pytest.mark.parametrize("beat_s", [0.4, 1.1])
def test_a_counter_that_is_renewed_slowly_tells_its_beat(tmp_path, monkeypatch, beat_s):
    monkeypatch.setattr(sensors, "SENSOR_WATCH_TIMES_S", WATCH_TIMES_S)
    slow = simulated(lambda: 50.0 * (time.monotonic() // beat_s), "energy")
    (told,) = sample(tmp_path / "s", slow).header.sensors
    assert told.primary and told.update_s == pytest.approx(beat_s, rel=0.1)


def test_nothing_is_sampled_more_often_than_it_can_be_read(tmp_path):
    slow = simulated(lambda: time.sleep(0.1) or 250.0)
    header = sample(tmp_path / "s", slow).header
    assert 0.1 < header.period_s < 0.2


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf"), None, "12"])
def test_what_cannot_be_true_is_a_gap(tmp_path, value):
    begun = time.monotonic()
    sensor = simulated(lambda: 200.0 if time.monotonic() < begun + 0.3 else value)
    samples = sample(tmp_path / "s", sensor, seconds=0.3)
    assert np.isnan(samples.readings[-5:]).all()
    (problem,) = samples.problems
    assert "s cannot be read" in problem
