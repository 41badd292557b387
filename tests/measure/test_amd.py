"""AMD GPUs through a fake amdsmi of known power."""

import sys

import pytest

from energynn.host.files import REPOSITORY
from energynn.measure import amd, kernel
from energynn.measure.sensors import Sensor, SensorInventory
from tests.processes import printed

# The power of each GPU is `watts[gpu]`, by the names that its generation has.
AMDSMI = """
class AmdSmiException(Exception): pass
class AmdSmiInitFlags: INIT_AMD_GPUS = 2
initialized, watts, fields = True, [100, 200, 300], ["average_socket_power"] * 4
product_name = "MI210"
def amdsmi_init(flags):
    if not initialized: raise AmdSmiException("driver not loaded")
def amdsmi_get_processor_handles(): return range(len(watts))
def amdsmi_get_gpu_device_uuid(handle): return f"{handle}aff74a0-0000-1000-80de-{handle}bc"
def amdsmi_get_gpu_board_info(handle): return {"product_name": product_name}
def amdsmi_get_gpu_device_bdf(handle): return f"0000:0{handle}:00.0"
def amdsmi_get_power_info(handle):
    power = watts[handle]() if callable(watts[handle]) else watts[handle]
    if power is None: raise AmdSmiException("busy")
    values = {"average_socket_power": "N/A", "current_socket_power": "N/A"}
    return values | {"power_limit": 300_000_000, fields[handle]: power}
"""


@pytest.fixture
def amdsmi(tmp_path, monkeypatch):
    (tmp_path / "amdsmi.py").write_text(AMDSMI)
    monkeypatch.setattr(amd, "AMD_DRIVER_FOLDER", tmp_path)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    import amdsmi

    yield amdsmi
    sys.modules.pop("amdsmi")


def found() -> SensorInventory:
    inventory = SensorInventory()
    amd.add_amd_sensors(inventory)
    return inventory


def test_a_host_without_them_starts_nothing():
    """In a process of its own: no library of theirs is loaded."""
    program = (
        "import sys; from energynn.measure import amd, sensors\n"
        "inventory = sensors.SensorInventory(); amd.add_amd_sensors(inventory)\n"
        "assert inventory.sensors == inventory.unaccounted == []\n"
        "assert not {'perun', 'cpuinfo', 'amdsmi'} & set(sys.modules)"
    )
    printed(sys.executable, "-c", program, cwd=REPOSITORY)


def test_amd_gpus_give_their_powers_in_watts(amdsmi, monkeypatch):
    amdsmi.fields[1] = "current_socket_power"  # an MI300
    inventory = found()
    assert inventory.problems == inventory.unaccounted == []
    assert [(s.device, s.read()) for s in inventory.sensors] == [
        ("0", 100),
        ("1", 200),
        ("2", 300),
    ]
    beside = Sensor("gpu_1_power", "gpu", "1", "power", "measured", read=float)
    both = SensorInventory([beside])
    amd.add_amd_sensors(both)
    assert [sensor.device for sensor in both.sensors] == ["1", "2", "3", "4"]
    own = ["0000:01:00.0"]  # its energy is in the package's
    monkeypatch.setattr(kernel, "list_own_graphics", lambda: own)
    assert [sensor.device for sensor in found().sensors] == ["0", "2"]
    first = inventory.sensors[0]
    kinds = first.component, first.kind, first.to_SI, first.provenance
    assert kinds == ("gpu", "power", 1.0, "measured") and first.notes["name"] == "MI210"


@pytest.mark.parametrize("power", [None, 0, "N/A", 0xFFFF, 0xFFFFFFFF])
def test_a_failed_read_is_no_zero(amdsmi, power, capfd):
    sensor = found().sensors[0]
    amdsmi.watts[0] = power
    with pytest.raises(Exception):  # noqa: B017
        sensor.read()
    amdsmi.watts[0] = 250
    assert sensor.read() == 250
    assert "Traceback" not in "".join(capfd.readouterr())


def test_amdsmi_that_does_not_start_makes_the_record_not_valid(amdsmi):
    amdsmi.initialized = False
    assert "AMD GPUs cannot be read" in found().unaccounted[0]
