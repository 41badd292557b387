"""ImageNet's images wherever they lie, subsets of them that are nested, balanced and
reproducible, and a fast store.

They are found in ImageFolder's tree (``train/<synset>/*.JPEG``, ``val/<synset>/*.JPEG``), in the
official archives, which are read in place, or in a prepared store. A split's ``Listing`` is the
same from all three but for the place.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from energynn.config import ResNet50Config
from energynn.data import photographs
from energynn.files import REPOSITORY, whole
from energynn.progress import meter

SPLITS = ("train", "val")
ENDINGS = (".jpeg", ".jpg", ".png")
# where the images of an archive begin, kept for later
INDEX = REPOSITORY / "build" / "imagenet"
# Archive -> MD5 as image-net.org publishes them; the kit tells the classes of the validation
# images.
ARCHIVES = {
    "ILSVRC2012_img_train.tar": "1d675b47d978889d74fa0da5fadfb00e",
    "ILSVRC2012_img_val.tar": "29b22e2961454d5413ddabcf34fc5622",
    "ILSVRC2012_devkit_t12.tar.gz": "fa75699e90414af021442c21a62c3abf",
}
TRAINING_ARCHIVE, VALIDATION_ARCHIVE, DEVELOPMENT_KIT = ARCHIVES
KIT_FOLDER = "ILSVRC2012_devkit_t12/data"
FORMATS = ("JPEG", "PNG", "PPM")  # the last is that of our own store
# what Pillow raises for bytes that it cannot decode
BAD_IMAGE = (OSError, SyntaxError, ValueError)
BATCH = 256  # images in memory at once while a store is written
SHORTER_SIDE = 256  # at most, in pixels, of an image in a store


@dataclass(frozen=True)
class Listing:
    """Hold the images of one split, sorted by class and name; arrays, because loader workers
    would copy a long list.

    names: (samples,) bytes, "<split>/<class>/<file>"; labels: (samples,) index into classes;
    place: the folder of a tree, or the file that holds every image from ``offsets`` for ``sizes``
    bytes, both (samples,).
    """

    classes: tuple[str, ...]
    names: np.ndarray
    labels: np.ndarray
    place: Path
    offsets: np.ndarray | None = None
    sizes: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.names)

    def where(self, index: int) -> str:
        """Name the image's path, or its archive and its name there, for messages."""
        name = self.names[index].decode()
        return (
            f"{self.place}/{name}" if self.offsets is None else f"{self.place}: {name}"
        )

    def read(self, index: int) -> bytes:
        """Read the image's bytes as they lie there."""
        if self.offsets is None:
            return Path(self.where(index)).read_bytes()
        file = _descriptor(self.place)
        return os.pread(file, int(self.sizes[index]), int(self.offsets[index]))


@lru_cache
def _descriptor(path: Path) -> int:
    """Open a file once in each process; pread has no position that forked loader workers could
    share.
    """
    return os.open(path, os.O_RDONLY)


def list_images(root: Path) -> tuple[Listing, Listing]:
    """List training and validation images below ``root``: prepared store, else trees, else
    official archives.

    Raises ValueError naming what is missing: the split, or a class in one of them.
    """
    training, validation = (_list_split(Path(root), split) for split in SPLITS)
    if different := sorted(set(training.classes) ^ set(validation.classes)):
        raise ValueError(f"images: {root}: class {different[0]} is in one split only")
    return training, validation


def _list_split(root: Path, split: str) -> Listing:
    store = root / f"{split}.ppm"
    archive = root / f"ILSVRC2012_img_{split}.tar"
    if store.is_file():
        return make_listing(store, **np.load(store.with_suffix(".npz")))
    if (root / split).is_dir():
        return make_listing(root, list(_names_of_tree(root, split)))
    if archive.is_file():
        return make_listing(archive, **_index(archive))
    raise ValueError(
        f"images: {root} has neither {split}/<class>/*.JPEG nor {archive.name}; name another folder"
    )


def make_listing(
    place: Path, names: Sequence[bytes], offsets=None, sizes=None
) -> Listing:
    """Sort images by name, and take their classes from the names."""
    names = np.asarray(names, dtype=bytes)
    order = np.argsort(names, kind="stable")
    folders = np.array([name.split(b"/")[1] for name in names[order]])
    classes, labels = np.unique(folders, return_inverse=True)
    if offsets is not None:
        offsets = np.asarray(offsets)[order]
        sizes = np.asarray(sizes)[order]
    classes = tuple(name.decode() for name in classes)
    return Listing(classes, names[order], labels, place, offsets, sizes)


def _names_of_tree(root: Path, split: str) -> Iterator[bytes]:
    for folder in os.scandir(root / split):
        if folder.is_dir():
            for file in os.scandir(folder):
                # a scan knows what is a file, without a question for each of a million
                if file.name.lower().endswith(ENDINGS) and file.is_file():
                    yield os.fsencode(f"{split}/{folder.name}/{file.name}")


def _index(archive: Path) -> dict[str, np.ndarray]:
    """Find names, offsets and sizes of the images in an archive, from its headers; they are read
    once and kept.
    """
    state = archive.stat()
    index = INDEX / f"{archive.stem}-{state.st_size}-{state.st_mtime_ns}.npz"
    if not index.is_file():
        rows = (
            _training_images if archive.name == TRAINING_ARCHIVE else _validation_images
        )
        try:
            with tarfile.open(archive, "r:") as file:
                table = [
                    np.array(column)
                    for column in zip(*rows(file, archive), strict=True)
                ]
        except tarfile.TarError as error:
            raise ValueError(
                f"images: {archive} is damaged ({error}); copy it again"
            ) from error
        _save(index, *table)
    return dict(np.load(index))


def _save(
    path: Path, names: np.ndarray, offsets: np.ndarray, sizes: np.ndarray
) -> None:
    """Write a table of images, also if several ranks write it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as file:
        np.savez(file, names=names, offsets=offsets, sizes=sizes)


def _training_images(
    outer: tarfile.TarFile, archive: Path
) -> Iterator[tuple[bytes, int, int]]:
    """Find name, offset and bytes of each image; there is one archive per synset within the
    archive.
    """
    for member in outer:
        with tarfile.open(fileobj=outer.extractfile(member), mode="r:") as inner:
            for image in inner:
                name = f"train/{Path(member.name).stem}/{Path(image.name).name}"
                yield name.encode(), member.offset_data + image.offset_data, image.size


def _validation_images(
    flat: tarfile.TarFile, archive: Path
) -> Iterator[tuple[bytes, int, int]]:
    """Find the same; line k of the development kit's ground truth is the class of
    ILSVRC2012_val_<k>.JPEG.
    """
    from scipy.io import loadmat

    with tarfile.open(archive.with_name(DEVELOPMENT_KIT)) as kit:
        meta = kit.extractfile(f"{KIT_FOLDER}/meta.mat").read()
        truth = kit.extractfile(
            f"{KIT_FOLDER}/ILSVRC2012_validation_ground_truth.txt"
        ).read()
    synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
    synset_of = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    numbers = truth.split()
    for image in flat:
        name = Path(image.name).name
        line = int(Path(name).stem.rpartition("_")[2]) - 1
        synset = synset_of[int(numbers[line])]
        yield f"val/{synset}/{name}".encode(), image.offset_data, image.size


# -------------------------------------------------------------------------------------- subsets


def stratified_prefix(
    names: Sequence[str | bytes], labels: Sequence[int], count: int
) -> np.ndarray:
    """Choose the first ``count`` samples (0: all), as indices, in an order that takes one sample
    of each class in turn.

    Inside a class the order is that of sha256("0|file name"), so that a larger subset contains
    every smaller one on any machine; a class without samples left is skipped. Raises ValueError
    if there are fewer than ``count``.
    """
    if count > len(names):
        raise ValueError(
            f"asked for {count} samples, the data set has {len(names)}; ask for fewer, or 0 for all"
        )
    if count == 0:
        return np.arange(len(names))
    file_names = (os.path.basename(os.fsencode(name)) for name in names)
    keys = np.array([hashlib.sha256(b"0|" + name).digest() for name in file_names])
    by_class = np.lexsort((keys, labels))
    sorted_labels = np.asarray(labels)[by_class]
    turn = np.arange(len(names)) - np.searchsorted(sorted_labels, sorted_labels)
    return by_class[np.lexsort((sorted_labels, turn))][:count]


def images_read(
    listings: Iterable[Listing], config: ResNet50Config
) -> list[np.ndarray]:
    """Choose a run's training and validation images, as indices in their order.

    With ``image_loading="device"``, and of photographs_large, there are as many as asked for, in
    turn where there are fewer: their number makes the steps of an epoch, but one batch of them is
    read, or few images again and again.
    """
    in_turn = config.stays_on_device or config.dataset == photographs.LARGE
    counts = (config.training_samples, config.validation_samples)
    chosen = []
    for listing, count in zip(listings, counts, strict=True):
        available = min(count, len(listing)) if in_turn else count
        indices = stratified_prefix(listing.names, listing.labels, available)
        chosen.append(np.resize(indices, count or len(indices)))
    return chosen


# ------------------------------------------------------------------------------- prepared store


def prepare(root: Path, out: Path) -> None:
    """Write every image as uint8 pixels to ``out``/{train,val}.ppm, so that training decodes no
    JPEG.

    Each image is a PPM (``ppm``) whose shorter side is at most SHORTER_SIDE pixels: other pixels
    than the originals', so a training with them is another experiment. Every call writes all
    anew. Raises ValueError naming an image that cannot be decoded.
    """
    out.mkdir(parents=True, exist_ok=True)
    for split, listing in zip(SPLITS, list_images(root), strict=True):
        _prepare_split(listing, out / f"{split}.ppm")


def _prepare_split(listing: Listing, path: Path) -> None:
    """Write the images of a split, then their table."""

    def as_ppm(index: int) -> bytes:
        try:
            return ppm(listing.read(index))
        except BAD_IMAGE as error:
            raise ValueError(
                f"{listing.where(index)} is broken ({error}); copy it again"
            ) from error

    indices = range(len(listing))
    sizes_B: list[int] = []
    advance = meter(f"prepare {path.stem}", len(listing), "images")
    with whole(path) as file, ThreadPoolExecutor() as pool:
        for start in indices[::BATCH]:
            batch = indices[start : start + BATCH]
            for data in pool.map(as_ppm, batch):
                file.write(data)
                sizes_B.append(len(data))
            advance(len(batch))
        sizes = np.array(sizes_B)
        _save(path.with_suffix(".npz"), listing.names, np.cumsum(sizes) - sizes, sizes)


def ppm(data: bytes) -> bytes:
    """Make binary PPM of an image file, reduced to SHORTER_SIDE."""
    from PIL import Image

    with open_image(data) as image:
        scale = SHORTER_SIDE / min(image.size)
        width, height = (round(edge * scale) for edge in image.size)
        # libjpeg decodes at a fraction of the size where that is large enough; nothing is enlarged.
        image.thumbnail((width, height), Image.Resampling.BICUBIC)
        file = io.BytesIO()
        image.convert("RGB").save(file, "PPM")
    return file.getvalue()


def open_image(data: bytes):
    """Open a JPEG, PNG or PPM by its content, not yet decoded; others are refused: of EPS Pillow
    would start a program.

    Raises one of BAD_IMAGE.
    """
    from PIL import Image

    return Image.open(io.BytesIO(data), formats=FORMATS)


def read_ppm(data: bytes) -> np.ndarray:
    """Read pixels (height, width, 3) uint8 of what ``ppm`` wrote, ten times as fast as Pillow."""
    lines = data[:64].split(b"\n")  # a comment may come before the size
    width, height = map(int, lines[lines.index(b"255") - 1].split())
    length = 3 * width * height
    pixels = np.frombuffer(bytearray(data), np.uint8, offset=len(data) - length)
    return pixels.reshape(height, width, 3)
