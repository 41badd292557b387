"""One rank of a comparison: the gradients of the trainers' own models and losses on a fixed
batch.

rank_gradients.py OUT: rank r of n takes the r-th part of the batch. A single rank takes the whole
batch with the AFNO, and with ResNet50 one part after the other, because batch norm is over the
local batch. Rank 0 writes OUT.
"""

import sys

import numpy as np
import torch
import torch.nn.functional as F

from energynn.experiment import config as configuration
from energynn.host import launchers
from energynn.train import distributed, fourcastnet, resnet50

PARTS = 2
ranks = launchers.rank_and_size()[1]
config = configuration.make(
    "fourcastnet", devices=ranks, patch_size=4, embed_dim=32, depth=2, num_blocks=4
)
world = distributed.join_ranks(config)
generator = torch.Generator().manual_seed(3)
found = {}


def keep(name, model):
    for parameter, value in model.module.named_parameters():
        found[f"{name}/{parameter}"] = value.grad.numpy().copy()


for steps in (1, 2):
    # pre-training, and fine-tuning: two passes through the network before one backward
    torch.manual_seed(0)
    model = fourcastnet.make_model(config, (4, 16, 32), world)
    batch = torch.randn(2 * PARTS, steps + 1, 4, 16, 32, generator=generator)
    fourcastnet.rollout_loss(
        model, batch[world.rank :: ranks] if ranks > 1 else batch
    ).backward()
    keep(f"afno{steps}", model)

torch.manual_seed(0)
model = resnet50.make_model(10, configuration.make("resnet50"), world)
model.train()
images, labels = (
    torch.randn(8, 3, 64, 64, generator=generator),
    torch.randint(10, (8,), generator=generator),
)
if ranks > 1:
    part = slice(world.rank * 4, world.rank * 4 + 4)
    F.cross_entropy(model(images[part]), labels[part]).backward()
else:
    for start in (0, 4):
        (
            F.cross_entropy(model(images[start : start + 4]), labels[start : start + 4])
            / PARTS
        ).backward()
keep("resnet50", model)

torch.manual_seed(0)
# A new one: batch norm's statistics of the one above depend on the ranks.
model = resnet50.make_model(10, configuration.make("resnet50"), world)
loader = [(images[world.rank :: ranks], labels[world.rank :: ranks])]
metrics, count = resnet50.evaluate_images(
    model, loader, configuration.make("resnet50"), world
)
found |= {
    "count/samples": np.array(count),
    "count/wrong": np.array(metrics["top1_error"] * count),
}
if world.rank == 0:
    np.savez(sys.argv[1], **found)
del model  # nothing of torch may still work when the interpreter ends
distributed.leave_ranks()
