"""A workload of one's own, as a person adds it: `PYTHONPATH=tests`, `-p workload thumbnails`; nothing else to change.

A two-layer network tells the photographs apart by thumbnails of 8 x 8 pixels. It does what a record needs: it joins the
other ranks, marks the events, counts the samples, and times the phases.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from energynn.config import RunConfig
from energynn.data import manifests
from energynn.measure.samples import Events
from energynn.train import distributed
from energynn.train.phases import PhaseTimer, Progress, require_finite


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    workload: str = "thumbnails"
    dataset: str = "photographs"
    local_batch_size: int = 16
    global_batch_size: int = 16
    epochs: int = 40
    learning_rate: float = 1e-3
    hidden: int = 256


def load(config: Config, split: str) -> TensorDataset:
    paths = sorted((manifests.verify(config.dataset, progress=lambda line: None) / split).rglob("*.jpg"))
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB").resize((8, 8)), np.float32) for path in paths])
    names = sorted({path.parent.name for path in paths})
    labels = [names.index(path.parent.name) for path in paths]
    return TensorDataset(torch.from_numpy(pixels).flatten(1) / 255 - 0.5, torch.tensor(labels))


@distributed.lost_ranks_named()
def main(config: Config, run_dir: Path, folder: Path | None = None) -> list[float]:
    folder = Path(folder or run_dir)
    world = distributed.join(config)
    events = Events(folder, world.rank)
    events.mark("rank_start", **world.describe())
    training, validation = load(config, "train"), load(config, "val")
    sampler = distributed.Shard(training, shuffle=True, seed=config.seed, drop_last=True)
    loader = DataLoader(training, config.local_batch_size, sampler=sampler, drop_last=True)
    classes = 1 + int(training.tensors[1].max())
    network = torch.nn.Sequential(
        torch.nn.Linear(192, config.hidden), torch.nn.ReLU(), torch.nn.Linear(config.hidden, classes)
    )
    model = DistributedDataParallel(network.to(world.device))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    phases = PhaseTimer(world.device, folder, world.rank)
    progress = Progress(config, len(loader), 0, events if world.rank == 0 else None)
    losses: list[float] = []

    distributed.barrier(world)
    events.mark("training_start", dataset_samples=len(training), samples_done=0)
    for epoch in range(config.epochs):
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(phases.loading(loader)):
            with phases("forward"):
                loss = F.cross_entropy(model(images.to(world.device)), labels.to(world.device))
            with phases("backward"):
                optimizer.zero_grad()
                loss.backward()
            with phases("optimizer"):
                optimizer.step()
            losses.append(loss.item())
            require_finite(losses[-1:], epoch, step)
            progress.step(epoch, step, loss)
        with phases("evaluation"), torch.no_grad():
            images, labels = (tensor[world.rank :: world.size].to(world.device) for tensor in validation.tensors)
            wrong = (network(images).argmax(dim=1) != labels).sum().item()
            metrics = {"top1_error": distributed.total([wrong], world)[0] / len(validation)}
        counts = {
            "samples_trained": (epoch + 1) * len(loader) * config.global_batch_size,
            "samples_evaluated": (epoch + 1) * len(validation), "optimizer_steps": (epoch + 1) * len(loader),
        }  # fmt: skip
        if world.rank == 0:
            events.mark("epoch", epoch=epoch + 1, epochs=config.epochs, **counts, **metrics)
    distributed.barrier(world)
    events.mark("training_end", **counts, forward_backward_passes=counts["optimizer_steps"], metrics=metrics)
    phases.write()
    progress.end(metrics)
    distributed.leave()
    return losses
