"""The energies of one run from its raw files: per sensor, component, phase and rank, and what is doubtful."""

from __future__ import annotations

from pathlib import Path

from energynn.measure import energy
from energynn.measure.energy import COMPONENTS, Curve
from energynn.measure.samples import Samples, read_events, read_hosts, read_phases, segments

FEWEST_IDLE_SAMPLES = 5


def account(run_dir: Path) -> dict:
    """Times and energies of a run, all its segments added up; works on the remains of a dead run too.

    A segment is one start of the run. What passed between two segments is not counted; ``segments`` shows it. What
    cannot be known is absent: without a training window there are no energies.
    """
    parts = [_account_segment(folder) for folder in segments(run_dir)]
    result: dict = {"segments": [], "sensors": [], "energy_phases": [], "clocks": [], "overhead": [], "flags": []}
    for number, part in enumerate(parts, start=1):
        for name in ("clocks", "overhead", "sensors"):
            result[name] += [{"segment": number, **entry} if len(parts) > 1 else entry for entry in part[name]]
        result["flags"] += [f"segment {number}: {flag}" if len(parts) > 1 else flag for flag in part["flags"]]
    with_samples = [part for part in parts if "sampling_period_s" in part]
    if with_samples:
        result["sampling_period_s"] = max(part["sampling_period_s"] for part in with_samples)
        result["unreadable_lines"] = sum(part["unreadable_lines"] for part in with_samples)
    measured = [part for part in parts if "training_time_s" in part]
    if any("nodes" in part for part in parts):
        result["nodes"] = max(part.get("nodes", 0) for part in parts)
    if not measured:
        return result
    result["training_time_s"] = sum(part["training_time_s"] for part in measured)
    result["cross_checks"] = energy.cross_checks(_added(result["sensors"]))
    for check in result["cross_checks"]:
        if check["flagged"]:
            where = f"gpu {check['device']} of {check['host']}"
            result["flags"].append(f"{where}: the power's integral is {check['gap']:+.1%} off the counter")
    if result["training_time_s"] > 0 and result["sensors"]:
        result["samples_in_training"] = sum(part["samples_in_training"] for part in measured)
        covered = [part["coverage"] * part["training_time_s"] for part in measured]
        result["coverage"] = sum(covered) / result["training_time_s"]
        result |= energy.totals(result["sensors"], result["training_time_s"])
    result |= _idle(measured, result)
    result["energy_phases"] = _phases(measured, result)
    before = None
    for part in measured:
        gap_s = None if before is None else (part["start_wall_ns"] - before) / 1e9
        before = part["end_wall_ns"]
        joules = energy.totals(part["sensors"], part["training_time_s"]) if part["training_time_s"] > 0 else {}
        result["segments"].append({
            "start_wall_ns": part["start_wall_ns"], "training_time_s": part["training_time_s"], "gap_before_s": gap_s,
            "energy_total_J": joules.get("energy_total_J"), "finished": part["finished"],
        })  # fmt: skip
    return result


def _account_segment(folder: Path) -> dict:
    """The same for the raw files of one segment."""
    events, hosts = read_events(folder), read_hosts(folder)
    leave_out_unused(events, hosts)
    of_kind = lambda kind: [event for event in events if event["event"] == kind]  # noqa: E731
    result: dict = {"sensors": [], "clocks": [], "overhead": [host.overhead() for host in hosts], "flags": []}
    result["clocks"] = [_clock(host) for host in hosts if host.clocks]
    host_of_rank = {event["rank"]: event["host"] for event in of_kind("rank_start")}
    uuids = {event["rank"]: _plain_uuid(event.get("gpu_uuid")) for event in of_kind("rank_start")}
    if host_of_rank:
        result["nodes"] = len(set(host_of_rank.values()))
    if hosts:
        result["sampling_period_s"] = max(host.period_s for host in hosts)
        result["unreadable_lines"] = sum(host.unreadable_lines for host in hosts)
    for host in hosts:
        result["flags"] += list(dict.fromkeys(host.problems))
        result["flags"] += [f"the wall clock of {step['host']} was set by {step['step_s']:+.2f} s while the run went on"
                            for step in host.wall_clock_steps()]  # fmt: skip
    # A rank whose file was cut off before its start is on no host that we know of.
    starts, ends = ([event for event in of_kind(kind) if event["rank"] in host_of_rank]
                    for kind in ("training_start", "training_end"))  # fmt: skip
    # Each host has its own monotonic clock: its ranks' marks bound the window of its own samples.
    windows = {}
    for host in sorted(set(host_of_rank.values())):
        begun = [e["t_mono_ns"] for e in starts if host_of_rank[e["rank"]] == host]
        ended = [e["t_mono_ns"] for e in ends if host_of_rank[e["rank"]] == host]
        own = [samples for samples in hosts if samples.host == host]
        if begun and (ended or (own and len(own[0].t_ns))):
            windows[host] = (min(begun), max(ended) if ended else int(own[0].t_ns[-1]))
    if not windows:
        return result
    result["training_time_s"] = max(end - start for start, end in windows.values()) / 1e9
    result["finished"] = bool(ends)
    result["start_wall_ns"] = min(event["t_wall_ns"] for event in starts)
    result["end_wall_ns"] = result["start_wall_ns"] + int(result["training_time_s"] * 1e9)
    result["curves"] = {samples.host: energy.curves(samples) for samples in hosts if samples.host in windows}
    counts = []
    for samples in hosts:
        if samples.host in windows:
            start_ns, end_ns = windows[samples.host]
            entries = energy.energy_of_sensors(result["curves"][samples.host], start_ns, end_ns)
            result["sensors"] += entries
            seen = {entry["id"] for entry in entries}
            result["sensors"] += [{**sensor, "host": samples.host, "samples": 0, "failed_reads": len(samples.t_ns)}
                                  for sensor in samples.header["sensors"] if sensor["id"] not in seen]  # fmt: skip
            counts.append(int(((samples.t_ns >= start_ns) & (samples.t_ns <= end_ns)).sum()))
    blind = sorted(set(host_of_rank.values()) - {host.host for host in hosts if len(host.t_ns)})
    blind = [f"no samples of {host}: its energy is missing" for host in blind]  # from every sum
    for rank, uuid in uuids.items():
        sensors = [sensor for host in hosts if host.host == host_of_rank[rank] for sensor in host.header["sensors"]]
        if uuid and uuid not in {_uuid_of(sensor) for sensor in sensors}:
            blind.append(f"rank {rank}: no sensor of its GPU {uuid} on {host_of_rank[rank]}; its energy is missing")
    result["flags"] += blind
    for entry in result["sensors"]:
        name = f"{entry['id']} of {entry['host']}"
        if entry.get("aliased"):
            result["flags"].append(f"{name}: aliased, the load changes faster than it is sampled")
        if entry.get("coverage", 1.0) < 1.0 - 1e-6:
            result["flags"].append(f"{name}: {1 - entry['coverage']:.2%} of the time is in gaps")
    result["samples_in_training"] = min(counts, default=0)
    covered = [entry.get("coverage", 0.0) for entry in result["sensors"] if entry["primary"]]
    result["coverage"] = min(covered, default=0.0)
    if blind:
        result["samples_in_training"], result["coverage"] = 0, 0.0
    result["windows"], result["host_of_rank"] = windows, host_of_rank
    result["rank_windows"] = _rank_windows(starts, ends, host_of_rank, windows)
    result["gpu_of_rank"] = uuids
    result["phases"] = read_phases(folder)
    result["idle_windows"] = _idle_windows(events, host_of_rank)
    return result


def leave_out_unused(events: list[dict], hosts: list[Samples]) -> None:
    """Where every rank has said which GPU it uses, others of its host that were sampled enter no sum."""
    starts = [event for event in events if event["event"] == "rank_start"]
    for samples in hosts:
        used = {_plain_uuid(event.get("gpu_uuid")) for event in starts if event["host"] == samples.host}
        for sensor in samples.header["sensors"] if used and None not in used else ():
            if sensor["component"] == "gpu" and _uuid_of(sensor) not in used:
                sensor |= {"primary": False, "used": False}


def _rank_windows(starts, ends, host_of_rank, windows) -> dict[int, tuple[int, int]]:
    ended = {event["rank"]: event["t_mono_ns"] for event in ends}
    return {event["rank"]: (event["t_mono_ns"], ended.get(event["rank"], windows[host_of_rank[event["rank"]]][1]))
            for event in starts if host_of_rank[event["rank"]] in windows}  # fmt: skip


def _clock(samples: Samples) -> dict:
    first, last = samples.clocks[0], samples.clocks[-1]
    return {"host": samples.host, "reference": last["reference"], "method": last["method"],
            "offset_start_ns": first["offset_ns"], "offset_end_ns": last["offset_ns"],
            "uncertainty_ns": last["uncertainty_ns"]}  # fmt: skip


def _added(entries: list[dict]) -> list[dict]:
    """One entry per sensor with the energies of all segments."""
    added: dict[tuple, dict] = {}
    for entry in entries:
        if "energy_J" in entry:
            known = added.setdefault((entry["host"], entry["id"]), {**entry, "energy_J": 0.0})
            known["energy_J"] += entry["energy_J"]
    return list(added.values())


# ---------------------------------------------------------------------------------------------------------------- idle


def _idle_windows(events: list[dict], host_of_rank: dict[int, str]) -> dict[tuple[str, str], tuple[int, int]]:
    """(host, before or after) -> the time in which all ranks of the host were idle."""
    windows: dict[tuple[str, str], tuple[int, int]] = {}
    for kind, choose, place in (("idle_start", max, 0), ("idle_end", min, 1)):
        for event in events:
            if event["event"] == kind and event["rank"] in host_of_rank:
                key = (host_of_rank[event["rank"]], event["when"])
                known = list(windows.get(key, (0, 2**63 - 1)))
                known[place] = choose(known[place], event["t_mono_ns"])
                windows[key] = tuple(known)
    return {key: window for key, window in windows.items() if 0 < window[0] < window[1] < 2**63 - 1}


def _idle(parts: list[dict], totals: dict) -> dict:
    """Mean power while nothing was computed, before and after the training, and the energies without it."""
    result: dict = {}
    joules: dict[str, float] = {}
    for component in COMPONENTS:
        of_when: dict[str, float] = {}
        for part in parts:
            for when in ("before", "after"):
                watts = [_mean_power(part, component, host, window)
                         for (host, at), window in part["idle_windows"].items() if at == when]  # fmt: skip
                if watts and len(watts) == len(part["windows"]) and None not in watts:
                    of_when.setdefault(when, sum(watts))
        if of_when and f"energy_{component}_J" in totals:
            for when, watts in of_when.items():
                result[f"idle_power_{component}_{when}_W"] = watts
            idle_W = sum(of_when.values()) / len(of_when)
            joules[component] = totals[f"energy_{component}_J"] - idle_W * totals["training_time_s"]
            result[f"energy_net_{component}_J"] = joules[component]
    if joules and all(c in joules for c in COMPONENTS if f"energy_{c}_J" in totals):
        result["energy_net_total_J"] = sum(joules.values())
    return result


def _mean_power(part: dict, component: str, host: str, window: tuple[int, int]) -> float | None:
    own = [curve for curve in part["curves"].get(host, ())
           if curve.sensor["component"] == component and curve.sensor["primary"]]  # fmt: skip
    if any(((c.good_ns >= window[0]) & (c.good_ns <= window[1])).sum() < FEWEST_IDLE_SAMPLES for c in own):
        return None
    return sum(curve.between(*window)[0] for curve in own) / (window[1] - window[0]) * 1e9


# -------------------------------------------------------------------------------------------------------------- phases


def _phases(parts: list[dict], totals: dict) -> list[dict]:
    """Energy per rank, device and phase, and what belongs to no rank; together they are the totals.

    A rank has all of its GPU's energy and an equal part of its host's CPU and RAM, so that these count once per node.
    """
    added: dict[tuple, dict] = {}
    for part in parts:
        hosts = list(part["host_of_rank"].values())
        for rank, window in part["rank_windows"].items():
            if rank not in part["phases"]:
                continue
            host = part["host_of_rank"][rank]
            shares = _shares(part, rank, host, hosts.count(host))
            for entry in energy.energy_of_phases(part["phases"][rank], window, shares):
                key = (rank, entry["phase"])
                where = {"rank": rank, "host": host, "device": part["gpu_of_rank"].get(rank) or "cpu"}
                known = added.setdefault(key, where | {"phase": entry["phase"]})
                for name, value in entry.items():
                    if name != "phase":
                        known[name] = known.get(name, 0.0) + value
    if not added:
        return []
    rest = {"rank": None, "host": None, "device": None, "phase": "unattributed"}
    for component in COMPONENTS:
        name = f"energy_{component}_J"
        if name in totals:
            rest[name] = totals[name] - sum(entry.get(name, 0.0) for entry in added.values())
    return [added[key] for key in sorted(added)] + [rest]


def _shares(part: dict, rank: int, host: str, ranks_of_host: int) -> dict[str, list[tuple[Curve, float]]]:
    uuid = part["gpu_of_rank"].get(rank)
    shares: dict[str, list[tuple[Curve, float]]] = {}
    for curve in part["curves"].get(host, ()):
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
    """A GPU's UUID as NVML and torch both write it: NVML begins it with GPU-, torch does not."""
    return uuid.removeprefix("GPU-").lower() if uuid else None
