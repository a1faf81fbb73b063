"""Decode image files to uint8 pixels, in threads, into one pre-allocated tensor.

Every image becomes 8-bit grey or RGB. EXIF rotation is applied, transparency is composited over white, and only the
first frame of an animation is read. With `size`, the central square is cropped and resized: by box averaging if it
shrinks, by bicubic interpolation if it grows.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from sfumato.data.errors import DataError, DataWarning, first_few, reason
from sfumato.data.imageset import ImageSet
from sfumato.data.parallel import map_in_order
from sfumato.data.persons import encode_persons
from sfumato.data.storage import allocate

Mode = Literal["grey", "rgb"]
OnError = Literal["raise", "skip"]
Progress = Callable[[int, int], None]
Pixels = np.ndarray[Any, np.dtype[np.uint8]]

# Excluded on purpose: formats that run other programs (EPS) and formats without a signature.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF", "MPO")
SUFFIXES = frozenset(
    [
        *(".png", ".jpg", ".jpeg", ".jpe", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".mpo"),
    ]
)
# Exceptions that Pillow raises for damaged files. Warning is included because the caller may turn Pillow's warnings
# about odd metadata into errors.
DECODING_ERRORS = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError),
    *(RuntimeError, struct.error, zlib.error, Warning),
)

SKIP_HINT = "skip such files with on_error='skip' (--on-error skip)"


@dataclass(frozen=True)
class Item:
    """One encoded image: its name in error messages, and a function that opens its bytes."""

    name: str
    open: Callable[[], AbstractContextManager[BinaryIO]]


@dataclass(frozen=True)
class Listing:
    """Encoded images with their labels and person names; `skipped` lists files that were left out."""

    items: Iterable[Item]
    count: int
    labels: torch.Tensor | None = None
    classes: tuple[str, ...] = ("all",)
    skipped: list[str] = field(default_factory=list)
    soft_labels: torch.Tensor | None = None
    persons: Sequence[str] | None = None


def file_item(path: Path, name: str) -> Item:
    """Describe an image file on disk."""
    return Item(name, lambda: path.open("rb"))


def decode(
    listing: Listing,
    *,
    size: int | None = None,
    mode: Mode | None = None,
    on_error: OnError = "raise",
    workers: int | None = None,
    progress: Progress | None = None,
) -> ImageSet:
    """Decode a listing. With `on_error="skip"`, leave out unreadable images with a `DataWarning`."""
    buffer = PixelBuffer(listing.count, mode)
    skipped = list(listing.skipped)
    kept: list[int] = []
    decode_one = partial(_decode_item, size=size, mode=mode)
    with closing(map_in_order(decode_one, listing.items, workers)) as results:
        for index, (name, result) in enumerate(results):
            if isinstance(result, DataError):
                if on_error == "raise":
                    raise result
                skipped.append(name)
            else:
                buffer.write(len(kept), name, result)
                kept.append(index)
            if progress is not None:
                progress(index + 1, listing.count)
    if skipped:
        warnings.warn(DataWarning(f"skipped {len(skipped)} unreadable: {first_few(skipped)}"), stacklevel=3)
    if not kept:
        raise DataError("no image could be read")
    labels, soft_labels = (
        None if values is None else values[torch.tensor(kept)] for values in (listing.labels, listing.soft_labels)
    )
    persons = None if listing.persons is None else encode_persons([listing.persons[index] for index in kept])
    return ImageSet(buffer.images(len(kept)), labels, listing.classes, soft_labels, persons)


def convert_images(
    images: ImageSet,
    *,
    size: int | None = None,
    mode: Mode | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> ImageSet:
    """Convert decoded images to `size` and `mode` with the same arithmetic as `decode`."""
    channels, height, width = images.shape
    same_mode = mode is None or channels == (1 if mode == "grey" else 3)
    if same_mode and (size is None or height == width == size):
        return images
    buffer = PixelBuffer(len(images), mode)
    convert_one = partial(_convert_array, size=size, mode=mode)
    with closing(map_in_order(convert_one, images.images.numpy(), workers)) as results:
        for index, pixels in enumerate(results):
            buffer.write(index, str(index), pixels)
            if progress is not None:
                progress(index + 1, len(images))
    return replace(images, images=buffer.images(len(images)))


def to_pil_image(pixels: Pixels) -> Image.Image:
    """Convert one image [C, H, W] to a Pillow image."""
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))


class PixelBuffer:
    """Pre-allocated pixels. All images must have one size, and one number of channels unless `mode` is given."""

    def __init__(self, count: int, mode: Mode | None) -> None:
        self.count = count
        self.mode = mode
        self.pixels: Pixels | None = None
        self.first = ""

    def write(self, index: int, name: str, image: Pixels) -> None:
        """Copy one image [C, H, W] to position `index`; grey is repeated over the channels of an RGB buffer."""
        channels, height, width = image.shape
        if self.pixels is None:
            self.first = name
            self.pixels = allocate((self.count, 3 if self.mode == "rgb" else channels, height, width))
        _, first_channels, first_height, first_width = self.pixels.shape
        if (height, width) != (first_height, first_width):
            sizes = f"{self.first} is {first_width}×{first_height}, {name} is {width}×{height}"
            raise DataError(f"the images differ in size: {sizes}; pass size (--size) to resize them")
        if channels != first_channels and self.mode is None:
            kinds = f"{self.first} is {_colour(first_channels)}, {name} is {_colour(channels)}"
            raise DataError(f"the images mix grey and colour: {kinds}; pass mode='grey' or 'rgb' (--mode grey|rgb)")
        self.pixels[index] = image

    def images(self, count: int) -> torch.Tensor:
        """Return the first `count` images as a tensor."""
        assert self.pixels is not None
        return torch.from_numpy(self.pixels)[:count]


def _colour(channels: int) -> str:
    return "grey" if channels == 1 else "colour"


def _decode_item(item: Item, size: int | None, mode: Mode | None) -> tuple[str, Pixels | DataError]:
    try:
        with item.open() as file:
            return item.name, _decode_file(file, size, mode)
    except UnidentifiedImageError:
        error = DataError(f"{item.name} is not an image in a supported format; remove it, or {SKIP_HINT}")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        limit = f"more than {Image.MAX_IMAGE_PIXELS} pixels and may be a decompression bomb"
        error = DataError(f"{item.name} has {limit}; shrink it, or {SKIP_HINT}")
    except DataError as cause:
        error = DataError(f"{item.name} {cause}")
    except DECODING_ERRORS as cause:
        error = DataError(f"{item.name} cannot be read: {reason(cause)}; replace it, or {SKIP_HINT}")
    return item.name, error


def _decode_file(file: BinaryIO, size: int | None, mode: Mode | None) -> Pixels:
    if not file.read(1):
        raise DataError(f"is empty (0 bytes); replace it, or {SKIP_HINT}")
    file.seek(0)
    with Image.open(file, formats=_known_formats()) as image:
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and image.width * image.height > limit:
            raise Image.DecompressionBombError
        if size is not None:
            # A JPEG decodes faster at 1/2, 1/4 or 1/8 scale; twice the target size keeps enough detail.
            image.draft(image.mode, (2 * size, 2 * size))
        ImageOps.exif_transpose(image, in_place=True)
        return _convert(_to_eight_bit(image), size, mode)


@cache
def _known_formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _to_eight_bit(image: Image.Image) -> Image.Image:
    """Convert to opaque 8-bit mode "L" or "RGB"."""
    if image.mode == "F" or image.mode.startswith("I"):
        return _reduce_depth(image)
    if image.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
        assert converted is not None
        return converted
    grey = image.mode in ("1", "L", "LA", "La")
    if image.has_transparency_data:
        layered = image.convert("LA" if grey else "RGBA")
        white = Image.new("L" if grey else "RGB", image.size, "white")
        white.paste(layered.convert(white.mode), mask=layered.getchannel("A"))
        return white
    target = "L" if grey else "RGB"
    return image if image.mode == target else image.convert(target)


def _reduce_depth(image: Image.Image) -> Image.Image:
    """Scale 16-bit integers by 1/257, and floats in [0, 1] by 255. Refuse values outside these ranges."""
    values = np.asarray(image)
    if image.mode == "F":
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            raise DataError("holds floats outside [0, 1] or NaN; rescale it, or save it with 8 or 16 bits")
        return Image.fromarray(np.round(values.astype(np.float64) * 255).astype(np.uint8))
    if values.min() < 0 or values.max() > 65535:
        raise DataError("holds integers outside 0..65535; save it with 8 or 16 bits")
    return Image.fromarray(((values.astype(np.int64) + 128) // 257).astype(np.uint8))


def _convert(image: Image.Image, size: int | None, mode: Mode | None) -> Pixels:
    """Convert to grey, crop and resize as requested, and return [C, H, W]."""
    if mode == "grey" and image.mode != "L":
        image = image.convert("L")
    if size is not None and image.size != (size, size):
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        # Crop first: resize(box=…) would let bicubic interpolation read pixels outside the square.
        image = image.crop((left, top, left + side, top + side))
        image = image.resize((size, size), Image.Resampling.BOX if side >= size else Image.Resampling.BICUBIC)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _convert_array(pixels: Pixels, size: int | None, mode: Mode | None) -> Pixels:
    return _convert(to_pil_image(pixels), size, mode)
