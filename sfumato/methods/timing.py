"""Estimate how long a fit takes, from a few steps on random images of the same shape. No private image is used."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass

import torch

from sfumato.data import ImageSet, PublicFacts
from sfumato.methods.base import Synthesizer
from sfumato.methods.checkpoints import Stopwatch, stopwatch
from sfumato.progress import bar

PROBE_IMAGES, PROBE_SAMPLES = 2000, 100


@dataclass(frozen=True)
class Estimate:
    """Rough seconds for a fit, and for drawing 10,000 images."""

    fit: float
    sample: float


def estimate_time(model: Synthesizer, public: PublicFacts, images: int) -> Estimate:
    """Fit and sample on random images, with few steps, and extrapolate to `images` images and all steps.

    Loops keep their time per step, so that methods whose samples grow with the number of images take longer than this.
    """
    number = min(images, PROBE_IMAGES)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (number, *public.shape), dtype=torch.uint8, generator=generator)
    labels = torch.arange(number) % len(public.classes) if public.labelled else None
    watch = Stopwatch()
    token = stopwatch.set(watch)
    start = time.perf_counter()
    try:
        with bar("probing"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(ImageSet(pixels, labels, public.classes))
    finally:
        stopwatch.reset(token)
    rest = time.perf_counter() - start - watch.measured
    start = time.perf_counter()
    count = min(PROBE_SAMPLES, model.max_samples(public) or PROBE_SAMPLES)
    model.sample(count)
    drawn = (time.perf_counter() - start) * min(10_000, model.max_samples(public) or 10_000)
    return Estimate(watch.expected + rest * images / number, drawn / count)
