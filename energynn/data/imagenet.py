"""ImageNet's images, or one's own, wherever they lie, subsets of them that are nested, balanced
and reproducible, and a fast store.

They are found in ImageFolder's tree (``train/<synset>/*.JPEG``, ``val/<synset>/*.JPEG``), in the
official archives, which are read in place, or in a prepared store. A split's ``ImageListing`` is
the same from all three but for the place.
"""

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from energynn.data import photographs
from energynn.data.folders import list_files
from energynn.experiment.config import ResNet50Config
from energynn.host.files import REPOSITORY, atomic_write
from energynn.host.progress import progress_meter
from energynn.host.reading import join_faults
from energynn.host.texts import escape_controls

SPLIT_NAMES = ("train", "val")
# those of torchvision's ImageFolder
IMAGE_ENDINGS = tuple(".jpg .jpeg .png .ppm .bmp .pgm .tif .tiff .webp".split())
# where the images of an archive begin, kept for later
INDEX_FOLDER = REPOSITORY / "build" / "imagenet"
# Archive -> MD5 as image-net.org publishes them; the kit tells the classes of the validation
# images.
ARCHIVE_MD5_DIGESTS = {
    "ILSVRC2012_img_train.tar": "1d675b47d978889d74fa0da5fadfb00e",
    "ILSVRC2012_img_val.tar": "29b22e2961454d5413ddabcf34fc5622",
    "ILSVRC2012_devkit_t12.tar.gz": "fa75699e90414af021442c21a62c3abf",
}
TRAINING_ARCHIVE, VALIDATION_ARCHIVE, DEVELOPMENT_KIT = ARCHIVE_MD5_DIGESTS
DEVELOPMENT_KIT_FOLDER = "ILSVRC2012_devkit_t12/data"
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")  # PPM is our own store's, too
BITS_OF_TIFF_TAG = 258  # of each colour
# what our store has; an older one tells the original's size in a comment
PPM_HEADER_PATTERN = re.compile(rb"P6\n(?:#.*\n)?(\d+) (\d+)\n255\n")
IMAGES_IN_MEMORY = 256  # images in memory at once while a store is written
SHORTER_SIDE_PIXELS = 256  # at most, in pixels, of an image in a store


@dataclass(frozen=True)
class ImageListing:
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

    def place_of_image(self, index: int) -> str:
        """Name the image's path, or its archive and its name there, for messages."""
        name = printable_file_name(self.names[index])
        return (
            f"{self.place}/{name}" if self.offsets is None else f"{self.place}: {name}"
        )

    def broken_image_text(self, index: int, error: Exception) -> str:
        """Say whose fault it is, whatever a decoder raised."""
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"image {self.place_of_image(index)} is broken ({reason}); copy or convert it"

    def digest(self, index: int) -> str:
        """Compute the image's SHA-256."""
        return hashlib.sha256(self.read(index)).hexdigest()

    def read(self, index: int) -> bytes:
        """Read the image's bytes as they lie there."""
        if self.offsets is None:
            return (self.place / os.fsdecode(self.names[index])).read_bytes()
        return os.pread(_descriptor(self.place), self.sizes[index], self.offsets[index])


@lru_cache
def _descriptor(path: Path) -> int:
    """Open a file once in each process; pread has no position that forked loader workers could
    share.
    """
    return os.open(path, os.O_RDONLY)


class MisplacedImagesError(ValueError):
    """A tree whose images do not lie in the folders of their classes."""


def printable_file_name(name: bytes) -> str:
    """Return a file's name as any terminal and any file takes it."""
    return escape_controls(name.decode(errors="backslashreplace"))


def list_images(
    root: Path, remarks: dict[str, str] | None = None
) -> tuple[ImageListing, ImageListing]:
    """List training and validation images below ``root``: prepared store, else trees, else
    official archives.

    ``remarks`` are those of ``list_files``, and of files that are no images. Raises ValueError
    naming what is missing: the split, a class in one of them, or the folders of the classes
    (MisplacedImagesError).
    """
    remarks = {} if remarks is None else remarks
    training, validation = (
        _list_images_of_split(root, split, remarks) for split in SPLIT_NAMES
    )
    if different := sorted(set(training.classes) ^ set(validation.classes)):
        raise ValueError(
            f"images: {root}: class {different[0]} is in one split only: "
            "val/ needs the folders of classes that train/ has"
        )
    return training, validation


def _list_images_of_split(
    root: Path, split: str, remarks: dict[str, str]
) -> ImageListing:
    store = root / f"{split}.ppm"
    archive = root / f"ILSVRC2012_img_{split}.tar"
    if store.is_file():
        if (root / split).is_dir():
            raise ValueError(f"images: {root}: keep one of {split}/ and {store.name}")
        return make_listing(store, **np.load(store.with_suffix(".npz")))
    if (root / split).is_dir():
        return make_listing(root, _list_images_of_tree(root, split, remarks))
    if archive.is_file():
        return make_listing(archive, **_archive_index(archive))
    remedy = f"name a folder with {' and '.join(SPLIT_NAMES)} in it"
    if deeper := sorted(root.glob(f"*/{split}")):
        remedy = f"move what {deeper[0].parent} holds one folder up"
    raise ValueError(
        f"images: {root} has neither {split}/<class>/*.JPEG nor {archive.name}; {remedy}"
    )


def make_listing(
    place: Path, names: Sequence[bytes], offsets=None, sizes=None
) -> ImageListing:
    """Sort images by name, and take their classes from the names."""
    names = np.asarray(names, dtype=bytes)
    order = np.argsort(names, kind="stable")
    folders = np.array([name.split(b"/")[1] for name in names[order]])
    classes, labels = np.unique(folders, return_inverse=True)
    if offsets is not None:
        offsets = np.asarray(offsets)[order]
        sizes = np.asarray(sizes)[order]
        if place.stat().st_size < (offsets + sizes).max(initial=0):
            raise ValueError(
                f"images: {place} ends before its last image; copy it again"
            )
    classes = tuple(map(printable_file_name, classes))
    return ImageListing(classes, names[order], labels, place, offsets, sizes)


def is_image(name: str) -> bool:
    """Tell an image by its ending."""
    return name.lower().endswith(IMAGE_ENDINGS)


def _list_images_of_tree(
    root: Path, split: str, remarks: dict[str, str]
) -> list[bytes]:
    """List the images in the folders of classes, and in theirs. Raises MisplacedImagesError."""
    names = []
    outside = []
    for name in list_files(root, remarks, f"{split}/"):
        if not is_image(name):
            remarks[name] = (
                f"left out of the images by the ending {Path(name).suffix.lower()}"
            )
        elif name.count("/") == 1:
            outside.append(name)
            remarks[name] = "left out of the images, in no class folder"
        else:
            names.append(name)
    folder = f"images: {root}/{split}/"
    endings = f"images end in {', '.join(IMAGE_ENDINGS)}"
    if not names:
        remedy = endings
        if outside:
            remedy = f"move each into {split}/CLASS/"
        raise MisplacedImagesError(
            f"{folder} has {len(outside)} images and no class folders with images; {remedy} "
            f"(ImageNet's archives are read as they are, without {split}/)"
        )
    classes = {name.split("/")[1] for name in names}
    if len(classes) == 1:
        raise MisplacedImagesError(
            f"{folder} has one class folder only, {classes.pop()}, with images, and a training "
            f"needs two; {endings}; if the classes are folders in it, move them one folder up"
        )
    return list(map(os.fsencode, names))


def _archive_index(archive: Path) -> dict[str, np.ndarray]:
    """Find names, offsets and sizes of the images in an archive, from its headers; they are read
    once and kept.
    """
    state = archive.stat()
    index = INDEX_FOLDER / f"{archive.stem}-{state.st_size}-{state.st_mtime_ns}.npz"
    if not index.is_file():
        rows = (
            _read_training_archive
            if archive.name == TRAINING_ARCHIVE
            else _read_validation_archive
        )
        with join_faults(f"images: {archive}"), tarfile.open(archive, "r:") as file:
            table = [np.array(column) for column in zip(*rows(file), strict=True)]
            if not table or file.offset >= state.st_size:
                raise ValueError("no images, or no end as tar marks it; copy it again")
        _save_image_index(index, *table)
    return dict(np.load(index))


def _save_image_index(
    path: Path, names: np.ndarray, offsets: np.ndarray, sizes: np.ndarray
) -> None:
    """Write a table of images, also if several ranks write it at the same time."""
    with atomic_write(path) as file:
        np.savez(file, names=names, offsets=offsets, sizes=sizes)


def _read_training_archive(outer: tarfile.TarFile) -> Iterator[tuple[bytes, int, int]]:
    """Find name, offset and bytes of each image; there is one archive per synset within the
    archive.
    """
    for member in _visible_archive_members(outer, ".tar"):
        with tarfile.open(fileobj=outer.extractfile(member), mode="r:") as inner:
            for image in _visible_archive_members(inner, IMAGE_ENDINGS):
                name = f"train/{Path(member.name).stem}/{Path(image.name).name}"
                yield (
                    os.fsencode(name),
                    member.offset_data + image.offset_data,
                    image.size,
                )


def _visible_archive_members(
    archive: tarfile.TarFile, endings: str | tuple[str, ...]
) -> Iterator[tarfile.TarInfo]:
    """Give the files of an archive with these endings, without hidden ones, as macOS adds."""
    for member in archive:
        name = Path(member.name).name.lower()
        if member.isfile() and name.endswith(endings) and not name.startswith("."):
            yield member


def _read_validation_archive(flat: tarfile.TarFile) -> Iterator[tuple[bytes, int, int]]:
    """Find the same; line k of the development kit's ground truth is the class of
    ILSVRC2012_val_<k>.JPEG.
    """
    from scipy.io import loadmat

    file = open(Path(flat.name).with_name(DEVELOPMENT_KIT), "rb")
    with file, join_faults(f"images: {file.name}"), tarfile.open(fileobj=file) as kit:
        meta = kit.extractfile(f"{DEVELOPMENT_KIT_FOLDER}/meta.mat").read()
        truth = kit.extractfile(
            f"{DEVELOPMENT_KIT_FOLDER}/ILSVRC2012_validation_ground_truth.txt"
        ).read()
    synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
    synset_of = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    synset_of_image = {
        f"ILSVRC2012_val_{number:08d}.JPEG": synset_of[int(label)]
        for number, label in enumerate(truth.split(), start=1)
    }
    for image in _visible_archive_members(flat, IMAGE_ENDINGS):
        name = Path(image.name).name
        name_in_tree = f"val/{synset_of_image[name]}/{name}"
        yield name_in_tree.encode(), image.offset_data, image.size


# -------------------------------------------------------------------------------------- subsets


def select_stratified_subset(
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


def select_images_of_run(
    listings: Iterable[ImageListing], config: ResNet50Config
) -> list[np.ndarray]:
    """Choose a run's training and validation images, as indices in their order.

    With ``image_loading="device"``, and of photographs_large, there are as many as asked for, in
    turn where there are fewer: their number makes the steps of an epoch, but one batch of them is
    read, or few images again and again.
    """
    in_turn = config.stays_on_device or config.dataset == photographs.LARGE_SET
    counts = (config.training_samples, config.validation_samples)
    chosen = []
    for listing, count in zip(listings, counts, strict=True):
        available = min(count, len(listing)) if in_turn else count
        indices = select_stratified_subset(listing.names, listing.labels, available)
        chosen.append(np.resize(indices, count or len(indices)))
    return chosen


# ------------------------------------------------------------------------------- prepared store


def write_ppm_store(root: Path, out: Path) -> None:
    """Write every image as uint8 pixels to ``out``/{train,val}.ppm, so that training decodes no
    JPEG.

    Each image is a PPM (``encode_ppm``) whose shorter side is at most SHORTER_SIDE_PIXELS pixels:
    other pixels than the originals', so a training with them is another experiment. Every call
    writes all anew. Raises ValueError naming an image that cannot be decoded.
    """
    for split, listing in zip(SPLIT_NAMES, list_images(root), strict=True):
        _write_ppm_split(listing, out / f"{split}.ppm")


def _write_ppm_split(listing: ImageListing, path: Path) -> None:
    """Write the images of a split, then their table."""

    def read_as_ppm(index: int) -> bytes:
        data = listing.read(index)
        try:
            return encode_ppm(data)
        except Exception as error:
            raise ValueError(listing.broken_image_text(index, error)) from error

    indices = range(len(listing))
    sizes_B = []
    advance = progress_meter(f"prepare {path.stem}", len(listing), "images")
    with atomic_write(path) as file, ThreadPoolExecutor() as pool:
        for start in indices[::IMAGES_IN_MEMORY]:
            batch = indices[start : start + IMAGES_IN_MEMORY]
            for data in pool.map(read_as_ppm, batch):
                file.write(data)
                sizes_B.append(len(data))
            advance(len(batch))
        sizes = np.array(sizes_B)
        _save_image_index(
            path.with_suffix(".npz"), listing.names, np.cumsum(sizes) - sizes, sizes
        )


def encode_ppm(data: bytes) -> bytes:
    """Make binary PPM of an image file, reduced to SHORTER_SIDE_PIXELS."""
    with open_image(data) as image:
        scale = SHORTER_SIDE_PIXELS / min(image.size)
        size = [round(edge * scale) for edge in image.size]
        # libjpeg decodes at a fraction of the size where that is large enough; nothing is enlarged.
        image.thumbnail(size)
        file = io.BytesIO()
        image.convert("RGB").save(file, "PPM")
    return file.getvalue()


def open_image(data: bytes):
    """Open one of FORMATS by its content, not yet decoded; others are refused: of EPS Pillow
    would start a program.

    Raises whatever Pillow does, and ValueError for more than 8 bits, which Pillow would cut.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:  # whose text has an address in memory
        raise ValueError(f"cannot be read as {', '.join(FORMATS)}") from None
    bits = getattr(image, "tag_v2", {}).get(BITS_OF_TIFF_TAG, (8,))
    is_deep = ";16" in str(image.tile) or max(bits) > 8
    if image.mode[0] in "IF" or is_deep:  # of grey, of colours
        raise ValueError("the number of white is not known; save it with 8 bits")
    return image


def decode_ppm(data: bytes) -> np.ndarray | None:
    """Read pixels (height, width, 3) uint8 of what ``encode_ppm`` wrote, ten times as fast as
    Pillow; None of anything else.
    """
    header = PPM_HEADER_PATTERN.match(data)
    if header is None:
        return None
    width, height = map(int, header.groups())
    return np.frombuffer(
        bytearray(data), np.uint8, 3 * width * height, offset=header.end()
    ).reshape(height, width, 3)
