"""Sensors of one host and the loop that writes what they read to disk, as it is read."""

from __future__ import annotations

import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from energynn.measure.samples import ENDED, Heartbeat, Lines
from energynn.processes import name_of_this_process

POWERCAP = Path("/sys/class/powercap")


@dataclass
class Sensor:
    """One readable quantity of one device.

    ``kind`` says what a reading is: ``energy`` a cumulative counter, ``power`` an instant or average, ``busy`` the
    cumulative busy time of all cores in core-seconds. ``to_SI`` turns a reading into J, W or core-seconds.
    ``wraps_at`` is the reading at which a counter starts again; ``update_s`` how often a counter or power changes, None
    if that was not seen. Of several sensors of one device one is primary; the others never enter a sum, and ``checks``
    names the primary one that measures the same.
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
        """Everything but the reader, for the header of the samples file."""
        return {name: value for name, value in vars(self).items() if name != "read"}


def find(
    cpu_model: dict, powercap: Path = POWERCAP, others: tuple | list = (), visible: str | None = None
) -> tuple[list[Sensor], list[str]]:
    """All energy sensors of this host, and in words what is there but cannot be used.

    ``others`` come from elsewhere (perun's backends); ``visible`` is the value of CUDA_VISIBLE_DEVICES, None for all
    GPUs. The CPU is estimated from ``cpu_model`` where it has no sensor. A component that has neither is absent from
    the list: absent, not zero. Beside a counter that stands still the estimate waits to take its place.
    """
    rapl, rapl_problems = rapl_sensors(powercap)
    nvml, nvml_problems = nvml_sensors(visible)
    sensors = [*rapl, *nvml, *others]
    has_cpu = any(sensor.component == "cpu" and sensor.primary for sensor in sensors)
    if not has_cpu or any(sensor.component == "cpu" and stands_still(sensor) for sensor in rapl):
        sensors.append(cpu_estimate(cpu_model, primary=not has_cpu))
    return sensors, rapl_problems + nvml_problems


def stands_still(sensor: Sensor, seconds: float = 0.1) -> bool:
    """Whether a counter shows the same for so long; RAPL's change every millisecond, in many virtual machines never."""
    until = time.monotonic() + seconds
    with suppress(Exception):  # the sampler will say so
        first = sensor.read()
        while time.monotonic() < until:
            if sensor.read() != first:
                return False
    return True


def rapl_sensors(powercap: Path = POWERCAP) -> tuple[list[Sensor], list[str]]:
    """CPU packages and DRAM from the powercap tree; counters in microjoules that wrap around.

    Counters outside of /sys are somebody's imitation of one: their provenance is ``simulated``.
    """
    provenance = "measured" if powercap.resolve().is_relative_to("/sys") else "simulated"
    sensors, unreadable, problems = [], [], []
    for zone in sorted(powercap.glob("intel-rapl:*")):
        counter = zone / "energy_uj"
        try:
            name = (zone / "name").read_text().strip()
            component = {"package": "cpu", "dram": "ram"}.get(re.split(r"[-\d]", name)[0])
            if component is None:
                continue
            wraps_at = float((zone / "max_energy_range_uj").read_text())
        except OSError as error:
            problems.append(f"{zone} may not be read ({error.strerror}); sudo chmod -R a+r {zone}")
            continue
        except ValueError as error:
            problems.append(f"{zone} holds no number ({error}); it is left out")
            continue
        package = re.match(r"intel-rapl:(\d+)", zone.name)[1]
        sensor_id = f"{component}_{package}_{name}"
        about = {"to_SI": 1e-6, "wraps_at": wraps_at, "notes": _limit_of_zone(zone)}
        read = partial(_read_whole_number, counter)
        sensor = Sensor(sensor_id, component, package, "energy", provenance, read, **about)
        try:
            counter.read_text()
            sensors.append(sensor)
        except OSError as error:  # root only by default
            problems.append(f"{counter} may not be read ({error.strerror}); sudo chmod a+r {counter}")
            unreadable.append(sensor)
    # Where one of several can be read, the others are missing; where none can, there is no such sensor.
    readable = {sensor.component for sensor in sensors}
    return sensors + [sensor for sensor in unreadable if sensor.component in readable], problems


def _limit_of_zone(zone: Path) -> dict:
    """``limit_W``, the most that any limit of a RAPL zone allows or may be set to; nothing where there is none."""
    limits_W = []
    for path in zone.glob("constraint_*_uw"):  # constraint_0_max_power_uw, constraint_0_power_limit_uw
        with suppress(OSError, ValueError):
            limits_W.append(int(path.read_text()) / 1e6)
    return {"limit_W": max(limits_W)} if max(limits_W, default=0) > 0 else {}


def _read_whole_number(path: Path) -> int:
    return int(path.read_text())


POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT, in mW; bindings of before 2023 do not name it
# What NVML raises where there simply is no NVIDIA GPU; anything else is a fault that a person can mend.
NO_GPU = ("ImportError", "ModuleNotFoundError", "NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded")


def nvml_sensors(visible: str | None = None) -> tuple[list[Sensor], list[str]]:
    """Energy counter (Volta and newer) and powers of the NVIDIA GPUs that a value of CUDA_VISIBLE_DEVICES leaves."""
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except Exception as error:
        if type(error).__name__ in NO_GPU:
            return [], []
        return [], [f"NVML does not start ({error}): GPU energy is absent; after a driver update, restart the machine"]
    sensors, problems = [], []
    used, unknown = visible_devices([names_of_gpu(pynvml, index) for index in range(count)], visible)
    if unknown:
        problems.append(
            f"CUDA_VISIBLE_DEVICES names {unknown!r}, no GPU of this host: neither it nor what follows counts"
        )
    if "MIG-" in (visible or "").upper():
        problems.append("CUDA_VISIBLE_DEVICES names a part of a GPU (MIG): what others do on that GPU counts, too")
    lost = []
    for index in sorted(used):
        try:
            sensors += _sensors_of_gpu(pynvml, index)
        except Exception as error:
            problems.append(f"GPU {index} cannot be read ({error}): its energy is absent; look at nvidia-smi")
            lost.append(Sensor(f"gpu_{index}_energy", "gpu", str(index), "energy", "measured", partial(_fail, error)))
    # Where one of several GPUs can be read, the others are missing; where none can, there is no such sensor.
    return sensors + (lost if sensors else []), problems


def _fail(error: Exception) -> float:
    raise error


def _sensors_of_gpu(pynvml, index: int) -> list[Sensor]:
    """The energy counter of one GPU and its powers, what there is; raises what NVML raises if there is none.

    What cannot be read of one field leaves the others as they are. The first counts, the others check it.
    """
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    notes = notes_of_gpu(pynvml, handle)
    provenance = "simulated" if getattr(pynvml, "SIMULATED", False) else "measured"  # tests bring their own NVML
    readers = {
        "energy": partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle),
        "power_instant": partial(_instant_power_mW, pynvml, handle),
        "power": partial(pynvml.nvmlDeviceGetPowerUsage, handle),
    }
    semantics = {"power": power_semantics(notes.get("name", "")), "power_instant": "instantaneous"}
    found, faults = [], []
    for name, read in readers.items():
        try:
            read()
        except Exception as error:  # no counter before Volta, no instant power before Ampere
            faults.append(error)
            continue
        kind = "energy" if name == "energy" else "power"
        facts = {"component": "gpu", "device": str(index), "provenance": provenance, "to_SI": 1e-3}
        facts |= {"primary": not found, "checks": found[0].id if found else None}
        own_notes = notes | ({"power": semantics[name]} if name in semantics else {})
        found.append(Sensor(f"gpu_{index}_{name}", kind=kind, read=read, notes=own_notes, **facts))
    if not found:
        raise faults[0]
    return found


def notes_of_gpu(pynvml, handle) -> dict:
    """UUID, name, power limit and driver of a GPU, as far as it says them; laptops and virtual GPUs do not say all."""
    notes: dict = {}
    with suppress(Exception):
        notes["uuid"] = text(pynvml.nvmlDeviceGetUUID(handle))
    with suppress(Exception):
        notes["name"] = text(pynvml.nvmlDeviceGetName(handle))
    with suppress(Exception):
        notes["limit_W"] = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3
    with suppress(Exception):
        notes["driver"] = text(pynvml.nvmlSystemGetDriverVersion())
    return notes


def _instant_power_mW(pynvml, handle) -> int:
    (answer,) = pynvml.nvmlDeviceGetFieldValues(handle, [POWER_INSTANT])
    if answer.nvmlReturn:
        raise pynvml.NVMLError(answer.nvmlReturn)
    return answer.value.uiVal


def names_of_gpu(pynvml, index: int) -> dict[str, str]:
    """By which UUIDs CUDA_VISIBLE_DEVICES may name a GPU, in small letters, and what each means.

    "" for all of it; "MIG 1g.10gb" for such a part of it, or "MIG" where nobody says of which size.
    """
    names = {}
    with suppress(Exception):  # a GPU that is lost has no name any more, and most have no parts
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = text(pynvml.nvmlDeviceGetUUID(handle)).lower()
        names |= {uuid: "", f"mig-{uuid}": "MIG"}
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(Exception):  # parts may have any of these numbers
                part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                of_part = text(pynvml.nvmlDeviceGetUUID(part)).lower()
                names[of_part] = "MIG"
                names[of_part] += text(pynvml.nvmlDeviceGetName(part)).partition("MIG")[2]
    return names


def name_of_part(names: dict[str, str], value: str | None) -> str:
    """Which part of a GPU a variable as CUDA_VISIBLE_DEVICES names, as "MIG 1g.10gb"; "" for all of it."""
    for entry in filter(None, (value or "").lower().replace(" ", "").split(",")):
        for name, part in names.items():
            if part and _is_named({name}, entry):
                return part
    return ""


def visible_devices(names: list[Collection[str]], value: str | None) -> tuple[list[int], str | None]:
    """Numbers of the devices that a variable as CUDA_VISIBLE_DEVICES leaves, and its entry that names none, if any.

    An entry is a number, a name or the beginning of one; what follows an entry that names no device does not count, as
    for the runtimes themselves. None leaves all. CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if value is None:
        return list(range(len(names))), None
    chosen: list[int] = []
    for entry in filter(None, map(str.strip, value.split(","))):
        if entry.isdigit():
            named = [number for number in range(len(names)) if number == int(entry)]
        else:
            named = [number for number, known in enumerate(names) if _is_named(known, entry.lower())]
        if not named:
            return chosen, None if entry in ("-1", "NoDevFiles") else entry
        chosen += [number for number in named if number not in chosen]
    return chosen, None


def _is_named(names: Collection[str], entry: str) -> bool:
    """Whether an entry is one of a GPU's names, the beginning of one, or a part of it as older drivers write it."""
    return any(name.startswith(entry) or entry.startswith(name + "/") for name in names)


def power_semantics(gpu_name: str) -> str:
    """What NVML's power reading of a GPU is, by its name (NVML's manual; arXiv 2312.02741)."""
    if re.search(r"A100|A800|A30\b", gpu_name):
        return "instantaneous, seen by the sensor for about a quarter of the time"  # GA100
    if re.search(r"\b(K\d+|M\d+|P\d+|V100|T4|TITAN|Quadro)", gpu_name):
        return "of older GPUs, whose averaging differs"
    return "an average over 1 s"


def cpu_estimate(model: dict, primary: bool = True) -> Sensor:
    """All CPU cores of this host by a stated linear model of cumulative busy time: an estimate, never a measurement."""
    model = {**model, "cores": os.cpu_count()}
    facts = {"primary": primary, "model": model}
    return Sensor("cpu_estimate", "cpu", "all", "busy", "estimated", read=busy_core_seconds, **facts)


def busy_core_seconds(stat: Path = Path("/proc/stat")) -> float:
    """Time that all cores together have been busy since boot, in core-seconds (Linux)."""
    # user nice system idle iowait irq softirq steal; guest time is part of user, stolen time is somebody else's
    user, nice, system, _idle, _iowait, irq, softirq = map(int, stat.read_text().split(None, 8)[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


LONGEST_WATCH, ENOUGH_UPDATES = 6, 12


def watch_updates(sensors: list[Sensor], seconds: float = 0.25, about_to_read=lambda sensor: None) -> dict[str, float]:
    """How often each counter and power changes, in s, noted as its ``update_s``, too; none if it changed only once.

    A counter that moves, but seldom, as those of GPUs do, is watched for up to ``LONGEST_WATCH`` times as long. A power
    may stay the same by chance, so that its shorter times count; one that changes as often as we look tells no time.
    """
    watched = [sensor for sensor in sensors if sensor.kind in ("energy", "power")]
    changed: dict[str, list[float]] = {sensor.id: [] for sensor in watched}
    counters = [changed[sensor.id] for sensor in watched if sensor.kind == "energy"]
    last: dict[str, float] = {}
    begun, looks = time.monotonic(), 0
    while watched and (watched_s := time.monotonic() - begun) < LONGEST_WATCH * seconds:
        if watched_s >= seconds and not any(0 < len(times) < ENOUGH_UPDATES for times in counters):
            break
        looks += 1
        for sensor in watched:
            about_to_read(sensor)
            try:
                value = sensor.read()
            except Exception:  # the sampler will say so
                continue
            if value != last.setdefault(sensor.id, value):
                changed[sensor.id].append(time.monotonic())
                last[sensor.id] = value
        time.sleep(0.001)  # RAPL's own period; asking more often costs and tells nothing
    for sensor in watched:
        apart_s = sorted(later - earlier for earlier, later in pairwise(changed[sensor.id]))
        if apart_s and sensor.kind == "energy":
            sensor.update_s = sum(apart_s) / len(apart_s)
        elif apart_s and len(apart_s) < looks / 2:
            sensor.update_s = apart_s[len(apart_s) // 4]
    return {sensor.id: sensor.update_s for sensor in watched if sensor.update_s}


class Sampler:
    """Reads all sensors of a host again and again and appends each reading to a file before the next.

    The file is JSON lines: a header that describes the sensors, how often counters change, then
    ``{"t": monotonic ns, "w": wall clock ns, "d": microseconds that reading took, "v": [readings]}``; a failed reading
    is null, never zero. At most one period is lost if the process is killed. Between them stand problems, and how
    the loop keeps up.
    """

    STATUS_EVERY = 100  # samples
    FIRST_S, LAST_S = 20.0, 5.0  # patience with a sensor, at the start and at the end
    DISK_S = 120.0  # patience with the disk at the end

    def __init__(
        self,
        path: Path,
        sensors: list[Sensor],
        period_s: float,
        problems: list[str] | tuple = (),
        wall_ns: Callable[[], int] = time.time_ns,
        machine: dict | None = None,
    ):
        self.sensors, self.period_s, self.wall_ns = sensors, period_s, wall_ns
        self.stopping, self.has_begun = threading.Event(), threading.Event()
        self.missed_deadlines, self.count, self.thread_cpu_s = 0, 0, 0.0
        self.failing: set[str] = set()
        self.reading = ""  # the sensor that is just being read; a driver may never answer
        self.lines, self.heartbeat = Lines(path), Heartbeat()
        self.lines.add(
            {
                "header": "energynn-samples/1",
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "process": name_of_this_process(),
                "heartbeat": self.heartbeat.file,
                "period_s": period_s,
                "sensors": [sensor.describe() for sensor in sensors],
                "problems": list(problems),
                "machine": machine or {},
            }
        )
        for problem in problems:
            _say(problem)

    def start(self) -> None:
        """Sample in a thread; returns after the first sample, so that whoever waits for this call starts after it.

        Raises TimeoutError naming the sensor that has not answered for ``FIRST_S``.
        """
        self.thread = threading.Thread(target=self._loop, name="energynn-sampler", daemon=True)
        self.thread.start()
        if not self.has_begun.wait(self.FIRST_S):
            self._problem(f"{self.reading} does not answer; look at its driver, or leave the device out")
            raise TimeoutError(f"no first sample within {self.FIRST_S:.0f} s")
        self.lines.flush(self.FIRST_S)

    def stop(self) -> None:
        """Have the last sample taken and said how the loop kept up; does not wait for a sensor that is silent."""
        self.stopping.set()
        self.thread.join(self.LAST_S)
        if self.thread.is_alive():
            self._problem(f"{self.reading} does not answer; the samples end where it fell silent")
        if not self.lines.flush(self.DISK_S):
            _say("the last samples are lost: the disk is full, or does not answer")

    def sample(self) -> None:
        """Read every sensor once; the time is the middle of the readings."""
        before = time.monotonic_ns()
        wall = self.wall_ns()
        values = [self._read(sensor) for sensor in self.sensors]
        after = time.monotonic_ns()
        self.lines.add({"t": (before + after) // 2, "w": wall, "d": (after - before) // 1000, "v": values})
        self.heartbeat.beat()
        self.count += 1

    def _about_to_read(self, sensor: Sensor) -> None:
        self.reading = sensor.id

    def _read(self, sensor: Sensor) -> float | None:
        """A reading, or None where there is none that can be true."""
        self._about_to_read(sensor)
        try:
            value = sensor.read()
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"it says {value}")
        except Exception as error:  # whatever a driver throws: a gap, and the run goes on
            if sensor.id not in self.failing:
                self.failing.add(sensor.id)
                self._problem(f"{sensor.id} cannot be read ({error}); the gap is in the record")
            return None
        self.failing.discard(sensor.id)
        return value

    def note(self, values: dict) -> None:
        """Keep what perun's own loop has just read, so that its data survive a crash too."""
        self.lines.add({"t": time.monotonic_ns(), "w": self.wall_ns(), "perun": values})

    def _loop(self) -> None:
        updates = {}
        for kind in ("energy", "power"):  # apart: a power that is slow to read would hide how often a counter changes
            of_kind = [sensor for sensor in self.sensors if sensor.kind == kind]
            updates |= watch_updates(of_kind, about_to_read=self._about_to_read)
        if updates:
            self.lines.add({"update_s": updates})
        self.sample()
        self.has_begun.set()
        period_ns = int(self.period_s * 1e9)
        begun, index = time.monotonic_ns(), 1
        while True:
            # Absolute deadlines, so that a late sample does not delay the others; each moved by up to a quarter of the
            # period (golden ratio, so evenly), so that a load with the sampler's own rhythm cannot hide behind it.
            deadline = begun + period_ns * index + int(period_ns * ((index * 0.6180339887) % 1 - 0.5) / 2)
            if self.stopping.wait(max(0.0, (deadline - time.monotonic_ns()) / 1e9)):
                break
            self.sample()
            index += 1
            behind = (time.monotonic_ns() - begun) // period_ns - index
            if behind > 0:
                self.missed_deadlines += behind
                index += behind
            self.thread_cpu_s = time.thread_time()
            if self.count % self.STATUS_EVERY == 0:
                self.lines.add({"status": self._status()})
        self.sample()
        self.lines.add({"status": self._status() | {"ended": True}})
        self.heartbeat.beat(ENDED)

    def _status(self) -> dict:
        return {
            "missed_deadlines": self.missed_deadlines,
            "thread_cpu_s": self.thread_cpu_s,
            "process_cpu_s": time.process_time(),
        }

    def _problem(self, problem: str) -> None:
        _say(problem)
        self.lines.add({"problem": problem})


def _say(line: str) -> None:
    print(f"energynn: {line}", file=sys.stderr, flush=True)


def text(value: bytes | str) -> str:
    """NVML's older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value
