"""The physical model: how long a training takes and what it draws, from what one GPU does in an
epoch.

Time of an epoch of one GPU:

    tau (trained + evaluation evaluated) (1 + c)          samples that it loads and computes
    + t_start passes                                      passes over data, each starts a loader
    + t_epoch begun                                       a further epoch of a command begins
    + fill tau (1 + c) filled                             waits for the first batches of a pass
    + updates (t_update + 2 (n-1)/n gradient_bytes / (efficiency bandwidth))
    + what is left of updates step_period_s (1 - 1/U)     a run that is made to wait
    c = kappa [node full] + kappa_nodes log2(nodes)       contention
    U: updates of all epochs; after the last one nothing waits

Energy is waiting plus work:

    E = (host / GPUs of a node in use + idle) time        every hour costs this, idle or not
        + (fed - idle) (time without starts, fills, waiting)   a GPU that computes or exchanges
        + image_J trained samples

TERMS are what else more devices may cost. Each is 0 in a forecast's value, unless runs ask for it,
and opens its interval:

    t_start grows by start_device and an update by latency for each further device, an all-reduce by
    a part, congestion, for each doubling of nodes; every rank evaluates a part, repeated, of
    what all others do; all devices share a storage that takes storage for a sample;
    an all-reduce draws more than fed by a part, exchange.

All of one GPU with its part of a node. Bandwidth: of a node's link, or between the GPUs of one
node.

``work`` is a record array, (configurations,): what one GPU does, and where. devices_of_node: in
use on each node, as a mean. sharers: devices that share a limit of loading. is_full: whether a node
has all in use. workers: of each GPU's loader. Of an epoch of one GPU: trained and evaluated
samples, of these validated ones, passes, filled (samples of the first local batches), updates
(where gradients of several local batches add up, each counts as one). allreduce_s: of one of them,
as a mean, at the full bandwidth. step_period_s: from one update to the next at least.
"""

from typing import NamedTuple

import numpy as np

# Parameters that are learnt: unit and meaning.
TIME_PARAMETERS = {
    "tau": ("s", "one trained sample, loaded and computed, where the node is not full"),
    "evaluation": ("1", "time of an evaluated sample, that of a trained one being 1"),
    "t_start": ("s", "a pass over data begins: the loader's workers start"),
    "t_epoch": ("s", "a further epoch of a command begins"),
    "fill": ("batches", "local batches that a GPU waits for until a pass flows"),
    "t_update": ("s", "one update of the weights, without the all-reduce"),
    "efficiency": ("1", "part of the bandwidth that the all-reduce reaches"),
    "kappa": ("1", "further time of a sample where all GPUs of a node are in use"),
    "kappa_nodes": ("1", "further time of a sample for each doubling of nodes"),
}
POWER_PARAMETERS = {
    "host": ("W", "a node without its GPUs: CPUs and memory"),
    "fed": ("W", "a GPU that computes or is in an all-reduce, without image_J"),
    "idle": ("W", "a GPU that waits for its loader: no kernel runs"),
    "image_J": ("J", "one trained sample"),
}


class Term(NamedTuple):
    """A term of time or power that is 0 unless runs ask for it.

    usual: how large it may well be where no run tells; most: where runs ask. Of storage both relate
    to a sample at the greatest rate that was seen, of start_device to the start that is usual.
    """

    unit: str
    meaning: str
    usual: float
    most: float


TERMS = {
    "start_device": Term(
        "s", "a pass begins later for each further device", 0.0005, 0.6
    ),
    "repeated": Term("1", "part of others' validation that each rank makes", 0.01, 1.0),
    "kappa_storage": Term("1", "further time of a sample for each node", 0.0005, 0.05),
    "storage": Term("us", "one sample from what devices share", 0.001, 1.0),
    "congestion": Term(
        "1", "more of an all-reduce for each doubling of nodes", 0.03, 3.0
    ),
    "overlap": Term("1", "an all-reduce hides: exp(-overlap) of it is left", 2.0, 3.0),
    "latency": Term("us", "more of an update for each further device", 10.0, 1000.0),
    "exchange": Term("1", "part of fed - idle that an all-reduce draws more", 0.2, 0.2),
}
# of the others the logarithm is fitted
LINEAR = [
    "kappa_nodes",
    *POWER_PARAMETERS,
    *TERMS,
]


def times_by_cause_s(
    values: dict[str, float], work: np.ndarray
) -> dict[str, np.ndarray]:
    """Compute the seconds of the whole training by cause, (configurations,) each."""
    repeated = values["repeated"] * work["validated"] * (work["devices"] - 1)
    samples = work["trained"] + values["evaluation"] * (work["evaluated"] + repeated)
    images = work["epochs"] * samples * values["tau"]
    nodes = np.log2(work["nodes"])
    more = work["nodes"] - 1
    slower = values["kappa"] * work["is_full"] + values["kappa_nodes"] * nodes
    slower = slower + values["kappa_storage"] * more
    filled_s = work["filled"] * values["tau"] * (1 + slower)
    start_s = values["t_start"] + values["start_device"] * (work["devices"] - 1)
    starts_s = work["passes"] * start_s + work["begun"] * values.get("t_epoch", 0.0)
    update_s = values["t_update"] + 1e-6 * values["latency"] * (work["devices"] - 1)
    exchange_s = work["allreduce_s"] / values["efficiency"] * np.exp(-values["overlap"])
    stored = 1e-6 * values["storage"] * work["epochs"] * samples * work["sharers"]
    updates = work["epochs"] * work["updates"]
    times = {
        "images": images,
        "starts": work["epochs"] * starts_s,
        "fill": work["epochs"] * values["fill"] * filled_s,
        "updates": updates * update_s,
        "allreduce": updates * exchange_s * (1 + values["congestion"] * nodes),
        "contention": slower * images,
    }
    if np.any(stored):
        times["storage"] = np.maximum(stored - (1 + slower) * images, 0.0)
    if work["step_period_s"].any():
        trained = (1 + slower) * images * work["trained"] / samples
        busy = trained + times["updates"] + times["allreduce"]
        held = np.maximum(updates * work["step_period_s"] - busy, 0.0)
        times["waiting"] = held * (1 - 1 / updates)
    return times


def predict_times_and_powers(
    values: dict[str, float], work: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute time in s, and mean powers in W of one GPU: with its part of a node, and alone,
    (configurations,) each.
    """
    times = times_by_cause_s(values, work)
    total_s = sum(times.values())
    waits = ("starts", "fill", "storage", "waiting")
    works_s = total_s - sum(times.get(cause, 0.0) for cause in waits)
    works_s = works_s + values["exchange"] * times["allreduce"]
    gpu_W = values["idle"] + (values["fed"] - values["idle"]) * works_s / total_s
    gpu_W = gpu_W + values["image_J"] * work["epochs"] * work["trained"] / total_s
    return total_s, gpu_W + values["host"] / work["devices_of_node"], gpu_W
