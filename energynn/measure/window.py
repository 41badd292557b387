"""The energy of a block of code: `with energynn.window("epoch") as measured:`."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path

from energynn.files import write_json
from energynn.measure import energy, machine
from energynn.measure.sampler_process import start_sampler, until
from energynn.measure.samples import read_samples

PERIOD_S = 0.04
# of the samples file before a window: some seconds, with dozens of sensors
MARGIN_B = 2**18
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
        with _starting:
            self._file = _start_sampler()
        self._begin_B = self._file.stat().st_size - MARGIN_B
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

        ``doubts`` are reasons not to believe them, ``remedy`` what in system.toml overrules them. A
        component without a sensor is absent. Raises ValueError while the block goes on, and if the
        sampler has died.
        """
        if not self.end_ns:
            raise ValueError(
                f"window {self.name}: its energy is known when it has ended"
            )
        until(
            self._is_sampled, f"samples in {self._file}; the sampler is dead", PERIOD_S
        )
        samples = read_samples(self._file, self._begin_B)
        curves = energy.curves(samples)
        window_s = self.start_ns / 1e9, self.end_ns / 1e9
        path = machine.system_file()
        limits = energy.THRESHOLDS | machine.load(path)["thresholds"]
        unread = samples.header["unaccounted"]
        doubts = energy.doubts(curves, *window_s, unread, limits)
        entries = energy.entries_of(curves, *window_s, limits)
        found = {"doubts": doubts, "remedy": machine.remedy(doubts, path)}
        return energy.totals(entries, self.time_s) | found

    def _is_sampled(self) -> bool:
        """Tell whether each sensor has had time to show the end of the block."""
        samples = read_samples(self._file, self._begin_B)
        late_s = max(sensor["update_s"] or 0.0 for sensor in samples.header["sensors"])
        return samples.t_ns[-1] > self.end_ns + late_s * 1e9

    @property
    def energy_J(self) -> float:
        """Energy of all components in J; NaN where no sensor could be read."""
        return self.energies.get("energy_total_J", float("nan"))

    def __str__(self) -> str:
        text = f"{self.name}: {self.time_s:.2f} s"
        if not self.end_ns:
            return f"{text} so far"
        if "energy_total_J" in self.energies:
            bound_J = self.energies["energy_total_bound_J"]
            text += f", {self.energy_J:.2f} +- {bound_J:.2f} J"
            text += f" {self.energies['energy_total_provenance']}"
        text = "\n  NOT valid: ".join([text, *self.energies["doubts"]])
        return "\n  ".join([text, *self.energies["remedy"]])


def window(name: str = "window") -> Window:
    """Measure a block: ``with energynn.window("epoch") as measured: ...; print(measured)``.

    The first window of a process starts a sampler, which takes about two seconds and goes on until
    the process ends; it costs about 1 % of one core.
    """
    return Window(name)


@cache
def _start_sampler() -> Path:
    """Start a sampler as a child of this process; return its file, which forks read, too."""
    folder = Path(tempfile.mkdtemp(prefix="energynn-window-"))
    intent = machine.load(machine.system_file())
    intent["config"] = {"sampling_period_s": PERIOD_S}
    write_json(folder / "run.json", intent)
    stop_sampler = start_sampler(folder, 1, [0])  # waits for no other rank
    atexit.register(_end, os.getpid(), folder, stop_sampler)
    return folder / f"samples-{os.uname().nodename}.jsonl"


def _end(process: int, folder: Path, stop_sampler: Callable) -> None:
    if process == os.getpid():  # no fork that ends
        stop_sampler()
        shutil.rmtree(folder, ignore_errors=True)
