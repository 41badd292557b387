"""What a GPU draws while it does little, and at work: a minute of each kind (docs/gpu.md)."""

import time
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchvision import models

from energynn.experiment.config import RunConfig
from energynn.train import distributed
from energynn.train.batches import Shard
from energynn.train.session import Session

STREAMS = 8  # blocks that spin, as many as a collective of NCCL may have
SHARED = 25_000_000  # gradients of a step, of ResNet50


class Config(RunConfig, frozen=True, kw_only=True):
    """kind: what the GPU does
    seconds: about how long
    wait_s: for each batch of a starved loader, or of the rank that all others wait for
    image_size: height and width of random images
    """

    workload: str = "gpu_minutes"
    dataset: str = "synthetic"
    kind: Literal["idle", "starved", "simulated_collective", "collective", "work"] = (
        "idle"
    )
    seconds: float = 60.0
    wait_s: float = 1.0
    image_size: int = 224
    local_batch_size: int = 32
    global_batch_size: int = 32
    epochs: int = 1
    learning_rate: float = 1e-3
    idle_ready_s: float = 5.0


class Steps:
    """A loader of steps: before each it waits, and gives an empty batch."""

    def __init__(self, count, wait_s):
        self.sampler, self.wait_s = Shard(range(count), shuffle=False), wait_s

    def __len__(self):
        return len(self.sampler.dataset)

    def __iter__(self):
        for _ in range(len(self)):
            time.sleep(self.wait_s)
            yield ()


def resnet50_step(config, world):
    """A step of ResNet50 on one batch of random images that stays on the device."""
    network = models.resnet50().to(world.device)
    model = distributed.data_parallel(network, config, world)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.learning_rate, momentum=0.9
    )
    size = config.local_batch_size, 3, config.image_size, config.image_size
    images = torch.randn(size).to(world.device)
    labels = torch.zeros(config.local_batch_size, dtype=torch.int64).to(world.device)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def spinning_step(world):
    """For about 0.1 s blocks of one thread ask for the time, each in a stream of its own.

    SIMULATED: those of NCCL have 500 threads, which ask for memory of others. It is no price of a
    collective.
    """
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    nothing = torch.zeros(1).to(world.device)

    def step():
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10**8)
        torch.cuda.synchronize()
        return nothing[0]

    return step


def waiting_step(world):
    """All ranks share as much as ResNet50 does; while one is late, the others' GPUs spin."""
    gradients = torch.zeros(SHARED).to(world.device)

    def step():
        dist.all_reduce(gradients)
        return gradients[0]

    return step


def nothing_step(world):
    nothing = torch.zeros(1).to(world.device)
    return lambda: nothing[0]


def make_step(config, world):
    if config.kind in ("starved", "work"):
        return resnet50_step(config, world)
    makers = {"idle": nothing_step, "collective": waiting_step}
    return makers.get(config.kind, spinning_step)(world)


def waits(kind, rank):
    """Tell whether a rank waits before each step; of a real collective only the first does."""
    return kind in ("idle", "starved") or (kind == "collective" and rank == 0)


def seconds_of_a_step(step, world):
    """Warm up and time; all ranks agree on the mean."""
    times = []
    for _ in range(10):
        begun = time.monotonic()
        step()
        distributed.barrier(world)  # waits for the GPU, too
        times.append(time.monotonic() - begun)
    (total,) = distributed.total([sum(times[5:]) / 5], world)
    return total / world.size


@distributed.lost_ranks_named()
def main(config, run_dir, folder=None):
    if config.kind == "collective" and config.devices < 2:
        raise ValueError("kind: a collective takes two GPUs or more; say devices=2")
    session = Session(config, run_dir, folder)
    world = session.world
    if world.device.type != "cuda":
        raise ValueError(
            "device: these are minutes of a GPU; go to a machine that has one"
        )
    step = make_step(config, world)
    is_waiting = config.kind not in ("work", "simulated_collective")
    taken_s = seconds_of_a_step(step, world) + config.wait_s * is_waiting
    wait_s = config.wait_s * waits(config.kind, world.rank)
    count = max(1, round(config.seconds / taken_s))
    world.tell(f"{config.kind}: {count} steps of {taken_s:.3g} s")
    session.resume(Steps(count, wait_s), model=torch.nn.Module())
    with session.measured(dataset_samples=0):
        for epoch in session.epochs():
            for _number, batches in session.steps(epoch):
                for _batch, _is_last in batches:
                    session.step_done(step())
            session.epoch_done({}, 0, config.learning_rate)
    return session.finish({})
