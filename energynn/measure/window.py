"""The energy of a block of code: `with energynn.window("epoch") as measured:`."""

from __future__ import annotations

import atexit
import copy
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from energynn.host.files import write_json
from energynn.host.launchers import rank_and_size
from energynn.host.processes import MARK_VARIABLE, is_alive
from energynn.host.progress import accuracy_text
from energynn.measure import energy, machine
from energynn.measure.sampler_process import start_sampler, wait_until
from energynn.measure.samples import (
    EVENT_FIELDS,
    Events,
    Header,
    last_sample_time_ns,
    read_pieces,
)
from energynn.measure.stream import read_sensor_streams

SAMPLING_PERIOD_S = 0.04
# of the samples file before a window: some seconds, with dozens of sensors
MARGIN_BEFORE_WINDOW_B = 2**18
# When a sensor renews its counter follows from the renewals around a window's edges.
RENEWAL_SEARCH_MARGIN_S = 3.0  # at each edge, whose renewals are used
MIN_EDGE_RENEWALS = 5
MIN_RENEWAL = 1.5  # sampling periods from one renewal to the next
# that are tried, relative to what the sampler saw
RENEWAL_PERIOD_FACTORS = np.linspace(0.97, 1.03, 601)
SAMPLING_LEAD_TIME_S = 0.5  # of samples before the first window
SIZE_FILE = "gradient_bytes"  # of an empty file in a run's folder; bytes end its name
# what torch's FSDP, its weights today, and those of DeepSpeed's ZeRO have
SHARDED_MODEL_ATTRIBUTES = ("sharding_strategy", "placements", "ds_numel")
INCOMPLETE_MODEL_TEXT = (
    "model: must be a torch.nn.Module that is not sharded; leave it out, and give "
    "`energynn measure --local-batch-size N --weights N`, of a sharded one also "
    "--gradient-bytes-per-weight 6"
)


class Window:
    """Measure a block: ``with energynn.window("epoch") as measured: ...; print(measured)``.

    ``time_s`` is what the block took, ``energies`` those of this whole host meanwhile. The first
    window of a process starts a sampler, which takes about two seconds and goes on until the
    process ends; it costs about 1 % of one core. no_gpu: the GPUs of this host do not matter.
    synchronize: where torch uses CUDA, a block begins and ends when the GPUs have done their work.
    model: the network of PyTorch that is trained: `energynn measure` notes the bytes of its
    gradients for forecasts, the sum over networks of different sizes.

    GPUs, CPU sockets and RAM count for all that ran on this host in that time. Of several ranks on
    one host each sees the same energy: take one of them. Windows may lie within each other, and in
    several threads. A window may be entered again after its block: it then tells of the last block;
    what an ``as`` names keeps the block that it was bound to.
    """

    def __init__(
        self,
        name: str = "window",
        no_gpu: bool = False,
        synchronize: bool = True,
        model: Any = None,
    ):
        self.name = name
        self.no_gpu = no_gpu
        self.synchronize = synchronize
        self._block: MeasuredBlock | None = None
        if model is not None:
            file = f"{SIZE_FILE}.{count_gradient_bytes(model)}"
            with suppress(OSError):  # no run is measured, or it has ended
                Path(os.environ.get(MARK_VARIABLE, "/dev/null"), file).touch()

    def __enter__(self) -> Window:
        sampler = _sampler_of_process(self.no_gpu)
        _synchronize_cuda(self.synchronize)
        with _samplers_lock:
            if self._block and not self._block.end_ns:
                raise ValueError(
                    f"window {self.name}: its block goes on, here or in another thread; "
                    "make one for each block: energynn.window(...)"
                )
            begin_B = sampler.file.stat().st_size - MARGIN_BEFORE_WINDOW_B
            self._block = MeasuredBlock(self.name, sampler, begin_B)
        return copy.copy(self)

    def __exit__(self, *_error) -> None:
        try:
            _synchronize_cuda(self.synchronize)
        finally:
            assert self._block  # it was entered
            self._block.end_ns = time.monotonic_ns()

    @property
    def time_s(self) -> float:
        """Duration of the block in s, so far if it goes on."""
        return self._block.time_s if self._block else 0.0

    @property
    def energies(self) -> dict:
        """Energies in J, their provenances and bounds, mean powers in W; named as in a record.

        ``doubts`` are reasons not to believe them, ``remedy`` what in system.toml overrules them. A
        component without a sensor is absent, and all are if the sampler has died. While the block
        goes on they are those so far. The first time this waits until the sensors have shown the
        end, about 0.04 s. Raises ValueError if the block was not entered.
        """
        if not self._block:
            raise ValueError(f"window {self.name}: enter its block first")
        if not self._block.end_ns:
            return replace(self._block, end_ns=time.monotonic_ns()).energies
        return self._block.energies

    @property
    def energy_J(self) -> float:
        """Energy of all components in J; NaN where no sensor could be read."""
        return self.energies.get("energy_total_J", float("nan"))

    def __str__(self) -> str:
        text = f"{self.name}: {self.time_s:.2f} s"
        if not (self._block and self._block.end_ns):
            return f"{text} so far"
        if self.energies.get("energy_total_J"):
            text += f", {self.energy_J:.2f} J {_accuracy_text(self.energies)}"
        return self._block.with_doubts(text)

    __repr__ = __str__  # a notebook shows it


window = Window  # as it is written in a with statement


class Phases:
    """Add up blocks by name: ``phases = energynn.phases()``, in a loop ``with phases("forward"):``,
    after it ``print(phases)``.

    A block is measured as a window is, and may be entered any number of times, but not within
    another. Samples are read when rows or energies are asked for. no_gpu, synchronize: as of a
    window.
    """

    def __init__(self, no_gpu: bool = False, synchronize: bool = True):
        self._window = partial(Window, no_gpu=no_gpu, synchronize=synchronize)
        self._blocks: list[MeasuredBlock] = []
        self._whole: MeasuredBlock  # from the first block to the end of the last
        self._open_name = ""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._open_name:
            raise ValueError(
                f"phases: {self._open_name} goes on; measure what lies within it by a window"
            )
        self._open_name = name
        one = self._window(name)
        try:
            with one:
                yield
        finally:
            self._open_name = ""
            if last := one._block:  # it was entered
                self._blocks.append(last)
                self._whole = replace(self._blocks[0], end_ns=last.end_ns)

    @property
    def energies(self) -> dict:
        """Those of the whole, with what lies between blocks, as a window has them."""
        if not self._blocks:
            raise ValueError("phases: no block has ended")
        return self._whole.energies

    @property
    def rows(self) -> dict[str, dict[str, float]]:
        """Number of blocks, time in s and energy in J of each name; NaN where it is not known."""
        is_known = "energy_total_J" in self.energies
        edges_s = np.array([[one.start_ns, one.end_ns] for one in self._blocks]) / 1e9
        each_J = np.full(len(edges_s), np.nan)
        if is_known:
            sampler = self._whole.sampler
            streams, _ = read_sensor_streams(
                sampler.file, sampler.header, {}, edges_s, self._whole.begin_B
            )
            used = [one for one in streams if one.sensor.primary]
            each_J = np.sum([np.diff(one.at(edges_s))[:, 0] for one in used], axis=0)
        rows = {
            one.name: {"blocks": 0, "time_s": 0.0, "energy_J": 0.0}
            for one in self._blocks
        }
        for one, energy_J in zip(self._blocks, each_J, strict=True):
            row = rows[one.name]
            row["blocks"] += 1
            row["time_s"] += one.time_s
            row["energy_J"] += float(energy_J)
        return rows

    def __str__(self) -> str:
        form = "{:16} {blocks:8} x {time_s:10.2f} s {energy_J:12.2f} J"
        lines = [form.format(name, **row) for name, row in self.rows.items()]
        is_known = self.energies.get("energy_total_J")
        lines.append(_accuracy_text(self.energies) if is_known else "not known")
        return self._whole.with_doubts("\n".join(lines))


phases = Phases


def _accuracy_text(energies: dict) -> str:
    """Say what an energy is, and how wrong it may be."""
    wrong_J = energies["energy_total_bound_J"] + energies["energy_total_systematic_J"]
    words = accuracy_text(energies["energy_total_J"], wrong_J)
    return f"{energies['energy_total_provenance']}, {words}"


def _synchronize_cuda(is_asked: bool) -> None:
    """Wait for the GPUs in use; another one would get a context, and memory, by waiting for it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if is_asked and cuda and cuda.is_initialized():
        try:
            used = list(filter(cuda.memory_reserved, range(cuda.device_count())))
        except RuntimeError:  # an allocator that is not torch's tells nothing
            used = [cuda.current_device()]
        for device in used:
            cuda.synchronize(device)


def count_gradient_bytes(model: Any) -> int:
    """Count the bytes of the gradients of a network of PyTorch, of the weights that are trained.

    Raises ValueError for what is none, or holds only a part of its weights.
    """
    is_known = hasattr(model, "modules")
    parts = [*model.modules(), *model.parameters()] if is_known else []
    if not is_known or any(
        hasattr(part, mark) for part in parts for mark in SHARDED_MODEL_ATTRIBUTES
    ):
        raise ValueError(INCOMPLETE_MODEL_TEXT)
    trained = [each for each in model.parameters() if each.requires_grad]
    return sum(each.numel() * each.element_size() for each in trained)


def log_epoch(epoch: float, **reached: float) -> None:
    """Tell the `energynn measure` in which this runs what an epoch reached, at its end.

    As in ``energynn.log_epoch(1, training_loss=0.4, top1_error=0.2)``. ``energynn.epochs`` and
    `show --plot` then have its time and energy, too; what the last epoch reached is the record's
    metrics. Only rank 0 of several tells; without `energynn measure` nothing happens. Raises
    ValueError or TypeError for what is no number.
    """
    numbers = {name: float(value) for name, value in reached.items()}
    if taken := numbers.keys() & EVENT_FIELDS:
        raise ValueError(f"log_epoch: {min(taken)} is a name of ours; give another")
    with suppress(OSError, KeyError):  # no run is measured, or it has ended
        folder = Path(os.environ[MARK_VARIABLE])
        if rank_and_size()[0] == 0:
            Events(folder, 0).mark("epoch", epoch=float(epoch), **numbers)


# ---------------------------------------------------------------------------------- the sampler


@dataclass
class SamplerProcess:
    """The process whose samples windows read, that of a parent in its forks.

    system: as ``machine.load_system`` gives it, of the file at ``path``.
    """

    file: Path
    header: Header
    process: psutil.Process
    path: Path
    system: dict

    def has_sampled(self, end_ns: int) -> bool:
        """Tell whether each sensor has had time to show what was at an instant."""
        late_s = max(one.update_s or 0.0 for one in self.header.sensors)
        # its file goes with a parent
        return last_sample_time_ns(self.file) > end_ns + late_s * 1e9


_samplers_lock = threading.Lock()
_running_samplers: dict[str, SamplerProcess] = {}  # by what they read


def _sampler_of_process(no_gpu: bool) -> SamplerProcess:
    """Return the sampler of this process; another one where it has died, or ended with a parent."""
    try:
        path = machine.system_file()
        system = machine.load_system(path)
        asked = f"{no_gpu} {os.environ.get('CUDA_VISIBLE_DEVICES')} {system}"
        with _samplers_lock:
            known = _running_samplers.get(asked)
            if not (known and is_alive(known.process) and known.file.exists()):
                _running_samplers[asked] = _start_window_sampler(no_gpu, path, system)
            return _running_samplers[asked]
    except (ValueError, OSError) as error:
        # a training that goes on is worth more than its energy: only the first is refused
        if not _running_samplers:
            raise
        *_, last = _running_samplers.values()
        fault = f"an earlier window's sampler was read: {error}"
        doubted = msgspec.structs.replace(last.header, unaccounted=[fault])
        return replace(last, header=doubted)


def _start_window_sampler(no_gpu: bool, path: Path, system: dict) -> SamplerProcess:
    folder = Path(tempfile.mkdtemp(prefix="energynn-window-"))
    write_json(
        folder / "run.json",
        system
        | {
            "uses_gpus": not no_gpu,
            "config": {"sampling_period_s": SAMPLING_PERIOD_S},
        },
    )
    stop_sampler, number = start_sampler(folder, 1, [0])  # waits for no other rank
    atexit.register(_end_sampler, os.getpid(), folder, stop_sampler)
    time.sleep(SAMPLING_LEAD_TIME_S)
    file = folder / f"samples-{platform.node()}.jsonl"
    return SamplerProcess(
        file, next(read_pieces(file)).header, psutil.Process(number), path, system
    )


def _end_sampler(process: int, folder: Path, stop_sampler: Callable) -> None:
    if process == os.getpid():  # no fork that ends
        stop_sampler()
        shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------------------------- the energy


@dataclass
class MeasuredBlock:
    """A block of code that a window was entered for; ``begin_B``: samples from there on count."""

    name: str
    sampler: SamplerProcess
    begin_B: int
    start_ns: int = field(default_factory=time.monotonic_ns)
    end_ns: int = 0

    @property
    def time_s(self) -> float:
        return ((self.end_ns or time.monotonic_ns()) - self.start_ns) / 1e9

    def with_doubts(self, text: str) -> str:
        """Add to a text what speaks against the energies, and remedies."""
        text = "\n  NOT valid: ".join([text, *self.energies["doubts"]])
        return "\n  ".join([text, *self.energies["remedy"]])

    @cached_property
    def energies(self) -> dict:
        sampler = self.sampler
        with suppress(ValueError):
            wait_until(
                lambda: (
                    sampler.has_sampled(self.end_ns) or not is_alive(sampler.process)
                ),
                "",
                SAMPLING_PERIOD_S,
            )
        if not sampler.has_sampled(self.end_ns):
            died = (
                "D: the sampler died, or a driver hangs; the next window starts another"
            )
            return {"doubts": [died], "remedy": []}
        window_s = self.start_ns / 1e9, self.end_ns / 1e9
        streams, _ = read_sensor_streams(
            sampler.file,
            sampler.header,
            {"block": window_s},
            begin_B=self.begin_B,
            make=partial(_renewal_curve, window_s),
        )
        evidence = [stream.evidence["block"] for stream in streams]
        limits = energy.THRESHOLDS | sampler.system["thresholds"]
        doubts = energy.judge_sensors(evidence, sampler.header.unaccounted, limits)
        doubts = [text.replace("--no-gpu", "no_gpu=True") for text in doubts]
        return energy.total_energies(
            energy.sensor_entries(evidence, limits), self.time_s
        ) | {
            "doubts": doubts,
            "remedy": machine.system_file_remedy(doubts, sampler.path),
        }


def _renewal_curve(window_s: tuple[float, float], *readings) -> energy.EnergyCurve:
    """Make a curve as ``energy.energy_curve`` does, but put what a counter shows at the instants at
    which it was renewed, not at which it was read.

    Each lies between two readings, in the middle if nothing else is known. Where the renewals
    around the window's edges fit a regular beat, they lie on it: short windows end between them.
    """
    one = energy.energy_curve(*readings)
    beat_s = one.sensor.update_s or 0.0
    new = np.flatnonzero(np.diff(one.values)) + 1
    at_s = (one.t_s[new] + one.t_s[new - 1]) / 2
    near = (abs(np.subtract.outer(window_s, at_s)) < RENEWAL_SEARCH_MARGIN_S).any(
        axis=0
    )
    is_slow = beat_s >= MIN_RENEWAL * one.period_s and near.sum() >= MIN_EDGE_RENEWALS
    if one.sensor.kind != "energy" or not is_slow:
        return one
    near_s = at_s[near]
    half_s = (one.t_s[new] - at_s)[near]
    beats_s = beat_s * RENEWAL_PERIOD_FACTORS
    turns = np.exp(2j * np.pi * near_s / beats_s[:, None]).mean(axis=1)
    best = abs(turns).argmax()
    beat_s = beats_s[best]
    first_s = beat_s * np.angle(turns[best]) / (2 * np.pi)
    fitted_s = first_s + beat_s * np.rint((near_s - first_s) / beat_s)
    if (abs(fitted_s - near_s) < half_s + one.period_s / 4).all():
        at_s[near] = fitted_s
    # the first reading is of a renewal before it
    at_s = np.r_[at_s[0] - beat_s, at_s, one.t_s[-1]]
    joules = one.energy_J[np.r_[0, new, -1]]
    return one._replace(energy_J=np.interp(one.t_s, at_s, joules))
