"""From samples on disk to energies: every joule in a record comes from these functions and can be derived again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

JOULE_PER_KWH = 3.6e6
SECOND_PER_HOUR = 3600.0
COMPONENTS = ("gpu", "cpu", "ram")
# From strongest to weakest: a sum is no better than its weakest part.
PROVENANCES = ("measured", "published", "estimated", "simulated")


@dataclass(frozen=True)
class Samples:
    """What the sampler of one host has written.

    t_ns, wall_ns: (samples,) monotonic and wall clock in ns; readings: (samples, sensors), NaN where a read failed;
    perun: what perun's own loop read, as ``{"t", "w", "perun"}`` lines; unreadable_lines: cut or damaged ones.
    """

    header: dict
    t_ns: np.ndarray
    wall_ns: np.ndarray
    readings: np.ndarray
    perun: list[dict]
    unreadable_lines: int

    @property
    def period_s(self) -> float:
        return self.header["period_s"]


def read_samples(path: Path) -> Samples:
    """Read a samples file; a line that was cut by a crash or a full disk is skipped and counted.

    Raises ValueError where the header is missing: then nothing can be said of the readings.
    """
    header, times, walls, rows, perun, unreadable = None, [], [], [], [], 0
    with open(path, errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                unreadable += 1
                continue
            if not isinstance(line, dict):
                unreadable += 1
            elif "header" in line:
                header = line
            elif "perun" in line:
                perun.append(line)
            elif "v" in line and header and len(line["v"]) == len(header["sensors"]):
                times.append(line["t"])
                walls.append(line["w"])
                rows.append([np.nan if value is None else value for value in line["v"]])
    if header is None:
        raise ValueError(f"{path}: no header line; the samples cannot be read")
    shape = (len(rows), len(header["sensors"]))
    return Samples(header, np.array(times, dtype=np.int64), np.array(walls, dtype=np.int64),
                   np.array(rows, dtype=float).reshape(shape), perun, unreadable)  # fmt: skip


def read_events(run_dir: Path) -> list[dict]:
    """Events of all ranks in the order of their wall clocks; lines cut by a crash are skipped."""
    events = []
    for path in sorted(run_dir.glob("events-rank*.jsonl")):
        rank = int(path.stem.removeprefix("events-rank"))
        for text in path.read_text(errors="replace").splitlines():
            try:
                events.append({"rank": rank, **json.loads(text)})
            except ValueError:
                continue
    return sorted(events, key=lambda event: event["t_wall_ns"])


def cumulative_energy(sensor: dict, seconds: np.ndarray, readings: np.ndarray) -> np.ndarray:
    """Energy in J from the first sample on, at each sample.

    A counter is differenced (with wrap-around), never turned into power first; power is integrated by the
    trapezoidal rule; the estimate is idle power x cores x time + (full - idle) x busy core time.
    """
    if sensor["kind"] == "power":
        watts = readings * sensor["to_SI"]
        return np.concatenate([[0.0], np.cumsum(np.diff(seconds) * (watts[1:] + watts[:-1]) / 2)])
    steps = np.diff(readings)
    if sensor["wraps_at"] is not None:
        steps = np.where(steps < 0, steps + sensor["wraps_at"], steps)
    total = np.concatenate([[0.0], np.cumsum(steps)]) * sensor["to_SI"]
    if sensor["kind"] == "busy":
        model = sensor["model"]
        idle_W, full_W = model["idle_W_per_core"], model["full_W_per_core"]
        return idle_W * model["cores"] * (seconds - seconds[0]) + (full_W - idle_W) * total
    return total


def energy_of_sensors(samples: Samples, start_ns: int, end_ns: int) -> list[dict]:
    """Energy of each sensor between two instants of the host's monotonic clock, edges interpolated.

    Each entry: the sensor's description, ``energy_J``, ``samples`` inside the window, ``failed_reads`` and
    ``coverage``, the share of the window within two periods of a successful reading. Sensors without two readings
    have no energy: the entry lacks ``energy_J``.
    """
    entries = []
    for column, sensor in enumerate(samples.header["sensors"]):
        good = ~np.isnan(samples.readings[:, column])
        t_ns = samples.t_ns[good]
        entry = {**sensor, "host": samples.header["host"]}
        inside = (samples.t_ns >= start_ns) & (samples.t_ns <= end_ns)
        entry["samples"] = int((inside & good).sum())
        entry["failed_reads"] = int((inside & ~good).sum())
        if len(t_ns) >= 2 and end_ns > start_ns:
            seconds = (t_ns - t_ns[0]) / 1e9
            energy_J = cumulative_energy(sensor, seconds, samples.readings[good, column])
            window_s = (np.array([start_ns, end_ns]) - t_ns[0]) / 1e9
            first_J, last_J = np.interp(window_s, seconds, energy_J)
            entry["energy_J"] = float(last_J - first_J)
            entry["coverage"] = _coverage(seconds, *window_s, 2 * samples.period_s)
        entries.append(entry)
    return entries


def _coverage(seconds: np.ndarray, start_s: float, end_s: float, longest_s: float) -> float:
    """Share of a window that lies between samples no further apart than longest_s."""
    edges = np.clip(seconds, start_s, end_s)
    widths = np.diff(edges)
    return float(widths[np.diff(seconds) <= longest_s].sum() / (end_s - start_s))


def totals(entries: list[dict], window_s: float) -> dict:
    """Energies and mean powers per component, and their sum, from the primary sensors of all hosts.

    The total's provenance is the weakest of its parts. A component without a sensor is absent.
    """
    result: dict = {}
    provenances: dict[str, str] = {}
    for component in COMPONENTS:
        own = [e for e in entries if e["component"] == component and e["primary"] and "energy_J" in e]
        if own:
            result[f"energy_{component}_J"] = sum(entry["energy_J"] for entry in own)
            provenances[component] = max((entry["provenance"] for entry in own), key=PROVENANCES.index)
            result[f"energy_{component}_provenance"] = provenances[component]
            result[f"mean_power_{component}_W"] = result[f"energy_{component}_J"] / window_s
    if provenances:
        result["energy_total_J"] = sum(result[f"energy_{component}_J"] for component in provenances)
        result["energy_total_provenance"] = max(provenances.values(), key=PROVENANCES.index)
        result["mean_power_total_W"] = result["energy_total_J"] / window_s
    return result


def cost_so_far(folder: Path) -> dict:
    """``seconds`` and energies (``totals``) of all that was sampled to folder/samples-*.jsonl, cut calls included."""
    hosts = [
        samples for path in sorted(folder.glob("samples-*.jsonl")) if len((samples := read_samples(path)).t_ns) > 1
    ]
    windows = [(int(samples.t_ns[0]), int(samples.t_ns[-1])) for samples in hosts]
    seconds = sum(end - start for start, end in windows) / 1e9
    entries = [entry for samples, window in zip(hosts, windows, strict=True)
               for entry in energy_of_sensors(samples, *window)]  # fmt: skip
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
    paths = sorted(run_dir.glob("samples-*.jsonl"))
    for path in paths:
        samples = read_samples(path)
        host = samples.header["host"]
        for column, sensor in enumerate(samples.header["sensors"]):
            good = ~np.isnan(samples.readings[:, column])
            if good.sum() < 2:
                continue
            seconds = (samples.t_ns[good] - starts.get(host, samples.t_ns[0])) / 1e9
            energy_J = cumulative_energy(sensor, seconds, samples.readings[good, column])
            edges = np.arange(np.ceil(seconds[0] / period_s), np.floor(seconds[-1] / period_s) + 1) * period_s
            name = sensor["id"] if len(paths) == 1 else f"{host}:{sensor['id']}"
            traces[name] = ((edges[1:] + edges[:-1]) / 2, np.diff(np.interp(edges, seconds, energy_J)) / period_s)
    return traces
