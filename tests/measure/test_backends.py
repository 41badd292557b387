"""AMD GPUs and Grace CPUs through perun's own backends, with a fake amdsmi and a fake hwmon tree of known power."""

import subprocess
import sys

import pytest

from energynn.files import REPOSITORY
from energynn.measure import perun_backends
from energynn.measure.sensors import Inventory

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


@pytest.fixture(autouse=True)
def nothing_is_there(tmp_path, monkeypatch):
    """A host without AMD and Grace, and perun's singletons as in a new process."""
    monkeypatch.setattr(Singleton, "_instances", {})
    monkeypatch.setattr(perun_backends, "AMD_DRIVER", tmp_path / "no driver")
    monkeypatch.setattr(perun_backends, "HWMON", tmp_path / "no hwmon")
    monkeypatch.setattr(hwmon_grace, "HWMON_PATH", "")  # which is put back at the end
    monkeypatch.setattr(hwmon_grace.cpuinfo, "get_cpu_info", lambda: {"arch": "ARM_8"})
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    yield
    sys.modules.pop("amdsmi", None)


@pytest.fixture
def amdsmi(tmp_path, monkeypatch):
    (tmp_path / "amdsmi.py").write_text(AMDSMI)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(perun_backends, "AMD_DRIVER", tmp_path)
    import amdsmi

    return amdsmi


@pytest.fixture
def hwmon(tmp_path, monkeypatch):
    """A GH200's ACPI power meters: label -> file with microwatts."""
    root = tmp_path / "hwmon"
    files = {}
    for number, name in enumerate(["Module", "Grace", "CPU", "SysIO"]):
        device = root / f"hwmon{number}" / "device"
        device.mkdir(parents=True)
        (device / "power1_oem_info").write_text(f"{name} Power Socket 0\n")
        files[name] = device / "power1_average"
        files[name].write_text(f"{(number + 1) * 50_000_000}\n")
    monkeypatch.setattr(perun_backends, "HWMON", root)
    return files


def backend_sensors(gpus=True):
    inventory = Inventory()
    perun_backends.add_backends(inventory, gpus)
    return inventory


def test_a_host_without_either_starts_nothing():
    """In a process of its own: neither perun's back ends nor its libraries are loaded."""
    program = (
        "import sys; from energynn.measure import perun_backends, sensors\n"
        "inventory = sensors.Inventory(); perun_backends.add_backends(inventory)\n"
        "assert inventory.sensors == []\n"
        "assert not {'perun', 'cpuinfo', 'amdsmi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)


def test_amd_gpus_give_their_powers_in_watts(amdsmi):
    amdsmi.fields[1] = "current_socket_power"  # an MI300
    inventory = backend_sensors()
    assert inventory.problems == inventory.unaccounted == []
    facts = [(s.component, s.device, s.kind, s.to_SI, s.provenance) for s in inventory.sensors]
    assert facts == [("gpu", device, "power", 1.0, "measured") for device in "012"]
    assert [s.read() for s in inventory.sensors] == [100, 200, 300]
    assert inventory.sensors[0].notes["name"] == "MI210"
    assert backend_sensors(gpus=False).sensors == []


@pytest.mark.parametrize("power", [None, 0, "N/A", 0xFFFF, 0xFFFFFFFF])
def test_a_failed_read_of_an_amd_gpu_is_no_zero(amdsmi, power, capfd):
    sensor = backend_sensors().sensors[0]
    amdsmi.watts[0] = power
    with pytest.raises(Exception):  # noqa: B017
        sensor.read()
    amdsmi.watts[0] = 250
    assert sensor.read() == 250
    assert "Traceback" not in "".join(capfd.readouterr())


def test_amdsmi_that_does_not_start_is_said_only_where_there_is_a_driver(
    amdsmi, monkeypatch, tmp_path
):
    amdsmi.initialized = False
    assert "amdsmi_init fails" in backend_sensors().unaccounted[0]
    monkeypatch.setattr(perun_backends, "AMD_DRIVER", tmp_path / "none")
    assert backend_sensors().unaccounted == []


def test_grace_counts_the_cpu_once(hwmon):
    inventory = backend_sensors()
    assert inventory.problems == inventory.unaccounted == []
    (cpu,) = inventory.sensors
    assert (cpu.component, cpu.kind, cpu.provenance) == ("cpu", "power", "simulated")
    assert cpu.device == "CPU Power Socket 0" and cpu.read() * cpu.to_SI == pytest.approx(150.0)


@pytest.mark.parametrize("text", ["", "0\n", "-1\n", "no number\n"])
def test_a_failed_read_of_grace_is_no_zero(hwmon, text, capfd):
    (cpu,) = backend_sensors().sensors
    hwmon["CPU"].write_text(text)
    with pytest.raises(ValueError, match="a failed reading"):
        cpu.read()
    assert "Traceback" not in "".join(capfd.readouterr())


def test_other_power_meters_are_no_cpu_and_one_that_cannot_be_opened_is_said(hwmon):
    hwmon["CPU"].unlink()
    hwmon["CPU"].mkdir()
    inventory = backend_sensors()
    assert inventory.unaccounted == ["CPU Power Socket 0: its power cannot be opened"]
    assert inventory.sensors == []
    for file in hwmon.values():
        file.with_name("power1_oem_info").write_text("Chassis\n")
    assert backend_sensors().sensors == []
