"""Scattering transform: agreement with Kymatio, gradients, contraction, stability under shifts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import scipy.special
import torch

from sfumato.data import ImageSet
from sfumato.features.scattering import Scattering


def kymatio(size: tuple[int, int], scales: int, angles: int) -> Any:
    """Return the reference. Its import needs a function that recent SciPy lacks; the patch supplies a placeholder."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(scipy.special, "sph_harm", None, raising=False)
        from kymatio.torch import Scattering2D

        return Scattering2D(J=scales, shape=size, L=angles)


@pytest.mark.parametrize(
    ("size", "scales", "angles"),
    [((28, 28), 2, 8), ((32, 24), 2, 8), ((30, 45), 2, 8), ((64, 64), 3, 8), ((32, 32), 2, 6), ((28, 28), 1, 8)],
)
def test_coefficients_and_gradients_equal_kymatio(size: tuple[int, int], scales: int, angles: int) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(3, 2, *size, generator=generator) * 2 - 1
    ours, theirs = images.clone().requires_grad_(True), images.clone().requires_grad_(True)
    coefficients, expected = Scattering(size, scales, angles)(ours), kymatio(size, scales, angles)(theirs)
    assert coefficients.shape == expected.shape
    assert torch.allclose(coefficients, expected, rtol=0, atol=1e-4)
    weights = torch.randn(coefficients.shape, generator=generator)
    (gradient,) = torch.autograd.grad(coefficients, ours, weights)
    (reference,) = torch.autograd.grad(expected, theirs, weights)
    assert torch.allclose(gradient, reference, rtol=0, atol=1e-4 * float(reference.abs().max()) + 1e-4)


@pytest.mark.parametrize("size", [(28, 28), (32, 24)])
def test_dense_filters_equal_fourier_filters(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense filters are used on a GPU."""
    images = (torch.rand(3, 2, *size, generator=torch.Generator().manual_seed(0)) * 2 - 1).requires_grad_(True)
    transform = Scattering(size)
    expected = transform(images)
    monkeypatch.setattr(transform, "_by_matrix", lambda _: True)
    dense = transform(images)
    assert torch.allclose(dense, expected, rtol=0, atol=1e-6)
    gradient, reference = (torch.autograd.grad(values.square().sum(), images)[0] for values in (dense, expected))
    assert torch.allclose(gradient, reference, rtol=0, atol=1e-5 * float(reference.abs().max()))
    black = torch.zeros_like(images, requires_grad=True)
    (at_black,) = torch.autograd.grad(transform(black).sum(), black)
    assert at_black.isfinite().all()


def test_rows_are_independent(few_digits: ImageSet) -> None:
    images = few_digits.images.float() / 127.5 - 1
    transform = Scattering((8, 8))
    assert torch.allclose(transform(images)[5:6], transform(images[5:6]), atol=1e-6)


def test_contraction_and_stability_under_shifts() -> None:
    images = torch.rand(40, 1, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    transform = Scattering((32, 32))
    coefficients = transform(images).flatten(1)
    distances = (coefficients[:20] - coefficients[20:]).norm(dim=1) * 4  # one coefficient per 4 × 4 pixels
    assert (distances <= (images[:20] - images[20:]).flatten(1).norm(dim=1)).all()
    shifted = images.roll(1, 3)
    change = (transform(shifted).flatten(1) - coefficients).norm(dim=1)
    relative = change / coefficients.norm(dim=1)
    pixels = (shifted - images).flatten(1).norm(dim=1) / images.flatten(1).norm(dim=1)
    assert (relative < 0.5 * pixels).all()


def test_invalid_sizes_raise_errors() -> None:
    with pytest.raises(ValueError, match=r"for images of size \(28, 28\)"):
        Scattering((28, 28))(torch.zeros(1, 1, 32, 32))
    with pytest.raises(ValueError, match="at least 4 pixels"):
        Scattering((3, 28))
