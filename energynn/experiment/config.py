"""The complete description of one training run: frozen, typed, hashable, stored with the result."""

import difflib
import functools
import hashlib
import importlib
import inspect
import json
import math
import os
import re
import symtable
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import asdict, fields, replace

from energynn.host.files import DATA_MANIFESTS, hash_file
from energynn.host.reading import read_toml

IMAGENET_IMAGES = {"train": 1_281_167, "val": 50_000}  # ImageNet-2012
RESNET50_WEIGHTS = 25_557_032  # with 1000 classes
SYNTHETIC_STATES = 32
ENSEMBLE_STATES = 20  # samples of one step in era5_ensemble: two times, ten members
# of ERA5, every six hours, as FourCastNet's public files have them
STATES_OF_A_YEAR = 1460
ERA5_CHANNELS = 20
ERA5_GRID = (720, 1440)  # latitudes x longitudes
DATASET_GRIDS = {"era5_ensemble": (60, 120), "synthetic": ERA5_GRID}

# beside those of a workload
NOTEBOOK_OPTIONS = ("workload", "name", "note", "runs_dir")
PAPERMILL_CELL_START = "# Parameters\n"  # begins the cell of papermill
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}(?!\n)$"
YEARS_PATTERN = r"^(19|20)\d\d(-(19|20)\d\d)?(,(19|20)\d\d(-(19|20)\d\d)?)*(?!\n)$"

# Types of parameters with their limits; a title says in words what a pattern allows.
FolderName = Annotated[
    str,
    Meta(
        pattern=rf"(?!.*\.toml$){NAME_PATTERN}",
        title="up to 64 letters, digits, '_', '-' and '.', without .toml at its end",
    ),
]
RunId = Annotated[
    str,
    Meta(
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,199})?(?!\n)$",
        title="up to 200 letters, digits, '_', '-' and '.'",
    ),
]
YearsText = Annotated[
    str, Meta(pattern=YEARS_PATTERN, title="years as 1979-2015 or 2016,2018")
]
OneOrMore = Annotated[int, Meta(ge=1, le=2**20)]
Natural = Annotated[int, Meta(ge=0, le=10**9)]
ShareOfOne = Annotated[float, Meta(ge=0, le=1)]
Number = Annotated[float, Meta(ge=0, le=10**6)]
SecondsWithinDay = Annotated[float, Meta(ge=0, le=86_400)]
SamplingPeriod = Annotated[float, Meta(ge=0.01, le=60)]
TimeoutSeconds = Annotated[float, Meta(ge=1, le=86_400)]


@dataclass(frozen=True)
class Epoch:
    """What one epoch of a run does, as far as its configuration tells; a forecast needs no more.

    training_samples, validation_samples: 0 where only the data tell how many there are.
    evaluates_training_set: whether the training data are loaded a second time. gradient_bytes: what
    one update shares; 0 if unknown. forward_steps: of one sample.
    """

    training_samples: int = 0
    validation_samples: int = 0
    evaluates_training_set: bool = False
    gradient_bytes: int = 0
    forward_steps: int = 1


class ScaleFields(msgspec.Struct, frozen=True, kw_only=True):
    """How large a training is, and on how many devices: what differs within a scaling series.

    devices: GPUs, or CPU cores where there is no GPU
    local_batch_size: samples that one device trains on at once
    global_batch_size: local batch size x devices x accumulation steps
    accumulation_steps: local batches whose gradients add up before a step of the optimizer; each
        also moves the running statistics of batch norm, which only the evaluation uses (on several
        devices those of rank 0)
    repeat: number of a repetition with the same seed: the machine's noise
    """

    devices: OneOrMore = 1
    local_batch_size: OneOrMore
    global_batch_size: OneOrMore
    accumulation_steps: OneOrMore = 1
    repeat: Natural = 0


class WatchFields(ScaleFields, frozen=True, kw_only=True):
    """How a training is watched and kept. A run may go on with other values.

    sampling_period_s: seconds between two of our own power samples; another period makes another
        run
    perun_sampling_period_s: the same of perun's samples; the study: 1
    idle_baseline_s: seconds of idling before and after, to measure idle power
    idle_ready_s: seconds of idling when all is set up, before the training: the idle power of a GPU
        with its context
    collective_timeout_s: seconds after which a rank that waits for others in the training fails
    setup_timeout_s: the same before the training: data are listed, checkpoints read, code compiled
    save_weights: keep the weights when the run has ended
    checkpoint_period_s: seconds between two checkpoints; 0: only when asked to stop
    """

    sampling_period_s: SamplingPeriod = 0.04
    perun_sampling_period_s: SamplingPeriod = 0.25
    idle_baseline_s: SecondsWithinDay = 1.0
    idle_ready_s: SecondsWithinDay = 0.0
    collective_timeout_s: TimeoutSeconds = 120.0
    setup_timeout_s: TimeoutSeconds = 1800.0
    save_weights: bool = False
    checkpoint_period_s: Number = 600.0


class RunConfig(WatchFields, frozen=True, kw_only=True):
    """Parameters of every workload; one device is one GPU, or one CPU core where there is no GPU.

    A workload of your own subclasses it, with a default for each parameter.

    workload: resnet50, fourcastnet, or the name of a module of your own on PYTHONPATH
    preset: gives every value that is not given
    system: machine or cluster; its records lie in runs/SYSTEM
    device: auto takes a GPU where there is one
    epochs: passes over the training data
    seed: of weights, order of samples and augmentation
    learning_rate: of the optimizer
    loader_workers: processes of each rank that load data; 0: the trainer
    data_staging: workers prefetch; False: there are none (README of the study's code)
    synchronous_phases: wait for the GPU around each phase: exact phases, slower training
    precision: float32 is torch's: on GPUs since the A100, convolutions then use TF32, as the
        study's did; bfloat16 runs forward passes in autocast, while weights and optimizer stay
        float32 (the study's code)
    fused_optimizer: one kernel updates all parameters (the study's code)
    compile: use torch.compile (the study's code)
    deterministic: False: the fastest algorithms that cuDNN's benchmark finds (the study's code)
    pinned_memory: of a GPU: batches in page-locked memory, copied while it computes
    persistent_workers: the loader's workers live on from epoch to epoch (the study's code)
    gradient_compression: how gradients travel between devices; bfloat16: in half the bytes, and
        rounded
    gradient_buckets: gradients stay in the buckets in which they travel: one copy less, same
        numbers
    step_period_s: least seconds from one step of the optimizer to the next, so that samples and
        updates an hour vary independently; 0: as fast as it can
    power_limit_W: of older records; today `nvidia-smi -pl` sets it before a run
    threads_per_device: CPU threads of each rank
    """

    workload: str
    preset: Literal["smoke", "paper", "fast"] = "smoke"
    dataset: FolderName
    system: FolderName = "local"
    device: Literal["auto", "cpu", "gpu"] = "auto"
    epochs: OneOrMore
    seed: Natural = 0
    learning_rate: Number
    loader_workers: Natural = 0
    data_staging: bool = True
    synchronous_phases: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    fused_optimizer: bool = False
    compile: bool = False
    deterministic: bool = True
    pinned_memory: bool = False
    persistent_workers: bool = False
    gradient_compression: Literal["none", "bfloat16"] = "none"
    gradient_buckets: bool = False
    step_period_s: SecondsWithinDay = 0.0
    power_limit_W: Number = 0.0
    threads_per_device: OneOrMore = 1

    def epoch(self) -> Epoch:
        """Describe an epoch for a forecast; a workload of your own may say more."""
        sizes = ("training_samples", "validation_samples", "gradient_bytes")
        return Epoch(**{name: getattr(self, name, 0) for name in sizes})

    @property
    def stays_on_device(self) -> bool:
        """Whether one batch stays on the device and stands for all of the others."""
        return False

    @property
    def working_loader_workers(self) -> int:
        """Those of ``loader_workers`` that there are: none where no batch is fetched ahead."""
        has_some = self.data_staging and not self.stays_on_device
        return self.loader_workers if has_some else 0

    @property
    def bytes_of_gradient(self) -> int:
        """Bytes of one weight's gradient on its way between devices."""
        return 2 if self.gradient_compression == "bfloat16" else 4

    @property
    def bytes_of_sample(self) -> int:
        """Bytes of a sample as a loader's worker hands it over; 0 if unknown."""
        return 0


# Not of the recipe: scale, watch, and in the same sense how much data, the run of the same scale
# that a fine-tuning starts from, and names that only say where a run is made.
FIELDS_OUTSIDE_RECIPE = frozenset(WatchFields.__struct_fields__) | {
    "training_samples",
    "validation_samples",
    "initial_run",
    "preset",
    "system",
    "device",
}
WATCH_FIELDS = frozenset(WatchFields.__struct_fields__) - frozenset(
    ScaleFields.__struct_fields__
)
# Not of a run's name. Runs with other sampling periods are compared, so they are other runs.
FIELDS_OUTSIDE_NAME = WATCH_FIELDS - {"sampling_period_s", "perun_sampling_period_s"}

# Of each parameter with a default the value when it came. The file says what it is for.
ORIGINAL_DEFAULTS = read_toml(Path(__file__).with_name("values_at_birth.toml"))


class ResNet50Config(RunConfig, frozen=True, kw_only=True):
    """ResNet50 on images; recipe constants as the paper states them (section 3.2.1).

    dataset: photographs (small), photographs_large (as large as ImageNet's) or imagenet
    image_size: height and width of a crop in pixels
    training_samples: size of a nested, class-balanced part of the data set; 0: all
    validation_samples: the same, of the validation data
    image_loading: pil: as torchvision's ImageFolder; fast: faster, from a prepared store if there
        is one; store: from a store only; device: one batch stays on the device for every step
    uint8_to_device: pixels are copied as bytes, and the device normalizes them
    channels_last: memory format of images and weights (the study's code)
    validation_crop: center: the usual crop of 0.875 (the study's code)
    on_bad_image: skip: the next image stands in, and is counted
    crop_scale_min: least part of an image that a crop covers, in validation too
    momentum: momentum of the optimizer, SGD (section 3.2.1)
    weight_decay: of the optimizer (section 3.2.1)
    weight_decay_on_all: on batch norm and biases, too; False: on matrices only (the study's code)
    warmup_epochs: epochs in which the learning rate rises (section 3.2.1)
    warmup_start: learning rate at the beginning, for every batch size (the study's code)
    warmup_per_epoch: the learning rate rises once an epoch; False: every step (the study's code)
    learning_rate: at GBS 256; scaled linearly with the global batch size
    plateau_factor: factor of the learning rate when the validation no longer improves
    plateau_patience: epochs without improvement before that
    evaluate_training_set: evaluate the training data after every epoch, too (the study's code)
    top5_per_sample: top-5 error in a loop over samples; False: a batch at once (the study's code)
    drop_last: leave out what ranks cannot share; False: some count twice (the study's code)
    """

    workload: str = "resnet50"
    dataset: FolderName = "photographs"
    image_size: OneOrMore
    training_samples: Natural = 0
    validation_samples: Natural = 0
    image_loading: Literal["pil", "fast", "store", "device"] = "pil"
    uint8_to_device: bool = False
    channels_last: bool = False
    validation_crop: Literal["random", "center"] = "random"
    on_bad_image: Literal["fail", "skip"] = "fail"
    crop_scale_min: ShareOfOne = 0.5
    momentum: ShareOfOne = 0.9
    weight_decay: Number = 1e-4
    weight_decay_on_all: bool = True
    warmup_epochs: Natural = 5
    warmup_start: Number = 0.1
    warmup_per_epoch: bool = True
    learning_rate: Number = 0.1
    plateau_factor: Annotated[float, Meta(ge=0, lt=1)] = 0.5
    plateau_patience: Natural = 5
    evaluate_training_set: bool = True
    top5_per_sample: bool = True
    drop_last: bool = True

    @property
    def stays_on_device(self) -> bool:
        return self.image_loading == "device"

    @property
    def bytes_of_sample(self) -> int:
        return 3 * self.image_size**2 * (1 if self.uint8_to_device else 4)

    def epoch(self) -> Epoch:
        whole = IMAGENET_IMAGES if self.dataset == "imagenet" else {}
        return Epoch(
            training_samples=self.training_samples or whole.get("train", 0),
            validation_samples=self.validation_samples or whole.get("val", 0),
            evaluates_training_set=self.evaluate_training_set,
            gradient_bytes=self.bytes_of_gradient * RESNET50_WEIGHTS,
        )


class FourCastNetConfig(RunConfig, frozen=True, kw_only=True):
    """FourCastNet on ERA5; pre-training predicts one step, fine-tuning two autoregressive steps.

    dataset: era5_ensemble (embedded), era5 (the store of `energynn data era5`) or synthetic
        (random, full size)
    training_years: years of era5 to train on (section 3.3.1)
    validation_years: years to validate on (section 3.3.1)
    test_years: years of era5 to test on (section 3.3.1)
    stage: finetune trains on two steps
    initial_run: fine-tuning: run_id of the pre-training it starts from
    learning_rate: 5e-4 in pre-training, 1e-4 in fine-tuning (section 3.3.1)
    patch_size: height and width of a patch in grid points
    embed_dim: channels of a patch; a multiple of num_blocks
    depth: number of AFNO layers
    num_blocks: blocks of the weights that act on the Fourier modes
    mlp_ratio: hidden width of each MLP, as a multiple of embed_dim
    sparsity_threshold: soft threshold below which Fourier modes become zero
    hard_thresholding_fraction: part of the Fourier modes that is kept
    filter_modes: zonal corrects which modes pass
    activation_checkpointing: less memory for one more forward pass
    states_on_device: one batch stays on the device for every step: a training without its loader
    """

    workload: str = "fourcastnet"
    dataset: Literal["era5_ensemble", "era5", "synthetic"] = "era5_ensemble"
    training_years: YearsText = "1979-2015"
    validation_years: YearsText = "2016-2017"
    test_years: YearsText = "2019"
    stage: Literal["pretrain", "finetune"] = "pretrain"
    initial_run: RunId = ""
    learning_rate: Number = 5e-4
    patch_size: OneOrMore
    embed_dim: OneOrMore
    depth: OneOrMore
    num_blocks: OneOrMore = 8
    mlp_ratio: Number = 4.0
    sparsity_threshold: Number = 0.01
    hard_thresholding_fraction: ShareOfOne = 1.0
    filter_modes: Literal["published", "zonal"] = "published"
    activation_checkpointing: bool = False
    states_on_device: bool = False

    def __post_init__(self):
        if (self.stage == "finetune") != bool(self.initial_run):
            raise ValueError(
                "initial_run: fine-tuning, and only it, needs the run_id of a pre-training"
            )
        if self.embed_dim % self.num_blocks:
            raise ValueError(
                f"embed_dim: {self.embed_dim} must be a multiple of num_blocks"
            )
        rows, columns = DATASET_GRIDS.get(self.dataset, (0, 0))
        if rows % self.patch_size or columns % self.patch_size:
            raise ValueError(
                f"patch_size: {self.patch_size} must divide the {rows} x {columns} grid of "
                f"{self.dataset}"
            )

    @property
    def stays_on_device(self) -> bool:
        return self.states_on_device

    @property
    def bytes_of_sample(self) -> int:
        points = math.prod(DATASET_GRIDS.get(self.dataset, ERA5_GRID))
        states = 1 + self.epoch().forward_steps
        return 4 * states * ERA5_CHANNELS * points

    def epoch(self) -> Epoch:
        forward_steps = 2 if self.stage == "finetune" else 1
        if self.dataset == "era5_ensemble":
            return Epoch(
                training_samples=ENSEMBLE_STATES // forward_steps,
                forward_steps=forward_steps,
            )
        training = SYNTHETIC_STATES
        validation = 0
        if self.dataset == "era5":
            training = STATES_OF_A_YEAR * len(parse_years(self.training_years))
            validation = STATES_OF_A_YEAR * len(parse_years(self.validation_years))
        return Epoch(
            training_samples=training,
            validation_samples=validation,
            gradient_bytes=self.bytes_of_gradient * self.weights(*ERA5_GRID),
            forward_steps=forward_steps,
        )

    def weights(
        self, latitudes: int, longitudes: int, channels: int = ERA5_CHANNELS
    ) -> int:
        """Count the trained weights of the network (train/afno.py) for states on this grid."""
        width = self.embed_dim
        pixels = self.patch_size**2
        embedding = width * channels * pixels + width
        positions = latitudes * longitudes // pixels * width
        mixing = 4 * (width * width // self.num_blocks + width)  # two complex layers
        hidden = int(width * self.mlp_ratio)
        mlp = 2 * width * hidden + hidden + width
        head = width * channels * pixels
        return embedding + positions + self.depth * (mixing + mlp + 4 * width) + head


def parse_years(text: str) -> list[int]:
    """List the years of a text like "1979-2017,2019". Raises ValueError for anything else."""
    spans = []
    if re.fullmatch(YEARS_PATTERN, text):
        for part in text.split(","):
            first, _, last = part.partition("-")
            spans.append(range(int(first), int(last or first) + 1))
    if not spans or not all(spans):
        raise ValueError(
            f"years: must be like 1979-2015 or 1979-2017,2019; got {text!r}"
        )
    return sorted(set().union(*spans))


CONFIGS: dict[str, type[RunConfig]] = {
    "resnet50": ResNet50Config,
    "fourcastnet": FourCastNetConfig,
}

PRESETS: dict[str, dict[str, dict]] = read_toml(
    Path(__file__).with_name("presets.toml")
)
# What FourCastNet's stages have beneath every preset.
STAGE_VALUES = PRESETS.pop("stages")


def make(workload: str = "resnet50", **parameters) -> RunConfig:
    """Make the configuration of one run from named parameters; the preset gives the rest.

    Parameters that are None count as not given. One of ``local_batch_size`` and
    ``global_batch_size`` is enough: global batch size = local batch size x devices (paper,
    section 3). Where both are given, or one with ``accumulation_steps``, gradients of several local
    batches add up to those of the global batch.

    Raises ValueError with the remedy for an unknown, ill-typed or impossible parameter.
    """
    config_class = _config_class(workload)
    given = {name: value for name, value in parameters.items() if value is not None}
    given = _validate_parameters(config_class, given)
    if given.get("power_limit_W"):
        raise ValueError(
            "power_limit_W: a run changes nothing on the machine; leave it out and give "
            f"`sudo nvidia-smi -pl {given['power_limit_W']:g}` before the run"
        )
    values = {"global_batch_size": 1}  # until it is known
    if workload == "fourcastnet":
        values |= STAGE_VALUES[given.get("stage", "pretrain")]
    preset = given.get("preset", "smoke")
    if preset == "fast":
        values |= PRESETS["paper"].get(workload, {})
    values |= PRESETS[preset].get(workload, {})
    if preset != "smoke" and workload not in PRESETS[preset]:
        raise ValueError(f"preset: {workload} has none; give its values one by one")
    try:
        run = config_class(**values | given)
    except TypeError as error:
        raise ValueError(f"{workload}: {error}; give it a default there") from error
    return replace(
        run, **_validate_parameters(config_class, _complete_batch_sizes(run, given))
    )


def suggestion(name: str, known: Iterable[str]) -> str:
    """Suggest the closest known name for a misspelt one: "; did you mean X?", or ""."""
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


@functools.cache
def parameter_types(config_class: type[RunConfig]) -> dict:
    """Return the type of each parameter."""
    return {field.name: field.type for field in fields(config_class)}


def limits_of_type(kind) -> str:
    """Describe the allowed values of a type, in the words of JSON Schema."""
    schema = msgspec.json.schema(kind)
    words = [f"{name} {schema[name]}" for name in schema if name != "pattern"]
    return ", ".join(words).removeprefix("title ")


def _validate_parameters(config_class: type[RunConfig], given: dict) -> dict:
    """Convert values, also as texts, to the types of their parameters; ValueError for others."""
    known = parameter_types(config_class)
    values = {}
    for name, value in given.items():
        if name not in known:
            if name in NOTEBOOK_OPTIONS:
                raise ValueError(
                    f"{name}: is no parameter; give --{name.replace('_', '-')} {value}"
                )
            raise ValueError(
                f"{name}: not a parameter of {config_class.__name__}{suggestion(name, known)}; "
                f"`energynn run --list` shows all {len(known)} of them"
            )
        if name.endswith("_years") and type(value) is int:
            # one year, as papermill reads it
            value = str(value)
        try:
            values[name] = msgspec.convert(
                value, known[name], strict=not isinstance(value, str)
            )
        except msgspec.ValidationError as error:
            raise ValueError(
                f"{name}: must have {limits_of_type(known[name])}, got {value!r:.80}"
            ) from error
    return values


def _complete_batch_sizes(run: RunConfig, given: dict) -> dict:
    """Return local batch size, accumulation steps and global batch size, each from the others."""
    devices = run.devices
    steps = given.get("accumulation_steps", 1)
    global_size = given.get("global_batch_size", run.local_batch_size * devices * steps)
    if "local_batch_size" in given and "accumulation_steps" not in given:
        steps = max(1, global_size // (devices * given["local_batch_size"]))
    local_size = given.get("local_batch_size", global_size // (devices * steps))
    if local_size * devices * steps != global_size:
        raise ValueError(
            f"global_batch_size: {global_size} is not local_batch_size x {devices} devices x "
            f"{steps} accumulation_steps; choose a multiple of "
            f"{devices * given.get('local_batch_size', steps)}"
        )
    return {
        "local_batch_size": local_size,
        "accumulation_steps": steps,
        "global_batch_size": global_size,
    }


def _config_class(workload: str, is_named: bool = True) -> type[RunConfig]:
    """Return the configuration of a workload: ours, or ``Config`` of a module on PYTHONPATH.

    A module that the caller has not named is not imported: that would run what a file says.
    """
    if workload in CONFIGS:
        return CONFIGS[workload]
    if not is_named and workload not in sys.modules:
        raise ValueError(
            f"workload: {workload!r:.80} is a module that only a file names; where you "
            "trust it, give it with --workload"
        )
    try:
        config_class = importlib.import_module(workload).Config
        if not issubclass(config_class, RunConfig):
            raise ValueError("its Config is not made from RunConfig")
        return config_class
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"workload: {workload!r:.80} is not known ({error})"
            f"{suggestion(workload, CONFIGS)}; choose one of {', '.join(CONFIGS)}, or a module on "
            "PYTHONPATH with a class Config(RunConfig) and a main"
        ) from error


def config_from_dict(values: dict, named: str = "") -> RunConfig:
    """Read a configuration back from a record; parameters that came later are filled in.

    ``named``: the workload that the caller means; no other module is imported. Raises ValueError
    for another type, and for what is beyond its limits.
    """
    workload = str(values.get("workload"))
    config_class = _config_class(workload, is_named=workload == named)
    known = _validate_parameters(config_class, add_missing_parameters(values))
    try:
        return config_class(**known)
    except TypeError as error:  # one that has no default
        raise ValueError(f"config: {error}") from error


def original_defaults(workload: str) -> dict:
    """Return the values that the parameters of a workload had when they came."""
    return ORIGINAL_DEFAULTS["shared"] | ORIGINAL_DEFAULTS.get(workload, {})


def add_missing_parameters(values: dict) -> dict:
    """Add what a training's configuration lacks because the parameter came later."""
    first = original_defaults(str(values["workload"])) if "workload" in values else {}
    return first | values


def recipe(values: dict, left_out: Iterable[str] = ()) -> dict:
    """Select from a configuration what decides the numbers: two runs with the same have one recipe.

    They may differ in scale, in the amount of data, in where they ran and in how they were watched.
    ``left_out``: further parameters in which they may differ.
    """
    kept = add_missing_parameters(values).items()
    outside = FIELDS_OUTSIDE_RECIPE.union(left_out)
    return {name: value for name, value in kept if name not in outside}


def json_digest(value) -> str:
    """Hash a JSON value in its canonical form: hex SHA-256."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache  # ImageNet's list has 140 MB, and a study hundreds of runs
def manifest_digest(dataset: str) -> str | None:
    """Hash a data set's checksum list (SHA-256), so that other data make another run.

    None without a list: such a run can be planned, but not made.
    """
    path = DATA_MANIFESTS / dataset / "SHA256SUMS"
    return hash_file(path) if path.is_file() else None


def values_in_name(config: RunConfig) -> dict:
    """Select what a run's name is made from: scale and recipe, where they differ from birth.

    So a parameter that comes later renames no run, and another default makes other runs. Of a
    workload that is not ours all counts that is its own, and what is shared where it differs.
    """
    first = original_defaults(config.workload)
    unnamed = FIELDS_OUTSIDE_NAME if config.workload in CONFIGS else ()
    return {
        name: value
        for name, value in asdict(config).items()
        if name not in unnamed and value != first.get(name)
    }


def run_id(config: RunConfig) -> str:
    """Name the run, readably, with a digest of its data and of ``values_in_name``."""
    named = {"config": values_in_name(config), "data": manifest_digest(config.dataset)}
    stage = f"-{config.stage}" if isinstance(config, FourCastNetConfig) else ""
    preset = f"-{config.preset}" if config.preset != "smoke" else ""
    sizes = (
        f"n{config.devices}-lbs{config.local_batch_size}-gbs{config.global_batch_size}"
    )
    return (
        f"{config.workload}{stage}{preset}-{config.dataset}-{sizes}-s{config.seed}"
        f"-r{config.repeat}-{json_digest(named)[:8]}"
    )


def folder(config: RunConfig, runs_dir: Path) -> Path:
    """Say where a run lies."""
    return runs_dir / config.system / run_id(config)


def notebook_parameters(namespace: dict) -> dict:
    """Collect the parameters of a notebook, also misspelt ones.

    They are what its cell of parameters assigns, and the cell that papermill puts behind that.
    Raises ValueError for a text that is none: papermill makes 7 of the word 007.
    """
    own, injected = _assigned_in_cells(namespace)
    given = {name: namespace[name] for name in own | injected if name in namespace}
    kinds = dict.fromkeys(NOTEBOOK_OPTIONS, str)
    if isinstance(given.get("workload"), str):
        kinds |= parameter_types(_config_class(given["workload"]))
    for name, value in given.items():
        is_text = msgspec.json.schema(kinds.get(name, int)).get("type") == "string"
        is_default = value is None and name not in injected
        is_year = name.endswith("_years") and type(value) is int
        if is_text and not (
            isinstance(value, str | os.PathLike) or is_default or is_year
        ):
            raise ValueError(
                f"{name}: papermill made {value!r:.80} of it; give it with -r {name} "
                "WORD, or in quotes"
            )
    return given


def _assigned_in_cells(namespace: dict) -> tuple[dict, dict]:
    """Return the names that a notebook's cell of parameters assigns, and those of papermill's.

    ``In`` has the cells as they were executed, the newest last; a kernel may have executed a
    notebook before, and cells of its user.
    """
    injected = {}
    for cell in reversed(namespace["In"]):
        names = _names_assigned_in_cell(cell)
        if cell.startswith(PAPERMILL_CELL_START):
            # its paths are no parameters
            injected |= {name: None for name in names if "PAPERMILL_" not in name}
        elif "workload" in names:
            return names, injected
    raise ValueError(
        "the cell of parameters is not found; run the notebook's cells, without a magic (%%time) "
        "on top of it"
    )


def _names_assigned_in_cell(cell: str) -> dict:
    """Return the names that a cell assigns, in their order."""
    cell = re.sub("^[%!].*", "", cell, flags=re.MULTILINE)  # IPython's own
    try:
        symbols = symtable.symtable(cell, "cell", "exec").get_symbols()
    except SyntaxError:  # it had no effect
        return {}
    return {each.get_name(): None for each in symbols if each.is_assigned()}


def parameters_help_text() -> str:
    """Describe every parameter: first what it means, then its values in the presets and limits."""
    classes = (RunConfig, ScaleFields, WatchFields, *CONFIGS.values())
    parts = [inspect.getdoc(each) for each in classes]
    for workload, config_class in CONFIGS.items():
        lines = [
            f"parameters of {workload}, their values in {', '.join(PRESETS)}, and limits:"
        ]
        presets = [make(workload, preset=preset) for preset in PRESETS]
        for name, kind in parameter_types(config_class).items():
            values = ", ".join(str(getattr(run, name)) for run in presets)
            lines.append(f"{name}: {values}; {limits_of_type(kind)}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
