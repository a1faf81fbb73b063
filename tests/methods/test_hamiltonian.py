"""Samplers against laws that are known: what should leave a law as it is does, and what should not does not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from sfumato.methods.hamiltonian import (
    MOMENTA,
    SAMPLERS,
    Target,
    annealed,
    flow,
    hamiltonian,
    langevin,
    leapfrog,
    momenta,
    noise_levels,
)

POINTS = 20_000
ERRORS = 5.0  # standard errors: a sound sampler fails one comparison in a million


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(scales: torch.Tensor, energies: bool = True) -> Target:
    """Independent normal coordinates."""
    return lambda x: (-x / scales**2, (x / scales).square().sum(1) / 2 if energies else None)


def mixture(noise: float = 0.0) -> Target:
    """0.3 N(-2, 0.5^2) + 0.7 N(1, 1) in each of the coordinates, with noise on top."""
    weights, means = torch.tensor([0.3, 0.7]), torch.tensor([-2.0, 1.0])
    scales = (torch.tensor([0.5, 1.0]).square() + noise**2).sqrt()

    def target(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = weights.log() - scales.log() - ((x[..., None] - means) / scales).square() / 2
        share = parts.softmax(-1)
        return (share * (means - x[..., None]) / scales**2).sum(-1), -parts.logsumexp(-1).sum(1)

    return target


def mixture_points(count: int, seed: int) -> torch.Tensor:
    first = torch.rand(count, 2, generator=seeded(seed)) < 0.3
    normal = torch.randn(count, 2, generator=seeded(seed + 1))
    return torch.where(first, -2 + 0.5 * normal, 1 + normal)


def off(one: torch.Tensor, other: torch.Tensor, power: int) -> float:
    """By how many standard errors the moments of two samples differ, at the most."""
    a, b = one**power, other**power
    error = ((a.var(0) + b.var(0)) / len(one)).sqrt()
    return float(((a.mean(0) - b.mean(0)).abs() / error).max())


@pytest.mark.parametrize("energies", [True, False])
def test_a_gaussian_is_left_as_it_is(energies: bool) -> None:
    """With steps so large that without the test it would not be; scores alone do for a quadratic energy."""
    scales = torch.tensor([1.0, 2.0, 0.8])
    target, generator = gaussian(scales, energies), seeded()
    x = start = scales * torch.randn(POINTS, 3, generator=generator)
    for _ in range(8):
        x, accepted = hamiltonian(target, x, 1.1, 3, generator)
    assert 0.3 < accepted.float().mean() < 0.95
    variance = x.square().mean(0) / scales**2
    assert (variance - 1).abs().max() < ERRORS * math.sqrt(2 / POINTS)
    assert abs(float((x**4).mean(0)[0]) - 3) < ERRORS * math.sqrt(96 / POINTS)
    untested = start
    for _ in range(8):
        untested, _, _ = leapfrog(target, untested, momenta(untested, "gaussian", generator), 1.1, 3)
    assert (untested.square().mean(0) / scales**2 - 1).abs().max() > 2 * ERRORS * math.sqrt(2 / POINTS)


def test_a_mixture_is_left_as_it_is() -> None:
    generator, x = seeded(3), mixture_points(POINTS, 10)
    other = mixture_points(POINTS, 20)
    for _ in range(8):
        x, accepted = hamiltonian(mixture(), x, 0.7, 4, generator)
    assert 0.3 < accepted.float().mean() < 0.99
    assert max(off(x, other, power) for power in (1, 2, 3, 4)) < ERRORS


def test_the_test_is_exact_in_its_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trajectory is taken with min(1, exp(-energy gained)), and energies are those of the target."""
    target, x = mixture(), mixture_points(1000, 5)
    p = momenta(x, "gaussian", seeded(1))
    moved, q, gained = leapfrog(target, x, p, 0.9, 3)
    before, after = (energy(target, at) + m.square().sum(1) / 2 for at, m in ((x, p), (moved, q)))
    assert torch.allclose(gained, after - before, atol=1e-4)
    monkeypatch.setattr("sfumato.methods.hamiltonian.momenta", lambda *_: p)
    taken = torch.stack([hamiltonian(target, x, 0.9, 3, seeded(seed))[1] for seed in range(200)]).float().mean(0)
    chance = (-gained).exp().clamp(max=1)
    assert (taken[chance == 1] == 1).all()
    error = (chance * (1 - chance) / 200).sum().sqrt()
    assert abs(float((taken - chance).sum())) < ERRORS * float(error)


def energy(target: Target, x: torch.Tensor) -> torch.Tensor:
    found = target(x)[1]
    assert found is not None
    return found


def test_leapfrog_runs_backwards() -> None:
    x = mixture_points(500, 7).double()
    p = torch.randn(500, 2, generator=seeded(), dtype=torch.float64)
    there, momentum, gained = leapfrog(mixture(), x, p, 0.3, 10)
    back, reversed_momentum, lost = leapfrog(mixture(), there, -momentum, 0.3, 10)
    assert (there - x).abs().mean() > 0.5
    assert torch.allclose(back, x, atol=1e-5)
    assert torch.allclose(-reversed_momentum, p, atol=1e-5)
    assert torch.allclose(gained, -lost, atol=1e-5)


def test_energy_is_kept_to_second_order() -> None:
    x, p = mixture_points(500, 7).double(), torch.randn(500, 2, generator=seeded(), dtype=torch.float64)
    errors = [float(leapfrog(mixture(), x, p, 1.0 / n, n)[2].abs().mean()) for n in (10, 20, 40)]
    assert errors[0] < 0.02
    assert all(3.5 < large / small < 4.5 for large, small in itertools.pairwise(errors))


def test_energies_from_scores_are_those_of_trapezia() -> None:
    target, x = mixture(), mixture_points(200, 9).double()
    p = torch.randn(200, 2, generator=seeded(), dtype=torch.float64)
    scores_only: Target = lambda x: (target(x)[0], None)  # noqa: E731
    potential, here, q = torch.zeros(200, dtype=torch.float64), x, p
    for _ in range(6):
        there, r, _ = leapfrog(scores_only, here, q, 0.2, 1)
        potential -= ((target(here)[0] + target(there)[0]) / 2 * (there - here)).sum(1)
        here, q = there, r
    direct = potential + (q.square() - p.square()).sum(1) / 2
    assert torch.allclose(leapfrog(scores_only, x, p, 0.2, 6)[2], direct, atol=1e-9)


def test_only_gaussian_momenta_keep_the_law() -> None:
    for kind in MOMENTA:
        p = momenta(torch.zeros(POINTS, 4), kind, seeded())
        assert abs(float(p.mean())) < 0.02
        assert abs(float(p.var()) - 1) < 0.03
    fourth = {}
    for kind in MOMENTA:
        generator = seeded(1)
        x = torch.randn(POINTS, 2, generator=generator)
        for _ in range(3):
            x, _ = hamiltonian(gaussian(torch.ones(2)), x, 0.3, 5, generator, kind)
        fourth[kind] = abs(float((x**4).mean()) - 3) / math.sqrt(96 / (2 * POINTS))
    assert fourth["gaussian"] < ERRORS < fourth["uniform"]


def test_langevin_is_right_for_small_steps_only() -> None:
    variances = []
    for step, steps in ((0.2, 60), (1.2, 20)):
        generator = seeded(2)
        x = torch.randn(POINTS, 1, generator=generator)
        variances.append(float(langevin(gaussian(torch.ones(1)), x, step, steps, generator).var()))
    assert abs(variances[0] - 1) < 0.04
    assert variances[1] > 1.3  # 1 / (1 - step^2 / 4)


def test_levels_fall_as_the_steps_of_the_paper() -> None:
    assert noise_levels(20, 0.05, 20.0) == pytest.approx([0.05 * (20 / m) ** 2 for m in range(1, 21)])
    for count in (2, 7, 50):
        levels = noise_levels(count, 0.1, 30.0)
        assert (levels[0], levels[-1]) == (pytest.approx(30.0), pytest.approx(0.1))
        assert levels == sorted(levels, reverse=True)
    assert noise_levels(1, 0.1, 30.0) == [30.0]


def test_the_flow_takes_a_gaussian_to_a_gaussian() -> None:
    """Exact: x shrinks with the root of the total variance. Heun's error is of second order, Euler's of first."""
    at: Callable[[float], Target] = lambda level: gaussian(torch.full((1,), math.hypot(0.5, level)), False)  # noqa: E731
    errors = {}
    for second in (False, True):
        for count in (20, 40):
            x, levels = torch.ones(1, 1).double(), [*noise_levels(count, 0.05, 5.0)]
            for level, lower in itertools.pairwise(levels):
                x = flow(at, x, level, lower, second_order=second)
            errors[second, count] = abs(float(x) - math.hypot(0.5, 0.05) / math.hypot(0.5, 5.0))
    assert 1.6 < errors[False, 20] / errors[False, 40] < 2.6
    assert 3.0 < errors[True, 20] / errors[True, 40] < 6.0


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_reach_the_law_from_noise(sampler: str) -> None:
    generator = seeded(4)
    levels = noise_levels(60, 0.02, 30.0)
    x = levels[0] * torch.randn(POINTS, 2, generator=generator)
    made, accepted = annealed(mixture, x, levels, generator, sampler=sampler, step_size=1.0, steps=5)
    true = mixture_points(POINTS, 30)
    assert 0.5 < accepted <= 1
    assert (made.mean(0) - true.mean(0)).abs().max() < 0.1
    assert (made.std(0) / true.std(0) - 1).abs().max() < 0.06
    assert ((made < -0.8).float().mean(0) - (true < -0.8).float().mean(0)).abs().max() < 0.03
