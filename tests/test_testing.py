"""Every registered method passes `check_synthesizer`, and planted faults do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sfumato.audit.faults import HalfNoise, NoCharge, PrivateMean
from sfumato.audit.small_settings import SMALL_SETTINGS
from sfumato.data import ImageSet, PublicFacts
from sfumato.engine import GradientVault
from sfumato.methods.dp_merf import MeanEmbedding
from sfumato.methods.prior_painter import PainterTraining
from sfumato.methods.registry import METHODS
from sfumato.methods.teacher import TeacherSettings
from sfumato.nets.stacked import stacked
from sfumato.privacy import Budget, Release
from sfumato.privacy.budget import ADJACENCIES
from sfumato.privacy.mechanisms import add_gaussian
from sfumato.testing import (
    UnsoundError,
    _check_neighbours,
    _check_noise,
    build,
    check_synthesizer,
    check_unit_variance,
)

PRIOR = Path(__file__).parent / "priors" / "tiny.safetensors"  # random weights
CONDITIONED = PRIOR.with_name("conditioned.safetensors")  # also random, with an embedding
ADAPTATION = PainterTraining(pool=12, rounds=2, practice_steps=1, practice_batch=4, levels=2)
WITH_PRIOR = {key: {**SMALL_SETTINGS[key], "prior": str(PRIOR)} for key in ("dp-diffusion", "private-evolution")}
QUICK = {**SMALL_SETTINGS, **WITH_PRIOR}
PRIVATE = [key for key, method in METHODS.items() if method.guarantee == "differential-privacy"]


def quick(key: str, kind: Any = None) -> Any:
    return lambda **params: build(kind or key, **{"device": "cpu", **QUICK[key], **params})


@pytest.mark.parametrize("key", PRIVATE)
def test_every_method_is_sound(key: str, fewer_digits: ImageSet) -> None:
    check_synthesizer(quick(key), fewer_digits)


@pytest.mark.parametrize(
    "settings",
    [
        {"tune": "all", "curriculum": False},
        pytest.param({"tune": "low-rank"}, marks=pytest.mark.slow),  # the same query, other parameters
        pytest.param({"steps": 0}, marks=pytest.mark.slow),  # the counts and means of the other forms, no gradients
    ],
    ids=str,
)
def test_every_form_of_dp_diffusion_is_sound(settings: dict[str, Any], fewer_digits: ImageSet) -> None:
    check_synthesizer(lambda **params: quick("dp-diffusion")(**{**settings, **params}), fewer_digits)


@pytest.mark.parametrize(
    "settings",
    [
        {"prior": str(CONDITIONED)},
        pytest.param({"prior": str(PRIOR)}, marks=pytest.mark.slow),  # the painter of dp-diffusion, with a teacher
        pytest.param({"prior": str(CONDITIONED), "steps": 0}, marks=pytest.mark.slow),  # the same, no gradients
    ],
    ids=str,
)
def test_atelier_with_a_prior_is_sound(
    settings: dict[str, Any], fewer_digits: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sfumato.methods.embedding_painter.MIN_IMAGES_PER_CLASS", 1)  # images, for a correction
    prior = {**QUICK["dp-diffusion"], "teacher": TeacherSettings(steps=2), **settings}
    check_synthesizer(lambda **params: build("atelier", **{"device": "cpu", **prior, **params}), fewer_digits)


@pytest.mark.slow
def test_evolution_after_an_adaptation_is_sound(fewer_digits: ImageSet) -> None:
    options = {"prior": str(CONDITIONED), "adapt": True, "steps": 2, "sampling_prob": 0.5, "adaptation": ADAPTATION}
    check_synthesizer(lambda **params: quick("private-evolution")(**{**options, **params}), fewer_digits)


@pytest.mark.parametrize("key", [key for key in METHODS if key not in PRIVATE])
def test_a_method_without_guarantee_says_so(key: str, few_digits: ImageSet) -> None:
    """In its class, in its certificate; and the suite does not take it for a private one."""
    assert METHODS[key].guarantee == "none"
    certificate = quick(key)().fit(few_digits).certificate_
    assert (certificate.guarantee, certificate.epsilon) == ("none", None)
    assert certificate.void
    with pytest.raises(UnsoundError):
        check_synthesizer(quick(key), few_digits)


class Mean(GradientVault):
    def _answer(self, release: Release, query: Any, exact: Callable[[], torch.Tensor]) -> torch.Tensor:
        smaller = replace(query, sensitivity=query.sensitivity / self._units)
        return super()._answer(release, smaller, lambda: exact() / self._units)


class FixedNoise(GradientVault):
    def _noised(self, release: Release, exact: torch.Tensor, sensitivity: float, secure: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return exact + release.noise * sensitivity * torch.randn(exact.shape, generator=generator, dtype=torch.float64)


class QuietCounts(GradientVault):
    """A tenth of the noise, on the smallest release only."""

    def _noised(self, release: Release, exact: torch.Tensor, sensitivity: float, secure: bool) -> torch.Tensor:
        scale = 0.1 if release.name == "counts" else 1.0
        return add_gaussian(exact, release.noise * sensitivity * scale)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (HalfNoise, r"0\.\d+ times what is charged"),
        (Mean, "noise, bound, shape or sampling depends on a single record"),
        (PrivateMean, "one record moves the sum"),
        (NoCharge, "without a charge"),
        (FixedNoise, "two runs drew the same noise"),
        (QuietCounts, "'counts': the noise is 0"),
    ],
)
def test_a_faulty_vault_is_caught(fault: type[GradientVault], message: str, few_digits: ImageSet) -> None:
    with pytest.raises(UnsoundError, match=message):
        check_synthesizer(quick("dp-merf"), few_digits, vault=fault)


class Long(MeanEmbedding):
    """Rows of norm 3 under a bound of 1: sound, because the vault clips them."""

    def _fit(self, vault: GradientVault, public: Any) -> None:
        vault.sum(lambda images: 3 * torch.nn.functional.normalize(images.flatten(1)), release="long", bound=1.0)
        super()._fit(vault, public)

    def _releases(self, public: Any) -> list[Release]:
        return [*super()._releases(public), Release("long")]


def test_missing_clipping_is_caught(few_digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(**params: Any) -> Long:
        return build(Long, **{"device": "cpu", **QUICK["dp-merf"], **params})

    check_synthesizer(make, few_digits)
    monkeypatch.setattr("sfumato.privacy.vault.clip", lambda rows, bound, unit, nonnegative: rows.double() / unit)
    with pytest.raises(UnsoundError, match="one record moves the sum"):
        check_synthesizer(make, few_digits, vault=NotSecure)


class NotSecure(GradientVault):
    """The fast form: the secure one has a second guard that drops long rows."""

    def _secure(self, release: Release) -> bool:
        return False


class Spy(MeanEmbedding):
    """Reaches past the vault's queries."""

    def _fit(self, vault: GradientVault, public: Any) -> None:
        super()._fit(vault, public)
        self._use(vault._pixels(torch.arange(len(vault._images))))

    def _use(self, images: torch.Tensor) -> None:
        pass


class InTheModel(Spy):
    def _use(self, images: torch.Tensor) -> None:
        self.counts_ = self.counts_ + images.sum() * 1e-3


class FirstImage(Spy):
    def _use(self, images: torch.Tensor) -> None:
        self.counts_ = self.counts_ + images[0].sum() * 1e-3


class InAnAttribute(Spy):
    def _use(self, images: torch.Tensor) -> None:
        self.mean_ = images.mean()


class InAList(Spy):
    def _use(self, images: torch.Tensor) -> None:
        self.sizes_ = [len(images)]


class InAParameter(Spy):
    def _use(self, images: torch.Tensor) -> None:
        self.batch_size = len(images)


class Printed(Spy):
    def _use(self, images: torch.Tensor) -> None:
        print("loss", float(images.mean()))


class Noted(Spy):
    def _use(self, images: torch.Tensor) -> None:
        self.note_ = f"trained on {len(images)} images"


class InASet(Spy):
    def _use(self, images: torch.Tensor) -> None:
        self.seen_ = {len(images)}


class Hidden(Spy):
    """Where numbers hide: arrays, keys, bytes, networks, objects."""

    def _use(self, images: torch.Tensor) -> None:
        network = torch.nn.Linear(1, 1)
        network.weight.data.fill_(len(images))
        holder = SimpleNamespace(count=len(images))
        places = [np.array(len(images)), np.float32(len(images)), {len(images): 1}, bytes(len(images)), network, holder]
        self.hidden_ = [places[self.batch_size - 20]]


class Mixup(MeanEmbedding):
    """An augmentation that looks at other images."""

    def _releases(self, public: Any) -> list[Release]:
        return [*super()._releases(public), Release("mixed")]

    def _fit(self, vault: GradientVault, public: Any) -> None:
        vault.sum(lambda images: (images + images.flip(0)).flatten(1), release="mixed", bound=1.0)
        super()._fit(vault, public)


class NoNoiseOfItsOwn(MeanEmbedding):
    class vault_type(GradientVault):  # type: ignore[assignment]
        def _noised(self, release: Release, exact: torch.Tensor, sensitivity: float, secure: bool) -> torch.Tensor:
            return exact


class Deaf(MeanEmbedding):
    """Accounts for addition whatever it is asked for."""

    def _budget(self, unit: Any = "image") -> Budget:
        return Budget(self.epsilon, self.delta, unit=unit)


class SecondHelping(MeanEmbedding):
    """Asks again depending on the number of images."""

    def _releases(self, public: Any) -> list[Release]:
        return [*super()._releases(public), Release("more", 2)]

    def _fit(self, vault: GradientVault, public: Any) -> None:
        for _ in range(1 + len(vault._images) % 2):
            vault.sum(lambda images: images.flatten(1), release="more", bound=1.0)
        super()._fit(vault, public)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (InTheModel, r"(model.safetensors|certificate.json) depends on"),
        (FirstImage, r"(model.safetensors|certificate.json) depends on"),
        (InAnAttribute, "the model depends on"),
        (InAList, "the model depends on"),
        (InAParameter, "the model depends on"),
        (Printed, "the printed text depends on"),
        (Noted, "the model depends on"),
        (InASet, "the model depends on"),
        (Mixup, "mixes the images"),
        (NoNoiseOfItsOwn, "two runs drew the same noise|0.000 times what is charged"),
        (Deaf, "another delta or adjacency"),
        (SecondHelping, "number or order of queries depends on"),
    ],
)
def test_a_faulty_method_is_caught(method: type[MeanEmbedding], message: str, few_digits: ImageSet) -> None:
    with pytest.raises((UnsoundError, ValueError), match=message):
        check_synthesizer(lambda **params: build(method, **{"device": "cpu", **QUICK["dp-merf"], **params}), few_digits)


@pytest.mark.parametrize("place", range(6))
def test_a_number_is_found_wherever_it_hides(place: int, few_digits: ImageSet) -> None:
    with pytest.raises(UnsoundError, match="the model depends on"):
        check_synthesizer(
            lambda **params: quick("dp-merf", Hidden)(**{"batch_size": 20 + place, **params}),
            few_digits,
        )


class Careless(MeanEmbedding):
    """Counts calls, keeps what its feature saw, prints: it runs on public images only, so that nothing shows."""

    def _releases(self, public: Any) -> list[Release]:
        return [*super()._releases(public), Release("seen", 3, 0.5)]

    def _fit(self, vault: GradientVault, public: Any) -> None:
        self.calls_, self.kept_ = 0, None

        def feature(images: torch.Tensor) -> torch.Tensor:
            self.calls_ += 1
            print("rows", tuple(images.shape))
            return images.flatten(1)

        mapped = vault.map(feature)
        for _ in range(3):
            mapped.sum(feature, release="seen", bound=1.0)
        super()._fit(vault, public)


def test_a_careless_method_is_sound(few_digits: ImageSet) -> None:
    for adjacency in ADJACENCIES:
        _check_neighbours(
            quick("dp-merf", Careless),
            few_digits,
            30,
            adjacency,
            GradientVault,
        )


# -- persons ------------------------------------------------------------------------------------------------


@pytest.fixture
def people(fewer_digits: ImageSet) -> ImageSet:
    """Six persons with images of three classes, and one with a single image of a fourth."""
    owners = torch.arange(len(fewer_digits)) % 6
    owners[-1] = 6
    return ImageSet(fewer_digits.images, fewer_digits.labels, fewer_digits.classes, persons=owners)


@pytest.mark.parametrize("key", ["dp-merf", "ndpdc", "dp-lflow", "dpmix"])
def test_methods_are_sound_for_persons(key: str, people: ImageSet) -> None:
    check_synthesizer(quick(key), people)
    certificate = quick(key)().fit(people).certificate_
    assert certificate.unit == "person"


class EveryImageInFull(GradientVault):
    """Forgets that a person's images share one weight."""

    def _set_units(self, *args: Any) -> None:
        super()._set_units(*args)
        self._weights = torch.ones_like(self._weights)


class HalfWeight(GradientVault):
    """Half the weight, however many images a person has."""

    def _set_units(self, *args: Any) -> None:
        super()._set_units(*args)
        self._weights = torch.full_like(self._weights, 0.5)


@pytest.mark.parametrize("fault", [EveryImageInFull, HalfWeight])
@pytest.mark.parametrize("key", ["dp-merf", "dp-lflow"])
def test_a_vault_that_forgets_persons_is_caught(
    fault: type[GradientVault], key: str, people: ImageSet, fewer_digits: ImageSet
) -> None:
    if fault is EveryImageInFull:
        _check_neighbours(quick(key), fewer_digits, 3, "add-remove", fault)  # without persons it does not show
    with pytest.raises(UnsoundError, match="one record moves the sum"):
        _check_neighbours(quick(key), people, 2, "add-remove", fault)


def test_unit_variance_accepts_and_rejects() -> None:
    noise = torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    check_unit_variance(noise)
    for scale in (2 / 3, 3 / 2):
        with pytest.raises(UnsoundError, match="times what is charged"):
            check_unit_variance(noise * scale)


class WithGradients(MeanEmbedding):
    """A method that also asks for gradients, of a network per class, with random views."""

    def _releases(self, public: PublicFacts) -> list[Release]:
        return [*super()._releases(public), Release("gradients", 2, 0.5)]

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        super()._fit(vault, public)
        torch.manual_seed(0)
        whole = stacked([torch.nn.Linear(64, 3).to(vault.device) for _ in public.classes])
        for _ in range(2):
            self.asked_ = vault.gradient(
                whole,
                _jittered,
                release="gradients",
                bound={"weight": 0.5, "bias": 0.1},
                by_class=True,
                views=2,
                draws=64,
            )


def _jittered(model: torch.nn.Module, images: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
    return model(images.flatten(1) + normals).square().sum(1)  # type: ignore[no-any-return]


class NoiseOfOneGroup(GradientVault):
    """As if the smaller group were alone."""

    def _noised(self, release: Release, exact: torch.Tensor, sensitivity: float, secure: bool) -> torch.Tensor:
        return super()._noised(release, exact, sensitivity * (0.1 if release.name == "gradients" else 1), secure)


def test_gradients_pass_record_and_replay(few_digits: ImageSet) -> None:
    def make(**params: Any) -> Any:
        return build(WithGradients, **{"device": "cpu", **QUICK["dp-merf"], **params})

    for place in (0, 30, len(few_digits) - 1):
        for adjacency in ADJACENCIES:
            _check_neighbours(make, few_digits, place, adjacency, GradientVault)
    _check_noise(make, few_digits, GradientVault)
    with pytest.raises(UnsoundError, match="gradients"):
        _check_noise(make, few_digits, NoiseOfOneGroup)
