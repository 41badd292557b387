"""FourCastNet on ERA5 states, data-parallel: pre-training on one step, fine-tuning on two
autoregressive steps.

The recipe is that of the paper, section 3.3.1; where it is silent, that of the published code
(Pathak et al. 2022, github.com/NVlabs/FourCastNet), marked "published code". Sizes, epochs and
data come from the configuration.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset

from energynn.data import era5, era5_store, manifests
from energynn.experiment.config import FourCastNetConfig
from energynn.train import checkpoint, distributed
from energynn.train.afno import AFNO
from energynn.train.batches import (
    Shard,
    make_loader,
    predict,
    require_batch_count,
)
from energynn.train.distributed import World
from energynn.train.session import Session


@distributed.lost_ranks_named()
def main(
    config: FourCastNetConfig, run_dir: Path, folder: Path | None = None
) -> list[float]:
    """Train in this process as one rank of ``config.devices``; return its training losses.

    Goes on from the newest checkpoint in ``run_dir``, if there is one. Writes this rank's events to
    ``folder``, a segment of the run, by default the whole; and the weights if asked to. Raises
    ValueError for damaged data or weights, a data set smaller than one global batch, and a loss
    that is not finite; Interrupted after the checkpoint when it was asked to stop; LostRank.
    """
    session = Session(config, run_dir, folder)
    world = session.world
    training, validation, test = load_splits(config)
    # What does not fill a batch on every rank is left out, as in the published code.
    sampler = Shard(training, shuffle=True, seed=config.seed, drop_last=True)
    loader = make_loader(training, sampler, config, world, drop_last=True)
    validation_loader = load_validation_shard(validation, config, world)
    require_batch_count(loader, config.accumulation_steps)
    if config.stays_on_device:
        loader.one_batch = next(iter(loader)).to(world.device)
    model = make_model(config, training.shape[2:], world, session.run_dir)
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=config.learning_rate,
        fused=config.fused_optimizer or None,
    )
    scheduler = CosineAnnealingLR(optimizer, T_max=config.epochs)
    example = torch.from_numpy(training[0]).expand(
        config.local_batch_size, -1, -1, -1, -1
    )
    # It is brought to the device in place, so that its memory is the training's afterwards.
    distributed.warm_up(
        model, lambda: rollout_loss(model, example.to(world.device), config.precision)
    )

    session.resume(loader, model=model.module, optimizer=optimizer, scheduler=scheduler)
    phase = session.phase
    with session.measured(dataset_samples=len(training)):
        for epoch in session.epochs():
            learning_rate = optimizer.param_groups[0]["lr"]
            model.train()
            for _step, local_batches in session.steps(epoch):
                optimizer.zero_grad()
                step_loss = 0.0
                for batch, is_last in local_batches:
                    with phase("host_to_device"):
                        batch = batch.to(
                            world.device, non_blocking=config.pinned_memory
                        )
                    model.require_backward_grad_sync = is_last
                    with phase("forward"):
                        loss = rollout_loss(model, batch, config.precision)
                        loss = loss / config.accumulation_steps
                    with phase("backward"):
                        loss.backward()
                    step_loss += loss.detach()
                with phase("optimizer"):
                    optimizer.step()
                session.step_done(step_loss)

            with session.evaluation():
                metrics, samples = evaluate_all_splits(
                    model.module, test, validation_loader, session
                )
            scheduler.step()
            session.epoch_done(metrics, samples, learning_rate)
    return session.finish(architecture(config))


def load_splits(
    config: FourCastNetConfig,
) -> tuple[Dataset, Dataset | None, era5.TestSet]:
    """Load sequences to train and to validate on, and the test set; embedded and synthetic data
    have no validation set.
    """
    data = manifests.verify(config.dataset)
    steps = config.epoch().forward_steps
    if config.dataset == "era5":
        years = config.training_years, config.validation_years, config.test_years
        return era5_store.load_splits(data, steps, *years)
    if config.dataset == "synthetic":
        training, test = era5.make_random_splits(steps)
    else:
        training, test = era5.load_ensemble(data / f"{config.dataset}.nc", steps)
    return training, None, test


def architecture(config: FourCastNetConfig) -> dict:
    """Return the sizes that decide which weights fit the network; they are stored with them."""
    names = (
        "patch_size",
        "embed_dim",
        "depth",
        "mlp_ratio",
        "num_blocks",
        "sparsity_threshold",
        "hard_thresholding_fraction",
        "filter_modes",
    )
    return {name: getattr(config, name) for name in names}


def load_validation_shard(
    validation: Dataset | None, config: FourCastNetConfig, world: World
) -> DataLoader | None:
    """Load a rank's part of the validation set; the last ranks may have one sample less."""
    if validation is None:
        return None
    own_part = range(world.rank, len(validation), world.size)
    return make_loader(validation, own_part, config, world)


def make_model(
    config: FourCastNetConfig,
    state_shape: tuple[int, int, int],
    world: World,
    run_dir: Path,
) -> DistributedDataParallel:
    """Make the AFNO for states (channels, latitude, longitude).

    Fine-tuning begins with the weights of ``config.initial_run``, in the folder beside ``run_dir``.
    """
    sizes = architecture(config)
    channels, *grid = state_shape
    again = config.activation_checkpointing
    model = AFNO(
        tuple(grid),
        channels=channels,
        activation_checkpointing=again,
        **sizes,
    )
    if config.stage == "finetune":
        weights = run_dir.parent / config.initial_run / "weights.pt"
        checkpoint.load_weights(weights, model, sizes)
    return distributed.data_parallel(model.to(world.device), config, world)


def rollout_loss(model: torch.nn.Module, batch: Tensor, precision: str) -> Tensor:
    """Add up the relative L2 losses of all steps; each step starts from the forecast of the one
    before.

    batch: (samples, steps + 1, channels, latitude, longitude). Fine-tuning adds both steps'
    losses (published code).
    """
    state = batch[:, 0]
    loss = torch.zeros((), device=batch.device)
    for target in batch[:, 1:].unbind(dim=1):
        state = predict(model, state, precision)
        loss = loss + relative_l2_loss(state, target)
    return loss


def relative_l2_loss(forecast: Tensor, target: Tensor) -> Tensor:
    """Compute |forecast - target| / |target|, norms over channels and grid, mean over samples
    (published code).
    """
    error = (forecast - target).flatten(1).norm(dim=1)
    return (error / target.flatten(1).norm(dim=1)).mean()


@torch.no_grad()
def evaluate_all_splits(
    model: torch.nn.Module,
    test: era5.TestSet,
    validation_loader: DataLoader | None,
    session: Session,
) -> tuple[dict[str, float], int]:
    """Compute metrics of the test set and, if there is a validation set, its loss; return the
    number of samples, too.

    ``model`` is not the DistributedDataParallel around it, because ranks may have different
    numbers of samples.
    """
    config = session.config
    world = session.world
    metrics = evaluate(model, test, world, config.precision)
    samples = len(test.sequences)
    if validation_loader is not None:
        validation_samples = len(validation_loader.dataset)
        batches_of_every_rank = (
            validation_samples // world.size // config.local_batch_size
        )
        loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
        for batch in session.stop.stoppable_batches(
            validation_loader, batches_of_every_rank
        ):
            loss = rollout_loss(model, batch.to(world.device), config.precision)
            loss_sum += len(batch) * loss
        (loss_total,) = distributed.total([loss_sum.item()], world)
        metrics["validation_loss"] = loss_total / validation_samples
        samples += validation_samples
    return metrics, samples


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, test: era5.TestSet, world: World, precision: str = "float32"
) -> dict[str, float]:
    """Compute RMSE and ACC of the forecasts after each of ``test.scored_steps``, each test
    sample once over all ranks.

    Means over samples of each sample's score, beside those of persistence (no change): of Z500,
    its RMSE as height (m) and its ACC; of all channels, the mean of their RMSE, in standard
    deviations, and of their ACC.
    """
    model.eval()
    weights = torch.from_numpy(test.latitude_weights[:, None]).to(
        world.device, torch.float64
    )
    climatology = torch.from_numpy(test.climatology).to(world.device, torch.float64)
    # For each scored step, of forecast and persistence, the sums of both scores for each channel.
    sums = torch.zeros(
        len(test.scored_steps),
        2,
        2,
        len(test.std),
        dtype=torch.float64,
        device=world.device,
    )
    for index in range(world.rank, len(test.sequences), world.size):
        sequence = torch.from_numpy(test.sequences[index]).to(world.device)
        state = first = sequence[:1]
        for step, truth in enumerate(sequence[1:], start=1):
            state = predict(model, state, precision)
            if step in test.scored_steps:
                place = test.scored_steps.index(step)
                sums[place, 0] += forecast_scores(state[0], truth, climatology, weights)
                sums[place, 1] += forecast_scores(first[0], truth, climatology, weights)
    means = np.reshape(
        distributed.total(sums.flatten().tolist(), world), sums.shape
    ) / len(test.sequences)
    metrics = {}
    z500 = test.z500
    for step, of_step in zip(test.scored_steps, means, strict=True):
        lead = f"{test.lead_h * step}h"
        kinds = (lead, f"{lead}_persistence")
        for (rmse, acc), kind in zip(of_step, kinds, strict=True):
            if z500 is not None:
                height_m = rmse[z500] * float(test.std[z500]) / era5.GRAVITY_M_S2
                metrics[f"z500_rmse_{kind}_m"] = height_m
                metrics[f"z500_acc_{kind}"] = acc[z500]
        rmse, acc = of_step[0]
        metrics[f"rmse_{lead}"] = rmse.mean()
        metrics[f"acc_{lead}"] = acc.mean()
    return {name: float(value) for name, value in metrics.items()}


def forecast_scores(
    forecast: Tensor, truth: Tensor, climatology: Tensor, weights: Tensor
) -> Tensor:
    """Compute latitude-weighted root mean square error and anomaly correlation coefficient, (2,
    channels) float64.

    States are (channels, latitude, longitude), normalized; weights (latitude, 1), mean 1. The ACC
    correlates what the forecast and what the truth differ from the climatology, about zero, not
    about their means (published code).
    """

    def weighted_mean(product: Tensor) -> Tensor:
        return (weights * product).mean(dim=(1, 2))

    forecast_anomaly = forecast - climatology
    true_anomaly = truth - climatology
    rmse = weighted_mean((forecast_anomaly - true_anomaly) ** 2).sqrt()
    acc = (
        weighted_mean(forecast_anomaly * true_anomaly)
        / (weighted_mean(forecast_anomaly**2) * weighted_mean(true_anomaly**2)).sqrt()
    )
    return torch.stack([rmse, acc])
