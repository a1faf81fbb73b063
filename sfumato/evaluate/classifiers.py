"""Downstream utility: train on synthetic images only, test once on real ones.

Epochs are fixed and nothing is chosen on the test images, so the figure is an honest one: the mean over
seeds, never the best. The test images must be public (a benchmark's test split): measuring is a disclosure.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from sfumato.data import DataError, ImageSet
from sfumato.progress import track

EPOCHS = 10
BATCH = 256
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Accuracy:
    """Accuracy in percent, a value per seed."""

    values: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.sd:.1f} %" if len(self.values) > 1 else f"{self.mean:.1f} %"


def small_cnn(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The papers' small network: two convolutions with pooling, one hidden layer."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def downstream_accuracy(
    synthetic: ImageSet, test: ImageSet, *, seeds: tuple[int, ...] = (0,), device: str | torch.device = "cpu"
) -> Accuracy:
    """Test accuracy of the small CNN trained on `synthetic`, for each seed."""
    test = aligned(test, synthetic)
    if len(torch.unique(_labels(synthetic))) < 2:
        raise DataError("the synthetic set has images of one class only; a classifier needs two")
    if min(synthetic.shape[1:]) < 4:
        raise DataError("the small CNN needs images of at least 4 pixels a side")
    return Accuracy([_accuracy(synthetic, test, seed, torch.device(device)) for seed in seeds])


def _accuracy(synthetic: ImageSet, test: ImageSet, seed: int, device: torch.device) -> float:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = small_cnn(synthetic.shape, len(synthetic.classes)).to(device)
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    images, labels = synthetic.images.to(device), _labels(synthetic).to(device)
    for _ in track(EPOCHS, "classifier"):
        for index in torch.split(torch.randperm(len(images), generator=generator).to(device), BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(network(_pixels(images[index])), labels[index]).backward()
            optimizer.step()
    network.eval()
    with torch.no_grad():
        guesses = torch.cat(
            [network(_pixels(part.to(device))).argmax(1).cpu() for part in torch.split(test.images, 1000)]
        )
    return 100 * float((guesses == _labels(test)).double().mean())


def _pixels(images: torch.Tensor) -> torch.Tensor:
    return images.float() / 127.5 - 1


def _labels(images: ImageSet) -> torch.Tensor:
    assert images.labels is not None
    return images.labels


def aligned(test: ImageSet, like: ImageSet) -> ImageSet:
    """The test set with its classes numbered as in `like`, or an error that says why they cannot be compared."""
    if like.labels is None or test.labels is None:
        raise DataError("a classifier needs labels, on the synthetic images and on the test images")
    if like.shape != test.shape:
        raise DataError(f"test images are {test.shape}, the others {like.shape}; read both with the same size and mode")
    names = list(like.classes)
    if unknown := [name for name in test.classes if name not in names]:
        raise DataError(f"the test set has classes ({', '.join(unknown)}) that the other set has not")
    order = torch.tensor([names.index(name) for name in test.classes])
    return ImageSet(test.images, order[test.labels], like.classes)
