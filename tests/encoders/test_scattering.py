"""Scattering: Kymatio's numbers, derivatives, and what the transform promises."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import scipy.special
import torch

from sfumato.data import ImageSet
from sfumato.encoders.scattering import Scattering


def kymatio(size: tuple[int, int], scales: int, angles: int) -> Any:
    """The reference. Its import asks SciPy for a function that newer ones lack and that nothing here needs."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(scipy.special, "sph_harm", None, raising=False)
        from kymatio.torch import Scattering2D

        return Scattering2D(J=scales, shape=size, L=angles)


@pytest.mark.parametrize(
    ("size", "scales", "angles"),
    [((28, 28), 2, 8), ((32, 24), 2, 8), ((30, 45), 2, 8), ((64, 64), 3, 8), ((32, 32), 2, 6), ((28, 28), 1, 8)],
)
def test_equals_kymatio(size: tuple[int, int], scales: int, angles: int) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(3, 2, *size, generator=generator) * 2 - 1
    ours, theirs = images.clone().requires_grad_(True), images.clone().requires_grad_(True)
    made, expected = Scattering(size, scales, angles)(ours), kymatio(size, scales, angles)(theirs)
    assert made.shape == expected.shape
    assert torch.allclose(made, expected, rtol=0, atol=1e-4)
    weights = torch.randn(made.shape, generator=generator)
    (one,) = torch.autograd.grad(made, ours, weights)
    (other,) = torch.autograd.grad(expected, theirs, weights)
    assert torch.allclose(one, other, rtol=0, atol=1e-4 * float(other.abs().max()) + 1e-4)


@pytest.mark.parametrize("size", [(28, 28), (32, 24)])
def test_filters_as_matrices_are_the_same_transform(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """That is how a GPU computes it."""
    images = (torch.rand(3, 2, *size, generator=torch.Generator().manual_seed(0)) * 2 - 1).requires_grad_(True)
    transform = Scattering(size)
    expected = transform(images)
    monkeypatch.setattr(transform, "_by_matrix", lambda _: True)
    made = transform(images)
    assert torch.allclose(made, expected, rtol=0, atol=1e-6)
    one, other = (torch.autograd.grad(values.square().sum(), images)[0] for values in (made, expected))
    assert torch.allclose(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))
    black = torch.zeros_like(images, requires_grad=True)
    (at_black,) = torch.autograd.grad(transform(black).sum(), black)
    assert at_black.isfinite().all()


def test_rows_are_their_images_alone(few_digits: ImageSet) -> None:
    images = few_digits.images.float() / 127.5 - 1
    transform = Scattering((8, 8))
    assert torch.allclose(transform(images)[5:6], transform(images[5:6]), atol=1e-6)


def test_it_contracts_distances_and_moves_little_when_images_are_shifted() -> None:
    images = torch.rand(40, 1, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    transform = Scattering((32, 32))
    made = transform(images).flatten(1)
    distances = (made[:20] - made[20:]).norm(dim=1) * 4  # a coefficient stands for 4 × 4 pixels
    assert (distances <= (images[:20] - images[20:]).flatten(1).norm(dim=1)).all()
    shifted = images.roll(1, 3)
    relative = (transform(shifted).flatten(1) - made).norm(dim=1) / made.norm(dim=1)
    pixels = (shifted - images).flatten(1).norm(dim=1) / images.flatten(1).norm(dim=1)
    assert (relative < 0.5 * pixels).all()


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"for images of \(28, 28\)"):
        Scattering((28, 28))(torch.zeros(1, 1, 32, 32))
    with pytest.raises(ValueError, match="at least 4 pixels"):
        Scattering((3, 28))
