"""private-evolution: votes, what is planned, what evolves, what the certificate says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import sfumato as sf
from sfumato.data import ImageSet
from sfumato.engine import GradientVault
from sfumato.methods.curriculum_painter import CurriculumPainter
from sfumato.methods.prior_painter import PainterTraining
from sfumato.methods.private_evolution import (
    TEMPERATURE,
    EvolutionSettings,
    PrivateEvolution,
    Votes,
    chosen_weights,
    draw_parents,
)
from sfumato.testing import UnsoundError, build, check_synthesizer

PRIOR = Path(__file__).parents[1] / "priors" / "tiny.safetensors"  # random weights
CONDITIONED = PRIOR.with_name("conditioned.safetensors")
QUICK: dict[str, Any] = {
    "prior": str(PRIOR),
    "rounds": 2,
    "candidates": 4,
    "adaptation": PainterTraining(pool=40, rounds=1, practice_steps=2, practice_batch=8, levels=2),
    "device": "cpu",
    "epsilon": 20.0,
}


def quick(**settings: Any) -> Any:
    return build("private-evolution", **{**QUICK, **settings})


def test_a_vote_has_norm_at_most_one_and_goes_to_the_own_class() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(*shape, generator=generator) for shape in ((9, 6), (3, 5, 6)))
    rows, candidates = (functional.normalize(each, dim=-1) for each in drawn)
    labels = torch.arange(9) % 3
    votes = Votes(3)(rows, labels, candidates)
    assert votes.shape == (9, 5)
    assert bool((votes >= 0).all())
    torch.testing.assert_close(votes.sum(1), torch.ones(9))
    assert float(votes.norm(dim=1).max()) <= 1 + 1e-6
    distances = (rows[:, None] - candidates[labels]).norm(dim=2)
    assert torch.equal(votes.argmax(1), distances.argmin(1))
    others = candidates.clone()
    others[1:] = 0  # candidates of other classes
    assert torch.equal(Votes(3)(rows, labels, others)[labels == 0], votes[labels == 0])


def test_a_vote_is_continuous() -> None:
    """Between two candidates, rounding errors move half of a vote by little; a one-hot vote would jump."""
    candidates = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    middle = torch.full((1, 2), 0.5**0.5)
    moved = middle + torch.tensor([[4e-5, -4e-5]])  # what was measured on a GPU
    label = torch.zeros(1, dtype=torch.int64)
    votes, other = (Votes(1)(rows, label, candidates) for rows in (middle, moved))
    torch.testing.assert_close(votes, torch.full((1, 2), 0.5), atol=1e-4, rtol=0)
    assert float((votes - other).norm()) < 1e-2  # the margin on a GPU is 2e-2


def test_a_vote_moves_at_most_a_hundred_times_as_far_as_its_embedding() -> None:
    """The bound of the docstring, in the worst directions that were found, and a one-hot vote, which jumps."""
    generator = torch.Generator().manual_seed(0)
    largest, jump, label = 0.0, 0.0, torch.zeros(1, dtype=torch.int64)
    for _ in range(200):
        first, second, shift = functional.normalize(torch.randn(3, 6, generator=generator), dim=1)
        middle = functional.normalize(first + second, dim=0)[None]  # equally far from both
        moved, candidates = middle + 1e-5 * functional.normalize(first - second + 0.1 * shift, dim=0), [first, second]
        rows = [Votes(1)(each.double(), label, torch.stack(candidates)[None].double()) for each in (middle, moved)]
        largest = max(largest, float((rows[1] - rows[0]).norm()) / 1e-5)
        hard = [functional.one_hot(each.argmax(1), 2).float() for each in rows]
        jump = max(jump, float((hard[1] - hard[0]).norm()))
    assert 0.3 * 2 / TEMPERATURE < largest <= 2 / TEMPERATURE
    assert jump == pytest.approx(2**0.5)  # a margin of 2e-2 does not cover it


class PrivateCandidate(PrivateEvolution):
    """The author takes the first candidate from the private images."""

    def _evolve(self, painter: Any, embedding: Any, embedded: GradientVault, classes: int) -> None:
        super()._evolve(painter, embedding, embedded, classes)
        self.weights_[0, 0] += float(embedded._images[0, 0].abs())


class ExactSizes(PrivateEvolution):
    """The author takes class sizes from the labels, un-noised, and not from the votes."""

    def _evolve(self, painter: Any, embedding: Any, embedded: GradientVault, classes: int) -> None:
        super()._evolve(painter, embedding, embedded, classes)
        assert embedded._labels is not None
        self.counts_ = torch.bincount(embedded._labels, minlength=classes).float()


@pytest.mark.parametrize("method", [PrivateCandidate, ExactSizes])
def test_what_leaves_without_noise_is_caught(method: type[PrivateEvolution], fewer_digits: ImageSet) -> None:
    small = {"rounds": 2, "candidates": 3, "adaptation": PainterTraining(pool=12, levels=2), "prior": str(PRIOR)}
    with pytest.raises(UnsoundError, match="depends on"):
        check_synthesizer(lambda **given: build(method, device="cpu", **small, **given), fewer_digits)


def test_unlabelled_images_are_one_class(few_digits: ImageSet) -> None:
    model = quick(epsilon=math.inf).fit(ImageSet(few_digits.images))
    assert float(model.counts_[0]) == pytest.approx(len(few_digits), abs=1e-2)


def test_only_votes_are_released(few_digits: ImageSet) -> None:
    public = few_digits.public()
    plan = quick(rounds=5, epsilon=1.0).plan(public)
    assert [(release.name, release.times, release.nonnegative) for release in plan.releases] == [("votes", 5, True)]
    assert plan["votes"].noise == pytest.approx(sf.noise_multiplier(epsilon=1.0) * math.sqrt(5), rel=1e-2)
    assert "more than" in quick(epsilon=1.0).explain_plan(public)[-1]


@pytest.mark.parametrize(("prior", "moments"), [(PRIOR, ["means"]), (CONDITIONED, ["moments", "common-moments"])])
def test_tune_then_vote_shares_the_budget(prior: Path, moments: list[str], few_digits: ImageSet) -> None:
    public = few_digits.public()
    model = quick(prior=str(prior), adapt=True, steps=10, adapt_share=0.25, epsilon=1.0)
    plan = model.plan(public)
    assert [release.name for release in plan.releases] == ["counts", *moments, "gradients", "votes"]
    alone = sf.noise_multiplier(epsilon=1.0) ** -2
    assert plan["votes"].times / plan["votes"].noise ** 2 / alone == pytest.approx(0.75, rel=1e-2)
    assert plan.epsilon == pytest.approx(1.0, rel=1e-3)
    names = [release.name for release in quick(prior=str(prior), adapt=True, steps=0).plan(public).releases]
    assert names == ["counts", *moments, "votes"]


@pytest.fixture
def levels_of_grey() -> ImageSet:
    """Two classes: bright and dark."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 2
    labels[80:] = 0
    noise = torch.randint(-20, 21, (90, 1, 8, 8), generator=generator)
    return ImageSet((60 + 140 * labels[:, None, None, None] + noise).clamp(0, 255).byte(), labels, ("dark", "bright"))


def test_candidates_evolve_towards_their_class(levels_of_grey: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones have any brightness; a variation is a little brighter or darker. Votes are without noise."""

    def paint(self: Any, network: Any, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return (0.6 * torch.rand(len(labels), 1, 1, 1, generator=generator) - 0.3).expand(-1, 1, 8, 8).clone()

    def vary(self: Any, network: Any, images: torch.Tensor, labels: torch.Tensor, level: float, generator: Any) -> Any:
        return (images + 0.2 * torch.randn(len(images), 1, 1, 1, generator=generator)).clamp(-1, 1)

    def brightness(images: torch.Tensor) -> torch.Tensor:
        return images.mean((1, 2, 3))[:, None]

    def embed(self: Any, vault: GradientVault, checkpoints: Any) -> Any:
        return brightness, vault.map(brightness)

    monkeypatch.setattr(CurriculumPainter, "embed", embed)
    monkeypatch.setattr(CurriculumPainter, "paint", paint)
    monkeypatch.setattr(CurriculumPainter, "vary", vary)
    model = quick(epsilon=math.inf, rounds=6, candidates=8).fit(levels_of_grey)
    means = (model.candidates_.float().mean((2, 3, 4)) * model.weights_).sum(1)
    assert means[0] < 80  # beyond what was drawn at first: 89 to 166
    assert means[1] > 175
    torch.testing.assert_close(model.counts_, torch.tensor([50.0, 40.0]), atol=1e-2, rtol=0)
    assert model.sample(9).labels.bincount().tolist() == [5, 4]


@pytest.mark.parametrize("prior", [PRIOR, CONDITIONED])
@pytest.mark.parametrize("adapt", [False, True])
def test_a_model_is_saved_and_loaded(prior: Path, adapt: bool, few_digits: ImageSet, tmp_path: Path) -> None:
    model = quick(prior=str(prior), adapt=adapt, steps=2).with_constants(sampling_prob=0.5)
    model.fit(few_digits, run_dir=tmp_path / "run")
    assert model.certificate_.public_facts["prior"]["trained_on"] == "random weights, for tests"
    assert sf.verify(tmp_path / "run" / "certificate.json")
    again = sf.load(tmp_path / "run")
    drawn = model.sample(12, seed=3)
    assert torch.equal(drawn.images, again.sample(12, seed=3).images)
    assert len(drawn.images.unique(dim=0)) == 12  # variations, also where a candidate is drawn twice


def test_a_person_has_one_vote(few_digits: ImageSet) -> None:
    """All images of the last class belong to one person: in each generation their votes sum to 1."""
    persons = torch.arange(len(few_digits))
    persons[few_digits.labels == 3] = persons[few_digits.labels == 3][0].item()
    images = ImageSet(few_digits.images, few_digits.labels, few_digits.classes, persons=persons)
    sizes = quick(epsilon=math.inf).fit(images).counts_
    assert float(sizes[3]) == pytest.approx(1, abs=1e-3)
    assert float(sizes[0]) == pytest.approx(int((few_digits.labels == 0).sum()), abs=1e-2)


def test_weights_subtract_the_threshold() -> None:
    votes = torch.tensor([[10.0, 4.0, -3.0], [3.0, 1.0, -1.0], [-1.0, -2.0, -3.0]])
    expected = torch.tensor([[5 / 5, 0, 0], [3 / 4, 1 / 4, 0], [1 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(chosen_weights(votes, 5.0), expected)


def test_a_parent_stays_once() -> None:
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
    places, again = draw_parents(weights, 6, torch.Generator().manual_seed(0))
    assert places[:6].tolist() == [0] * 6
    assert again[:6].tolist() == [False] + [True] * 5
    assert set(places[6:].tolist()) == {4, 5}
    assert int((~again[6:]).sum()) == 2


def test_noise_levels_fall_to_the_last() -> None:
    levels = [EvolutionSettings().level(number, 4) for number in range(4)]
    assert levels[0] == pytest.approx(10.0)
    assert levels[-1] == pytest.approx(0.5)
    assert levels == sorted(levels, reverse=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"candidates": 1}, "at least 2"),
        ({"steps": 1}, "at least 2"),
        ({"adapt_share": 1.0}, "between 0 and 1"),
        ({"rounds": 0}, "rounds"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick(**settings).validate()
