"""One rank of a comparison: the gradients of ResNet50 and its loss on a fixed batch, and what its
evaluation counts.

rank_gradients.py OUT: rank r of two takes the r-th part of the batch. A single rank takes one part
after the other, because batch norm is over the local batch. Rank 0 writes OUT.
"""

import sys

import numpy as np
import torch
import torch.nn.functional as F

from energynn.experiment import config as configuration
from energynn.host import launchers
from energynn.train import distributed, resnet50

ranks = launchers.rank_and_size()[1]
config = configuration.make("resnet50", devices=ranks)
world = distributed.join_ranks(config)
generator = torch.Generator().manual_seed(3)
torch.manual_seed(0)
model = resnet50.make_model(10, config, world)
model.train()
images, labels = (
    torch.randn(8, 3, 64, 64, generator=generator),
    torch.randint(10, (8,), generator=generator),
)
for start in range(4 * world.rank, 8, 4 * ranks):
    part = slice(start, start + 4)
    (F.cross_entropy(model(images[part]), labels[part]) * ranks / 2).backward()
found = {
    name: value.grad.numpy().copy() for name, value in model.module.named_parameters()
}

torch.manual_seed(0)
# A new one: batch norm's statistics of the one above depend on the ranks.
model = resnet50.make_model(10, config, world)
loader = [(images[world.rank :: ranks], labels[world.rank :: ranks])]
metrics, count = resnet50.evaluate_images(model, loader, config, world)
found |= {
    "count/samples": np.array(count),
    "count/wrong": np.array(metrics["top1_error"] * count),
}
if world.rank == 0:
    np.savez(sys.argv[1], **found)
del model  # nothing of torch may still work when the interpreter ends
distributed.leave_ranks()
