"""`energynn status --watch RUN`: what a run draws, has used and will still use, from any shell."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from energynn import records
from energynn.files import write_json
from energynn.measure.samples import events_of_kind, read_events, segments, times_of_hosts
from energynn.reading import one_fault

RECENT_NS = 1_000_000_000  # power is the mean over the last second
STATE = ".state.json"  # the last look in a notebook, for `energynn status`
LOOK_S = 2.0  # between two looks in a notebook
OLD_S = 5.0  # samples older than this are worth a word


def look(run_dir: Path, files: dict[Path, dict]) -> dict:
    """Return power in W and energy in J of each device, and what follows from the progress.

    ``files``: what earlier looks have read, {} at first; each look reads only what is new. Energies
    are those of the newest segment.
    """
    intent = records.read_intent(run_dir)
    folder = segments(run_dir)[-1]
    events = read_events(folder)
    starts, ends = (times_of_hosts(events, f"training_{mark}") for mark in ("start", "end"))
    devices = []
    for path in sorted(folder.glob("samples-*.jsonl")):
        host = path.stem.removeprefix("samples-")
        file = files.setdefault(path, {"read_B": 0, "sensors": [], "devices": []})
        _read_new(path, file, starts.get(host, sys.maxsize), ends.get(host, sys.maxsize))
        devices += [{"host": host} | device for device in file["devices"] if device["trace"]]
    state = {
        "run_id": intent["run_id"],
        "segment": len(segments(run_dir)),
        "devices": devices,
        "status": ["starting", "training", "ending"][bool(starts) + bool(ends)],
        "power_W": sum(_power_W(device) for device in devices),
        "energy_J": sum(device["energy_J"] for device in devices),
        "age_s": max((time.time() - device["wall_s"] for device in devices), default=0.0),
    }
    if (run_dir / "record.json").exists():
        state["status"] = records.read_record(run_dir)["status"]
    for event in events_of_kind(events, "epoch")[-1:]:
        state |= {name: event[name] for name in ("epoch", "epochs")}
    return state | _progress(events, state["energy_J"])


def _read_new(path: Path, file: dict, begin_ns: int, end_ns: int) -> None:
    """Add the samples that were written since the last look to the energies of a host's devices."""
    with path.open("rb") as lines:
        lines.seek(file["read_B"])
        for line in lines:
            if not line.endswith(b"\n"):  # it is just being written
                break
            file["read_B"] += len(line)
            row = json.loads(line)
            if "sensors" in row:
                file["sensors"] = row["sensors"]
                empty = {"energy_J": 0.0, "wall_s": 0.0}
                file["devices"] = [empty | {"sensor": each, "trace": []} for each in row["sensors"]]
            for device, value in zip(file["devices"], row.get("v", ()), strict=False):
                if device["sensor"]["primary"] and value is not None:
                    _add(device, row, value, begin_ns, end_ns)


def _add(device: dict, row: dict, value: float, begin_ns: int, end_ns: int) -> None:
    """Add a reading: to the trace of the last second, and to the energy of the training."""
    trace, now_ns = device["trace"], row["t"]
    device["wall_s"] = row["w"] / 1e9
    if trace:
        before_ns, before, total_J = trace[-1]
        joules = _energy_J(device["sensor"], before, value, (now_ns - before_ns) / 1e9)
        inside_ns = min(now_ns, end_ns) - max(before_ns, begin_ns)
        device["energy_J"] += joules * max(0, inside_ns) / (now_ns - before_ns)
        trace.append((now_ns, value, total_J + joules))
        while len(trace) > 2 and trace[1][0] <= now_ns - RECENT_NS:
            trace.pop(0)
    else:
        trace.append((now_ns, value, 0.0))


def _energy_J(sensor: dict, before: float, now: float, seconds: float) -> float:
    """Return the energy between two readings of a counter, a power, or busy core-seconds."""
    if sensor["kind"] == "power":
        return (before + now) / 2 * sensor["to_SI"] * seconds
    step = now - before
    if sensor["kind"] == "energy":
        return (step if step >= 0 else step + (sensor["wraps_at"] or 0)) * sensor["to_SI"]
    idle_W, full_W = (sensor["model"][f"{load}_W_per_core"] for load in ("idle", "full"))
    return (full_W - idle_W) * step + idle_W * sensor["model"]["cores"] * seconds


def _power_W(device: dict) -> float:
    (begin_ns, _, first_J), (end_ns, _, last_J) = device["trace"][0], device["trace"][-1]
    return (last_J - first_J) / max(1, end_ns - begin_ns) * 1e9


def _progress(events: list[dict], energy_J: float) -> dict:
    """Return what was trained, how fast, and what is left; empty before rank 0's first word."""
    told = [event for event in events if event.get("samples_trained")]
    starts = [each for each in events_of_kind(events, "training_start") if each["rank"] == 0]
    if not told or not starts:
        return {}
    done = told[-1]["samples_trained"]
    aim = max(event.get("samples_to_train", done) for event in told)
    elapsed_s = (told[-1]["t_mono_ns"] - starts[0]["t_mono_ns"]) / 1e9
    here = max(1, done - starts[0].get("samples_done", 0))  # in this segment
    return {
        "samples_trained": done,
        "samples_to_train": aim,
        "samples_per_s": here / elapsed_s,
        "energy_per_sample_J": energy_J / here,
        "time_left_s": elapsed_s / here * (aim - done),
        "energy_left_J": energy_J / here * (aim - done),
    }


def text(state: dict) -> str:
    """Write a look for a person: a line for each device, then the whole."""
    segment = f", segment {state['segment']}" if state["segment"] > 1 else ""
    lines = [f"{state['run_id']}: {state['status']}{segment}"]
    if state["age_s"] > OLD_S and state["status"] in ("starting", "training", "ending"):
        lines[0] += f", but the last sample is {state['age_s']:.0f} s old"
    for device in state["devices"]:
        name, provenance = f"{device['host']}:{device['sensor']['id']}", device["sensor"]
        power, used = f"{_power_W(device):10.1f} W", f"{device['energy_J']:14.1f} J"
        lines.append(f"  {name:28}{power} {used}  {provenance['provenance']}")
    lines.append(f"  {'together':28}{state['power_W']:10.1f} W {state['energy_J']:14.1f} J")
    if "samples_trained" in state:
        samples = f"{state['samples_trained']} of {state['samples_to_train']} samples"
        speed = f"{state['samples_per_s']:.1f} samples/s"
        lines.append(f"  {samples}, {speed}, {state['energy_per_sample_J']:.4g} J per sample,")
        lines.append(f"  {state['time_left_s']:.0f} s and {state['energy_left_J']:.4g} J left")
    return "\n".join(lines)


def follow(run_dir: Path, every_s: float, once: bool) -> None:
    """Print looks until the run has its record; in a terminal each over the one before."""
    if not (run_dir / "run.json").exists():
        raise ValueError(f"watch: {run_dir} is no run; give a folder with a run.json")
    files, height = {}, 0
    while True:
        with one_fault(run_dir):
            shown = text(look(run_dir, files))
        if height and sys.stdout.isatty():
            print(f"\x1b[{height}A\x1b[J", end="")
        print(shown, flush=True)
        height = len(shown.splitlines())
        if once or (run_dir / "record.json").exists():
            return
        time.sleep(every_s)


def in_notebook(run_dir: Path) -> threading.Event:
    """Show looks in the running cell of a notebook, if there is one, until the event is set."""
    ended, files = threading.Event(), {}
    if "ipykernel" not in sys.modules:
        return ended
    from IPython.display import display

    handle = display({"text/plain": "..."}, raw=True, display_id=True)

    def show() -> None:
        while not ended.wait(LOOK_S):
            try:
                state = look(run_dir, files)
                write_json(run_dir / STATE, state)
                words = text(state)
            except Exception as error:  # a view that fails must not stop the run that it shows
                words = f"(no view: {error})"
            handle.update({"text/plain": words}, raw=True)

    threading.Thread(target=show, name="energynn-watch", daemon=True).start()
    return ended
