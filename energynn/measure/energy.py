"""From samples on disk to energies: every joule in a record comes from these functions and can be derived again."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from energynn.measure import plausible
from energynn.measure.edges import CounterEdges, MeanPower, MeanPowerEdges, ShapedEdges
from energynn.measure.plausible import NORMAL_95, Judgement, from_zero
from energynn.measure.samples import Instants, Samples, read_events, read_hosts, times_of_hosts

JOULE_PER_KWH = 3.6e6
SECOND_PER_HOUR = 3600.0
COMPONENTS = ("gpu", "cpu", "ram")
# From strongest to weakest: a sum is no better than its weakest part.
PROVENANCES = ("measured", "published", "estimated", "simulated")
# Share of an energy by which a sensor may be wrong throughout, which no repetition makes smaller. Measured: what MLPerf
# grants its power meters; NVML and RAPL were found within it (arXiv 2312.02741). Estimated: the assumed watts per core
# are those of another CPU, and off by up to half. A simulated sensor is what it says.
SYSTEMATIC = {"measured": 0.05, "published": 0.05, "estimated": 0.5, "simulated": 0.0}
SMOOTHING = 20  # counter steps to each side over which the counter corrects the integral of the power
TICK_S = 0.01  # resolution of the busy time in /proc/stat
DISAGREEMENT = 0.02  # of counter and power, from which on a record says so
WHOLE_CHECK = 0.99  # the coverage from which on a power tells whether its counter is right
# A power is aliased if it varies by more than 5 % and half the sampling rate would lose 40 % of its variance.
LEAST_VARIATION, MOST_ALIASING = 0.05, 0.4
# The distance of a reading from the line between its neighbours has 1.5 times the variance of the noise of one reading.
# For a jump between two readings, it has three times that of the integral's error. 1.9 lies between them, so that
# intervals hold for both; notebook 80 and tests/measure/test_uncertainty.py show the coverage.
NOISE_OFF_THE_LINE, BETWEEN_NOISE_AND_JUMP = 1.5, 1.9
# A counter that power explains leaves the noise of its own steps, and some more by chance.
MOST_UNEXPLAINED = 1.3
# A counter shows what was true at most one of its steps ago; the estimate of this lag may be a fifth off.
LAG_TOLERANCE = 0.2
# The time of a counter's knot is off by no more than half an update: 95 % of such errors lie within 1.85 sd, not 1.96.
BOUNDED = 0.94
# A power is renewed less often than it is read where of its readings so few are new, in s so often, and so evenly: the
# least time between two new ones as a share of the mean, or the variance of three such times by that of mere chance.
MOST_NEW, RENEWED_S, EVENLY, BY_CHANCE = 0.82, 1.5, 0.55, 0.5
# A power is fresh if it is renewed in less of the time between two readings; how sure the time of another one is.
FRESH, LATE = 0.3, 0.2
UNSHARED = 10_000  # values that BLAS does not share out to threads
FINER = 5.0  # readings of a counter further apart than so many of its own steps need no power to shape them


@dataclass(frozen=True, eq=False)
class Power:
    """Readings of a power: read, when; watts: (readings,). What follows is worked out once for all who ask.

    shown: when it was read, where ``read`` is when the device renewed what it showed (``renewed``); else None.
    """

    read: Instants
    watts: np.ndarray
    shown: Instants | None = None
    late_s: float = 0.0

    @cached_property
    def off_the_line_W(self) -> np.ndarray:
        """(readings - 2,): how far each inner reading is from the straight line between its two neighbours."""
        watts, weights = self.watts, self.read.weights
        return watts[1:-1] - (1 - weights) * watts[:-2] - weights * watts[2:]

    def variance_J2(self) -> np.ndarray:
        """(readings,): what each reading adds to the variance of the power's integral."""
        variance_J2 = np.zeros(len(self.watts))
        if len(self.watts) > 2:
            variance_J2[1:-1] = self.off_the_line_W**2 * self.read.widths_s**2 / BETWEEN_NOISE_AND_JUMP
        return variance_J2

    @cached_property
    def missed_J2(self) -> np.ndarray:
        """(readings + 1,): what this adds up to."""
        return from_zero(self.variance_J2())

    def gaps(self, longest_ns: float) -> np.ndarray:
        """(readings - 1,): after which of them nothing was read for too long."""
        shown, are_gaps = self.shown or self.read, np.zeros(len(self.watts) - 1, dtype=bool)
        last_ns = shown.ns[:-1][shown.apart_ns > longest_ns]
        are_gaps[np.searchsorted(self.read.ns[1:-1], last_ns, side="right")] = True
        return are_gaps

    def renewed(self) -> Power | None:
        """The same without repetitions, where the device renews its power less often than it is read; else None."""
        ns, new = self.read.ns, np.flatnonzero(self.watts[1:] != self.watts[:-1]) + 1
        if len(new) < 4 or len(new) - 1 > MOST_NEW * (new[-1] - new[0]) or self.read.apart_ns.min() < 0:
            return None
        apart, apart_ns, period_ns = np.diff(new), np.diff(ns[new]), np.median(self.read.apart_ns)
        every_ns = apart_ns[apart_ns <= 1.5 * np.median(apart_ns) + period_ns].mean()
        if every_ns > 3 * period_ns:
            is_held = np.percentile(apart_ns, 5) > EVENLY * every_ns and every_ns < RENEWED_S * 1e9
        else:
            is_held = np.var(new[3:] - new[:-3]) < BY_CHANCE * 3 * apart.mean() * (apart.mean() - 1)
        if not is_held or self._is_coarse(new):
            return None
        # Each value at the middle of when it may have been renewed. What was renewed several times, the same each time,
        # was so until the renewal before the next value.
        begins_ns = ns[new] - np.minimum(self.read.apart_ns[new - 1], every_ns) / 2
        ends_ns = np.append(np.minimum(begins_ns - every_ns, ns[new - 1]), ns[-1] - every_ns)
        begins_ns = np.append(min(ns[0], ends_ns[0]), begins_ns)
        stays = ends_ns - begins_ns > 0.75 * every_ns
        knots_ns = np.sort(np.append(begins_ns, ends_ns[stays])).astype(np.int64)
        watts = np.repeat(self.watts[np.append(0, new)], np.where(stays, 2, 1))
        knots_ns[0], watts[0] = ns[0], np.interp(ns[0], knots_ns, watts)
        return Power(Instants(knots_ns), watts, shown=self.read)

    def not_fresh(self, update_s: float | None, period_s: float) -> Power | None:
        """The same at the middle of when a device that renews it every ``update_s`` may have; None where that is soon.

        Hardly a reading repeats here, so that it is not renewed less often than it is read, whatever was seen before.
        """
        late_s = min(update_s or 0.0, period_s)
        if late_s < FRESH * period_s or self._is_coarse(np.flatnonzero(self.watts[1:] != self.watts[:-1]) + 1):
            return None
        return Power(Instants(self.read.ns - int(late_s * 5e8)), self.watts, shown=self.read, late_s=late_s)

    def _is_coarse(self, new: np.ndarray) -> bool:
        """Whether readings that are new, by their numbers, are so by the unit, mostly, or a load without noise."""
        steps_W = np.abs(self.watts[new] - self.watts[new - 1]).round(6)
        return len(np.unique(steps_W)) < 4 or np.median(steps_W) == steps_W.min()

    def at(self, read: Instants) -> Power | None:
        """The same at the instants of another sensor; None where there is no reading at one of them."""
        if read is self.read:
            return self
        where = np.minimum(np.searchsorted(self.read.ns, read.ns), len(self.watts) - 1)
        return Power(read, self.watts[where]) if (self.read.ns[where] == read.ns).all() else None


@dataclass(frozen=True)
class Curve:
    """Cumulative energy of one sensor over its host's monotonic clock, linear between its knots.

    t_ns, energy_J, variance_J2: (knots,), the last the cumulative variance of what lies between the knots. An edge of a
    window has a standard deviation of ``edge_s`` in time and, by ``edges``, in energy; ``lag_s`` is one for both edges.
    added: knots before the first and after the last that the sensor gave. read, failed_ns: when the sensor was read,
    well and in vain; power: what a power sensor read; range_W: see ``plausible.Judgement``.
    """

    sensor: dict
    host: str
    t_ns: np.ndarray
    energy_J: np.ndarray
    variance_J2: np.ndarray
    read: Instants
    failed_ns: np.ndarray
    longest_ns: float
    period_s: float
    edge_s: float = 0.0
    edges: CounterEdges | ShapedEdges | None = None
    lag_s: float = 0.0
    added: tuple[int, int] = (0, 0)
    range_W: float = 0.0
    power: Power | None = None

    @cached_property
    def from_first_ns(self) -> np.ndarray:
        """The knots in ns since the first, as numpy interpolates between them."""
        instants = self.read if self.t_ns is self.read.ns else Instants(self.t_ns)
        return instants.from_first_ns

    def at(self, t_ns) -> np.ndarray:
        """Energy in J since the first reading, at instants of the host's monotonic clock."""
        return np.interp(np.asarray(t_ns) - self.t_ns[0], self.from_first_ns, self.energy_J)

    def between(self, start_ns: int, end_ns: int) -> tuple[float, float]:
        """Energy in a window in J, edges interpolated, and its statistical standard deviation in J."""
        edges_ns = np.array([start_ns, end_ns])
        first_J, last_J = self.at(edges_ns)
        around_ns = 2.5e9 * self.period_s
        edge_W = (self.at(edges_ns + around_ns) - self.at(edges_ns - around_ns)) / (2 * around_ns / 1e9)
        inside_J2 = np.diff(np.interp(edges_ns - self.t_ns[0], self.from_first_ns, self.variance_J2))[0]
        edge_J, step_J = self._at_edges(edges_ns)
        edges_J2 = ((self.edge_s * edge_W) ** 2 + edge_J**2).sum() + (self.lag_s * (edge_W[1] - edge_W[0])) ** 2
        return float(last_J - first_J), float(np.sqrt(inside_J2 + edges_J2 + (step_J**2).sum()))

    def _at_edges(self, edges_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Standard deviation in J of each edge, and what is added to it where the power steps there."""
        if self.edges is None:
            return np.zeros(len(edges_ns)), np.zeros(len(edges_ns))
        own = len(self.t_ns) - sum(self.added)
        around = self._knot_before(edges_ns) + np.array([[0], [1]])
        around_J = self.edges.edge_J(np.clip(around - self.added[0], 0, own - 1))
        ns = self.from_first_ns[around]
        edge_J = [np.interp(*each) for each in zip(edges_ns - self.t_ns[0], ns.T, around_J.T, strict=True)]
        # A knot may lie on the other side of the edge than it seems.
        near_ns = edges_ns + 2e9 * self.edge_s * np.array([[-1], [0], [1]])
        between = np.clip(self._knot_before(near_ns) - self.added[0], 0, own - 2)
        return np.array(edge_J), self.edges.step_J(between).max(axis=0)

    def _knot_before(self, t_ns: np.ndarray) -> np.ndarray:
        """Number of the last knot before an instant, of all but the last knot."""
        return np.clip(np.searchsorted(self.t_ns, t_ns, side="right") - 1, 0, len(self.t_ns) - 2)

    def coverage(self, start_ns: int, end_ns: int) -> float:
        """Share of a window that lies between readings no further apart than the longest allowed, and none failed."""
        is_gap = self.read.apart_ns > self.longest_ns
        failed = np.searchsorted(self.read.ns, self.failed_ns, side="right") - 1
        is_gap[failed[(failed >= 0) & (failed < len(is_gap))]] = True
        gaps = np.flatnonzero(is_gap)
        begins_ns = np.clip(self.read.ns[gaps], start_ns, end_ns)
        ends_ns = np.clip(self.read.ns[gaps + 1], start_ns, end_ns)
        first_ns, last_ns = np.clip(self.read.ns[[0, -1]], start_ns, end_ns)
        return float((last_ns - first_ns - (ends_ns - begins_ns).sum()) / (end_ns - start_ns))


def curves(samples: Samples, judged: list[Judgement] | None = None) -> list[Curve]:
    """The energy of every sensor of a host that has one; ``judged``: what `plausible.judge` says of the samples."""
    judged = plausible.judge(samples) if judged is None else judged
    powers, shapes = {}, {}
    for column, judgement in enumerate(judged):
        sensor = judgement.sensor
        if sensor["kind"] == "power" and not judgement.is_dead:
            watts = judgement.of(samples.readings[:, column]) * sensor["to_SI"]
            power = Power(judgement.instants(samples), watts)
            powers[column] = power.renewed() or power.not_fresh(sensor.get("update_s"), samples.period_s) or power
            # What is a mean, or stays while the counter moves, does not tell what was between the counter's steps.
            if sensor.get("checks") and not (_is_averaged(sensor) or powers[column].shown or samples.thinned_s):
                shapes[sensor["checks"]] = powers[column]
    made = []
    for column, judgement in enumerate(judged):
        if not judgement.is_dead:
            power = powers.get(column) or shapes.get(judgement.sensor["id"])
            curve = _curve(judgement, samples, column, power)
            made.append(_to_the_ends(curve, samples.t_ns[0], samples.t_ns[-1]))
    return made


def _to_the_ends(curve: Curve, first_ns: int, last_ns: int) -> Curve:
    """A sensor that fell silent before its host did goes on with the power of its last second, or anything it had."""
    if curve.t_ns[-1] < curve.read.ns[-1]:  # its device has renewed nothing since
        curve = _prolonged(curve, -1, curve.read.ns[-1])
    if curve.read.ns[0] - first_ns > curve.longest_ns:
        curve = _prolonged(curve, 0, first_ns)
    if last_ns - curve.read.ns[-1] > curve.longest_ns:
        curve = _prolonged(curve, -1, last_ns)
    return curve


def _over_edges(curve: Curve, start_ns: int, end_ns: int) -> Curve:
    """A window may begin before a power's first reading, or end after its last: less than a period is no gap."""
    period_ns = int(curve.period_s * 1e9)
    if curve.power and 0 < curve.t_ns[0] - start_ns:
        curve = _prolonged(curve, 0, max(start_ns, curve.t_ns[0] - period_ns))
    if curve.power and 0 < end_ns - curve.t_ns[-1]:
        curve = _prolonged(curve, -1, min(end_ns, curve.t_ns[-1] + period_ns))
    return curve


def _prolonged(curve: Curve, edge: int, end_ns: int) -> Curve:
    """A curve with one more knot beyond its first (``edge`` 0) or last (-1)."""
    length_ns = end_ns - curve.t_ns[edge]
    inner_ns = np.clip(curve.t_ns[edge] - np.sign(length_ns) * 1e9, curve.t_ns[0], curve.t_ns[-1])
    power_W = (curve.energy_J[edge] - curve.at(inner_ns)) / (curve.t_ns[edge] - inner_ns)
    sd_W = max(plausible.power_range_W((curve.t_ns - curve.t_ns[0]) / 1e9, curve.energy_J), curve.range_W)
    at, (before, after) = 0 if edge == 0 else len(curve.t_ns), curve.added
    more_J2 = (sd_W * length_ns / 1e9) ** 2 * np.sign(length_ns)
    return replace(
        curve,
        t_ns=np.insert(curve.t_ns, at, end_ns),
        energy_J=np.insert(curve.energy_J, at, curve.energy_J[edge] + power_W * length_ns),
        variance_J2=np.insert(curve.variance_J2, at, curve.variance_J2[edge] + more_J2),
        added=(before + 1, after) if edge == 0 else (before, after + 1),
    )


def _curve(judgement: Judgement, samples: Samples, column: int, power: Power | None) -> Curve:
    """The energy of one sensor; ``power``: what it reads, or its device shows beside a counter."""
    sensor, is_power = judgement.sensor, judgement.sensor["kind"] == "power"
    read = (power.shown or power.read) if is_power else judgement.instants(samples)
    failed_ns = samples.t_ns[~judgement.good]
    if judgement.unknown is not None and judgement.unknown.any():
        failed_ns = np.union1d(failed_ns, (read.ns[:-1] + read.apart_ns // 2)[judgement.unknown])
    reads = {
        "sensor": sensor,
        "host": samples.host,
        "read": read,
        "failed_ns": failed_ns,
        "longest_ns": samples.longest_ns,
        "period_s": samples.period_s,
        "range_W": judgement.range_W,
    }
    if sensor["kind"] == "energy":
        return _counter_curve(reads, judgement, power and power.at(read))
    if sensor["kind"] == "busy":
        return _busy_curve(reads, judgement.of(samples.readings[:, column]))
    if _is_averaged(sensor):
        return _averaged_power_curve(reads, power)
    return _power_curve(reads, power)


def _is_averaged(sensor: dict) -> bool:
    """Whether a power is a mean over the last second, as NVML's on most GPUs."""
    return "average over 1 s" in (sensor.get("notes") or {}).get("power", "")


def _power_curve(reads: dict, power: Power) -> Curve:
    """The integral of the power by the trapezoidal rule.

    How far a reading lies from the line between its neighbours tells noise and what happened between the readings;
    over a gap the power may have been anything that it was elsewhere.
    """
    read, watts, variance_J2 = power.read, power.watts, power.missed_J2[1:]
    energy_J = from_zero(read.apart_s * (watts[1:] + watts[:-1]) / 2)
    gaps = power.gaps(reads["longest_ns"])
    if gaps.any():
        variance_J2 = power.variance_J2()
        variance_J2[1:][gaps] = (read.apart_s[gaps] * max(watts.std(), reads["range_W"])) ** 2
        variance_J2 = np.cumsum(variance_J2)
    more = {"variance_J2": variance_J2, "edge_s": LATE * power.late_s, "power": power}
    return Curve(**reads, t_ns=read.ns, energy_J=energy_J, **more)


def _averaged_power_curve(reads: dict, power: Power) -> Curve:
    """A power that is a mean over the last second: that second's energy, and the integral of what was before it."""
    read, watts = power.read, power.watts
    noise_W2 = np.mean(power.off_the_line_W**2) / NOISE_OFF_THE_LINE if len(watts) > 2 else 0.0
    mean = MeanPower(read.seconds, watts, noise_W2)
    energy_J, variance_J2 = mean.energy_J(), np.zeros(len(watts))
    gaps = power.gaps(reads["longest_ns"])
    if gaps.any():
        variance_J2[1:][gaps] = (np.diff(read.seconds)[gaps] * max(watts.std(), reads["range_W"])) ** 2
    more = {"variance_J2": np.cumsum(variance_J2), "edge_s": LATE * power.late_s, "power": power}
    return Curve(**reads, t_ns=read.ns, energy_J=energy_J, edges=MeanPowerEdges(read.ns, energy_J, power=mean), **more)


def _aliasing(watts: np.ndarray, off_the_line_W: np.ndarray) -> dict:
    """Share of the power's variance that half the sampling rate would lose: 0 for a smooth power, 1 for noise.

    Near 1 neighbouring readings have nothing to do with each other: the load changes faster than it is sampled. A power
    that varies, and does so mostly between one reading and the next, is aliased.
    """
    variance_W2 = watts.var() if len(watts) >= 8 else 0.0
    if variance_W2 == 0:
        return {"aliasing": 0.0, "aliased": False}
    share = float(np.mean(off_the_line_W**2) / NOISE_OFF_THE_LINE / variance_W2)
    varies = np.sqrt(variance_W2) > LEAST_VARIATION * abs(watts.mean())
    return {"aliasing": share, "aliased": bool(share > MOST_ALIASING and varies)}


def _busy_curve(reads: dict, core_seconds: np.ndarray) -> Curve:
    """The stated model: idle power of all cores, and (full - idle) power while a core is busy."""
    model, t_ns = reads["sensor"]["model"], reads["read"].ns
    more_W = model["full_W_per_core"] - model["idle_W_per_core"]
    idle_J = model["idle_W_per_core"] * model["cores"] * (t_ns - t_ns[0]) / 1e9
    energy_J = idle_J + more_W * (core_seconds - core_seconds[0])
    edge_J = more_W * TICK_S * np.sqrt(model["cores"] / 12)
    edges = CounterEdges(t_ns, energy_J, always_J=edge_J)
    return Curve(**reads, t_ns=t_ns, energy_J=energy_J, variance_J2=np.zeros(len(t_ns)), edges=edges)


def _counter_curve(reads: dict, judgement: Judgement, power: Power | None) -> Curve:
    """A counter's differences, never turned into power first; its own steps in time are finer than they look.

    A counter that changes every 100 ms says nothing between its steps. So only readings that changed are knots, half
    an update late on average. Where the power of the same device is read too, and explains the steps, the power gives
    the shape between them and the counter, smoothed over some steps, the energy.
    """
    read, energy_J, period_s = reads["read"], judgement.energy_J, reads["period_s"]
    t_ns = read.ns
    new = np.flatnonzero(np.diff(energy_J) > 0) + 1
    is_finer = period_s > FINER * (reads["sensor"].get("update_s") or period_s)  # than readings of the power can tell
    if not is_finer and power and len(new) > SMOOTHING:
        breaks = (read.apart_ns > reads["longest_ns"]) | judgement.unknown
        shaped = _shaped_by_power(power, energy_J, new, breaks)
        if shaped is not None:
            return Curve(**reads, t_ns=t_ns, variance_J2=judgement.variance_J2, **shaped)
    update_s, since_s = reads["sensor"].get("update_s"), read.apart_s[new - 1]  # the reading before
    is_known = update_s is not None or len(new) <= 0.9 * (len(t_ns) - 1)
    if update_s is None:
        update_s = _update_seen_in_samples(t_ns, new, period_s)
    late_s = np.minimum(np.concatenate([[np.inf], since_s]), update_s)  # at most
    edge_s = BOUNDED * np.sqrt(np.mean(late_s[1:] ** 2) / 12 * 2 / 3)
    if not is_known:
        late_s[:] = 0.0  # it may be a thousandth of the period
    knots = np.concatenate([[0], new])
    knots_ns = t_ns[knots] - (late_s * 5e8).astype(np.int64)
    knots_J, variance_J2 = energy_J[knots], judgement.variance_J2[knots]
    edges, added = CounterEdges(knots_ns, knots_J, edge_s), (0, 0)
    if t_ns[-1] > knots_ns[-1]:
        # The last reading is a knot, too: it goes on as before, unless the counter has stood still for some steps.
        more_J = np.diff(knots_J[-2:]) / np.diff(knots_ns[-2:]) * (t_ns[-1] - knots_ns[-1])
        if t_ns[-1] - t_ns[new[-1]] > 3e9 * max(update_s, period_s):
            more_J = energy_J[-1:] - knots_J[-1]
        knots_ns, knots_J = np.append(knots_ns, t_ns[-1]), np.append(knots_J, knots_J[-1] + more_J)
        variance_J2, added = np.append(variance_J2, judgement.variance_J2[-1]), (0, 1)
    found = {"energy_J": knots_J, "variance_J2": variance_J2, "edge_s": edge_s, "edges": edges, "added": added}
    return Curve(**reads, t_ns=knots_ns, **found)


def _update_seen_in_samples(t_ns: np.ndarray, new: np.ndarray, period_s: float) -> float:
    """How often a counter changes, in s, where nobody has watched it or it is too slow for that."""
    if len(new) / max(1, len(t_ns) - 1) > 0.9:
        return min(period_s, 0.1)
    return float(np.median(np.diff(t_ns[new])) / 1e9) if len(new) > 2 else 0.0


def _shaped_by_power(power: Power, energy_J, new, breaks) -> dict | None:
    """The power's integral, moved to the counter's level: energy, its edges, and the sd of the counter's lag in s.

    None if the power does not explain the counter's steps, as where it is an average over a second.
    """
    seconds, watts = power.read.seconds, power.watts
    integral_J = from_zero(np.diff(seconds) * (watts[1:] + watts[:-1]) / 2)
    blocks = np.unique(np.searchsorted(new, np.flatnonzero(breaks) + 1))  # nothing is smoothed over a gap
    knots_s, knot_W = seconds[new], watts[new]
    apart_J = energy_J[new] - integral_J[new]
    spacing_s = float(np.median(np.diff(knots_s)))
    # The counter shows what was true some time ago, at most one spacing. Where the power varies, the difference between
    # the two follows it, and tells the lag. Where the power is constant, the lag has no effect.
    smooth_J, smooth_W = _local_line(knots_s, np.stack([apart_J, knot_W]), blocks)
    rough_J, rough_W = apart_J - smooth_J, knot_W - smooth_W
    noise_J = spacing_s / np.sqrt(12) * abs(knot_W.mean())
    prior = (noise_J / (spacing_s / 4)) ** 2
    told = _dot(rough_W, rough_W) + prior
    lag_s = spacing_s / 2 - _dot(rough_W, rough_J + spacing_s / 2 * rough_W) / told
    if not -LAG_TOLERANCE * spacing_s <= lag_s <= (1 + LAG_TOLERANCE) * spacing_s:
        return None
    left_J = float(np.std(rough_J + lag_s * rough_W))
    if left_J > MOST_UNEXPLAINED * noise_J:
        return None
    lag_sd_s = noise_J / np.sqrt(told)
    reach_s = SMOOTHING * spacing_s
    edges = ShapedEdges(power.read.ns, seconds, watts, new, left_J, power.missed_J2, reach_s)
    return {
        "energy_J": integral_J + np.interp(seconds, knots_s, smooth_J + lag_s * smooth_W),
        "edges": edges,
        "lag_s": lag_sd_s,
    }


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """The scalar product, part by part: threads of BLAS take a processor each for some time after what they shared.

    Nor does what it rounds to depend on the number of cores.
    """
    return sum(np.dot(a[at : at + UNSHARED], b[at : at + UNSHARED]) for at in range(0, len(a), UNSHARED))


def _local_line(x: np.ndarray, y: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """At each point the straight line fitted to its neighbours, ``SMOOTHING`` to each side within its block.

    y: (..., points), each line of its own; blocks: at which points one begins.
    """
    result = np.empty(y.shape)
    for begin, end in pairwise([0, *blocks.tolist(), len(x)]):
        xs, ys = x[begin:end], y[..., begin:end]
        xs = xs - xs[:1]  # a block may be empty
        count = _count_around(len(xs))
        mean_x, mean_y = _sum_around(xs) / count, _sum_around(ys) / count
        spread = _sum_around(xs * xs) / count - mean_x**2
        slope = _sum_around(xs * ys) / count
        slope -= mean_x * mean_y
        slope /= np.maximum(spread, 1e-9)
        slope[..., spread <= 1e-9] = 0.0
        result[..., begin:end] = mean_y + slope * (xs - mean_x)
    return result


def _count_around(points: int) -> np.ndarray:
    """How many points are no further from each of some than ``SMOOTHING``, itself included."""
    before = np.minimum(np.arange(float(points)), SMOOTHING)
    return before + before[::-1] + 1.0


def _sum_around(values: np.ndarray) -> np.ndarray:
    """At each point (the last axis) the sum of these neighbours."""
    points = values.shape[-1]
    sums = np.zeros((*values.shape[:-1], points + 2 * SMOOTHING + 1))  # its ends go on as they are
    np.cumsum(values, axis=-1, out=sums[..., SMOOTHING + 1 : SMOOTHING + 1 + points])
    sums[..., SMOOTHING + 1 + points :] = sums[..., [SMOOTHING + points]]
    return sums[..., 2 * SMOOTHING + 1 :] - sums[..., :points]


# --------------------------------------------------------------------------------------------------- energy of windows


def energy_of_sensors(found: list[Curve], start_ns: int, end_ns: int) -> list[dict]:
    """Energy of each sensor between two instants of its host's monotonic clock.

    Each entry: the sensor's description, ``energy_J``, ``statistical_J`` (half the 95 % interval: sampling, edges,
    gaps), ``samples`` inside the window, ``failed_reads``, ``coverage``, and of power sensors ``aliasing``.
    """
    entries = []
    for curve in found:
        first, after = np.searchsorted(curve.read.ns, start_ns), np.searchsorted(curve.read.ns, end_ns, side="right")
        entry = {**curve.sensor, "host": curve.host, "samples": max(0, int(after - first))}
        entry["failed_reads"] = int(((curve.failed_ns >= start_ns) & (curve.failed_ns <= end_ns)).sum())
        if end_ns > start_ns:
            entry["energy_J"], sd_J = _over_edges(curve, start_ns, end_ns).between(start_ns, end_ns)
            entry["statistical_J"] = NORMAL_95 * sd_J
            entry["coverage"] = curve.coverage(start_ns, end_ns)
            if curve.power:
                first, after = np.searchsorted(curve.power.read.ns, [start_ns, end_ns + 1])
                off_the_line_W = curve.power.off_the_line_W[first : max(first, after - 2)]
                entry |= _aliasing(curve.power.watts[first:after], off_the_line_W)
        entries.append(entry)
    return entries


def totals(entries: list[dict], window_s: float, doubtful: dict[str, float] | None = None) -> dict:
    """Energies, their uncertainties and mean powers per component, and their sum, by the primary sensors of all hosts.

    Statistical uncertainties are independent, systematic ones are not: several sensors of one kind are wrong together.
    The total's provenance is the weakest of its parts. A component without a sensor is absent. ``doubtful`` (see
    ``doubtful_J``) widens the intervals by half as much again, since no device is quite as another.
    """
    doubtful = {component: joules for component, joules in (doubtful or {}).items() if np.isfinite(joules)}
    result: dict = {}
    for component in COMPONENTS:
        own = [e for e in entries if e["component"] == component and e["primary"] and "energy_J" in e]
        if own:
            result |= _sum(component, own, window_s, doubtful.get(component, 0.0))
    parts = [e for e in entries if e["primary"] and "energy_J" in e]
    return result | (_sum("total", parts, window_s, sum(doubtful.values())) if parts else {})


def _sum(name: str, entries: list[dict], window_s: float, doubtful_J: float) -> dict:
    energy_J = sum(entry["energy_J"] for entry in entries)
    sampled_J = float(np.sqrt(sum(e.get("statistical_J", 0.0) ** 2 for e in entries)))
    return {
        f"energy_{name}_J": energy_J,
        f"energy_{name}_provenance": max((entry["provenance"] for entry in entries), key=PROVENANCES.index),
        f"energy_{name}_statistical_J": sampled_J + 1.5 * doubtful_J,
        f"energy_{name}_systematic_J": sum(SYSTEMATIC[e["provenance"]] * e["energy_J"] for e in entries),
        f"mean_power_{name}_W": energy_J / window_s,
    }


def cross_checks(entries: list[dict]) -> list[dict]:
    """Where a device has a counter and a power, both energies and by what share the power's is larger.

    A gap is flagged if it is more than ``DISAGREEMENT`` and more than the intervals of both leave open.
    """
    by_id = {(entry["host"], entry["id"]): entry for entry in entries}
    checks = []
    for entry in entries:
        counter = by_id.get((entry["host"], entry.get("checks")))
        if entry["primary"] or not counter or "energy_J" not in entry or "energy_J" not in counter:
            continue
        shown_J = max(counter["energy_J"], 1e-3)  # the least that a counter of NVML shows
        gap = entry["energy_J"] / shown_J - 1
        open_J = np.hypot(entry.get("statistical_J", 0.0), counter.get("statistical_J", 0.0))
        checks.append(
            {
                "host": entry["host"],
                "device": entry["device"],
                "counter_J": counter["energy_J"],
                "power_J": entry["energy_J"],
                "gap": gap,
                "flagged": bool(abs(gap) > DISAGREEMENT and abs(gap) > open_J / shown_J),
            }
        )
    return checks


def doubtful_J(entries: list[dict], checks: list[dict]) -> dict[str, float]:
    """Component -> energy that may be missing or false: of sensors without one, and where counter and power contradict.

    A sensor without energy would have had that of the others of its component, on the mean; infinite if there are
    none. All DRAM together may be absent, as on a machine that has no sensor of it.
    """
    doubtful: dict[str, float] = {}
    primary = [entry for entry in entries if entry["primary"]]
    for component in COMPONENTS:
        own = [entry for entry in primary if entry["component"] == component]
        known_J = [entry["energy_J"] for entry in own if "energy_J" in entry]
        if known_J and len(known_J) < len(own):
            doubtful[component] = float(np.mean(known_J)) * (len(own) - len(known_J))
        elif own and not known_J and component != "ram":
            doubtful[component] = float("inf")
    whole = {(e["host"], e["device"]) for e in entries if e.get("checks") and e.get("coverage", 0.0) >= WHOLE_CHECK}
    contradicted: dict[tuple, float] = {}  # of a device that has two powers, by the one that differs more
    for check in checks:
        device, off_J = (check["host"], check["device"]), abs(check["power_J"] - check["counter_J"])
        if check["flagged"] and abs(check["gap"]) > SYSTEMATIC["measured"] and device in whole:
            contradicted[device] = max(off_J, contradicted.get(device, 0.0))
    if contradicted:
        doubtful["gpu"] = doubtful.get("gpu", 0.0) + sum(contradicted.values())
    return doubtful


def energy_of_phases(
    phases: tuple[np.ndarray, np.ndarray, np.ndarray, list[str]],
    window_ns: tuple[int, int],
    shares: dict[str, list[tuple[Curve, float]]],
) -> list[dict]:
    """Time and energy of each phase of one rank within a window; ``idle`` is what lies in no phase.

    ``shares``: component -> (curve, share) of the sensors whose energy is this rank's: all of its device's, its part
    of what its host's ranks have in common. Phases shorter than a sampling period get the mean power around them.
    """
    kinds, begin_ns, end_ns, names = phases
    start_ns, stop_ns = window_ns
    begin_ns, end_ns = np.clip(begin_ns, start_ns, stop_ns), np.clip(end_ns, start_ns, stop_ns)

    def by_phase(amounts: np.ndarray) -> np.ndarray:
        return np.bincount(kinds, weights=amounts, minlength=len(names))

    phases_s = by_phase((end_ns - begin_ns) / 1e9)
    times_s = np.append(phases_s, (stop_ns - start_ns) / 1e9 - phases_s.sum())
    joules = {}
    for component, parts in shares.items():
        phases_J = sum(share * by_phase(curve.at(end_ns) - curve.at(begin_ns)) for curve, share in parts)
        whole_J = sum(share * (curve.at(stop_ns) - curve.at(start_ns)) for curve, share in parts)
        joules[f"energy_{component}_J"] = np.append(phases_J, whole_J - np.sum(phases_J))
    entries = []
    for index, phase in enumerate([*names, "idle"]):
        if times_s[index] > 0:
            energies = {name: float(values[index]) for name, values in joules.items()}
            entries.append({"phase": phase, "time_s": float(times_s[index]), **energies})
    return entries


def cost_so_far(folder: Path) -> dict:
    """``seconds`` and energies (``totals``) of all that was sampled to folder/samples-*.jsonl, cut calls included."""
    seconds, entries = 0.0, []
    for samples in read_hosts(folder):
        if len(samples.t_ns) > 1:
            window = int(samples.t_ns[0]), int(samples.t_ns[-1])
            seconds += (window[1] - window[0]) / 1e9
            entries += energy_of_sensors(curves(samples), *window)
    return {"seconds": seconds} | totals(entries, seconds)


def power_trace(run_dir: Path, period_s: float = 0.5) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Mean power in W of every sensor of a run in steps of ``period_s``; time 0 is the start of the training.

    Returns sensor id -> (t_s, power_W), each (steps,), t_s the middle of a step; of several hosts the id carries
    the host's name. Before the first and after the last sample there is nothing. Several hosts are put on one axis by
    their wall clocks: time 0 is where the first of them began.
    Of a long run only some lines are read. Then the steps are as long as these are apart, a warning says so, and peaks
    within a step are not seen; the mean power of a counter is exact.
    """
    hosts = read_hosts(run_dir, thinned=True)
    thinned_s = max((samples.thinned_s for samples in hosts), default=0.0)
    if thinned_s > period_s:
        period_s = thinned_s
        warnings.warn(f"{run_dir}: thinned, a sample in {period_s:.3g} s; peaks between are not seen", stacklevel=2)
    begun_ns = _training_begun(hosts, read_events(run_dir))
    traces = {}
    for samples in hosts:
        for curve in curves(samples):
            seconds = (curve.read.ns[[0, -1]] - begun_ns.get(curve.host, curve.read.ns[0])) / 1e9
            edges_s = np.arange(np.ceil(seconds[0] / period_s), np.floor(seconds[1] / period_s) + 1) * period_s
            energy_J = curve.at(curve.read.ns[0] + ((edges_s - seconds[0]) * 1e9).astype(np.int64))
            name = curve.sensor["id"] if len(hosts) == 1 else f"{curve.host}:{curve.sensor['id']}"
            traces[name] = ((edges_s[1:] + edges_s[:-1]) / 2, np.diff(energy_J) / period_s)
    return traces


def _training_begun(hosts: list[Samples], events: list[dict]) -> dict[str, int]:
    """When the training began on the first host, in ns of each host's own clock, by the wall clocks of the samples."""
    own_ns, wall_ns = times_of_hosts(events, "training_start"), {}
    ahead_ns = {samples.host: int(samples.wall_ns[0] - samples.t_ns[0]) for samples in hosts if len(samples.t_ns)}
    for host in own_ns.keys() & ahead_ns.keys():
        wall_ns[host] = own_ns[host] + ahead_ns[host]
    first_ns = min(wall_ns.values(), default=0)
    return {host: first_ns - ahead_ns[host] if host in wall_ns else own_ns[host] for host in own_ns}
