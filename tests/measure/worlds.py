"""Simulated sensors of one host with known energy, in memory: loads in closed form, sensors by their own rules."""

from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from energynn.measure.samples import Samples

GOLDEN = 0.6180339887
AVERAGED_S = 1.0  # NVML's power on Ampere and newer


@dataclass(frozen=True)
class Load:
    """A power over time: ``shape`` (constant, sine, square) from begin_s to end_s, idle_W before and after."""

    shape: str
    low_W: float
    high_W: float
    rhythm_s: float
    idle_W: float = 0.0
    begin_s: float = -np.inf
    end_s: float = np.inf

    def power_W(self, t):
        return np.where((t >= self.begin_s) & (t < self.end_s), self._shape_W(t), self.idle_W)

    def energy_J(self, t):
        """Integral of the power from 0 on, t in s >= 0."""
        begin_s, end_s = max(self.begin_s, 0.0), min(self.end_s, 1e9)
        inside_s = np.clip(t, begin_s, end_s)
        return (
            self.idle_W * (t - (inside_s - begin_s))
            + self._shape_J(inside_s)
            - self._shape_J(begin_s)
        )

    def _shape_W(self, t):
        if self.shape == "constant":
            return self.high_W + 0.0 * t
        if self.shape == "sine":
            half_W = (self.high_W - self.low_W) / 2
            return self.low_W + half_W + half_W * np.sin(2 * np.pi * t / self.rhythm_s)
        return np.where((t / self.rhythm_s) % 1 < 0.5, self.high_W, self.low_W)

    def _shape_J(self, t):
        if self.shape == "constant":
            return self.high_W * t
        half_W = (self.high_W - self.low_W) / 2
        if self.shape == "sine":
            turn = 2 * np.pi / self.rhythm_s
            return (self.low_W + half_W) * t + half_W / turn * (1 - np.cos(turn * t))
        rounds = np.floor(t / self.rhythm_s)
        rest_s = t - rounds * self.rhythm_s
        high_s = np.minimum(rest_s, self.rhythm_s / 2)
        return (
            (rounds * self.rhythm_s * (self.low_W + half_W))
            + self.high_W * high_s
            + self.low_W * (rest_s - high_s)
        )


def random_load(random, low_W=(60, 150), high_W=(200, 600), **times) -> Load:
    shape = random.choice(["constant", "sine", "square"], p=[0.3, 0.4, 0.3])
    low_W = random.uniform(*low_W)
    idle_W = random.uniform(0.3, 1.0) * low_W
    return Load(
        str(shape), low_W, random.uniform(*high_W), random.uniform(0.7, 9.0), idle_W, **times
    )


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


def instantaneous_W(random, load: Load, t, noise_W=4.0) -> np.ndarray:
    return load.power_W(t) + random.normal(0, noise_W, len(t))


def averaged_W(random, load: Load, t, noise_W=0.5) -> np.ndarray:
    """A mean over the last second."""
    return (load.energy_J(t) - load.energy_J(t - AVERAGED_S)) / AVERAGED_S + random.normal(
        0, noise_W, len(t)
    )


MODEL = {"idle_W_per_core": 3.0, "full_W_per_core": 8.75, "cores": 16}


def busy_load(random, **times) -> Load:
    """The power of a CPU by the model: some of its cores busy, others not."""
    idle_W, more_W = (MODEL["idle_W_per_core"], MODEL["full_W_per_core"] - MODEL["idle_W_per_core"])
    all_idle_W = idle_W * MODEL["cores"]
    busy = random.integers(2, MODEL["cores"] + 1)
    shape = str(random.choice(["constant", "sine", "square"], p=[0.3, 0.4, 0.3]))
    few = random.uniform(0.1, 0.6) * busy
    watts = all_idle_W + more_W * few, all_idle_W + more_W * busy
    return Load(
        shape,
        *watts,
        random.uniform(0.7, 9.0),
        all_idle_W + more_W * 0.02 * MODEL["cores"],
        **times,
    )


def busy_core_s(random, load: Load, t, tick_s=0.004) -> np.ndarray:
    """/proc/stat: all cores are charged at each tick of the kernel, and the sum is shown in hundredths of a second."""
    phase_s = random.uniform(0, tick_s)
    ticked_s = np.maximum(np.floor((t + phase_s) / tick_s) * tick_s - phase_s, 0.0)
    more_W = MODEL["full_W_per_core"] - MODEL["idle_W_per_core"]
    idle_J = MODEL["idle_W_per_core"] * MODEL["cores"] * ticked_s
    return np.floor((load.energy_J(ticked_s) - idle_J) / more_W * 100) / 100


def sensor(id, kind, component="gpu", device="0", **more) -> dict:
    return {
        "id": id,
        "component": component,
        "device": device,
        "kind": kind,
        "provenance": "measured",
        "to_SI": 1.0,
        "wraps_at": None,
        "primary": True,
        "checks": None,
        "update_s": None,
        "model": None,
        "notes": {},
    } | more


def samples_of(
    t, sensors: list[dict], columns: list[np.ndarray], period_s: float, host="h"
) -> Samples:
    """Readings in SI units, as a sampler would have written them."""
    readings = np.stack(
        [values / s["to_SI"] for s, values in zip(sensors, columns, strict=True)], axis=1
    )
    t_ns = (t * 1e9).astype(np.int64)
    header = {"host": host, "period_s": period_s, "sensors": sensors, "problems": []}
    return Samples(header, t_ns, t_ns, readings)


def renewed(random, load: Load, t, every_s: float, watts_at) -> np.ndarray:
    """A power that the device renews every ``every_s`` and shows until then, noise included; 0: whenever it is read.

    ``watts_at``: ``instantaneous_W`` or ``averaged_W``.
    """
    if not every_s:
        return watts_at(random, load, t)
    phase_s = random.uniform(0, every_s)
    renewals, which = np.unique(np.floor((t + phase_s) / every_s), return_inverse=True)
    return watts_at(random, load, renewals * every_s - phase_s)[which]


KINDS = (
    "rapl",
    "counter",
    "counter and power",
    "counter and mean power",
    "power",
    "mean power",
    "busy",
)

EVERY = " renewed every "
# Counter and power are renewed about as often as they are read, and the sampler has seen how often.
PERIODS = " periods"
AS_OFTEN = [
    f"{kind}{EVERY}{share}{PERIODS}"
    for kind, share in product(
        ("counter", "counter and power", "power", "mean power"), (0.6, 0.8, 1.0, 1.05)
    )
]


def world(kind: str, period_s: float, window: str, random):
    """One simulated run: samples, start and end of a window in s, and its true energy in J.

    ``window``: ``aligned`` with a load that begins and ends with it on a machine that is idle before and after;
    ``tight``, the same, but sampled hardly longer than the load lasts; or ``random`` within a load that goes on.
    """
    begin_s = random.uniform(100, 200)
    start_s = begin_s + random.uniform(0.3, 3.0)
    end_s = start_s + random.uniform(3.0, 10.0)
    if window == "tight":
        start_s = begin_s + period_s * random.uniform(0.3, 1.5)
    times = {} if window == "random" else {"begin_s": start_s, "end_s": end_s}
    load = busy_load(random, **times) if kind == "busy" else random_load(random, **times)
    after_s = period_s * random.uniform(1.3, 2.5) if window == "tight" else random.uniform(0.3, 3.0)
    t = instants_s(random, begin_s, end_s + after_s - begin_s, period_s)
    return (
        *_read(kind, load, t, period_s, random),
        start_s,
        end_s,
        load.energy_J(end_s) - load.energy_J(start_s),
    )


def _read(kind, load, t, period_s, random):
    kind, _, every = kind.partition(EVERY)
    update_s, every_s, seen = random.uniform(0.02, 0.1), 0.0, {}
    if every.endswith(PERIODS):
        update_s = every_s = float(every.removesuffix(PERIODS)) * period_s
        seen = {"update_s": update_s}
    elif every:
        every_s = float(every)
    mean = {"power": "an average over 1 s"}
    shown = partial(renewed, random, load, t, every_s)
    counter = sensor("e", "energy", to_SI=1e-3, update_s=update_s)
    if kind == "rapl":
        rapl = sensor("cpu_0", "energy", "cpu", to_SI=1e-6, update_s=0.001)
        return (samples_of(t, [rapl], [counter_J(random, load, t, 0.001, 61e-6)], period_s),)
    if kind == "busy":
        busy = sensor("cpu_estimate", "busy", "cpu", "all", model=MODEL)
        return (samples_of(t, [busy], [busy_core_s(random, load, t)], period_s),)
    if kind == "power":
        return (samples_of(t, [sensor("p", "power", **seen)], [shown(instantaneous_W)], period_s),)
    if kind == "mean power":
        return (
            samples_of(
                t, [sensor("p", "power", notes=mean, **seen)], [shown(averaged_W)], period_s
            ),
        )
    joules = counter_J(random, load, t, update_s, 1e-3)
    if kind == "counter":
        return (samples_of(t, [counter], [joules], period_s),)
    if kind == "counter and power":
        power, watts = (
            sensor("p", "power", primary=False, checks="e", **seen),
            shown(instantaneous_W),
        )
    else:
        power, watts = (
            sensor("p", "power", primary=False, checks="e", notes=mean),
            shown(averaged_W),
        )
    return (samples_of(t, [counter, power], [joules, watts], period_s),)
