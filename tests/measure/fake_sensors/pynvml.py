"""An NVML whose true energy is known: power is a closed form of the monotonic clock.

Counters are its integral. FAKE_GPUS is a JSON list, one entry per GPU: shape (constant, sine,
square), low_W, high_W, rhythm_s, update_s of the counter (null: no counter), averaged (power is a
mean over 1 s).
"""

import json
import math
import os
import time

SIMULATED = True
NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_CLOCK_GRAPHICS = 1, 2, 0


class NVMLError(Exception):
    pass


class NVMLError_Uninitialized(NVMLError):
    pass


def gpus():
    return json.loads(os.environ.get("FAKE_GPUS", "[]"))


def power_W(gpu, t):
    low, high, rhythm = gpu.get("low_W", 100.0), gpu.get("high_W", 500.0), gpu.get("rhythm_s", 7.0)
    if gpu["shape"] == "constant":
        return high
    if gpu["shape"] == "sine":
        return (low + high) / 2 + (high - low) / 2 * math.sin(2 * math.pi * t / rhythm)
    return high if (t / rhythm) % 1 < 0.5 else low


def energy_J(gpu, t):
    """Integral of power_W from 0 to t."""
    low, high, rhythm = gpu.get("low_W", 100.0), gpu.get("high_W", 500.0), gpu.get("rhythm_s", 7.0)
    if gpu["shape"] == "constant":
        return high * t
    if gpu["shape"] == "sine":
        w = 2 * math.pi / rhythm
        return (low + high) / 2 * t + (high - low) / 2 / w * (1 - math.cos(w * t))
    whole, rest = divmod(t, rhythm)
    return (
        whole * rhythm * (low + high) / 2
        + high * min(rest, rhythm / 2)
        + low * max(0.0, rest - rhythm / 2)
    )


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len(gpus())


def nvmlDeviceGetHandleByIndex(index):
    return (index, gpus()[index])


def nvmlDeviceGetUUID(handle):
    return f"GPU-fake-{handle[0]}"


def nvmlDeviceGetName(handle):
    return (
        "a fake H100" if handle[1].get("averaged") else "a fake A100"
    )  # whose power is instantaneous


def nvmlDeviceGetPowerUsage(handle):
    gpu, t = handle[1], time.monotonic()
    watts = energy_J(gpu, t) - energy_J(gpu, t - 1) if gpu.get("averaged") else power_W(gpu, t)
    return int(watts * 1e3)


def nvmlDeviceGetTotalEnergyConsumption(handle):
    gpu, t = handle[1], time.monotonic()
    if gpu.get("update_s") is None:
        raise NVMLError("Not Supported")
    return int(energy_J(gpu, math.floor(t / gpu["update_s"]) * gpu["update_s"]) * 1e3)


def nvmlDeviceGetPowerManagementLimit(handle):
    return 700_000


def nvmlDeviceGetComputeRunningProcesses(handle):
    return []


def nvmlSystemGetDriverVersion():
    return "fake"


def nvmlSystemGetCudaDriverVersion():
    return 12000


class _Memory:
    used, total = 2**30, 2**36


def nvmlDeviceGetMemoryInfo(handle):
    return _Memory()


def nvmlDeviceGetClockInfo(handle, kind):
    return 1500


def nvmlDeviceGetMaxClockInfo(handle, kind):
    return 2000


def nvmlDeviceGetPowerManagementDefaultLimit(handle):
    return 700_000
