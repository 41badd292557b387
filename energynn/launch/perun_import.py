"""perun HDF5 files that others have, as run folders of ours: raw readings, with perun's own result beside them."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np

from energynn import processes, records
from energynn.files import sha256, staged, write_json
from energynn.measure import energy, perun_adapter
from energynn.measure.perun_adapter import READ_WITHIN_S, PerunRun, PerunSensor
from energynn.measure.sensors import Sensor
from energynn.reading import one_fault

LONGEST_S = 1e8  # of a run: three years
METHOD = (
    "Samples of perun's HDF5: difference of the raw counter, with wrap-around, where perun kept one; else the "
    "trapezoidal integral of power. Zero, negative and missing readings are gaps, bridged by their neighbours."
)


def import_file(path: Path, runs_dir: Path) -> list[Path]:
    """Write a run folder ``imported/<application>-<run>-<digest>`` for every run in a perun file; returns the folders.

    Each has its record; rounds of a run are its segments. Importing a file again changes nothing. Raises
    ValueError for what is no perun file.
    """
    processes.require_an_end(perun_adapter.read_runs, path, READ_WITHIN_S)
    runs = perun_adapter.read_runs(path)
    digest = sha256(path)
    return [_import_run(path, digest, run, runs_dir) for run in runs]


def _import_run(path: Path, digest: str, run: PerunRun, runs_dir: Path) -> Path:
    """The folder of one run, written unless it is there already."""
    suffix = hashlib.sha256(f"{digest} {run.name}".encode()).hexdigest()[:8]
    folder = runs_dir / "imported" / _file_name(f"{run.application}-{run.name}-{suffix}")
    if folder.exists():
        return folder
    with one_fault(path):
        raw_files = list(_raw_files(path, run))
        intent = {"run_id": folder.name, **_intent(path, digest, run)}
    # A folder that bears its name is whole: an import that is cut off leaves only a hidden one.
    with staged(folder.parent) as parent:
        unfinished = parent / folder.name
        (unfinished / "perun").mkdir(parents=True)
        shutil.copyfile(path, unfinished / "perun" / f"{path.stem}.hdf5")
        for name, lines in raw_files:
            (unfinished / name).parent.mkdir(exist_ok=True)
            text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            (unfinished / name).write_text(text)
        write_json(unfinished / "run.json", intent)
        with one_fault(path):
            records.build(unfinished, "finished", "", ended_at=intent["started_at"])
        unfinished.rename(folder)
    return folder


def _energy_sensors(run: PerunRun) -> list[PerunSensor]:
    """Sensors that perun adds up; utilization, memory, disk and network are not energy, and "other" is not summed."""
    counted = [sensor for sensor in run.sensors if sensor.component in energy.COMPONENTS]
    return [sensor for sensor in counted if sensor.counter or sensor.values and sensor.values.unit == "W"]


def _as_ours(theirs: PerunSensor) -> tuple[Sensor, np.ndarray]:
    """Our description of a sensor of perun's, and its readings, (samples,), NaN where a reading failed.

    perun stores 0 for a failed read. No device that is on draws 0 W, and a counter of microjoules that truly stands
    at 0 is one in 10^11: a gap there costs no energy, as the next reading bridges it, while a false 0 is taken for a
    wrap-around and adds up to the whole range of the counter, 262 kJ.
    """
    series = theirs.counter or theirs.values
    if not 0 < series.to_SI < math.inf:
        raise ValueError(f"{theirs.name}: its magnitude is {series.to_SI}, no number above 0")
    readings = series.readings.astype(float)
    failed = ~(readings > 0)  # NaN too
    if theirs.counter:
        failed |= readings > series.valid_max
    number = re.search(r"(?:^CUDA:|^ROCM:|_)([0-9a-fA-F-]+)(?=_)", theirs.name)
    wraps = theirs.counter and series.valid_max < 2**63  # 64 bits never wrap
    sensor = Sensor(
        id=theirs.name,
        component=theirs.component,
        device=number[1] if number else theirs.name,
        kind="energy" if theirs.counter else "power",
        provenance="measured",
        read=lambda: None,
        to_SI=series.to_SI,
        notes={"source": "perun HDF5"},
        wraps_at=series.valid_max if wraps else None,
    )
    return sensor, np.where(failed, np.nan, readings)


def _raw_files(path: Path, run: PerunRun):
    """Name and lines of each file of samples and events: of each host, and of each round as a segment of the run.

    t is the time since the first sample of a round, as perun keeps no clock that goes on from round to round.
    """
    sensors = _energy_sensors(run)
    places = sorted({(sensor.host, sensor.round) for sensor in sensors})
    hosts, rounds = sorted({host for host, _ in places}), sorted({round_ for _, round_ in places})
    for host, round_ in places:
        own = [sensor for sensor in sensors if (sensor.host, sensor.round) == (host, round_)]
        seconds = own[0].seconds.astype(float)
        if not (np.isfinite(seconds).all() and (np.diff(seconds) >= 0).all() and np.ptp(seconds) < LONGEST_S):
            raise ValueError(
                f"{path}: the times of {host} are not those of a run, from {seconds[0]} to {seconds[-1]} s"
            )
        if not all(np.array_equal(sensor.seconds, own[0].seconds) for sensor in own):
            raise ValueError(f"{path}: the sensors of {host} were not read at the same times, as perun does")
        translated = [_as_ours(sensor) for sensor in own]
        raw = [(sensor.counter or sensor.values).readings.tolist() for sensor in own]  # whole counters, not floats
        columns = []
        for values, (_, readings) in zip(raw, translated, strict=True):
            pairs = zip(values, readings, strict=True)
            columns.append([None if np.isnan(reading) else value for value, reading in pairs])
        start_ns = _start_ns(run) if round_ == rounds[0] else 0  # when later rounds began perun does not say
        period_s = float(np.median(np.diff(seconds))) if len(seconds) > 1 else 0.0
        header = {"header": "energynn-samples/1", "host": host, "period_s": period_s}
        header["sensors"] = [sensor.describe() for sensor, _ in translated]
        times_ns = np.rint(seconds * 1e9).astype(np.int64).tolist()
        folder = "" if round_ == rounds[0] else f"segment-{rounds.index(round_) + 1}/"
        yield (
            f"{folder}{_file_name(f'samples-{host}.jsonl')}",
            [header]
            + [{"t": t, "w": start_ns + t, "v": values} for t, *values in zip(times_ns, *columns, strict=True)],
        )
        rank = hosts.index(host)  # one for each host, whose window is all that perun sampled there
        marks = (("rank_start", times_ns[0]), ("training_start", times_ns[0]), ("training_end", times_ns[-1]))
        yield (
            f"{folder}events-rank{rank}.jsonl",
            [
                {"t_mono_ns": t, "t_wall_ns": start_ns + t, "event": event, "rank": rank, "host": host}
                for event, t in marks
            ],
        )


def _intent(path: Path, digest: str, run: PerunRun) -> dict:
    # Every round of a run has the same sensors.
    sensors = {(sensor.host, sensor.name, sensor.component) for sensor in _energy_sensors(run)}
    number = Counter(component for _, _, component in sensors)
    return {
        "workload": "perun import",
        "system": "imported",
        "started_at": "",
        **_origin(run),
        "config": {"source": path.name, "source_sha256": digest, "application": run.application, "run": run.name},
        "perun_run": run.name,
        "machine": {"sockets": number["cpu"] // max(1, len(run.hosts))},
        "devices": number["gpu"] or 1,
        "method": METHOD,
    }


def _origin(run: PerunRun) -> dict:
    """When the run began, by a clock whose time zone perun does not keep, and its perun, each if the file says so.

    perun 0.8 wrote 0.3.2 as its version.
    """
    named = {"started_at": "execution_dt", "perun_version": "perun_version"}
    return {ours: str(run.attributes[theirs]) for ours, theirs in named.items() if theirs in run.attributes}


def _start_ns(run: PerunRun) -> int:
    """Wall clock at the start of the run in ns, a time without zone taken as UTC; 0 if the file does not tell."""
    try:
        started = datetime.datetime.fromisoformat(run.attributes["execution_dt"])
    except (KeyError, TypeError, ValueError):
        return 0
    if not 1970 < started.year < 2200:
        raise ValueError(f"run {run.name}: began in the year {started.year}, by its execution_dt; mend it")
    return round((started if started.tzinfo else started.replace(tzinfo=datetime.UTC)).timestamp() * 1e6) * 1000


def _file_name(text: str) -> str:
    """Times have colons, which not every file system takes; nobody looks for runs in a folder that is hidden."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip(".")
