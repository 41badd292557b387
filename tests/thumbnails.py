"""A workload of one's own, as a person adds it: `PYTHONPATH=tests`, `-p workload thumbnails`; nothing else to change.

A two-layer network tells the photographs apart by thumbnails of 8 x 8 pixels. The session does what a record needs: it
joins the other ranks, marks the events, counts the samples, times the phases, and goes on from checkpoints.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from energynn.config import RunConfig
from energynn.data import manifests
from energynn.train import distributed
from energynn.train.batches import Shard
from energynn.train.session import Session


class Config(RunConfig):
    workload: str = "thumbnails"
    dataset: str = "photographs"
    local_batch_size: int = 16
    global_batch_size: int = 16
    epochs: int = 40
    learning_rate: float = 1e-3
    hidden: int = 256


def load(config: Config, split: str) -> TensorDataset:
    paths = sorted((manifests.verify(config.dataset) / split).rglob("*.jpg"))
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB").resize((8, 8)), np.float32) for path in paths])
    names = sorted({path.parent.name for path in paths})
    labels = [names.index(path.parent.name) for path in paths]
    return TensorDataset(torch.from_numpy(pixels).flatten(1) / 255 - 0.5, torch.tensor(labels))


@distributed.lost_ranks_named()
def main(config: Config, run_dir: Path, folder: Path | None = None) -> list[float]:
    session = Session(config, run_dir, folder)
    world = session.world
    training, validation = load(config, "train"), load(config, "val")
    sampler = Shard(training, shuffle=True, seed=config.seed, drop_last=True)
    loader = DataLoader(training, config.local_batch_size, sampler=sampler, drop_last=True)
    classes = 1 + int(training.tensors[1].max())
    network = torch.nn.Sequential(
        torch.nn.Linear(192, config.hidden), torch.nn.ReLU(), torch.nn.Linear(config.hidden, classes)
    )
    model = distributed.data_parallel(network.to(world.device), config, world)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)

    session.resume(loader, model=network, optimizer=optimizer)
    with session.measured(dataset_samples=len(training)):
        for epoch in session.epochs():
            for _step, local_batches in session.steps(epoch):
                optimizer.zero_grad()
                step_loss = 0.0
                for (images, labels), _is_last in local_batches:
                    with session.phase("forward"):
                        loss = F.cross_entropy(model(images.to(world.device)), labels.to(world.device))
                        loss = loss / config.accumulation_steps
                    with session.phase("backward"):
                        loss.backward()
                    step_loss += loss.detach()
                with session.phase("optimizer"):
                    optimizer.step()
                session.step_done(step_loss)
            with session.evaluation(), torch.no_grad():
                images, labels = (tensor[world.rank :: world.size].to(world.device) for tensor in validation.tensors)
                wrong = (network(images).argmax(dim=1) != labels).sum().item()
                metrics = {"top1_error": distributed.total([wrong], world)[0] / len(validation)}
            session.epoch_done(metrics, len(validation), config.learning_rate)
    return session.finish({"hidden": config.hidden})
