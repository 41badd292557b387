"""The one place that knows perun 1.0: how it is started, how we ride along, and what its files hold.

perun launches the ranks, elects one sampler process per host over MPI, reads its own sensors and writes its own HDF5.
Our samples come from a thread of our own inside that same process. What perun does differently from what its users
expect is listed where it is worked around.
"""

from __future__ import annotations

import configparser
import functools
import json
import logging
import multiprocessing
import os
import platform
import re
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from energynn.launchers import label_lines, ranks_of_this_host
from energynn.measure.machine import cpu_name
from energynn.processes import end_forks_with_this, end_with_parent, require_an_end
from energynn.reading import Hdf5, require_file, require_plain_hdf5

if TYPE_CHECKING:
    from energynn.measure.sensors import Sensor

PERUN_VERSION = "1.0.0"
RUN_DIR_VARIABLE = "ENERGYNN_RUN_DIR"
POWERCAP_VARIABLE = "ENERGYNN_POWERCAP"  # another powercap tree than the kernel's, for tests and drills
AMD_DRIVER = Path("/sys/module/amdgpu")
NO_POWER_W = 65535.0  # amdsmi's "not supported" has all of 16 or 32 bits set; no device draws as much

# perun sets these in its own process, and a command that it runs would inherit them.
SET_BY_PERUN = ("OMPI_MCA_mpi_warn_on_fork", "IBV_FORK_SAFE", "RDMAV_FORK_SAFE")

# ------------------------------------------------------------------------------------------ before the run


def write_configuration(path: Path, sampling_period_s: float, on_gpu: bool, gpus: list[int]) -> None:
    """Pin every factor of perun: its defaults differ between versions (emissions 417.8, 230, 274.8 g/kWh).

    perun counts every GPU of a host; of the NVIDIA GPUs only those with the given numbers stay in.
    """
    unused = f"CUDA:(?!({'|'.join(map(str, gpus))})_)"
    ini = configparser.ConfigParser(interpolation=None)
    monitor = {
        "sampling_period": sampling_period_s,
        "queue_timeout": 60,
        "include_backends": "",
        "include_sensors": "",
        "exclude_backends": "" if on_gpu else "nvml amdsmi",
        "exclude_sensors": f"CPU_FREQ_ CPU_USAGE_([1-9]+) DISK_ NET_ CUDA:[0-9]+_(MEM|CLOCK) {unused}",
    }
    sections = {
        "post-processing": {"power_overhead": 0, "pue": 1.0, "emissions_factor": 0, "price_factor": 0},
        "monitor": monitor,
        "output": {"app_name": "energynn", "run_id": "run", "format": "hdf5"},
        "benchmarking": {"rounds": 1, "warmup_rounds": 0},
        "debug": {"log_lvl": "ERROR"},
    }
    ini.read_dict(sections)
    with open(path, "w") as file:
        ini.write(file)


def command(script: Path, run_dir: Path, configuration: Path, python: list[str] | None = None) -> list[str]:
    """The command that each rank runs: a Python script under perun, with our sampler attached.

    perun keeps the folder that it writes to in its HDF5 file, and its configuration file stays with the run. Both may
    move to another machine. So the folder stands in the command only, relative to the working directory.
    """
    hook, out = Path(__file__).with_name("perun_hook.py"), os.path.relpath(run_dir / "perun")
    perun = [*(python or [sys.executable]), "-m", "perun", "-c", str(configuration)]
    options = ["--data_out", out.replace("%", "%%"), "--live-callback-files", str(hook)]  # perun's parser interpolates
    return [*perun, "monitor", *options, "--", str(script), str(run_dir)]


def environment(run_dir: Path, given: dict[str, str]) -> dict[str, str]:
    """The ranks' environment: without PERUN_* variables, which would overrule our configuration file."""
    clean = {name: value for name, value in given.items() if not name.startswith("PERUN_")}
    return clean | {RUN_DIR_VARIABLE: str(run_dir)}


# ------------------------------------------------------------------------------------------ during the run


def attach() -> None:
    """Run in every rank by perun_hook.py: register our sampler with the sampler process that perun will start."""
    import cpuinfo
    import perun

    label_lines()
    for handler in logging.getLogger("perun").handlers:  # perun has opened its log by now
        handler.setStream(sys.stdout)
    cpuinfo.get_cpu_info = processor(cpuinfo.get_cpu_info)
    # Sampler and hook share memory with the rank only if forked; Python 3.14 would use a fork server.
    multiprocessing.set_start_method("fork", force=True)
    end_with_parent()
    end_forks_with_this()  # perun's sampler outlives a killed rank otherwise, and holds its pipes open
    if os.environ.get(POWERCAP_VARIABLE):
        import perun.backend.powercap_rapl as powercap_rapl

        powercap_rapl.RAPL_PATH = os.environ[POWERCAP_VARIABLE] + "/"
    perun.register_live_callback(_start_sampler, "energynn")


def processor(look: Callable[[], dict]) -> Callable[[], dict]:
    """What perun learns of the processor: its kind and name, for which py-cpuinfo keeps an x86 core busy for a second.

    perun asks five times in each rank. A look is a process; where that one is killed, perun would miss the name when
    all is over, fail, and wait ten minutes for its own sampler.
    """
    name = {"brand_raw": cpu_name()}
    if platform.machine() == "x86_64":
        return lambda: name | {"arch": "X86_64"}
    return functools.cache(lambda: name | look())


def _start_sampler():
    """Called once in perun's sampler process before it reports ready: no rank starts before our first sample."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # no signal must end it before its rank
        signal.signal(number, signal.SIG_IGN)
    sampler = make_sampler(Path(os.environ[RUN_DIR_VARIABLE]))
    sampler.start()
    multiprocessing.util.Finalize(None, sampler.stop, exitpriority=1)
    return lambda values: sampler.note({name: _plain(value) for name, value in values.items()})


def make_sampler(folder: Path):
    """The sampler of this host for the run, or segment of a run, whose raw files lie in a folder."""
    from energynn.measure import machine, sensors

    intent = intent_of(folder)
    others, problems = backend_sensors()
    powercap = Path(os.environ.get(POWERCAP_VARIABLE) or sensors.POWERCAP)
    found, more_problems = sensors.find(intent["cpu_model"], powercap, others, visible_to_the_host())
    host = os.uname().nodename
    path, period_s = folder / f"samples-{host}.jsonl", intent["config"]["sampling_period_s"]
    about = machine.describe_host() | {"job_id": machine.job_of_process().get("job_id", "")}
    return sensors.Sampler(path, found, period_s, problems + more_problems, machine=about)


def visible_to_the_host() -> str | None:
    """CUDA_VISIBLE_DEVICES for all ranks of this host; None, all GPUs, where a launcher shows each rank only its own.

    Which of them the ranks use is then known by the UUIDs that they report.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value and len(value.split(",")) < ranks_of_this_host() else value


def intent_of(folder: Path) -> dict:
    """run.json of the run whose raw files, or those of one of its segments, lie in a folder."""
    path = folder / "run.json"
    return json.loads((path if path.exists() else folder.parent / "run.json").read_text())


def _plain(value):
    return value.item() if hasattr(value, "item") else value


# ------------------------------------------------------------------------------------------ perun's backends


def backend_sensors() -> tuple[list[Sensor], list[str]]:
    """AMD GPUs and Grace CPUs through perun's own backends, and one line for whatever is there but cannot be read.

    Absent hardware or libraries are no problem, and are found absent without importing perun, whose backends take
    0.25 s to import and, for Grace, 1 s to start.
    """
    sensors, problems = [], []
    if find_spec("perun") is None:
        return sensors, problems
    for name, is_there, start in (("AMD", _amd_is_there, _amd_sensors), ("Grace", _grace_labels, _grace_sensors)):
        try:
            if is_there():
                found, faults = start()
                sensors += found
                problems += faults
        except Exception as error:  # whatever a vendor's library throws
            problems.append(f"perun's backend for {name} does not start: {type(error).__name__}: {error}")
    return sensors, problems


def _amd_is_there() -> bool:
    return AMD_DRIVER.exists() and ("amdsmi" in sys.modules or find_spec("amdsmi") is not None)


def _amd_sensors() -> tuple[list[Sensor], list[str]]:
    """Power in W of the AMD GPUs that this job may use; the number of a GPU is its place in amdsmi's list.

    perun 1.0.0 reads ``average_socket_power``, which MI300 and newer do not have: of those we read
    ``current_socket_power``. https://rocm.docs.amd.com/projects/amdsmi/en/latest/
    """
    from perun.backend.rocmsmi import ROCMBackend

    _silence("perun.backend.rocmsmi")
    backend = ROCMBackend()
    if not hasattr(backend, "_uuid_map"):  # perun has logged the exception and gone on without a GPU
        return [], ["AMD GPUs: amdsmi is installed, but amdsmi_init fails; `amd-smi list` tells why"]
    sensors, problems = [], []
    handles = backend._uuid_map
    visible, unknown = _visible_amd_gpus([_names_of_amd_gpu(backend.amdsmi, *gpu) for gpu in handles.items()])
    problems += [f"{variable} names {entry!r}, no AMD GPU of this host" for variable, entry in unknown]
    for number, (uuid, handle) in enumerate(handles.items()):
        if number not in visible:
            continue
        notes = {"uuid": uuid}
        if f"ROCM:{uuid}_POWER" in backend.availableSensors():
            (found,) = backend.getSensors({f"ROCM:{uuid}_POWER"})
            notes |= {"name": found.metadata["name"], "power": "average"}
            sensors.append(_sensor(found, "gpu", str(number), notes=notes))
            continue
        sensor = _current_power_of_amd_gpu(backend.amdsmi, handle, str(number), notes | {"power": "current"})
        with suppress(Exception):
            sensor.read()
            sensors.append(sensor)
            continue
        problems.append(f"AMD GPU {number} ({uuid}) gives no power; of an MI250X only the first half does")
    return sensors, problems


def _current_power_of_amd_gpu(amdsmi, handle, device: str, notes: dict) -> Sensor:
    from energynn.measure.sensors import Sensor

    def read() -> int:
        return _credible(int(amdsmi.amdsmi_get_power_info(handle)["current_socket_power"]), 1.0)

    return Sensor(f"ROCM:{notes['uuid']}_POWER", "gpu", device, "power", "measured", read=read, notes=notes)


def _names_of_amd_gpu(amdsmi, uuid: str, handle) -> set[str]:
    """amdsmi and the HIP runtime name a GPU differently; what amdsmi knows of HIP's name depends on its version."""
    names = {uuid.lower()}
    with suppress(Exception):
        names.add(amdsmi.amdsmi_get_gpu_enumeration_info(handle)["hip_uuid"].lower())
    with suppress(Exception):
        names.add("gpu-" + amdsmi.amdsmi_get_gpu_asic_info(handle)["asic_serial"].lower().removeprefix("0x"))
    return names


def _visible_amd_gpus(names: list[set[str]]) -> tuple[list[int], list[tuple[str, str]]]:
    """Numbers of the GPUs that this job may use, and the entries of the variables that name none.

    amdsmi lists all GPUs. HIP_VISIBLE_DEVICES counts within what ROCR_VISIBLE_DEVICES leaves; where it is not set HIP
    takes CUDA_VISIBLE_DEVICES. https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html
    """
    from energynn.measure.sensors import visible_devices

    visible, unknown = list(range(len(names))), []
    hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    for variable in ("ROCR_VISIBLE_DEVICES", hip):
        chosen, wrong = visible_devices([names[number] for number in visible], os.environ.get(variable))
        visible = [visible[number] for number in chosen]
        unknown += [(variable, wrong)] if wrong else []
    return visible, unknown


def _grace_labels() -> list[str]:
    """Labels of this host's Grace power sensors; other machines have ACPI power meters at the same place."""
    hwmon = getattr(sys.modules.get("perun.backend.hwmon_grace"), "HWMON_PATH", "/sys/class/hwmon/")
    labels = [path.read_text().strip() for path in sorted(Path(hwmon).glob("*/device/power*_oem_info"))]
    return [label for label in labels if re.search("(CPU|Grace) Power Socket", label)]


def _grace_sensors() -> tuple[list[Sensor], list[str]]:
    """Power in microwatts of the Grace CPUs.

    "CPU Power Socket" is the CPU. "Grace Power Socket" holds the CPU, its DRAM and "SysIO Power Socket": a cross-check
    from above, as a device of its own. SysIO alone is no CPU, and "Module Power Socket" holds the GPU, which NVML
    counts: both are left out. https://docs.nvidia.com/dccpu/grace-perf-tuning-guide/power-thermals.html
    """
    from perun.backend import hwmon_grace

    _silence("perun.backend.hwmon_grace")
    backend = hwmon_grace.HWMonGraceBackend()
    provenance = "measured" if Path(hwmon_grace.HWMON_PATH).resolve().is_relative_to("/sys") else "simulated"
    sensors, read = [], set()
    for found in backend.getSensors(sorted(backend.availableSensors())):
        label = found.metadata["device_name"]
        match = re.search(r"(CPU|Grace) Power Socket ?(\d*)", label)
        if match is None:
            continue
        read.add(label)
        is_cpu, socket = match[1] == "CPU", match[2] or found.metadata["hwmon_device"]
        notes = {"name": label, "power": "average", "holds": "CPU" if is_cpu else "CPU, DRAM and SysIO"}
        device = socket if is_cpu else f"{socket} with DRAM and SysIO"
        sensors.append(_sensor(found, "cpu", device, provenance=provenance, primary=is_cpu, notes=notes))
    return sensors, [f"{label}: its power cannot be opened" for label in _grace_labels() if label not in read]


def _sensor(found, component: str, device: str, **facts) -> Sensor:
    """Our sensor for one of perun's; its unit says what it reads."""
    from energynn.measure.sensors import Sensor

    to_SI = float(found.dataType.mag.value)
    is_counter = found.dataType.unit.value == "J"
    facts = {"provenance": "measured", "wraps_at": float(found.dataType.max) if is_counter else None} | facts

    def read():
        return _credible(_plain(found.read()), to_SI, is_counter)

    return Sensor(found.id, component, device, "energy" if is_counter else "power", read=read, to_SI=to_SI, **facts)


def _credible(reading, to_SI: float, is_counter: bool = False):
    """The reading; ValueError for what perun's readers return where they have failed, which is zero."""
    if not (reading > 0 and (is_counter or reading * to_SI < NO_POWER_W)):
        raise ValueError(f"a failed reading: {reading}")
    return reading


def _silence(logger: str) -> None:
    """perun logs a traceback for each failed read, ten times a second; ours is a gap in the samples."""
    logging.getLogger(logger).setLevel(logging.CRITICAL)


# ------------------------------------------------------------------------------------------ after the run


ORIGIN = ("execution_dt", "perun_version")  # attributes of a run that tell where it comes from
READ_WITHIN_S = 120  # the largest file that is accepted takes seconds
SMALL_B = 2**20  # a file that is read at once; that of a run of five minutes has 90 kB
MOST_VALUES = 50_000_000  # read from one file: about a week of twelve sensors on six hosts at perun's 1 s


@dataclass(frozen=True)
class Series:
    """Readings as perun stored them, (samples,), in ``unit`` x ``to_SI``; a counter starts again at ``valid_max``."""

    readings: np.ndarray
    unit: str
    to_SI: float
    valid_max: float


@dataclass(frozen=True)
class PerunSensor:
    """One sensor of one host in one round of a run.

    seconds: (samples,) float32, 0 at the first sample; values: what perun integrates, None where that is no energy;
    counter: the raw counter, where the sensor is one: in perun 0.8 the values themselves, from 0.9.1 on kept beside
    them as alternative values.
    """

    round: str
    host: str
    component: str
    name: str
    seconds: np.ndarray
    values: Series | None
    counter: Series | None

    def energy_as_perun_J(self) -> float | None:
        """Energy in J as its perun computed it; None: not an energy sensor.

        perun 0.9.1 and 1.0 turn counters into power and integrate that; 0.8 added up the steps of counters.
        """
        if self.values is None:
            return None
        readings, scale = self.values.readings, self.values.to_SI
        if self.values.unit == "W":
            return float(np.trapezoid(readings.astype("float32") * np.float32(scale), self.seconds))
        steps = np.diff(readings.astype("float64"))
        steps[steps < 0] += self.values.valid_max  # the counter started again
        return float(steps.sum() * scale)


@dataclass(frozen=True)
class PerunRun:
    """One run in a perun file.

    attributes: of ``ORIGIN``, where they were read; reported_J: the total that perun wrote itself, None if it had no
    energy sensor.
    """

    application: str
    name: str
    attributes: dict
    reported_J: float | None
    hosts: list[str]
    sensors: list[PerunSensor]


def read_runs(path: Path, with_origin: bool = True) -> list[PerunRun]:
    """All runs in a perun HDF5 file (perun 0.8 to 1.0), the oldest first, with all their sensors.

    ``with_origin``: read the attributes of a single run, too, which takes a tenth of the time. Raises ValueError where
    the file is no perun file, or is damaged.
    """
    from h5py import h5f

    try:
        require_file(path)
        access = _access(in_memory=os.path.getsize(path) <= SMALL_B)
        with closing(h5f.open(os.fsencode(path), h5f.ACC_RDONLY, access)) as file:
            ((application, root),) = require_plain_hdf5(file, MOST_VALUES).members.items()
            found = root.members["nodes"].members.items()
            told = ORIGIN if with_origin or len(found) > 1 else ()  # several are put in order by them
            runs = [_read_run(application, name, run, told) for name, run in found]
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a perun HDF5 file that can be read ({error})") from error
    if not runs:
        raise ValueError(f"{path}: not a perun HDF5 file that can be read (it holds no run)")
    return sorted(runs, key=lambda run: str(run.attributes.get("execution_dt", run.name)))


@functools.cache
def _access(in_memory: bool):
    """How a file is opened: to close with all that was opened in it; ``in_memory``: one read instead of hundreds."""
    from h5py import h5f, h5p

    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    if in_memory:
        access.set_fapl_core(backing_store=False)
    return access


def _read_run(application: str, name: str, run: Hdf5, told: Iterable[str]) -> PerunRun:
    hosts, sensors = set(), []
    for round_name, round_ in run.members["nodes"].members.items():
        for host, node in round_.members["nodes"].members.items():
            hosts.add(host)
            for component, group in node.members["nodes"].members.items():
                sensors += _read_sensors(group, round_name, host, component)
    metrics, attributes = run.members.get("metrics"), {name: _attribute(run, name) for name in told}
    total = metrics and metrics.members.get("ENERGY")
    reported_J = _number(total, "sum") if total else None
    attributes = {name: value for name, value in attributes.items() if value is not None}
    return PerunRun(application, name, attributes, reported_J, sorted(hosts), sensors)


def _read_sensors(group: Hdf5, round_name: str, host: str, component: str) -> list[PerunSensor]:
    """The sensors of one component of a host; a component that perun knows but did not read has none."""
    sensors = []
    for name, sensor in group.members["nodes"].members.items() if "nodes" in group.members else ():
        raw = sensor.members["raw_data"].members
        times = raw["timesteps"]
        seconds = _numbers(times).astype("float32") * np.float32(_number(times, "mag"))
        values = _read_series(raw["values"], len(seconds))
        kept = _read_series(raw["alt_values"], len(seconds)) if "alt_values" in raw else values
        counter = kept if kept and kept.unit == "J" else None
        sensors.append(PerunSensor(round_name, host, component, name, seconds, values, counter))
    return sensors


def _read_series(dataset: Hdf5, readings: int) -> Series | None:
    """A data set of so many readings; None where they are no energy. Raises ValueError for another number of them."""
    if not readings or dataset.shape != (readings,):
        raise ValueError(f"{dataset}: its times and values do not match")
    if (unit := _attribute(dataset, "unit")) not in ("J", "W"):
        return None
    return Series(_numbers(dataset), unit, _number(dataset, "mag"), _number(dataset, "valid_max", np.inf))


def _number(of: Hdf5, name: str, otherwise: float | None = None) -> float:
    """The one number that an attribute holds, or another one where there is none of this name, if one is given."""
    from h5py import h5a, h5t

    if otherwise is not None and not h5a.exists(of.id, name.encode()):
        return otherwise
    attribute = h5a.open(of.id, name.encode())
    number = np.empty(attribute.shape)  # h5py does not look whether there is room for all that it reads
    attribute.read(number, h5t.NATIVE_DOUBLE)
    return number.item()


def _attribute(of: Hdf5, name: str):
    """The one number or text that an attribute holds; None where there is none of this name."""
    from h5py import h5a

    if not h5a.exists(of.id, name.encode()):
        return None
    attribute = h5a.open(of.id, name.encode())
    value = np.empty(attribute.shape, attribute.dtype)
    attribute.read(value)
    value = value.item()
    return value.decode() if isinstance(value, bytes) else value


def _numbers(dataset: Hdf5) -> np.ndarray:
    """All numbers of a data set. Raises TypeError for what has no row of them."""
    from h5py import h5s

    if not dataset.shape:
        raise TypeError(f"{dataset}: is no row of numbers")
    numbers = np.empty(dataset.shape, dataset.id.dtype)
    dataset.id.read(h5s.ALL, h5s.ALL, numbers)
    return numbers


def read_hdf5(path: Path, run: str | None = None) -> dict:
    """Energies of a run in a file, perun's newest by default, integrated anew by perun's own method from its raw data.

    See energies_as_perun. Raises ValueError where the file is no perun file or has no such run.
    """
    runs = read_runs(path, with_origin=False)
    chosen = [found for found in runs if run is None or found.name == run]
    if not chosen:
        raise ValueError(f"{path}: has no run {run!r}; it has {', '.join(found.name for found in runs)}")
    return energies_as_perun(chosen[-1])


def read_guarded(path: Path, run: str | None = None) -> dict:
    """The same of a file that may be damaged: HDF5 may crash on it, or never end."""
    require_an_end(read_hdf5, path, READ_WITHIN_S)
    return read_hdf5(path, run)


def energies_as_perun(run: PerunRun) -> dict:
    """Energies of a run by perun's own method, from the first to the last sample of each sensor.

    Returns ``perun_time_s``, ``energy_perun_<component>_J`` for the components that have sensors, their
    ``energy_perun_total_J``, ``perun_samples``, and the total that perun wrote itself, ``energy_perun_reported_J``.
    """
    energy_J: dict[str, float] = {}
    for sensor in run.sensors:
        joules = sensor.energy_as_perun_J()
        if joules is not None and sensor.component in ("cpu", "gpu", "ram"):
            energy_J[sensor.component] = energy_J.get(sensor.component, 0.0) + joules
    result = {
        "perun_time_s": max((float(sensor.seconds[-1]) for sensor in run.sensors), default=0.0),
        "perun_samples": max((len(sensor.seconds) for sensor in run.sensors), default=0),
    }
    result |= {f"energy_perun_{component}_J": joules for component, joules in sorted(energy_J.items())}
    if energy_J:
        result["energy_perun_total_J"] = sum(energy_J.values())
    if run.reported_J is not None:
        result["energy_perun_reported_J"] = run.reported_J
    return result


def energy_of_readings(sensor: dict, t_ns: np.ndarray, values: np.ndarray) -> float:
    """Energy in J that perun 1.0 computes from readings: a counter becomes power, and power is integrated."""
    seconds = (t_ns - t_ns[0]) / 1e9
    watts = values * sensor["to_SI"]
    if sensor["kind"] == "energy":
        steps = np.diff(values)
        steps = np.where(steps < 0, steps + (sensor["wraps_at"] or 0), steps) * sensor["to_SI"]
        watts = steps / np.diff(seconds)
        watts = np.insert(watts, 0, watts[0])
    return float(np.trapezoid(watts, seconds))
