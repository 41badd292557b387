"""The complete description of one training run: frozen, typed, hashable, stored with the result."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib
import json
import math
import re
import sys
import textwrap
import typing
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from energynn.files import DATA_MANIFESTS

IMAGENET_IMAGES = {"train": 1_281_167, "val": 50_000}  # ImageNet-2012
RESNET50_WEIGHTS = 25_557_032  # with 1000 classes
RESNET50_OPERATIONS = 4.1e9  # multiply-adds of an image of 224 x 224 pixels
SYNTHETIC_STATES = 32
ENSEMBLE_STATES = 20  # samples of one step in era5_ensemble: two times, ten members
STATES_OF_A_YEAR = 1460  # of ERA5, every six hours, as FourCastNet's public files have them
ERA5_STATE = (20, 720, 1440)  # channels, latitudes, longitudes
REQUIRED = dataclasses.MISSING
CODE = "the study's code"


@dataclass(frozen=True)
class Form:
    """What a text must look like: a regular expression, and the words that messages say instead."""

    pattern: str
    words: str


FOLDER_NAME = Form("[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "up to 64 letters, digits, '_', '-' and '.'")
FOLDER_NAME_OR_NONE = Form("([A-Za-z0-9][A-Za-z0-9_.-]{0,199})?", "up to 200 letters, digits, '_', '-' and '.'")
YEARS = Form(r"(19|20)\d\d([-,](19|20)\d\d)*", "years as 1979-2015 or 2016,2018")


@dataclass(frozen=True)
class Facts:
    """What a parameter means, and which values it may have.

    ``is_later``: it came after runs had names. It stands in a run's configuration only where it is not the default,
    so that the names of earlier runs stay.
    """

    meaning: str = ""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    form: Form | None = None
    origin: str = ""
    is_later: bool = False

    def limits(self) -> str:
        """The limits in words; empty where there are none."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.form:
            return self.form.words
        ends = ("at least", self.least), ("at most", self.most)
        return " and ".join(f"{words} {end:,}" for words, end in ends if end is not None)

    def allows(self, value) -> bool:
        if self.choices:
            return value in self.choices
        if self.form:
            return bool(re.fullmatch(self.form.pattern, value))
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


def parameter(default, meaning: str = "", **facts):
    """A field of a configuration with its default, its meaning and the other Facts."""
    return dataclasses.field(default=default, metadata={"facts": Facts(meaning, **facts)})


@dataclass(frozen=True)
class Epoch:
    """What one epoch of a run does, as far as its configuration tells; a forecast needs no more of a workload.

    training_samples, validation_samples: 0 where only the data tell how many there are. evaluates_training_set: whether
    the training data are loaded a second time. gradient_bytes: what one update shares; 0 where nobody has said it.
    forward_steps: of one sample. operations: multiply-adds of one forward step of one sample; 0 where nobody said it.
    """

    training_samples: int = 0
    validation_samples: int = 0
    evaluates_training_set: bool = False
    gradient_bytes: int = 0
    forward_steps: int = 1
    operations: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every workload needs to know; one device is one GPU, or one CPU core where there is no GPU."""

    workload: str = parameter(REQUIRED, "resnet50, fourcastnet, or the name of a module of your own on PYTHONPATH")
    preset: str = parameter("smoke", "gives every value that is not given", choices=("smoke", "paper", "fast"))
    dataset: str = parameter(REQUIRED, form=FOLDER_NAME)
    system: str = parameter("local", "machine or cluster; its records lie in runs/SYSTEM", form=FOLDER_NAME)
    device: str = parameter("auto", "auto takes a GPU where there is one", choices=("auto", "cpu", "gpu"))
    devices: int = parameter(1, "number of GPUs, or of CPU cores where there is no GPU", least=1, most=65_536)
    local_batch_size: int = parameter(REQUIRED, "samples that one device trains on at once", least=1, most=2**20)
    global_batch_size: int = parameter(REQUIRED, "local batch size x devices x accumulation steps", least=1, most=2**31)
    accumulation_steps: int = parameter(
        1,
        "local batches whose gradients add up before a step of the optimizer; each also moves the running statistics "
        "of batch norm, which only the evaluation uses (on several devices those of rank 0)",
        least=1,
        most=2**20,
    )
    epochs: int = parameter(REQUIRED, "passes over the training data", least=1, most=10**6)
    seed: int = parameter(
        0, "of weights, order of samples and augmentation; another seed is another run", least=0, most=2**32 - 1
    )
    repeat: int = parameter(
        0, "number of a repetition with the same seed, which shows the machine's noise", least=0, most=10**6
    )
    learning_rate: float = parameter(REQUIRED, least=0)
    loader_workers: int = parameter(
        0, "processes of each rank that load data; 0: the trainer loads by itself", least=0, most=1024
    )
    data_staging: bool = parameter(True, "workers prefetch; False: there are none", origin="README of the study's code")
    synchronous_phases: bool = parameter(False, "wait for the GPU around each phase: exact phases, slower training")
    precision: str = parameter(
        "float32",
        "float32 is torch's: on GPUs since the A100, convolutions then use TF32, as the study's did; bfloat16 runs "
        "forward passes in autocast, while weights and optimizer stay float32",
        choices=("float32", "bfloat16"),
        origin=CODE,
    )
    fused_optimizer: bool = parameter(False, "one kernel updates all parameters", origin=CODE)
    compile: bool = parameter(False, "use torch.compile", origin=CODE)
    deterministic: bool = parameter(True, "False: the fastest algorithms that cuDNN's benchmark finds", origin=CODE)
    pinned_memory: bool = parameter(
        False, "of a GPU: batches in page-locked memory, copied while it computes", origin=CODE
    )
    persistent_workers: bool = parameter(False, "the loader's workers live on from epoch to epoch", origin=CODE)
    gradient_compression: str = parameter(
        "none",
        "how gradients travel between devices; bfloat16: in half the bytes, and rounded",
        choices=("none", "bfloat16"),
        is_later=True,
    )
    gradient_buckets: bool = parameter(
        False, "gradients stay in the buckets in which they travel: one copy less, the same numbers", is_later=True
    )
    gradient_noise_steps: int = parameter(
        0,
        "steps of the optimizer from one look at the norms of the gradients to the next, of each local batch and of "
        "their average over all devices; metrics then have the gradient noise scale; 0: none",
        least=0,
        most=10**6,
        origin="McCandlish et al. 2018",
        is_later=True,
    )
    step_period_s: float = parameter(
        0.0,
        "least seconds from the beginning of one step of the optimizer to that of the next, so that samples and "
        "updates an hour vary independently; 0: as fast as it can",
        least=0,
        most=60,
        is_later=True,
    )
    threads_per_device: int = parameter(1, "CPU threads of each rank", least=1, most=1024)
    sampling_period_s: float = parameter(0.04, "seconds between two of our own power samples", least=0.01, most=60)
    idle_baseline_s: float = parameter(
        1.0, "seconds of idling before and after, to measure idle power", least=0, most=3600
    )
    idle_ready_s: float = parameter(
        0.0,
        "seconds of idling when all is set up, before the training: the idle power of a GPU with its context",
        least=0,
        most=3600,
        is_later=True,
    )
    perun_sampling_period_s: float = parameter(
        0.25, "seconds between two of perun's samples; the study: 1", least=0.1, most=60
    )
    collective_timeout_s: float = parameter(
        120.0, "seconds after which a rank that waits for others in the training fails", least=1, most=86_400
    )
    setup_timeout_s: float = parameter(
        1800.0,
        "the same before the training: data are listed for the first time, checkpoints read, code compiled",
        least=1,
        most=86_400,
        is_later=True,
    )
    save_weights: bool = parameter(False, "keep the weights when the run has ended")
    checkpoint_period_s: float = parameter(
        600.0, "seconds between two checkpoints; 0: only when asked to stop", least=0, most=10**7
    )

    def epoch(self) -> Epoch:
        """What a forecast needs to know of an epoch; a workload of your own may say more."""
        return Epoch(getattr(self, "training_samples", 0), getattr(self, "validation_samples", 0))

    @property
    def stays_on_device(self) -> bool:
        """Whether one batch stays on the device and stands for all of the others."""
        return False

    @property
    def bytes_of_gradient(self) -> int:
        """Bytes of one weight's gradient on its way between devices."""
        return 2 if self.gradient_compression == "bfloat16" else 4


IMAGE_LOADING = ("pil", "fast", "store", "device")


@dataclass(frozen=True, kw_only=True)
class ResNet50Config(RunConfig):
    """ResNet50 on images; recipe constants as the paper states them (section 3.2.1)."""

    workload: str = "resnet50"
    dataset: str = parameter(
        "photographs",
        "photographs (embedded), photographs_large (as large as ImageNet's, but few) or imagenet",
        form=FOLDER_NAME,
    )
    image_size: int = parameter(REQUIRED, "height and width of a crop in pixels", least=32, most=4096)
    training_samples: int = parameter(
        0, "size of a nested, class-balanced part of the data set; 0: all", least=0, most=10**9
    )
    validation_samples: int = parameter(0, "as training_samples, of the validation data", least=0, most=10**9)
    image_loading: str = parameter(
        "pil",
        "pil: as torchvision's ImageFolder; fast: faster, from a prepared store if there is one; store: from a store "
        "only; device: one batch stays on the device for every step",
        choices=IMAGE_LOADING,
    )
    uint8_to_device: bool = parameter(False, "pixels are copied as bytes, and the device normalizes them")
    channels_last: bool = parameter(False, "memory format of images and weights", origin=CODE)
    validation_crop: str = parameter(
        "random", "center: the usual crop of 0.875", choices=("random", "center"), origin=CODE
    )
    on_bad_image: str = parameter("fail", "skip: the next image stands in, and is counted", choices=("fail", "skip"))
    crop_scale_min: float = parameter(
        0.5, "least part of an image that a crop covers, in validation too", origin=CODE, least=0, most=1
    )
    momentum: float = parameter(0.9, "momentum of the optimizer (SGD)", origin="section 3.2.1", least=0, most=1)
    weight_decay: float = parameter(1e-4, "weight decay of the optimizer", origin="section 3.2.1", least=0, most=1000)
    weight_decay_on_all: bool = parameter(True, "on batch norm and biases, too; False: on matrices only", origin=CODE)
    warmup_epochs: int = parameter(
        5, "epochs in which the learning rate rises", origin="section 3.2.1", least=0, most=10**6
    )
    warmup_start: float = parameter(
        0.1, "learning rate at the beginning, for every batch size", origin=CODE, least=0, most=1000
    )
    warmup_per_epoch: bool = parameter(True, "the learning rate rises once an epoch; False: every step", origin=CODE)
    learning_rate: float = parameter(0.1, "at GBS 256; scaled linearly with the global batch size", least=0)
    plateau_factor: float = parameter(
        0.5, "factor of the learning rate when the validation no longer improves", least=0, most=0.999
    )
    plateau_patience: int = parameter(5, "epochs without improvement before that", least=0, most=10**6)
    evaluate_training_set: bool = parameter(True, "evaluate the training data after every epoch, too", origin=CODE)
    top5_per_sample: bool = parameter(True, "top-5 error in a loop over samples; False: a batch at once", origin=CODE)
    drop_last: bool = parameter(True, "leave out what ranks cannot share; False: some count twice", origin=CODE)

    @property
    def stays_on_device(self) -> bool:
        return self.image_loading == "device"

    def epoch(self) -> Epoch:
        whole = IMAGENET_IMAGES if self.dataset == "imagenet" else {"train": 0, "val": 0}
        return Epoch(
            training_samples=self.training_samples or whole["train"],
            validation_samples=self.validation_samples or whole["val"],
            evaluates_training_set=self.evaluate_training_set,
            gradient_bytes=self.bytes_of_gradient * RESNET50_WEIGHTS,
            operations=RESNET50_OPERATIONS * (self.image_size / 224) ** 2,
        )


@dataclass(frozen=True, kw_only=True)
class FourCastNetConfig(RunConfig):
    """FourCastNet on ERA5 states; pre-training predicts one step, fine-tuning two autoregressive steps."""

    workload: str = "fourcastnet"
    dataset: str = parameter(
        "era5_ensemble",
        "era5_ensemble (embedded), era5 (the store of `energynn data era5`) or synthetic (random, full size)",
        form=FOLDER_NAME,
    )
    training_years: str = parameter("1979-2015", "years of era5 to train on", form=YEARS, origin="section 3.3.1")
    validation_years: str = parameter("2016-2017", "years of era5 to validate on", form=YEARS, origin="section 3.3.1")
    test_years: str = parameter("2019", "years of era5 to test on", form=YEARS, origin="section 3.3.1")
    stage: str = parameter("pretrain", "finetune trains on two steps", choices=("pretrain", "finetune"))
    initial_run: str = parameter("", "fine-tuning: run_id of the pre-training it starts from", form=FOLDER_NAME_OR_NONE)
    learning_rate: float = parameter(5e-4, "5e-4 in pre-training, 1e-4 in fine-tuning", least=0, origin="section 3.3.1")
    patch_size: int = parameter(REQUIRED, "height and width of a patch in grid points", least=1, most=4096)
    embed_dim: int = parameter(REQUIRED, "channels of a patch; a multiple of num_blocks", least=8, most=65_536)
    depth: int = parameter(REQUIRED, "number of AFNO layers", least=1, most=1024)
    num_blocks: int = parameter(8, "blocks of the weights that act on the Fourier modes", least=1, most=65_536)
    mlp_ratio: float = parameter(4.0, "hidden width of each MLP, as a multiple of embed_dim", least=0.125, most=64)
    sparsity_threshold: float = parameter(
        0.01, "soft threshold below which Fourier modes become zero", least=0, most=1000
    )
    hard_thresholding_fraction: float = parameter(1.0, "part of the Fourier modes that is kept", least=0, most=1)
    filter_modes: str = parameter("published", "zonal corrects which modes pass", choices=("published", "zonal"))
    activation_checkpointing: bool = parameter(False, "less memory for one more forward pass")
    states_on_device: bool = parameter(
        False, "one batch stays on the device for every step: a training without its loader", is_later=True
    )

    @property
    def stays_on_device(self) -> bool:
        return self.states_on_device

    def epoch(self) -> Epoch:
        full_size = self.dataset in ("era5", "synthetic")
        training, validation = (number_of_years(text) for text in (self.training_years, self.validation_years))
        states = STATES_OF_A_YEAR if self.dataset == "era5" else 0
        forward_steps = 2 if self.stage == "finetune" else 1
        known = {"synthetic": SYNTHETIC_STATES, "era5_ensemble": ENSEMBLE_STATES // forward_steps}
        channels, latitudes, longitudes = ERA5_STATE[0], *GRIDS.get(self.dataset, ERA5_STATE[1:])
        patches = latitudes * longitudes // self.patch_size**2
        weights_of_a_patch = self.weights(channels, latitudes, longitudes) - patches * self.embed_dim
        return Epoch(
            training_samples=known.get(self.dataset, training * states),
            validation_samples=validation * states,
            gradient_bytes=self.bytes_of_gradient * self.weights(*ERA5_STATE) if full_size else 0,
            forward_steps=forward_steps,
            operations=patches * weights_of_a_patch,
        )

    def weights(self, channels: int, latitudes: int, longitudes: int) -> int:
        """Number of trained weights of the network (models/afno.py) for states of this shape."""
        width, pixels = self.embed_dim, self.patch_size**2
        embedding = width * channels * pixels + width
        positions = latitudes * longitudes // pixels * width
        mixing = 4 * (width * width // self.num_blocks + width)  # two complex layers
        hidden = int(width * self.mlp_ratio)
        mlp = 2 * width * hidden + hidden + width
        return embedding + positions + self.depth * (mixing + mlp + 4 * width) + width * channels * pixels


def number_of_years(text: str) -> int:
    """How many years a text as "1979-2015" or "2016,2018" names."""
    ends = [part.split("-") for part in text.split(",")]
    return sum(int(years[-1]) - int(years[0]) + 1 for years in ends)


GRIDS = {"era5_ensemble": (60, 120), "synthetic": (720, 1440)}  # latitudes x longitudes of data sets that are known
CONFIGS: dict[str, type[RunConfig]] = {"resnet50": ResNet50Config, "fourcastnet": FourCastNetConfig}

# "paper" is the study's recipe as it ran (sections 3.2.1 and 3.3.1 and its code). It is the object of study and is
# never made faster. ResNet50's defaults above belong to it. FourCastNet's float32 and unfused Adam are inferred from
# the paper's silence, its workers and pinned memory from the published code (AFNO.yaml, data_loader_multifiles.py).
LOADING = dict(loader_workers=4, perun_sampling_period_s=1.0)
IMAGENET = dict(dataset="imagenet", local_batch_size=256, epochs=100, image_size=224)
ERA5 = dict(dataset="era5", local_batch_size=1, pinned_memory=True, save_weights=True)
AFNO = dict(patch_size=8, embed_dim=768, depth=12)
PAPER = {"resnet50": LOADING | IMAGENET, "fourcastnet": LOADING | ERA5 | AFNO}
# "fast" changes the cost, hardly what is learned (the error becomes that of a centre crop); each can be set alone.
FAST = dict(
    precision="bfloat16", fused_optimizer=True, deterministic=False, pinned_memory=True, persistent_workers=True
)
FAST |= dict(gradient_buckets=True)
# compile stays off: nobody has seen it on a GPU here, and it needs a C compiler, and before each training about as long
# as a run of the study gpu takes. `-p compile true` tries it, and the study gpu-grid does, beside the same run without.
FAST_IMAGES = dict(
    channels_last=True,
    uint8_to_device=True,
    image_loading="fast",
    validation_crop="center",
    evaluate_training_set=False,
    top5_per_sample=False,
)
FAST_ALONE = dict(precision="bfloat16", channels_last=True, fused_optimizer=True)  # those that make steps faster
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
# What FourCastNet's stages have beneath every preset (section 3.3.1).
STAGES = {"pretrain": dict(learning_rate=5e-4, epochs=80), "finetune": dict(learning_rate=1e-4, epochs=50)}


def make(workload: str = "resnet50", **parameters) -> RunConfig:
    """Make the configuration of one run from named parameters; the preset gives the rest, "smoke" if none is named.

    Parameters that are None count as not given. One of ``local_batch_size`` and ``global_batch_size`` is
    enough: global batch size = local batch size x devices (paper, section 3). Where both are given, or one with
    ``accumulation_steps``, gradients of several local batches add up to those of the global batch.

    Raises ValueError with the remedy for an unknown, ill-typed or impossible parameter.
    """
    config_class = _class(workload)
    given = {name: value for name, value in parameters.items() if value is not None}
    given = _with_types(workload, config_class, given)
    _check_limits(config_class, given)
    values = {field.name: field.default for field in fields(config_class) if field.default is not REQUIRED}
    if workload == "fourcastnet":
        values |= STAGES[given.get("stage", "pretrain")]
    values |= PRESETS[given.get("preset", "smoke")].get(workload, {}) | given
    sizes = _batch_sizes(values, given)
    _check_limits(config_class, sizes)
    values |= sizes
    if workload == "fourcastnet":
        _check_fourcastnet(values)
    if values.get("gradient_noise_steps") and values["global_batch_size"] == values["local_batch_size"]:
        raise ValueError(
            "gradient_noise_steps: one local batch has none to compare with; give devices, or accumulation"
        )
    return config_class(**values)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Words for the end of a message: "; did you mean X?", or nothing where no known name is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def facts(config_class: type[RunConfig]) -> dict[str, Facts]:
    """What is known of each parameter; a field that only gets another default in a subclass keeps its facts."""
    result = {field.name: Facts() for field in fields(config_class)}
    for base in reversed(config_class.__mro__):
        if dataclasses.is_dataclass(base):
            result |= {field.name: field.metadata["facts"] for field in fields(base) if "facts" in field.metadata}
    return result


KIND_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}


@functools.cache
def _kinds(config_class: type[RunConfig]) -> dict[str, type]:
    return typing.get_type_hints(config_class)


def _with_types(workload: str, config_class: type[RunConfig], given: dict) -> dict:
    """The given values in their fields' types; raises ValueError for an unknown name or another type."""
    kinds, known = _kinds(config_class), facts(config_class)
    result = {}
    for name, value in given.items():
        if name not in kinds:
            near = suggestion(name, kinds)
            raise ValueError(
                f"{name}: not a parameter of {workload}{near}; `energynn run --list` shows all {len(kinds)} of them"
            )
        kind = kinds[name]
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if known[name].form is YEARS and type(value) is int:  # one year, as papermill or the command line reads it
            value = str(value)
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            # A number for a field of words is often meant for a field of a similar name, as device and devices.
            near = suggestion(name, kinds.keys() - {name}) if kind is str and known[name].choices else ""
            raise ValueError(f"{name}: must be {KIND_NAMES[kind]}, got {_shown(value)}{near}")
        result[name] = value
    return result


def _check_limits(config_class: type[RunConfig], given: dict) -> None:
    known = facts(config_class)
    for name, value in given.items():
        if not known[name].allows(value):
            raise ValueError(f"{name}: must be {known[name].limits()}, got {_shown(value)}")


def _shown(value) -> str:
    """A value in a message: not all of a long one."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _batch_sizes(values: dict, given: dict) -> dict:
    """Local batch size, accumulation steps and global batch size, each from what is given of the others."""
    devices = values["devices"]
    steps = given.get("accumulation_steps", 1)
    global_size = given.get("global_batch_size") or values["local_batch_size"] * devices * steps
    if "local_batch_size" in given and "accumulation_steps" not in given:
        steps = max(1, global_size // (devices * given["local_batch_size"]))
    if global_size % (devices * steps):
        raise ValueError(
            f"global_batch_size: {global_size} is not divisible by {devices} devices x {steps} accumulation_steps; "
            f"choose a multiple of {devices * steps}"
        )
    local_size = global_size // (devices * steps)
    if given.get("local_batch_size", local_size) != local_size:
        raise ValueError(
            f"local_batch_size: {given['local_batch_size']} x {devices} devices x {steps} accumulation_steps is "
            f"not the global batch size {global_size}; give a local batch size that divides it"
        )
    return dict(local_batch_size=local_size, accumulation_steps=steps, global_batch_size=global_size)


def _check_fourcastnet(values: dict) -> None:
    is_tuning = values["stage"] == "finetune"
    if is_tuning != bool(values["initial_run"]):
        raise ValueError("initial_run: fine-tuning, and only it, needs the run_id of a pre-training run")
    if values["embed_dim"] % values["num_blocks"]:
        raise ValueError(f"embed_dim: {values['embed_dim']} must be a multiple of num_blocks")
    patch, grid = values["patch_size"], GRIDS.get(values["dataset"])
    if grid and (grid[0] % patch or grid[1] % patch):
        raise ValueError(
            f"patch_size: {patch} must divide the {grid[0]} x {grid[1]} grid points of {values['dataset']}"
        )


def trainer(workload: str) -> str:
    """Name of the module whose ``main(config, run_dir, folder)`` trains: one of ours, or a workload of your own."""
    return f"energynn.train.{workload}" if workload in CONFIGS else workload


def _class(workload: str) -> type[RunConfig]:
    """The configuration of a workload: one of ours, or ``Config`` in a module of that name on PYTHONPATH."""
    if isinstance(workload, str) and workload in CONFIGS:
        return CONFIGS[workload]
    try:
        if not isinstance(workload, str) or workload.partition(".")[0] in sys.stdlib_module_names:
            raise ValueError("it is no module of a workload")
        found = importlib.import_module(workload).Config
        if not issubclass(found, RunConfig):
            raise ValueError("its Config is not made from RunConfig")
        return found
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"workload: {_shown(workload)} is not known ({error}){suggestion(workload, CONFIGS)}; "
            f"choose one of {', '.join(CONFIGS)}, or a module on "
            "PYTHONPATH with a Config, a dataclass made from RunConfig, and a main"
        ) from error


def from_dict(values: dict) -> RunConfig:
    """Read a configuration back from a record; every field must be there but the later ones, and none more.

    Raises ValueError for another type, and for what is beyond its limits.
    """
    config_class = _class(values["workload"])
    known = facts(config_class)
    needed = {name for name in known if not known[name].is_later}
    if not needed <= set(values) <= set(known):
        differ = sorted((needed - set(values)) | (set(values) - set(known)))
        raise ValueError(f"config: fields differ from {config_class.__name__}: {differ}")
    _check_limits(config_class, _with_types(values["workload"], config_class, values))
    return config_class(**values)


def to_dict(config: RunConfig) -> dict:
    """The configuration as plain values, for run.json and record.json; without later fields at their default."""
    plain = dataclasses.asdict(config)
    known = facts(type(config))
    for field in fields(config):
        if known[field.name].is_later and plain[field.name] == field.default:
            del plain[field.name]
    return plain


def digest(value) -> str:
    """Hex SHA-256 of a JSON value in its canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def checksum_file(dataset: str, folder: Path = DATA_MANIFESTS) -> Path:
    """The list of a data set's checksums, as ``sha256sum -c`` reads it; raises ValueError if there is none."""
    path = folder / dataset / "SHA256SUMS"
    if not path.is_file():
        known = sorted(found.parent.name for found in folder.glob("*/SHA256SUMS"))
        raise ValueError(
            f"dataset {dataset}: no manifest in {path.parent}; known are {', '.join(known) or 'none'}"
            f"{suggestion(dataset, known)}; `git checkout data_manifests` restores them, `energynn data describe "
            f"{dataset}` describes data of your own"
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
    known = (DATA_MANIFESTS / config.dataset / "SHA256SUMS").is_file()  # if not, it can be planned, but not be made
    stage = f"-{config.stage}" if isinstance(config, FourCastNetConfig) else ""
    return _name(to_dict(config), manifest_digest(config.dataset) if known else None, stage)


def names_of_run(values: dict, data_digest: str | None) -> list[str]:
    """What a run of this configuration is called, from plain values: no module of the workload is imported.

    Two names where it has a stage, of which only FourCastNet's is a part of the name.
    """
    stages = ["", f"-{values['stage']}"] if "stage" in values else [""]
    return [_name(values, data_digest, stage) for stage in stages]


def _name(values: dict, data_digest: str | None, stage: str) -> str:
    preset = f"-{values['preset']}" if values["preset"] != "smoke" else ""
    return (
        f"{values['workload']}{stage}{preset}-{values['dataset']}-n{values['devices']}-lbs{values['local_batch_size']}"
        f"-gbs{values['global_batch_size']}-s{values['seed']}-r{values['repeat']}"
        f"-{digest({'config': values, 'data': data_digest})[:8]}"
    )


def from_notebook(namespace: dict) -> dict:
    """The plain parameters of a papermill notebook: every simple literal that its first cells defined.

    papermill warns of an unknown parameter and goes on; collecting all names lets ``make`` refuse it.
    """
    plain_types = (str, int, float, bool, list, dict, type(None))
    names = [name for name in namespace if not name.startswith("_") and name not in ("In", "Out")]
    return {name: namespace[name] for name in names if isinstance(namespace[name], plain_types)}


# --------------------------------------------------------------------------------------- help and docs/parameters.md


def groups() -> dict[str, dict[str, Facts]]:
    """The parameters of every workload, then of each workload those that it adds or describes anew."""
    shared = facts(RunConfig)
    result = {"every workload": {name: known for name, known in shared.items() if known.meaning}}
    for workload, config_class in CONFIGS.items():
        own = facts(config_class)
        result[workload] = {name: known for name, known in own.items() if shared.get(name) != known}
    return result


def _explanation(known: Facts) -> str:
    origin = f"origin: {known.origin}" if known.origin else ""
    return "; ".join(part for part in (known.meaning, known.limits(), origin) if part)


def _default(name: str, group: str) -> str:
    """The value of the preset smoke; where workloads differ, of each."""
    if name == "workload":
        return "resnet50"
    workloads = [group] if group in CONFIGS else list(CONFIGS)
    values = [str(getattr(make(workload), name)) or "none" for workload in workloads]
    if len(set(values)) == 1:
        return values[0]
    return ", ".join(f"{value} ({workload})" for value, workload in zip(values, workloads, strict=True))


def _kind(name: str, group: str) -> str:
    return _kinds(CONFIGS.get(group, RunConfig))[name].__name__


def help_text(width: int = 79) -> str:
    """Every parameter with type, default, meaning and limits, for `energynn run --help`."""
    lines = ["parameters, with their type and the default, which is the preset smoke's:"]
    for group, parameters in groups().items():
        lines += ["", f"of {group}:"]
        for name, known in parameters.items():
            lines.append(f"  {name} ({_kind(name, group)}, {_default(name, group)})")
            lines += textwrap.wrap(_explanation(known), width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def document() -> str:
    """The text of docs/parameters.md."""
    lines = [
        "# Parameters of a run",
        "",
        "Made from the fields of `energynn/config.py` by `python -m energynn.config > docs/parameters.md`.",
        "`energynn run -p NAME VALUE` and papermill's `-p NAME VALUE` set any of them.",
        "A default is that of the preset smoke; the last section shows what other presets change.",
    ]
    for group, parameters in groups().items():
        lines += ["", f"## Of {group}", "", "| parameter | type | default | meaning |", "|---|---|---|---|"]
        for name, known in parameters.items():
            lines.append(f"| `{name}` | {_kind(name, group)} | {_default(name, group)} | {_explanation(known)} |")
    for workload in CONFIGS:
        presets = {preset: dataclasses.asdict(make(workload, preset=preset)) for preset in PRESETS}
        lines += ["", f"## Presets of {workload}", "", f"| parameter | {' | '.join(presets)} |", "|---|---|---|---|"]
        for name in presets["smoke"]:
            values = [str(made[name]) for made in presets.values()]
            if name != "preset" and len(set(values)) > 1:
                lines.append(f"| `{name}` | {' | '.join(values)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(document())
