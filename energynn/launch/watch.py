"""`energynn status --watch RUN`: what a run draws, has used and will still use, from any shell."""

from __future__ import annotations

import math
import time
from pathlib import Path

from energynn import records
from energynn.measure.energy import curves
from energynn.measure.samples import (
    Samples,
    events_of_kind,
    read_events,
    read_hosts,
    segments,
    times_of,
)
from energynn.reading import one_fault

LOOK_S = 2.0  # between two looks


def look(run_dir: Path) -> dict:
    """Return power in W and energy in J of each device, and what follows from the progress.

    Energies are those of the training in the newest segment.
    """
    folder = segments(run_dir)[-1]
    events = read_events(folder)
    starts, ends = (
        times_of(events, f"training_{mark}", "host") for mark in ("start", "end")
    )
    devices = [
        one for host in read_hosts(folder) for one in _devices(host, starts, ends)
    ]
    state = {
        "run_id": run_dir.name,
        "devices": devices,
        "status": ["starting", "training", "ending"][bool(starts) + bool(ends)],
        "power_W": sum(device["power_W"] for device in devices),
        "energy_J": sum(device["energy_J"] for device in devices),
    }
    if (run_dir / "record.json").exists():
        state["status"] = records.read_record(run_dir)["status"]
    for event in events_of_kind(events, "epoch")[-1:]:
        state |= {name: event[name] for name in ("epoch", "epochs")}
    return state | _progress(events, state["energy_J"])


def _devices(host: Samples, starts: dict[str, int], ends: dict[str, int]) -> list[dict]:
    """Describe the primary sensors of a host; the power is the mean of the last second."""
    devices = []
    begin_s, end_s = (times.get(host.host, math.inf) / 1e9 for times in (starts, ends))
    for one in curves(host):
        last_s = one.t_s[-1]
        recent_s = min(1.0, last_s - one.t_s[0])
        if not one.sensor["primary"] or not recent_s:
            continue
        # Beyond the last reading the energy stays the same.
        first_J, used_J, recent_J, last_J = one.at(
            [begin_s, end_s, last_s - recent_s, last_s]
        )
        device = {
            "name": f"{host.host}:{one.sensor['id']}",
            "energy_J": float(used_J - first_J),
        }
        device["power_W"] = float(last_J - recent_J) / recent_s
        devices.append(device | {"provenance": one.sensor["provenance"]})
    return devices


def _progress(events: list[dict], energy_J: float) -> dict:
    """Return what was trained, how fast, and what is left; empty before rank 0's first word."""
    told = [event for event in events if "samples_to_train" in event]
    starts = [
        each for each in events_of_kind(events, "training_start") if each["rank"] == 0
    ]
    if not told or not starts:
        return {}
    done, aim = told[-1]["samples_trained"], told[-1]["samples_to_train"]
    here = max(1, done - starts[0].get("samples_done", 0))  # in this segment
    elapsed_s = (told[-1]["t_mono_ns"] - starts[0]["t_mono_ns"]) / 1e9
    left = (aim - done) / here
    return {
        "samples_trained": done,
        "samples_to_train": aim,
        "energy_per_sample_J": energy_J / here,
        "time_left_s": elapsed_s * left,
        "energy_left_J": energy_J * left,
    }


def text(state: dict) -> str:
    """Write a look for a person: a line for each device, then the whole."""
    lines = [f"{state['run_id']}: {state['status']}"]
    together = {"name": "together", "provenance": ""} | state
    for device in [*state["devices"], together]:
        used = f"{device['power_W']:10.1f} W {device['energy_J']:14.1f} J"
        lines.append(f"  {device['name']:28}{used}  {device['provenance']}".rstrip())
    if "samples_trained" in state:
        samples = f"{state['samples_trained']} of {state['samples_to_train']} samples"
        lines.append(f"  {samples}, {state['energy_per_sample_J']:.4g} J per sample,")
        lines.append(
            f"  {state['time_left_s']:.0f} s and {state['energy_left_J']:.4g} J left"
        )
    return "\n".join(lines)


def follow(run_dir: Path) -> None:
    """Print a look every two seconds until the run has its record."""
    while True:
        with one_fault(run_dir):
            print(text(look(run_dir)), flush=True)
        if (run_dir / "record.json").exists():
            return
        time.sleep(LOOK_S)
