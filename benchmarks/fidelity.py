"""Speed of the feature pass and of the Fréchet distance, and the distances of real images to real images.

    python benchmarks/fidelity.py [--device cpu] [--images 10000] [--json FILE]

`seconds`: the Fréchet distance from features [10000, D] to its value: ours, torchmetrics (float64) and SciPy's
`sqrtm`, each on the same features, alternating. `images_per_second`: the EfficientNet-Lite0 pass, ours and the
reference package (PyPI `efficientnet_lite_pytorch`). `anchors`: training images against test images of MNIST and
Fashion-MNIST, where found: what a perfect synthesizer would score with this many images.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import scipy.linalg
import torch

from sfumato.data import ImageSet, find_named, load_images
from sfumato.encoders import Encoder, features, load_encoder
from sfumato.encoders.efficientnet import WEIGHTS
from sfumato.encoders.weights import find_weights
from sfumato.evaluate.fidelity import fidelity, frechet_distance

COUNT = 10_000
SPEED_IMAGES = 128


def timed(function: Callable[[], float]) -> tuple[float, float]:
    start = time.perf_counter()
    value = function()
    return value, time.perf_counter() - start


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
    root = np.real(scipy.linalg.sqrtm(one @ two))
    return float(shift.square().sum() + np.trace(one + two - 2 * root))


def frechet_seconds(dimension: int, repeats: int) -> dict[str, float]:
    """Best seconds of each, on features that decay as a network's do."""
    generator = torch.Generator().manual_seed(0)
    scale = 1 / torch.arange(1, dimension + 1).sqrt()
    mix = torch.linalg.qr(torch.randn(dimension, dimension, generator=generator)).Q
    a, b = (torch.randn(COUNT, dimension, generator=generator) * scale @ mix + shift for shift in (0, 0.01))
    ways: dict[str, Callable[[], float]] = {
        "sfumato": lambda: frechet_distance(a, b),
        "torchmetrics": lambda: with_torchmetrics(a, b),
        "scipy_sqrtm": lambda: with_scipy(a, b),
    }
    seconds = dict.fromkeys(ways, float("inf"))
    values = {}
    for _ in range(repeats):
        for name, way in ways.items():
            values[name], spent = timed(way)
            seconds[name] = min(seconds[name], spent)
    if not np.allclose(list(values.values()), values["sfumato"], rtol=1e-5):
        raise SystemExit(f"the distances disagree: {values}")
    return {name: round(spent, 2) for name, spent in seconds.items()}


def images_per_second(encoder: Encoder, device: str, repeats: int) -> dict[str, float]:
    """Best rate of each, from 28×28 grey images; the reference is given images that are prepared already."""
    from efficientnet_lite_pytorch import EfficientNet

    generator = torch.Generator().manual_seed(0)
    images = ImageSet(torch.randint(0, 256, (SPEED_IMAGES, 1, 28, 28), generator=generator).to(torch.uint8))
    with contextlib.redirect_stdout(io.StringIO()):
        path = str(find_weights(WEIGHTS))
        reference = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval().to(device)
    prepared = encoder.prepare(images.images).contiguous()

    def ours() -> float:
        return float(features(images, encoder, device=device).values.sum())

    def theirs() -> float:
        with torch.inference_mode():
            batches = prepared.split(32)
            return sum(float(reference.extract_features(x.to(device)).mean((2, 3)).sum()) for x in batches)

    ways = {"sfumato": ours, "efficientnet_lite_pytorch": theirs}
    rates = dict.fromkeys(ways, 0.0)
    for _ in range(repeats):
        for name, way in ways.items():
            rates[name] = max(rates[name], SPEED_IMAGES / timed(way)[1])
    return {name: round(rate, 1) for name, rate in rates.items()}


def anchors(encoder: Encoder, device: str, count: int) -> dict[str, dict[str, float]]:
    found = {}
    for name in ("mnist", "fashion-mnist"):
        if find_named(name) is None:
            continue
        train, test = load_images(name), load_images(name, split="test")
        start = time.perf_counter()
        measures = fidelity(train, test, encoder, device=device, sample=count)
        seconds = time.perf_counter() - start
        found[name] = {measure: round(value, 5) for measure, value in measures.items()} | {"seconds": round(seconds, 1)}
        print(name, found[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=COUNT, help="images of each set for the anchors (0: none)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torchmetrics")
    encoder = load_encoder("effnet_lite0")
    results = {
        "setting": {
            "device": arguments.device if arguments.device == "cpu" else torch.cuda.get_device_name(),
            "cores": len(os.sched_getaffinity(0)),
            "repeats": arguments.repeats,
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("torch", "numpy", "scipy", "torchmetrics")},
        },
        "images_per_second": images_per_second(encoder, arguments.device, arguments.repeats),
    }
    print(results["images_per_second"])
    results["seconds"] = {}
    for dimension in (1280, 2048):
        results["seconds"][f"frechet_{COUNT}x{dimension}"] = frechet_seconds(dimension, arguments.repeats)
        print(results["seconds"])
    if arguments.images:
        found = anchors(encoder, arguments.device, arguments.images)
        results["anchors"] = {"train_against_test_images_each": arguments.images, **found}
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
