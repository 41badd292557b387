"""Hold this host's GPUs at a power limit; each gets its own back, whatever process is ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from energynn.measure import sensors


def require(limit_W: float, gpus: list[dict]) -> None:
    """Raise ValueError with the remedy where GPUs, as ``machine.gpus`` tells them, cannot have it.

    To set what is in force already shows whether this user may.
    """
    if not gpus:
        raise ValueError("power_limit_W: no NVIDIA GPU is used; leave it out")
    pynvml, _ = sensors.list_gpus()
    for gpu in gpus:
        name = f"GPU {gpu['index']} ({gpu['name']})"
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(gpu["index"])
            ends_mW = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
            low_W, high_W = (end_mW / 1e3 for end_mW in ends_mW)
            if not low_W <= limit_W <= high_W:
                raise ValueError(f"{limit_W:g} W is beyond {low_W:g} to {high_W:g} W")
            before_mW = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)
            pynvml.nvmlDeviceSetPowerManagementLimit(handle, before_mW)
        except Exception as error:  # whatever a driver throws
            remedy = "choose another or none; only root may set it (docs/gpu.md)"
            raise ValueError(f"power_limit_W: {name}: {error}; {remedy}") from error


@contextmanager
def held(limit_W: float, gpus: list[dict]) -> Iterator[list[int]]:
    """Hold GPUs at a limit as long as a file is open, here or in who inherits it; 0: as they are.

    A process of its own sets it, and sets back when the last one has closed the file or was
    killed. Gives the file's number. Raises ValueError with the remedy.
    """
    if not limit_W:
        yield []
        return
    require(limit_W, gpus)
    indices = [str(gpu["index"]) for gpu in gpus]
    words = [sys.executable, "-m", "energynn.measure.power_limit", str(limit_W)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    guard = subprocess.Popen([*words, *indices], start_new_session=True, **pipes)
    try:
        if not guard.stdout.readline():
            raise ValueError("power_limit_W: it could not be set; see the lines above")
        yield [guard.stdin.fileno()]
    finally:
        guard.stdin.close()
        guard.wait()
        guard.stdout.close()


def guard(limit_W: float, indices: list[int]) -> None:
    """Set the limit, say so, and set it back when standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pynvml, _ = sensors.list_gpus()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
    before_mW = [pynvml.nvmlDeviceGetEnforcedPowerLimit(each) for each in handles]
    try:
        for handle in handles:
            pynvml.nvmlDeviceSetPowerManagementLimit(handle, round(limit_W * 1e3))
        print("held", flush=True)
        sys.stdin.read()
    finally:
        for handle, limit_mW in zip(handles, before_mW, strict=True):
            with suppress(Exception):  # the others get theirs
                pynvml.nvmlDeviceSetPowerManagementLimit(handle, limit_mW)


if __name__ == "__main__":
    guard(float(sys.argv[1]), list(map(int, sys.argv[2:])))
