"""Gradients on their way between the ranks: in half the bytes, or measured before and after, where a run asks for it.

The gradient noise scale is that of McCandlish et al. 2018, appendix A.1: the squared norm of gradients of B samples
is |G|^2 + trace(covariance) / B, and a local batch and the global batch have two different B.
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
        self.parameters: list[torch.Tensor] = []
        self.is_shared = False
        self.steps = 0  # of the optimizer, in this segment of the run
        self._begin()

    def _begin(self) -> None:
        """Forget the norms so far."""
        self.local: list[torch.Tensor] = []  # of one step: the norm of each parameter in each local batch of this rank
        self.norms2 = torch.zeros(2, dtype=torch.float64, device=self.world.device)  # local and global, sums over looks
        self.looks = 0

    def share(self, model: DistributedDataParallel) -> None:
        """Take the model's gradients in hand as the configuration asks; call it after the warm-up."""
        self.is_shared = True
        if self.is_compressed:
            model.register_comm_hook(self.world.size, average_in_half)
        if self.period:
            self.parameters = list(model.parameters())
            for parameter in self.parameters:
                parameter.register_hook(self._look)  # called before the gradient is added up and averaged

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

    def _look(self, gradient: torch.Tensor) -> None:
        if self.is_looking:
            self.local.append(torch.linalg.vector_norm(gradient))

    def step_done(self) -> None:
        """After a step of the optimizer, which leaves the averaged gradients as they were."""
        if self.is_looking and self.local:
            averaged = [torch.linalg.vector_norm(parameter.grad) for parameter in self.parameters]
            self.norms2 += torch.stack([torch.stack(norms).square().sum() for norms in (self.local, averaged)])
            self.local = []
            self.looks += 1
        self.steps += 1

    def noise(self) -> dict[str, float]:
        """Squared norm of the true gradient, variance of a sample's, and their ratio, since the last call.

        The ratio is the gradient noise scale in samples; it is missing where chance made the norm negative. All ranks
        call it together.
        """
        if not self.period:
            return {}
        local, averaged = self.norms2.tolist()
        local, looks = distributed.total([local, self.looks], self.world)
        found, batches = {}, self.config.accumulation_steps  # the loss of each local batch is divided by their number
        if looks:
            sizes = self.config.local_batch_size, self.config.global_batch_size
            found = noise_scale(local * batches / looks, averaged / self.looks, *sizes)
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


def average_in_half(ranks: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks; it travels as bfloat16."""
    local = bucket.buffer()
    sent = local.mul_(1 / ranks).to(torch.bfloat16)
    return dist.all_reduce(sent, async_op=True).get_future().then(lambda done: local.copy_(done.value()[0]))
