"""Account for a run from its raw files: times and energies of hosts, ranks, devices and phases.

Each host is accounted on its own clock, between the marks that its own ranks wrote after a barrier.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from energynn.measure import energy
from energynn.measure.energy import COMPONENTS, THRESHOLDS, Curve
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
NOT_SAMPLED = {"sensors": [], "unaccounted": ["no samples of this host: its energy is missing"]}


@dataclass
class Host:
    """What one host did in one segment, a start of the run.

    window_s: of its training, on its own clock; None if none began. sensors: with their energies.
    doubts: reasons against them. idle_W: (component, when) -> mean power. phases: of its ranks, an
    entry of time and energies for each.
    """

    segment: int
    events: list[dict]
    samples: Samples
    window_s: tuple[float, float] | None
    sensors: list[dict] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    idle_W: dict[tuple[str, str], float | None] = field(default_factory=dict)
    phases: list[dict] = field(default_factory=list)

    @property
    def primary(self) -> list[dict]:
        return [sensor for sensor in self.sensors if sensor["primary"]]


def account(run_dir: Path, thresholds: dict | None = None) -> dict:
    """Give times and energies of a run, all its segments added up, also of one that died.

    thresholds: of this system, where they differ from ``energy.THRESHOLDS``. The time between two
    segments does not count. What cannot be known is absent. ``doubts`` are the reasons against the
    energies.
    """
    limits = THRESHOLDS | (thresholds or {})
    parts = [
        read_segment(folder, events, number, limits)
        for number, (folder, events) in enumerate(events_of_segments(run_dir).items(), start=1)
    ]
    hosts = list(chain.from_iterable(parts))
    trained = [part for part in map(_that_trained, parts) if part]
    result = {
        "segments": [_segment(part) for part in trained],
        "sensors": [sensor for host in hosts for sensor in host.sensors],
        "flags": sorted({problem for host in hosts for problem in host.samples.problems}),
        "doubts": [text for host in hosts for text in host.doubts],
        "energy_phases": [],
        "phases": [],
    }
    if hosts:
        result["hosts"] = [_about(host) for host in hosts]
        result["nodes"] = max(map(len, parts))
        result["sampling_period_s"] = max(host.samples.period_s for host in hosts)
    if not trained:
        return result
    result["doubts"] += _absences(hosts) + _overlaps(result["segments"])
    time_s = sum(part["training_time_s"] for part in result["segments"])
    worst = [_worst(part, "samples") for part in trained]
    coverage = min(_worst(part, "coverage") for part in trained)
    result |= {"training_time_s": time_s, "samples_in_training": sum(worst), "coverage": coverage}
    result |= energy.totals(result["sensors"], time_s)
    result |= _idle(trained, result)
    result["energy_phases"] = _phases(hosts, result)
    result["phases"] = _phase_times(result["energy_phases"])
    return result


def _that_trained(part: list[Host]) -> list[Host]:
    return [host for host in part if host.window_s]


def _worst(part: list[Host], name: str) -> float:
    """Return a number of the primary sensor that has the least of it; 0 if a host has no sensor."""
    return min(min((one[name] for one in host.primary), default=0) for host in part)


def _about(host: Host) -> dict:
    """Say what a host is, as its own sampler tells: CPU, memory, kernel, job."""
    place = {"segment": host.segment, "host": host.samples.host}
    return place | host.samples.header.get("machine", {})


def _segment(part: list[Host]) -> dict:
    """Say when a segment began, how long it trained, and what it took."""
    sensors = [sensor for host in part for sensor in host.sensors]
    marks = [event for host in part for event in host.events]
    time_s = max(host.window_s[1] - host.window_s[0] for host in part)
    return {
        "start_wall_ns": min(one["t_wall_ns"] for one in events_of_kind(marks, "training_start")),
        "training_time_s": time_s,
        "energy_total_J": energy.totals(sensors, time_s).get("energy_total_J"),
    }


def _absences(hosts: list[Host]) -> list[str]:
    """D: a component that another host or segment has."""
    of_hosts = [{sensor["component"] for sensor in host.primary} for host in hosts]
    reasons = []
    for host, components in zip(hosts, of_hosts, strict=True):
        for component in sorted(set().union(*of_hosts) - components):
            where = f"{host.samples.host} in segment {host.segment}"
            reasons.append(f"D: {where} has no sensor of {component}")
    return reasons


def _overlaps(segments: list[dict]) -> list[str]:
    for one, later in pairwise(segments):
        if later["start_wall_ns"] - one["start_wall_ns"] < one["training_time_s"] * 1e9:
            return ["D: two segments overlap: their energy counts twice"]
    return []


# ----------------------------------------------------------------------------------- one segment


def read_segment(folder: Path, events: list[dict], number: int, limits: dict) -> list[Host]:
    """Read the samples and phases of one start of a run, host by host."""
    names = host_of_rank(events)
    phases = read_phases(folder)
    nothing = np.zeros(0, dtype=np.int64)
    of_host = {
        name: Samples(NOT_SAMPLED | {"host": name, "period_s": 0}, nothing, nothing, nothing)
        for name in names.values()
    }
    of_host |= {samples.host: samples for samples in read_hosts(folder)}
    hosts = []
    for name in sorted(of_host):
        own = [event for event in events if names.get(event["rank"]) == name]
        hosts.append(_read_host(of_host[name], own, number, phases, limits))
    return hosts


def _read_host(samples: Samples, events, number: int, phases: dict, limits: dict) -> Host:
    """Account for one host; events: of its own ranks."""
    t_s = samples.t_ns / 1e9
    host = Host(number, events, samples, _window(events, t_s))
    sensors, unread = in_use(samples.header["sensors"], events)
    curves = energy.curves(t_s, samples.readings, sensors, samples.period_s)
    if host.window_s:
        where = {"segment": number, "host": samples.host}
        entries = energy.entries_of(curves, *host.window_s, limits)
        host.sensors = [where | entry for entry in entries]
        unread += samples.header.get("unaccounted", [])
        host.doubts = energy.doubts(curves, *host.window_s, unread, limits)
        host.phases = _phases_of_ranks(host, phases, curves)
    for when in IDLE:
        for component in COMPONENTS:
            host.idle_W[component, when] = _idle_W(curves, component, _idle_span(events, when))
    samples.readings = None  # they may be large
    return host


def _times_ns(events: list[dict], kind: str) -> dict[int, int]:
    """Rank -> time of an event on its host's clock."""
    return {event["rank"]: event["t_mono_ns"] for event in events_of_kind(events, kind)}


def _window(events: list[dict], t_s: np.ndarray) -> tuple[float, float] | None:
    """Tell when a host trained, from its first rank's start to its last rank's end.

    If no rank wrote an end, it is the host's last sample.
    """
    begin_s = min(_times_ns(events, "training_start").values(), default=np.inf) / 1e9
    end_s = max(_times_ns(events, "training_end").values(), default=t_s.max(initial=0) * 1e9) / 1e9
    return (begin_s, end_s) if begin_s < end_s else None


def in_use(sensors: list[dict], events: list[dict]) -> tuple[list[dict], list[str]]:
    """Take GPUs that no rank uses out of the sums, if every rank of the host names its GPU.

    Returns the sensors, and in words the GPUs of ranks that none of them reads.
    """
    used = set(_gpus_of_ranks(events).values())
    if not used or None in used:
        return sensors, []
    unused = {"primary": False, "checks": None, "used": False}
    marked = []
    for one in sensors:
        is_used = one["component"] != "gpu" or _uuid_of(one) in used
        marked.append(one if is_used else one | unused)
    unread = sorted(used - set(map(_uuid_of, sensors)))
    return marked, [f"no sensor of GPU {uuid}, which a rank uses" for uuid in unread]


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
    """Tell when all ranks of a host were idle, in s; the end is before the begin if never."""
    marks = [event for event in events if event.get("when") == when]
    begin_ns = max(_times_ns(marks, "idle_start").values(), default=np.inf)
    end_ns = min(_times_ns(marks, "idle_end").values(), default=0)
    return begin_ns / 1e9, end_ns / 1e9


def _idle_W(curves: list[Curve], component: str, span_s: tuple[float, float]) -> float | None:
    """Return the mean power of a component; None where a sensor has too few readings."""
    own = [one for one in curves if one.sensor["component"] == component and one.sensor["primary"]]
    begin_s, end_s = span_s
    counts = [((one.t_s >= begin_s) & (one.t_s <= end_s)).sum() for one in own]
    if min(counts, default=0) < FEWEST_IDLE_SAMPLES:
        return None
    return sum(float(one.at(end_s) - one.at(begin_s)) for one in own) / (end_s - begin_s)


def _idle(parts: list[list[Host]], totals: dict) -> dict:
    """Return idle power of all hosts, of the first segment that knows it, and energies without it.

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
                of_hosts = [host.idle_W[component, when] for host in part]
                if None not in of_hosts:
                    watts.setdefault(when, sum(of_hosts))
        if not watts:
            return result
        result |= {f"idle_power_{component}_{when}_W": watts[when] for when in watts}
        mean_W = watts.get("ready", sum(watts.values()) / len(watts))
        net_J.append(totals[f"energy_{component}_J"] - mean_W * totals["training_time_s"])
        result[f"energy_net_{component}_J"] = net_J[-1]
    return result | ({"energy_net_total_J": sum(net_J)} if net_J else {})


# ---------------------------------------------------------------------------------------- phases


def _phases_of_ranks(host: Host, phases: dict, curves: list[Curve]) -> list[dict]:
    """Give time and energy of each phase of each rank; ``idle`` is what lies in no phase.

    A rank has all of its GPU's energy and an equal part of its host's CPU and RAM. Phases shorter
    than a sampling period get the mean power around them.
    """
    starts_ns = _times_ns(host.events, "training_start")
    ends_ns = _times_ns(host.events, "training_end")
    gpus = _gpus_of_ranks(host.events)
    entries = []
    for rank in gpus.keys() & phases.keys() & starts_ns.keys():
        kinds, begin_ns, end_ns, names = phases[rank]
        span_ns = starts_ns[rank], ends_ns.get(rank, int(host.window_s[1] * 1e9))
        spans_ns = np.clip([begin_ns, end_ns], *span_ns)
        spans_ns = np.column_stack([spans_ns, span_ns])  # the last: the training
        columns = {"time_s": np.diff(spans_ns, axis=0)[0] / 1e9}
        for curve in curves:
            is_gpu = curve.sensor["component"] == "gpu"
            if curve.sensor["primary"] and (not is_gpu or _uuid_of(curve.sensor) == gpus[rank]):
                joules = np.diff(curve.at(spans_ns / 1e9), axis=0)[0] / (1 if is_gpu else len(gpus))
                name = f"energy_{curve.sensor['component']}_J"
                columns[name] = columns.get(name, 0.0) + joules
        where = {"rank": rank, "host": host.samples.host, "device": gpus[rank] or "cpu"}
        for index, phase in enumerate(names):
            sums = {name: float(each[:-1][kinds == index].sum()) for name, each in columns.items()}
            entries.append(where | {"phase": phase} | sums)
        idle = {name: float(each[-1] - each[:-1].sum()) for name, each in columns.items()}
        entries.append(where | {"phase": "idle"} | idle)
    return entries


def _phases(hosts: list[Host], totals: dict) -> list[dict]:
    """Give energy per rank, device and phase, and what belongs to no rank; together the totals."""
    sums: dict[tuple, dict] = {}
    for entry in chain.from_iterable(host.phases for host in hosts):
        same = sums.setdefault((entry["rank"], entry["phase"]), dict.fromkeys(entry, 0.0))
        for name, value in entry.items():
            same[name] = same.get(name, 0.0) + value if name.endswith(("_J", "_s")) else value
    rest = {"rank": None, "host": None, "device": None, "phase": "unattributed"}
    for name in [f"energy_{component}_J" for component in COMPONENTS]:
        if name in totals:
            of_ranks_J = sum(entry.get(name, 0.0) for entry in sums.values())
            rest[name] = round(totals[name] - of_ranks_J, 3)  # the rest is rounding
    return [*(sums[key] for key in sorted(sums)), rest] if sums else []


def _phase_times(entries: list[dict]) -> list[dict]:
    """Give seconds of each rank in each phase, from the entries of ``_phases``."""
    ranks: dict[int, dict] = {}
    for entry in entries:
        if entry["phase"] not in ("idle", "unattributed"):
            times = ranks.setdefault(entry["rank"], {"rank": entry["rank"]})
            times[f"{entry['phase']}_s"] = entry["time_s"]
    return list(ranks.values())


# ---------------------------------------------------------------------------------------- traces


def power_trace(run_dir: Path, period_s: float = 0.5) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Give the mean power in W of every sensor in steps of ``period_s``; the training starts at 0.

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
