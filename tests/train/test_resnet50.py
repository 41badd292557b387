"""What the presets' fields do to images and loaders, training without a loader, and data that
differ between ranks.
"""

import pytest
import torch

from energynn.data import manifests
from energynn.data.images import CHANNEL_STD, normalize_images
from energynn.experiment import config as configuration
from energynn.train import resnet50
from tests.jpegs import as_jpegs, usual_images
from tests.train.conftest import IMAGES

# the seed as people write a date
SIZES = IMAGES | dict(training_samples=20, learning_rate=0.1, seed=20_261_125)


def crops_of(data, crop, **fields):
    torch.manual_seed(3)
    return resnet50.make_image_transform(
        configuration.make("resnet50", image_size=224, **fields), crop
    )(data)


def test_paper_s_images_are_those_of_image_folder_to_the_bit(alone):
    config = configuration.make("resnet50", **SIZES | dict(training_samples=0))
    training, _ = resnet50.load_images(config)
    usual = usual_images(manifests.root("photographs") / "train", 32)
    assert len(training) == len(usual) == 1000
    for index in (0, 17, 999):
        torch.manual_seed((config.seed * 2**40 + index) % 2**64)
        expected, label = usual[index]
        found, own_label = training[index]
        assert torch.equal(found, expected) and own_label == label


@pytest.mark.parametrize("name", ["coffee", "flower", "temple"])
@pytest.mark.parametrize("crop", ["random", "center"])
def test_every_way_of_loading_gives_the_same_crop(crop, name):
    """Over uint8 up to the rounding of a float; the fast ones within one of 255, on average."""
    (data,) = as_jpegs(name, 1, (500, 375))
    expected = crops_of(data, crop=crop)
    assert expected.shape == (3, 224, 224) and expected.dtype == torch.float32
    pixels = crops_of(data, crop=crop, uint8_to_device=True)
    assert pixels.shape == (224, 224, 3) and pixels.dtype == torch.uint8
    assert torch.allclose(normalize_images(pixels[None])[0], expected, atol=1e-5)
    fast = crops_of(data, crop=crop, image_loading="fast")
    assert 0 < (fast - expected).abs().mean() * 255 * sum(CHANNEL_STD) / 3 < 1
    fast_pixels = crops_of(data, crop=crop, image_loading="fast", uint8_to_device=True)
    assert (fast_pixels.float() - pixels.float()).abs().mean() < 1
    assert torch.equal(normalize_images(fast_pixels[None])[0], fast)


def test_a_batch_that_stays_on_the_device_stands_for_all(alone):
    config = configuration.make(
        "resnet50",
        **SIZES | dict(training_samples=2002),
        image_loading="device",
        loader_workers=2,
    )
    training, validation = resnet50.load_images(config)
    assert len(training) == 2002, "more than there are: only their number counts"
    loader = resnet50.make_loader(training, config, alone, shuffle=True)
    assert len(loader) == 500 and loader.num_workers == 0
    first, second = [images for images, _ in loader][:2]
    assert first.data_ptr() == second.data_ptr() and first.std() > 0.1, "real images"
    sizes = [
        len(labels) for _, labels in resnet50.make_loader(validation, config, alone)
    ]
    assert sizes == [4, 4], "what fills no batch is left out"


@pytest.mark.parametrize(
    "fields",
    [
        dict(preset="fast", dataset="photographs", loader_workers=2),
        dict(image_loading="device", evaluate_training_set=True),
    ],
    ids=["fast", "device"],
)
def test_a_training_with_other_choices_counts_what_it_does(tmp_path, train, fields):
    sizes = SIZES | dict(training_samples=12, validation_samples=6)
    run = train(tmp_path / "run", "resnet50", epochs=2, **sizes, **fields)
    (end,) = run.of_kind("training_end")
    # the fast preset evaluates the validation set only
    both = fields.get("preset") != "fast"
    # six images, or the one batch of four that they fill
    evaluated = 4 + 12 if both else 6
    assert end["samples_trained"] == 24 and end["samples_evaluated"] == 2 * evaluated
    assert ("top1_error_training" in end["metrics"]) == both and len(run.losses) == 6
    if fields.get("image_loading") == "device":
        assert run.losses[-1] < run.losses[0], "the one batch is learned by heart"
        added = train(
            tmp_path / "added",
            "resnet50",
            epochs=1,
            accumulation_steps=2,
            **sizes,
            **fields,
        )
        assert added.losses[0] == pytest.approx(run.losses[0]), (
            "two passes over that batch have the mean of its loss"
        )


def test_top_5_errors_are_the_same_counted_by_sample_and_by_batch(alone):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
    batches = [
        (torch.randn(count, 3, 32, 32), torch.arange(count) % 10) for count in (30, 7)
    ]
    slow, fast = (
        resnet50.evaluate_images(
            model, batches, configuration.make("resnet50", top5_per_sample=one), alone
        )
        for one in (True, False)
    )
    assert (
        slow == fast
        and slow[1] == 37
        and 0 < slow[0]["top5_error"] < slow[0]["top1_error"] < 1
    )
    images, labels = map(torch.cat, zip(*batches, strict=True))
    mean_loss = torch.nn.functional.cross_entropy(model(images), labels).item()
    assert slow[0]["validation_loss"] == pytest.approx(mean_loss), (
        "batches of 30 and 7 count by their samples"
    )


def test_the_learning_rate_rises_with_each_epoch_or_with_each_step(tmp_path, train):
    made = configuration.make(
        "resnet50",
        local_batch_size=512,
        warmup_epochs=5,
        learning_rate=0.1,
        warmup_start=0.05,
    )
    rates = [resnet50.warmup_learning_rate(epoch, made) for epoch in (0, 2.5, 5)]
    assert rates == pytest.approx([0.05, 0.125, 0.2])
    sizes = SIZES | dict(training_samples=12, evaluate_training_set=False)
    losses = [
        train(
            tmp_path / str(by),
            "resnet50",
            epochs=1,
            warmup_epochs=1,
            warmup_per_epoch=by,
            **sizes,
        ).losses
        for by in (True, False)
    ]
    # the first step's rate is the same
    assert losses[0][:2] == losses[1][:2] and losses[0][2] != losses[1][2]


def test_the_learning_rate_falls_by_a_plateau_of_the_validation_loss(tmp_path, train):
    sizes = SIZES | dict(
        training_samples=8, validation_samples=8, evaluate_training_set=False
    )
    fields = sizes | dict(
        warmup_epochs=0, plateau_patience=0, plateau_factor=0.5, epochs=5
    )
    epochs = train(tmp_path / "run", "resnet50", **fields).of_kind("epoch")

    def rates(metric):
        optimizer = torch.optim.SGD(
            [torch.zeros(1, requires_grad=True)], lr=epochs[0]["learning_rate"]
        )
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0
        )
        found = []
        for event in epochs:
            found.append(optimizer.param_groups[0]["lr"])
            plateau.step(event[metric])
        return found

    assert [event["learning_rate"] for event in epochs] == pytest.approx(
        rates("validation_loss")
    )
    assert rates("validation_loss") != rates("top1_error"), (
        "the test could not tell them apart"
    )


def test_weight_decay_spares_vectors_where_it_is_told_to():
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for on_all, decays in ((True, [1e-4] * 4), (False, [1e-4, 0, 0, 0])):
        config = configuration.make(
            "resnet50", weight_decay=1e-4, weight_decay_on_all=on_all
        )
        groups = resnet50.make_optimizer(network, config).param_groups
        assert [
            group["weight_decay"] for group in groups for _ in group["params"]
        ] == decays
