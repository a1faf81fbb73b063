"""Decode image files to uint8 pixels, in threads, into one pre-allocated tensor.

Every image becomes 8-bit grey or RGB. EXIF rotation is applied, transparency is composited over white, and only the
first frame of an animation is read. With `size`, the central square is cropped and resized: by box averaging if it
shrinks, by bicubic interpolation if it grows. Files of several images (TIFF pages, DICOM frames, NIfTI slices) are read
as `frames` says; without it they are refused, because several images of one person would count as several units.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from sfumato.data.errors import DataError, DataWarning, first_few, reason
from sfumato.data.imageset import ImageSet
from sfumato.data.medical import (
    DICOM_SUFFIXES,
    NIFTI_SUFFIXES,
    PREAMBLE,
    ValueRange,
    dicom_frames,
    is_dicom,
    is_nifti,
    nifti_frames,
    read_dicom,
    read_nifti,
    to_byte_range,
)
from sfumato.data.parallel import map_in_order
from sfumato.data.persons import encode_persons
from sfumato.data.storage import allocate

Mode = Literal["grey", "rgb"]
OnError = Literal["raise", "skip"]
Frames = Literal["first", "middle", "all"]
Progress = Callable[[int, int], None]
Pixels = np.ndarray[Any, np.dtype[np.uint8]]

# Excluded on purpose: formats that run other programs (EPS) and formats without a signature.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF", "MPO")
SUFFIXES = frozenset(
    [
        *(".png", ".jpg", ".jpeg", ".jpe", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".mpo", ".heic", ".heif"),
        *(*DICOM_SUFFIXES, *NIFTI_SUFFIXES),
    ]
)
HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
# Exceptions that Pillow raises for damaged files. Warning is included because the caller may turn Pillow's warnings
# about odd metadata into errors.
DECODING_ERRORS = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError),
    *(RuntimeError, struct.error, zlib.error, Warning),
)

MAX_DARK_BITS = 14  # a set of 16-bit images that uses fewer bits gives a warning
SKIP_HINT = "skip such files with on_error='skip' (--on-error skip)"


@dataclass(frozen=True)
class Item:
    """One file: its name in error messages, a function that opens its bytes, and the number of images to read."""

    name: str
    open: Callable[[], AbstractContextManager[BinaryIO]]
    images: int = 1


@dataclass(frozen=True)
class Listing:
    """Files with their labels and person names.

    - count: number of images in all files.
    - skipped: unreadable files that were left out.
    - others: files that are not images by their names.
    """

    items: Iterable[Item]
    count: int
    labels: torch.Tensor | None = None
    classes: tuple[str, ...] = ("all",)
    skipped: list[str] = field(default_factory=list)
    soft_labels: torch.Tensor | None = None
    persons: Sequence[str] | None = None
    others: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Conversion:
    """How files become pixels; see `load_images`. `deep` collects the largest value of each 16-bit image."""

    size: int | None = None
    mode: Mode | None = None
    frames: Frames | None = None
    value_range: ValueRange | None = None
    deep: list[int] = field(default_factory=list)

    def choose(self, count: int) -> Sequence[int]:
        """Return the indices of the images to read from a file that holds `count`."""
        if self.frames is None and count > 1:
            what = f"holds {count} images, probably of one person; pass frames= (--frames): first or middle for one of"
            raise DataError(f"{what} them, or all together with person= (--person file, …)")
        return range(count) if self.frames == "all" else [count // 2 if self.frames == "middle" else 0]


def file_item(path: Path, name: str) -> Item:
    """Describe an image file on disk, by its absolute path: workers may have another working directory."""
    return Item(name, partial(_open_file, path.absolute()))


def _open_file(path: Path) -> BinaryIO:
    return path.open("rb")


def decode(
    listing: Listing,
    conversion: Conversion,
    *,
    on_error: OnError = "raise",
    workers: int | None = None,
    progress: Progress | None = None,
) -> ImageSet:
    """Decode a listing. With `on_error="skip"`, leave out unreadable files with a `DataWarning`."""
    buffer = PixelBuffer(listing.count, conversion.mode)
    skipped = list(listing.skipped)
    kept: list[int] = []  # for each image, the index of its item

    def decode_one(item: Item) -> tuple[str, list[Pixels] | DataError]:
        return decode_item(item, conversion)

    with closing(map_in_order(decode_one, listing.items, workers)) as results:
        for index, (name, result) in enumerate(results):
            if isinstance(result, DataError):
                if on_error == "raise":
                    raise result
                skipped.append(name)
                continue
            for pixels in result:
                buffer.write(len(kept), name, pixels)
                kept.append(index)
            if progress is not None:
                progress(len(kept) + len(skipped), listing.count)
    report_left_out(listing.others, skipped, conversion.deep)
    if not kept:
        raise DataError("no image could be read")
    labels, soft_labels = (
        None if values is None else values[torch.tensor(kept)] for values in (listing.labels, listing.soft_labels)
    )
    persons = None if listing.persons is None else encode_persons([listing.persons[index] for index in kept])
    return ImageSet(buffer.images(len(kept)), labels, listing.classes, soft_labels, persons)


def count_frames(listing: Listing, workers: int | None = None) -> Listing:
    """Count the images of each file, to read all of them. The images of a file belong to one person."""
    with closing(map_in_order(_counted, listing.items, workers)) as counted:
        items = list(counted)
    return replace(listing, items=items, count=sum(item.images for item in items))


def report_left_out(others: Sequence[str], skipped: Sequence[str], deep: Sequence[int] = ()) -> None:
    """Warn about files that were left out, and about dark images. For the owner's eyes: the counts are private."""
    if others:
        kinds = Counter(PurePosixPath(name).suffix or PurePosixPath(name).name for name in others)
        named = first_few([f"{kind} ({number})" for kind, number in kinds.most_common()], limit=6)
        text = f"left out files that are not images by their names, {len(others)} in all: {named}"
        warnings.warn(DataWarning(text), stacklevel=4)
    if skipped:
        warnings.warn(DataWarning(f"skipped {len(skipped)} unreadable: {first_few(skipped)}"), stacklevel=4)
    if deep and (bits := max(deep).bit_length()) <= MAX_DARK_BITS:
        limit = 2**bits - 1
        text = f"the 16-bit images have no value above {limit}, so they become dark; if they hold {bits}-bit values, "
        warnings.warn(DataWarning(f"{text}pass value_range=(0, {limit}) (--range 0,{limit})"), stacklevel=4)


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

    def convert_one(pixels: Pixels) -> Pixels:
        return convert(to_pil_image(pixels), size, mode)

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


def decode_item(item: Item, conversion: Conversion) -> tuple[str, list[Pixels] | DataError]:
    """Return the name of a file and its images [C, H, W], or the error to raise."""
    try:
        with item.open() as file:
            images = _open_images(file, item.name, conversion)
            return item.name, [convert(image, conversion.size, conversion.mode) for image in images]
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


def is_image_file(path: Path) -> bool:
    """Return whether a file is an image by its name. A name without a usual suffix is decided by the signature."""
    name = path.name.lower()
    if name.endswith(tuple(SUFFIXES)):
        return True
    if path.suffix and not path.suffix[1:].isdigit():  # DICOM names may end in digits: 1.2.840.10008
        return False
    try:
        with path.open("rb") as file:
            if is_dicom(name, file.read(PREAMBLE)):
                return True
            file.seek(0)
            with Image.open(file, formats=_known_formats()):
                return True
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return True  # refused by name when it is read
    except DECODING_ERRORS:
        return False


def _open_images(file: BinaryIO, name: str, conversion: Conversion) -> list[Image.Image]:
    """Return the chosen images of a file, 8-bit grey or RGB."""
    head = file.read(PREAMBLE)
    if not head:
        raise DataError(f"is empty (0 bytes); replace it, or {SKIP_HINT}")
    file.seek(0)
    if is_dicom(name, head):
        return read_dicom(file, conversion.choose, conversion.value_range)
    if is_nifti(name):
        return read_nifti(file, name, conversion.choose, conversion.value_range)
    with _open_pillow(file, head) as image:
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and image.width * image.height > limit:
            raise Image.DecompressionBombError
        pages = getattr(image, "n_frames", 1) if image.format == "TIFF" or conversion.frames else 1
        found = []
        for page in conversion.choose(pages):
            if page or pages > 1:
                image.seek(page)
            elif conversion.size is not None:
                # A JPEG decodes faster at 1/2, 1/4 or 1/8 scale; twice the target size keeps enough detail.
                image.draft(image.mode, (2 * conversion.size, 2 * conversion.size))
            found.append(to_eight_bit(ImageOps.exif_transpose(image), conversion.value_range, conversion.deep))
        return found


def _open_pillow(file: BinaryIO, head: bytes) -> Image.Image:
    """Open a file with Pillow, and with the plug-in for HEIC if it is one."""
    if head[4:8] == b"ftyp" and head[8:12] in HEIF_BRANDS:
        _register_heif()
        return Image.open(file, formats=("HEIF", "AVIF"))
    return Image.open(file, formats=_known_formats())


def _counted(item: Item) -> Item:
    """Count the images of one file. A file that cannot be read counts as one, and fails when it is decoded."""
    try:
        with item.open() as file:
            head = file.read(PREAMBLE)
            file.seek(0)
            if is_dicom(item.name, head):
                return replace(item, images=dicom_frames(file))
            if is_nifti(item.name):
                return replace(item, images=nifti_frames(file, item.name))
            with _open_pillow(file, head) as image:
                return replace(item, images=getattr(image, "n_frames", 1))
    except (DataError, Image.DecompressionBombError, *DECODING_ERRORS):
        return item


@cache
def _register_heif() -> None:
    try:
        import pillow_heif
    except ImportError as error:
        raise DataError("is a HEIC file, which needs pillow-heif: pip install 'sfumato[heic]'") from error
    pillow_heif.register_heif_opener()


@cache
def _known_formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def to_eight_bit(
    image: Image.Image, value_range: ValueRange | None = None, deep: list[int] | None = None
) -> Image.Image:
    """Convert to opaque 8-bit mode "L" or "RGB". `deep` collects the largest value of a 16-bit image."""
    if image.mode == "F" or image.mode.startswith("I"):
        if value_range is not None:
            return Image.fromarray(to_byte_range(np.asarray(image), value_range))
        if deep is not None and image.mode != "F":
            deep.append(int(np.asarray(image).max()))
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
            raise DataError("holds floats outside [0, 1] or NaN; pass value_range= (--range LOW,HIGH)")
        return Image.fromarray(np.round(values.astype(np.float64) * 255).astype(np.uint8))
    if values.min() < 0 or values.max() > 65535:
        raise DataError("holds integers outside 0..65535; pass value_range= (--range LOW,HIGH)")
    return Image.fromarray(((values.astype(np.int64) + 128) // 257).astype(np.uint8))


def convert(image: Image.Image, size: int | None, mode: Mode | None) -> Pixels:
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
