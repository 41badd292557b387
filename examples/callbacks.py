"""The energy of each epoch in a Trainer of transformers, or of Lightning: one callback for either.

trainer.add_callback(for_transformers(trainer)); lightning.Trainer(callbacks=[for_lightning()])
"""

import energynn


class Epochs:
    """Measure one epoch after the other, and log each one's energy, power and time."""

    def begin(self):
        self.window = energynn.window("epoch")  # an epoch may have been interrupted
        self.block = self.window.__enter__()

    def end(self):
        self.window.__exit__()
        energies = self.block.energies
        provenance = energies.get("energy_total_provenance", "unknown")
        if energies["doubts"]:
            provenance = "not_valid"
        return {
            f"energy_{provenance}_J": self.block.energy_J,
            f"mean_power_{provenance}_W": self.block.energy_J / self.block.time_s,
            "epoch_time_s": self.block.time_s,
        }


def for_transformers(trainer):
    """Its values go where the Trainer's go: ``report_to``, and ``trainer.state.log_history``.

    Of several ranks the first has them. What is evaluated after an epoch does not count.
    """
    from transformers import TrainerCallback

    class EnergyOfEpochs(TrainerCallback, Epochs):
        def on_epoch_begin(self, args, state, control, **more):
            if state.is_world_process_zero:
                self.begin()

        def on_epoch_end(self, args, state, control, **more):
            if state.is_world_process_zero:
                is_loss_due = control.should_log  # to log makes it False
                trainer.log(self.end())
                control.should_log = is_loss_due

    return EnergyOfEpochs()


def for_lightning():
    """Its values go to the Trainer's logger, beside the loss; validation is in the epoch."""
    from lightning.pytorch import Callback

    class EnergyOfEpochs(Callback, Epochs):
        def on_train_epoch_start(self, trainer, module):
            if trainer.is_global_zero:
                self.begin()

        def on_train_epoch_end(self, trainer, module):
            if trainer.is_global_zero:
                module.log_dict(self.end(), rank_zero_only=True)

    return EnergyOfEpochs()
