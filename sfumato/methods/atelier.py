"""Atelier: a private painter with a private teacher; a method of this package.

The idea: part of the budget trains a *painter*, a generator that follows noisy kernel means (`dp_kernel.py`); the rest
trains a *teacher*, a linear classifier, by noisy gradients. A linear teacher learns much at small epsilon, and makes no
images; a painter makes images, and some of another class than it was asked for. So the teacher looks at what the
painter makes: an image is of the class that the teacher sees in it. All of that is post-processing: it costs nothing.

What the teacher looks at: wavelet scattering coefficients, and the maps of a small CNN that was taught to tell
*painted* images apart; of both the principal components among painted images, the lesser ones enlarged. So a gradient
has few entries that noise can fall on, and descends in all directions at about the same speed. None of that was taught
by a private image. A public encoder, if one is named, is a third thing to look at. Where the painter paints an
autoencoder's maps, the teacher looks at these in the place of scattering: images would have to be decoded first.

Released: what `dp-kernel` releases, where noise is great with sums whatever the class beside; and some noisy sums over
all images of the gradients of the teacher's loss, each clipped to `teacher_bound`. Budget and public facts settle which
and how many.
Public: image shape, class names, a public encoder if one is named; frequencies and initial weights, from the seed.
Events: Gaussian sums over all images (or Poisson samples of them), composed exactly. The proof is that of a
composition: each release is the Gaussian mechanism on a sum of bounded rows, and nothing else is seen.

`teacher_share` is the teacher's part of the budget: Gaussian releases compose by adding 1 / noise², and that sum is
what is divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional

from sfumato.data import DataError, ImageSet, PublicFacts
from sfumato.encoders import load_perceptual
from sfumato.encoders.autoencoder import load_autoencoder
from sfumato.engine import Performance, Vault
from sfumato.methods.dp_kernel import KernelGenerator
from sfumato.methods.seeing import Encoded, Maps, Taught, Vectors, scaled_maps, untaught
from sfumato.nets.augmentation import moved
from sfumato.nets.generator import parts
from sfumato.privacy import Release

Look = Callable[[torch.Tensor], torch.Tensor]
DISAGREEMENT = ("relabel", "drop", "keep")
MOMENTUM = 0.9
AT_ONCE = 512  # rows in a gradient's batch: the margin for rounding grows with it
CALM = 6e-3  # noise of all the teacher's gradients together, per image, times their number: above it the rate is lower
QUIET = 3e-5  # that noise, below which there is more to learn: more steps, and more components
FEW_STEPS, MANY_STEPS = 60, 200
TRIES = 20  # of the painter, until the teacher sees the class that is asked for
FEW, MANY = 500, 1500  # components
LEVELLING, LEAST_SPREAD = 0.5, 1e-4  # the power by which their spreads are levelled
NO_TEACHER = "there are no classes, so that there is no teacher and there are no soft labels"
ENCODED = "a public encoder makes a better teacher, and worse images where that was measured (CIFAR-10, epsilon 1)"
SEEN_AT_ONCE = 250  # images: a network that looks at them keeps megabytes of each
GREAT = 1.3e-3  # noise of the whole budget per image of a class: epsilon 0.2 of 60,000 in ten classes has it, 1 has not
CAUTIOUS = {**KernelGenerator.on_cpu, "smoothness": 0.6}  # a painter's, where noise is great
CAUTION = ("auto", "on", "off")
LOOKED_AT = 200  # images of each class, to learn what the teacher sees in what the painter makes


@dataclass(kw_only=True, eq=False)
class Atelier(KernelGenerator):
    """A generator that follows noisy kernel means, and a linear teacher that says what its images show.

    disagreement: what becomes of images in which the teacher sees another class than the painter meant: `relabel`, they
    are of the class that the teacher sees; `drop`; `keep`, as the painter meant. soft_labels: whether samples come with
    the teacher's probabilities, beside their labels. Both may change after `fit`. teacher_share: its part of the
    budget. teacher_steps, teacher_bound, teacher_rate: of the noisy gradients; 0 steps: as many as suit the noise, and
    the rate is lower where that is great. teacher_encoder: a public network that the teacher alone looks through, as
    `load_perceptual` takes it; left out, it is `encoder`. teacher_side: images are enlarged to so many pixels across
    for it; networks see more where images are about as large as those that they were trained on. variety: from 0 to 1,
    how far images that are relabelled go beyond what the painter makes of a class: towards another class, up to half
    way (not with `parallel`, which has no way between), turned by up to 8 degrees, scaled by 6 % and shifted by 5 %
    (not with `autoencoder`). It may change after `fit`, too. caution: of the painter, who must not follow noise too
    closely: `on`, those of steps, batch_size, features_per_step, scattering_share and smoothness that are at their
    defaults, be it that they were given, take cautious values; `auto`, where noise is great, which budget and public
    facts tell, for 30,000 images if sizes are not declared; `off`. All others are the painter's, as in `dp-kernel`.
    """

    key: ClassVar[str] = "atelier"
    paper: ClassVar[str] = "this package"
    summary: ClassVar[str] = "dp-kernel's painter, and a private teacher who says what its images show"
    adjustable: ClassVar[frozenset[str]] = frozenset({"disagreement", "soft_labels", "variety"})
    may_be_zero: ClassVar[frozenset[str]] = KernelGenerator.may_be_zero | {"teacher_steps", "variety"}
    on_cpu: ClassVar[dict[str, Any]] = {**KernelGenerator.on_cpu, "teacher_steps": FEW_STEPS}

    common_share: float = 0.5
    common_above: float = GREAT
    caution: str = "auto"
    disagreement: str = "relabel"
    soft_labels: bool = False
    teacher_share: float = 0.4
    teacher_steps: int = 0
    teacher_bound: float = 0.5
    teacher_rate: float = 60.0
    teacher_encoder: str = ""
    teacher_side: int = 128
    variety: float = 1.0

    def validate(self) -> Self:
        if self.form != "pathwise":
            raise ValueError(f"atelier's painter is pathwise, not {self.form!r}; dp-kernel has the other forms")
        super().validate()
        if self.disagreement not in DISAGREEMENT:
            raise ValueError(f"disagreement must be one of {', '.join(DISAGREEMENT)}, got {self.disagreement!r}")
        if self.teacher_encoder and self.autoencoder:
            raise ValueError(
                "teacher_encoder looks at images, and with autoencoder the teacher sees its maps; leave one out"
            )
        if self.teacher_steps == 1:
            raise ValueError("teacher_steps must be at least 2, or 0 for as many as suit the noise")
        if not self.teacher_share < 1:
            raise ValueError(f"teacher_share must lie between 0 and 1, got {self.teacher_share!r}")
        if self.caution not in CAUTION:
            raise ValueError(f"caution must be one of {', '.join(CAUTION)}, got {self.caution!r}")
        if not self.variety <= 1:
            raise ValueError(f"variety must lie between 0 and 1, got {self.variety!r}")
        return self

    def _suiting(self, public: PublicFacts) -> dict[str, Any]:
        """Who follows noisy means closely paints noise: fewer steps, smaller batches, and roughness costs."""
        if self.caution == "off" or (self.caution == "auto" and self._class_noise(public) < GREAT):
            return {}
        left = {field.name for field in fields(self) if getattr(self, field.name) == field.default}
        own = CAUTIOUS.keys() & left - ({"smoothness"} if self.autoencoder else set())
        return {name: CAUTIOUS[name] for name in sorted(own)}

    def explain_plan(self, public: PublicFacts) -> list[str]:
        suited = ", ".join(f"{name} {value:g}" for name, value in self._suiting(public).items())
        why = "noise is great" if self.caution == "auto" else "as asked for"
        cautious = [f"the painter is cautious, {why}: {suited} (caution='off': not)"] if suited else []
        encoded = (self.teacher_encoder or self.encoder) and _taught(public)
        return [*cautious, ENCODED] if encoded else cautious

    def _releases(self, public: PublicFacts) -> list[Release]:
        painter = super()._releases(public)
        if not _taught(public):
            if self.soft_labels:
                raise DataError(NO_TEACHER)
            return painter
        times, share = self._teacher_steps(public), self.teacher_share
        weight = math.sqrt(times * (1 - share) / (share * self._stages))
        return [*painter, Release("teacher", times, self.sampling_prob, weight=weight)]

    def _teacher_steps(self, public: PublicFacts) -> int:
        """Those that are asked for; or more where the noise, which public facts and the budget tell, is small."""
        if self.teacher_steps:
            return self.teacher_steps
        return MANY_STEPS if self._whole_noise(public) < QUIET * math.sqrt(self.teacher_share) else FEW_STEPS

    def _facts(self, public: PublicFacts) -> dict[str, Any]:
        own = {"teacher_encoder": load_perceptual(self.teacher_encoder).facts} if self.teacher_encoder else {}
        return {**super()._facts(public), **own}

    def _learn(self, vault: Vault, public: PublicFacts) -> None:
        if self.teacher_encoder:
            self._confirm(vault, load_perceptual(self.teacher_encoder).facts, "teacher_encoder")
        super()._learn(vault, public)
        if _taught(public):
            self.teacher_ = self._teach(vault, public)
            self.origins_ = self._origins(len(public.classes))

    def _new_teacher(self, public: PublicFacts, taught: Maps) -> Teacher:
        device = self.torch_device
        looks: list[Look] = [Maps(nn.Identity()) if self.autoencoder else Vectors(public.shape).to(device).scattering]
        if name := self.teacher_encoder or self.encoder:
            looks.append(Encoded(load_perceptual(name, device), public.shape, self.teacher_side))
        return Teacher(public.shape, taught.to(device), looks, len(public.classes)).requires_grad_(False)

    def _teach(self, vault: Vault, public: PublicFacts) -> Teacher:
        """Full-batch gradient descent with momentum, each gradient a noisy sum."""
        times, expected = vault.plan["teacher"].times, float(self.counts_.sum())
        noise = vault.plan["teacher"].noise / (math.sqrt(times) * expected)
        teacher, components = self._schooled(public, MANY if noise < QUIET else FEW)
        linear = nn.utils.skip_init(nn.Linear, components.axes.shape[1], len(public.classes), bias=False)
        nn.init.zeros_(linear.to(self.torch_device).weight)
        velocity = torch.zeros_like(linear.weight)
        seen = vault.map(lambda images: components(teacher.look(images)))
        rate = self.teacher_rate * (min(1.0, CALM / (noise * times)) if noise > 0 else 1.0)
        for _ in self._checkpoints.loop("teacher", times, linear=linear, velocity=velocity):
            sums = seen.gradient(
                linear,
                _surprise,
                release="teacher",
                bound=self.teacher_bound,
                with_labels=True,
                performance=Performance(batch_size=AT_ONCE),
            )
            velocity.mul_(MOMENTUM).add_(sums["weight"] / (self.sampling_prob * expected))
            with torch.no_grad():
                linear.weight -= rate * velocity
        teacher.know(components, linear.weight.detach())
        return teacher

    def _schooled(self, public: PublicFacts, most: int) -> tuple[Teacher, Components]:
        """A teacher who knows painted images, and the principal components of what it sees in them."""
        known: list[tuple[Teacher, Components]] = []

        def make() -> dict[str, torch.Tensor]:
            generator = torch.Generator(self.torch_device).manual_seed(self.seed)
            labels = self._even_labels(self.lessons)
            painted = self._painted(labels, generator)
            teacher = self._new_teacher(public, Taught(painted, labels, len(public.classes), generator))
            rows = torch.cat([teacher.look(part) for part in painted.split(self.sample_batch)])
            components = Components.of(rows, most, self.seed)
            known.append((teacher, components))
            taught = {f"taught.{name}": value for name, value in teacher.taught.state_dict().items()}
            return {"centre": components.centre, "axes": components.axes, **taught}

        saved = self._checkpoints.once("components", make)
        if not known:
            maps = untaught(public.shape, len(public.classes))
            own = {name: value for name, value in saved.items() if name.startswith("taught.")}
            maps.load_state_dict({name.removeprefix("taught."): value for name, value in own.items()})
            components = Components(saved["centre"].to(self.torch_device), saved["axes"].to(self.torch_device))
            known.append((self._new_teacher(public, maps), components))
        return known[0]

    def _painted(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """What the painter makes, whatever the teacher says."""
        with torch.no_grad():
            parts = [super(Atelier, self)._paint(part, generator) for part in labels.split(self.sample_batch)]
        return torch.cat(parts)

    def _even_labels(self, count: int) -> torch.Tensor:
        """At least so many labels, as many of each class."""
        classes = len(self.counts_)
        return torch.arange(classes, device=self.torch_device).repeat(math.ceil(count / classes))

    def _origins(self, classes: int) -> torch.Tensor:
        """[class that the teacher sees, class that the painter meant]: how often, among what is painted."""
        meant = self._even_labels(LOOKED_AT * classes)
        generator = torch.Generator(self.torch_device).manual_seed(self.seed)
        painted = self._painted(meant, generator)
        seen = torch.cat([self.teacher_(part).argmax(1) for part in painted.split(self.sample_batch)])
        pairs = functional.one_hot(seen, classes).T.double() @ functional.one_hot(meant, classes).double()
        shares = (pairs + torch.eye(classes, device=pairs.device)) * (self.counts_ / self.counts_.sum())
        return (shares / shares.sum(1, keepdim=True)).float()

    # -- samples ----------------------------------------------------------------------------------------------

    def _paint(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Painted again and again, until the teacher sees in each image what is asked for, or patience ends."""
        images = self._painted(labels, generator)
        if self.disagreement == "keep" or len(self.counts_) == 1:
            return images
        alike = torch.eye(len(self.counts_), device=labels.device)
        origins = self.origins_ if self.disagreement == "relabel" else alike
        left = torch.arange(len(labels), device=labels.device)
        for _ in range(TRIES):
            wanted = labels[left]
            painted = self._varied(torch.multinomial(origins[wanted], 1, generator=generator)[:, 0], generator)
            found = self.teacher_(painted).argmax(1) == wanted
            images[left[found]] = painted[found]
            left = left[~found]
            if not len(left):
                break
        return images

    def _varied(self, meant: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Painted between classes and moved a little, if the teacher is to say what is to be seen."""
        if not self.variety or self.disagreement != "relabel":
            return self._painted(meant, generator)
        if not self._per_class:
            classes, device = len(self.counts_), meant.device
            further = torch.randint(1, classes, meant.shape, generator=generator, device=device)
            other = (meant + further) % classes
            share = self.variety / 2 * torch.rand(len(meant), 1, generator=generator, device=device)
            meant = torch.lerp(parts(meant, classes).float(), parts(other, classes).float(), share)
        painted = self._painted(meant, generator)
        return painted if self.autoencoder else moved(painted, generator, self.variety)

    def sample(
        self, n: int, *, labels: int | str | Sequence[int] | None = None, seed: int = 0, **options: Any
    ) -> ImageSet:
        """`n` synthetic images, as for every method; with `soft_labels`, what the teacher sees in each of them, too."""
        images = super().sample(n, labels=labels, seed=seed, **options)
        with self._adjusted(options):
            return replace(images, soft_labels=self.probabilities(images)) if self.soft_labels else images

    def probabilities(self, images: ImageSet) -> torch.Tensor:
        """What the teacher sees in images: a probability for each class, [N, classes].

        The teacher is post-processing of releases, so this costs no privacy of the images that were learned from. It
        tells of the images that are looked at.
        """
        public = self._fitted()
        if not _taught(public):
            raise DataError(NO_TEACHER)
        if images.shape != public.shape:
            raise DataError(f"images must be {public.shape} like those of the model, not {images.shape}")
        network, seen = load_autoencoder(self.torch_device) if self.autoencoder else None, []
        with torch.no_grad():
            for part in torch.split(images.images, self.sample_batch):
                pixels = part.to(self.torch_device).float() / 127.5 - 1
                canvas = pixels if network is None else scaled_maps(network, pixels)
                seen.append(self.teacher_(canvas).softmax(1).cpu())
        return torch.cat(seen)

    def _state(self) -> dict[str, torch.Tensor]:
        state = super()._state()
        if _taught(self._fitted()):
            state |= {"origins": self.origins_, **self.teacher_.state_dict(prefix="teacher.")}
        return state

    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        if _taught(public):
            canvas = self._canvas(public)
            self.teacher_ = self._new_teacher(canvas, untaught(canvas.shape, len(public.classes)))
            own = {name: value for name, value in state.items() if name.startswith("teacher.")}
            self.teacher_.load_state_dict({name.removeprefix("teacher."): value for name, value in own.items()})
            self.origins_ = state["origins"]
            state = {name: value for name, value in state.items() if name != "origins" and name not in own}
        super()._restore(public, state)


class Teacher(nn.Module):
    """A linear classifier of what is seen in an image: several vectors of norm one at most, side by side."""

    def __init__(self, shape: tuple[int, int, int], taught: Maps, looks: list[Look], classes: int) -> None:
        super().__init__()
        device = next(taught.parameters()).device
        self.taught = taught
        self._looks: list[Look] = [*looks, taught]  # a list: what was not taught here is not in the state
        width = self.look(torch.zeros(1, *shape, device=device)).shape[1]
        self.weight = nn.Parameter(torch.zeros(classes, width, device=device))
        self.bias = nn.Parameter(torch.zeros(classes, device=device))

    @torch.no_grad()
    def look(self, images: torch.Tensor) -> torch.Tensor:
        rows = [torch.cat([look(part) for look in self._looks], 1) for part in images.split(SEEN_AT_ONCE)]
        return torch.cat(rows) / math.sqrt(len(self._looks))

    def know(self, components: Components, weight: torch.Tensor) -> None:
        """Takes over what was learned of the components."""
        self.weight.copy_(weight @ components.axes.T)
        self.bias.copy_(-self.weight @ components.centre)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.look(images), self.weight, self.bias)


@dataclass(frozen=True)
class Components:
    """Principal components of public rows, scaled: rows get a mean norm of one, and lesser components more weight."""

    centre: torch.Tensor
    axes: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, most: int, seed: int) -> Components:
        """At most `most` components of these rows."""
        centre = rows.mean(0)
        count = min(most, *rows.shape)
        with torch.random.fork_rng(devices=[rows.device] if rows.is_cuda else []):
            torch.manual_seed(seed)
            _, spread, axes = torch.svd_lowrank(rows - centre, count, niter=2)
        axes = axes * (spread / spread[0]).clamp_min(LEAST_SPREAD) ** -LEVELLING
        return cls(centre, axes / ((rows - centre) @ axes).norm(dim=1).mean())

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = (rows - self.centre) @ self.axes
        return scaled


def _surprise(model: nn.Module, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(rows), labels, reduction="none")


def _taught(public: PublicFacts) -> bool:
    """Without several classes there is nothing to teach, and the painter works alone."""
    return len(public.classes) > 1
