"""Write and read the files that a run appends to: samples of hosts, events and phases of ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from energynn.reading import require_file

PIECE = 2**14  # samples that are read at once
LONGEST_LINE_B = 2**24


# ----------------------------------------------------------------------------------------- samples


Instant = Annotated[int, msgspec.Meta(gt=-(2**62), lt=2**62)]


class Sample(msgspec.Struct):
    """One line of readings; its wall clock is for people."""

    t: Instant
    v: list[float | None]


_decode_sample = msgspec.json.Decoder(Sample).decode


class DeviceState(msgspec.Struct):
    """What a device tells of itself: its power limit, and whether it works."""

    limit_W: float | None = None
    is_busy: bool | None = None


class States(msgspec.Struct):
    """One line of states, by sensor."""

    t: Instant
    states: dict[str, DeviceState]


_decode_states = msgspec.json.Decoder(States).decode


@dataclass
class Samples:
    """Readings of one host.

    t_ns: (samples,) of the monotonic clock; readings: (samples, sensors), NaN where one failed;
    problems: what the sampler complained about; states: what devices told of themselves.
    """

    header: dict
    t_ns: np.ndarray
    readings: np.ndarray
    problems: list[str]
    states: list[States] = field(default_factory=list)

    @property
    def host(self) -> str:
        return self.header["host"]

    @property
    def period_s(self) -> float:
        return self.header["period_s"]

    def states_of(self, sensor: dict) -> Iterator[tuple]:
        """Give time in s, power limit in W and activity of a sensor's device, None if untold."""
        place = sensor["component"], sensor["device"]
        sensors = self.header["sensors"]
        names = {
            one["id"] for one in sensors if (one["component"], one["device"]) == place
        }
        for line in self.states:
            for name in names & line.states.keys():
                told = line.states[name]
                yield line.t / 1e9, told.limit_W, told.is_busy


def read_samples(path: Path, begin_B: int = 0) -> Samples | None:
    """Read a samples file, of its samples only those from a byte on; None without a header.

    It must fit into the memory: for a file of any length there are ``pieces``.
    """
    parts = list(pieces(path, begin_B))
    if not parts:
        return None
    return Samples(
        header=parts[0].header,
        t_ns=np.concatenate([part.t_ns for part in parts]),
        readings=np.concatenate([part.readings for part in parts]),
        problems=list(chain.from_iterable(part.problems for part in parts)),
        states=list(chain.from_iterable(part.states for part in parts)),
    )


def pieces(path: Path, begin_B: int = 0) -> Iterator[Samples]:
    """Read a samples file of any length, ``PIECE`` samples at once; nothing without a header.

    What is no whole line, as at the end of a file that is being written, is skipped. Problems of
    the header are those of the first piece.
    """
    header = read_header(path)
    if header is None:
        return
    problems = header.get("problems", [])
    with open(path, "rb") as file:
        file.readline()
        file.seek(max(begin_B, file.tell()))
        lines = iter(partial(file.readline, LONGEST_LINE_B), b"")
        while True:
            part = _read_piece(lines, header, problems)
            yield part
            if len(part.t_ns) < PIECE:
                return
            problems = []


def read_header(path: Path) -> dict | None:
    """Read what a samples file says of host and sensors; None where it was cut off before."""
    require_file(path)
    with open(path, "rb") as file:
        first = file.readline(LONGEST_LINE_B)
    return msgspec.json.decode(first) if first.endswith(b"\n") else None


def _read_piece(lines: Iterator[bytes], header: dict, problems: list[str]) -> Samples:
    samples, states, problems = [], [], list(problems)
    for line in lines:
        with suppress(ValueError):
            if line.startswith(b'{"problem"'):
                problems.append(msgspec.json.decode(line)["problem"])
            elif b'"states"' in line:
                states.append(_decode_states(line))
            else:
                sample = _decode_sample(line)
                if len(sample.v) == len(header["sensors"]):
                    samples.append(sample)
        if len(samples) == PIECE:
            break
    readings = np.array([sample.v for sample in samples], dtype=float)
    return Samples(
        header=header,
        t_ns=np.array([sample.t for sample in samples], dtype=np.int64),
        readings=readings.reshape(len(samples), len(header["sensors"])),
        problems=problems,
        states=states,
    )


def last_ns(path: Path) -> int:
    """Tell when the last sample of a file was taken, of the monotonic clock; 0 without one."""
    back_B, length_B = 2**16, path.stat().st_size
    while True:
        with open(path, "rb") as file:
            file.seek(max(0, length_B - back_B))
            lines = file.read(back_B).splitlines()
        for line in reversed(lines):
            with suppress(ValueError):
                return _decode_sample(line).t
        if back_B >= min(length_B, LONGEST_LINE_B):
            return 0
        back_B *= 8


def samples_files(folder: Path) -> list[Path]:
    """List the samples of every host of a folder."""
    return sorted(folder.glob("samples-*.jsonl"))


def write_host(
    folder: Path,
    rank: int,
    host: str,
    sensors: list[dict],
    times_ns: list[int],
    readings: Iterable[list],
    apart_ns: int = 0,
    **at_end,
) -> None:
    """Write samples and events of a host that was not sampled by us: all of them in the training.

    One rank stands for it. apart_ns: from its monotonic to its wall clock. at_end: fields of the
    end of the training.
    """
    header = {
        "header": "energynn-samples/1",
        "host": host,
        "period_s": float(np.median(np.diff(times_ns))) / 1e9,
        "sensors": sensors,
    }
    samples = [
        {"t": t, "w": apart_ns + t, "v": values}
        for t, values in zip(times_ns, readings, strict=True)
    ]
    events = []
    for event, at in (("rank_start", 0), ("training_start", 0), ("training_end", -1)):
        clocks = {"t_mono_ns": times_ns[at], "t_wall_ns": apart_ns + times_ns[at]}
        events.append({"event": event, "host": host} | clocks)
    events[-1] |= at_end
    files = {f"samples-{host}": [header, *samples], f"events-rank{rank}": events}
    for name, lines in files.items():
        content = msgspec.json.Encoder().encode_lines(lines)
        (folder / f"{name}.jsonl").write_bytes(content)


def has_begun(folder: Path, host: str) -> bool:
    """Tell whether the sampler of a host has written its first sample."""
    path = folder / f"samples-{host}.jsonl"
    return path.exists() and b'"v":[' in path.read_bytes()


# -------------------------------------------------------------------------------- events and phases


class Events:
    """The events of one rank, appended line by line to events-rank<r>.jsonl, with both clocks."""

    def __init__(self, run_dir: Path, rank: int):
        self.file = open(Path(run_dir) / f"events-rank{rank}.jsonl", "a", buffering=1)

    def mark(self, event: str, **fields) -> None:
        """Write an event, so that it is in the file even if the process is killed."""
        clocks = {"t_mono_ns": time.monotonic_ns(), "t_wall_ns": time.time_ns()}
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
    t_mono_ns: Instant
    t_wall_ns: Instant
    rank: int = 0
    host: str = ""


def read_events(folder: Path) -> list[dict]:
    """Read the events of rank 0, then those of rank 1 ...; lines that a crash cut are skipped.

    ``host`` is where the rank ran, None if its file was cut before it said so.
    """
    events = []
    for rank, path in _files_of_ranks(folder, "events"):
        own = []
        for line in _lines_of(path):
            with suppress(ValueError):
                msgspec.convert(line, EventLine)
                own.append(line)
        hosts = [event["host"] for event in own if event["event"] == "rank_start"]
        place = {"rank": rank, "host": hosts[-1] if hosts else None}
        events += [place | event for event in own]
    return events


def _files_of_ranks(folder: Path, kind: str) -> list[tuple[int, Path]]:
    paths = folder.glob(f"{kind}-rank*.jsonl")
    return sorted((int(path.stem.removeprefix(f"{kind}-rank")), path) for path in paths)


def _lines_of(path: Path) -> Iterator[dict]:
    """Read JSON lines; NaN and Infinity, which no record can hold, become None."""
    require_file(path)
    with open(path, errors="replace") as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                values = json.loads(line, parse_constant=lambda _constant: None)
                if isinstance(values, dict):
                    yield values


def events_of_segments(run_dir: Path) -> dict[Path, list[dict]]:
    """Read the events of each start of a run, by its folder."""
    return {folder: read_events(folder) for folder in segments(run_dir)}


def events_of_kind(events: Iterable[dict], kind: str) -> list[dict]:
    return [event for event in events if event["event"] == kind]


def times_of(events: list[dict], kind: str, who: str = "rank") -> dict:
    """Tell when an event came last to each rank, or host, in ns of its host's monotonic clock."""
    return {event[who]: event["t_mono_ns"] for event in events_of_kind(events, kind)}


def read_phases(folder: Path) -> dict[int, tuple]:
    """Read the phases of each rank on its host's monotonic clock.

    Returns rank -> (phase index, begin ns, end ns, names): arrays (phases,) of int, which do not
    overlap, and a list of names.
    """
    phases = {}
    for rank, path in _files_of_ranks(folder, "phases"):
        names: list[str] = []
        parts = [np.zeros((3, 0), dtype=np.int64)]
        for line in _lines_of(path):
            if "names" in line:
                names = line["names"]
            elif "length_us" in line:
                columns = [line["phase"], line["gap_us"], line["length_us"]]
                kind, gap_us, length_us = np.array(columns, dtype=np.int64)
                end_ns = line["t"] + 1000 * np.cumsum(gap_us + length_us)
                parts.append(np.stack([kind, end_ns - 1000 * length_us, end_ns]))
        if names:
            phases[rank] = (*np.concatenate(parts, axis=1), names)
    return phases


def segments(run_dir: Path) -> list[Path]:
    """List the folders of each start of a run: the run's own, then segment-2, segment-3 ..."""
    later = run_dir.glob("segment-[0-9]*")
    return [run_dir, *sorted(later, key=lambda path: int(path.name.partition("-")[2]))]
