"""Preview what a run would release, for `sfumato plan` and `sfumato serve`. A preview spends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sfumato.advice import advice
from sfumato.data import ImageSet, PublicFacts
from sfumato.methods.base import Synthesizer
from sfumato.methods.parameters import Setting
from sfumato.privacy import Plan


@dataclass(frozen=True)
class Preview:
    """What is known of a run before it is made.

    - method, prior: key of the method, and the model of public images that it starts from, if any.
    - public: what is taken as public.
    - plan: the releases and their noise.
    - settings: those of the method.
    - notes: what the noise does to the result.
    - warnings: weak settings.
    - private_warnings: those that depend on the number of images, for the owner's eyes only.
    """

    method: str
    prior: str | None
    public: PublicFacts
    plan: Plan
    settings: Sequence[Setting]
    notes: Sequence[str]
    warnings: Sequence[str]
    private_warnings: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """Return what may be shared, ready for JSON."""
        public, plan = self.public, self.plan
        return {
            "method": self.method,
            "prior": self.prior,
            **{name: getattr(public, name) for name in ("shape", "classes", "unit", "sizes")},
            "releases": [asdict(release) for release in plan.releases],
            "settings": [asdict(setting) for setting in self.settings],
            "bounds": plan.bounds,
            "epsilon": plan.epsilon,
            "delta": plan.budget.delta,
            "adjacency": plan.budget.adjacency,
            "notes": self.notes,
            "warnings": self.warnings,
        }


def preview(model: Synthesizer, outline: ImageSet, *, max_per_person: int, shape_declared: bool = True) -> Preview:
    """Return what a run of `model` would release.

    - outline: labels, classes and persons of the images; see `read_outline`.
    - max_per_person: cap on the images of a person that are used.
    - shape_declared: False if the shape is that of the first image.
    """
    public = model.public_facts(outline)
    plan, notes = model.plan(public), model.explain_plan(public)
    if public.unit == "person":
        notes = [*notes, f"at most {max_per_person} images of each person are used"]
    if not shape_declared:
        notes = [*notes, "the shape is that of the first image; declare --size and --mode, since all must agree"]
    prior = getattr(model, "prior", "") or None
    weak, private = advice(model, outline)
    return Preview(model.key, prior, public, plan, model.settings(public), notes, weak, private)
