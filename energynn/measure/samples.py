"""Write and read the files that a run appends to: samples of hosts, events and phases of ranks."""

import json
import os
import platform
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from energynn.host.processes import cpu_times
from energynn.host.reading import require_file
from energynn.measure import kernel

PIECE_SAMPLES = 2**14  # samples that are read at once
MAX_LINE_LENGTH_B = 2**24


# ----------------------------------------------------------------------------------------- samples


InstantNs = Annotated[int, msgspec.Meta(gt=-(2**62), lt=2**62)]


class Channel(msgspec.Struct):
    """One quantity of one device, as the header of a samples file describes it.

    ``kind`` says what a reading is: ``energy`` a cumulative counter, ``power`` an instant or
    average, ``busy`` the cumulative busy time of all cores in core-seconds. ``to_SI`` turns a
    reading into J, W or core-seconds. ``wraps_at`` is the reading at which a counter starts again;
    ``update_s`` the time between changes, None if unknown. One sensor of each device is primary;
    ``checks`` names the primary sensor that measures the same. The others never enter a sum.
    ``model`` is that of an estimate.
    """

    id: str
    component: str  # gpu, cpu or ram
    device: str
    kind: str
    provenance: str
    to_SI: float = 1.0
    wraps_at: float | None = None
    primary: bool = True
    checks: str | None = None
    update_s: float | None = None
    model: dict | None = None
    notes: dict = {}

    @property
    def device_name(self) -> str:
        """Name the device as a person may leave it out, with all that reads it."""
        return self.component + self.device


class Header(msgspec.Struct, tag_field="header", tag="energynn-samples/1"):
    """What a samples file says of its host, in its first line.

    problems, unaccounted: as in ``sensors.SensorInventory``.
    """

    host: str
    period_s: float
    sensors: list[Channel]
    boot_id: str = ""
    problems: list[str] = []
    unaccounted: list[str] = []


class DeviceState(msgspec.Struct, omit_defaults=True):
    """What a device tells of itself: its power limit, and whether it works."""

    limit_W: float | None = None
    is_busy: bool | None = None


class SamplesLine(msgspec.Struct):
    """One line: readings, or the states of devices, by sensor; older ones have more fields."""

    t: InstantNs
    v: list[float | None] = []
    states: dict[str, DeviceState] = {}


_decode_line = msgspec.json.Decoder(SamplesLine).decode


@dataclass
class Samples:
    """Readings of one host.

    t_ns: (samples,) of the monotonic clock; readings: (samples, sensors), NaN where one failed;
    problems: what the sampler complained about; states: what devices told of themselves.
    """

    header: Header
    t_ns: np.ndarray
    readings: np.ndarray
    problems: list[str]
    states: list[SamplesLine]


def read_pieces(path: Path, begin_B: int = 0) -> Iterator[Samples]:
    """Read a samples file of any length, ``PIECE_SAMPLES`` samples at once; nothing without a
    header.

    Of its samples only those from a byte on. What is no whole line, as at the end of a file that
    is being written, is skipped.
    """
    header = read_samples_header(path)
    if header is None:
        return
    with open(path, "rb") as file:
        file.readline()
        file.seek(max(begin_B, file.tell()))
        lines = iter(partial(file.readline, MAX_LINE_LENGTH_B), b"")
        while True:
            part = _parse_piece(lines, header)
            yield part
            if len(part.t_ns) < PIECE_SAMPLES:
                return


def read_samples_header(path: Path) -> Header | None:
    """Read what a samples file says of host and sensors; None where it was cut off before."""
    require_file(path)
    with open(path, "rb") as file:
        first = file.readline(MAX_LINE_LENGTH_B)
    return msgspec.json.decode(first, type=Header) if first.endswith(b"\n") else None


def _parse_piece(lines: Iterator[bytes], header: Header) -> Samples:
    times_ns = []
    rows = []
    states = []
    problems = []
    for line in lines:
        with suppress(ValueError):
            if line.startswith(b'{"problem"'):
                problems.append(msgspec.json.decode(line)["problem"])
                continue
            told = _decode_line(line)
            if told.states:
                states.append(told)
            elif len(told.v) == len(header.sensors):
                times_ns.append(told.t)
                rows.append(told.v)
        if len(rows) == PIECE_SAMPLES:
            break
    readings = np.array(rows, dtype=float).reshape(len(rows), len(header.sensors))
    return Samples(
        header, np.array(times_ns, dtype=np.int64), readings, problems, states
    )


def last_sample_time_ns(path: Path) -> int:
    """Tell when the last sample of a file was taken, of the monotonic clock; 0 without one, or
    without a file.
    """
    if not path.exists():
        return 0
    for back_B in (2**16, MAX_LINE_LENGTH_B):
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - back_B))
            lines = file.read().splitlines()
        for line in reversed(lines):
            with suppress(ValueError):
                told = _decode_line(line)
                if told.v:
                    return told.t
    return 0


def list_samples_files(folder: Path) -> list[Path]:
    """List the samples of every host of a folder."""
    return sorted(folder.glob("samples-*.jsonl"))


def write_host_files(
    folder: Path,
    rank: int,
    host: str,
    sensors: list[Channel],
    times_ns: list[int],
    readings: Iterable[list],
    apart_ns: int = 0,
    **at_end,
) -> None:
    """Write samples and events of a host that was not sampled by us: all of them in the training;
    of a host without sensors the events alone.

    One rank stands for it. apart_ns: from its monotonic to its wall clock. at_end: fields of the
    end of the training.
    """
    header = Header(host, float(np.median(np.diff(times_ns))) / 1e9, sensors)
    samples = [
        {"t": t, "v": values} for t, values in zip(times_ns, readings, strict=True)
    ]
    marks = ("rank_start", 0), ("training_start", 0), ("training_end", -1)
    events = [
        {
            "event": event,
            "host": host,
            "t_mono_ns": times_ns[at],
            "t_wall_ns": apart_ns + times_ns[at],
        }
        for event, at in marks
    ]
    events[-1] |= at_end
    files: dict[str, list] = {f"events-rank{rank}": events}
    if sensors:
        files[f"samples-{host}"] = [header, *samples]
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_bytes(
            msgspec.json.Encoder().encode_lines(lines)
        )


def has_samples(folder: Path, host: str) -> bool:
    """Tell whether the sampler of a host has written its first sample."""
    return last_sample_time_ns(folder / f"samples-{host}.jsonl") > 0


# -------------------------------------------------------------------------------- events and phases


class Events:
    """The events of one rank, appended line by line to events-rank<r>.jsonl, with both clocks."""

    def __init__(self, run_dir: Path, rank: int):
        self.file = open(Path(run_dir) / f"events-rank{rank}.jsonl", "a", buffering=1)

    def mark(self, event: str, **fields) -> None:
        """Write an event, so that it is in the file even if the process is killed.

        The first tells of the process. Those of the training have CPU times, which are looked up
        outside of it, and the last one.
        """
        if event == "rank_start":
            boot_id = kernel.boot_id()
            process = {"host": platform.node(), "boot_id": boot_id, "pid": os.getpid()}
            fields = process | fields
        if event == "training_start":
            fields |= cpu_times()
        clocks = {"t_mono_ns": time.monotonic_ns(), "t_wall_ns": time.time_ns()}
        if event in ("training_end", "rank_end"):
            fields |= cpu_times()
        self.file.write(json.dumps(clocks | {"event": event} | fields) + "\n")

    def be_idle(self, when: str, seconds: float) -> None:
        """Do nothing for a while, so that idle power is measured."""
        if seconds > 0:
            self.mark("idle_start", when=when)
            time.sleep(seconds)
            self.mark("idle_end", when=when)


class EventLine(msgspec.Struct):
    """What every event has; ``host`` only ``rank_start``."""

    event: str
    t_mono_ns: InstantNs
    t_wall_ns: InstantNs
    rank: int = 0
    host: str = ""


EVENT_FIELDS = EventLine.__struct_fields__


def read_events(folder: Path) -> list[dict]:
    """Read the events of rank 0, then those of rank 1 ...; lines that a crash cut are skipped.

    ``host`` is where the rank ran, None if its file was cut before it said so.
    """
    events = []
    for rank, path in _list_files_of_ranks(folder, "events"):
        own = []
        for line in _read_json_lines(path):
            with suppress(ValueError):
                msgspec.convert(line, EventLine)
                own.append(line)
        hosts = [event["host"] for event in own if event["event"] == "rank_start"]
        place = {"rank": rank, "host": hosts[-1] if hosts else None}
        events += [place | event for event in own]
    return events


def _list_files_of_ranks(folder: Path, kind: str) -> list[tuple[int, Path]]:
    paths = folder.glob(f"{kind}-rank*.jsonl")
    return sorted((int(path.stem.removeprefix(f"{kind}-rank")), path) for path in paths)


def _read_json_lines(path: Path) -> Iterator[dict]:
    """Read JSON lines; NaN and Infinity, which no record can hold, become None."""
    require_file(path)
    with open(path, errors="replace") as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                values = json.loads(line, parse_constant=lambda _constant: None)
                if isinstance(values, dict):
                    yield values


def read_events_of_segments(run_dir: Path) -> dict[Path, list[dict]]:
    """Read the events of each start of a run, by its folder."""
    return {folder: read_events(folder) for folder in segment_dirs(run_dir)}


def events_of_kind(events: Iterable[dict], kind: str) -> list[dict]:
    return [event for event in events if event["event"] == kind]


def event_ns(events: list[dict], kind: str, who: str = "rank") -> dict:
    """Tell when an event came last to each rank, or host, in ns of its host's monotonic clock."""
    return {event[who]: event["t_mono_ns"] for event in events_of_kind(events, kind)}


def read_phases(folder: Path, ranks: Collection[int]) -> dict[int, tuple]:
    """Read the phases of these ranks, each on its host's monotonic clock.

    Returns rank -> (phase index, begin ns, end ns, names): arrays (phases,) of int, which do not
    overlap, and a list of names.
    """
    phases = {}
    for rank, path in _list_files_of_ranks(folder, "phases"):
        if rank not in ranks:  # those of all hosts need more memory than a node has
            continue
        names = []
        parts = [np.zeros((3, 0), dtype=np.int64)]
        for line in _read_json_lines(path):
            if "names" in line:
                names = line["names"]
            elif "length_us" in line:
                kind, gap_us, length_us = np.array(
                    [line["phase"], line["gap_us"], line["length_us"]], dtype=np.int64
                )
                end_ns = line["t"] + 1000 * np.cumsum(gap_us + length_us)
                parts.append(np.stack([kind, end_ns - 1000 * length_us, end_ns]))
        if names:
            phases[rank] = (*np.concatenate(parts, axis=1), names)
    return phases


def run_dir_of(segment: Path) -> Path:
    """Return the folder of the run of a segment; of the first it is the same."""
    return segment if (segment / "run.json").exists() else segment.parent


def segment_dirs(run_dir: Path) -> list[Path]:
    """List the folders of each start of a run: the run's own, then segment-2, segment-3 ..."""
    return [
        run_dir,
        *sorted(
            run_dir.glob("segment-[0-9]*"),
            key=lambda path: int(path.name.removeprefix("segment-")),
        ),
    ]
