"""All that surrounds a recipe: the other ranks, events, phases, checkpoints, and the agreement
to stop.

The trainer calls the session; the session never calls the trainer.
"""

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from energynn.experiment.config import RunConfig
from energynn.host.progress import progress_meter
from energynn.measure.samples import Events
from energynn.train import distributed
from energynn.train.checkpoint import Checkpoints, save_weights
from energynn.train.distributed import Interrupted, RankAgreement, RankRequest
from energynn.train.phases import PhaseTimer


class Session:
    """Surround the training of one rank, from joining the other ranks to leaving them.

    A trainer makes a session, loads its data, makes its parts, and calls ``resume``. Within
    ``measured`` come the ``epochs``; in each of them ``steps``, with ``step_done`` after each,
    then ``evaluation`` and ``epoch_done``. At the end comes ``finish``. ``world`` tells of the
    ranks, ``phase(name)`` times what is done within it.
    """

    def __init__(self, config: RunConfig, run_dir: Path, folder: Path | None = None):
        """Join the other ranks; ``folder`` is a segment of the run in ``run_dir``, by default
        the whole.
        """
        self.config = config
        self.run_dir = Path(run_dir)
        self.folder = Path(folder or run_dir)
        self.world = distributed.join_ranks(config)
        self.events = Events(self.folder, self.world.rank)
        self.events.mark("rank_start", **self.world.describe())

    def resume(self, loader: DataLoader, **parts) -> None:
        """Go back to the newest checkpoint of the run, if there is one.

        ``loader`` gives the local batches of an epoch, and its sampler is a ``Shard``. ``parts``
        are what a checkpoint holds, as ``model`` (without the DistributedDataParallel around it),
        optimizer and schedule.
        """
        config = self.config
        world = self.world
        self.loader = loader
        self.parts = parts
        self.steps_per_epoch = len(loader) // config.accumulation_steps
        self.phase = PhaseTimer(
            world.device, self.folder, world.rank, config.synchronous_phases
        )
        self.checkpoints = Checkpoints(
            self.run_dir, world, config.checkpoint_period_s, parts
        )
        self.optimizer_steps, own = self.checkpoints.load(
            config.epochs * self.steps_per_epoch
        ) or (
            0,
            {"losses": [], "samples_evaluated": 0},
        )
        self.losses: list[float] = own["losses"]  # of this rank, one for each step
        self.samples_evaluated: int = own["samples_evaluated"]
        self.stop = RankAgreement(world, self.folder)
        # losses on their way from the GPU, since the last agreement
        self._unread: list[torch.Tensor] = []
        self.next_step = 0.0  # before which none begins

    @contextlib.contextmanager
    def measured(self, dataset_samples: int) -> Iterator[None]:
        """Mark the part whose time and energy the record tells: all ranks begin and end it
        together.
        """
        distributed.barrier(self.world)  # a GPU has nothing left to do
        self.events.be_idle("ready", self.config.idle_ready_s)
        distributed.barrier(self.world)
        distributed.limit_waiting_time(self.config.collective_timeout_s)
        batch = self.config.global_batch_size
        before = self.optimizer_steps * batch
        self.events.mark(
            "training_start", dataset_samples=dataset_samples, samples_done=before
        )
        # its rate does not count the set-up, nor what was idle
        total = self.config.epochs * self.steps_per_epoch * batch
        self.advance_progress = progress_meter(
            self.config.workload, total, "samples", before
        )
        yield
        distributed.barrier(self.world)
        passes = self.optimizer_steps * self.config.accumulation_steps
        self.events.mark(
            "training_end",
            **self._training_counts(),
            forward_backward_passes=passes,
            **self.world.memory(),
            metrics=self.metrics,
        )
        self.phase.write()
        # one by one: the launcher labels what each call writes
        self.world.tell(f"{self.config.workload}: {self.config.epochs} epochs")
        for name, value in self.metrics.items():
            self.world.tell(f"  {name}={value:.4g}")

    def epochs(self) -> range:
        """List the epochs that are not complete, from 0; an epoch's evaluation comes after its
        last step.
        """
        first = max(self.optimizer_steps - 1, 0) // self.steps_per_epoch
        return range(first, self.config.epochs)

    def steps(self, epoch: int) -> Iterator[tuple[int, Iterator[tuple]]]:
        """Give each step still to be done in the epoch, from 0, and its local batches, whose
        gradients add up.

        A local batch comes as (batch, is_last). The wait for it is the phase data_loading. What
        does not fill a global batch at the end of the epoch is left out.
        """
        local_batches = self.config.accumulation_steps
        is_last = [False] * (local_batches - 1) + [True]
        done = self.optimizer_steps - epoch * self.steps_per_epoch
        # drawn from the training's own, another seed would shift what a resumed epoch draws
        self.loader.generator = torch.Generator().manual_seed(self.config.seed + epoch)
        self.loader.sampler.set_epoch(epoch)
        self.loader.sampler.first = done * local_batches * self.config.local_batch_size
        batches = self.phase.loading(self.loader)
        for step in range(done, self.steps_per_epoch):
            time.sleep(max(0.0, self.next_step - time.monotonic()))
            self.next_step = time.monotonic() + self.config.step_period_s
            yield (
                step,
                zip(itertools.islice(batches, local_batches), is_last, strict=True),
            )
        next(batches, None)  # the loader comes to its end, too

    def step_done(self, loss: torch.Tensor) -> None:
        """Count a step of the optimizer; write a checkpoint if one is due, stop if the ranks
        shall.

        loss: that of this rank, on its device. Raises ValueError for one that is not finite, some
        steps later, and Interrupted after the checkpoint of a stop.
        """
        epoch, step = divmod(self.optimizer_steps, self.steps_per_epoch)
        self.optimizer_steps += 1
        self._unread.append(loss)
        if self.world.rank == 0:
            self._tell_step(epoch, step, loss)
        if self.stop.is_due() or step == self.steps_per_epoch - 1:
            request = self.stop(self.checkpoints.is_due())
            losses = torch.stack(self._unread).tolist()
            require_finite_losses(losses, epoch, first_step=step + 1 - len(losses))
            self.losses += losses
            self._unread.clear()
            if request:
                self._save_checkpoint(request)

    def _tell_step(self, epoch: int, step: int, loss: torch.Tensor) -> None:
        """Tell the person who waits, and who watches, how far the training is, every two seconds.

        The loss is read, which waits for the GPU, only if a line is due.
        """
        config = self.config
        place = f", epoch {epoch + 1}/{config.epochs}, step {step + 1}, loss "
        told = self.advance_progress(
            config.global_batch_size, lambda: f"{place}{loss.item():.4g}"
        )
        if told:
            self.events.mark("progress", told=told)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Time the evaluation after an epoch; a stop that is heard in it saves a checkpoint
        before it.
        """
        try:
            with self.phase("evaluation"):
                yield
        except Interrupted:
            self._save_checkpoint(RankRequest.STOP)

    def epoch_done(
        self, metrics: dict[str, float], samples_evaluated: int, learning_rate: float
    ) -> None:
        """Tell of the epoch; ``samples_evaluated`` are those of this epoch, on all ranks."""
        self.metrics = metrics
        self.samples_evaluated += samples_evaluated
        steps = self.steps_per_epoch
        local_loss = sum(self.losses[-steps:]) / steps
        (training_loss,) = distributed.total([local_loss / self.world.size], self.world)
        if self.world.rank == 0:
            self.events.mark(
                "epoch",
                epoch=self.optimizer_steps // steps,
                epochs=self.config.epochs,
                training_loss=training_loss,
                learning_rate=learning_rate,
                **self._training_counts(),
                **metrics,
            )
        # reads the GPU's events of this epoch, so that they do not pile up
        self.phase.write()

    def finish(self, architecture: dict) -> list[float]:
        """Save the weights with their ``architecture`` if asked for, leave the other ranks,
        return all losses.
        """
        if self.config.save_weights and self.world.rank == 0:
            save_weights(self.run_dir / "weights.pt", self.parts["model"], architecture)
        self.checkpoints.remove()
        distributed.leave_ranks()
        return self.losses

    def _training_counts(self) -> dict[str, int]:
        return {
            "samples_trained": self.optimizer_steps * self.config.global_batch_size,
            "samples_evaluated": self.samples_evaluated,
            "optimizer_steps": self.optimizer_steps,
        }

    def _save_checkpoint(self, request: RankRequest) -> None:
        with self.phase("checkpoint"):
            for file in (self.events.file, self.phase.file):
                # must not be lost where the checkpoint is not
                os.fsync(file.fileno())
            self.checkpoints.save(
                self.optimizer_steps,
                losses=self.losses,
                samples_evaluated=self.samples_evaluated,
            )
        self.phase.write()
        if request == RankRequest.STOP:
            # a thread of gloo that still has work aborts a process that is ending
            distributed.leave_ranks()
            all_steps = self.config.epochs * self.steps_per_epoch
            raise Interrupted(
                f"checkpoint after {self.optimizer_steps} of {all_steps} steps"
            )


def require_finite_losses(losses: list[float], epoch: int, first_step: int) -> None:
    """Raise ValueError naming epoch and step, both from 1, if a loss of this epoch is not a
    finite number.
    """
    for step, loss in enumerate(losses, start=first_step):
        if not math.isfinite(loss):
            where = f"epoch {epoch + 1}, step {step + 1}"
            raise ValueError(
                f"loss is {loss} in {where}; lower learning_rate, or look at the data there"
            )
