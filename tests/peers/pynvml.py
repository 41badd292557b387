"""An NVML of two GPUs with a square load whose energy is known, and with one lie, of the first GPU.

The names, errors and constants are those of nvidia-ml-py, which other tools ask for. Counters are
renewed every 0.1 s, give or take 2 ms. FAKE_LIE names a lie. It is told from the start, or from the
instant of the monotonic clock that stands in the file FAKE_LIE_FILE, once that is there.
"""

import functools
import importlib.machinery
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from tests.measure.worlds import Load

SIMULATED = True
BEAT_S, UNEVEN_S = 0.1, 0.002
LOADS = [Load("square", 100.0, 500.0, 1.3), Load("square", 80.0, 300.0, 0.9)]
LIE = os.environ.get("FAKE_LIE", "none")
LATE = "counter 2 s late, of a load that begins"
LIE_FILE = os.environ.get("FAKE_LIE_FILE")

_others = [folder for folder in sys.path if Path(folder) != Path(__file__).parent]
_real = importlib.machinery.PathFinder.find_spec("pynvml", _others).origin
exec(compile(Path(_real).read_text(), _real, "exec"))


@functools.cache
def _told_s() -> float:
    return float(Path(LIE_FILE).read_text())


def lie_s() -> float:
    """Since when it lies."""
    if not LIE_FILE:
        return 0.0
    return _told_s() if os.path.exists(LIE_FILE) else float("inf")


def load(index: int) -> Load:
    """What a GPU does; where its counter is late, it begins to work in the window."""
    if index == 0 and LIE == LATE:
        return replace(LOADS[0], idle_W=60.0, begin_s=min(lie_s(), 1e9))
    return LOADS[index]


def true_J(begin_s: float, end_s: float) -> float:
    loads = load(0), load(1)
    return float(sum(one.energy_J(end_s) - one.energy_J(begin_s) for one in loads))


def counted_J(index: int, t: float) -> float:
    """What an honest counter shows."""
    beat = t // BEAT_S
    at_s = beat * BEAT_S + UNEVEN_S * ((beat * 0.618) % 1)
    if at_s > t:
        at_s = (beat - 1) * BEAT_S + UNEVEN_S * (((beat - 1) * 0.618) % 1)
    return float(load(index).energy_J(at_s))


def lying_J(t: float) -> float:
    """What the first GPU's counter shows; lies that keep on begin at ``lie_s``."""
    begin_s = lie_s()
    now_J, then_J = counted_J(0, t), counted_J(0, min(t, begin_s))
    later_J = now_J - then_J
    return {
        "counter stuck": then_J,
        "counter falls to 0": later_J if t > begin_s else now_J,
        "counter in J": now_J / 1e3,
        "counter in uJ": now_J * 1e3,
        "counter drips 1 W": then_J + max(0.0, t - begin_s),
        "counter jumps by 10 kJ": now_J + 1e4 * (t > begin_s),
        "counter 10 % low": now_J * 0.9,
        "counter 30 % high": now_J * 1.3,
        LATE: counted_J(0, t - 2.0),
        "counter stops at 200 W": min(now_J, 200 * t),
    }.get(LIE, now_J)


def nvmlDeviceGetCount():
    return 1 if LIE == "one of two GPUs" else 2


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetIndex(handle):
    return handle


def nvmlDeviceGetUUID(handle):
    return f"GPU-fake-{handle}"


def nvmlDeviceGetPowerUsage(handle):
    t = time.monotonic()
    if handle == 0 and LIE == "power stuck, no counter":
        t = min(t, lie_s())
    if handle == 0 and LIE == "power in whole watts stuck, no counter" and t > lie_s():
        return 100_000
    # not in whole watts, as most tell it
    return int(1e3 * load(handle).power_W(t)) + int(t * 1e3) % 97


def nvmlDeviceGetTotalEnergyConsumption(handle):
    t = time.monotonic()
    is_silent = LIE == "counter cannot be read" and t > lie_s()
    if handle == 0 and (is_silent or "no counter" in LIE):
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)  # noqa: F821
    return int(1e3 * (lying_J(t) if handle == 0 else counted_J(handle, t)))


ANSWERS = {  # always the same
    "Init": None,
    "Shutdown": None,
    "SystemGetDriverVersion": "fake",
    "SystemGetCudaDriverVersion": 12000,
    "DeviceGetName": "a fake A100",  # whose power is instantaneous
    "DeviceGetArchitecture": NVML_DEVICE_ARCH_AMPERE,  # noqa: F821
    "DeviceGetEnforcedPowerLimit": 600_000,
    "DeviceGetPowerManagementLimit": 600_000,
    "DeviceGetMemoryInfo": SimpleNamespace(total=2**36, free=2**35, used=2**35),
    "DeviceGetUtilizationRates": SimpleNamespace(gpu=90, memory=50),
    "DeviceGetTemperature": 60,
    "DeviceGetComputeMode": 0,
    "DeviceGetComputeRunningProcesses": [],
    "DeviceGetGraphicsRunningProcesses": [],
}
for _name, _answer in ANSWERS.items():
    globals()[f"nvml{_name}"] = lambda *_given, _answer=_answer: _answer


def _unsupported(*_args):
    raise NVMLError(NVML_ERROR_NOT_SUPPORTED)  # noqa: F821


for _name in (
    "C2cModeInfoV MigMode FieldValues PowerManagementLimitConstraints PersistenceMode PciInfo"
).split():
    globals()[f"nvmlDeviceGet{_name}"] = _unsupported
