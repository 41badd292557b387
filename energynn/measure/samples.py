"""Write and read the files that a run appends to: samples of hosts, events and phases of ranks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
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
    "ready_limit_s": 60.0,  # for a sampler process, and for ranks that wait for each other's files
}


def limit_s(name: str) -> float:
    """Return one of LIMITS_S, or what the environment says (ENERGYNN_SILENCE_LIMIT_S ...)."""
    return float(os.environ.get(f"ENERGYNN_{name.upper()}", LIMITS_S[name]))


# ----------------------------------------------------------------------------------------- samples


class Sample(msgspec.Struct):
    """One line of readings; lines of what perun read have no ``v``."""

    t: Annotated[int, msgspec.Meta(gt=-(2**62), lt=2**62)]
    w: Annotated[int, msgspec.Meta(gt=-(2**62), lt=2**62)] = 0
    v: list[float | None] | None = None


@dataclass
class Samples:
    """Readings of one host.

    t_ns, wall_ns: (samples,) of the monotonic and the wall clock; readings: (samples, sensors),
    NaN where one failed; problems: what the sampler complained about.
    """

    header: dict
    t_ns: np.ndarray
    wall_ns: np.ndarray
    readings: np.ndarray
    problems: list[str] = field(default_factory=list)

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

    def read(self) -> None:
        require_file(self.path, LARGEST_B)
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.offset += len(line)
                with suppress(ValueError, LookupError, TypeError, AttributeError):  # a cut line
                    self._take(line)

    def _take(self, line: bytes) -> None:
        if line.startswith(b'{"t"'):
            sample = self.decode_sample(line)
            if len(sample.v) == len(self.header["sensors"]):
                self.samples_read.append(sample)
            return
        values = msgspec.json.decode(line)
        if "header" in values:
            self.header = values
            self.problems += values.get("problems", [])
        elif "problem" in values:
            self.problems.append(values["problem"])

    def samples(self) -> Samples:
        """Return what was read so far. Raises ValueError without a header."""
        if self.header is None:
            raise ValueError(f"{self.path}: no header line; the samples cannot be read")
        shape = len(self.samples_read), len(self.header["sensors"])
        rows = [sample.v for sample in self.samples_read]
        return Samples(
            header=self.header,
            t_ns=np.array([sample.t for sample in self.samples_read], dtype=np.int64),
            wall_ns=np.array([sample.w for sample in self.samples_read], dtype=np.int64),
            readings=np.array(rows, dtype=float).reshape(shape),
            problems=self.problems,
        )


def read_samples(path: Path) -> Samples:
    """Read a samples file. Raises ValueError where the header is missing."""
    reader = Reader(path)
    reader.read()
    return reader.samples()


def read_hosts(folder: Path) -> list[Samples]:
    """Read the samples of every host of a folder; a file cut off before its header has none."""
    readers = [Reader(path) for path in sorted(folder.glob("samples-*.jsonl"))]
    for reader in readers:
        reader.read()
    return [reader.samples() for reader in readers if reader.header]


def has_begun(folder: Path, host: str) -> bool:
    """Tell whether the sampler of a host has written its first sample."""
    with suppress(FileNotFoundError), open(folder / f"samples-{host}.jsonl", "rb") as file:
        return b'"v":[' in file.read(2**17)
    return False


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


def read_events(folder: Path) -> list[dict]:
    """Read the events of rank 0, then those of rank 1 ...; lines that a crash cut are skipped."""
    return [
        {"rank": rank} | line
        for rank, path in _files_of_ranks(folder, "events")
        for line in _lines_of(path)
        if _is_event(line)
    ]


def _files_of_ranks(folder: Path, kind: str) -> list[tuple[int, Path]]:
    paths = folder.glob(f"{kind}-rank*.jsonl")
    return sorted((int(path.stem.removeprefix(f"{kind}-rank")), path) for path in paths)


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
    folder: Path,
) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]]:
    """Read the phases of each rank on its host's monotonic clock.

    Returns rank -> (phase index, begin ns, end ns, names); phases of one rank do not overlap.
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
