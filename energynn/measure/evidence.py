"""What the readings of one sensor say about one window, added up from pieces of them.

A week of samples is longer than a memory. All that the energy of a window, its bound and the six
tests need is a few numbers of a sensor, and those of two pieces add up. ``energy.py`` judges them.
"""

import msgspec
import numpy as np

from energynn.measure.samples import Channel, DeviceState

# before and after a window: how much the power varies there, for its bound
VARIATION_MARGIN_S = 2.0
JUDGED_MARGIN_S = 1.0  # before and after a window: readings that the tests look at, too
HALF_MINUTE_S = 30.0
MAX_COMPARED_READINGS = 10_000  # readings by which two counters are compared

# What the tests hold against a sensor; a table [thresholds] in system.toml may override each.
THRESHOLDS = {
    "least_gpu_W": 5.0,  # in the mean of a window, of a device that is used
    "least_cpu_W": 1.0,
    "least_ram_W": 0.1,
    "least_share": 0.01,  # or that share of its power limit
    "most_gpu_W": 3000.0,  # of a device that states no limit
    "most_cpu_W": 2000.0,
    "most_ram_W": 1000.0,
    "over_limit_gpu": 1.2,
    "over_limit_cpu": 1.5,  # of half a minute: RAPL's limits are means
    "over_limit_ram": 1.5,
    "peak_over_limit": 8.0,  # of a second, where limits are means
    "counter_still_s": 0.4,  # or three times as long as it usually shows the same
    "power_still_s": 3.0,
    "power_zero_s": 0.4,
    "gap_s": 0.5,
    "gap_share": 0.01,
    "disagreement": 0.05,
}
# of a power, in its mean: a constant one, too, is read at odd instants
MIN_RELATIVE_RANGE = 0.25


class SensorEvidence(msgspec.Struct):
    """One sensor in one window; times in s of the monotonic clock.

    late_s: how old what is shown may be; missed_J2: squared energy that may lie between readings;
    lost_s, longest_gap_s: in gaps within the window; edge_lost_s: in those that hold its begin or
    end, which last edge_gap_s at most; lowest_W, highest_W: means over what it is late; falls: how
    often a counter fell or a power was negative; peak_W: the highest mean of a second, or step of
    a counter; half_minute_W: the highest mean of that; still: (runs, 2) reading and duration in s
    of the longest times that it showed the same; least, most: readings near the window; zero_s:
    the longest time that it showed nothing at all; head, first_s: its first readings of all;
    is_busy: as the device says; None where it does not. limit_W: the highest that was told,
    limit_end_W: the last.
    """

    sensor: Channel
    begin_s: float
    end_s: float
    period_s: float
    is_named: bool = False
    is_busy: bool | None = None
    limit_W: float = 0.0
    limit_end_W: float = 0.0
    late_s: float = 0.0
    energy_J: float = 0.0
    missed_J2: float = 0.0
    readings: int = 0
    lost_s: float = 0.0
    longest_gap_s: float = 0.0
    edge_lost_s: float = 0.0
    edge_gap_s: float = 0.0
    lowest_W: float = np.inf
    highest_W: float = -np.inf
    falls: int = 0
    peak_W: float = 0.0
    half_minute_W: float = 0.0
    least: float = np.inf
    most: float = -np.inf
    zero_s: float = 0.0
    still: np.ndarray = np.zeros((0, 2))
    is_whole: bool = True
    head: np.ndarray = np.zeros(0)
    first_s: float = np.inf

    def __post_init__(self):
        self.limit_W = self.sensor.notes.get("limit_W", 0.0)

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def coverage(self) -> float:
        return 1 - self.lost_s / self.length_s

    @property
    def bound_J(self) -> float:
        """How wrong the energy may be if the sensor is right.

        At the edges what the sensor shows late, in gaps all that its power varies, and between the
        readings of a power half of each step, and half a watt if it tells whole ones. In a gap a
        counter goes on: only those at the edges count.
        """
        range_W = self.highest_W - self.lowest_W
        if range_W < 0:  # nothing is known of it
            range_W = THRESHOLDS[f"most_{self.sensor.component}_W"]
        range_W = max(range_W, MIN_RELATIVE_RANGE * self.energy_J / self.length_s)
        lost_s = self.edge_lost_s if self.is_counter else self.lost_s
        bound_J = range_W * (1.5 * self.late_s + lost_s) + 2 * np.sqrt(self.missed_J2)
        if not self.is_counter and self.is_whole:
            bound_J += 0.5 * self.length_s  # it is told in whole watts
        return float(bound_J)

    @property
    def is_counter(self) -> bool:
        return self.sensor.kind != "power"

    def add_state(self, t_s: float, told: DeviceState) -> None:
        """Take what the device has told of itself; it holds until it tells something else."""
        self.limit_W = max(self.limit_W, told.limit_W or 0.0)
        self.limit_end_W = told.limit_W or self.limit_end_W
        if told.is_busy is None or t_s > self.end_s:
            return
        was_busy = self.is_busy and t_s > self.begin_s
        self.is_busy = bool(told.is_busy or was_busy)

    def add(self, curve, from_s: float, to_s: float) -> None:
        """Add the readings of a curve after ``from_s`` and until ``to_s``; it knows more around."""
        t_s = curve.t_s
        self.late_s = curve.late_s
        if not len(self.head):
            self.head = curve.values[:MAX_COMPARED_READINGS]
            self.first_s = t_s[0]
        is_new = (t_s > from_s) & (t_s <= to_s)
        self.is_whole &= not (curve.values % 1).any()
        self.readings += int(
            (is_new & (t_s >= self.begin_s) & (t_s <= self.end_s)).sum()
        )
        begin_s, end_s = np.clip([self.begin_s, self.end_s], from_s, to_s)
        self.energy_J += float(curve.at(end_s) - curve.at(begin_s))
        begin_J2, end_J2 = np.interp([begin_s, end_s], t_s, curve.missed_J2)
        self.missed_J2 += float(end_J2 - begin_J2)
        lost_s = np.diff(np.clip(curve.gaps_s, begin_s, end_s)).ravel()
        gaps_s = curve.gaps_s[lost_s > 0]
        lost_s = lost_s[lost_s > 0]
        within_s = np.clip(gaps_s, self.begin_s, self.end_s)
        is_edge = (within_s != gaps_s).any(axis=1)
        self.lost_s += float(lost_s.sum())
        self.edge_lost_s += float(lost_s[is_edge].sum())
        self.longest_gap_s = np.diff(within_s).max(initial=self.longest_gap_s)
        self.edge_gap_s = np.diff(gaps_s[is_edge]).max(initial=self.edge_gap_s)
        watts = self._step_powers_W(
            curve, VARIATION_MARGIN_S, max(self.late_s, 0.1), is_new
        )
        if len(watts) > 1:  # one alone tells no range
            self.lowest_W = watts.min(initial=self.lowest_W)
            self.highest_W = watts.max(initial=self.highest_W)
        near_s = self.begin_s - JUDGED_MARGIN_S, self.end_s + JUDGED_MARGIN_S
        near = slice(*np.searchsorted(t_s, near_s))
        if len(t_s[near]) > 1 and is_new[near].any():
            self._add_test_readings(curve, near, is_new)

    def _step_powers_W(
        self, curve, around_s: float, step_s: float, is_new
    ) -> np.ndarray:
        """Return mean powers of whole steps of the window and around it: of those at new readings.

        is_new: (readings,). Between two readings all steps have the same power: one stands for
        them, so that years without readings cost nothing.
        """
        begin_s = max(self.begin_s - around_s, self.first_s)
        end_s = min(self.end_s + around_s, curve.t_s[-1])
        whole = np.ceil((end_s - begin_s) / step_s) - 1
        at = np.unique(np.floor((curve.t_s[is_new] - begin_s) / step_s).clip(0.0))
        steps = np.append(at, at + 1)
        steps = steps[steps < whole]
        apart_s = (begin_s + step_s) - begin_s  # as np.arange does, to the last digit
        joules = curve.at(begin_s + apart_s * (steps + 1))
        return (joules - curve.at(begin_s + apart_s * steps)) / step_s

    def _add_test_readings(self, curve, near: slice, is_new: np.ndarray) -> None:
        """Add what the tests of movement, monotony and power ask."""
        t_s = curve.t_s[near]
        values = curve.values[near]
        amounts = curve.amounts_of_readings[near]
        self.falls += int((amounts < 0)[is_new[near]].sum())
        begins = np.append(0, np.flatnonzero(np.diff(values)) + 1)
        seconds_s = 1.0
        if self.is_counter:
            added_W = amounts[begins] / (
                np.diff(t_s[begins], prepend=-np.inf) + self.late_s
            )
            self.peak_W = added_W[is_new[near][begins]].max(initial=self.peak_W)
            seconds_s = max(1.0, 10 * self.late_s)
        seconds_W = self._step_powers_W(curve, JUDGED_MARGIN_S, seconds_s, is_new)
        self.peak_W = seconds_W.max(initial=self.peak_W)
        longer_W = self._step_powers_W(curve, JUDGED_MARGIN_S, HALF_MINUTE_S, is_new)
        self.half_minute_W = longer_W.max(initial=self.half_minute_W)
        self.least = values.min(initial=self.least)
        self.most = values.max(initial=self.most)
        ends = np.append(begins[1:], len(values)) - 1
        runs = np.column_stack([values[begins], t_s[ends] - t_s[begins]])
        runs = runs[runs[:, 1] > 0]
        self.zero_s = runs[runs[:, 0] == 0, 1].max(initial=self.zero_s)
        # keep the (reading, duration) that no higher reading lasts as long as
        runs = np.concatenate([self.still, runs])
        runs = runs[np.argsort(-runs[:, 0])]
        before_s = np.maximum.accumulate(np.append(0.0, runs[:, 1]))[:-1]
        self.still = runs[runs[:, 1] > before_s]
