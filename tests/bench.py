"""`make bench`: what measuring costs, how fast the trainers and their loaders are; ratios within
one run.
"""

import contextlib
import copy
import functools
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch.utils.data import DataLoader

from energynn.data import imagenet, manifests, photographs
from energynn.experiment import config
from energynn.measure import machine, sampler_process, sensors
from energynn.train import fourcastnet, resnet50
from energynn.train.afno import AFNO
from energynn.train.phases import PhaseTimer
from tests.jpegs import as_jpegs, usual_images
from tests.peers import table
from tests.published_afno import PublishedFilter, every_activation_kept
from tests.train.conftest import ALONE, alone_in_the_world

PAIRS = 7
AFNO_PAIRS = 15  # a step differs by less than the machine does
PERIOD_S = 0.04  # the default of our trainers
STEPS = 25
WORKERS = 2


def sample_until_told(folder: str, period_s: float, stop) -> None:
    """The sampler in a process of its own, as perun has it."""
    found = sampler_process.find_sensors({"cpu_model": machine.DEFAULT_CPU_MODEL}, None)
    sampler = sensors.Sampler(Path(folder) / "samples.jsonl", found, period_s)
    sampler.start()
    stop.wait()
    sampler.stop()


def training_step() -> Callable:
    """A step of the AFNO at smoke size."""
    torch.manual_seed(0)
    model = AFNO((60, 120), 4, 4, embed_dim=192, depth=4)
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

    return step


def seconds_of(function, times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        function()
    return time.perf_counter() - begun


def tell(what: str, pair: int, pairs: int, ratio: float) -> None:
    words = f"  {what}, pair {pair + 1} of {pairs}: {ratio:.3f}"
    print(words, file=sys.stderr, flush=True)


def measuring_costs() -> None:
    """Time of a training loop measured as in a run (sampler beside it, phases timed), over the
    time without.
    """
    step = training_step()
    seconds_of(step, 3)
    context = multiprocessing.get_context("spawn")
    ratios, measured = [], []
    for pair in range(PAIRS):
        times = {}
        for on in (pair % 2 == 0, pair % 2 == 1):  # each comes first as often
            with tempfile.TemporaryDirectory() as folder:
                if not on:
                    times[on] = seconds_of(step, STEPS)
                    continue
                stop = context.Event()
                given = folder, PERIOD_S, stop
                child = context.Process(target=sample_until_told, args=given)
                child.start()
                while not (Path(folder) / "samples.jsonl").exists():
                    time.sleep(0.05)
                timer = PhaseTimer(torch.device("cpu"), folder, 0)
                times[on] = seconds_of(functools.partial(step, timer), STEPS)
                timer.write()
                stop.set()
                child.join()
        ratios.append(times[True] / times[False])
        measured.append(times[True])
        tell("measuring", pair, PAIRS, ratios[-1])
    baseline, ratio = "the same loop without", statistics.median(ratios)
    value = statistics.median(measured)
    print_ratio("time of training with measurement", value, "s", baseline, ratio)


# --------------------------------------------------------------------------- the training steps


def with_published_operations(model: AFNO) -> AFNO:
    """The same network with the published code's operations: FFT, every activation kept, patches
    by convolution.
    """
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.filter = PublishedFilter(block.filter)
        block.mlp.forward = functools.partial(every_activation_kept, block.mlp)
    patches = model.patch_embed
    patches.forward = lambda x: patches.proj(x).flatten(2).transpose(1, 2)
    return model


def afno_against_published_code() -> None:
    """Processor's time of the published code's AFNO step at 20 x 176 x 352 on one thread, over
    that of ours.
    """
    torch.manual_seed(0)
    ours, state = AFNO((176, 352)), torch.randn(1, 20, 176, 352)
    networks = [ours, with_published_operations(ours)]
    with torch.no_grad():
        torch.testing.assert_close(
            networks[0](state), networks[1](state), rtol=1e-4, atol=1e-4
        )
    optimizers = [
        torch.optim.Adam(network.parameters(), fused=True) for network in networks
    ]

    def step_s(which: int) -> float:
        begun = time.process_time()
        loss = fourcastnet.relative_l2_loss(networks[which](state), state)
        optimizers[which].zero_grad()
        loss.backward()
        optimizers[which].step()
        return time.process_time() - begun

    ratios, own_s = [], []
    for pair in range(-2, AFNO_PAIRS):  # two to warm up
        seconds = {which: step_s(which) for which in ((0, 1) if pair % 2 else (1, 0))}
        if pair >= 0:
            ratios.append(seconds[1] / seconds[0])
            own_s.append(seconds[0])
            tell("AFNO", pair, AFNO_PAIRS, ratios[-1])
    name = "AFNO step: published code over ours"
    ratio = statistics.median(ratios)
    print_ratio(name, statistics.median(own_s), "s (ours)", "ours", ratio)


def image_loading(baseline: str = "ImageFolder and Pillow") -> None:
    """Images per second of the trainer's loaders over torchvision's ImageFolder with Pillow's
    transforms.

    "paper" is that pipeline; "fast" has the same random crops (pixels differ by less than one of
    255 on average) and leaves normalization to the device; so from original JPEGs and from a
    prepared store. JPEGs of 500 x 375 pixels and 100 kB, all with the same batches and number of
    workers, started before the clock.
    """
    with tempfile.TemporaryDirectory() as folder:
        root, store = Path(folder) / "tree", Path(folder) / "store"
        for name in photographs.PHOTOGRAPH_SOURCES:
            for split, count in (("train", 48), ("val", 1)):
                (root / split / name).mkdir(parents=True)
                for k, data in enumerate(as_jpegs(name, count, (500, 375))):
                    (root / split / name / f"{k}.jpg").write_bytes(data)
        imagenet.write_ppm_store(root, store)
        pillow = usual_images(root / "train", 224)
        loaders = {
            baseline: DataLoader(
                pillow, 32, num_workers=WORKERS, persistent_workers=True
            ),
            "paper's crops": trainers_loader(root, image_loading="pil"),
            "fast crops": trainers_loader(
                root, image_loading="fast", uint8_to_device=True
            ),
            "a prepared store": trainers_loader(
                store, image_loading="store", uint8_to_device=True
            ),
        }
        for loader in loaders.values():
            list(loader)
        taken_s: dict[str, list[float]] = {name: [] for name in loaders}
        for pair in range(PAIRS):
            for name in loaders if pair % 2 else reversed(loaders):
                taken_s[name].append(
                    seconds_of(functools.partial(list, loaders[name]), 1)
                )
    usual_s = taken_s.pop(baseline)
    for name, seconds in taken_s.items():
        rate = len(pillow) / statistics.median(seconds)
        ratios = [
            first / second for first, second in zip(usual_s, seconds, strict=True)
        ]
        print_ratio(name, rate, "images/s", baseline, statistics.median(ratios))


def trainers_loader(root: Path, **fields) -> DataLoader:
    """Batches of the training images below ``root`` as the trainer loads them, in workers that
    stay.
    """
    sizes = {"local_batch_size": 32, "image_size": 224}
    sizes |= {"training_samples": 0, "validation_samples": 0}
    workers = {"loader_workers": WORKERS, "persistent_workers": True}
    made = config.make("resnet50", **fields, **sizes, **workers)
    with (
        mock.patch.object(manifests, "verify", lambda *given, **named: root),
        alone_in_the_world(),
    ):
        return resnet50.make_loader(resnet50.load_images(made)[0], made, ALONE)


def peers() -> None:
    """Median errors of short windows by zeus over those by energynn."""
    if not table.is_installed():
        print("  zeus and codecarbon are not installed: pip install -e '.[peers]'")
        return
    for length_s, errors in table.compare().items():
        ours, theirs = (statistics.median(errors[one]) for one in ("Energynn", "Zeus"))
        name = f"error of a window of {length_s:g} s"
        print_ratio(name, 100 * ours, "%", "zeus", theirs / ours)


def print_ratio(
    name: str, value: float, unit: str, baseline: str, ratio: float
) -> None:
    print(
        f"{name:36} {value:9.3f} {unit:8} ratio {ratio:.3f} to {baseline}", flush=True
    )


def main() -> None:
    """All comparisons, or only those named."""
    known = {function.__name__.replace("_", "-"): function for function in USUAL}
    if unknown := set(sys.argv[1:]) - set(known):
        names = ", ".join(known)
        raise SystemExit(f"tests.bench: {unknown} not known; choose from {names}")
    torch.set_num_threads(1)
    for function in [known[name] for name in sys.argv[1:]] or USUAL:
        function()


USUAL = (measuring_costs, afno_against_published_code, image_loading, peers)

if __name__ == "__main__":
    main()
