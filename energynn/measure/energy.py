"""From samples on disk to energies: every joule in a record comes from these functions and can be derived again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from energynn.measure.samples import Samples, read_events, read_hosts

JOULE_PER_KWH = 3.6e6
SECOND_PER_HOUR = 3600.0
COMPONENTS = ("gpu", "cpu", "ram")
# From strongest to weakest: a sum is no better than its weakest part.
PROVENANCES = ("measured", "published", "estimated", "simulated")
# Share of an energy by which a sensor may be wrong throughout, which no repetition makes smaller. Measured: what MLPerf
# grants its power meters; NVML and RAPL were found within it (arXiv 2312.02741). Estimated: the assumed watts per core
# are those of another CPU, and off by up to half. A simulated sensor is what it says.
SYSTEMATIC = {"measured": 0.05, "published": 0.05, "estimated": 0.5, "simulated": 0.0}
NORMAL_95 = 1.96
MOST_W = 20e3  # no device draws as much: such a step of a counter is a misread or a reset, not energy
SMOOTHING = 20  # counter steps to each side over which the counter corrects the integral of the power
TICK_S = 0.01  # resolution of the busy time in /proc/stat
DISAGREEMENT = 0.02  # of counter and power, from which on a record says so


@dataclass(frozen=True)
class Curve:
    """Cumulative energy of one sensor over its host's monotonic clock, linear between its knots.

    t_ns, energy_J, variance_J2: (knots,), the last the cumulative variance of what lies between the knots. An edge of a
    window has a standard deviation of ``edge_s`` in time and ``edge_J`` in energy (one, or one per knot); ``lag_s`` is
    one for both edges.
    good_ns, failed_ns: when the sensor was read, well and in vain; watts: (good,) the power read, of power sensors.
    """

    sensor: dict
    host: str
    t_ns: np.ndarray
    energy_J: np.ndarray
    variance_J2: np.ndarray
    good_ns: np.ndarray
    failed_ns: np.ndarray
    longest_ns: float
    period_s: float
    edge_s: float = 0.0
    edge_J: float | np.ndarray = 0.0
    lag_s: float = 0.0
    watts: np.ndarray | None = None

    def at(self, t_ns) -> np.ndarray:
        """Energy in J since the first reading, at instants of the host's monotonic clock."""
        return np.interp(np.asarray(t_ns) - self.t_ns[0], self.t_ns - self.t_ns[0], self.energy_J)

    def between(self, start_ns: int, end_ns: int) -> tuple[float, float]:
        """Energy in a window in J, edges interpolated, and its statistical standard deviation in J."""
        edges_ns = np.array([start_ns, end_ns])
        first_J, last_J = self.at(edges_ns)
        around_ns = 2.5e9 * self.period_s
        edge_W = (self.at(edges_ns + around_ns) - self.at(edges_ns - around_ns)) / (2 * around_ns / 1e9)
        from_first_ns = self.t_ns - self.t_ns[0]
        inside_J2 = np.diff(np.interp(edges_ns - self.t_ns[0], from_first_ns, self.variance_J2))[0]
        at_knots_J = np.broadcast_to(self.edge_J, len(self.t_ns))
        edge_J = np.interp(edges_ns - self.t_ns[0], from_first_ns, at_knots_J)
        edges_J2 = ((self.edge_s * edge_W) ** 2 + edge_J**2).sum() + (self.lag_s * (edge_W[1] - edge_W[0])) ** 2
        return float(last_J - first_J), float(np.sqrt(inside_J2 + edges_J2))

    def coverage(self, start_ns: int, end_ns: int) -> float:
        """Share of a window that lies between readings no further apart than the longest allowed, and none failed."""
        widths_ns = np.diff(np.clip(self.good_ns, start_ns, end_ns))
        none_failed = np.diff(np.searchsorted(self.failed_ns, self.good_ns)) == 0
        whole = (np.diff(self.good_ns) <= self.longest_ns) & none_failed
        return float(widths_ns[whole].sum() / (end_ns - start_ns))


def curves(samples: Samples) -> list[Curve]:
    """The energy of every sensor of a host that was read at least twice."""
    sensors = samples.header["sensors"]
    power_of = {sensor.get("checks"): column for column, sensor in enumerate(sensors) if sensor.get("checks")}
    found = []
    for column, sensor in enumerate(sensors):
        readings = samples.readings[:, column]
        good = ~np.isnan(readings)
        if sensor["kind"] != "power":
            good[good] = _plausible(sensor, samples.t_ns[good], readings[good])
        if good.sum() < 2:
            continue
        times_ns, values = samples.t_ns[good], readings[good]
        reads = dict(sensor=sensor, host=samples.host, good_ns=times_ns, failed_ns=samples.t_ns[~good],
                     longest_ns=samples.longest_ns, period_s=samples.period_s)  # fmt: skip
        if sensor["kind"] == "power":
            found.append(_power_curve(reads, times_ns, values * sensor["to_SI"]))
        elif sensor["kind"] == "busy":
            found.append(_busy_curve(reads, times_ns, values))
        else:
            watts = None
            if sensor["id"] in power_of:
                other = sensors[power_of[sensor["id"]]]
                watts = samples.readings[good, power_of[sensor["id"]]] * other["to_SI"]
            found.append(_counter_curve(reads, times_ns, _unwrapped(sensor, times_ns, values), watts, samples.period_s))
    return found


def _power_curve(reads: dict, t_ns: np.ndarray, watts: np.ndarray) -> Curve:
    """The integral of the power by the trapezoidal rule.

    How far a reading lies from the line between its neighbours tells noise and what happened between the readings;
    over a gap the power may have been anything that it was elsewhere.
    """
    seconds = np.diff(t_ns) / 1e9
    energy_J = np.concatenate([[0.0], np.cumsum(seconds * (watts[1:] + watts[:-1]) / 2)])
    variance_J2 = _variance_of_readings(t_ns, watts)
    gaps = np.diff(t_ns) > reads["longest_ns"]
    variance_J2[1:] = np.where(gaps, (seconds * watts.std()) ** 2, variance_J2[1:])
    return Curve(**reads, t_ns=t_ns, energy_J=energy_J, variance_J2=np.cumsum(variance_J2), watts=watts)


def _variance_of_readings(t_ns: np.ndarray, watts: np.ndarray) -> np.ndarray:
    """What each reading adds to the variance of the power's integral, in J2."""
    variance_J2 = np.zeros(len(t_ns))
    if len(t_ns) > 2:
        # Noise alone is off the line by 1.5 times its variance, a jump between two readings by three times its error's.
        width_s = (t_ns[2:] - t_ns[:-2]) / 2e9
        variance_J2[1:-1] = _off_the_line(t_ns, watts) ** 2 * width_s**2 / 1.9
    return variance_J2


def _off_the_line(t_ns: np.ndarray, watts: np.ndarray) -> np.ndarray:
    """How far each inner reading is from the straight line between its two neighbours, in W."""
    weight = (t_ns[1:-1] - t_ns[:-2]) / (t_ns[2:] - t_ns[:-2])
    return watts[1:-1] - (1 - weight) * watts[:-2] - weight * watts[2:]


def aliasing(t_ns: np.ndarray, watts: np.ndarray) -> float:
    """Share of the power's variance that half the sampling rate would lose: 0 for a smooth power, 1 for noise.

    Near 1 neighbouring readings have nothing to do with each other: the load changes faster than it is sampled.
    """
    if len(t_ns) < 8 or watts.std() == 0:
        return 0.0
    return float(np.mean(_off_the_line(t_ns, watts) ** 2) / 1.5 / watts.var())


def is_aliased(t_ns: np.ndarray, watts: np.ndarray) -> bool:
    """Whether a power changes by more than 5 % of itself and mostly between one reading and the next."""
    return len(watts) > 0 and watts.std() > 0.05 * abs(watts.mean()) and aliasing(t_ns, watts) > 0.4


def _busy_curve(reads: dict, t_ns: np.ndarray, core_seconds: np.ndarray) -> Curve:
    """The stated model: idle power of all cores, and (full - idle) power while a core is busy."""
    model = reads["sensor"]["model"]
    more_W = model["full_W_per_core"] - model["idle_W_per_core"]
    idle_J = model["idle_W_per_core"] * model["cores"] * (t_ns - t_ns[0]) / 1e9
    edge_J = more_W * TICK_S * np.sqrt(model["cores"] / 12)
    return Curve(**reads, t_ns=t_ns, energy_J=idle_J + more_W * (core_seconds - core_seconds[0]),
                 variance_J2=np.zeros(len(t_ns)), edge_J=edge_J)  # fmt: skip


def _counter_curve(
    reads: dict, t_ns: np.ndarray, energy_J: np.ndarray, watts: np.ndarray | None, period_s: float
) -> Curve:
    """A counter's differences, never turned into power first; its own steps in time are finer than they look.

    A counter that changes every 100 ms says nothing between its steps. So only readings that changed are knots, half
    an update late on average. Where the power of the same device is read too, and explains the steps, the power gives
    the shape between them and the counter, smoothed over some steps, the energy.
    """
    new = np.flatnonzero(np.diff(energy_J) > 0) + 1
    update_s = reads["sensor"].get("update_s")
    if update_s is None:  # not watched, or too slow for it
        changes = len(new) / max(1, len(t_ns) - 1)
        between_s = float(np.median(np.diff(t_ns[new])) / 1e9) if len(new) > 2 else 0.0
        update_s = min(period_s, 0.1) if changes > 0.9 else between_s
    zeros = np.zeros(len(t_ns))
    if watts is not None and not np.isnan(watts).any() and len(new) > SMOOTHING:
        shaped = _shaped_by_power(t_ns, energy_J, watts, new, reads["longest_ns"])
        if shaped is not None:
            shaped_J, edge_J, lag_s = shaped
            return Curve(**reads, t_ns=t_ns, energy_J=shaped_J, variance_J2=zeros, edge_J=edge_J, lag_s=lag_s)
    late_ns = np.minimum(np.diff(t_ns)[new - 1], update_s * 1e9) / 2
    # The last reading is a knot only where the counter has stood still for longer than between two of its steps.
    stood = int(len(new) == 0 or t_ns[-1] - t_ns[new[-1]] > 3e9 * max(update_s, period_s))
    knots_ns = np.concatenate([t_ns[:1], t_ns[new] - late_ns.astype(np.int64), t_ns[-1:][:stood]])
    knots_J = np.concatenate([energy_J[:1], energy_J[new], energy_J[-1:][:stood]])
    return Curve(**reads, t_ns=knots_ns, energy_J=knots_J, variance_J2=np.zeros(len(knots_ns)),
                 edge_s=min(update_s, period_s) / np.sqrt(12) * np.sqrt(2 / 3))  # fmt: skip


def _shaped_by_power(t_ns, energy_J, watts, new, longest_ns) -> tuple[np.ndarray, np.ndarray, float] | None:
    """The power's integral, moved to the counter's level; with the sd of an edge in J and of the counter's lag in s.

    None if the power does not explain the counter's steps, as where it is an average over a second.
    """
    seconds = (t_ns - t_ns[0]) / 1e9
    integral_J = np.concatenate([[0.0], np.cumsum(np.diff(seconds) * (watts[1:] + watts[:-1]) / 2)])
    block_of = np.concatenate([[0], np.cumsum(np.diff(t_ns) > longest_ns)])[new]  # nothing is smoothed over a gap
    knots_s, knot_W = seconds[new], watts[new]
    apart_J = energy_J[new] - integral_J[new]
    spacing_s = float(np.median(np.diff(knots_s)))
    # The counter shows what was true some time ago, at most one spacing. Where the power varies, how the difference
    # follows it tells the lag; where it does not, the lag is of no consequence.
    rough_J = apart_J - _local_line(knots_s, apart_J, block_of)
    rough_W = knot_W - _local_line(knots_s, knot_W, block_of)
    noise_J = spacing_s / np.sqrt(12) * abs(knot_W.mean())
    prior = (noise_J / (spacing_s / 4)) ** 2
    lag_s = spacing_s / 2 - np.dot(rough_W, rough_J + spacing_s / 2 * rough_W) / (np.dot(rough_W, rough_W) + prior)
    if not -0.2 * spacing_s <= lag_s <= 1.2 * spacing_s:
        return None
    apart_J = apart_J + lag_s * knot_W
    smooth_J = _local_line(knots_s, apart_J, block_of)
    left_J = float(np.std(apart_J - smooth_J))
    if left_J > 1.3 * noise_J:
        return None
    lag_sd_s = noise_J / np.sqrt(np.dot(rough_W, rough_W) + prior)
    # What the power misses between two corrections by the counter stays: about an eighth of it, by simulation.
    reach_s = SMOOTHING * spacing_s
    missed_J2 = np.concatenate([[0.0], np.cumsum(_variance_of_readings(t_ns, watts))])
    first, last = np.searchsorted(seconds, [seconds - reach_s, seconds + reach_s])
    edge_J = np.sqrt(left_J**2 / (2 * SMOOTHING + 1) + (missed_J2[last] - missed_J2[first]) / 8)
    return integral_J + np.interp(seconds, knots_s, smooth_J), edge_J, lag_sd_s


def _local_line(x: np.ndarray, y: np.ndarray, block_of: np.ndarray) -> np.ndarray:
    """At each point the straight line fitted to its neighbours, ``SMOOTHING`` to each side within its block."""
    result = np.empty(len(x))
    for block in np.unique(block_of):
        at = block_of == block
        xs, ys = x[at] - x[at][0], y[at]
        index = np.arange(len(xs))
        first, last = np.maximum(0, index - SMOOTHING), np.minimum(len(xs), index + SMOOTHING + 1)

        def mean(values, first=first, last=last):
            sums = np.concatenate([[0.0], np.cumsum(values)])
            return (sums[last] - sums[first]) / (last - first)

        mean_x, mean_y = mean(xs), mean(ys)
        spread = mean(xs * xs) - mean_x**2
        slope = np.where(spread > 1e-9, (mean(xs * ys) - mean_x * mean_y) / np.maximum(spread, 1e-9), 0.0)
        result[at] = mean_y + slope * (xs - mean_x)
    return result


def _unwrapped(sensor: dict, t_ns: np.ndarray, readings: np.ndarray) -> np.ndarray:
    """A counter's readings in J from 0 on, with wrap-around; over a reset it goes on at its median rate."""
    steps, seconds = np.diff(readings), np.diff(t_ns) / 1e9
    if sensor["wraps_at"] is not None:
        steps = np.where(steps < 0, steps + sensor["wraps_at"], steps)
    # A step that no device can draw is a counter that was set, there or back.
    false = (steps < 0) | (steps * sensor["to_SI"] > MOST_W * seconds)
    steps = np.where(false, np.median(steps / seconds) * seconds, steps)
    return np.concatenate([[0.0], np.cumsum(steps)]) * sensor["to_SI"]


def _plausible(sensor: dict, t_ns: np.ndarray, readings: np.ndarray) -> np.ndarray:
    """Which readings of a counter can be true: not those that jump away and back, as a misread does."""
    keep = np.ones(len(readings), dtype=bool)
    if sensor["kind"] != "energy" or len(readings) < 2:
        return keep

    def possible(before: int, after: int) -> bool:
        step = readings[after] - readings[before]
        if step < 0 and sensor["wraps_at"] is not None:
            step += sensor["wraps_at"]
        return 0 <= step * sensor["to_SI"] <= MOST_W * (t_ns[after] - t_ns[before]) / 1e9

    step = np.diff(readings)
    wrapped = np.where((step < 0) & (sensor["wraps_at"] is not None), step + (sensor["wraps_at"] or 0), step)
    suspects = np.flatnonzero((wrapped < 0) | (wrapped * sensor["to_SI"] > MOST_W * np.diff(t_ns) / 1e9)) + 1
    for index in suspects:
        before = index - 1
        while before > 0 and not keep[before]:
            before -= 1
        if possible(before, index):
            continue
        # A reset stays where it went, and what follows goes on from there; a misread does not.
        stays = index + 1 < len(readings) and possible(index, index + 1)
        returns = index + 1 < len(readings) and possible(before, index + 1)
        keep[index] = stays and not returns
    return keep


# --------------------------------------------------------------------------------------------------- energy of windows


def energy_of_sensors(found: list[Curve], start_ns: int, end_ns: int) -> list[dict]:
    """Energy of each sensor between two instants of its host's monotonic clock.

    Each entry: the sensor's description, ``energy_J``, ``statistical_J`` (half the 95 % interval: sampling, edges,
    gaps), ``samples`` inside the window, ``failed_reads``, ``coverage``, and of power sensors ``aliasing``.
    """
    entries = []
    for curve in found:
        inside = (curve.good_ns >= start_ns) & (curve.good_ns <= end_ns)
        entry = {**curve.sensor, "host": curve.host, "samples": int(inside.sum())}
        entry["failed_reads"] = int(((curve.failed_ns >= start_ns) & (curve.failed_ns <= end_ns)).sum())
        if end_ns > start_ns:
            entry["energy_J"], sd_J = curve.between(start_ns, end_ns)
            entry["statistical_J"] = NORMAL_95 * sd_J
            entry["coverage"] = curve.coverage(start_ns, end_ns)
            if curve.watts is not None:
                entry["aliasing"] = aliasing(curve.good_ns[inside], curve.watts[inside])
                entry["aliased"] = bool(is_aliased(curve.good_ns[inside], curve.watts[inside]))
        entries.append(entry)
    return entries


def totals(entries: list[dict], window_s: float) -> dict:
    """Energies, their uncertainties and mean powers per component, and their sum, by the primary sensors of all hosts.

    Statistical uncertainties are independent, systematic ones are not: several sensors of one kind are wrong together.
    The total's provenance is the weakest of its parts. A component without a sensor is absent.
    """
    result: dict = {}
    for component in COMPONENTS:
        own = [e for e in entries if e["component"] == component and e["primary"] and "energy_J" in e]
        if own:
            result |= _sum(component, own, window_s)
    parts = [e for e in entries if e["primary"] and "energy_J" in e]
    return result | (_sum("total", parts, window_s) if parts else {})


def _sum(name: str, entries: list[dict], window_s: float) -> dict:
    energy_J = sum(entry["energy_J"] for entry in entries)
    return {
        f"energy_{name}_J": energy_J,
        f"energy_{name}_provenance": max((entry["provenance"] for entry in entries), key=PROVENANCES.index),
        f"energy_{name}_statistical_J": float(np.sqrt(sum(e.get("statistical_J", 0.0) ** 2 for e in entries))),
        f"energy_{name}_systematic_J": sum(SYSTEMATIC[e["provenance"]] * e["energy_J"] for e in entries),
        f"mean_power_{name}_W": energy_J / window_s,
    }


def cross_checks(entries: list[dict]) -> list[dict]:
    """Where a device has a counter and a power, both energies and by what share the power's is larger."""
    by_id = {(entry["host"], entry["id"]): entry for entry in entries}
    checks = []
    for entry in entries:
        counter = by_id.get((entry["host"], entry.get("checks")))
        if counter and "energy_J" in entry and counter.get("energy_J", 0) > 0:
            gap = entry["energy_J"] / counter["energy_J"] - 1
            checks.append({"host": entry["host"], "device": entry["device"], "counter_J": counter["energy_J"],
                           "power_J": entry["energy_J"], "gap": gap, "flagged": abs(gap) > DISAGREEMENT})  # fmt: skip
    return checks


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
    start, stop = window_ns
    begin_ns, end_ns = np.clip(begin_ns, start, stop), np.clip(end_ns, start, stop)
    entries = []
    inside_s = np.bincount(kinds, weights=(end_ns - begin_ns) / 1e9, minlength=len(names))
    joules = {}
    for component, parts in shares.items():
        of_phase = sum(share * np.bincount(kinds, weights=curve.at(end_ns) - curve.at(begin_ns), minlength=len(names))
                       for curve, share in parts)  # fmt: skip
        total = sum(share * (curve.at(stop) - curve.at(start)) for curve, share in parts)
        joules[f"energy_{component}_J"] = np.append(of_phase, total - np.sum(of_phase))
    times_s = np.append(inside_s, (stop - start) / 1e9 - inside_s.sum())
    for index, name in enumerate([*names, "idle"]):
        if times_s[index] > 0:
            entries.append({"phase": name, "time_s": float(times_s[index]),
                            **{field: float(values[index]) for field, values in joules.items()}})  # fmt: skip
    return entries


def cost_so_far(folder: Path) -> dict:
    """``seconds`` and energies (``totals``) of all that was sampled to folder/samples-*.jsonl, cut calls included."""
    hosts = [samples for samples in read_hosts(folder) if len(samples.t_ns) > 1]
    windows = [(int(samples.t_ns[0]), int(samples.t_ns[-1])) for samples in hosts]
    seconds = sum(end - start for start, end in windows) / 1e9
    entries = [entry for samples, window in zip(hosts, windows, strict=True)
               for entry in energy_of_sensors(curves(samples), *window)]  # fmt: skip
    return {"seconds": seconds} | totals(entries, seconds)


def power_trace(run_dir: Path, period_s: float = 0.5) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Mean power in W of every sensor of a run in steps of ``period_s``; time 0 is the start of the training.

    Returns sensor id -> (t_s, power_W), each (steps,), t_s the middle of a step; of several hosts the id carries
    the host's name. Before the first and after the last sample there is nothing.
    """
    events = read_events(run_dir)
    host_of_rank = {event["rank"]: event["host"] for event in events if event["event"] == "rank_start"}
    starts = {host_of_rank[e["rank"]]: e["t_mono_ns"] for e in events if e["event"] == "training_start"}
    traces = {}
    hosts = read_hosts(run_dir)
    for samples in hosts:
        for curve in curves(samples):
            seconds = (curve.good_ns[[0, -1]] - starts.get(curve.host, curve.good_ns[0])) / 1e9
            edges_s = np.arange(np.ceil(seconds[0] / period_s), np.floor(seconds[1] / period_s) + 1) * period_s
            energy_J = curve.at(curve.good_ns[0] + ((edges_s - seconds[0]) * 1e9).astype(np.int64))
            name = curve.sensor["id"] if len(hosts) == 1 else f"{curve.host}:{curve.sensor['id']}"
            traces[name] = ((edges_s[1:] + edges_s[:-1]) / 2, np.diff(energy_J) / period_s)
    return traces
