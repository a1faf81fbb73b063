"""Samplers on known distributions: invariance, reversibility, order of the errors, convergence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from sfumato.nets.samplers import (
    MOMENTA,
    SAMPLERS,
    Target,
    annealed_sampling,
    draw_momenta,
    hamiltonian_monte_carlo,
    leapfrog,
    noise_levels,
    probability_flow_step,
    unadjusted_langevin,
)

POINTS = 20_000
MAX_ERRORS = 5.0  # standard errors: a correct sampler fails with probability below one in a million


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(scales: torch.Tensor, energies: bool = True) -> Target:
    """Return the target of independent normal coordinates."""
    return lambda x: (-x / scales**2, (x / scales).square().sum(1) / 2 if energies else None)


def mixture(noise: float = 0.0) -> Target:
    """Return the target 0.3 N(-2, 0.5²) + 0.7 N(1, 1) in each coordinate, with added noise."""
    weights, means = torch.tensor([0.3, 0.7]), torch.tensor([-2.0, 1.0])
    scales = (torch.tensor([0.5, 1.0]).square() + noise**2).sqrt()

    def target(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = weights.log() - scales.log() - ((x[..., None] - means) / scales).square() / 2
        posterior = logits.softmax(-1)
        return (posterior * (means - x[..., None]) / scales**2).sum(-1), -logits.logsumexp(-1).sum(1)

    return target


def mixture_points(count: int, seed: int) -> torch.Tensor:
    first = torch.rand(count, 2, generator=seeded(seed)) < 0.3
    normal = torch.randn(count, 2, generator=seeded(seed + 1))
    return torch.where(first, -2 + 0.5 * normal, 1 + normal)


def standard_errors(x: torch.Tensor, y: torch.Tensor, power: int) -> float:
    """Return the largest difference of the moments of two samples, in standard errors."""
    a, b = x**power, y**power
    error = ((a.var(0) + b.var(0)) / len(x)).sqrt()
    return float(((a.mean(0) - b.mean(0)).abs() / error).max())


@pytest.mark.parametrize("energies", [True, False])
def test_gaussian_is_invariant(energies: bool) -> None:
    """The steps are so large that the Metropolis test matters; for a quadratic energy scores are sufficient."""
    scales = torch.tensor([1.0, 2.0, 0.8])
    target, generator = gaussian(scales, energies), seeded()
    x = start = scales * torch.randn(POINTS, 3, generator=generator)
    for _ in range(8):
        x, accepted = hamiltonian_monte_carlo(target, x, 1.1, 3, generator)
    assert 0.3 < accepted.float().mean() < 0.95
    variance = x.square().mean(0) / scales**2
    assert (variance - 1).abs().max() < MAX_ERRORS * math.sqrt(2 / POINTS)
    assert abs(float((x**4).mean(0)[0]) - 3) < MAX_ERRORS * math.sqrt(96 / POINTS)
    unadjusted = start
    for _ in range(8):
        unadjusted, _, _ = leapfrog(target, unadjusted, draw_momenta(unadjusted, "gaussian", generator), 1.1, 3)
    assert (unadjusted.square().mean(0) / scales**2 - 1).abs().max() > 2 * MAX_ERRORS * math.sqrt(2 / POINTS)


def test_mixture_is_invariant() -> None:
    generator, x = seeded(3), mixture_points(POINTS, 10)
    other = mixture_points(POINTS, 20)
    for _ in range(8):
        x, accepted = hamiltonian_monte_carlo(mixture(), x, 0.7, 4, generator)
    assert 0.3 < accepted.float().mean() < 0.99
    assert max(standard_errors(x, other, power) for power in (1, 2, 3, 4)) < MAX_ERRORS


def test_acceptance_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trajectory is accepted with probability min(1, exp(-change of energy)), with the energy of the target."""
    target, x = mixture(), mixture_points(1000, 5)
    p = draw_momenta(x, "gaussian", seeded(1))
    proposal, q, change = leapfrog(target, x, p, 0.9, 3)
    before, after = (energy(target, at) + m.square().sum(1) / 2 for at, m in ((x, p), (proposal, q)))
    assert torch.allclose(change, after - before, atol=1e-4)
    monkeypatch.setattr("sfumato.nets.samplers.draw_momenta", lambda *_: p)
    runs = [hamiltonian_monte_carlo(target, x, 0.9, 3, seeded(seed))[1] for seed in range(200)]
    rate, probability = torch.stack(runs).float().mean(0), (-change).exp().clamp(max=1)
    assert (rate[probability == 1] == 1).all()
    error = (probability * (1 - probability) / 200).sum().sqrt()
    assert abs(float((rate - probability).sum())) < MAX_ERRORS * float(error)


def energy(target: Target, x: torch.Tensor) -> torch.Tensor:
    energies = target(x)[1]
    assert energies is not None
    return energies


def test_leapfrog_is_reversible() -> None:
    x = mixture_points(500, 7).double()
    p = torch.randn(500, 2, generator=seeded(), dtype=torch.float64)
    end, momentum, change = leapfrog(mixture(), x, p, 0.3, 10)
    start, reversed_momentum, reverse_change = leapfrog(mixture(), end, -momentum, 0.3, 10)
    assert (end - x).abs().mean() > 0.5
    assert torch.allclose(start, x, atol=1e-5)
    assert torch.allclose(-reversed_momentum, p, atol=1e-5)
    assert torch.allclose(change, -reverse_change, atol=1e-5)


def test_energy_error_is_of_second_order() -> None:
    x, p = mixture_points(500, 7).double(), torch.randn(500, 2, generator=seeded(), dtype=torch.float64)
    errors = [float(leapfrog(mixture(), x, p, 1.0 / n, n)[2].abs().mean()) for n in (10, 20, 40)]
    assert errors[0] < 0.02
    assert all(3.5 < large / small < 4.5 for large, small in itertools.pairwise(errors))


def test_energy_change_from_scores_equals_the_trapezoidal_rule() -> None:
    target, x = mixture(), mixture_points(200, 9).double()
    p = torch.randn(200, 2, generator=seeded(), dtype=torch.float64)
    scores_only: Target = lambda x: (target(x)[0], None)  # noqa: E731
    potential, point, q = torch.zeros(200, dtype=torch.float64), x, p
    for _ in range(6):
        following, r, _ = leapfrog(scores_only, point, q, 0.2, 1)
        potential -= ((target(point)[0] + target(following)[0]) / 2 * (following - point)).sum(1)
        point, q = following, r
    direct = potential + (q.square() - p.square()).sum(1) / 2
    assert torch.allclose(leapfrog(scores_only, x, p, 0.2, 6)[2], direct, atol=1e-9)


def test_only_gaussian_momenta_leave_the_target_invariant() -> None:
    for kind in MOMENTA:
        p = draw_momenta(torch.zeros(POINTS, 4), kind, seeded())
        assert abs(float(p.mean())) < 0.02
        assert abs(float(p.var()) - 1) < 0.03
    fourth = {}
    for kind in MOMENTA:
        generator = seeded(1)
        x = torch.randn(POINTS, 2, generator=generator)
        for _ in range(3):
            x, _ = hamiltonian_monte_carlo(gaussian(torch.ones(2)), x, 0.3, 5, generator, kind)
        fourth[kind] = abs(float((x**4).mean()) - 3) / math.sqrt(96 / (2 * POINTS))
    assert fourth["gaussian"] < MAX_ERRORS < fourth["uniform"]


def test_langevin_bias_depends_on_the_step() -> None:
    variances = []
    for step, steps in ((0.2, 60), (1.2, 20)):
        generator = seeded(2)
        x = torch.randn(POINTS, 1, generator=generator)
        variances.append(float(unadjusted_langevin(gaussian(torch.ones(1)), x, step, steps, generator).var()))
    assert abs(variances[0] - 1) < 0.04
    assert variances[1] > 1.3  # 1 / (1 - step^2 / 4)


def test_noise_levels_follow_the_paper() -> None:
    assert noise_levels(20, 0.05, 20.0) == pytest.approx([0.05 * (20 / m) ** 2 for m in range(1, 21)])
    for count in (2, 7, 50):
        levels = noise_levels(count, 0.1, 30.0)
        assert (levels[0], levels[-1]) == (pytest.approx(30.0), pytest.approx(0.1))
        assert levels == sorted(levels, reverse=True)
    assert noise_levels(1, 0.1, 30.0) == [30.0]


def test_probability_flow_of_a_gaussian() -> None:
    """The exact x is proportional to the standard deviation. Errors: Euler first order, Heun second order."""
    target_at: Callable[[float], Target] = lambda level: gaussian(torch.full((1,), math.hypot(0.5, level)), False)  # noqa: E731
    errors = {}
    for second in (False, True):
        for count in (20, 40):
            x, levels = torch.ones(1, 1).double(), [*noise_levels(count, 0.05, 5.0)]
            for level, lower in itertools.pairwise(levels):
                x = probability_flow_step(target_at, x, level, lower, second_order=second)
            errors[second, count] = abs(float(x) - math.hypot(0.5, 0.05) / math.hypot(0.5, 5.0))
    assert 1.6 < errors[False, 20] / errors[False, 40] < 2.6
    assert 3.0 < errors[True, 20] / errors[True, 40] < 6.0


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_converge_from_noise_to_the_target(sampler: str) -> None:
    generator = seeded(4)
    levels = noise_levels(60, 0.02, 30.0)
    x = levels[0] * torch.randn(POINTS, 2, generator=generator)
    samples, acceptance = annealed_sampling(mixture, x, levels, generator, sampler=sampler, step_size=1.0, steps=5)
    expected = mixture_points(POINTS, 30)
    assert 0.5 < acceptance <= 1
    assert (samples.mean(0) - expected.mean(0)).abs().max() < 0.1
    assert (samples.std(0) / expected.std(0) - 1).abs().max() < 0.06
    assert ((samples < -0.8).float().mean(0) - (expected < -0.8).float().mean(0)).abs().max() < 0.03
