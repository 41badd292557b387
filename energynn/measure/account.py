"""Account for a run from its raw files: times and energies of hosts, ranks, devices and phases.

Each host is accounted on its own clock, between the marks that its own ranks wrote after a barrier.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np

from energynn.host.reading import join_faults
from energynn.measure import devices, energy
from energynn.measure.energy import COMPONENTS, THRESHOLDS, SensorEnergy, refusal
from energynn.measure.samples import (
    Channel,
    Header,
    event_ns,
    events_of_kind,
    last_sample_time_ns,
    list_samples_files,
    read_events,
    read_phases,
    read_pieces,
    read_samples_header,
)
from energynn.measure.sensors import plain_name
from energynn.measure.stream import SensorStream, read_sensor_streams

MIN_IDLE_SAMPLES = 5
IDLE_WINDOWS = ("before", "ready", "after")  # the training
PLACE_FIELDS = ("rank", "host", "device", "phase")
MAX_TRACE_STEPS = 10**6  # of a trace


class SegmentAccount(msgspec.Struct):
    """When a segment began, how long it trained, how well it was sampled, what it took."""

    start_wall_ns: int
    training_time_s: float
    samples: int
    coverage: float
    energy_total_J: float | None = None


class HostAccount(msgspec.Struct):
    """What one host did in one segment, a start of the run.

    time_s: of its training; 0 if none began; end_s: of its monotonic clock. is_named: each rank
    names its GPU. sensors: with their energies. doubts: reasons against them. idle_W: by the names
    of a record. phases: (PLACE_FIELDS, name, amount) of times and energies.
    """

    name: str
    segment: int
    doubts: list[str] = []
    problems: list[str] = []
    period_s: float = 0.0
    start_wall_ns: float = np.inf
    time_s: float = 0.0
    boot_id: str = ""
    end_s: float = 0.0
    is_named: bool = False
    sensors: list[SensorEnergy] = []
    idle_W: dict[str, float] = {}
    phases: list[tuple] = []

    @property
    def primary(self) -> list[SensorEnergy]:
        return [sensor for sensor in self.sensors if sensor.primary]

    @property
    def sensor_counts(self) -> Counter[str]:
        """Count its primary sensors by component."""
        return Counter(sensor.component for sensor in self.primary)


def account_for_run(
    events: dict[Path, list[dict]], thresholds: dict[str, float]
) -> dict:
    """Give times and energies of a run, all its segments added up, also of one that died.

    events: of each segment, by its folder. thresholds: of this system, where they differ from
    ``energy.THRESHOLDS``. The time between two segments does not count. What cannot be known is
    absent. ``doubts`` are the reasons against the energies.
    """
    limits = THRESHOLDS | thresholds
    starts = enumerate(events.items(), start=1)
    parts = [_read_segment(*files, number, limits) for number, files in starts]
    hosts = list(chain.from_iterable(parts))
    trained = list(filter(_has_trained, parts))
    segments = list(map(_account_for_segment, trained))
    sensors = [sensor for host in hosts for sensor in host.sensors]
    doubts = [text for host in hosts for text in host.doubts]
    result = {
        "segments": segments,
        "sensors": sensors,
        "flags": sorted({problem for host in hosts for problem in host.problems}),
        "doubts": doubts,
    }
    if hosts:
        result["nodes"] = max(map(len, parts))
        result["sampling_period_s"] = max(host.period_s for host in hosts)
    if not trained:
        return result
    doubts += devices.device_differences(trained) + devices.overlapping_starts(
        trained, segments
    )
    time_s = sum(segment.training_time_s for segment in segments)
    result["training_time_s"] = time_s
    result["samples_in_training"] = sum(segment.samples for segment in segments)
    result["coverage"] = min(segment.coverage for segment in segments)
    result |= energy.total_energies(sensors, time_s)
    # idle powers of all hosts together, of the first segment that knows them
    for part in trained:
        for name in set.intersection(*(set(host.idle_W) for host in part)):
            result.setdefault(name, sum(host.idle_W[name] for host in part))
    result["energy_phases"] = _phase_rows(hosts, result)
    return result | _total_cpu_times(events)


def _total_cpu_times(events: dict[Path, list[dict]]) -> dict[str, float]:
    """Add up the CPU time of the run's ranks, and of all else on their hosts.

    {} where a start of the run did not live to tell it.
    """
    own_s = others_s = 0.0
    for of_segment in events.values():
        starts = {
            each["rank"]: each for each in events_of_kind(of_segment, "training_start")
        }
        own_of: Counter[str] = Counter()
        whole_of: dict[str, float] = {}
        # a rank that was stopped tells at its very end
        ends = {
            each["rank"]: each
            for each in reversed(of_segment)
            if each["event"] in ("training_end", "rank_end")
        }
        for rank, end in ends.items():
            start = starts.get(rank, {})
            if {"cpu_own_s", "cpu_host_s"} <= start.keys() & end.keys():
                own_of[end["host"]] += end["cpu_own_s"] - start["cpu_own_s"]
                whole_of[end["host"]] = end["cpu_host_s"] - start["cpu_host_s"]
        if starts and not whole_of:
            return {}
        own_s += sum(own_of.values())
        others_s += sum(max(0.0, whole_of[host] - own_of[host]) for host in whole_of)
    return {"cpu_time_s": own_s, "cpu_time_others_s": others_s} if own_s else {}


def _has_trained(hosts: list[HostAccount]) -> bool:
    return any(host.time_s for host in hosts)


def _account_for_segment(hosts: list[HostAccount]) -> SegmentAccount:
    primary = [sensor for host in hosts for sensor in host.primary]
    return SegmentAccount(
        int(min(host.start_wall_ns for host in hosts)),
        max(host.time_s for host in hosts),
        min((sensor.samples for sensor in primary), default=0),
        min((sensor.coverage for sensor in primary), default=0.0),
        energy.total_energies(primary, 1.0).get("energy_total_J"),
    )


# ----------------------------------------------------------------------------------- one segment


def _read_segment(
    folder: Path, events: list[dict], number: int, limits: dict
) -> list[HostAccount]:
    """Read the samples and phases of one start of a run, host by host."""
    hosts = []
    for path in list_samples_files(folder):
        faults: list[str] = []
        with join_faults(path.name, faults):
            if header := read_samples_header(path):
                hosts.append(_read_host(path, header, events, number, limits))
        # what else is known of the run is worth its record
        for text in faults:
            reason = refusal("D", f"samples cannot be read: {text}")
            hosts.append(
                HostAccount(path.stem.removeprefix("samples-"), number, [reason])
            )
    names = {event["host"] for event in events} - {None}
    for name in sorted(names - {host.name for host in hosts}):
        text = f"no samples of {name}: its energy is missing"
        hosts.append(HostAccount(name, number, [refusal("D", text)]))
    return hosts


def _read_host(
    path: Path, header: Header, events, number: int, limits: dict
) -> HostAccount:
    """Account for one host: read its samples between the marks of its own ranks."""
    name = header.host
    host = HostAccount(name, number, period_s=header.period_s, boot_id=header.boot_id)
    events = [event for event in events if event["host"] == name]
    unread = _leave_out_unused_gpus(header.sensors, events)
    gpus = {
        event["rank"]: plain_name(event.get("gpu_uuid", ""))
        for event in events_of_kind(events, "rank_start")
    }
    # A run that died trained until its last sample.
    end_ns = last_sample_time_ns(path)
    windows_s = _training_and_idle_windows_s(events, end_ns)
    # what a rank that has not said where it is has done belongs to nobody
    spans = _phase_spans(events, read_phases(path.parent, gpus), end_ns)
    asked_s = [spans_ns.ravel() / 1e9 for spans_ns, *_ in spans.values()]
    streams, host.problems = read_sensor_streams(
        path, header, windows_s, np.concatenate([[], *asked_s])
    )
    for when in windows_s.keys() & IDLE_WINDOWS:
        host.idle_W |= _mean_idle_power_W(streams, when)
    if "training" in windows_s:
        named = set(gpus.values())
        host.is_named = bool(named) and "" not in named
        trained = [stream.evidence["training"] for stream in streams]
        for one in trained:
            one.is_named = _gpu_uuid(one.sensor) in named - {""}
        host.sensors = energy.sensor_entries(trained, limits)
        for entry in host.sensors:
            entry.segment = number
            entry.host = name
        unread += header.unaccounted
        unread += devices.ranks_of_namesake(host, events)
        host.doubts = energy.judge_sensors(trained, unread, limits)
        host.phases = list(_energies_of_phases(name, gpus, spans, streams))
        starts = events_of_kind(events, "training_start")
        host.start_wall_ns = min(event["t_wall_ns"] for event in starts)
        host.time_s = trained[0].length_s
        host.end_s = trained[0].end_s
    return host


def _training_and_idle_windows_s(
    events: list[dict], end_ns: int
) -> dict[str, np.ndarray]:
    """Tell from when until when a host trained, and when all its ranks were idle."""
    begin_ns = min(event_ns(events, "training_start").values(), default=np.inf)
    until_ns = max(event_ns(events, "training_end").values(), default=end_ns)
    spans_ns = {"training": (begin_ns, until_ns)}
    for when in IDLE_WINDOWS:
        marks = [event for event in events if event.get("when") == when]
        begin_ns = max(event_ns(marks, "idle_start").values(), default=np.inf)
        spans_ns[when] = begin_ns, min(event_ns(marks, "idle_end").values(), default=0)
    return {
        when: np.divide(span_ns, 1e9)
        for when, span_ns in spans_ns.items()
        if span_ns[0] < span_ns[1]
    }


def _leave_out_unused_gpus(sensors: list[Channel], events: list[dict]) -> list[str]:
    """Take GPUs that no rank uses out of the sums, if every rank tells which it may use.

    Returns, in words, the GPUs of ranks that none of the sensors reads.
    """
    used = devices.used_devices(events)
    if used is None:
        return []
    for one in sensors:
        if one.component == "gpu" and _gpu_uuid(one) not in used:
            one.primary = False
            one.checks = None
    unread = sorted(used - set(map(_gpu_uuid, sensors)))
    return [f"no sensor of GPU {uuid}, which a rank uses" for uuid in unread]


def _gpu_uuid(sensor: Channel) -> str:
    return plain_name(sensor.notes.get("uuid", ""))


# ------------------------------------------------------------------------------------------ idle


def _mean_idle_power_W(streams: list[SensorStream], when: str) -> dict[str, float]:
    """Return the mean power of each component while a host was idle.

    It is absent where a sensor has too few readings.
    """
    watts = {}
    for component in COMPONENTS:
        own = [
            stream.evidence[when]
            for stream in streams
            if stream.sensor.primary and stream.sensor.component == component
        ]
        if own and min(one.readings for one in own) >= MIN_IDLE_SAMPLES:
            energy_J = sum(one.energy_J for one in own)
            watts[f"idle_power_{component}_{when}_W"] = energy_J / own[0].length_s
    return watts


# ---------------------------------------------------------------------------------------- phases


def _phase_spans(
    events: list[dict], phases: dict[int, tuple], end_ns: int
) -> dict[int, tuple]:
    """Give the phases of each rank of a host that trained.

    Returns rank -> (spans in ns, phase index, names): (2, phases + 1) begin and end, of which the
    last is the training itself, as phase 0 with the name ``idle``; (phases + 1,) of int; a list.
    """
    starts_ns = event_ns(events, "training_start")
    ends_ns = event_ns(events, "training_end")
    spans = {}
    for rank in phases.keys() & starts_ns.keys():
        kinds, begin_ns, until_ns, names = phases[rank]
        training_ns = starts_ns[rank], ends_ns.get(rank, end_ns)
        spans_ns = np.clip([begin_ns, until_ns], *training_ns)
        spans_ns = np.column_stack([spans_ns, training_ns])
        spans[rank] = spans_ns, np.append(kinds + 1, 0), ["idle", *names]
    return spans


def _energies_of_phases(
    host: str, gpus: dict[int, str], spans: dict, streams: list[SensorStream]
) -> Iterator[tuple]:
    """Give time and energies of each phase of each rank; ``idle`` is what lies in no phase.

    Yields (PLACE_FIELDS, name, amount).
    A rank has all of its GPU's energy and an equal part of its host's CPU and RAM. Phases shorter
    than a sampling period get the mean power around them.
    """
    for rank, (spans_ns, kinds, names) in spans.items():
        columns = [("time_s", np.diff(spans_ns, axis=0)[0] / 1e9)]
        for stream in streams:
            component = stream.sensor.component
            if not stream.sensor.primary:
                continue
            joules = np.diff(stream.at(spans_ns / 1e9), axis=0)[0]
            if component != "gpu":
                joules = joules / len(gpus)
            elif gpus[rank] not in {_gpu_uuid(stream.sensor)} - {""}:
                continue
            columns.append((f"energy_{component}_J", joules))
        for name, amounts in columns:
            of_phases = np.bincount(kinds, amounts, len(names))
            of_phases[0] -= of_phases[1:].sum()
            for phase, amount in zip(names, of_phases, strict=True):
                yield (rank, host, gpus[rank] or "cpu", phase), name, float(amount)


def _phase_rows(hosts: list[HostAccount], totals: dict) -> list[dict]:
    """Give energy by PLACE_FIELDS, and what belongs to no rank; together the totals."""
    sums: dict[tuple, Counter] = defaultdict(Counter)
    for place, name, amount in chain.from_iterable(host.phases for host in hosts):
        sums[place][name] += amount
    entries = [
        dict(zip(PLACE_FIELDS, place, strict=True)) | sums[place]
        for place in sorted(sums)
    ]
    rest = dict.fromkeys(PLACE_FIELDS) | {"phase": "unattributed"}
    for name in [f"energy_{component}_J" for component in COMPONENTS]:
        if name in totals:
            of_ranks_J = sum(entry.get(name, 0.0) for entry in entries)
            rest[name] = round(totals[name] - of_ranks_J, 3)  # the rest is rounding
    return [*entries, rest] if entries else []


# ---------------------------------------------------------------------------------------- traces


def read_power_trace(
    run_dir: Path, period_s: float = 0.5
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Give the mean power in W of every sensor in steps of ``period_s``; the training starts at 0.

    Returns sensor id -> (t_s, power_W), each (steps,), t_s the middle of a step; of several hosts
    the id carries the host's name. On each host the training starts where its own ranks say so. A
    long run has ``MAX_TRACE_STEPS`` longer steps.
    """
    starts_ns = event_ns(read_events(run_dir), "training_start", "host")
    paths = list_samples_files(run_dir)
    traces = {}
    for path in paths:
        first = next(read_pieces(path), None)
        if first is None or len(first.t_ns) < 2:
            continue
        host = first.header.host
        prefix = f"{host}:" if len(paths) > 1 else ""
        first_s = first.t_ns[0] / 1e9
        last_s = last_sample_time_ns(path) / 1e9
        begin_s = starts_ns.get(host, first.t_ns[0]) / 1e9
        step_s = max(period_s, (last_s - first_s) / MAX_TRACE_STEPS)
        steps = np.ceil((first_s - begin_s) / step_s) + np.arange(
            (last_s - first_s) // step_s + 1
        )
        streams, _ = read_sensor_streams(
            path, first.header, {}, begin_s + step_s * steps
        )
        for stream in streams:
            edges_s = stream.asked_s
            is_known = (edges_s >= stream.first_s) & (edges_s <= stream.last_s)
            watts = np.diff(stream.asked_J[is_known]) / step_s
            middles_s = edges_s[is_known][:-1] - begin_s + step_s / 2
            traces[prefix + stream.sensor.id] = middles_s, watts
    return traces
