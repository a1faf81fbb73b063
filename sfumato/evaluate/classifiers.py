"""Downstream utility: train on synthetic images only, test once on real ones.

Epochs and rates are fixed beforehand and nothing is chosen on the test images, so every figure is an honest one: the
mean over seeds, never the best. Where synthetic images have soft labels, these are learned. The test images must be
public (a benchmark's test split): measuring is a disclosure.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sfumato.data import DataError, ImageSet, PublicFacts
from sfumato.nets.augmentation import draw_augmentation
from sfumato.nets.classifiers import NETWORKS
from sfumato.nets.graph import Alone, Graph
from sfumato.progress import track

LOGISTIC = "logistic"
CLASSIFIERS = (LOGISTIC, *NETWORKS)
LEAST_SIDE = 8
SCORING_BATCH = 500


@dataclass(frozen=True)
class Recipe:
    """How networks are trained: fixed before anything is seen.

    The default is for sets of thousands of images (Adam). `condensed` is for a few images per class, as the papers on
    condensation do it: SGD with momentum, a tenth of the rate after half of the epochs, and augmentation. `annealed` is
    FFCV's for a ResNet-9, but for augmentation, as DP-MEPF's authors take it (`ANNEALED`): SGD with momentum, a rate
    that rises to a half and falls to nothing, and labels that are smoothed by a tenth.
    """

    epochs: int = 10
    batch_size: int = 256
    condensed: bool = False
    annealed: bool = False
    flip: bool = False

    @property
    def smoothing(self) -> float:
        return 0.1 if self.annealed else 0.0

    def annealed_rate(self, done: float) -> float:
        """The learning rate of `annealed` when this part of the steps is done."""
        return 0.5 * min(2 * done, 2 - 2 * done)

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        if self.condensed or self.annealed:
            return torch.optim.SGD(network.parameters(), 0.01, momentum=0.9, weight_decay=5e-4)
        on_gpu = next(network.parameters()).device.type == "cuda"
        return torch.optim.Adam(network.parameters(), 1e-3, capturable=on_gpu)


ANNEALED = Recipe(batch_size=512, annealed=True)


@dataclass(frozen=True)
class Accuracy:
    """Accuracy in percent, a value per seed; `confusion` counts [true class, guess] over all seeds."""

    values: list[float]
    confusion: list[list[int]]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def per_class(self) -> list[float | None]:
        """Accuracy within each true class; None for a class without test images."""
        rows = enumerate(self.confusion)
        return [100 * row[label] / sum(row) if sum(row) else None for label, row in rows]

    def to_dict(self) -> dict[str, Any]:
        return {
            "mean": self.mean,
            "sd": self.sd,
            "values": self.values,
            "per_class": self.per_class,
            "confusion": self.confusion,
        }

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.sd:.1f} %" if len(self.values) > 1 else f"{self.mean:.1f} %"


def downstream_accuracy(
    synthetic: ImageSet,
    test: ImageSet,
    classifier: str = "small_cnn",
    *,
    seeds: Sequence[int] = (0,),
    recipe: Recipe = Recipe(),  # noqa: B008  (frozen)
    device: str | torch.device = "cpu",
) -> Accuracy:
    """Test accuracy of a classifier trained on `synthetic`, for each seed."""
    if classifier not in CLASSIFIERS:
        raise DataError(f"there is no classifier {classifier!r}; there are {', '.join(CLASSIFIERS)}")
    test = aligned(test, synthetic)
    labels = synthetic.labels
    assert labels is not None
    if len(torch.unique(labels)) < 2:
        raise DataError("the synthetic set has images of one class only; a classifier needs two")
    values, confusion = [], torch.zeros(len(test.classes), len(test.classes), dtype=torch.int64)
    if classifier == LOGISTIC:
        seeds = seeds[:1]  # a convex problem has one solution
    for seed in seeds:
        network = _trained(classifier, synthetic, seed, recipe, torch.device(device))
        guesses = _guesses(network, test.images, torch.device(device))
        truth = test.labels
        assert truth is not None
        values.append(100 * float((guesses == truth).double().mean()))
        confusion += torch.bincount(truth * len(confusion) + guesses, minlength=confusion.numel()).view_as(confusion)
    return Accuracy(values, confusion.tolist())


def check_comparable(test: ImageSet, public: PublicFacts) -> None:
    """Raises unless classifiers of such images can be tested on `test`. Looks at public facts only."""
    if not public.labelled or not test.labelled:
        raise DataError("a classifier needs labels, on the synthetic images and on the test images")
    if public.shape != test.shape:
        raise DataError(
            f"test images are {test.shape}, the others {public.shape}; read both with the same size and mode"
        )
    if unknown := [name for name in test.classes if name not in public.classes]:
        raise DataError(f"the test set has classes ({', '.join(unknown)}) that the other set has not")
    if unknown := [name for name in public.classes if name not in test.classes]:
        raise DataError(f"there are classes ({', '.join(unknown)}) that the test set has not")
    if min(public.shape[1:]) < LEAST_SIDE:
        raise DataError(f"classifiers need images of at least {LEAST_SIDE} pixels a side")


def aligned(test: ImageSet, like: ImageSet) -> ImageSet:
    """The test set with its classes numbered as in `like`, or an error that says why they cannot be compared."""
    check_comparable(test, like.public())
    names = list(like.classes)
    assert test.labels is not None
    order = torch.tensor([names.index(name) for name in test.classes])
    return ImageSet(test.images, order[test.labels], like.classes)


def _trained(name: str, images: ImageSet, seed: int, recipe: Recipe, device: torch.device) -> nn.Module:
    targets = images.labels if images.soft_labels is None else images.soft_labels
    assert targets is not None
    pixels, targets = images.images.to(device), targets.to(device)
    if name == LOGISTIC:
        return _logistic(_unit(pixels), targets, len(images.classes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = NETWORKS[name](images.shape, len(images.classes)).to(device)
    if name == "resnet18" and device.type == "cuda":
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as its convolutions like it
    generator = torch.Generator(device).manual_seed(seed)
    size = images.shape[1:]
    parameters, optimizer = list(network.parameters()), recipe.optimizer(network)

    def step(_: Alone, batch: torch.Tensor, wanted: torch.Tensor) -> None:
        loss = functional.cross_entropy(network(batch), wanted, label_smoothing=recipe.smoothing)
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    graphs: dict[int, Graph] = defaultdict(lambda: Graph(step))  # by the size of a batch: the last is smaller
    for epoch in track(recipe.epochs, name):
        if recipe.condensed and epoch == recipe.epochs // 2:
            for group in optimizer.param_groups:
                group["lr"] /= 10
        order = torch.randperm(len(pixels), generator=generator, device=device)
        for place, index in enumerate(batches := torch.split(order, recipe.batch_size)):
            batch = _unit(pixels[index])
            if recipe.condensed:
                drawn = draw_augmentation(len(batch), size, generator, flip=recipe.flip, together=True)
                step(Alone(), drawn(batch), targets[index])  # its rate changes: that is no graph
            elif recipe.annealed:
                done = (epoch + place / len(batches)) / recipe.epochs
                optimizer.param_groups[0]["lr"] = recipe.annealed_rate(done)
                step(Alone(), batch, targets[index])
            else:
                graphs[len(index)](Alone(), batch, targets[index])
    return network.eval()


def _logistic(pixels: torch.Tensor, targets: torch.Tensor, classes: int) -> nn.Module:
    """Multinomial logistic regression with |w|^2 / 2 + sum of losses, the objective of scikit-learn's C = 1."""
    flat = pixels.flatten(1).double()
    targets = targets.double() if targets.is_floating_point() else targets
    # Equal scales make the problem well-conditioned; the penalty is on the weights of pixels in [-1, 1].
    weight = torch.zeros(classes, flat.shape[1], dtype=torch.float64, device=flat.device, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, device=flat.device, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight, bias], max_iter=300, history_size=20, tolerance_grad=1e-7, tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def objective() -> torch.Tensor:
        solver.zero_grad()
        losses = functional.cross_entropy(flat @ weight.T + bias, targets)
        value: torch.Tensor = losses + weight.square().sum() / (2 * len(flat))
        value.backward()
        return value

    solver.step(objective)
    linear = nn.Linear(flat.shape[1], classes).to(flat.device)
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
    return nn.Sequential(nn.Flatten(), linear).eval()


def _guesses(network: nn.Module, images: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        parts = [network(_unit(part.to(device))).argmax(1).cpu() for part in torch.split(images, SCORING_BATCH)]
    return torch.cat(parts)


def _unit(images: torch.Tensor) -> torch.Tensor:
    """uint8 pixels in [-1, 1]."""
    return images.float() / 127.5 - 1
