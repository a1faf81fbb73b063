"""Every method on a GPU: captured CUDA graphs, lower precision, checkpoints. Run with `make gpu-test`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sfumato as sf
from sfumato.data import ImageSet
from sfumato.methods.registry import METHODS
from sfumato.testing import build

pytestmark = pytest.mark.gpu

FEW: dict[str, dict[str, Any]] = {
    "atelier": {"steps": 12, "paths": 2},
    "dp-kernel": {"steps": 12, "paths": 2},
    "dp-merf": {"steps": 12},
    "dp-mepf": {"steps": 12, "snapshots": 2},
    "dp-lflow": {"warm": "none", "steps": 8, "procedural_batches": 8},
    "pge": {"warm": "none", "steps": 8},
    "ndpdc": {"iterations": 8},
    "dm": {"iterations": 8},
    "dp-kernel-as-published": {"steps": 8},
    "pge-as-published": {"steps": 8},
}


@pytest.mark.parametrize("key", METHODS)
def test_a_method_fits_samples_and_loads(key: str, digits: ImageSet, tmp_path: Path) -> None:
    epsilon = float("inf") if key == "dm" else 10.0
    model = build(key, epsilon=epsilon, device="cuda", secure=False, **FEW.get(key, {})).fit(digits, run_dir=tmp_path)
    made = model.sample(50, seed=1)
    assert made.shape == digits.shape
    assert made.images.float().std() > 0
    assert sf.verify(tmp_path / "certificate.json", allow_none=True).ok
    again = sf.load(tmp_path, device="cuda").sample(50, seed=1)
    assert (again.images.float() - made.images.float()).abs().mean() < 2


def test_warm_starts(digits: ImageSet) -> None:
    for key in ("dp-lflow", "pge"):
        model = build(key, epsilon=10.0, device="cuda", secure=False, warm="dp-merf", steps=4)
        assert len(model.fit(digits).sample(20)) == 20
    torch.cuda.synchronize()
