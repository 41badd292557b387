"""Account for a run from its raw files: times and energies of hosts, ranks, devices and phases.

Each host is accounted on its own clock, between the marks that its own ranks wrote after a barrier.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from energynn.measure import energy
from energynn.measure.energy import COMPONENTS, Curve
from energynn.measure.samples import (
    Samples,
    events_of_kind,
    events_of_segments,
    host_of_rank,
    read_events,
    read_hosts,
    read_phases,
    times_of_hosts,
)

FEWEST_IDLE_SAMPLES = 5
IDLE = ("before", "ready", "after")  # the training


@dataclass
class Host:
    """What one host did in one segment, a start of the run.

    window_s: of its training, on its own clock; None if none began. sensors: with their energies.
    doubts: reasons against them. samples: instants of readings in the window. idle_W: (component,
    when) -> mean power. phases: of its ranks, an entry of time and energies for each.
    """

    name: str
    segment: int
    events: list[dict]
    window_s: tuple[float, float] | None
    sensors: list[dict] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    samples: int = 0
    idle_W: dict[tuple[str, str], float | None] = field(default_factory=dict)
    phases: list[dict] = field(default_factory=list)
    header: dict = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unreadable_lines: int = 0

    @property
    def time_s(self) -> float:
        return self.window_s[1] - self.window_s[0]

    @property
    def primary(self) -> list[dict]:
        return [sensor for sensor in self.sensors if sensor["primary"]]

    @property
    def devices(self) -> set[tuple[str, str]]:
        return {(sensor["component"], sensor["device"]) for sensor in self.primary}


def account(
    run_dir: Path, events: dict[Path, list[dict]] | None = None, thresholds: dict | None = None
) -> dict:
    """Times and energies of a run, all its segments added up; works on the remains of a dead run.

    events: ``events_of_segments``, if somebody has read them; thresholds: of this system, beside
    ``energy.THRESHOLDS``. The time between two segments does not count. What cannot be known is
    absent. ``doubts`` are the reasons against the energies.
    """
    events = events or events_of_segments(run_dir)
    parts = [
        read_segment(folder, of_folder, number, thresholds)
        for number, (folder, of_folder) in enumerate(events.items(), start=1)
    ]
    hosts = [host for part in parts for host in part]
    result = {
        "segments": [],
        "energy_phases": [],
        "sensors": [sensor for host in hosts for sensor in host.sensors],
        "flags": list(dict.fromkeys(problem for host in hosts for problem in host.problems)),
        "doubts": [text for host in hosts for text in host.doubts],
        "phases": _phase_times(hosts),
    }
    if about := [_about(host) for host in hosts if host.header.get("machine")]:
        result["hosts"] = about
    if hosts:
        result["nodes"] = max(len(part) for part in parts)
    if any(host.header for host in hosts):
        result["sampling_period_s"] = max(host.header.get("period_s", 0) for host in hosts)
        result["unreadable_lines"] = sum(host.unreadable_lines for host in hosts)
    trained = [list(filter(_has_trained, part)) for part in parts]
    trained = [part for part in trained if part]
    if not trained:
        return result
    result["segments"] = _segments(trained)
    result["doubts"] += _absences(trained)
    if any((entry["gap_before_s"] or 0) < 0 for entry in result["segments"]):
        result["doubts"].append("D: two segments overlap: their energy counts twice")
    time_s = result["training_time_s"] = sum(part["training_time_s"] for part in result["segments"])
    if result["sensors"]:
        result["samples_in_training"] = sum(map(_samples, trained))
        covered_s = sum(_coverage(part) * _time_s(part) for part in trained)
        result["coverage"] = covered_s / time_s
        result |= energy.totals(result["sensors"], time_s)
    result |= _idle(trained, result)
    result["energy_phases"] = _phases(trained, result)
    return result


def _has_trained(host: Host) -> bool:
    return host.window_s is not None


def _time_s(part: list[Host]) -> float:
    return max(host.time_s for host in part)


def _samples(part: list[Host]) -> int:
    """Samples of the host that has the fewest."""
    return min(host.samples for host in part)


def _coverage(part: list[Host]) -> float:
    """Coverage of the sensor that has the least; 0 if a host has none."""
    shares = [sensor["coverage"] for host in part for sensor in host.primary]
    return min(shares) if all(host.primary for host in part) else 0.0


def _about(host: Host) -> dict:
    """What a host is, as its own sampler says: CPU, memory, kernel, job, and every GPU."""
    gpus = {}
    for sensor in host.header["sensors"]:
        if sensor["component"] == "gpu":
            gpus[sensor["device"]] = {"device": sensor["device"]} | (sensor.get("notes") or {})
            gpus[sensor["device"]].pop("power", None)  # of the sensor, not of the GPU
    about = {"segment": host.segment, "host": host.name} | host.header["machine"]
    return about | {"gpus": list(gpus.values())}


def _absences(parts: list[list[Host]]) -> list[str]:
    """D: a device of a host that another segment had, and a component that another host has."""
    hosts = [host for part in parts for host in part]
    components = {component for host in hosts for component, _ in host.devices}
    reasons = []
    for host in hosts:
        of_host = set().union(*(other.devices for other in hosts if other.name == host.name))
        lacking = {" ".join(device) for device in of_host - host.devices}
        lacking |= components - {component for component, _ in of_host}
        if lacking:
            where = f"{host.name} in segment {host.segment}"
            reasons.append(f"D: {where} has no sensor of {', '.join(sorted(lacking))}")
    return reasons


def _segments(parts: list[list[Host]]) -> list[dict]:
    """When each segment began, how long it trained, what it took, and the gap before it."""
    entries: list[dict] = []
    for part in parts:
        sensors = [sensor for host in part for sensor in host.sensors]
        marks = [event for host in part for event in host.events]
        starts_ns = [event["t_wall_ns"] for event in events_of_kind(marks, "training_start")]
        entry = {
            "start_wall_ns": min(starts_ns),
            "training_time_s": _time_s(part),
            "gap_before_s": None,
            "energy_total_J": energy.totals(sensors, _time_s(part)).get("energy_total_J"),
            "finished": bool(events_of_kind(marks, "training_end")),
        }
        if entries:
            last = entries[-1]
            begun_s = (entry["start_wall_ns"] - last["start_wall_ns"]) / 1e9
            entry["gap_before_s"] = begun_s - last["training_time_s"]
        entries.append(entry)
    return entries


# ----------------------------------------------------------------------------------- one segment


def read_segment(
    folder: Path, events: list[dict], number: int = 1, thresholds: dict | None = None
) -> list[Host]:
    """Read the samples and phases of one start of a run, host by host."""
    names = host_of_rank(events)
    phases = read_phases(folder)
    hosts: dict[str, Host] = {}
    doubled = []
    for samples in read_hosts(folder):
        if samples.host in hosts:
            doubled.append(f"D: two samples files of {samples.host}: remove one of them")
            continue
        own = [event for event in events if names.get(event["rank"]) == samples.host]
        hosts[samples.host] = _read_host(samples, own, number, phases, thresholds)
    for name in set(names.values()) - hosts.keys():
        own = [event for event in events if names.get(event["rank"]) == name]
        hosts[name] = Host(name, number, own, _window(own, 0.0))
        hosts[name].doubts.append(f"D: no samples of {name}: its energy is missing")
        hosts[name].phases = _phases_of_ranks(hosts[name], phases, [])
    result = [hosts[name] for name in sorted(hosts)]
    if doubled:
        result[0].doubts += doubled
    return result


def _read_host(samples: Samples, events, number: int, phases: dict, thresholds) -> Host:
    """Account for one host; events: of its own ranks."""
    t_s = samples.t_ns / 1e9
    host = Host(samples.host, number, events, _window(events, t_s[-1] if len(t_s) else 0.0))
    host.header = samples.header
    host.problems = samples.problems
    host.unreadable_lines = samples.unreadable_lines
    sensors = in_use(samples.header["sensors"], events)
    curves = energy.curves(t_s, samples.readings, sensors, samples.period_s)
    if host.window_s:
        host.samples = int(((t_s >= host.window_s[0]) & (t_s <= host.window_s[1])).sum())
        where = {"segment": number, "host": host.name}
        entries = energy.entries_of(curves, *host.window_s, thresholds)
        host.sensors = [where | entry for entry in entries]
        unaccounted = samples.header.get("unaccounted", []) + _unread_gpus(sensors, events)
        host.doubts = energy.doubts(curves, *host.window_s, unaccounted, thresholds)
    for when in IDLE:
        for component in COMPONENTS:
            host.idle_W[component, when] = _idle_W(curves, component, _idle_span(events, when))
    host.phases = _phases_of_ranks(host, phases, curves)
    return host


def _times_ns(events: list[dict], kind: str) -> dict[int, int]:
    """Rank -> time of an event on its host's clock."""
    return {event["rank"]: event["t_mono_ns"] for event in events_of_kind(events, kind)}


def _window(events: list[dict], last_s: float) -> tuple[float, float] | None:
    """Training of a host, from its first rank's start to its last rank's end.

    If no rank wrote an end, it is the host's last sample.
    """
    begin_s = min(_times_ns(events, "training_start").values(), default=np.inf) / 1e9
    end_s = max(_times_ns(events, "training_end").values(), default=last_s * 1e9) / 1e9
    return (begin_s, end_s) if begin_s < end_s else None


def in_use(sensors: list[dict], events: list[dict]) -> list[dict]:
    """Take GPUs that no rank uses out of the sums, if every rank of the host names its GPU."""
    uuids = set(_gpus_of_ranks(events).values())
    if not uuids or None in uuids:
        return sensors
    unused = {"primary": False, "checks": None, "used": False}
    is_used = [one["component"] != "gpu" or _uuid_of(one) in uuids for one in sensors]
    return [one if used else one | unused for one, used in zip(sensors, is_used, strict=True)]


def _unread_gpus(sensors: list[dict], events: list[dict]) -> list[str]:
    uuids = set(_gpus_of_ranks(events).values()) - set(map(_uuid_of, sensors)) - {None}
    return [f"no sensor of GPU {uuid}, which a rank uses" for uuid in sorted(uuids)]


def _gpus_of_ranks(events: list[dict]) -> dict[int, str | None]:
    starts = events_of_kind(events, "rank_start")
    return {event["rank"]: _plain(event.get("gpu_uuid")) for event in starts}


def _uuid_of(sensor: dict) -> str | None:
    return _plain((sensor.get("notes") or {}).get("uuid"))


def _plain(uuid: str | None) -> str | None:
    """Write a GPU's UUID as torch does: NVML begins it with GPU-."""
    return uuid.removeprefix("GPU-").lower() if uuid else None


# ------------------------------------------------------------------------------------------ idle


def _idle_span(events: list[dict], when: str) -> tuple[float, float]:
    """The time in which all ranks of a host were idle, in s; ends before it begins if never."""
    marks = [event for event in events if event.get("when") == when]
    begin_ns = max(_times_ns(marks, "idle_start").values(), default=np.inf)
    end_ns = min(_times_ns(marks, "idle_end").values(), default=0)
    return begin_ns / 1e9, end_ns / 1e9


def _idle_W(curves: list[Curve], component: str, span_s: tuple[float, float]) -> float | None:
    """Mean power of a component; None where a sensor has too few readings."""
    own = [one for one in curves if one.sensor["component"] == component and one.sensor["primary"]]
    begin_s, end_s = span_s
    counts = [((one.t_s >= begin_s) & (one.t_s <= end_s)).sum() for one in own]
    if min(counts, default=0) < FEWEST_IDLE_SAMPLES:
        return None
    return sum(float(one.at(end_s) - one.at(begin_s)) for one in own) / (end_s - begin_s)


def _idle(parts: list[list[Host]], totals: dict) -> dict:
    """Idle power of all hosts, each of the first segment that knows it, and energies without it.

    The power that a device has when all is ready is the one to take off, where it was measured.
    """
    result: dict = {}
    net_J = []
    for component in COMPONENTS:
        if f"energy_{component}_J" not in totals:
            continue
        watts: dict[str, float] = {}
        for when in IDLE:
            for part in parts:
                of_hosts = [host.idle_W.get((component, when)) for host in part]
                if None not in of_hosts and when not in watts:
                    watts[when] = result[f"idle_power_{component}_{when}_W"] = sum(of_hosts)
        if not watts:
            return result
        mean_W = watts.get("ready", sum(watts.values()) / len(watts))
        net_J.append(totals[f"energy_{component}_J"] - mean_W * totals["training_time_s"])
        result[f"energy_net_{component}_J"] = net_J[-1]
    return result | ({"energy_net_total_J": sum(net_J)} if net_J else {})


# ---------------------------------------------------------------------------------------- phases


def _phases_of_ranks(host: Host, phases: dict, curves: list[Curve]) -> list[dict]:
    """Times and energies of the phases of each rank of a host.

    A rank has all of its GPU's energy and an equal part of its host's CPU and RAM.
    """
    starts_ns = _times_ns(host.events, "training_start")
    ends_ns = _times_ns(host.events, "training_end")
    gpus = _gpus_of_ranks(host.events)
    entries = []
    for rank in gpus.keys() & phases.keys() & starts_ns.keys() if host.window_s else ():
        where = {"rank": rank, "host": host.name, "device": gpus[rank] or "cpu"}
        shares = []
        for curve in curves:
            is_gpu = curve.sensor["component"] == "gpu"
            is_own = not is_gpu or (gpus[rank] and _uuid_of(curve.sensor) == gpus[rank])
            if curve.sensor["primary"] and is_own:
                shares.append((curve, 1.0 if is_gpu else 1 / len(gpus)))
        span_ns = starts_ns[rank], ends_ns.get(rank, int(host.window_s[1] * 1e9))
        entries += [where | entry for entry in energy_of_phases(phases[rank], span_ns, shares)]
    return entries


def energy_of_phases(phases: tuple, span_ns: tuple[int, int], shares: list) -> list[dict]:
    """Time and energy of each phase of one rank; ``idle`` is what lies in no phase.

    phases: as ``read_phases`` has them; shares: curves, each with the share that is this rank's.
    Phases shorter than a sampling period get the mean power around them.
    """
    kinds, begin_ns, end_ns, names = phases
    begin_ns, end_ns = np.clip(begin_ns, *span_ns), np.clip(end_ns, *span_ns)

    def by_phase(amounts: np.ndarray, whole: float) -> np.ndarray:
        sums = np.bincount(kinds, weights=amounts, minlength=len(names))
        return np.append(sums, whole - sums.sum())

    columns = {"time_s": by_phase((end_ns - begin_ns) / 1e9, (span_ns[1] - span_ns[0]) / 1e9)}
    for curve, share in shares:
        name = f"energy_{curve.sensor['component']}_J"
        whole_J = curve.at(span_ns[1] / 1e9) - curve.at(span_ns[0] / 1e9)
        joules = share * by_phase(curve.at(end_ns / 1e9) - curve.at(begin_ns / 1e9), whole_J)
        columns[name] = columns.get(name, 0.0) + joules
    entries = []
    for index, phase in enumerate([*names, "idle"]):
        values = {name: float(column[index]) for name, column in columns.items()}
        entries.append({"phase": phase} | values)
    return entries


def _phases(parts: list[list[Host]], totals: dict) -> list[dict]:
    """Energy per rank, device and phase, and what belongs to no rank; together the totals."""
    sums: dict[tuple, dict] = {}
    hosts = chain.from_iterable(parts)
    for entry in chain.from_iterable(host.phases for host in hosts):
        if not entry["time_s"]:
            continue
        same = sums.setdefault((entry["rank"], entry["phase"]), dict.fromkeys(entry, 0.0))
        for name, value in entry.items():
            same[name] = same.get(name, 0.0) + value if name.endswith(("_J", "_s")) else value
    rest = {"rank": None, "host": None, "device": None, "phase": "unattributed"}
    for name in [f"energy_{component}_J" for component in COMPONENTS]:
        if name in totals:
            left_J = totals[name] - sum(entry.get(name, 0.0) for entry in sums.values())
            rest[name] = left_J if abs(left_J) > 1e-9 * totals[name] else 0.0  # rounding
    return [*(sums[key] for key in sorted(sums)), rest] if sums else []


def _phase_times(hosts: list[Host]) -> list[dict]:
    """Seconds of each rank in each phase, all segments added up."""
    ranks: dict[int, dict] = {}
    for entry in chain.from_iterable(host.phases for host in hosts):
        if entry["phase"] == "idle":
            continue
        times = ranks.setdefault(entry["rank"], {"rank": entry["rank"]})
        name = f"{entry['phase']}_s"
        times[name] = times.get(name, 0.0) + entry["time_s"]
    return [ranks[rank] for rank in sorted(ranks)]


# ---------------------------------------------------------------------------------------- traces


def power_trace(run_dir: Path, period_s: float = 0.5) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Mean power in W of every sensor of a run in steps of ``period_s``; time 0: training starts.

    Returns sensor id -> (t_s, power_W), each (steps,), t_s the middle of a step; of several hosts
    the id carries the host's name. Hosts are put on one axis by their wall clocks.
    """
    hosts = [samples for samples in read_hosts(run_dir) if len(samples.t_ns) > 1]
    ahead_s = {one.host: (one.wall_ns[0] - one.t_ns[0]) / 1e9 for one in hosts}
    begun_ns = times_of_hosts(read_events(run_dir), "training_start")
    walls_s = [begun_ns[host] / 1e9 + ahead_s[host] for host in begun_ns.keys() & ahead_s.keys()]
    traces = {}
    for samples in hosts:
        t_s = samples.t_ns / 1e9 + ahead_s[samples.host]
        t_s -= min(walls_s, default=t_s[0])
        sensors = samples.header["sensors"]
        for curve in energy.curves(t_s, samples.readings, sensors, samples.period_s):
            first, last = curve.t_s[[0, -1]] / period_s
            edges_s = np.arange(np.ceil(first), np.floor(last) + 1) * period_s
            name = curve.sensor["id"] if len(hosts) == 1 else f"{samples.host}:{curve.sensor['id']}"
            watts = np.diff(curve.at(edges_s)) / period_s
            traces[name] = ((edges_s[1:] + edges_s[:-1]) / 2, watts)
    return traces
