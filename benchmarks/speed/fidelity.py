"""Speed of the EfficientNet-Lite0 features and of the Fréchet distance, beside the reference packages.

Features: images per second of 28×28 grey images, beside efficientnet_lite_pytorch, which is given prepared images.
Distance: seconds from features [10000, D] to the value, beside torchmetrics (float64) and SciPy's `sqrtm`. Best of the
repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.linalg
import torch

from benchmarks.runner import timed
from benchmarks.timing import alternating
from sfumato.data import ImageSet
from sfumato.evaluate.fidelity import frechet_distance
from sfumato.features import features, load_feature_network
from sfumato.features.efficientnet import WEIGHTS
from sfumato.features.weights import find_weights

COUNT, IMAGES, BATCH = 10_000, 128, 32


def with_torchmetrics(a: torch.Tensor, b: torch.Tensor) -> float:
    from torchmetrics.image.fid import FrechetInceptionDistance

    class Given(torch.nn.Identity):
        num_features = a.shape[1]

    metric = FrechetInceptionDistance(feature=Given()).set_dtype(torch.float64)
    for real, rows in ((True, a), (False, b)):
        for part in rows.split(1000):
            metric.update(part.double(), real=real)
    return float(metric.compute())


def with_scipy(a: torch.Tensor, b: torch.Tensor) -> float:
    one, two = (np.cov(rows.double().numpy(), rowvar=False) for rows in (a, b))
    shift = a.double().mean(0) - b.double().mean(0)
    return float(shift.square().sum() + np.trace(one + two - 2 * np.real(scipy.linalg.sqrtm(one @ two))))


def distance_seconds(dimension: int, repeats: int) -> dict[str, float]:
    """Compare on features whose variances decay as those of a network do."""
    generator = torch.Generator().manual_seed(0)
    scale = 1 / torch.arange(1, dimension + 1).sqrt()
    mix = torch.linalg.qr(torch.randn(dimension, dimension, generator=generator)).Q
    a, b = (torch.randn(COUNT, dimension, generator=generator) * scale @ mix + shift for shift in (0, 0.01))
    ways = {"sfumato": frechet_distance, "torchmetrics": with_torchmetrics, "scipy_sqrtm": with_scipy}
    if not np.allclose([way(a, b) for way in ways.values()], frechet_distance(a, b), rtol=1e-5):
        raise SystemExit("the distances disagree")
    return _best({name: lambda way=way: way(a, b) for name, way in ways.items()}, repeats, 2)


def images_per_second(device: str, repeats: int) -> dict[str, float]:
    from efficientnet_lite_pytorch import EfficientNet

    encoder = load_feature_network("effnet_lite0")
    generator = torch.Generator().manual_seed(0)
    images = ImageSet(torch.randint(0, 256, (IMAGES, 1, 28, 28), generator=generator).to(torch.uint8))
    with contextlib.redirect_stdout(io.StringIO()):
        path = str(find_weights(WEIGHTS))
        reference = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval().to(device)
    prepared = encoder.prepare(images.images).contiguous()

    @torch.inference_mode()
    def theirs() -> float:
        return sum(float(reference.extract_features(x.to(device)).mean((2, 3)).sum()) for x in prepared.split(BATCH))

    ways = {"sfumato": lambda: features(images, encoder, device=device), "efficientnet_lite_pytorch": theirs}
    return {name: round(IMAGES / seconds, 1) for name, seconds in _best(ways, repeats, 6).items()}


def _best(ways: dict[str, Callable[[], Any]], repeats: int, digits: int) -> dict[str, float]:
    times = alternating({name: lambda way=way: timed(way) for name, way in ways.items()}, repeats)
    return {name: round(min(some), digits) for name, some in times.items()}


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    warnings.filterwarnings("ignore", module="torchmetrics")
    measured = images_per_second(options.device, options.repeats)
    yield {"job": "EfficientNet-Lite0 features, images per second", "measured": measured}
    for dimension in (1280, 2048):
        job = f"Fréchet distance of features {COUNT}x{dimension}"
        yield {"job": job, "measured": distance_seconds(dimension, options.repeats)}
