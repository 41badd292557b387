"""The energy of a block of code: `with energynn.window("epoch") as measured:`, by the sampler of all our runs."""

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


class Window:
    """What one block of code took: ``time_s`` when it has ended, and ``energies`` of this whole host meanwhile.

    GPUs, CPU sockets and RAM count for all that ran on this host in that time. Of several ranks on one host each
    sees the same energy: take one of them. Windows may lie within each other, and in several threads.
    """

    def __init__(self, name: str, folder: Path | None = None):
        self.name, self.folder = name, folder
        self.start_ns = self.end_ns = 0

    def __enter__(self) -> Window:
        self._meter = _running_meter(self.folder)
        self.end_ns, self.start_ns = 0, time.monotonic_ns()
        self.__dict__.pop("energies", None)
        return self

    def __exit__(self, *_error) -> None:
        self.end_ns = time.monotonic_ns()

    @property
    def time_s(self) -> float:
        """Duration of the block in s, so far if it goes on."""
        return ((self.end_ns or time.monotonic_ns()) - self.start_ns) / 1e9

    @cached_property
    def energies(self) -> dict[str, float | str]:
        """Energies in J, their provenances and bounds, mean powers in W; named as in a record.

        ``doubts`` are reasons not to believe them. A component without a sensor is absent. Raises
        ValueError while the block goes on, and where the sampler has died: then nothing is known of
        its end.
        """
        if not self.end_ns:
            raise ValueError(f"window {self.name}: its energy is known when it has ended")
        samples = self._meter.samples_until(self.end_ns)
        # Some seconds on both sides: what happened long before is no reason against this window.
        near = (samples.t_ns > self.start_ns - MARGIN_NS) & (samples.t_ns < self.end_ns + MARGIN_NS)
        begin_s, end_s = self.start_ns / 1e9, self.end_ns / 1e9
        header, readings = samples.header, samples.readings[near]
        curves = energy.curves(samples.t_ns[near] / 1e9, readings, header["sensors"], samples.period_s)
        entries = energy.entries_of(curves, begin_s, end_s)
        doubts = energy.doubts(curves, begin_s, end_s, header.get("unaccounted", []))
        return energy.totals(entries, self.time_s) | {"doubts": doubts}

    @property
    def energy_J(self) -> float:
        """Energy of all components in J; NaN where no sensor could be read."""
        return self.energies.get("energy_total_J", float("nan"))

    def __str__(self) -> str:
        if not self.end_ns:
            return f"{self.name}: {self.time_s:.2f} s so far"
        if "energy_total_J" not in self.energies:
            return f"{self.name}: {self.time_s:.2f} s, no sensor of energy here; `energynn doctor` says more"
        bound_J = self.energies["energy_total_bound_J"]
        sensor_J = self.energies["energy_total_systematic_J"]
        energy_text = f"{self.energy_J:.2f} J {self.energies['energy_total_provenance']}"
        doubts = "".join(f"\n  NOT valid: {reason}" for reason in self.energies["doubts"])
        return (
            f"{self.name}: {self.time_s:.2f} s, {energy_text} "
            f"+- {bound_J:.2f} J (sampling) +- {sensor_J:.2f} J (sensor){doubts}"
        )


def window(name: str = "window", folder: str | Path | None = None) -> Window:
    """Measure a block of code: ``with energynn.window("epoch") as measured: ...; print(measured.energy_J)``.

    The first window of a process starts a sampler, which takes about a second and goes on until the process ends;
    it costs about 1 % of one core. ``folder`` keeps its raw samples; only the first window of a process can say so.
    """
    return Window(name, Path(folder) if folder else None)


class _Meter:
    """The sampler of this process and what it has written so far.

    A thread of its own starts it and lives as long as this process: Linux ends a sampler with the thread that did.
    """

    def __init__(self, folder: Path | None):
        self.is_temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="energynn-window-")) if folder is None else folder.absolute()
        self.lock, self.ending, self.begun, self.reader = threading.Lock(), threading.Event(), threading.Event(), None
        self.problem: BaseException | None = None
        self.thread = threading.Thread(target=self._keep_sampling, name="energynn-window", daemon=True)

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if list(self.folder.glob("samples-*")):
            raise ValueError(f"window: {self.folder} holds samples already; give another folder")
        intent = {"cpu_model": machine.CPU_MODEL, "config": {"sampling_period_s": PERIOD_S}}
        write_json(self.folder / "run.json", intent)
        self.thread.start()
        self.begun.wait()
        if self.problem:
            raise self.problem
        atexit.register(self.stop)

    def _keep_sampling(self) -> None:
        try:
            stop_sampler = start_sampler(self.folder, 1, [])
            self.samples_until(time.monotonic_ns())
        except (ValueError, OSError) as problem:
            self.problem = problem
            return
        finally:
            self.begun.set()
        self.ending.wait()
        stop_sampler()

    def stop(self) -> None:
        self.ending.set()
        self.thread.join()
        if self.is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def samples_until(self, end_ns: int) -> Samples:
        """All samples up to one an update of each sensor after an instant.

        Raises ValueError if none comes.
        """
        path = self.folder / f"samples-{os.uname().nodename}.jsonl"
        patience_s = limit_s("silence_limit_s")
        deadline = time.monotonic() + patience_s
        with self.lock:
            self.reader = self.reader or Reader(path)
            while not self._has(end_ns):
                if time.monotonic() > deadline:
                    raise ValueError(f"window: no sample for {patience_s:.0f} s in {path}; the sampler is dead")
                time.sleep(PERIOD_S / 4)
                if path.exists():
                    self.reader.read()
            return self.reader.samples()

    def _has(self, end_ns: int) -> bool:
        if not self.reader.samples_read:
            return False
        updates_s = [sensor.get("update_s") or 0.0 for sensor in self.reader.header["sensors"]]
        return self.reader.samples_read[-1].t >= end_ns + max(updates_s, default=0.0) * 1e9


_meter: _Meter | None = None
_starting = threading.Lock()


def _running_meter(folder: Path | None) -> _Meter:
    global _meter
    with _starting:
        if _meter is None:
            new = _Meter(folder)
            new.start()
            _meter = new
        elif folder is not None and folder.absolute() != _meter.folder:
            raise ValueError(f"window: this process samples into {_meter.folder} already; say the folder first")
        return _meter


def _forget_the_parents() -> None:
    """A process that was forked has no sampler: that of its parent ends with its parent."""
    global _meter, _starting
    if _meter is not None:
        atexit.unregister(_meter.stop)
    _meter, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_the_parents)
