"""`check_synthesizer`: one suite that every method must pass.

Record and replay: a method is run on a small set with every exact sum and noise draw recorded; then on a
neighbouring set, where the vault answers with the recorded releases instead of its own. A sound method can then
not tell the two sets apart: same queries, same model, same files, same output, same samples; and the exact sums may
differ by one record's share only. The record that differs stands first, in the middle or last, and is ordinary,
extreme or the only one of its class. A method that reaches past the vault, divides by a private size, forgets to
clip, to noise or to charge fails; a sound one fails the noise tests with probability `FAILURE` at most.

What it cannot see: a method that behaves well on these small sets only, and time.
"""

from __future__ import annotations

import io
import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2

from sfumato.data import ImageSet
from sfumato.methods.base import Synthesizer
from sfumato.methods.registry import load
from sfumato.privacy import Release, Vault
from sfumato.privacy.budget import ADJACENCIES

FAILURE = 1e-9  # chance that a sound method fails a noise test
RUNS = 8  # for the noise tests: enough values of the smallest release, the counts
SLACK = 1e-4  # relative, for the rounding of rows beside other rows; the radius has a margin of its own for that


class UnsoundError(AssertionError):
    """A method or vault broke a rule of the house."""


@dataclass
class Answer:
    """One query as the recorder saw it."""

    release: Release
    exact: torch.Tensor
    radius: float
    noised: torch.Tensor
    shares: list[float] | None


@dataclass
class Tape:
    """What one run asked and was told; with `replay`, what it is told instead.

    `place` is the index at which the neighbouring sets differ; `present` is False where the record is absent.
    """

    place: int
    present: bool = True
    replay: list[Answer] | None = None
    answers: list[Answer] = field(default_factory=list)
    shares: list[float] | None = None  # of the query under way


@dataclass(frozen=True)
class Run:
    """A finished run and all that it left: files by name, what it printed."""

    model: Synthesizer
    files: dict[str, bytes]
    printed: str


def check_synthesizer(make: Callable[..., Synthesizer], images: ImageSet, *, vault: type[Vault] | None = None) -> None:
    """Raises `UnsoundError` if the method that `make(**params)` builds is unsound or breaks the interface.

    `images` should be small and labelled; its last image must be the only one of its class.
    """
    base = vault or make().vault_type
    last = len(images) - 1
    for place in (0, last // 2, last):
        for adjacency in ADJACENCIES:
            _check_neighbours(make, images, place, adjacency, base)
    _check_noise(make, images, base)
    _check_interface(make, images)


def _neighbours(images: ImageSet, place: int, adjacency: str) -> list[ImageSet]:
    """`images` with the record at `place` gone, or replaced: by another one with its label, by an extreme one."""
    assert images.labels is not None
    if adjacency == "add-remove":
        return [images.subset(torch.arange(len(images)) != place)]
    checkers = (torch.arange(math.prod(images.shape)) % 2 * 255).byte().reshape(images.shape)
    other = (place + len(images) // 2) % len(images)
    replaced = []
    for image, label in ((images.images[other], images.labels[other]), (checkers, images.labels[place])):
        pixels, labels = images.images.clone(), images.labels.clone()
        pixels[place], labels[place] = image, label
        replaced.append(ImageSet(pixels, labels, images.classes))
    return replaced


def _check_neighbours(
    make: Callable[..., Synthesizer], images: ImageSet, place: int, adjacency: str, base: type[Vault]
) -> None:
    recorded = Tape(place)
    one = _fit(make(adjacency=adjacency), images, recorded, base)
    for neighbour in _neighbours(images, place, adjacency):
        replayed = Tape(place, present=len(neighbour) == len(images), replay=recorded.answers)
        other = _fit(make(adjacency=adjacency), neighbour, replayed, base)
        _check_answers(recorded.answers, replayed.answers, one.model)
        _check_same(one, other)


def _check_answers(recorded: list[Answer], replayed: list[Answer], model: Synthesizer) -> None:
    if len(recorded) != len(replayed):
        raise UnsoundError("the number or order of queries depends on a single record")
    for a, b in zip(recorded, replayed, strict=True):
        name = a.release.name
        if (a.release, a.radius, a.exact.shape, a.shares) != (b.release, b.radius, b.exact.shape, b.shares):
            raise UnsoundError(f"release {name!r}: its noise, bound, shape or sampling depends on a single record")
        allowed = a.radius * a.release.shift(model.adjacency) * (1 + SLACK)
        moved = float((a.exact.double() - b.exact.double()).norm())
        if moved > allowed:
            raise UnsoundError(f"release {name!r}: one record moves the sum by {moved:.6g}, {allowed:.6g} is paid for")


def _check_same(one: Run, other: Run) -> None:
    """Given the same releases, everything that leaves must be the same to the last bit."""
    if one.printed != other.printed:
        raise UnsoundError("what is printed depends on the images beyond what was released")
    for name in sorted(one.files.keys() | other.files.keys()):
        if one.files.get(name) != other.files.get(name):
            raise UnsoundError(f"{name} depends on the images beyond what was released")
    if not torch.equal(one.model.sample(20, seed=1).images, other.model.sample(20, seed=1).images):
        raise UnsoundError("samples depend on the images beyond what was released")
    a, b = (_learned(run.model) for run in (one, other))
    if a.keys() != b.keys() or any(
        a[name].shape != b[name].shape or not torch.allclose(a[name], b[name], 0, 0, equal_nan=True) for name in a
    ):
        raise UnsoundError("the model depends on the images beyond what was released")


def _learned(model: Synthesizer) -> dict[str, torch.Tensor]:
    """The state, and the numbers in every attribute, parameters included."""
    held = {name: _numbers(value) for name, value in vars(model).items() if name != "vault_type"}
    numbers = {name: torch.cat(parts) for name, parts in held.items()}
    return {**numbers, **{f"state {name}": value for name, value in model._state().items()}}


def _numbers(value: Any) -> list[torch.Tensor]:
    """All that a value holds, as numbers: of tensors, arrays, containers, networks, objects; else what it prints.

    What was met before is its number in the order of meeting, so that cycles end and sharing costs nothing.
    """
    found: list[torch.Tensor] = []
    seen: dict[int, int] = {}
    alive: list[Any] = []  # or else another object could take an id

    def text(words: str) -> None:
        found.append(torch.tensor([len(words), *words.encode()], dtype=torch.float64))

    def walk(item: Any) -> None:
        if id(item) in seen:
            return text(f"again {seen[id(item)]}")
        alive.append(item)
        seen[id(item)] = len(seen)
        if isinstance(item, torch.Tensor) and item.layout == torch.strided and not item.is_complex():
            text(str(tuple(item.shape)))
            found.append(item.detach().double().flatten().cpu())
        elif isinstance(item, torch.nn.Module | dict | list | tuple) or hasattr(item, "__dict__"):
            text(type(item).__name__)
            whole = dict(vars(item)) if hasattr(item, "__dict__") else {}
            if isinstance(item, torch.nn.Module):
                whole |= item.state_dict()
            inside = (
                item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list | tuple) else ()
            )
            for name, part in [*whole.items(), *inside]:
                if not (callable(part) and not isinstance(part, torch.nn.Module)):
                    walk(name)
                    walk(part)
        elif isinstance(item, set | frozenset):
            text(repr(sorted(map(repr, item))))
        elif isinstance(item, np.ndarray):
            text(f"{item.dtype} {item.shape} {item.tolist()!r}")
        else:
            text(repr(item))

    walk(value)
    return found


def _check_noise(make: Callable[..., Synthesizer], images: ImageSet, base: type[Vault]) -> None:
    """Each release's noise against what is charged, and that no two runs share it, whatever the seed."""
    draws: dict[str, list[torch.Tensor]] = defaultdict(list)
    for _ in range(RUNS):
        tape = Tape(0)
        _fit(make(seed=7), images, tape, base)
        for answer in tape.answers:
            noise = (answer.noised.double() - answer.exact.double()) / (answer.release.noise * answer.radius)
            draws[answer.release.name].append(noise.flatten())
    for name, noises in draws.items():
        if any(torch.equal(noises[0], noise) for noise in noises[1:]):
            raise UnsoundError(f"release {name!r}: two runs drew the same noise")
        check_unit_variance(torch.cat(noises), f"release {name!r}: ")


def check_unit_variance(noise: torch.Tensor, prefix: str = "") -> None:
    """Raises unless `noise` may be standard normal; a sound one fails with probability `FAILURE`.

    With 500 values or more, noise of 2/3 or 3/2 of its scale fails with probability above 1 - 1e-6.
    """
    count, square = noise.numel(), float(noise.square().sum())
    low, high = chi2.ppf(FAILURE / 2, count), chi2.isf(FAILURE / 2, count)
    if not low <= square <= high:
        raise UnsoundError(f"{prefix}the noise is {math.sqrt(square / count):.3f} times what is charged for")


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


def _fit(model: Synthesizer, images: ImageSet, tape: Tape, base: type[Vault]) -> Run:
    model.vault_type = _recorder(tape, base)  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as name, io.StringIO() as text:
        with redirect_stdout(text), redirect_stderr(text):
            model.fit(images, run_dir=Path(name) / "run")
        files = {str(path.relative_to(name)): path.read_bytes() for path in Path(name).rglob("*") if path.is_file()}
        if model.certificate_.adjacency != model.adjacency or model.certificate_.delta != model.delta:
            raise UnsoundError("the certificate is for another delta or relation than was asked for")
        return Run(model, files, text.getvalue().replace(name, ""))


def _recorder(tape: Tape, base: type[Vault]) -> type[Vault]:
    """A vault that writes down what it computes and, on replay, answers from the tape."""

    class Recorder(base):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "batch_size": 1})  # so that a count of batches shows

        def map(self, transform: Any) -> Vault:
            mapped = super().map(transform)
            mapped._batch_size = 1
            return mapped  # type: ignore[no-any-return]

        def gradient(self, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
            return super().gradient(*args, **{**options, "at_once": 1})  # type: ignore[no-any-return]

        def _drawn(self, release: Release, shares: list[float] | None) -> torch.Tensor:
            """The same records in both runs, and the one that differs in every sample: the worst case."""
            generator = torch.Generator().manual_seed(len(tape.answers))
            chance = torch.rand(self._size + (not tape.present), generator=generator)
            chance[tape.place] = 0
            if not tape.present:
                chance = torch.cat([chance[: tape.place], chance[tape.place + 1 :]])
            tape.shares = shares
            most = release.sampling_prob if shares is None else max(shares)
            if most > release.sampling_prob:
                raise UnsoundError(f"release {release.name!r}: a class is drawn with {most}, more than is charged")
            return (chance < most).nonzero()[:, 0]

        def _normals(self, index: torch.Tensor, count: int) -> torch.Tensor:
            """A record's own numbers are the same in both runs: what is compared is given them."""
            own = index + (index >= tape.place) * (not tape.present)
            seeds = [int(record) + 2**20 * len(tape.answers) for record in own]
            drawn = [torch.randn(count, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
            return torch.stack([torch.zeros(count), *drawn])[1:].to(self.device)

        def _noised(self, release: Release, exact: torch.Tensor, radius: float, secure: bool) -> torch.Tensor:
            asked = Counter(answer.release.name for answer in tape.answers)[release.name] + 1
            if self.ledger.charged(release.name) < asked:
                raise UnsoundError(f"release {release.name!r} was drawn without a charge in the ledger")
            noised: torch.Tensor = super()._noised(release, exact, radius, secure)
            tape.answers.append(Answer(release, exact.clone(), radius, noised.clone(), tape.shares))
            if tape.replay is None:
                return noised
            recorded = tape.replay[len(tape.answers) - 1 :][:1]
            if not recorded or recorded[0].noised.shape != noised.shape:
                raise UnsoundError("the number or order of queries depends on a single record")
            return recorded[0].noised.clone()

    recorder: Any = Recorder
    return recorder  # type: ignore[no-any-return]
