"""ResNet50 on images, data-parallel: the recipe of the study, with sizes and epochs from the configuration.

What is said about the recipe comes from the paper, section 3.2.1, and where it is silent from the study's own code
(github.com/RAI-SCC/ResNet), marked "study's code".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset
from torchvision import models, transforms

from energynn.config import ResNet50Config
from energynn.data import manifests
from energynn.data.imagenet import list_images, prepare, stratified_prefix
from energynn.data.images import CENTRE_SHARE, Images, centre_crop, load_pillow, normalized, random_crop
from energynn.files import REPOSITORY
from energynn.measure.samples import Events
from energynn.train import checkpoint, distributed
from energynn.train.distributed import World
from energynn.train.phases import PhaseTimer, Progress, require_finite

# Of ImageNet's training images; the usual constants of torchvision's reference training.
CHANNEL_MEAN = (0.485, 0.456, 0.406)
CHANNEL_STD = (0.229, 0.224, 0.225)
REFERENCE_BATCH_SIZE = 256  # config.learning_rate is for this global batch size (Goyal et al. 2017)
CHECK_STEPS = 50  # between two looks at the losses: each look waits for the GPU


@distributed.lost_ranks_named()
def main(config: ResNet50Config, run_dir: Path, folder: Path | None = None) -> list[float]:
    """Train in this process as one rank of ``config.devices``; return this rank's training loss of every step.

    Goes on from the newest checkpoint in ``run_dir``, if there is one. Writes the events of this rank to ``folder``, a
    segment of the run, by default the whole; and the weights if ``config.save_weights``. Raises ValueError for damaged
    data or other data than another rank's, a data set smaller than one global batch, and a loss that is not finite;
    Interrupted after the checkpoint when it was asked to stop; LostRank.
    """
    run_dir = Path(run_dir)
    folder = Path(folder or run_dir)
    world = distributed.join(config)
    events = Events(folder, world.rank)
    events.mark("rank_start", **world.describe())

    training, validation = load_images(config, world)
    for images in (training, validation):
        listing = images.listing
        places = [] if listing.offsets is None else [listing.offsets, listing.sizes]  # within an archive or a store
        some = [np.frombuffer(listing.read(images.indices[at]), np.uint8) for at in (0, -1)[: len(images)]]
        chosen = [listing.names, listing.labels, images.indices]
        distributed.require_same_data(world, listing.place, *chosen, *places, *some)
    training_loader = make_loader(training, config, world, shuffle=True)
    training_evaluation_loader = make_loader(training, config, world)
    validation_loader = make_loader(validation, config, world)
    steps = len(training_loader) // config.accumulation_steps
    if steps == 0 or len(validation_loader) == 0:
        raise ValueError(
            f"local_batch_size: {len(training)} training and {len(validation)} validation samples are less than one "
            f"batch of {config.local_batch_size} on each of {config.devices} devices; lower it or take more samples"
        )
    model = make_model(len(training.listing.classes), config, world)
    vectors = [] if config.weight_decay_on_all else [one for one in model.parameters() if one.ndim < 2]
    matrices = [one for one in model.parameters() if config.weight_decay_on_all or one.ndim >= 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}][: 1 + bool(vectors)]
    optimizer = torch.optim.SGD(
        groups, lr=config.warmup_start, momentum=config.momentum, weight_decay=config.weight_decay,
        fused=config.fused_optimizer or None,
    )  # fmt: skip
    plateau = ReduceLROnPlateau(optimizer, factor=config.plateau_factor, patience=config.plateau_patience)

    example = torch.zeros(config.local_batch_size, 3, config.image_size, config.image_size)
    images, labels = to_device((example, torch.zeros(config.local_batch_size, dtype=torch.int64)), config, world)
    distributed.warm_up(model, lambda: F.cross_entropy(scores(model, images, config), labels))
    if config.compile:  # for evaluation once more
        evaluate(model, [(images, labels)], config, world)

    phases = PhaseTimer(world.device, folder, world.rank, config.synchronous_phases)
    parts = {"model": model.module, "optimizer": optimizer, "plateau": plateau}
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

    def mark_bad_images() -> None:
        if config.on_bad_image == "skip":
            skipped = training.skipped() + validation.skipped()
            events.mark("bad_images", images_skipped=len(skipped), first=skipped[:10])

    def save(optimizer_steps: int) -> None:
        with phases("checkpoint"):
            checkpoints.save(optimizer_steps, losses=losses, samples_evaluated=samples_evaluated)
        phases.write()
        if asked == stop.STOP:
            mark_bad_images()
            raise distributed.Interrupted(f"checkpoint after {optimizer_steps} of {config.epochs * steps} steps")

    distributed.barrier(world)
    samples_done = first_step * config.global_batch_size
    events.mark("training_start", dataset_samples=len(training), samples_done=samples_done)
    for epoch in range(first_epoch, config.epochs):
        if epoch <= config.warmup_epochs:
            set_learning_rate(optimizer, warmup_learning_rate(epoch, config))
        learning_rate = optimizer.param_groups[0]["lr"]

        model.train()
        for loader in (training_loader, validation_loader):
            loader.sampler.set_epoch(epoch)
        training_evaluation_loader.sampler.set_epoch(config.epochs + epoch)  # other crops than those of the training
        training_loader.sampler.first = done_steps * config.accumulation_steps * config.local_batch_size
        unread: list[torch.Tensor] = []
        accumulated = 0.0
        first_pass = done_steps * config.accumulation_steps
        for passes, batch in enumerate(phases.loading(training_loader), start=first_pass):
            step, part = divmod(passes, config.accumulation_steps)
            if step == steps:  # what does not fill a global batch is left out
                break
            is_last_part = part == config.accumulation_steps - 1
            if epoch < config.warmup_epochs and not config.warmup_per_epoch:
                set_learning_rate(optimizer, warmup_learning_rate(epoch + step / steps, config))
            with phases("host_to_device"):
                images, labels = to_device(batch, config, world)
            with contextlib.nullcontext() if is_last_part else model.no_sync():
                with phases("forward"):
                    loss = F.cross_entropy(scores(model, images, config), labels) / config.accumulation_steps
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
                batches = stop.during(validation_loader, len(validation_loader))
                metrics, evaluated = evaluate(model, batches, config, world)
                if config.evaluate_training_set:  # with random crops as in training (study's code)
                    batches = stop.during(training_evaluation_loader, len(training_evaluation_loader))
                    again, more = evaluate(model, batches, config, world)
                    metrics["top1_error_training"], evaluated = again["top1_error"], evaluated + more
        except distributed.Interrupted:
            asked = stop.STOP
            save((epoch + 1) * steps)
        samples_evaluated += evaluated
        if epoch >= config.warmup_epochs:
            plateau.step(metrics["validation_loss"])
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
    mark_bad_images()
    progress.end(metrics)
    if config.save_weights and world.rank == 0:
        classes = {"classes": len(training.listing.classes)}
        digest = checkpoint.save_weights(run_dir / "weights.pt", model.module, classes)
        events.mark("weights_saved", file="weights.pt", sha256=digest)
    checkpoints.remove()
    distributed.leave()
    return losses


def load_images(config: ResNet50Config, world: World) -> tuple[Images, Images]:
    """Training and validation images as the configuration selects and transforms them, from the verified folder.

    With ``image_loading="store"`` they come from a prepared store only, which the embedded data set gets here; with
    "device" there are as many as asked for: their number makes the steps of an epoch, but one batch of them is read.
    """
    root = manifests.verify(config.dataset, progress=(lambda line: None) if world.rank else print)
    if config.image_loading == "store" and not (root / "train.ppm").is_file():
        store = REPOSITORY / "build" / "store" / config.dataset
        if config.dataset in manifests.VARIABLES:
            raise ValueError(f"image_loading: {root} is no prepared store; `energynn imagenet prepare` writes one")
        if world.rank == 0:
            prepare(root, store)
        distributed.barrier(world)
        root = store
    found = []
    wanted = ((config.training_samples, "random"), (config.validation_samples, config.validation_crop))
    for listing, (count, crop) in zip(list_images(root), wanted, strict=True):
        on_device = config.image_loading == "device"
        indices = stratified_prefix(listing.names, listing.labels, min(count, len(listing)) if on_device else count)
        indices = np.resize(indices, count or len(indices))  # each of them once, or in turn where "device" wants more
        found.append(Images(listing, indices, make_transform(config, crop), config.on_bad_image))
    return tuple(found)


def make_transform(config: ResNet50Config, crop: str) -> Callable[[bytes], torch.Tensor]:
    """From a file's bytes to a crop: "random" as in training, of ``crop_scale_min`` to 1 of the image, or "center".

    Normalized float (3, size, size), or with ``uint8_to_device`` the pixels, uint8 (size, size, 3). Images of
    validation are cropped and flipped at random in the study's code, so its error is not that of a centre crop.
    """
    size, scale, is_random = config.image_size, (config.crop_scale_min, 1.0), crop == "random"
    if config.image_loading in ("fast", "store"):
        crops = [partial(random_crop, size=size, scale_min=scale[0]) if is_random else partial(centre_crop, size=size)]
        pixels, floats = [], [_normalized_alone]
    else:
        random_steps = [transforms.RandomResizedCrop(size, scale=scale), transforms.RandomHorizontalFlip()]
        centre_steps = [transforms.Resize(round(size / CENTRE_SHARE)), transforms.CenterCrop(size)]
        crops = [load_pillow, *(random_steps if is_random else centre_steps)]
        pixels, floats = [_pixels], [transforms.ToTensor(), transforms.Normalize(CHANNEL_MEAN, CHANNEL_STD)]
    return transforms.Compose(crops + (pixels if config.uint8_to_device else floats))


def _normalized_alone(crop: torch.Tensor) -> torch.Tensor:
    return normalized(crop[None], CHANNEL_MEAN, CHANNEL_STD)[0]


def _pixels(image) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


class SeededCrops(Dataset):
    """Images whose random crop and flip follow from seed, epoch and index alone, whoever loads them and when.

    So a training goes on from a checkpoint with the very images that it would have seen.
    """

    def __init__(self, images: Images, seed: int):
        self.images, self.seed = images, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed * 2**40 + number)  # number is epoch x samples + index
            return self.images[number % len(self.images)]


class OneBatch:
    """A loader's first batch, which stays on the device and stands for all of the others: steps without a loader."""

    def __init__(self, loader: DataLoader, config: ResNet50Config, world: World):
        self.loader, self.sampler = loader, loader.sampler
        self.batch = to_device(next(iter(loader)), config, world)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self):
        for done in range(0, len(self.sampler), self.loader.batch_size):  # the last batch of an evaluation is smaller
            yield tuple(part[: len(self.sampler) - done] for part in self.batch)


def make_loader(images: Images, config: ResNet50Config, world: World, shuffle: bool = False) -> DataLoader | OneBatch:
    """This rank's share in batches; what does not fill a batch on every rank is left out (study's code: drop_last)."""
    sampler = distributed.Shard(images, shuffle=shuffle, seed=config.seed, drop_last=config.drop_last)
    sampler.numbered = True
    workers = config.loader_workers if config.data_staging and config.image_loading != "device" else 0
    loader = DataLoader(
        SeededCrops(images, config.seed), config.local_batch_size, sampler=sampler, num_workers=workers,
        drop_last=shuffle, persistent_workers=config.persistent_workers and workers > 0,
        pin_memory=config.pinned_memory and world.device.type == "cuda",
    )  # fmt: skip
    return OneBatch(loader, config, world) if config.image_loading == "device" and len(loader) else loader


def to_device(batch, config: ResNet50Config, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels of a batch on the device, images normalized and in their memory format."""
    images, labels = (part.to(world.device, non_blocking=config.pinned_memory) for part in batch)
    if images.dtype == torch.uint8:
        images = normalized(images, CHANNEL_MEAN, CHANNEL_STD)
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
    return images.contiguous(memory_format=memory_format), labels


def make_model(classes: int, config: ResNet50Config, world: World) -> DistributedDataParallel:
    """torchvision's ResNet50, untrained, with batch norm over the local batch of each rank."""
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
    model = models.resnet50(num_classes=classes).to(world.device, memory_format=memory_format)
    model = DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None)
    if config.compile:
        model.compile()
    return model


def scores(model: torch.nn.Module, images: torch.Tensor, config: ResNet50Config) -> torch.Tensor:
    """One score per class, in the precision of the images; the network computes in that of the configuration."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
        return model(images).to(images.dtype)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def warmup_learning_rate(epoch: float, config: ResNet50Config) -> float:
    """Learning rate up to ``warmup_epochs``: linear from ``warmup_start`` to the one scaled with the batch size.

    The scaling with GBS / 256 is that of Goyal et al. 2017.
    """
    target = config.learning_rate * config.global_batch_size / REFERENCE_BATCH_SIZE
    share = epoch / config.warmup_epochs if config.warmup_epochs else 1.0
    return config.warmup_start + share * (target - config.warmup_start)


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, loader: Iterable, config: ResNet50Config, world: World
) -> tuple[dict[str, float], int]:
    """Mean loss, top-1 and top-5 error (0..1) over the samples of all ranks, and their number."""
    model.eval()
    loss_sum, wrong, wrong5 = (torch.zeros((), dtype=torch.float64, device=world.device) for _ in range(3))
    count = 0
    for batch in loader:
        images, labels = to_device(batch, config, world)
        found = scores(model, images, config)
        loss_sum += F.cross_entropy(found, labels, reduction="sum")
        wrong += (found.argmax(dim=1) != labels).sum()
        best = min(5, found.shape[1])
        if config.top5_per_sample:
            wrong5 += sum(label not in row.topk(best).indices for row, label in zip(found, labels, strict=True))
        else:
            wrong5 += (found.topk(best).indices != labels[:, None]).all(dim=1).sum()
        count += len(labels)
    *sums, count = distributed.total([wrong.item(), wrong5.item(), loss_sum.item(), count], world)
    top1, top5, loss = (one / count for one in sums)
    return {"top1_error": top1, "top5_error": top5, "validation_loss": loss}, int(count)
