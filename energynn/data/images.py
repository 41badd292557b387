"""Images of a listing as a PyTorch data set: decoded, cropped, and replaced or fatal where they
are broken.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import RandomResizedCrop

from energynn.data.imagenet import BAD_IMAGE, Listing, open_image, read_ppm

ASPECT_RATIOS = (3 / 4, 4 / 3)  # torchvision's default
MOST_IN_A_ROW = 100
CENTRE_SHARE = 0.875  # of the shorter side: 224 of 256 pixels


class Images:
    """Load some images of a listing, in the order of ``indices``, as pairs of ``load(bytes)``
    and label.
    """

    def __init__(
        self,
        listing: Listing,
        indices: np.ndarray,
        load: Callable,
        on_bad_image: str = "fail",
    ):
        self.listing, self.indices, self.load = listing, indices, load
        self.on_bad_image = on_bad_image
        # The loader's workers write here.
        self.bad = torch.zeros(len(indices), dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> tuple:
        """Load image and label; raises ValueError with the path of a broken image, or takes the
        next one in its place.

        A file that cannot be read is an error in any case (OSError): the disk may be gone, not
        the image.
        """
        for step in range(min(MOST_IN_A_ROW, len(self))):
            candidate = (position + step) % len(self)
            index = self.indices[candidate]
            data = self.listing.read(index)
            try:
                return self.load(data), int(self.listing.labels[index])
            except BAD_IMAGE as error:
                where = self.listing.where(index)
                line = f"image {where} is broken ({error})"
                if self.on_bad_image == "fail":
                    raise ValueError(
                        f"{line}; copy it, or set on_bad_image to skip"
                    ) from error
                self.bad[candidate] = True
        raise ValueError(
            f"images: {MOST_IN_A_ROW} in a row are broken, the last is {where}"
        )

    def skipped(self) -> list[str]:
        """List where the broken images lie that others stood in for, in this process and its
        loader's workers.
        """
        positions = self.bad.nonzero().flatten().tolist()
        return [self.listing.where(self.indices[position]) for position in positions]


def decode(data: bytes) -> tuple[torch.Tensor, tuple[int, int]]:
    """Decode to pixels (3, height, width) uint8, channels last in memory, and the size (height,
    width) of the original.

    The pixels are Pillow's, grey and CMYK JPEGs included; what is no JPEG (ImageNet has one PNG)
    goes through Pillow, which also finds the words for a broken image: OSError, SyntaxError or
    ValueError.
    """
    if data[:2] == b"P6":
        pixels, original = read_ppm(data)
        return torch.from_numpy(pixels).permute(2, 0, 1), original
    open_image(data)  # too large, or neither JPEG nor PNG
    try:
        # torchvision 0.29 announces that it will drop this decoder one day; requirements.lock
        # keeps it
        pixels = decode_jpeg(
            torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB
        )
    except (RuntimeError, ValueError):
        pixels = torch.from_numpy(np.array(load_pillow(data))).permute(2, 0, 1)
    return pixels, tuple(pixels.shape[-2:])


def load_pillow(data: bytes) -> Image.Image:
    """Load the image as torchvision's ImageFolder loads it."""
    with open_image(data) as image:
        return image.convert("RGB")


def random_crop(data: bytes, size: int, scale_min: float) -> torch.Tensor:
    """Apply torchvision's RandomResizedCrop and RandomHorizontalFlip to an image file: (size,
    size, 3) uint8.

    Draws the same random numbers and so the same crops; pixels differ by less than one of 255
    from Pillow's, on average. Of a prepared store the same part of the picture is taken.
    Normalization is left to the device.
    """
    pixels, original = decode(data)
    box = RandomResizedCrop.get_params(
        torch.empty(1).expand(3, *original), [scale_min, 1.0], list(ASPECT_RATIOS)
    )
    scale = pixels.shape[1] / original[0]
    top, left, height, width = (round(edge * scale) for edge in box)
    crop = _resized(pixels[:, top : top + height, left : left + width], (size, size))
    return crop.flip(1) if torch.rand(1) < 0.5 else crop


def centre_crop(data: bytes, size: int) -> torch.Tensor:
    """Cut as ImageNet's validation does, (size, size, 3) uint8: Resize to size / 0.875 and
    CenterCrop.
    """
    pixels, _ = decode(data)
    height, width = pixels.shape[1:]
    shorter_side = round(size / CENTRE_SHARE)
    resized = _resized(
        pixels,
        tuple(shorter_side * edge // min(height, width) for edge in (height, width)),
    )
    top, left = (round((edge - size) / 2) for edge in resized.shape[:2])
    return resized[top : top + size, left : left + size].contiguous()


def _resized(pixels: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Scale (3, height, width) to (height, width, 3), antialiased bilinear; torch is fastest on
    packed channels.
    """
    packed = pixels[None].contiguous(memory_format=torch.channels_last)
    return F.interpolate(packed, size, mode="bilinear", antialias=True)[0].permute(
        1, 2, 0
    )


def normalized(
    images: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]
) -> torch.Tensor:
    """Normalize (..., size, size, 3) uint8 to (..., 3, size, size) float32, channels last, on
    its device.
    """
    device = images.device
    return (images.movedim(-1, -3) - _of_255(mean, device)) / _of_255(std, device)


@lru_cache
def _of_255(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Keep a constant on the device: to copy them for each batch would wait for it."""
    return 255 * torch.tensor(values, device=device)[:, None, None]
