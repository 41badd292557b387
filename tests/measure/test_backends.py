"""AMD GPUs and Grace CPUs through perun's own backends, with a fake amdsmi and a fake hwmon tree of known power."""

import subprocess
import sys
import time

import numpy as np
import pytest

from energynn.files import REPOSITORY
from energynn.measure import energy, perun_adapter
from energynn.measure.samples import read_samples
from energynn.measure.sensors import Sampler

pytest.importorskip("perun")
from perun.backend import hwmon_grace  # noqa: E402
from perun.util import Singleton  # noqa: E402

# As perun imports it: three GPUs; the power of each is `watts[gpu]`, by the names that its generation has.
AMDSMI = """
class AmdSmiException(Exception): pass
class AmdSmiInitFlags: INIT_AMD_GPUS = 2
class AmdSmiMemoryType: VRAM = 0
initialized, watts, fields = True, [100, 200, 300], ["average_socket_power"] * 3
def amdsmi_init(flags):
    if not initialized: raise AmdSmiException("driver not loaded")
def amdsmi_shut_down(): pass
def amdsmi_get_lib_version(): return {"major": 25}
def amdsmi_get_processor_handles(): return [0, 1, 2]
def amdsmi_get_gpu_device_uuid(handle): return f"{handle}aff74a0-0000-1000-80de-{handle}bc"
def amdsmi_get_gpu_asic_info(handle): return {"asic_serial": f"0xDEAD{handle}"}
def amdsmi_get_gpu_board_info(handle): return {"product_name": "MI210"}
def amdsmi_get_gpu_memory_usage(handle, kind): return 1
def amdsmi_get_gpu_memory_total(handle, kind): return 2
def amdsmi_get_power_info(handle):
    power = watts[handle]() if callable(watts[handle]) else watts[handle]
    if power is None: raise AmdSmiException("busy")
    values = {"average_socket_power": "N/A", "current_socket_power": "N/A", "power_limit": 300_000_000}
    return values | {fields[handle]: power}
"""
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def nothing_is_there(tmp_path, monkeypatch):
    """A host without AMD and Grace, and perun's singletons as in a new process."""
    monkeypatch.setattr(Singleton, "_instances", {})
    monkeypatch.setattr(perun_adapter, "AMD_DRIVER", tmp_path / "no driver")
    monkeypatch.setattr(hwmon_grace, "HWMON_PATH", str(tmp_path / "no hwmon") + "/")
    monkeypatch.setattr(hwmon_grace.cpuinfo, "get_cpu_info", lambda: {"arch": "ARM_8"})  # takes a second
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    for variable in VISIBLE:
        monkeypatch.delenv(variable, raising=False)
    yield
    sys.modules.pop("amdsmi", None)


@pytest.fixture
def amdsmi(tmp_path, monkeypatch):
    (tmp_path / "amdsmi.py").write_text(AMDSMI)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(perun_adapter, "AMD_DRIVER", tmp_path)
    import amdsmi

    return amdsmi


@pytest.fixture
def hwmon(tmp_path, monkeypatch):
    """A GH200's ACPI power meters: label -> file with microwatts."""
    root = tmp_path / "hwmon"
    labels = ["Module Power Socket 0", "Grace Power Socket 0", "CPU Power Socket 0", "SysIO Power Socket 0"]
    files = {}
    for number, label in enumerate(labels):
        device = root / f"hwmon{number}" / "device"
        device.mkdir(parents=True)
        (device / "power1_oem_info").write_text(label + "\n")
        files[label] = device / "power1_average"
        files[label].write_text(f"{(number + 1) * 50_000_000}\n")
    monkeypatch.setattr(hwmon_grace, "HWMON_PATH", str(root) + "/")
    return files


def test_a_host_without_either_starts_nothing():
    """In a process of its own: neither perun's backends nor its libraries are loaded, in under 0.2 s."""
    program = (
        "import sys, time; from energynn.measure import perun_adapter; begun = time.perf_counter()\n"
        "assert perun_adapter.backend_sensors() == ([], []); assert time.perf_counter() - begun < 0.2\n"
        "assert not {'perun', 'cpuinfo', 'amdsmi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)


def test_perun_is_optional(amdsmi, monkeypatch):
    monkeypatch.setattr(perun_adapter, "find_spec", lambda name: None)
    assert perun_adapter.backend_sensors() == ([], [])


def test_an_amd_gpu_gives_its_power_in_watts(amdsmi):
    found, problems = perun_adapter.backend_sensors()
    assert problems == []
    assert [(s.component, s.device, s.kind, s.to_SI, s.provenance, s.primary) for s in found] == [
        ("gpu", device, "power", 1.0, "measured", True) for device in "012"
    ]
    assert [s.read() for s in found] == [100, 200, 300] and type(found[0].read()) is int
    assert found[0].notes["power"] == "average" and "MI210" in found[0].notes["name"]


@pytest.mark.parametrize(
    "variables, devices",
    [
        ({"ROCR_VISIBLE_DEVICES": "2,0"}, "02"),
        ({"HIP_VISIBLE_DEVICES": "1"}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "1"),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, "2"),  # counted within what the first one leaves
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, "0"),
        ({"ROCR_VISIBLE_DEVICES": ""}, ""),
        ({"ROCR_VISIBLE_DEVICES": "GPU-dead1"}, "1"),
        ({"HIP_VISIBLE_DEVICES": "0,-1,2"}, "0"),
    ],
)
def test_only_the_gpus_of_the_job_count(amdsmi, monkeypatch, variables, devices):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found, problems = perun_adapter.backend_sensors()
    assert "".join(s.device for s in found) == devices and problems == []


def test_a_variable_that_names_no_gpu_is_said(amdsmi, monkeypatch):
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "GPU-beef,0")
    assert perun_adapter.backend_sensors() == (
        [],
        ["ROCR_VISIBLE_DEVICES names 'GPU-beef', no AMD GPU of this host"],
    )


def test_gpus_whose_power_perun_does_not_read(amdsmi):
    amdsmi.fields[1] = "current_socket_power"  # an MI300
    amdsmi.watts[2] = 0  # the second half of an MI250X
    found, problems = perun_adapter.backend_sensors()
    assert [(s.device, s.read(), s.notes["power"]) for s in found] == [("0", 100, "average"), ("1", 200, "current")]
    (problem,) = problems
    assert problem.startswith("AMD GPU 2 (2aff74a0") and "gives no power" in problem


@pytest.mark.parametrize("power", [None, 0, "N/A", 0xFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("field", ["average_socket_power", "current_socket_power"])
def test_a_failed_read_of_a_gpu_is_no_zero(amdsmi, power, field, capfd):
    amdsmi.fields[0] = field
    found, _ = perun_adapter.backend_sensors()
    amdsmi.watts[0] = power
    with pytest.raises((ValueError, amdsmi.AmdSmiException)):
        found[0].read()
    amdsmi.watts[0] = 250
    assert found[0].read() == 250
    assert "Traceback" not in "".join(capfd.readouterr())


def test_amdsmi_that_does_not_start_is_said_only_where_there_is_a_driver(amdsmi, monkeypatch, tmp_path):
    amdsmi.initialized = False
    assert "amdsmi_init fails" in perun_adapter.backend_sensors()[1][0]
    monkeypatch.setattr(perun_adapter, "AMD_DRIVER", tmp_path / "none")
    assert perun_adapter.backend_sensors() == ([], [])


def test_a_broken_amdsmi_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "amdsmi.py").write_text("raise OSError('libamd_smi.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(perun_adapter, "AMD_DRIVER", tmp_path)
    assert perun_adapter.backend_sensors() == (
        [],
        ["perun's backend for AMD does not start: OSError: libamd_smi.so: cannot open shared object file"],
    )


def test_grace_counts_the_cpu_once(hwmon):
    found, problems = perun_adapter.backend_sensors()
    assert problems == []
    facts = {s.notes["name"]: (s.component, s.device, s.primary, s.provenance, s.read() * s.to_SI) for s in found}
    assert facts == {
        "CPU Power Socket 0": ("cpu", "0", True, "simulated", pytest.approx(150.0)),
        "Grace Power Socket 0": ("cpu", "0 with DRAM and SysIO", False, "simulated", pytest.approx(100.0)),
    }
    assert all(s.kind == "power" for s in found) and len({s.id for s in found}) == 2


@pytest.mark.parametrize("text", ["", "0\n", "-1\n", "no number\n"])
def test_a_failed_read_of_grace_is_no_zero(hwmon, text, capfd):
    (cpu,) = [s for s in perun_adapter.backend_sensors()[0] if s.primary]
    hwmon["CPU Power Socket 0"].write_text(text)
    with pytest.raises(ValueError, match="a failed reading"):
        cpu.read()
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_power_meter_of_another_machine_is_no_cpu(hwmon):
    for file in hwmon.values():
        file.with_name("power1_oem_info").write_text("Chassis\n")
    assert perun_adapter.backend_sensors() == ([], []) and hwmon_grace.HWMonGraceBackend not in Singleton._instances


def test_a_grace_sensor_that_cannot_be_opened_is_said(hwmon):
    hwmon["CPU Power Socket 0"].unlink()
    hwmon["CPU Power Socket 0"].mkdir()
    found, problems = perun_adapter.backend_sensors()
    assert problems == ["CPU Power Socket 0: its power cannot be opened"]
    assert [s.primary for s in found] == [False]


def test_energy_of_a_known_power_with_an_outage(amdsmi, tmp_path):
    """P(t) = 200 W + 40 W/s t from 0.6 to 2.6 s, one read in ten fails: 527 J."""
    begun = time.monotonic()
    power = iter(range(10**6))
    amdsmi.watts[1] = lambda: None if next(power) % 10 == 5 else 200 + 40 * (time.monotonic() - begun)
    found, _ = perun_adapter.backend_sensors()
    sampler = Sampler(tmp_path / "samples-a.jsonl", found, 0.02)
    sampler.start()
    time.sleep(2.5)
    sampler.stop()
    samples = read_samples(tmp_path / "samples-a.jsonl")
    assert np.isnan(samples.readings[:, 1]).sum() > 5
    start_ns = int(begun * 1e9) + 600_000_000
    (entry,) = [
        e
        for e in energy.energy_of_sensors(energy.curves(samples), start_ns, start_ns + 2 * 10**9)
        if e["device"] == "1"
    ]
    # perun rounds down to whole watts: half a watt less on average
    assert entry["energy_J"] == pytest.approx(200 * 2 + 40 / 2 * (2.6**2 - 0.6**2) - 1, rel=2e-3)
