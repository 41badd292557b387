"""Synthetic run records: provenance is ``simulated``, and every value follows a formula that stands here."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from energynn import config

POWER_W = {0: 5.0, 1: 14.0, 2: 23.0, 4: 41.0}  # of the whole host with so many devices at work


PHASES = ("data_loading", "host_to_device", "forward", "backward", "optimizer", "evaluation", "idle")


def write_run(runs_dir: Path, configuration: config.RunConfig, provenance: str = "simulated", **changes) -> Path:
    """Write the files of one run as the launcher does; ``changes`` replace fields of the record, None removes one."""
    settings = config.to_dict(configuration)
    stage = settings.get("stage", "")
    devices, repeat = configuration.devices, configuration.repeat
    parts = (configuration.workload, stage, f"n{devices}", f"lbs{configuration.local_batch_size}", f"r{repeat}")
    name = "-".join((*filter(None, parts), config.digest(settings)[:8]))
    run_dir = runs_dir / configuration.system / name
    run_dir.mkdir(parents=True)
    training_time_s = 60.0 / devices**0.85 * (1 + 0.01 * repeat) * (1.6 if stage == "finetune" else 1)
    power_W = POWER_W[devices]
    energy_J = power_W * training_time_s
    metrics = {"top1_error": 0.30 + 0.02 * devices + 0.002 * repeat, "validation_loss": 1.1}
    if configuration.workload == "fourcastnet":
        metrics = {"z500_rmse_12h_m": 70.0 + 4 * devices, "z500_rmse_12h_persistence_m": 95.0}
        metrics |= {"z500_rmse_12h_m2_s2": metrics["z500_rmse_12h_m"] * 9.80665}
        if stage == "finetune":
            metrics |= {"z500_rmse_24h_m": 110.0 + 5 * devices, "z500_rmse_24h_persistence_m": 150.0}
    model = {"name": "linear in busy cores", "idle_W_per_core": 2.5, "full_W_per_core": 11.5, "cores": 2}
    sensor = {"id": "cpu_estimate", "component": "cpu", "device": "all", "kind": "busy", "provenance": provenance}
    sensor |= {"to_SI": 1.0, "wraps_at": None, "primary": True, "model": model, "notes": {}}
    record = {
        "schema": "energynn-record/2", "run_id": name, "workload": configuration.workload,
        "system": configuration.system, "status": "finished", "status_reason": "", "valid": True, "invalid_reasons": [],
        "started_at": "2026-01-01T00:00:00Z", "config": settings, "config_digest": config.digest(settings),
        "data_digest": "0", "device_kind": "cpu core", "device_name": "synthetic core", "devices": devices,
        "nodes": 1, "sockets": 1, "dataset_samples": 1000, "samples_trained": 1000, "samples_evaluated": 100,
        "optimizer_steps": 50, "forward_backward_passes": 50, "training_time_s": training_time_s,
        "device_hours_training": devices * training_time_s / 3600, "perun_time_s": training_time_s + 3.0,
        "device_hours_perun": devices * (training_time_s + 3.0) / 3600, "energy_cpu_J": energy_J,
        "energy_total_J": energy_J, "energy_cpu_provenance": provenance,
        "energy_total_provenance": provenance, "mean_power_cpu_W": power_W, "mean_power_total_W": power_W,
        "sampling_period_s": 0.1, "samples_in_training": int(training_time_s / 0.1),
        "coverage": 1.0, "sensors": [sensor], "metrics": metrics,
        "energy_phases": [
            {"rank": rank, "device": "cpu", "phase": phase, "time_s": training_time_s / 7,
             "energy_cpu_J": energy_J / 7 / devices} for rank in range(devices) for phase in PHASES
        ],
        "machine": {"hostname": "synthetic", "cpu": "none"},
    } | changes  # fmt: skip
    record = {field: value for field, value in record.items() if value is not None}
    (run_dir / "record.json").write_text(json.dumps(record))
    _write_samples(run_dir, sensor, training_time_s, power_W)
    return run_dir


def _write_samples(run_dir: Path, sensor: dict, training_time_s: float, power_W: float) -> None:
    """Idle for 2 s, busy during the training, idle for 2 s, with a dip every 5 s; samples every 0.1 s."""
    host, start_ns = "synthetic", 10**12
    events = [
        {"t_mono_ns": start_ns - 3 * 10**9, "event": "rank_start", "rank": 0, "host": host},
        {"t_mono_ns": start_ns, "event": "training_start", "rank": 0},
        {"t_mono_ns": start_ns + int(training_time_s * 1e9), "event": "training_end", "rank": 0},
    ]
    (run_dir / "events-rank0.jsonl").write_text("\n".join(json.dumps({"t_wall_ns": 0, **e}) for e in events) + "\n")
    lines = [json.dumps({"header": "energynn-samples/1", "host": host, "pid": 1, "period_s": 0.1, "sensors": [sensor]})]
    busy_core_s = 0.0
    for step in range(-20, int(training_time_s / 0.1) + 21):
        seconds = step * 0.1
        lines.append(json.dumps({"t": start_ns + int(seconds * 1e9), "w": 0, "v": [busy_core_s]}))
        if 0 <= seconds < training_time_s and seconds % 5 > 0.5:
            busy_core_s += 0.1 * (power_W - 5.0) / 9.0
    (run_dir / "samples-synthetic.jsonl").write_text("\n".join(lines) + "\n")


def write_study(runs_dir: Path, provenance: str = "simulated") -> Path:
    """ResNet50 and FourCastNet on 1 and 2 devices, constant LBS and GBS, three repeats of one configuration."""
    for repeat in range(3):
        write_run(runs_dir, config.make("resnet50", local_batch_size=16, repeat=repeat), provenance)
    write_run(runs_dir, config.make("resnet50", devices=2, local_batch_size=16), provenance)
    write_run(runs_dir, config.make("resnet50", devices=2, global_batch_size=16), provenance, training_time_s=45.0)
    for devices in (1, 2):
        write_run(runs_dir, config.make("fourcastnet", devices=devices), provenance)
        tuning = config.make("fourcastnet", devices=devices, stage="finetune", initial_run=f"pretrain-{devices}")
        write_run(runs_dir, tuning, provenance)
    return runs_dir


@pytest.fixture(scope="session")
def synthetic() -> SimpleNamespace:
    """The functions of this file, for tests that write their own records."""
    return SimpleNamespace(write_run=write_run, write_study=write_study, POWER_W=POWER_W)


@pytest.fixture
def synthetic_runs(tmp_path: Path) -> Path:
    return write_study(tmp_path / "runs")
