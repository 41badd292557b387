"""Where a run stood still, as a job that is suspended: its ranks did not run, and its sampler took no sample.

Each rank notes it as soon as it runs again. A sampler that alone is stopped, late or dead is no such case: the ranks
ran meanwhile, and what was not measured is a gap.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np

from energynn.measure import clocks
from energynn.measure.samples import Events, Samples, events_of_kind, host_of_rank

EVENT = "stood_still"
TICK_S = 0.1
BRIEF_S = 1.0  # what runs for less between two suspensions, or between one and its end, does not count either
LEAST_S = 2.0  # a machine that is short of memory, or moved to another host, stands still for less
MOST_BUSY = 0.5  # cores that a rank may have kept busy: more, and only its watching thread stood still
END_OF_TIME_NS = 2**63 - 1
Span = tuple[int, int]  # from, to: ns of a monotonic clock


def watch(folder: Path, rank: int) -> None:
    """Have a thread of this process mark from now on where the clock went on and the process did not."""
    threading.Thread(target=_watch, args=(Events(folder, rank).mark,), name="energynn-stillness", daemon=True).start()


def _watch(mark: Callable) -> None:
    while True:
        from_ns, cpu_s = time.monotonic_ns(), time.process_time()
        time.sleep(TICK_S)
        if time.monotonic_ns() - from_ns > LEAST_S * 1e9:
            mark(EVENT, from_ns=from_ns, cpu_s=time.process_time() - cpu_s)


def lately_s(events: list[dict], within_s: float) -> float:
    """The longest that a rank has stood still of those that ran again so lately; 0 where none did."""
    since_ns = time.time_ns() - within_s * 1e9
    return max(
        (_length(_span(event)) / 1e9 for event in _credible(events) if event["t_wall_ns"] > since_ns), default=0.0
    )


def of_host(samples: Samples, events: list[dict]) -> list[Span]:
    """Where all of a host stood still: no sample was taken, and all of its ranks say that they did not run."""
    longest_ns = int(samples.longest_ns)  # to the samples around it, where there is no gap before them
    told: dict[int, list[Span]] = {rank: [] for rank, host in host_of_rank(events).items() if host == samples.host}
    for event in _credible(events):
        if event["rank"] in told:
            told[event["rank"]].append((event["from_ns"] - longest_ns, event["t_mono_ns"] + longest_ns))
    # A sample that was being read meanwhile is of neither side.
    times_ns = samples.t_ns[samples.duration_us < LEAST_S * 1e6]
    found = []
    for gap in np.flatnonzero(np.diff(times_ns) > LEAST_S * 1e9):
        span = int(times_ns[gap]), int(times_ns[gap + 1])
        for of_rank in told.values():
            span = max([_overlap(span, own) for own in of_rank], key=_length, default=(0, 0))
        if _length(span) > LEAST_S * 1e9:
            found.append(span)
    if found and times_ns[-1] - found[-1][1] < BRIEF_S * 1e9:  # it was ended as soon as it ran again
        found[-1] = found[-1][0], int(times_ns[-1]) + 1
    return found


def _credible(events: list[dict]) -> list[dict]:
    """What ranks have marked, where they did not compute meanwhile."""
    found = []
    for event in events_of_kind(events, EVENT):
        are_numbers = type(event.get("from_ns")) is int and isinstance(event.get("cpu_s"), float | int)
        if are_numbers and event["cpu_s"] * 1e9 < MOST_BUSY * _length(_span(event)):
            found.append(event)
    return found


def of_run(stood_still: dict[str, list[Span]], offsets: dict[str, list[dict]]) -> dict[str, list[Span]]:
    """Host -> where the run stood still, on the host's own clock: while one host stands still, the others wait.

    ``stood_still``: what ``of_host`` says of each; ``offsets``: `Samples.clocks` of each. Nothing is known where the
    clock of one of several hosts was never measured.
    """
    if len(stood_still) < 2:
        return {host: _united(spans) for host, spans in stood_still.items()}
    if not all(offsets.values()):
        return {host: [] for host in stood_still}
    common = []
    for host, spans in stood_still.items():
        common += [(clocks.align(begin, offsets[host]), clocks.align(end, offsets[host])) for begin, end in spans]
    found = {}
    for host, own in offsets.items():
        found[host] = [(clocks.on_own(begin, own), clocks.on_own(end, own)) for begin, end in _united(common)]
    return found


def parts_between(stood_still: dict[str, list[Span]]) -> list[tuple[dict[str, Span], float]]:
    """What lies before, between and after such spans: host -> from, to; and how long the run stood still before it, s.

    Every host has as many spans.
    """
    edges = {host: [0, *chain.from_iterable(spans), END_OF_TIME_NS] for host, spans in stood_still.items()}
    parts = []
    for number in range(0, max(map(len, edges.values()), default=2), 2):
        within = {host: (own[number], own[number + 1]) for host, own in edges.items()}
        still_ns = [own[number] - own[number - 1] for own in edges.values() if number]
        parts.append((within, max(still_ns, default=0) / 1e9))
    return parts


def _span(event: dict) -> Span:
    return event["from_ns"], event["t_mono_ns"]


def _length(span: Span) -> int:
    return span[1] - span[0]


def _overlap(one: Span, other: Span) -> Span:
    return max(one[0], other[0]), min(one[1], other[1])


def _united(spans: list[Span]) -> list[Span]:
    """The same instants in spans that follow each other and do not overlap, and with what is too brief between them."""
    united: list[Span] = []
    for begin, end in sorted(spans):
        if united and begin - united[-1][1] < BRIEF_S * 1e9:
            united[-1] = united[-1][0], max(end, united[-1][1])
        else:
            united.append((begin, end))
    return united
