"""AMD GPUs through their own library, which is imported only where there are some."""

import re
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from energynn.measure import kernel
from energynn.measure.sensors import Sensor, SensorInventory

AMD_DRIVER_FOLDER = Path("/sys/module/amdgpu")
UNSUPPORTED_POWER_W = 65535  # amdsmi's "not supported" has all of 16 or 32 bits set


def add_amd_sensors(inventory: SensorInventory) -> None:
    """Add all AMD GPUs of this host, numbered as in amdsmi's list, behind those of NVIDIA.

    https://rocm.docs.amd.com/projects/amdsmi/en/latest/
    """
    if not (AMD_DRIVER_FOLDER.exists() and find_spec("amdsmi")):
        return
    try:
        import amdsmi

        amdsmi.amdsmi_init(amdsmi.AmdSmiInitFlags.INIT_AMD_GPUS)
        nvidias = [
            int(one.device) for one in inventory.sensors if one.component == "gpu"
        ]
        first = max(nvidias, default=-1) + 1
        for number, handle in enumerate(amdsmi.amdsmi_get_processor_handles()):
            uuid = amdsmi.amdsmi_get_gpu_device_uuid(handle)
            board = amdsmi.amdsmi_get_gpu_board_info(handle)
            name = f"ROCM:{uuid}_POWER"
            read = partial(_read_power_W, amdsmi, handle)
            device = str(first + number)
            sensor = Sensor(name, "gpu", device, "power", "measured", read=read)
            if number % 2 and re.search("MI2[05]0", board["product_name"]):
                try:
                    read()
                except Exception:  # whatever a vendor's library throws
                    # the power of the one before is that of both halves
                    sensor.device = str(first + number - 1)
            sensor.notes = {"uuid": uuid, "name": board["product_name"]}
            with suppress(Exception):  # an old amdsmi
                sensor.notes["pci"] = amdsmi.amdsmi_get_gpu_device_bdf(handle).lower()
            if sensor.notes.get("pci") not in kernel.list_own_graphics():
                inventory.sensors.append(sensor)
    except Exception as error:  # whatever a vendor's library throws
        inventory.unaccounted.append(
            f"AMD GPUs cannot be read: {type(error).__name__}; see `amd-smi list`"
        )


def _read_power_W(amdsmi, handle) -> int:
    """Read a power; MI300 and newer have no ``average_socket_power``, which perun 1.0.0 reads.

    Raises ValueError for what stands for a failed reading.
    """
    powers = amdsmi.amdsmi_get_power_info(handle)
    values = [powers.get(f"{kind}_socket_power") for kind in ("average", "current")]
    told = [int(value) for value in values if value not in (None, "N/A")]
    power_W = told[0] if told else 0
    if not 0 < power_W < UNSUPPORTED_POWER_W:
        raise ValueError(f"a failed reading: {power_W}")
    return power_W
