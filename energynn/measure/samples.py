"""Write and read the files that a run appends to: samples of hosts, events and phases of ranks."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from energynn.reading import require_file

LARGEST_B = 2**32  # of a file that is read as a whole
# Timeouts in s. Increase them in systems/NAME.toml if your file system is slow.
LIMITS_S = {
    "silence_limit_s": 90.0,  # for a sample that somebody waits for
    "first_sample_limit_s": 120.0,  # hundreds of ranks start slowly from one file system
    "ready_limit_s": 60.0,  # for a sampler process, and for ranks that wait for each other's files
}


def limit_s(name: str) -> float:
    """Return one of LIMITS_S, or what the environment says (ENERGYNN_SILENCE_LIMIT_S ...)."""
    return float(os.environ.get(limit_variable(name), LIMITS_S[name]))


def limit_variable(name: str) -> str:
    return f"ENERGYNN_{name.upper()}"


# ----------------------------------------------------------------------------------------- samples


class NoHeader(ValueError):
    """A samples file that was cut off before its header."""


class Sample(msgspec.Struct):
    """One line of readings; lines of what perun read have no ``v``."""

    t: Annotated[int, msgspec.Meta(gt=-(2**62), lt=2**62)]
    w: Annotated[int, msgspec.Meta(gt=-(2**62), lt=2**62)] = 0
    v: list[float | None] | None = None


@dataclass
class Samples:
    """Readings of one host.

    t_ns, wall_ns: (samples,) of the monotonic and the wall clock; readings: (samples, sensors),
    NaN where one failed; problems: what the sampler complained about; unreadable_lines: lines that
    a crash or a full disk cut.
    """

    header: dict
    t_ns: np.ndarray
    wall_ns: np.ndarray
    readings: np.ndarray
    problems: list[str] = field(default_factory=list)
    unreadable_lines: int = 0

    @property
    def host(self) -> str:
        return self.header["host"]

    @property
    def period_s(self) -> float:
        return self.header["period_s"]


class Reader:
    """Read a samples file as it grows; each ``read`` takes the whole lines that are new."""

    decode_sample = msgspec.json.Decoder(Sample).decode

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        self.header: dict | None = None
        self.samples_read: list[Sample] = []
        self.problems: list[str] = []
        self.unreadable_lines = 0

    def read(self) -> None:
        require_file(self.path, LARGEST_B)
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.offset += len(line)
                try:
                    self._take(line)
                except (msgspec.DecodeError, ValueError, LookupError, TypeError, AttributeError):
                    self.unreadable_lines += line != b"\n"

    def _take(self, line: bytes) -> None:
        if line.startswith(b'{"t"'):
            sample = self.decode_sample(line)
            if sample.v is None:
                return
            if len(sample.v) != len(self.header["sensors"]):
                raise ValueError("readings of other sensors")
            self.samples_read.append(sample)
            return
        values = msgspec.json.decode(line)
        if "header" in values:
            self.header = values
            self.problems += values.get("problems", [])
        elif "problem" in values:
            self.problems.append(values["problem"])
        for sensor in self.header["sensors"] if "update_s" in values else ():  # of older samplers
            sensor["update_s"] = values["update_s"].get(sensor["id"])

    def samples(self) -> Samples:
        """Return what was read so far. Raises ValueError without a header."""
        if self.header is None:
            raise NoHeader(f"{self.path}: no header line; the samples cannot be read")
        shape = len(self.samples_read), len(self.header["sensors"])
        rows = [sample.v for sample in self.samples_read]
        return Samples(
            header=self.header,
            t_ns=np.array([sample.t for sample in self.samples_read], dtype=np.int64),
            wall_ns=np.array([sample.w for sample in self.samples_read], dtype=np.int64),
            readings=np.array(rows, dtype=float).reshape(shape),
            problems=self.problems,
            unreadable_lines=self.unreadable_lines,
        )


def read_samples(path: Path) -> Samples:
    """Read a samples file. Raises ValueError where the header is missing."""
    reader = Reader(path)
    reader.read()
    reader.unreadable_lines += path.stat().st_size > reader.offset  # a last line that was cut
    return reader.samples()


def read_hosts(folder: Path) -> list[Samples]:
    """Read the samples of every host of a folder; a file cut off before its header has none."""
    hosts = []
    for path in files_named(folder, "samples-", ".jsonl"):
        with suppress(NoHeader):
            hosts.append(read_samples(path))
    return hosts


def has_begun(folder: Path, host: str) -> bool:
    """Tell whether the sampler of a host has written its first sample."""
    with suppress(FileNotFoundError), open(folder / f"samples-{host}.jsonl", "rb") as file:
        return b'"v":[' in file.read(2**17)
    return False


class Lines:
    """Append lines to a file from a thread, so that a slow disk delays nobody.

    While the disk does not answer or is full, lines wait in memory.
    """

    FORCE_S = 5.0  # so that other hosts see the lines
    AGAIN_S = 0.5  # after a write that failed

    def __init__(self, path: Path):
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size_B = os.fstat(self.file).st_size
        # A line in which an earlier writer was killed must not swallow our first one.
        is_cut = size_B and os.pread(self.file, 1, size_B - 1) != b"\n"
        self.waiting = bytearray(b"\n" if is_cut else b"")
        self.is_refused = False
        self.changed = threading.Condition()
        threading.Thread(target=self._write, name="energynn-lines", daemon=True).start()

    def add(self, line: dict) -> None:
        with self.changed:
            self.waiting += msgspec.json.encode(line) + b"\n"
            self.changed.notify_all()

    def flush(self, patience_s: float) -> bool:
        """Wait until all lines are written; False if that takes longer or the disk refuses."""
        with self.changed:
            self.changed.wait_for(lambda: not self.waiting or self.is_refused, patience_s)
            return not self.waiting

    def _write(self) -> None:
        force_s = time.monotonic() + self.FORCE_S
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting)
                data = bytes(self.waiting)
            written_B = 0
            try:
                written_B = os.write(self.file, data)
                if time.monotonic() > force_s:
                    os.fsync(self.file)
                    force_s = time.monotonic() + self.FORCE_S
            except OSError as error:
                if not self.is_refused:
                    what = f"samples are not written: {error.strerror}; free some space"
                    print(f"energynn: {what}", file=sys.stderr)
            with self.changed:
                del self.waiting[:written_B]
                self.is_refused = written_B == 0
                self.changed.notify_all()
            if written_B < len(data):
                time.sleep(self.AGAIN_S)


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


def read_events(folder: Path, of_rank: int | None = None) -> list[dict]:
    """Read the events of all ranks, or of one; lines that a crash cut are skipped.

    Those of one rank follow its monotonic clock, and the ranks are put together by the wall clock
    at which each began, so that a wall clock that is set meanwhile does not change the order.
    """
    events = []
    for path in files_named(folder, "events-rank", ".jsonl"):
        rank = int(path.stem.removeprefix("events-rank"))
        if of_rank not in (None, rank):
            continue
        own = [{"rank": rank} | line for line in _lines_of(path) if _is_event(line)]
        ahead_ns = own[0]["t_wall_ns"] - own[0]["t_mono_ns"] if own else 0
        events += [(event["t_mono_ns"] + ahead_ns, rank, event) for event in own]
    return [event for *_, event in sorted(events, key=lambda entry: entry[:2])]


def _lines_of(path: Path) -> Iterator[dict]:
    """Read JSON lines; NaN and Infinity, which no record can hold, become None."""
    require_file(path, LARGEST_B)
    with open(path, errors="replace") as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                values = json.loads(line, parse_constant=lambda _constant: None)
                if isinstance(values, dict):
                    yield values


def _is_event(line: dict) -> bool:
    kinds = {type(line.get("t_mono_ns")), type(line.get("t_wall_ns")), type(line.get("rank", 0))}
    return kinds == {int} and isinstance(line.get("event"), str)


def events_of_segments(run_dir: Path) -> dict[Path, list[dict]]:
    """Read the events of each start of a run, by its folder."""
    return {folder: read_events(folder) for folder in segments(run_dir)}


def events_of_kind(events: Iterable[dict], kind: str) -> list[dict]:
    return [event for event in events if event["event"] == kind]


def host_of_rank(events: list[dict]) -> dict[int, str]:
    """Tell on which host each rank ran; a rank whose file was cut before its start is not there."""
    return {event["rank"]: event["host"] for event in events_of_kind(events, "rank_start")}


def times_of_hosts(events: list[dict], kind: str) -> dict[str, int]:
    """Tell when an event came last on each host, in ns of its monotonic clock."""
    hosts = host_of_rank(events)
    known = [event for event in events_of_kind(events, kind) if event["rank"] in hosts]
    return {hosts[event["rank"]]: event["t_mono_ns"] for event in known}


def read_phases(
    folder: Path, ranks: Collection[int] | None = None
) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]]:
    """Read the phases of each rank, or of some, on its host's monotonic clock.

    Returns rank -> (phase index, begin ns, end ns, names); phases of one rank do not overlap.
    """
    phases = {}
    for path in files_named(folder, "phases-rank", ".jsonl"):
        rank = int(path.stem.removeprefix("phases-rank"))
        if ranks is not None and rank not in ranks:
            continue
        names: list[str] = []
        parts = [np.zeros((3, 0), dtype=np.int64)]
        for line in _lines_of(path):
            if "names" in line:
                names = line["names"]
            elif {"t", "phase", "gap_us", "length_us"} <= line.keys():
                columns = [line["phase"], line["gap_us"], line["length_us"]]
                kind, gap_us, length_us = np.array(columns, dtype=np.int64)
                if kind.max(initial=-1) < len(names):  # others have no name
                    end_ns = line["t"] + 1000 * np.cumsum(gap_us + length_us)
                    parts.append(np.stack([kind, end_ns - 1000 * length_us, end_ns]))
        if names:
            phases[rank] = (*np.concatenate(parts, axis=1), names)
    return phases


def segments(run_dir: Path) -> list[Path]:
    """List the folders of each start of a run: the run's own, then segment-2, segment-3 ..."""
    later = [path for path in files_named(run_dir, "segment-") if path.name[8:9].isdecimal()]
    return [run_dir, *sorted(later, key=lambda path: int(path.name.partition("-")[2]))]


def files_named(folder: Path, begin: str, end: str = "") -> list[Path]:
    """List what lies in a folder under such names; nothing where it cannot be looked into.

    As Path.glob, in a fifth of the time.
    """
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        names = sorted(os.listdir(folder))
        return [folder / name for name in names if name.startswith(begin) and name.endswith(end)]
    return []
