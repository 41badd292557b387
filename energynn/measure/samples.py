"""What a run leaves on disk while it goes on, samples of each host, events and phases of each rank, and reading it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np

from energynn.processes import is_alive, lives
from energynn.reading import ILL_TYPED, require_file

# Two readings further apart than both have a gap between them. A sampler that waits for a busy core is late, not blind.
LONGEST_PERIODS, LONGEST_S = 2.0, 0.2
LARGEST_LINES_B = 2**30  # of a file of events or phases, which is read as a whole
STEP_OF_WALL_CLOCK_S = 0.05  # more than a wall clock is steered between two samples: it was set
# Patience in s, for what a slow file system delays; a system's file can state others (energynn/cluster/systems.py).
LIMITS_S = {
    "silence_limit_s": 90.0,  # without a new sample of a host; then its ranks ask all to stop, with a checkpoint
    "first_sample_limit_s": 120.0,  # hundreds of ranks start slowly from one file system
    "ready_limit_s": 60.0,  # for a sampler process of our own, and for ranks that have to find each other's files
    "rank_limit_s": 0.0,  # for a rank that others wait for in the training, where collective_timeout_s is shorter
}
# A line of a sample as the sampler writes it, without its numbers: where a comma parts two readings stands %b.
LINE, OF_NUMBERS = b'{"t":,"w":,"d":,"v":[%b]}\n', b"0123456789.nul"
WORDS, COMMA_FOR_NEWLINE = b'{}[]":twdv', bytes.maketrans(b"\n", b",")  # all that is no number, and what parts them
WHOLE = rb"(?:0|[1-9][0-9]{0,18}+)"
READING = rb'"[ !#-\[\]-~]*+":-?+%b(?:\.[0-9]++)?+(?:e[-+]?+[0-9]++)?+' % WHOLE  # its name has no escapes
PERUN_LINES = re.compile(  # lines of what perun read, as the sampler writes them, one after the other
    rb'^(?:\{"t":%(int)b,"w":%(int)b,"perun":\{%(one)b(?:,%(one)b)*+\}\}\n)++' % {b"int": WHOLE, b"one": READING},
    re.MULTILINE,
)
PHASES = re.compile(  # a line of them as a rank writes it
    r'\{"t":([1-9][0-9]{0,17}),"phase":\[([0-9,]+)\],"gap_us":\[([0-9,]+)\],"length_us":\[([0-9,]+)\]\}'
)
POWERS_OF_TEN = np.array([float(10**power) for power in range(23)])  # all that floating point numbers hold exactly
GREATEST = 2**63 - 1  # what numpy reads of a whole number that is greater
PERCENTILES = (50, 95, 99)  # of the time between samples
BLOCK_B, LONGEST_LINE_B = 2**17, 2**24  # what is read at once; larger arrays leave the caches
FEW = 16  # lines that are read one by one sooner than together
# Of files of more than LARGE_B in all, views read the beginning and the end, and between them a line in THINNED_S, in
# which no counter wraps around twice, or more often: THINNED lines of all hosts.
LARGE_B, EDGE_B, THINNED_S, THINNED = 2**27, 2**16, 60.0, 10_000
DECODER = json.JSONDecoder(parse_constant=lambda _constant: None)  # one for all lines: to make one takes longer
ENDED = b"\xff" * 8  # the last beat of a sampler that ended as it should


def limit_s(name: str) -> float:
    """One of LIMITS_S, or what the environment says instead (ENERGYNN_SILENCE_LIMIT_S ...)."""
    return float(os.environ.get(limit_variable(name), LIMITS_S[name]))


def limit_variable(name: str) -> str:
    return f"ENERGYNN_{name.upper()}"


@dataclass(frozen=True, eq=False)
class Instants:
    """When readings were taken, and what follows from that, worked out once for all sensors that share them.

    ns: (readings,) of the host's monotonic clock.
    """

    ns: np.ndarray

    @cached_property
    def from_first_ns(self) -> np.ndarray:
        """As numpy interpolates between them."""
        return (self.ns - self.ns[0]).astype(float)

    @cached_property
    def seconds(self) -> np.ndarray:
        return self.from_first_ns / 1e9

    @cached_property
    def apart_ns(self) -> np.ndarray:
        """(readings - 1,): from each to the next."""
        return np.diff(self.ns)

    @cached_property
    def apart_s(self) -> np.ndarray:
        return self.apart_ns / 1e9

    @cached_property
    def widths_s(self) -> np.ndarray:
        """(readings - 2,): half of the time between the two neighbours of an inner reading, for which it stands."""
        return (self.ns[2:] - self.ns[:-2]) / 2e9

    @cached_property
    def weights(self) -> np.ndarray:
        """(readings - 2,): how far from one neighbour to the other an inner reading lies, 0 to 1."""
        return self.apart_ns[:-1] / (self.ns[2:] - self.ns[:-2])


@dataclass
class Samples:
    """What the sampler of one host has written.

    t_ns, wall_ns: (samples,) monotonic and wall clock in ns; readings: (samples, sensors), NaN where a read failed;
    duration_us: (samples,) what reading all sensors took; perun_lines: see ``perun``, as text or
    parsed; status: how the loop kept up, the newest last; problems: what the sampler complained about;
    unreadable_lines: cut or damaged ones.
    thinned_s: 0, or how far apart the lines are that were read: energies of counters are exact, peaks are not seen.
    """

    header: dict
    t_ns: np.ndarray
    wall_ns: np.ndarray
    readings: np.ndarray
    duration_us: np.ndarray
    perun_lines: list[dict | bytes] = field(default_factory=list)
    status: list[dict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unreadable_lines: int = 0
    thinned_s: float = 0.0

    @cached_property
    def perun(self) -> list[dict]:
        """What perun's own loop read, as ``{"t", "w", "perun"}``; no record needs it."""
        lines = []
        for part in self.perun_lines:
            lines += json.loads(b"[%b]" % part[:-1].replace(b"\n", b",")) if isinstance(part, bytes) else [part]
        return lines

    @property
    def host(self) -> str:
        return self.header["host"]

    @property
    def period_s(self) -> float:
        return self.header["period_s"]

    @cached_property
    def instants(self) -> Instants:
        return Instants(self.t_ns)

    @property
    def longest_ns(self) -> float:
        """Two readings further apart than this have a gap between them."""
        return max(LONGEST_PERIODS * self.period_s, LONGEST_S) * 1e9

    def between(self, begin_ns: int, end_ns: int, is_last: bool) -> Samples:
        """The samples from one instant to another; ``is_last``: with what is said of all of them."""
        first, after = np.searchsorted(self.t_ns, [begin_ns, end_ns])
        # One on the other side of an edge, with no gap before it, tells what was at the edge.
        if first > 0 and begin_ns - self.t_ns[first - 1] < self.longest_ns:
            first -= 1
        if after < len(self.t_ns) and self.t_ns[after] - end_ns < self.longest_ns:
            after += 1
        inside = slice(first, after)
        arrays = {name: getattr(self, name)[inside] for name in ("t_ns", "wall_ns", "readings", "duration_us")}
        of_all = {} if is_last else {"status": [], "problems": [], "unreadable_lines": 0}
        return replace(self, **arrays, **of_all)

    def wall_clock_steps(self) -> list[dict]:
        """Where the wall clock was set while the run went on; energies and windows do not depend on it."""
        ahead_s = (self.wall_ns - self.t_ns) / 1e9 + self.duration_us / 2e6  # the wall clock is read first
        steps = []
        for i in np.flatnonzero(np.abs(np.diff(ahead_s)) > STEP_OF_WALL_CLOCK_S):
            # A step stays. A sampler that lost its core between its two clocks is late for one sample only.
            step_s = float(np.median(ahead_s[i + 1 : i + 6]) - np.median(ahead_s[max(0, i - 4) : i + 1]))
            if abs(step_s) > STEP_OF_WALL_CLOCK_S:
                steps.append({"host": self.host, "t_mono_ns": int(self.t_ns[i + 1]), "step_s": step_s})
        return steps

    def overhead(self) -> dict:
        """What sampling this host cost and how regular it was."""
        entry: dict = {"host": self.host, "samples": len(self.t_ns)}
        if self.status:
            entry |= {name: self.status[-1][name] for name in ("missed_deadlines", "thread_cpu_s", "process_cpu_s")}
        if len(self.t_ns) > 1:
            intervals_s = np.diff(self.t_ns) / 1e9
            ranks, ranked_s = np.arange(len(intervals_s)), np.sort(intervals_s)  # faster than np.percentile
            for percent in PERCENTILES:
                entry[f"interval_p{percent}_s"] = float(np.interp(percent / 100 * ranks[-1], ranks, ranked_s))
            entry["interval_longest_s"] = float(ranked_s[-1])
            entry["reading_median_s"] = float(np.median(self.duration_us)) / 1e6
        return entry


class Events:
    """The events of one rank, appended line by line to events-rank<r>.jsonl, with both clocks."""

    def __init__(self, run_dir: Path, rank: int):
        self.file = open(Path(run_dir) / f"events-rank{rank}.jsonl", "a", buffering=1)

    def mark(self, event: str, **fields) -> None:
        """Write an event; what happened before it is on disk afterwards, even if the process is killed."""
        clocks = {"t_mono_ns": time.monotonic_ns(), "t_wall_ns": time.time_ns()}
        self.file.write(json.dumps(clocks | {"event": event} | fields) + "\n")

    def be_idle(self, when: str, seconds: float) -> None:
        """Do nothing for a while, so that idle power is measured, and tell of it."""
        if seconds > 0:
            self.mark("idle_start", when=when)
            time.sleep(seconds)
            self.mark("idle_end", when=when)


class Reader:
    """Takes the lines of a samples file, all at once or as they come.

    Keeps readings in compact arrays: a run of some days has more of them than Python objects fit into memory.
    """

    def __init__(self, path: Path):
        self.path, self.offset, self.header = path, 0, None
        self.times, self.walls, self.rows, self.durations = array("q"), array("q"), array("d"), array("d")
        self.perun_lines, self.status, self.problems, self.unreadable = [], [], [], 0
        self.thinned_s = 0.0

    def read(self, to_the_end: bool = True) -> None:
        """Take what was written since the last call; a last line without an end only if no more will come."""
        require_file(self.path)
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            while block := file.read(BLOCK_B) + file.readline(LONGEST_LINE_B):
                if not to_the_end:
                    block = block[: block.rfind(b"\n") + 1]
                    if not block:
                        break
                    file.seek(self.offset + len(block))
                self.offset += len(block)
                self._take_block(block)

    def read_thinned(self, lines: int) -> None:
        """Take the beginning and the end of what was written, and about so many lines between them, or more."""
        require_file(self.path)
        with open(self.path, "rb") as file:
            self._take_block(head := file.read(EDGE_B) + file.readline(LONGEST_LINE_B))
            size_B = os.fstat(file.fileno()).st_size
            file.seek(max(len(head), size_B - EDGE_B) - 1)
            file.readline(LONGEST_LINE_B)
            tail_B, tail = file.tell(), file.read()
            tail = tail[: tail.rfind(b"\n") + 1]
            if len(self.times):
                line_B = len(head) / len(self.times)
                apart_B = min(THINNED_S / self.header["period_s"] * line_B, (tail_B - len(head)) / lines)
                before = len(self.times)
                self._take_samples(_lines_apart(file, len(head), tail_B, max(apart_B, line_B)))
                self.thinned_s = (self.times[-1] - self.times[before - 1]) / 1e9 / max(1, len(self.times) - before)
        self._take_block(tail)
        self.offset = tail_B + len(tail)

    def _take_block(self, block: bytes) -> None:
        """Take some lines. Nearly all are samples in the sampler's own words: numpy reads these at once."""
        if b"p" not in block and self._take_at_once(block):
            return  # where there is a "p" there may be a line of perun, and looking at all was in vain
        text = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(text == ord("\n")) + 1
        if not block.endswith(b"\n"):
            ends = np.append(ends, len(block))
        begins = np.concatenate([[0], ends[:-1]])
        is_sample = (text[np.minimum(begins + 2, ends - 1)] == ord("t")) & (text[np.maximum(ends - 3, 0)] == ord("]"))
        places = np.flatnonzero(~is_sample)
        begins, ends = begins[places].tolist(), ends[places].tolist()
        others = [block[begin:end] for begin, end in zip(begins, ends, strict=True)]
        samples = [block[end:begin] for end, begin in zip([0, *ends], [*begins, len(block)], strict=True)]
        taken = 0
        for place in [place for place, line in enumerate(others, start=1) if b'"header"' in line]:
            self._take_samples(b"".join(samples[taken:place]))  # what follows may be of other sensors
            self._take_others(others[taken:place])
            taken = place
        self._take_others(others[taken:])
        self._take_samples(b"".join(samples[taken:]))

    def _take_others(self, lines: list[bytes]) -> None:
        """Take lines that are no samples: read as one list of JSON, or each alone where that might not be the same."""
        lines, found = self._keep_of_perun(lines), []
        with contextlib.suppress(UnicodeDecodeError):
            found = _read_as_one([line.decode() for line in lines], json.loads)
        for line in found or lines:
            self._take_line(line)

    def _keep_of_perun(self, lines: list[bytes]) -> list[bytes]:
        """Keep what perun read as text, since no record needs it; returns the other lines, or all if in doubt."""
        text = b"".join(lines)
        of_perun, others, taken = [], [], 0
        for match in PERUN_LINES.finditer(text):
            of_perun.append(match[0])
            others.append(text[taken : match.start()])
            taken = match.end()
        rest = b"".join([*others, text[taken:]])
        if b"perun" in rest:  # in other words, whose place is between these
            return lines
        self.perun_lines += of_perun
        return io.BytesIO(rest).readlines()

    def _take_line(self, line: bytes | dict) -> None:
        try:
            self._take(json.loads(line) if isinstance(line, bytes) else line)
        except ILL_TYPED:
            self.unreadable += 1

    def _take_samples(self, block: bytes) -> None:
        """Take lines of samples at once, or by halves where one is not as the sampler writes it, at last one by one."""
        if not block or self._take_at_once(block):
            return
        lines = io.BytesIO(block).readlines()
        if len(lines) > FEW:
            self._take_samples(b"".join(lines[: len(lines) // 2]))
            self._take_samples(b"".join(lines[len(lines) // 2 :]))
        else:
            for text in lines:
                self._take_line(text)

    def _take_at_once(self, block: bytes) -> bool:
        """Take lines of samples; False, and nothing is taken, where one is not as the sampler writes it."""
        sensors = len(self.header["sensors"]) if self.header else 0
        words, line = block.translate(None, OF_NUMBERS), LINE % (b"," * (sensors - 1))
        lines = len(words) // len(line)
        has_points, has_nulls = b"." in block, b"n" in block
        if not (sensors and lines) or words != line * lines or not _are_plain(block, has_points, has_nulls):
            return False
        numbers = block.translate(COMMA_FOR_NEWLINE, WORDS)[:-1]
        if has_nulls:
            numbers = numbers.replace(b"null", b"-1")
        try:
            with warnings.catch_warnings(action="error"):
                whole = np.fromstring(numbers.replace(b".", b""), np.int64, sep=",").reshape(lines, 3 + sensors)
                values = _with_points(numbers, whole) if has_points else whole.astype(float)
        except (ValueError, DeprecationWarning):
            return False
        moments, readings = whole[:, :2], values[:, 3:]
        if whole.max() == GREATEST or has_points and (moments != values[:, :2]).any():
            return False
        if has_nulls:
            if whole[:, :3].min() < 0 or readings.min() < -1:
                return False
            readings[readings < 0] = np.nan
        self.times.frombytes(moments[:, 0].tobytes())
        self.walls.frombytes(moments[:, 1].tobytes())
        self.durations.frombytes(values[:, 2].tobytes())
        self.rows.frombytes(readings.tobytes())
        return True

    def _take(self, line: dict) -> None:
        if "v" in line:
            values = [np.nan if value is None else float(value) for value in line["v"]]
            if self.header is None or len(values) != len(self.header["sensors"]):
                raise ValueError("readings of other sensors")
            moments, durations = array("q", [line["t"], line["w"]]), array("d", [line.get("d", 0)])
            self.times.append(moments[0])  # what is of another type has ended before
            self.walls.append(moments[1])
            self.durations.extend(durations)
            self.rows.extend(values)
        elif "header" in line:
            self.header = line
            self.problems += line.get("problems", [])
        elif "update_s" in line:
            for sensor in self.header["sensors"]:
                sensor["update_s"] = line["update_s"].get(sensor["id"])
        elif "perun" in line:
            self.perun_lines.append(line)
        elif "status" in line:
            self.status.append(line["status"])
        elif "problem" in line:
            self.problems.append(line["problem"])

    def forget(self, before_ns: int) -> None:
        """Drop readings from before an instant."""
        kept = int(np.searchsorted(np.array(self.times), before_ns))
        del self.times[:kept], self.walls[:kept], self.durations[:kept]
        del self.rows[: kept * len(self.header["sensors"])]

    def samples(self) -> Samples:
        """What was read so far; raises ValueError where the header is missing: nothing can be said of readings then."""
        if self.header is None:
            raise ValueError(f"{self.path}: no header line; the samples cannot be read")
        rows = np.frombuffer(self.rows).reshape(len(self.times), len(self.header["sensors"]))
        return Samples(
            header=self.header,
            t_ns=np.array(self.times, dtype=np.int64),
            wall_ns=np.array(self.walls, dtype=np.int64),
            readings=np.array(rows, order="F"),  # sensor by sensor, as they are looked at
            duration_us=np.array(self.durations),
            perun_lines=self.perun_lines,
            status=self.status,
            problems=self.problems,
            unreadable_lines=self.unreadable,
            thinned_s=self.thinned_s,
        )


def _are_plain(block: bytes, has_points: bool, has_nulls: bool) -> bool:
    """Whether each number of some samples stands where one should, and is one as JSON has it.

    The samples' words are the sampler's, in their order: a number that ends at a comma or a bracket is in its place.
    """
    text = np.frombuffer(block, np.uint8)
    is_digit = text - ord("0") < 10  # what is below "0" becomes large
    is_number, is_end = is_digit, (text == ord(",")) | (text == ord("]"))
    if has_points:
        point = text == ord(".")
        if (point[1:-1] & ~(is_digit[:-2] & is_digit[2:])).any():
            return False
        is_number = is_number | point
    if has_nulls:
        is_number = is_number | (text == ord("n")) | (text == ord("u")) | (text == ord("l"))
    if ((is_number[:-1] & ~is_number[1:]) != is_end[1:]).any():
        return False
    is_before_digit = (text[1:-1] == ord("0")) & is_digit[2:]
    return not (is_before_digit & ~is_number[:-2]).any()  # JSON has no leading zeros


def _with_points(numbers: bytes, whole: np.ndarray) -> np.ndarray:
    """Some numbers between commas, of which ``whole`` is what they are without their points.

    The quotient of two whole numbers that are exact is the number that is nearest to the decimal one.
    """
    text = np.frombuffer(numbers, np.uint8)
    points, ends = np.flatnonzero(text == ord(".")), np.append(np.flatnonzero(text == ord(",")), len(text))
    which = np.searchsorted(ends, points)
    decimals = ends[which] - points - 1
    if (np.diff(which) == 0).any() or decimals.max() >= len(POWERS_OF_TEN) or whole.ravel()[which].max() > 2**53:
        return np.fromstring(numbers, sep=",").reshape(whole.shape)
    values = whole.astype(float)
    values.ravel()[which] /= POWERS_OF_TEN[decimals]
    return values


def _lines_apart(file, begin_B: int, end_B: int, apart_B: float) -> bytes:
    """Whole lines of samples between two places of a file, so far apart."""
    lines = []
    for place_B in np.arange(begin_B, end_B, apart_B).astype(int).tolist():
        file.seek(place_B - 1)
        file.readline(LONGEST_LINE_B)
        line = file.readline(LONGEST_LINE_B) if file.tell() < end_B else b""
        if line.endswith(b"]}\n"):
            lines.append(line)
    return b"".join(lines)


def read_samples(path: Path) -> Samples:
    """Read a samples file; a line that was cut by a crash or a full disk is skipped and counted.

    Raises ValueError where the header is missing: then nothing can be said of the readings.
    """
    reader = Reader(path)
    reader.read()
    return reader.samples()


def read_hosts(folder: Path, thinned: bool = False) -> list[Samples]:
    """The samples of every host of a run, or of one segment of it; a file cut off before its header has none.

    ``thinned``: of more than ``LARGE_B`` only some lines, for a view.
    """
    readers = [Reader(path) for path in files_named(folder, "samples-", ".jsonl")]
    for reader in readers:
        if thinned and lines_of_view(folder):
            reader.read_thinned(lines_of_view(folder))
        else:
            reader.read()
    return [reader.samples() for reader in readers if reader.header is not None]


def files_named(folder: Path, begin: str, end: str = "") -> list[Path]:
    """What lies in a folder under a name that begins and ends so, by name; nothing where it cannot be looked into.

    As Path.glob, in a fifth of the time.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        return [folder / name for name in sorted(os.listdir(folder)) if name.startswith(begin) and name.endswith(end)]
    return []


def lines_of_view(folder: Path) -> int:
    """How many lines of each host a view of a segment reads; 0 where they are so few that it reads all."""
    sizes_B = [path.stat().st_size for path in folder.glob("samples-*.jsonl")]
    return THINNED // len(sizes_B) if sum(sizes_B) > LARGE_B else 0


def has_begun(folder: Path, host: str) -> bool:
    """Whether the sampler of a host has written its first sample."""
    path = folder / f"samples-{host}.jsonl"
    if not path.exists():
        return False
    with open(path, "rb") as file:
        return b'"v":[' in file.read(BLOCK_B)


def read_events(folder: Path, of_rank: int | None = None) -> list[dict]:
    """Events of all ranks, or of one; lines that a crash cut are skipped.

    Those of one rank follow its monotonic clock, and the ranks are put together by the wall clock at which each began:
    a wall clock that is set while the run goes on does not change the order.
    """
    events = []
    for path in files_named(folder, "events-rank", ".jsonl"):
        rank = int(path.stem.removeprefix("events-rank"))
        if of_rank not in (None, rank):
            continue
        own = [{"rank": rank, **line} for line in _whole_lines(path) if _is_event(line)]
        ahead_ns = own[0]["t_wall_ns"] - own[0]["t_mono_ns"] if own else 0
        events += [(event["t_mono_ns"] + ahead_ns, rank, event) for event in own]
    return [event for *_, event in sorted(events, key=lambda entry: entry[:2])]


def events_of_segments(run_dir: Path) -> dict[Path, list[dict]]:
    """The events of each start of a run, by its folder."""
    return {folder: read_events(folder) for folder in segments(run_dir)}


def _is_event(line: dict) -> bool:
    kinds = {type(line.get("t_mono_ns")), type(line.get("t_wall_ns")), type(line.get("rank", 0))}
    return kinds == {int} and isinstance(line.get("event"), str)


def events_of_kind(events: Iterable[dict], kind: str) -> list[dict]:
    return [event for event in events if event["event"] == kind]


def host_of_rank(events: list[dict]) -> dict[int, str]:
    """On which host each rank ran; a rank whose file was cut off before its start is not there."""
    return {event["rank"]: event["host"] for event in events_of_kind(events, "rank_start")}


def times_of_hosts(events: list[dict], kind: str) -> dict[str, int]:
    """When an event came last on each host, in ns of its monotonic clock."""
    where = host_of_rank(events)
    known = [event for event in events_of_kind(events, kind) if event["rank"] in where]
    return {where[event["rank"]]: event["t_mono_ns"] for event in known}


def read_phases(
    folder: Path, ranks: Collection[int] | None = None, but: Collection[int] = ()
) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]]:
    """Phases of each rank, or of some, or of all but some, as they followed each other on its host's monotonic clock.

    Returns rank -> (phase index, begin ns, end ns, names); phases of one rank do not overlap.
    """
    phases = {}
    for path in files_named(folder, "phases-rank", ".jsonl"):
        rank = int(path.stem.removeprefix("phases-rank"))
        if rank in but or ranks is not None and rank not in ranks:
            continue
        names, kinds, begins, lengths = [], [], [], []
        for line in _whole_lines(path):
            if "names" in line:
                names = line["names"]
            elif {"t", "phase", "gap_us", "length_us"} <= line.keys():
                kind = np.array(line["phase"], dtype=np.int64)
                if kind.max(initial=-1) >= len(names):
                    continue  # of a phase that has no name
                length_us = np.array(line["length_us"], dtype=np.int64)
                end_us = np.cumsum(np.array(line["gap_us"], dtype=np.int64) + length_us)
                begins.append(line["t"] + (end_us - length_us) * 1000)
                lengths.append(length_us * 1000)
                kinds.append(kind)
        if kinds:
            begin_ns = np.concatenate(begins)
            phases[rank] = (np.concatenate(kinds), begin_ns, begin_ns + np.concatenate(lengths), names)
    return phases


def _whole_lines(path: Path) -> list[dict]:
    """The lines of a JSONL file that are whole; NaN and Infinity, which no record can hold, become None."""
    require_file(path, LARGEST_LINES_B)
    texts = path.read_bytes().decode(errors="replace").splitlines()
    phases = _lines_of_phases(texts)
    others = iter(_decoded([text for place, text in enumerate(texts) if place not in phases]))
    lines = [phases.get(place) or next(others) for place in range(len(texts))]
    return [line for line in lines if isinstance(line, dict)]


def _decoded(texts: list[str]) -> list:
    """What lines of JSON hold, None where one is none."""
    return _read_as_one(texts, DECODER.decode) or list(map(_decoded_alone, texts))


def _read_as_one(texts: list[str], decode: Callable[[str], list]) -> list:
    """The JSON objects that some lines hold, read as one list; nothing where each alone might be something else."""
    text, found = "\n,".join(texts), []
    # Where all begin with a brace and there is no bracket, no object can go on in the next line.
    if "[" not in text and text.startswith("{") and text.count("\n,{") == len(texts) - 1:
        with contextlib.suppress(*ILL_TYPED):
            found = decode(f"[{text}]")
    return found if len(found) == len(texts) else []


def _decoded_alone(text: str):
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _lines_of_phases(texts: list[str]) -> dict[int, dict]:
    """Those of some lines that are phases as a rank writes them, by their place, the numbers of all read at once.

    Nothing where one might not be read as JSON reads it.
    """
    found = {place: match.groups() for place, match in enumerate(map(PHASES.fullmatch, texts)) if match}
    lists = list(chain.from_iterable(groups[1:] for groups in found.values()))
    numbers = ",".join(lists).encode()
    if not found or not _are_plain(b"[%b]" % numbers, has_points=False, has_nulls=False):
        return {}
    whole = np.fromstring(numbers, np.int64, sep=",")
    if whole.max() == GREATEST:
        return {}
    parts = iter(np.split(whole, np.cumsum([part.count(",") + 1 for part in lists])))
    lines = {}
    for place, (t, *_) in found.items():
        lines[place] = {"t": int(t), "phase": next(parts), "gap_us": next(parts), "length_us": next(parts)}
    return lines


def segments(run_dir: Path) -> list[Path]:
    """The folders with the raw files of each start of a run: the run's own, then segment-2, segment-3 ..."""
    later = [path for path in files_named(run_dir, "segment-") if path.name[8:9].isdecimal()]
    return [run_dir, *sorted(later, key=lambda path: int(path.name.partition("-")[2]))]


class Lines:
    """Lines on their way to the end of a file. Who adds one does not wait for a disk that does not answer.

    One thread writes them as they come. Another has them forced to disk every ``FORCE_S``, so that other hosts see
    them. While the disk does not answer, or is full, they wait in memory, ``MOST_B`` at most. Lines beyond that are
    dropped, and a line says how many.
    """

    FORCE_S = 5.0
    AGAIN_S = 0.5  # after a write that failed
    PROMPT_S = 0.02  # more than a write takes while all is well
    MOST_B = 32 * 2**20

    def __init__(self, path: Path):
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size_B = os.fstat(self.file).st_size
        # A line in which an earlier writer was killed must not swallow our first one.
        self.waiting = b"\n" if size_B and os.pread(self.file, 1, size_B - 1) != b"\n" else b""
        self.taken_B, self.written_B, self.forced_B = len(self.waiting), 0, 0
        self.dropped, self.refused = 0, False  # lines; whether the last write failed
        self.changed, self.hurry = threading.Condition(), threading.Event()
        for work in (self._write, self._force):
            threading.Thread(target=work, name="energynn-lines", daemon=True).start()

    def add(self, line: dict) -> None:
        """Take a line; it is in the file afterwards, even if the process is killed, unless the disk does not answer."""
        with self.changed:
            is_prompt = self.taken_B == self.written_B
            if self.taken_B - self.written_B > self.MOST_B:
                self.dropped += 1
                return
            if self.dropped:
                self._take({"problem": f"{self.dropped} lines were lost: nothing could be written for too long"})
                self.dropped = 0
            self._take(line)
            self.changed.notify_all()
            if is_prompt:
                self.changed.wait_for(lambda: self.taken_B == self.written_B, self.PROMPT_S)

    def _take(self, line: dict) -> None:
        data = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        self.waiting += data
        self.taken_B += len(data)

    def flush(self, patience_s: float) -> bool:
        """Wait until all lines are forced to disk; False where that takes longer, or the disk takes no more."""
        with self.changed:
            taken_B = self.taken_B
            self.hurry.set()
            self.changed.wait_for(lambda: self.forced_B >= taken_B or self.refused, patience_s)
            self.hurry.clear()
            return self.forced_B >= taken_B

    def _write(self) -> None:
        writing, complained = b"", False
        while True:
            with self.changed:
                while not (self.waiting or writing):
                    self.changed.wait()
                writing, self.waiting = writing + self.waiting, b""
            written = 0
            try:
                written = os.write(self.file, writing)
            except OSError as error:
                if not complained:
                    print(f"energynn: samples are not written: {error.strerror}; free some space", file=sys.stderr)
                complained = True
            with self.changed:
                self.written_B += written
                self.refused = written == 0
                self.changed.notify_all()
            if written < len(writing):
                time.sleep(self.AGAIN_S)
            writing = writing[written:]

    def _force(self) -> None:
        while True:
            self.hurry.wait(self.FORCE_S)
            written_B = self.written_B
            if written_B > self.forced_B:
                with contextlib.suppress(OSError):  # a full disk
                    os.fsync(self.file)
            with self.changed:
                self.forced_B = written_B
                self.changed.notify_all()
            time.sleep(0.01)  # before the rest, if there is a hurry


class Heartbeat:
    """The last sign of life of a sampler, in memory that other processes of the host find by what its header says."""

    def __init__(self):
        self.file = os.memfd_create("energynn-heartbeat")

    def beat(self, sign: bytes | None = None) -> None:
        """Tell that the sampler lives; ``ENDED`` that it has ended as it should."""
        os.pwrite(self.file, sign or time.monotonic_ns().to_bytes(8), 0)


class Silence:
    """Whether this host's sampler has died or fallen silent: in words, or "" while all is well.

    Every host watches its own, by its process and its heartbeat, which are no files of the run: a file system may
    stand still for a minute, and show late what other hosts have written. The folder is asked until the sampler is
    found. One that has ended as it should is not silent; perun's evaluation, which follows it, is only given
    ``EVALUATION_S``.
    """

    LOOK_S = 1.0
    NOTICED_S = 10.0
    EVALUATION_S = 600.0

    def __init__(self, folder: Path):
        self.folder, self.host = folder, os.uname().nodename
        self.path = folder / f"samples-{self.host}.jsonl"
        self.looked, self.words, self.silent_s = time.monotonic() - self.LOOK_S, "", 0.0
        self.process, self.heartbeat, self.last = 0, None, b""

    def __call__(self) -> str:
        """Call it often: it looks once in ``LOOK_S``, and counts no time in which its own process was stopped."""
        since_s = time.monotonic() - self.looked
        if since_s >= self.LOOK_S:
            self.silent_s += min(since_s, 2 * self.LOOK_S)
            self.looked, self.words = time.monotonic(), self._look()
        return self.words

    def notice(self) -> str:
        """In words that there has been no sample for ``NOTICED_S``: a reason to look, or for a checkpoint."""
        is_noticed = self.last not in (b"", ENDED) and self.silent_s > self.NOTICED_S
        return f"no sample for {self.NOTICED_S:.0f} s on {self.host}" if is_noticed else ""

    def _look(self) -> str:
        if self.heartbeat is None and not self._find():
            if self._was_killed():
                return f"the sampler is dead on {self.host}"
            most_s = limit_s("first_sample_limit_s")
            nothing = self.silent_s > most_s and not list(self.folder.glob("samples-*.jsonl"))
            return f"no sample in the first {most_s:.0f} s" if nothing else ""
        sign = os.pread(self.heartbeat, 8, 0)
        if sign != self.last:
            self.last, self.silent_s = sign, 0.0
        if sign == ENDED:
            too_long = self.silent_s > self.EVALUATION_S
            return f"perun's evaluation takes longer than {self.EVALUATION_S:.0f} s" if too_long else ""
        if not lives(self.process):
            return f"the sampler is dead on {self.host}"
        most_s = limit_s("silence_limit_s")
        return f"no sample for {most_s:.0f} s on {self.host}" if self.silent_s > most_s else ""

    def _find(self) -> bool:
        """Find the process and the heartbeat of the sampler by the last header in its file."""
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            header = self._header()
            self.heartbeat = os.open(f"/proc/{header['pid']}/fd/{header['heartbeat']}", os.O_RDONLY)
            self.process = header["pid"]
        return self.heartbeat is not None

    def _was_killed(self) -> bool:
        """Whether a sampler that was never found has gone, and did not say as its last word that it ended."""
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            return not is_alive(self._header()["process"]) and b'"ended":true' not in self.path.read_bytes()[-1000:]
        return False

    def _header(self) -> dict:
        with open(self.path, "rb") as file:
            return json.loads([line for line in file.read(2**20).splitlines() if b'"header"' in line][-1])
