"""The complete description of one training run: frozen, typed, hashable, stored with the result."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import re
import typing
from dataclasses import dataclass, fields
from pathlib import Path

from energynn.files import DATA_MANIFESTS


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every workload needs to know; one device is one GPU, or one CPU core where there is no GPU."""

    workload: str
    preset: str = "smoke"  # where the values came from that were not given: PRESETS, below
    dataset: str
    system: str = "local"
    device: str = "auto"  # "gpu", "cpu", or a GPU where there is one
    devices: int = 1
    local_batch_size: int
    global_batch_size: int
    # Local batches whose gradients are added up before a step of the optimizer. Each also moves batch norm's running
    # statistics, which are for evaluation only; on several devices only those of rank 0 do.
    accumulation_steps: int = 1
    epochs: int
    seed: int = 0
    repeat: int = 0  # same seed, run again: hardware noise; another seed is another configuration
    learning_rate: float
    loader_workers: int = 0
    data_staging: bool = True  # workers prefetch, as in all of the study's experiments (its code's README); off: none
    synchronous_phases: bool = False  # wait for the GPU before and after each phase: exact phases, slower training
    # Of the study's code: float32, no pinned memory, three loader iterators that start anew each epoch, cuDNN
    # deterministic and its benchmark off. FourCastNet's: published code, or inferred; see PRESETS.
    # "float32" is torch's: on GPUs since the A100 cuDNN's convolutions then use TF32, the study's, too, which changes
    # nothing of that. "bfloat16": forward passes in autocast; weights and optimizer stay float32.
    precision: str = "float32"
    fused_optimizer: bool = False  # one kernel updates all parameters
    compile: bool = False  # torch.compile
    deterministic: bool = True  # off: the fastest algorithms that cuDNN's benchmark finds
    pinned_memory: bool = False  # of a GPU: batches in page-locked memory, copied while it computes
    persistent_workers: bool = False  # the loader's workers live on from epoch to epoch
    threads_per_device: int = 1
    sampling_period_s: float = 0.04  # our own samples
    idle_baseline_s: float = 1.0  # nothing is computed for so long before and after, to measure idle power
    perun_sampling_period_s: float = 0.25  # perun's; the paper used 1 s
    collective_timeout_s: float = 120.0
    save_weights: bool = False
    checkpoint_period_s: float = 600.0  # between two checkpoints; 0: only when asked to stop


@dataclass(frozen=True, kw_only=True)
class ResNet50Config(RunConfig):
    """ResNet50 on images; recipe constants as the paper states them (section 3.2.1)."""

    workload: str = "resnet50"
    dataset: str = "photographs"
    image_size: int
    training_samples: int = 0  # a nested, class-balanced part of the data set; 0 is all of it
    validation_samples: int = 0
    image_loading: str = "pil"  # IMAGE_LOADING, below
    uint8_to_device: bool = False  # pixels cross as bytes, and the device normalizes them, not the loader
    channels_last: bool = False  # memory format of images and weights (study's code: torch's default)
    validation_crop: str = "random"  # study's code: as in training; "center": the usual one, of 0.875
    on_bad_image: str = "fail"  # or "skip": the next image stands in for a broken one, and the run counts it
    crop_scale_min: float = 0.5  # the study's crops cover 0.5 to 1 of the image, in validation too
    momentum: float = 0.9
    weight_decay: float = 1e-4
    weight_decay_on_all: bool = True  # on batch norm and biases, too (study's code); off: on matrices only
    warmup_epochs: int = 5
    warmup_start: float = 0.1  # learning rate at the beginning, whatever the batch size (study's code)
    warmup_per_epoch: bool = True  # study's code; off: the learning rate rises with every step
    learning_rate: float = 0.1  # at GBS 256; scaled linearly with the global batch size
    plateau_factor: float = 0.5
    plateau_patience: int = 5
    evaluate_training_set: bool = True  # the study evaluates it after every epoch
    top5_per_sample: bool = True  # study's code: a Python loop over the samples; off: a batch at once
    drop_last: bool = True  # what the ranks cannot share evenly is left out (study's code); off: some count twice


@dataclass(frozen=True, kw_only=True)
class FourCastNetConfig(RunConfig):
    """FourCastNet on ERA5 states; pre-training predicts one step, fine-tuning two autoregressive steps."""

    workload: str = "fourcastnet"
    dataset: str = "era5_ensemble"  # or "era5": the store of `energynn era5 prepare`; "synthetic": random, full size
    training_years: str = "1979-2015"  # these three are of "era5" (section 3.3.1)
    validation_years: str = "2016-2017"
    test_years: str = "2019"
    stage: str = "pretrain"
    initial_run: str = ""  # fine-tuning: run_id of the pre-training whose weights it starts from
    learning_rate: float = 5e-4
    patch_size: int
    embed_dim: int
    depth: int
    num_blocks: int = 8
    mlp_ratio: float = 4.0
    sparsity_threshold: float = 0.01
    hard_thresholding_fraction: float = 1.0
    filter_modes: str = "published"  # "zonal" corrects which modes pass
    activation_checkpointing: bool = False  # less memory for one more forward pass


CONFIGS: dict[str, type[RunConfig]] = {"resnet50": ResNet50Config, "fourcastnet": FourCastNetConfig}

# "paper" is the study's recipe as it ran (sections 3.2.1 and 3.3.1 and its code), the object of study: never faster.
# ResNet50's defaults above belong to it. FourCastNet's float32 and unfused Adam are inferred from the paper's silence;
# its workers and pinned memory are the published code's (AFNO.yaml, data_loader_multifiles.py), so inferred as well.
PAPER = {
    "resnet50": dict(
        dataset="imagenet", local_batch_size=256, epochs=100, image_size=224, loader_workers=4,
        perun_sampling_period_s=1.0,
    ),
    "fourcastnet": dict(
        dataset="era5", local_batch_size=1, patch_size=8, embed_dim=768, depth=12, loader_workers=4,
        pinned_memory=True, perun_sampling_period_s=1.0, save_weights=True,
    ),
}  # fmt: skip
# Changes the cost, hardly what is learned (the error becomes that of a centre crop); each can be set alone.
FAST = dict(
    precision="bfloat16", fused_optimizer=True, deterministic=False, pinned_memory=True, persistent_workers=True
)
FAST_IMAGES = dict(channels_last=True, uint8_to_device=True, image_loading="fast", validation_crop="center",
                   evaluate_training_set=False, top5_per_sample=False)  # fmt: skip
# "smoke" is what a laptop core does in about 20 s. Recipes keep their form; only sizes and epochs shrink. ResNet50 has
# no warm-up there, because its first epoch at a learning rate of 0.1 would be most of the run.
SMOKE = {
    "resnet50": dict(
        local_batch_size=16, epochs=2, warmup_epochs=0, image_size=64, training_samples=288, validation_samples=50
    ),
    "fourcastnet": dict(local_batch_size=1, epochs=16, patch_size=4, embed_dim=192, depth=4, save_weights=True),
}
PRESETS: dict[str, dict[str, dict]] = {
    "smoke": SMOKE,
    "paper": PAPER,
    "fast": {"resnet50": PAPER["resnet50"] | FAST | FAST_IMAGES, "fourcastnet": PAPER["fourcastnet"] | FAST},
}


def make(workload: str = "resnet50", **parameters) -> RunConfig:
    """Make the configuration of one run from named parameters; the rest is the preset's, "smoke" if not told.

    Parameters that are None count as not given. One of ``local_batch_size`` and ``global_batch_size`` is
    enough: global batch size = local batch size x devices (paper, section 3). Where both are given, or one with
    ``accumulation_steps``, gradients of several local batches add up to those of the global batch.

    Raises ValueError with the remedy for an unknown, ill-typed or impossible parameter.
    """
    config_class = _class(workload)
    types_by_name = typing.get_type_hints(config_class)
    given = {name: value for name, value in parameters.items() if value is not None}
    for name, value in given.items():
        if name not in types_by_name:
            raise ValueError(f"{name}: not a parameter of {workload}; known are {', '.join(sorted(types_by_name))}")
        given[name] = _typed(name, value, types_by_name[name])
    for name, choices in CHOICES.items():
        if given.get(name, choices[0]) not in choices:
            raise ValueError(f"{name}: must be one of {', '.join(choices)}, got {given[name]!r}")
    for name in ("dataset", "system", "initial_run"):  # they name folders
        form = "[A-Za-z0-9][A-Za-z0-9_.-]*" + "|" * (name == "initial_run")  # which may be empty: none
        if name in given and not re.fullmatch(form, given[name]):
            raise ValueError(f"{name}: must be letters, digits, '_', '-' and '.', got {given[name]!r}")
    for name in [name for name in given if name.endswith("_years")]:
        if not re.fullmatch(r"[0-9]{4}([-,][0-9]{4})*", given[name]):
            raise ValueError(f"{name}: must be years as 1979-2015 or 2016,2018, got {given[name]!r}")
    for name, least in LEAST_VALUES.items():
        if name in given and not given[name] >= least:
            raise ValueError(f"{name}: must be at least {least}, got {given[name]}")

    own = {field.name: field.default for field in fields(config_class) if field.default is not dataclasses.MISSING}
    values = PRESETS[given.get("preset", "smoke")].get(workload, own) | given
    devices, steps = values.get("devices", 1), given.get("accumulation_steps", 1)
    if "global_batch_size" in given:
        whole = given["global_batch_size"]
        if "local_batch_size" in given and "accumulation_steps" not in given:
            steps = max(1, whole // (devices * given["local_batch_size"]))
        if whole % (devices * steps):
            raise ValueError(
                f"global_batch_size: {whole} is not divisible by {devices} devices x {steps} accumulation_steps; "
                f"choose a multiple of {devices * steps}"
            )
        local = whole // (devices * steps)
        if given.get("local_batch_size", local) != local:
            raise ValueError(
                f"local_batch_size: {given['local_batch_size']} x {devices} devices x {steps} accumulation_steps is "
                f"not the global batch size {whole}; give a local batch size that divides it"
            )
        values["local_batch_size"] = local
    values["accumulation_steps"] = steps
    values["global_batch_size"] = values["local_batch_size"] * devices * steps

    if workload == "fourcastnet":
        if (values.get("stage") == "finetune") != bool(values.get("initial_run")):
            raise ValueError("initial_run: fine-tuning, and only it, needs the run_id of a pre-training run")
        tuning = values.get("stage") == "finetune"
        values = dict(learning_rate=1e-4 if tuning else 5e-4, epochs=50 if tuning else 80) | values  # section 3.3.1
        if values["embed_dim"] % values.get("num_blocks", 8):
            raise ValueError(f"embed_dim: {values['embed_dim']} must be a multiple of num_blocks")
    return config_class(**values)


def trainer(workload: str) -> str:
    """Name of the module whose ``main(config, run_dir, folder)`` trains: one of ours, or a workload of your own."""
    return f"energynn.train.{workload}" if workload in CONFIGS else workload


def _class(workload: str) -> type[RunConfig]:
    """The configuration of a workload: one of ours, or ``Config`` in a module of that name on PYTHONPATH."""
    if workload in CONFIGS:
        return CONFIGS[workload]
    try:
        return importlib.import_module(workload).Config
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"workload: {workload!r} is not known ({error}); choose one of {', '.join(CONFIGS)}, or a module on "
            "PYTHONPATH with a Config, a dataclass made from RunConfig, and a main"
        ) from error


# How an image file becomes a crop: as torchvision's ImageFolder does it; faster, and from a prepared store if that is
# what the folder holds; so, but from a store only; or not at all: one batch stays on the device, for every step.
IMAGE_LOADING = ("pil", "fast", "store", "device")
CHOICES = {
    "preset": tuple(PRESETS), "precision": ("float32", "bfloat16"), "image_loading": IMAGE_LOADING,
    "validation_crop": ("random", "center"),
    "device": ("auto", "cpu", "gpu"), "on_bad_image": ("fail", "skip"), "stage": ("pretrain", "finetune"),
    "filter_modes": ("published", "zonal"),
}  # fmt: skip
LEAST_VALUES = {
    "devices": 1, "local_batch_size": 1, "global_batch_size": 1, "accumulation_steps": 1, "epochs": 1, "seed": 0,
    "repeat": 0, "loader_workers": 0, "threads_per_device": 1, "sampling_period_s": 0.01,
    "perun_sampling_period_s": 0.1, "idle_baseline_s": 0, "collective_timeout_s": 1, "checkpoint_period_s": 0,
    "image_size": 32, "patch_size": 1, "embed_dim": 8, "depth": 1, "num_blocks": 1, "warmup_epochs": 0,
    "warmup_start": 0, "plateau_patience": 0, "training_samples": 0, "validation_samples": 0, "learning_rate": 0,
    "momentum": 0, "weight_decay": 0,
}  # fmt: skip


def _typed(name: str, value, kind: type):
    """Return value as kind, or raise ValueError; a whole number may stand where a real number is asked for."""
    if kind is float and type(value) is int:
        return float(value)
    if name.endswith("_years") and type(value) is int:  # one year, read by papermill or the command line
        return str(value)
    if type(value) is not kind or (kind is float and value != value):
        raise ValueError(f"{name}: must be {KIND_NAMES[kind]}, got {value!r}")
    return value


KIND_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}


def from_dict(values: dict) -> RunConfig:
    """Read a configuration back from a record; every field must be there and none more."""
    config_class = _class(values["workload"])
    names = {field.name for field in fields(config_class)}
    if names != set(values):
        raise ValueError(f"config: fields differ from {config_class.__name__}: {sorted(names ^ set(values))}")
    return config_class(**values)


def to_dict(config: RunConfig) -> dict:
    """The configuration as plain values, for run.json and record.json."""
    return dataclasses.asdict(config)


def digest(value) -> str:
    """Hex SHA-256 of a JSON value in its canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def checksum_file(dataset: str, folder: Path = DATA_MANIFESTS) -> Path:
    """The list of a data set's checksums, as ``sha256sum -c`` reads it; raises ValueError if there is none."""
    path = folder / dataset / "SHA256SUMS"
    if not path.is_file():
        known = sorted(found.parent.name for found in folder.glob("*/SHA256SUMS"))
        raise ValueError(
            f"dataset {dataset}: no manifest in {path.parent}; known are {', '.join(known) or 'none'}; "
            "`git checkout data_manifests` restores them, `energynn manifest build` describes data of your own"
        )
    return path


def manifest_digest(dataset: str) -> str:
    """SHA-256 of a data set's checksum list, so that other data make another run."""
    path = checksum_file(dataset)
    return _file_digest(path, path.stat().st_mtime_ns)


@functools.cache  # ImageNet's list has 140 MB, and a study hundreds of runs
def _file_digest(path: Path, _changed: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_id(config: RunConfig) -> str:
    """Readable name of the run, ending in a digest of workload, data, configuration, system and repeat."""
    stage = f"-{config.stage}" if isinstance(config, FourCastNetConfig) else ""
    preset = f"-{config.preset}" if config.preset != "smoke" else ""
    known = (DATA_MANIFESTS / config.dataset / "SHA256SUMS").is_file()  # if not, it can be planned, but not be made
    tail = digest({"config": to_dict(config), "data": manifest_digest(config.dataset) if known else None})[:8]
    return (
        f"{config.workload}{stage}{preset}-{config.dataset}-n{config.devices}-lbs{config.local_batch_size}"
        f"-gbs{config.global_batch_size}-s{config.seed}-r{config.repeat}-{tail}"
    )


def from_notebook(namespace: dict) -> dict:
    """The plain parameters of a papermill notebook: every simple literal that its first cells defined.

    papermill warns of an unknown parameter and goes on; collecting all names lets ``make`` refuse it.
    """
    simple = (str, int, float, bool, list, dict, type(None))
    return {
        name: value
        for name, value in namespace.items()
        if not name.startswith("_") and isinstance(value, simple)
        and name not in ("In", "Out")
    }  # fmt: skip
