"""Studies as code: a function that returns the runs of an experiment; series are selections of runs."""

from __future__ import annotations

import inspect
import math
import os
import random
import re
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path

from energynn import config
from energynn.config import RunConfig, suggestion
from energynn.measure import machine
from energynn.reading import LARGEST_B, require_file

# The default study is shorter than the preset smoke, so that `make reproduce` takes ten minutes.
SHORT = {"resnet50": dict(image_size=32, training_samples=192), "fourcastnet": dict(patch_size=6)}


def smoke(system: str = "local") -> list[RunConfig]:
    """The default study: every path of the compendium once, on one and two devices, with real but small data.

    Figures: own points in the ResNet50 and FourCastNet figures. Hardware: any two cores. Command: `make reproduce`.
    Cost: about 5 minutes on two cores. Expected: ResNet50 with constant local batch size takes half as many steps
    on two devices, with constant global batch size as many; FourCastNet comes near persistence; all energies on a
    machine without sensors are estimates. It runs on CPU cores also where there are GPUs, so that it is the same
    study everywhere.
    """

    def make(workload: str, **fields) -> RunConfig:
        return config.make(workload, device="cpu", system=system, **SHORT[workload], **fields)

    runs = []
    for repeat in range(2):  # the same seed each time: their difference is the machine's noise
        runs.append(make("resnet50", devices=1, local_batch_size=16, repeat=repeat))
        runs.append(make("resnet50", devices=2, local_batch_size=16, repeat=repeat))  # constant LBS
    runs.append(make("resnet50", devices=2, global_batch_size=16))  # constant GBS
    for devices in (1, 2):
        pretraining = make("fourcastnet", devices=devices, local_batch_size=1)  # constant LBS
        runs.append(pretraining)
        tuning = dict(stage="finetune", initial_run=config.run_id(pretraining))
        runs.append(make("fourcastnet", devices=devices, local_batch_size=1, **tuning))
    runs.append(make("fourcastnet", devices=1, global_batch_size=2))  # constant GBS with the run on two devices
    return runs


def one_device(system: str = "local") -> list[RunConfig]:
    """What tells a forecast's parameters apart on one device: a run with few samples and a small batch.

    Figures: none. Hardware: any core. Command: `make reproduce`, after the default study. Cost: half a minute.
    Expected: with the default study's runs on one device this one tells the time of a sample and of an update, from
    which `energynn forecast held-out` forecasts the runs on two devices.
    """
    few_samples = SHORT["resnet50"] | dict(training_samples=96)
    return [config.make("resnet50", device="cpu", system=system, local_batch_size=4, **few_samples)]


def kick_the_tires(system: str = "local") -> list[RunConfig]:
    """Two runs of the default study, one of each workload on two devices, to see in minutes whether all is well.

    Figures: as of the default study. Hardware: any two cores. Command: `make kick-the-tires`. Cost: five minutes on two
    cores, with the paper. Expected: as of the default study.
    """
    chosen = [run for run in smoke(system) if run.devices == 2 and run.repeat == 0]
    return [chosen[0], next(run for run in chosen if run.workload == "fourcastnet")]


def loader() -> list[RunConfig]:
    """What loading costs: the paper's loader, then one choice changed at a time, the last no loader at all.

    Figures: none yet; phases, energies and power of the records tell (section 3.4 suspects data loading). Hardware: any
    two cores, with the photographs. Where ENERGYNN_IMAGENET says where ImageNet is: a GPU, with the paper's sizes and
    its smallest scaled subset. Command: `energynn study run loader`. Cost: about five minutes on two cores. Expected:
    on a GPU four workers on "pil" are the limit; on cores little changes, because a step takes far longer than loading
    its images. Without data staging the trainer loads by itself, as without workers, so that these two differ by the
    machine's noise only; on cores so do the first and pinned memory. Where ImageNet is no prepared store, "store"
    fails and says so.
    """
    if os.environ.get("ENERGYNN_IMAGENET"):
        make = partial(config.make, "resnet50", preset="paper", epochs=2, training_samples=5004, validation_samples=195)
    else:
        make = partial(config.make, "resnet50", device="cpu", image_size=32, loader_workers=2)
    choices = [
        dict(),
        dict(loader_workers=0),
        dict(data_staging=False),
        dict(persistent_workers=True),
        dict(pinned_memory=True),
        dict(uint8_to_device=True),
    ]
    choices += [dict(image_loading=loading) for loading in config.IMAGE_LOADING if loading != "pil"]
    return [make(**choice) for choice in choices]


# What one H100 is expected to train in a second, by recipe and local batch size: it makes runs of about GPU_RUN_S.
GPU_RUN_S = 24
IMAGES_PER_S = {
    "paper": {32: 1000, 64: 1150, 96: 1200, 128: 1250, 256: 1300, 512: 1300},
    "fast": {32: 2300, 64: 2400, 96: 2700, 128: 2900, 256: 3200, 512: 3300},
}
ALONE_IMAGES_PER_S = {"precision": 2200, "channels_last": 1800, "fused_optimizer": 1300}  # one choice of fast, LBS 256
STATES_PER_S = {"paper": 6.5, "fast": 20}


def _images(preset: str, size: int, share: float = 1.0, steps: int = 1, **fields) -> dict:
    """ResNet50 on one batch that stays on the device, at a share of its rate; ``steps`` local batches make an update.

    A repeated batch diverges at the recipe's warm-up rate of 0.1. Samples are whole batches: others would be tuned
    within the run.
    """
    rate, batch = share * IMAGES_PER_S[preset][size], size * steps
    sizes = dict(local_batch_size=size, accumulation_steps=steps, epochs=1, validation_samples=size)
    sizes |= dict(training_samples=round(rate * GPU_RUN_S / batch) * batch)
    pace = dict(step_period_s=round(batch / rate, 4)) if share < 1 else {}
    about = dict(workload="resnet50", preset=preset, dataset="photographs", image_loading="device")
    return about | sizes | pace | dict(warmup_start=1e-3, evaluate_training_set=False) | fields


def _alone(field: str, value) -> dict:
    """The paper's recipe with one choice of the preset ``fast``."""
    samples = round(ALONE_IMAGES_PER_S[field] * GPU_RUN_S / 256) * 256
    return _images("paper", 256, training_samples=samples, **{field: value})


def _loaded(preset: str, workers: int, images_per_s: float) -> dict:
    """ResNet50 on JPEG files as large as ImageNet's, at the rate that the loader is expected to give."""
    of_files = dict(dataset="photographs_large", image_loading="pil" if preset == "paper" else "fast")
    samples = round(images_per_s * GPU_RUN_S / 128) * 128
    return _images(preset, 128, **of_files, loader_workers=workers, training_samples=samples)


def _states(preset: str, size: int, share: float = 1.0, seconds: float = GPU_RUN_S) -> dict:
    """FourCastNet at full size on one batch of random states that stays on the device, at a share of its rate."""
    rate = share * STATES_PER_S[preset]
    pace = dict(step_period_s=round(size / rate, 3)) if share < 1 else {}
    about = dict(workload="fourcastnet", preset=preset, dataset="synthetic", states_on_device=True, save_weights=False)
    return about | dict(local_batch_size=size, epochs=math.ceil(rate * seconds / config.SYNTHETIC_STATES)) | pace


# Repeated at the beginning and after equal parts: what drifts shows in it, also where the last runs are left out.
GPU_ANCHOR = _images("paper", 256)
GPU_POINTS = [
    *(_images("paper", size) for size in (32, 128)),
    _images("fast", 256),
    *(_images("paper", size, 0.3) for size in (32, 256)),
    *(_states(preset, size) for preset in ("paper", "fast") for size in (1, 4)),
    _loaded("paper", 4, 1000),
]
MORE_GPU_POINTS = [
    *(_images("paper", size) for size in (64, 512)),
    *(_images("fast", size) for size in (32, 64, 128, 512)),
    *(_images("paper", size, 0.6) for size in (32, 96, 256)),
    _images("paper", 96, 0.3),
    _images("paper", 256, sampling_period_s=0.2),
    *(_alone(field, value) for field, value in config.FAST_ALONE.items()),
    _loaded("paper", 12, 1300),
    _loaded("fast", 12, 2900),
    *(_states(preset, size) for preset in ("paper", "fast") for size in (2, 8)),
    *(_states("paper", size, 0.5) for size in (1, 4)),
]
GPU_SEED = 735  # with it neither samples nor updates go with the time, also in a loan's part of the grid
# Made first: no other point tells what they tell, and two of them take longer than any other.
FIRST_GPU_POINTS = [
    _states("paper", 1, seconds=65),
    _images("paper", 32, steps=8),
    _images("fast", 256, compile=True),
]
# Made last, because a loan of half an hour leaves some of them out: no statement of the ledger and no plane needs them.
LAST_GPU_POINTS = [
    *(_images("paper", size) for size in (64, 512)),
    *(_images("fast", size) for size in (32, 64, 128, 512)),
    *(_images("paper", 96, share) for share in (0.3, 0.6)),
    *(_states("fast", size) for size in (1, 2, 8)),
    _states("paper", 1),  # the first point is as large
]


def gpu(dry_run: bool = False) -> list[RunConfig]:
    """What one GPU needs by local batch size, update rate, recipe and loader, in a seeded random order.

    ResNet50 on images that stay on the device, also at a part of its rate, and through the loader; FourCastNet at full
    size on random states. Figures: notebooks/45_one_gpu. Hardware: one NVIDIA GPU with 80 GB. Command:
    `make gpu-study`. Cost: nine minutes, about 0.07 kWh. Expected: energy per sample falls with the local batch size,
    and with the fast recipe much further; the paper's loader keeps the GPU waiting. ``dry_run``: the same points in
    small on CPU cores.
    """
    return _on_this_gpu([], GPU_POINTS, 2, dry_run)


def gpu_grid(dry_run: bool = False) -> list[RunConfig]:
    """The study gpu with more points: what samples and what updates add to the power, and each choice of ``fast``.

    Three local batch sizes at three rates tell samples from updates, which an LBS sweep alone cannot: a step takes
    t0 + t1 LBS, so that samples and updates an hour lie on a line. Figures: as of gpu. Hardware: one NVIDIA GPU with
    80 GB. Command: `make gpu-study GPU_MINUTES=32`. Cost: half an hour, about 0.25 kWh. Expected: as of gpu; power
    rises with samples an hour more than with updates an hour; the anchor's repeats differ by less than 2 %.
    """
    return _on_this_gpu(FIRST_GPU_POINTS, GPU_POINTS + MORE_GPU_POINTS, 3, dry_run)


def _on_this_gpu(first: list[dict], others: list[dict], anchors: int, dry_run: bool) -> list[RunConfig]:
    """Points in a seeded random order between repeats of the anchor; their system has the name of this GPU."""
    shuffled = random.Random(GPU_SEED).sample(others, len(others))
    order = first + sorted(shuffled, key=LAST_GPU_POINTS.__contains__)
    repeats = [GPU_ANCHOR | dict(repeat=repeat) for repeat in range(anchors)]
    apart = len(order) // anchors
    for number, anchor in enumerate(repeats):
        order.insert(number * (apart + 1), anchor)
    found = machine.gpus()
    name = re.sub("[^a-z0-9]+", "-", found[0]["name"].lower().removeprefix("nvidia ")).strip("-") if found else "study"
    shared = dict(system=f"gpu-{name}", device="gpu", sampling_period_s=0.02, idle_ready_s=5.0)
    return [config.make(**shared | (_in_small(point) if dry_run else point)) for point in order]


def _in_small(point: dict) -> dict:
    """A point as CPU cores can make it in seconds."""
    small = point | dict(device="cpu", loader_workers=point.get("loader_workers", 0) // 4, idle_ready_s=0.5)
    if "step_period_s" in point:
        small["step_period_s"] /= 20
    if point["workload"] == "fourcastnet":
        small |= dict(dataset="era5_ensemble", patch_size=6, embed_dim=32, depth=1, num_blocks=4)
        return small | dict(epochs=30 * point["epochs"])
    size = 1 + point["local_batch_size"] // 32  # batch norm needs two images
    return small | dict(local_batch_size=size, image_size=32, training_samples=16 * size, validation_samples=size)


# Epochs of the study large-batch by global batch size: four epochs, and as many as make 60 updates of 960 images.
LARGE_BATCH_EPOCHS = {16: (1, 4), 48: (3, 4), 96: (4, 6), 240: (4, 15)}


def large_batch() -> list[RunConfig]:
    """Top-1 error against the global batch size, on one device by accumulation: LBS stays 16, for batch norm too.

    At fixed epochs a larger batch means fewer updates, as in the paper's series with constant local batch size; at
    fixed updates it means more samples. Three seeds each. Data: the embedded photographs at 32 pixels, an easy task.
    The learning rate is a fifth of the recipe's, with which these runs without warm-up diverge from GBS 96 on.
    Figures: notebooks/35_large_batch. Hardware: any core. Command: `energynn study run large-batch`.
    Cost: about an hour. Expected: at fixed epochs the error rises with the global batch size, at fixed updates it does
    not. Records of one machine are committed under runs/large-batch/.
    """
    few_images = dict(image_size=32, training_samples=960, validation_samples=250, evaluate_training_set=False)
    make = partial(config.make, "resnet50", system="large-batch", device="cpu", sampling_period_s=0.1, **few_images)
    runs = []
    for seed in range(3):
        for gbs, choices in LARGE_BATCH_EPOCHS.items():
            for epochs in choices:
                sizes = dict(local_batch_size=16, global_batch_size=gbs)
                runs.append(make(**sizes, epochs=epochs, seed=seed, learning_rate=0.02))
    return runs


STUDIES = {"smoke": smoke, "one-device": one_device, "kick-the-tires": kick_the_tires, "loader": loader}
STUDIES |= {"gpu": gpu, "gpu-grid": gpu_grid, "large-batch": large_batch}


# ----------------------------------------------------------------------------------------------- the paper's own series
# GPU hours and kWh in "Cost" are of the whole series: published where the paper gives them, the rest scaled from its
# nearest published run (cluster/costs.py). Hardware is where the paper ran them; `energynn submit` runs them anywhere.

IMAGES, VALIDATION_IMAGES = config.IMAGENET_IMAGES["train"], config.IMAGENET_IMAGES["val"]
SMALL, LARGE, EVERY = (1, 2, 4, 8, 16), (32, 64, 128, 256), (1, 2, 4, 8, 16, 32, 64, 128, 256)


def _resnet50(system: str, devices: tuple[int, ...], n_max: int = 0, **batch: int) -> list[RunConfig]:
    """Five repeats on each number n of GPUs, on n / n_max of the images; without ``n_max`` on all of them."""
    runs = []
    for n in devices:
        images = {}  # all of them
        if n < n_max:
            images = dict(training_samples=IMAGES * n // n_max, validation_samples=VALIDATION_IMAGES * n // n_max)
        make = partial(config.make, "resnet50", preset="paper", device="gpu", system=system, devices=n)
        runs += [make(repeat=repeat, **batch, **images) for repeat in range(5)]
    return runs


def _fourcastnet(system: str, devices: tuple[int, ...], **fields) -> list[RunConfig]:
    make = partial(config.make, "fourcastnet", preset="paper", device="gpu", system=system)
    return [make(devices=n, **fields) for n in devices]


def r1(system: str = "local") -> list[RunConfig]:
    """ResNet50 on all of ImageNet-2012, constant local batch size 256, on 1 to 256 GPUs.

    Figures: 2, 6. Hardware: A100, four to a node. Command: `energynn submit R1 --system horeka-a100`.
    Cost: 4,577 GPU hours, 1,398 kWh (5 of 45 runs published).
    Expected: near-optimal speed-up, slightly less beyond 32 GPUs; the least energy at four GPUs, because one and
    two keep both CPU sockets of a node; top-1 error grows beyond GBS 8192.
    """
    return _resnet50(system, EVERY, local_batch_size=256)


def r2(system: str = "local") -> list[RunConfig]:
    """ResNet50 on all of ImageNet-2012, constant global batch size 256, on 1 to 16 GPUs; n=1 is R1's.

    Figures: 2, 6. Hardware: A100. Command: `energynn submit R2 --system horeka-a100`.
    Cost: 2,308 GPU hours, 810 kWh (5 of 25 runs published).
    Expected: the error stays; energy is least at four GPUs and grows with GPU hours from there.
    """
    return _resnet50(system, SMALL, global_batch_size=256)


def r3(system: str = "local") -> list[RunConfig]:
    """ResNet50 on all of ImageNet-2012, constant global batch size 8192, on 32 to 256 GPUs; n=32 is R1's.

    Figures: 2, 6. Hardware: A100. Command: `energynn submit R3 --system horeka-a100`.
    Cost: 2,224 GPU hours, 623 kWh (5 of 20 runs published).
    Expected: the error stays, a little above R2's; near-optimal speed-up.
    """
    return _resnet50(system, LARGE, global_batch_size=8192)


def r4(system: str = "local") -> list[RunConfig]:
    """ResNet50, 5,004 images per GPU, constant local batch size 256, on 1 to 256 GPUs; n=256 is R1's.

    Figures: 3, 6. Hardware: A100. Command: `energynn submit R4 --system horeka-a100`.
    Cost: 1,138 GPU hours, 303 kWh (all published).
    Expected: constant training time, energy proportional to the images, about 0.0235 Wh for each from four GPUs on.
    """
    return _resnet50(system, EVERY, n_max=256, local_batch_size=256)


def r5(system: str = "local") -> list[RunConfig]:
    """ResNet50, 80,072 images per GPU, constant global batch size 256, on 1 to 16 GPUs; n=16 is R2's.

    Figures: 3, 6. Hardware: A100. Command: `energynn submit R5 --system horeka-a100`.
    Cost: 995 GPU hours, 308 kWh (all published).
    Expected: 0.0221 to 0.0260 Wh per image, from four GPUs on.
    """
    return _resnet50(system, SMALL, n_max=16, global_batch_size=256)


def r6(system: str = "local") -> list[RunConfig]:
    """ResNet50, 5,004 images per GPU, constant global batch size 8192, on 32 to 256 GPUs; n=32 is R4's, n=256 R3's.

    Figures: 3, 6. Hardware: A100. Command: `energynn submit R6 --system horeka-a100`.
    Cost: 1,049 GPU hours, 300 kWh (all published).
    Expected: 0.0238 to 0.0260 Wh per image.
    """
    return _resnet50(system, LARGE, n_max=256, global_batch_size=8192)


def f1(system: str = "local") -> list[RunConfig]:
    """FourCastNet pre-training on ERA5, one sample per GPU, on 4 to 256 GPUs.

    Figures: 4, 7. Hardware: A100. Command: `energynn submit F1 --system horeka-a100`.
    Cost: 6,089 GPU hours, 1,195 kWh (3 of 7 runs published; more beyond 64 GPUs, where the paper prints no value).
    Expected: the speed-up leaves the ideal after quadrupling the GPUs; the Z500 RMSE rises beyond GBS 64 above all.
    """
    return _fourcastnet(system, (4, 8, 16, 32, 64, 128, 256), local_batch_size=1)


def f2(system: str = "local") -> list[RunConfig]:
    """FourCastNet fine-tuning on two autoregressive steps, from the weights of the F1 run on as many GPUs, 16 to 256.

    Figures: 4, 7. Hardware: A100. Command: `energynn submit F2 --system horeka-a100`.
    Cost: 5,880 GPU hours, 1,132 kWh (0 of 5 runs published: two steps for each sample of pre-training).
    Expected: more energy than F1, and large-batch effects beyond GBS 64.
    """
    runs = []
    for before in f1(system)[2:]:
        tuning = dict(stage="finetune", initial_run=config.run_id(before))
        runs += _fourcastnet(system, (before.devices,), local_batch_size=1, **tuning)
    return runs


def f3(system: str = "local") -> list[RunConfig]:
    """FourCastNet pre-training, constant global batch size 64, on 16 to 64 GPUs (a range inferred); n=64 is F1's.

    Figures: 4, 7. Hardware: A100. Command: `energynn submit F3 --system horeka-a100`.
    Cost: 2,594 GPU hours, 507 kWh (2 of 3 runs published).
    Expected: 651 to 1,034 GPU hours and 136 to 195 kWh, at a steady RMSE.
    """
    return _fourcastnet(system, (16, 32, 64), global_batch_size=64)


def f4(system: str = "local") -> list[RunConfig]:
    """FourCastNet pre-training, constant global batch size 16, on 4 to 16 GPUs (a range inferred).

    Figures: 4, 7. Hardware: H100. Command: `energynn submit F4 --system horeka-h100`.
    Cost: 1,359 GPU hours, 377 kWh (2 of 3 runs published).
    Expected: GPU power rises with the number of GPUs.
    """
    return _fourcastnet(system, (4, 8, 16), global_batch_size=16)


def f5(system: str = "local") -> list[RunConfig]:
    """FourCastNet pre-training, constant global batch size 32, on 8 to 32 GPUs (a range inferred).

    Figures: 4, 7. Hardware: H100. Command: `energynn submit F5 --system horeka-h100`.
    Cost: 1,601 GPU hours, 435 kWh (1 of 3 runs published).
    Expected: GPU power falls with the number of GPUs.
    """
    return _fourcastnet(system, (8, 16, 32), global_batch_size=32)


def t1(system: str = "local") -> list[RunConfig]:
    """FourCastNet pre-training as in Table 1: to be made on A100 and on H100; parts of F1, or of F4 and F5.

    Table: 1. Hardware: A100 and H100. Command: `energynn submit T1 --system horeka-a100`, then -h100.
    Cost: 2,162 GPU hours, 441 kWh on A100; 1,601 GPU hours, 435 kWh on H100 (all published).
    Expected: H100 needs 25 to 30 % less time, and energy within 5 %.
    """
    return _fourcastnet(system, (4,), local_batch_size=4) + _fourcastnet(system, (16, 32), local_batch_size=1)


def fluctuation(system: str = "local") -> list[RunConfig]:
    """FourCastNet pre-training, 20 epochs on 64 GPUs three times over: how much repeats differ.

    Text: section 3.3.1. Hardware: A100. Command: `energynn submit fluctuation --system horeka-a100`.
    Cost: 840 GPU hours, 156 kWh (all published).
    Expected: a spread of about 4 %.
    """
    make = partial(_fourcastnet, system, (64,), local_batch_size=1, epochs=20)
    return make(repeat=0) + make(repeat=1) + make(repeat=2)


PAPER = {"R1": r1, "R2": r2, "R3": r3, "R4": r4, "R5": r5, "R6": r6}
PAPER |= {"F1": f1, "F2": f2, "F3": f3, "F4": f4, "F5": f5, "T1": t1, "fluctuation": fluctuation}
# What the paper ran on each of HoreKa's partitions; a name may stand for several studies.
GROUPS = {"paper-a100": [name for name in PAPER if name not in ("F4", "F5")], "paper-h100": ["F4", "F5", "T1"]}
STUDIES |= PAPER


def find(names: list[str], system: str = "local") -> dict[str, list[RunConfig]]:
    """The runs of each study on a system, by the study's name.

    A name may be one of GROUPS, or a Python file of one's own, which defines ``study(system)`` and returns its runs.
    Raises ValueError with the remedy for an unknown name, or a file whose study cannot be made.
    """
    runs_by_study = {}
    for name in names:
        for study in GROUPS.get(name, [name]):
            runs_by_study[study] = _runs(study, system)
    return runs_by_study


def _runs(name: str, system: str) -> list[RunConfig]:
    is_own = name.endswith(".py")
    study = _own_study(name) if is_own else STUDIES.get(name)
    if study is None:
        known = ", ".join([*STUDIES, *GROUPS])
        near = suggestion(name, [*STUDIES, *GROUPS])
        raise ValueError(f"study: {name!r} is not known{near}; choose one of {known}, or a file of your own (.py)")
    try:
        if "system" in inspect.signature(study).parameters:
            runs = list(study(system))
        else:
            runs = list(study())
            if system != "local":
                runs = [config.replace(run, system=system) for run in runs]
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and not is_own:
            raise
        raise ValueError(f"study: {name}: {type(error).__name__}: {error}") from error
    faults = [run for run in runs if not isinstance(run, RunConfig)]
    if faults or not runs:
        raise ValueError(f"study: {name}: must return runs of config.make(..., system=system), got {faults[:1]}")
    return runs


def _own_study(path: str) -> Callable:
    try:
        require_file(Path(path), LARGEST_B)
        study = runpy.run_path(path).get("study")
    except FileNotFoundError:
        raise ValueError(f"study: there is no file {path}") from None
    except (Exception, SystemExit) as error:
        raise ValueError(f"study: {path} cannot be read: {type(error).__name__}: {error}") from error
    if not callable(study):
        raise ValueError(f"study: {path} defines no study; write `def study(system): return [...]` in it")
    return study
