"""How far off the energy is at an edge of a window, worked out only near the edges: loads begin and end there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

AVERAGED_S = 1.0  # over which NVML averages the power of most GPUs
# All of the following by simulation: tests/measure/test_uncertainty.py shows what the intervals hold.
# The share of what the power misses between two corrections by the counter that stays.
MISSED_SHARE = 1 / 8
# A counter's steps are evenly spread, so that more of them vanish in a mean than of independent noise.
LEFT_SHARE = 0.6
# The sd of an edge at which a load begins or ends, in steps of the power x the time between two readings. The error is
# bounded there, too, and has one sign: straight lines are a (1 - a) off for counters, (1 - a)^2 / 2 for powers.
STEP_OF_COUNTER, STEP_OF_POWER = 0.175, 0.15
SMOOTH_SHARE = 0.8  # of a slope on both sides of an edge, which is no step at it
LITTLE_NOISE, MOST_KNOTS = 0.1, 8  # the share of a power below which its noise hides no step, and the most knots for it
NOISE_OF_STEP, LONGER = 3.0, 2.0  # sd of a knot's time: what makes no step, and what may be missing between two knots
BLURRED = 1.8  # what the variance of a power's mean has to be multiplied with, since its errors are rare and large


@dataclass(frozen=True)
class CounterEdges:
    """Edges of a counter: t_ns, energy_J (knots,), whose times are off by ``edge_s``, and any edge by ``always_J``."""

    t_ns: np.ndarray
    energy_J: np.ndarray
    edge_s: float = 0.0
    always_J: float = 0.0

    def edge_J(self, knots: np.ndarray) -> np.ndarray:
        """Standard deviation in J of an edge at some knots, by their numbers."""
        return np.full(knots.shape, self.always_J)

    def step_J(self, knots: np.ndarray) -> np.ndarray:
        """Standard deviation in J of an edge between some knots and the next ones, where the power steps at the edge.

        A load that begins at a share a of the time between two knots is a (1 - a) x step x time off the straight line.
        Knots that are off by ``edge_s`` show steps that there are not, and may be further apart than they seem.
        """
        apart_s = (self.t_ns[knots + 1] - self.t_ns[knots]) / 1e9
        noise_share = NOISE_OF_STEP * self.edge_s / apart_s
        step_W, knots_for_it = np.zeros(knots.shape), int(noise_share.max() / LITTLE_NOISE) + 1
        # A step that noise hides between neighbours is seen over some knots.
        for over in {1, min(knots_for_it, MOST_KNOTS)}:
            # Before its first knot, and after its last, the power may have been next to nothing.
            far_before, before = self._slope_W(knots - 3 * over, over), self._slope_W(knots - over, over)
            after, far_after = self._slope_W(knots + 1, over), self._slope_W(knots + 1 + 2 * over, over)
            over_W = _jump(far_before, before, after, far_after)
            is_step = over_W > noise_share / over * np.maximum(before, after)
            step_W = np.maximum(step_W, np.where(is_step, over_W, 0.0))
        return STEP_OF_COUNTER * step_W * (apart_s + LONGER * self.edge_s)

    def _slope_W(self, knots: np.ndarray, over: int) -> np.ndarray:
        """The power from some knots to those ``over`` further on, 0 where there are none."""
        first, last = (np.clip(ends, 0, len(self.t_ns) - 1) for ends in (knots, knots + over))
        more_J, seconds = self.energy_J[last] - self.energy_J[first], (self.t_ns[last] - self.t_ns[first]) / 1e9
        return np.divide(more_J, seconds, out=np.zeros(knots.shape), where=seconds > 0)


@dataclass(frozen=True)
class MeanPower:
    """A power that is a mean over the last second: seconds, watts (readings,), and the variance of its noise in W2.

    In its integral a reading counts for the middle of its second. So a step of the power is where it was at once, and
    is off, by what the mean blurs, only a second later; how far, the same second tells of the integral.
    """

    seconds: np.ndarray
    watts: np.ndarray
    noise_W2: float

    def until(self, instants_s: np.ndarray, integral_J: np.ndarray) -> np.ndarray:
        """The integral at some instants; before the first reading the power was what it says."""
        return np.interp(instants_s, self.seconds, integral_J) + np.minimum(instants_s, 0.0) * self.watts[0]

    def integral_J(self) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(np.diff(self.seconds) * (self.watts[1:] + self.watts[:-1]) / 2)])

    def energy_J(self) -> np.ndarray:
        """(readings,): the last second's energy, and the integral of what was before it."""
        return self.until(self.seconds - AVERAGED_S / 2, self.integral_J()) + AVERAGED_S * self.watts


@dataclass(frozen=True)
class MeanPowerEdges(CounterEdges):
    """Edges of a power that is a mean over the last second."""

    power: MeanPower | None = None

    def edge_J(self, knots: np.ndarray) -> np.ndarray:
        """Standard deviation in J of an edge at some knots, by their numbers."""
        power, integral_J = self.power, self.power.integral_J()
        earlier_s = power.seconds[knots] - AVERAGED_S
        blurred_J = power.until(earlier_s + AVERAGED_S / 2, integral_J)
        blurred_J -= power.until(earlier_s - AVERAGED_S / 2, integral_J)
        blurred_J -= AVERAGED_S * np.interp(earlier_s, power.seconds, power.watts)
        return np.sqrt(AVERAGED_S**2 * power.noise_W2 + BLURRED * blurred_J**2)


@dataclass(frozen=True)
class ShapedEdges:
    """Edges of a power's integral that a counter corrects: t_ns, seconds, watts, (readings,).

    new: the readings at which the counter changed; left_J: what the correction leaves; missed_J2: (readings,) what the
    power misses, cumulative; reach_s: over which the counter corrects, to each side.
    """

    t_ns: np.ndarray
    seconds: np.ndarray
    watts: np.ndarray
    new: np.ndarray
    left_J: float
    missed_J2: np.ndarray
    reach_s: float

    def edge_J(self, knots: np.ndarray) -> np.ndarray:
        """Standard deviation in J of an edge at some readings, by their numbers."""
        first = np.searchsorted(self.seconds, self.seconds[knots] - self.reach_s)
        last = np.searchsorted(self.seconds, self.seconds[knots] + self.reach_s)
        before, at, after = (np.searchsorted(self.new, readings) for readings in (first, knots, last))
        count = np.maximum(after - before, 1)
        off_centre = (after + before - 2 * at) / count
        worse = 1 + 3 * off_centre**2  # at its end a fitted line is known four times worse
        noise_J2 = LEFT_SHARE * self.left_J**2 / count
        return np.sqrt(worse * (noise_J2 + MISSED_SHARE * (self.missed_J2[last] - self.missed_J2[first])))

    def step_J(self, knots: np.ndarray) -> np.ndarray:
        """Standard deviation in J of an edge between some readings and the next ones, where the power steps there."""
        near = np.clip(np.stack([knots - 1, knots, knots + 1, knots + 2]), 0, len(self.watts) - 1)
        return STEP_OF_POWER * _jump(*self.watts[near]) * (self.t_ns[near[2]] - self.t_ns[near[1]]) / 1e9


def _jump(far_before, before, after, far_after) -> np.ndarray:
    """By how much more a value changes between two neighbours than it does, the same way, on either side of them."""
    step = after - before
    slope = np.sign(step) * (before - far_before + far_after - after) / 2
    return np.maximum(np.abs(step) - SMOOTH_SHARE * np.maximum(slope, 0.0), 0.0)
