"""The energies of one run from its raw files: per sensor, component, phase and rank, and what is doubtful."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from energynn.measure import energy, plausible
from energynn.measure.energy import COMPONENTS, Curve
from energynn.measure.plausible import Judgement
from energynn.measure.samples import (
    Samples,
    events_of_kind,
    host_of_rank,
    read_events,
    read_hosts,
    read_phases,
    segments,
)

FEWEST_IDLE_SAMPLES = 5
END_OF_TIME_NS = 2**63 - 1
WHOLE = 1.0 - 1e-6  # a coverage above it has no gap


@dataclass(frozen=True)
class Segment:
    """One start of a run, as its raw files tell it.

    hosts: what the sampler of each host wrote. starts, ends: the marks at which each rank began and ended its training;
    a rank whose file was cut off before ``rank_start`` is on no host that we know of, and has none. windows: host ->
    start and end of the training in ns of its own monotonic clock. curves: host -> energy of each of its sensors.
    sensors: energy of each sensor within the window of its host. missing: in words, what has no sensor.
    """

    folder: Path
    events: list[dict]
    hosts: list[Samples]
    host_of_rank: dict[int, str]
    gpu_of_rank: dict[int, str | None]
    starts: list[dict]
    ends: list[dict]
    windows: dict[str, tuple[int, int]]
    curves: dict[str, list[Curve]]
    sensors: list[dict]
    missing: list[str]

    @property
    def training_time_s(self) -> float:
        return max(end - start for start, end in self.windows.values()) / 1e9

    @property
    def start_wall_ns(self) -> int:
        return min(event["t_wall_ns"] for event in self.starts)

    @property
    def end_wall_ns(self) -> int:
        return self.start_wall_ns + int(self.training_time_s * 1e9)

    @property
    def samples_in_training(self) -> int:
        """Samples of the host that has the fewest of them; none where a sensor is missing."""
        if self.missing:
            return 0
        counts = []
        for host in self.hosts:
            if host.host in self.windows:
                start_ns, end_ns = self.windows[host.host]
                counts.append(int(((host.t_ns >= start_ns) & (host.t_ns <= end_ns)).sum()))
        return min(counts, default=0)

    @property
    def coverage(self) -> float:
        """Coverage of the sensor that has the least; 0 where a sensor is missing."""
        if self.missing:
            return 0.0
        covered = [sensor["coverage"] for sensor in self.sensors if sensor["primary"] and "coverage" in sensor]
        return min(covered, default=0.0)


def account(run_dir: Path) -> dict:
    """Times and energies of a run, all its segments added up; works on the remains of a dead run too.

    A segment is one start of the run. The time between two segments does not count; ``segments`` shows it. What cannot
    be known is absent: without a training window there are no energies.
    """
    parts = [read_segment(folder) for folder in segments(run_dir)]
    result = _facts_of_hosts(parts)
    trained = [part for part in parts if part.windows]
    if not trained:
        return result
    result["training_time_s"] = sum(part.training_time_s for part in trained)
    result["cross_checks"] = energy.cross_checks(_added(result["sensors"]))
    for check in result["cross_checks"]:
        if check["flagged"]:
            where = f"gpu {check['device']} of {check['host']}"
            result["flags"].append(f"{where}: the power's integral is {check['gap']:+.1%} off the counter")
    doubtful = energy.doubtful_J(result["sensors"], result["cross_checks"])
    if result["training_time_s"] > 0 and result["sensors"]:
        result["samples_in_training"] = sum(part.samples_in_training for part in trained)
        covered_s = sum(part.coverage * part.training_time_s for part in trained)
        result["coverage"] = covered_s / result["training_time_s"]
        result |= energy.totals(result["sensors"], result["training_time_s"], doubtful)
        doubtful_J = sum(doubtful.values())
        if doubtful_J > 0:
            result["doubtful_share"] = 1 / (1 + result.get("energy_total_J", 0.0) / doubtful_J)
    result |= _idle(trained, result)
    result["energy_phases"] = _phases(trained, result)
    result["segments"] = _times_and_energies(trained)
    return result


def read_segment(folder: Path) -> Segment:
    """Read the raw files of one start of a run, and find the energy of each sensor during its training."""
    events, hosts = read_events(folder), read_hosts(folder)
    leave_out_unused(events, hosts)
    where = host_of_rank(events)
    gpus = {event["rank"]: _plain_uuid(event.get("gpu_uuid")) for event in events_of_kind(events, "rank_start")}
    starts = [event for event in events_of_kind(events, "training_start") if event["rank"] in where]
    ends = [event for event in events_of_kind(events, "training_end") if event["rank"] in where]
    windows = _training_windows(starts, ends, where, hosts)
    curves, sensors = {}, []
    for host in hosts:
        if host.host in windows:
            judged = plausible.judge(host)
            curves[host.host] = energy.curves(host, judged)
            sensors += _energy_of_sensors(host.host, judged, curves[host.host], windows[host.host])
    missing = _missing(hosts, where, gpus)
    return Segment(folder, events, hosts, where, gpus, starts, ends, windows, curves, sensors, missing)


def leave_out_unused(events: list[dict], hosts: list[Samples]) -> None:
    """Where every rank has said which GPU it uses, other GPUs of its host enter no sum."""
    starts = events_of_kind(events, "rank_start")
    for samples in hosts:
        used = {_plain_uuid(event.get("gpu_uuid")) for event in starts if event["host"] == samples.host}
        if not used or None in used:
            continue
        for sensor in samples.header["sensors"]:
            if sensor["component"] == "gpu" and _uuid_of(sensor) not in used:
                sensor |= {"primary": False, "used": False}


def _training_windows(
    starts: list[dict], ends: list[dict], where: dict[int, str], hosts: list[Samples]
) -> dict[str, tuple[int, int]]:
    """Each host's training window on its own clock, by the marks of its ranks; a dead run ends at its last sample."""
    windows = {}
    last_sample_ns = {samples.host: int(samples.t_ns[-1]) for samples in hosts if len(samples.t_ns)}
    for host in sorted(set(where.values())):
        begun_ns = [event["t_mono_ns"] for event in starts if where[event["rank"]] == host]
        ended_ns = [event["t_mono_ns"] for event in ends if where[event["rank"]] == host]
        if begun_ns and ended_ns:
            windows[host] = (min(begun_ns), max(ended_ns))
        elif begun_ns and host in last_sample_ns:
            windows[host] = (min(begun_ns), last_sample_ns[host])
    return windows


def _energy_of_sensors(host: str, judged: list[Judgement], curves: list[Curve], window: tuple[int, int]) -> list[dict]:
    """The sensors of one host with their energies; one that was never read well has none."""
    entries = energy.energy_of_sensors(curves, *window)
    for judgement in judged:
        if judgement.is_dead:
            failed = {"host": host, "samples": 0, "failed_reads": len(judgement.good)}
            entries.append({**judgement.sensor, **failed})
    return entries


def _missing(hosts: list[Samples], where: dict[int, str], gpus: dict[int, str | None]) -> list[str]:
    """In words: hosts of ranks without samples, and ranks whose GPU no sensor reads."""
    sampled = {samples.host for samples in hosts if len(samples.t_ns)}
    lines = [f"no samples of {host}: its energy is missing" for host in sorted(set(where.values()) - sampled)]
    read = {(samples.host, _uuid_of(sensor)) for samples in hosts for sensor in samples.header["sensors"]}
    for rank, uuid in gpus.items():
        if uuid and (where[rank], uuid) not in read:
            lines.append(f"rank {rank}: no sensor of its GPU {uuid} on {where[rank]}; its energy is missing")
    return lines


def _facts_of_hosts(parts: list[Segment]) -> dict:
    """What is known of a run before its energies: sensors, clocks, cost of sampling, flags; lists may be empty."""
    result: dict = {"segments": [], "sensors": [], "energy_phases": [], "clocks": [], "overhead": [], "flags": []}
    for number, part in enumerate(parts, start=1):
        entries = {
            "clocks": [_clock(samples) for samples in part.hosts if samples.clocks],
            "overhead": [samples.overhead() for samples in part.hosts],
            "sensors": part.sensors,
        }
        flags = _flags(part)
        if len(parts) > 1:
            flags = [f"segment {number}: {flag}" for flag in flags]
            for name, values in entries.items():
                entries[name] = [{"segment": number, **entry} for entry in values]
        for name, values in entries.items():
            result[name] += values
        result["flags"] += flags
    hosts = [samples for part in parts for samples in part.hosts]
    if hosts:
        result["sampling_period_s"] = max(samples.period_s for samples in hosts)
        result["unreadable_lines"] = sum(samples.unreadable_lines for samples in hosts)
    nodes = max((len(set(part.host_of_rank.values())) for part in parts), default=0)
    if nodes:
        result["nodes"] = nodes
    return result


def _flags(part: Segment) -> list[str]:
    """What is doubtful about one segment, in words."""
    flags = []
    for samples in part.hosts:
        flags += list(dict.fromkeys(samples.problems))
        for step in samples.wall_clock_steps():
            flags.append(f"the wall clock of {step['host']} was set by {step['step_s']:+.2f} s while the run went on")
    if not part.windows:
        return flags
    flags += part.missing
    for sensor in part.sensors:
        name = f"{sensor['id']} of {sensor['host']}"
        if sensor.get("doubt") and sensor.get("used", True):
            flags.append(f"{name}: {sensor['doubt']}")
        if sensor.get("aliased"):
            flags.append(f"{name}: aliased, the load changes faster than it is sampled")
        if sensor.get("coverage", 1.0) < WHOLE:
            flags.append(f"{name}: {1 - sensor['coverage']:.2%} of the time is in gaps")
    return flags


def _clock(samples: Samples) -> dict:
    first, last = samples.clocks[0], samples.clocks[-1]
    return {
        "host": samples.host,
        "reference": last["reference"],
        "method": last["method"],
        "offset_start_ns": first["offset_ns"],
        "offset_end_ns": last["offset_ns"],
        "uncertainty_ns": last["uncertainty_ns"],
    }


def _times_and_energies(parts: list[Segment]) -> list[dict]:
    """The record's list of segments: when each began, how long it trained, what it took, and the gap before it."""
    entries = []
    for number, part in enumerate(parts):
        joules = energy.totals(part.sensors, part.training_time_s) if part.training_time_s > 0 else {}
        gap_s = (part.start_wall_ns - parts[number - 1].end_wall_ns) / 1e9 if number else None
        entries.append(
            {
                "start_wall_ns": part.start_wall_ns,
                "training_time_s": part.training_time_s,
                "gap_before_s": gap_s,
                "energy_total_J": joules.get("energy_total_J"),
                "finished": bool(part.ends),
            }
        )
    return entries


def _added(entries: list[dict]) -> list[dict]:
    """One entry per sensor with the energies of all segments."""
    added: dict[tuple, dict] = {}
    for entry in entries:
        if "energy_J" in entry:
            total = added.setdefault((entry["host"], entry["id"]), {**entry, "energy_J": 0.0})
            total["energy_J"] += entry["energy_J"]
    return list(added.values())


# ---------------------------------------------------------------------------------------------------------------- idle


def _idle(parts: list[Segment], totals: dict) -> dict:
    """Mean power while nothing was computed, before and after the training, and the energies without it."""
    result: dict = {}
    net_J: dict[str, float] = {}
    present = [component for component in COMPONENTS if f"energy_{component}_J" in totals]
    for component in present:
        watts = _idle_power(parts, component)
        if not watts:
            continue
        for when, idle_W in watts.items():
            result[f"idle_power_{component}_{when}_W"] = idle_W
        mean_W = sum(watts.values()) / len(watts)
        net_J[component] = totals[f"energy_{component}_J"] - mean_W * totals["training_time_s"]
        result[f"energy_net_{component}_J"] = net_J[component]
    if net_J and len(net_J) == len(present):
        result["energy_net_total_J"] = sum(net_J.values())
    return result


def _idle_power(parts: list[Segment], component: str) -> dict[str, float]:
    """Idle power in W of a component of all hosts, ``before`` and ``after``, of the first segment that knows it."""
    watts: dict[str, float] = {}
    for part in parts:
        windows = _idle_windows(part)
        for when in ("before", "after"):
            of_hosts = []
            for (host, at), window in windows.items():
                if at == when:
                    of_hosts.append(_mean_power(part, component, host, window))
            if of_hosts and len(of_hosts) == len(part.windows) and None not in of_hosts:
                watts.setdefault(when, sum(of_hosts))
    return watts


def _idle_windows(part: Segment) -> dict[tuple[str, str], tuple[int, int]]:
    """(host, before or after) -> the time in which all ranks of the host were idle."""
    starts: dict[tuple[str, str], int] = {}
    ends: dict[tuple[str, str], int] = {}
    for event in part.events:
        if event["event"] not in ("idle_start", "idle_end") or event["rank"] not in part.host_of_rank:
            continue
        key = (part.host_of_rank[event["rank"]], event["when"])
        if event["event"] == "idle_start":
            starts[key] = max(starts.get(key, 0), event["t_mono_ns"])
        else:
            ends[key] = min(ends.get(key, END_OF_TIME_NS), event["t_mono_ns"])
    both = [key for key in starts if key in ends]
    return {key: (starts[key], ends[key]) for key in both if 0 < starts[key] < ends[key]}


def _mean_power(part: Segment, component: str, host: str, window: tuple[int, int]) -> float | None:
    """Mean power in W of a host's sensors of a component; None where one has too few readings in the window."""
    start_ns, end_ns = window
    energy_J = 0.0
    for curve in part.curves.get(host, ()):
        if curve.sensor["component"] != component or not curve.sensor["primary"]:
            continue
        if ((curve.good_ns >= start_ns) & (curve.good_ns <= end_ns)).sum() < FEWEST_IDLE_SAMPLES:
            return None
        energy_J += curve.between(start_ns, end_ns)[0]
    return energy_J / (end_ns - start_ns) * 1e9


# -------------------------------------------------------------------------------------------------------------- phases


def _phases(parts: list[Segment], totals: dict) -> list[dict]:
    """Energy per rank, device and phase, and what belongs to no rank; together they are the totals.

    A rank has all of its GPU's energy and an equal part of its host's CPU and RAM, so that these count once per node.
    """
    added: dict[tuple, dict] = {}
    for part in parts:
        phases = read_phases(part.folder)
        for rank, window in _rank_windows(part).items():
            if rank not in phases:
                continue
            where = {"rank": rank, "host": part.host_of_rank[rank], "device": part.gpu_of_rank.get(rank) or "cpu"}
            for entry in energy.energy_of_phases(phases[rank], window, _shares(part, rank)):
                phase = entry.pop("phase")
                sums = added.setdefault((rank, phase), where | {"phase": phase})
                for name, value in entry.items():
                    sums[name] = sums.get(name, 0.0) + value
    if not added:
        return []
    rest = {"rank": None, "host": None, "device": None, "phase": "unattributed"}
    for component in COMPONENTS:
        name = f"energy_{component}_J"
        if name in totals:
            rest[name] = totals[name] - sum(entry.get(name, 0.0) for entry in added.values())
    return [added[key] for key in sorted(added)] + [rest]


def _rank_windows(part: Segment) -> dict[int, tuple[int, int]]:
    """Training of each rank on its host's clock; one that did not end has its host's end."""
    ended_ns = {event["rank"]: event["t_mono_ns"] for event in part.ends}
    windows = {}
    for event in part.starts:
        rank = event["rank"]
        host = part.host_of_rank[rank]
        if host in part.windows:
            windows[rank] = (event["t_mono_ns"], ended_ns.get(rank, part.windows[host][1]))
    return windows


def _shares(part: Segment, rank: int) -> dict[str, list[tuple[Curve, float]]]:
    """Component -> the sensors that a rank has a share of, each with this share."""
    host, uuid = part.host_of_rank[rank], part.gpu_of_rank.get(rank)
    ranks_of_host = Counter(part.host_of_rank.values())[host]
    shares: dict[str, list[tuple[Curve, float]]] = {}
    for curve in part.curves.get(host, ()):
        component = curve.sensor["component"]
        if not curve.sensor["primary"]:
            continue
        if component != "gpu":
            shares.setdefault(component, []).append((curve, 1 / ranks_of_host))
        elif uuid and _uuid_of(curve.sensor) == uuid:
            shares.setdefault(component, []).append((curve, 1.0))
    return shares


def _uuid_of(sensor: dict) -> str | None:
    return _plain_uuid((sensor.get("notes") or {}).get("uuid"))


def _plain_uuid(uuid: str | None) -> str | None:
    """A GPU's UUID as torch writes it: NVML begins it with GPU-, torch does not."""
    return uuid.removeprefix("GPU-").lower() if uuid else None
