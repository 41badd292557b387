"""Sensors of one host: find them, choose the one that counts for each device, write readings."""

from __future__ import annotations

import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from energynn.measure.samples import Lines

POWERCAP = Path("/sys/class/powercap")
POWERCAP_VARIABLE = "ENERGYNN_POWERCAP"  # another powercap tree, for tests and drills
NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")
PCI_DEVICES = Path("/sys/bus/pci/devices")
WATCH_S = 1.0  # before the first sample, to see which sensors work
LONGEST_UPDATE_S = 1.5  # a counter that changes less often is not valid


@dataclass
class Sensor:
    """One readable quantity of one device.

    ``kind`` says what a reading is: ``energy`` a cumulative counter, ``power`` an instant or
    average, ``busy`` the cumulative busy time of all cores in core-seconds. ``to_SI`` turns a
    reading into J, W or core-seconds. ``wraps_at`` is the reading at which a counter starts again;
    ``update_s`` the time between changes, None if unknown. One sensor of each device is primary;
    ``checks`` names the primary sensor that measures the same. The others never enter a sum.
    """

    id: str
    component: str  # gpu, cpu or ram
    device: str
    kind: str
    provenance: str
    read: Callable[[], float]
    to_SI: float = 1.0
    wraps_at: float | None = None
    primary: bool = True
    checks: str | None = None
    update_s: float | None = None
    model: dict | None = None
    notes: dict = field(default_factory=dict)

    def describe(self) -> dict:
        """Give everything but the reader, for the header of the samples file."""
        return {name: value for name, value in vars(self).items() if name != "read"}


@dataclass
class Inventory:
    """Sensors of a host, problems in words, and one text for each device that no sensor reads."""

    sensors: list[Sensor] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unaccounted: list[str] = field(default_factory=list)


def find(
    cpu_model: dict,
    powercap: Path = POWERCAP,
    visible: str | None = None,
    gpus: bool = True,
    others: Inventory | None = None,
) -> Inventory:
    """List the sensors that this host may have; ``choose`` says which of them work.

    ``visible`` is a value of CUDA_VISIBLE_DEVICES, None for all GPUs. Without ``gpus`` GPUs are
    left out. ``others`` come from perun's back ends. The CPU's estimate from ``cpu_model`` comes
    last: it counts where nothing else does.
    """
    others = others or Inventory()
    nvidia = nvml_sensors(visible) if gpus else Inventory()
    if not gpus and nvidia_gpus():
        nvidia.problems.append("the GPUs of this host are left out, as asked for")
    return Inventory(
        [*rapl_sensors(powercap), *nvidia.sensors, *others.sensors, cpu_estimate(cpu_model)],
        nvidia.problems + others.problems,
        nvidia.unaccounted + others.unaccounted,
    )


def choose(inventory: Inventory, faults: dict[str, str]) -> Inventory:
    """Make one sensor of each device primary, and drop those with a fault (id -> words).

    Where no RAPL zone works at all, as in many virtual machines, the estimate stands for the CPU.
    """
    working = [sensor for sensor in inventory.sensors if sensor.id not in faults]
    if any(sensor.component == "cpu" and sensor.kind != "busy" for sensor in working):
        working = [sensor for sensor in working if sensor.kind != "busy"]
    first: dict[tuple[str, str], Sensor] = {}
    for sensor in working:
        primary = first.setdefault((sensor.component, sensor.device), sensor)
        if primary is not sensor:
            sensor.primary = False
            sensor.checks = primary.id
    chosen = Inventory(working, list(inventory.problems), list(inventory.unaccounted))
    rapl_works = any(_is_zone(sensor) for sensor in working)
    for sensor in inventory.sensors:
        if sensor.id in faults and (sensor.component, sensor.device) not in first:
            is_absent = _is_zone(sensor) and not rapl_works
            lines = chosen.problems if is_absent else chosen.unaccounted
            lines.append(f"{sensor.id} {faults[sensor.id]}")
    return chosen


def _is_zone(sensor: Sensor) -> bool:
    return sensor.kind == "energy" and sensor.component != "gpu"


def watch(sensors: list[Sensor], read: Callable[[Sensor], float]) -> dict[str, str]:
    """Note how often each sensor changes; return id -> fault of those that tell nothing."""
    watched = [sensor for sensor in sensors if sensor.kind != "busy"]
    news: dict[str, list[tuple[float, float]]] = {sensor.id: [] for sensor in watched}
    faults = {}
    end_s = time.monotonic() + WATCH_S
    while watched and time.monotonic() < end_s:
        for sensor in watched:
            try:
                value = read(sensor)
            except Exception as error:  # whatever a driver throws
                faults[sensor.id] = f"cannot be read ({error})"
                continue
            if not news[sensor.id] or news[sensor.id][-1][1] != value:
                news[sensor.id].append((time.monotonic(), value))
        time.sleep(0.001)
    for sensor in watched:
        times_s = [time_s for time_s, _ in news[sensor.id]]
        if times_s:
            faults.pop(sensor.id, None)
        if len(times_s) == 1 and sensor.kind == "energy":
            faults[sensor.id] = f"does not move: it shows {news[sensor.id][0][1]}"
        if len(times_s) > 2:
            sensor.update_s = float(np.median(np.diff(times_s[1:])))
    return faults


def reading(sensor: Sensor) -> float:
    """Read a sensor; raises ValueError for what is no number of zero or more."""
    value = sensor.read()
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"it says {value}")
    return value


def _fail(error: Exception) -> float:
    raise error


# ------------------------------------------------------------------------------------------ CPU


def rapl_sensors(powercap: Path = POWERCAP) -> list[Sensor]:
    """List CPU packages and DRAM of the powercap tree; counters in microjoules that wrap around.

    A zone that cannot be read has a sensor that raises. Counters outside of /sys are somebody's
    imitation of one: their provenance is ``simulated``.
    """
    provenance = "measured" if powercap.resolve().is_relative_to("/sys") else "simulated"
    sensors = []
    for zone in sorted(powercap.glob("intel-rapl:*")):
        package = re.match(r"intel-rapl:(\w+)", zone.name)[1]
        try:
            name = (zone / "name").read_text().strip()
            component = {"package": "cpu", "dram": "ram"}.get(re.split(r"[-\d]", name)[0])
            if component is None:
                continue
            wraps_at = int((zone / "max_energy_range_uj").read_text())
            if wraps_at < 0:
                raise ValueError(f"its range is {wraps_at}")
            _read_whole_number(zone / "energy_uj")
        except (OSError, ValueError) as error:
            read = partial(_fail, ValueError(f"{error}; sudo chmod a+r {zone}/*"))
            sensors.append(Sensor(zone.name, "cpu", zone.name, "energy", provenance, read))
            continue
        sensor = Sensor(
            f"{component}_{package}_{name}",
            component,
            package,
            "energy",
            provenance,
            read=partial(_read_whole_number, zone / "energy_uj"),
            to_SI=1e-6,
            wraps_at=float(wraps_at),
            notes=_limit_of_zone(zone),
        )
        sensors.append(sensor)
    return sensors


def _limit_of_zone(zone: Path) -> dict:
    """Return ``limit_W``, the most that any limit of a RAPL zone allows; nothing without one."""
    limits_W = []
    for path in zone.glob("constraint_*_uw"):
        with suppress(OSError, ValueError):
            limits_W.append(int(path.read_text()) / 1e6)
    return {"limit_W": max(limits_W)} if max(limits_W, default=0) > 0 else {}


def _read_whole_number(path: Path) -> int:
    return int(path.read_text())


def cpu_estimate(model: dict) -> Sensor:
    """Estimate all CPU cores of this host by a linear model of busy time: never a measurement."""
    model = {**model, "cores": os.cpu_count()}
    return Sensor("cpu_estimate", "cpu", "all", "busy", "estimated", busy_core_seconds, model=model)


def busy_core_seconds() -> float:
    """Return the time that all cores have been busy since boot, in core-seconds."""
    times = psutil.cpu_times()  # guest time is part of user; stolen time is somebody else's
    return round(times.user + times.nice + times.system + times.irq + times.softirq, 2)


# ------------------------------------------------------------------------------------------ GPUs

POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT, in mW; bindings of before 2023 do not name it
# What NVML raises where there is no NVIDIA GPU, or none that a program could use.
NO_GPU = (
    "ImportError",
    "ModuleNotFoundError",
    "NVMLError_LibraryNotFound",
    "NVMLError_DriverNotLoaded",
)
NOTHING_VISIBLE = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES


def nvml_sensors(visible: str | None = None) -> Inventory:
    """List energy counters and powers of the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves.

    A GPU that the driver or the PCI bus names and NVML does not list is unaccounted for.
    """
    inventory = Inventory()
    if visible in NOTHING_VISIBLE:
        return inventory
    there = nvidia_gpus()
    try:
        pynvml = start_nvml()
        notes = notes_of_gpus(pynvml)
    except Exception as error:
        if there or type(error).__name__ not in NO_GPU:
            fault = f"NVIDIA GPUs {' '.join(there)}: NVML does not start ({error})"
            remedy = "install nvidia-ml-py, look at nvidia-smi, or say --no-gpu"
            inventory.unaccounted.append(f"{fault}; {remedy}")
        return inventory
    if visible is None and len(there) > len(notes):
        fault = f"NVML lists {len(notes)} of the {len(there)} NVIDIA GPUs {' '.join(there)}"
        inventory.unaccounted.append(f"{fault}; look at nvidia-smi, or say --no-gpu")
    chosen, unknown = visible_gpus(notes, visible)
    if unknown:
        fault = f"CUDA_VISIBLE_DEVICES names {', '.join(unknown)}, no whole GPU of this host"
        inventory.unaccounted.append(f"{fault}; write numbers, or UUIDs as `nvidia-smi -L` does")
    for index in chosen:
        inventory.sensors += _sensors_of_gpu(pynvml, index, notes[index])
    return inventory


def start_nvml():
    """Import NVML's binding and start it; a driver may need a moment, so this is tried twice."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except Exception as error:
        if type(error).__name__ in NO_GPU and not nvidia_gpus():
            raise
        time.sleep(0.5)
        pynvml.nvmlInit()
    return pynvml


def nvidia_gpus() -> list[str]:
    """List PCI addresses of this host's NVIDIA GPUs by witnesses that are not NVML.

    Of a driver that is loaded count the GPUs whose device file this process may open: containers
    and batch systems hide the others. Without a driver count those on the PCI bus.
    """
    addresses = []
    for path in NVIDIA_DRIVER.glob("*/information"):
        minor = re.search(r"Device Minor:\s*(\d+)", path.read_text())
        if minor is None or os.access(f"/dev/nvidia{minor[1]}", os.R_OK | os.W_OK):
            addresses.append(path.parent.name)
    if NVIDIA_DRIVER.is_dir():
        return sorted(addresses)
    for device in PCI_DEVICES.glob("*"):
        with suppress(OSError):
            facts = (device / "vendor").read_text() + (device / "class").read_text()
            if re.match("0x10de\n0x03", facts):
                addresses.append(device.name)
    return sorted(addresses)


def _instant_power_mW(pynvml, handle) -> int:
    (answer,) = pynvml.nvmlDeviceGetFieldValues(handle, [POWER_INSTANT])
    if answer.nvmlReturn:
        raise pynvml.NVMLError(answer.nvmlReturn)
    return answer.value.uiVal


# In the order of preference. A binding may lack any of these functions, so that each reading looks it up anew.
NVML_READERS = {
    "energy": lambda pynvml, handle: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle),
    "power_instant": _instant_power_mW,
    "power": lambda pynvml, handle: pynvml.nvmlDeviceGetPowerUsage(handle),
}


def _sensors_of_gpu(pynvml, index: int, notes: dict) -> list[Sensor]:
    """List energy counter and powers that a GPU may have; reading tells which of them it has."""
    simulated = getattr(pynvml, "SIMULATED", False)  # tests bring their own NVML
    semantics = {"power": power_semantics(notes.get("name", "")), "power_instant": "instantaneous"}
    handle = None  # of a GPU that is lost; to read it raises
    with suppress(Exception):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    sensors = []
    for name, read in NVML_READERS.items():
        sensor = Sensor(
            f"gpu_{index}_{name}",
            "gpu",
            str(index),
            "energy" if name == "energy" else "power",
            "simulated" if simulated else "measured",
            read=partial(read, pynvml, handle),
            to_SI=1e-3,
            notes=dict(notes),
        )
        if name in semantics:
            sensor.notes["power"] = semantics[name]
        sensors.append(sensor)
    return sensors


def notes_of_gpus(pynvml) -> list[dict]:
    """Return UUID, name, power limit and driver of each GPU, as far as it says them."""
    questions = {
        "uuid": lambda handle: pynvml.nvmlDeviceGetUUID(handle),
        "name": lambda handle: pynvml.nvmlDeviceGetName(handle),
        "limit_W": lambda handle: pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3,
        "driver": lambda handle: pynvml.nvmlSystemGetDriverVersion(),
    }
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        notes = {}
        for name, ask in questions.items():
            with suppress(Exception):  # laptops and virtual GPUs do not say all, a lost one nothing
                notes[name] = ask(pynvml.nvmlDeviceGetHandleByIndex(index))
        gpus.append(notes)
    return gpus


def visible_gpus(notes: list[dict], visible: str | None) -> tuple[list[int], list[str]]:
    """Return the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves, and its unknown entries."""
    return visible_devices([gpu.get("uuid", "") for gpu in notes], visible)


def visible_devices(names: list[str], value: str | None) -> tuple[list[int], list[str]]:
    """Return the devices that a variable as CUDA_VISIBLE_DEVICES leaves, and unknown entries.

    An entry is a number or a whole name. None leaves all. CUDA C++ Programming Guide, "CUDA
    Environment Variables".
    """
    numbers = {name.lower(): number for number, name in enumerate(names)}
    numbers |= {str(number): number for number in range(len(names))}
    if value is None:
        return list(range(len(names))), []
    entries = [entry.strip() for entry in value.split(",") if entry.strip()]
    unknown = [entry for entry in entries if entry.lower() not in numbers]
    known = {numbers[entry.lower()] for entry in entries if entry not in unknown}
    return sorted(known), unknown


def power_semantics(gpu_name: str) -> str:
    """Say what NVML's power of a GPU is, by its name (NVML's manual; arXiv 2312.02741)."""
    if re.search(r"A100|A800|A30\b", gpu_name):  # GA100
        return "instantaneous, seen by the sensor for about a quarter of the time"
    if re.search(r"\b(K\d+|M\d+|P\d+|V100|T4|TITAN|Quadro)", gpu_name):
        return "of older GPUs, whose averaging differs"
    return "an average over 1 s"


# ------------------------------------------------------------------------------------------ sampler


class Sampler:
    """Reads all sensors of a host again and again and appends each reading to a file.

    The file is JSON lines: a header that describes the sensors, then
    ``{"t": monotonic ns, "w": wall clock ns, "v": [readings]}``; a failed reading is null, never
    zero. At most one period is lost if the process is killed.
    """

    FIRST_S, LAST_S = 20.0, 5.0  # patience with a sensor, at the start and at the end
    DISK_S = 120.0  # patience with the disk at the end

    def __init__(
        self, path: Path, inventory: Inventory, period_s: float, machine: dict | None = None
    ):
        self.inventory = inventory
        self.header = {
            "header": "energynn-samples/1",
            "host": socket.gethostname(),
            "period_s": period_s,
            "machine": machine or {},
        }
        self.stopping, self.has_begun = threading.Event(), threading.Event()
        self.failing: set[str] = set()
        self.asked = ""  # the sensor that is being read; a driver may never answer
        self.lines = Lines(path)

    def start(self) -> None:
        """Sample in a thread; returns after the first sample.

        Raises TimeoutError naming the sensor that has not answered for ``FIRST_S``.
        """
        self.thread = threading.Thread(target=self._loop, name="energynn-sampler", daemon=True)
        self.thread.start()
        if not self.has_begun.wait(self.FIRST_S):
            fault = f"{self.asked} does not answer for {self.FIRST_S:.0f} s"
            raise TimeoutError(f"{fault}; look at its driver, or leave the device out")
        self.lines.flush(self.FIRST_S)

    def stop(self) -> None:
        """Sample until every sensor had time to show the end, and once more."""
        updates_s = [sensor.update_s or 0.0 for sensor in self.inventory.sensors]
        time.sleep(max(updates_s, default=0.0))
        self.stopping.set()
        self.thread.join(self.LAST_S)
        if self.thread.is_alive():
            say(f"{self.asked} does not answer; the samples end where it fell silent")
        if not self.lines.flush(self.DISK_S):
            say("the last samples are lost: the disk is full, or does not answer")

    def _loop(self) -> None:
        self.inventory = choose(self.inventory, watch(self.inventory.sensors, self._ask))
        sensors = [sensor.describe() for sensor in self.inventory.sensors]
        self.lines.add(self.header | vars(self.inventory) | {"sensors": sensors})
        self.sample()
        self.has_begun.set()
        period_ns = int(self.header["period_s"] * 1e9)
        begun, index = time.monotonic_ns(), 1
        while True:
            # Absolute deadlines, so that a late sample does not delay the others; each moved by up
            # to a quarter of the period (golden ratio, so evenly), so that a load with the
            # sampler's own rhythm cannot hide behind it.
            moved = (index * 0.6180339887) % 1 / 2 - 0.25
            deadline = begun + int(period_ns * (index + moved))
            if self.stopping.wait(max(0.0, (deadline - time.monotonic_ns()) / 1e9)):
                break
            self.sample()
            index = max(index + 1, (time.monotonic_ns() - begun) // period_ns)
        self.sample()

    def sample(self) -> None:
        """Read every sensor once; the time is the middle of the readings."""
        before = time.monotonic_ns()
        wall_ns = time.time_ns()
        values = [self._value(sensor) for sensor in self.inventory.sensors]
        middle_ns = (before + time.monotonic_ns()) // 2
        self.lines.add({"t": middle_ns, "w": wall_ns, "v": values})

    def _ask(self, sensor: Sensor) -> float:
        self.asked = sensor.id
        return reading(sensor)

    def _value(self, sensor: Sensor) -> float | None:
        """Return a reading, or None where there is none that can be true."""
        try:
            value = self._ask(sensor)
        except Exception as error:  # whatever a driver throws: a gap, and the run continues
            if sensor.id not in self.failing:
                self.failing.add(sensor.id)
                say(f"{sensor.id} cannot be read ({error}); the gap is in the record")
            return None
        self.failing.discard(sensor.id)
        return value


def say(line: str) -> None:
    print(f"energynn: {line}", file=sys.stderr, flush=True)
