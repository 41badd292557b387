"""Sensors of one host: find them, choose the one that counts for each device, write readings."""

import math
import os
import platform
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import psutil

from energynn.host.processes import busy_core_seconds
from energynn.measure import energy, kernel
from energynn.measure.samples import Channel, DeviceState, Header

HWMON_FOLDER = Path("/sys/class/hwmon")
PCI_ADDRESS_PATTERN = re.compile(r"[\da-f]+:[\da-f]{2}:[\da-f]{2}\.[\da-f]")
STATE_POLL_PERIOD_S = 1.0  # between looks at what devices tell
# on one module with a CPU: NVIDIA GH200, GB200, AMD MI300A
MODULE_GPU_PATTERN = re.compile(r"\bG[BH]\d|MI300A")
MODULE_RATIO = 1.1  # of a GPU's power, that a counter of more than the GPU shows
# before the first sample, to see which sensors work; the second where a counter may be slower
SENSOR_WATCH_TIMES_S = 1.0, 4.0


class Sensor(Channel, kw_only=True):
    """A channel that can be read on this host.

    ``tell`` gives its device's power limit and whether it is busy, as far as it says so.
    """

    read: Callable[[], float]
    tell: Callable[[], DeviceState] | None = None

    @property
    def names(self) -> set[str]:
        """Names by which a person may leave it out."""
        place = self.id, self.component, self.device_name
        return set(map(plain_name, [*place, *self.notes.values()]))

    @property
    def is_zone(self) -> bool:
        return self.kind == "energy" and self.component != "gpu"


class SensorInventory(msgspec.Struct):
    """Sensors of a host, problems in words, and one text for each device that no sensor reads."""

    sensors: list[Sensor] = []
    problems: list[str] = []
    unaccounted: list[str] = []


def drop_left_out_sensors(inventory: SensorInventory, names: Collection[str]) -> None:
    """Drop what a person names in system.toml, and say so, also of a name that nothing has.

    A name is a sensor's id, a component (gpu, cpu, ram or dram), one with its device (cpu1), or
    what a device tells of itself: a UUID, a PCI address. Of a CPU that is left out no estimate
    counts.
    """
    left_out = set(map(plain_name, names))
    before = inventory.sensors
    lines = inventory.unaccounted
    kept = [one for one in before if left_out.isdisjoint(one.names)]
    if any(one.component == "cpu" for one in before if one not in kept):
        kept = [one for one in kept if one.kind != "busy"]
    # of GPUs without a sensor: a line goes when all that it names are left out
    named = {text: {*PCI_ADDRESS_PATTERN.findall(text)} or {text} for text in lines}
    unread = [text for text in lines if not named[text] <= left_out]
    inventory.sensors = kept
    inventory.unaccounted = [] if "gpu" in left_out else unread
    known = {"gpu"}.union(*named.values(), *(one.names for one in before))
    for name in names:
        more = "" if plain_name(name) in known else ", but names nothing here"
        inventory.problems.append(f"{name} is left out by system.toml{more}")


def plain_name(name) -> str:
    """Write a name in one way: UUIDs as torch has them, NVML begins one with GPU-, PCI addresses
    as Linux.
    """
    plain = str(name).lower().replace("dram", "ram")
    return re.sub(r"^(gpu-|0000(?=[\da-f]{4}:))", "", plain)


def choose(inventory: SensorInventory, faults: dict[str, str]) -> None:
    """Make one sensor of each device primary, and drop those with a fault (id -> words).

    Where no RAPL zone works at all, as in many virtual machines, the estimate stands for the CPU.
    """
    found = inventory.sensors
    working = [sensor for sensor in found if sensor.id not in faults]
    if any(sensor.component == "cpu" and sensor.kind != "busy" for sensor in working):
        found = [sensor for sensor in found if sensor.kind != "busy"]
        working = [sensor for sensor in found if sensor.id not in faults]
    broken = [sensor for sensor in found if sensor.id in faults]
    has_rapl = any(sensor.is_zone for sensor in working)
    first: dict[tuple[str, str], Sensor] = {}
    for sensor in working + broken:
        primary = first.setdefault((sensor.component, sensor.device), sensor)
        if primary is not sensor:
            sensor.primary = False
            sensor.checks = primary.id
        elif sensor.id in faults:
            fault = f"{sensor.id} {faults[sensor.id]}"
            if sensor.is_zone and not has_rapl:
                inventory.problems.append(fault)
            else:
                # all that reads it: without its counter, its power would count
                without = energy.left_out_remedy(sensor.device_name)
                inventory.unaccounted.append(f"{fault}; {without}")
    inventory.sensors = working or broken  # which are sampled, and say why


def count_modules_once(inventory: SensorInventory, watts: dict[str, float]) -> None:
    """Read nothing that counts a CPU twice, of GPUs that are on one module with it.

    watts: mean power by sensor. A counter that shows more than the power is the module's. Where
    both show the same, nobody knows whose it is, and the CPU is left out.
    https://github.com/ml-energy/zeus/issues/172
    """
    for sensor in list(inventory.sensors):
        if sensor.kind != "power" or not MODULE_GPU_PATTERN.search(
            sensor.notes.get("name", "")
        ):
            continue
        counter = sensor.id.replace("power", "energy")
        if watts.get(counter, 0.0) > MODULE_RATIO * watts.get(sensor.id, np.inf):
            fault = "is the whole module's; the GPU's power is read"
            what = [counter]
        else:
            fault = f"is left out: {sensor.id} may be the whole module's"
            what = [one.id for one in inventory.sensors if one.component == "cpu"]
        inventory.problems += [f"{name} {fault}" for name in what]
        inventory.sensors = [one for one in inventory.sensors if one.id not in what]


# ------------------------------------------------------------------------------------------ CPU


def list_rapl_sensors() -> list[Sensor]:
    """List CPU packages and DRAM of the powercap tree; counters in microjoules that wrap around.

    Counters outside of /sys are somebody's imitation of one: their provenance is ``simulated``.
    """
    is_real = kernel.POWERCAP_FOLDER.resolve().is_relative_to("/sys")
    provenance = "measured" if is_real else "simulated"
    sensors = []
    # intel-rapl-mmio shows the same counters again
    for zone in sorted(kernel.POWERCAP_FOLDER.glob("intel-rapl:*")):
        try:
            sensor = _rapl_sensor(zone, provenance)
        except (OSError, ValueError, OverflowError) as error:  # whatever stands there
            read = partial(_fail_reading, error)
            sensor = Sensor(
                zone.name, "cpu", zone.name, "energy", provenance, read=read
            )
        if sensor:
            sensors.append(sensor)
    return sensors


def _rapl_sensor(zone: Path, provenance: str) -> Sensor | None:
    """Make the sensor of a zone of what it tells of itself; None if it is none of ours."""
    name = (zone / "name").read_text().strip()
    component = {"package": "cpu", "dram": "ram"}.get(re.split(r"[-\d]", name)[0])
    if component is None:
        return None
    package = zone.name.split(":")[1]
    return Sensor(
        f"{component}_{package}_{name}",
        component,
        package,
        "energy",
        provenance,
        1e-6,
        float((zone / "max_energy_range_uj").read_text()),
        read=partial(_read_number_file, zone / "energy_uj"),
        tell=partial(_read_zone_state, zone),
    )


def _read_zone_state(zone: Path) -> DeviceState:
    """Read the higher of a zone's limits; a laptop has others on mains."""
    state = DeviceState()
    with suppress(Exception):  # whatever stands there
        limits_uW = map(kernel.read_text, zone.glob("constraint_[01]_*limit_uw"))
        state.limit_W = max(map(int, filter(str.isdecimal, limits_uW))) / 1e6
    return state


def _fail_reading(error: Exception):
    raise error


def list_grace_sensors() -> list[Sensor]:
    """List powers in microwatts of Grace CPUs: "CPU Power Socket".

    "Grace Power Socket" holds their DRAM, too, and "Module Power Socket" the GPU that NVML counts.
    https://docs.nvidia.com/dccpu/grace-perf-tuning-guide/power-thermals.html
    """
    sensors = []
    for path in sorted(HWMON_FOLDER.glob("*/device/power*_oem_info")):
        label = kernel.read_text(path)
        if label.startswith("CPU Power Socket"):
            meter = path.with_name(path.name.replace("oem_info", "average"))
            sensors.append(
                Sensor(
                    label,
                    "cpu",
                    label,
                    "power",
                    "measured",
                    read=partial(_read_number_file, meter),
                    to_SI=1e-6,
                )
            )
    return sensors


def _read_number_file(path: Path) -> int:
    try:
        return int(path.read_text())
    except PermissionError as error:
        raise ValueError(f"{error.strerror}; sudo chmod a+r {path}") from error


def cpu_estimate_sensor(model: dict) -> Sensor:
    """Estimate all CPU cores of this host by a linear model of busy time: never a measurement.

    A core may run several threads, which are busy each.
    """
    threads = os.cpu_count() or 1
    cores = min(psutil.cpu_count(logical=False) or threads, threads)
    return Sensor(
        "cpu_estimate",
        "cpu",
        "all",
        "busy",
        "estimated",
        cores / threads,
        read=busy_core_seconds,
        model=model | {"cores": cores},
        notes={"measured_by": kernel.cpu_counter_remedy()},
    )


# ------------------------------------------------------------------------------------------ GPUs

# as NVML says that there is nothing for it
NVML_ABSENCES = (
    "ModuleNotFoundError",
    "ImportError",
    "AttributeError",
    "NVMLError_GpuNotFound",
    "NVMLError_LibraryNotFound",
    "NVMLError_DriverNotLoaded",
)
NVML_FUNCTIONS = {
    "energy": "nvmlDeviceGetTotalEnergyConsumption",
    "power": "nvmlDeviceGetPowerUsage",
}
MIG_FAULT_TEXT = (
    "GPU {index} is split into parts (MIG), which have no energy each; "
    "`sudo nvidia-smi -i {index} -mig 0` makes it whole again"
)
UNKNOWN_GPU_TEXT = (
    "CUDA_VISIBLE_DEVICES names {entry}, no whole GPU of this host, or one that it names twice; "
    "write a number, or a UUID of `nvidia-smi -L`, once; a part of a GPU (MIG) has no energy of "
    "its own: `sudo nvidia-smi -mig 0` makes all GPUs whole again"
)
VALUES_WITHOUT_GPU = ("", "-1", "none", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES


def add_nvidia_sensors(inventory: SensorInventory, visible: str | None) -> None:
    """Add counters and powers of the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves.

    A GPU that the driver or the PCI bus names and NVML does not list is unaccounted for.
    """
    if visible in VALUES_WITHOUT_GPU:
        return
    vendors = kernel.list_training_devices()
    there = [address for address, vendor in vendors.items() if vendor == "NVIDIA"]
    fault = "NVML does not list it"
    is_absent = False
    notes = None
    try:
        notes = list_nvml_gpus()
    except Exception as error:  # no library, no driver, no permission
        fault = f"NVML does not start ({error})"
        is_absent = type(error).__name__ in NVML_ABSENCES
    told = [gpu.get("pci") for gpu in notes or []]
    unlisted = [address for address in there if address not in told]
    # one that does not tell its address may be any of these
    if len(unlisted) > told.count(None) and (visible is None or notes is None):
        inventory.unaccounted += [
            f"NVIDIA GPU {address}: {fault}; look at nvidia-smi, install nvidia-ml-py, or say "
            f"--no-gpu, or {energy.left_out_remedy(address)}"
            for address in unlisted
        ]
    if notes is None:
        if not there and not is_absent:
            inventory.unaccounted.append(
                f"NVIDIA GPUs: {fault}; look at nvidia-smi, or say --no-gpu"
            )
        return
    chosen, unknown = parse_visible_devices(notes, visible)
    inventory.unaccounted += [UNKNOWN_GPU_TEXT.format(entry=entry) for entry in unknown]
    split = [notes[index]["fault"] for index in chosen if "fault" in notes[index]]
    # beside a whole GPU they count as wholes, too
    is_none_whole = len(split) == len(chosen)
    (inventory.unaccounted if is_none_whole else inventory.problems).extend(split)
    import pynvml  # tests bring their own

    provenance = "simulated" if getattr(pynvml, "SIMULATED", False) else "measured"
    # reading tells which of them a GPU has
    for index, kind in product(chosen, NVML_FUNCTIONS):
        inventory.sensors.append(
            Sensor(
                f"gpu_{index}_{kind}",
                "gpu",
                str(index),
                kind,
                provenance,
                read=partial(_read_nvml_value, index, NVML_FUNCTIONS[kind]),
                to_SI=1e-3,
                notes=notes[index],
                tell=partial(_read_gpu_state, index),
            )
        )


def list_nvml_gpus() -> list[dict]:
    """Start NVML; return what each GPU tells of itself, as far as it does."""
    import pynvml

    pynvml.nvmlInit()
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        notes: dict = {"name": "unknown GPU"}
        with suppress(Exception):  # a lost GPU says nothing, a laptop's knows no limit
            notes["uuid"] = _read_nvml_value(index, "nvmlDeviceGetUUID")
            notes["name"] = _read_nvml_value(index, "nvmlDeviceGetName")
            notes["power"] = nvml_power_semantics(notes["name"])
            notes["driver"] = _as_text(pynvml.nvmlSystemGetDriverVersion())
            notes["limit_W"] = _read_nvml_limit_W(index)
        with suppress(Exception):
            pci = _read_nvml_value(index, "nvmlDeviceGetPciInfo")
            # as Linux writes it: the domain in four digits
            notes["pci"] = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
        with suppress(Exception):  # a GPU without such a mode raises
            if _read_nvml_value(index, "nvmlDeviceGetMigMode")[0]:
                notes["fault"] = MIG_FAULT_TEXT.format(index=index)
        gpus.append(notes)
    return gpus


def _read_nvml_value(index: int, function: str):
    import pynvml

    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
    return _as_text(getattr(pynvml, function)(gpu))  # an old binding lacks some


def _as_text(value):
    """Decode what bindings of before 2023 give in bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _read_nvml_limit_W(index: int) -> float:
    return _read_nvml_value(index, "nvmlDeviceGetEnforcedPowerLimit") / 1e3


def _read_gpu_state(index: int) -> DeviceState:
    state = DeviceState()
    with suppress(Exception):  # not every GPU tells
        state.limit_W = _read_nvml_limit_W(index)
    with suppress(Exception):
        share = _read_nvml_value(index, "nvmlDeviceGetUtilizationRates").gpu
        running = _read_nvml_value(index, "nvmlDeviceGetComputeRunningProcesses")
        state.is_busy = share > 0 or bool(running)
    return state


def parse_visible_devices(
    gpus: list[dict], value: str | None
) -> tuple[list[int], list[str]]:
    """Return the devices that a variable as CUDA_VISIBLE_DEVICES leaves, and what CUDA refuses.

    An entry is a number, or a UUID or its beginning; one that is unknown, or names a device again,
    is refused. None leaves all.
    """
    if value is None:
        return list(range(len(gpus))), []
    entries = list(filter(None, map(str.strip, value.split(","))))
    number_of = {entry: _number_of_entry(gpus, entry) for entry in entries}
    named = Counter(number_of[entry] for entry in entries)
    refused = {
        each for each in entries if number_of[each] < 0 or named[number_of[each]] > 1
    }
    return sorted(named.keys() - {-1}), sorted(refused)


def _number_of_entry(gpus: list[dict], entry: str) -> int:
    """Return the device that an entry names; -1 where that is none, or several."""
    numbers = [
        number
        for number, gpu in enumerate(gpus)
        if entry == str(number) or gpu.get("uuid", "").startswith(entry)
    ]
    return numbers[0] if len(numbers) == 1 else -1


def nvml_power_semantics(gpu_name: str) -> str:
    """Say what NVML's power of a GPU is, by its name (NVML's manual; arXiv 2312.02741)."""
    if re.search(r"\b(A100X?|A800|A30X?)\b", gpu_name):  # GA100
        return "instantaneous, seen by the sensor for about a quarter of the time"
    if re.search(r"\b(M?[KMPTX]\d+|V100|TITAN|Quadro|GTX|RTX 20[678]0)", gpu_name):
        return "of older GPUs, whose averaging differs"
    return "an average over 1 s"


# ------------------------------------------------------------------------------------------ sampler


class Sampler:
    """Reads all sensors of a host again and again and appends each reading to a file.

    The file is JSON lines: a header that describes the sensors, then
    ``{"t": monotonic ns, "v": [readings]}``; a failed reading is null, never
    zero. At most one period is lost if the process is killed. A disk that stands still leaves a
    gap, and a full one ends the samples: the record is not valid then.
    """

    START_PATIENCE_S = 20.0  # with a sensor that does not answer
    STOP_PATIENCE_S = 5.0

    def __init__(self, path: Path, inventory: SensorInventory, period_s: float):
        self.path = path
        self.inventory = inventory
        self.period_s = period_s
        self.stopping = threading.Event()
        self.has_begun = threading.Event()
        self.thread = threading.Thread(target=self._run_thread, daemon=True)
        self.asked = ""  # the sensor that is being read; a driver may never answer
        self.faults: dict[str, str] = {}  # by sensor, the first in words
        self.looked_s = -math.inf
        self.file = open(path, "ab", buffering=0)

    def start(self) -> None:
        """Sample in a thread; returns after the first sample.

        Raises TimeoutError naming the sensor that has not answered for ``START_PATIENCE_S``.
        """
        self.thread.start()
        if not self.has_begun.wait(self.START_PATIENCE_S):
            raise TimeoutError(
                f"{self.asked} does not answer for {self.START_PATIENCE_S:.0f} s; look at its "
                "driver, or leave the device out"
            )

    def stop(self) -> None:
        """Sample until every sensor had time to show the end, and once more."""
        late_s = [sensor.update_s or 0.0 for sensor in self.inventory.sensors]
        time.sleep(max(late_s))
        self.stopping.set()
        self.thread.join(self.STOP_PATIENCE_S)

    def _run_thread(self) -> None:
        try:
            self._sample_until_stopped()
        except OSError as error:
            print(
                f"energynn: no more samples of this host ({error.strerror}); free some space "
                "and measure again",
                file=sys.stderr,
            )
        finally:
            self.has_begun.set()  # who waits for it need not wait longer

    def _sample_until_stopped(self) -> None:
        self._watch_sensors()
        choose(self.inventory, self.faults)
        self._write_line(
            Header(
                platform.node(),
                self.period_s,
                msgspec.convert(
                    self.inventory.sensors, list[Channel], from_attributes=True
                ),
                kernel.boot_id(),
                self.inventory.problems,
                self.inventory.unaccounted,
            )
        )
        self.faults.clear()
        pause_s = 0.0
        while not self.stopping.wait(pause_s):
            began_s = time.monotonic()
            self._write_device_states()
            self._sample_once()
            self.has_begun.set()
            # Not in step, so that a load with the sampler's own rhythm cannot hide behind it.
            next_s = began_s + self.period_s * random.uniform(0.75, 1.25)
            pause_s = max(0.0, next_s - time.monotonic())
        self._sample_once()
        self.looked_s = -math.inf
        self._write_device_states()

    def _write_device_states(self) -> None:
        """Write limits and whether devices are busy, every ``STATE_POLL_PERIOD_S``."""
        now_s = time.monotonic()
        if now_s - self.looked_s < STATE_POLL_PERIOD_S:
            return
        self.looked_s = now_s
        states = {one.id: one.tell() for one in self.inventory.sensors if one.tell}
        if states:
            self._write_line({"t": time.monotonic_ns(), "states": states})

    def _watch_sensors(self) -> None:
        """Note how often each sensor changes, and the faults of those that tell nothing.

        Nothing is sampled more often than all sensors can be read.
        """
        times_s = []
        rows = []
        for watch_s in SENSOR_WATCH_TIMES_S:
            end_s = time.monotonic() + watch_s
            while time.monotonic() < end_s:
                rows.append(self._read_all_sensors())
                times_s.append(time.monotonic())
                time.sleep(0.001)
            readings = np.array(rows, float)
            watts = self._note_behaviour(np.array(times_s), readings)
            if not any(
                one.kind == "energy" and not one.update_s and np.isfinite(column).any()
                for one, column in zip(self.inventory.sensors, readings.T, strict=True)
            ):
                break
        self.period_s = max(self.period_s, float(np.median(np.diff(times_s))))
        count_modules_once(self.inventory, watts)

    def _note_behaviour(
        self, times_s: np.ndarray, readings: np.ndarray
    ) -> dict[str, float]:
        """Note what readings, (times, sensors), tell; return mean powers in W of GPUs' sensors."""
        watts = {}
        for sensor, column in zip(self.inventory.sensors, readings.T, strict=True):
            good = column[np.isfinite(column)]
            if not len(good):
                continue
            self.faults.pop(sensor.id, None)
            one = energy.energy_curve(sensor, times_s, column, self.period_s)
            sensor.update_s = one.sensor.update_s
            # an idle machine's busy time may stand still; since boot it is not 0, but in gVisor
            is_never_busy = sensor.kind == "busy" and not good.any()
            if is_never_busy or sensor.kind == "energy" and not np.ptp(good):
                self.faults[sensor.id] = f"does not move: it shows {good[0]:.0f}"
            elif sensor.component == "gpu":
                watts[sensor.id] = np.ptp(one.energy_J) / np.ptp(one.t_s)
        return watts

    def _sample_once(self) -> None:
        """Read every sensor once; the time is the middle of the readings."""
        before_ns = time.monotonic_ns()
        known = set(self.faults)
        values = self._read_all_sensors()
        middle_ns = (before_ns + time.monotonic_ns()) // 2
        for name in self.faults.keys() - known:
            self._write_line({"problem": f"{name} {self.faults[name]}"})
        self._write_line({"t": middle_ns, "v": values})

    def _write_line(self, line: Header | dict) -> None:
        self.file.write(msgspec.json.encode(line) + b"\n")

    def _read_all_sensors(self) -> list[float | None]:
        return list(map(self._read_sensor, self.inventory.sensors))

    def _read_sensor(self, sensor: Sensor) -> float | None:
        """Return a number of zero or more, or None; what was wrong first is added to faults."""
        self.asked = sensor.id
        try:
            value = sensor.read()
            if math.isfinite(value) and 0 <= value < 2**63:  # what a file can hold
                return value
            raise ValueError(f"it says {value}")
        except Exception as error:
            # whatever a driver throws: a gap, and the run continues
            self.faults.setdefault(sensor.id, f"cannot be read: {error}")
        return None
