"""Photographs as large JPEG files, for tests and bench."""

import io
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision import transforms
from torchvision.datasets import ImageFolder

from energynn.data.photographs import PHOTOGRAPH_SOURCES, photograph_path


def as_jpegs(name: str, count: int, size: tuple[int, int]) -> list[bytes]:
    """``count`` parts of a photograph scaled to ``size`` (width, height), as JPEG; at 500 x 375
    about 100 kB.
    """
    generator, files = np.random.default_rng(0), []
    photograph = Image.open(photograph_path(*PHOTOGRAPH_SOURCES[name][:2])).convert(
        "RGB"
    )
    for _ in range(count):
        share = generator.uniform(0.6, 1) * min(
            photograph.width / size[0], photograph.height / size[1]
        )
        width, height = share * size[0], share * size[1]
        left, top = generator.uniform(
            0, (photograph.width - width, photograph.height - height)
        )
        part = photograph.resize(
            size, Image.Resampling.LANCZOS, (left, top, left + width, top + height)
        )
        data = io.BytesIO()
        part.save(data, "JPEG", quality=98)
        files.append(data.getvalue())
    return files


def usual_images(folder: Path, size: int) -> ImageFolder:
    """Images and labels below a folder as people train on them, by Pillow and torchvision."""
    steps = [
        transforms.RandomResizedCrop(size, scale=(0.5, 1.0)),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    return ImageFolder(folder, transforms.Compose(steps))
