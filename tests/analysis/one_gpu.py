"""Records of examples/gpu_grid.py by an imagined GPU: every value follows a formula that stands
here.
"""

import math
import runpy
from pathlib import Path

import numpy as np

from energynn.experiment import config
from energynn.experiment.config import SYNTHETIC_STATES, RunConfig
from energynn.host.files import REPOSITORY
from tests.analysis.conftest import write_run

gpu_grid = runpy.run_path(str(REPOSITORY / "examples" / "gpu_grid.py"))["study"]

# shares of a pass
PHASES = {"forward": 0.4, "backward": 0.5, "optimizer": 0.1}
# of a pass, where a choice is not paper's
SPEEDS = {"channels_last": 1.3, "precision": 1.6, "fused_optimizer": 1.05}
LOADED_PER_S = {"pil-4": 480.0, "pil-12": 1250.0, "fast-12": 2800.0}


# Power is idle + SAMPLE_J samples/s + UPDATE_J passes/s + drift + noise; a pass takes t0 + t1 LBS.
IDLE_W, SAMPLE_J, UPDATE_J = 120.0, 0.1, 2.0
DRIFT_W = 5.0  # over the whole study
NOISE = 0.01


def speed(run: RunConfig) -> float:
    chosen = [name for name in SPEEDS if getattr(run, name, 0) in (True, "bfloat16")]
    return math.prod(SPEEDS[name] for name in chosen)


def steps_of(run: RunConfig) -> int:
    """Steps of an epoch."""
    samples = getattr(run, "training_samples", 0) or SYNTHETIC_STATES
    return samples // run.global_batch_size


def passes_s(run: RunConfig) -> float:
    """Seconds of a step in which the GPU works."""
    t0_s, t1_s = (0.008, 0.0007) if run.workload == "resnet50" else (0.02, 0.15)
    pass_s = (t0_s + t1_s * run.local_batch_size) / speed(run)
    return run.accumulation_steps * pass_s


def step_s(run: RunConfig) -> float:
    """Seconds of a step: its passes, or as long as its pace or its loader says."""
    loading_s = 0.0
    if not run.stays_on_device:
        loader = f"{run.image_loading}-{run.loader_workers}"
        loading_s = run.global_batch_size / LOADED_PER_S[loader]
    return max(passes_s(run), loading_s, run.step_period_s)


def power_W(run: RunConfig, place: float) -> float:
    """Without noise; a state of FourCastNet costs 200 times as much as an image."""
    sample_J = SAMPLE_J * (1 if run.workload == "resnet50" else 200)
    of_samples_W = sample_J * run.global_batch_size / step_s(run) / speed(run)
    of_passes_W = UPDATE_J * run.accumulation_steps / step_s(run)
    return IDLE_W + of_samples_W + of_passes_W + DRIFT_W * place


def write_grid(
    runs_dir: Path, runs: list[RunConfig], provenance: str = "measured"
) -> None:
    """Records of the runs as that GPU would make them, its energy measured and the CPU's
    estimated.
    """
    random = np.random.default_rng(0)
    for number, run in enumerate(runs):
        place = number / len(runs)
        watts = power_W(run, place) * (1 + random.normal(0, NOISE))
        steps = max(1, run.epochs * steps_of(run))
        time_s = steps * step_s(run)
        at_work = passes_s(run) / step_s(run)
        shares = {phase: at_work * share for phase, share in PHASES.items()}
        shares["idle" if run.stays_on_device else "data_loading"] = 1 - at_work
        phases = []
        for phase, share in shares.items():
            part = {"time_s": share * time_s, "energy_gpu_J": share * watts * time_s}
            phases.append({"rank": 0, "device": "gpu:0", "phase": phase, **part})
        write_run(
            runs_dir,
            run,
            provenance,
            time_s=time_s,
            parts_W={"gpu": watts, "cpu": 150.0},
            samples=False,
            energy_cpu_provenance="estimated",
            energy_total_provenance="estimated",
            device_kind="gpu",
            device_name="NVIDIA H100 80GB HBM3",
            samples_trained=steps * run.global_batch_size,
            optimizer_steps=steps,
            forward_backward_passes=steps * run.accumulation_steps,
            dataset_samples=steps_of(run) * run.global_batch_size,
            sampling_period_s=run.sampling_period_s,
            started_at=f"2026-01-01T00:{number:02d}:00Z",
            energy_phases=phases,
        )


def write_minute(runs_dir: Path, kind: str, watts: float) -> None:
    """A minute of the same GPU."""
    run = config.make("gpu_minutes", kind=kind, device="gpu", system="gpu-study")
    parts_W = {"gpu": watts}
    write_run(
        runs_dir, run, "measured", parts_W=parts_W, samples=False, device_kind="gpu"
    )
