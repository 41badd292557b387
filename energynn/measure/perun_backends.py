"""AMD GPUs and Grace CPUs through perun's own back ends."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from energynn.measure.sensors import Inventory, Sensor

HWMON = Path("/sys/class/hwmon")
AMD_DRIVER = Path("/sys/module/amdgpu")
NO_POWER_W = 65535.0  # amdsmi's "not supported" has all of 16 or 32 bits set


def add_backends(inventory: Inventory, gpus: bool = True) -> None:
    """Add AMD GPUs and Grace CPUs.

    Absent hardware or libraries are no problem, and are found absent without importing perun,
    whose back ends take 0.25 s to import and, for Grace, 1 s to start.
    """
    has_amd = gpus and AMD_DRIVER.exists() and find_spec("amdsmi")
    for is_there, add_sensors in ((has_amd, _add_amd), (_grace_labels(), _add_grace)):
        try:
            if is_there and find_spec("perun"):
                # perun would log a traceback for each failed read; ours is a gap in the samples.
                logging.getLogger("perun.backend").setLevel(logging.CRITICAL)
                add_sensors(inventory)
        except Exception as error:  # whatever a vendor's library throws
            fault = f"perun's back end does not start: {type(error).__name__}: {error}"
            inventory.unaccounted.append(fault)


def _add_amd(inventory: Inventory) -> None:
    """Add all AMD GPUs of this host, numbered as in amdsmi's list.

    https://rocm.docs.amd.com/projects/amdsmi/en/latest/
    """
    from perun.backend.rocmsmi import ROCMBackend

    backend = ROCMBackend()
    if not hasattr(backend, "_uuid_map"):  # perun has logged the exception and gone on
        raise ValueError("amdsmi_init fails; `amd-smi list` tells why")
    for number, (uuid, handle) in enumerate(backend._uuid_map.items()):
        name = backend.amdsmi.amdsmi_get_gpu_board_info(handle)["product_name"]
        read = partial(_amd_power_W, backend.amdsmi, handle)
        sensor = Sensor(f"ROCM:{uuid}_POWER", "gpu", str(number), "power", "measured", read)
        sensor.notes = {"uuid": uuid, "name": name, "power": "of the socket"}
        inventory.sensors.append(sensor)


def _amd_power_W(amdsmi, handle) -> int:
    """Read a power; MI300 and newer have no ``average_socket_power``, which perun 1.0.0 reads."""
    powers = amdsmi.amdsmi_get_power_info(handle)
    values = [powers.get(f"{kind}_socket_power") for kind in ("average", "current")]
    return _credible(next(int(value) for value in values if value != "N/A"), 1.0)


def _grace_labels() -> list[str]:
    """List labels of this host's Grace CPUs; other machines have other meters there."""
    labels = []
    for path in sorted(HWMON.glob("*/device/power*_oem_info")):
        with suppress(OSError):
            labels += re.findall("CPU Power Socket.*", path.read_text())
    return labels


def _add_grace(inventory: Inventory) -> None:
    """Add power in microwatts of the Grace CPUs: "CPU Power Socket".

    "Grace Power Socket" holds their DRAM, too, and "Module Power Socket" the GPU that NVML counts.
    https://docs.nvidia.com/dccpu/grace-perf-tuning-guide/power-thermals.html
    """
    from perun.backend import hwmon_grace

    hwmon_grace.HWMON_PATH = f"{HWMON}/"
    backend = hwmon_grace.HWMonGraceBackend()
    provenance = "measured" if HWMON.resolve().is_relative_to("/sys") else "simulated"
    meters = backend.getSensors(sorted(backend.availableSensors()))
    by_label = {meter.metadata["device_name"]: meter for meter in meters}
    for label in _grace_labels():
        meter = by_label.get(label)
        if meter is None:
            inventory.unaccounted.append(f"{label}: its power cannot be opened")
            continue
        to_SI = float(meter.dataType.mag.value)
        read = partial(_read_meter, meter, to_SI)
        sensor = Sensor(meter.id, "cpu", label, "power", provenance, read, to_SI)
        sensor.notes = {"power": "average"}
        inventory.sensors.append(sensor)


def _read_meter(meter, to_SI: float):
    return _credible(np.asarray(meter.read()).item(), to_SI)


def _credible(power, to_SI: float):
    """Return the power; ValueError for what perun's readers return where they have failed."""
    if not 0 < power * to_SI < NO_POWER_W:
        raise ValueError(f"a failed reading: {power}")
    return power
