"""What the readings of one sensor say about one window, added up from pieces of them.

A week of samples is longer than a memory. All that the energy of a window, its bound and the six
tests need is a few numbers of a sensor, and those of two pieces add up. ``energy.py`` judges them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

AROUND_S = (
    2.0  # before and after a window: how much the power varies there, for its bound
)
NEAR_S = 1.0  # before and after a window: readings that the tests look at, too
HALF_MINUTE_S = 30.0
HEAD = 10_000  # readings by which two counters are compared


@dataclass
class Evidence:
    """One sensor in one window; times in s of the monotonic clock.

    late_s: how old what is shown may be; missed_J2: squared energy that may lie between readings;
    lost_s, longest_gap_s: in gaps within the window; edge_lost_s: in those that hold its begin or
    end, which last edge_gap_s at most; lowest_W, highest_W: means over what it is late; steps: of
    these; second_W, half_minute_W: highest means; step_W: the highest of a counter's own steps;
    still: (runs, 2) reading and duration in s of the longest times that it showed the same; least,
    most: readings near the window; zero_s: the longest time that it showed nothing at all;
    is_busy: as the device says; None where it does not. limit_W: the highest that was told.
    """

    sensor: dict
    begin_s: float
    end_s: float
    period_s: float
    is_named: bool = False
    is_busy: bool | None = None
    limit_W: float = 0.0
    late_s: float = 0.0
    energy_J: float = 0.0
    missed_J2: float = 0.0
    readings: int = 0
    lost_s: float = 0.0
    longest_gap_s: float = 0.0
    edge_lost_s: float = 0.0
    edge_gap_s: float = 0.0
    steps: float = 0.0
    lowest_W: float = np.inf
    highest_W: float = -np.inf
    falls: int = 0
    step_W: float = 0.0
    second_W: float = 0.0
    half_minute_W: float = 0.0
    least: float = np.inf
    most: float = -np.inf
    zero_s: float = 0.0
    still: np.ndarray = field(default_factory=partial(np.zeros, (0, 2)))
    is_whole: bool = True
    head: np.ndarray | None = None
    first_s: float = np.inf  # reading of all
    near_s: float = np.inf  # first reading near the window

    def __post_init__(self):
        self.limit_W = self.sensor["notes"].get("limit_W", 0.0)

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def coverage(self) -> float:
        return 1 - self.lost_s / self.length_s

    @property
    def is_counter(self) -> bool:
        return self.sensor["kind"] != "power"

    @property
    def is_used(self) -> bool:
        """Tell whether the device works in the window, as far as is known; a CPU always does."""
        is_idle = self.sensor["component"] == "gpu" and self.is_busy is False
        return self.is_named or not is_idle

    def hear(self, t_s: float, limit_W: float | None, is_busy: bool | None) -> None:
        """Take what the device has told of itself; it holds until it tells something else."""
        self.limit_W = max(self.limit_W, limit_W or 0.0)
        if is_busy is None or t_s > self.end_s:
            return
        was_busy = self.is_busy and t_s > self.begin_s
        self.is_busy = bool(is_busy or was_busy)

    def add(self, curve, from_s: float = -np.inf, to_s: float = np.inf) -> None:
        """Add the readings of a curve after ``from_s`` and until ``to_s``; it knows more around."""
        self.late_s = curve.late_s
        if self.head is None:
            self.head, self.first_s = curve.values[:HEAD], curve.t_s[0]
        is_new = (curve.t_s > from_s) & (curve.t_s <= to_s)
        self.is_whole &= not (curve.values[is_new] % 1).any()
        inside_s = max(self.begin_s, from_s), min(self.end_s, to_s)
        if inside_s[0] < inside_s[1]:
            self._add_energy(curve, *inside_s)
            self._add_gaps(curve, *inside_s)
        is_inside = (curve.t_s >= self.begin_s) & (curve.t_s <= self.end_s)
        self.readings += int((is_new & is_inside).sum())
        begin_s = max(self.begin_s - AROUND_S, self.first_s)
        end_s = min(self.end_s + AROUND_S, curve.t_s[-1])
        step_s = max(self.late_s, 0.1)
        watts = curve.powers_W(begin_s, end_s, step_s, is_new)
        self.steps = (end_s - begin_s) / step_s
        self.lowest_W = watts.min(initial=self.lowest_W)
        self.highest_W = watts.max(initial=self.highest_W)
        near_s = self.begin_s - NEAR_S, self.end_s + NEAR_S
        near = slice(*np.searchsorted(curve.t_s, near_s))
        if len(curve.t_s[near]) > 1 and is_new[near].any():
            self._add_readings(curve, near, is_new)

    def _add_energy(self, curve, begin_s: float, end_s: float) -> None:
        self.energy_J += float(curve.at(end_s) - curve.at(begin_s))
        begin_J2, end_J2 = np.interp([begin_s, end_s], curve.t_s, curve.missed_J2)
        self.missed_J2 += float(end_J2 - begin_J2)

    def _add_gaps(self, curve, begin_s: float, end_s: float) -> None:
        lost_s = np.diff(np.clip(curve.gaps_s, begin_s, end_s)).ravel()
        gaps_s, lost_s = curve.gaps_s[lost_s > 0], lost_s[lost_s > 0]
        whole_s = np.diff(np.clip(gaps_s, self.begin_s, self.end_s))
        from_s, to_s = gaps_s.T
        is_edge = (from_s < self.begin_s) | (to_s > self.end_s)
        self.lost_s += float(lost_s.sum())
        self.longest_gap_s = whole_s.max(initial=self.longest_gap_s)
        self.edge_lost_s += float(lost_s[is_edge].sum())
        self.edge_gap_s = (to_s - from_s)[is_edge].max(initial=self.edge_gap_s)

    def _add_readings(self, curve, near: slice, is_new: np.ndarray) -> None:
        """Add what the tests of movement, monotony and power ask."""
        t_s, values, new = curve.t_s[near], curve.values[near], is_new[near]
        self.near_s = min(self.near_s, t_s[0])
        seconds_s = 1.0
        if self.sensor["kind"] == "power":
            self.falls += int((values < 0)[new].sum())
        else:
            steps_J = curve.steps_J[near][1:]
            self.falls += int((steps_J < 0)[new[1:]].sum())
            changes = np.append(0, np.flatnonzero(steps_J) + 1)
            added_J, apart_s = steps_J[changes[1:] - 1], np.diff(t_s[changes])
            added_W = (added_J / (apart_s + self.late_s))[new[changes[1:]]]
            self.step_W = added_W.max(initial=self.step_W)
            seconds_s = max(1.0, 10 * self.late_s)
        seconds_W = curve.powers_W(self.near_s, t_s[-1], seconds_s, is_new)
        self.second_W = seconds_W.max(initial=self.second_W)
        longer_W = curve.powers_W(self.near_s, t_s[-1], HALF_MINUTE_S, is_new)
        self.half_minute_W = longer_W.max(initial=self.half_minute_W)
        self.least = values.min(initial=self.least)
        self.most = values.max(initial=self.most)
        begins = np.append(0, np.flatnonzero(np.diff(values)) + 1)
        ends = np.append(begins[1:], len(values)) - 1
        runs = np.column_stack([values[begins], t_s[ends] - t_s[begins]])
        runs = runs[runs[:, 1] > 0]
        self.zero_s = runs[runs[:, 0] == 0, 1].max(initial=self.zero_s)
        self.still = _longest(np.concatenate([self.still, runs]))


def _longest(runs: np.ndarray) -> np.ndarray:
    """Keep the (reading, duration) that no higher reading lasts as long as."""
    runs = runs[np.argsort(-runs[:, 0])]
    before_s = np.maximum.accumulate(np.append(0.0, runs[:, 1]))[:-1]
    return runs[runs[:, 1] > before_s]
