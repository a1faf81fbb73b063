"""Accuracy in the manner of DPImageBench (Gong et al. 2025), to compare with figures that were measured there.

Three deep networks are trained on synthetic images. A twelfth of these (5,000 of 60,000) is set aside; the epoch whose
averaged weights are best on them is tested on real images. So nothing is selected on the test images, as in the
benchmark's present program; its headline, the best of the three networks, is. Both figures are returned.

- CIFAR: ResNet-164, WRN-28-10, ResNeXt; 200 epochs of SGD at 0.1 with batches of 126.
- Others: ResNet-110, WRN-40-4, ResNeXt-29; 50 epochs of Adam at 0.01 with batches of 256.

The learning rate falls to a fifth after each 60 or 20 epochs. No augmentation.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from sfumato.data import DataError, ImageSet
from sfumato.data.pixels import to_unit_range
from sfumato.engine.cuda_graph import Graph, NoBundle
from sfumato.evaluate.utility import aligned
from sfumato.nets.classifiers import Builder
from sfumato.nets.deep_classifiers import DEEP_CIFAR_NETWORKS, DEEP_NETWORKS
from sfumato.progress import track

VALIDATION_INTERVAL = 12  # one of this many synthetic images is for validation
EMA = 0.9999  # of the weights, less in the beginning
DROP, BATCH = 0.2, 500


@dataclass(frozen=True)
class BenchResult:
    """Accuracies in percent.

    - each: by network. mean, best: of the three.
    """

    each: dict[str, float]

    @property
    def mean(self) -> float:
        return sum(self.each.values()) / len(self.each)

    @property
    def best(self) -> float:
        return max(self.each.values())


def bench_accuracy(
    synthetic: ImageSet,
    test: ImageSet,
    *,
    cifar: bool = False,
    epochs: int | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    networks: dict[str, Builder] | None = None,
) -> BenchResult:
    """Train the three networks of DPImageBench on `synthetic`, and return their accuracies on `test`.

    - cifar: the benchmark's settings for CIFAR, default False.
    - epochs: default 200 or 50. Fewer epochs shorten the schedule of the learning rate, too.
    - networks: others, for tests.
    """
    test = aligned(test, synthetic)
    if len(synthetic) < 2 * VALIDATION_INTERVAL:
        raise DataError(f"DPImageBench's classifiers need at least {2 * VALIDATION_INTERVAL} synthetic images")
    chosen = networks or (DEEP_CIFAR_NETWORKS if cifar else DEEP_NETWORKS)
    order = torch.randperm(len(synthetic), generator=torch.Generator().manual_seed(seed))
    held = order[: len(order) // VALIDATION_INTERVAL]
    train, validation = synthetic.subset(order[len(held) :]), synthetic.subset(held)
    total = epochs or (200 if cifar else 50)
    found = {}
    for name, build in chosen.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = build(synthetic.shape, len(synthetic.classes)).to(device)
        best = _train(name, network, train, validation, total, cifar, seed)
        found[name] = 100 * _accuracy(best, test)
    return BenchResult(found)


def _train(
    name: str, network: nn.Module, train: ImageSet, validation: ImageSet, epochs: int, cifar: bool, seed: int
) -> nn.Module:
    """Return the averaged network of the epoch that is best on the validation images."""
    device = next(network.parameters()).device
    targets = train.labels if train.soft_labels is None else train.soft_labels
    assert targets is not None
    pixels, targets = train.images.to(device), targets.to(device)
    average, parameters = copy.deepcopy(network), list(network.parameters())
    if cifar:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=5e-4)
    else:
        optimizer = torch.optim.Adam(parameters, 0.01, capturable=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(seed)
    decay = torch.zeros((), device=device)

    def step(_: NoBundle, batch: torch.Tensor, target: torch.Tensor) -> None:
        loss = functional.cross_entropy(network(batch), target)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), parameters, strict=True):
                mean.lerp_(parameter, 1 - decay)

    graphs: dict[int, Graph] = defaultdict(lambda: Graph(step))
    batch_size, drop_each = (126, 0.3) if cifar else (256, 0.4)  # part of the epochs after which the rate drops
    steps, best, best_state = 0, -1.0, average.state_dict()
    rate, drops = optimizer.param_groups[0]["lr"], 0
    for epoch in track(epochs, name):
        if int(epoch / (drop_each * epochs)) > drops:
            drops += 1
            optimizer.param_groups[0]["lr"] = rate * DROP**drops
            graphs.clear()  # the learning rate is part of a graph
        network.train()
        for index in torch.randperm(len(pixels), generator=generator, device=device).split(batch_size):
            steps += 1
            decay.fill_(min(EMA, (1 + steps) / (10 + steps)))
            if len(index) > 1:  # batch norm needs two images
                graphs[len(index)](NoBundle(), to_unit_range(pixels[index]), targets[index])
        for mine, theirs in zip(average.buffers(), network.buffers(), strict=True):
            mine.copy_(theirs)  # statistics of batch norms are not averaged
        if (accuracy := _accuracy(average, validation)) >= best:
            best, best_state = accuracy, {key: value.clone() for key, value in average.state_dict().items()}
    average.load_state_dict(best_state)
    return average


@torch.no_grad()
def _accuracy(network: nn.Module, images: ImageSet) -> float:
    assert images.labels is not None
    device = next(network.parameters()).device
    network.eval()
    parts = images.images.split(BATCH)
    seen = torch.cat([network(to_unit_range(part.to(device))).argmax(1).cpu() for part in parts])
    return float((seen == images.labels).double().mean())
