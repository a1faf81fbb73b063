"""Samplers of score-based models: Hamiltonian Monte Carlo, unadjusted Langevin dynamics, probability-flow ODE.

A `Target` maps points [N, ...] to their scores (the gradient of the log-density) and, if available, energies [N].

Leapfrog integration preserves volume and is reversible. With Gaussian momenta and a Metropolis test on the total energy
U(x) + |p|² / 2 it leaves the target distribution invariant. This differs from the published algorithm (PGE, Algorithm
2), which uses ratios of scores in place of ratios of densities, and whose signs differ between Eq. 11 and the
algorithm. The other momentum distributions of the paper are available for comparison; with them, and the same kinetic
energy, the target distribution is not invariant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from sfumato.progress import track

Target = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
MOMENTA = ("gaussian", "rayleigh", "uniform")
SAMPLERS = ("hamiltonian", "langevin", "ode")


def draw_momenta(like: torch.Tensor, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Draw momenta of mean 0 and variance 1; `rayleigh` has a random sign."""
    shape, device = like.shape, like.device
    if kind == "gaussian":
        return torch.randn(shape, generator=generator, device=device)
    uniform = torch.rand(shape, generator=generator, device=device) * 2 - 1
    if kind == "uniform":
        return uniform * 3**0.5
    return uniform.sign() * (-(uniform.abs().clamp_min(1e-12)).log()).sqrt()


def leapfrog(
    target: Target, x: torch.Tensor, p: torch.Tensor, step: float, steps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Leapfrog integration (PGE, Eq. 11, with corrected signs); return x, p and the change of total energy [N].

    If the target has no energies, the trapezoidal rule along the trajectory estimates the change of potential energy
    from the scores. The change of total energy is then step² / 8 times the change of |score|², which is exact for
    quadratic energies.
    """
    score, energy_before = target(x)
    first_score, kinetic_before = score, _squared_norm(p) / 2
    energy_after = energy_before
    for _ in range(steps):
        p = p + step / 2 * score
        x = x + step * p
        score, energy_after = target(x)
        p = p + step / 2 * score
    if energy_before is None or energy_after is None:
        return x, p, step**2 / 8 * (_squared_norm(score) - _squared_norm(first_score))
    return x, p, (energy_after - energy_before) + _squared_norm(p) / 2 - kinetic_before


def hamiltonian_monte_carlo(
    target: Target, x: torch.Tensor, step: float, steps: int, generator: torch.Generator, momentum: str = "gaussian"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hamiltonian Monte Carlo (Duane et al. 1987), one trajectory; return the points and which were accepted [N]."""
    proposal, _, energy_change = leapfrog(target, x, draw_momenta(x, momentum, generator), step, steps)
    uniform = torch.rand(len(x), generator=generator, device=x.device)
    accepted = uniform.log() < -energy_change.nan_to_num(nan=torch.inf)
    return torch.where(accepted.view(-1, *[1] * (x.ndim - 1)), proposal, x), accepted


def unadjusted_langevin(
    target: Target, x: torch.Tensor, step: float, steps: int, generator: torch.Generator
) -> torch.Tensor:
    """Unadjusted Langevin algorithm: no Metropolis test, so the bias vanishes only as the step goes to zero."""
    for _ in range(steps):
        noise = torch.randn(x.shape, generator=generator, device=x.device)
        x = x + step**2 / 2 * target(x)[0] + step * noise
    return x


def noise_levels(count: int, lowest: float, highest: float) -> list[float]:
    """Return decreasing noise levels, proportional to (M / m)² for m = 1, …, M as in PGE (M² = highest / lowest).

    For a different `count`, a constant is added to m and M so that the first and the last level are unchanged.
    """
    ratio = (highest / lowest) ** 0.5
    if count < 2:
        return [highest]
    offset = (count - ratio) / (ratio - 1)
    return [lowest * ((count + offset) / (m + offset)) ** 2 for m in range(1, count + 1)]


def karras_levels(count: int, lowest: float, highest: float, power: float = 7.0) -> list[float]:
    """Return decreasing noise levels, equally spaced in level^(1/power) (Karras et al. 2022, Eq. 5)."""
    first, last = highest ** (1 / power), lowest ** (1 / power)
    return [(first + step / max(1, count - 1) * (last - first)) ** power for step in range(count)]


def probability_flow_step(
    target_at: Callable[[float], Target], x: torch.Tensor, level: float, lower: float, *, second_order: bool = False
) -> torch.Tensor:
    """Take one step of the probability-flow ODE (Song et al. 2021; Karras et al. 2022): Euler's method, or Heun's."""
    slope = -level * target_at(level)(x)[0]
    euler = x + (lower - level) * slope
    if not second_order or lower == 0:
        return euler
    return x + (lower - level) / 2 * (slope - lower * target_at(lower)(euler)[0])


def dpm_solver(
    denoise: Callable[[torch.Tensor, float], torch.Tensor], x: torch.Tensor, levels: Sequence[float]
) -> torch.Tensor:
    """DPM-Solver++(2M) (Lu et al. 2022): the probability flow to second order, with one evaluation for each level.

    - denoise: the mean of the clean image given a noisy one and its noise level.
    - x: noisy images of the first level, [N, ...].
    - levels: decreasing noise levels; a last step goes to zero.
    """
    earlier, step_before = None, 0.0
    for index in track(len(levels), "sampling"):
        mean = denoise(x, levels[index])
        if index + 1 == len(levels):
            return mean
        step = math.log(levels[index] / levels[index + 1])
        current = mean if earlier is None else mean + step / (2 * step_before) * (mean - earlier)
        ratio = levels[index + 1] / levels[index]
        x = ratio * x + (1 - ratio) * current
        earlier, step_before = mean, step
    return x


def annealed_sampling(
    target_at: Callable[[float], Target],
    x: torch.Tensor,
    levels: Sequence[float],
    generator: torch.Generator,
    *,
    sampler: str = "hamiltonian",
    step_size: float = 1.0,
    steps: int = 5,
    momentum: str = "gaussian",
) -> tuple[torch.Tensor, float]:
    """Sample along decreasing noise levels; return the points and the acceptance rate (1 without a Metropolis test).

    First `x` is replaced by the denoised mean plus new noise: even at the highest level the mean of the images can be
    as large as the noise (along a constant grey). Then each level has one trajectory of the sampler and one step of the
    probability flow to the next level, finally to zero. The step of the dynamics is `step_size` times the level over
    the fourth root of the dimension, which keeps the acceptance rate independent of the dimension.

    - target_at: the target at a noise level.
    - x: noise of the first level, [N, ...].
    - levels: decreasing noise levels.
    - generator: draws noise, momenta and Metropolis tests.
    - sampler: "hamiltonian" (default), "langevin", or "ode": probability flow only, of second order.
    - step_size: default 1.
    - steps: steps of the dynamics at each level, default 5.
    - momentum: distribution of the momenta, one of `MOMENTA`, default "gaussian".
    """
    scale = step_size / x[0].numel() ** 0.25
    acceptance: list[torch.Tensor] = []
    denoised = x + levels[0] ** 2 * target_at(levels[0])(x)[0]
    x = denoised + levels[0] * torch.randn(x.shape, generator=generator, device=x.device)
    for index in track(len(levels), "sampling"):
        level, lower = levels[index], 0.0 if index + 1 == len(levels) else levels[index + 1]
        if sampler == "hamiltonian":
            x, accepted = hamiltonian_monte_carlo(target_at(level), x, scale * level, steps, generator, momentum)
            acceptance.append(accepted.float().mean())
        elif sampler == "langevin":
            x = unadjusted_langevin(target_at(level), x, scale * level, steps, generator)
        x = probability_flow_step(target_at, x, level, lower, second_order=sampler == "ode")
    return x, float(torch.stack(acceptance).mean()) if acceptance else 1.0


def _squared_norm(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1).square().sum(1)
