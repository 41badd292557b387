"""Images of one's own: what is described is what is verified and trained on, and what is left out
is said.
"""

import base64
import io
import os
import re
import shutil
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import resnet50

from energynn.data import imagenet, manifests
from energynn.data.images import ImageDataset, decode, load_with_pillow
from energynn.experiment import config
from energynn.train import batches
from tests.data.test_imagenet import jpeg
from tests.processes import answer, printed, refused
from tests.train.conftest import ALONE

SIZES = dict(image_size=64, training_samples=0, validation_samples=0)
GREYS = np.arange(16, dtype=np.uint16).reshape(4, 4) * 4369  # 0 to 65535


def picture(path, value=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (value, 0, 0)).save(path)


def encoded(values, kind) -> bytes:
    file = io.BytesIO()
    Image.fromarray(values).save(file, kind)
    return file.getvalue()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree of two classes."""
    for module in (manifests, config):
        monkeypatch.setattr(module, "DATA_MANIFESTS", tmp_path / "manifests")
    monkeypatch.setattr(manifests, "GENERATED_DATA_FOLDER", tmp_path / "data")
    tree = tmp_path / "data" / "pets"
    for number, name in enumerate(("train/a", "train/b", "val/a", "val/b")):
        for k in range(3):
            picture(tree / name / f"{k}.jpg", 20 * number + k)
    return tree


def said(verb="describe", status=0):
    """What a command says of the tree."""
    return answer("data", verb, "pets", status=status)


def run(**fields):
    manifests.verify_data_of_run(config.make(dataset="pets", **SIZES | fields))


@pytest.mark.parametrize("linked", ["train/b", "train", "train/b/1.jpg", "."])
def test_pictures_behind_links_are_listed_and_verified(tree, linked):
    elsewhere = (tree / linked).rename(tree.parent / "elsewhere")
    (tree / linked).symlink_to(elsewhere)
    assert "train: 6 images of 2 classes: a/*.jpg 3, b/*.jpg 3" in said()
    run()
    picture(tree / "train" / "b" / "1.jpg", 99)
    assert "train/b/1.jpg differs" in said("verify", status=2)
    refused("b/1.jpg differs.*data describe pets", run)
    said()  # the remedy
    run()


@pytest.mark.parametrize(
    "target",
    [".", "..", "../..", "../../..", "/", "../b", "data set"],
    ids=lambda text: f"to {text}",
)
def test_a_link_back_into_its_own_path_is_named_and_left_out(tree, target):
    train = (tree / "train").rename(tree.parent / "elsewhere")
    (tree / "train").symlink_to(train)
    (train / "a" / "round").symlink_to(tree if target == "data set" else target)
    (train / "b" / "round").symlink_to("../a")  # and so from b to a to b
    assert "a link back into its own path: train/a/round" in said()
    assert len(imagenet.list_images(tree)[0]) == (12 if target == "../b" else 9)


def test_what_is_found_and_left_out_is_said_and_the_same_for_all(tree):
    train = tree / "train"
    for ending in ("webp", "TIFF", "bmp", "ppm", "png", "gif"):
        picture(train / "a" / "deeper" / "still" / f"x.{ending}", 5)
    hidden = (
        ".ipynb_checkpoints/x.jpg",
        "a/._x.jpg",
        "__MACOSX/x.jpg",
        "a/@eaDir/x.jpg",
    )
    for name in (*hidden, "loose.jpg"):
        picture(train / name)
    links = {"gone": "/nowhere", "self": "self.jpg", "again": "../a/0.jpg"}
    for name, target in links.items():
        (train / "a" / f"{name}.jpg").symlink_to(target)
    os.link(train / "a" / "1.jpg", train / "a" / "once.jpg")
    os.mkfifo(train / "a" / "pipe.jpg")
    (train / "c").mkdir()
    lines = {line.removeprefix("pets: ") for line in said().splitlines()[:-1]}
    assert lines == {
        "train: 13 images of 2 classes: a/*.bmp 1, a/*.jpg 5, a/*.png 1, a/*.ppm 1, "
        "a/*.tiff 1, a/*.webp 1, b/*.jpg 3",
        "val: 6 images of 2 classes: a/*.jpg 3, b/*.jpg 3",
        "1 left out, an empty folder: train/c",
        "4 left out, hidden: train/.ipynb_checkpoints, train/__MACOSX, train/a/._x.jpg, "
        "train/a/@eaDir",
        "2 left out, no link to anything: train/a/gone.jpg, train/a/self.jpg",
        "1 left out, no regular file: train/a/pipe.jpg",
        "1 left out of the images by the ending .gif: train/a/deeper/still/x.gif",
        "1 left out of the images, in no class folder: train/loose.jpg",
        "2 used, though another name of its class is the same file: train/a/again.jpg, "
        "train/a/once.jpg",
    }
    training = imagenet.list_images(tree)[0]
    assert training.classes == ("a", "b")
    listed = {
        name for name in manifests.read_checksums("pets") if name.startswith("train")
    }
    images = {name.decode() for name in training.names}
    assert listed - images == {"train/a/deeper/still/x.gif", "train/loose.jpg"}
    picture(train / ".Trash" / "new.jpg")  # is not read, so it does not matter
    run()


def one_folder_deeper(folder):
    whole = folder.rename(folder.parent / "animals")
    folder.mkdir()
    whole.rename(folder / "animals")


def renamed(path):
    path.rename(path.with_suffix(".jfif"))


def flattened(folder):
    for path in list(folder.glob("*/*")):
        path.rename(folder / f"{path.parent.name}_{path.name}")
    for path in folder.glob("?"):
        path.rmdir()


@pytest.mark.parametrize(
    "slip, sentence",
    [
        (flattened, "val/ has 6 images and no class folders.* into val/CLASS/"),
        (
            lambda folder: [*map(renamed, folder.glob("*/*"))],
            "val/ has 0 images and no class folders with images; images end in .jpg",
        ),
        (one_folder_deeper, "val/ has one class folder only, animals, .*one folder up"),
    ],
)
def test_pictures_in_other_folders_than_their_classes_have_a_sentence(
    tree, slip, sentence
):
    said()
    sums = manifests.DATA_MANIFESTS / "pets" / "SHA256SUMS"
    before = sums.read_bytes()
    slip(tree / "val")
    told = said(status=2)
    assert sums.read_bytes() == before
    shutil.rmtree(sums.parent)
    assert re.search(sentence, told)
    refused("data describe pets", run)  # which says it
    for path in list((tree / "val").rglob("*.j*")):  # the remedy
        *_, folder, name = path.with_suffix(".jpg").parts
        place = tree / "val" / (name if folder == "val" else folder)[0]
        place.mkdir(exist_ok=True)
        path.rename(place / name)
    said()
    run()


def test_data_for_another_training_may_lie_otherwise(tree):
    for split in ("train", "val"):
        flattened(tree / split)
    assert "ResNet50 cannot train on it: images: " in said()
    whole = tree.parent / "whole"
    tree.rename(whole)
    tree.mkdir()
    whole.rename(tree / "unpacked")
    assert f"move what {tree}/unpacked holds one folder up" in said()


def test_a_name_that_is_no_text_is_taken_and_a_list_is_never_emptied(tree, monkeypatch):
    said()
    strange = os.fsdecode(b"\xff\xe4 \x1b[31m.jpg")
    picture(tree / "train" / "b" / strange, 77)
    (tree / "train" / "b" / "2\n.jpg").touch()
    sums = manifests.DATA_MANIFESTS / "pets" / "SHA256SUMS"
    before = sums.read_bytes()
    with monkeypatch.context() as full:
        full.setattr("os.fsync", lambda file: os.write(-1, b""))
        said(status=2)
    assert sums.read_bytes() == before
    told = said()
    assert r"train/b/2\n.jpg" in told and "b/*.jpg 4" in told
    run()
    printed("sha256sum", "-c", "--quiet", sums, cwd=tree)
    training = imagenet.list_images(tree)[0]
    (index,) = (k for k, name in enumerate(training.names) if b"\xff" in name)
    assert training.place_of_image(index).endswith(r"train/b/\xff\xe4 \x1b[31m.jpg")
    assert decode(training.read(index)).shape == (3, 8, 8)


BOMB = b"P5\n60000 60000\n255\n"
FLOATS = encoded(GREYS.astype(np.float32), "TIFF")


# a PNG of one pixel, 16 bits a colour, of a camera of 12: 4095 of 65535
COLOURS = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABEAIAAADA54+dAAAADElEQVR4nGPg/w+CAAmyAysEKUClAAAAAElFTkSuQmCC"
)
INTEGERS = encoded(GREYS.astype(np.int32), "TIFF")
# two pixels of a satellite, 16 bits a band, one band after the other
BANDS = base64.b64decode(
    "SUkqABQAAADnBGDqpwQsAYEECQAJAAABAwABAAAAAgAAAAEBAwABAAAAAQAAAAIBAwADAAAAhgAAAAMBAwABAAAAAQAA"
    "AAYBAwABAAAAAgAAABEBBAADAAAAjAAAABUBAwABAAAAAwAAABcBBAADAAAAmAAAABwBAwABAAAAAgAAAAAAAAAQABAA"
    "EAAIAAAADAAAABAAAAAEAAAABAAAAAQAAAA="
)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no image",
        jpeg(1)[:300],
        BOMB,
        FLOATS,
        INTEGERS,
        encoded(GREYS, "PNG"),
        COLOURS,
        BANDS,
        encoded(GREYS, "TIFF"),
        b"P5\n4 4\n65535\n" + GREYS.astype(">u2").tobytes(),
        b"II*\0\x08\0\0\0\xff\xff",
        b"P6\n9 9\n255\n",
    ],
)
@pytest.mark.parametrize("load", [load_with_pillow, decode, imagenet.encode_ppm])
def test_a_broken_picture_is_named_and_fatal_or_replaced_and_counted(tree, data, load):
    broken = tree / "train" / "a" / "2.jpg"
    broken.write_bytes(data)
    training = imagenet.list_images(tree)[0]

    def images(*indices, on_bad_image="skip"):
        return ImageDataset(training, np.array(indices), load, on_bad_image)

    for only in (images(1, 2, on_bad_image="fail"), images(2, 2)):
        with pytest.raises(ValueError, match=f"^image {broken} is broken .*skip$"):
            only[1]
    selected = images(*range(6))
    for _ in range(2):
        # the next image stands in, with its own label
        assert selected[2][1] == selected[3][1] == 1
    assert selected.skipped_images() == [str(broken)]
    assert images(0, 2)[1][1] == 0
    broken.unlink()
    with pytest.raises(FileNotFoundError):  # never skipped: the disk may be gone
        selected[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [struct.error, MemoryError, KeyError("Exif"), OSError]
)
def test_what_a_decoder_raises_has_one_sentence_from_a_worker_too(tree, fault):
    training = imagenet.list_images(tree)[0]

    def load(data):
        if data == training.read(4):
            raise fault
        return torch.zeros(1)

    made = config.make(local_batch_size=2, loader_workers=1, **SIZES)
    images = ImageDataset(training, np.arange(6), load)
    loader = batches.make_loader(images, range(6), made, ALONE)
    waiting = iter(loader)
    assert len(next(waiting)[1]) == len(next(waiting)[1]) == 2
    with pytest.raises(ValueError) as error:
        next(waiting)
    assert str(error.value).startswith(
        f"image {training.place_of_image(4)} is broken ("
    )
    assert str(error.value).endswith(
        "); copy or convert it, or set on_bad_image to skip"
    )
    (tree / "train" / "a" / "0.jpg").unlink()
    with pytest.raises(FileNotFoundError, match="^.Errno 2. .*train/a/0.jpg'$"):
        next(iter(loader))


def test_one_image_of_one_pixel_is_refused_before_it_starts(tree):
    said()
    refused(
        "local_batch_size: .*take 2, or .* above 32",
        run,
        workload="resnet50",
        image_size=32,
        local_batch_size=1,
    )
    for size, batch in ((33, 1), (32, 2)):  # the remedies
        run(workload="resnet50", image_size=size, local_batch_size=batch)
        with torch.device("meta"):  # which has shapes, and computes nothing
            resnet50()(torch.zeros(batch, 3, size, size))
