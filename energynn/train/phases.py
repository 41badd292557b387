"""When each phase of a training began and ended."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

PHASE_NAMES = (
    "data_loading",
    "host_to_device",
    "forward",
    "backward",
    "optimizer",
    "evaluation",
    "checkpoint",
)


class PhaseTimer:
    """Write when each phase began and ended, for the energy of each; phases do not nest.

    Every phase of every step is appended to phases-rank<r>.jsonl, gaps and lengths in
    microseconds, some steps a line.

    On a GPU all phases but data loading are timed by events in its queue, which cost no waiting.
    ``write`` reads them and puts them on the clock of the samples. Data loading is the CPU's time
    until a batch is in its memory. The GPU may still work on the batch before. That time belongs
    to the batch before: phases keep the order of the program, and each begins only when the one
    before it has ended.

    With ``synchronous`` the CPU waits for the GPU before and after each phase. Then data loading
    and host_to_device together are the study's "data loading with data staging": from the start
    of the iteration until its data are on the GPU.
    """

    def __init__(
        self, device: torch.device, run_dir: Path, rank: int, synchronous: bool = False
    ):
        self.on_gpu = device.type == "cuda"
        self.synchronous = synchronous and self.on_gpu
        # (phase, begin, end): ns, or events of the GPU's queue
        self.pending: list[tuple] = []
        self.file = open(Path(run_dir) / f"phases-rank{rank}.jsonl", "a", buffering=1)
        self._write_line({"names": PHASE_NAMES})

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        in_queue = self.on_gpu and not self.synchronous and phase != "data_loading"
        now = _record_cuda_event if in_queue else self._now_ns
        begin = now()
        try:
            yield
        finally:  # a phase that is broken off counts, too
            self.pending.append((phase, begin, now()))

    def _now_ns(self) -> int:
        if self.synchronous:
            torch.cuda.synchronize()
        return time.monotonic_ns()

    def loading(self, batches: Iterable) -> Iterator:
        """Give the same batches; the waiting for each counts as data loading."""
        iterator = iter(batches)
        while True:
            # the first time, this starts the loader's workers
            with self("data_loading"):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def write(self) -> None:
        """Put the phases so far on disk; waits for the GPU, so call it where that is harmless."""
        if self.pending:
            lines = self._phases_on_one_clock()
            self.pending = []
            last_end = lines[0][1]
            entry: dict = {"t": last_end, "phase": [], "gap_us": [], "length_us": []}
            for phase, begin, end in lines:
                begin = max(begin, last_end)
                length_us = (end - begin) // 1000
                gap_us = (begin - last_end) // 1000
                if length_us > 0:
                    entry["phase"].append(PHASE_NAMES.index(phase))
                    entry["gap_us"].append(gap_us)
                    entry["length_us"].append(length_us)
                    last_end += (gap_us + length_us) * 1000
            self._write_line(entry)

    def _phases_on_one_clock(self) -> list[tuple[str, int, int]]:
        """Return the pending phases in ns of the monotonic clock."""
        if not self.on_gpu:
            return self.pending
        now = _record_cuda_event()
        torch.cuda.synchronize()
        now_ns = time.monotonic_ns()

        def instant_ns(moment) -> int:
            return (
                moment
                if isinstance(moment, int)
                else now_ns - int(moment.elapsed_time(now) * 1e6)
            )

        return [
            (phase, instant_ns(begin), instant_ns(end))
            for phase, begin, end in self.pending
        ]

    def _write_line(self, line: dict) -> None:
        self.file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _record_cuda_event() -> torch.cuda.Event:
    """Record an event that tells when the GPU came to this place in its queue."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
