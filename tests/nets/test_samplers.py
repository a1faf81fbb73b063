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
    dpm_solver,
    draw_momenta,
    hamiltonian_monte_carlo,
    karras_levels,
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


def test_karras_levels_follow_the_paper() -> None:
    for count, power in ((2, 7.0), (18, 7.0), (50, 3.0)):
        levels = karras_levels(count, 0.002, 80.0, power)
        assert len(levels) == count
        assert (levels[0], levels[-1]) == (pytest.approx(80.0), pytest.approx(0.002))
        assert all(higher > lower > 0 for higher, lower in itertools.pairwise(levels))
        roots = [level ** (1 / power) for level in levels]
        assert [a - b for a, b in itertools.pairwise(roots)] == pytest.approx(
            [(roots[0] - roots[-1]) / (count - 1)] * (count - 1)
        )
    assert karras_levels(1, 0.002, 80.0) == [pytest.approx(80.0)]
    assert karras_levels(5, 0.1, 10.0, 7.0)[2] < karras_levels(5, 0.1, 10.0, 1.0)[2] == pytest.approx(5.05)


CENTRE, SPREAD = 0.7, 0.5  # of the Gaussian that `denoise` assumes


def denoise(x: torch.Tensor, level: float) -> torch.Tensor:
    """Return the mean of N(CENTRE, SPREAD²) given x with added noise."""
    return CENTRE + SPREAD**2 / (SPREAD**2 + level**2) * (x - CENTRE)


def flow_end(x: torch.Tensor, start: float, end: float) -> torch.Tensor:
    """Return the exact end of the probability flow for that Gaussian."""
    return CENTRE + (x - CENTRE) * math.hypot(SPREAD, end) / math.hypot(SPREAD, start)


Solver = Callable[[Callable[[torch.Tensor, float], torch.Tensor], torch.Tensor, list[float]], torch.Tensor]


def planted(factor: Callable[[float], float]) -> Solver:
    """Return DPM-Solver++(2M) with another factor, of the ratio of two steps, in place of its half."""

    def solver(
        denoised: Callable[[torch.Tensor, float], torch.Tensor], x: torch.Tensor, levels: list[float]
    ) -> torch.Tensor:
        earlier, before = None, 0.0
        for level, lower in itertools.pairwise(levels):
            mean, step = denoised(x, level), math.log(level / lower)
            current = mean if earlier is None else mean + factor(step / before) * (mean - earlier)
            x, earlier, before = lower / level * x + (1 - lower / level) * current, mean, step
        return denoised(x, levels[-1])

    return solver


def uneven_levels(count: int) -> list[float]:
    """Return an odd number of levels from 5 to 0.1; the steps of their logarithm are in turn short and long."""
    return [5.0 * (0.1 / 5.0) ** ((number - 0.25 * (number % 2)) / (count - 1)) for number in range(count)]


def solver_errors(solver: Solver, levels_of: Callable[[int], list[float]]) -> list[float]:
    """Return the errors of one trajectory with 21, 41 and 81 levels. The last step to zero is left out."""
    start, errors = torch.tensor([[3.0]], dtype=torch.float64), []
    for count in (21, 41, 81):
        ends: list[torch.Tensor] = []

        def kept(x: torch.Tensor, level: float, ends: list[torch.Tensor] = ends) -> torch.Tensor:
            ends.append(x)
            return denoise(x, level)

        levels = levels_of(count)
        solver(kept, start, levels)
        errors.append(float((ends[-1] - flow_end(start, levels[0], levels[-1])).abs()))
    return errors


WRONG_FACTORS = {"step / step_before": lambda ratio: ratio, "1 / 2": lambda ratio: 0.5, "none": lambda ratio: 0.0}


@pytest.mark.parametrize("even", [True, False])
def test_dpm_solver_is_of_second_order(even: bool) -> None:
    """Twice the levels: a quarter of the error. With a wrong coefficient, about half of it.

    A factor of 1 / 2 is wrong for uneven levels only.
    """
    levels_of = (lambda count: karras_levels(count, 0.1, 5.0)) if even else uneven_levels
    right = solver_errors(dpm_solver, levels_of)
    assert right[0] < 0.01
    assert all(3.2 < large / small < 5.0 for large, small in itertools.pairwise(right)), right
    assert solver_errors(planted(lambda ratio: ratio / 2), levels_of) == pytest.approx(right)
    for name, factor in WRONG_FACTORS.items():
        if name != "1 / 2" or not even:
            wrong = solver_errors(planted(factor), levels_of)
            assert all(large / small < 2.6 for large, small in itertools.pairwise(wrong)), (name, wrong)
            assert wrong[-1] > 3 * right[-1], name


def test_dpm_solver_samples_a_gaussian() -> None:
    """Tolerances: five standard errors plus 2 % of the standard deviation for the error of 18 levels."""
    levels = karras_levels(18, 0.02, 40.0)
    noise = levels[0] * torch.randn(POINTS, 2, generator=seeded(1))
    samples = dpm_solver(denoise, noise, levels)
    error = SPREAD * (MAX_ERRORS / math.sqrt(POINTS) + 0.02)
    assert (samples.mean(0) - CENTRE).abs().max() < error
    assert (samples.std(0) - SPREAD).abs().max() < error
    wrong = planted(lambda ratio: ratio)(denoise, noise, levels)
    assert (wrong.std(0) - SPREAD).abs().min() > error


@pytest.mark.parametrize("count", [1, 2, 9])
def test_dpm_solver_is_exact_for_a_point(count: int) -> None:
    """Along the way x is the point plus the level times fixed noise; at the end the point itself."""
    point, noise = torch.tensor([0.3, -0.8], dtype=torch.float64), torch.randn(4, 2, generator=seeded()).double()
    levels, seen = karras_levels(count, 0.02, 40.0), []

    def to_point(x: torch.Tensor, level: float) -> torch.Tensor:
        seen.append((x, level))
        return point.expand_as(x)

    end = dpm_solver(to_point, point + levels[0] * noise, levels)
    assert torch.equal(end, point.expand(4, 2))
    assert [level for _, level in seen] == levels
    assert all(torch.allclose(x, point + level * noise, atol=1e-12) for x, level in seen)
