"""The energy of a block of code: `with energynn.window("epoch") as measured:`."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import time
from functools import cached_property
from pathlib import Path

from energynn.files import write_json
from energynn.measure import energy, machine
from energynn.measure.sampler_process import start_sampler
from energynn.measure.samples import Reader, Samples, limit_s

PERIOD_S = 0.04
MARGIN_NS = 3_000_000_000
_meters: dict[int, _Meter] = {}  # by process: a fork begins its own
_starting = threading.Lock()


class Window:
    """What one block of code took: ``time_s``, and ``energies`` of this whole host meanwhile.

    GPUs, CPU sockets and RAM count for all that ran on this host in that time. Of several ranks on
    one host each sees the same energy: take one of them. Windows may lie within each other, and in
    several threads.
    """

    def __init__(self, name: str):
        self.name = name
        self.start_ns = self.end_ns = 0

    def __enter__(self) -> Window:
        self._meter = _running_meter()
        self.start_ns = time.monotonic_ns()
        return self

    def __exit__(self, *_error) -> None:
        self.end_ns = time.monotonic_ns()

    @property
    def time_s(self) -> float:
        """Duration of the block in s, so far if it goes on."""
        return ((self.end_ns or time.monotonic_ns()) - self.start_ns) / 1e9

    @cached_property
    def energies(self) -> dict[str, float | str | list[str]]:
        """Energies in J, their provenances and bounds, mean powers in W; named as in a record.

        ``doubts`` are reasons not to believe them. A component without a sensor is absent. Raises
        ValueError while the block goes on, and if the sampler has died.
        """
        if not self.end_ns:
            raise ValueError(f"window {self.name}: its energy is known when it has ended")
        samples = self._meter.samples_until(self.end_ns)
        # Some seconds on both sides: what happened long before is no reason against this window.
        near = (samples.t_ns > self.start_ns - MARGIN_NS) & (samples.t_ns < self.end_ns + MARGIN_NS)
        t_s, readings, header = samples.t_ns[near] / 1e9, samples.readings[near], samples.header
        curves = energy.curves(t_s, readings, header["sensors"], samples.period_s)
        window_s = self.start_ns / 1e9, self.end_ns / 1e9
        doubts = energy.doubts(curves, *window_s, header["unaccounted"])
        return energy.totals(energy.entries_of(curves, *window_s), self.time_s) | {"doubts": doubts}

    @property
    def energy_J(self) -> float:
        """Energy of all components in J; NaN where no sensor could be read."""
        return self.energies.get("energy_total_J", float("nan"))

    def __str__(self) -> str:
        text = f"{self.name}: {self.time_s:.2f} s"
        if not self.end_ns:
            return f"{text} so far"
        doubts = "".join(f"\n  NOT valid: {reason}" for reason in self.energies["doubts"])
        if "energy_total_J" not in self.energies:
            return f"{text}, energy unknown; `energynn doctor` says more{doubts}"
        total = {name: self.energies[f"energy_total_{name}"] for name in ("bound_J", "provenance")}
        energy_text = f"{self.energy_J:.2f} +- {total['bound_J']:.2f} J {total['provenance']}"
        return f"{text}, {energy_text}{doubts}"


def window(name: str = "window") -> Window:
    """Measure a block: ``with energynn.window("epoch") as measured: ...; print(measured)``.

    The first window of a process starts a sampler, which takes about two seconds and goes on until
    the process ends; it costs about 1 % of one core.
    """
    return Window(name)


class _Meter:
    """The sampler of this process, a child that ends with it, and what it has written so far."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="energynn-window-"))
        intent = {"cpu_model": machine.CPU_MODEL, "config": {"sampling_period_s": PERIOD_S}}
        write_json(self.folder / "run.json", intent)
        self.stop_sampler = start_sampler(self.folder, 1, [0])  # waits for no other rank
        atexit.register(self._stop, os.getpid())
        self.reader = Reader(self.folder / f"samples-{os.uname().nodename}.jsonl")
        self.reader.read()
        updates_s = [sensor["update_s"] or 0.0 for sensor in self.reader.header["sensors"]]
        self.late_ns = max(updates_s) * 1e9
        self.lock = threading.Lock()

    def _stop(self, process: int) -> None:
        if process == os.getpid():  # no fork that ends
            self.stop_sampler()
            shutil.rmtree(self.folder, ignore_errors=True)

    def samples_until(self, end_ns: int) -> Samples:
        """Return all samples, with one an update of each sensor after an instant.

        Raises ValueError if none comes.
        """
        deadline_s = time.monotonic() + limit_s("silence_limit_s")
        with self.lock:
            while self.reader.samples_read[-1].t < end_ns + self.late_ns:
                if time.monotonic() > deadline_s:
                    raise ValueError(f"window: no samples in {self.folder}; the sampler is dead")
                time.sleep(PERIOD_S / 4)
                self.reader.read()
            return self.reader.samples()


def _running_meter() -> _Meter:
    with _starting:
        if os.getpid() not in _meters:
            _meters[os.getpid()] = _Meter()
        return _meters[os.getpid()]
