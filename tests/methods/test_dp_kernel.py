"""DP-kernel: the published training leaks, the sound forms do not; each learns; forms agree on what they follow."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sfumato.data import ImageSet, load_images
from sfumato.evaluate import downstream_accuracy
from sfumato.functional import Frequencies, Gaussian, Part, Points
from sfumato.methods.check import check_synthesizer
from sfumato.methods.dp_kernel import KernelGenerator, Vectors, published_loss, smooth_images

QUICK: dict[str, Any] = {
    "steps": 2,
    "paths": 2,
    "features": 20,
    "batch_size": 40,
    "width": 8,
    "device": "cpu",
    "sampling_prob": 0.5,
}


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.flatten().double(), other.flatten().double(), dim=0))


def test_the_published_gradient_is_the_unnoised_one_at_every_noise_level(few_digits: ImageSet) -> None:
    assert few_digits.labels is not None
    real, labels = few_digits.images[:30].float() / 127.5 - 1, few_digits.labels[:30]
    fake = smooth_images(30, few_digits.shape, torch.Generator().manual_seed(0)).requires_grad_(True)
    gradients = []
    for noise in (0.0, 1.0, 1000.0):
        loss = published_loss(real, labels, fake, labels, noise, torch.Generator().manual_seed(1))
        gradients.append(torch.autograd.grad(loss, fake)[0])
    assert abs(cosine(gradients[0], gradients[1])) > 0.9999
    assert abs(cosine(gradients[0], gradients[2])) > 0.9999


def test_the_sound_gradient_drowns_in_its_noise(few_digits: ImageSet) -> None:
    """The same comparison for a path, and for exact derivatives: noise turns the direction."""
    generator = torch.Generator().manual_seed(0)
    real = few_digits.images[:30].flatten(1).double() / 127.5 - 1
    points = smooth_images(6, few_digits.shape, generator).flatten(1).double().requires_grad_(True)
    kernel = Gaussian((8.0,))
    features = Frequencies([Part(lambda x: x, kernel)], 3000, points.float(), generator)
    sums = features(real.float()).sum(0)
    exact = Points(kernel, points)
    for noise, least, most in ((0.0, 0.999, 1.0), (1e4, -0.5, 0.5)):
        noisy = sums + noise * torch.randn(sums.shape, generator=generator)
        (path,) = torch.autograd.grad((features(points.float()) @ noisy).sum(), points)
        rows = exact.rows(real).sum(0)
        _, slopes = exact.coloured(rows + noise * torch.randn(rows.shape, generator=generator, dtype=torch.float64))
        places = points.detach().clone().requires_grad_(True)
        squares = (real[:, None] - places).square().sum(2)
        (true,) = torch.autograd.grad(torch.exp(-squares / 128).sum(), places)
        assert least - 0.06 <= cosine(path, true) <= most
        assert least <= cosine(slopes, true) <= most + 1e-9


@pytest.mark.parametrize("form", ["gp", "nystrom"])
def test_the_other_forms_are_sound(form: str, few_digits: ImageSet) -> None:
    check_synthesizer(lambda **params: KernelGenerator(form=form, **{**QUICK, **params}), few_digits)


def test_the_published_form_says_that_it_promises_nothing(few_digits: ImageSet) -> None:
    model = KernelGenerator(form="published", **QUICK).fit(few_digits)
    assert model.certificate_.guarantee == "none"
    assert model.certificate_.epsilon is None
    assert model.certificate_.claimed is not None
    assert "never reaches the gradient" in model.certificate_.claimed["why"]
    assert model.plan(few_digits.public()).epsilon == math.inf  # no releases to account for is not an epsilon of 0
    assert KernelGenerator(**QUICK).fit(few_digits).certificate_.claimed is None


def test_vectors_have_norm_one_or_less(digits: ImageSet) -> None:
    images = torch.nn.functional.interpolate(digits.images[:50].float() / 127.5 - 1, (28, 28))
    vectors = Vectors((1, 28, 28))
    rows = vectors(images)
    assert rows.shape == (50, 81 * 49 + 784)
    assert vectors.scattering(rows).norm(dim=1).max() <= 1 + 1e-6
    assert vectors.scattering(rows).norm(dim=1).min() > 0.7
    assert vectors.pixels(rows).norm(dim=1).max() <= 1 + 1e-6
    assert Vectors((3, 32, 24))(torch.zeros(1, 3, 32, 24)).shape == (1, 243 * 48 + 3 * 32 * 24)


def test_forms_are_named() -> None:
    with pytest.raises(ValueError, match="form must be one of pathwise, gp, nystrom, published"):
        KernelGenerator(form="exact").validate()


def test_it_learns_digits(digits: ImageSet) -> None:
    model = KernelGenerator(
        epsilon=200.0, steps=80, features=200, batch_size=100, sampling_prob=0.2, learning_rate=5e-3, device="cpu"
    ).fit(digits)
    accuracy = downstream_accuracy(model.sample(2000), load_images("digits", split="test"))
    assert accuracy.mean > 30  # far more as a rule; eighty steps are not many
