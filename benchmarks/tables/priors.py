"""Methods that start from a prior, beside the same method without one: accuracy, the teacher, distances.

What limits them stands beside: a fit without noise, images drawn with the embeddings of the private images themselves
(no noise, and no distribution in between), and real images. None of these is private.
"""

from __future__ import annotations

import argparse
from math import inf
from typing import Any

import torch

from benchmarks.runner import Job, jobs
from sfumato.data import ImageSet
from sfumato.data.pixels import to_bytes, to_unit_range
from sfumato.features.embedding import convert
from sfumato.methods.parameters import chosen_device
from sfumato.methods.prior_painter import PainterTraining
from sfumato.priors import load_prior
from sfumato.priors.denoising import draw_images

SETS = ["cifar10", "celeba64", "brain_mri64"]
SIZES = {"public_size": True, "secure": False}  # exact noise takes minutes for each of the gradients
MEASURES = {"measures": ("small_cnn", "convnet", "resnet18", "teacher"), "first": ("fidelity", "fid")}
PHOTOGRAPHS = {"prior": "tiny-imagenet"}
NOBODY = {"prior": "random-process"}
DRAWN_AT_ONCE = 2000


def with_prior(
    name: str,
    method: str,
    given: dict[str, str],
    data: list[str] = SETS,
    epsilons: tuple[float, ...] = (1.0, 10.0),
    **more: Any,
) -> list[Job]:
    measures = MEASURES if method == "atelier" else {**MEASURES, "measures": MEASURES["measures"][:3]}
    return jobs(name, method, data, epsilons, params={**SIZES, **given}, **{**measures, **more})


def with_real_embeddings(
    job: Job,  # noqa: ARG001
    seed: int,
    options: argparse.Namespace,
    images: ImageSet,
    test: ImageSet,  # noqa: ARG001
) -> ImageSet:
    """Return an image for each training image, drawn with its embedding. Not private."""
    device, settings = chosen_device(options.device), PainterTraining()
    prior = load_prior(PHOTOGRAPHS["prior"])
    embedding = prior.new_embedding(prior.card.load_encoder(device), device)
    network, generator = prior.network().to(device).eval(), torch.Generator(device).manual_seed(seed)
    parts = []
    for pixels in images.images.split(DRAWN_AT_ONCE):
        condition = embedding.condition(embedding(to_unit_range(pixels.to(device))))
        drawn = draw_images(
            network,
            prior.card.shape,
            torch.full((len(pixels),), -1, device=device),
            generator,
            levels=settings.levels,
            guidance=settings.guidance,
            condition=condition,
        )
        parts.append(to_bytes(convert(drawn, images.shape)).cpu())
    return ImageSet(torch.cat(parts), images.labels, images.classes)


JOBS = [
    *with_prior("tiny-imagenet", "atelier", PHOTOGRAPHS),
    *with_prior("random-process", "atelier", NOBODY),
    *with_prior("tiny-imagenet", "dp-diffusion", PHOTOGRAPHS, SETS[:1]),
    *with_prior("random-process", "dp-diffusion", NOBODY),
    *with_prior("random-process", "atelier", NOBODY, ["mnist", "fashion-mnist"]),
    *with_prior("tiny-imagenet", "atelier", PHOTOGRAPHS, ["celeba"]),
    *with_prior("tiny-imagenet", "atelier", PHOTOGRAPHS, SETS, (inf,), seeds=1),  # what limits besides noise
    *jobs(
        "tiny-imagenet, embeddings of real images",
        None,
        SETS,
        [None],
        draw=with_real_embeddings,
        measures=MEASURES["measures"][:3],
        first=MEASURES["first"],
        seeds=1,
    ),
    *jobs("real images", None, SETS, [None], measures=MEASURES["measures"][:3], first=("fidelity",), seeds=1),
]
