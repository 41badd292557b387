"""The physical model: how long a training takes and what it draws, from what one GPU does in an
epoch.

Time of an epoch of one GPU:

    tau (trained + evaluation evaluated) (1 + c)          samples that it loads and computes
    + t_start passes                                      passes over data, each starts a loader
    + fill tau (1 + c) filled                             waits for the first batches of a pass
    + updates (t_update + 2 (n-1)/n gradient_bytes / (efficiency bandwidth))
    + what is left of updates step_period_s (1 - 1/U)     a run that is made to wait
    c = kappa [node full] + kappa_nodes log2(nodes) + kappa_storage (nodes - 1)      contention
    U: updates of all epochs; after the last one nothing waits

Energy is waiting plus work:

    E = (host / GPUs of a node in use + idle) time        every hour costs this, idle or not
        + (fed - idle) (time without starts, fills, waiting)   a GPU that computes or exchanges
        + image_J trained samples

All of one GPU with its part of a node. Bandwidth: of a node's link, or between the GPUs of one
node.

``work`` is a record array, (configurations,): what one GPU does, and where. devices_of_node: in
use on each node, as a mean. is_full: whether a node has all in use. workers: of each GPU's
loader. Of an epoch of one GPU: trained and evaluated samples, passes, filled (samples of the
first local batches), updates (where gradients of several local batches add up, each counts as
one). allreduce_s: of one of them, as a mean, at the full bandwidth. step_period_s: from one update
to the next at least.
"""

import numpy as np

# Parameters that are learnt: unit and meaning.
OF_TIME = {
    "tau": ("s", "one trained sample, loaded and computed, where the node is not full"),
    "evaluation": ("1", "time of an evaluated sample, that of a trained one being 1"),
    "t_start": ("s", "a pass over data begins: the loader's workers start"),
    "fill": ("batches", "local batches that a GPU waits for until a pass flows"),
    "t_update": ("s", "one update of the weights, without the all-reduce"),
    "efficiency": ("1", "part of the bandwidth that the all-reduce reaches"),
    "kappa": ("1", "further time of a sample where all GPUs of a node are in use"),
    "kappa_nodes": ("1", "further time of a sample for each doubling of nodes"),
    "kappa_storage": ("1/node", "further time of a sample for each further node"),
}
OF_POWER = {
    "host": ("W", "a node without its GPUs: CPUs and memory"),
    "fed": ("W", "a GPU that computes or is in an all-reduce, without image_J"),
    "idle": ("W", "a GPU that waits for its loader: no kernel runs"),
    "image_J": ("J", "one trained sample"),
}
LINEAR = ["kappa_nodes", *OF_POWER]  # of the others the logarithm is fitted


def times_s(values: dict[str, float], work: np.recarray) -> dict[str, np.ndarray]:
    """Seconds of the whole training by cause, (configurations,) each."""
    samples = work.trained + values["evaluation"] * work.evaluated
    images = work.epochs * samples * values["tau"]
    slower = (
        values["kappa"] * work.is_full
        + values["kappa_nodes"] * np.log2(work.nodes)
        + values["kappa_storage"] * (work.nodes - 1)
    )
    filled_s = work.filled * values["tau"] * (1 + slower)
    updates = work.epochs * work.updates
    times = {
        "images": images,
        "starts": work.epochs * work.passes * values["t_start"],
        "fill": work.epochs * values["fill"] * filled_s,
        "updates": updates * values["t_update"],
        "allreduce": updates * work.allreduce_s / values["efficiency"],
        "contention": slower * images,
    }
    if work.step_period_s.any():
        trained = (1 + slower) * images * work.trained / samples
        busy = trained + times["updates"] + times["allreduce"]
        held = np.maximum(updates * work.step_period_s - busy, 0.0)
        times["waiting"] = held * (1 - 1 / updates)
    return times


def predict(
    values: dict[str, float], work: np.recarray
) -> tuple[np.ndarray, np.ndarray]:
    """Time in s, and mean power of one GPU with its part of a node in W, (configurations,)."""
    times = times_s(values, work)
    total_s = sum(times.values())
    waiting = times["starts"] + times["fill"] + times.get("waiting", 0.0)
    power_W = (
        values["host"] / work.devices_of_node
        + values["idle"]
        + (values["fed"] - values["idle"]) * (1 - waiting / total_s)
    )
    return total_s, power_W + values["image_J"] * work.epochs * work.trained / total_s
