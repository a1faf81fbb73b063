"""Downstream utility: accuracy of classifiers trained on synthetic images only and tested once on real images.

Epochs and learning rates are fixed in advance, and nothing is selected on the test images. Results are means over
seeds. Classifiers learn from soft labels if the synthetic images have them. The test images must be public (for example
a test split), because an accuracy discloses information about them.
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
from sfumato.data.pixels import to_unit_range
from sfumato.engine.cuda_graph import Graph, NoBundle
from sfumato.nets.augmentation import draw_augmentation
from sfumato.nets.classifiers import CLASSIFIER_NETWORKS
from sfumato.progress import bar, track

LOGISTIC = "logistic"
CLASSIFIERS = (LOGISTIC, *CLASSIFIER_NETWORKS)
MIN_IMAGE_SIDE = 8
TEST_BATCH_SIZE = 500


@dataclass(frozen=True)
class Recipe:
    """Training settings of classifiers. The default uses Adam and suits sets of thousands of images.

    - epochs: passes over the synthetic images, default 10.
    - batch_size: images in a step, default 256.
    - condensed: settings of the condensation papers for few images per class: SGD with momentum, augmentation, and a
      learning rate that drops to a tenth after half of the epochs.
    - annealed: settings of DP-MEPF for a ResNet-9 (FFCV without augmentation, see `ANNEALED`): SGD with momentum, a
      learning rate that rises linearly to 0.5 and falls to 0, and label smoothing of 0.1.
    - flip: include horizontal flips in the augmentation.
    """

    epochs: int = 10
    batch_size: int = 256
    condensed: bool = False
    annealed: bool = False
    flip: bool = False

    @property
    def label_smoothing(self) -> float:
        return 0.1 if self.annealed else 0.0

    def annealed_rate(self, progress: float) -> float:
        """Return the learning rate of `annealed` at a progress of 0 to 1."""
        return 0.5 * min(2 * progress, 2 - 2 * progress)

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """Create the optimizer of a network."""
        if self.condensed or self.annealed:
            return torch.optim.SGD(network.parameters(), 0.01, momentum=0.9, weight_decay=5e-4)
        on_gpu = next(network.parameters()).device.type == "cuda"
        return torch.optim.Adam(network.parameters(), 1e-3, capturable=on_gpu)


ANNEALED = Recipe(batch_size=512, annealed=True)


@dataclass(frozen=True)
class Accuracy:
    """Test accuracy.

    - values: accuracy in percent for each seed.
    - confusion: counts [true class][predicted class] over all seeds.
    """

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
        """Accuracy in percent of each true class; None for a class without test images."""
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
    """Train a classifier on `synthetic` for each seed, and return its accuracy on `test`."""
    if classifier not in CLASSIFIERS:
        raise DataError(f"there is no classifier {classifier!r}; there are {', '.join(CLASSIFIERS)}")
    test = aligned(test, synthetic)
    labels = synthetic.labels
    assert labels is not None
    if len(torch.unique(labels)) < 2:
        raise DataError("the synthetic set has images of only one class; a classifier needs at least two")
    values, confusion = [], torch.zeros(len(test.classes), len(test.classes), dtype=torch.int64)
    if classifier == LOGISTIC:
        seeds = seeds[:1]  # a convex problem has one solution
    for seed in seeds:
        network = _train(classifier, synthetic, seed, recipe, torch.device(device))
        predicted = _predict(network, test.images, torch.device(device))
        truth = test.labels
        assert truth is not None
        values.append(100 * float((predicted == truth).double().mean()))
        confusion += torch.bincount(truth * len(confusion) + predicted, minlength=confusion.numel()).view_as(confusion)
    return Accuracy(values, confusion.tolist())


def check_comparable(test: ImageSet, public: PublicFacts) -> None:
    """Raise `DataError` unless classifiers of such images can be tested on `test`. Use only public facts."""
    if not public.labelled or not test.labelled:
        raise DataError("a classifier needs labels for the synthetic and the test images")
    if public.shape != test.shape:
        raise DataError(
            f"test images are {test.shape}, the other images {public.shape}; read both with the same size and mode"
        )
    if unknown := [name for name in test.classes if name not in public.classes]:
        raise DataError(f"the test set has classes that the other set does not have: {', '.join(unknown)}")
    if unknown := [name for name in public.classes if name not in test.classes]:
        raise DataError(f"the test set does not have the classes {', '.join(unknown)}")
    if min(public.shape[1:]) < MIN_IMAGE_SIDE:
        raise DataError(f"classifiers need images of at least {MIN_IMAGE_SIDE}×{MIN_IMAGE_SIDE} pixels")


def aligned(test: ImageSet, like: ImageSet) -> ImageSet:
    """Return the test set with its classes in the order of `like`. Raise `DataError` if they cannot be compared."""
    check_comparable(test, like.public())
    names = list(like.classes)
    assert test.labels is not None
    order = torch.tensor([names.index(name) for name in test.classes])
    return ImageSet(test.images, order[test.labels], like.classes)


def _train(name: str, images: ImageSet, seed: int, recipe: Recipe, device: torch.device) -> nn.Module:
    targets = images.labels if images.soft_labels is None else images.soft_labels
    assert targets is not None
    pixels, targets = images.images.to(device), targets.to(device)
    if name == LOGISTIC:
        with bar(f"evaluating, {name}"):
            return _fit_logistic_regression(to_unit_range(pixels), targets, len(images.classes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = CLASSIFIER_NETWORKS[name](images.shape, len(images.classes)).to(device)
    if name == "resnet18" and device.type == "cuda":
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster for its convolutions
    generator = torch.Generator(device).manual_seed(seed)
    size = images.shape[1:]
    parameters, optimizer = list(network.parameters()), recipe.optimizer(network)

    def step(_: NoBundle, batch: torch.Tensor, target: torch.Tensor) -> None:
        loss = functional.cross_entropy(network(batch), target, label_smoothing=recipe.label_smoothing)
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    graphs: dict[int, Graph] = defaultdict(lambda: Graph(step))  # by batch size, because the last batch is smaller
    for epoch in track(recipe.epochs, f"evaluating, {name}"):
        if recipe.condensed and epoch == recipe.epochs // 2:
            for group in optimizer.param_groups:
                group["lr"] /= 10
        order = torch.randperm(len(pixels), generator=generator, device=device)
        for position, index in enumerate(batches := torch.split(order, recipe.batch_size)):
            batch = to_unit_range(pixels[index])
            if recipe.condensed:
                drawn = draw_augmentation(len(batch), size, generator, flip=recipe.flip, same_operation=True)
                step(NoBundle(), drawn(batch), targets[index])  # no CUDA graph: the learning rate changes
            elif recipe.annealed:
                progress = (epoch + position / len(batches)) / recipe.epochs
                optimizer.param_groups[0]["lr"] = recipe.annealed_rate(progress)
                step(NoBundle(), batch, targets[index])
            else:
                graphs[len(index)](NoBundle(), batch, targets[index])
    return network.eval()


def _fit_logistic_regression(pixels: torch.Tensor, targets: torch.Tensor, classes: int) -> nn.Module:
    """Minimise |w|^2 / 2 + sum of cross-entropies, which is the objective of scikit-learn for C = 1."""
    flat = pixels.flatten(1).double()
    targets = targets.double() if targets.is_floating_point() else targets
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


def _predict(network: nn.Module, images: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        parts = [network(to_unit_range(part.to(device))).argmax(1).cpu() for part in images.split(TEST_BATCH_SIZE)]
    return torch.cat(parts)
