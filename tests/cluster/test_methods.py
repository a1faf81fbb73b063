"""Methods on shards: they fit, and data-parallel training on two workers gives the model of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sfumato as sf
from sfumato.audit.small_settings import small
from sfumato.cluster import ClusterVault, open_shards
from sfumato.data import ImageSet
from sfumato.data import shards as shards_module
from sfumato.privacy import Release

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*holds fewer than:sfumato.data.DataWarning",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)
SLOW = [pytest.param(key, marks=pytest.mark.slow) for key in ("dp-diffusion", "dp-kernel", "dp-mepf", "ldpdc", "dpmix")]


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "SHARDS", 4)


@pytest.mark.parametrize("key", ["atelier", "dp-lflow", "pge", "ndpdc", *SLOW])
def test_a_method_fits_on_shards(key: str, digits: ImageSet, tmp_path: Path) -> None:
    with open_shards(digits) as images:
        model = small(key)(epsilon=20.0).fit(images, run_dir=tmp_path)
    assert sf.verify(tmp_path / "certificate.json")
    assert model.sample(5).shape == digits.shape


@pytest.mark.slow
@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("key", ["dp-lflow", "pge", "dp-diffusion"])
def test_two_workers_train_the_model_of_one_process(
    key: str, digits: ImageSet, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest has the seed of the division, so that both have the same shards and samples. There is no noise."""

    def exact(self: ClusterVault, release: Release, total: torch.Tensor, *_: Any) -> torch.Tensor:
        return total.double()

    monkeypatch.setattr(ClusterVault, "_noised", exact)

    def fitted(where: Any, manifest: str) -> dict[str, torch.Tensor]:
        with open_shards(digits, cluster=where, manifest=tmp_path / manifest) as images:
            state: dict[str, torch.Tensor] = small(key)(epsilon=20.0).fit(images)._state()
            return state

    one, two, resampled = fitted(None, "manifest"), fitted(cluster, "manifest"), fitted(None, "another")
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name
    assert not all(torch.equal(one[name], resampled[name]) for name in one)  # the states depend on the sums
