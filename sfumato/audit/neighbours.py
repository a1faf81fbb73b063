"""Pairs of neighbouring data sets, made of public images, that are hard to hide from an attacker.

The auditor owns both sets. No private image is needed to audit a method: a guarantee must hold for all data sets, so
one pair that violates it is enough. Canaries that are added to somebody's own images are in `black_box`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sfumato.data import ImageSet, load_images

GREY = 128


@dataclass(frozen=True)
class Neighbours:
    """A data set with one unit more than the other.

    - with_unit, without: the two sets.
    - place: index of the unit among the units of `with_unit`.
    - origin: index in `with_unit` of each record of `without`.
    - worst_case: whether white-box audits lengthen the features and gradients of the unit to more than the clipping
      norm (`worst_case_rows.py`).
    """

    with_unit: ImageSet
    without: ImageSet
    place: int
    origin: torch.Tensor
    worst_case: bool = False

    @property
    def canaries(self) -> ImageSet:
        """The images of the differing unit."""
        kept = torch.zeros(len(self.with_unit), dtype=torch.bool)
        kept[self.origin] = True
        return self.with_unit.subset(~kept)


def digits_of(*counts: int) -> ImageSet:
    """Return the first images of the classes 0, 1, … of scikit-learn's digits, this many of each."""
    digits = load_images("digits")
    assert digits.labels is not None
    index = torch.cat([(digits.labels == c).nonzero()[:n, 0] for c, n in enumerate(counts)])
    return ImageSet(digits.images[index], digits.labels[index], digits.classes[: len(counts)])


def small_set(*, persons: bool = False) -> ImageSet:
    """Return 22 digits of four classes; the last is the only one of its class, as `check_synthesizer` needs it.

    - persons: whether the images belong to seven persons, the last with one image; default False.
    """
    digits = digits_of(7, 7, 7, 1)
    if not persons:
        return digits
    owners = torch.arange(len(digits)) % 6
    owners[-1] = 6
    return ImageSet(digits.images, digits.labels, digits.classes, persons=owners)


def neighbours(kind: str) -> Neighbours:
    """Return a pair of data sets: a kind in `KINDS`."""
    if kind not in KINDS:
        raise ValueError(f"there are no neighbours {kind!r}; there are {', '.join(KINDS)}")
    return KINDS[kind]()


def worst_case() -> Neighbours:
    """Return the outlier pair, with features and gradients of the clipping norm."""
    return replace(outlier(), worst_case=True)


def outlier() -> Neighbours:
    """Return a pair with an image of largest contrast, alone in its class, against constant images."""
    labels = torch.arange(8) % 4
    grey = torch.full((8, 1, 8, 8), GREY, dtype=torch.uint8)
    return _added(ImageSet(grey, labels, ("0", "1", "2", "3", "4")), contrast((1, 8, 8)), 4)


def mislabelled() -> Neighbours:
    """Return a pair with an image that has the label of another class."""
    digits = small_set()
    return _added(digits.subset(range(1, len(digits))), digits.images[0], 1)


def duplicate() -> Neighbours:
    """Return a pair with a second copy of an image."""
    digits = small_set()
    assert digits.labels is not None
    return _added(digits, digits.images[0], int(digits.labels[0]))


def person() -> Neighbours:
    """Return a pair with a person of five equal outliers, against persons with five ordinary images each."""
    digits = digits_of(10, 10)
    assert digits.labels is not None
    persons, pixels = torch.arange(len(digits)) % 4, digits.images.clone()
    pixels[persons == 0] = contrast(digits.shape)
    labels = torch.where(persons == 0, 2, digits.labels)
    whole = ImageSet(pixels, labels, (*digits.classes, "2"), persons=persons)
    others = (persons != 0).nonzero()[:, 0]
    return Neighbours(whole, whole.subset(others), 0, others)


def contrast(shape: tuple[int, int, int]) -> torch.Tensor:
    """Return an image that is half white and half black, uint8: extreme, and easy to learn."""
    image = torch.zeros(shape, dtype=torch.uint8)
    image[:, :, : shape[2] // 2] = 255
    return image


def _added(base: ImageSet, image: torch.Tensor, label: int) -> Neighbours:
    """Return the pair in which this image is added at the end."""
    assert base.labels is not None
    images, labels = torch.cat([base.images, image[None]]), torch.cat([base.labels, torch.tensor([label])])
    return Neighbours(ImageSet(images, labels, base.classes), base, len(base), torch.arange(len(base)))


KINDS = {
    "worst-case": worst_case,
    "outlier": outlier,
    "mislabelled": mislabelled,
    "duplicate": duplicate,
    "person": person,
}
