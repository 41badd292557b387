"""ResNet50 on images, data-parallel: the recipe of the study, with sizes and epochs from the
configuration.

What is said about the recipe comes from the paper, section 3.2.1, and where it is silent from the
study's own code (github.com/RAI-SCC/ResNet), marked "study's code".
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from torchvision import models, transforms

from energynn.data import manifests
from energynn.data.imagenet import list_images, select_images_of_run
from energynn.data.images import (
    CENTRE_CROP_SHARE,
    CHANNEL_MEAN,
    CHANNEL_STD,
    ImageDataset,
    centre_crop,
    load_with_pillow,
    normalize_images,
    random_crop,
)
from energynn.experiment.config import ResNet50Config
from energynn.train import batches, distributed
from energynn.train.batches import Loader, Shard, predict, require_batch_count
from energynn.train.distributed import World
from energynn.train.session import Session

# config.learning_rate is for this global batch size (Goyal et al. 2017)
REFERENCE_BATCH_SIZE = 256


@distributed.lost_ranks_named()
def main(
    config: ResNet50Config, run_dir: Path, folder: Path | None = None
) -> list[float]:
    """Train in this process as one rank of ``config.devices``; return its training losses.

    Goes on from the newest checkpoint in ``run_dir``, if there is one. Writes this rank's events to
    ``folder``, a segment of the run, by default the whole; and the weights if asked to. Raises
    ValueError for damaged data, a data set smaller than one global batch, and a loss that is not
    finite; Interrupted after the checkpoint when it was asked to stop; LostRank.
    """
    session = Session(config, run_dir, folder)
    world = session.world
    training, validation = load_images(config)
    loader = make_loader(training, config, world, shuffle=True)
    validation_loader = make_loader(validation, config, world)
    training_evaluation_loader = make_loader(training, config, world)
    require_batch_count(loader, config.accumulation_steps)
    require_batch_count(validation_loader, 1)
    classes = len(training.listing.classes)
    model = make_model(classes, config, world)
    optimizer = make_optimizer(model, config)
    plateau = ReduceLROnPlateau(
        optimizer, factor=config.plateau_factor, patience=config.plateau_patience
    )
    warm_up(model, config, world)

    session.resume(loader, model=model.module, optimizer=optimizer, plateau=plateau)
    phase = session.phase
    with (
        report_bad_images(session, training, validation),
        session.measured(dataset_samples=len(training)),
    ):
        for epoch in session.epochs():
            if epoch <= config.warmup_epochs:
                set_learning_rate(optimizer, warmup_learning_rate(epoch, config))
            learning_rate = optimizer.param_groups[0]["lr"]
            model.train()
            for step, local_batches in session.steps(epoch):
                if epoch < config.warmup_epochs and not config.warmup_per_epoch:
                    epochs_done = epoch + step / session.steps_per_epoch
                    set_learning_rate(
                        optimizer, warmup_learning_rate(epochs_done, config)
                    )
                optimizer.zero_grad()
                step_loss = 0.0
                for batch, is_last in local_batches:
                    with phase("host_to_device"):
                        images, labels = move_to_device(batch, config, world)
                    model.require_backward_grad_sync = is_last
                    with phase("forward"):
                        loss = F.cross_entropy(
                            predict(model, images, config.precision), labels
                        )
                        loss = loss / config.accumulation_steps
                    with phase("backward"):
                        loss.backward()
                    step_loss += loss.detach()
                with phase("optimizer"):
                    optimizer.step()
                session.step_done(step_loss)

            with session.evaluation():
                metrics, samples = evaluate_all_images(
                    model, validation_loader, training_evaluation_loader, epoch, session
                )
            if epoch >= config.warmup_epochs:
                plateau.step(metrics["validation_loss"])
            session.epoch_done(metrics, samples, learning_rate)
    return session.finish({"classes": classes})


def load_images(config: ResNet50Config) -> list[ImageDataset]:
    """List training and validation images as the configuration selects and transforms them."""
    root = manifests.verify(config.dataset)
    is_store = (root / "train.ppm").is_file()
    if {"pil": False, "store": True}.get(config.image_loading, is_store) != is_store:
        raise ValueError(
            f"image_loading: {root} is {'a' if is_store else 'no'} prepared store; give store for "
            "one, which `energynn data imagenet` writes, and pil for the images themselves"
        )
    listings = list_images(root)
    indices = select_images_of_run(listings, config)
    crops = ("random", config.validation_crop)
    return [
        ImageDataset(
            listing,
            chosen,
            make_image_transform(config, crop),
            config.on_bad_image,
            config.seed,
        )
        for listing, chosen, crop in zip(listings, indices, crops, strict=True)
    ]


@contextlib.contextmanager
def report_bad_images(session: Session, *selected: ImageDataset) -> Iterator[None]:
    """Write an event that names the skipped images when the training ends or is stopped."""
    try:
        yield
    finally:
        if session.config.on_bad_image == "skip":
            skipped = [
                place for images in selected for place in images.skipped_images()
            ]
            session.events.mark(
                "bad_images", images_skipped=len(skipped), first=skipped[:10]
            )


def make_image_transform(
    config: ResNet50Config, crop: str
) -> Callable[[bytes], torch.Tensor]:
    """Make the function from a file's bytes to a crop: "random" as in training, or "center".

    Normalized float (3, size, size), or with ``uint8_to_device`` the pixels, uint8 (size, size,
    3). Images of validation are cropped and flipped at random in the study's code, so its error
    is not that of a centre crop.
    """
    size = config.image_size
    scale_min = config.crop_scale_min
    if config.image_loading in ("fast", "store"):
        cropped = partial(centre_crop, size=size)
        if crop == "random":
            cropped = partial(random_crop, size=size, scale_min=scale_min)
        steps = [cropped]
        if not config.uint8_to_device:
            steps.append(normalize_images)
        return transforms.Compose(steps)
    if crop == "random":
        crops = [
            transforms.RandomResizedCrop(size, scale=(scale_min, 1.0)),
            transforms.RandomHorizontalFlip(),
        ]
    else:
        crops = [
            transforms.Resize(round(size / CENTRE_CROP_SHARE)),
            transforms.CenterCrop(size),
        ]
    if config.uint8_to_device:
        values = [np.array, torch.from_numpy]
    else:
        values = [
            transforms.ToTensor(),
            transforms.Normalize(CHANNEL_MEAN, CHANNEL_STD),
        ]
    return transforms.Compose([load_with_pillow, *crops, *values])


def make_loader(
    images: ImageDataset, config: ResNet50Config, world: World, shuffle: bool = False
) -> Loader:
    """Load this rank's share in batches; what fills no batch on every rank is left out (study's
    code: drop_last), and in the evaluation, too, where one batch stays on the device.
    """
    sampler = Shard(
        images, shuffle=shuffle, seed=config.seed, drop_last=config.drop_last
    )
    sampler.numbered = True
    is_whole = shuffle or config.stays_on_device
    loader = batches.make_loader(images, sampler, config, world, drop_last=is_whole)
    if config.stays_on_device and len(loader):
        loader.one_batch = move_to_device(next(iter(loader)), config, world)
    return loader


def move_to_device(
    batch, config: ResNet50Config, world: World
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring images and labels of a batch to the device, images normalized and in their memory
    format.
    """
    images, labels = (
        part.to(world.device, non_blocking=config.pinned_memory) for part in batch
    )
    if images.dtype == torch.uint8:
        images = normalize_images(images)
    memory_format = (
        torch.channels_last if config.channels_last else torch.contiguous_format
    )
    return images.contiguous(memory_format=memory_format), labels


def make_model(
    classes: int, config: ResNet50Config, world: World
) -> DistributedDataParallel:
    """Make torchvision's ResNet50, untrained, with batch norm over the local batch of each rank."""
    memory_format = (
        torch.channels_last if config.channels_last else torch.contiguous_format
    )
    model = models.resnet50(num_classes=classes).to(
        world.device, memory_format=memory_format
    )
    return distributed.data_parallel(model, config, world)


def make_optimizer(model: torch.nn.Module, config: ResNet50Config) -> torch.optim.SGD:
    """Make SGD with weight decay on all parameters, or only on those of two dimensions or more:
    no biases, no norms.
    """
    groups = [{"params": list(model.parameters())}]
    if not config.weight_decay_on_all:
        matrices = [values for values in model.parameters() if values.ndim >= 2]
        vectors = [values for values in model.parameters() if values.ndim < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.SGD(
        groups,
        lr=config.warmup_start,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        fused=config.fused_optimizer or None,
    )


def warm_up(
    model: DistributedDataParallel, config: ResNet50Config, world: World
) -> None:
    """Let everything be set up before the measured region: forward, backward, and compiled code
    for evaluation.
    """
    pixels = torch.zeros(
        config.local_batch_size, 3, config.image_size, config.image_size
    )
    images, labels = move_to_device(
        (pixels, torch.zeros(config.local_batch_size, dtype=torch.int64)), config, world
    )
    distributed.warm_up(
        model, lambda: F.cross_entropy(predict(model, images, config.precision), labels)
    )
    if config.compile:
        evaluate_images(model, [(images, labels)], config, world)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def warmup_learning_rate(epoch: float, config: ResNet50Config) -> float:
    """Compute the learning rate up to ``warmup_epochs``: linear from ``warmup_start`` to the
    scaled one.

    The scaling with GBS / 256 is that of Goyal et al. 2017.
    """
    target = config.learning_rate * config.global_batch_size / REFERENCE_BATCH_SIZE
    share = epoch / config.warmup_epochs if config.warmup_epochs else 1.0
    return config.warmup_start + share * (target - config.warmup_start)


def evaluate_all_images(
    model: torch.nn.Module,
    validation: DataLoader,
    training: DataLoader,
    epoch: int,
    session: Session,
) -> tuple[dict[str, float], int]:
    """Evaluate the validation set and, if configured, the training set after it.

    Both have random crops as in training (study's code), but other ones in each epoch; a stop is
    heard meanwhile.
    """
    config = session.config

    def evaluate_loader(loader, crops: int) -> tuple[dict[str, float], int]:
        loader.sampler.set_epoch(crops)
        heard = session.stop.stoppable_batches(loader, len(loader))
        return evaluate_images(model, heard, config, session.world)

    metrics, samples = evaluate_loader(validation, epoch)
    if config.evaluate_training_set:
        again, more = evaluate_loader(training, config.epochs + epoch)
        metrics["top1_error_training"] = again["top1_error"]
        samples += more
    return metrics, samples


@torch.no_grad()
def evaluate_images(
    model: torch.nn.Module, loader: Iterable, config: ResNet50Config, world: World
) -> tuple[dict[str, float], int]:
    """Compute mean loss, top-1 and top-5 error (0..1) over the samples of all ranks, and their
    number.
    """
    model.eval()
    loss_sum, wrong, wrong5 = torch.zeros(
        3, dtype=torch.float64, device=world.device
    ).unbind()
    count = 0
    for batch in loader:
        images, labels = move_to_device(batch, config, world)
        logits = predict(model, images, config.precision)
        loss_sum += F.cross_entropy(logits, labels, reduction="sum")
        wrong += (logits.argmax(dim=1) != labels).sum()
        best = min(5, logits.shape[1])
        if config.top5_per_sample:
            missed = [
                label not in row.topk(best).indices
                for row, label in zip(logits, labels, strict=True)
            ]
            wrong5 += sum(missed)
        else:
            wrong5 += (logits.topk(best).indices != labels[:, None]).all(dim=1).sum()
        count += len(labels)
    *sums, samples = distributed.total(
        [wrong.item(), wrong5.item(), loss_sum.item(), count], world
    )
    top1_error, top5_error, loss = (value / samples for value in sums)
    return {
        "top1_error": top1_error,
        "top5_error": top5_error,
        "validation_loss": loss,
    }, int(samples)
