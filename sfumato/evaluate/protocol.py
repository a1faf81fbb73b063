"""Evaluation protocol: utility and fidelity of a synthetic set against public test images.

Measurements against the private training images disclose information about them. They are written to a separate folder,
and never to the certificate or to anything that is shared.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sfumato.data import DataError, ImageSet, contact_sheet
from sfumato.data.atomic import write_json
from sfumato.evaluate.fidelity import fidelity
from sfumato.evaluate.measure_descriptions import chance_of
from sfumato.evaluate.utility import Recipe, aligned, downstream_accuracy
from sfumato.features import FeatureNetwork, Features, features, load_feature_network

Networks = str | FeatureNetwork | Sequence[str | FeatureNetwork] | None  # for fidelity

NEIGHBOURS, SHOWN_IMAGES = 3, 12
BLOCK = 2000  # images in memory at a time


class PrivateMeasurementWarning(UserWarning):
    """Issued if something was measured against private images. The result must not be shared."""


@dataclass(frozen=True)
class Profile:
    """Settings of an evaluation.

    - classifiers: names of the classifiers to train.
    - seeds: one training run of each classifier for each seed.
    - sample: maximum number of images of each set for fidelity.
    - recipe: training settings of the classifiers.
    """

    classifiers: tuple[str, ...]
    seeds: tuple[int, ...]
    sample: int
    recipe: Recipe


PROFILES = {
    "quick": Profile(("logistic", "mlp", "small_cnn"), (0,), 1500, Recipe()),
    "full": Profile(("logistic", "mlp", "small_cnn", "convnet", "resnet18"), (0, 1, 2), 10_000, Recipe()),
    "condensed": Profile(
        ("convnet", "mlp", "lenet", "alexnet", "vgg11", "resnet18"), (0, 1, 2), 10_000, Recipe(1000, condensed=True)
    ),
}


def evaluate(
    synthetic: ImageSet,
    *,
    test: ImageSet,
    train: ImageSet | None = None,
    profile: str = "quick",
    network: Networks = "effnet_lite0",
    device: str | torch.device = "cpu",
    private_dir: str | Path | None = None,
    real: Sequence[Features] | None = None,
) -> dict[str, Any]:
    """Return the metrics of a synthetic set.

    - test: real images, which this call declares public.
    - train: the private images. Their nearest neighbours are written to `private_dir` with a warning, and are not part
      of the result.
    - profile: "quick", "full" or "condensed".
    - network: feature network for fidelity, or several; `inception` gives FID; None skips fidelity.
    - private_dir: folder for measurements against `train`.
    - real: features of the test images, one for each network, if they were computed before.
    """
    chosen = _get_profile(profile)
    if train is not None and private_dir is None:
        raise DataError("measurements against private images need a separate folder; pass private_dir")
    metrics: dict[str, Any] = {"protocol": _describe_protocol(profile, chosen, synthetic)}
    if synthetic.labelled:
        metrics["utility"] = _utility(synthetic, test, chosen, device)
        metrics["chance"] = {"accuracy": chance_of(metrics)}
    for number, encoder in enumerate(load_networks(network)):
        true = test if real is None else real[number]
        found = fidelity(synthetic, true, encoder, device=device, sample=chosen.sample)
        metrics["fidelity"] = {**metrics.get("fidelity", {}), **found}
    if train is not None and private_dir is not None:
        measure_private(synthetic, train, Path(private_dir))
    return metrics


def load_networks(network: Networks) -> list[FeatureNetwork]:
    """Load one feature network, several or none."""
    given = [] if network is None else [network] if isinstance(network, str | FeatureNetwork) else network
    return [load_feature_network(each) if isinstance(each, str) else each for each in given]


def reference_features(test: ImageSet, profile: str, network: FeatureNetwork, device: str | torch.device) -> Features:
    """Compute the features of the test images once, for several calls of `evaluate`."""
    sample = _get_profile(profile).sample
    if sample < len(test):
        generator = torch.Generator().manual_seed(0)
        test = test.subset(torch.randperm(len(test), generator=generator)[:sample])
    return features(test, network, device=device)


def measure_private(synthetic: ImageSet, train: ImageSet, folder: Path) -> None:
    """Write the nearest training images of some synthetic images, and their distances, to `folder`."""
    warnings.warn(
        f"{folder} holds measurements against private images; do not share it",
        PrivateMeasurementWarning,
        stacklevel=3,
    )
    if any((parent / "certificate.json").exists() for parent in folder.resolve().parents):
        raise DataError(
            f"{folder} lies in a folder that is meant to be shared; choose another folder for private results (--out)"
        )
    if synthetic.shape != train.shape:
        raise DataError(f"training images are {train.shape}, synthetic images {synthetic.shape}; use one size and mode")
    shown = torch.linspace(0, len(synthetic) - 1, min(SHOWN_IMAGES, len(synthetic))).long()
    distances, nearest = nearest_neighbours(synthetic.images[shown], train.images, NEIGHBOURS)
    rows = [
        torch.cat([synthetic.images[i : i + 1], train.images[n]]) for i, n in zip(shown.tolist(), nearest, strict=True)
    ]
    labels = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(row) for row in rows]))
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{n + 1}: synthetic, nearest" for n in range(len(rows))]
    contact_sheet(ImageSet(torch.cat(rows), labels, names), folder / "neighbours.png", per_class=NEIGHBOURS + 1)
    write_json(folder / "neighbours.json", {"distance": distances.tolist(), "index": nearest.tolist()})


def nearest_neighbours(images: torch.Tensor, among: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the root-mean-square pixel distances (0 to 255) to the k nearest images in `among`, and their indices."""
    if len(among) < k:
        raise DataError(f"{k} neighbours were requested among {len(among)} images")
    queries = images.flatten(1).float()
    best = torch.full((len(images), 0), 0.0)
    index = torch.zeros(len(images), 0, dtype=torch.int64)
    for start in range(0, len(among), BLOCK):
        part = among[start : start + BLOCK].flatten(1).float()
        distances = torch.cdist(queries, part) / queries.shape[1] ** 0.5
        best = torch.cat([best, distances], 1)
        index = torch.cat([index, torch.arange(start, start + len(part)).expand(len(images), -1)], 1)
        best, order = best.topk(min(k, best.shape[1]), largest=False)
        index = index.gather(1, order)
    return best, index


def summary(metrics: dict[str, Any]) -> dict[str, str]:
    """Format each measure for the comparison table."""
    line = {
        name: f"{value['mean']:.1f} ± {value['sd']:.1f}" if len(value["values"]) > 1 else f"{value['mean']:.1f}"
        for name, value in metrics.get("utility", {}).items()
        if name != "convolutional"
    }
    for name, value in metrics.get("fidelity", {}).items():
        if not name.endswith("_sd"):
            line[name] = f"{value:.4g}"
    return line


def _utility(
    synthetic: ImageSet, test: ImageSet, profile: Profile, device: str | torch.device
) -> dict[str, dict[str, Any]]:
    """Return the accuracy of each classifier, and the mean over all convolutional classifiers and seeds."""
    test = aligned(test, synthetic)
    found = {
        name: downstream_accuracy(
            synthetic, test, name, seeds=profile.seeds, recipe=profile.recipe, device=device
        ).to_dict()
        for name in profile.classifiers
    }
    values = [value for name, entry in found.items() if name not in ("logistic", "mlp") for value in entry["values"]]
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return {**found, "convolutional": {"mean": statistics.fmean(values), "sd": sd, "values": values}}


def _get_profile(name: str) -> Profile:
    if name not in PROFILES:
        raise DataError(f"there is no profile {name!r}; there are {', '.join(PROFILES)}")
    return PROFILES[name]


def _describe_protocol(name: str, profile: Profile, synthetic: ImageSet) -> dict[str, Any]:
    return {
        "profile": name,
        "seeds": list(profile.seeds),
        "epochs": profile.recipe.epochs,
        "synthetic_images": len(synthetic),
        "labels": "hard" if synthetic.soft_labels is None else "soft",
        "fidelity_images": profile.sample,
        "trained_on": "synthetic images only; tested once; nothing was selected on the test images",
    }


def compare(
    sets: dict[str, ImageSet],
    *,
    test: ImageSet,
    profile: str = "quick",
    network: Networks = "effnet_lite0",
    device: str | torch.device = "cpu",
) -> dict[str, dict[str, Any]]:
    """Evaluate several synthetic sets with one pass over the test images."""
    encoders = load_networks(network)
    real = [reference_features(test, profile, encoder, device) for encoder in encoders]
    return {
        name: evaluate(images, test=test, profile=profile, network=encoders, device=device, real=real)
        for name, images in sets.items()
    }
