"""A measured command as the model sees it: what a person told of it, beside its devices."""

from typing import Annotated

from msgspec import Meta

from energynn.experiment.config import Natural, RunConfig


class Config(RunConfig, frozen=True, kw_only=True):
    """What a person told of a measured command; a size of 0 is not known.

    training_samples: that the command trains on in an epoch
    gradient_bytes: that devices exchange at each update
    """

    workload: str = __name__
    dataset: str = "own"
    local_batch_size: Natural = 0
    global_batch_size: Natural = 0
    epochs: int = 1
    learning_rate: float = 0.0
    training_samples: Natural
    gradient_bytes: Annotated[int, Meta(ge=0)] = 0
