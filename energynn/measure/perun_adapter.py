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
from pathlib import Path

import numpy as np

PERUN_VERSION = "1.0.0"
RUN_DIR_VARIABLE = "ENERGYNN_RUN_DIR"
POWERCAP_VARIABLE = "ENERGYNN_POWERCAP"  # another powercap tree than the kernel's, for tests and drills

# perun sets these in its own process, and a command that it runs would inherit them.
SET_BY_PERUN = ("OMPI_MCA_mpi_warn_on_fork", "IBV_FORK_SAFE", "RDMAV_FORK_SAFE")

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
            "exclude_sensors": "CPU_FREQ_ CPU_USAGE_([1-9]+) DISK_ NET_ CUDA:[0-9]+_(MEM|CLOCK)",
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
    # perun's sampler outlives a killed rank and holds its pipes open; and no signal must end it before its rank.
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sampler = make_sampler(Path(os.environ[RUN_DIR_VARIABLE]))
    sampler.start()
    multiprocessing.util.Finalize(None, sampler.stop, exitpriority=1)
    return lambda values: sampler.note({name: _plain(value) for name, value in values.items()})


def make_sampler(folder: Path):
    """The sampler of this host for the run, or segment of a run, whose raw files lie in a folder."""
    from energynn.measure import clocks, sensors

    intent = intent_of(folder)
    others, problems = backend_sensors()
    powercap = Path(os.environ.get(POWERCAP_VARIABLE) or sensors.POWERCAP)
    found, more_problems = sensors.find(intent["cpu_model"], powercap, others)
    host = os.uname().nodename
    return sensors.Sampler(
        folder / f"samples-{host}.jsonl", found, intent["config"]["sampling_period_s"], problems + more_problems,
        clocks.Clock(folder, host),
    )  # fmt: skip


def intent_of(folder: Path) -> dict:
    """run.json of the run whose raw files, or those of one of its segments, lie in a folder."""
    path = folder / "run.json"
    return json.loads((path if path.exists() else folder.parent / "run.json").read_text())


def die_with_parent(with_signal: int = signal.SIGKILL) -> None:
    """Ask Linux to send this process a signal when its parent ends, however that ends (prctl PR_SET_PDEATHSIG)."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, with_signal, 0, 0, 0)
    if os.getppid() != parent:  # it ended between the two calls
        os.kill(os.getpid(), with_signal)


def _plain(value):
    return value.item() if hasattr(value, "item") else value


# ------------------------------------------------------------------------------------------ after the run


def read_hdf5(path: Path) -> dict:
    """Energies of perun's newest run in a file, integrated anew by perun's own method from the raw data in it.

    From the first to the last sample of each sensor. Returns ``perun_time_s``, ``energy_perun_<component>_J`` for the
    components that have sensors, their ``energy_perun_total_J``, ``perun_samples``, and the total that perun wrote
    itself, ``energy_perun_reported_J``. Raises ValueError where the file is no perun file.
    """
    import h5py

    energy_J: dict[str, float] = {}
    time_s, samples = 0.0, 0
    try:
        with h5py.File(path, "r") as file:
            (application,) = file.values()
            runs = application["nodes"]
            run = runs[sorted(runs, key=lambda name: runs[name].attrs.get("execution_dt", name))[-1]]
            reported = run["metrics/ENERGY"].attrs["sum"] if "ENERGY" in run["metrics"] else None
            for host in _nodes(run["nodes"], depth=2):
                for component, group in host["nodes"].items():
                    for sensor in group["nodes"].values() if "nodes" in group else ():
                        raw = sensor["raw_data"]
                        seconds = raw["timesteps"][:].astype("float32") * np.float32(raw["timesteps"].attrs["mag"])
                        time_s, samples = max(time_s, float(seconds[-1])), max(samples, len(seconds))
                        joules = _energy_as_perun(raw["values"], seconds)
                        if joules is not None and component in ("cpu", "gpu", "ram"):
                            energy_J[component] = energy_J.get(component, 0.0) + joules
    except (OSError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not a perun HDF5 file that can be read ({error})") from error
    result = {"perun_time_s": time_s, "perun_samples": samples}
    result |= {f"energy_perun_{component}_J": joules for component, joules in sorted(energy_J.items())}
    if energy_J:
        result["energy_perun_total_J"] = sum(energy_J.values())
    if reported is not None:
        result["energy_perun_reported_J"] = float(reported)
    return result


def _energy_as_perun(dataset, seconds: np.ndarray) -> float | None:
    """Energy in J of one sensor as its perun computed it; None: not an energy sensor.

    perun 1.0 stores power, also of counters, and integrates it; up to 0.9 it stored counters and added up their steps.
    """
    unit, scale = dataset.attrs["unit"], float(dataset.attrs["mag"])
    readings = dataset[:]
    if unit == "W":
        return float(np.trapezoid(readings.astype("float32") * np.float32(scale), seconds))
    if unit != "J":
        return None
    steps = np.diff(readings.astype("float64"))
    steps[steps < 0] += float(dataset.attrs["valid_max"])  # the counter started again
    return float(steps.sum() * scale)


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


def _nodes(group, depth: int):
    """The hosts of a run: perun nests round and host in ``nodes`` groups."""
    for child in group.values():
        if depth == 1:
            yield child
        else:
            yield from _nodes(child["nodes"], depth - 1)
