"""Windows of zeus, CodeCarbon and energynn at once, on one fake GPU pair of known truth.

    PYTHONPATH=tests/peers:. python tests/peers/windows.py LENGTH_S WINDOWS

prints a JSON line for each window of each tool: tool, error (relative), doubt.
"""

import contextlib
import json
import logging
import random
import sys
import time
from pathlib import Path

import pynvml  # the fake one

import energynn


class Zeus:
    def __init__(self):
        from zeus.monitor import ZeusMonitor

        self.monitor = ZeusMonitor(cpu_indices=[])

    def begin(self):
        self.monitor.begin_window("window", sync_execution=False)

    def end(self):
        return self.monitor.end_window("window", sync_execution=False)

    def told(self, found):
        return found.total_energy, ""


class CodeCarbon:
    def __init__(self):
        from codecarbon import OfflineEmissionsTracker
        from codecarbon.core import gpu

        gpu.is_nvidia_system = lambda: True  # it asks for nvidia-smi
        quiet = dict(save_to_file=False, log_level="warning")
        self.tracker = OfflineEmissionsTracker(country_iso_code="DEU", **quiet)
        self.begin()  # the first one looks for hardware
        self.end()

    def begin(self):
        self.tracker.start_task("window")

    def end(self):
        return self.tracker.stop_task("window")

    def told(self, found):
        return found.gpu_energy * 3.6e6, ""


class Energynn:
    def begin(self):
        self.window = energynn.window("window", synchronize=False)
        self.found = self.window.__enter__()

    def end(self):
        self.window.__exit__()
        return self.found

    def told(self, found):
        doubts = "; ".join(found.energies["doubts"])
        return found.energies.get("energy_gpu_J", float("nan")), doubts


class Warned(logging.Handler):
    """What the tools log as a warning about the GPU that lies."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        for name in ("zeus", "codecarbon"):
            logging.getLogger(name).addHandler(self)

    def emit(self, record):
        if "GPU 0" in record.getMessage():
            self.texts.append((record.name, record.getMessage()))

    def of(self, tool: str) -> str:
        return "; ".join(text for name, text in self.texts if name.startswith(tool))


class Measured:
    """A window of one tool: what it told of the time between its begin and its end."""

    def __init__(self, tool):
        self.tool, self.raised, self.found = tool, "", None

    @contextlib.contextmanager
    def guarded(self):
        try:
            yield
        except Exception as error:  # what a tool says of a lie
            self.raised = self.raised or f"raises {type(error).__name__}"

    def __enter__(self):
        with self.guarded():
            self.tool.begin()
        self.begin_s = time.monotonic()

    def __exit__(self, *_error):
        self.end_s = time.monotonic()
        with self.guarded():
            self.found = self.tool.end()

    def told(self, warned: Warned) -> dict:
        energy_J, name, doubt = float("nan"), type(self.tool).__name__, ""
        with self.guarded():
            energy_J, doubt = self.tool.told(self.found)
        error = energy_J / pynvml.true_J(self.begin_s, self.end_s) - 1
        doubts = filter(None, [self.raised, doubt, warned.of(name.lower())])
        known = error if error == error else None
        return {"tool": name, "error": known, "doubt": "; ".join(doubts)}


def main(length_s: float, windows: int) -> None:
    warned, tools = Warned(), []
    for tool in (CodeCarbon, Energynn, Zeus):
        if tool is Zeus and "no counter" in pynvml.LIE:
            continue  # its processes that poll a power do not run on this NVML
        try:
            tools.append(tool())
        except Exception as error:
            doubt = f"raises {type(error).__name__}"
            print(json.dumps({"tool": tool.__name__, "error": None, "doubt": doubt}))
    with energynn.window():  # starts the sampler
        pass
    for _ in range(windows):
        time.sleep(random.uniform(0.05, 1.3))
        measured = [Measured(tool) for tool in tools]
        with contextlib.ExitStack() as stack:
            for one in measured:
                stack.enter_context(one)
            if pynvml.LIE_FILE:  # half of the window is honest
                begun = Path(f"{pynvml.LIE_FILE}.new")
                begun.write_text(str(time.monotonic() + length_s / 2))
                begun.rename(pynvml.LIE_FILE)
            time.sleep(length_s)
        for one in measured:
            print(json.dumps(one.told(warned)), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
