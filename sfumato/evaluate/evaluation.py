"""One honest protocol: utility and fidelity of a synthetic set against public test images.

What is measured against the private training images is kept apart, under `private`: it is a disclosure, and belongs
neither into the certificate nor into anything that is shared.
"""

from __future__ import annotations

import json
import statistics
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sfumato.data import DataError, ImageSet, contact_sheet
from sfumato.data.atomic import replacing
from sfumato.encoders import Encoder, Features, features, load_encoder
from sfumato.evaluate.classifiers import Recipe, aligned, downstream_accuracy
from sfumato.evaluate.fidelity import fidelity

NEIGHBOURS, SHOWN = 3, 12
BLOCK = 2000


class PrivateMeasurementWarning(UserWarning):
    """Something was measured against private images: the result must not be shared."""


@dataclass(frozen=True)
class Profile:
    """What a run measures: classifiers, seeds, images for fidelity, and the training recipe."""

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
    network: str | Encoder | None = "effnet_lite0",
    device: str | torch.device = "cpu",
    private_dir: str | Path | None = None,
    real: Features | None = None,
) -> dict[str, Any]:
    """Metrics of a synthetic set.

    `test` images are declared public by being given here. `train` are the private images: what is measured against
    them (nearest neighbours) goes to `private_dir`, with a warning, and into no result. `network=None` leaves
    fidelity out; `real` saves a pass over the test images when several sets are compared.
    """
    chosen = _profile(profile)
    if train is not None and private_dir is None:
        raise DataError("results against private images need a folder of their own; pass private_dir")
    metrics: dict[str, Any] = {"protocol": _protocol(profile, chosen, synthetic)}
    if synthetic.labelled:
        metrics["utility"] = _utility(synthetic, test, chosen, device)
    if network is not None:
        metrics["fidelity"] = fidelity(
            synthetic, real if real is not None else test, network, device=device, sample=chosen.sample
        )
    if train is not None and private_dir is not None:
        measure_private(synthetic, train, Path(private_dir))
    return metrics


def reference_features(test: ImageSet, profile: str, network: str | Encoder, device: str | torch.device) -> Features:
    """Features of the test images as `evaluate` would take them, to be handed to several calls of it."""
    sample = _profile(profile).sample
    if sample < len(test):
        generator = torch.Generator().manual_seed(0)
        test = test.subset(torch.randperm(len(test), generator=generator)[:sample])
    return features(test, network if isinstance(network, Encoder) else load_encoder(network), device=device)


def measure_private(synthetic: ImageSet, train: ImageSet, folder: Path) -> None:
    """Nearest training images of some synthetic ones: a picture and their distances, into `folder` alone."""
    warnings.warn(
        f"{folder} holds measurements against private images; keep it as private as they are",
        PrivateMeasurementWarning,
        stacklevel=3,
    )
    if any((parent / "certificate.json").exists() for parent in folder.resolve().parents):
        raise DataError(f"{folder} lies in a folder that is made to be shared; put private results elsewhere (--out)")
    if synthetic.shape != train.shape:
        raise DataError(f"training images are {train.shape}, synthetic ones {synthetic.shape}; read both alike")
    some = torch.linspace(0, len(synthetic) - 1, min(SHOWN, len(synthetic))).long()
    distances, nearest = nearest_neighbours(synthetic.images[some], train.images, NEIGHBOURS)
    rows = [
        torch.cat([synthetic.images[i : i + 1], train.images[n]]) for i, n in zip(some.tolist(), nearest, strict=True)
    ]
    labels = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(row) for row in rows]))
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{n + 1}: made, nearest" for n in range(len(rows))]
    contact_sheet(ImageSet(torch.cat(rows), labels, names), folder / "neighbours.png", per_class=NEIGHBOURS + 1)
    with replacing(folder / "neighbours.json", overwrite=True) as partial:
        partial.write_text(json.dumps({"distance": distances.tolist(), "index": nearest.tolist()}, indent=1) + "\n")


def nearest_neighbours(images: torch.Tensor, among: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square pixel distances (0 to 255) to the k nearest, and their indices; streams over `among`."""
    if len(among) < k:
        raise DataError(f"{k} neighbours were asked for among {len(among)} images")
    wanted = images.flatten(1).float()
    best = torch.full((len(images), 0), 0.0)
    index = torch.zeros(len(images), 0, dtype=torch.int64)
    for start in range(0, len(among), BLOCK):
        part = among[start : start + BLOCK].flatten(1).float()
        distances = torch.cdist(wanted, part) / wanted.shape[1] ** 0.5
        best = torch.cat([best, distances], 1)
        index = torch.cat([index, torch.arange(start, start + len(part)).expand(len(images), -1)], 1)
        best, order = best.topk(min(k, best.shape[1]), largest=False)
        index = index.gather(1, order)
    return best, index


def summary(metrics: dict[str, Any]) -> dict[str, str]:
    """A line of the comparison table: each figure as people write it."""
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
    """Accuracy by classifier, and over all convolutional ones and seeds, which is what we publish."""
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


def _profile(name: str) -> Profile:
    if name not in PROFILES:
        raise DataError(f"there is no profile {name!r}; there are {', '.join(PROFILES)}")
    return PROFILES[name]


def _protocol(name: str, profile: Profile, synthetic: ImageSet) -> dict[str, Any]:
    return {
        "profile": name,
        "seeds": list(profile.seeds),
        "epochs": profile.recipe.epochs,
        "synthetic_images": len(synthetic),
        "labels": "hard" if synthetic.soft_labels is None else "soft",
        "fidelity_images": profile.sample,
        "trained_on": "synthetic images only; tested once on the test images; nothing was selected on them",
    }


def compare(
    sets: dict[str, ImageSet],
    *,
    test: ImageSet,
    profile: str = "quick",
    network: str | None = "effnet_lite0",
    device: str | torch.device = "cpu",
) -> dict[str, dict[str, Any]]:
    """`evaluate` for several synthetic sets, with one pass over the test images."""
    encoder = None if network is None else load_encoder(network)
    real = None if encoder is None else reference_features(test, profile, encoder, device)
    return {
        name: evaluate(images, test=test, profile=profile, network=encoder, device=device, real=real)
        for name, images in sets.items()
    }
