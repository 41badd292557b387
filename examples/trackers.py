"""The energy of each epoch beside the loss, in TensorBoard, MLflow or Weights & Biases.

for epoch in with_energy(range(10), to_tensorboard(writer)):
    train_one_epoch()
"""

import energynn


def with_energy(epochs, log):
    """The epochs one after the other; ``log(name, value, step)`` gets each one's energy and power.

    Its time, too.
    """
    for number, epoch in enumerate(epochs):
        step = epoch if isinstance(epoch, int) else number
        try:
            with energynn.window(f"epoch {epoch}") as measured:
                yield epoch
        finally:  # also of an epoch at which the loop breaks
            # measured, or only estimated
            provenance = measured.energies.get("energy_total_provenance", "unknown")
            if measured.energies["doubts"]:
                provenance = "not_valid"
            log(f"energy_{provenance}_J", measured.energy_J, step)
            log(f"mean_power_{provenance}_W", measured.energy_J / measured.time_s, step)
            log("epoch_time_s", measured.time_s, step)


def to_tensorboard(writer):
    """``writer`` is a torch.utils.tensorboard.SummaryWriter."""

    def log(name, value, step):
        writer.add_scalar(f"energynn/{name}", value, step)

    return log


def to_mlflow(mlflow):
    """``mlflow`` is the module, or a run's client with ``log_metric``."""

    def log(name, value, step):
        mlflow.log_metric(f"energynn/{name}", value, step=step)

    return log


def to_wandb(run):
    """``run`` is what wandb.init() returns; its step goes on: the epoch is an axis of its own."""

    def log(name, value, step):
        run.log({f"energynn/{name}": value, "energynn/epoch": step})

    return log
