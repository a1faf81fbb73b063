"""Noise: its scale, its independence of seeds and forks, and the exactness of the secure form.

Each variance test rejects correct noise with probability 1e-9.
"""

from __future__ import annotations

import math
import os
import random

import numpy as np
import pytest
import torch
from scipy import stats

from sfumato.privacy import mechanisms, randomness
from sfumato.privacy.mechanisms import add_discrete_gaussian, add_gaussian
from sfumato.privacy.sampling import poisson_sample
from sfumato.testing import UnsoundError, check_unit_variance


def fast(scale: float, count: int = 5000) -> torch.Tensor:
    return add_gaussian(torch.zeros(count, dtype=torch.float64), scale)


def secure(scale: float, count: int = 5000) -> torch.Tensor:
    return add_discrete_gaussian(torch.zeros(count, dtype=torch.int64), scale).double()


@pytest.mark.parametrize("draw", [fast, secure])
@pytest.mark.parametrize("scale", [5.0, 70_000.0])
def test_the_scale_is_correct_and_other_scales_are_rejected(draw: object, scale: float) -> None:
    noise = draw(scale)  # type: ignore[operator]
    true = math.sqrt(scale**2 + mechanisms.SMOOTHING**2) if draw is secure else scale
    check_unit_variance(noise / true)
    for wrong in (2 / 3, 3 / 2):
        with pytest.raises(UnsoundError):
            check_unit_variance(noise / (true * wrong))
    assert abs(float(noise.mean())) < 6.2 * true / math.sqrt(len(noise))


@pytest.mark.parametrize("draw", [fast, secure])
def test_the_distribution_is_gaussian(draw: object) -> None:
    noise = draw(1000.0, 20_000) / 1000  # type: ignore[operator]
    assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-9
    assert stats.kstest(stats.laplace.rvs(scale=1 / math.sqrt(2), size=20_000, random_state=0), "norm").pvalue < 1e-9


def test_discrete_noise_follows_its_formula() -> None:
    """At a small scale, frequencies of single integers match exp(-k^2 / 2 sigma^2)."""
    noise = secure(1.0, 20_000)
    k = np.arange(-12, 13)
    weights = np.exp(-(k**2) / 2 / (1 + mechanisms.SMOOTHING**2))
    expected = 20_000 * weights / weights.sum()
    seen = np.array([(noise == value).sum().item() for value in k])
    assert seen.sum() >= 19_990
    assert ((seen - expected) ** 2 / expected).sum() < stats.chi2.isf(1e-9, len(k))


def test_discrete_is_a_rounded_continuous_gaussian() -> None:
    """Check both facts of proof 3 numerically: rho_3(Z - y) is constant in y, and the convolution is Gaussian."""
    k = np.arange(-200, 201)[:, None]
    y = np.linspace(0, 1, 41)[None]
    sums = np.exp(-((k - y) ** 2) / 2 / 9).sum(0)
    assert sums.max() / sums.min() - 1 < 1e-14
    t = 4.0
    grid = np.linspace(-80, 80, 64_001)
    output = (
        np.exp(-(grid**2) / 2 / t**2)[None] * np.exp(-((np.arange(-20, 21)[:, None] - grid[None]) ** 2) / 18)
    ).sum(1)
    discrete = np.exp(-(np.arange(-20, 21) ** 2) / 2 / (t**2 + 9))
    np.testing.assert_allclose(output / output.sum(), discrete / discrete.sum(), rtol=1e-6)


@pytest.mark.parametrize("draw", [fast, secure, lambda scale: poisson_sample(5000, 0.5)])
def test_no_seed_repeats_a_draw(draw: object) -> None:
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        draws.append(draw(100.0))  # type: ignore[operator]
    assert len(draws[0]) != len(draws[1]) or not torch.equal(draws[0], draws[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("draw", [fast, lambda scale: poisson_sample(5000, 0.5)])
def test_a_forked_process_draws_other_numbers(draw: object) -> None:
    fast(1.0)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, draw(1.0)[:20].double().numpy().tobytes())  # type: ignore[operator]
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 160) != draw(1.0)[:20].double().numpy().tobytes()  # type: ignore[operator]
    os.close(read)
    os.close(write)


def test_drawing_noise_does_not_change_global_generators() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    fast(1.0)
    secure(1.0)
    poisson_sample(100, 0.5)
    assert torch.equal(before, torch.get_rng_state())


def test_keys_have_128_bits_of_os_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(randomness.secrets, "randbits", lambda bits: asked.append(bits) or 1)
    randomness.host_generator()
    assert asked == [128]
    with pytest.raises(ValueError, match="host_generator"):
        randomness.device_generator(torch.device("cpu"))


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
def test_invalid_scales_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="noise scale"):
        fast(scale)
    with pytest.raises(ValueError, match="noise scale"):
        secure(scale)
    with pytest.raises(TypeError, match="int64"):
        add_discrete_gaussian(torch.zeros(3), 1.0)


def test_a_failing_sampler_releases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(sigma: float, size: int) -> list[int]:
        raise RuntimeError("no entropy")

    monkeypatch.setattr(mechanisms, "_exact_samples", broken)
    with pytest.raises(RuntimeError, match="no entropy"):
        secure(1.0)


def test_poisson_samples() -> None:
    """Sample sizes are binomial and inclusions independent, by the variances of sizes and of each record's count."""
    sizes = torch.tensor([len(poisson_sample(1000, 0.1)) for _ in range(400)], dtype=torch.float64)
    check_unit_variance((sizes - 100) / math.sqrt(90))  # a shuffled batch of fixed size would have variance 0
    counts = torch.zeros(1000)
    for _ in range(400):
        counts[poisson_sample(1000, 0.1)] += 1
    check_unit_variance((counts.double() - 40) / 6)
    assert torch.equal(poisson_sample(5, 1.0), torch.arange(5))
    assert len(poisson_sample(0, 0.5)) == 0
    for bad in (0.0, -0.1, 1.1):
        with pytest.raises(ValueError, match="sampling probability"):
            poisson_sample(10, bad)
