"""From the readings of a sensor to the energy of a window, its bound, and reasons against it.

    energy_curve     cumulative energy of one sensor
    judge_sensors    the six tests; empty: no reason against it
    sensor_entries   sensors with their energies and bounds
    total_energies   sums by component, named as in a record

Times are seconds of one host's monotonic clock. Nothing here repairs a reading. What curves say
about windows is ``evidence.py``'s; what is too long for a memory comes in pieces (``stream.py``).
"""

from collections.abc import Iterable, Iterator
from itertools import combinations
from operator import mul
from typing import NamedTuple

import msgspec
import numpy as np

from energynn.measure.evidence import THRESHOLDS, SensorEvidence
from energynn.measure.samples import Channel

JOULE_PER_KWH = 3.6e6
SECOND_PER_HOUR = 3600.0
COMPONENTS = ("gpu", "cpu", "ram")
# Share of an energy by which a sensor may be wrong throughout: 5 % is what MLPerf grants its power
# meters, and NVML and RAPL were found within it (arXiv 2312.02741). An estimate's watts per core
# are those of another CPU. A simulated sensor is what it says.
SENSOR_BIAS = {"measured": 0.05, "published": 0.05, "estimated": 0.5, "simulated": 0.0}
# From strongest to weakest: a sum is no better than its weakest part.
PROVENANCES = tuple(SENSOR_BIAS)

AVERAGING_S = 1.0  # NVML's mean power
# times the least power of a device that is used: no load is below that
MIN_LOAD_FACTOR = 5.0
# causes of times without readings
END_TEXT = "it failed, or its sampler was killed"
GAP_TEXT = (
    "a busy host or a container's quota of CPUs (cpu.max) held its sampler up: give more; or it "
    "failed now and then"
)
# a power that shows the same for longer is not slow but constant
MAX_UPDATE_PERIOD_S = 1.5
# a power that is this late may miss half of a changing load: it checks no counter
MAX_DELAY_OF_CHECK_S = 0.4
CPU_CLOCK_TICK_S = 0.02  # resolution of the busy time in /proc/stat


def left_out_remedy(name: str) -> str:
    """Say how a person leaves a device or sensor out, by system.toml."""
    return f'left_out = ["{name}"] leaves it out'


class SensorEnergy(Channel):
    """What a primary or checking sensor tells of the training of a segment.

    ``energy_J``, of which ``bound_J`` is the bound, is None where its readings cannot be true.
    """

    samples: int = 0
    coverage: float = 0.0
    energy_J: float | None = None
    bound_J: float = 0.0
    segment: int = 0
    host: str = ""


class EnergyCurve(NamedTuple):
    """Cumulative energy of one sensor, NaN if it has fewer than two readings.

    t_s, values, energy_J: (readings,) of good readings, the values in J, W or core-seconds;
    missed_J2: (readings,) squared energy that may lie between readings, cumulative;
    gaps_s: (gaps, 2) from and to; late_s: how old what is shown may be.
    """

    sensor: Channel
    t_s: np.ndarray
    values: np.ndarray
    energy_J: np.ndarray
    missed_J2: np.ndarray
    gaps_s: np.ndarray
    period_s: float
    late_s: float

    def at(self, t_s) -> np.ndarray:
        """Return the energy in J since the first reading, linear between readings."""
        return np.interp(t_s, self.t_s, self.energy_J)

    @property
    def amounts_of_readings(self) -> np.ndarray:
        """(readings,) that are never negative: a power, or what a counter has added each time."""
        if self.sensor.kind == "power":
            return self.values
        return np.append(0.0, _counter_steps_J(self.sensor, self.values))


def energy_curve(
    sensor: Channel, t_s: np.ndarray, readings: np.ndarray, period_s: float
) -> EnergyCurve:
    """Make the energy of one sensor from its readings, NaN where one failed; shapes (samples,)."""
    good = np.flatnonzero(np.isfinite(readings))
    if len(good) < 2:
        good = np.arange(2)
        t_s = np.zeros(2)
        readings = np.full(2, np.nan)
    read_s = t_s[good]
    values = readings[good] * sensor.to_SI
    edges_s = np.concatenate([[-np.inf], read_s, [np.inf]])
    is_gap = np.diff(edges_s) > max(2 * period_s, 0.2)
    is_gap[1:-1] |= np.diff(good) > 1
    gaps_s = np.stack([edges_s[:-1], edges_s[1:]], axis=1)[is_gap]
    update_s = sensor.update_s or update_period_s(read_s, values)
    sensor = msgspec.structs.replace(sensor, update_s=update_s)
    make = {"energy": _count, "power": _integrate, "busy": _estimate}[sensor.kind]
    energy_J, missed_J2, late_s = make(
        sensor, read_s, values, period_s, update_s or 0.0
    )
    return EnergyCurve(
        sensor, read_s, values, energy_J, missed_J2, gaps_s, period_s, late_s
    )


def _count(sensor, t_s, values, period_s, update_s):
    """Difference a counter; between its updates it says nothing, so its energy is linear there."""
    energy_J = np.append(0.0, np.cumsum(_counter_steps_J(sensor, values)))
    is_new = np.append(True, np.diff(values) != 0)
    is_new[-1] = True
    energy_J = np.interp(t_s, t_s[is_new], energy_J[is_new])
    return energy_J, 0 * energy_J, period_s + update_s


def _counter_steps_J(sensor: Channel, values: np.ndarray) -> np.ndarray:
    steps_J = np.diff(values)
    wraps_J = (sensor.wraps_at or 0.0) * sensor.to_SI
    return np.where(steps_J < 0, steps_J + wraps_J, steps_J)


def update_period_s(t_s: np.ndarray, values: np.ndarray) -> float | None:
    """Tell how often a sensor shows something new, by its readings; None if they do not tell."""
    new_s = t_s[1:][np.diff(values) != 0]
    return float(np.median(np.diff(new_s))) if len(new_s) > 3 else None


def _integrate(sensor, t_s, watts, period_s, update_s):
    """Integrate a power by the trapezoidal rule; a mean over 1 s is exact for its own second."""
    apart_s = np.diff(t_s)
    steps_W = np.diff(watts)
    energy_J = np.append(0.0, np.cumsum(apart_s * (watts[1:] + watts[:-1]) / 2))
    late_s = max(period_s, min(update_s, MAX_UPDATE_PERIOD_S))
    missed_J2 = np.append(
        0.0, np.cumsum((steps_W * np.maximum(apart_s, late_s) / 2) ** 2)
    )
    if _is_averaged(sensor):
        middle_s = t_s - AVERAGING_S / 2
        before_J = np.interp(middle_s, t_s, energy_J)
        before_J += np.minimum(middle_s - t_s[0], 0.0) * watts[0]
        energy_J = before_J + AVERAGING_S * watts
        late_s += AVERAGING_S / 4
    return energy_J, missed_J2, late_s


def _is_averaged(sensor: Channel) -> bool:
    return "average over 1 s" in sensor.notes.get("power", "")


def _estimate(sensor, t_s, core_s, period_s, _update_s):
    """Apply the stated model: idle power of all cores, and more while a core is busy."""
    model = sensor.model
    more_W = model["full_W_per_core"] - model["idle_W_per_core"]
    idle_W = model["idle_W_per_core"] * model["cores"]
    energy_J = more_W * (core_s - core_s[0]) + idle_W * (t_s - t_s[0])
    return energy_J, 0 * energy_J, period_s + CPU_CLOCK_TICK_S


# ---------------------------------------------------------------------------------- the six tests


def refusal(test: str, text: str, *thresholds: str) -> str:
    """Say what a test found, and the thresholds that it went by: all refusals are made here."""
    return f"{test}: {text}" + (f" ({', '.join(thresholds)})" if thresholds else "")


def judge_sensors(
    evidence: list[SensorEvidence],
    unaccounted: Iterable[str] = (),
    limits: dict = THRESHOLDS,
) -> list[str]:
    """Test the sensors of one host; returns the reasons not to believe its energies.

    evidence: of all sensors of devices in use; unaccounted: in words, devices that no sensor reads.
    """
    primary = [one for one in evidence if one.sensor.primary]
    # D: every device is accounted for, and none twice.
    reasons = [refusal("D", text) for text in unaccounted]
    for one, other in combinations(primary, 2):
        if _are_same_sensor(one, other):
            text = f"{one.sensor.id} and {other.sensor.id} are the same device"
            text += f", counted twice; {left_out_remedy(other.sensor.device_name)}"
            reasons.append(refusal("D", text))
    for one in primary:
        reasons += test_possible_readings(one, limits)
        reasons += _test_gaps(one, limits)
        for power in _powers_that_check(one, evidence):
            if not one.falls:
                reasons += _test_agreement(one, power, limits)
    return reasons


def test_possible_readings(one: SensorEvidence, limits: dict) -> Iterator[str]:
    """Test whether the readings can be those of the device: M, S and P. Else it has no energy."""
    # M: a counter never falls, its wrap aside, and no power is negative.
    if one.falls:
        yield refusal("M", f"{one.sensor.id} fell or was negative {one.falls} times")
        return  # what follows from its sum is no fault of its own
    if one.sensor.kind != "busy" and one.least <= one.most:
        # a CPU always works; a GPU that says it does not, and that no rank names, may be still
        is_idle = one.sensor.component == "gpu" and one.is_busy is False
        if one.is_named or not is_idle:
            yield from _test_movement(one, limits)
        yield from _test_power(one, limits)


def _test_movement(one: SensorEvidence, limits: dict) -> Iterator[str]:
    """S: what is used draws more than next to nothing in the mean, and its sensor moves."""
    name = one.sensor.id
    component = one.sensor.component
    least_W = limits[f"least_{component}_W"]
    by = [f"least_{component}_W"]
    if 0 < one.limit_W < limits[f"most_{component}_W"]:
        least_W = max(least_W, limits["least_share"] * one.limit_W)
        by.append("least_share")
    mean_W = one.energy_J / one.length_s
    if mean_W < least_W:
        text = f"{name} showed {mean_W:.2g} W in the mean, at least {least_W:.2g} W are drawn"
        if mean_W == 0:
            text += f"; {left_out_remedy(one.sensor.device_name)}"
        yield refusal("S", text, *by)
    readings, seconds = one.still.T
    if one.is_counter:
        usual_s = 3 * one.late_s
        longest_s = {"counter_still_s": seconds.max(initial=0.0)}
    else:
        # A power is read more finely than in whole watts, and its device under load.
        load_W = (one.least + one.most) / 2
        if not (one.is_busy or one.is_named):
            load_W = max(load_W, MIN_LOAD_FACTOR * least_W)
        is_load = (readings >= load_W) & (readings % 1 != 0)
        load_s = seconds[is_load].max(initial=0.0)
        usual_s = 3 * one.period_s
        longest_s = {"power_still_s": load_s, "power_zero_s": one.zero_s}
    for threshold, still_s in longest_s.items():
        most_s = max(limits[threshold], usual_s)
        if still_s > most_s:
            text = f"{name} showed the same for {still_s:.1f} s, {most_s:.1f} s at most is usual"
            yield refusal("S", text, threshold)


def _test_power(one: SensorEvidence, limits: dict) -> Iterator[str]:
    """P: its mean over a second, and a step of a counter, is what the device can draw.

    The limits of CPUs and RAM are means: half a minute is held against them, a second against
    several times as much. RAPL without a limit shows its greatest number.
    """
    component = one.sensor.component
    by = f"most_{component}_W"
    tests = [(one.peak_W, limits[by], by)]
    if 0 < one.limit_W < limits[by]:
        by = f"over_limit_{component}"
        limit_W = limits[by] * one.limit_W
        peak_W = limits["peak_over_limit"] * one.limit_W
        if component == "gpu":
            tests = [(one.peak_W, limit_W, by)]
        else:
            tests += [
                (one.peak_W, peak_W, "peak_over_limit"),
                (one.half_minute_W, limit_W, by),
            ]
    for shown_W, most_W, by in tests:
        if shown_W > most_W:
            yield refusal(
                "P",
                f"{one.sensor.id} showed {shown_W:.3g} W, at most {most_W:.3g} W can be drawn "
                "(as where the machine slept meanwhile)",
                by,
            )
            return


def _test_gaps(one: SensorEvidence, limits: dict) -> Iterator[str]:
    """G: hardly any time of a power is without readings.

    A counter loses nothing in a gap, but at the edges of the window, or if it can go round in it.
    """
    share = one.lost_s / one.length_s
    longest_s = one.longest_gap_s
    most_s = max(limits["gap_s"], 2 * one.period_s)
    if one.is_counter:
        most_s = max(most_s, limits["gap_share"] * one.length_s)
        most_W = limits[f"most_{one.sensor.component}_W"]
        round_J = (one.sensor.wraps_at or np.inf) * one.sensor.to_SI
        is_lost = one.edge_gap_s > most_s or longest_s > round_J / most_W
    else:
        is_lost = share > limits["gap_share"] or longest_s > most_s
    if is_lost:
        is_end = np.isinf(one.edge_gap_s)  # there is no later reading
        yield refusal(
            "G",
            f"{one.sensor.id} has no readings for {share:.1%} of the time, for "
            f"{longest_s:.2g} s at most; {END_TEXT if is_end else GAP_TEXT}",
            *(() if is_end else ("gap_s", "gap_share")),
        )


def _powers_that_check(
    one: SensorEvidence, evidence: list[SensorEvidence]
) -> list[SensorEvidence]:
    """List the powers that check a counter and can tell: read, and not too slow."""
    return [
        other
        for other in evidence
        if other.sensor.checks == one.sensor.id and other.late_s < MAX_DELAY_OF_CHECK_S
    ]


def _test_agreement(
    counter: SensorEvidence, power: SensorEvidence, limits: dict
) -> Iterator[str]:
    """C: counter and power of a device agree within 5 %, or what that power's lag allows."""
    counted_J = counter.energy_J
    drawn_J = power.energy_J
    lag_s = AVERAGING_S / 2 if _is_averaged(power.sensor) else 1.5 * power.late_s
    lag_J = lag_s * max(counted_J, drawn_J) / counter.length_s
    lag_J = min(lag_J, counter.bound_J + power.bound_J)
    open_J = max(limits["disagreement"] * counted_J, lag_J)
    if abs(drawn_J - counted_J) > open_J:
        yield refusal(
            "C",
            f"{power.sensor.id} says {drawn_J:.0f} J, not {counted_J:.0f} J as "
            f"{counter.sensor.id}",
            "disagreement",
        )


def _are_same_sensor(one: SensorEvidence, other: SensorEvidence) -> bool:
    """Tell whether two sensors have one UUID, or two counters the same readings."""
    uuid = one.sensor.notes.get("uuid")
    if uuid and uuid == other.sensor.notes.get("uuid"):
        return True
    are_counters = one.sensor.kind == other.sensor.kind == "energy"
    are_comparable = are_counters and len(one.head) == len(other.head)
    return bool(are_comparable and np.mean(one.head == other.head) > 0.5)


# ------------------------------------------------------------------------------------------- sums


def sensor_entries(
    evidence: list[SensorEvidence], limits: dict = THRESHOLDS
) -> list[SensorEnergy]:
    """Describe each sensor with its coverage and, if its readings can be true, its energy in J.

    Where a power of the same device says something else, the bound is that far, too.
    """
    described = []
    for one in evidence:
        entry = SensorEnergy(
            **msgspec.structs.asdict(one.sensor),
            samples=one.readings,
            coverage=one.coverage,
        )
        if one.limit_end_W:
            entry.notes = entry.notes | {"limit_end_W": one.limit_end_W}
        if np.isfinite(one.energy_J) and not any(test_possible_readings(one, limits)):
            apart_J = [
                abs(other.energy_J - one.energy_J)
                for other in _powers_that_check(one, evidence)
            ]
            entry.energy_J = one.energy_J
            entry.bound_J = max([one.bound_J, *apart_J])
        described.append(entry)
    return described


def total_energies(entries: Iterable[SensorEnergy], window_s: float) -> dict:
    """Add up energies, bounds, bands and mean powers per component and in all, by the primary
    sensors.

    entries: sensors of all hosts. Where one has no energy, neither has its component, nor the
    total. Bounds add up, and so do bands: sensors of one kind are wrong together. The total's
    provenance is the weakest of its parts.
    """
    primary = [entry for entry in entries if entry.primary]
    result: dict = {}
    for name in (*COMPONENTS, "total"):
        own = [entry for entry in primary if name in (entry.component, "total")]
        joules = [entry.energy_J for entry in own if entry.energy_J is not None]
        if not own or len(joules) < len(own):
            continue
        provenances = [entry.provenance for entry in own]
        shares = map(SENSOR_BIAS.__getitem__, provenances)
        result |= {
            f"energy_{name}_J": sum(joules),
            f"energy_{name}_provenance": max(provenances, key=PROVENANCES.index),
            f"energy_{name}_bound_J": sum(entry.bound_J for entry in own),
            f"energy_{name}_systematic_J": sum(map(mul, shares, joules)),
            f"mean_power_{name}_W": sum(joules) / window_s,
        }
    return result
