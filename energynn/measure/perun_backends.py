"""AMD GPUs and Grace CPUs through perun's own back ends."""

from __future__ import annotations

import logging
import os
import re
import sys
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from energynn.measure.sensors import Inventory, Sensor, visible_devices

AMD_DRIVER = Path("/sys/module/amdgpu")
NO_POWER_W = 65535.0  # amdsmi's "not supported" has all of 16 or 32 bits set


def backend_sensors(gpus: bool = True) -> Inventory:
    """List AMD GPUs and Grace CPUs through perun's own backends.

    Absent hardware or libraries are no problem, and are found absent without importing perun,
    whose backends take 0.25 s to import and, for Grace, 1 s to start.
    """
    inventory = Inventory()
    backends = [("Grace", _grace_labels, _add_grace_sensors)]
    if gpus:
        backends.append(("AMD", _amd_is_there, _add_amd_sensors))
    for name, is_there, add_sensors in backends:
        try:
            if find_spec("perun") and is_there():
                add_sensors(inventory)
        except Exception as error:  # whatever a vendor's library throws
            text = f"perun's backend for {name} does not start: {type(error).__name__}: {error}"
            inventory.unaccounted.append(text)
    return inventory


def _amd_is_there() -> bool:
    return AMD_DRIVER.exists() and ("amdsmi" in sys.modules or find_spec("amdsmi") is not None)


def _add_amd_sensors(inventory: Inventory) -> None:
    """Add power in W of the AMD GPUs that this job may use, numbered as in amdsmi's list.

    https://rocm.docs.amd.com/projects/amdsmi/en/latest/
    """
    from perun.backend.rocmsmi import ROCMBackend

    _silence("perun.backend.rocmsmi")
    backend = ROCMBackend()
    if not hasattr(backend, "_uuid_map"):  # perun has logged the exception and gone on
        raise ValueError("amdsmi_init fails; `amd-smi list` tells why")
    amdsmi = backend.amdsmi
    gpus = list(backend._uuid_map.items())
    visible, unknown = _visible_amd_gpus([_names_of_amd_gpu(amdsmi, *gpu) for gpu in gpus])
    inventory.unaccounted += unknown
    for number in visible:
        uuid, handle = gpus[number]
        name = amdsmi.amdsmi_get_gpu_board_info(handle)["product_name"]
        read = partial(_amd_power_W, amdsmi, handle)
        sensor = Sensor(f"ROCM:{uuid}_POWER", "gpu", str(number), "power", "measured", read)
        sensor.notes = {
            "uuid": uuid,
            "name": name,
            "power": "average, or current where there is no average",
        }
        if "MI250" in name and _is_silent(sensor):
            inventory.problems.append(f"AMD GPU {number}: the other half of its MI250 counts it")
        else:
            inventory.sensors.append(sensor)


def _amd_power_W(amdsmi, handle) -> int:
    """Read a power; MI300 and newer have no ``average_socket_power``, which perun 1.0.0 reads."""
    powers = amdsmi.amdsmi_get_power_info(handle)
    values = [powers.get(f"{kind}_socket_power") for kind in ("average", "current")]
    return _credible(next(int(value) for value in values if value != "N/A"), 1.0)


def _is_silent(sensor: Sensor) -> bool:
    with suppress(Exception):
        sensor.read()
        return False
    return True


def _names_of_amd_gpu(amdsmi, uuid: str, handle) -> set[str]:
    """Return names of a GPU: amdsmi's UUID, and HIP's as far as this amdsmi knows it."""
    names = {uuid.lower()}
    with suppress(Exception):
        names.add(amdsmi.amdsmi_get_gpu_enumeration_info(handle)["hip_uuid"].lower())
    with suppress(Exception):
        serial = amdsmi.amdsmi_get_gpu_asic_info(handle)["asic_serial"]
        names.add("gpu-" + serial.lower().removeprefix("0x"))
    return names


def _visible_amd_gpus(names: list[set[str]]) -> tuple[list[int], list[str]]:
    """Return the GPUs that this job may use, and a text for each variable that names no GPU.

    HIP_VISIBLE_DEVICES counts within what ROCR_VISIBLE_DEVICES leaves; where it is not set HIP
    takes CUDA_VISIBLE_DEVICES. https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html
    """
    visible, faults = list(range(len(names))), []
    hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    for variable in ("ROCR_VISIBLE_DEVICES", hip):
        known = [names[number] for number in visible]
        chosen, unknown = visible_devices(known, os.environ.get(variable))
        visible = [visible[number] for number in chosen]
        if unknown:
            faults.append(f"{variable} names {unknown!r}, no AMD GPU of this host")
    return sorted(visible), faults


def _grace_labels() -> list[str]:
    """List labels of this host's Grace power sensors; other machines have ACPI meters there."""
    grace = sys.modules.get("perun.backend.hwmon_grace")
    folder = Path(getattr(grace, "HWMON_PATH", "/sys/class/hwmon/"))
    labels = [path.read_text().strip() for path in sorted(folder.glob("*/device/power*_oem_info"))]
    return [label for label in labels if re.search("(CPU|Grace) Power Socket", label)]


def _add_grace_sensors(inventory: Inventory) -> None:
    """Add power in microwatts of the Grace CPUs.

    "CPU Power Socket" is the CPU. "Grace Power Socket" holds the CPU, its DRAM and "SysIO Power
    Socket": a cross-check from above, as a device of its own. SysIO alone is no CPU, and "Module
    Power Socket" holds the GPU, which NVML counts: both are left out.
    https://docs.nvidia.com/dccpu/grace-perf-tuning-guide/power-thermals.html
    """
    from perun.backend import hwmon_grace

    _silence("perun.backend.hwmon_grace")
    backend = hwmon_grace.HWMonGraceBackend()
    is_real = Path(hwmon_grace.HWMON_PATH).resolve().is_relative_to("/sys")
    missing = set(_grace_labels())
    for theirs in backend.getSensors(sorted(backend.availableSensors())):
        label = theirs.metadata["device_name"]
        match = re.search(r"(CPU|Grace) Power Socket ?(\d*)", label)
        if match is None:
            continue
        missing.discard(label)
        socket = match[2] or theirs.metadata["hwmon_device"]
        to_SI = float(theirs.dataType.mag.value)
        ours = Sensor(
            theirs.id,
            "cpu",
            socket if match[1] == "CPU" else f"{socket} with DRAM and SysIO",
            "power",
            "measured" if is_real else "simulated",
            read=partial(_read_theirs, theirs, to_SI),
            to_SI=to_SI,
            primary=match[1] == "CPU",
            notes={"name": label, "power": "average"},
        )
        inventory.sensors.append(ours)
    inventory.unaccounted += [f"{label}: its power cannot be opened" for label in sorted(missing)]


def _read_theirs(theirs, to_SI: float):
    value = theirs.read()
    return _credible(value.item() if hasattr(value, "item") else value, to_SI)


def _credible(power, to_SI: float):
    """Return the power; ValueError for what perun's readers return where they have failed."""
    if not 0 < power * to_SI < NO_POWER_W:
        raise ValueError(f"a failed reading: {power}")
    return power


def _silence(logger: str) -> None:
    """Keep perun from logging a traceback for each failed read; ours is a gap in the samples."""
    logging.getLogger(logger).setLevel(logging.CRITICAL)
