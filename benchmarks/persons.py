"""What protecting persons costs, beside what else one could do: MNIST with many images of some persons.

    python benchmarks/persons.py --json benchmarks/results/persons.json

Persons are made: sizes follow a power law (m^-1.5, at most 300 images), and a person has images of two classes. Ways:

- `image`: one image is protected; a person is not. For comparison only.
- `person`: one person is protected (`persons=`): clipped rows of a person are averaged.
- `divided`: one image at epsilon / K, for K images of the most frequent person, as one would do without `persons`.
- `one each`: one image of each person is kept.
- `ten each`: ten at most, at epsilon / 10.

Accuracy of a small CNN trained on 10,000 synthetic images, on the real test split; dp-merf, epsilon 1, delta 1e-5.

`rules`: how well class means of random Fourier features are known after noise, by averaging clipped rows of a person or
by clipping their sum: relative error |estimate - mean| / |mean|, averaged over classes. Public data, no vault.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch

import sfumato as sf
from sfumato.data import ImageSet
from sfumato.engine import noise_multiplier
from sfumato.evaluate import downstream_accuracy

MOST = 300
EPSILON, DELTA = 1.0, 1e-5


def with_persons(images: ImageSet, seed: int = 0) -> ImageSet:
    """The same images, each somebody's: sizes by a power law, two classes for each person."""
    assert images.labels is not None
    generator = torch.Generator().manual_seed(seed)
    chances = torch.arange(1, MOST + 1).double() ** -1.5
    queues = [(images.labels == c).nonzero()[:, 0].tolist() for c in range(len(images.classes))]
    persons, number = torch.full((len(images),), -1), 0
    while any(queues):
        size = int(torch.multinomial(chances, 1, generator=generator)) + 1
        two = torch.randperm(len(queues), generator=generator)[:2].tolist()
        for place in range(size):
            queue = queues[two[place % 2]] or max(queues, key=len)
            if queue:
                persons[queue.pop()] = number
        number += 1
    return ImageSet(images.images, images.labels, images.classes, persons=persons)


def thinned(images: ImageSet, most: int) -> ImageSet:
    """At most so many images of each person, each its own unit."""
    assert images.persons is not None
    order = images.persons.argsort(stable=True)
    _, sizes = images.persons[order].unique_consecutive(return_counts=True)
    rank = torch.arange(len(order)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    kept = images.subset(order[rank < most])
    return ImageSet(kept.images, kept.labels, kept.classes)


def rules(images: ImageSet) -> dict[str, float]:
    """Relative error of class means by both rules; counts are a release of their own, by the same rule, here exact."""
    assert images.labels is not None
    assert images.persons is not None
    generator = torch.Generator().manual_seed(0)
    pixels = images.images.flatten(1).float() / 127.5 - 1
    phase = pixels @ (torch.randn(784, 500, generator=generator) / 14)
    rows = torch.cat([phase.cos(), phase.sin()], 1) / math.sqrt(500)
    members = torch.nn.functional.one_hot(images.labels, 10).float()
    wanted = members.T @ rows / members.sum(0)[:, None]
    noise = noise_multiplier(epsilon=EPSILON, delta=DELTA)
    units = int(images.persons.max()) + 1
    found = {}
    for rule in ("average", "clipped sum"):
        each, counts = torch.zeros(units, 10, 1000), torch.zeros(units, 10)
        each.view(units * 10, 1000).index_add_(0, images.persons * 10 + images.labels, rows)
        counts.view(-1).index_add_(0, images.persons * 10 + images.labels, torch.ones(len(rows)))
        sizes = counts.sum(1).clamp_min(1)
        average = rule == "average"
        scale = 1 / sizes if average else 1 / each.flatten(1).norm(dim=1).clamp_min(1)
        total = (each * scale[:, None, None]).sum(0) + noise * torch.randn(10, 1000, generator=generator)
        scale = 1 / sizes if average else 1 / counts.norm(dim=1).clamp_min(1)  # a release of its own
        estimate = total / (counts * scale[:, None]).sum(0)[:, None]
        found[rule] = round(float(((estimate - wanted).norm(dim=1) / wanted.norm(dim=1)).mean()), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    whole, test = sf.load_images("mnist"), sf.load_images("mnist", split="test")
    images = with_persons(whole.subset(torch.arange(min(options.records, len(whole)))))
    assert images.persons is not None
    largest = int(torch.bincount(images.persons).max())
    plain = ImageSet(images.images, images.labels, images.classes)
    ways: dict[str, tuple[ImageSet, float]] = {
        "image": (plain, EPSILON),
        "person": (images, EPSILON),
        "divided": (plain, EPSILON / largest),
        "one each": (thinned(images, 1), EPSILON),
        "ten each": (thinned(images, 10), EPSILON / 10),
    }
    content: dict[str, Any] = {
        "command": "python benchmarks/persons.py --json benchmarks/results/persons.json",
        "images": len(images),
        "persons": int(images.persons.max()) + 1,
        "most_images_of_a_person": largest,
        "rules": rules(images),
        "accuracy": {},
    }
    print(json.dumps(content), flush=True)
    for way, (data, epsilon) in ways.items():
        values = []
        for seed in range(options.seeds):
            model = sf.create("dp-merf", epsilon=epsilon, delta=DELTA, steps=options.steps, seed=seed)
            model.fit(data)
            values.append(downstream_accuracy(model.sample(10_000, seed=seed), test, seeds=(seed,)).mean)
            print(json.dumps({way: values}), flush=True)
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        row = {"epsilon": epsilon, "mean": round(statistics.mean(values), 2), "sd": round(spread, 2), "values": values}
        content["accuracy"][way] = row
        if options.json:
            options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
