"""Studies as code: a function that returns the runs of an experiment; series are selections of runs."""

from __future__ import annotations

import os
from functools import partial

from energynn import config
from energynn.config import RunConfig


def smoke() -> list[RunConfig]:
    """The default study: every path of the compendium once, on one and two devices, with real but small data.

    Figures: own points in the ResNet50 and FourCastNet figures. Hardware: any two cores. Command: `make reproduce`.
    Cost: about 8 minutes on two cores. Expected: ResNet50 with constant local batch size takes half as many steps
    on two devices, with constant global batch size as many; FourCastNet comes near persistence; all energies on a
    machine without sensors are estimates. It runs on CPU cores also where there are GPUs, so that it is the same
    study everywhere.
    """
    make = partial(config.make, device="cpu")
    runs = []
    for repeat in range(3):  # the same seed each time: their spread is the machine's noise
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


def kick_the_tires() -> list[RunConfig]:
    """Two runs of the default study, one of each workload on two devices, to see in minutes whether all is well."""
    chosen = [run for run in smoke() if run.devices == 2 and run.repeat == 0]
    return [chosen[0], next(run for run in chosen if run.workload == "fourcastnet")]


def loader() -> list[RunConfig]:
    """What loading costs: the paper's loader, then one choice changed at a time, the last no loader at all.

    Figures: none yet; phases, energies and power of the records tell (section 3.4 suspects data loading). Hardware: any
    two cores, with the photographs; where ENERGYNN_IMAGENET says where ImageNet is, a GPU, the paper's sizes and its
    smallest scaled subset. Command: `energynn study run loader`. Cost: about five minutes on two cores. Expected: on a
    GPU four workers on "pil" are the limit; on cores, where a step takes far longer than its images, little changes.
    Without data staging the trainer loads by itself, as without workers: these two differ by the machine's noise, and
    on cores so do the first and pinned memory. Where ImageNet is no prepared store, "store" fails and says so.
    """
    if os.environ.get("ENERGYNN_IMAGENET"):
        make = partial(config.make, preset="paper", epochs=2, training_samples=5004, validation_samples=195)
    else:
        make = partial(config.make, device="cpu", image_size=32, loader_workers=2)
    choices = [dict(loader_workers=0), dict(data_staging=False), dict(persistent_workers=True),
               dict(pinned_memory=True), dict(uint8_to_device=True)]  # fmt: skip
    choices += [dict(image_loading=loading) for loading in config.IMAGE_LOADING if loading != "pil"]
    return [make("resnet50"), *(make("resnet50", **choice) for choice in choices)]


def gpu(dry_run: bool = False) -> list[RunConfig]:
    """What one GPU needs by local batch size, with the recipe of the paper and with a fast one.

    ResNet50 on images that stay on the device, and through the loader (the embedded photographs); FourCastNet at full
    size on random states. Hardware: one NVIDIA GPU with 40 GB. Command: `make gpu-study`. Cost: nine minutes at most,
    about 0.05 kWh. Expected: energy per sample falls with the local batch size, and on an H200 much more by the fast
    recipe; the paper's loader keeps the GPU waiting. ``dry_run``: the same points in small on CPU cores.
    """
    here = dict(sampling_period_s=0.02, system="gpu-study")
    tiny = dict(device="cpu", loader_workers=0) if dry_run else dict(device="gpu")
    images = (
        dict(image_size=32, training_samples=60, validation_samples=10) if dry_run else dict(validation_samples=250)
    )
    states = dict(dataset="synthetic")
    if dry_run:
        states = dict(dataset="era5_ensemble", patch_size=6, embed_dim=32, depth=1, num_blocks=4)
    runs = []
    for faster, preset in enumerate(("paper", "fast")):
        make = partial(config.make, preset=preset, **here, **tiny)
        for lbs in (4,) if dry_run else (128, 32, 512):
            samples = {} if dry_run else dict(training_samples=24576 if faster else 8192)
            runs.append(make("resnet50", dataset="photographs", image_loading="device", local_batch_size=lbs, epochs=1,
                             **images | samples))  # fmt: skip
        for lbs in (4,) if dry_run else (1, 2, 4):
            epochs = 60 if dry_run else 4 if faster else 1
            runs.append(make("fourcastnet", local_batch_size=lbs, epochs=epochs, save_weights=False, **states))
        for lbs in (4,) if dry_run else (256, 64):
            epochs = 1 if dry_run else 10 if faster else 6
            runs.append(make("resnet50", dataset="photographs", local_batch_size=lbs, epochs=epochs, **images))
    return runs


def large_batch() -> list[RunConfig]:
    """Top-1 error against the global batch size, on one device by accumulation: LBS stays 16, for batch norm too.

    At fixed epochs a larger batch means fewer updates, as in the paper's series with constant local batch size; at
    fixed updates it means more samples. Three seeds each. Data: the embedded photographs at 32 pixels, an easy task.
    Hardware: any core. Cost: about an hour. Expected: at fixed epochs the error rises with the global batch
    size, at fixed updates it does not. Records of one machine are committed under runs/large-batch/.
    """
    make = partial(config.make, "resnet50", system="large-batch", device="cpu", image_size=32,
                   training_samples=960, validation_samples=250, evaluate_training_set=False, local_batch_size=16,
                   learning_rate=0.02, sampling_period_s=0.1)  # fmt: skip
    steps_of_epoch = {16: 60, 48: 20, 96: 10, 240: 4}
    epochs = [(gbs, {4, 60 // steps}) for gbs, steps in steps_of_epoch.items()]  # four epochs, and sixty updates
    return [make(global_batch_size=gbs, epochs=count, seed=seed)
            for seed in range(3) for gbs, counts in epochs for count in sorted(counts)]  # fmt: skip


STUDIES = {"smoke": smoke, "kick-the-tires": kick_the_tires, "loader": loader, "gpu": gpu, "large-batch": large_batch}
