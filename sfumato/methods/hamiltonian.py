"""Drawing from a density whose score is known: Hamiltonian dynamics, Langevin dynamics, and a flow down noise levels.

A `Target` gives scores at points [N, ...], the slope of the log-density, and energies [N] if it has them.

Leapfrog steps keep volumes and can be run backwards; with a Metropolis test on the total energy U(x) + |p|^2 / 2 and
Gaussian momenta they leave the target's law as it is, exactly. What the paper (PGE, Algorithm 2) has otherwise: it
divides scores where densities belong, and its signs differ between Eq. 11 and the algorithm. Its momenta of other
distributions are here for comparison, with the same kinetic energy: the law is then not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sfumato.progress import track

Target = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
MOMENTA = ("gaussian", "rayleigh", "uniform")
SAMPLERS = ("hamiltonian", "langevin", "ode")


def momenta(like: torch.Tensor, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Momenta of mean 0 and variance 1; those after Rayleigh have a random sign."""
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
    """(x, p, energy gained [N]) after so many steps (Eq. 11, with the signs of a force that pulls to where images are).

    Of a target without energies the gain of potential is taken from scores, by trapezia along the way; with that of
    kinetic energy it makes step^2 / 8 times the change of |score|^2. For quadratic energies that is exact.
    """
    score, before = target(x)
    first, kinetic = score, _squares(p) / 2
    after = before
    for _ in range(steps):
        p = p + step / 2 * score
        x = x + step * p
        score, after = target(x)
        p = p + step / 2 * score
    if before is None or after is None:
        return x, p, step**2 / 8 * (_squares(score) - _squares(first))
    return x, p, (after - before) + _squares(p) / 2 - kinetic


def hamiltonian(
    target: Target, x: torch.Tensor, step: float, steps: int, generator: torch.Generator, momentum: str = "gaussian"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(points, which of them moved [N]): one trajectory, and a Metropolis test at its end."""
    moved, _, gained = leapfrog(target, x, momenta(x, momentum, generator), step, steps)
    chance = torch.rand(len(x), generator=generator, device=x.device)
    accepted = chance.log() < -gained.nan_to_num(nan=torch.inf)
    return torch.where(accepted.view(-1, *[1] * (x.ndim - 1)), moved, x), accepted


def langevin(target: Target, x: torch.Tensor, step: float, steps: int, generator: torch.Generator) -> torch.Tensor:
    """So many steps of Langevin dynamics, without a test: right as the step goes to zero."""
    for _ in range(steps):
        noise = torch.randn(x.shape, generator=generator, device=x.device)
        x = x + step**2 / 2 * target(x)[0] + step * noise
    return x


def noise_levels(count: int, lowest: float, highest: float) -> list[float]:
    """Levels from highest to lowest that fall as the paper's steps do: as (M / m)^2, where M^2 is their ratio.

    With more or fewer of them, m and M are moved by a constant, so that the ends stay. Steps are in proportion to
    levels, so they fall alike.
    """
    ratio = (highest / lowest) ** 0.5
    if count < 2:
        return [highest]
    offset = (count - ratio) / (ratio - 1)
    return [lowest * ((count + offset) / (m + offset)) ** 2 for m in range(1, count + 1)]


def flow(
    at: Callable[[float], Target], x: torch.Tensor, level: float, lower: float, *, second_order: bool = False
) -> torch.Tensor:
    """Down from a noise level to a lower one along the probability-flow ODE: Euler's step, or Heun's."""
    slope = -level * at(level)(x)[0]
    there = x + (lower - level) * slope
    if not second_order or lower == 0:
        return there
    return x + (lower - level) / 2 * (slope - lower * at(lower)(there)[0])


def annealed(
    at: Callable[[float], Target],
    x: torch.Tensor,
    levels: Sequence[float],
    generator: torch.Generator,
    *,
    sampler: str = "hamiltonian",
    step_size: float = 1.0,
    steps: int = 5,
    momentum: str = "gaussian",
) -> tuple[torch.Tensor, float]:
    """(points without noise, share of trajectories that were accepted): from level to level, down to none.

    `x` has noise of the first level and nothing else. What an image is expected to be is put under it first: even there
    the mean of images may be as large as the noise, in the direction of a plain grey. At each level there are `steps`
    of the dynamics, then a step of the flow to the next. Their size is `step_size` times the level over the fourth root
    of the dimension, which keeps acceptance as it is whatever the dimension. For `ode` there are steps of the flow
    alone, of second order.
    """
    scale = step_size / x[0].numel() ** 0.25
    moved: list[torch.Tensor] = []
    expected = x + levels[0] ** 2 * at(levels[0])(x)[0]
    x = expected + levels[0] * torch.randn(x.shape, generator=generator, device=x.device)
    for place in track(len(levels), "sampling"):
        level, lower = levels[place], 0.0 if place + 1 == len(levels) else levels[place + 1]
        if sampler == "hamiltonian":
            x, accepted = hamiltonian(at(level), x, scale * level, steps, generator, momentum)
            moved.append(accepted.float().mean())
        elif sampler == "langevin":
            x = langevin(at(level), x, scale * level, steps, generator)
        x = flow(at, x, level, lower, second_order=sampler == "ode")
    return x, float(torch.stack(moved).mean()) if moved else 1.0


def _squares(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1).square().sum(1)
