"""Samples files of any length: what their sensors say about windows, and energies at instants.

A file is read in pieces; of each sensor only the last readings are kept, so that a minute before
and after each reading is known when it counts. A file of one piece is read as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from energynn.measure.energy import curve_of_good, update_s
from energynn.measure.evidence import Evidence
from energynn.measure.samples import PIECE, pieces

MARGIN_S = 60.0  # of readings around those that count, and
MARGIN = 100  # readings at least


class Stream:
    """The readings of one sensor, as they come.

    found: evidence of each window, in their order. asked_s, asked_J: instants and the energy from
    the first reading until then. first_s, last_s: good readings.
    """

    def __init__(self, sensor: dict, period_s: float, windows_s: list, asked_s):
        self.sensor, self.period_s = sensor, period_s
        self.found = [Evidence(sensor, *window_s, period_s) for window_s in windows_s]
        self.asked_s = np.unique(asked_s)
        self.asked_J = np.full(len(self.asked_s), np.nan)
        self.first_s, self.last_s = np.inf, -np.inf
        # time, value, and whether readings failed before it
        self._good = np.zeros((3, 0))
        self._has_failed = False
        self._renewed_s: float | None = None
        self._done_s, self._done_J = -np.inf, 0.0

    def hear(self, states: Iterable[tuple]) -> None:
        for state in states:
            for one in self.found:
                one.hear(*state)

    def take(self, t_s: np.ndarray, readings: np.ndarray) -> None:
        """Take further readings, NaN where one failed; shapes (samples,)."""
        good = np.flatnonzero(np.isfinite(readings))
        if len(good) == 0:
            self._has_failed |= len(readings) > 0
            return
        is_after_fault = np.diff(good, prepend=-1) > 1
        is_after_fault[0] |= self._has_failed
        self._has_failed = good[-1] < len(readings) - 1
        values = readings[good] * self.sensor["to_SI"]
        taken = np.stack([t_s[good], values, is_after_fault])
        self._good = np.concatenate([self._good, taken], axis=1)
        self.first_s = min(self.first_s, t_s[good[0]])
        self.last_s = t_s[good[-1]]
        if self._good.shape[1] > PIECE:
            self._use_all_but_the_last()

    def _use_all_but_the_last(self) -> None:
        t_s = self._good[0]
        until = min(np.searchsorted(t_s, t_s[-1] - MARGIN_S), len(t_s) - MARGIN)
        until_s = t_s[until]
        if until_s > self._done_s:
            self._use(until_s)
            kept = np.searchsorted(t_s, until_s - MARGIN_S)
            self._good = self._good[:, max(0, min(kept, until - MARGIN)) :]

    def _use(self, until_s: float) -> None:
        """Let the readings count that have not yet, until an instant."""
        t_s, values, is_after_fault = self._good
        self._renewed_s = self._renewed_s or update_s(t_s, values)
        one = curve_of_good(
            self.sensor,
            t_s,
            values,
            is_after_fault.astype(bool),
            self.period_s,
            self.sensor.get("update_s") or self._renewed_s,
        )
        for found in self.found:
            found.add(one, self._done_s, until_s)
        before_J = self._done_J - one.at(self._done_s)
        is_next = (self.asked_s > self._done_s) & (self.asked_s <= until_s)
        self.asked_J[is_next] = before_J + one.at(self.asked_s[is_next])
        self._done_s, self._done_J = until_s, before_J + one.at(until_s)

    def finish(self) -> None:
        self._use(np.inf)

    def at(self, t_s) -> np.ndarray:
        """Energy in J at instants that were asked for."""
        return self.asked_J[np.searchsorted(self.asked_s, t_s)]


def read_streams(
    path: Path, header: dict, windows_s: list, asked_s=()
) -> tuple[list[Stream], list[str]]:
    """Read a samples file; returns its sensors, and what the sampler complained about.

    windows_s: (begin, end) of each, in s of the monotonic clock; asked_s: further instants.
    """
    period_s = header["period_s"]
    streams = [
        Stream(sensor, period_s, windows_s, asked_s) for sensor in header["sensors"]
    ]
    problems: list[str] = []
    for part in pieces(path):
        problems += part.problems
        for stream, column in zip(streams, part.readings.T, strict=True):
            stream.hear(part.states_of(stream.sensor))
            stream.take(part.t_ns / 1e9, column)
    for stream in streams:
        stream.finish()
    return streams, problems
