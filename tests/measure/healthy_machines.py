"""Machines that people have, written as our sampler writes them, on a clock of their own.

machines.toml describes them: of each device its sensors and the power that it draws, in closed
form, so that the true energy is known. Nothing waits: a minute of samples takes milliseconds.
"""

import json
import tomllib
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from energynn.measure.account import account
from energynn.measure.samples import events_of_segments
from tests.measure import worlds
from tests.measure.test_lying_sensors import BEGIN_S, COUNTERS, POWERS

TABLE = tomllib.loads(Path(__file__).with_name("machines.toml").read_text())
MACHINES = {machine["name"]: machine for machine in TABLE["machine"]}
DEFENDED = {machine["name"]: machine for machine in TABLE["defended"]}
LIARS = TABLE["liar"]
AFTER_S = 2.0  # that are sampled after the end
STATES_S = 10.0
BOOT_NS = 10**15
SPECIAL = {"missing", "twice"}  # faults of a whole device


@dataclass(frozen=True)
class Sum:
    """A power that is the sum of several loads."""

    parts: list[worlds.Load]

    def power_W(self, t):
        return sum(part.power_W(t) for part in self.parts)

    def energy_J(self, t):
        return sum(part.energy_J(np.maximum(t, 0.0)) for part in self.parts)


@dataclass(frozen=True)
class Device:
    """One device: its component, number, sensors, power, and what it tells of itself."""

    component: str
    number: int
    kinds: list[str]
    load: Sum
    facts: dict

    @property
    def uuid(self):
        return f"GPU-{self.number}" if self.component == "gpu" else None

    def state(self, t_s):
        """What state lines tell of it at a time; limits_W: from each of some seconds on."""
        limits_W = self.facts.get("limits_W", [[0, self.facts.get("limit_W", 0)]])
        told = {"limit_W": [watts for since_s, watts in limits_W if since_s <= t_s][-1]}
        busy = self.facts.get("is_busy", True)
        return told | ({"is_busy": busy} if self.component == "gpu" else {})

    def columns(self, t, random, fault):
        """Describe each sensor, and make its readings in its own unit; the first counts."""
        made = []
        for kind in self.kinds:
            about, values = self.readings(
                kind, t - self.facts.get("lag_s", 0.0), random
            )
            notes = self.state(0.0) | {"power": about["notes"].get("power", "")}
            notes |= {"uuid": self.uuid, "vendor": "10de"} if self.uuid else {}
            notes.pop("is_busy", None)
            about |= {
                "id": f"{self.component}_{self.number}_{kind.replace(' ', '_')}",
                "component": self.component,
                "device": str(self.number),
                "notes": notes,
            }
            if made:
                about |= {"primary": False, "checks": made[0][0]["id"]}
            elif fault:
                values = (COUNTERS | POWERS)[fault](values, t)
            if wraps_J := self.facts.get("wraps_J"):
                about["wraps_at"] = wraps_J / about["to_SI"]
                values = values % wraps_J
            made.append((about, values / about["to_SI"]))
        return made

    def readings(self, kind, t, random):
        """Describe a sensor, and make its readings in SI units."""
        every_s = self.facts.get("renewed_s", 0.0)
        about, values = worlds.readings_of(kind, self.load, t, random, every_s)
        if (
            kind == "busy"
        ):  # the kernel charges at each tick, and tells hundredths of a second
            tick_s, model = np.floor(t / 0.004) * 0.004, worlds.MODEL
            idle_J = model["idle_W_per_core"] * model["cores"] * tick_s
            more_W = model["full_W_per_core"] - model["idle_W_per_core"]
            values = (
                np.floor((self.load.energy_J(tick_s) - idle_J) / more_W * 100) / 100
            )
        if kind not in ("power", "mean power"):
            return about, values

        def watts_at(random, load, t):
            kinds = {"power": worlds.instantaneous_W, "mean power": worlds.averaged_W}
            watts = kinds[kind](random, load, t, 0.0)
            return watts * (1 + random.normal(0, self.facts.get("noise", 0.01), len(t)))

        return about, worlds.renewed(random, self.load, t, every_s, watts_at).round(3)


def devices_of(machine, end_s):
    """Make the devices of an entry of machines.toml, numbered within their component."""
    devices = []
    for facts in machine["devices"]:
        component = next(each for each in ("gpu", "cpu", "ram") if each in facts)
        number = sum(each.component == component for each in devices)
        kinds = facts[component]
        loads = [
            worlds.Load(shape, low, high, rhythm, idle, begin_s=BEGIN_S, end_s=end_s)
            for shape, low, high, rhythm, idle in facts["W"]
        ]
        kinds = [kinds] if isinstance(kinds, str) else kinds
        devices.append(Device(component, number, kinds, Sum(loads), facts))
    return devices


def instants_s(machine, random, until_s):
    """When this machine's sampler reads; stalls: how often it is late, and for how long, in s."""
    period_s = machine.get("period_s", 0.04)
    read_s = machine.get("read_s", 0.0)
    t = worlds.instants_s(random, 0.0, until_s, max(period_s, read_s))
    for every_s, late_s in machine.get("stalls", []):
        begins_s = np.arange(BEGIN_S + random.uniform(0, every_s), until_s, every_s)
        for begin_s in begins_s + random.uniform(-0.2, 0.2, len(begins_s)) * every_s:
            t = t[(t <= begin_s) | (t >= begin_s + late_s)]
    return t


def write(folder, machine, device=None, fault=None):
    """Write the files of one measured command on a machine, and return the true J by component.

    device, fault: which device lies, and how; "missing" has no sensor, "twice" has two.
    """
    random = np.random.default_rng(zlib.crc32(f"{machine['name']} {fault}".encode()))
    end_s = BEGIN_S + machine.get("seconds", 20.0)
    t = instants_s(machine, random, end_s + AFTER_S)
    columns, read, true_J = [], [], {}
    for each in devices_of(machine, end_s):
        lies = f"{each.component}{each.number}" == device
        joules = float(np.diff(each.load.energy_J(np.array([BEGIN_S, end_s])))[0])
        if not each.facts.get("unused"):
            true_J[each.component] = true_J.get(each.component, 0.0) + joules
        if lies and fault == "missing":
            continue
        read.append(each)
        columns += each.columns(
            t, random, fault if lies and fault not in SPECIAL else ""
        )
        if lies and fault == "twice":
            about, values = columns[-len(each.kinds)]
            columns.append((about | {"id": "again", "device": "again"}, values))
    _write_samples(folder, machine, t, columns, read)
    _write_events(folder, machine, end_s)
    return true_J


def _write_samples(folder, machine, t, columns, devices):
    header = {
        "header": "energynn-samples/1",
        "host": "h",
        "boot_id": "b",
        "period_s": machine.get("period_s", 0.04),
        "sensors": [about for about, _ in columns],
        "problems": [],
        "unaccounted": machine.get("unaccounted", []),
    }
    lines = [header]
    next_s = 0.0
    for row, t_s in enumerate(t):
        if t_s >= next_s or row == len(t) - 1:
            states = {
                about["id"]: each.state(t_s)
                for each in devices
                for about, _ in columns
                if (about["component"], about["device"])
                == (each.component, str(each.number))
            }
            lines.append({"t": _ns(t_s), "states": states})
            next_s += STATES_S
        values = [_number(values[row]) for _, values in columns]
        lines.append({"t": _ns(t_s), "w": _ns(t_s), "v": values})
    _write_lines(folder / "samples-h.jsonl", lines)


def _number(value):
    return round(float(value), 3) if np.isfinite(value) and value >= 0 else None


def _write_events(folder, machine, end_s):
    for rank, uuid in enumerate(machine.get("ranks", [None])):
        events = [
            {"event": "rank_start", "host": "h", "gpu_uuid": uuid, **_clocks(1.0)},
            {"event": "training_start", **_clocks(BEGIN_S)},
            {"event": "training_end", **_clocks(end_s)},
        ]
        _write_lines(folder / f"events-rank{rank}.jsonl", events)


def _ns(t_s):
    return BOOT_NS + int(t_s * 1e9)


def _clocks(t_s):
    return {"t_mono_ns": _ns(t_s), "t_wall_ns": _ns(t_s)}


def _write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def judge(folder, machine, device=None, fault=None, thresholds=None):
    """Return what our account says of a machine, and the true J by component."""
    true_J = write(folder, machine, device, fault)
    return account(events_of_segments(folder), thresholds), true_J


def is_right(found, true_J):
    """Tell whether each energy is there and, within its bound and 0.4 %, right."""
    return all(
        abs(found.get(f"energy_{name}_J", np.inf) - joules)
        <= found.get(f"energy_{name}_bound_J", 0.0) + 0.004 * joules
        for name, joules in true_J.items()
    )
