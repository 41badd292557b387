"""FourCastNet on ERA5 states, data-parallel: pre-training on one step, fine-tuning on two autoregressive steps.

The recipe is that of the paper, section 3.3.1; where it is silent, that of the published code (Pathak et al. 2022,
github.com/NVlabs/FourCastNet), marked "published code". Sizes, epochs and data come from the configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from energynn.config import FourCastNetConfig
from energynn.data import era5, era5_store, manifests
from energynn.measure.samples import Events
from energynn.models.afno import AFNO
from energynn.train import checkpoint, distributed
from energynn.train.distributed import World
from energynn.train.phases import PhaseTimer, Progress, require_finite

STEPS = {"pretrain": 1, "finetune": 2}  # autoregressive steps of a sample (section 3.3.1)
CHECK_STEPS = 50  # between two looks at the losses: each look waits for the GPU


@distributed.lost_ranks_named()
def main(config: FourCastNetConfig, run_dir: Path, folder: Path | None = None) -> list[float]:
    """Train in this process as one rank of ``config.devices``; return this rank's training loss of every step.

    Fine-tuning starts from the weights of ``config.initial_run`` in the folder beside ``run_dir``. Goes on from the
    newest checkpoint in ``run_dir``, if there is one. Writes the events of this rank to ``folder``, a segment of the
    run, by default the whole; and the weights if ``config.save_weights``. Raises ValueError for damaged data or other
    than another rank's, missing or other weights, a data set smaller than one global batch, and a loss that is not
    finite; Interrupted after the checkpoint when it was asked to stop; LostRank.
    """
    run_dir = Path(run_dir)
    folder = Path(folder or run_dir)
    world = distributed.join(config)
    events = Events(folder, world.rank)
    events.mark("rank_start", **world.describe())

    quiet = (lambda line: None) if world.rank else print
    data = manifests.verify(config.dataset, progress=quiet)
    if config.dataset == "era5":
        years = (config.training_years, config.validation_years, config.test_years)
        training, validation, test = era5_store.load(data, STEPS[config.stage], *years)
    elif config.dataset == "synthetic":
        validation, (training, test) = None, era5.synthetic(STEPS[config.stage])
    else:  # too few times for a validation set
        validation, (training, test) = None, era5.load_ensemble(data / f"{config.dataset}.nc", STEPS[config.stage])
    sequences = training.sequences
    few = (training.mean, training.std, training.climatology, sequences[0], sequences[len(sequences) - 1])
    distributed.require_same_data(world, data, *few, test.sequences[0])
    # The published code leaves out what does not fill a batch on every rank, too.
    sampler = distributed.Shard(sequences, shuffle=True, seed=config.seed, drop_last=True)
    loader = make_loader(sequences, sampler, config, world, drop_last=True)
    if validation:  # each sample on one rank; the last ranks may have one less
        own_part = range(world.rank, len(validation.sequences), world.size)
        validation_loader = make_loader(validation.sequences, own_part, config, world)
    steps = len(loader) // config.accumulation_steps
    if steps == 0:
        raise ValueError(
            f"local_batch_size: {len(sequences)} training samples are less than one batch of {config.local_batch_size} "
            f"on each of {config.devices} devices; lower it"
        )
    initial_weights = run_dir.parent / config.initial_run / "weights.pt" if config.stage == "finetune" else None
    model = make_model(config, training.sequences.shape[2:], world, initial_weights)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=config.fused_optimizer or None)
    scheduler = CosineAnnealingLR(optimizer, T_max=config.epochs)

    def example() -> Tensor:  # made in place, so that its memory is the training's afterwards
        return torch.from_numpy(sequences[0]).expand(config.local_batch_size, -1, -1, -1, -1).to(world.device)

    distributed.warm_up(model, lambda: rollout_loss(model, example(), config.precision))

    phases = PhaseTimer(world.device, folder, world.rank, config.synchronous_phases)
    parts = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler}
    checkpoints = checkpoint.Checkpoints(run_dir, world, config.checkpoint_period_s, parts)
    first_step, own = checkpoints.load() or (0, {"losses": [], "samples_evaluated": 0})
    # Steps of the epoch that a checkpoint broke off; after its last step the evaluation is still to be made.
    first_epoch, done_steps = divmod(first_step - 1, steps) if first_step else (0, -1)
    done_steps += 1
    losses, samples_evaluated = own["losses"], own["samples_evaluated"]  # of all epochs
    stop = distributed.StopVote(world, folder, config.collective_timeout_s)
    progress = Progress(config, steps, first_step, events if world.rank == 0 else None)
    metrics: dict[str, float] = {}
    asked = stop.NOTHING

    def save(optimizer_steps: int) -> None:
        with phases("checkpoint"):
            checkpoints.save(optimizer_steps, losses=losses, samples_evaluated=samples_evaluated)
        phases.write()
        if asked == stop.STOP:
            raise distributed.Interrupted(f"checkpoint after {optimizer_steps} of {config.epochs * steps} steps")

    distributed.barrier(world)
    samples_done = first_step * config.global_batch_size
    events.mark("training_start", dataset_samples=len(sequences), samples_done=samples_done)
    for epoch in range(first_epoch, config.epochs):
        learning_rate = optimizer.param_groups[0]["lr"]
        model.train()
        sampler.set_epoch(epoch)
        sampler.first = done_steps * config.accumulation_steps * config.local_batch_size
        unread: list[Tensor] = []
        accumulated = 0.0
        for passes, batch in enumerate(phases.loading(loader), start=done_steps * config.accumulation_steps):
            step, part = divmod(passes, config.accumulation_steps)
            if step == steps:  # what does not fill a global batch is left out
                break
            is_last_part = part == config.accumulation_steps - 1
            with phases("host_to_device"):
                batch = batch.to(world.device, non_blocking=config.pinned_memory)
            with contextlib.nullcontext() if is_last_part else model.no_sync():
                with phases("forward"):
                    loss = rollout_loss(model, batch, config.precision) / config.accumulation_steps
                with phases("backward"):
                    if part == 0:
                        optimizer.zero_grad()
                    loss.backward()
            accumulated = (accumulated if part else 0.0) + loss.detach()
            if not is_last_part:
                continue
            with phases("optimizer"):
                optimizer.step()
            unread.append(accumulated)
            progress.step(epoch, step, unread[-1])
            asked = stop(checkpoints.is_due())
            if len(unread) == CHECK_STEPS or step == steps - 1 or asked:
                read = torch.stack(unread).tolist()
                require_finite(read, epoch, first_step=step + 1 - len(read))
                losses += read
                unread.clear()
            if asked:
                save(epoch * steps + step + 1)
        done_steps = 0
        samples_trained = (epoch + 1) * steps * config.global_batch_size

        try:
            with phases("evaluation"):
                metrics = evaluate(model.module, test, world, config.precision)
                if validation:
                    votes = len(validation.sequences) // world.size // config.local_batch_size
                    batches = stop.during(validation_loader, votes)
                    metrics["validation_loss"] = mean_loss(model.module, batches, world, config.precision)
        except distributed.Interrupted:
            asked = stop.STOP
            save((epoch + 1) * steps)
        samples_evaluated += len(test.sequences) + (len(validation.sequences) if validation else 0)
        scheduler.step()
        training_loss = distributed.total([sum(losses[-steps:]) / steps / world.size], world)[0]
        if world.rank == 0:
            events.mark(
                "epoch", epoch=epoch + 1, epochs=config.epochs, training_loss=training_loss,
                learning_rate=learning_rate, samples_trained=samples_trained, samples_evaluated=samples_evaluated,
                optimizer_steps=(epoch + 1) * steps, **metrics,
            )  # fmt: skip
        phases.write()  # reads the GPU's events of this epoch, so that they do not pile up
    stop.close()
    distributed.barrier(world)
    events.mark(
        "training_end", samples_trained=samples_trained, samples_evaluated=samples_evaluated,
        optimizer_steps=config.epochs * steps,
        forward_backward_passes=config.epochs * steps * config.accumulation_steps, metrics=metrics,
    )  # fmt: skip
    phases.write()
    progress.end(metrics)
    if config.save_weights and world.rank == 0:
        digest = checkpoint.save_weights(run_dir / "weights.pt", model.module, architecture(config))
        events.mark("weights_saved", file="weights.pt", sha256=digest)
    checkpoints.remove()
    distributed.leave()
    return losses


def architecture(config: FourCastNetConfig) -> dict:
    """What decides which weights fit the network; stored with them."""
    names = ("patch_size", "embed_dim", "depth", "mlp_ratio", "num_blocks", "sparsity_threshold",
             "hard_thresholding_fraction", "filter_modes")  # fmt: skip
    return {name: getattr(config, name) for name in names}


def make_model(
    config: FourCastNetConfig, state_shape: tuple[int, int, int], world: World, initial_weights: Path | None = None
) -> DistributedDataParallel:
    """The AFNO for states (channels, latitude, longitude), with new weights or those of an earlier run."""
    channels, *grid = state_shape
    model = AFNO(img_size=tuple(grid), in_chans=channels, out_chans=channels,
                 activation_checkpointing=config.activation_checkpointing, **architecture(config))  # fmt: skip
    if initial_weights:
        checkpoint.load_weights(initial_weights, model, architecture(config))
    model.to(world.device)
    model = DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None)
    if config.compile:
        model.compile()
    return model


def make_loader(
    sequences, sampler, config: FourCastNetConfig, world: World, drop_last: bool = False
) -> DataLoader:  # fmt: skip
    """Batches of the sequences that the sampler names."""
    workers = config.loader_workers if config.data_staging else 0
    return DataLoader(
        sequences, config.local_batch_size, sampler=sampler, drop_last=drop_last, collate_fn=as_batch,
        num_workers=workers, persistent_workers=config.persistent_workers and workers > 0,
        pin_memory=config.pinned_memory and world.device.type == "cuda",
    )  # fmt: skip


def as_batch(sequences: list[np.ndarray] | np.ndarray) -> Tensor:
    """(samples, steps + 1, channels, latitude, longitude) from single sequences; a batch already stays as it is."""
    return torch.from_numpy(np.asarray(sequences))


def forecast(model: torch.nn.Module, state: Tensor, precision: str) -> Tensor:
    """The next state; with bfloat16 the products are of that precision, and the filter's transform of float32."""
    with torch.autocast(state.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        return model(state).to(state.dtype)


def rollout_loss(model: torch.nn.Module, batch: Tensor, precision: str = "float32") -> Tensor:
    """Sum over the steps of the relative L2 loss; each step starts from the forecast of the one before.

    batch: (samples, steps + 1, channels, latitude, longitude). Fine-tuning adds both steps' losses (published code).
    """
    state, loss = batch[:, 0], torch.zeros((), device=batch.device)
    for target in batch[:, 1:].unbind(dim=1):
        state = forecast(model, state, precision)
        loss = loss + relative_l2_loss(state, target)
    return loss


def relative_l2_loss(forecast: Tensor, target: Tensor) -> Tensor:
    """|forecast - target| / |target|, the norms over channels and grid points, mean over samples (published code)."""
    return ((forecast - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)).mean()


@torch.no_grad()
def mean_loss(model: torch.nn.Module, loader: Iterable[Tensor], world: World, precision: str) -> float:
    """Mean loss over the samples of all ranks' batches, which may have different numbers of them.

    ``model`` is not the DistributedDataParallel around it, here and in ``evaluate``, for the same reason.
    """
    model.eval()
    loss_sum, count = torch.zeros((), dtype=torch.float64, device=world.device), 0
    for batch in loader:
        loss_sum += len(batch) * rollout_loss(model, batch.to(world.device), precision)
        count += len(batch)
    loss_total, count_total = distributed.total([loss_sum.item(), count], world)
    return loss_total / count_total


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, test: era5.Split, world: World, precision: str = "float32"
) -> dict[str, float]:  # fmt: skip
    """RMSE and ACC of the forecasts after each of ``test.scored_steps``, each test sample once over all ranks.

    Means over samples of each sample's score, beside those of persistence (no change): of Z500, its RMSE as
    geopotential (m2/s2) and as height (m); of all channels, the mean of their RMSE, in standard deviations,
    and of their ACC.
    """
    model.eval()
    weights, climatology = (
        torch.from_numpy(values).to(world.device, torch.float64)
        for values in (test.latitude_weights[:, None], test.climatology)
    )
    sums = torch.zeros(len(test.scored_steps), 2, 2, len(test.std), dtype=torch.float64, device=world.device)
    for index in range(world.rank, len(test.sequences), world.size):
        sequence = torch.from_numpy(test.sequences[index]).to(world.device)
        state = first = sequence[:1]
        for step, truth in enumerate(sequence[1:], start=1):
            state = forecast(model, state, precision)
            if step in test.scored_steps:
                found = [scores(each[0], truth, climatology, weights) for each in (state, first)]
                sums[test.scored_steps.index(step)] += torch.stack(found)
    means = np.reshape(distributed.total(sums.flatten().tolist(), world), sums.shape) / len(test.sequences)
    metrics: dict[str, float] = {}
    for step, ((rmse, acc), (persistence_rmse, persistence_acc)) in zip(test.scored_steps, means, strict=True):
        lead, z500, z500_std = f"{test.lead_h * step}h", test.z500, float(test.std[test.z500])
        metrics |= {
            f"z500_rmse_{lead}_m": rmse[z500] * z500_std / era5.GRAVITY_M_S2,
            f"z500_rmse_{lead}_m2_s2": rmse[z500] * z500_std,
            f"z500_rmse_{lead}_persistence_m": persistence_rmse[z500] * z500_std / era5.GRAVITY_M_S2,
            f"z500_acc_{lead}": acc[z500], f"z500_acc_{lead}_persistence": persistence_acc[z500],
            f"rmse_{lead}": rmse.mean(), f"acc_{lead}": acc.mean(),
        }  # fmt: skip
    return {name: float(value) for name, value in metrics.items()}


def scores(forecast: Tensor, truth: Tensor, climatology: Tensor, weights: Tensor) -> Tensor:
    """Latitude-weighted root mean square error and anomaly correlation coefficient, (2, channels) float64.

    States are (channels, latitude, longitude), normalized; weights (latitude, 1), mean 1. The ACC correlates what the
    forecast and what the truth differ from the climatology, about zero, not about their means (published code).
    """
    mean = lambda product: (weights * product).mean(dim=(1, 2))  # noqa: E731
    ours, theirs = forecast - climatology, truth - climatology
    rmse = mean((ours - theirs) ** 2).sqrt()
    return torch.stack([rmse, mean(ours * theirs) / (mean(ours**2) * mean(theirs**2)).sqrt()])
