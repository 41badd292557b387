"""Which readings of a sensor can be true: a counter that stands still or jumps, a power that no device can draw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from energynn.measure.samples import Instants, Samples

# What no device of its kind draws, in W, where its sensor knows no limit; and how far a reading may lie above a limit,
# which holds for a mean over some time only.
MOST_W = {"gpu": 3e3, "cpu": 2e3, "ram": 1e3}
ABOVE_LIMIT = 1.5
LEAST_SHARE = 0.002  # of its own power under load: a device that is on draws more, even asleep
UNDER_LOAD = 90  # the percentile of its power that is its power under load
# A counter that has not moved for so many of its usual steps, or so many seconds, stands still, unless it then catches
# up with this share of what it had in the second before or after. Its unit must be fine enough to show a hundredth of
# its mean power, or so many watts, in that time.
STILL_STEPS, STILL_S, CAUGHT_UP, UNITS, LEAST_W = 3, 1.5, 0.9, 100, 1.0
NORMAL_95 = 1.96
BRIDGED_BY_S, BRIDGED_SD = 1.0, 0.1  # what is lost has the mean power of so long before and after, and this relative sd
LEAST_OF_COUNTER = 0.99  # of its readings that tell something; below it, its device's power is better
FROZEN_S = 1.0  # the same power to the last digit for longer is looked at
FROZEN_RUNS = 5  # times as long as it ever was at such a power
ALIKE = 0.1  # share by which two powers are about the same
AWAKE = 1.05  # times its least power
BIN_S, BINS = 0.5, 4  # in which powers of several sensors are compared; more than so many make a stretch
FOLLOWS = 0.7  # correlation of two powers, one of which tells when the other should move
# By what factor an idle CPU may draw less than a busy one beside it, and a small one less than busy time has it.
UNLIKE_CPUS, UNLIKE_BUSY = 30, 10
ROUNDING = 1e-9  # share of a variance below which there is none


@dataclass
class Judgement:
    """What can be believed of one sensor.

    sensor: its description, with ``doubt`` in words where there is one, and ``primary`` where another took its place.
    good: (samples,) which readings can be true. unknown: (good - 1,) of a counter, between which of them the energy is
    unknown. energy_J, variance_J2: (good,) of a counter, from 0 on, the latter of what is unknown.
    range_W: of a power that was frozen, between its least and greatest; what it hides may be anything in between.
    """

    sensor: dict
    good: np.ndarray
    unknown: np.ndarray | None = None
    energy_J: np.ndarray | None = None
    variance_J2: np.ndarray | None = None
    range_W: float = 0.0

    @property
    def is_dead(self) -> bool:
        """Whether the sensor gives no energy at all."""
        return np.count_nonzero(self.good) < 2

    @property
    def share(self) -> float:
        """Of the readings, how many tell the energy since the one before."""
        lost = 0 if self.unknown is None else np.count_nonzero(self.unknown)
        return (np.count_nonzero(self.good) - lost) / max(1, len(self.good))

    def of(self, values: np.ndarray) -> np.ndarray:
        """Those of some values, one for each sample, that belong to good readings; no copy where all do."""
        return values if self.good.all() else values[self.good]

    def instants(self, samples: Samples) -> Instants:
        """When the sensor was read well."""
        return samples.instants if self.good.all() else Instants(samples.t_ns[self.good])

    def doubt(self, words: str) -> None:
        self.sensor["doubt"] = "; ".join(filter(None, [self.sensor.get("doubt"), words]))


def judge(samples: Samples) -> list[Judgement]:
    """What can be believed of each sensor of a host; where one fails, another of the same device takes its place."""
    judged = []
    for column, sensor in enumerate(samples.header["sensors"]):
        readings = samples.readings[:, column]
        judgement = Judgement(dict(sensor), ~np.isnan(readings))
        if judgement.is_dead:
            judgement.doubt("it could not be read; it has no energy")
        elif sensor["kind"] == "power":
            _judge_power(judgement, samples.t_ns, readings * sensor["to_SI"])
        elif sensor["kind"] == "energy":
            _judge_counter(judgement, samples, readings)
        elif sensor["kind"] == "busy":
            more_W = sensor["model"]["full_W_per_core"] - sensor["model"]["idle_W_per_core"]
            judgement.energy_J = more_W * from_zero(np.diff(judgement.of(readings)))
        judged.append(judgement)
    _judge_by_level(judged, samples)
    _judge_by_others(judged, samples)
    _replace(judged)
    return judged


def most_W(sensor: dict) -> float:
    """The power above which a reading of a sensor is false."""
    limit_W = (sensor.get("notes") or {}).get("limit_W")
    return ABOVE_LIMIT * limit_W if limit_W else MOST_W[sensor["component"]]


# -------------------------------------------------------------------------------------------------------------- power


def _judge_power(judgement: Judgement, t_ns: np.ndarray, watts: np.ndarray) -> None:
    """Zero, next to nothing and more than the device can draw are no readings; nor is what stays where others vary."""
    read = judgement.good
    with np.errstate(invalid="ignore"):
        high = read & (watts > most_W(judgement.sensor))
        judgement.good = read & ~high
        least_W = LEAST_SHARE * np.percentile(judgement.of(watts), UNDER_LOAD) if judgement.good.any() else 0.0
        low = read & (watts <= least_W)
    judgement.good &= ~low
    frozen = judgement.good.copy()
    if frozen.any():
        frozen[frozen] = _frozen(judgement.of(t_ns), judgement.of(watts))
    if frozen.any():
        judgement.range_W = float(np.ptp(judgement.of(watts)))
        judgement.good &= ~frozen
    for which, words in (
        (low, "no power where there must be some"),
        (high, f"more than {most_W(judgement.sensor):.0f} W, which it cannot draw"),
        (frozen, "frozen, where it varies at other times"),
    ):
        if which.any():
            judgement.doubt(f"{which.sum()} of {read.sum()} readings are {words}")
    if judgement.is_dead:
        judgement.doubt("it has no energy")


def _frozen(t_ns: np.ndarray, watts: np.ndarray) -> np.ndarray:
    """Which readings belong to a stretch that is much longer the same than any other at about the same power."""
    frozen = np.zeros(len(watts), dtype=bool)
    begins, ends = _stretches(np.diff(watts) == 0)
    if not ((t_ns[ends] - t_ns[begins]) / 1e9 > FROZEN_S).any():
        return frozen
    changes = np.flatnonzero(np.diff(watts) != 0)
    first, last = np.append(0, changes + 1), np.append(changes, len(watts) - 1)
    lengths_s = (t_ns[last] - t_ns[first]) / 1e9
    period_s = float(np.median(np.diff(t_ns))) / 1e9
    by_power = np.argsort(watts[first], kind="stable")
    powers_W, lengths_s = watts[first][by_power], lengths_s[by_power]
    long = np.flatnonzero(lengths_s > FROZEN_S)
    begin = np.searchsorted(powers_W, (1 - ALIKE) * powers_W[long], side="right")
    end = np.searchsorted(powers_W, (1 + ALIKE) * powers_W[long])
    usual_s = np.maximum(_greatest(lengths_s, begin, long), _greatest(lengths_s, long + 1, end))
    are_enough = end - begin - 1 >= 2 * STILL_STEPS
    for stretch in by_power[long[are_enough & (lengths_s[long] > FROZEN_RUNS * np.maximum(period_s, usual_s))]]:
        frozen[first[stretch] + 1 : last[stretch] + 1] = True
    return frozen


def _greatest(values: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The greatest of ``values[begin:end]`` for each pair, 0 of none; by way of those of 1, 2, 4 ... neighbours."""
    result, width = np.zeros(len(begin)), 1
    while len(values):
        fits = (end - begin >= width) & (end - begin < 2 * width)
        result[fits] = np.maximum(values[begin[fits]], values[end[fits] - width])
        values, width = np.maximum(values[:-width], values[width:]), 2 * width
    return result


def _stretches(steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each stretch of some steps begins and ends, as the numbers of the readings that they lie between."""
    edges = np.flatnonzero(np.diff(steps, prepend=False, append=False))
    return edges[::2], edges[1::2]


# ------------------------------------------------------------------------------------------------------------ counters


def _judge_counter(judgement: Judgement, samples: Samples, readings: np.ndarray) -> None:
    """Readings that jump away and back are misreads; steps that no device can draw, or none at all, are unknown."""
    sensor = judgement.sensor
    read, shown = judgement.instants(samples), judgement.of(readings)
    steps = np.diff(shown)
    energy_J = from_zero(steps * sensor["to_SI"])
    if _is_sound(sensor, read, steps * sensor["to_SI"], energy_J):
        judgement.unknown = np.zeros(len(steps), dtype=bool)
        judgement.energy_J, judgement.variance_J2 = energy_J, np.zeros(len(energy_J))
        return
    usual_s = _usual_s(read.ns, steps)
    kept = _no_misread(sensor, read, shown, steps, usual_s)
    if not kept.all():
        judgement.good[judgement.good] = kept
        judgement.doubt(f"{(~kept).sum()} readings of the counter cannot be true")
        read, steps = judgement.instants(samples), np.diff(shown[kept])
        usual_s = _usual_s(read.ns, steps)
    seconds = read.apart_s
    steps_J = _wrapped(sensor, steps) * sensor["to_SI"]
    since_change_s = _seconds_since_change(read.ns, steps, usual_s)
    false = (steps_J < 0) | (steps_J > most_W(sensor) * since_change_s)
    false |= _may_wrap(sensor, seconds)
    if false.any():
        since = _last_change(steps)
        for step in np.flatnonzero(false):
            false[since[step] : step] = True  # what it adds up was drawn since the counter changed before
        steps_J = np.where(false, 0.0, steps_J)
        since_change_s = _seconds_since_change(read.ns, steps_J, _usual_s(read.ns, steps_J))
    still, lost_J2 = _still(sensor, read, steps_J, false, since_change_s)
    judgement.unknown = false | still
    if not steps_J[~judgement.unknown].any():
        judgement.good[:] = False
        judgement.doubt(f"the counter did not move{' as one does' if steps.any() else ''}; it has no energy")
        return
    judgement.energy_J, judgement.variance_J2 = _bridged(seconds, steps_J, judgement.unknown)
    judgement.variance_J2 += from_zero(lost_J2)
    if still.any():
        judgement.doubt(f"the counter stood still for {seconds[still].sum():.2f} s and lost what was drawn")
    if lost_J2.any():
        judgement.doubt(f"the counter stood still for {seconds[lost_J2 > 0].sum():.2f} s and may have lost a part")
    if false.any():
        judgement.doubt(f"the counter's steps over {seconds[false].sum():.2f} s cannot be true")


def _is_sound(sensor: dict, read: Instants, steps_J: np.ndarray, energy_J: np.ndarray) -> bool:
    """Whether a glance at a counter's steps tells that none is false and that it never stood still."""
    longest_s = read.apart_s.max()
    if steps_J.min() < 0 or steps_J.max() == 0 or _may_wrap(sensor, longest_s):
        return False
    if (steps_J > most_W(sensor) * read.apart_s).any():
        return False
    # A counter that moves once in STILL_STEPS adds up no more than this time, however late it shows what was drawn.
    least_J = LEAST_SHARE * _under_load(read.seconds, energy_J) * (2 * STILL_STEPS + 1) * longest_s
    return bool(np.diff(_knots(steps_J > least_J)).max() <= STILL_STEPS)


def _bridged(seconds: np.ndarray, steps_J: np.ndarray, unknown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Energy and variance from 0 on; what is unknown has the mean power of the seconds before and after it."""
    steps_J, variance_J2 = np.where(unknown, 0.0, steps_J), np.zeros(len(seconds))
    known_s, known_J = from_zero(np.where(unknown, 0.0, seconds)), from_zero(steps_J)
    half_range_W = power_range_W(known_s, known_J) / 2
    for begin, end in zip(*_stretches(unknown), strict=True):
        around_s = np.array([known_s[begin] - BRIDGED_BY_S, known_s[begin], known_s[begin] + BRIDGED_BY_S])
        around_s = np.clip(around_s, 0.0, known_s[-1])
        around_J, lengths_s = np.diff(np.interp(around_s, known_s, known_J)), np.diff(around_s)
        powers_W = around_J[lengths_s > 0] / lengths_s[lengths_s > 0]
        length_s = seconds[begin:end].sum()
        sd_W = BRIDGED_SD * powers_W.mean() + np.ptp(powers_W) / 2 + half_range_W * min(1.0, length_s / BRIDGED_BY_S)
        steps_J[begin:end] = powers_W.mean() * seconds[begin:end]
        variance_J2[begin:end] = sd_W**2 * length_s * seconds[begin:end]
    return from_zero(steps_J), from_zero(variance_J2)


def from_zero(steps: np.ndarray) -> np.ndarray:
    """(steps + 1,): what some steps add up to, from 0 on."""
    sums = np.empty(len(steps) + 1)
    sums[0] = 0.0
    np.cumsum(steps, out=sums[1:])
    return sums


def power_range_W(seconds: np.ndarray, energy_J: np.ndarray) -> float:
    """Between the least and the greatest power, by means over a second; of less than two seconds, the mean power."""
    powers_W = np.diff(np.interp(np.arange(seconds[0], seconds[-1]), seconds, energy_J))
    if len(powers_W) < 2:
        return float((energy_J[-1] - energy_J[0]) / (seconds[-1] - seconds[0]))
    return float(np.ptp(powers_W))


def _may_wrap(sensor: dict, seconds):
    """Whether a counter may have wrapped around more than once, unseen, in a long gap."""
    return most_W(sensor) * seconds > (sensor["wraps_at"] or np.inf) * sensor["to_SI"]


def _knots(moves: np.ndarray) -> np.ndarray:
    """The readings to which a counter moved, by its steps, and the first and the last."""
    return np.concatenate([[0], np.flatnonzero(moves[:-1]) + 1, [len(moves)]])


def _wrapped(sensor: dict, steps):
    """Steps of a counter, in its unit, over the reading at which it starts again."""
    if sensor["wraps_at"] is None or not (steps < 0).any():
        return steps
    return np.where(steps < 0, steps + sensor["wraps_at"], steps)


def _seconds_since_change(t_ns: np.ndarray, steps: np.ndarray, usual_s: float) -> np.ndarray:
    """For each step, how long the counter may have added it up: since it changed before, which it shows late."""
    return (t_ns[1:] - t_ns[_last_change(steps)]) / 1e9 + usual_s


def _last_change(steps: np.ndarray) -> np.ndarray:
    """For each step, the reading before it at which the counter changed the last time."""
    before = np.arange(len(steps))
    before[1:][steps[:-1] == 0] = 0
    return np.maximum.accumulate(before, out=before)


def _usual_s(t_ns: np.ndarray, steps: np.ndarray) -> float:
    """Time between two changes of a counter, by the median."""
    changes = np.flatnonzero(steps != 0) + 1
    return float(np.median(np.diff(t_ns[changes]))) / 1e9 if len(changes) > 1 else 0.0


def _still(sensor: dict, read: Instants, steps_J: np.ndarray, false: np.ndarray, since_change_s: np.ndarray):
    """Between which readings a counter stood still, or nearly, and did not catch up afterwards, (steps,) of bool.

    And the variance in J2 of what it may have lost, (steps,), where it caught up, but with less than was around.
    """
    seconds, energy_J = read.seconds, from_zero(steps_J)
    load_W = _under_load(seconds, energy_J)
    knots = _knots((steps_J > LEAST_SHARE * load_W * since_change_s) | false)
    lengths_s = np.diff(read.ns[knots]) / 1e9
    usual_s = min(float(np.median(lengths_s)), STILL_S / STILL_STEPS)
    suspects = (lengths_s > STILL_STEPS * usual_s) & (np.diff(knots) > STILL_STEPS)
    suspects &= lengths_s * max(load_W / 100, LEAST_W) > UNITS * sensor["to_SI"]
    never_goes_on = suspects.any() and suspects[1:-1].all()  # from one step to the next
    still, lost_J2 = np.full(len(steps_J), never_goes_on), np.zeros(len(steps_J))
    for stretch in np.flatnonzero(suspects & ~never_goes_on):
        begin, end, length_s = knots[stretch], knots[stretch + 1], lengths_s[stretch]
        away_s, shown_J = np.arange(np.ceil(length_s) + 1), energy_J[end] - energy_J[begin]
        around_s = np.stack([seconds[begin] - away_s, seconds[end] + away_s])
        around_W = np.abs(np.diff(np.interp(around_s, seconds, energy_J)))  # by seconds; 0 beyond the first and last
        enough_J = CAUGHT_UP * (length_s - usual_s) * around_W
        if shown_J < enough_J[:, 0].min(initial=load_W * length_s, where=around_W[:, 0] > 0):
            still[begin:end] = True
        elif shown_J < enough_J.max():
            lost_J = max(around_W.max(), load_W) * length_s - shown_J
            lost_J2[begin:end] = (lost_J / NORMAL_95) ** 2 * read.apart_s[begin:end] / length_s
    return still, lost_J2


def _under_load(seconds: np.ndarray, energy_J: np.ndarray) -> float:
    """The power of a counter in W while there is a load, by means over a second."""
    if seconds[-1] <= 1:
        return float(energy_J[-1] / seconds[-1])
    by_second_J = np.interp(np.arange(0.0, seconds[-1] + 1.0), seconds, energy_J)
    return float(np.percentile(np.diff(by_second_J), UNDER_LOAD))


def _no_misread(sensor: dict, read: Instants, readings: np.ndarray, steps: np.ndarray, usual_s: float) -> np.ndarray:
    """Which readings of a counter do not jump away and back, as a misread does."""
    keep = np.ones(len(readings), dtype=bool)

    def possible(before: int, after: int) -> bool:
        step = _wrapped(sensor, readings[after] - readings[before])
        return 0 <= step * sensor["to_SI"] <= most_W(sensor) * (int(read.ns[after] - read.ns[before]) / 1e9 + usual_s)

    steps_J = _wrapped(sensor, steps) * sensor["to_SI"]
    suspects = np.flatnonzero((steps_J < 0) | (steps_J > most_W(sensor) * (read.apart_s + usual_s))) + 1
    before = 0
    for index in suspects:
        before = index - 1 if keep[index - 1] else before
        if possible(before, index):
            continue
        # A reset stays where it went, and what follows goes on from there; a misread does not.
        stays = index + 1 < len(readings) and possible(index, index + 1)
        returns = index + 1 < len(readings) and possible(before, index + 1)
        keep[index] = stays and not returns
    return keep


# ------------------------------------------------------------------------------------------------------- other sensors


def _judge_by_level(judged: list[Judgement], samples: Samples) -> None:
    """A counter far below the limit of its GPU, or what its CPU's busy time or another CPU tells, has no energy."""
    counters, busy_W = [], 0.0
    for judgement in judged:
        if judgement.energy_J is not None and not judgement.is_dead:
            watts = float(judgement.energy_J[-1] / judgement.instants(samples).seconds[-1])
            if judgement.sensor["kind"] == "busy":
                busy_W = watts
            else:
                counters.append((judgement, watts))
    cpus_W = [watts for counter, watts in counters if counter.sensor["component"] == "cpu"]
    least_W = {"cpu": max(cpus_W, default=0.0) / UNLIKE_CPUS, "ram": 0.0}
    if sum(cpus_W) < busy_W / UNLIKE_BUSY:
        least_W["cpu"] = np.inf
    for counter, watts in counters:
        limit_W = (counter.sensor.get("notes") or {}).get("limit_W") or 0.0
        if watts < least_W.get(counter.sensor["component"], LEAST_SHARE * limit_W):
            counter.good[:] = False
            counter.doubt(f"the counter shows {watts:.2f} W, far less than its device draws; it has no energy")


def _judge_by_others(judged: list[Judgement], samples: Samples) -> None:
    """A power that stays the same while another sensor, which it follows at other times, goes up or down is frozen."""
    stretches, bin_s = {}, max(BIN_S, samples.thinned_s)
    for column, judgement in enumerate(judged):
        if judgement.sensor["kind"] == "power" and not judgement.is_dead:
            begins, ends = _long_stretches(judgement, samples, column, BINS * bin_s)
            if len(begins):
                stretches[column] = begins, ends
    if not stretches:
        return
    edges_ns = np.arange(samples.t_ns[0], samples.t_ns[-1], int(bin_s * 1e9))
    powers = [_binned_power(judgement, samples, column, edges_ns) for column, judgement in enumerate(judged)]
    for column, (begins, ends) in stretches.items():
        first = np.searchsorted(edges_ns, samples.t_ns[begins])
        last = np.maximum(first, np.searchsorted(edges_ns, samples.t_ns[ends], side="right") - 1)
        moved = np.full(len(begins), -1)  # which other sensor did
        for other, power in enumerate(powers):
            if other != column and power is not None:
                moved[(moved < 0) & _moves_alone(powers[column], power, first, last)] = other
        _freeze(judged, column, samples, [part[moved >= 0] for part in (begins, ends, moved)])


def _freeze(judged: list[Judgement], column: int, samples: Samples, stretches: list[np.ndarray]) -> None:
    """Take the readings of some stretches out: begin, end and the sensor that moved, (stretches,) each."""
    judgement = judged[column]
    watts = judgement.of(samples.readings[:, column]) * judgement.sensor["to_SI"]
    for begin, end, other in zip(*stretches, strict=True):
        judgement.range_W = max(judgement.range_W, float(np.ptp(watts)))
        judgement.good[begin + 1 : end + 1] = False
        length_s = (samples.t_ns[end] - samples.t_ns[begin]) / 1e9
        judgement.doubt(f"frozen for {length_s:.1f} s, while {judged[other].sensor['id']} moved")


def _long_stretches(judgement: Judgement, samples: Samples, column: int, least_s: float) -> list[np.ndarray]:
    """First and last sample of the stretches of the same power that others may tell to be frozen."""
    t_ns, readings = judgement.of(samples.t_ns), judgement.of(samples.readings[:, column])
    first, last = _stretches(np.diff(readings) == 0)
    awake = readings[first] > AWAKE * readings.min()  # asleep a device may well draw the same while others work
    long = awake & (t_ns[last] - t_ns[first] > least_s * 1e9)
    samples_of = np.flatnonzero(judgement.good)
    return [samples_of[first[long]], samples_of[last[long]]]


def _binned_power(judgement: Judgement, samples: Samples, column: int, edges_ns: np.ndarray) -> np.ndarray | None:
    """Mean power in each bin, of busy time the mean of busy cores; None of a sensor that tells nothing."""
    if judgement.is_dead or len(edges_ns) < 4:
        return None
    t_ns, values = judgement.of(samples.t_ns), judgement.of(samples.readings[:, column])
    if judgement.sensor["kind"] == "power":
        values = from_zero(np.diff(t_ns) * (values[1:] + values[:-1]) / 2)
    if judgement.energy_J is not None:
        values = judgement.energy_J
    return np.diff(np.interp(edges_ns, t_ns, values))


def _moves_alone(power: np.ndarray, other: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """For each stretch of bins, whether a sensor spans half of its range inside, and outside the power follows it."""
    spans = _greatest(other, begin, end) + _greatest(-other, begin, end)
    power, other, outside = power - power.mean(), other - other.mean(), len(power) - (end - begin)

    def mean_outside(values: np.ndarray) -> np.ndarray:
        sums = np.concatenate([[0.0], np.cumsum(values)])
        return (sums[-1] - sums[end] + sums[begin]) / np.maximum(outside, 1)

    mean, mean_other = mean_outside(power), mean_outside(other)
    spread, spread_other = mean_outside(power**2) - mean**2, mean_outside(other**2) - mean_other**2
    varies = (spread > ROUNDING * power.var()) & (spread_other > ROUNDING * other.var())
    follows = mean_outside(power * other) - mean * mean_other > FOLLOWS * np.sqrt(np.maximum(spread * spread_other, 0))
    return (end - begin >= 2) & (outside >= 4) & (spans >= np.ptp(other) / 2) & varies & follows


def _replace(judged: list[Judgement]) -> None:
    """A counter that lies leaves its place to the power of its device, dead counters of all CPUs to busy time."""
    by_id = {judgement.sensor["id"]: judgement for judgement in judged}
    for power in judged:
        counter = by_id.get(power.sensor.get("checks"))
        if counter and counter.sensor["primary"] and power.share > counter.share < LEAST_OF_COUNTER:
            counter.sensor["primary"], power.sensor["primary"] = False, True
            counter.doubt("the power counts in its place")
    cpus = [judgement for judgement in judged if judgement.sensor["component"] == "cpu"]
    own = [judgement for judgement in cpus if judgement.sensor["primary"]]
    estimates = [judgement for judgement in cpus if judgement.sensor["kind"] == "busy" and not judgement.is_dead]
    if own and estimates and all(judgement.is_dead for judgement in own):
        for judgement in own:
            judgement.sensor["primary"] = False
        estimates[0].sensor["primary"] = True
        own[0].doubt("the CPU's energy is estimated from busy time")
