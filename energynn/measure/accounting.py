"""The energies of one run from its raw files: per sensor, component, phase and rank, and what is doubtful."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from energynn.measure import energy, plausible
from energynn.measure.energy import COMPONENTS, Curve
from energynn.measure.plausible import Judgement
from energynn.measure.samples import (
    Reader,
    Samples,
    events_of_kind,
    events_of_segments,
    files_named,
    host_of_rank,
    read_phases,
)
from energynn.processes import on_all_cores

FEWEST_IDLE_SAMPLES = 5
END_OF_TIME_NS = 2**63 - 1
WORTH_A_PROCESS_B = 2**26  # of samples: to read less takes no longer than to start processes
WHOLE = 1.0 - 1e-6  # a coverage above it has no gap


@dataclass(frozen=True)
class Marks:
    """What the ranks of one start of a run marked.

    starts, ends: the marks at which each rank began and ended its training; a rank whose file was cut off before
    ``rank_start`` is on no host that we know of, and has none. idle: (host, before or after) -> when all ranks of the
    host were idle, in ns of its own monotonic clock. within: host -> from and to, of a part of a start that stood still
    in between; still_s: for how long, before this part.
    """

    folder: Path
    rank_starts: list[dict]
    host_of_rank: dict[int, str]
    gpu_of_rank: dict[int, str | None]
    starts: list[dict]
    ends: list[dict]
    idle: dict[tuple[str, str], tuple[int, int]]
    within: dict[str, tuple[int, int]] = field(default_factory=dict)
    still_s: float = 0.0

    @property
    def is_last(self) -> bool:
        """Whether the start ends with this part."""
        return all(end_ns == END_OF_TIME_NS for _, end_ns in self.within.values())

    def clip(self, host: str, span: tuple[int, int]) -> tuple[int, int]:
        """What of a span of a host's clock lies in this part."""
        begin_ns, end_ns = self.within.get(host, span)
        return max(span[0], begin_ns), min(span[1], end_ns)

    def window(self, host: str, last_sample_ns: int | None = None) -> tuple[int, int] | None:
        """A host's training on its own clock, by the marks of its ranks; a dead run ends at its last sample."""
        begun_ns = [event["t_mono_ns"] for event in self.starts if self.host_of_rank[event["rank"]] == host]
        ended_ns = [event["t_mono_ns"] for event in self.ends if self.host_of_rank[event["rank"]] == host]
        end_ns = max(ended_ns, default=last_sample_ns)
        if not begun_ns or end_ns is None:
            return None
        window = self.clip(host, (min(begun_ns), end_ns))
        return window if window[0] < window[1] or host not in self.within else None

    def rank_windows(self, host: str, window: tuple[int, int]) -> dict[int, tuple[int, int]]:
        """Training of each rank of a host; one that did not end has its host's end."""
        ended_ns = {event["rank"]: event["t_mono_ns"] for event in self.ends}
        of_host = [event for event in self.starts if self.host_of_rank[event["rank"]] == host]
        spans = {event["rank"]: (event["t_mono_ns"], ended_ns.get(event["rank"], window[1])) for event in of_host}
        return {rank: self.clip(host, span) for rank, span in spans.items()}


@dataclass(frozen=True)
class Host:
    """What the samples of one host tell of one start of a run: all that the record needs, and nothing large.

    flags: what the sampler complained about, and where the wall clock was set. uuids: of the GPUs that were read.
    window: of the training. sensors: energy of each sensor within it. samples_in_training: instants within it.
    idle_W: (component, before or after) -> mean power; None where a sensor has too few readings. phases: of each rank,
    within the window; phase_times: of each rank, seconds of each phase, whenever.
    """

    host: str
    period_s: float
    unreadable_lines: int
    has_samples: bool
    uuids: set[str | None]
    about: dict
    flags: list[str]
    overhead: dict
    window: tuple[int, int] | None
    sensors: list[dict]
    samples_in_training: int
    idle_W: dict[tuple[str, str], float | None]
    phases: dict[int, list[dict]]
    phase_times: dict[int, dict[str, float]]


@dataclass(frozen=True)
class Segment:
    """One start of a run.

    windows: host -> start and end of its training; missing: in words, what has no sensor. phases, phase_times: of all
    ranks, as those of ``Host``.
    """

    marks: Marks
    hosts: list[Host]
    windows: dict[str, tuple[int, int]]
    missing: list[str]
    phases: dict[int, list[dict]]
    phase_times: dict[int, dict[str, float]]

    @property
    def start_wall_ns(self) -> int:
        """When the training of this part began, by the wall clock of its first rank."""
        walls_ns = []
        for start in self.marks.starts:
            begun_ns, _ = self.windows.get(self.marks.host_of_rank[start["rank"]], (0, 0))
            walls_ns.append(start["t_wall_ns"] + max(0, begun_ns - start["t_mono_ns"]))
        return min(walls_ns)

    @property
    def sensors(self) -> list[dict]:
        return [sensor for host in self.hosts for sensor in host.sensors]

    @property
    def training_time_s(self) -> float:
        return max(end - start for start, end in self.windows.values()) / 1e9

    @property
    def end_wall_ns(self) -> int:
        return self.start_wall_ns + int(self.training_time_s * 1e9)

    @property
    def samples_in_training(self) -> int:
        """Samples of the host that has the fewest of them; none where a sensor is missing."""
        if self.missing:
            return 0
        return min((host.samples_in_training for host in self.hosts if host.window), default=0)

    @property
    def coverage(self) -> float:
        """Coverage of the sensor that has the least; 0 where a sensor is missing."""
        if self.missing:
            return 0.0
        covered = [sensor["coverage"] for sensor in self.sensors if sensor["primary"] and "coverage" in sensor]
        return min(covered, default=0.0)


def account(run_dir: Path, by_segment: dict[Path, list[dict]] | None = None) -> dict:
    """Times and energies of a run, all its segments added up; works on the remains of a dead run too.

    ``by_segment``: the ``events_of_segments``, where somebody has read them already.
    A segment is one start of the run. The time between two segments does not count; ``segments`` shows it. What cannot
    be known is absent: without a training window there are no energies.
    """
    starts = (by_segment or events_of_segments(run_dir)).items()
    parts = [part for start in starts for part in read_segment(*start)]
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


def read_segment(folder: Path, events: list[dict]) -> list[Segment]:
    """Read one start of a run but for its events, host by host, on as many cores as there are where that takes long.

    """
    paths = files_named(folder, "samples-", ".jsonl")
    parts = [marks_of(folder, events)]
    read = partial(read_host, parts=parts)
    is_much = sum(path.stat().st_size for path in paths) > WORTH_A_PROCESS_B
    found = on_all_cores(read, paths) if is_much else [read(path) for path in paths]
    by_host = [hosts for hosts in found if hosts]
    return [_segment(marks, number, by_host) for number, marks in enumerate(parts)]


def _segment(marks: Marks, number: int, by_host: list[list[Host]]) -> Segment:
    """One part of a start, by its number."""
    hosts = [parts[number] for parts in by_host]
    windows = {host: marks.window(host) for host in sorted(set(marks.host_of_rank.values()))}
    windows |= {host.host: host.window for host in hosts}
    windows = {host: window for host, window in sorted(windows.items()) if window}
    phases, energies = read_phases(marks.folder, but=[rank for host in hosts for rank in host.phase_times]), {}
    for host in windows.keys() - {host.host for host in hosts}:
        energies |= _phases_of_ranks(marks, host, windows[host], phases, [])
    times = _times_in_phases(phases)
    for host in hosts:
        energies |= host.phases
        times |= host.phase_times
    return Segment(marks, hosts, windows, _missing(hosts, marks), energies, times)


def marks_of(folder: Path, events: list[dict]) -> Marks:
    """What the ranks marked in events-rank*.jsonl of a folder."""
    where = host_of_rank(events)
    rank_starts = events_of_kind(events, "rank_start")
    return Marks(
        folder=folder,
        rank_starts=rank_starts,
        host_of_rank=where,
        gpu_of_rank={event["rank"]: _plain_uuid(event.get("gpu_uuid")) for event in rank_starts},
        starts=[event for event in events_of_kind(events, "training_start") if event["rank"] in where],
        ends=[event for event in events_of_kind(events, "training_end") if event["rank"] in where],
        idle=_idle_windows(events, where),
    )


def read_host(path: Path, parts: list[Marks]) -> list[Host]:
    """What the samples of one host tell of each part of a start; nothing of a file cut off before its header."""
    if (samples := _read(path)) is None:
        return []
    leave_out_unused(parts[0].rank_starts, [samples])
    return [_host(samples, marks) for marks in parts]


def _read(path: Path) -> Samples | None:
    reader = Reader(path)
    reader.read()
    return None if reader.header is None else reader.samples()


def _host(samples: Samples, marks: Marks) -> Host:
    if samples.host in marks.within:
        samples = samples.between(*marks.within[samples.host], marks.is_last)
    window = marks.window(samples.host, int(samples.t_ns[-1]) if len(samples.t_ns) else None)
    curves, sensors, inside = [], [], 0
    if window:
        judged = plausible.judge(samples)
        curves = energy.curves(samples, judged)
        sensors = _energy_of_sensors(samples.host, judged, curves, window)
        inside = int(((samples.t_ns >= window[0]) & (samples.t_ns <= window[1])).sum())
    flags = list(dict.fromkeys(samples.problems))
    for step in samples.wall_clock_steps():
        flags.append(f"the wall clock of {step['host']} was set by {step['step_s']:+.2f} s while the run went on")
    ranks = [rank for rank, host in marks.host_of_rank.items() if host == samples.host]
    phases = {rank: _clipped(own, marks, samples.host) for rank, own in read_phases(marks.folder, ranks).items()}
    idle_W = {}
    for (host, when), idle in marks.idle.items():
        if host == samples.host:
            idle_W |= {(component, when): _mean_power(curves, component, idle) for component in COMPONENTS}
    return Host(
        host=samples.host,
        period_s=samples.period_s,
        unreadable_lines=samples.unreadable_lines,
        has_samples=len(samples.t_ns) > 0,
        uuids={_uuid_of(sensor) for sensor in samples.header["sensors"]},
        about=_about(samples.header),
        flags=flags,
        overhead=samples.overhead(),
        window=window,
        sensors=sensors,
        samples_in_training=inside,
        idle_W=idle_W,
        phases=_phases_of_ranks(marks, samples.host, window, phases, curves) if window else {},
        phase_times=_times_in_phases(phases),
    )


def _clipped(phases: tuple, marks: Marks, host: str) -> tuple:
    """Phases of one rank, as ``read_phases`` has them, within one part of a start."""
    kinds, begin_ns, end_ns, names = phases
    if host not in marks.within:
        return phases
    return kinds, begin_ns.clip(*marks.within[host]), end_ns.clip(*marks.within[host]), names


def _about(header: dict) -> dict:
    """What a host is, as its own sampler tells: CPU, memory, kernel, job, and every GPU that it read."""
    gpus = {}
    for sensor in header["sensors"]:
        if sensor["component"] == "gpu":
            gpus[sensor["device"]] = {"device": sensor["device"], **(sensor.get("notes") or {})}
            gpus[sensor["device"]].pop("power", None)  # of the sensor, not of the GPU
    host = {"host": header["host"], **header.get("machine", {}), "gpus": list(gpus.values())}
    return host if header.get("machine") else {}


def leave_out_unused(events: list[dict], hosts: list[Samples]) -> None:
    """Where every rank has said which GPU it uses, other GPUs of its host enter no sum."""
    starts = events_of_kind(events, "rank_start")
    for samples in hosts:
        used = {_plain_uuid(event.get("gpu_uuid")) for event in starts if event["host"] == samples.host}
        if not used or None in used:
            continue
        gpus = [sensor for sensor in samples.header["sensors"] if sensor["component"] == "gpu"]
        _name_the_only_one(gpus, used)
        for sensor in gpus:
            if _uuid_of(sensor) not in used:
                sensor |= {"primary": False, "used": False}


def _name_the_only_one(gpus: list[dict], used: set[str]) -> None:
    """A GPU that does not tell its UUID is the one in use that no other sensor reads, where there is one of each."""
    sought = used - {_uuid_of(sensor) for sensor in gpus}
    nameless = [sensor for sensor in gpus if _uuid_of(sensor) is None]
    if len(sought) == 1 and len({sensor["device"] for sensor in nameless}) == 1:
        for sensor in nameless:
            sensor["notes"] = {**(sensor.get("notes") or {}), "uuid": min(sought)}


def _energy_of_sensors(host: str, judged: list[Judgement], curves: list[Curve], window: tuple[int, int]) -> list[dict]:
    """The sensors of one host with their energies; one that was never read well has none."""
    entries = energy.energy_of_sensors(curves, *window)
    for judgement in judged:
        if judgement.is_dead:
            failed = {"host": host, "samples": 0, "failed_reads": len(judgement.good)}
            entries.append({**judgement.sensor, **failed})
    return entries


def _missing(hosts: list[Host], marks: Marks) -> list[str]:
    """In words: hosts of ranks without samples, and ranks whose GPU no sensor reads."""
    where = marks.host_of_rank
    sampled = {host.host for host in hosts if host.has_samples}
    lines = [f"no samples of {host}: its energy is missing" for host in sorted(set(where.values()) - sampled)]
    read = {(host.host, uuid) for host in hosts for uuid in host.uuids}
    for rank, uuid in marks.gpu_of_rank.items():
        if uuid and (where[rank], uuid) not in read:
            lines.append(f"rank {rank}: no sensor of its GPU {uuid} on {where[rank]}; its energy is missing")
    return lines


def _facts_of_hosts(parts: list[Segment]) -> dict:
    """What is known of a run before its energies: sensors, cost of sampling, flags; lists may be empty."""
    names = ("segments", "sensors", "energy_phases", "overhead", "hosts", "flags")
    result: dict = {name: [] for name in names}
    for number, part in enumerate(parts, start=1):
        entries = {
            "overhead": [host.overhead for host in part.hosts],
            "hosts": [host.about for host in part.hosts if host.about],
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
    hosts = [host for part in parts for host in part.hosts]
    if hosts:
        result["sampling_period_s"] = max(host.period_s for host in hosts)
        result["unreadable_lines"] = sum(host.unreadable_lines for host in hosts)
    nodes = max((len(set(part.marks.host_of_rank.values())) for part in parts), default=0)
    if nodes:
        result["nodes"] = nodes
    result["flags"] += _differences(result["hosts"])
    if not result["hosts"]:  # samplers before did not say
        del result["hosts"]
    result["phases"] = _phase_times(parts)
    return result


def _flags(part: Segment) -> list[str]:
    """What is doubtful about one segment, in words."""
    flags = []
    for host in part.hosts:
        flags += host.flags
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


def _differences(hosts: list[dict]) -> list[str]:
    """In words: what the hosts of a run do not have in common, though their energies are added up as if they had."""
    alike: dict[str, dict[str, str]] = {}
    for host in hosts:
        facts = {name: str(host.get(name, "")) for name in ("cpu", "cores", "sockets", "kernel")}
        facts["number of GPUs"] = str(len(host["gpus"]))
        for name, words in (("name", "GPU"), ("driver", "GPU driver"), ("limit_W", "GPU power limit in W")):
            facts[words] = ", ".join(sorted({str(gpu.get(name, "unknown")) for gpu in host["gpus"]}))
        for name, value in facts.items():
            alike.setdefault(name, {}).setdefault(value, host["host"])
    flags = []
    for name, hosts_by_value in alike.items():
        if len(hosts_by_value) > 1:
            words = "; ".join(f"{host} has {value or 'none'}" for value, host in hosts_by_value.items())
            flags.append(f"hosts differ in {name}: {words}")
    return flags


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
                "finished": bool(part.marks.ends) and part.marks.is_last,
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
    """Mean power while nothing was computed, before and after the training, and the energies without it.

    The power that a device has when all is ready is the one to take off, where it was measured.
    """
    result: dict = {}
    net_J: dict[str, float] = {}
    present = [component for component in COMPONENTS if f"energy_{component}_J" in totals]
    for component in present:
        watts = _idle_power(parts, component)
        if not watts:
            continue
        for when, idle_W in watts.items():
            result[f"idle_power_{component}_{when}_W"] = idle_W
        mean_W = watts.get("ready", sum(watts.values()) / len(watts))
        net_J[component] = totals[f"energy_{component}_J"] - mean_W * totals["training_time_s"]
        result[f"energy_net_{component}_J"] = net_J[component]
    if net_J and len(net_J) == len(present):
        result["energy_net_total_J"] = sum(net_J.values())
    return result


def _idle_power(parts: list[Segment], component: str) -> dict[str, float]:
    """Idle power in W of a component of all hosts (before, ready, after), each of the first segment that knows it."""
    watts: dict[str, float] = {}
    for part in parts:
        by_host = {host.host: host.idle_W for host in part.hosts}
        for when in ("before", "ready", "after"):
            hosts = [host for host, at in part.marks.idle if at == when]
            of_hosts = [by_host.get(host, {}).get((component, when), 0.0) for host in hosts]
            if of_hosts and len(of_hosts) == len(part.windows) and None not in of_hosts:
                watts.setdefault(when, sum(of_hosts))
    return watts


def _idle_windows(events: list[dict], where: dict[int, str]) -> dict[tuple[str, str], tuple[int, int]]:
    """(host, before, ready or after) -> the time in which all ranks of the host were idle."""
    starts: dict[tuple[str, str], int] = {}
    ends: dict[tuple[str, str], int] = {}
    for event in events:
        if event["event"] not in ("idle_start", "idle_end") or event["rank"] not in where:
            continue
        key = (where[event["rank"]], event["when"])
        if event["event"] == "idle_start":
            starts[key] = max(starts.get(key, 0), event["t_mono_ns"])
        else:
            ends[key] = min(ends.get(key, END_OF_TIME_NS), event["t_mono_ns"])
    both = [key for key in starts if key in ends]
    return {key: (starts[key], ends[key]) for key in both if 0 < starts[key] < ends[key]}


def _mean_power(curves: list[Curve], component: str, window: tuple[int, int]) -> float | None:
    """Mean power in W of a host's sensors of a component; None where one has too few readings in the window."""
    start_ns, end_ns = window
    energy_J = 0.0
    for curve in curves:
        if curve.sensor["component"] != component or not curve.sensor["primary"]:
            continue
        if ((curve.read.ns >= start_ns) & (curve.read.ns <= end_ns)).sum() < FEWEST_IDLE_SAMPLES:
            return None
        first_J, last_J = curve.at((start_ns, end_ns))
        energy_J += float(last_J - first_J)
    return energy_J / (end_ns - start_ns) * 1e9


# -------------------------------------------------------------------------------------------------------------- phases


def _phases(parts: list[Segment], totals: dict) -> list[dict]:
    """Energy per rank, device and phase, and what belongs to no rank; together they are the totals.

    A rank has all of its GPU's energy and an equal part of its host's CPU and RAM, so that these count once per node.
    """
    added: dict[tuple, dict] = {}
    for part in parts:
        for rank, entries in part.phases.items():
            marks = part.marks
            where = {"rank": rank, "host": marks.host_of_rank[rank], "device": marks.gpu_of_rank.get(rank) or "cpu"}
            for entry in entries:
                sums = added.setdefault((rank, entry["phase"]), where | {"phase": entry["phase"]})
                for name, value in entry.items():
                    if name != "phase":
                        sums[name] = sums.get(name, 0.0) + value
    if not added:
        return []
    rest = {"rank": None, "host": None, "device": None, "phase": "unattributed"}
    for component in COMPONENTS:
        name = f"energy_{component}_J"
        if name in totals:
            left = totals[name] - sum(entry.get(name, 0.0) for entry in added.values())
            rest[name] = left if abs(left) > 1e-9 * totals[name] else 0.0  # what sums round to differs between machines
    return [added[key] for key in sorted(added)] + [rest]


def _phase_times(parts: list[Segment]) -> list[dict]:
    """Seconds of each rank in each phase, all segments added up."""
    ranks: dict[int, dict] = {}
    for part in parts:
        for rank, times in sorted(part.phase_times.items()):
            entry = ranks.setdefault(rank, {"rank": rank})
            for name, seconds in times.items():
                entry[name] = entry.get(name, 0.0) + seconds
    return list(ranks.values())


def _times_in_phases(phases: dict[int, tuple]) -> dict[int, dict[str, float]]:
    """Rank -> seconds of each phase of ``read_phases``."""
    times: dict[int, dict[str, float]] = {}
    for rank, (kinds, begin_ns, end_ns, names) in phases.items():
        lengths_ns = end_ns - begin_ns
        times[rank] = {f"{name}_s": float(lengths_ns[kinds == kind].sum()) / 1e9 for kind, name in enumerate(names)}
    return times


def _phases_of_ranks(
    marks: Marks, host: str, window: tuple[int, int], phases: dict[int, tuple], curves: list[Curve]
) -> dict[int, list[dict]]:
    """Times and energies of the phases of each rank of a host."""
    windows = marks.rank_windows(host, window)
    ranks_of_host = Counter(marks.host_of_rank.values())[host]
    found = {}
    for rank in windows.keys() & phases.keys():
        shares = _shares(curves, marks.gpu_of_rank.get(rank), ranks_of_host)
        found[rank] = energy.energy_of_phases(phases[rank], windows[rank], shares)
    return found


def _shares(curves: list[Curve], uuid: str | None, ranks_of_host: int) -> dict[str, list[tuple[Curve, float]]]:
    """Component -> the sensors that a rank has a share of, each with this share."""
    shares: dict[str, list[tuple[Curve, float]]] = {}
    for curve in curves:
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
