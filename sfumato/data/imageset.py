"""The one form that images take inside the package: uint8 pixels, whole-number labels, class names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from .errors import DataError
from .labels import Classes, check_classes, class_names, encode_labels, encode_soft_labels
from .persons import encode_persons

ROUNDING = 1e-2  # of soft labels' sums: half precision is enough


@dataclass(frozen=True)
class PublicFacts:
    """What may be known of an image set without a privacy charge; `sizes` of classes only if declared public.

    unit: what one record is, an "image" or a "person" with all images. A person counts as one in `sizes`, shared
    among the classes as the person's images are.
    """

    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    labelled: bool
    sizes: tuple[float, ...] | None = None
    unit: Literal["image", "person"] = "image"


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images uint8 [N, C, H, W], C being 1 (grey) or 3 (RGB); labels int64 [N], or None if unlabelled.

    soft_labels: float32 [N, classes], a probability for each class, beside the labels; None if there are none.
    persons: int64 [N], the index of the person to whom each image belongs (private); None: each image is its own unit.
    """

    images: torch.Tensor
    labels: torch.Tensor | None = None
    classes: Sequence[str] = ("all",)
    soft_labels: torch.Tensor | None = None
    persons: torch.Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))
        _check_images(self.images)
        check_classes(self.classes)
        if self.labels is None:
            if self.classes != ("all",):
                raise DataError("classes were given without labels; an unlabelled set has one class, 'all'")
        else:
            _check_labels(self.labels, len(self.images), len(self.classes))
        if self.soft_labels is not None:
            if self.labels is None:
                raise DataError("soft labels were given without labels; they stand beside them")
            _check_soft_labels(self.soft_labels, len(self.images), len(self.classes))
        if self.persons is not None:
            _check_persons(self.persons, len(self.images))

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        # No number of images or persons, and no pixel: a repr ends up in logs, and all these are private.
        return f"ImageSet(shape={self.shape}, classes={len(self.classes)}, labelled={self.labelled})"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @property
    def labelled(self) -> bool:
        return self.labels is not None

    def public(self, declare_size: bool = False) -> PublicFacts:
        """The public facts; numbers of images are private unless the caller declares them public."""
        sizes = None
        if declare_size:
            labels = torch.zeros(len(self), dtype=torch.int64) if self.labels is None else self.labels
            weights = None if self.persons is None else 1 / torch.bincount(self.persons).double()[self.persons]
            sizes = tuple(torch.bincount(labels, weights, minlength=len(self.classes)).tolist())
        unit: Literal["image", "person"] = "image" if self.persons is None else "person"
        return PublicFacts(self.shape, tuple(self.classes), self.labelled, sizes, unit)

    def subset(self, indices: torch.Tensor | np.ndarray[Any, Any] | Sequence[int]) -> ImageSet:
        """The images at `indices` (or where a boolean mask is true), in that order, with the same classes."""
        chosen = torch.as_tensor(indices)
        if chosen.numel() == 0:
            raise DataError("the subset holds no images")
        chosen = chosen if chosen.dtype == torch.bool else chosen.long()
        labels, soft_labels, persons = (
            None if values is None else values[chosen] for values in (self.labels, self.soft_labels, self.persons)
        )
        return ImageSet(self.images[chosen], labels, self.classes, soft_labels, persons)

    @classmethod
    def from_arrays(
        cls,
        images: Any,
        labels: Any = None,
        classes: Classes | None = None,
        soft_labels: Any = None,
        persons: Any = None,
    ) -> ImageSet:
        """Make a set from numpy or torch arrays.

        Images are uint8, or float within [0, 1]; shaped [N,H,W], [N,C,H,W] or [N,H,W,C] with C 1 or 3.
        Labels are whole numbers (indices into `classes`), booleans or strings, shaped [N] or [N,1]; soft labels are
        probabilities, shaped [N, classes]. Labels need `classes`: the names in their order, or their number.
        Persons are whole numbers or strings, shaped [N].
        """
        pixels = _as_uint8(_channels_first(_as_tensor(images, "images")))
        soft = None if soft_labels is None else encode_soft_labels(soft_labels)
        units = None if persons is None else encode_persons(persons)
        names = None if classes is None else class_names(classes)
        if labels is None:
            return cls(pixels, None, names or ("all",), soft, units)
        encoded, names = encode_labels(labels, names)
        return cls(pixels, encoded, names, soft, units)


def shared_images(a: ImageSet, b: ImageSet) -> bool:
    """Whether any image of one set equals an image of the other, pixel for pixel."""
    return a.shape == b.shape and not _digests(a).isdisjoint(_digests(b))


def _digests(images: ImageSet) -> set[bytes]:
    return {hashlib.sha256(image).digest() for image in np.ascontiguousarray(images.images.numpy())}


def _as_tensor(values: Any, what: str) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu()
    array = np.asarray(values)
    if array.dtype.kind not in "uifb":
        raise DataError(f"{what} are an array of {array.dtype}; expected uint8, or floats within [0, 1]")
    # Byte order and read-only memory are numpy notions that torch does not share.
    array = array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable)
    if (array.dtype.kind == "u" and array.dtype != np.uint8) or array.dtype == np.longdouble:
        raise DataError(f"{what} are an array of {array.dtype}; expected uint8, or floats within [0, 1]")
    return torch.from_numpy(np.ascontiguousarray(array))


def _channels_first(images: torch.Tensor) -> torch.Tensor:
    shape = tuple(images.shape)
    if images.ndim == 3:
        if shape[2] in (1, 3) or shape[0] == 3:
            raise DataError(f"images of shape {shape} may be one image or many; add the missing axis")
        return images.unsqueeze(1)
    if images.ndim != 4:
        raise DataError(f"images have shape {shape}; expected [N,H,W], [N,C,H,W] or [N,H,W,C]")
    first, last = shape[1] in (1, 3), shape[3] in (1, 3)
    if first and last:
        raise DataError(f"images of shape {shape} may be [N,C,H,W] or [N,H,W,C]; transpose or crop them")
    if not first and not last:
        raise DataError(f"images of shape {shape} have no axis of 1 (grey) or 3 (RGB) channels")
    return images if first else images.permute(0, 3, 1, 2)


def _as_uint8(images: torch.Tensor) -> torch.Tensor:
    if images.dtype == torch.uint8:
        return images.contiguous()
    if not images.is_floating_point():
        raise DataError(f"images are {_name(images.dtype)}; expected uint8 (0..255), or floats within [0, 1]")
    if images.numel() == 0:
        return images.to(torch.uint8)
    if not bool(torch.isfinite(images).all()):
        kind = "NaN" if bool(torch.isnan(images).any()) else "infinite values"
        raise DataError(f"images contain {kind}; every value must be a number within [0, 1]")
    low, high = float(images.min()), float(images.max())
    if low < 0 or high > 1:
        # The extremes of private pixels stay out of the message: it may end up in a shared log.
        side = "below 0" if low < 0 else "above 1"
        raise DataError(f"float images have values {side}; scale them into [0, 1], or pass uint8 (0..255)")
    return (images.double() * 255).round().to(torch.uint8).contiguous()


def _check_images(images: torch.Tensor) -> None:
    if not isinstance(images, torch.Tensor) or images.dtype != torch.uint8:
        kind = _name(images.dtype) if isinstance(images, torch.Tensor) else type(images).__name__
        raise DataError(f"images must be a uint8 tensor, not {kind}; use ImageSet.from_arrays to convert")
    if images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape[2:]:
        raise DataError(f"images must have shape [N, C, H, W] with C 1 or 3, not {list(images.shape)}")
    if len(images) == 0:
        raise DataError("the set holds no images")


def _check_labels(labels: torch.Tensor, images: int, classes: int) -> None:
    if not isinstance(labels, torch.Tensor) or labels.dtype != torch.int64 or labels.ndim != 1:
        raise DataError("labels must be an int64 tensor of shape [N]; use ImageSet.from_arrays to convert")
    if len(labels) != images:
        raise DataError(f"there are {images} images but {len(labels)} labels")
    if int(labels.min()) < 0:
        raise DataError(f"label {int(labels.min())} is negative; labels count from 0 (drop unlabelled images)")
    if int(labels.max()) >= classes:
        raise DataError(f"label {int(labels.max())} has no class name: only {classes} classes are named")


def _check_soft_labels(soft_labels: torch.Tensor, images: int, classes: int) -> None:
    if not isinstance(soft_labels, torch.Tensor) or soft_labels.dtype != torch.float32:
        raise DataError("soft labels must be a float32 tensor; use ImageSet.from_arrays to convert")
    if soft_labels.shape != (images, classes):
        raise DataError(f"soft labels must have shape [{images}, {classes}], not {list(soft_labels.shape)}")
    # a sum that is not a number fails, too
    if not bool((soft_labels >= 0).all() and ((soft_labels.sum(1) - 1).abs() < ROUNDING).all()):
        raise DataError("soft labels must be probabilities: at least 0, and 1 in sum for each image")


def _check_persons(persons: torch.Tensor, images: int) -> None:
    if not isinstance(persons, torch.Tensor) or persons.dtype != torch.int64 or persons.ndim != 1:
        raise DataError("persons must be an int64 tensor of shape [N]; use ImageSet.from_arrays to convert")
    if len(persons) != images:
        raise DataError(f"there are {images} images but {len(persons)} persons; give one person per image")
    if int(persons.min()) < 0:
        raise DataError("a person has a negative index; persons count from 0")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
