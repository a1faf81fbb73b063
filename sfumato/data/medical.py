"""Read DICOM and NIfTI files as 8-bit images, with `pydicom` and `nibabel` (extra `medical`).

Grey values are mapped to 0..255 by a declared range, or by the window in the file, or else by the smallest and largest
value of the file. Each rule looks at one file only, so one person's file never changes another's image.
"""

from __future__ import annotations

import gzip
import io
import math
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from sfumato.data.errors import DataError

DICOM_SUFFIXES, NIFTI_SUFFIXES = (".dcm", ".dicom"), (".nii", ".nii.gz")
PREAMBLE = 132  # bytes; the last four are the signature of DICOM
MAX_VOLUME = 2**31  # bytes of a decompressed NIfTI file
ValueRange = tuple[float, float]
Choose = Callable[[int], Sequence[int]]
Values = np.ndarray[Any, Any]


def is_dicom(name: str, head: bytes) -> bool:
    """Return whether a file is DICOM, by its suffix or its signature (such files often have no suffix)."""
    return name.lower().endswith(DICOM_SUFFIXES) or head[PREAMBLE - 4 : PREAMBLE] == b"DICM"


def is_nifti(name: str) -> bool:
    return name.lower().endswith(NIFTI_SUFFIXES)


def read_dicom(file: BinaryIO, choose: Choose, value_range: ValueRange | None) -> list[Image.Image]:
    """Return the frames at the indices that `choose` returns for their number."""
    content = _parse(file)
    if "PixelData" not in content:
        raise DataError("is a DICOM file without an image; leave it out")
    _check_pixels(int(content.Rows), int(content.Columns))
    indices = choose(int(content.get("NumberOfFrames") or 1))
    return [_dicom_image(content, index, value_range) for index in indices]


def dicom_frames(file: BinaryIO) -> int:
    """Return the number of frames of a DICOM file, from its header."""
    return int(_parse(file, stop_before_pixels=True).get("NumberOfFrames") or 1)


def dicom_value(file: BinaryIO, keyword: str) -> str:
    """Return an element of the header as text, such as `PatientID`."""
    content = _parse(file, stop_before_pixels=True)
    value = str(content.get(keyword, "")).strip()
    if not value:
        raise DataError(f"has no DICOM element {keyword}")
    return value


def read_nifti(file: BinaryIO, name: str, choose: Choose, value_range: ValueRange | None) -> list[Image.Image]:
    """Return axial slices, upright (anterior on top), at the indices that `choose` returns for their number."""
    image = _library("nibabel").as_closest_canonical(_nifti(file, name))
    shape = image.shape
    _check_pixels(shape[0], shape[1])
    volume = np.asarray(image.dataobj, dtype=np.float32).reshape(shape[0], shape[1], -1)
    # 1 in 200 voxels may be clipped: a few bright ones would leave the rest dark.
    limits = value_range or tuple(float(limit) for limit in np.nanpercentile(volume, [0.5, 99.5]))
    slices = (np.rot90(volume[:, :, index]) for index in choose(volume.shape[2]))
    return [Image.fromarray(to_byte_range(values, (limits[0], limits[1]))) for values in slices]


def nifti_frames(file: BinaryIO, name: str) -> int:
    """Return the number of axial slices, over all volumes of a series."""
    return math.prod(_nifti(file, name).shape[2:])


def to_byte_range(values: Values, limits: ValueRange) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Map `limits` to 0..255 linearly; values outside are clipped, NaN is the lower limit."""
    low, high = limits
    scaled = (np.nan_to_num(values.astype(np.float64), nan=low) - low) / ((high - low) or 1) * 255
    return np.round(scaled.clip(0, 255)).astype(np.uint8)


def _dicom_image(content: Any, index: int, value_range: ValueRange | None) -> Image.Image:
    pixels = import_module("pydicom.pixels")
    values = pixels.pixel_array(content, index=index)
    photometric = str(content.PhotometricInterpretation)
    if photometric == "PALETTE COLOR":
        values = (pixels.apply_color_lut(values, content) >> 8).astype(np.uint8)
    if values.ndim == 3:
        if values.dtype != np.uint8:
            raise DataError(f"is a DICOM file in colour with values of {values.dtype}; convert it to 8 bits")
        return Image.fromarray(values)
    values = pixels.apply_modality_lut(values, content)
    if value_range is not None:
        grey = to_byte_range(values, value_range)
    elif "VOILUTSequence" in content:
        bits = int(content.VOILUTSequence[0].LUTDescriptor[2])
        grey = to_byte_range(pixels.apply_voi_lut(values, content, prefer_lut=True), (0, 2**bits - 1))
    else:
        grey = to_byte_range(values, _window(content) or (float(values.min()), float(values.max())))
    return Image.fromarray(255 - grey if photometric == "MONOCHROME1" else grey)


def _window(content: Any) -> ValueRange | None:
    """Return the lower and upper limit of the first window (DICOM PS3.3, C.11.2.1.2)."""
    center, width = (content.get(name) for name in ("WindowCenter", "WindowWidth"))
    if center is None or width is None:
        return None
    first = [float(value[0] if isinstance(value, Sequence) and not isinstance(value, str) else value)
             for value in (center, width)]  # fmt: skip
    return first[0] - 0.5 - (first[1] - 1) / 2, first[0] - 0.5 + (first[1] - 1) / 2


def _check_pixels(rows: int, columns: int) -> None:
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and rows * columns > limit:
        raise Image.DecompressionBombError


def _parse(file: BinaryIO, **options: Any) -> Any:
    pydicom = _library("pydicom")
    try:
        return pydicom.dcmread(file, force=True, **options)
    except pydicom.errors.InvalidDicomError as error:
        raise DataError(f"is not a readable DICOM file: {error}") from error


def _nifti(file: BinaryIO, name: str) -> Any:
    nibabel = _library("nibabel")
    stream: Any = file
    if name.lower().endswith(".gz"):
        with gzip.open(file) as packed:
            stream = io.BytesIO(packed.read(MAX_VOLUME + 1))
        if stream.getbuffer().nbytes > MAX_VOLUME:
            raise DataError("decompresses to more than 2 GiB; split the series")
    try:
        image = nibabel.Nifti1Image.from_stream(stream)
    except nibabel.spatialimages.HeaderDataError as error:
        raise DataError(f"is not a readable NIfTI file: {error}") from error
    except nibabel.filebasedimages.ImageFileError as error:
        raise DataError(f"is not a readable NIfTI file: {error}") from error
    if len(image.shape) < 3:
        raise DataError(f"is a NIfTI file of shape {image.shape}; expected a volume")
    return image


@cache
def _library(name: str) -> Any:
    try:
        module = import_module(name)
    except ImportError as error:
        kind = "DICOM" if name == "pydicom" else "NIfTI"
        raise DataError(f"is a {kind} file, which needs {name}: pip install 'sfumato[medical]'") from error
    if name == "pydicom":  # odd values of elements that nobody asked for are common, and no reason for a warning
        module.config.settings.reading_validation_mode = module.config.IGNORE
    return module
