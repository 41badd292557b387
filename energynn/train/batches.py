"""Local batches of a rank: its share of a data set, and how it is loaded."""

import itertools
from collections.abc import Iterable

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from energynn.experiment.config import RunConfig
from energynn.train.distributed import World


class Shard(DistributedSampler):
    """List this rank's part of a data set, from a given place within the epoch on.

    With ``numbered`` an index also tells the epoch, as epoch x samples + index: a sample's random
    crop can then depend on both and on nothing else, whichever process loads it and wherever the
    training was interrupted.
    """

    first = 0
    numbered = False

    def __iter__(self):
        offset = self.epoch * len(self.dataset) if self.numbered else 0
        return (
            offset + index
            for index in itertools.islice(super().__iter__(), self.first, None)
        )


class Loader(DataLoader):
    """Load batches, and raise the fault of one as its own sentence.

    ``one_batch``, which stays on the device, stands for each of them: steps without loading.
    """

    one_batch = None

    def __iter__(self):
        """Give batches; of what a worker raises torch makes a traceback, whose last line is the
        fault.
        """
        if self.one_batch is not None:
            yield from itertools.repeat(self.one_batch, len(self))
            return
        try:
            yield from super().__iter__()
        except (ValueError, OSError) as fault:
            text = str(fault)
            if not text.startswith("Caught "):
                raise
            raise type(fault)(text.splitlines()[-1].partition(": ")[2]) from fault


def make_loader(
    dataset: Dataset,
    sampler: Iterable[int],
    config: RunConfig,
    world: World,
    drop_last: bool = False,
) -> Loader:
    """Load local batches of the samples that the sampler names; drop_last: full ones alone."""
    workers = config.working_loader_workers
    return Loader(
        dataset,
        config.local_batch_size,
        sampler=sampler,
        num_workers=workers,
        pin_memory=config.pinned_memory and world.device.type == "cuda",
        drop_last=drop_last,
        persistent_workers=config.persistent_workers and workers > 0,
    )


def require_batch_count(loader, count: int) -> None:
    """Raise ValueError if this rank has fewer batches than ``count``."""
    if len(loader) < count:
        samples = f"{len(loader.sampler)} samples on each device"
        raise ValueError(
            f"local_batch_size: {samples} are too few for {count} batches; lower it or "
            "global_batch_size, or take more samples"
        )


def predict(
    model: torch.nn.Module, inputs: torch.Tensor, precision: str
) -> torch.Tensor:
    """Apply the network in ``precision``; the outputs have the type of the inputs."""
    with torch.autocast(
        inputs.device.type, torch.bfloat16, enabled=precision == "bfloat16"
    ):
        return model(inputs).to(inputs.dtype)
