"""Regression tests for defects that a security review found."""

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
from sfumato.certificate.issue import content_digest
from sfumato.certificate.statement import account_events, rounded_up
from sfumato.data import DataError, ImageSet
from sfumato.engine import GradientVault, kept_results
from sfumato.engine.kept_results import KeptResults
from sfumato.privacy import Budget, Ledger, LedgerError, Plan, RedactedError, Release

PLAN = Plan((Release("a", 9, 1.0, 30.0), Release("b", 9, 1.0, 30.0)), Budget(1.0))


def pixels(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1)


def records(images: torch.Tensor) -> Any:
    return SimpleNamespace(images=images, labels=None, classes=("all",))


def same_images(count: int) -> torch.Tensor:
    return torch.full((count, 1, 4, 4), 200, dtype=torch.uint8)


def recording(images: torch.Tensor) -> tuple[GradientVault, list[tuple[torch.Tensor, float]]]:
    """Return a vault, and a list of the exact sums and sensitivities that it adds noise to."""
    vault, seen = GradientVault(records(images), PLAN), []

    def listen(release: Release, exact: torch.Tensor, sensitivity: float, secure: bool) -> torch.Tensor:
        seen.append((exact.clone(), sensitivity))
        return exact

    vault._noised = listen  # type: ignore[method-assign]
    return vault, seen


def test_two_vaults_cannot_share_a_ledger() -> None:
    ledger = Ledger()
    GradientVault(records(same_images(5)), PLAN, ledger=ledger)
    with pytest.raises(LedgerError, match="has a vault already"):
        GradientVault(records(same_images(5)), PLAN, ledger=ledger)


def test_changing_groups_after_a_query_has_no_effect() -> None:
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
    (one, sensitivity), (other, _) = moved
    assert float((one - other).norm()) <= sensitivity
    with pytest.raises(ValueError, match="finite bounds"):
        recording(same_images(3))[0].vectors(function, weights, release="a", groups=[(float("inf"), [0])])


def test_a_captured_tensor_cannot_be_reassigned() -> None:
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
    (one, sensitivity), (other, _) = moved
    assert one.shape == (1, 16)
    assert float((one - other).norm()) <= sensitivity


def test_a_result_after_an_incomplete_entry_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a full disk and free space again, later results are still there after a restart."""
    write = os.write

    def opened() -> tuple[Ledger, KeptResults, GradientVault]:
        ledger = Ledger(tmp_path / "ledger.jsonl")
        kept = KeptResults(tmp_path, ledger)
        return ledger, kept, GradientVault(records(same_images(20)), PLAN, ledger=ledger, kept=kept)

    ledger, kept, vault = opened()
    vault.sum(pixels, release="a", bound=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(kept_results.os, "write", lambda fd, data: write(fd, data[:20] if fd == kept._log else data))
        with pytest.raises(LedgerError, match="disk is full"):
            vault.sum(pixels, release="a", bound=1.0)
    third = vault.sum(pixels, release="a", bound=1.0)
    kept.close()
    ledger.close()
    ledger, kept, vault = opened()
    assert torch.equal([vault.sum(pixels, release="a", bound=1.0) for _ in range(3)][2], third)
    kept.close()
    ledger.close()


def test_large_results_are_read_and_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_results, "CHUNK", 7)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        kept, result = KeptResults(tmp_path, ledger), torch.randn(3, 5)
        ledger.append("charge", name="a", times=1)
        kept.put("a", 0, result)
        kept.close()
        kept = KeptResults(tmp_path, ledger)
        found = kept.get("a", 0)
        assert found is not None
        assert torch.equal(found, result)
        kept.close()


def test_a_warning_on_private_images_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    vault, _ = recording(same_images(5))
    vault.sum(pixels, release="a", bound=1.0)

    def warn(*_: Any) -> Any:
        warnings.warn("entry 3 of the batch did not converge", stacklevel=1)
        return iter(())

    monkeypatch.setattr(vault, "_batches", warn)
    with warnings.catch_warnings(record=True) as caught:
        vault.sum(pixels, release="a", bound=1.0)
    assert not caught


def test_the_device_is_synchronised_before_a_query_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU reports errors at synchronisation, which must happen where an error voids the run."""

    def fail(_: Any) -> None:
        raise RuntimeError("device-side assert: pixel 255")

    vault, _ = recording(same_images(5))
    monkeypatch.setattr(torch.accelerator, "synchronize", fail)
    vault.device = torch.device("cuda")
    with pytest.raises(RedactedError) as caught:
        vault._void_on_failure(lambda: torch.zeros(1))
    assert "255" not in str(caught.value)
    assert vault.ledger.void


@pytest.fixture
def finished(tmp_path: Path, few_digits: ImageSet) -> Path:
    sf.create("dp-merf", epsilon=5.0, steps=3, features=20).fit(few_digits, run_dir=tmp_path / "run")
    return tmp_path / "run"


def test_derived_from_does_not_skip_the_ledger_check(finished: Path) -> None:
    path = finished / "certificate.json"
    content = json.loads(path.read_text())
    for event in content["events"]:
        event["noise_multiplier"] *= 4
    found, epsilon = account_events(content["events"], content["delta"], content["adjacency"])
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
