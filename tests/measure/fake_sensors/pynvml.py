"""An NVML of GPUs with constant power, whose counters are its integral over the monotonic clock.

FAKE_GPUS is a JSON list, one entry per GPU: high_W, update_s of the counter (null: no counter),
averaged (its power is a mean over 1 s). FAKE_LIMITS names a file of rows [moment, GPU, mW], the
limits that others have set; none of these GPUs draws more.
"""

import json
import os
import time
from itertools import pairwise
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


LIMIT_MW = 700_000


def _limits(handle):
    """Moment and mW of each limit that this GPU has had."""
    limits = [(0.0, LIMIT_MW)]
    if path := os.environ.get("FAKE_LIMITS"):
        with open(path, "a+") as file:
            file.seek(0)
            rows = map(json.loads, file)
            limits += [(t, limit) for t, index, limit in rows if index == handle]
    return limits


def nvmlDeviceGetPowerUsage(handle):
    return int(min(gpus()[handle]["high_W"] * 1e3, _limits(handle)[-1][1]))


def nvmlDeviceGetTotalEnergyConsumption(handle):
    gpu, t = gpus()[handle], time.monotonic()
    if gpu.get("update_s") is None:
        raise NVMLError("Not Supported")
    seen_s = t // gpu["update_s"] * gpu["update_s"]
    energy_mJ = 0.0
    for (begin_s, limit_mW), (end_s, _) in pairwise([*_limits(handle), (seen_s, 0)]):
        power_mW = min(gpu["high_W"] * 1e3, limit_mW)
        energy_mJ += power_mW * max(0.0, min(end_s, seen_s) - begin_s)
    return int(energy_mJ)


def nvmlDeviceGetEnforcedPowerLimit(handle):
    return _limits(handle)[-1][1]


ANSWERS = {  # always the same
    "Init": None,
    "Shutdown": None,
    "SystemGetDriverVersion": "fake",
    "SystemGetCudaDriverVersion": 12000,
    "DeviceGetComputeRunningProcesses": [],
    "DeviceGetMemoryInfo": SimpleNamespace(used=2**30, total=2**36),
    "DeviceGetClockInfo": 1500,
    "DeviceGetMaxClockInfo": 2000,
    "DeviceGetPowerManagementDefaultLimit": LIMIT_MW,
}
for _name, _answer in ANSWERS.items():
    globals()[f"nvml{_name}"] = lambda *_given, _answer=_answer: _answer
