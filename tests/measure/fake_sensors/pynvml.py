"""An NVML of GPUs with constant power, whose counters are its integral over the monotonic clock.

FAKE_GPUS is a JSON list, one entry per GPU: high_W, update_s of the counter (null: no counter),
averaged (its power is a mean over 1 s), limit_W, more than which it never draws.
"""

import json
import os
import time
from types import SimpleNamespace

SIMULATED = True
NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_CLOCK_GRAPHICS = 1, 2, 0


class NVMLError(Exception):
    pass


class NVMLError_Uninitialized(NVMLError):
    pass


def gpus():
    return json.loads(os.environ.get("FAKE_GPUS", "[]"))


def nvmlDeviceGetCount():
    return len(gpus())


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetUUID(handle):
    return f"GPU-fake-{handle}"


def nvmlDeviceGetName(handle):
    is_averaged = gpus()[handle].get("averaged")
    return "a fake H100" if is_averaged else "a fake A100"  # instantaneous


LIMIT_W = 700


def limit_W(handle):
    return gpus()[handle].get("limit_W", LIMIT_W)


def power_W(handle):
    return min(gpus()[handle]["high_W"], limit_W(handle))


def nvmlDeviceGetPowerUsage(handle):
    return int(power_W(handle) * 1000)


def nvmlDeviceGetTotalEnergyConsumption(handle):
    update_s = gpus()[handle].get("update_s")
    if update_s is None:
        raise NVMLError("Not Supported")
    seen_s = time.monotonic() // update_s * update_s
    return int(power_W(handle) * 1000 * seen_s)


def nvmlDeviceGetEnforcedPowerLimit(handle):
    return int(limit_W(handle) * 1000)


ANSWERS = {  # always the same
    "Init": None,
    "Shutdown": None,
    "SystemGetDriverVersion": "fake",
    "SystemGetCudaDriverVersion": 12000,
    "DeviceGetComputeRunningProcesses": [],
    "DeviceGetMemoryInfo": SimpleNamespace(used=2**30, total=2**36),
    "DeviceGetClockInfo": 1500,
    "DeviceGetMaxClockInfo": 2000,
    "DeviceGetPowerManagementDefaultLimit": LIMIT_W * 1000,
}
for _name, _answer in ANSWERS.items():
    globals()[f"nvml{_name}"] = lambda *_given, _answer=_answer: _answer
