"""Machines that people have, written as our sampler writes them, on a clock of their own.

machines.toml describes them: of each device its sensors and the power that it draws, in closed
form, so that the true energy is known. Nothing waits: a minute of samples takes milliseconds.
"""

import tomllib
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from tests.measure import worlds
from tests.measure.test_lying_sensors import BEGIN_S, COUNTERS, POWERS
from tests.run_files import judged, write_samples, write_training

TABLE = tomllib.loads(Path(__file__).with_name("machines.toml").read_text())
MACHINES = {machine["name"]: machine for machine in TABLE["machine"]}
DEFENDED = {machine["name"]: machine for machine in TABLE["defended"]}
LIARS, BUSES = TABLE["liar"], {bus["name"]: bus for bus in TABLE["bus"]}
AFTER_S = 2.0  # that are sampled after the end
STATES_S = 10.0  # between two lines of states


def instants_s(machine, random, until_s):
    """When this machine's sampler reads, stalls left out."""
    apart_s = max(machine.get("period_s", 0.04), machine.get("read_s", 0.0))
    t = worlds.instants_s(random, 0.0, until_s, apart_s)
    for every_s, late_s in machine.get("stalls", []):
        for nth_s in np.arange(BEGIN_S, until_s, every_s):
            begin_s = nth_s + random.uniform(0, every_s)
            t = t[(t <= begin_s) | (t >= begin_s + late_s)]
    return t


def state(device, t_s):
    """What a line of states tells of a device."""
    limits_W = device.get("limits_W", [[0, device.get("limit_W", 0)]])
    so_far_W = [watts for since_s, watts in limits_W if since_s <= t_s]
    return {"limit_W": so_far_W[-1], "is_busy": device.get("is_busy", True)}


def columns_of(device, number, load, t, random, fault):
    """Describe the sensors of a device, each with its readings; the first counts, and may lie."""
    on, columns = device["on"], []
    shown = device.get("renewed_s", 0.0), device.get("noise", 0.01)
    for kind in device["has"]:
        seen_s = t - device.get("lag_s", 0.0)
        about, values = worlds.readings_of(kind, load, seen_s, random, *shown)
        if wraps_J := device.get("wraps_J"):
            about["wraps_at"], values = wraps_J / about["to_SI"], values % wraps_J
        notes = {"limit_W": state(device, 0.0)["limit_W"]}
        notes["power"] = about["notes"].get("power", "")
        notes |= {"uuid": f"GPU-{number}", "vendor": "10de"} if on == "gpu" else {}
        name = f"{on}_{number}_{kind.replace(' ', '_')}"
        about |= {"id": name, "component": on, "device": str(number), "notes": notes}
        if columns:
            about |= {"primary": False, "checks": columns[0][0]["id"]}
        elif fault:
            values = (COUNTERS | POWERS)[fault](values, t)
        columns.append((about, values / about["to_SI"]))
    return columns


def write(folder, machine, liar="", fault=""):
    """Write the files of one measured command on a machine, and return the true J by component.

    liar, fault: which device lies, and how; "missing" has no sensor, "twice" has two.
    """
    random = np.random.default_rng(zlib.crc32(f"{machine['name']} {fault}".encode()))
    end_s = BEGIN_S + machine.get("seconds", 20.0)
    t = instants_s(machine, random, end_s + AFTER_S)
    columns, told, true_J, numbers = [], {}, Counter(), Counter()
    for device in machine["devices"]:
        load = worlds.Load(*device["W"], begin_s=BEGIN_S, end_s=end_s)
        if not device.get("unused"):
            true_J[device["on"]] += load.energy_J(end_s) - load.energy_J(BEGIN_S)
        number = numbers[device["on"]]
        numbers[device["on"]] += 1
        how = fault if liar == f"{device['on']}{number}" else ""
        if how == "missing":
            continue
        lie = how.replace("twice", "")
        own = columns_of(device, number, load, t, random, lie)
        if how == "twice":
            own.append((own[0][0] | {"id": "again", "device": "again"}, own[0][1]))
        told |= {about["id"]: device for about, _ in own}
        columns += own
    states = [
        (t_s, name, state(device, t_s))
        for t_s in [*np.arange(0.0, t[-1], STATES_S), t[-1]]
        for name, device in told.items()
    ]
    period_s = machine.get("period_s", 0.04)
    write_samples(folder, t, columns, states, period_s=period_s, boot_id="b")
    for rank, uuid in enumerate(machine.get("ranks", [None])):
        write_training(folder, BEGIN_S, end_s, rank, gpu_uuid=uuid)
    return true_J


def judge(folder, machine, liar="", fault="", thresholds=None):
    """Return what our account says of a machine, and the true J by component."""
    true_J = write(folder, machine, liar, fault)
    return judged(folder, thresholds), true_J
