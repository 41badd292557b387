"""`energynn status --watch RUN`: what a run draws, has used and has left to do, from any shell."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np

from energynn import records
from energynn.measure.samples import (
    events_of_kind,
    last_ns,
    read_events,
    read_header,
    samples_files,
    segments,
    times_of,
)
from energynn.measure.stream import read_streams
from energynn.progress import tell
from energynn.reading import one_fault

LOOK_S = 2.0  # between two looks


def look(run_dir: Path) -> str:
    """Say what each device draws, and has used in the training of the newest segment."""
    folder = segments(run_dir)[-1]
    events = read_events(folder)
    starts = times_of(events, "training_start", "host")
    ends = times_of(events, "training_end", "host")
    status = ["starting", "training", "ending"][bool(starts) + bool(ends)]
    if (run_dir / "record.json").exists():
        status = records.read_record(run_dir).status
    lines, together = [f"{run_dir.name}: {status}"], np.zeros(2)
    for path in samples_files(folder):
        header = read_header(path)
        if header is None:
            continue
        host, now_s = header.host, last_ns(path) / 1e9
        begin_s, end_s = (times.get(host, math.inf) / 1e9 for times in (starts, ends))
        asked_s = [begin_s, end_s, now_s - 1.0, now_s]
        for one in read_streams(path, header, {}, asked_s)[0]:
            if not one.sensor.primary:
                continue
            # beyond the last reading the energy stays the same
            begin_J, end_J, before_J, now_J = one.at(asked_s)
            used = np.array([now_J - before_J, end_J - begin_J])
            together += used
            name = f"{host}:{one.sensor.id}"
            lines.append(_line(name, used, one.sensor.provenance))
    return "\n".join([*lines, _line("together", together), *_progress(events)])


def _line(name: str, used: np.ndarray, provenance: str = "") -> str:
    power_W, energy_J = used
    return f"  {name:28}{power_W:10.1f} W {energy_J:14.1f} J  {provenance}".rstrip()


def _progress(events: list[dict]) -> list[str]:
    """Say how far it is; nothing before rank 0's first word."""
    told = [event for event in events if "samples_to_train" in event]
    starts = [
        each for each in events_of_kind(events, "training_start") if each["rank"] == 0
    ]
    if not told or not starts:
        return []
    done, aim = told[-1]["samples_trained"], told[-1]["samples_to_train"]
    here = max(1, done - starts[0].get("samples_done", 0))  # in this segment
    elapsed_s = (told[-1]["t_mono_ns"] - starts[0]["t_mono_ns"]) / 1e9
    left_s = elapsed_s * (aim - done) / here
    return [f"  {done} of {aim} samples, {left_s:.0f} s left"]


def follow(run_dir: Path) -> None:
    """Print a look every two seconds until the run has its record."""
    while True:
        with one_fault(run_dir):
            tell(look(run_dir))
        if (run_dir / "record.json").exists():
            return
        time.sleep(LOOK_S)
