"""Windows of zeus, CodeCarbon and energynn at once, on one fake GPU pair of known truth.

    PYTHONPATH=tests/peers:. python tests/peers/windows.py LENGTH_S WINDOWS

prints a JSON line for each window of each tool: tool, error (relative), doubt.
"""

import json
import logging
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pynvml  # the fake one

import energynn

NOTHING = float("nan")


def zeus() -> Iterator:
    """Get ready; then begin each window, and end it with its energy and what speaks against it."""
    from zeus.monitor import ZeusMonitor

    monitor = ZeusMonitor(cpu_indices=[])
    yield
    while True:
        monitor.begin_window("window", sync_execution=False)
        yield
        found = monitor.end_window("window", sync_execution=False)
        yield found.total_energy, ""


def codecarbon() -> Iterator:
    from codecarbon import OfflineEmissionsTracker
    from codecarbon.core import gpu

    gpu.is_nvidia_system = lambda: True  # it asks for nvidia-smi
    quiet = dict(save_to_file=False, log_level="warning")
    tracker = OfflineEmissionsTracker(country_iso_code="DEU", **quiet)
    tracker.start_task("window")  # the first one looks for hardware
    tracker.stop_task("window")
    yield
    while True:
        tracker.start_task("window")
        yield
        yield tracker.stop_task("window").gpu_energy * 3.6e6, ""


def ours() -> Iterator:
    with energynn.window():  # starts the sampler
        pass
    yield
    while True:
        with energynn.window("window", synchronize=False) as found:
            yield
        doubts = "; ".join(found.energies["doubts"])
        yield found.energies.get("energy_gpu_J", NOTHING), doubts


TOOLS = {"Energynn": ours, "CodeCarbon": codecarbon, "Zeus": zeus}


class Warned(logging.Handler):
    """What the tools log as a warning about the GPU that lies."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        for name in TOOLS:
            logging.getLogger(name.lower()).addHandler(self)

    def emit(self, record):
        if "GPU 0" in record.getMessage():
            self.texts.append((record.name, record.getMessage()))

    def of(self, tool: str) -> list[str]:
        return [text for name, text in self.texts if name.startswith(tool.lower())]


def go_on(tool: Iterator):
    """Let a tool take its next step; what it raises is what it says of a lie."""
    try:
        return next(tool)
    except Exception as error:
        return NOTHING, f"raises {type(error).__name__}"


def tell(tool: str, error: float, *doubts: str) -> None:
    known = error if error == error else None
    line = {"tool": tool, "error": known, "doubt": "; ".join(filter(None, doubts))}
    print(json.dumps(line), flush=True)


def main(length_s: float, windows: int) -> None:
    warned, ready = Warned(), {}
    for name, tool in TOOLS.items():
        if tool is zeus and "no counter" in pynvml.LIE:
            continue  # its processes that poll a power do not run on this NVML
        ready[name] = tool()
        if failed := go_on(ready[name]):
            del ready[name]
            tell(name, *failed)
    for _ in range(windows):
        time.sleep(random.uniform(0.05, 1.3))
        begun = [
            (name, tool, go_on(tool), time.monotonic()) for name, tool in ready.items()
        ]
        if pynvml.LIE_FILE:  # half of the window is honest
            begin = Path(f"{pynvml.LIE_FILE}.new")
            begin.write_text(str(time.monotonic() + length_s / 2))
            begin.rename(pynvml.LIE_FILE)
        time.sleep(length_s)
        for name, tool, failed, begin_s in reversed(begun):
            end_s = time.monotonic()
            energy_J, doubt = failed or go_on(tool)
            error = energy_J / pynvml.true_J(begin_s, end_s) - 1
            tell(name, error, doubt, *warned.of(name))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
