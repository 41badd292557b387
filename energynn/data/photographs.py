"""Make small real images for ImageNet's loader path: crops of photographs that scikit-image and
scikit-learn ship.

An easy task: colours alone tell most photographs apart, and validation crops come from the same
ten pictures.
"""

import importlib.util
from pathlib import Path

from energynn.host.files import INSTALLATION, staging_folder

CROP_PIXELS = 64
SPLIT_CROPS = {"train": 100, "val": 25}  # per class
# training crops lie in the left three quarters of a photograph, validation crops in the rest
TRAINING_SHARE_OF_WIDTH = 0.75
CROP_SEED = 0
JPEG_QUALITY = 90
# A second set, as large as ImageNet's images, for a loader's speed and for runs that learn in
# seconds: its crops overlap, also those of validation.
LARGE_SET = "photographs_large"
LARGE_CROP_PIXELS = (500, 375)
LARGE_CROPS = {"train": 20, "val": 4}  # per class
MIN_CROP_SHARE = 0.6  # of the largest box of this shape that fits a photograph
# class -> (package that ships it, file inside of the package, licence)
PHOTOGRAPH_SOURCES = {
    "astronaut": ("skimage", "data/astronaut.png", "public domain (NASA)"),
    "cat": ("skimage", "data/chelsea.png", "CC0, Stefan van der Walt"),
    "coffee": ("skimage", "data/coffee.png", "CC0, Rachel Michetti"),
    "flower": (
        "sklearn",
        "datasets/images/flower.jpg",
        "CC BY 2.0, flickr user vultilion",
    ),
    "galaxies": ("skimage", "data/hubble_deep_field.jpg", "public domain (NASA)"),
    "motorcycle": (
        "skimage",
        "data/motorcycle_left.png",
        "not stated by scikit-image; Middlebury 2014 stereo data",
    ),
    "retina": ("skimage", "data/retina.jpg", "CC0, Häggström, wikimedia"),
    "rocket": ("skimage", "data/rocket.jpg", "public domain (SpaceX)"),
    "temple": (
        "sklearn",
        "datasets/images/china.jpg",
        "CC BY 2.0, flickr user danielbuechele",
    ),
    "tissue": ("skimage", "data/ihc.png", "no known copyright restrictions"),
}


def photograph_path(package: str, file: str) -> Path:
    """Find where an installed package keeps a file, without importing the package. Raises
    ValueError without it.
    """
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ValueError(
            f"photographs: {package} is not installed; {INSTALLATION} installs it"
        )
    return Path(spec.origin).parent / file


def write_crops(target: Path) -> None:
    """Write the crops as ``target/{train,val}/<class>/NNN.jpg``, the layout of torchvision's
    ImageFolder.

    The last part of ``target`` is the name of the data set, ``photographs`` or LARGE_SET. The
    folder appears at once and whole, also if two processes make it at the same time.
    """
    import numpy as np
    from PIL import Image

    counts = LARGE_CROPS if target.name == LARGE_SET else SPLIT_CROPS
    with staging_folder(target.parent) as folder:
        crops = folder / target.name
        for index, (name, (package, file, _licence)) in enumerate(
            PHOTOGRAPH_SOURCES.items()
        ):
            photograph = Image.open(photograph_path(package, file)).convert("RGB")
            generator = np.random.default_rng([CROP_SEED, index])
            border = int(TRAINING_SHARE_OF_WIDTH * photograph.width)
            for split, left, right in (
                ("train", 0, border),
                ("val", border, photograph.width),
            ):
                place = crops / split / name
                place.mkdir(parents=True)
                for number in range(counts[split]):
                    if target.name == LARGE_SET:
                        crop = _cut_large_crop(photograph, generator)
                    else:
                        crop = _cut_square_crop(photograph, generator, left, right)
                    crop.save(place / f"{number:03d}.jpg", quality=JPEG_QUALITY)
        try:
            crops.rename(target)
        except OSError:  # another process was faster; its crops are the same
            if not target.is_dir():
                raise


def _cut_square_crop(photograph, generator, left: int, right: int):
    """Cut a square out of the photograph between two columns."""
    x = generator.integers(left, right - CROP_PIXELS + 1)
    y = generator.integers(0, photograph.height - CROP_PIXELS + 1)
    return photograph.crop((x, y, x + CROP_PIXELS, y + CROP_PIXELS))


def _cut_large_crop(photograph, generator):
    """Cut a box of ImageNet's usual shape from anywhere in the photograph, resized to
    LARGE_CROP_PIXELS.
    """
    width, height = LARGE_CROP_PIXELS
    share = generator.uniform(MIN_CROP_SHARE, 1)
    scale = min(photograph.width / width, photograph.height / height) * share
    x = generator.uniform(0, photograph.width - scale * width)
    y = generator.uniform(0, photograph.height - scale * height)
    return photograph.resize(
        LARGE_CROP_PIXELS, box=(x, y, x + scale * width, y + scale * height)
    )
