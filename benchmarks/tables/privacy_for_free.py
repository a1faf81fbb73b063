"""Is condensation private for free? The linear construction of Dong et al. beside distribution matching, no privacy.

Both start from the same noise. Compared are the matching loss in fresh random networks, class means and spreads (the
test of Bai and Saranadasa), the accuracy of a ConvNet trained on the images in 8 bits, and membership read off the
basis.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch

import sfumato as sf
from benchmarks.free_privacy_claim import basis_of, linear_construction, matching_losses, outside_span
from benchmarks.runner import Job, load_sets
from benchmarks.two_sample import bai_saranadasa
from sfumato.data import ImageSet
from sfumato.data.pixels import to_bytes, to_unit_range
from sfumato.evaluate import Recipe, downstream_accuracy
from sfumato.methods.dm import class_batches, initial_noise

NETWORKS = 20  # for the loss
EPOCHS = {"cifar10": 300, "digits": 100}
ROWS = ("initial noise", "Eq. 8", "Eq. 8, clamped", "dm", "real images", "tests")


def compare(job: Job, seed: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Make both sets of images and measure them."""
    real, test = load_sets(job, options.folder)
    model = sf.create("dm", device=options.device, seed=seed, **job.params).with_constants(**job.constants)
    public, each, device = real.public(), model.images_per_class, model.torch_device
    width, flip = job.constants.get("width", model.width), model.flip
    noise = initial_noise(public, each, torch.Generator(device).manual_seed(seed))
    labels = real.labels.to(device)
    pixels = to_unit_range(real.images.to(device))
    by_class = [pixels[labels == label] for label in range(len(public.classes))]
    pairs = zip(noise.split(each), by_class, strict=True)
    linear, learned = torch.cat([linear_construction(*pair) for pair in pairs]), model.fit(real).images_
    generator = torch.Generator(device).manual_seed(seed + 1)
    chosen = next(class_batches(real.images, labels, public, each, generator))[0]
    sets = dict(zip(ROWS, (noise, linear, linear.clamp(-1, 1), learned, chosen), strict=False))
    losses = matching_losses(sets, real, networks=NETWORKS, seed=seed + 1, device=device, width=width)
    found: dict[str, dict[str, Any]] = {name: {"loss": _summary(losses[name])} for name in sets}
    recipe = Recipe(EPOCHS[job.data], condensed=True, flip=flip)
    for name in ("Eq. 8", "dm", "real images"):
        kept = ImageSet(to_bytes(sets[name]).cpu(), torch.arange(len(by_class)).repeat_interleave(each), public.classes)
        accuracy = downstream_accuracy(kept, test, "convnet", seeds=range(3), recipe=recipe, device=device)
        found[name]["convnet"] = _summary(accuracy.values)
    means, spreads = {}, {}
    split = zip(public.classes, linear.split(each), learned.split(each), by_class, strict=True)
    for name, one, other, members in split:
        means[name] = round(bai_saranadasa(one, other)[0], 2)
        deviations = [(images - members.mean(0)).square() for images in (one, other)]
        spreads[name] = round(bai_saranadasa(*deviations)[0], 2)
    others = to_unit_range(test.images[test.labels == 0].to(device))[:1000]
    found["tests"] = {"means_z": means, "spreads_z": spreads, **membership(by_class[0], others)}
    return found


def membership(members: torch.Tensor, others: torch.Tensor) -> dict[str, Any]:
    """Return how much of members and other images lies outside the span of half as many members as there are pixels."""
    count = min(len(members), members[0].numel()) // 2
    basis = basis_of(members[:count].flatten(1))
    inside, outside = (outside_span(basis, count, images) for images in (members[:count], others))
    return {"images": count, "members_outside_most": float(inside.max()), "others_outside_least": float(outside.min())}


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {"mean": round(statistics.fmean(values), 2), "sd": round(statistics.stdev(values), 2), "count": len(values)}


def free(data: str, constants: dict[str, Any] | None = None, **params: Any) -> Job:
    return Job("all", None, data, None, params, constants or {}, seeds=1, run=compare, produces=ROWS)


JOBS = [
    free("cifar10", images_per_class=50, iterations=2000, flip=True),
    free("digits", {"width": 32}, images_per_class=20, iterations=500, batch_size=64),
]
