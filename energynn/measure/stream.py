"""Samples files of any length: what their sensors say about windows, and energies at instants.

A file is read in pieces; of each sensor only the last readings are kept, so that a minute before
and after each reading is known when it counts. A file of one piece is read as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from energynn.measure.energy import curve, update_s
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
        self.sensor = self._sensor = sensor
        self.period_s = period_s
        self.found = [Evidence(sensor, *window_s, period_s) for window_s in windows_s]
        self.asked_s = np.unique(asked_s)
        self.asked_J = np.full(len(self.asked_s), np.nan)
        self.first_s, self.last_s = np.inf, -np.inf
        self._t_s = self._readings = np.zeros(0)
        self._done_s, self._done_J = -np.inf, 0.0

    def hear(self, states: Iterable[tuple]) -> None:
        for state in states:
            for one in self.found:
                one.hear(*state)

    def take(self, t_s: np.ndarray, readings: np.ndarray) -> None:
        """Take further readings, NaN where one failed; shapes (samples,)."""
        good_s = t_s[np.isfinite(readings)]
        self.first_s = good_s.min(initial=self.first_s)
        self.last_s = good_s.max(initial=self.last_s)
        self._t_s = np.append(self._t_s, t_s)
        self._readings = np.append(self._readings, readings)
        self._keep(~_is_repeated(np.isnan(self._readings)))
        if len(self._t_s) > PIECE:
            self._use_all_but_the_last()

    def _keep(self, which) -> None:
        self._t_s, self._readings = self._t_s[which], self._readings[which]

    def _use_all_but_the_last(self) -> None:
        late = np.searchsorted(self._t_s, self._t_s[-1] - MARGIN_S)
        until = min(late, len(self._t_s) - MARGIN)
        until_s = self._t_s[until]
        if until_s > self._done_s:
            self._use(until_s)
            early = np.searchsorted(self._t_s, until_s - MARGIN_S)
            self._keep(slice(max(0, min(early, until - MARGIN)), None))

    def _use(self, until_s: float) -> None:
        """Let the readings count that have not yet, until an instant."""
        one = curve(self._sensor, self._t_s, self._readings, self.period_s)
        if (
            self._done_s == -np.inf
        ):  # what the first piece tells of the sensor holds for all
            renewed_s = self._sensor.get("update_s") or update_s(one.t_s, one.values)
            self._sensor = self._sensor | {"update_s": renewed_s}
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


def _is_repeated(is_failed: np.ndarray) -> np.ndarray:
    """Tell which readings failed as the one before: one of them is as good as a thousand."""
    return is_failed & np.append(False, is_failed[:-1])


def read_streams(
    path: Path, header: dict, windows_s: list, asked_s=(), begin_B: int = 0
) -> tuple[list[Stream], list[str]]:
    """Read a samples file; returns its sensors, and what the sampler complained about.

    windows_s: (begin, end) of each, in s of the monotonic clock; asked_s: further instants;
    begin_B: where to begin.
    """
    period_s = header["period_s"]
    streams = [
        Stream(sensor, period_s, windows_s, asked_s) for sensor in header["sensors"]
    ]
    problems: list[str] = []
    for part in pieces(path, begin_B):
        problems += part.problems
        for stream, column in zip(streams, part.readings.T, strict=True):
            stream.hear(part.states_of(stream.sensor))
            stream.take(part.t_ns / 1e9, column)
    for stream in streams:
        stream.finish()
    return streams, problems
