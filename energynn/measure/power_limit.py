"""Hold this host's GPUs at a power limit; each gets its own back, whatever process is ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from energynn.measure import sensors
from energynn.processes import OWN_PYTHON, own_environment

ALLOWED = "only root may, in the range of `nvidia-smi -q -d POWER` (docs/gpu.md)"


@contextmanager
def held(limit_W: float, gpus: list[dict]) -> Iterator[list[int]]:
    """Hold GPUs at a limit as long as a file is open, here or in who inherits it; 0: as they are.

    A process of its own sets it, and the one of before when the last one has closed the file or was
    killed. gpus: as ``machine.gpus`` tells them. Gives the file's number. Raises ValueError with
    the remedy.
    """
    if not limit_W:
        yield []
        return
    if not gpus:
        raise ValueError("power_limit_W: no NVIDIA GPU is used; leave it out")
    words = [*OWN_PYTHON, "-m", "energynn.measure.power_limit", str(limit_W)]
    words += [str(gpu["index"]) for gpu in gpus]
    pipes = dict(
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own_environment()
    )
    guard = subprocess.Popen(words, start_new_session=True, **pipes)
    try:
        answer = guard.stdout.readline().strip()
        if answer != "held":
            raise ValueError(f"power_limit_W: {answer}; choose another or none")
        yield [guard.stdin.fileno()]
    finally:
        # it speaks where a limit could not be set back
        print(guard.communicate()[0], end="", file=sys.stderr)


def guard(limit_W: float, indices: list[int]) -> None:
    """Set the limit, say so or why not, and set the one of before when standard input ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pynvml, _ = sensors.list_gpus()
    set_limit = pynvml.nvmlDeviceSetPowerManagementLimit
    try:
        with ExitStack() as before:
            for index in indices:
                gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
                limit_mW = pynvml.nvmlDeviceGetPowerManagementLimit(gpu)
                set_limit(gpu, round(limit_W * 1e3))
                before.callback(set_limit, gpu, limit_mW)
            print("held", flush=True)
            sys.stdin.read()
    except Exception as error:  # whatever a driver throws
        print(f"GPU {index}: {limit_W:g} W: {error}; {ALLOWED}")


if __name__ == "__main__":
    guard(float(sys.argv[1]), list(map(int, sys.argv[2:])))
