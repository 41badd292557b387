"""The one place that knows perun 1.0: how it is started, how we ride along, and what its files hold.

perun launches the ranks, elects one sampler process per host over MPI, reads its own sensors and writes its own HDF5.
Our samples come from a thread of our own inside that same process. What perun does differently from what its users
expect is listed where it is worked around.
"""

from __future__ import annotations

import configparser
import ctypes
import json
import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PERUN_VERSION = "1.0.0"
RUN_DIR_VARIABLE = "ENERGYNN_RUN_DIR"
POWERCAP_VARIABLE = "ENERGYNN_POWERCAP"  # another powercap tree than the kernel's, for tests and drills

# ------------------------------------------------------------------------------------------ before the run


def write_configuration(path: Path, run_dir: Path, sampling_period_s: float, on_gpu: bool) -> None:
    """Pin every factor of perun: its defaults differ between versions (emissions 417.8, 230, 274.8 g/kWh).

    perun counts every GPU of a host; a run that uses none leaves them out.
    """
    ini = configparser.ConfigParser()
    ini.read_dict({
        "post-processing": {"power_overhead": 0, "pue": 1.0, "emissions_factor": 0, "price_factor": 0},
        "monitor": {
            "sampling_period": sampling_period_s, "queue_timeout": 60, "include_backends": "", "include_sensors": "",
            "exclude_backends": "" if on_gpu else "nvml amdsmi",
            "exclude_sensors": "CPU_FREQ_ CPU_USAGE_([1-9]+) DISK_ NET_",
        },
        "output": {"app_name": "energynn", "run_id": "run", "format": "hdf5", "data_out": str(run_dir / "perun")},
        "benchmarking": {"rounds": 1, "warmup_rounds": 0},
        "debug": {"log_lvl": "ERROR"},
    })  # fmt: skip
    with open(path, "w") as file:
        ini.write(file)


def command(script: Path, run_dir: Path, configuration: Path) -> list[str]:
    """The command that each rank runs: a Python script under perun, with our sampler attached."""
    hook = Path(__file__).with_name("perun_hook.py")
    return [
        sys.executable, "-m", "perun", "-c", str(configuration),
        "monitor", "--live-callback-files", str(hook), "--", str(script), str(run_dir),
    ]  # fmt: skip


def environment(run_dir: Path, given: dict[str, str]) -> dict[str, str]:
    """The ranks' environment: without PERUN_* variables, which would overrule our configuration file."""
    clean = {name: value for name, value in given.items() if not name.startswith("PERUN_")}
    return clean | {RUN_DIR_VARIABLE: str(run_dir)}


# ------------------------------------------------------------------------------------------ during the run


def attach() -> None:
    """Run in every rank by perun_hook.py: register our sampler with the sampler process that perun will start."""
    import perun

    # Sampler and hook share memory with the rank only if forked; Python 3.14 would use a fork server.
    multiprocessing.set_start_method("fork", force=True)
    die_with_parent()
    if os.environ.get(POWERCAP_VARIABLE):
        import perun.backend.powercap_rapl as powercap_rapl

        powercap_rapl.RAPL_PATH = os.environ[POWERCAP_VARIABLE] + "/"
    perun.register_live_callback(_start_sampler, "energynn")


def _start_sampler():
    """Called once in perun's sampler process before it reports ready: no rank starts before our first sample."""
    from perun.backend import powercap_rapl

    from energynn.measure import sensors

    # perun's sampler outlives a killed rank and holds its pipes open; and SIGTERM must not end it before its rank.
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run_dir = Path(os.environ[RUN_DIR_VARIABLE])
    intent = json.loads((run_dir / "run.json").read_text())
    found = sensors.find(intent["cpu_model"], Path(powercap_rapl.RAPL_PATH))
    path = run_dir / f"samples-{os.uname().nodename}.jsonl"
    sampler = sensors.Sampler(path, found, intent["config"]["sampling_period_s"])
    sampler.start()
    multiprocessing.util.Finalize(None, sampler.stop, exitpriority=1)
    return lambda values: sampler.note({name: _plain(value) for name, value in values.items()})


def die_with_parent(with_signal: int = signal.SIGKILL) -> None:
    """Ask Linux to send this process a signal when its parent ends, however that ends (prctl PR_SET_PDEATHSIG)."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, with_signal, 0, 0, 0)
    if os.getppid() != parent:  # it ended between the two calls
        os.kill(os.getpid(), with_signal)


def _plain(value):
    return value.item() if hasattr(value, "item") else value


# ------------------------------------------------------------------------------------------ after the run


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

    seconds: (samples,) float32, 0 at the first sample; values: what perun integrates; counter: the raw counter, where
    the sensor is one: in perun 0.8 the values themselves, from 0.9.1 on kept beside them as alternative values.
    """

    round: str
    host: str
    component: str
    name: str
    seconds: np.ndarray
    values: Series
    counter: Series | None

    def energy_as_perun_J(self) -> float | None:
        """Energy in J as its perun computed it; None: not an energy sensor.

        perun 0.9.1 and 1.0 turn counters into power and integrate that; 0.8 added up the steps of counters.
        """
        readings, scale = self.values.readings, self.values.to_SI
        if self.values.unit == "W":
            return float(np.trapezoid(readings.astype("float32") * np.float32(scale), self.seconds))
        if self.values.unit != "J":
            return None
        steps = np.diff(readings.astype("float64"))
        steps[steps < 0] += self.values.valid_max  # the counter started again
        return float(steps.sum() * scale)


@dataclass(frozen=True)
class PerunRun:
    """One run in a perun file; reported_J: the total that perun wrote itself, None if it had no energy sensor."""

    application: str
    name: str
    attributes: dict
    reported_J: float | None
    hosts: list[str]
    sensors: list[PerunSensor]


def read_runs(path: Path) -> list[PerunRun]:
    """All runs in a perun HDF5 file (perun 0.8 to 1.0), the oldest first, with all their sensors.

    Raises ValueError where the file is no perun file, or is damaged.
    """
    import h5py

    try:
        with h5py.File(path, "r") as file:
            ((application, root),) = file.items()
            runs = [_read_run(application, name, run) for name, run in root["nodes"].items()]
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a perun HDF5 file that can be read ({error})") from error
    if not runs:
        raise ValueError(f"{path}: not a perun HDF5 file that can be read (it holds no run)")
    return sorted(runs, key=lambda run: str(run.attributes.get("execution_dt", run.name)))


def _read_run(application: str, name: str, run) -> PerunRun:
    hosts, sensors = set(), []
    for round_name, round_ in run["nodes"].items():
        for host, node in round_["nodes"].items():
            hosts.add(host)
            for component, group in node["nodes"].items():
                for sensor_name, sensor in group["nodes"].items() if "nodes" in group else ():
                    raw = sensor["raw_data"]
                    seconds = raw["timesteps"][:].astype("float32") * np.float32(raw["timesteps"].attrs["mag"])
                    values = _read_series(raw["values"])
                    kept = _read_series(raw["alt_values"]) if "alt_values" in raw else values
                    counter = kept if kept.unit == "J" else None
                    if not 0 < len(seconds) == len(values.readings) == len(kept.readings):
                        raise ValueError(f"{sensor.name}: its times and values do not match")
                    sensors.append(
                        PerunSensor(round_name, host, component, sensor_name, seconds, values, counter)
                    )  # fmt: skip
    reported_J = float(run["metrics/ENERGY"].attrs["sum"]) if "metrics/ENERGY" in run else None
    return PerunRun(application, name, dict(run.attrs), reported_J, sorted(hosts), sensors)


def _read_series(dataset) -> Series:
    facts = dataset.attrs
    return Series(dataset[:], facts["unit"], float(facts["mag"]), float(facts.get("valid_max", np.inf)))


def read_hdf5(path: Path, run: str | None = None) -> dict:
    """Energies of a run in a file, perun's newest by default, integrated anew by perun's own method from its raw data.

    See energies_as_perun. Raises ValueError where the file is no perun file or has no such run.
    """
    runs = read_runs(path)
    chosen = [found for found in runs if run is None or found.name == run]
    if not chosen:
        raise ValueError(f"{path}: has no run {run!r}; it has {', '.join(found.name for found in runs)}")
    return energies_as_perun(chosen[-1])


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
