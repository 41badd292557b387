"""A workload of one's own on data of one's own (docs/own.md): a line through points.csv."""

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from energynn.data import manifests
from energynn.experiment.config import RunConfig
from energynn.train import distributed
from energynn.train.batches import Shard, require_batch_count
from energynn.train.session import Session


class Config(RunConfig):
    workload: str = "straight_line"
    dataset: str = "my-points"
    local_batch_size: int = 10
    global_batch_size: int = 10
    epochs: int = 500
    learning_rate: float = 0.05


@distributed.lost_ranks_named()
def main(config, run_dir, folder=None):
    session = Session(config, run_dir, folder)
    path = manifests.root(config.dataset) / "points.csv"
    points = torch.from_numpy(np.loadtxt(path, np.float32, delimiter=",")).to(
        session.world.device
    )
    data = TensorDataset(points[:, :1], points[:, 1:])
    sampler = Shard(data, shuffle=True, seed=config.seed, drop_last=True)
    loader = DataLoader(data, config.local_batch_size, sampler=sampler, drop_last=True)
    require_batch_count(loader, config.accumulation_steps)
    line = torch.nn.Linear(1, 1).to(session.world.device)
    model = distributed.data_parallel(line, config, session.world)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    session.resume(loader, model=line, optimizer=optimizer)
    with session.measured(dataset_samples=len(data)):
        for epoch in session.epochs():
            for _step, batches in session.steps(epoch):
                optimizer.zero_grad()
                step_loss = 0.0
                for (x, y), _is_last in batches:
                    loss = torch.nn.functional.mse_loss(model(x), y)
                    loss = loss / config.accumulation_steps
                    loss.backward()
                    step_loss += loss.detach()
                optimizer.step()
                session.step_done(step_loss)
            session.epoch_done({"slope": line.weight.item()}, 0, config.learning_rate)
    return session.finish({})
