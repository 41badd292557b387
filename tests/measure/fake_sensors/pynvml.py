"""An NVML whose true energy is known: power is a closed form of the monotonic clock, counters are its integral.

FAKE_GPUS is a JSON list, one entry per GPU: shape (constant, sine, square), low_W, high_W, rhythm_s, update_s of the
counter (null: no counter), noise_W, averaged (power is a mean over 1 s, and the instant one a field), and faults:
fails_from_s and fails_to_s after FAKE_T0 (monotonic seconds), fault (error, nan, negative, gone, hang). FAKE_INIT_ERROR
makes nvmlInit fail.
"""

import json
import math
import os
import random
import time

SIMULATED = True
NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_CLOCK_GRAPHICS = 1, 2, 0


class NVMLError(Exception):
    pass


class NVMLError_Uninitialized(NVMLError):
    pass


class NVMLError_LibRmVersionMismatch(NVMLError):
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
    return whole * rhythm * (low + high) / 2 + high * min(rest, rhythm / 2) + low * max(0.0, rest - rhythm / 2)


def _fault(gpu, t, good):
    since = t - float(os.environ.get("FAKE_T0", "0"))
    if not gpu.get("fails_from_s", math.inf) <= since < gpu.get("fails_to_s", math.inf):
        return good
    fault = gpu.get("fault", "error")
    if fault == "nan":
        return math.nan
    if fault == "negative":
        return -good
    if fault == "hang":
        time.sleep(3600)
    raise NVMLError("GPU is lost" if fault == "gone" else "Unknown Error")


def nvmlInit():
    if os.environ.get("FAKE_INIT_ERROR"):
        raise NVMLError_LibRmVersionMismatch(os.environ["FAKE_INIT_ERROR"])


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len(gpus())


def nvmlDeviceGetHandleByIndex(index):
    return (index, gpus()[index])


def nvmlDeviceGetUUID(handle):
    return f"GPU-fake-{handle[0]}"


def nvmlDeviceGetName(handle):
    return "a fake H100" if handle[1].get("averaged") else "a fake A100"  # whose power is instantaneous


def nvmlDeviceGetPowerUsage(handle):
    gpu, t = handle[1], time.monotonic()
    watts = energy_J(gpu, t) - energy_J(gpu, t - 1) if gpu.get("averaged") else power_W(gpu, t)
    watts = _fault(gpu, t, watts + random.gauss(0, gpu.get("noise_W", 0.0)))
    return watts if math.isnan(watts) else int(watts * 1e3)


class _Field:
    def __init__(self, fault, milliwatts):
        self.nvmlReturn, self.value = fault, self
        self.uiVal = milliwatts


def nvmlDeviceGetFieldValues(handle, fields):
    assert fields == [186]
    return [_Field(0 if handle[1].get("averaged") else 3, int(power_W(handle[1], time.monotonic()) * 1e3))]


def nvmlDeviceGetTotalEnergyConsumption(handle):
    gpu, t = handle[1], time.monotonic()
    if gpu.get("update_s") is None:
        raise NVMLError("Not Supported")
    joules = _fault(gpu, t, energy_J(gpu, math.floor(t / gpu["update_s"]) * gpu["update_s"]))
    return joules if math.isnan(joules) else int(joules * 1e3)


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
