"""Simulated sensors of one host with known energy, in memory: loads in closed form, sensors by
their own rules.
"""

from dataclasses import dataclass

import numpy as np

from energynn.measure import energy
from energynn.measure.evidence import SensorEvidence
from energynn.measure.samples import Channel

GOLDEN = 0.6180339887
AVERAGED_S = 1.0  # NVML's power on Ampere and newer


@dataclass(frozen=True)
class Load:
    """A power over time: ``shape`` (constant, sine, square) from begin_s to end_s, idle_W before
    and after.
    """

    shape: str
    low_W: float
    high_W: float
    rhythm_s: float
    idle_W: float = 0.0
    begin_s: float = -np.inf
    end_s: float = np.inf

    def power_W(self, t):
        return np.where(
            (t >= self.begin_s) & (t < self.end_s), self._shape_W(t), self.idle_W
        )

    def energy_J(self, t):
        """Integral of the power from 0 on, t in s >= 0."""
        begin_s, end_s = max(self.begin_s, 0.0), min(self.end_s, 1e9)
        inside_s = np.clip(t, begin_s, end_s)
        return (
            self.idle_W * (t - (inside_s - begin_s))
            + self._shape_J(inside_s)
            - self._shape_J(begin_s)
        )

    @property
    def half_W(self):
        return 0.0 if self.shape == "constant" else (self.high_W - self.low_W) / 2

    def _shape_W(self, t):
        turns = t / self.rhythm_s
        if self.shape == "sine":
            sign = np.sin(2 * np.pi * turns)
        else:
            sign = np.where(turns % 1 < 0.5, 1.0, -1.0)
        return self.high_W - self.half_W + self.half_W * sign

    def _shape_J(self, t):
        turns = t / self.rhythm_s
        if self.shape == "sine":
            ahead_s = (1 - np.cos(2 * np.pi * turns)) / (2 * np.pi) * self.rhythm_s
        else:
            ahead_s = self.rhythm_s / 2 * (1 - abs(2 * (turns % 1) - 1))
        return (self.high_W - self.half_W) * t + self.half_W * ahead_s


def instants_s(random, begin_s: float, seconds: float, period_s: float) -> np.ndarray:
    """When our sampler reads: each a little off its deadline, and sometimes late."""
    index = np.arange(int(seconds / period_s))
    late_s = random.exponential(min(2e-4, period_s / 10), len(index))
    return begin_s + period_s * (index + ((index * GOLDEN) % 1 - 0.5) / 2) + late_s


def counter_J(random, load: Load, t, update_s: float, unit_J: float) -> np.ndarray:
    """A counter that is set every ``update_s``, in J, cut to its unit."""
    phase_s = random.uniform(0, update_s)
    shown_s = np.floor((t + phase_s) / update_s) * update_s - phase_s
    return np.floor(load.energy_J(np.maximum(shown_s, 0.0)) / unit_J) * unit_J


def averaged_W(load: Load, t) -> np.ndarray:
    """A mean over the last second."""
    return (load.energy_J(t) - load.energy_J(t - AVERAGED_S)) / AVERAGED_S


def sensor(id, kind, component="gpu", device="0", **more) -> dict:
    return {
        "id": id,
        "component": component,
        "device": device,
        "kind": kind,
        "provenance": "measured",
        "to_SI": 1.0,
        "notes": {},
    } | more


MODEL = {"idle_W_per_core": 3.0, "full_W_per_core": 8.75, "cores": 4}
MACHINES = {  # by sensors of their one device; the first counts
    "counter": ["counter"],
    "counter and power": ["counter", "power"],
    "counter and mean power": ["counter", "mean power"],
    "power": ["power"],
    "mean power": ["mean power"],
    "whole watts": ["whole watts"],
    "CPU": ["RAPL"],
    "CPU by busy time": ["busy"],
}


def readings_of(kind, load, t, random, every_s=0.0, noise_share=None):
    """Describe a sensor and make its readings in SI units.

    every_s: how often it is renewed; it shows that until then, noise included. noise_share: of its
    power, in place of what is usual.
    """
    notes, seen = {"limit_W": 700.0, "uuid": "GPU-0"}, {"update_s": every_s or None}
    if kind == "RAPL":
        about = {"update_s": 0.001, "to_SI": 1e-6, "notes": {"limit_W": 700.0}}
        return sensor("r", "energy", "cpu", **about), counter_J(
            random, load, t, 0.001, 61e-6
        )
    if kind == "busy":
        # The kernel charges all cores at each tick, and shows hundredths of a second.
        tick_s = np.floor(t / 0.004) * 0.004
        more_W = MODEL["full_W_per_core"] - MODEL["idle_W_per_core"]
        idle_J = MODEL["idle_W_per_core"] * MODEL["cores"] * tick_s
        core_s = (load.energy_J(tick_s) - idle_J) / more_W
        return sensor("b", "busy", "cpu", model=MODEL), np.floor(core_s * 100) / 100
    if kind == "counter":
        update_s = every_s or random.uniform(0.02, 0.1)
        joules = 5e4 + counter_J(random, load, t, update_s, 1e-3)
        return sensor("e", "energy", update_s=update_s, to_SI=1e-3, notes=notes), joules
    if kind == "whole watts":
        return sensor("p", "power", notes=notes), load.power_W(t).round()
    shown_s, which = t, slice(None)
    if every_s:
        phase_s = random.uniform(0, every_s)
        steps, which = np.unique(np.floor((t + phase_s) / every_s), return_inverse=True)
        shown_s = steps * every_s - phase_s
    if kind == "power":
        watts, noise_W = load.power_W(shown_s), 4.0
    else:
        watts, noise_W = averaged_W(load, shown_s), 0.5
        notes["power"] = "an average over 1 s"
    if noise_share is not None:
        noise_W = noise_share * watts
    watts = watts + random.normal(0, noise_W, len(watts))
    return sensor("p", "power", notes=notes, **seen), watts[which].round(3)


def curves(
    machine, load, t, random, period_s, every_s=0.0, fault=lambda values, t: values
):
    """Make the curves of a machine of which the sensor that counts has a fault."""
    made = []
    for kind in MACHINES[machine]:
        about, values = readings_of(kind, load, t, random, every_s)
        if made:
            about |= {"primary": False, "checks": made[0].sensor.id}
        else:
            values = fault(values, t)
        made.append(
            energy.energy_curve(Channel(**about), t, values / about["to_SI"], period_s)
        )
    return made


def found(curves, begin_s, end_s):
    """Collect what curves say about a window."""
    made = [SensorEvidence(one.sensor, begin_s, end_s, one.period_s) for one in curves]
    for one, curve in zip(made, curves, strict=True):
        one.add(curve, -np.inf, np.inf)
    return made


def window(is_aligned, period_s, random):
    """Make a load, instants at which it is read, and the begin and end of a window in it.

    is_aligned: the load begins and ends with it; else it goes on.
    """
    begin_s = 1.0 + random.uniform(0.3, 3.0)
    end_s = begin_s + random.uniform(3.0, 10.0)
    shape = random.choice(["constant", "sine", "square"], p=[0.3, 0.4, 0.3])
    low_W = random.uniform(60, 150)
    idle_W = random.uniform(0.3, 1.0) * low_W
    powers = low_W, random.uniform(200, 600), random.uniform(0.7, 9.0), idle_W
    load = Load(str(shape), *powers, *([begin_s, end_s] if is_aligned else []))
    t = instants_s(random, 0.0, end_s + random.uniform(0.3, 3.0), period_s)
    return load, t, begin_s, end_s


def is_right(found, true_J):
    """Tell whether each energy is there and, within its bound and 0.4 %, right."""
    return all(
        abs(found.get(f"energy_{name}_J", np.inf) - joules)
        <= found.get(f"energy_{name}_bound_J", 0.0) + 0.004 * joules
        for name, joules in true_J.items()
    )
