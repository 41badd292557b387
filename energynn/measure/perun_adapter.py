"""The one place that knows perun 1.0: how it is started, and what its files hold.

perun launches the ranks, elects one sampler process per host over MPI, reads its own sensors and
writes its own HDF5. Our samples come from a thread of our own inside that same process.
"""

import contextlib
import multiprocessing
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from energynn.host.files import is_locked
from energynn.host.launchers import buffer_output_by_line, count_ranks_of_this_host
from energynn.host.processes import (
    MARK_VARIABLE,
    end_forks_with_this,
    end_with_parent,
    require_readable_in_time,
)
from energynn.host.reading import join_faults, require_file, require_plain_hdf5
from energynn.measure.kernel import POWERCAP_FOLDER, cpu_name
from energynn.measure.sampler_process import begin_sampling
from energynn.measure.samples import Channel

PERUN_VERSION = "1.0.0"
# perun as a program; a Ctrl-C waits for the trainer: perun would join its sampler for ever.
PERUN_PROGRAM = (
    "import runpy, signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT});"
    "runpy.run_module('perun', run_name='__main__', alter_sys=True)"
)

# ------------------------------------------------------------------------------- before the run


CONFIGURATION_FILE = "perun.ini"
# Every factor is pinned: perun's defaults differ between versions.
CONFIGURATION_TEXT = """[post-processing]
power_overhead = 0
pue = 1.0
emissions_factor = 0
price_factor = 0
[monitor]
sampling_period = {period_s}
queue_timeout = 60
include_backends =
include_sensors =
exclude_backends = {backends}
exclude_sensors = CPU_FREQ_ CPU_USAGE_([1-9]+) DISK_ NET_ CUDA:[0-9]+_(MEM|CLOCK) CUDA:(?!({used})_)
[output]
app_name = energynn
run_id = run
format = hdf5
[benchmarking]
rounds = 1
warmup_rounds = 0
[debug]
log_lvl = ERROR
"""


def write_configuration(folder: Path, period_s: float, gpus: list[int]) -> None:
    """Write perun's configuration: of the NVIDIA GPUs it counts those with the given numbers."""
    text = CONFIGURATION_TEXT.format(
        period_s=period_s,
        backends="" if gpus else "nvml amdsmi",
        used="|".join(map(str, gpus)),
    )
    (folder / CONFIGURATION_FILE).write_text(text)


def command_under_perun(
    python: list[str], script: list[str], folder: Path
) -> list[str]:
    """Return the command of each rank: a Python script under perun, with our sampler attached.

    script: with its arguments. perun keeps the folder that it writes to in its HDF5 file, and its
    configuration file stays with the run. Both may move to another machine. So the folder stands
    in the command only, relative to the working directory.
    """
    hook = Path(__file__).with_name("perun_hook.py")
    # perun's parser interpolates
    out = os.path.relpath(folder / "perun").replace("%", "%%")
    return [
        *python,
        "-P",
        "-c",
        PERUN_PROGRAM,
        "-c",
        str(folder / CONFIGURATION_FILE),
        "monitor",
        "--data_out",
        out,
        "--live-callback-files",
        str(hook),
        "--",
        *script,
    ]


# ------------------------------------------------------------------------------- during the run


def attach_sampler() -> None:
    """Register our sampler with the sampler process that perun will start (from perun_hook.py)."""
    import cpuinfo
    import perun
    import perun.backend.powercap_rapl as powercap_rapl

    buffer_output_by_line()
    cpuinfo.get_cpu_info = processor_facts
    # Sampler and hook share memory with the rank only if forked; Python 3.14 would use a server.
    multiprocessing.set_start_method("fork", force=True)
    end_with_parent()
    end_forks_with_this()  # perun's sampler outlives a killed rank otherwise
    sys.excepthook = _end_all_ranks
    powercap_rapl.RAPL_PATH = f"{POWERCAP_FOLDER}/"
    perun.register_live_callback(_start_sampler, "energynn")


def processor_facts() -> dict[str, str]:
    """Tell perun the processor's kind and name, for which py-cpuinfo keeps a core busy for 1 s.

    perun asks five times in each rank, and fails where a look, which is a process, is killed.
    """
    arch = {"x86_64": "X86_64", "aarch64": "ARM_8"}.get(platform.machine(), "")
    return {"arch": arch, "brand_raw": cpu_name()}


def _start_sampler():
    """Start sampling in perun's sampler process before that reports ready, and so before a rank."""
    sampler = begin_sampling(
        Path(os.environ[MARK_VARIABLE]), count_ranks_of_this_host()
    )
    multiprocessing.util.Finalize(None, sampler.stop, exitpriority=1)
    return lambda values: None


def _end_all_ranks(kind, error, trace) -> None:
    """End all ranks where an exception, as of Ctrl-C, ends this one.

    MPI would wait for the others for ever, and Python for perun's sampler, which ends with us.
    """
    sys.__excepthook__(kind, error, trace)
    sys.stderr.flush()
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(1)


# -------------------------------------------------------------------------------- after the run

# of one file: about a week of twelve sensors on six hosts at perun's 1 s
MAX_VALUES_OF_FILE = 50_000_000
KIND_OF_UNIT = {"J": "energy", "W": "power"}
RESULT_FIELDS = {
    "RUNTIME": "perun_time_s",
    "ENERGY": "energy_perun_total_J",
    "CPU_ENERGY": "energy_perun_cpu_J",
    "GPU_ENERGY": "energy_perun_gpu_J",
    "DRAM_ENERGY": "energy_perun_ram_J",
}


class PerunSensor(NamedTuple):
    """What one sensor of one host read in one round of a run.

    seconds: (samples,) float32, 0 at the first sample; readings: (samples,). Those of a counter are
    raw: in perun 0.8 what it integrates, from 0.9.1 on kept beside the power that it makes of them.
    channel: as the header of a samples file describes it, the kind of what is no energy its unit.
    """

    round: str
    host: str
    channel: Channel
    seconds: np.ndarray
    readings: np.ndarray


class PerunRun(NamedTuple):
    """One run in a perun file: its sensors, and what perun itself made of them.

    started: as ISO date, "" if unknown; results: ``perun_time_s``, from the first to the last
    sample, and ``energy_perun_*_J`` of the components that have sensors and of all.
    """

    application: str
    name: str
    started: str
    results: dict[str, float]
    sensors: list[PerunSensor]

    @property
    def whole_name(self) -> str:
        """Name it where a file has several applications, too."""
        return f"{self.application}/{self.name}"


def read_perun_runs(path: Path) -> tuple[list[PerunRun], list[str]]:
    """Read all runs in a perun HDF5 file (perun 0.8 to 1.0), by name, with all their sensors.

    Returns them, and a line for each run that is not whole. Raises ValueError where the file is no
    perun file, is being written, is damaged, or has no whole run.
    """
    import h5py

    runs = []
    faults: list[str] = []
    is_in_use = False
    with contextlib.suppress(ValueError):  # without locks HDF5 has none either
        is_in_use = is_locked(path)
    if is_in_use:
        raise ValueError(
            f"{path}: is in use by another process; try again when it ends"
        )
    with join_faults(f"{path}: not a perun HDF5 file that can be read"):
        require_file(path)
        with h5py.File(path) as file:
            require_plain_hdf5(file, MAX_VALUES_OF_FILE)
            for application, root in file.items():
                for name, run in root["nodes"].items():
                    with join_faults(f"{path}: run {application}/{name}", faults):
                        runs.append(_read_perun_run(application, name, run))
        if not runs:
            raise ValueError("; ".join(faults) or "it holds no run")
    return runs, faults


def _read_perun_run(application: str, name: str, run) -> PerunRun:
    sensors = []
    metrics = run["metrics"]

    def add_sensor(path: str, raw) -> None:
        *place, last = path.split("/")  # of round, host, component and sensor
        if last != "raw_data" or place[::2] != ["nodes"] * 4:
            return
        times = raw["timesteps"]
        series = raw.get("alt_values", raw["values"])
        seconds = times[:].astype("float32") * np.float32(times.attrs["mag"])
        if not len(seconds) or len(series) != len(seconds):
            raise ValueError(f"{raw.name}: its times and values do not match")
        round_, host, component, name = place[1::2]
        unit = series.attrs["unit"]
        most = float(series.attrs.get("valid_max", np.inf))
        channel = Channel(
            name,
            component,
            name,
            KIND_OF_UNIT.get(unit, unit),
            "measured",
            to_SI=float(series.attrs["mag"]),
        )
        if unit == "J" and most < 2**63:  # 64 bits never wrap
            channel.wraps_at = most
        sensors.append(PerunSensor(round_, host, channel, seconds, series[:]))

    run.visititems(add_sensor)
    known = RESULT_FIELDS.keys() & metrics.keys()
    results = {RESULT_FIELDS[each]: float(metrics[each].attrs["sum"]) for each in known}
    return PerunRun(
        application, name, str(run.attrs.get("execution_dt", "")), results, sensors
    )


def read_perun_results(
    path: Path, run: str | None = None, is_trusted: bool = False
) -> dict[str, float]:
    """Read what perun made of a run, or of the only one in a file; see ``PerunRun.results``.

    HDF5 may crash on a damaged file, or never end: one that is not trusted is read by another
    process first. Raises ValueError where the file is no perun file or has no such run.
    """
    if not is_trusted:
        require_readable_in_time(read_perun_runs, path)
    runs, _ = read_perun_runs(path)
    results = [one.results for one in runs if run in (None, one.name, one.whole_name)]
    if len(results) != 1:
        raise ValueError(f"{path}: has {len(results)} runs {run or ''}")
    return results[0]
