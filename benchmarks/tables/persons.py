"""The cost of protecting persons in place of images: DP-MERF on MNIST with simulated persons.

The number of images of a person follows a power law (m^-1.5, at most 300); a person has images of two classes.

`error of class means`: how well class means of random Fourier features are known after noise, if the clipped rows of a
person are averaged, or if their sum is clipped: |estimate - mean| / |mean|, averaged over classes. No vault.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import Any

import torch

from benchmarks.runner import Job, load_sets
from sfumato.data import ImageSet
from sfumato.engine import noise_multiplier

MAX_IMAGES = 300
CLASSES, FREQUENCIES = 10, 500

Sets = tuple[ImageSet, ImageSet]


def with_persons(images: ImageSet, test: ImageSet) -> Sets:
    """Give each image a person."""
    generator = torch.Generator().manual_seed(0)
    chances = torch.arange(1, MAX_IMAGES + 1).double() ** -1.5
    queues = [(images.labels == c).nonzero()[:, 0].tolist() for c in range(len(images.classes))]
    persons, number = torch.full((len(images),), -1), 0
    while any(queues):
        size = int(torch.multinomial(chances, 1, generator=generator)) + 1
        two = torch.randperm(len(queues), generator=generator)[:2].tolist()
        for place in range(size):
            if queue := queues[two[place % 2]] or max(queues, key=len):
                persons[queue.pop()] = number
        number += 1
    return ImageSet(images.images, images.labels, images.classes, persons=persons), test


def thinned(images: ImageSet, test: ImageSet, count: int) -> Sets:
    """Keep at most `count` images of each person, each a unit of its own."""
    persons = with_persons(images, test)[0].persons
    order = persons.argsort(stable=True)
    sizes = persons[order].unique_consecutive(return_counts=True)[1]
    rank = torch.arange(len(order)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return images.subset(order[rank < count]), test


def error_of_means(job: Job, seed: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Compare the two ways to bound the contribution of a person; counts are exact."""
    images, _ = load_sets(job, options.folder)
    generator = torch.Generator().manual_seed(seed)
    phase = (images.images.flatten(1).float() / 127.5 - 1) @ (torch.randn(784, FREQUENCIES, generator=generator) / 14)
    rows = torch.cat([phase.cos(), phase.sin()], 1) / math.sqrt(FREQUENCIES)
    members = torch.nn.functional.one_hot(images.labels, CLASSES).float()
    wanted = members.T @ rows / members.sum(0)[:, None]
    noise = noise_multiplier(epsilon=job.epsilon, delta=1e-5)
    units, place = int(images.persons.max()) + 1, images.persons * CLASSES + images.labels
    each = torch.zeros(units * CLASSES, rows.shape[1]).index_add_(0, place, rows).view(units, CLASSES, -1)
    counts = torch.zeros(units * CLASSES).index_add_(0, place, torch.ones(len(rows))).view(units, CLASSES)
    sizes = counts.sum(1)
    found = {"images": len(images), "persons": units, "largest_count": int(sizes.max())}
    for rule in ("average", "clipped_sum"):
        average = rule == "average"
        scale = 1 / sizes if average else 1 / each.flatten(1).norm(dim=1).clamp_min(1)
        total = (each * scale[:, None, None]).sum(0)
        total += noise * torch.randn(total.shape, generator=generator)
        scale = 1 / sizes if average else 1 / counts.norm(dim=1).clamp_min(1)  # counts are a release of their own
        estimate = total / (counts * scale[:, None]).sum(0)[:, None]
        found[rule] = round(float(((estimate - wanted).norm(dim=1) / wanted.norm(dim=1)).mean()), 4)
    return {job.name: found}


def protect(name: str, epsilon: float, prepare: Any = None) -> Job:
    return Job(name, "dp-merf", "mnist", epsilon, {"steps": 1000}, images=10_000, prepare=prepare)


JOBS = [
    protect("one image protected", 1.0),
    protect("one person protected", 1.0, with_persons),
    protect("epsilon divided by the largest count", 1.0 / MAX_IMAGES),
    protect("one image of each person", 1.0, partial(thinned, count=1)),
    protect("ten images of each person, epsilon / 10", 0.1, partial(thinned, count=10)),
    Job("error of class means", None, "mnist", 1.0, seeds=1, prepare=with_persons, run=error_of_means),
]
