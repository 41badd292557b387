"""Sensors that lie, one fault after the other, in windows of known energy; and healthy machines."""

import zlib
from dataclasses import replace

import numpy as np
import pytest

from energynn.measure import energy
from tests.measure import worlds
from tests.measure.worlds import Load, sensor

BEGIN_S, END_S, UNTIL_S, T0_S = 2.0, 22.0, 24.0, 1000.0
HALF_S = (BEGIN_S + END_S) / 2
AVERAGE = {"power": "an average over 1 s"}


def load(shape, idle_W, low_W, high_W, rhythm_s=3.7) -> Load:
    return Load(shape, low_W, high_W, rhythm_s, idle_W, T0_S + BEGIN_S, T0_S + END_S)


class Falling(Load):
    """A load that falls to a third in the middle."""

    def power_W(self, t):
        return np.where(
            t < T0_S + HALF_S, super().power_W(t), np.minimum(super().power_W(t), self.high_W / 3)
        )

    def energy_J(self, t):
        late_s = np.clip(t, T0_S + HALF_S, self.end_s) - (T0_S + HALF_S)
        return super().energy_J(t) - self.high_W * 2 / 3 * late_s


GPU_LOADS = {
    "constant": load("constant", 60.0, 60.0, 400.0),
    "square": load("square", 60.0, 150.0, 450.0),
    "sine": load("sine", 60.0, 150.0, 450.0),
    "falling": Falling("constant", 60.0, 400.0, 1.0, 60.0, T0_S + BEGIN_S, T0_S + END_S),
    "idle": load("constant", 60.0, 60.0, 60.0),
}
CPU = load("sine", 50.0, 120.0, 180.0, 5.0)
RAM = load("constant", 3.0, 3.0, 12.0)


def whole_watts(t, a_load, number=0):
    """A GPU whose power is shown in whole watts, without noise."""
    power = sensor(f"gpu_{number}_power", "power", device=str(number), notes={"limit_W": 700.0})
    return [(power, a_load.power_W(t).round(), a_load)]


def gpu(t, random, a_load, number=0, counter=True, power="instantaneous"):
    """Sensors of one GPU: (description, readings in SI units, load)."""
    limit = {"limit_W": 700.0, "uuid": f"GPU-{number}"}
    found, checks = [], None
    if counter:
        checks, update_s = f"gpu_{number}_energy", random.uniform(0.02, 0.1)
        joules = 5e4 + worlds.counter_J(random, a_load, t, update_s, 1e-3)
        about = {"to_SI": 1e-3, "update_s": update_s, "notes": limit}
        found.append((sensor(checks, "energy", device=str(number), **about), joules, a_load))
    if power:
        watts, notes = worlds.instantaneous_W(random, a_load, t, noise_W=1.0), limit
        if power == "averaged":
            watts, notes = worlds.averaged_W(random, a_load, t), limit | AVERAGE
        about = {"to_SI": 1e-3, "primary": not counter, "checks": checks, "notes": notes}
        found.append(
            (
                sensor(f"gpu_{number}_power", "power", device=str(number), **about),
                watts.round(3),
                a_load,
            )
        )
    return found


def rapl(t, random, a_load, socket=0, component="cpu", **more):
    joules = 1e3 + worlds.counter_J(random, a_load, t, 0.001, 61e-6)
    name = {"cpu": "package", "ram": "dram"}[component]
    about = {"to_SI": 1e-6, "update_s": 0.001, "wraps_at": 262143328850.0, **more}
    return [
        (
            sensor(f"{component}_{socket}_{name}", "energy", component, str(socket), **about),
            joules,
            a_load,
        )
    ]


def busy(t, random):
    """Busy time of a CPU whose true power is as the model has it, as a reserve."""
    model = worlds.MODEL | {"idle_W_per_core": 50.0 / 16, "full_W_per_core": 200.0 / 16}
    more_W = model["full_W_per_core"] - model["idle_W_per_core"]
    core_s = np.floor((CPU.energy_J(t) - 50.0 * t) / more_W * 100) / 100
    return [
        (
            sensor(
                "cpu_estimate",
                "busy",
                "cpu",
                "all",
                primary=False,
                provenance="estimated",
                model=model,
            ),
            core_s,
            None,
        )
    ]


def machine(kind, gpu_load, t, random):
    """All sensors of a machine, by its kind."""
    found = rapl(t, random, CPU)
    if kind == "counter and power":
        return found + gpu(t, random, gpu_load)
    if kind == "counter and mean power":
        return found + gpu(t, random, gpu_load, power="averaged")
    if kind == "counter and both powers":
        mean, *values = gpu(t, random, gpu_load, power="averaged")[1]
        return found + gpu(t, random, gpu_load) + [(mean | {"id": "gpu_0_power_mean"}, *values)]
    if kind == "counter":
        return found + gpu(t, random, gpu_load, power=None)
    if kind == "power":
        return found + gpu(t, random, gpu_load, counter=False)
    if kind == "mean power":
        return found + gpu(t, random, gpu_load, counter=False, power="averaged")
    if kind == "four GPUs":
        return found + sum((gpu(t, random, gpu_load, number) for number in range(4)), [])
    if kind == "two sockets":
        return (
            found
            + rapl(t, random, CPU, 1)
            + rapl(t, random, RAM, 0, "ram")
            + rapl(t, random, RAM, 1, "ram")
        )
    if kind == "whole watts":
        return rapl(t, random, gpu_load) + whole_watts(t, gpu_load)
    if kind == "two GPUs, one idle from half on":
        return whole_watts(t, gpu_load) + whole_watts(t, replace(gpu_load, end_s=T0_S + HALF_S), 1)
    if kind == "CPU with a limit":
        return rapl(t, random, CPU, notes={"limit_W": 250.0})
    assert kind == "CPU with busy time"
    return found + busy(t, random)


def lost(values, t, begin_s, end_s):
    """A counter that stands still for a time and goes on from where it stood."""
    inside = (t >= begin_s) & (t < end_s)
    first, after = np.argmax(inside), np.flatnonzero(inside)[-1] + 1
    changed = values.copy()
    changed[inside] = values[first]
    if after < len(values):
        changed[after:] -= values[after - 1] - values[first]
    return changed


def faulty(fault, values, t):
    """Readings with a fault; ``t`` counts from the first sample."""
    later, second = t >= HALF_S, (t >= HALF_S) & (t < HALF_S + 1.0)
    changed = values.copy()
    if fault in ("stuck", "stuck at 0"):
        changed[:] = values[0] if fault == "stuck" else 0.0
    elif fault == "stuck from half on":
        changed = lost(values, t, HALF_S, np.inf)
    elif fault.startswith("lost for "):
        changed = lost(values, t, HALF_S, HALF_S + float(fault.split()[2]))
    elif fault == "catches up after 1 s":
        changed[second] = values[np.argmax(second)]
    elif fault.startswith("jump of "):
        changed[later] += float(fault.split()[2])
    elif fault == "steps back once":
        changed[:] = np.where(later, 5.0, 10.0)
    elif fault == "jumps once":
        changed[:] = np.where(later, 1e9, 5.0)
    elif fault == "reset, then stuck":
        changed[:] = np.where(later, 0.0, values[0])
    elif fault.startswith("5 J once at "):
        changed[:] = values[0] + np.where(t < float(fault.split()[4]), 0.0, 5.0)
    elif fault.endswith(" s") and fault.split()[1:3] == ["J", "every"]:
        changed[:] = values[0] + float(fault.split()[0]) * np.floor(
            (t + 1.0) / float(fault.split()[3])
        )
    elif fault.startswith("stands still "):
        begin_s, end_s, share = map(float, fault.split()[2:])
        changed = lost(values, t, begin_s, end_s)
        changed[t >= end_s] += share * (values - changed)[-1]
    elif fault == "reset":
        changed[later] -= values[np.argmax(later)]
    elif fault == "one misread":
        changed[np.argmax(later)] = 3.0
    elif fault == "zero":
        changed[:] = 0.0
    elif fault == "zero for 1 s":
        changed[second] = 0.0
    elif fault == "frozen from half on":
        changed[t >= HALF_S - 0.5] = values[np.argmax(t >= HALF_S - 0.5)]
    elif fault.startswith("x "):
        factor = float(fault.split()[1])
        changed[second if fault.endswith("for 1 s") else later] *= factor
    elif fault.startswith("always x "):
        changed *= float(fault.split()[2])
    elif fault == "slower from half on":
        changed[later] = (
            values[np.argmax(later)] + (values[later] - values[np.argmax(later)]) / 1000
        )
    elif fault == "unreadable":
        changed[:] = np.nan
    elif fault == "unreadable for 1 s":
        changed[second] = np.nan
    else:
        assert fault == "none", fault
    return changed


COUNTER = [
    "stuck",
    "stuck at 0",
    "stuck from half on",
    "lost for 2 s",
    "lost for 0.5 s",
    "jump of 700 J",
]
COUNTER += ["jump of -700 J", "x 1000 from half on", "slower from half on", "unreadable"]
POWER = [
    "zero",
    "zero for 1 s",
    "x 1000 for 1 s",
    "x 1000 from half on",
    "x 0.001 from half on",
    "unreadable",
]
BOTH = [
    "stuck",
    "stuck at 0",
    "stuck from half on",
    "lost for 2 s",
    "jump of 700 J",
    "always x 1.3",
    "always x 0.5",
]
CASES = []
for shape in ("constant", "square"):
    CASES += [("counter and power", "gpu_0_energy", fault, shape) for fault in BOTH]
    CASES += [("counter", "gpu_0_energy", fault, shape) for fault in COUNTER]
    CASES += [("power", "gpu_0_power", fault, shape) for fault in POWER]
CASES += [("counter and mean power", "gpu_0_energy", fault, "square") for fault in BOTH]
CASES += [("counter and power", "gpu_0_power", fault, "sine") for fault in POWER]
CASES += [("mean power", "gpu_0_power", fault, "constant") for fault in POWER]
CASES += [("CPU with a limit", "cpu_0_package", fault, "idle") for fault in COUNTER]
CASES += [("two sockets", "cpu_1_package", fault, "idle") for fault in COUNTER]
CASES += [
    ("CPU with busy time", "cpu_0_package", fault, "idle") for fault in ("stuck", "stuck at 0")
]
CASES += [
    ("four GPUs", "gpu_2_energy", fault, "square")
    for fault in ("stuck", "unreadable", "stuck from half on")
]
CASES += [
    (kind, "gpu_0_power", "frozen from half on", "falling")
    for kind in ("power", "mean power", "whole watts")
]
CASES += [("two sockets", "ram_1_dram", fault, "idle") for fault in ("stuck", "unreadable")]
# What came to light later, by kind of machine: a counter that moves, but not as a counter does.
ONCE = [
    "steps back once",
    "jumps once",
    "reset, then stuck",
    "5 J once at 0.3 s",
    "5 J once at 12 s",
]
ONCE += [f"5 J every {seconds} s" for seconds in (2, 3, 6, 12)]
COUNTERS = [
    ("counter", "gpu_0_energy"),
    ("counter and power", "gpu_0_energy"),
    ("CPU with a limit", "cpu_0_package"),
]
COUNTERS += [("two sockets", "cpu_1_package"), ("CPU with busy time", "cpu_0_package")]
NO_COUNTERS = [(*of, fault, "constant") for of in COUNTERS for fault in ONCE]
NO_COUNTERS += [
    (*of, f"{J} J every {J} s", "constant")
    for of in COUNTERS
    if of[0] != "CPU with a limit"
    for J in (1, 0.5)
]
CASES += NO_COUNTERS
for times in ("10 13 0.6", "10 11 0.6", "2 3 0", "21 22 0"):  # catches up in part, or not at all
    CASES += [(*of, f"stands still {times}", "square") for of in COUNTERS]
CASES += [("counter", "gpu_0_energy", "reset", "constant")]
CASES += [("counter and power", "gpu_0_energy", "one misread", "constant")]
# A power alone, in whole watts, that stays where it is while the load falls: nobody can know.
UNKNOWABLE = [("whole watts", "gpu_0_power", "frozen from half on", "falling")]
HEALTHY = [("counter and power", shape) for shape in GPU_LOADS]
HEALTHY += [
    (kind, shape)
    for kind in ("counter", "power", "mean power", "four GPUs")
    for shape in ("idle", "square")
]
HEALTHY += [
    ("two sockets", "idle"),
    ("CPU with a limit", "idle"),
    ("counter and mean power", "sine"),
]
HEALTHY += [("whole watts", shape) for shape in ("constant", "square", "falling")]
HEALTHY += [
    ("two GPUs, one idle from half on", "square"),
    ("two GPUs, one idle from half on", "sine"),
]
HEALTHY += [
    ("counter and mean power", "falling"),
    ("mean power", "falling"),
    ("counter", "falling"),
]


def judge(kind, lies, fault, shape, period_s=0.04):
    """Energies of a machine with a fault, the reasons against them, and the true energies in J."""
    random = np.random.default_rng(zlib.crc32(f"{kind} {lies} {fault} {shape}".encode()))
    t = worlds.instants_s(random, T0_S, UNTIL_S, period_s)
    found = machine(kind, GPU_LOADS[shape], t, random)
    curves = []
    for description, values, _ in found:
        own = fault if description["id"] == lies else "none"
        readings = faulty(own, values, t - T0_S) / description["to_SI"]
        curves.append(energy.curve(description, t, readings, period_s))
    window = T0_S + BEGIN_S, T0_S + END_S
    totals = energy.totals(energy.entries_of(curves, *window), END_S - BEGIN_S)
    return totals, energy.doubts(curves, *window), truth_of(found)


def truth_of(found) -> dict[str, float]:
    """Energy of the window by component in J, each device once."""
    loads = {(sensor["component"], sensor["device"]): load for sensor, _, load in found if load}
    truth: dict[str, float] = {}
    for (component, _), load in loads.items():
        joules = float(load.energy_J(T0_S + END_S) - load.energy_J(T0_S + BEGIN_S))
        truth[component] = truth.get(component, 0.0) + joules
    return truth


def wrong(totals, truth) -> list[str]:
    """List components whose energy is off by more than its bound and 1 %."""
    lines = []
    for component, true_J in truth.items():
        said_J = totals.get(f"energy_{component}_J", true_J)
        if abs(said_J - true_J) > totals.get(f"energy_{component}_bound_J", 0.0) + 0.01 * true_J:
            lines.append(f"{component}: {said_J:.0f} J, not {true_J:.0f} J")
    return lines


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(case))
def test_a_sensor_that_lies_is_doubted_or_within_its_bound(case):
    totals, doubts, truth = judge(*case)
    if case not in UNKNOWABLE:
        assert doubts or not wrong(totals, truth)
    if case[2] in ("stuck", "stuck at 0", "unreadable") and totals.get("energy_gpu_J") == 0:
        pytest.fail("an energy of 0 J, which is none")


@pytest.mark.parametrize("kind, shape", HEALTHY)
@pytest.mark.parametrize("period_s", [0.01, 0.04, 0.1])
def test_nothing_healthy_is_doubted(kind, shape, period_s):
    totals, doubts, truth = judge(kind, None, "none", shape, period_s)
    assert not doubts and not wrong(totals, truth)
    assert all(f"energy_{component}_J" in totals for component in truth)
