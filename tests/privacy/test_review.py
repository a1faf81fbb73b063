"""What a hostile reader of the core found, each kept from coming back."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import sfumato as sf
from sfumato import keeping
from sfumato.certificate.issue import content_digest
from sfumato.certificate.statement import accounted, rounded_up
from sfumato.data import DataError, ImageSet
from sfumato.engine import Vault
from sfumato.keeping import Kept
from sfumato.privacy import Budget, FailedOnPrivate, Ledger, LedgerError, Plan, Release

PLAN = Plan((Release("a", 9, 1.0, 30.0), Release("b", 9, 1.0, 30.0)), Budget(1.0))


def pixels(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1)


def records(images: torch.Tensor) -> Any:
    return SimpleNamespace(images=images, labels=None, classes=("all",))


def same_images(count: int) -> torch.Tensor:
    return torch.full((count, 1, 4, 4), 200, dtype=torch.uint8)


def recording(images: torch.Tensor) -> tuple[Vault, list[tuple[torch.Tensor, float]]]:
    """A vault, and the exact sums and radii that it noises."""
    vault, seen = Vault(records(images), PLAN), []

    def listen(release: Release, exact: torch.Tensor, radius: float, secure: bool) -> torch.Tensor:
        seen.append((exact.clone(), radius))
        return exact

    vault._noised = listen  # type: ignore[method-assign]
    return vault, seen


def test_two_vaults_cannot_share_a_ledger() -> None:
    ledger = Ledger()
    Vault(records(same_images(5)), PLAN, ledger=ledger)
    with pytest.raises(LedgerError, match="has a vault already"):
        Vault(records(same_images(5)), PLAN, ledger=ledger)


def test_groups_that_are_changed_later_change_nothing() -> None:
    def function(shared: dict[str, torch.Tensor], image: torch.Tensor) -> list[torch.Tensor]:
        return [image.flatten() * shared["w"] * 1e3]

    moved = []
    for count in (20, 19):
        vault, seen = recording(same_images(count))
        groups: list[Any] = [(1.0, [0])]
        weights = {"w": torch.ones(())}
        vault.vectors(function, weights, release="a", groups=groups)
        groups[0] = (100.0, [0])
        vault.vectors(function, weights, release="b", groups=groups)
        vault.vectors(function, weights, release="a", groups=[(1.0, [0])])
        moved.append(seen[-1])
    (one, radius), (other, _) = moved
    assert float((one - other).norm()) <= radius
    with pytest.raises(ValueError, match="plain bounds"):
        recording(same_images(3))[0].vectors(function, weights, release="a", groups=[(float("inf"), [0])])


def test_a_captured_tensor_cannot_be_exchanged() -> None:
    moved = []
    for count in (20, 19):
        torch.manual_seed(0)
        projection = nn.Linear(16, 16, bias=False)

        def feature(images: torch.Tensor, projection: nn.Module = projection) -> torch.Tensor:
            made: torch.Tensor = projection(images.flatten(1))
            return made

        vault, seen = recording(same_images(count))
        vault.sum(feature, release="a", bound=1.0)
        projection.weight.data = torch.ones(1, 16)
        vault.sum(feature, release="a", bound=1.0)
        moved.append(seen[-1])
    (one, radius), (other, _) = moved
    assert one.shape == (1, 16)
    assert float((one - other).norm()) <= radius


def test_a_result_after_a_torn_entry_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, then space again: what was handed out afterwards is there after a restart."""
    write = os.write

    def opened() -> tuple[Ledger, Kept, Vault]:
        ledger = Ledger(tmp_path / "ledger.jsonl")
        kept = Kept(tmp_path, ledger)
        return ledger, kept, Vault(records(same_images(20)), PLAN, ledger=ledger, kept=kept)

    ledger, kept, vault = opened()
    vault.sum(pixels, release="a", bound=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(keeping.os, "write", lambda fd, data: write(fd, data[:20] if fd == kept._log else data))
        with pytest.raises(LedgerError, match="disk is full"):
            vault.sum(pixels, release="a", bound=1.0)
    third = vault.sum(pixels, release="a", bound=1.0)
    kept.close()
    ledger.close()
    ledger, kept, vault = opened()
    assert torch.equal([vault.sum(pixels, release="a", bound=1.0) for _ in range(3)][2], third)
    kept.close()
    ledger.close()


def test_large_results_are_read_and_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "CHUNK", 7)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        kept, result = Kept(tmp_path, ledger), torch.randn(3, 5)
        kept.put("a", 0, result)
        kept.close()
        kept = Kept(tmp_path, ledger)
        found = kept.get("a", 0)
        assert found is not None
        assert torch.equal(found, result)
        kept.close()


def test_a_warning_on_private_images_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    vault, _ = recording(same_images(5))
    vault.sum(pixels, release="a", bound=1.0)

    def telling(*_: Any) -> Any:
        warnings.warn("entry 3 of the batch did not converge", stacklevel=1)
        return iter(())

    monkeypatch.setattr(vault, "_batches", telling)
    with warnings.catch_warnings(record=True) as caught:
        vault.sum(pixels, release="a", bound=1.0)
    assert not caught


def test_a_device_is_waited_for_before_a_query_counts_as_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU tells of an error when it is waited for: that must happen where it voids the run."""

    def fail(_: Any) -> None:
        raise RuntimeError("device-side assert: pixel 255")

    vault, _ = recording(same_images(5))
    monkeypatch.setattr(torch.accelerator, "synchronize", fail)
    vault.device = torch.device("cuda")
    with pytest.raises(FailedOnPrivate) as caught:
        vault._void_on_failure(lambda: torch.zeros(1))
    assert "255" not in str(caught.value)
    assert vault.ledger.void


@pytest.fixture
def finished(tmp_path: Path, few_digits: ImageSet) -> Path:
    sf.create("dp-merf", epsilon=5.0, steps=3, features=20, features_per_step=10).fit(
        few_digits, run_dir=tmp_path / "run"
    )
    return tmp_path / "run"


def test_a_derived_certificate_does_not_excuse_the_pinned_ledger(finished: Path) -> None:
    path = finished / "certificate.json"
    content = json.loads(path.read_text())
    for event in content["events"]:
        event["noise_multiplier"] *= 4
    found, epsilon = accounted(content["events"], content["delta"], content["adjacency"])
    assert epsilon is not None
    content["epsilon"] = rounded_up(epsilon)
    content["bounds"] = {name: None if value is None else rounded_up(value) for name, value in found.items()}
    content |= {"derived_from": "0" * 64, "ledger": "1" * 64}
    content["digest"] = content_digest(content)
    path.write_text(json.dumps(content))
    assert not sf.verify(path)


def test_a_model_under_an_edited_certificate_is_not_sampled(finished: Path) -> None:
    model, path = finished / "model.safetensors", finished / "certificate.json"
    model.write_bytes(model.read_bytes() + b"\0")
    content = json.loads(path.read_text())
    content["outputs"]["model.safetensors"] = hashlib.sha256(model.read_bytes()).hexdigest()
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="edited after it was made"):
        sf.load(finished)
