"""Small sharded sources, and one Ray cluster for all tests of this folder."""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from PIL import Image

from sfumato.cluster import ClusterVault, ShardedImages, cluster_vault, connect
from sfumato.data import ImageSet, load_images
from sfumato.engine import Performance
from sfumato.privacy import Budget, Plan, Release

RELEASES = (
    *(Release("counts", noise_multiplier=0.0), Release("sum", noise_multiplier=0.0)),
    *(Release("sampled", 1000, 0.3, noise_multiplier=0.0), Release("gradients", 1000, 0.3, noise_multiplier=0.0)),
)


@pytest.fixture(scope="session")
def digits() -> ImageSet:
    return load_images("digits").subset(range(60))


def write_tar(path: Path, images: ImageSet, persons: list[str] | None = None) -> None:
    """Write a WebDataset shard."""
    assert images.labels is not None
    with tarfile.open(path, "w") as archive:
        for index, (pixels, label) in enumerate(zip(images.images, images.labels.tolist(), strict=True)):
            png = io.BytesIO()
            Image.fromarray(pixels[0].numpy()).save(png, "PNG")
            facts = {"label": label} | ({} if persons is None else {"person": persons[index]})
            for suffix, data in (("png", png.getvalue()), ("json", json.dumps(facts).encode())):
                member = tarfile.TarInfo(f"{index:05}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


@pytest.fixture
def shards(tmp_path: Path, digits: ImageSet) -> Path:
    """Return a folder of three shards of 20 digits; the images of a person lie in all of them."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        part = digits.subset(range(20 * number, 20 * number + 20))
        write_tar(folder / f"w-{number:03}.tar", part, [f"p{index % 7}" for index in range(20)])
    return folder


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Return a local Ray cluster with two workers."""
    started = connect("local", workers=2)
    yield started
    started.close()


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the same sampling keys in each vault: a function of how many were drawn by this vault."""
    drawn: WeakKeyDictionary[ClusterVault, int] = WeakKeyDictionary()  # an id may be that of a vault which is gone
    now = [0]

    def exact(self: ClusterVault, *args: Any) -> torch.Tensor:
        now[0] = drawn[self] = drawn.get(self, 0) + 1
        return original(self, *args)

    original = ClusterVault._exact
    monkeypatch.setattr(ClusterVault, "_exact", exact)
    monkeypatch.setattr(cluster_vault, "new_key", lambda: now[0].to_bytes(16))


def vault_of(images: ShardedImages, unit: Any = "image", **options: Any) -> ClusterVault:
    """Return a vault without noise, with small batches."""
    plan = Plan(RELEASES, Budget(math.inf, unit=unit))
    return ClusterVault(images, plan, performance=Performance(batch_size=8), **options)


def pixels(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1)


def make_answers(classes: int = 10) -> Callable[[ClusterVault], list[torch.Tensor]]:
    """Return a function that asks a vault one query of each kind."""
    torch.manual_seed(0)
    network = torch.nn.Linear(64, classes)

    def loss(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
        logits = model((images + 0.1 * normals.reshape(images.shape)).flatten(1))
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    def ask(vault: ClusterVault) -> list[torch.Tensor]:
        mapped = vault.map(pixels)
        found = vault.gradient(network, loss, release="gradients", bound=1.0, with_labels=True, draws=64)
        return [
            vault.counts(),
            vault.sum(pixels, release="sum", bound=4.0, by_class=True),
            vault.sum(pixels, release="sampled", bound=4.0),
            mapped.sum(torch.tanh, release="sampled", bound=4.0, by_class=True),
            *found.values(),
        ]

    return ask
