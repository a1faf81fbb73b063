"""Encoded images of any usual kind to uint8 pixels, in threads, into one pre-allocated tensor.

Every image becomes 8-bit grey or RGB, upright (EXIF), opaque (transparency is laid over white), its first
frame only. With `size` it is cropped to the central square and resized: box averaging down, bicubic up.
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

from .errors import DataError, DataWarning, first_few, reason
from .imageset import ImageSet
from .parallel import map_in_order
from .persons import encode_persons
from .storage import allocate

Mode = Literal["grey", "rgb"]
OnError = Literal["raise", "skip"]
Progress = Callable[[int, int], None]
Pixels = np.ndarray[Any, np.dtype[np.uint8]]

# Photographs and scans. Left out on purpose: formats that run other programs (EPS) or have no signature.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF", "MPO")
SUFFIXES = frozenset(
    [
        *(".png", ".jpg", ".jpeg", ".jpe", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".mpo"),
    ]
)
# What Pillow raises on damaged files, depending on the format and on where the damage is; its warnings of odd
# metadata are raised, too, where the caller has made warnings errors.
UNREADABLE = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError),
    *(RuntimeError, struct.error, zlib.error, Warning),
)

SKIP = "leave such files out with on_error='skip' (--on-error skip)"


@dataclass(frozen=True)
class Item:
    """One encoded image: what an error calls it, and how to open its bytes."""

    name: str
    open: Callable[[], AbstractContextManager[BinaryIO]]


@dataclass(frozen=True)
class Listing:
    """Encoded images still to be decoded, with labels and names of persons; `skipped` were left out while listing."""

    items: Iterable[Item]
    count: int
    labels: torch.Tensor | None = None
    classes: tuple[str, ...] = ("all",)
    skipped: list[str] = field(default_factory=list)
    soft_labels: torch.Tensor | None = None
    persons: Sequence[str] | None = None


def file_item(path: Path, name: str) -> Item:
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
    """Decode a listing; unreadable images are errors, or are left out with a `DataWarning`."""
    canvas = Canvas(listing.count, mode)
    skipped = list(listing.skipped)
    kept: list[int] = []
    one = partial(_decode_or_explain, size=size, mode=mode)
    with closing(map_in_order(one, listing.items, workers)) as results:
        for index, (name, result) in enumerate(results):
            if isinstance(result, DataError):
                if on_error == "raise":
                    raise result
                skipped.append(name)
            else:
                canvas.place(len(kept), name, result)
                kept.append(index)
            if progress is not None:
                progress(index + 1, listing.count)
    if skipped:
        warnings.warn(DataWarning(f"left out {len(skipped)} unreadable: {first_few(skipped)}"), stacklevel=3)
    if not kept:
        raise DataError("no image could be read")
    labels, soft_labels = (
        None if values is None else values[torch.tensor(kept)] for values in (listing.labels, listing.soft_labels)
    )
    persons = None if listing.persons is None else encode_persons([listing.persons[index] for index in kept])
    return ImageSet(canvas.images(len(kept)), labels, listing.classes, soft_labels, persons)


def refit(
    images: ImageSet,
    *,
    size: int | None = None,
    mode: Mode | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> ImageSet:
    """Bring decoded images to `size` and `mode` with the very arithmetic that files get."""
    channels, height, width = images.shape
    same_mode = mode is None or channels == (1 if mode == "grey" else 3)
    if same_mode and (size is None or height == width == size):
        return images
    canvas = Canvas(len(images), mode)
    fit_one = partial(_fit_array, size=size, mode=mode)
    with closing(map_in_order(fit_one, images.images.numpy(), workers)) as results:
        for index, pixels in enumerate(results):
            canvas.place(index, str(index), pixels)
            if progress is not None:
                progress(index + 1, len(images))
    return replace(images, images=canvas.images(len(images)))


def to_picture(pixels: Pixels) -> Image.Image:
    """One image [C, H, W] as a Pillow image."""
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))


class Canvas:
    """Where images are placed: all of one size, and all grey or all RGB unless the mode is given."""

    def __init__(self, count: int, mode: Mode | None) -> None:
        self.count = count
        self.mode = mode
        self.pixels: Pixels | None = None
        self.first = ""

    def place(self, index: int, name: str, image: Pixels) -> None:
        """Copy one image [C, H, W] to its place; grey is repeated over the channels of an RGB canvas."""
        channels, height, width = image.shape
        if self.pixels is None:
            self.first = name
            self.pixels = allocate((self.count, 3 if self.mode == "rgb" else channels, height, width))
        _, have, tall, wide = self.pixels.shape
        if (height, width) != (tall, wide):
            sizes = f"{self.first} is {wide}×{tall}, {name} is {width}×{height}"
            raise DataError(f"the images differ in size: {sizes}; pass size (--size) to bring them to one")
        if channels != have and self.mode is None:
            kinds = f"{self.first} is {_colour(have)}, {name} is {_colour(channels)}"
            raise DataError(f"the images mix grey and colour: {kinds}; pass mode='grey' or 'rgb' (--mode grey|rgb)")
        self.pixels[index] = image

    def images(self, count: int) -> torch.Tensor:
        assert self.pixels is not None
        return torch.from_numpy(self.pixels)[:count]


def _colour(channels: int) -> str:
    return "grey" if channels == 1 else "colour"


def _decode_or_explain(item: Item, size: int | None, mode: Mode | None) -> tuple[str, Pixels | DataError]:
    try:
        with item.open() as file:
            return item.name, _decode_file(file, size, mode)
    except UnidentifiedImageError:
        error = DataError(f"{item.name} is not an image of a known format; remove it, or {SKIP}")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        limit = f"more than {Image.MAX_IMAGE_PIXELS} pixels, perhaps a decompression bomb"
        error = DataError(f"{item.name} has {limit}; shrink it, or {SKIP}")
    except DataError as cause:
        error = DataError(f"{item.name} {cause}")
    except UNREADABLE as cause:
        error = DataError(f"{item.name} cannot be read: {reason(cause)}; replace it, or {SKIP}")
    return item.name, error


def _decode_file(file: BinaryIO, size: int | None, mode: Mode | None) -> Pixels:
    if not file.read(1):
        raise DataError(f"is empty (0 bytes); replace it, or {SKIP}")
    file.seek(0)
    with Image.open(file, formats=_known_formats()) as image:
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and image.width * image.height > limit:
            raise Image.DecompressionBombError
        if size is not None:
            # A JPEG decodes at 1/2, 1/4 or 1/8 scale for a fraction of the work; keep twice the wanted size.
            image.draft(image.mode, (2 * size, 2 * size))
        ImageOps.exif_transpose(image, in_place=True)
        return _fit(_eight_bit(image), size, mode)


@cache
def _known_formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _eight_bit(image: Image.Image) -> Image.Image:
    """The image as opaque 8-bit "L" or "RGB"."""
    if image.mode == "F" or image.mode.startswith("I"):
        return _from_deep(image)
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


def _from_deep(image: Image.Image) -> Image.Image:
    """Scale 16-bit whole numbers by 1/257, and floats within [0, 1] by 255; never wrap around."""
    values = np.asarray(image)
    if image.mode == "F":
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            raise DataError("holds floats outside [0, 1] (or NaN); rescale it, or save it with 8 or 16 bits")
        return Image.fromarray(np.round(values.astype(np.float64) * 255).astype(np.uint8))
    if values.min() < 0 or values.max() > 65535:
        raise DataError("holds whole numbers outside 0..65535; save it with 8 or 16 bits")
    return Image.fromarray(((values.astype(np.int64) + 128) // 257).astype(np.uint8))


def _fit(image: Image.Image, size: int | None, mode: Mode | None) -> Pixels:
    """Grey if asked, crop and resize if asked, and return [C, H, W]."""
    if mode == "grey" and image.mode != "L":
        image = image.convert("L")
    if size is not None and image.size != (size, size):
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        # Not resize(box=…): bicubic would then look beyond the edge of the square.
        image = image.crop((left, top, left + side, top + side))
        image = image.resize((size, size), Image.Resampling.BOX if side >= size else Image.Resampling.BICUBIC)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _fit_array(pixels: Pixels, size: int | None, mode: Mode | None) -> Pixels:
    return _fit(to_picture(pixels), size, mode)
