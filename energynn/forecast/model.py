"""The physical model: how long a training takes and what it draws, from what one GPU does in an epoch.

    t_epoch = tau samples (1 + c)                          samples that a GPU loads, trained and evaluated
            + t_start passes                               passes over data, each of which starts a loader
            + fill tau (1 + c) filled                      filled: min(LBS, samples) for each pass over the training set
            + t_update updates
            + updates 2 (n-1)/n gradient_bytes / (efficiency bandwidth)
    c       = kappa [node full] + kappa_storage (nodes - 1)                                            contention
    power   = host / GPUs of a node in use + fed (1 - s) + idle s + image_J trained samples / s of time
    s       = share of the time in starts and fills

All of one GPU: power x time x GPUs is the energy. Bandwidth: of a node's link, or between the GPUs of the only node.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

CAUSES_OF_TIME = ("images", "starts", "fill", "updates", "allreduce", "contention")


@dataclass(frozen=True)
class Parameter:
    """A number that is learnt. Times and factors are fitted by their logarithm (``is_log``), powers as they are.

    ``told_by``: the run that would tell most of it.
    """

    name: str
    unit: str
    meaning: str
    told_by: str
    is_log: bool = True


PARAMETERS = (
    Parameter("tau", "s", "one sample, loaded and computed, where the node is not full", "more samples an epoch"),
    Parameter("t_start", "s", "a pass over data begins: the loader's workers start", "few samples an epoch"),
    Parameter("fill", "batches", "local batches that a GPU waits for until a pass flows", "another local batch size"),
    Parameter("t_update", "s", "one update of the weights, without the all-reduce", "a small local batch size"),
    Parameter("efficiency", "1", "part of the bandwidth that the all-reduce reaches", "small batches on two nodes"),
    Parameter("kappa", "1", "further time of a sample where all GPUs of a node are in use", "a full node"),
    Parameter("kappa_storage", "1/node", "further time of a sample for each further node", "several numbers of nodes"),
    Parameter("host", "W", "a node without its GPUs: CPUs and memory", "one GPU, and a full node", is_log=False),
    Parameter("fed", "W", "a GPU that has data, without image_J", "two local batch sizes", is_log=False),
    Parameter("idle", "W", "a GPU that waits for data", "an idle baseline", is_log=False),
    Parameter("image_J", "J", "one trained sample", "two local batch sizes", is_log=False),
)
NAMES = tuple(parameter.name for parameter in PARAMETERS)
BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}


@dataclass(frozen=True)
class Reading:
    """What limits a GPU's samples; published times fit both, and only a run without the loader would decide.

    evaluation: time of an evaluated sample, that of a trained one being 1. by_workers: whether workers share tau.
    """

    evaluation: float
    by_workers: bool


READINGS = {
    "loader-bound": Reading(evaluation=1.0, by_workers=True),
    "GPU-bound": Reading(evaluation=1 / 3, by_workers=False),  # of forward and backward pass the forward pass only
}


@dataclass(frozen=True)
class Work:
    """What one GPU does, and where: arrays (configurations,).

    devices_of_node: in use on each node, as a mean. is_full: 1 where a node has all in use. Of an epoch of one GPU:
    trained and evaluated samples, passes, filled (samples of the first local batches), updates. allreduce_s: of one
    update at the full bandwidth. workers: of the loader, those of the calibrated runs being 1.
    """

    devices: np.ndarray
    nodes: np.ndarray
    devices_of_node: np.ndarray
    is_full: np.ndarray
    local_batch_size: np.ndarray
    epochs: np.ndarray
    trained: np.ndarray
    evaluated: np.ndarray
    passes: np.ndarray
    filled: np.ndarray
    updates: np.ndarray
    allreduce_s: np.ndarray
    workers: np.ndarray

    def __len__(self) -> int:
        return len(self.devices)

    def __getitem__(self, index) -> Work:
        return Work(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


def together(works: list[Work]) -> Work:
    """Several of them as one."""
    columns = zip(*(vars(work).values() for work in works), strict=True)
    return Work(*map(np.concatenate, columns))


def times_s(values: dict[str, float], work: Work, reading: Reading) -> dict[str, np.ndarray]:
    """Seconds of the whole training by cause, (configurations,) each."""
    loaded = values["tau"] / work.workers  # one sample, where loading takes it
    tau = loaded if reading.by_workers else values["tau"]
    images = work.epochs * (work.trained + reading.evaluation * work.evaluated) * tau
    slower = values["kappa"] * work.is_full + values["kappa_storage"] * (work.nodes - 1)
    return {
        "images": images,
        "starts": work.epochs * work.passes * values["t_start"],
        "fill": work.epochs * values["fill"] * work.filled * loaded * (1 + slower),
        "updates": work.epochs * work.updates * values["t_update"],
        "allreduce": work.epochs * work.updates * work.allreduce_s / values["efficiency"],
        "contention": slower * images,
    }


def powers_W(values: dict[str, float], work: Work, times: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Mean power of one GPU and its part of a node in W by cause, (configurations,) each."""
    total_s = sum(times.values())
    waiting = (times["starts"] + times["fill"]) / total_s
    return {
        "host": values["host"] / work.devices_of_node,
        "fed": values["fed"] * (1 - waiting),
        "idle": values["idle"] * waiting,
        "images": values["image_J"] * work.epochs * work.trained / total_s,
    }


def predict(values: dict[str, float], work: Work, reading: Reading) -> tuple[np.ndarray, np.ndarray]:
    """Time of the training in s, and mean power of one GPU with its part of a node in W, (configurations,) each."""
    times = times_s(values, work, reading)
    return sum(times.values()), sum(powers_W(values, work, times).values())
