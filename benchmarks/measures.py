"""What is measured of a fitted model and its samples. Everything is tested once on the real test split.

- NAME: accuracy in percent of a classifier of `sfumato.evaluate`, trained on the samples.
- NAME@EPOCHS: the same, trained as in the condensation papers. NAME, annealed: as the authors of DP-MEPF train it.
- fidelity: Fréchet distance, precision and recall in EfficientNet-Lite0 features, against 10,000 test images.
- fid: FID as DPImageBench computes it: 2015 Inception (TF32 on a GPU, PyTorch's default), all samples against all
  training images. For real images (no method): training against test images.
- dpimagebench: mean and best of three deep classifiers, in the manner of DPImageBench; dpimagebench@EPOCHS: with fewer
  epochs than there (50, CIFAR: 200).
- teacher: accuracy of the teacher of `atelier` on test images.
- auroc, auroc_image: AUROC of the likelihood of codes or images, one class against the others, averaged.
- agreement: how often a CNN trained on real images sees the requested class, and the entropy in bits of what it sees.
- accepted: share of accepted trajectories of the Hamiltonian sampler. images_per_s: of drawing the samples.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.data import ImageSet
from sfumato.evaluate import ANNEALED, Recipe, bench_accuracy, detect_each, downstream_accuracy, fidelity
from sfumato.evaluate.fidelity import frechet_distance
from sfumato.features import features, load_feature_network
from sfumato.methods.base import Synthesizer
from sfumato.methods.parameters import chosen_device

DISTANCES = ("fd_effnet_lite0", "precision_effnet_lite0", "recall_effnet_lite0")
MIRRORED = ("fashion-mnist", "cifar10", "celeba")  # data sets whose classes do not change in a mirror


@dataclass
class Fitted:
    """A model (None: real images), its data and its samples."""

    model: Any
    train: ImageSet
    test: ImageSet
    synthetic: ImageSet
    seed: int
    data: str
    device: str
    sample_s: float = 0.0

    @property
    def torch_device(self) -> torch.device:
        return self.model.torch_device if isinstance(self.model, Synthesizer) else chosen_device(self.device)


def key_of(name: str) -> str:
    """Return the key under which a measure is stored."""
    return DISTANCES[0] if name == "fidelity" else name.partition("@")[0]


def measure(name: str, fitted: Fitted) -> dict[str, Any]:
    """Return the values of one measure by key."""
    own = {"fidelity": _fidelity, "teacher": _teacher, "agreement": _agreement, "accepted": _accepted}
    own |= {"auroc": _auroc, "auroc_image": _auroc, "images_per_s": _images_per_s, "fid": _fid}
    if name in own:
        return own[name](name, fitted)
    if name.startswith("dpimagebench"):
        return _dpimagebench(name, fitted)
    classifier, _, epochs = name.partition("@")
    recipe = Recipe(int(epochs), condensed=True, flip=fitted.data in MIRRORED) if epochs else Recipe()
    if classifier.endswith(", annealed"):
        recipe = ANNEALED
    network, options = classifier.partition(", ")[0], {"recipe": recipe, "device": fitted.torch_device}
    found = downstream_accuracy(fitted.synthetic, fitted.test, network, seeds=(fitted.seed,), **options)
    return {classifier: round(found.mean, 2)}


def _fidelity(_: str, fitted: Fitted) -> dict[str, Any]:
    found = fidelity(fitted.synthetic, fitted.test, device=fitted.torch_device, progress=False)
    return {key: round(found[key], 4) for key in DISTANCES}


def _fid(name: str, fitted: Fitted) -> dict[str, Any]:
    real = fitted.test if fitted.synthetic is fitted.train else fitted.train
    found = _inception_features(fitted.synthetic, fitted.torch_device)
    return {name: round(frechet_distance(_real_features(real, fitted.torch_device), found), 3)}


def _real_features(real: ImageSet, device: torch.device) -> torch.Tensor:
    """Return Inception features of public images; jobs and workers share them through a file."""
    digest = hashlib.sha256(real.images.numpy()).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / f"sfumato-inception-{device.type}-{digest}.npy"
    if not kept.exists():
        partial = kept.with_suffix(f".{os.getpid()}.npy")
        np.save(partial, _inception_features(real, device).cpu().numpy())
        partial.replace(kept)
    return torch.from_numpy(np.load(kept)).to(device)


def _inception_features(images: ImageSet, device: torch.device) -> torch.Tensor:
    return features(images, load_feature_network("inception"), device=device, progress=False, tf32=True).values.to(
        device
    )


def _dpimagebench(name: str, fitted: Fitted) -> dict[str, Any]:
    epochs = int(name.partition("@")[2] or 0) or None
    options = {"cifar": fitted.data.startswith("cifar"), "epochs": epochs, "seed": fitted.seed}
    found = bench_accuracy(fitted.synthetic, fitted.test, device=fitted.torch_device, **options)
    each = {network: round(value, 2) for network, value in found.each.items()}
    return {"dpimagebench": round(found.mean, 2), "dpimagebench_best": round(found.best, 2), "dpimagebench_each": each}


def _teacher(name: str, fitted: Fitted) -> dict[str, Any]:
    right = fitted.model.probabilities(fitted.test).argmax(1) == fitted.test.labels
    return {name: round(100 * float(right.float().mean()), 2)}


def _auroc(name: str, fitted: Fitted) -> dict[str, Any]:
    found = detect_each(fitted.model, fitted.test, likelihood="image" if name.endswith("image") else "code")
    flagged = statistics.fmean(one.to_dict()["flagged_inliers"] for one in found.values())
    each = {key: round(one.auroc or 0.0, 3) for key, one in found.items()}
    value = round(statistics.fmean(one.auroc or 0.0 for one in found.values()), 3)
    return {name: value, f"{name}_each": each, f"{name}_flagged_inliers": round(flagged, 3)}


def _agreement(name: str, fitted: Fitted) -> dict[str, Any]:
    seen = downstream_accuracy(fitted.train, fitted.synthetic, device=fitted.torch_device)
    shares = torch.tensor(seen.confusion).sum(0).double()
    shares = shares[shares > 0] / shares.sum()
    return {name: round(seen.mean, 2), "entropy": round(float(-(shares * shares.log2()).sum()), 3)}


def _accepted(name: str, fitted: Fitted) -> dict[str, Any]:
    device = fitted.torch_device
    labels = torch.arange(len(fitted.train.classes), device=device).repeat_interleave(20)
    with torch.no_grad():
        return {name: round(fitted.model.draw(labels, torch.Generator(device).manual_seed(1))[1], 3)}


def _images_per_s(name: str, fitted: Fitted) -> dict[str, Any]:
    return {name: round(len(fitted.synthetic) / fitted.sample_s, 1)}
