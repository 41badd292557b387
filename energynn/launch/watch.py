"""`energynn status --watch RUN`: what a run draws, has used and will still use, from any shell that sees its files."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path

import numpy as np

from energynn import records
from energynn.files import write_json
from energynn.measure import energy
from energynn.measure.account import in_use
from energynn.measure.samples import (
    Reader,
    Samples,
    events_of_kind,
    host_of_rank,
    read_events,
    segments,
    times_of_hosts,
)
from energynn.reading import json_table, one_fault

RECENT_S = 1.0  # power is the mean over the last second
STATE = ".state.json"  # the last look, for who asks from elsewhere (`energynn status`)
LOOK_S = 2.0  # between two looks in a notebook
OLD_S = 5.0  # samples older than this are worth a word


class Watch:
    """Follows the files of a run, each look reading only what is new."""

    def __init__(self, run_dir: Path):
        self.run_dir = Path(run_dir)
        if not (self.run_dir / "run.json").exists():
            raise ValueError(f"watch: {run_dir} is no run; give a folder with a run.json, as runs/<system>/<run_id>")
        self.intent = records.read_intent(self.run_dir)
        self.folder = segments(self.run_dir)[-1]
        self.before_J = 0.0  # of earlier segments, from the last look at them
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            last = json_table(self.run_dir / STATE)
            self.before_J = last["energy_before_J"]
            if last["segment"] < len(segments(self.run_dir)):
                self.before_J += last["energy_J"]
        self.readers: dict[Path, Reader] = {}

    def look(self) -> dict:
        """Power in W and energy so far in J of each primary sensor, and what follows from the trainer's progress."""
        events = read_events(self.folder)
        starts, ends = times_of_hosts(events, "training_start"), times_of_hosts(events, "training_end")
        devices = []
        for path in sorted(self.folder.glob("samples-*.jsonl")):
            if path not in self.readers:
                self.readers[path] = Reader(path)
            reader = self.readers[path]
            reader.read()
            if reader.header and len(reader.samples_read) > 1:
                devices += self._look_at(reader.samples(), events, starts, ends)
        state = {
            "run_id": self.intent["run_id"],
            "segment": len(segments(self.run_dir)),
            "devices": devices,
            "power_W": sum(device["power_W"] for device in devices),
            "energy_J": sum(device["energy_J"] for device in devices),
            "energy_before_J": self.before_J,
        }
        for event in events_of_kind(events, "epoch")[-1:]:
            state |= {name: event[name] for name in ("epoch", "epochs")}
        state |= _progress(events, state["energy_J"])
        read = [reader.samples_read for reader in self.readers.values()]
        last_ns = [samples[-1].w for samples in read if samples]
        state["age_s"] = time.time() - min(last_ns) / 1e9 if last_ns else None  # by two clocks, if read elsewhere
        state["status"] = self._status(starts, ends)
        return state

    def _status(self, starts: dict[str, int], ends: dict[str, int]) -> str:
        if (self.run_dir / "record.json").exists():
            return records.read_record(self.run_dir)["status"]
        if ends:
            return "ending"
        return "training" if starts else "starting"

    def _look_at(self, samples: Samples, events: list[dict], starts: dict, ends: dict) -> list[dict]:
        """Power of the last second, and energy since the training began, of each primary sensor."""
        names = host_of_rank(events)
        own = [event for event in events if names.get(event["rank"]) == samples.host]
        sensors = in_use(samples.header["sensors"], own)
        devices = []
        for curve in energy.curves(samples.t_ns / 1e9, samples.readings, sensors, samples.period_s):
            if not curve.sensor["primary"]:
                continue
            last_s = curve.t_s[-1]
            begin_s = starts.get(samples.host, np.inf) / 1e9
            end_s = min(last_s, ends.get(samples.host, np.inf) / 1e9)
            device = {"host": samples.host}
            device |= {name: curve.sensor[name] for name in ("id", "component", "provenance")}
            device["energy_J"] = float(curve.at(max(begin_s, end_s)) - curve.at(begin_s))
            recent_s = min(RECENT_S, last_s - curve.t_s[0])
            recent_J = float(curve.at(last_s) - curve.at(last_s - recent_s))
            device["power_W"] = recent_J / max(recent_s, 1e-9)
            devices.append(device)
        return devices


def _progress(events: list[dict], energy_J: float) -> dict:
    """What was trained, how fast, and what is left, from rank 0's last word; empty before there is one."""
    told = [event for event in events if "samples_trained" in event]
    starts = [event for event in events_of_kind(events, "training_start") if event["rank"] == 0]
    if not told or not starts or told[-1]["samples_trained"] == 0:
        return {}
    done = told[-1]["samples_trained"]
    aim = max(event.get("samples_to_train", done) for event in told)
    elapsed_s = (told[-1]["t_mono_ns"] - starts[0]["t_mono_ns"]) / 1e9
    # Joules, seconds and samples of this segment alone; an earlier one may have run elsewhere.
    here = max(1, done - starts[0].get("samples_done", 0))
    return {
        "samples_trained": done,
        "samples_to_train": aim,
        "samples_per_s": here / elapsed_s,
        "energy_per_sample_J": energy_J / here,
        "time_left_s": elapsed_s / here * (aim - done),
        "energy_left_J": energy_J / here * (aim - done),
    }


def text(state: dict) -> str:
    """A look for a person: one line per device, then the whole."""
    segment = f", segment {state['segment']}" if state["segment"] > 1 else ""
    lines = [f"{state['run_id']}: {state['status']}{segment}"]
    if state["age_s"] and state["age_s"] > OLD_S and state["status"] in ("starting", "training", "ending"):
        lines[0] += f", but the last sample is {state['age_s']:.0f} s old; `energynn check` tells whether it still runs"
    several = len({device["host"] for device in state["devices"]}) > 1
    for device in state["devices"]:
        name = f"{device['host']}:{device['id']}" if several else device["id"]
        lines.append(f"  {name:28}{device['power_W']:10.1f} W {device['energy_J']:14.1f} J  {device['provenance']}")
    lines.append(f"  {'together':28}{state['power_W']:10.1f} W {state['energy_J']:14.1f} J")
    if "samples_trained" in state:
        lines.append(
            f"  {state['samples_trained']} of {state['samples_to_train']} samples, "
            f"{state['samples_per_s']:.1f} samples/s, {state['energy_per_sample_J']:.4g} J per sample,\n"
            f"  {state['time_left_s']:.0f} s and {state['energy_left_J']:.4g} J left"
        )
    return "\n".join(lines)


def follow(run_dir: Path, every_s: float, once: bool) -> None:
    """Print looks until the run has its record; in a terminal each over the one before."""
    with one_fault(run_dir):
        watch, height = Watch(run_dir), 0
    while True:
        with one_fault(run_dir):
            shown = text(watch.look())
        if height and sys.stdout.isatty():
            print(f"\x1b[{height}A\x1b[J", end="")
        print(shown, flush=True)
        height = len(shown.splitlines())
        if once or (watch.run_dir / "record.json").exists():
            return
        time.sleep(every_s)


def in_notebook(run_dir: Path) -> threading.Event | None:
    """Show the looks in the running cell of a notebook until the event is set; None where there is no notebook."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        return None
    if not hasattr(get_ipython(), "kernel"):
        return None
    handle, ended = display({"text/plain": "..."}, raw=True, display_id=True), threading.Event()

    def show() -> None:
        watch = Watch(run_dir)
        while True:
            # A look reads a file of each rank and host. Of many ranks it is taken seldom, for the storage's sake.
            last = ended.wait(max(LOOK_S, watch.intent["devices"] / 4))
            try:
                state = watch.look()
                write_json(run_dir / STATE, state)
                handle.update({"text/plain": text(state)}, raw=True)
            except Exception as error:  # a view that fails must not stop the run that it shows
                handle.update({"text/plain": f"(no view: {error})"}, raw=True)
            if last:
                return

    threading.Thread(target=show, name="energynn-watch", daemon=True).start()
    return ended
