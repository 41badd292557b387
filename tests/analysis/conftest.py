"""Synthetic run records: provenance is ``simulated``, and every value follows a formula that
stands here.
"""

import fcntl
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from energynn import config
from energynn.analysis import numbers
from energynn.files import REPOSITORY
from tests.analysis.notebook import execute
from tests.conftest import minimal_record

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
    settings: dict | None = None,
    samples: bool = True,
    **changes,
) -> Path:
    """Write the files of one run as the launcher does; ``changes`` replace fields of the record,
    None removes one.

    ``parts_W``: mean power per component; by default all is the CPU's. ``settings`` replace the
    configuration's.
    """
    settings = config.to_dict(configuration) | (settings or {})
    stage = settings.get("stage", "")
    devices, repeat = settings["devices"], settings["repeat"]
    kind = "-".join(filter(None, (configuration.workload, stage, f"n{devices}")))
    name = f"{kind}-lbs{settings['local_batch_size']}-{config.digest(settings)[:8]}"
    run_dir = runs_dir / configuration.system / name
    run_dir.mkdir(parents=True)
    training_time_s = time_s or 60.0 / devices**0.85 * (1 + 0.01 * repeat) * (
        1.6 if stage == "finetune" else 1
    )
    parts_W = parts_W or {"cpu": POWER_W[devices]}
    power_W = sum(parts_W.values())
    energy_J = power_W * training_time_s
    metrics = {
        "top1_error": 0.30 + 0.02 * devices + 0.002 * repeat,
        "validation_loss": 1.1,
    }
    if configuration.workload == "fourcastnet":
        metrics = {
            "z500_rmse_12h_m": 70.0 + 4 * devices,
            "z500_rmse_12h_persistence_m": 95.0,
        }
        metrics |= {"z500_rmse_12h_m2_s2": metrics["z500_rmse_12h_m"] * 9.80665}
        if stage == "finetune":
            metrics |= {
                "z500_rmse_24h_m": 110.0 + 5 * devices,
                "z500_rmse_24h_persistence_m": 150.0,
            }
    model = {
        "name": "linear in busy cores",
        "idle_W_per_core": 2.5,
        "full_W_per_core": 11.5,
        "cores": 2,
    }
    sensor = {
        "id": "cpu_estimate",
        "component": "cpu",
        "device": "all",
        "kind": "busy",
        "provenance": provenance,
    }
    sensor |= {
        "to_SI": 1.0,
        "wraps_at": None,
        "primary": True,
        "model": model,
        "notes": {},
    }
    record = {
        **minimal_record(record_sha256=f"{run_dir}"),
        "run_id": name,
        "workload": configuration.workload,
        "system": configuration.system,
        "status": "finished",
        "status_reason": "",
        "valid": True,
        "invalid_reasons": [],
        "started_at": "2026-01-01T00:00:00Z",
        "config": settings,
        "config_digest": config.digest(settings),
        "data_digest": "0",
        "device_kind": "cpu core",
        "device_name": "synthetic core",
        "devices": devices,
        "nodes": 1,
        "sockets": 1,
        "dataset_samples": 1000,
        "samples_trained": 1000,
        "samples_evaluated": 100,
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
        "sensors": [sensor],
        "metrics": metrics,
        "energy_phases": [
            {
                "rank": rank,
                "device": "cpu",
                "phase": phase,
                "time_s": training_time_s / 7,
                "energy_cpu_J": energy_J / 7 / devices,
            }
            for rank in range(devices)
            for phase in PHASES
        ],
        "machine": {"hostname": "synthetic", "cpu": "none"},
    } | changes
    record = {field: value for field, value in record.items() if value is not None}
    (run_dir / "record.json").write_text(json.dumps(record))
    if samples:
        _write_samples(run_dir, sensor, training_time_s, power_W)
    return run_dir


def _write_samples(
    run_dir: Path, sensor: dict, training_time_s: float, power_W: float
) -> None:
    """Idle for 2 s, busy during the training, idle for 2 s, with a dip every 5 s; samples every
    0.1 s.
    """
    host, start_ns = "synthetic", 10**12
    events = [
        {
            "t_mono_ns": start_ns - 3 * 10**9,
            "event": "rank_start",
            "rank": 0,
            "host": host,
        },
        {"t_mono_ns": start_ns, "event": "training_start", "rank": 0},
        {
            "t_mono_ns": start_ns + int(training_time_s * 1e9),
            "event": "training_end",
            "rank": 0,
        },
    ]
    (run_dir / "events-rank0.jsonl").write_text(
        "\n".join(json.dumps({"t_wall_ns": 0, **e}) for e in events) + "\n"
    )
    lines = [
        json.dumps(
            {
                "header": "energynn-samples/1",
                "host": host,
                "pid": 1,
                "period_s": 0.1,
                "sensors": [sensor],
            }
        )
    ]
    busy_core_s = 0.0
    for step in range(-20, int(training_time_s / 0.1) + 21):
        seconds = step * 0.1
        lines.append(
            json.dumps({"t": start_ns + int(seconds * 1e9), "w": 0, "v": [busy_core_s]})
        )
        if 0 <= seconds < training_time_s and seconds % 5 > 0.5:
            busy_core_s += 0.1 * (power_W - 5.0) / 9.0
    (run_dir / "samples-synthetic.jsonl").write_text("\n".join(lines) + "\n")


def write_study(runs_dir: Path, provenance: str = "simulated") -> Path:
    """ResNet50 and FourCastNet on 1 and 2 devices, constant LBS and GBS, three repeats of one
    configuration.
    """
    for repeat in range(3):
        write_run(
            runs_dir,
            config.make("resnet50", local_batch_size=16, repeat=repeat),
            provenance,
        )
    write_run(
        runs_dir, config.make("resnet50", devices=2, local_batch_size=16), provenance
    )
    write_run(
        runs_dir,
        config.make("resnet50", devices=2, global_batch_size=16),
        provenance,
        time_s=45.0,
    )
    for devices in (1, 2):
        write_run(runs_dir, config.make("fourcastnet", devices=devices), provenance)
        tuning = config.make(
            "fourcastnet",
            devices=devices,
            stage="finetune",
            initial_run=f"pretrain-{devices}",
        )
        write_run(runs_dir, tuning, provenance)
    return runs_dir


A100, H100 = "NVIDIA A100-SXM4-40GB", "NVIDIA H100"


def write_replica(
    runs_dir: Path,
    provenance: str = "measured",
    repeats: int = 2,
    series: str = "R1 R4 R6 F1",
) -> Path:
    """Runs at the study's scale, by formulas of our own: not a copy of its values, and no
    evidence for anything.
    """
    powers = lambda low, high: [2**k for k in range(low, high + 1)]  # noqa: E731
    plans = {
        "R1": (powers(0, 8), lambda n: (256, 1281167)),
        "R4": (powers(0, 8), lambda n: (256, 1281167 * n // 256)),
        "R5": (powers(0, 4), lambda n: (256 // n, 1281167 * n // 16)),
        "R6": (powers(5, 8), lambda n: (8192 // n, 1281167 * n // 256)),
        "F1": (powers(2, 8), lambda n: (1, 54020)),
        "F4": (powers(2, 4), lambda n: (16 // n, 54020)),
    }
    for name in series.split():
        devices, plan = plans[name]
        for n in devices:
            _write_replica_runs(
                runs_dir,
                name,
                n,
                *plan(n),
                repeats if name[0] == "R" else 1,
                provenance,
            )
    return runs_dir


def _write_replica_runs(runs_dir, name, n, lbs, samples, repeats, provenance):
    image = name[0] == "R"
    epochs, hardware = (100 if image else 80), (H100 if name == "F4" else A100)
    rate = (430 * n**-0.04 * lbs / (lbs + 8) if image else 2.1 * (n / 4) ** -0.3) * (
        1.35 if hardware == H100 else 1
    )
    sockets = 2 * -(-n // 4)
    gpu_W = n * (
        (80 + 0.28 * rate if image else 100 + 20 * rate)
        + (70 if hardware == H100 else 0)
    )
    steps, parts_W = (
        samples * epochs // (lbs * n),
        {"gpu": gpu_W, "cpu": 110 * sockets, "ram": 6 * sockets},
    )
    metrics = {
        "top1_error": 0.28 + max(0.0, 0.05 * math.log2(lbs * n / 8192)),
        "validation_loss": 1.0,
    }
    if not image:
        metrics = {"z500_rmse_6h_m": 20 * n**0.1, "z500_rmse_6h_persistence_m": 60.0}
    for repeat in range(repeats):
        noise = 1 + 0.004 * math.sin(7 * repeat + n)
        settings = {
            "dataset": "imagenet" if image else "era5",
            "devices": n,
            "local_batch_size": lbs,
            "epochs": epochs,
            "global_batch_size": lbs * n,
            "repeat": repeat,
            "system": f"replica-{name}",
        }
        write_run(
            runs_dir,
            config.make("resnet50" if image else "fourcastnet"),
            provenance,
            samples=False,
            settings=settings,
            time_s=noise * samples * epochs / rate / n,
            parts_W=parts_W,
            device_name=hardware,
            device_kind="gpu",
            devices=n,
            metrics=metrics,
            dataset_samples=samples,
            nodes=-(-n // 4),
            sockets=sockets,
            samples_trained=samples * epochs,
            optimizer_steps=steps,
            forward_backward_passes=steps,
            run_id=f"replica-{name}-n{n}-r{repeat}",
            system=f"replica-{name}",
        )


@pytest.fixture(scope="session")
def synthetic() -> SimpleNamespace:
    """The functions of this file, for tests that write their own records."""
    return SimpleNamespace(
        write_run=write_run,
        write_study=write_study,
        write_replica=write_replica,
        POWER_W=POWER_W,
    )


@pytest.fixture(scope="session")
def executed(tmp_path_factory):
    """The build folder after all analysis notebooks ran on given own runs; once for all
    processes of pytest-xdist.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def execute_once(
        name: str, write_runs: Callable[[Path], object] | None = None
    ) -> Path:
        folder = shared / name
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "numbers.json").exists():
                if write_runs:
                    write_runs(folder / "runs")
                for notebook in ANALYSIS:
                    execute(
                        notebook, runs_dir=str(folder / "runs"), build_dir=str(folder)
                    )
                numbers.colophon(folder)
                numbers.merge(folder)
        return folder

    return execute_once


@pytest.fixture
def synthetic_runs(tmp_path: Path) -> Path:
    return write_study(tmp_path / "runs")
