"""One training step of the published `dp-kernel` and `pge`, attacked: a single update violates the claim.

The attacker sees what does not depend on the data (weights, generated images, projection vectors) and the update, and
knows all records but one. Samples and the random numbers of the published mechanism are fresh in each trial and unknown
to him: a claim that profits from sampling is not attacked as if the sample were known.

- `dp-kernel`: the noise changes the length and the sign of the gradient, never its line. He compares the line with
  that of either batch. The unit is in a Poisson sample, as published; the other images of the batch are known to him.
  The number of generated images is fixed; in the published training it is the size of the batch, which tells more.
- `pge`: randomised response chooses among finitely many gradients. He asks which of the two sets can have made the
  update. One image is replaced by another; the batch is drawn with replacement, as published.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable

import torch

from sfumato.audit.lower_bounds import CONFIDENCE, LowerBounds, lower_bounds
from sfumato.audit.neighbours import digits_of
from sfumato.audit.small_settings import small
from sfumato.data import ImageSet
from sfumato.data.pixels import to_unit_range
from sfumato.engine import noise_multiplier
from sfumato.methods.as_published.published_dp_kernel import PublishedKernelGenerator, published_loss
from sfumato.methods.as_published.published_pge import (
    PublishedGradientEstimation,
    PublishedLoss,
    randomised_response,
)
from sfumato.methods.score_matching import LossGradient

TRIALS = 1000
SAMPLING = 0.1  # of dp-kernel: batches of 60 from 600 images
BATCH = 2  # images of the set of pge, and of a step: 2^2 samples, each with 2^2 outcomes of randomised response
EQUAL_TOLERANCE = 1e-6  # relative distance of gradients that are equal but for rounding

Step = Callable[[bool], float]  # the score of one trial, with the unit or without it


def audit_published(
    key: str, *, epsilon: float = 1.0, delta: float = 1e-5, trials: int = TRIALS, confidence: float = CONFIDENCE
) -> LowerBounds:
    """Return lower bounds on the epsilon of one training step of a published form that claims `epsilon`."""
    if key not in STEPS:
        raise ValueError(f"there is no published step of {key!r}; there are {', '.join(STEPS)}")
    step = STEPS[key](epsilon, delta)
    present, absent = ([step(world) for _ in range(trials)] for world in (True, False))
    return lower_bounds(present, absent, delta=delta, confidence=confidence, releases=None)


def kernel_step(epsilon: float, delta: float) -> Step:
    """Return a trial of `dp-kernel`: ten digits, and one more if it exists and is in the sample. Score: 1 if seen."""
    model = small("dp-kernel-as-published", epsilon=epsilon, delta=delta)()
    assert isinstance(model, PublishedKernelGenerator)
    images = digits_of(6, 5)
    network = model._new_generator(images.public())
    steps = PublishedKernelGenerator.steps  # the noise of a whole training
    noise = noise_multiplier(epsilon=epsilon, delta=delta, sampling_prob=SAMPLING, steps=steps)
    latent = torch.randn(len(images), model.generator.latent, generator=torch.Generator().manual_seed(0))

    def gradient(drawn: bool, scale: float, generator: torch.Generator) -> torch.Tensor:
        assert images.labels is not None
        real = to_unit_range(images.images)[int(not drawn) :]
        fake = network(latent, images.labels)
        loss = published_loss(real, images.labels[int(not drawn) :], fake, images.labels, scale, generator)
        parts = torch.autograd.grad(loss, list(network.parameters()))
        update = torch.cat([part.flatten() for part in parts]).double()
        return torch.nn.functional.normalize(update, dim=0, eps=1e-300)

    with_unit, without = (gradient(world, 0.0, torch.Generator()) for world in (True, False))

    def trial(present: bool) -> float:
        fresh = torch.Generator().manual_seed(secrets.randbits(63))
        drawn = present and bool(torch.rand((), generator=fresh) < SAMPLING)
        update = gradient(drawn, noise, fresh)
        return float((update @ with_unit).abs() > (update @ without).abs())

    return trial


def pge_step(epsilon: float, delta: float) -> Step:  # noqa: ARG001
    """Return a trial of `pge`: a set of two digits, one of which is another image without the unit.

    Score: 1 if only the set with the unit can have made the update, -1 if only the other one can, else 0.
    """
    model = small("pge-as-published", epsilon=epsilon)()
    assert isinstance(model, PublishedGradientEstimation)
    images = digits_of(BATCH + 1)
    public = images.public()
    views, network = model._views(public, slices=False), model._new_network(public)
    generator = torch.Generator().manual_seed(0)
    normals = torch.randn(BATCH, views.draws, generator=generator)
    vectors = torch.randn(BATCH, views.dimension, generator=generator)
    gradients = LossGradient(PublishedLoss(views), network)

    def gradient(present: bool, chosen: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        batch = _records(images, present)[chosen]
        kinds = torch.zeros(BATCH, dtype=torch.int64)
        parts = gradients(views.rows(batch), kinds, normals, vectors, vectors[answers])
        return torch.cat([part.flatten() for part in parts.values()]).double().clone()

    tuples = [torch.tensor(each) for each in itertools.product(range(BATCH), repeat=BATCH)]
    known = {
        world: torch.stack([gradient(world, chosen, answers) for chosen in tuples for answers in tuples])
        for world in (True, False)
    }

    def trial(present: bool) -> float:
        fresh = torch.Generator().manual_seed(secrets.randbits(63))
        chosen = torch.randint(BATCH, (BATCH,), generator=fresh)
        update = gradient(present, chosen, randomised_response(vectors, model.epsilon, model.nearest, fresh))
        near = {world: float((known[world] - update).norm(dim=1).min() / update.norm()) for world in known}
        return float(near[True] < EQUAL_TOLERANCE) - float(near[False] < EQUAL_TOLERANCE)

    return trial


def _records(images: ImageSet, present: bool) -> torch.Tensor:
    """Return the first images, or those with the first one replaced by the last."""
    order = list(range(BATCH)) if present else [BATCH, *range(1, BATCH)]
    return to_unit_range(images.images[order])


STEPS: dict[str, Callable[[float, float], Step]] = {
    "dp-kernel-as-published": kernel_step,
    "pge-as-published": pge_step,
}
