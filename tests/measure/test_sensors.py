"""Which sensor of each device counts, what is missing, and what the sampler writes."""

import itertools
import sys
import threading
import time
import types

import numpy as np
import pytest

from energynn.measure import machine, sampler_process, sensors
from energynn.measure.samples import read_samples
from energynn.measure.sensors import Inventory, Sensor
from tests import powercap

MODEL = machine.CPU_MODEL


@pytest.fixture(autouse=True)
def no_gpu(tmp_path, monkeypatch):
    """A machine without a GPU, whatever runs these tests, and a short look at sensors."""
    monkeypatch.setattr(sensors, "NVIDIA_DRIVER", tmp_path / "driver")
    monkeypatch.setattr(sensors, "PCI_DEVICES", tmp_path / "pci")
    monkeypatch.setattr(sensors, "WATCH_S", 0.3)
    monkeypatch.setitem(sys.modules, "pynvml", None)


def powercap_tree(root, packages=1):
    for package in range(packages):
        zones = {f"intel-rapl:{package}": f"package-{package}", f"intel-rapl:{package}:0": "dram"}
        for zone, name in zones.items():
            folder = root / zone
            folder.mkdir(parents=True)
            (folder / "name").write_text(name + "\n")
            (folder / "energy_uj").write_text("1000000\n")
            (folder / "max_energy_range_uj").write_text("262143328850\n")
    return root


def fake_nvml(gpus=2):
    """NVML of GPUs that draw 250 W, have moving counters and say nothing else."""
    nvml = types.ModuleType("pynvml")
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = lambda: gpus
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
    nvml.nvmlDeviceGetName = lambda handle: "a GPU"
    nvml.nvmlDeviceGetPowerUsage = lambda handle: 250_000
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: int(time.monotonic() * 50) * 5_000
    return nvml


@pytest.fixture
def nvml(monkeypatch):
    fake = fake_nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def look(powercap="nowhere", **facts):
    """What counts on this machine: an inventory after its sensors were watched."""
    inventory = sensors.find(MODEL, powercap=sensors.Path(powercap), **facts)
    return sensors.choose(inventory, sensors.watch(inventory.sensors, sensors.reading))


def primary(inventory):
    return [sensor.id for sensor in inventory.sensors if sensor.primary]


# ------------------------------------------------------------------------------------------ CPU


def test_the_cpu_is_estimated_only_where_no_counter_moves(tmp_path):
    assert primary(look()) == ["cpu_estimate"]
    dead = look(powercap_tree(tmp_path / "dead"))
    assert primary(dead) == ["cpu_estimate"] and dead.unaccounted == []
    assert "does not move" in dead.problems[0]
    writer = powercap.constant_power(tmp_path / "alive", 100.0)
    try:
        time.sleep(0.3)
        (package,) = look(tmp_path / "alive").sensors
        before_J, begun = package.read() * package.to_SI, time.monotonic()
        time.sleep(0.5)
        watts = (package.read() * package.to_SI - before_J) / (time.monotonic() - begun)
    finally:
        writer.kill()
        writer.wait()
    assert (package.id, package.provenance) == ("cpu_0_package-0", "simulated")
    assert watts == pytest.approx(100, rel=0.1) and package.update_s < 0.02


@pytest.mark.parametrize("file", ["name", "max_energy_range_uj", "energy_uj"])
def test_one_of_two_sockets_that_cannot_be_read_is_unaccounted(tmp_path, file, monkeypatch):
    powercap_tree(tmp_path, packages=2)
    counts = itertools.count(1)
    monkeypatch.setattr(
        sensors, "_read_whole_number", lambda path: next(counts) + 0 * int(path.read_text())
    )
    broken = tmp_path / "intel-rapl:1" / file
    broken.unlink()
    broken.mkdir()  # reading it fails, for root too
    inventory = look(tmp_path)
    assert primary(inventory) == ["cpu_0_package-0", "ram_0_dram", "ram_1_dram"]
    (fault,) = inventory.unaccounted
    assert "intel-rapl:1" in fault and "sudo chmod" in fault


def test_limits_of_zones_are_noted(tmp_path):
    zone = powercap_tree(tmp_path) / "intel-rapl:0"
    (zone / "constraint_0_max_power_uw").write_text("270000000\n")
    (zone / "constraint_1_power_limit_uw").write_text("420000000\n")
    package, dram = sensors.rapl_sensors(tmp_path)
    assert (package.notes, dram.notes) == ({"limit_W": 420.0}, {})
    (zone / "max_energy_range_uj").write_text("-1\n")
    with pytest.raises(ValueError, match="range is -1"):
        sensors.rapl_sensors(tmp_path)[0].read()


def test_busy_time_counts_what_this_machine_does():
    before = sensors.busy_core_seconds()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    assert sensors.busy_core_seconds() - before > 0.2


# ------------------------------------------------------------------------------------------ GPUs


def test_a_gpu_counts_by_its_counter_and_without_one_by_a_power(nvml):
    answer = types.SimpleNamespace(nvmlReturn=0, value=types.SimpleNamespace(uiVal=300_000))
    nvml.nvmlDeviceGetFieldValues = lambda handle, fields: [answer] if fields == [186] else 1 / 0
    nvml.nvmlDeviceGetPowerManagementLimit = lambda handle: 400_000
    inventory = look()
    assert primary(inventory) == ["gpu_0_energy", "gpu_1_energy", "cpu_estimate"]
    counter, instant, power = inventory.sensors[:3]
    assert instant.checks == power.checks == "gpu_0_energy" and not instant.primary
    assert counter.update_s == pytest.approx(0.02, rel=0.2)
    assert instant.read() * instant.to_SI == 300.0 and power.read() * power.to_SI == 250.0
    assert power.notes["power"] == "an average over 1 s" and counter.notes["limit_W"] == 400.0
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: 7_000  # it stands still
    assert primary(look())[:2] == ["gpu_0_power_instant", "gpu_1_power_instant"]
    answer.nvmlReturn = 3  # NVML_ERROR_NOT_SUPPORTED
    assert primary(look())[:2] == ["gpu_0_power", "gpu_1_power"]
    assert look().unaccounted == []


@pytest.mark.parametrize("name", ["TotalEnergyConsumption", "PowerUsage", "UUID", "Name"])
def test_a_binding_without_one_function_gives_the_rest(nvml, name):
    delattr(nvml, f"nvmlDeviceGet{name}")
    inventory = look(gpus=True)
    sensor = "gpu_0_power" if name == "TotalEnergyConsumption" else "gpu_0_energy"
    assert primary(inventory)[0] == sensor and inventory.unaccounted == []
    assert [gpu["index"] for gpu in machine.gpus()] == [0, 1]


def test_a_gpu_that_is_lost_is_unaccounted(nvml):
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda index: (
        time.monotonic_ns() if index == 0 else 1 / 0
    )
    nvml.nvmlDeviceGetPowerUsage = lambda index: 250_000 if index == 0 else 1 / 0
    inventory = look()
    assert primary(inventory) == ["gpu_0_energy", "cpu_estimate"]
    assert inventory.unaccounted and all("gpu_1" in text for text in inventory.unaccounted)


def pci(tmp_path, address, vendor="0x10de", kind="0x030200"):
    (tmp_path / "pci" / address).mkdir(parents=True)
    (tmp_path / "pci" / address / "vendor").write_text(vendor + "\n")
    (tmp_path / "pci" / address / "class").write_text(kind + "\n")


def driver(tmp_path, address, minor):
    (tmp_path / "driver" / address).mkdir(parents=True)
    (tmp_path / "driver" / address / "information").write_text(f"Device Minor: \t {minor}\n")


def test_a_gpu_that_only_others_name_is_unaccounted(tmp_path, monkeypatch):
    pci(tmp_path, "0000:01:00.0", kind="0x020000")  # NVIDIA's network
    pci(tmp_path, "0000:02:00.0", vendor="0x1002")  # AMD's GPU
    assert look().unaccounted == [], "no NVIDIA GPU"
    pci(tmp_path, "0000:03:00.0")
    (fault,) = look().unaccounted
    assert "0000:03:00.0" in fault and "--no-gpu" in fault and "nvidia-ml-py" in fault
    for hidden in ("", "-1"):
        assert look(visible=hidden).unaccounted == []
    without = look(gpus=False)
    assert without.unaccounted == [] and "left out" in without.problems[0]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(gpus=0))
    assert "NVML lists 0 of the 1" in look().unaccounted[0]
    driver(tmp_path, "0000:03:00.0", minor=10**6)  # the device file is another job's
    assert look().unaccounted == []


def test_nvml_is_started_twice(nvml):
    starts = []

    def start():
        starts.append(time.monotonic())
        if len(starts) == 1:
            raise RuntimeError("Unknown Error")

    nvml.nvmlInit = start
    assert primary(look())[0] == "gpu_0_energy"
    nvml.nvmlInit = lambda: 1 / 0
    assert "NVML does not start" in look().unaccounted[0]


UUIDS = ["GPU-AA11", "GPU-AB22", "GPU-CC33"]


@pytest.mark.parametrize(
    "value, chosen, unknown",
    [
        (None, [0, 1, 2], []),
        ("", [], []),
        ("2,0", [0, 2], []),
        (" 1 , 2 ", [1, 2], []),
        ("0,7,1", [0, 1], ["7"]),
        ("gpu-ab22", [1], []),
        ("MIG-77", [], ["MIG-77"]),
    ],
)
def test_visible_devices_are_those_of_the_runtime(value, chosen, unknown):
    assert sensors.visible_devices(UUIDS, value) == (chosen, unknown)


def test_a_variable_that_names_no_gpu_makes_it_unaccounted(nvml):
    inventory = look(visible="1,5")
    assert primary(inventory)[0] == "gpu_1_energy"
    assert "names 5, no whole GPU" in inventory.unaccounted[0]


def test_all_ranks_of_a_host_say_which_gpus_they_see(tmp_path, monkeypatch):
    for rank, value in enumerate(["0", "2"]):
        monkeypatch.setenv("PMI_RANK", str(rank))
        monkeypatch.setenv("PMI_SIZE", "2")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        sampler_process.announce_gpus(tmp_path)
    assert sampler_process.visible_gpus(tmp_path, 2) == "0,2"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    sampler_process.announce_gpus(tmp_path)
    assert sampler_process.visible_gpus(tmp_path, 2) is None, "one sees all"


# ------------------------------------------------------------------------------------------ sampler


def simulated(read, kind="power", **facts):
    return Sensor("s", "gpu", "0", kind, "simulated", read, **facts)


def sample(path, *found, seconds=0.5, period_s=0.02):
    sampler = sensors.Sampler(path, Inventory(list(found)), period_s)
    sampler.start()
    time.sleep(seconds)
    sampler.stop()
    return read_samples(path)


def test_the_sampler_writes_as_it_reads(tmp_path):
    calls = itertools.count()

    def read():
        if next(calls) % 10 == 3:
            raise OSError("a driver hiccup")
        return time.monotonic_ns()

    samples = sample(tmp_path / "s", simulated(read, "energy"))
    assert 15 <= len(samples.t_ns) <= 40, "of 25, on a machine that does other things, too"
    is_good = np.isfinite(samples.readings[:, 0])
    assert 0 < (~is_good).sum() < 10, "a failed reading is a gap"
    assert np.abs(samples.readings[is_good, 0] - samples.t_ns[is_good]).max() < 5e7
    (sensor,) = samples.header["sensors"]
    assert sensor["primary"] and samples.header["unaccounted"] == [] and sensor["update_s"] < 0.05


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf"), None, "12"])
def test_what_cannot_be_true_is_a_gap(tmp_path, value, capsys):
    begun = time.monotonic()
    sensor = simulated(lambda: 200.0 if time.monotonic() < begun + 0.3 else value)
    samples = sample(tmp_path / "s", sensor, seconds=0.3)
    assert np.isnan(samples.readings[-5:]).all()
    assert capsys.readouterr().err.count("s cannot be read") == 1


def test_a_late_sampler_leaves_out_what_it_has_missed(tmp_path):
    waits = itertools.chain([0.0] * 5, [0.5], itertools.repeat(0.0))
    sensor = simulated(lambda: time.sleep(next(waits)) or 1.0, "busy")
    samples = sample(tmp_path / "s", sensor, seconds=0.9, period_s=0.01)
    periods = (samples.t_ns[-1] - samples.t_ns[0]) / 1e7
    assert len(samples.t_ns) < periods - 35


def test_a_sensor_that_never_answers_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sensors.Sampler, "FIRST_S", 0.5)
    monkeypatch.setattr(sensors.Sampler, "LAST_S", 0.2)
    answers, never = threading.Event(), threading.Event()
    answers.set()
    mute = simulated(lambda: 1.0 if answers.is_set() else never.wait())
    sampler = sensors.Sampler(tmp_path / "s", Inventory([mute]), 0.02)
    sampler.start()
    answers.clear()
    time.sleep(0.1)
    sampler.stop()
    assert "s does not answer" in capsys.readouterr().err
    with pytest.raises(TimeoutError, match="s does not answer"):
        sensors.Sampler(tmp_path / "t", Inventory([mute]), 0.02).start()
    never.set()
