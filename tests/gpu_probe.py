"""`make gpu-probe`: what a GPU's sensors say and what it can do at most, before the study; two minutes.

Each part is tried by itself; the error of one that fails stands in its place. Without a GPU the parts run on the CPU
in small, beside whatever NVML there is.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch

from energynn.measure import machine, sensors

IDLE_S, STEPS_S, WAVE_S, HALF_WAVE_S = 5.0, 5.0, 20.0, 1.0
SETTLE_S = 2.0  # until what the start of a context stirred up is over


def facts() -> dict:
    """What the machine is; nvidia-smi's own words go to a file of their own."""
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "machine": machine.describe_machine(),
        "versions": machine.versions(),
        "commit": machine.git_state(),
        "shm_B": shm.total if shm else 0,
        "affinity": sorted(os.sched_getaffinity(0)),
        "sensors": [sensor.describe() for sensor in sensors.nvml_sensors()[0]],
    }


def counter_steps(seconds: float) -> dict:
    """How often and by how much each counter and power changes, asked every millisecond, and what asking costs."""
    found, _ = sensors.nvml_sensors()
    changes: dict[str, list] = {sensor.id: [] for sensor in found}
    last, costs_s = {}, {sensor.id: [] for sensor in found}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for sensor in found:
            before = time.monotonic()
            value = sensor.read()
            costs_s[sensor.id].append(time.monotonic() - before)
            if value != last.get(sensor.id):
                changes[sensor.id].append((before, value))
                last[sensor.id] = value
        time.sleep(0.001)
    result = {}
    for name, seen in changes.items():
        result[name] = {"changes": len(seen), "read_median_s": statistics.median(costs_s[name])}
        if len(seen) > 2:
            intervals_s = [later[0] - earlier[0] for earlier, later in zip(seen, seen[1:], strict=False)]
            quantiles_s = statistics.quantiles(intervals_s, n=20)
            result[name] |= {"interval_p5_p50_p95_s": [quantiles_s[0], statistics.median(intervals_s), quantiles_s[-1]]}
    return result


def trace(seconds: float) -> list[list]:
    """Readings of all sensors every 10 ms, each line [monotonic s, ...]."""
    found, lines = sensors.nvml_sensors()[0], []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        lines.append([time.monotonic(), *(sensor.read() for sensor in found)])
        time.sleep(0.01)
    return lines


def mean_powers_W(seconds: float) -> dict:
    """Mean power by each sensor over some time: of counters their rise, of powers their mean."""
    found, lines = sensors.nvml_sensors()[0], trace(seconds)
    span_s = lines[-1][0] - lines[0][0]
    result = {}
    for column, sensor in enumerate(found, start=1):
        values = [line[column] * sensor.to_SI for line in lines]
        result[sensor.id] = (values[-1] - values[0]) / span_s if sensor.kind == "energy" else statistics.mean(values)
    return result


def product(device: str, dtype: torch.dtype):
    """A matrix product on random numbers, and its operations."""
    size = 8192 if device == "cuda" else 128
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return partial(torch.mm, a, b), 2 * size**3


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def square_wave(device: str) -> dict:
    """A load that is there for a second and away for one: the edges by our clock, and what the sensors say."""
    work, _ = product(device, torch.bfloat16 if device == "cuda" else torch.float32)
    edges, is_over = [], threading.Event()

    def load() -> None:
        while not is_over.is_set():
            edges.append(["on", time.monotonic()])
            while time.monotonic() < edges[-1][1] + HALF_WAVE_S:
                work()
                wait(device)
            edges.append(["off", time.monotonic()])
            is_over.wait(HALF_WAVE_S)

    worker = threading.Thread(target=load)
    worker.start()
    try:
        lines = trace(WAVE_S)
    finally:
        is_over.set()
        worker.join()
    return {"sensors": [sensor.id for sensor in sensors.nvml_sensors()[0]], "edges": edges, "lines": lines}


def ceilings(device: str) -> dict:
    """Rates of a matrix product in three precisions and of a copy, best of five."""
    rates = {}
    for name, dtype, tf32 in (
        ("bfloat16", torch.bfloat16, False),
        ("float32", torch.float32, False),
        ("tf32", torch.float32, True),
    ):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        work, operations = product(device, dtype)
        rates[f"{name}_TFLOP_per_s"] = operations / best_s(work, device) / 1e12
    torch.backends.cuda.matmul.allow_tf32 = False
    source = torch.zeros(2**30 if device == "cuda" else 2**20, device=device)
    rates["copy_GB_per_s"] = 2 * 4 * len(source) / best_s(source.clone, device) / 1e9
    return rates


def best_s(work, device: str) -> float:
    times_s = []
    for _ in range(6):
        begun = time.monotonic()
        for _ in range(5):
            work()
        wait(device)
        times_s.append((time.monotonic() - begun) / 5)
    return min(times_s[1:])


def smi(folder: Path) -> str:
    """The file with nvidia-smi's whole report."""
    done = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, timeout=30)
    (folder / "nvidia-smi.txt").write_text(done.stdout)
    return "nvidia-smi.txt"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    device, result = "cuda" if torch.cuda.is_available() else "cpu", {}

    def context() -> dict:
        torch.zeros(1, device=device)
        wait(device)
        time.sleep(SETTLE_S)
        return mean_powers_W(IDLE_S)

    parts = {
        "facts": facts,
        "nvidia_smi": partial(smi, folder),
        "counter_steps_idle": partial(counter_steps, STEPS_S),
        "idle_without_context_W": partial(mean_powers_W, IDLE_S),
        "idle_with_context_W": context,
        "ceilings": partial(ceilings, device),
        "square_wave": partial(square_wave, device),
        "idle_after_load_W": partial(mean_powers_W, IDLE_S),
    }
    for name, part in parts.items():
        begun = time.monotonic()
        try:
            result[name] = part()
        except Exception as error:
            result[name] = {"error": f"{type(error).__name__}: {error}"}
        told = "" if name in ("facts", "square_wave") else json.dumps(result[name])
        print(f"probe: {name} ({time.monotonic() - begun:.1f} s) {told}", flush=True)
        (folder / "gpu-probe.json").write_text(json.dumps(result, default=str) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
