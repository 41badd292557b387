"""`make bench`: what measuring costs, how fast the trainers and their loaders are; ratios within one run."""

import collections
import contextlib
import copy
import functools
import io
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models, transforms
from torchvision.datasets import ImageFolder

from energynn import cli, config, files
from energynn.data import era5_sources, era5_store, manifests, photographs
from energynn.data.era5_sources import CHANNELS
from energynn.files import REPOSITORY
from energynn.measure import energy, machine, sensors
from energynn.models import afno
from energynn.models.afno import AFNO
from energynn.train import checkpoint, distributed, fourcastnet, resnet50
from energynn.train.distributed import World
from energynn.train.gradients import Gradients
from energynn.train.phases import PhaseTimer
from tests.jpegs import as_jpegs
from tests.saved_bytes import bytes_saved_for_backward, every_activation_kept

PAIRS = 7
PERIOD_S = 0.04  # the default of our trainers
STEPS = 25
RESNET_STEPS = 4
WORKERS = 2


def sample_until_told(folder: str, period_s: float, stop) -> None:
    """The sampler in a process of its own, as perun has it."""
    found, _ = sensors.find(machine.CPU_MODEL)
    sampler = sensors.Sampler(Path(folder) / "samples.jsonl", found, period_s)
    sampler.start()
    stop.wait()
    sampler.stop()


def training_step() -> Callable:
    """A step of the AFNO at smoke size."""
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

    return step


def seconds_of(function, times: int, clock: Callable[[], float] = time.perf_counter) -> float:
    begun = clock()
    for _ in range(times):
        function()
    return clock() - begun


def measuring_costs() -> dict:
    """Time of a training loop measured as in a run (sampler beside it, phases timed), over the time without."""
    step = training_step()
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


# ------------------------------------------------------------------------------------------------- the training steps


class Products(TorchDispatchMode):
    """The matrix products made meanwhile: how often each, by function, shapes and strides; and all of them again.

    A product into memory that is there already (``out``) is made again into such memory.
    """

    FUNCTIONS = ("mm", "addmm", "bmm", "baddbmm")

    def __init__(self):
        super().__init__()
        self.times = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in self.FUNCTIONS:
            tensors = (*args, *(kwargs or {}).values())
            self.times[function, tuple((tuple(tensor.shape), tensor.stride()) for tensor in tensors)] += 1
        return function(*args, **(kwargs or {}))

    def again_s(self) -> float:
        """Processor's time of as many products with the same shapes and strides, and of nothing else."""
        total_s = 0.0
        for (function, layouts), times in self.times.items():
            operands = []
            for shape, stride in layouts:
                elements = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
                operands.append(torch.randn(elements).as_strided(shape, stride))
            out = {"out": operands.pop()} if function._overloadname == "out" else {}
            again = functools.partial(function, *operands, **out)
            again()  # the first asks the system for memory
            total_s += seconds_of(again, times, time.process_time)
        return total_s


def share_of_matrix_products() -> list[dict]:
    """Rate of a training step of the AFNO of the paper's widths over the rate of a large matrix product, one thread.

    The step's operations are what torch counts: matrix products and the convolution's equal. Layer norms, GELU (and
    its recomputation), skip connections and the fused Adam take time, but count for nothing. Time is the processor's,
    which on one thread is that of the clock but for what other processes take. Then the same over the rate of the
    step's own products, made again with nothing else, and their rate over the large product's: what is lost beside
    the products, and by their shapes.
    """
    torch.manual_seed(0)
    model, state = AFNO((176, 352)), torch.randn(1, 20, 176, 352)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def step():
        loss = fourcastnet.relative_l2_loss(model(state), state)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    a, b = torch.randn(4096, 4096), torch.randn(4096, 4096)

    def large_product_rate() -> float:
        return 2 * 4096**3 / seconds_of(lambda: a @ b, 1, time.process_time)

    with FlopCounterMode(display=False) as counter, Products() as products:
        step()
    flops = counter.get_total_flops()
    seconds_of(step, 4)  # until then the allocator still asks the system for memory
    rates, own_rates, ratios, to_own, own_ratios, large_rates = [], [], [], [], [], [large_product_rate()]
    for pair in range(PAIRS):  # large product, step, large product, the step's products, large product
        rates.append(flops / seconds_of(step, 1, time.process_time))
        large_rates.append(large_product_rate())
        own_rates.append(flops / products.again_s())
        large_rates.append(large_product_rate())
        ratios.append(rates[-1] / statistics.mean(large_rates[-3:-1]))
        own_ratios.append(own_rates[-1] / statistics.mean(large_rates[-2:]))
        to_own.append(rates[-1] / own_rates[-1])
        words = f"{ratios[-1]:.3f}, to its own products {to_own[-1]:.3f}, these {own_ratios[-1]:.3f}"
        print(f"  AFNO step, pair {pair + 1} of {PAIRS}: {words}", file=sys.stderr, flush=True)
    rate, own_rate = statistics.median(rates) / 1e9, statistics.median(own_rates) / 1e9
    name, large = "rate of an AFNO training step", "4096 x 4096 matrix product"
    return [
        entry(name, rate, "GFLOP/s", large, statistics.median(ratios)),
        entry("same, to its own products", rate, "GFLOP/s", "its own products alone", statistics.median(to_own)),
        entry("rate of its own products alone", own_rate, "GFLOP/s", large, statistics.median(own_ratios)),
    ]


class PublishedFilter(torch.nn.Module):
    """The filter of one of our blocks with the published code's operations (networks/afnonet.py, AFNO2D)."""

    def __init__(self, ours: afno.FourierFilter):
        super().__init__()
        self.ours = ours

    def forward(self, x):
        (n, h, w, channels), ours = x.shape, self.ours
        blocks, size = ours.w1.shape[1:3]
        z = torch.fft.rfft2(x.float(), dim=(1, 2), norm="ortho").reshape(n, h, w // 2 + 1, blocks, size)
        rows, columns = slice(0, h), slice(0, min(h // 2 + 1, w // 2 + 1))  # those that pass
        first, second = ([torch.zeros(z.shape) for _ in range(2)] for _ in range(2))

        def layer(real, imaginary, weight, bias, part):
            signs = (1, -1) if part == 0 else (1, 1)
            products = [torch.einsum("...bi,bio->...bo", real, weight[part])]
            products.append(torch.einsum("...bi,bio->...bo", imaginary, weight[1 - part]))
            return signs[0] * products[0] + signs[1] * products[1] + bias[part]

        z = z[:, rows, columns]
        for part in (0, 1):
            first[part][:, rows, columns] = torch.relu(layer(z.real, z.imag, ours.w1, ours.b1, part))
        passed = [part[:, rows, columns] for part in first]
        for part in (0, 1):
            second[part][:, rows, columns] = layer(*passed, ours.w2, ours.b2, part)
        z = torch.nn.functional.softshrink(torch.stack(second, dim=-1), ours.sparsity_threshold)
        z = torch.view_as_complex(z).reshape(n, h, w // 2 + 1, channels)
        return torch.fft.irfft2(z, s=(h, w), dim=(1, 2), norm="ortho").to(x.dtype) + x


def with_published_operations(model: AFNO) -> AFNO:
    """The same network with the published code's operations: FFT, every activation kept, patches by convolution."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.filter = PublishedFilter(block.filter)
        block.mlp.forward = functools.partial(every_activation_kept, block.mlp)
    patches = model.patch_embed
    patches.forward = lambda x: patches.proj(x).flatten(2).transpose(1, 2)
    return model


def afno_against_published_code() -> dict:
    """Processor's time of the published code's AFNO step at 20 x 176 x 352 on one thread, over that of ours."""
    torch.manual_seed(0)
    ours, state = AFNO((176, 352)), torch.randn(1, 20, 176, 352)
    networks = [ours, with_published_operations(ours)]
    with torch.no_grad():
        torch.testing.assert_close(networks[0](state), networks[1](state), rtol=1e-4, atol=1e-4)
    optimizers = [torch.optim.Adam(network.parameters(), fused=True) for network in networks]

    def step_s(which: int) -> float:
        begun = time.process_time()
        loss = fourcastnet.relative_l2_loss(networks[which](state), state)
        optimizers[which].zero_grad()
        loss.backward()
        optimizers[which].step()
        return time.process_time() - begun

    ratios, own_s = [], []
    for pair in range(-2, PAIRS):  # two to warm up
        seconds = {which: step_s(which) for which in ((0, 1) if pair % 2 else (1, 0))}
        if pair >= 0:
            ratios.append(seconds[1] / seconds[0])
            own_s.append(seconds[0])
            print(f"  AFNO, pair {pair + 1} of {PAIRS}: {ratios[-1]:.3f}", file=sys.stderr, flush=True)
    name = "AFNO step: published code over ours"
    return entry(name, statistics.median(own_s), "s (ours)", "ours", statistics.median(ratios))


def memory_for_backward() -> list[dict]:
    """Bytes that the AFNO at 20 x 176 x 352 keeps for the backward pass of one sample, over those if it kept all."""
    state = torch.randn(1, 20, 176, 352)
    with mock.patch.object(afno.MLP, "forward", every_activation_kept):
        everything = bytes_saved_for_backward(AFNO((176, 352)), state)
    return [
        entry(name, kept / 1e6, "MB", "every activation kept", kept / everything, pairs=1)
        for name, option in (("kept for backward", False), ("same, activation_checkpointing", True))
        for kept in [bytes_saved_for_backward(AFNO((176, 352), activation_checkpointing=option), state)]
    ]


def full_size_step() -> list[dict]:
    """One training step of the whole FourCastNet, all cores, in a process of its own; only when asked for by name."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        parts = process.submit(full_size_parts).result()
    print("  " + ", ".join(f"{name} {value:.4g}" for name, value in parts.items()), file=sys.stderr, flush=True)
    seconds = parts["forward_s"] + parts["backward_s"] + parts["optimizer_s"]
    return [
        entry("full-size step: peak memory", parts["peak_GiB"], "GiB", "12 GiB", parts["peak_GiB"] / 12, pairs=1),
        entry("full-size step: time", seconds, "s", "its operations as a matrix product",
              seconds / parts["as_product_s"], pairs=1),
    ]  # fmt: skip


def full_size_parts() -> dict[str, float]:
    """Seconds of the parts of the first step, as the trainer makes it, and this process's peak memory."""
    torch.manual_seed(0)
    model = AFNO()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    batch = torch.randn(1, 2, 20, 720, 1440)
    with FlopCounterMode(display=False) as counter:
        begun, processor_s = time.perf_counter(), -time.process_time()
        loss = fourcastnet.rollout_loss(model, batch)
        forward = time.perf_counter()
        optimizer.zero_grad()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        end, processor_s = time.perf_counter(), processor_s + time.process_time()
    peak_GiB = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    a, b = torch.randn(4096, 4096), torch.randn(4096, 4096)
    product_s = seconds_of(lambda: a @ b, 5) / 5
    return {
        "forward_s": forward - begun, "backward_s": backward - forward, "optimizer_s": end - backward,
        "processor_s": processor_s,  # of all threads; less than threads x time where others took the cores
        "peak_GiB": peak_GiB, "threads": torch.get_num_threads(), "loss": loss.item(),
        "as_product_s": product_s * counter.get_total_flops() / (2 * 4096**3),
    }  # fmt: skip


def resnet50_steps() -> list[dict]:
    """A step of the trainer as ``main`` does it (batch on the device, DDP, phases, votes), over the plainest loop.

    Images of the paper's 224 pixels, but only 8 of its 256 a step: what does not depend on their number, as DDP's
    copies of the gradients, weighs more here than there. CPU time of one thread: on a machine with nothing else to do
    the same as time, elsewhere more repeatable. The trainer's runs from the barrier before the first step to the only
    evaluation.
    """
    size = dict(local_batch_size=8, image_size=224)
    shape = dict(training_samples=8 * RESNET_STEPS, validation_samples=8, epochs=1, warmup_epochs=1, device="cpu",
                 image_loading="device", evaluate_training_set=False)  # fmt: skip
    ways = {"paper": {}, "fast": config.FAST | dict(channels_last=True)}
    cores, seconds = os.sched_getaffinity(0), []

    def trainer_s(way: str) -> float:
        marks = []

        def noted(function):
            return lambda *given: marks.append(time.process_time()) or function(*given)

        with (
            mock.patch.object(distributed, "barrier", noted(distributed.barrier)),
            mock.patch.object(resnet50, "evaluate", noted(resnet50.evaluate)),
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            resnet50.main(config.make("resnet50", **size, **shape, **ways[way]), Path(folder))
        os.sched_setaffinity(0, cores)
        torch.use_deterministic_algorithms(False)
        return (marks[1] - marks[0]) / RESNET_STEPS

    for pair in range(PAIRS):
        order = [plainest_steps_s, *ways] if pair % 2 else [*ways, plainest_steps_s]
        taken = {way: trainer_s(way) if way in ways else way(**size) for way in order}
        seconds.append({way: taken[way] for way in ways} | {"plain": taken[plainest_steps_s]})
        ratios = ", ".join(f"{way} {taken[way] / taken[plainest_steps_s]:.3f}" for way in ways)
        print(f"  ResNet50 step, pair {pair + 1} of {PAIRS}: {ratios}", file=sys.stderr, flush=True)
    return [
        entry(f"ResNet50 step, {way}", statistics.median(row[way] for row in seconds), "s", "plainest torch loop",
              statistics.median(row[way] / row["plain"] for row in seconds))
        for way in ways
    ]  # fmt: skip


def plainest_steps_s(local_batch_size: int, image_size: int) -> float:
    """CPU seconds of a step of ResNet50 as anybody would write it."""
    torch.manual_seed(0)
    model = models.resnet50(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    images = torch.randn(local_batch_size, 3, image_size, image_size)
    labels = torch.arange(local_batch_size) % 10

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    step()
    begun = time.process_time()
    seconds_of(step, RESNET_STEPS)
    return (time.process_time() - begun) / RESNET_STEPS


def gradient_noise() -> list[dict]:
    """Time of steps of ResNet50 some of which look at the norms of the gradients, over that of the steps alone.

    Images of 64 pixels (16 a step, every tenth step looks) and of the paper's 224 pixels, but 8 of its
    256 a step (every step looks). CPU time of one rank: what a look needs does not depend on the other ranks.
    """
    return [look_costs(16, 64, period=10), look_costs(8, 224, period=1)]


def look_costs(local_batch_size: int, image_size: int, period: int) -> dict:
    """A look at the norms beside a step."""
    size = dict(local_batch_size=local_batch_size, image_size=image_size)
    made = config.make("resnet50", device="cpu", devices=2, gradient_noise_steps=1, **size)
    images = torch.randn(local_batch_size, 3, image_size, image_size)
    labels = torch.arange(local_batch_size) % 10
    with alone_in_the_world():
        world = World(0, 1, 0, torch.device("cpu"), "")
        model, gradients = resnet50.make_model(10, made, world), Gradients(made, world)
        optimizer = resnet50.make_optimizer(model, made)
        gradients.parameters = list(model.parameters())

        def step():
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(resnet50.scores(model, images, made), labels).backward()
            optimizer.step()

        def look():
            for parameter in gradients.parameters:
                gradients._look(parameter.grad)
            gradients.step_done()

        step(), look()
        ratios, looks_s = [], []
        for pair in range(PAIRS):
            step_s = seconds_of(step, 1, time.process_time)
            looks_s.append(seconds_of(look, 3, time.process_time) / 3)
            ratios.append(1 + looks_s[-1] / period / step_s)
            words = f"step {step_s:.3f} s, look {looks_s[-1]:.4f} s"
            print(f"  gradient noise, pair {pair + 1} of {PAIRS}: {words}", file=sys.stderr, flush=True)
    name = f"gradient noise, {image_size} pixels, 1 look in {period}"
    value = 1000 * statistics.median(looks_s)
    return entry(name, value, "ms", "the same steps without", statistics.median(ratios))


def image_loading() -> list[dict]:
    """Images per second of the trainer's loaders over torchvision's ImageFolder with Pillow's transforms.

    "paper" is that pipeline; "fast" has the same random crops (pixels differ by less than one of 255 on average) and
    leaves normalization to the device; so from original JPEGs and from a prepared store. JPEGs of 500 x 375 pixels and
    100 kB, all with the same batches and number of workers, started before the clock.
    """
    with tempfile.TemporaryDirectory() as folder:
        root, store = Path(folder) / "tree", Path(folder) / "store"
        for label, name in enumerate(photographs.PHOTOGRAPHS):
            for split, count in (("train", 48), ("val", 1)):
                (root / split / name).mkdir(parents=True)
                for k, data in enumerate(as_jpegs([name], count, (500, 375), label)):
                    (root / split / name / f"{k}.jpg").write_bytes(data)
        with contextlib.redirect_stdout(sys.stderr):
            cli.main(["data", "imagenet", "--root", str(root), "--out", str(store)])
        preparing = energy.cost_so_far(store)
        usual = transforms.Compose([
            transforms.RandomResizedCrop(224, scale=(0.5, 1.0)), transforms.RandomHorizontalFlip(),
            transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ])  # fmt: skip
        loaders = [
            DataLoader(ImageFolder(root / "train", usual), 32, num_workers=WORKERS, persistent_workers=True),
            trainers_loader(root, image_loading="pil"),
            trainers_loader(root, image_loading="fast", uint8_to_device=True),
            trainers_loader(store, image_loading="store", uint8_to_device=True),
        ]
        for loader in loaders:
            list(loader)
        seconds = []
        for pair in range(PAIRS):
            taken = {which: seconds_of(lambda: [None for _ in loaders[which]], 1)  # noqa: B023
                     for which in (range(4) if pair % 2 else reversed(range(4)))}  # fmt: skip
            seconds.append([taken[which] for which in range(4)])
            ratios = ", ".join(f"{taken[0] / taken[which]:.2f}" for which in (1, 2, 3))
            print(f"  images, pair {pair + 1} of {PAIRS}: {ratios}", file=sys.stderr, flush=True)
    count, baseline = len(loaders[0].dataset), f"ImageFolder and Pillow, {WORKERS} workers"
    names = ("paper's crops", "fast crops from original JPEGs", "fast crops from a prepared store")
    found = [
        entry(name, statistics.median(count / row[which] for row in seconds), "images/s", baseline,
              statistics.median(row[0] / row[which] for row in seconds))
        for which, name in enumerate(names, start=1)
    ]  # fmt: skip
    cost_s, cost_J = (preparing[name] / (count + 10) for name in ("seconds", "energy_total_J"))
    per_epoch_s = statistics.median(row[0] for row in seconds) / count
    name = f"preparing an image, {cost_J:.2g} J {preparing['energy_total_provenance']}"
    return [*found, entry(name, 1e3 * cost_s, "ms", f"loading it once so, {WORKERS} workers", cost_s / per_epoch_s)]


def trainers_loader(root: Path, **fields) -> DataLoader:
    """Batches of the training images below ``root`` as the trainer loads them, in workers that stay."""
    made = config.make("resnet50", **fields, local_batch_size=32, image_size=224, training_samples=0,
                       validation_samples=0, loader_workers=WORKERS, persistent_workers=True)  # fmt: skip
    alone = World(0, 1, 0, torch.device("cpu"), "")
    with mock.patch.object(manifests, "verify", lambda *given, **named: root), alone_in_the_world():
        return resnet50.make_loader(resnet50.load_images(made, alone)[0], made, alone)


@contextlib.contextmanager
def alone_in_the_world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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


def checkpoint_saving() -> dict:
    """Time to checkpoint the full-size FourCastNet with Adam's state, SHA-256 and all, over torch.save and fsync."""
    model = AFNO()
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    parts = {"model": model, "optimizer": optimizer}
    world = World(0, 1, 0, torch.device("cpu"), "")
    with tempfile.TemporaryDirectory() as folder, alone_in_the_world():
        checkpoints = checkpoint.Checkpoints(Path(folder), world, 0, parts)
        numbers = iter(range(1, 2 * PAIRS + 1))

        def plain():
            with open(Path(folder) / "plain.pt", "wb") as file:
                torch.save({name: part.state_dict() for name, part in parts.items()}, file)
                os.fsync(file.fileno())

        def ours():
            checkpoints.save(next(numbers), losses=[0.0] * 1000, samples_evaluated=0)

        seconds = []
        for pair in range(PAIRS):
            order = (ours, plain) if pair % 2 else (plain, ours)
            taken = {function: seconds_of(function, 1) for function in order}
            seconds.append((taken[ours], taken[plain]))
            print(f"  checkpoint, pair {pair + 1} of {PAIRS}: {taken[ours]:.2f} s, {taken[ours] / taken[plain]:.2f}",
                  file=sys.stderr, flush=True)  # fmt: skip
    return entry("full-size checkpoint", statistics.median(own for own, _ in seconds), "s", "torch.save and fsync",
                 statistics.median(own / plain for own, plain in seconds))  # fmt: skip


def entry(name: str, value: float, unit: str, baseline: str, ratio: float, pairs: int = PAIRS) -> dict:
    return {"name": name, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio, "pairs": pairs,
            "machine": machine.describe_machine()["cpu"]}  # fmt: skip


def main() -> None:
    """All comparisons, or only those named."""
    functions = {
        function.__name__.replace("_", "-"): function for function in (*USUAL, full_size_step, gradient_noise)
    }
    if unknown := set(sys.argv[1:]) - set(functions):
        raise SystemExit(f"tests.bench: {', '.join(sorted(unknown))} not known; choose from {', '.join(functions)}")
    torch.set_num_threads(1)
    print(f"minutes: {PAIRS} interleaved pairs of each comparison, medians", file=sys.stderr)
    entries = []
    for function in [functions[name] for name in sys.argv[1:]] or USUAL:
        made = function()
        entries += made if isinstance(made, list) else [made]
    path = REPOSITORY / "build" / "bench.json"
    path.parent.mkdir(exist_ok=True)
    earlier = json.loads(path.read_text()) if path.exists() and sys.argv[1:] else []  # one that is named joins them
    names = {line["name"] for line in entries}
    files.write_json(path, [line for line in earlier if line["name"] not in names] + entries)
    for line in entries:
        print(
            f"{line['name']:36} {line['value']:9.3f} {line['unit']:8} ratio {line['ratio']:.3f} to {line['baseline']}"
        )
    print(f"wrote {path.relative_to(REPOSITORY)}, {json.dumps(entries[0]['machine'])}")


USUAL = (
    measuring_costs, share_of_matrix_products, afno_against_published_code, memory_for_backward, resnet50_steps,
    image_loading, era5_loading, checkpoint_saving,
)  # fmt: skip

if __name__ == "__main__":
    main()
