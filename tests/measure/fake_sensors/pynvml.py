"""An NVML of GPUs with constant power, whose counters are its integral over the monotonic clock.

FAKE_GPUS is a JSON list, one entry per GPU: high_W, update_s of the counter (null: no counter),
averaged (its power is a mean over 1 s).
"""

import json
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
    return int(handle[1]["high_W"] * 1e3)


def nvmlDeviceGetTotalEnergyConsumption(handle):
    gpu, t = handle[1], time.monotonic()
    if gpu.get("update_s") is None:
        raise NVMLError("Not Supported")
    return int(gpu["high_W"] * 1e3 * (t // gpu["update_s"]) * gpu["update_s"])


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
