"""FID: its value for real CIFAR-10 images, agreement with the reference network and arithmetic, and speed.

- CIFAR-10: all training against all test images; papers report 3.15. On a CPU this takes hours: it is left out.
- Features: largest difference between our Inception and the TorchScript that the weights come from, same input.
- Distance: FID of these features by SciPy's matrix square root, as pytorch-fid, clean-fid and torch-fidelity compute
  it, beside ours; and ours with TF32 convolutions, PyTorch's default on a GPU.
- Speed: seconds for 10,000 CIFAR-10 images, resized and through the network (on a CPU 32 images, scaled up).

Needs the extra `fid`.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.runner import Job, load_sets, timed
from benchmarks.speed.fidelity import with_scipy
from sfumato.data import ImageSet
from sfumato.evaluate.fidelity import SmallSampleWarning, frechet_distance
from sfumato.features import features, load_feature_network
from sfumato.features.inception import WEIGHTS
from sfumato.features.weights import find_weights

IMAGES, FEW = 10_000, 32
NAME = "FID of CIFAR-10, training against test images"


def largest_difference(images: ImageSet, device: str) -> dict[str, float]:
    """Compare the features of some images with those of the TorchScript, in float32 without TF32."""
    encoder = load_feature_network("inception", find_weights(WEIGHTS.instead[0]))
    reference = torch.jit.load(str(find_weights(WEIGHTS.instead[0])), map_location=device).eval()
    ours = features(images, encoder, device=device, progress=False).values
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        theirs = reference(encoder.prepare(images.images.to(device)).contiguous()).cpu()
    return {"largest_difference": round(float((ours - theirs).abs().max()), 6), "mean": round(float(theirs.mean()), 4)}


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    warnings.simplefilter("ignore", SmallSampleWarning)
    device, on_gpu = options.device, options.device == "cuda"
    train, test = load_sets(Job("fid", None, "cifar10"), options.folder)
    few = test.subset(range(FEW))
    encoder = load_feature_network("inception")

    def seen(images: ImageSet, tf32: bool) -> torch.Tensor:
        return features(images, encoder, device=device, progress=False, tf32=tf32).values.to(device)

    for tf32, name in ((False, ""), (True, ", TF32")):
        some = train.subset(range(IMAGES if on_gpu else FEW))
        seen(few, tf32)  # warm-up
        seconds = min(timed(lambda: seen(some, tf32)) for _ in range(options.repeats))  # noqa: B023
        measured: dict[str, Any] = {"seconds": round(seconds * IMAGES / len(some), 1), "measured_images": len(some)}
        yield {"job": f"features of {IMAGES} images{name}", "measured": measured}
    if on_gpu:
        quick = frechet_distance(seen(train, True), seen(test, True))
        a, b = seen(train, False), seen(test, False)
        seconds = timed(lambda: frechet_distance(a, b))
        measured = {"sfumato": round(frechet_distance(a, b), 4), "tf32": round(quick, 4)}
        yield {"job": f"{NAME}, ours", "measured": {**measured, "seconds_of_distance": round(seconds, 2)}}
        reference = {"scipy_sqrtm": round(with_scipy(a.cpu(), b.cpu()), 4)}
        yield {"job": f"{NAME}, by SciPy", "measured": reference}
    yield {"job": f"features of {FEW} images, beside the TorchScript", "measured": largest_difference(few, device)}
