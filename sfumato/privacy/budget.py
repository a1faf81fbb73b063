"""How much privacy may be spent, and what it protects: one image, or one person with all their images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Adjacency = Literal["add-remove", "replace-one"]
Unit = Literal["image", "person"]
ADJACENCIES: tuple[str, ...] = get_args(Adjacency)
UNITS: tuple[str, ...] = get_args(Unit)


class BudgetExceeded(RuntimeError):
    """A query would spend more than the budget allows. Raised before any image is read."""


@dataclass(frozen=True)
class Budget:
    """An (epsilon, delta) budget; `epsilon=inf` asks for no noise, and the certificate says `guarantee: none`.

    - unit: `image`, or `person`: a person's images, however many, come and go together.
    - adjacency: `add-remove`: neighbouring sets differ by the presence of one unit; their sizes are private.
      `replace-one`: they have as many units and differ in one (and its labels).
    """

    epsilon: float
    delta: float = 1e-5
    adjacency: Adjacency = "add-remove"
    unit: Unit = "image"

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):  # whole numbers and NumPy's are welcome; ledgers hold plain ones
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
        """Whether the budget promises anything at all."""
        return math.isfinite(self.epsilon)
