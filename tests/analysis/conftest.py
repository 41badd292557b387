"""Synthetic run records: provenance is ``simulated``, and every value follows a formula that
stands here.
"""

import fcntl
import json
import math
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from energynn.analysis import numbers
from energynn.experiment import config
from energynn.host.files import REPOSITORY
from tests.analysis.notebook import execute
from tests.conftest import minimal_record
from tests.measure.worlds import sensor
from tests.run_files import write_samples, write_training

ANALYSIS = sorted(
    path.stem
    for path in (REPOSITORY / "notebooks").glob("[1-9]*.ipynb")
    if path.stem < "9"
)

# of the whole host with so many devices at work
POWER_W = {0: 5.0, 1: 14.0, 2: 23.0, 4: 41.0}


PHASES = (
    "data_loading",
    "host_to_device",
    "forward",
    "backward",
    "optimizer",
    "evaluation",
    "idle",
)


def write_run(
    runs_dir: Path,
    configuration: config.RunConfig,
    provenance: str = "simulated",
    time_s: float | None = None,
    parts_W: dict | None = None,
    samples: bool = True,
    **changes,
) -> Path:
    """Write the files of one run as the launcher does; ``changes`` replace fields of the record,
    None removes one.

    ``parts_W``: mean power per component; by default all is the CPU's.
    """
    run_dir = config.folder(configuration, runs_dir)
    run_dir.mkdir(parents=True)
    devices, repeat = configuration.devices, configuration.repeat
    is_tuning = getattr(configuration, "stage", "") == "finetune"
    usual_s = 60.0 / devices**0.85 * (1 + 0.01 * repeat) * (1.6 if is_tuning else 1)
    training_time_s = time_s or usual_s
    parts_W = parts_W or {"cpu": POWER_W[devices]}
    power_W = sum(parts_W.values())
    energy_J = power_W * training_time_s
    metrics = {"top1_error": 0.30 + 0.02 * devices + 0.002 * repeat}
    if configuration.workload == "fourcastnet":
        metrics = {"z500_rmse_12h_m": 70.0 + 4 * devices}
        metrics |= {"z500_rmse_12h_persistence_m": 95.0}
        if is_tuning:
            metrics |= {"z500_rmse_24h_m": 110.0 + 5 * devices}
            metrics |= {"z500_rmse_24h_persistence_m": 150.0}
    model = {"idle_W_per_core": 2.5, "full_W_per_core": 11.5, "cores": 2}
    more = {"provenance": provenance, "model": model}
    about = sensor("cpu_estimate", "busy", "cpu", "all", **more)
    phase = {"device": "cpu", "time_s": training_time_s / len(PHASES)}
    phase |= {"energy_cpu_J": energy_J / len(PHASES) / devices}
    record = {
        **minimal_record(),
        "run_id": run_dir.name,
        "workload": configuration.workload,
        "system": configuration.system,
        "valid": True,
        "started_at": "2026-01-01T00:00:00Z",
        "config": config.asdict(configuration),
        "device_kind": "cpu core",
        "device_name": "synthetic core",
        "devices": devices,
        "nodes": 1,
        "sockets": 1,
        "dataset_samples": 1000,
        "samples_trained": 1000,
        "optimizer_steps": 50,
        "forward_backward_passes": 50,
        "training_time_s": training_time_s,
        "device_hours_training": devices * training_time_s / 3600,
        "perun_time_s": training_time_s + 3.0,
        "device_hours_perun": devices * (training_time_s + 3.0) / 3600,
        **{f"energy_{c}_J": watts * training_time_s for c, watts in parts_W.items()},
        "energy_total_J": energy_J,
        **{f"energy_{c}_provenance": provenance for c in (*parts_W, "total")},
        **{f"mean_power_{c}_W": watts for c, watts in parts_W.items()},
        "mean_power_total_W": power_W,
        "sampling_period_s": 0.1,
        "samples_in_training": int(training_time_s / 0.1),
        "coverage": 1.0,
        "sensors": [about],
        "metrics": metrics,
        "energy_phases": [
            phase | {"rank": rank, "phase": name}
            for rank in range(devices)
            for name in PHASES
        ],
        "machine": {"hostname": "synthetic", "cpu": "none"},
    } | changes
    record = {field: value for field, value in record.items() if value is not None}
    (run_dir / "record.json").write_text(json.dumps(record))
    if samples:
        _write_samples(run_dir, about, training_time_s, power_W)
    return run_dir


def _write_samples(
    run_dir: Path, about: dict, training_time_s: float, power_W: float
) -> None:
    """Idle for 2 s, busy during the training, idle for 2 s, with a dip every 5 s; samples every
    0.1 s.
    """
    t_s = 0.1 * np.arange(-20, int(training_time_s / 0.1) + 21)
    is_busy = (t_s >= 0) & (t_s < training_time_s) & (t_s % 5 > 0.5)
    busy_core_s = np.cumsum(np.append(0.0, is_busy[:-1])) * 0.1 * (power_W - 5.0) / 9.0
    write_samples(run_dir, t_s, [(about, busy_core_s)], period_s=0.1)
    write_training(run_dir, 0.0, training_time_s)


def write_study(runs_dir: Path, provenance: str = "simulated") -> Path:
    """ResNet50 and FourCastNet on 1 and 2 devices, constant LBS and GBS, three repeats of one
    configuration.
    """
    images = partial(config.make, "resnet50")
    runs = [images(local_batch_size=16, repeat=repeat) for repeat in range(3)]
    runs.append(images(devices=2, local_batch_size=16))
    for devices in (1, 2):
        states = partial(config.make, "fourcastnet", devices=devices)
        before = f"pretrain-{devices}"
        runs += [states(), states(stage="finetune", initial_run=before)]
    for run in runs:
        write_run(runs_dir, run, provenance)
    run = images(devices=2, global_batch_size=16)
    write_run(runs_dir, run, provenance, time_s=45.0)
    return runs_dir


def write_replica(runs_dir: Path, series: str, provenance: str = "measured") -> Path:
    """Runs at the study's scale, by formulas of our own: not a copy of its values, and no
    evidence for anything.
    """
    plans = {  # powers of two, and local batch and samples of so many devices
        "R1": (range(9), lambda n: (256, 1281167)),
        "R4": (range(9), lambda n: (256, 1281167 * n // 256)),
        "R5": (range(5), lambda n: (256 // n, 1281167 * n // 16)),
        "R6": (range(5, 9), lambda n: (8192 // n, 1281167 * n // 256)),
        "F1": (range(2, 9), lambda n: (1, 54020)),
        "F4": (range(2, 5), lambda n: (16 // n, 54020)),
    }
    for name in series.split():
        powers, plan = plans[name]
        workload = "resnet50" if name[0] == "R" else "fourcastnet"
        for n in (2**power for power in powers):
            local_batch_size, samples = plan(n)
            for repeat in range(2 if workload == "resnet50" else 1):
                run = config.make(
                    workload,
                    preset="paper",
                    devices=n,
                    local_batch_size=local_batch_size,
                    repeat=repeat,
                    system=f"replica-{name}",
                )
                _write_replica_run(runs_dir, run, name, samples, provenance)
    return runs_dir


def _write_replica_run(runs_dir, run, name, samples, provenance):
    n, size = run.devices, run.local_batch_size
    sockets = 2 * -(-n // 4)
    if name[0] == "R":
        rate = 430 * n**-0.04 * size / (size + 8)
        gpu_W = 80 + 0.28 * rate
        top1_error = 0.28 + max(0.0, 0.05 * math.log2(size * n / 8192))
        metrics = {"top1_error": top1_error}
    else:
        rate = 2.1 * (n / 4) ** -0.3
        if name == "F4":
            rate *= 1.35
        gpu_W = 100 + 20 * rate + (70 if name == "F4" else 0)
        metrics = {"z500_rmse_6h_m": 20 * n**0.1, "z500_rmse_6h_persistence_m": 60.0}
    steps = samples * run.epochs // run.global_batch_size
    parts_W = {"gpu": n * gpu_W, "cpu": 110 * sockets, "ram": 6 * sockets}
    noise = 1 + 0.004 * math.sin(7 * run.repeat + n)
    write_run(
        runs_dir,
        run,
        provenance,
        samples=False,
        time_s=noise * samples * run.epochs / rate / n,
        parts_W=parts_W,
        device_name="NVIDIA H100" if name == "F4" else "NVIDIA A100-SXM4-40GB",
        device_kind="gpu",
        metrics=metrics,
        dataset_samples=samples,
        nodes=-(-n // 4),
        sockets=sockets,
        samples_trained=samples * run.epochs,
        optimizer_steps=steps,
        forward_backward_passes=steps,
    )


@pytest.fixture(scope="session")
def executed(tmp_path_factory) -> Path:
    """The build folder after all analysis notebooks ran on the runs of ``write_study``; once
    for all processes of pytest-xdist.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "with own runs"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "numbers.json").exists():
            write_study(folder / "runs")
            for notebook in ANALYSIS:
                execute(notebook, folder, runs_dir=str(folder / "runs"))
            numbers.write_colophon(folder)
            numbers.merge_tables(folder)
    return folder


@pytest.fixture
def synthetic_runs(tmp_path: Path) -> Path:
    return write_study(tmp_path / "runs")
