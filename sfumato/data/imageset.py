"""Image sets: uint8 pixels, integer labels and class names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from sfumato.data.errors import DataError
from sfumato.data.labels import Classes, check_classes, class_names, encode_labels, encode_soft_labels
from sfumato.data.persons import encode_persons

SUM_TOLERANCE = 1e-2  # of soft labels; allows half precision


@dataclass(frozen=True)
class PublicFacts:
    """Facts about an image set that are public, so using them costs no privacy.

    - shape: channels, height and width.
    - classes: class names.
    - labelled: whether the images have labels.
    - sizes: number of units in each class, only if declared public. A person counts as one in total: it is divided
      among the classes in proportion to the person's images.
    - unit: unit of privacy, one "image" or one "person" with all images.
    """

    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    labelled: bool
    sizes: tuple[float, ...] | None = None
    unit: Literal["image", "person"] = "image"


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with optional labels, soft labels and persons.

    - images: uint8 [N, C, H, W], where C is 1 (grey) or 3 (RGB).
    - labels: int64 [N], indices into `classes`; None if unlabelled.
    - classes: class names; ("all",) if unlabelled.
    - soft_labels: float32 [N, classes], a probability for each class, in addition to the labels; or None.
    - persons: int64 [N], the index of the person that each image belongs to. Private. None: each image is one unit.
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
                raise DataError("soft labels were given without labels; pass both")
            _check_soft_labels(self.soft_labels, len(self.images), len(self.classes))
        if self.persons is not None:
            _check_persons(self.persons, len(self.images))

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        # The number of images and the pixels are private, and a repr may end up in logs.
        return f"ImageSet(shape={self.shape}, classes={len(self.classes)}, labelled={self.labelled})"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @property
    def labelled(self) -> bool:
        return self.labels is not None

    def public(self, declare_size: bool = False) -> PublicFacts:
        """Return the public facts. The number of images in each class is included only if declared public."""
        sizes = None
        if declare_size:
            labels = torch.zeros(len(self), dtype=torch.int64) if self.labels is None else self.labels
            weights = None if self.persons is None else 1 / torch.bincount(self.persons).double()[self.persons]
            sizes = tuple(torch.bincount(labels, weights, minlength=len(self.classes)).tolist())
        unit: Literal["image", "person"] = "image" if self.persons is None else "person"
        return PublicFacts(self.shape, tuple(self.classes), self.labelled, sizes, unit)

    def subset(self, indices: torch.Tensor | np.ndarray[Any, Any] | Sequence[int]) -> ImageSet:
        """Return the images at `indices` (or where a boolean mask is true), in that order, with the same classes."""
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
        """Create a set from numpy or torch arrays.

        - images: uint8, or floats in [0, 1], of shape [N,H,W], [N,C,H,W] or [N,H,W,C] with C = 1 or 3.
        - labels: integers (indices into `classes`), booleans or strings, of shape [N] or [N,1].
        - classes: class names in order, or their number; required with labels.
        - soft_labels: probabilities of shape [N, classes].
        - persons: integers or strings of shape [N].
        """
        pixels = _as_uint8(_channels_first(_as_tensor(images, "images")))
        soft = None if soft_labels is None else encode_soft_labels(soft_labels)
        units = None if persons is None else encode_persons(persons)
        names = None if classes is None else class_names(classes)
        if labels is None:
            return cls(pixels, None, names or ("all",), soft, units)
        encoded, names = encode_labels(labels, names)
        return cls(pixels, encoded, names, soft, units)


def shared_images(a: ImageSet, b: ImageSet) -> list[int]:
    """Return the indices of images in `b` that are also in `a`, pixel for pixel."""
    if a.shape != b.shape:
        return []
    known = set(image_digests(a))
    return [index for index, digest in enumerate(image_digests(b)) if digest in known]


def image_digests(images: ImageSet) -> Iterator[bytes]:
    """Yield the SHA-256 of the pixels of each image."""
    return (hashlib.sha256(image).digest() for image in np.ascontiguousarray(images.images.numpy()))


def _as_tensor(values: Any, what: str) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu()
    array = np.asarray(values)
    if array.dtype.kind not in "uifb":
        raise DataError(f"{what} are an array of {array.dtype}; expected uint8, or floats in [0, 1]")
    # torch supports neither foreign byte order nor read-only memory.
    array = array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable)
    if (array.dtype.kind == "u" and array.dtype != np.uint8) or array.dtype == np.longdouble:
        raise DataError(f"{what} are an array of {array.dtype}; expected uint8, or floats in [0, 1]")
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
        raise DataError(f"images are {_dtype_name(images.dtype)}; expected uint8 (0..255), or floats in [0, 1]")
    if images.numel() == 0:
        return images.to(torch.uint8)
    if not bool(torch.isfinite(images).all()):
        kind = "NaN" if bool(torch.isnan(images).any()) else "infinite values"
        raise DataError(f"images contain {kind}; every value must be a number in [0, 1]")
    low, high = float(images.min()), float(images.max())
    if low < 0 or high > 1:
        # The message leaves out the values, because it may end up in a shared log.
        side = "below 0" if low < 0 else "above 1"
        raise DataError(f"float images have values {side}; scale them to [0, 1], or pass uint8 (0..255)")
    return (images.double() * 255).round().to(torch.uint8).contiguous()


def _check_images(images: torch.Tensor) -> None:
    if not isinstance(images, torch.Tensor) or images.dtype != torch.uint8:
        kind = _dtype_name(images.dtype) if isinstance(images, torch.Tensor) else type(images).__name__
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
        raise DataError(f"label {int(labels.min())} is negative; labels start at 0 (remove images without a label)")
    if int(labels.max()) >= classes:
        raise DataError(f"label {int(labels.max())} has no class name: only {classes} classes are named")


def _check_soft_labels(soft_labels: torch.Tensor, images: int, classes: int) -> None:
    if not isinstance(soft_labels, torch.Tensor) or soft_labels.dtype != torch.float32:
        raise DataError("soft labels must be a float32 tensor; use ImageSet.from_arrays to convert")
    if soft_labels.shape != (images, classes):
        raise DataError(f"soft labels must have shape [{images}, {classes}], not {list(soft_labels.shape)}")
    # NaN fails this check
    if not bool((soft_labels >= 0).all() and ((soft_labels.sum(1) - 1).abs() < SUM_TOLERANCE).all()):
        raise DataError("soft labels must be probabilities: at least 0, with a sum of 1 for each image")


def _check_persons(persons: torch.Tensor, images: int) -> None:
    if not isinstance(persons, torch.Tensor) or persons.dtype != torch.int64 or persons.ndim != 1:
        raise DataError("persons must be an int64 tensor of shape [N]; use ImageSet.from_arrays to convert")
    if len(persons) != images:
        raise DataError(f"there are {images} images but {len(persons)} persons; give one person per image")
    if int(persons.min()) < 0:
        raise DataError("a person has a negative index; persons start at 0")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
