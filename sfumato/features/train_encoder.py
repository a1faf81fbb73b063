"""Training of the small public encoders that are part of the package.

With labels the encoder is a classifier: label smoothing; augmentation by shifts, mirroring and cutout. Without labels
it learns by contrast (`contrastive.py`). SGD with Nesterov momentum, one-cycle learning rate, an average of the
weights. The number of epochs is fixed. The test images are used once, after the training, with the weights in the
precision in which `save_perceptual` writes them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sfumato.data import DataError, ImageSet
from sfumato.features.contrastive import EMBEDDING, ViewBatches, alignment_and_uniformity
from sfumato.features.perceptual import PerceptualCard
from sfumato.features.resnet import ResNet, resnet18_cifar, small_resnet
from sfumato.features.weights import half_precision
from sfumato.progress import bar

TRAINABLE_NETWORKS: dict[str, Callable[[int], ResNet]] = {"small": small_resnet, "resnet18_cifar": resnet18_cifar}
MOMENTUM, WEIGHT_DECAY, LABEL_SMOOTHING = 0.9, 5e-4, 0.1
WARM_UP = 0.25  # fraction of the steps in which the learning rate increases
REFERENCE_BATCH = 512  # the learning rate is for this batch size
TEST_BATCH = 1000


def train_encoder(
    images: ImageSet,
    test: ImageSet | None = None,
    *,
    name: str,
    trained_on: str,
    licence: str = "Apache-2.0",
    network: str = "small",
    epochs: int = 40,
    batch_size: int = 512,
    learning_rate: float = 0.4,
    max_shift: int = 4,
    cutout: int = 8,
    seed: int = 0,
    device: str | torch.device = "cpu",
    compile_network: bool = False,
    notes: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> tuple[PerceptualCard, dict[str, torch.Tensor]]:
    """Train an encoder on public images; return its card and state dict, for `save_perceptual`.

    - images: colour images; with labels, the encoder is a classifier, without labels it learns by contrast.
    - test: labelled test images of the same classes; default none. The card then states the test accuracy.
    - name, trained_on, licence: for the card; licence default "Apache-2.0".
    - network: "small" (default) or "resnet18_cifar".
    - epochs: default 40.
    - batch_size: default 512; at most the number of images.
    - learning_rate: maximum of the schedule for a batch of 512, default 0.4; proportional to the batch size.
    - max_shift: largest shift in pixels, default 4.
    - cutout: side of the cutout square in pixels, default 8; 0: no cutout.
    - seed: of the initial weights and the augmentation, default 0.
    - device: default "cpu".
    - compile_network: use `torch.compile`, default False.
    - notes: additional notes for the card, default none.
    - progress: show a progress bar, default True.
    """
    if network not in TRAINABLE_NETWORKS:
        raise DataError(f"unknown network {network!r}; available: {', '.join(TRAINABLE_NETWORKS)}")
    for some in (images, test):
        if some is not None and some.images.shape[1] != 3:
            raise DataError("an encoder needs colour images; load them with mode='rgb'")
    if test is not None and (images.labels is None or test.labels is None):
        raise DataError("test images measure a classifier; load both sets with labels, or pass no test images")
    by_contrast = images.labels is None
    mean, std = channel_statistics(images.images)
    gain, bias = (value.view(1, 3, 1, 1).to(device) for value in (1 / (255 * std), -mean / std))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = TRAINABLE_NETWORKS[network](EMBEDDING if by_contrast else len(images.classes))
    model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    size = min(batch_size, len(images))
    batches: _TrainingBatches | ViewBatches
    if by_contrast:
        batches = ViewBatches(images.images.to(device), size, torch.Generator(device).manual_seed(seed))
    else:
        batches = _TrainingBatches(images, size, max_shift, cutout, seed, device)

    def loss(forward: Callable[..., Any], *batch: torch.Tensor) -> torch.Tensor:
        if by_contrast:
            rows = forward(torch.cat(batch) * (255 * gain) + bias)
            return alignment_and_uniformity(*rows.chunk(2))
        pixels, hidden, labels = batch
        logits = forward((pixels * gain + bias).masked_fill(hidden, 0))
        return functional.cross_entropy(logits, labels, label_smoothing=LABEL_SMOOTHING)

    rate = learning_rate * batches.batch_size / REFERENCE_BATCH
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        model = _fit(model, batches, loss, epochs, rate, compile_network, progress).eval()
        model.load_state_dict(half_precision(model.state_dict()), strict=False)  # there are no step counters
        facts: dict[str, Any] = {"images": len(images), "epochs": epochs}
        facts |= {"loss": "contrast of views"} if by_contrast else {"classes": len(images.classes)}
        if test is not None:
            facts = {"test_accuracy": round(accuracy(model, test, gain, bias), 2), "test_images": len(test), **facts}
    card = PerceptualCard(
        name=name,
        network=network,
        trained_on=trained_on,
        licence=licence,
        mean=_rgb(mean),
        std=_rgb(std),
        notes={**facts, **(notes or {})},
    )
    return card, model.state_dict()


def channel_statistics(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of each channel for pixels in [0, 1], rounded to four digits."""
    pixels = images.flatten(2).transpose(0, 1).flatten(1)
    chunks = [(chunk.double().sum(1), chunk.double().square().sum(1)) for chunk in pixels.split(1 << 24, 1)]
    first, second = (
        torch.stack(sums).sum(0) / pixels.shape[1] / 255**power
        for power, sums in enumerate(zip(*chunks, strict=True), 1)
    )
    return first.float().round(decimals=4), (second - first.square()).sqrt().float().round(decimals=4)


def augmented_batches(
    images: torch.Tensor,
    labels: torch.Tensor,
    batch_size: int,
    max_shift: int,
    cutout: int,
    generator: torch.Generator,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield one epoch of (pixels uint8 [B, 3, H, W] in channels-last order, cutout masks [B, 1, H, W], labels [B]).

    `images` are uint8 [N, H, W, 3]. All random numbers of the epoch are drawn at once. An incomplete last batch is
    dropped.
    """
    count, device = len(images), images.device

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (count, 1), generator=generator, device=device)

    order = torch.randperm(count, generator=generator, device=device)
    positions, hidden = [], []
    for length in images.shape[1:3]:
        axis = torch.arange(length, device=device)
        positions.append(_reflect(axis + integers(-max_shift, max_shift + 1), length))
        offset = axis - integers(0, length) + cutout // 2
        hidden.append((offset >= 0) & (offset < cutout))
    rows, columns = positions
    columns = torch.where(integers(0, 2) == 1, columns.flip(1), columns)
    for start in range(0, count - batch_size + 1, batch_size):
        batch = slice(start, start + batch_size)
        index = order[batch]
        pixels = images[index[:, None, None], rows[batch, :, None], columns[batch, None, :]]
        mask = hidden[0][batch, None, :, None] & hidden[1][batch, None, None, :]
        yield pixels.permute(0, 3, 1, 2), mask, labels[index]


@torch.no_grad()
def update_average(average: nn.Module, network: nn.Module, weight: float) -> None:
    """Move parameters and buffers of `average` towards those of `network`, in one launch without synchronisation."""
    old, new = ([*module.parameters(), *module.buffers()] for module in (average, network))
    torch._foreach_lerp_(old, new, weight)


@torch.no_grad()
def accuracy(network: nn.Module, images: ImageSet, gain: torch.Tensor, bias: torch.Tensor) -> float:
    """Return the accuracy in percent."""
    assert images.labels is not None
    correct = 0
    for batch, labels in zip(images.images.split(TEST_BATCH), images.labels.split(TEST_BATCH), strict=True):
        x = (batch.to(gain.device) * gain + bias).contiguous(memory_format=torch.channels_last)
        correct += int((network(x).argmax(1).cpu() == labels).sum())
    return 100 * correct / len(images)


class _TrainingBatches:
    """The training images on the device, and an iterator over the augmented batches of one epoch."""

    def __init__(
        self,
        images: ImageSet,
        batch_size: int,
        max_shift: int,
        cutout: int,
        seed: int,
        device: str | torch.device,
    ) -> None:
        assert images.labels is not None
        self.batch_size, self.steps = batch_size, len(images) // batch_size
        self._pixels = images.images.to(device).permute(0, 2, 3, 1).contiguous()
        self._labels = images.labels.to(device)
        self._options = max_shift, cutout
        self._generator = torch.Generator(device).manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return augmented_batches(self._pixels, self._labels, self.batch_size, *self._options, self._generator)


def _fit(
    network: nn.Module,
    batches: _TrainingBatches | ViewBatches,
    loss: Callable[..., torch.Tensor],
    epochs: int,
    rate: float,
    compile_network: bool,
    progress: bool,
) -> nn.Module:
    """Train the network; return an average of its weights over about one epoch."""
    device, total = next(network.parameters()).device, epochs * batches.steps
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.num_batches_tracked = None  # not used, and its update is a kernel launch for each layer
    average = copy.deepcopy(network).requires_grad_(False)
    forward = torch.compile(network) if compile_network else network
    groups: list[dict[str, Any]] = [
        {
            "params": [parameter for parameter in network.parameters() if parameter.ndim > 1],
            "weight_decay": WEIGHT_DECAY,
        },
        {"params": [parameter for parameter in network.parameters() if parameter.ndim <= 1]},
    ]
    optimizer = torch.optim.SGD(
        groups,
        rate,
        momentum=MOMENTUM,
        nesterov=True,
        fused=device.type == "cuda",
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [rate, rate], total_steps=total, pct_start=WARM_UP, cycle_momentum=False
    )
    with bar("training encoder") if progress else nullcontext(lambda *_: None) as advance:
        for _ in range(epochs):
            for batch in batches:
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    value = loss(forward, *batch)
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                schedule.step()
                update_average(average, network, 1 / min(batches.steps, schedule.last_epoch))
                advance(schedule.last_epoch, total)
    return average


def _reflect(positions: torch.Tensor, length: int) -> torch.Tensor:
    """Mirror positions outside of 0 … length - 1 at the border."""
    return length - 1 - (length - 1 - positions.abs()).abs()


def _rgb(values: torch.Tensor) -> tuple[float, float, float]:
    red, green, blue = (round(float(value), 4) for value in values)
    return red, green, blue
