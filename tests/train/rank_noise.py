"""One rank of a comparison: rank_noise.py OUT MODE; gradients of known covariance, averaged by torch or by us."""

import sys

import numpy as np
import torch

from energynn import config as configuration
from energynn.train import distributed
from energynn.train.gradients import Gradients

SIZE, STEPS, LOCAL = 40, 300, 4
ranks = distributed._find()[1]
noise = dict(gradient_noise_steps=1)
asked = {"noise": noise, "bfloat16": dict(gradient_compression="bfloat16"), "torch": {}}
asked["accumulation"] = noise | dict(accumulation_steps=3)
config = configuration.make("resnet50", devices=ranks, local_batch_size=LOCAL, **asked[sys.argv[2]])
made_of = config.accumulation_steps
world = distributed.join(config)
# The gradient of mean(x w) is the mean of x: truth 0.1 for each weight, with these standard deviations of a sample.
spread = torch.linspace(0.2, 1.0, SIZE)
torch.manual_seed(0)
network = torch.nn.Linear(SIZE, 1, bias=False)
model = distributed.data_parallel(network, config, world)
gradients = Gradients(config, world)
gradients.share(model)
chance, found = torch.Generator().manual_seed(world.rank), []
for _ in range(STEPS):
    model.zero_grad()
    for batch in range(made_of):
        samples = 0.1 + spread * torch.randn(LOCAL, SIZE, generator=chance)
        with distributed.gradients_shared(model, batch == made_of - 1):
            (model(samples).mean() / made_of).backward()
    gradients.step_done()
    found.append(network.weight.grad.numpy().copy())
noise = gradients.noise()
everyone = [None] * ranks
torch.distributed.all_gather_object(everyone, (noise, found[-1].tolist()))
assert all(other == everyone[0] for other in everyone), "all ranks have the same gradients, and tell the same noise"
if world.rank == 0:
    np.savez(sys.argv[1], gradients=np.array(found), **noise)
del model, network
distributed.leave()
