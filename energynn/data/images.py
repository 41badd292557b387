"""Images of a listing as a PyTorch data set: decoded, cropped, and replaced or fatal where they
are broken.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import RandomResizedCrop, functional

from energynn.data.imagenet import ImageListing, decode_ppm, open_image

CROP_ASPECT_RATIOS = (3 / 4, 4 / 3)  # torchvision's default
CENTRE_CROP_SHARE = 0.875  # of the shorter side: 224 of 256 pixels
# Of ImageNet's training images; the usual constants of torchvision's reference training.
CHANNEL_MEAN = (0.485, 0.456, 0.406)
CHANNEL_STD = (0.229, 0.224, 0.225)


class ImageDataset:
    """Load some images of a listing, in the order of ``indices``, as pairs of ``load(bytes)``
    and label.

    They are indexed by epoch x images + index. What ``load`` draws follows from this number and
    the seed alone, whoever loads them and when: so a training goes on from a checkpoint with the
    very images that it would have seen.
    """

    def __init__(
        self,
        listing: ImageListing,
        indices: np.ndarray,
        load: Callable,
        on_bad_image: str = "fail",
        seed: int = 0,
    ):
        self.listing = listing
        self.indices = indices
        self.load = load
        self.on_bad_image = on_bad_image
        self.seed = seed
        # The loader's workers write here.
        self.bad = torch.zeros(len(indices), dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> tuple:
        """Load image and label; raises ValueError with the path of a broken image, or takes the
        next one in its place.

        A file that cannot be read is an error in any case (OSError): the disk may be gone, not
        the image.
        """
        position = number % len(self)
        with torch.random.fork_rng(devices=[]):
            # torch takes 64 bits
            torch.default_generator.manual_seed((self.seed * 2**40 + number) % 2**64)
            while True:
                index = self.indices[position]
                data = self.listing.read(index)
                try:
                    return self.load(data), int(self.listing.labels[index])
                except Exception as error:  # whatever is raised: the image's fault
                    self.bad[position] = True
                    if self.on_bad_image == "fail" or self.bad.all():
                        fault = self.listing.broken_image_text(index, error)
                        raise ValueError(
                            f"{fault}, or set on_bad_image to skip"
                        ) from error
                    position = (position + 1) % len(self)

    def skipped_images(self) -> list[str]:
        """List where the broken images lie that others stood in for, in this process and its
        loader's workers.
        """
        indices = self.indices[self.bad.numpy()]
        return [self.listing.place_of_image(index) for index in indices]


def decode(data: bytes) -> torch.Tensor:
    """Decode to pixels (3, height, width) uint8, channels last in memory.

    The pixels are Pillow's, grey and CMYK JPEGs included; what is no JPEG (ImageNet has one PNG)
    goes through Pillow, which also finds the words for a broken image.
    """
    if (pixels := decode_ppm(data)) is not None:
        return torch.from_numpy(pixels).permute(2, 0, 1)
    open_image(data)  # too large, or none of FORMATS
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        # torchvision 0.29 announces that it will drop this decoder one day; requirements.lock
        # keeps it
        return decode_jpeg(encoded, mode=ImageReadMode.RGB)
    except (RuntimeError, ValueError):
        return functional.pil_to_tensor(load_with_pillow(data))


def load_with_pillow(data: bytes) -> Image.Image:
    """Load the image as torchvision's ImageFolder loads it."""
    with open_image(data) as image:
        return image.convert("RGB")


def random_crop(data: bytes, size: int, scale_min: float) -> torch.Tensor:
    """Apply torchvision's RandomResizedCrop and RandomHorizontalFlip to an image file: (size,
    size, 3) uint8.

    Draws the same random numbers and so the same crops; pixels differ by less than one of 255
    from Pillow's, on average. Normalization is left to the device.
    """
    pixels = decode(data)
    box = RandomResizedCrop.get_params(pixels, (scale_min, 1.0), CROP_ASPECT_RATIOS)
    crop = _resize_crop(functional.crop(pixels, *box), (size, size))
    return crop.flip(1) if torch.rand(1) < 0.5 else crop


def centre_crop(data: bytes, size: int) -> torch.Tensor:
    """Cut as ImageNet's validation does, (size, size, 3) uint8: Resize to size / 0.875 and
    CenterCrop.
    """
    pixels = decode(data)
    height, width = pixels.shape[1:]
    shorter_side = round(size / CENTRE_CROP_SHARE)
    resized = _resize_crop(
        pixels,
        tuple(shorter_side * edge // min(height, width) for edge in (height, width)),
    )
    cropped = functional.center_crop(resized.movedim(-1, 0), size)
    return cropped.movedim(0, -1).contiguous()


def _resize_crop(pixels: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Scale (3, height, width) to (height, width, 3), antialiased bilinear; torch is fastest on
    packed channels.
    """
    packed = pixels[None].contiguous(memory_format=torch.channels_last)
    return F.interpolate(packed, size, mode="bilinear", antialias=True)[0].permute(
        1, 2, 0
    )


def normalize_images(images: torch.Tensor) -> torch.Tensor:
    """Normalize (..., size, size, 3) uint8 to (..., 3, size, size) float32, channels last, on
    its device.
    """
    mean, std = _mean_and_std_times_255(images.device)
    return (images.movedim(-1, -3) - mean) / std


@lru_cache
def _mean_and_std_times_255(device: torch.device) -> torch.Tensor:
    """Keep the constants on the device: to copy them for each batch would wait for it."""
    constants = torch.tensor((CHANNEL_MEAN, CHANNEL_STD), device=device)
    return 255 * constants[..., None, None]
