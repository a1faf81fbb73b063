"""Why condensation is not private for free: matching does not make what Eq. 8 says, and Eq. 8 gives members away."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.free_privacy_claim import basis_of, linear_construction, matching_losses, outside_span
from benchmarks.two_sample import bai_saranadasa
from sfumato.data import ImageSet
from sfumato.methods.base import Synthesizer
from sfumato.methods.dm import initial_noise
from sfumato.testing import build

QUICK: dict[str, Any] = {"images_per_class": 10, "batch_size": 32, "width": 32, "device": "cpu"}


@pytest.fixture(scope="module")
def fitted(digits: ImageSet) -> Synthesizer:
    return build("dm", iterations=150, **QUICK).fit(digits)


@pytest.fixture(scope="module")
def noise(digits: ImageSet) -> torch.Tensor:
    """What `fitted` started from."""
    return initial_noise(digits.public(), 10, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def linear(digits: ImageSet, noise: torch.Tensor) -> torch.Tensor:
    """Eq. 8 from the same noise."""
    pairs = zip(noise.split(10), by_class(digits), strict=True)
    return torch.cat([linear_construction(*pair) for pair in pairs])


def by_class(images: ImageSet) -> list[torch.Tensor]:
    pixels = images.images.float() / 127.5 - 1
    return [pixels[images.labels == label] for label in range(len(images.classes))]


def losses(digits: ImageSet, **sets: torch.Tensor) -> dict[str, list[float]]:
    found = matching_losses(sets, digits, networks=5, seed=1, device=torch.device("cpu"), batch_size=64, width=32)
    assert isinstance(found, dict)
    return found


def test_matching_lowers_the_loss(digits: ImageSet, fitted: Any, noise: torch.Tensor) -> None:
    found = losses(digits, noise=noise, dm=fitted.images_)
    assert max(found["dm"]) < min(found["noise"]) / 20


def test_the_basis_spans_the_class_and_no_more(digits: ImageSet) -> None:
    """Thirty images in 64 dimensions: who is a member can be read off Q."""
    members, others = by_class(digits)[3][:30], by_class(digits)[3][30:]
    basis = basis_of(members.flatten(1))
    assert basis.shape == (64, 64)
    assert torch.allclose(basis.T @ basis, torch.eye(64, dtype=torch.float64), atol=1e-9)
    assert outside_span(basis, 30, members).max() < 1e-9
    assert outside_span(basis, 30, others).min() > 1e-3


def test_known_noise_gives_the_basis_away(digits: ImageSet) -> None:
    """As many images as pixels, and the seed that they came from: Q follows, and with it the members."""
    members, others = by_class(digits)[3][:30], by_class(digits)[3][30:]
    noise = torch.randn(65, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made = linear_construction(noise, members)
    known, seen = noise.flatten(1), made.flatten(1)
    found = torch.linalg.solve(known[1:] - known[0], seen[1:] - seen[0]).T  # the mean cancels
    assert outside_span(found, 30, members).max() < 1e-6
    assert outside_span(found, 30, others).min() > 1e-3


def test_eq_8_is_not_what_matching_makes(digits: ImageSet, fitted: Any, linear: torch.Tensor) -> None:
    """Its loss is far higher, also when cut to black and white, so it is no minimum of Eq. 3."""
    found = losses(digits, linear=linear, cut=linear.clamp(-1, 1), dm=fitted.images_)
    assert max(found["dm"]) < min(found["linear"]) / 5
    assert max(found["dm"]) < min(found["cut"]) / 5


def test_eq_8_is_another_distribution(digits: ImageSet, fitted: Any, linear: torch.Tensor) -> None:
    """Spreads differ in every class. Means need not: on digits they do not (docs/privacy-for-free.md)."""
    parts = zip(linear.split(10), fitted.images_.split(10), by_class(digits), strict=True)
    spreads = [[(some - real.mean(0)).square() for some in (one, other)] for one, other, real in parts]
    assert max(bai_saranadasa(*pair)[1] for pair in spreads) < 1e-6


def test_the_comparison_finds_another_mean(linear: torch.Tensor) -> None:
    """Images of a wrong class: the test has the power to see it."""
    assert bai_saranadasa(linear[:10], linear[10:20])[1] < 1e-4
