"""Studies as code: functions that return the runs of an experiment."""

import itertools
import math
import re
import runpy
from functools import partial
from pathlib import Path

from energynn.experiment import config, published_values
from energynn.experiment.config import RunConfig, suggestion
from energynn.host.reading import MAX_FILE_SIZE_B, require_file
from energynn.measure import machine

RunConfigs = list[RunConfig]

# The default study is shorter than the preset smoke, so that `make reproduce` takes ten minutes.
# Forty-two updates teach little unless they end with small ones: batch norm's statistics lag. So
# the learning rate falls, as a warm-up backwards, to a few per cent, and momentum is zero.
SHORT_TRAINING = dict(
    dataset="photographs_large",
    image_size=24,
    epochs=3,
    momentum=0.0,
    fused_optimizer=True,
    warmup_start=0.015,
    learning_rate=0.014,
    warmup_epochs=3,
    warmup_per_epoch=False,
    training_samples=168,
    validation_samples=40,
)


def smoke(system: str) -> RunConfigs:
    """The default study: every path once, on one and two devices, with real but small data.

    Figures: own points in the ResNet50 and FourCastNet figures. Hardware: any two cores. Command:
    `make reproduce`. Cost: about 5 minutes on two cores. Expected: ResNet50 with constant local
    batch size takes half as many steps on two devices, with constant global batch size as many, and
    tells more than half of the ten photographs apart (parts of the same ones: no generalization);
    FourCastNet comes near persistence; all energies on a machine without sensors are estimates. It
    runs on CPU cores also where there are GPUs, so that it is the same study everywhere.
    """
    make = partial(config.make, device="cpu", system=system)
    images = partial(make, "resnet50", **SHORT_TRAINING)
    # cores twice as fast as ours have their samples, too
    states = partial(
        make, "fourcastnet", patch_size=6, epochs=12, sampling_period_s=0.02
    )
    # the same seed each time: the difference of repeats is the machine's noise
    runs = [
        images(devices=n, local_batch_size=12, repeat=repeat)
        for repeat in range(2)
        for n in (1, 2)
    ]
    runs.append(images(devices=2, global_batch_size=12))
    for n in (1, 2):
        pretraining = states(devices=n)
        tuning = states(
            devices=n,
            stage="finetune",
            initial_run=config.run_id(pretraining),
            epochs=8,
        )
        runs += [pretraining, tuning]
    # as large as the one on two devices
    runs.append(states(devices=1, global_batch_size=2))
    return runs


def one_device(system: str) -> RunConfigs:
    """One run with fewer samples and a smaller batch, which a forecast from one device needs.

    Figures: none. Hardware: any core. Command: `make reproduce`, after the default study. Cost:
    half a minute. Expected: with the default study's runs on one device this one tells the time of
    a sample and of an update, from which `energynn forecast predict --held-out` forecasts the runs
    on two devices.
    """
    small = SHORT_TRAINING | dict(training_samples=96, local_batch_size=8)
    return [config.make("resnet50", device="cpu", system=system, **small)]


def kick_the_tires(system: str) -> RunConfigs:
    """Two runs of the default study, one of each workload, to see in minutes whether all is well.

    Figures: as of the default study. Hardware: any two cores. Command: `make kick-the-tires`. Cost:
    five minutes on two cores, with the paper. Expected: as of the default study.
    """
    runs = smoke(system)
    return [runs[1], runs[7]]


# What one H100 is expected to train in a second, by recipe and local batch size.
# One H200 made 1.2 to 1.7 times these images (runs/gpu-h200): its shortest runs took 14.5 s.
# The rates stay: sizes and names of the runs that are made follow from them.
GPU_STUDY_RUN_S = 24
IMAGES_PER_S = {
    "paper": {32: 1000, 64: 1150, 96: 1200, 128: 1250, 256: 1300, 512: 1300},
    "fast": {32: 2300, 64: 2400, 128: 2900, 256: 3200, 512: 3300},
}
STATES_PER_S = {"paper": 6.5, "fast": 20}


def image_point(
    preset: str, size: int, share=1.0, steps=1, images_per_s=0, **fields
) -> dict:
    """ResNet50 for about GPU_STUDY_RUN_S on one batch that stays on the device, at a share of its
    rate.

    ``steps`` local batches make an update. A repeated batch diverges at the recipe's warm-up rate
    of 0.1. Samples are whole batches: others would be tuned within the run.
    """
    rate = share * (images_per_s or IMAGES_PER_S[preset][size])
    batch = size * steps
    samples = round(rate * GPU_STUDY_RUN_S / batch) * batch
    point = dict(
        workload="resnet50",
        preset=preset,
        dataset="photographs",
        image_loading="device",
        local_batch_size=size,
        accumulation_steps=steps,
        training_samples=samples,
        epochs=1,
        validation_samples=size,
        evaluate_training_set=False,
        warmup_start=1e-3,
    )
    if share < 1:
        point["step_period_s"] = round(batch / rate, 4)
    return point | fields


def state_point(preset: str, size: int, share=1.0, seconds=GPU_STUDY_RUN_S) -> dict:
    """FourCastNet at full size on one batch of random states, at a share of its rate."""
    rate = share * STATES_PER_S[preset]
    epochs = math.ceil(rate * seconds / config.SYNTHETIC_STATES)
    point = dict(
        workload="fourcastnet",
        preset=preset,
        dataset="synthetic",
        states_on_device=True,
        local_batch_size=size,
        epochs=epochs,
        save_weights=False,
    )
    if share < 1:
        point["step_period_s"] = round(size / rate, 3)
    return point


# JPEG files as large as ImageNet's, through the loader of each recipe.
JPEG_FILES_POINT = dict(dataset="photographs_large", image_loading=None)

# In the order in which they are made: neither samples nor updates go with the time, and what is
# last is needed least, because a loan of a GPU may leave it out. ResNet50 with LBS 256 comes again
# and again: what drifts shows in it.
GPU_STUDY_POINTS = [
    image_point("paper", 256),
    state_point("paper", 4),
    image_point("fast", 256),
    image_point("paper", 32),
    image_point("paper", 256, 0.3),
    image_point("paper", 32, 0.3),
    image_point("paper", 256, repeat=1),
    image_point("paper", 128),
    image_point("paper", 128, images_per_s=1000, loader_workers=4, **JPEG_FILES_POINT),
    state_point("fast", 4),
    state_point("fast", 1),
    state_point("paper", 1),
]


def gpu(system: str = "local") -> RunConfigs:
    """What one GPU needs by local batch size, update rate, recipe and loader.

    ResNet50 on images that stay on the device, also at a part of its rate, and through the loader;
    FourCastNet at full size on random states. Figures: notebooks/45_one_gpu. Hardware: one NVIDIA
    GPU with 25 GB. Command: `make gpu-study`. Cost: nine minutes, about 0.04 kWh. Expected: energy
    per sample falls with the local batch size, and with the fast recipe much further; the paper's
    loader keeps the GPU waiting.
    """
    return make_gpu_runs(GPU_STUDY_POINTS, system)


def gpu_system() -> str:
    """Name a system after this machine's GPU, so that no two kinds of GPU share a folder."""
    names = [gpu["name"].lower() for gpu in machine.list_gpus()] or ["study"]
    words = re.findall("[a-z0-9]+", names[0].removeprefix("nvidia "))
    return "-".join(["gpu", *words])


def make_gpu_runs(points: list[dict], system: str) -> RunConfigs:
    """Make runs; the system "local" gets the name of this machine's GPU."""
    if system == "local":
        system = gpu_system()
    shared = dict(system=system, device="gpu", sampling_period_s=0.02, idle_ready_s=5.0)
    return [config.make(**shared | point) for point in points]


# Epochs of the study large-batch by global batch size: four, and as many as make 60 updates of 960
# images.
LARGE_BATCH_EPOCHS = {16: (1, 4), 48: (3, 4), 96: (4, 6), 240: (4, 15)}


def large_batch(system: str = "local") -> RunConfigs:
    """Top-1 error against the global batch size, on one device by accumulation: LBS stays 16.

    At fixed epochs a larger batch means fewer updates, as in the paper's series with constant local
    batch size; at fixed updates it means more samples. Three seeds each. Data: the
    photographs at 32 pixels, an easy task. The learning rate is a fifth of the recipe's, with which
    these runs without warm-up diverge from GBS 96 on.
    Figures: notebooks/35_large_batch. Hardware: any core.
    Command: `energynn study run large-batch`.
    Cost: about an hour. Expected: at fixed epochs the error rises with the global batch size, at
    fixed updates it does not. Records of one machine are committed under runs/large-batch/.
    """
    make = partial(
        config.make,
        "resnet50",
        system="large-batch" if system == "local" else system,
        device="cpu",
        sampling_period_s=0.1,
        learning_rate=0.02,
        image_size=32,
        local_batch_size=16,
        training_samples=960,
        validation_samples=250,
        evaluate_training_set=False,
    )
    return [
        make(global_batch_size=gbs, epochs=epochs, seed=seed)
        for seed in range(3)
        for gbs, choices in LARGE_BATCH_EPOCHS.items()
        for epochs in choices
    ]


OWN_STUDIES = {
    study.__name__.replace("_", "-"): study
    for study in (smoke, one_device, kick_the_tires, gpu, large_batch)
}


# --------------------------------------------------------------------------- the paper's own series
# `energynn study show` tells their cost. Hardware is where the paper ran them; `energynn submit`
# runs them anywhere.

_make_paper_run = partial(config.make, preset="paper", device="gpu")


def _make_series(name: str, system: str) -> RunConfigs:
    """Make the runs of a series of runs/published/series.toml, on powers of two of GPUs."""
    series = published_values.SERIES[name]
    fewest, most = map(int, re.findall(r"\d+", series["gpus"]))
    make = partial(
        _make_paper_run,
        series["workload"],
        system=system,
        local_batch_size=series.get("local_batch_size"),
        global_batch_size=series.get("global_batch_size"),
    )
    runs = []
    for n in (2**power for power in range(fewest.bit_length() - 1, most.bit_length())):
        data = {}  # all of it
        if series["data"] == "scaled" and n < most:
            data["training_samples"] = config.IMAGENET_IMAGES["train"] * n // most
            data["validation_samples"] = config.IMAGENET_IMAGES["val"] * n // most
        if series.get("stage") == "finetune":
            data |= {"stage": "finetune", "initial_run": config.run_id(make(devices=n))}
        repeats = range(series.get("repeats", 1))
        runs += [make(devices=n, repeat=repeat, **data) for repeat in repeats]
    return runs


def _series_study(name: str) -> partial:
    """Return the study of a series, with what is to be said of it."""
    study = partial(_make_series, name)
    study.__doc__ = published_values.SERIES[name]["about"]
    return study


def t1(system: str) -> RunConfigs:
    """FourCastNet pre-training as in Table 1, on A100 and on H100; parts of F1, or of F4 and F5.

    Table: 1. Hardware: A100 and H100. Command: `energynn submit T1 --system horeka-a100`, then
    -h100.
    Expected: H100 needs 25 to 30 % less time, and energy within 5 %.
    """
    return [
        _make_paper_run("fourcastnet", system=system, devices=n, local_batch_size=size)
        for n, size in ((4, 4), (16, 1), (32, 1))
    ]


def fluctuation(system: str) -> RunConfigs:
    """FourCastNet pre-training, 20 epochs on 64 GPUs three times over: how much repeats differ.

    Text: section 3.3.1. Hardware: A100. Command: `energynn submit fluctuation --system
    horeka-a100`.
    Expected: a spread of about 4 %.
    """
    return [
        _make_paper_run(
            "fourcastnet",
            system=system,
            devices=64,
            local_batch_size=1,
            epochs=20,
            repeat=repeat,
        )
        for repeat in range(3)
    ]


PAPER_STUDIES = {name: _series_study(name) for name in published_values.SERIES}
PAPER_STUDIES |= {"T1": t1, "fluctuation": fluctuation}
# What the paper ran on each of HoreKa's partitions; a name may stand for several studies.
STUDY_GROUPS = {
    "paper-a100": [name for name in PAPER_STUDIES if name not in ("F4", "F5")],
    "paper-h100": ["F4", "F5", "T1"],
}
STUDIES = OWN_STUDIES | PAPER_STUDIES


def large_batch_thresholds(run: RunConfig) -> dict[int, str]:
    """Find the global batch sizes up to which the study saw no loss of accuracy, and where.

    None where the run's data are not the study's.
    """
    if config.PRESETS["paper"].get(run.workload, {}).get("dataset") != run.dataset:
        return {}
    asked = ("large_batch_threshold", run.workload, getattr(run, "stage", ""))
    known = {}
    for row in published_values.read_rows():
        if (row["quantity"], row["workload"], row["stage"]) == asked:
            known[int(row["value"])] = f"{row['note']} ({row['stands_in']})"
    return dict(sorted(known.items()))


def make_sweep(parameters: dict[str, str]) -> RunConfigs:
    """Make a run for each combination of values; a text with commas is several of them.

    Only years are one value with its commas. Raises ValueError with the remedy.
    """
    choices = []
    for name, value in parameters.items():
        values = [value] if name.endswith("_years") else value.split(",")
        choices.append([(name, each.strip()) for each in values])
    runs = [config.make(**dict(pairs)) for pairs in itertools.product(*choices)]
    runs = list(dict.fromkeys(runs))
    if len(set(map(config.run_id, runs))) < len(runs):
        raise ValueError(
            "several of these runs are one: how a run is watched makes no other; give each "
            "another repeat, one after the other"
        )
    return runs


def find_studies(names: list[str], system: str = "local") -> dict[str, RunConfigs]:
    """Make the runs of each study on a system, by the study's name.

    A name may be one of STUDY_GROUPS, or a Python file of your own, which defines ``study(system)``
    and returns its runs. Raises ValueError with the remedy for an unknown name, or a file whose
    study cannot be made.
    """
    members = [study for name in names for study in STUDY_GROUPS.get(name, [name])]
    runs_by_study = {}
    for name in members:
        if name.endswith(".py"):
            runs_by_study[name] = _runs_of_own_file(name, system)
        elif name in STUDIES:
            runs_by_study[name] = STUDIES[name](system)
        else:
            known = [*STUDIES, *STUDY_GROUPS]
            raise ValueError(
                f"study: {name!r} is not known{suggestion(name, known)}; "
                f"choose one of {', '.join(known)}, or a file of your own (.py)"
            )
    return runs_by_study


def list_runs_of_studies(names: list[str], system: str) -> list[RunConfig]:
    """List the runs of ``find_studies``, each once: some belong to several studies."""
    studies = find_studies(names, system).values()
    return list(dict.fromkeys(itertools.chain.from_iterable(studies)))


def _runs_of_own_file(path: str, system: str) -> RunConfigs:
    try:
        require_file(Path(path), MAX_FILE_SIZE_B)
        runs = list(runpy.run_path(path)["study"](system))
        if not runs or not all(isinstance(run, RunConfig) for run in runs):
            raise ValueError(f"got {runs!r:.80}")
        return runs
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise ValueError(
            f"study: {path}: {kind}: {error}; a file must define `def study(system)`, which "
            "returns runs of config.make(...)"
        ) from error
