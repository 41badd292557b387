"""A measured command as the model sees it: what a person told of it, beside its devices."""

from energynn.experiment.config import CountOrNone, RunConfig


class Config(RunConfig, frozen=True, kw_only=True):
    """What a person told of a measured command; a size of 0 is not known.

    training_samples: that the command trains on in an epoch
    """

    workload: str = __name__
    dataset: str = "own"
    local_batch_size: CountOrNone = 0
    global_batch_size: CountOrNone = 0
    epochs: int = 1
    learning_rate: float = 0.0
    training_samples: CountOrNone
