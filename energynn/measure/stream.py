"""Samples files of any length: what their sensors say about windows, and energies at instants.

A file is read in pieces; of each sensor only the last readings are kept, so that those before and
after each reading are known when it counts. A file of one piece is read as a whole.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from energynn.measure.energy import EnergyCurve, energy_curve
from energynn.measure.evidence import SensorEvidence
from energynn.measure.samples import PIECE_SAMPLES, Channel, Header, read_pieces

MARGIN_READINGS = 2**12  # readings around those that count, more than half a minute


class SensorStream:
    """The readings of one sensor, as they come.

    evidence: of each window, by its name. asked_s, asked_J: instants and the energy from the
    first reading until then. first_s, last_s: good readings.
    """

    def __init__(self, sensor: Channel, period_s: float, windows_s, asked_s, make):
        self.sensor = sensor
        self.period_s = period_s
        self.make = make
        self.evidence = {
            name: SensorEvidence(sensor, begin_s, end_s, period_s)
            for name, (begin_s, end_s) in windows_s.items()
        }
        self.asked_s = np.unique(asked_s)
        self.asked_J = np.full(len(self.asked_s), np.nan)
        self.first_s = np.inf
        self._read = np.zeros((2, 0))  # times in s, and readings
        self._done_s = -np.inf
        self._done_J = 0.0

    def add_readings(self, t_s: np.ndarray, readings: np.ndarray) -> None:
        """Take further readings, NaN where one failed; shapes (samples,)."""
        read = np.hstack([self._read, [t_s, readings]])
        # of several that failed one after the other, one is as good as a thousand
        is_failed = np.isnan(read[1])
        self._read = read[:, ~(is_failed & np.append(False, is_failed[:-1]))]
        until = self._read.shape[1] - MARGIN_READINGS
        if until > PIECE_SAMPLES - MARGIN_READINGS:
            self.use_until(self._read[0, until])
            self._read = self._read[:, until - MARGIN_READINGS :]

    def use_until(self, until_s: float) -> None:
        """Let the readings count that have not yet, until an instant."""
        one = self.make(self.sensor, *self._read, self.period_s)
        # what the first piece tells of the sensor holds for all
        self.sensor = one.sensor
        self.first_s = min(self.first_s, one.t_s[0])
        self.last_s = one.t_s[-1]
        for window in self.evidence.values():
            window.add(one, self._done_s, until_s)
        before_J = self._done_J - one.at(self._done_s)
        these = slice(
            *np.searchsorted(self.asked_s, (self._done_s, until_s), side="right")
        )
        self.asked_J[these] = before_J + one.at(self.asked_s[these])
        self._done_s = until_s
        self._done_J = before_J + one.at(until_s)

    def at(self, t_s) -> np.ndarray:
        """Return the energy in J at instants that were asked for."""
        return self.asked_J[np.searchsorted(self.asked_s, t_s)]


def read_sensor_streams(
    path: Path,
    header: Header,
    windows_s: Mapping[str, Sequence[float] | np.ndarray],
    asked_s=(),
    begin_B: int = 0,
    make: Callable[..., EnergyCurve] = energy_curve,
) -> tuple[list[SensorStream], list[str]]:
    """Read a samples file; returns its sensors, and what the sampler complained about.

    windows_s: (begin, end) by name, in s of the monotonic clock; asked_s: further instants;
    begin_B: where to begin; make: curves, as ``energy.energy_curve`` does.
    """
    streams = [
        SensorStream(sensor, header.period_s, windows_s, asked_s, make)
        for sensor in header.sensors
    ]
    problems = header.problems
    for part in read_pieces(path, begin_B):
        problems = problems + part.problems
        for stream, column in zip(streams, part.readings.T, strict=True):
            told = [line for line in part.states if stream.sensor.id in line.states]
            for window, line in product(stream.evidence.values(), told):
                window.add_state(line.t / 1e9, line.states[stream.sensor.id])
            stream.add_readings(part.t_ns / 1e9, column)
    for stream in streams:
        stream.use_until(np.inf)
    return streams, problems
