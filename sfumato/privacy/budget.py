"""How much privacy may be spent, and what "one image" means."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Adjacency = Literal["add-remove", "replace-one"]
ADJACENCIES: tuple[str, ...] = get_args(Adjacency)


class BudgetExceeded(RuntimeError):
    """A query would spend more than the budget allows. Raised before any image is read."""


@dataclass(frozen=True)
class Budget:
    """An (epsilon, delta) budget under a neighbouring relation.

    `add-remove`: neighbouring sets differ by the presence of one image; their sizes are private.
    `replace-one`: they have the same size and differ in one image (and its label).
    `epsilon=inf` asks for no noise: the certificate then says `guarantee: none`.

    Guarantee: none by itself; every sensitivity and every accountant reads the relation from here.
    """

    epsilon: float
    delta: float = 1e-5
    adjacency: Adjacency = "add-remove"

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):  # whole numbers and NumPy's are welcome; ledgers hold plain ones
            object.__setattr__(self, name, float(getattr(self, name)))
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be greater than 0, got {self.epsilon}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie strictly between 0 and 1, got {self.delta}")
        if self.adjacency not in ADJACENCIES:
            raise ValueError(f"adjacency must be one of {', '.join(ADJACENCIES)}, got {self.adjacency!r}")

    @property
    def private(self) -> bool:
        """Whether the budget promises anything at all."""
        return math.isfinite(self.epsilon)
