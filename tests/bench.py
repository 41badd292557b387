"""`make bench`: what measuring costs, how fast the trainers and their loaders are; ratios within one run."""

import contextlib
import functools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from torchvision import transforms
from torchvision.datasets import ImageFolder

from energynn import records
from energynn.cluster import systems
from energynn.config import REPOSITORY
from energynn.data import era5_sources, era5_store, imagenet, photographs
from energynn.data.era5_sources import CHANNELS
from energynn.data.images import Images, random_crop
from energynn.measure import sensors
from energynn.models.afno import AFNO
from energynn.train import fourcastnet
from energynn.train.phases import PhaseTimer

PAIRS = 7
PERIOD_S = 0.04  # the default of our trainers
STEPS = 25
WORKERS = 2


def sample_until_told(folder: str, period_s: float, stop) -> None:
    """The sampler in a process of its own, as perun has it."""
    found, _ = sensors.find(systems.CPU_MODEL)
    sampler = sensors.Sampler(Path(folder) / "samples.jsonl", found, period_s)
    sampler.start()
    stop.wait()
    sampler.stop()


def training_step() -> tuple:
    """A step of the AFNO at smoke size, and its floating-point operations."""
    torch.manual_seed(0)
    model = AFNO((60, 120), 4, 4, 4, embed_dim=192, depth=4)
    optimizer = torch.optim.Adam(model.parameters())
    state = torch.randn(1, 4, 60, 120)

    def step(phase=lambda name: contextlib.nullcontext()):
        with phase("forward"):
            loss = (model(state) - state).square().mean()
        with phase("backward"):
            optimizer.zero_grad()
            loss.backward()
        with phase("optimizer"):
            optimizer.step()

    with FlopCounterMode(display=False) as counter:
        step()
    return step, counter.get_total_flops()


def seconds_of(function, times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        function()
    return time.perf_counter() - begun


def measuring_costs() -> dict:
    """Time of a training loop measured as in a run (sampler beside it, phases timed), over the time without."""
    step, _ = training_step()
    seconds_of(step, 3)
    context = multiprocessing.get_context("spawn")
    ratios, measured = [], []
    for pair in range(PAIRS):
        times = {}
        for on in (pair % 2 == 0, pair % 2 == 1):  # each comes first as often
            with tempfile.TemporaryDirectory() as folder:
                stop = context.Event()
                child = context.Process(target=sample_until_told, args=(folder, PERIOD_S, stop)) if on else None
                if child:
                    child.start()
                    while not (Path(folder) / "samples.jsonl").exists():
                        time.sleep(0.05)
                timer = PhaseTimer(torch.device("cpu"), folder, 0) if on else None
                times[on] = seconds_of(lambda t=timer: step(t) if t else step(), STEPS)
                if child:
                    timer.write()
                    stop.set()
                    child.join()
        ratios.append(times[True] / times[False])
        measured.append(times[True])
        print(f"  measuring, pair {pair + 1} of {PAIRS}: {ratios[-1]:.3f}", file=sys.stderr, flush=True)
    return entry(
        "time of training with measurement",
        statistics.median(measured),
        "s",
        "the same loop without",
        statistics.median(ratios),
    )


def share_of_matrix_products() -> dict:
    """Rate of an AFNO training step over the rate of a large matrix product, both on one thread."""
    step, flops = training_step()
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    seconds_of(step, 3)
    seconds_of(lambda: a @ b, 3)
    ratios, rates = [], []
    for pair in range(PAIRS):
        product_rate = 10 * 2 * 1024**3 / seconds_of(lambda: a @ b, 10)
        rates.append(STEPS * flops / seconds_of(step, STEPS))
        ratios.append(rates[-1] / product_rate)
        print(f"  AFNO step, pair {pair + 1} of {PAIRS}: {ratios[-1]:.3f}", file=sys.stderr, flush=True)
    rate = statistics.median(rates) / 1e9
    return entry("rate of an AFNO training step", rate, "GFLOP/s", "1024 x 1024 matrix product",
                 statistics.median(ratios))  # fmt: skip


def image_loading() -> list[dict]:
    """Images per second of the fast crops from original JPEGs and from a prepared store, over torchvision's pipeline.

    The same random crops (a few pixels differ by one of 255), batches and number of workers, started before the clock;
    JPEGs of 500 x 375 pixels and 100 kB. What the fast loader leaves to the device is left out: normalization.
    """
    with tempfile.TemporaryDirectory() as folder:
        root, store = Path(folder) / "tree", Path(folder) / "store"
        for label, name in enumerate(photographs.PHOTOGRAPHS):
            for split, count in (("train", 48), ("val", 1)):
                (root / split / name).mkdir(parents=True)
                for k, data in enumerate(photographs.as_jpegs([name], count, (500, 375), label)):
                    (root / split / name / f"{k}.jpg").write_bytes(data)
        begun = time.perf_counter()
        imagenet.prepare(root, store, progress=print)
        preparing_s = time.perf_counter() - begun
        usual = transforms.Compose([
            transforms.RandomResizedCrop(224, scale=(0.5, 1.0)), transforms.RandomHorizontalFlip(),
            transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ])  # fmt: skip
        fast = functools.partial(random_crop, size=224, scale_min=0.5)
        listings = [imagenet.list_images(place)[0] for place in (root, store)]
        data_sets = [ImageFolder(root / "train", usual), *(Images(one, np.arange(len(one)), fast) for one in listings)]
        loaders = [DataLoader(images, 32, num_workers=WORKERS, persistent_workers=True) for images in data_sets]
        for loader in loaders:
            list(loader)
        seconds = []
        for pair in range(PAIRS):
            order = (0, 1, 2) if pair % 2 else (2, 1, 0)
            taken = {which: seconds_of(lambda: [None for _ in loaders[which]], 2) for which in order}  # noqa: B023
            seconds.append([taken[which] for which in range(3)])
            ratios = ", ".join(f"{seconds[-1][0] / taken[which]:.2f}" for which in (1, 2))
            print(f"  images, pair {pair + 1} of {PAIRS}: {ratios}", file=sys.stderr, flush=True)
    count, baseline = 2 * len(data_sets[0]), f"ImageFolder and Pillow, {WORKERS} workers"
    found = [
        entry(name, statistics.median(count / row[which] for row in seconds), "images/s", baseline,
              statistics.median(row[0] / row[which] for row in seconds))
        for which, name in ((1, "fast crops from original JPEGs"), (2, "fast crops from a prepared store"))
    ]  # fmt: skip
    cost = preparing_s / (count / 2 + 10)
    per_epoch_s = statistics.median(row[0] for row in seconds) / count
    return [*found, entry("preparing an image", 1e3 * cost, "ms", f"loading it once so, {WORKERS} workers",
                          cost / per_epoch_s)]  # fmt: skip


def era5_loading() -> dict:
    """Rate at which the trainer's loader makes normalized pairs of full-size states, over a plain read of their bytes.

    The files are in the page cache, where reading is fastest and anything besides it shows most.
    """
    shape, times = (len(CHANNELS), 720, 1440), 5
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "2019.npy"
        stored = np.lib.format.open_memmap(path, "w+", np.float32, (times, *shape))
        for state in stored:
            state[:] = np.random.default_rng(0).standard_normal(shape, np.float32)
        del stored
        note = {"channels": list(CHANNELS), "latitude_deg": np.linspace(90, -89.75, 720).tolist(),
                "longitude_deg": np.arange(0, 360, 0.25).tolist(),
                "hours_since_1970": era5_sources.hours_of_year(2019)[:times].tolist()}  # fmt: skip
        path.with_suffix(".json").write_text(json.dumps(note))
        np.save(path.with_name("mean-2019.npy"), np.zeros(shape, np.float32))
        ones = np.ones(len(CHANNELS))
        sequences = era5_store.Sequences(Path(folder), [2019], 1, ones, 2 * ones)
        loader = DataLoader(sequences, 1, shuffle=True, collate_fn=fourcastnet.as_batch)
        batch_B = 4 * np.prod(sequences.shape[1:])

        def load():
            for batch in loader:
                assert batch.shape == (1, 2, *shape)

        def read():
            with open(path, "rb", buffering=0) as file:
                for index in range(len(sequences)):
                    file.seek(era5_store.HEADER_B + index * batch_B // 2)
                    assert file.readinto(np.empty((1, 2, *shape), np.float32)) == batch_B

        load(), read()
        ratios, rates = [], []
        for pair in range(PAIRS):
            seconds = {}
            for function in (load, read) if pair % 2 else (read, load):
                seconds[function] = seconds_of(function, 1)
            ratios.append(seconds[read] / seconds[load])
            rates.append(len(sequences) * batch_B / seconds[load] / 1e9)
            print(f"  ERA5, pair {pair + 1} of {PAIRS}: {ratios[-1]:.3f}", file=sys.stderr, flush=True)
    return entry("ERA5 loading at 20 x 720 x 1440", statistics.median(rates), "GB/s", "plain read, page cache",
                 statistics.median(ratios))  # fmt: skip


def entry(name: str, value: float, unit: str, baseline: str, ratio: float) -> dict:
    return {"name": name, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio, "pairs": PAIRS,
            "machine": systems.describe_machine()["cpu"]}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    print(f"about three minutes: {PAIRS} interleaved pairs of each comparison, medians", file=sys.stderr)
    entries = [measuring_costs(), share_of_matrix_products(), *image_loading(), era5_loading()]
    path = REPOSITORY / "build" / "bench.json"
    path.parent.mkdir(exist_ok=True)
    records.write_json(path, entries)
    for line in entries:
        print(
            f"{line['name']:36} {line['value']:9.3f} {line['unit']:8} ratio {line['ratio']:.3f} to {line['baseline']}"
        )
    print(f"wrote {path.relative_to(REPOSITORY)}, {json.dumps(entries[0]['machine'])}")


if __name__ == "__main__":
    main()
