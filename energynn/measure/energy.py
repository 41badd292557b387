"""From the readings of a sensor to the energy of a window, its bound, and reasons against it.

    curve(sensor, t_s, readings, period_s) -> Curve  cumulative energy of one sensor
    Curve.window(begin_s, end_s) -> Window           energy_J, bound_J, coverage
    doubts(curves, begin_s, end_s, unaccounted)      the six tests; empty: no reason against it
    totals(entries, window_s) -> dict                sums by component, named as in a record

Times are seconds of one host's monotonic clock. Nothing here repairs a reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from energynn.measure.samples import Samples

JOULE_PER_KWH = 3.6e6
SECOND_PER_HOUR = 3600.0
COMPONENTS = ("gpu", "cpu", "ram")
# From strongest to weakest: a sum is no better than its weakest part.
PROVENANCES = ("measured", "published", "estimated", "simulated")
# Share of an energy by which a sensor may be wrong throughout: 5 % is what MLPerf grants its power
# meters, and NVML and RAPL were found within it (arXiv 2312.02741). An estimate's watts per core
# are those of another CPU. A simulated sensor is what it says.
SYSTEMATIC = {"measured": 0.05, "published": 0.05, "estimated": 0.5, "simulated": 0.0}

# What the tests hold against a sensor; a table [thresholds] in system.toml may override each.
THRESHOLDS = {
    "least_gpu_W": 5.0,  # over half a second, of a device that is on
    "least_cpu_W": 1.0,
    "least_ram_W": 0.1,
    "least_share": 0.01,  # or that share of its power limit
    "most_gpu_W": 3000.0,  # of a device that states no limit
    "most_cpu_W": 2000.0,
    "most_ram_W": 1000.0,
    "over_limit_gpu": 1.2,
    "over_limit_cpu": 1.5,  # RAPL's limits are means over seconds
    "over_limit_ram": 1.5,
    "counter_still_s": 0.4,  # or three times as long as it usually shows the same
    "power_still_s": 3.0,
    "gap_s": 0.5,
    "gap_share": 0.01,
    "disagreement": 0.05,
}
# of a power, in its mean: a constant one, too, is read at odd instants
LEAST_RANGE = 0.25
AVERAGED_S = 1.0  # NVML's mean power
# a power that shows the same for longer is not slow but constant
LONGEST_UPDATE_S = 1.5
# a power that is this late may miss half of a changing load: it checks no counter
SLOW_S = 0.4
TICK_S = 0.02  # resolution of the busy time in /proc/stat


def may_leave_out(name: str) -> str:
    """Say how a person leaves a device or sensor out, by system.toml."""
    return f'left_out = ["{name}"] leaves it out'


class Window(NamedTuple):
    """Energy between two instants; the error is below ``bound_J`` if the sensor is right."""

    energy_J: float
    bound_J: float
    coverage: float


@dataclass(frozen=True, eq=False)
class Curve:
    """Cumulative energy of one sensor, NaN if it has fewer than two readings.

    t_s, values, energy_J: (readings,) of good readings, the values in J, W or core-seconds;
    missed_J2: (readings,) squared energy that may lie between readings, cumulative;
    gaps_s: (gaps, 2) from and to; late_s: how old what is shown may be.
    """

    sensor: dict
    t_s: np.ndarray
    values: np.ndarray
    energy_J: np.ndarray
    missed_J2: np.ndarray
    gaps_s: np.ndarray
    period_s: float
    late_s: float

    def at(self, t_s) -> np.ndarray:
        """Energy in J since the first reading, linear between readings."""
        return np.interp(t_s, self.t_s, self.energy_J)

    def powers_W(self, begin_s: float, end_s: float, step_s: float) -> np.ndarray:
        """Mean power of each whole step between two instants."""
        edges_s = np.arange(max(begin_s, self.t_s[0]), min(end_s, self.t_s[-1]), step_s)
        return np.diff(self.at(edges_s)) / step_s

    def readings_in(self, begin_s: float, end_s: float) -> int:
        return int(((self.t_s >= begin_s) & (self.t_s <= end_s)).sum())

    def lost_s(self, begin_s: float, end_s: float) -> np.ndarray:
        """(gaps,): how long each gap lasts within a window."""
        return np.diff(np.clip(self.gaps_s, begin_s, end_s), axis=1).ravel()

    def window(self, begin_s: float, end_s: float) -> Window:
        """Energy at the end minus energy at the beginning.

        Its bound: at the edges what the sensor shows late, in gaps all that its power varies, and
        between the readings of a power half of each step, and half a watt if it tells whole ones.
        """
        energy_J = self.at(end_s) - self.at(begin_s)
        watts = self.powers_W(begin_s - 2.0, end_s + 2.0, max(self.late_s, 0.1))
        most_W = THRESHOLDS[f"most_{self.sensor['component']}_W"]
        range_W = np.ptp(watts) if len(watts) > 1 else most_W
        range_W = max(range_W, LEAST_RANGE * energy_J / (end_s - begin_s))
        lost_s = self.lost_s(begin_s, end_s).sum()
        missed_J2 = np.diff(np.interp([begin_s, end_s], self.t_s, self.missed_J2))[0]
        bound_J = range_W * (1.5 * self.late_s + lost_s) + 2 * np.sqrt(missed_J2)
        if self.sensor["kind"] == "power" and not (self.values % 1).any():
            bound_J += 0.5 * (end_s - begin_s)  # it is told in whole watts
        return Window(
            float(energy_J), float(bound_J), float(1 - lost_s / (end_s - begin_s))
        )


def curve(
    sensor: dict, t_s: np.ndarray, readings: np.ndarray, period_s: float
) -> Curve:
    """Make the energy of one sensor from its readings, NaN where one failed; shapes (samples,)."""
    good = np.flatnonzero(np.isfinite(readings))
    if len(good) < 2:
        good, t_s, readings = np.arange(2), np.zeros(2), np.full(2, np.nan)
    read_s, values = t_s[good], readings[good] * sensor["to_SI"]
    is_gap = (np.diff(read_s) > max(2 * period_s, 0.2)) | (np.diff(good) > 1)
    begins_s = np.concatenate([[-np.inf], read_s[:-1][is_gap], read_s[-1:]])
    ends_s = np.concatenate([read_s[:1], read_s[1:][is_gap], [np.inf]])
    gaps_s = np.stack([begins_s, ends_s], axis=1)
    make = {"energy": _count, "power": _integrate, "busy": _estimate}[sensor["kind"]]
    energy_J, missed_J2, late_s = make(sensor, read_s, values, period_s)
    return Curve(sensor, read_s, values, energy_J, missed_J2, gaps_s, period_s, late_s)


def curves(samples: Samples) -> list[Curve]:
    """Make the energies of all sensors of a host."""
    columns = zip(samples.header["sensors"], samples.readings.T, strict=True)
    t_s, period_s = samples.t_ns / 1e9, samples.period_s
    return [curve(sensor, t_s, column, period_s) for sensor, column in columns]


def _count(sensor, t_s, values, period_s):
    """Difference a counter; between its updates it says nothing, so its energy is linear there."""
    energy_J = np.append(0.0, np.cumsum(_steps_J(sensor, values)))
    knots = np.unique([0, *(np.flatnonzero(np.diff(values)) + 1), len(values) - 1])
    energy_J = np.interp(t_s, t_s[knots], energy_J[knots])
    late_s = sensor.get("update_s") or update_s(t_s, values) or 0.0
    return energy_J, np.zeros(len(values)), period_s + late_s


def _steps_J(sensor: dict, values: np.ndarray) -> np.ndarray:
    steps_J = np.diff(values)
    wraps_J = (sensor["wraps_at"] or 0.0) * sensor["to_SI"]
    return np.where(steps_J < 0, steps_J + wraps_J, steps_J)


def update_s(t_s: np.ndarray, values: np.ndarray) -> float | None:
    """How often a sensor shows something new, by its readings; None if they do not tell."""
    new_s = t_s[1:][np.diff(values) != 0]
    return float(np.median(np.diff(new_s))) if len(new_s) > 3 else None


def _integrate(sensor, t_s, watts, period_s):
    """Integrate a power by the trapezoidal rule; before a mean over 1 s lies what was before it."""
    apart_s, steps_W = np.diff(t_s), np.diff(watts)
    energy_J = np.append(0.0, np.cumsum(apart_s * (watts[1:] + watts[:-1]) / 2))
    renewed_s = sensor.get("update_s") or update_s(t_s, watts) or 0.0
    late_s = max(period_s, min(renewed_s, LONGEST_UPDATE_S))
    missed_J2 = np.append(
        0.0, np.cumsum((steps_W * np.maximum(apart_s, late_s) / 2) ** 2)
    )
    if "average over 1 s" in sensor["notes"].get("power", ""):
        middle_s = t_s - AVERAGED_S / 2
        before_J = np.interp(middle_s, t_s, energy_J)
        before_J += np.minimum(middle_s - t_s[0], 0.0) * watts[0]
        energy_J = before_J + AVERAGED_S * watts
        late_s += AVERAGED_S / 4
    return energy_J, missed_J2, late_s


def _estimate(sensor, t_s, core_s, period_s):
    """Apply the stated model: idle power of all cores, and more while a core is busy."""
    model = sensor["model"]
    more_W = model["full_W_per_core"] - model["idle_W_per_core"]
    idle_W = model["idle_W_per_core"] * model["cores"]
    energy_J = more_W * (core_s - core_s[0]) + idle_W * (t_s - t_s[0])
    return energy_J, np.zeros(len(core_s)), period_s + TICK_S


# ---------------------------------------------------------------------------------- the six tests


def doubts(
    curves: list[Curve],
    begin_s: float,
    end_s: float,
    unaccounted: Iterable[str] = (),
    limits: dict = THRESHOLDS,
) -> list[str]:
    """Test the sensors of one host in a window; returns the reasons not to believe its energies.

    curves: of all sensors of devices in use; unaccounted: in words, devices that no sensor reads.
    """
    primary = {one.sensor["id"]: one for one in curves if one.sensor["primary"]}
    # D: every device is accounted for, and none twice.
    reasons = [f"D: {text}" for text in unaccounted]
    for one, other in combinations(primary.values(), 2):
        if _are_one(one, other):
            names = f"{one.sensor['id']} and {other.sensor['id']}"
            without = may_leave_out(other.sensor["id"])
            reasons.append(f"D: {names} are the same device, counted twice; {without}")
    for one in primary.values():
        reasons += impossible(one, begin_s, end_s, limits)
        reasons += _gaps(one, begin_s, end_s, limits)
    for one in curves:
        counter = primary.get(one.sensor.get("checks"))
        if counter and not one.sensor["primary"]:
            reasons += _disagreement(counter, one, begin_s, end_s, limits)
    return reasons


def impossible(
    one: Curve, begin_s: float, end_s: float, limits: dict = THRESHOLDS
) -> list[str]:
    """Test whether the readings can be those of the device: S, M and P. Else it has no energy."""
    name, component = one.sensor["id"], one.sensor["component"]
    first, after = np.searchsorted(one.t_s, [begin_s - 1.0, end_s + 1.0])
    t_s, values = one.t_s[first:after], one.values[first:after]
    is_power = one.sensor["kind"] == "power"
    steps = values if is_power else _steps_J(one.sensor, values)
    reasons = []
    # M: a counter never falls, its wrap aside, and no power is negative.
    if (steps < 0).any():
        reasons.append(f"M: {name} fell or was negative {(steps < 0).sum()} times")
    if one.sensor["kind"] == "busy" or len(t_s) < 2:
        return reasons
    # S: it moves, and shows more than next to nothing.
    still_s, most_s = _still(one, t_s, values, limits)
    if still_s > most_s:
        reasons.append(
            f"S: {name} showed the same for {still_s:.1f} s, {most_s:.1f} s at most is usual"
            f" ({'power' if is_power else 'counter'}_still_s)"
        )
    limit_W = one.sensor["notes"].get("limit_W", 0.0)
    upper, most_W = f"most_{component}_W", limits[f"most_{component}_W"]
    floors_W = {f"least_{component}_W": limits[f"least_{component}_W"]}
    if 0 < limit_W < most_W:  # RAPL without a limit shows its greatest number
        upper = f"over_limit_{component}"
        most_W = limits[upper] * limit_W
        floors_W["least_share"] = limits["least_share"] * limit_W
    if is_power:
        lowest_W = values.min()
        highest_W = one.powers_W(t_s[0], t_s[-1], 1.0).max(initial=0.0)
    else:
        new = np.append(0, np.flatnonzero(steps) + 1)
        added_W = steps[new[1:] - 1] / (np.diff(t_s[new]) + one.late_s)
        lowest_W = one.powers_W(t_s[0], t_s[-1], max(0.5, 3 * one.late_s)).min(
            initial=np.inf
        )
        seconds_W = one.powers_W(t_s[0], t_s[-1], max(1.0, 10 * one.late_s))
        highest_W = max(added_W.max(initial=0.0), seconds_W.max(initial=0.0))
    if below := [each for each in floors_W if lowest_W < floors_W[each]]:
        least_W = max(floors_W.values())
        reasons.append(
            f"S: {name} showed {lowest_W:.2g} W, at least {least_W:.2g} W are drawn"
            f" ({', '.join(below)})" + (f"; {may_leave_out(name)}" * (not values.any()))
        )
    # P: its mean over a second, and a step of a counter, is what the device can draw.
    if highest_W > most_W:
        reasons.append(
            f"P: {name} showed {highest_W:.3g} W, at most {most_W:.3g} W can be drawn"
            f" ({upper})"
        )
    return reasons


def _still(
    one: Curve, t_s: np.ndarray, values: np.ndarray, limits: dict
) -> tuple[float, float]:
    """How long a sensor showed the same at most, in s, and how long it may.

    A power counts where its device is under load, if it is read more finely than in whole watts.
    """
    begins = np.append(0, np.flatnonzero(np.diff(values)) + 1)
    ends = np.append(begins[1:], len(values)) - 1
    still_s = t_s[ends] - t_s[begins]
    if one.sensor["kind"] == "energy":
        return still_s.max(), max(limits["counter_still_s"], 3 * one.late_s)
    middle_W = (values.min() + values.max()) / 2
    is_counted = (values[begins] >= middle_W) & (values[begins] % 1 != 0)
    return still_s[is_counted].max(initial=0.0), max(
        limits["power_still_s"], 3 * one.period_s
    )


def _gaps(one: Curve, begin_s: float, end_s: float, limits: dict) -> list[str]:
    """G: hardly any time is without readings."""
    lost_s = one.lost_s(begin_s, end_s)
    share, longest_s = lost_s.sum() / (end_s - begin_s), lost_s.max()
    if share > limits["gap_share"] or longest_s > max(
        limits["gap_s"], 2 * one.period_s
    ):
        what = f"no readings for {share:.1%} of the time, for {longest_s:.2g} s at most"
        return [f"G: {one.sensor['id']} has {what} (gap_share, gap_s)"]
    return []


def _disagreement(
    counter: Curve, power: Curve, begin_s, end_s, limits: dict
) -> list[str]:
    """C: counter and power of a device agree within 5 % or their bounds."""
    counted, drawn = counter.window(begin_s, end_s), power.window(begin_s, end_s)
    open_J = max(
        limits["disagreement"] * counted.energy_J, counted.bound_J + drawn.bound_J
    )
    can_tell = drawn.coverage > 1 - limits["gap_share"] and power.late_s < SLOW_S
    if can_tell and abs(drawn.energy_J - counted.energy_J) > open_J:
        says = f"{drawn.energy_J:.0f} J, not {counted.energy_J:.0f} J"
        says += f" as {counter.sensor['id']} (disagreement)"
        return [f"C: {power.sensor['id']} says {says}"]
    return []


def _are_one(one: Curve, other: Curve) -> bool:
    """Tell whether two sensors have one UUID, or two counters the same readings."""
    uuids = [each.sensor["notes"].get("uuid") for each in (one, other)]
    if uuids[0] and uuids[0] == uuids[1]:
        return True
    are_counters = one.sensor["kind"] == other.sensor["kind"] == "energy"
    have_as_many = len(one.values) == len(other.values)
    return are_counters and have_as_many and np.mean(one.values == other.values) > 0.5


# ------------------------------------------------------------------------------------------- sums


def entries_of(
    curves: list[Curve], begin_s: float, end_s: float, limits: dict = THRESHOLDS
) -> list[dict]:
    """Describe each sensor with its coverage and, if its readings can be true, its energy in J."""
    entries = []
    for one in curves:
        window = one.window(begin_s, end_s)._asdict()
        if impossible(one, begin_s, end_s, limits) or np.isnan(window["energy_J"]):
            window = {"coverage": window["coverage"]}
        entries.append(
            one.sensor | {"samples": one.readings_in(begin_s, end_s)} | window
        )
    return entries


def totals(entries: Iterable[dict], window_s: float) -> dict:
    """Energies, bounds, bands and mean powers per component and in all, by the primary sensors.

    entries: sensors of all hosts with ``energy_J`` and ``bound_J``. Where one has none, neither has
    its component, nor the total. Bounds add up, and so do bands: sensors of one kind are wrong
    together. The total's provenance is the weakest of its parts.
    """
    entries = [entry for entry in entries if entry["primary"]]
    result: dict = {}
    for name in (*COMPONENTS, "total"):
        own = [entry for entry in entries if name in (entry["component"], "total")]
        if not own or not all("energy_J" in entry for entry in own):
            continue
        energy_J = sum(entry["energy_J"] for entry in own)
        provenances = [entry["provenance"] for entry in own]
        result |= {
            f"energy_{name}_J": energy_J,
            f"energy_{name}_provenance": max(provenances, key=PROVENANCES.index),
            f"energy_{name}_bound_J": sum(entry["bound_J"] for entry in own),
            f"energy_{name}_systematic_J": sum(
                SYSTEMATIC[entry["provenance"]] * entry["energy_J"] for entry in own
            ),
            f"mean_power_{name}_W": energy_J / window_s,
        }
    return result
