"""Sensors of one host and the loop that writes what they read to disk, as it is read."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


@dataclass
class Sensor:
    """One readable quantity of one device.

    ``kind`` says what a reading is: ``energy`` a cumulative counter, ``power`` an instant or average, ``busy`` the
    cumulative busy time of all cores in core-seconds. ``to_SI`` turns a reading into J, W or core-seconds.
    ``wraps_at`` is the reading at which a counter starts again. Of several sensors of one device one is primary;
    the others are cross-checks and never enter a sum.
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
    model: dict | None = None
    notes: dict = field(default_factory=dict)

    def describe(self) -> dict:
        """Everything but the reader, for the header of the samples file."""
        return {name: value for name, value in vars(self).items() if name != "read"}


def find(cpu_model: dict, powercap: Path = POWERCAP) -> list[Sensor]:
    """All energy sensors of this host; the CPU is estimated from ``cpu_model`` where it has no sensor.

    A component that has neither is absent from the list: absent, not zero.
    """
    sensors = rapl_sensors(powercap) + nvml_sensors()
    if not any(sensor.component == "cpu" for sensor in sensors):
        sensors.append(cpu_estimate(cpu_model))
    return sensors


def rapl_sensors(powercap: Path = POWERCAP) -> list[Sensor]:
    """CPU packages and DRAM from the powercap tree; counters in microjoules that wrap around.

    Counters outside of /sys are somebody's imitation of one: their provenance is ``simulated``.
    """
    provenance = "measured" if powercap.resolve().is_relative_to("/sys") else "simulated"
    sensors = []
    for zone in sorted(powercap.glob("intel-rapl:*")):
        counter = zone / "energy_uj"
        try:
            name = (zone / "name").read_text().strip()
            component = {"package": "cpu", "dram": "ram"}.get(re.split(r"[-\d]", name)[0])
            if component is None:
                continue
            counter.read_text()  # root only by default: `energynn doctor` will tell; here it is simply no sensor
            wraps_at = float((zone / "max_energy_range_uj").read_text())
        except OSError:
            continue
        package = re.match(r"intel-rapl:(\d+)", zone.name)[1]
        sensors.append(
            Sensor(f"{component}_{package}_{name}", component, package, "energy", provenance,
                   read=lambda path=counter: int(path.read_text()), to_SI=1e-6, wraps_at=wraps_at)
        )  # fmt: skip
    return sensors


def nvml_sensors() -> list[Sensor]:
    """Energy counter (Volta and newer) and power of the NVIDIA GPUs that this job may use."""
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except Exception:  # no library, no driver, or the two do not match: no GPU sensor
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    sensors = []
    for index in range(count):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
        if visible is not None and not {str(index), uuid} & set(visible.split(",")):
            continue
        notes = {"uuid": uuid, "name": _text(pynvml.nvmlDeviceGetName(handle))}
        has_counter = True
        try:
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except Exception:
            has_counter = False
        if has_counter:
            sensors.append(
                Sensor(f"gpu_{index}_energy", "gpu", str(index), "energy", "measured", to_SI=1e-3, notes=notes,
                       read=lambda h=handle: pynvml.nvmlDeviceGetTotalEnergyConsumption(h))
            )  # fmt: skip
        sensors.append(
            Sensor(f"gpu_{index}_power", "gpu", str(index), "power", "measured", to_SI=1e-3, notes=notes,
                   primary=not has_counter, read=lambda h=handle: pynvml.nvmlDeviceGetPowerUsage(h))
        )  # fmt: skip
    return sensors


def cpu_estimate(model: dict) -> Sensor:
    """All CPU cores of this host by a stated linear model of cumulative busy time: an estimate, never a measurement."""
    return Sensor(
        "cpu_estimate", "cpu", "all", "busy", "estimated", read=busy_core_seconds,
        model={**model, "cores": os.cpu_count()},
    )  # fmt: skip


def busy_core_seconds(stat: Path = Path("/proc/stat")) -> float:
    """Time that all cores together have been busy since boot, in core-seconds (Linux)."""
    # user nice system idle iowait irq softirq steal; guest time is part of user, stolen time is somebody else's
    user, nice, system, _idle, _iowait, irq, softirq = map(int, stat.read_text().split(None, 8)[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class Sampler:
    """Reads all sensors of a host at fixed instants and appends each reading to a file before the next.

    The file is JSON lines: a header that describes the sensors, then ``{"t": monotonic ns, "w": wall clock ns,
    "v": [readings]}``; a failed reading is null, never zero. At most one period is lost if the process is killed.
    """

    def __init__(self, path: Path, sensors: list[Sensor], period_s: float):
        self.sensors, self.period_s = sensors, period_s
        self.stopping = threading.Event()
        self.missed_deadlines = 0
        self.complained = False
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._write({
            "header": "energynn-samples/1", "host": socket.gethostname(), "pid": os.getpid(), "period_s": period_s,
            "sensors": [sensor.describe() for sensor in sensors],
        })  # fmt: skip

    def start(self) -> None:
        """Take the first sample, then go on in a thread: whoever waits for this call starts after the first sample."""
        self.sample()
        threading.Thread(target=self._loop, name="energynn-sampler", daemon=True).start()

    def stop(self) -> None:
        """Take the last sample and say how the loop kept up."""
        self.stopping.set()
        self.sample()
        cpu_s = time.process_time()
        self._write({"end": True, "missed_deadlines": self.missed_deadlines, "process_cpu_s": cpu_s})

    def sample(self) -> None:
        """Read every sensor once; the time is the middle of the readings."""
        before = time.monotonic_ns()
        wall = time.time_ns()
        values = []
        for sensor in self.sensors:
            try:
                values.append(sensor.read())
            except Exception:  # whatever a driver throws: a gap, and the run goes on
                values.append(None)
        self._write({"t": (before + time.monotonic_ns()) // 2, "w": wall, "v": values})

    def note(self, values: dict) -> None:
        """Keep what perun's own loop has just read, so that its data survive a crash too."""
        self._write({"t": time.monotonic_ns(), "w": time.time_ns(), "perun": values})

    def _loop(self) -> None:
        period_ns = int(self.period_s * 1e9)
        deadline = time.monotonic_ns() + period_ns
        while not self.stopping.wait(max(0.0, (deadline - time.monotonic_ns()) / 1e9)):
            self.sample()
            deadline += period_ns
            while deadline < time.monotonic_ns():  # absolute deadlines: a late sample does not delay the others
                deadline += period_ns
                self.missed_deadlines += 1

    def _write(self, line: dict) -> None:
        # One write per line: a line is whole or cut at its end, and a cut one is skipped when read.
        data = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        try:
            written = os.write(self.file, data)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self.complained:
                print(f"energynn: samples are not written: {error.strerror}; free some space", file=sys.stderr)
            self.complained = True


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
