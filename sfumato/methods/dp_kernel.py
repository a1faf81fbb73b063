"""DP-kernel: a generator trained on a noisy function (Jiang et al., "Functional Rényi DP", NeurIPS 2023).

Idea: release the kernel mean of each class with the noise of a Gaussian process, and train a generator to follow it
(`kernel_painter.py`). Three sound forms differ in what is released:

- `pathwise`: a few whole noisy sample paths, by random Fourier features; the default.
- `gp`: at each step the exact joint law of the function's derivatives at a few generated images; slow, the reference.
- `nystrom`: one release of the function's values at public points; interpolated in between.

The form as published is not private: `as_published/published_dp_kernel.py`.

Released: noisy class sums as above; noisy class counts unless sizes are declared public.
Public: image shape, class names; frequencies and initial weights, from the user's seed; networks named in `encoder`
and `autoencoder`.
Events: Gaussian sums over all images, composed exactly; classes are blocks of one vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch.nn import functional

from sfumato.data import PublicFacts
from sfumato.engine import GradientVault
from sfumato.features.fourier import PointEvaluations
from sfumato.features.kernels import GaussianKernel
from sfumato.methods.base import constant
from sfumato.methods.class_counts import class_counts, counts_release
from sfumato.methods.generator_method import GeneratorMethod
from sfumato.methods.kernel_painter import (
    CPU_BATCH_SIZE,
    CPU_PAINTER,
    CPU_STEPS,
    KernelPainter,
    PainterSettings,
    PathTraining,
)
from sfumato.nets.training import state_below, warm_cosine
from sfumato.privacy import Release

INDUCING_POINTS = 200  # public points of the `nystrom` form
POINTS_PER_CLASS = 4  # images whose derivatives the `gp` form releases in a step


@dataclass(kw_only=True, eq=False)
class KernelGenerator(GeneratorMethod):
    """A generator that follows a noisy kernel mean.

    - form: `pathwise` (default), `gp` or `nystrom`; see the module's docstring.
    - variant: `conditional` (default), one generator for all classes; `parallel`, one for each.
    - paths: int, 3; releases of the `pathwise` form.
    - steps: int, 4500; training steps.
    - batch_size: int, 600; generated images in a step.
    - encoder: text; a public network as `load_perceptual` takes it, for half of the first path's features; none.
    - autoencoder: `taef2` to generate its latents instead of pixels, for images above 64 pixels; none.

    Presets: `cpu`.
    """

    key: ClassVar[str] = "dp-kernel"
    paper: ClassVar[str] = "Jiang et al., NeurIPS 2023"
    summary: ClassVar[str] = "train a generator on noisy kernel means of pixels, wavelets and learned features"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "cpu": {"steps": CPU_STEPS, "batch_size": CPU_BATCH_SIZE, "painter": CPU_PAINTER}
    }

    form: Literal["pathwise", "gp", "nystrom"] = "pathwise"
    variant: Literal["conditional", "parallel"] = "conditional"
    paths: int = 3
    steps: int = 4500
    batch_size: int = 600
    encoder: str = ""
    autoencoder: Literal["", "taef2"] = ""
    painter: PainterSettings = constant(PainterSettings())

    def validate(self) -> Self:
        super().validate()
        if self.form != "pathwise" and (self.encoder or self.autoencoder):
            raise ValueError(f"encoder and autoencoder are for the pathwise form, not for {self.form}")
        if self.autoencoder and self.encoder:
            raise ValueError("encoder takes images and cannot be combined with autoencoder; leave one out")
        return self

    def _painter(self, public: PublicFacts) -> KernelPainter:
        sizes = replace(self.generator, per_class=self.variant == "parallel")
        return KernelPainter(self, self.painter, sizes, public, self.encoder)

    def _in_use(self, public: PublicFacts) -> dict[str, tuple[Any, str] | None]:
        found, followed = self._painter(public).in_use(), {"learning_rate", "ema", "scattering_bandwidths"}
        if self.form != "pathwise":
            names = [f"painter.{each.name}" for each in fields(self.painter) if each.name not in followed]
            found |= dict.fromkeys(("paths", *names))
        variants: tuple[Any, str] = (self.variant == "parallel", "by variant")
        return {**found, "generator.per_class": variants}

    def _releases(self, public: PublicFacts) -> list[Release]:
        painter = self._painter(public)
        if self.form == "pathwise":
            return painter.releases()
        painter.check_size()
        times = self.steps if self.form == "gp" else 1
        return [*counts_release(public, times**-0.5), Release("sums", times)]

    def _facts(self, public: PublicFacts) -> dict[str, Any]:
        return self._painter(public).facts()

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        painter = self._painter(public)
        vault = painter.open(vault)
        self.counts_ = class_counts(vault, public)
        if self.form == "pathwise":
            self.generator_ = painter.fit(vault, self.counts_, self._checkpoints)
            return
        training = painter.training()
        train = self._train_exactly if self.form == "gp" else self._train_once
        train(vault, training)
        self.generator_ = training.averaged()

    def _train_exactly(self, vault: GradientVault, training: PathTraining) -> None:
        """Release, at each step, the function's derivatives at some generated images, exactly in joint distribution."""
        kernel, classes = GaussianKernel(self.painter.scattering_bandwidths), len(self.counts_)
        vault = vault.map(training.vectors)
        for step in self._checkpoints.loop("generator", self.steps, training=training):
            made = training.vectors(training.images(training.latent()))
            near = training.by_class(made)[:, :POINTS_PER_CLASS]
            points = [PointEvaluations(kernel, some) for some in near.detach()]
            rows = _rows_by_class(points)  # traced at each step: the span of the points, and its shape, may change
            released = vault.sum(rows, release="sums", bound=1.0, by_class=True, with_labels=True)
            slopes = torch.stack([points[c].unwhiten(released[c])[1] / self.counts_[c] for c in range(classes)])
            attraction = (slopes.to(near.dtype) * near).sum() / POINTS_PER_CLASS
            # Half of Eq. 4; its first term does not depend on the generator.
            self._descend(training, _repulsion(kernel, training.by_class(made)) - attraction, step)

    def _train_once(self, vault: GradientVault, training: PathTraining) -> None:
        """Release the function's values at public points once; the kernel interpolates between them."""
        kernel = GaussianKernel(self.painter.scattering_bandwidths)
        with torch.no_grad():
            inducing = training.vectors(smooth_images(INDUCING_POINTS, training.shape, training.generator))
        points = PointEvaluations(kernel, inducing, derivatives=False)
        released = vault.map(training.vectors).sum(points.rows, release="sums", bound=1.0, by_class=True)
        weights = torch.stack([points.interpolation(row) for row in released]).float() / self.counts_[:, None]
        for step in self._checkpoints.loop("generator", self.steps, training=training):
            made = training.by_class(training.vectors(training.images(training.latent())))
            values = (kernel(made.flatten(0, 1), inducing).unflatten(0, made.shape[:2]) * weights[:, None]).sum(2)
            self._descend(training, _repulsion(kernel, made) - values.mean(1).sum(), step)

    def _descend(self, training: PathTraining, loss: torch.Tensor, step: int) -> None:
        training.trainer.set_rate(self.painter.learning_rate * warm_cosine(step, self.steps))
        training.trainer.descend(loss)

    def _sample(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        painter = self._painter(self._fitted())
        return painter.decode(painter.paint(self.generator_, labels, generator))

    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        self.counts_ = state["counts"]
        self.generator_ = self._painter(public).new_generator().eval()
        self.generator_.load_state_dict(state_below(state, "generator."))


def smooth_images(count: int, shape: tuple[int, int, int], generator: torch.Generator) -> torch.Tensor:
    """Draw public images as smooth as natural ones: noise with correlations over a quarter of the side."""
    noise = torch.randn(count, *shape, generator=generator, device=generator.device)
    for axis, size in ((2, shape[1]), (3, shape[2])):
        place = torch.arange(size, device=generator.device)
        root = torch.linalg.cholesky(torch.exp(-(place[:, None] - place).abs() / (size / 4)))
        noise = (noise.movedim(axis, 3) @ root.T).movedim(3, axis)
    return torch.tanh(noise)


def _repulsion(kernel: GaussianKernel, made: torch.Tensor) -> torch.Tensor:
    """Return half of r in Eq. 4: the mean kernel between different generated images of a class, summed over classes."""
    total = made.new_zeros(())
    for some in made:
        squares = (some[:, None] - some).square().sum(2)
        gram = torch.stack([torch.exp(-squares / (2 * h**2)) for h in kernel.bandwidths]).mean(0)
        total = total + (gram.sum() - gram.diagonal().sum()) / (2 * len(some) * (len(some) - 1))
    return total


def _rows_by_class(points: list[PointEvaluations]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the rows of each image for the points of its own class."""

    def rows(vectors: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        every = torch.stack([some.rows(vectors) for some in points], 1)
        return (every * functional.one_hot(labels, len(points))[..., None]).sum(1)

    return rows
