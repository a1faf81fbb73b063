"""`check_synthesizer`: one suite that every method must pass.

Record and replay: the suite fits a method on a small set and records every exact sum and noised release. Then it fits
the method on a neighbouring set, where the vault returns the recorded releases. A sound method cannot distinguish the
two sets: queries, model, files, printed text and samples are the same, and the exact sums differ by at most the
sensitivity. The differing record is the first, the middle or the last; it is ordinary, extreme or the only one of its
class. A method fails if it bypasses the vault, divides by a private size, or omits clipping, noise or charges. A sound
method fails the noise tests with probability at most `FAILURE`.

The suite cannot detect a method that is sound only on these small sets, or timing side channels.
"""

from __future__ import annotations

import io
import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.stats import binom, chi2, norm

from sfumato.certificate import verify
from sfumato.certificate.statement import rounded_up
from sfumato.data import ImageSet
from sfumato.engine import GradientVault, Performance
from sfumato.methods.base import Synthesizer
from sfumato.methods.registry import load, method_type
from sfumato.privacy import Release
from sfumato.privacy.budget import ADJACENCIES, Adjacency

FAILURE = 1e-9  # probability that a sound method fails a noise test
DRAWS = 2000  # samples that are drawn to test the sampling
SEED = 7  # the user's, of all runs that are compared
RUNS = 8  # for the noise tests: enough values of the smallest release, the counts
BATCH = 4  # images per batch: these sets are small
SLACK = 1e-4  # relative tolerance for rounding, in addition to the margin in the sensitivity


RULES = {
    "charges": "every release is charged in the ledger before its noise is drawn",
    "derivatives": "no answer carries a path for derivatives back to exact sums",
    "control flow": "queries, their order, shapes, noise and bounds do not depend on a single record",
    "sensitivity": "one unit moves an exact sum by at most what the noise is scaled to",
    "printed text": "what is printed depends on the images through releases only",
    "outputs": "model, files and samples depend on the images through releases only",
    "seed": "the noise does not depend on the user's seed",
    "noise": "the noise has the scale that is charged",
    "sampling": "samples are fresh Poisson samples with the charged probability",
    "raw images": "raw images are not handed out",
    "budget": "certificate, plan and budget agree",
    "pinned files": "the certificate pins every file of the run",
    "interface": "parameters, saved models and samples behave as for every method",
}


class UnsoundError(AssertionError):
    """A method or vault violates a condition of the guarantee; `rule` is its name in `RULES`."""

    def __init__(self, message: str, rule: str = "interface") -> None:
        super().__init__(message)
        self.rule = rule


@dataclass
class Answer:
    """A recorded query: its exact sum, sensitivity and noised result, and the vault, which can draw again."""

    release: Release
    exact: torch.Tensor
    sensitivity: float
    noised: torch.Tensor
    secure: bool
    vault: Any


@dataclass
class Tape:
    """The recorded queries of a run.

    - place: index of the unit (image or person) in which the neighbouring sets differ.
    - origin: index of each record in the first set.
    - present: whether the unit is in this set, default True.
    - drawn: further units that are in every sample, default none: those in which other neighbours of the set differ.
    - replay: queries of another run whose noised results are returned instead, default None.
    """

    place: int
    origin: torch.Tensor
    present: bool = True
    drawn: Sequence[int] = ()
    replay: list[Answer] | None = None
    answers: list[Answer] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """What shows of a run: its files by name, the printed text, some samples, and the model as numbers."""

    files: dict[str, bytes]
    printed: str
    samples: torch.Tensor
    learned: dict[str, torch.Tensor]


def build(method: str | type[Synthesizer], **settings: Any) -> Synthesizer:
    """Return a method with these parameters and named constants; for tests and experiments."""
    kind = method_type(method) if isinstance(method, str) else method
    constants = {each.name for each in fields(kind) if not each.init}
    model = kind(**{name: value for name, value in settings.items() if name not in constants})
    return model.with_constants(**{name: value for name, value in settings.items() if name in constants})


def check_synthesizer(
    make: Callable[..., Synthesizer], images: ImageSet, *, vault: type[GradientVault] | None = None
) -> None:
    """Raise `UnsoundError` if a method is unsound or does not follow the interface.

    - make: class or function that returns the method, `make(**params)`.
    - images: a small labelled set; its last image must be the only one of its class. If it has persons, they are
      numbered from 0, and all images of a person are added, removed or replaced together.
    - vault: class of the vault, default: the one that the method uses.
    """
    for _, check in soundness_checks(make, images, vault):
        check()


def soundness_checks(
    make: Callable[..., Synthesizer], images: ImageSet, vault: type[GradientVault] | None = None
) -> Iterator[tuple[tuple[str, ...], Callable[[], None]]]:
    """Yield the checks of `check_synthesizer`: the rules that a check covers, and a function that raises."""
    base = vault or make().vault_type
    last = len(images) - 1 if images.persons is None else int(images.persons.max())
    tapes: list[Tape] = []
    places = (0, last // 2, last)
    recorded = cache(partial(_record, make, images, places, base, tapes))  # once per adjacency, for all neighbours
    replayed = ("charges", "derivatives", "control flow", "sensitivity", "printed text", "outputs")
    for place in places:
        for adjacency in ADJACENCIES:
            yield replayed, partial(_check_neighbours, make, images, place, adjacency, base, tapes, recorded)
    yield ("seed", "noise"), partial(_check_noise, make, images, base, tapes)
    yield ("sampling",), partial(_check_sampling, make, images, base)
    yield ("raw images", "budget", "pinned files", "interface"), partial(_check_interface, make, images)


def _neighbours(images: ImageSet, place: int, adjacency: Adjacency) -> list[tuple[ImageSet, torch.Tensor]]:
    """Return neighbouring sets, each with the index of its records in `images`.

    The unit `place` is removed, or replaced by a copy of another unit or by an extreme image.
    """
    assert images.labels is not None
    units = torch.arange(len(images)) if images.persons is None else images.persons
    others = (units != place).nonzero()[:, 0]
    if adjacency == "add-remove":
        return [(images.subset(others), others)]
    checkers = (torch.arange(math.prod(images.shape)) % 2 * 255).byte().reshape(images.shape)
    own, other = int((units == place).nonzero()[0]), int(others[len(others) // 2])
    replaced = []
    for image, label in ((images.images[other], images.labels[other]), (checkers, images.labels[own])):
        origin = torch.cat([others[others < own], torch.tensor([own]), others[others > own]])  # one image in its place
        pixels, labels = images.images[origin], images.labels[origin]
        at = origin == own
        pixels[at], labels[at] = image, label
        persons = None if images.persons is None else images.persons[origin]
        replaced.append((ImageSet(pixels, labels, images.classes, persons=persons), origin))
    return replaced


def _record(
    make: Callable[..., Synthesizer],
    images: ImageSet,
    places: Sequence[int],
    base: type[GradientVault],
    tapes: list[Tape],
    adjacency: Adjacency,
) -> tuple[Tape, Run]:
    """Return a run whose samples all contain the units `places`, and its tape, which is added to `tapes`."""
    tape = Tape(places[0], torch.arange(len(images)), drawn=places)
    run = _fit(make(adjacency=adjacency, seed=SEED), images, tape, base)
    tapes.append(tape)
    return tape, run


def _check_neighbours(
    make: Callable[..., Synthesizer],
    images: ImageSet,
    place: int,
    adjacency: Adjacency,
    base: type[GradientVault],
    tapes: list[Tape] | None = None,
    recorded: Callable[[Adjacency], tuple[Tape, Run]] | None = None,
) -> None:
    """Raise unless runs on neighbouring sets are the same but for their exact sums; add their tapes to `tapes`.

    - recorded: returns the run on `images` for an adjacency, default: it is made for this check.
    """
    kept = [] if tapes is None else tapes
    tape, one = (recorded or partial(_record, make, images, (place,), base, kept))(adjacency)
    for neighbour, origin in _neighbours(images, place, adjacency):
        replayed = Tape(place, origin, adjacency == "replace-one", tape.drawn, replay=tape.answers)
        other = _fit(make(adjacency=adjacency, seed=SEED), neighbour, replayed, base)
        kept.append(replayed)  # its own noise is on the tape, though the method saw the recorded one
        _check_answers(tape.answers, replayed.answers, adjacency)
        _check_same(one, other)


def _check_answers(recorded: list[Answer], replayed: list[Answer], adjacency: Adjacency) -> None:
    if len(recorded) != len(replayed):
        raise UnsoundError("the number or order of queries depends on a single record", "control flow")
    for a, b in zip(recorded, replayed, strict=True):
        name = a.release.name
        if (a.release, a.sensitivity, a.exact.shape) != (b.release, b.sensitivity, b.exact.shape):
            raise UnsoundError(
                f"release {name!r}: its noise, bound, shape or sampling depends on a single record", "control flow"
            )
        allowed = a.sensitivity * a.release.shift(adjacency) * (1 + SLACK)
        moved = float((a.exact.double() - b.exact.double()).norm())
        if moved > allowed:
            raise UnsoundError(
                f"release {name!r}: one record moves the sum by {moved:.6g}, {allowed:.6g} is paid for", "sensitivity"
            )


def _check_same(one: Run, other: Run) -> None:
    """Raise unless two runs with the same releases have bitwise identical outputs."""
    if one.printed != other.printed:
        raise UnsoundError("the printed text depends on the images beyond what was released", "printed text")
    for name in sorted(one.files.keys() | other.files.keys()):
        if one.files.get(name) != other.files.get(name):
            raise UnsoundError(f"{name} depends on the images beyond what was released", "outputs")
    if not torch.equal(one.samples, other.samples):
        raise UnsoundError("samples depend on the images beyond what was released", "outputs")
    a, b = one.learned, other.learned
    if a.keys() != b.keys() or any(
        a[name].shape != b[name].shape or not torch.allclose(a[name], b[name], 0, 0, equal_nan=True) for name in a
    ):
        raise UnsoundError("the model depends on the images beyond what was released", "outputs")


def _learned(model: Synthesizer) -> dict[str, torch.Tensor]:
    """Return the state of a model and the numbers in all its attributes, parameters included."""
    held = {name: _numbers(value) for name, value in vars(model).items() if name != "vault_type"}
    numbers = {name: torch.cat(parts) for name, parts in held.items()}
    return {**numbers, **{f"state {name}": value for name, value in model._state().items()}}


def _numbers(value: Any) -> list[torch.Tensor]:
    """Return the content of a value as numbers: tensors, arrays, containers, networks, objects, or else its `repr`.

    An object that occurs again is replaced by its index, so that cycles terminate and shared parts are cheap.
    """
    found: list[torch.Tensor] = []
    seen: dict[int, int] = {}
    alive: list[Any] = []  # keeps the objects, so that their ids are not reused

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


def _check_noise(
    make: Callable[..., Synthesizer], images: ImageSet, base: type[GradientVault], tapes: Sequence[Tape] = ()
) -> None:
    """Raise unless each release has the charged noise and two runs with the same seed draw different noise.

    - tapes: of runs with the seed `SEED`. If there are fewer than `RUNS`, more runs are made.
    """
    draws: dict[str, list[torch.Tensor]] = defaultdict(list)
    made = [Tape(0, torch.arange(len(images))) for _ in range(RUNS - len(tapes))]
    for tape in made:
        _fit(make(seed=SEED), images, tape, base)
    for tape in (*tapes, *made):
        for answer in tape.answers:
            noise = (answer.noised.double() - answer.exact.double()) / (answer.release.noise * answer.sensitivity)
            draws[answer.release.name].append(noise.flatten())
    for name, noises in draws.items():
        if any(torch.equal(noises[0], noise) for noise in noises[1:]):
            raise UnsoundError(f"release {name!r}: two runs drew the same noise", "seed")
        check_unit_variance(torch.cat(noises), f"release {name!r}: ")


def check_unit_variance(noise: torch.Tensor, prefix: str = "") -> None:
    """Raise if `noise` is not plausibly standard normal; true standard normal noise fails with probability `FAILURE`.

    With 500 values or more, noise of 2/3 or 3/2 of the scale fails with probability above 1 - 1e-6.
    """
    count, square = noise.numel(), float(noise.square().sum())
    low, high = chi2.ppf(FAILURE / 2, count), chi2.isf(FAILURE / 2, count)
    if not low <= square <= high:
        raise UnsoundError(f"{prefix}the noise is {math.sqrt(square / count):.3f} times what is charged for", "noise")


def _check_sampling(make: Callable[..., Synthesizer], images: ImageSet, base: type[GradientVault]) -> None:
    """Raise unless units enter samples independently of each other and of the sample before, as charged.

    Counted over `DRAWS` samples: units (binomial), units in two consecutive samples (binomial), and the spread of the
    sample sizes (by a normal approximation, if enough units are drawn). A sound vault fails each test with a
    probability of about `FAILURE`.
    """
    model = make()
    plan = model.plan(model.public_facts(images))
    for release in plan.releases:
        q = release.sampling_prob
        if q == 1:
            continue
        vault = base(images, plan)
        units, drawn = vault._units, torch.zeros(DRAWS, vault._units, dtype=torch.float64)
        for row in drawn:
            row[vault._unit_of[vault._drawn(release)]] = 1
        counts = {"units": (drawn, q), "units that are drawn twice in a row": (drawn[::2] * drawn[1::2], q**2)}
        for name, (outcomes, chance) in counts.items():
            low, high = (int(binom.ppf(level, outcomes.numel(), chance)) for level in (FAILURE / 2, 1 - FAILURE / 2))
            if not low <= (found := int(outcomes.sum())) <= high:
                wanted = f"a Poisson sample has {low} to {high}"
                raise UnsoundError(f"release {release.name!r}: {name}: {found}, {wanted}", "sampling")
        variance = units * q * (1 - q)
        spread = float((drawn.sum(1) - units * q).square().mean()) / variance
        sd = math.sqrt((2 + (1 - 6 * q * (1 - q)) / variance) / DRAWS)
        if variance * DRAWS > 1000 and abs(spread - 1) > norm.isf(FAILURE / 2) * sd:
            raise UnsoundError(
                f"release {release.name!r}: the variance of sample sizes is {spread:.3f} of a Poisson sample's",
                "sampling",
            )


def _check_interface(make: Callable[..., Synthesizer], images: ImageSet) -> None:
    """Check the estimator conventions: parameters, plan from public facts, save and load, reproducible samples."""
    model = make()
    planned = model.plan(images.public())
    if model.get_params() != type(model)(**model.get_params()).get_params():
        raise UnsoundError("get_params does not rebuild the method")
    with tempfile.TemporaryDirectory() as folder:
        if model.fit(images, run_dir=folder) is not model:
            raise UnsoundError("fit must return the model")
        certificate = model.certificate_
        if certificate.void:
            raise UnsoundError(f"the guarantee is void: {certificate.void}", "raw images")
        if certificate.epsilon is None or certificate.epsilon > model.epsilon:
            raise UnsoundError(
                f"the certificate says epsilon {certificate.epsilon}, the budget is {model.epsilon}", "budget"
            )
        if rounded_up(planned.epsilon) < certificate.epsilon:
            raise UnsoundError("more was released than planned", "budget")
        if uncovered := verify(Path(folder) / "certificate.json").uncovered:
            raise UnsoundError(f"the certificate does not cover {', '.join(uncovered)}", "pinned files")
        again = load(folder, device=model.device)
    sample = model.sample(30, seed=3)
    if not torch.equal(sample.images, again.sample(30, seed=3).images):
        raise UnsoundError("a loaded model draws other images")
    if sample.shape != images.shape or tuple(sample.classes) != tuple(images.classes):
        raise UnsoundError("samples have another shape or other classes than the images")
    if torch.equal(sample.images, model.sample(30, seed=4).images):
        raise UnsoundError("sample ignores its seed")


def record(model: Synthesizer, images: ImageSet, tape: Tape, base: type[GradientVault], **options: Any) -> Synthesizer:
    """Fit a model through a vault that records its queries on the tape, or replays those of another one."""
    model.vault_type = _recorder(tape, base)  # type: ignore[misc]
    return model.fit(images, **options)


def _fit(model: Synthesizer, images: ImageSet, tape: Tape, base: type[GradientVault]) -> Run:
    same_time = mock.patch("sfumato.certificate.issue._now", return_value="2000-01-01T00:00:00+00:00")
    with tempfile.TemporaryDirectory() as name, io.StringIO() as text, same_time:
        with redirect_stdout(text), redirect_stderr(text):
            record(model, images, tape, base, run_dir=Path(name) / "run")
        files = {str(path.relative_to(name)): path.read_bytes() for path in Path(name).rglob("*") if path.is_file()}
        if model.certificate_.adjacency != model.adjacency or model.certificate_.delta != model.delta:
            raise UnsoundError("the certificate states another delta or adjacency than requested", "budget")
        printed = text.getvalue().replace(name, "")
    samples = model.sample(20, seed=1).images
    return Run(files, printed, samples, _learned(model))


def _recorder(tape: Tape, base: type[GradientVault]) -> type[GradientVault]:
    """Return a vault class that records its queries and, with `tape.replay`, returns the recorded results."""

    class Recorder(base):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "performance": Performance(batch_size=BATCH)})

        def gradient(self, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
            small = replace(options.get("performance") or Performance(), batch_size=BATCH)
            return super().gradient(*args, **{**options, "performance": small})  # type: ignore[no-any-return]

        def _new_run(self) -> str:
            return "check"

        def _drawn(self, release: Release) -> torch.Tensor:
            """Return the same units in both runs, and always those that may differ: the worst case."""
            generator = torch.Generator().manual_seed(len(tape.answers))
            chance = torch.rand(self._units + (not tape.present), generator=generator)
            chance[[tape.place, *tape.drawn]] = 0
            if not tape.present:
                chance = torch.cat([chance[: tape.place], chance[tape.place + 1 :]])
            drawn: torch.Tensor = self._chosen[(chance < release.sampling_prob)[self._unit_of[self._chosen]]]
            return drawn

        def _normals(self, index: torch.Tensor, count: int) -> torch.Tensor:
            """Return the same numbers for a record in both runs: the guarantee holds given these numbers (proof 2)."""
            own = torch.cat([tape.origin, torch.tensor([2**20])])[index.flatten()]  # the last: empty slots
            seeds = [int(record) + 2**21 * len(tape.answers) for record in own]
            drawn = [torch.randn(count, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
            return torch.stack(drawn).to(self.device)

        def _noised(self, release: Release, exact: torch.Tensor, sensitivity: float, secure: bool) -> torch.Tensor:
            asked = Counter(answer.release.name for answer in tape.answers)[release.name] + 1
            if self.ledger.charged(release.name) < asked:
                raise UnsoundError(f"release {release.name!r} was drawn without a charge in the ledger", "charges")
            noised: torch.Tensor = super()._noised(release, exact, sensitivity, secure)
            tape.answers.append(Answer(release, exact.clone(), sensitivity, noised.clone(), secure, self))
            if tape.replay is None:
                return noised
            recorded = tape.replay[len(tape.answers) - 1 :][:1]
            if not recorded or recorded[0].noised.shape != noised.shape:
                raise UnsoundError("the number or order of queries depends on a single record", "control flow")
            return recorded[0].noised.clone()

        def _answer(self, *args: Any) -> torch.Tensor:
            answer: torch.Tensor = super()._answer(*args)
            if answer.requires_grad:
                raise UnsoundError(f"release {args[0].name!r}: its answer can be differentiated", "derivatives")
            return answer

        def draw_noise(self, answer: Answer, exact: torch.Tensor) -> torch.Tensor:
            """Return sums with fresh noise of a recorded release."""
            noised: torch.Tensor = super()._noised(answer.release, exact, answer.sensitivity, answer.secure)
            return noised

        def draw_unit(self, release: Release) -> bool:
            """Return whether the differing unit is in a fresh sample of a release."""
            return bool((self._unit_of[super()._drawn(release)] == tape.place).any())

    recorder: Any = Recorder
    return recorder  # type: ignore[no-any-return]
