"""Atelier: a private painter and a private teacher; a method of this package.

Idea: part of the budget trains a *painter*: a generator that follows noisy kernel means (`kernel_painter.py`) or, with
`prior`, a public diffusion model (`embedding_painter.py`, `curriculum_painter.py`). The rest trains a *teacher*,
a linear classifier, by noisy gradients (`teacher.py`). A linear classifier learns much at small epsilon but makes no
images; a generator makes images, some of the wrong class. So the teacher labels what the painter makes. All of that is
post-processing.

Released: what the painter releases, with common sums where the noise is high; noisy gradient sums of the teacher.
Public: image shape, class names, a prior and an encoder if they are named; frequencies and initial weights, from the
seed.
Events: Gaussian sums over all images, composed exactly. `teacher_share` is the teacher's part of the sum of 1 / noise²,
by which Gaussian releases compose. With `prior`, also Poisson-subsampled Gaussian sums, the painter's gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch.nn import functional

from sfumato.data import DataError, ImageSet, PublicFacts
from sfumato.data.pixels import to_unit_range
from sfumato.engine import GradientVault, with_share
from sfumato.features import load_perceptual
from sfumato.features.public_autoencoder import load_autoencoder
from sfumato.features.unit_norm import UnitNormMaps, scaled_latents, untrained_cnn_features
from sfumato.methods.base import ASSUMED_IMAGES, Synthesizer, constant
from sfumato.methods.checkpoints import check_public_files
from sfumato.methods.class_counts import class_counts, counts_release
from sfumato.methods.generator_method import GeneratorSizes
from sfumato.methods.kernel_painter import CPU_BATCH_SIZE, CPU_PAINTER, CPU_STEPS, KernelPainter, PainterSettings
from sfumato.methods.painter_choice import painter_for
from sfumato.methods.parameters import AUTO
from sfumato.methods.prior_painter import (
    CPU_TRAINING,
    MAX_MOMENTS_SHARE,
    PainterTraining,
    PriorPainter,
    gpu_sample_batch,
)
from sfumato.methods.teacher import (
    FEW_STEPS,
    EmbeddingTeacher,
    Teacher,
    TeacherSettings,
    gradient_noise,
    prepare_teacher,
    train_teacher,
)
from sfumato.nets.augmentation import small_affine_warp
from sfumato.nets.generators import class_weights
from sfumato.nets.training import even_labels, state_below
from sfumato.privacy import Release

# Noise of the whole budget per image of a class: epsilon 0.2 with 60,000 images in ten classes is above, 1 is below.
HIGH_NOISE_THRESHOLD = 1.3e-3
MAX_TRIES = 20  # of the painter, until the teacher sees the wanted class
IMAGES_PER_CLASS = 200  # generated, to learn which classes the teacher sees in them
NO_TEACHER = "there are no classes, so there is no teacher and there are no soft labels"
ENCODER_NOTE = "a public encoder gives a better teacher, but worse images where that was measured (CIFAR-10, epsilon 1)"
ASSUMED_NOTE = (
    f"class sizes are not declared, so settings are chosen for {ASSUMED_IMAGES:,} images; with fewer, declare them "
    "(public_size=true) or set preset=high-noise"
)
PRIOR_TEACHER_SHARE = 0.15  # of the budget, with a prior; the gradients take what this and the moments leave
ONLY_WITH_PRIOR = ("adaptation", "sampling_prob")  # settings that have no effect otherwise
ONLY_WITHOUT_PRIOR = (
    "variety",
    "paths",
    "batch_size",
    "painter",
    "generator",
    "teacher.cnn_images",
    "teacher.components",
)
Painter = KernelPainter | PriorPainter
PAINTER = PainterSettings(common_share=0.5, common_threshold=HIGH_NOISE_THRESHOLD)
CPU = replace(CPU_PAINTER, common_share=0.5, common_threshold=HIGH_NOISE_THRESHOLD)


@dataclass(kw_only=True, eq=False)
class Atelier(Synthesizer):
    """A generator that follows noisy kernel means, or a public prior; and a linear teacher that labels its images.

    - prior: text; a public diffusion model that the painter fine-tunes: a name of `sfumato prior list`, or the folder
      of `sfumato prior train`; none.
    - steps: int, 4500; training steps of the painter. With `prior`: private gradients, 50; on a CPU 0.
    - encoder: text; a public network for the teacher's features, as `load_perceptual` takes it; none, or the prior's.
    - autoencoder: `taef2` to generate its latents instead of pixels, for images above 64 pixels; none.
    - disagreement: what to do with images in which the teacher sees another class than the painter meant: `relabel`
      (default; with `prior` it acts as `drop`), `drop`, or `keep` the painter's label. May change after `fit`.
    - soft_labels: bool, False; add the teacher's probabilities to samples. May change after `fit`.
    - variety: float, 1.0; strength from 0 to 1 of the augmentation of relabelled images: mixing of classes, rotation,
      scale, shift. Not used with `prior`. May change after `fit`.

    Presets: `cpu`; `prior` and `prior-cpu`: with a prior; `high-noise`: fewer steps, smaller batches, no scattering
    features, a penalty on total variation.
    """

    key: ClassVar[str] = "atelier"
    paper: ClassVar[str] = "this package"
    summary: ClassVar[str] = "train dp-kernel's generator or a public prior; a private linear teacher labels its images"
    adjustable: ClassVar[frozenset[str]] = frozenset({"disagreement", "soft_labels", "variety"})
    may_be_zero: ClassVar[frozenset[str]] = Synthesizer.may_be_zero | {"variety", "steps"}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "cpu": {
            "steps": CPU_STEPS,
            "batch_size": CPU_BATCH_SIZE,
            "painter": CPU,
            "teacher": TeacherSettings(steps=FEW_STEPS),
        },
        "prior": {"steps": 50, "teacher_share": PRIOR_TEACHER_SHARE, "teacher": TeacherSettings(steps=FEW_STEPS)},
        "prior-cpu": {
            "steps": 0,
            "teacher_share": PRIOR_TEACHER_SHARE,
            "teacher": TeacherSettings(steps=FEW_STEPS),
            "adaptation": CPU_TRAINING,
        },
        "high-noise": {
            "steps": CPU_STEPS,
            "batch_size": CPU_BATCH_SIZE,
            "painter": replace(CPU, smoothness=0.6),
        },
    }

    prior: str = ""
    steps: int = 4500
    encoder: str = ""
    autoencoder: Literal["", "taef2"] = ""
    disagreement: Literal["relabel", "drop", "keep"] = "relabel"
    soft_labels: bool = False
    variety: float = 1.0
    teacher_share: float = constant(0.4)  # the teacher's part of the budget
    sampling_prob: float = constant(0.1)  # of an image, in a private gradient; with a prior
    adaptation: PainterTraining = constant(PainterTraining())  # with a prior
    paths: int = constant(3)  # releases of the painter
    batch_size: int = constant(600)  # generated images in a step of the painter
    painter: PainterSettings = constant(PAINTER)
    teacher: TeacherSettings = constant(TeacherSettings())
    generator: GeneratorSizes = constant(GeneratorSizes())

    def validate(self) -> Self:
        super().validate()
        if self.prior and self.autoencoder:
            raise ValueError("a prior generates pixels, and with autoencoder the painter makes latents; leave one out")
        if self.encoder and self.autoencoder:
            raise ValueError("encoder takes images, and with autoencoder the teacher sees latents; leave one out")
        if self.steps == 0 and not self.prior:
            raise ValueError("without a prior, steps must be greater than 0, got 0")
        if self.steps == 1 and self.prior:
            raise ValueError("with a prior, steps must be at least 2, or 0 for no private gradients")
        if self.teacher.steps == 1:
            raise ValueError("the teacher needs at least 2 steps, or 0 for a choice by the noise")
        max_share = 1 - MAX_MOMENTS_SHARE if self.prior else 1.0
        if not self.teacher_share < max_share:
            raise ValueError(f"teacher_share must lie between 0 and {max_share:g}, got {self.teacher_share!r}")
        if not self.variety <= 1:
            raise ValueError(f"variety must lie between 0 and 1, got {self.variety!r}")
        return self

    def _auto_presets(self, public: PublicFacts) -> list[str]:
        if self.prior:
            return ["prior-cpu" if self.torch_device.type == "cpu" else "prior"]
        high = len(public.classes) * self._noise_per_image(public) >= HIGH_NOISE_THRESHOLD
        return [*super()._auto_presets(public), *(["high-noise"] if high else [])]

    def explain_plan(self, public: PublicFacts) -> list[str]:
        if self.prior:
            return self._prior_painter(public).notes()
        assumed = [ASSUMED_NOTE] if public.sizes is None and self.preset == AUTO else []
        return [*assumed, ENCODER_NOTE] if self.encoder and _has_classes(public) else assumed

    def _in_use(self, public: PublicFacts) -> dict[str, tuple[Any, str] | None]:
        found = self._painter(public).in_use()
        found |= dict.fromkeys(ONLY_WITHOUT_PRIOR if self.prior else ONLY_WITH_PRIOR)
        if self.prior and self.disagreement == "relabel":
            found["disagreement"] = "drop", "with a prior"
        if not _has_classes(public):
            return found | dict.fromkeys(("teacher", "teacher_share", "disagreement", "soft_labels", "variety"))
        plan, images = self.plan(public), sum(public.sizes or ()) or ASSUMED_IMAGES
        noise, steps = gradient_noise(plan, images), plan["teacher"].times
        why = f"by the noise of {images:,}{'' if public.sizes else ' assumed'} images"
        found["teacher.steps"] = steps, why
        found["teacher.rate"] = self.teacher.planned_rate(noise, steps), why
        return {"teacher.components": (self.teacher.planned_components(noise), why), **found}

    # -- the plan -----------------------------------------------------------------------------------------

    def _painter(self, public: PublicFacts) -> Painter:
        return self._prior_painter(public) if self.prior else self._kernel_painter(public)

    def _prior_painter(self, public: PublicFacts) -> PriorPainter:
        return painter_for(self, public, self.steps)

    def _kernel_painter(self, public: PublicFacts) -> KernelPainter:
        settings = replace(self.painter, smoothness=0.0) if self.autoencoder else self.painter
        return KernelPainter(self, settings, self.generator, public)

    def _releases(self, public: PublicFacts) -> list[Release]:
        if self.prior:
            return self._prior_releases(public)
        painter = self._kernel_painter(public)
        if not _has_classes(public):
            if self.soft_labels:
                raise DataError(NO_TEACHER)
            return painter.releases()
        share = self.teacher_share
        times = self._teacher_steps(public)
        weight = math.sqrt(times * (1 - share) / (share * painter.stages))
        return [*painter.releases(), Release("teacher", times, weight=weight)]

    def _teacher_steps(self, public: PublicFacts) -> int:
        return self.teacher.planned_steps(self._noise_per_image(public) / math.sqrt(self.teacher_share))

    def _prior_releases(self, public: PublicFacts) -> list[Release]:
        """Return counts, teacher and class means, with a share of the budget, and the painter's gradients."""
        if self.soft_labels and not _has_classes(public):
            raise DataError(NO_TEACHER)
        painter, share = self._prior_painter(public), self.teacher_share if _has_classes(public) else 0.0
        total = share + painter.moments_share
        first = [*counts_release(public, total**-0.5), *painter.moments(painter.moments_share)]
        if share:
            times = self._teacher_steps(public)
            first.append(Release("teacher", times, weight=math.sqrt(times / share)))
        if not painter.gradients():
            return first
        return [*with_share(first, self._budget(public.unit), total), *painter.gradients()]

    def _facts(self, public: PublicFacts) -> dict[str, Any]:
        if self.prior:
            return self._prior_painter(public).facts()
        own = {"encoder": load_perceptual(self.encoder).facts} if self.encoder else {}
        return {**self._kernel_painter(public).facts(), **own}

    # -- training -----------------------------------------------------------------------------------------

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        if self.prior:
            self._fit_prior(vault, public)
            return
        painter = self._kernel_painter(public)
        vault = painter.open(vault)
        if self.encoder:
            check_public_files(vault, {"encoder": load_perceptual(self.encoder).facts})
        self.counts_ = class_counts(vault, public)
        self.generator_ = painter.fit(vault, self.counts_, self._checkpoints)
        if _has_classes(public):
            self.teacher_: Teacher | EmbeddingTeacher = self._train_teacher(vault, painter)
            self.origins_ = self._class_origins(painter)

    def _fit_prior(self, vault: GradientVault, public: PublicFacts) -> None:
        """Train the teacher on an embedding of the images, then the painter."""
        painter = self._prior_painter(public)
        painter.check_unchanged(vault)
        self.counts_ = class_counts(vault, public)
        embedding, embedded = painter.embed(vault, self._checkpoints)
        teacher = None
        if _has_classes(public):
            self.teacher_ = teacher = EmbeddingTeacher(embedding, len(public.classes))
            teacher.train_on(embedded, self.teacher, float(self.counts_.sum()), self._checkpoints)
        self.generator_ = painter.adapt(vault, embedded, embedding, self.counts_, self._checkpoints, teacher).eval()
        # Images of another class that the teacher takes for this one teach a classifier its mistakes (docs/priors.md).
        self.origins_ = torch.eye(len(public.classes), device=self.torch_device)

    def _train_teacher(self, vault: GradientVault, painter: KernelPainter) -> Teacher:
        classes, image_count = len(painter.public.classes), float(self.counts_.sum())
        teacher, components = prepare_teacher(
            lambda labels, generator: self._paint(painter, labels, generator),
            even_labels(classes, self.teacher.cnn_images, self.torch_device),
            classes,
            self.teacher.planned_components(gradient_noise(vault.plan, image_count)),
            self.seed,
            self._checkpoints,
            lambda cnn: self._new_teacher(painter, cnn),
            self.sample_batch,
        )
        train_teacher(vault, teacher, components, self.teacher, image_count, self._checkpoints)
        return teacher

    def _new_teacher(self, painter: KernelPainter, cnn: UnitNormMaps) -> Teacher:
        canvas = painter.canvas
        return Teacher(
            canvas.shape,
            cnn.to(self.torch_device),
            len(canvas.classes),
            encoder=self.encoder,
            latents=bool(self.autoencoder),
        )

    def _class_origins(self, painter: KernelPainter) -> torch.Tensor:
        """Estimate P(class the painter meant | class the teacher sees), [seen, meant], on generated images."""
        classes = len(self.counts_)
        meant = even_labels(classes, IMAGES_PER_CLASS * classes, self.torch_device)
        images = self._paint(painter, meant, torch.Generator(self.torch_device).manual_seed(self.seed))
        seen = self.teacher_.predict(images, self.sample_batch)
        pairs = functional.one_hot(seen, classes).T.double() @ functional.one_hot(meant, classes).double()
        shares = (pairs + torch.eye(classes, device=pairs.device)) * (self.counts_ / self.counts_.sum())
        return (shares / shares.sum(1, keepdim=True)).float()

    def _paint(self, painter: Painter, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw images or latents of labels or class weights, whatever the teacher says."""
        with torch.no_grad():
            parts = [painter.paint(self.generator_, part, generator) for part in labels.split(self.sample_batch)]
        return torch.cat(parts)

    # -- samples ------------------------------------------------------------------------------------------

    @property
    def sample_batch(self) -> int:  # type: ignore[override]
        on_gpu = self.prior and self.torch_device.type == "cuda"
        return gpu_sample_batch(self._fitted().shape) if on_gpu else Synthesizer.sample_batch

    def _proportions(self) -> torch.Tensor:
        return self.counts_.cpu()

    def _sample(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw until the teacher sees the wanted class, at most `MAX_TRIES` times an image, with a prior `tries`."""
        painter = self._painter(self._fitted())
        images = self._paint(painter, labels, generator)
        classes = len(self.counts_)
        if self.disagreement == "keep" or classes == 1:
            return painter.decode(images)
        origins = self.origins_ if self.disagreement == "relabel" else torch.eye(classes, device=labels.device)
        left = torch.arange(len(labels), device=labels.device)
        if self.prior:  # the first images are as varied as any
            left = left[self.teacher_.predict(images, self.sample_batch) != labels]
        for _ in range(self.adaptation.tries if self.prior else MAX_TRIES):
            if not len(left):
                break
            wanted = labels[left]
            meant = torch.multinomial(origins[wanted], 1, generator=generator)[:, 0]
            drawn = self._varied(painter, meant, generator)
            found = self.teacher_(drawn).argmax(1) == wanted
            images[left[found]] = drawn[found]
            left = left[~found]
        return painter.decode(images)

    def _varied(self, painter: Painter, meant: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw images between classes and warp them a little, if the teacher relabels them."""
        if not self.variety or self.disagreement != "relabel" or self.prior:
            return self._paint(painter, meant, generator)
        classes, device = len(self.counts_), meant.device
        offset = torch.randint(1, classes, meant.shape, generator=generator, device=device)
        other = (meant + offset) % classes
        share = self.variety / 2 * torch.rand(len(meant), 1, generator=generator, device=device)
        mixed = torch.lerp(class_weights(meant, classes).float(), class_weights(other, classes).float(), share)
        images = self._paint(painter, mixed, generator)
        return images if self.autoencoder else small_affine_warp(images, generator, self.variety)

    def sample(
        self, n: int, *, labels: int | str | Sequence[int] | None = None, seed: int = 0, **options: Any
    ) -> ImageSet:
        """Draw `n` synthetic images, as for every method; with `soft_labels`, with the teacher's probabilities."""
        images = super().sample(n, labels=labels, seed=seed, **options)
        with self._adjusted(options):
            return replace(images, soft_labels=self.probabilities(images)) if self.soft_labels else images

    def probabilities(self, images: ImageSet) -> torch.Tensor:
        """Return the teacher's class probabilities for images, [N, classes].

        The teacher is post-processing of releases, so this costs no privacy of the training images. The result
        describes the images that are given.
        """
        public = self._fitted()
        if not _has_classes(public):
            raise DataError(NO_TEACHER)
        if images.shape != public.shape:
            raise DataError(f"images must have the model's shape {public.shape}, not {images.shape}")
        network, found = load_autoencoder(self.torch_device) if self.autoencoder else None, []
        with torch.no_grad():
            for part in torch.split(images.images, self.sample_batch):
                pixels = to_unit_range(part.to(self.torch_device))
                canvas = pixels if network is None else scaled_latents(network, pixels)
                found.append(self.teacher_(canvas).softmax(1).cpu())
        return torch.cat(found)

    def _state(self) -> dict[str, torch.Tensor]:
        state = {"counts": self.counts_, **self.generator_.state_dict(prefix="generator.")}
        if _has_classes(self._fitted()):
            state |= {"origins": self.origins_, **self.teacher_.state_dict(prefix="teacher.")}
        return state

    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        painter = self._painter(public)
        self.counts_ = state["counts"]
        self.generator_ = painter.new_generator().eval()
        self.generator_.load_state_dict(state_below(state, "generator."))
        if _has_classes(public):
            classes = len(public.classes)
            if isinstance(painter, PriorPainter):
                self.teacher_ = EmbeddingTeacher(painter.new_embedding(), classes)
            else:
                self.teacher_ = self._new_teacher(painter, untrained_cnn_features(painter.canvas.shape, classes))
            self.teacher_.load_state_dict(state_below(state, "teacher."))
            self.origins_ = state["origins"]


def _has_classes(public: PublicFacts) -> bool:
    """Return whether there are several classes; with one, the painter works alone."""
    return len(public.classes) > 1
