"""`check_synthesizer`: one suite that every method must pass.

Record and replay: a method is run on a small set with every exact sum and noise draw recorded; then on a
neighbouring set, where the vault answers with the recorded releases instead of its own. A sound method can then
not tell the two sets apart: same queries, same model, same samples, same certificate; and the exact sums may
differ by one record's share only. A method that reaches past the vault, divides by a private size, forgets to
clip, to noise or to charge fails, deterministically, or with a stated probability of at most `FAILURE` by chance.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from scipy.stats import chi2

from sfumato.data import ImageSet
from sfumato.methods.base import Synthesizer
from sfumato.methods.registry import load
from sfumato.privacy import Release, Vault

FAILURE = 1e-9  # chance that a sound method fails a noise test
SLACK = 1e-6  # relative, for the rounding of distances between sums


class UnsoundError(AssertionError):
    """A method or vault broke a rule of the house."""


@dataclass
class Answer:
    """One query as the recorder saw it."""

    release: Release
    exact: torch.Tensor
    radius: float
    noised: torch.Tensor


@dataclass
class Tape:
    """What one run asked and was told; with `replay`, what it is told instead."""

    common: int
    replay: list[Answer] | None = None
    answers: list[Answer] = field(default_factory=list)


def check_synthesizer(make: Callable[..., Synthesizer], images: ImageSet, *, vault: type[Vault] = Vault) -> None:
    """Raises `UnsoundError` if the method that `make(**params)` builds is unsound or breaks the interface.

    `images` should be small and labelled; its last image must be the only one of its class.
    """
    for adjacency in ("add-remove", "replace-one"):
        for neighbour in _neighbours(images, adjacency):
            _check_neighbours(make, images, neighbour, adjacency, vault)
    _check_noise(make, images, vault)
    _check_interface(make, images)


def _neighbours(images: ImageSet, adjacency: str) -> list[ImageSet]:
    """Sets that differ in one record at the end: ordinary and extreme, another class, an emptied class."""
    assert images.labels is not None
    checkers = (torch.arange(math.prod(images.shape)) % 2 * 255).byte().reshape(1, *images.shape)
    first, label = images.images[:1], images.labels[:1]
    if adjacency == "replace-one":
        most = torch.arange(len(images) - 1)
        return [_with(images.subset(most), image, label) for image in (first, checkers)]
    fewer = images.subset(torch.arange(len(images) - 1))  # empties the last class
    return [fewer, _with(images, first, label), _with(images, checkers, images.labels[-1:])]


def _with(images: ImageSet, image: torch.Tensor, label: torch.Tensor) -> ImageSet:
    assert images.labels is not None
    return ImageSet(torch.cat([images.images, image]), torch.cat([images.labels, label]), images.classes)


def _check_neighbours(
    make: Callable[..., Synthesizer], images: ImageSet, neighbour: ImageSet, adjacency: str, vault: type[Vault]
) -> None:
    common = min(len(images), len(neighbour)) - (adjacency == "replace-one")
    recorded, replayed = Tape(common), Tape(common)
    one = _fit(make(adjacency=adjacency), images, recorded, vault)
    replayed.replay = recorded.answers
    other = _fit(make(adjacency=adjacency), neighbour, replayed, vault)
    if len(recorded.answers) != len(replayed.answers):
        raise UnsoundError("the number of queries depends on a single record")
    for a, b in zip(recorded.answers, replayed.answers, strict=True):
        name = a.release.name
        if (a.release, a.radius, a.exact.shape) != (b.release, b.radius, b.exact.shape):
            raise UnsoundError(f"release {name!r}: its noise, bound or shape depends on a single record")
        allowed = a.radius * a.release.shift(one.adjacency) * (1 + SLACK)
        moved = float((a.exact.double() - b.exact.double()).norm())
        if moved > allowed:
            raise UnsoundError(f"release {name!r}: one record moves the sum by {moved:.6g}, {allowed:.6g} is paid for")
    _check_same(one, other)


def _check_same(one: Synthesizer, other: Synthesizer) -> None:
    """Given the same releases, everything that leaves must be the same to the last bit."""
    a, b = one._state(), other._state()
    if a.keys() != b.keys() or any(not torch.equal(a[name], b[name]) for name in a):
        raise UnsoundError("the model depends on the images beyond what was released")
    if not torch.equal(one.sample(20, seed=1).images, other.sample(20, seed=1).images):
        raise UnsoundError("samples depend on the images beyond what was released")
    if one.certificate_.to_dict() != other.certificate_.to_dict():
        raise UnsoundError("the certificate depends on the images beyond what was released")


def _check_noise(make: Callable[..., Synthesizer], images: ImageSet, vault: type[Vault]) -> None:
    """Variance of the noise against what is charged, and that no two runs share it, whatever the seed."""
    draws = []
    for _ in range(2):
        tape = Tape(len(images))
        _fit(make(seed=7), images, tape, vault)
        draws.append([(a.noised.double() - a.exact.double()) / (a.release.noise * a.radius) for a in tape.answers])
    for first, second in zip(*draws, strict=True):
        if torch.equal(first, second):
            raise UnsoundError("two runs drew the same noise")
    noise = torch.cat([draw.flatten() for run in draws for draw in run])
    check_unit_variance(noise)


def check_unit_variance(noise: torch.Tensor) -> None:
    """Raises unless `noise` may be standard normal; a sound one fails with probability `FAILURE`.

    With 500 values or more, noise of 2/3 or 3/2 of its scale fails with probability above 1 - 1e-6.
    """
    count, square = noise.numel(), float(noise.square().sum())
    low, high = chi2.ppf(FAILURE / 2, count), chi2.isf(FAILURE / 2, count)
    if not low <= square <= high:
        raise UnsoundError(f"the noise is {math.sqrt(square / count):.3f} times what is charged for")


def _check_interface(make: Callable[..., Synthesizer], images: ImageSet) -> None:
    """Estimator conventions: parameters, plan without pixels, save and load, reproducible samples."""
    model = make()
    planned = model.plan(images.public())
    if model.get_params() != type(model)(**model.get_params()).get_params():
        raise UnsoundError("get_params does not rebuild the method")
    with tempfile.TemporaryDirectory() as folder:
        if model.fit(images, run_dir=folder) is not model:
            raise UnsoundError("fit must return the model")
        certificate = model.certificate_
        if certificate.epsilon is None or certificate.epsilon > model.epsilon:
            raise UnsoundError(f"the certificate says epsilon {certificate.epsilon}, the budget is {model.epsilon}")
        if planned.epsilon < certificate.epsilon:
            raise UnsoundError("more was released than planned")
        again = load(folder, device=model.device)
    sample = model.sample(30, seed=3)
    if not torch.equal(sample.images, again.sample(30, seed=3).images):
        raise UnsoundError("a loaded model draws other images")
    if sample.shape != images.shape or tuple(sample.classes) != tuple(images.classes):
        raise UnsoundError("samples have another shape or other classes than the images")
    if torch.equal(sample.images, model.sample(30, seed=4).images):
        raise UnsoundError("sample ignores its seed")


def _fit(model: Synthesizer, images: ImageSet, tape: Tape, base: type[Vault]) -> Synthesizer:
    model.vault_type = _recorder(tape, base)  # type: ignore[misc]
    return model.fit(images)


def _recorder(tape: Tape, base: type[Vault]) -> type[Vault]:
    """A vault that writes down what it computes and, on replay, answers from the tape."""

    class Recorder(base):  # type: ignore[valid-type, misc]
        def _drawn(self, release: Release) -> torch.Tensor:
            """The same records in both runs, and the one that differs in every sample: the worst case."""
            chance = torch.rand(10_000, generator=torch.Generator().manual_seed(len(tape.answers)))[: self._size]
            chance[tape.common :] = 0
            return (chance < release.sampling_prob).nonzero()[:, 0]

        def _noised(self, release: Release, exact: torch.Tensor, radius: float, secure: bool) -> torch.Tensor:
            asked = Counter(answer.release.name for answer in tape.answers)[release.name] + 1
            if self.ledger.charged(release.name) < asked:
                raise UnsoundError(f"release {release.name!r} was drawn without a charge in the ledger")
            noised: torch.Tensor = super()._noised(release, exact, radius, secure)
            if noised.requires_grad:
                raise UnsoundError(f"release {release.name!r} carries a gradient path to the private images")
            tape.answers.append(Answer(release, exact.clone(), radius, noised.clone()))
            if tape.replay is None or len(tape.answers) > len(tape.replay):
                return noised
            return tape.replay[len(tape.answers) - 1].noised.clone()

    recorder: Any = Recorder
    return recorder  # type: ignore[no-any-return]
