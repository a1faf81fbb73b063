"""The privacy budget of a run and its unit of privacy: one image, or one person with all their images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Adjacency = Literal["add-remove", "replace-one"]
Unit = Literal["image", "person"]
ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)
UNITS: tuple[str, ...] = get_args(Unit)


class BudgetExceeded(RuntimeError):
    """A query would spend more than the budget allows. Raised before any image is read."""


@dataclass(frozen=True)
class Budget:
    """An (epsilon, delta) budget for one unit of privacy.

    - epsilon: greater than 0. With `inf` no noise is added, and the certificate states `guarantee: none`.
    - delta: between 0 and 1, default 1e-5.
    - adjacency: `add-remove` (default): neighbouring data sets differ by the presence of one unit, so the number of
      units is private. `replace-one`: they have the same number of units and differ in one unit and its labels.
    - unit: `image` (default), or `person`: all images of one person are added, removed or replaced together.
    """

    epsilon: float
    delta: float = 1e-5
    adjacency: Adjacency = "add-remove"
    unit: Unit = "image"

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):  # accepts integers and NumPy scalars; ledgers store Python floats
            object.__setattr__(self, name, float(getattr(self, name)))
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be greater than 0, got {self.epsilon}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie strictly between 0 and 1, got {self.delta}")
        for name, known in (("adjacency", ADJACENCIES), ("unit", UNITS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    @property
    def private(self) -> bool:
        """Whether epsilon is finite, that is, whether the budget promises anything."""
        return math.isfinite(self.epsilon)
