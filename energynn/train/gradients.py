"""Gradients on their way between the ranks: in half the bytes, or measured before and after, where a run asks for it.

The gradient noise scale is that of McCandlish et al. 2018, appendix A.1: the squared norm of gradients of B samples
is |G|^2 + trace(covariance) / B, and the gradients of one rank and of all have two different B.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from energynn.config import RunConfig
from energynn.train import distributed
from energynn.train.distributed import World


class Gradients:
    """How the ranks of a run average their gradients, and what their norms tell of the noise in them."""

    def __init__(self, config: RunConfig, world: World):
        self.config, self.world = config, world
        self.is_compressed = config.gradient_compression == "bfloat16"
        self.period = config.gradient_noise_steps
        self.is_shared = False
        self.steps = 0  # of the optimizer, in this segment of the run
        self._begin()

    def _begin(self) -> None:
        """Forget the norms so far."""
        self.before: list[torch.Tensor] = []  # of one step: squared norm of each bucket of this rank, and of all ranks
        self.after: list[torch.Tensor] = []
        self.norms2 = torch.zeros(2, dtype=torch.float64, device=self.world.device)  # sums over the steps looked at
        self.looks = 0

    def share(self, model: DistributedDataParallel) -> None:
        """Take the model's gradients in hand if the configuration asks for it; else torch averages them as ever."""
        self.is_shared = True
        if self.is_compressed or self.period:
            model.register_comm_hook(self, average)

    def require_shared(self) -> None:
        """Raise ValueError where a workload of one's own leaves its gradients to torch, and the run asks for more."""
        if (self.is_compressed or self.period) and not self.is_shared:
            raise ValueError(
                f"gradient_compression, gradient_noise_steps: {self.config.workload} has neither; call "
                "session.gradients.share(model) in its main, or leave both out"
            )

    @property
    def is_looking(self) -> bool:
        """Whether the norms of this step count."""
        return self.period > 0 and self.steps % self.period == 0

    def step_done(self) -> None:
        """After a step of the optimizer."""
        if self.before:
            self.norms2 += torch.stack([torch.stack(self.before).sum(), torch.stack(self.after).sum()])
            self.before, self.after = [], []
            self.looks += 1
        self.steps += 1

    def noise(self) -> dict[str, float]:
        """Squared norm of the true gradient, variance of a sample's, and their ratio, since the last call.

        The ratio is the gradient noise scale in samples; it is missing where chance made the norm negative. All ranks
        call it together.
        """
        if not self.period:
            return {}
        one_rank, all_ranks = self.norms2.tolist()
        one_rank, looks = distributed.total([one_rank, self.looks], self.world)
        found = {}
        if looks:
            few = self.config.global_batch_size // self.config.devices
            found = noise_scale(one_rank / looks, all_ranks / self.looks, few, self.config.global_batch_size)
        self._begin()
        return found


def noise_scale(norm2_few: float, norm2_many: float, few: int, many: int) -> dict[str, float]:
    """Estimates without bias from the mean squared norms of gradients of ``few`` and of ``many`` samples."""
    norm2 = (many * norm2_many - few * norm2_few) / (many - few)
    variance = (norm2_few - norm2_many) / (1 / few - 1 / many)
    found = {"gradient_norm2": norm2, "gradient_variance": variance}
    if norm2 > 0 and variance > 0:
        found["gradient_noise_scale_samples"] = variance / norm2
    return found


def average(gradients: Gradients, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks, in the same operations as torch does without this, so with the same bits."""
    local = bucket.buffer()
    is_looking = gradients.is_looking
    if is_looking:
        gradients.before.append(torch.dot(local, local))
    local.mul_(1 / gradients.world.size)
    sent = local.to(torch.bfloat16) if gradients.is_compressed else local

    def received(future) -> torch.Tensor:
        (averaged,) = future.value()
        if averaged is not local:
            averaged = local.copy_(averaged)
        if is_looking:
            gradients.after.append(torch.dot(averaged, averaged))
        return averaged

    return dist.all_reduce(sent, async_op=True).get_future().then(received)
