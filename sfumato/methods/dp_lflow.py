"""DP-LFlow: an autoencoder and a normalizing flow on its codes, trained together ("DP-LFlow: Differentially Private
Latent Flow for Scalable Sensitive Image Generation").

Idea: a flow has an exact density, but pixels are too many for it under noise. So a small autoencoder maps images to
codes and a RealNVP learns the density of the codes. Images are drawn by drawing a code and decoding it; an image unlike
the others has an unlikely code.

Released: `steps` noisy sums of per-example gradients over Poisson samples, autoencoder and flow clipped separately;
noisy class counts unless sizes are declared. With `warm`, first the releases of another method, charged in the same
plan: the networks are pre-trained on what its generator draws, each on its class (`warm_start.py`).
Public: image shape, class names; permutations and initial weights, from the user's seed. Without `warm` the networks
are pre-trained on procedural images (`data/procedural.py`), which come from no data and cost no privacy. With the
preset `procedural-autoencoder` the autoencoder learns from such images alone and is fixed then: private images are
encoded once, and the gradients train the flow on their codes.
Events: Gaussian sums over Poisson samples with probability q. The noise covers both bounds together, sqrt(C1^2 + C2^2)
(the authors' code noises each block for its own bound and charges once: its true noise is less by sqrt(2)). One model
per class: an image moves its class's block only, so all classes together are one sum (add-remove). Those of the warm
start.

The flow sees codes with a little noise (`jitter`), and so does the decoder: then the density has a floor, codes cannot
collapse to a point, and the loss is an evidence bound with a posterior of fixed width. Adam, the average of the
weights, and everything in `sample` are post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Self, cast

import torch

from sfumato.data import DataError, ImageSet, PublicFacts
from sfumato.data.pixels import to_unit_range
from sfumato.data.procedural import random_pictures
from sfumato.engine import GradientVault, Performance
from sfumato.engine.cuda_graph import Graph, NoBundle
from sfumato.methods.base import Synthesizer, constant
from sfumato.methods.warm_start import NONE, WarmMethod, WarmStart, WarmStartSettings
from sfumato.nets.latent_flow import LatentNetwork, sharpen
from sfumato.nets.stacked import apply_stacked, stacked, unstack
from sfumato.nets.training import Trainer, equal_batches, state_below, use_average, warm_cosine
from sfumato.privacy import Release

PROCEDURAL_BATCH, PROCEDURAL_RATE = 128, 2e-3
PRETRAINING_EMA = 0.998
GRADIENT_MEMORY = {"cpu": 2**28, "cuda": 2**34}  # bytes, about, for gradients computed at once
BYTES_PER_PIXEL = 800  # of an image's activations and their gradients, about
MAX_WARM_SIDE = 64  # pixels a side: the limit of other methods
Batch = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@dataclass(kw_only=True, eq=False)
class LatentFlow(Synthesizer):
    """An autoencoder and a flow on its codes, trained by DP-SGD.

    - variant: `partitioned` (default), a model for each class, all trained at once; `conditional`, one model whose
      decoder and flow are conditioned on the class.
    - steps: int, 30; number of private gradients.
    - sampling_prob: float, 0.5; probability q of an image to be in one.
    - warm: `dp-kernel` (default), `dp-merf`, `dp-mepf` or `none`; the method of the warm start.
    - temperature: float, 1.0; standard deviation of the normal numbers that samples are made of. May change after
      `fit`.
    - sharpness: float, 0.0; sharpen smoothed samples by this factor (the paper: 5 for MNIST, 8 for Fashion-MNIST, 2 for
      faces); 0: off. May change after `fit`.
    - likelihood: `code` (default), as in the paper, or `image`, of the code and of the image given the code. May change
      after `fit`.

    Presets: `cpu`; `no-warm-start`: more steps of smaller samples, at higher rates; `procedural-autoencoder`: an
    autoencoder that learns from procedural images alone, so that all gradients are for the flow.
    """

    key: ClassVar[str] = "dp-lflow"
    paper: ClassVar[str] = "Jiang and Sun, TMLR 2023"
    summary: ClassVar[str] = "train an autoencoder and a normalizing flow for each class by DP-SGD; detects outliers"
    may_be_zero: ClassVar[frozenset[str]] = frozenset({"seed", "sharpness", "ema", "procedural_batches"})
    adjustable: ClassVar[frozenset[str]] = frozenset({"temperature", "sharpness", "likelihood"})
    warm_parameters: ClassVar[dict[str, Any]] = {}  # of the warm start's method
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "cpu": {
            "warm": "dp-merf",
            "steps": 20,
            "sampling_prob": 0.1,
            "warm_start": WarmStartSettings(steps=500, batch_size=64),
        },
        "no-warm-start": {
            "warm": NONE,
            "steps": 300,
            "sampling_prob": 0.1,
            "reconstruction_weight": 1.0,
            "learning_rates": (5e-3, 2e-3, 2e-2),
            "ema": 0.95,
        },
        "procedural-autoencoder": {
            "autoencoder": "procedural",
            "procedural_batches": 4000,
            "code": 40,
            "steps": 60,
            "learning_rates": (1e-4, 4e-4, 4e-3),
        },
    }

    variant: Literal["partitioned", "conditional"] = "partitioned"
    steps: int = 30
    sampling_prob: float = 0.5
    warm: WarmMethod = "dp-kernel"
    temperature: float = 1.0
    sharpness: float = 0.0
    likelihood: Literal["code", "image"] = "code"
    warm_start: WarmStartSettings = constant(WarmStartSettings(batch_size=128))  # images of each class in a batch
    procedural_batches: int = constant(1000)  # of pre-training without a warm start; 0: random weights, as in the paper
    autoencoder: Literal["private", "procedural"] = constant("private")  # images that it learns from
    space: Literal["latent", "pixels"] = constant("latent")  # `pixels`: a flow without autoencoder
    bounds: tuple[float, float] = constant((1.0, 1.0))  # clipping norms of autoencoder and flow
    reconstruction_weight: float = constant(4.0)  # the paper's T^2
    jitter: float = constant(0.3)  # standard deviation of the noise on codes
    views: int = constant(1)  # jitters per image and step, averaged before clipping
    code: int = constant(20)  # size of a code
    width: int = constant(16)  # channels of the first convolution
    couplings: int = constant(4)
    hidden: int = constant(64)  # width of the flow's networks
    learning_rates: tuple[float, float, float] = constant((1e-4, 4e-5, 4e-4))  # autoencoder, couplings, affine map
    ema: float = constant(0.8)

    def validate(self) -> Self:
        super().validate()
        for name in ("sampling_prob", "ema"):
            if not getattr(self, name) <= 1:
                raise ValueError(f"{name} must be at most 1, got {getattr(self, name)!r}")
        for name in ("code", "steps"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, got {getattr(self, name)}")
        if self.autoencoder == "procedural" and (self.space == "pixels" or not self.procedural_batches):
            raise ValueError("a procedural autoencoder needs space=latent and procedural_batches")
        return self

    def _auto_presets(self, public: PublicFacts) -> list[str]:
        without = "warm" in self._given and self.warm == NONE
        return [*super()._auto_presets(public), *(["no-warm-start"] if without else [])]

    def _warm_start(self, public: PublicFacts) -> WarmStart:
        return WarmStart(self.warm, self.warm_start, self, public, self.warm_parameters)

    def _in_use(self, public: PublicFacts) -> dict[str, tuple[Any, str] | None]:  # noqa: ARG002
        off = {"warm_start": self.warm == NONE}
        off["procedural_batches"] = self.warm != NONE and self.autoencoder == "private"
        return dict.fromkeys(name for name in off if off[name])

    def _releases(self, public: PublicFacts) -> list[Release]:
        if self.warm != NONE and max(public.shape[1:]) > MAX_WARM_SIDE:
            raise DataError(
                f"a warm start takes images of up to {MAX_WARM_SIDE} pixels a side; pass a smaller size (--size), or "
                "do without one (--set warm=none)"
            )
        return self._warm_start(public).releases(Release("gradients", self.steps, self.sampling_prob))

    def _facts(self, public: PublicFacts) -> dict[str, Any]:
        return self._warm_start(public).facts()

    # -- training -----------------------------------------------------------------------------------------

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        self.counts_, generated = self._warm_start(public).begin(vault, self._checkpoints)
        network, fixed = self._new_network(public), self.autoencoder == "procedural"
        if generated is None or fixed:
            network = self._pretrained_on_procedural_images(network, public)
        if not fixed:
            if generated is not None:
                self._pretrain_on_images(network, generated)
            self.network_ = self._train(vault, network)
            return
        encoder, flow = self._encoder(network), self._new_network(public, "codes")
        flow.load_state_dict({n: value for n, value in network.state_dict().items() if n.startswith("flow.")})
        if generated is not None:
            self._pretrain_on_images(flow, generated, encoder)
        network.flow.load_state_dict(self._train(vault.map(encoder), flow).flow.state_dict())
        self.network_ = network.requires_grad_(False)

    def _encoder(self, network: LatentNetwork) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the encoder of a network whose autoencoders are the same for all classes."""
        single = network if self.variant == "conditional" else cast(LatentNetwork, unstack(network, 0))
        assert single.autoencoder is not None
        return cast(Callable[[torch.Tensor], torch.Tensor], single.autoencoder["encoder"].requires_grad_(False))

    def _train(self, vault: GradientVault, network: LatentNetwork) -> LatentNetwork:
        """Train by noisy gradients; return the average of the network."""
        partitioned = self.variant == "partitioned"
        expected = self.sampling_prob * (self.counts_ if partitioned else self.counts_.sum(0, keepdim=True))
        parts = ("flow",) if network.autoencoder is None else ("autoencoder", "flow")
        bounds = dict(zip(parts, self.bounds[-len(parts) :], strict=True))
        rates = dict(zip(("autoencoder.", "flow.couplings.", "flow."), self.learning_rates, strict=True))
        trainer = Trainer(network, ema=self.ema, betas=(0.9, 0.99), rates=rates, warm_up=True)
        performance = Performance(batch_size=self._gradient_batch(network, expected))
        for step in self._checkpoints.loop("training", self.steps, trainer=trainer):
            sums = vault.gradient(
                network,
                self._loss,
                release="gradients",
                bound=bounds,
                by_class=partitioned,
                with_labels=not partitioned,
                views=self.views,
                draws=network.size,
                performance=performance,
            )
            trainer.set_rate(warm_cosine(step, self.steps))
            trainer.step(
                {
                    name: total / (expected.view(-1, *[1] * (total.ndim - 1)) * bounds[name.split(".")[0]])
                    for name, total in sums.items()
                }
            )
        return cast(LatentNetwork, trainer.average)

    def _loss(self, model: Callable[..., Any], images: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        """Return the paper's Eq. 5 for each image."""
        *labels, normals = given
        reconstruction, density = model(images, self.jitter * normals, *labels)
        loss: torch.Tensor = -self.reconstruction_weight * reconstruction - density
        return loss

    def _gradient_batch(self, network: LatentNetwork, expected: torch.Tensor) -> int:
        """Return how many images (of each class) have their gradients in memory together; from public numbers."""
        classes = len(expected)
        together = 1 if self.torch_device.type == "cpu" else classes  # on a CPU, classes are computed in turn
        each = BYTES_PER_PIXEL * math.prod(network.shape) + 4 * sum(p.numel() for p in network.parameters()) // classes
        largest = max(8, GRADIENT_MEMORY[self.torch_device.type] // (together * each * self.views))
        return equal_batches(float(expected.max()), largest)

    def _pretrained_on_procedural_images(self, network: LatentNetwork, public: PublicFacts) -> LatentNetwork:
        """Return the network after pre-training on procedural images; stacked networks all start as the first."""
        if not self.procedural_batches:
            return network
        generator = torch.Generator(self.torch_device).manual_seed(self.seed)
        single = network if self.variant == "conditional" else cast(LatentNetwork, unstack(network, 0))
        labels = torch.arange(PROCEDURAL_BATCH, device=generator.device) % len(public.classes)

        def batch() -> tuple[torch.Tensor, torch.Tensor]:
            return random_pictures(PROCEDURAL_BATCH, public.shape, generator), labels

        self._pretrain(single, batch, self.procedural_batches, PROCEDURAL_RATE, generator, "procedural images")
        if single is network:
            return network
        return cast(LatentNetwork, stacked([single] * len(public.classes)))

    def _pretrain_on_images(
        self,
        network: LatentNetwork,
        generated: ImageSet,
        encoder: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Train on the images of the warm start; stacked networks each on their class.

        - encoder: makes codes of the images, for a network that takes codes; default none.
        """
        generator = torch.Generator(self.torch_device).manual_seed(self.seed)
        classes, device, settings = len(generated.classes), generator.device, self.warm_start
        images = generated.images.to(device).unflatten(0, (classes, -1))
        label = torch.arange(classes, device=device)[:, None].expand(-1, settings.batch_size)

        def batch() -> tuple[torch.Tensor, torch.Tensor]:
            chosen = torch.randint(images.shape[1], label.shape, generator=generator, device=device)
            shown = to_unit_range(images[label, chosen])
            if encoder is not None:
                with torch.no_grad():
                    shown = encoder(shown.flatten(0, 1)).unflatten(0, label.shape)
            return (shown, label) if self.variant == "partitioned" else (shown.flatten(0, 1), label.flatten())

        self._pretrain(network, batch, settings.steps, settings.learning_rate, generator, "pre-training")

    def _pretrain(
        self, network: LatentNetwork, batch: Batch, steps: int, rate: float, generator: torch.Generator, stage: str
    ) -> None:
        """Train without noise on images that are not private; leave the network with an average of its weights.

        - batch: draws images (or codes) and labels, [classes, n] for stacked networks.
        - stage: name for checkpoints.
        """
        trainer = Trainer(network, ema=PRETRAINING_EMA, warm_up=True)

        def gradients(_: NoBundle, images: torch.Tensor, labels: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
            model = network if labels.ndim == 1 else partial(apply_stacked, network)
            losses = self._loss(model, images, labels, normals)
            found = torch.autograd.grad(losses.mean(-1).sum(), list(trainer.parameters.values()))
            return torch.cat([gradient.flatten() for gradient in found])

        graph = Graph(gradients)
        sizes = [parameter.numel() for parameter in trainer.parameters.values()]
        for number in self._checkpoints.loop(stage, steps, trainer=trainer, generator=generator):
            images, labels = batch()
            normals = torch.randn(*labels.shape, network.size, generator=generator, device=generator.device)
            flat = graph(NoBundle(), images, labels, normals)
            assert flat is not None
            trainer.set_rate(rate * warm_cosine(number, steps))
            parts = zip(trainer.parameters.items(), flat.split(sizes), strict=True)
            trainer.step({name: part.view_as(parameter) for (name, parameter), part in parts})
        use_average(trainer)

    def _new_network(self, public: PublicFacts, space: str = "") -> LatentNetwork:
        """Return a network, or one for each class, stacked, with initial weights from the user's seed."""
        sizes = {"code": self.code, "width": self.width, "couplings": self.couplings, "hidden": self.hidden}
        classes, space = len(public.classes), space or self.space
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if self.variant == "conditional":
                network = LatentNetwork(public.shape, space, classes, **sizes)
            else:
                each = [LatentNetwork(public.shape, space, 0, **sizes) for _ in range(classes)]
                network = cast(LatentNetwork, stacked(each))
        return network.to(self.torch_device)

    # -- samples and scores -------------------------------------------------------------------------------

    def _proportions(self) -> torch.Tensor:
        return self.counts_.cpu()

    def _network_of(self, label: int) -> LatentNetwork:
        return self.network_ if self.variant == "conditional" else cast(LatentNetwork, unstack(self.network_, label))

    def _sample(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        shape = self._fitted().shape
        size = math.prod(shape) if self.space == "pixels" else self.code
        normals = torch.randn(len(labels), size, generator=generator, device=self.torch_device) * self.temperature
        images = torch.empty(len(labels), *shape, device=self.torch_device)
        for label in labels.unique().tolist():
            chosen = labels == label
            images[chosen] = self._network_of(label).draw(normals[chosen], labels[chosen])
        return sharpen(images, self.sharpness) if self.sharpness else images

    def _log_likelihood(self, images: torch.Tensor, label: int) -> torch.Tensor:
        labels = torch.full((len(images),), label, device=images.device)
        network = self._network_of(label)
        reconstruction, density = network(images, torch.zeros(len(images), network.size, device=images.device), labels)
        if self.likelihood == "code":
            return cast(torch.Tensor, density)
        return cast(torch.Tensor, density + self.reconstruction_weight * reconstruction)

    def _state(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts_, **self.network_.state_dict(prefix="network.")}

    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        self.counts_ = state["counts"]
        self.network_ = self._new_network(public).requires_grad_(False)
        self.network_.load_state_dict(state_below(state, "network."))
