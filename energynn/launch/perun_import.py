"""perun HDF5 files that others have, as run folders of ours: raw readings, with perun's own
result beside them.
"""

import hashlib
import re
import shutil
from pathlib import Path
from urllib.parse import quote

import numpy as np

from energynn import records
from energynn.host.files import hash_file, staging_folder, write_json
from energynn.host.processes import require_readable_in_time
from energynn.host.reading import join_faults
from energynn.launch import supervise
from energynn.measure.energy import COMPONENTS
from energynn.measure.perun_adapter import (
    KIND_OF_UNIT,
    PerunRun,
    PerunSensor,
    read_perun_runs,
)
from energynn.measure.samples import write_host_files

ROUND_DURATION_NS = 10**15  # 11 days from one round to the next: they do not overlap
ENERGY_METHOD_TEXT = (
    "Samples of perun's HDF5: difference of the raw counter, with wrap-around, where perun kept "
    "one; else the trapezoidal integral of power. Zero, negative and missing readings are gaps."
)


def import_perun_file(path: Path, runs_dir: Path) -> tuple[list[Path], list[str]]:
    """Write a run folder ``imported/<application>-<run>-<digest>`` for every run in a perun file.

    Returns the folders, and a line for each run that is not whole. Each folder has its record;
    rounds of a run are its segments. Importing a file again changes nothing. Raises ValueError for
    what is no perun file, and where no run is whole.
    """
    require_readable_in_time(read_perun_runs, path)
    runs, faults = read_perun_runs(path)
    digest = hash_file(path)
    folders = []
    for run in runs:
        try:
            folders.append(_import_perun_run(path, digest, run, runs_dir))
        except ValueError as error:
            faults.append(str(error))
    if not folders:
        raise ValueError("; ".join(faults))
    return folders, faults


def _import_perun_run(path: Path, digest: str, run: PerunRun, runs_dir: Path) -> Path:
    """Write the folder of one run, unless it is there already; return it."""
    # perun adds later runs to the same file
    content = f"{run.whole_name} {run.started}".encode()
    content += b"".join(each.readings.tobytes() for each in run.sensors)
    suffix = hashlib.sha256(content).hexdigest()[:8]
    # Not every file system takes the colons of a time, and hidden folders are no runs.
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{run.application}-{run.name}-{suffix}")
    folder = runs_dir / "imported" / name.lstrip(".")
    if folder.exists():
        return folder
    # A folder that bears its name is whole: an import that is cut off leaves only a hidden one.
    with staging_folder(folder.parent) as parent:
        unfinished = parent / folder.name
        (unfinished / "perun").mkdir(parents=True)
        shutil.copyfile(path, unfinished / "perun" / f"{path.stem}.hdf5")
        counted = filter(_is_counted, run.sensors)
        # every round of a run has the same
        parts = {(each.host, each.channel.id): each.channel for each in counted}
        hosts = {each.host for each in run.sensors}
        components = [channel.component for channel in parts.values()]
        write_json(
            unfinished / "run.json",
            {
                "run_id": folder.name,
                "workload": "perun import",
                "system": "imported",
                "started_at": run.started,
                "perun_run": run.whole_name,
                "config": {
                    "source": path.name,
                    "source_sha256": digest,
                    "application": run.application,
                    "run": run.name,
                },
                "machine": {"sockets": components.count("cpu") // max(1, len(hosts))},
                "devices": components.count("gpu") or 1,
                "method": ENERGY_METHOD_TEXT,
            },
        )
        with join_faults(f"{path}: run {run.whole_name}"):
            _write_samples_of_hosts(run.sensors, unfinished)
            records.save_record(unfinished, "finished", "")
        unfinished.rename(folder)
    return folder


def _is_counted(sensor: PerunSensor) -> bool:
    """Tell whether perun adds a sensor up; "other" is not summed, and not all others are energy."""
    channel = sensor.channel
    return channel.component in COMPONENTS and channel.kind in KIND_OF_UNIT.values()


def _raw_readings(theirs: PerunSensor) -> list[float | None]:
    """Return raw readings, None where one failed.

    perun stores 0 for a failed read. No device that is on draws 0 W, and a counter of microjoules
    that truly stands at 0 is one in 10^11, while a false 0 would be taken for a wrap-around.
    """
    most = theirs.channel.wraps_at or np.inf
    readings = theirs.readings.tolist()  # whole counters, not floats
    return [reading if 0 < reading <= most else None for reading in readings]


def _write_samples_of_hosts(sensors: list[PerunSensor], folder: Path) -> None:
    """Write the events of each host of each round, and the samples of its sensors that count.

    A round is a segment of the run. Both clocks begin at its first sample: perun keeps none that
    goes on from round to round, and the run's start stands in run.json.
    """
    rounds = sorted({sensor.round for sensor in sensors})
    hosts = sorted({sensor.host for sensor in sensors})
    for number, round_ in enumerate(rounds):
        place = supervise.make_segment_folder(folder) if number else folder
        for rank, host in enumerate(hosts):
            there = [
                each for each in sensors if (each.round, each.host) == (round_, host)
            ]
            own = [*filter(_is_counted, there)]
            seconds = (own or there)[0].seconds.astype(float)  # of all that count
            steps_s = np.diff(seconds)
            are_same = all(np.array_equal(each.seconds, seconds) for each in own)
            are_steps = len(steps_s) and ((steps_s >= 0) & (steps_s < np.inf)).all()
            if not (are_same and are_steps):
                raise ValueError(f"the times of {host} are not those of a run")
            rows = list(map(list, zip(*map(_raw_readings, own), strict=True)))
            times_ns = np.rint(seconds * 1e9).astype(np.int64).tolist()
            write_host_files(
                place,
                rank,
                quote(host, ""),  # no two hosts may have one name
                [each.channel for each in own],
                times_ns,
                rows or [[]] * len(seconds),
                apart_ns=number * ROUND_DURATION_NS,
            )
