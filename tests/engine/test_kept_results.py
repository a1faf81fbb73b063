"""Kept results: on disk before they are returned, returned again after a crash, never drawn twice."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sfumato.engine import GradientVault, Performance, calibrate
from sfumato.engine import kept_results as module
from sfumato.engine.kept_results import LOG, KeptResults
from sfumato.privacy import Budget, BudgetExceeded, Ledger, LedgerError, Release

RELEASES = (Release("once"), Release("often", 300, 0.5), Release("gradients", 300, 0.5))


@dataclass
class Floats:
    images: torch.Tensor
    labels: torch.Tensor | None = None
    classes: tuple[str, ...] = ("all",)


DATA = Floats(torch.randn(20, 1, 4, 4, generator=torch.Generator().manual_seed(0)))


def pixels(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1)


@contextmanager
def run(folder: Path, *, keep: bool = True) -> Iterator[GradientVault]:
    """Open a vault on the ledger and results of a folder, like a process that starts or resumes."""
    with Ledger(folder / "ledger.jsonl") as ledger:
        plan = calibrate(RELEASES, Budget(1))
        kept = KeptResults(folder, ledger) if keep else None
        yield GradientVault(DATA, plan, ledger=ledger, kept=kept, performance=Performance(batch_size=16))
        if kept is not None:
            kept.close()


def ask(vault: GradientVault, name: str) -> torch.Tensor:
    if name != "gradients":
        return vault.sum(pixels, release=name, bound=1.0)
    torch.manual_seed(0)
    model = nn.Linear(16, 2)
    found = vault.gradient(model, lambda m, x: m(x.flatten(1)).square().sum(1), release=name, bound=1.0)
    return torch.cat([each.flatten() for each in found.values()])


@pytest.fixture
def noised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the releases whose noise was drawn, in order."""
    drawn: list[str] = []
    draw = GradientVault._noised

    def counted(self: GradientVault, release: Release, *args: Any) -> torch.Tensor:
        drawn.append(release.name)
        return draw(self, release, *args)

    monkeypatch.setattr(GradientVault, "_noised", counted)
    return drawn


ORDER = ["once", "often", "gradients", "often", "often", "gradients"]


def test_results_are_returned_again_after_a_restart(tmp_path: Path, noised: list[str]) -> None:
    with run(tmp_path) as vault:
        first = [ask(vault, name) for name in ORDER]
        lines = list(vault.ledger.entries)
    assert noised == ORDER
    with run(tmp_path) as vault:
        again = [ask(vault, name) for name in ORDER]
        assert vault.ledger.entries == lines
        assert noised == ORDER  # nothing was drawn again
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        fresh = ask(vault, "often")
        assert noised == [*ORDER, "often"]
        assert not any(torch.equal(fresh, each) for each in first)
        assert vault.ledger.charged("often") == 6  # two blocks of three


def test_no_image_is_read_for_a_stored_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(tmp_path) as vault:
        first = ask(vault, "often")
    monkeypatch.setattr(GradientVault, "_pixels", None)
    with run(tmp_path) as vault:
        assert torch.equal(ask(vault, "often"), first)


def test_a_result_is_on_disk_before_it_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        sync(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    with run(tmp_path) as vault:
        monkeypatch.setattr(module.os, "fsync", watched)
        answer = ask(vault, "often")
        monkeypatch.undo()
        assert synced[-1] == LOG
        assert answer.numpy().tobytes() in (tmp_path / LOG).read_bytes()


def test_a_result_that_was_not_stored_is_drawn_again_for_one_charge(
    tmp_path: Path, noised: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with run(tmp_path) as vault:
        monkeypatch.setattr(KeptResults, "put", crash)
        with pytest.raises(KeyboardInterrupt):
            ask(vault, "once")
        monkeypatch.undo()
    with run(tmp_path) as vault:
        ask(vault, "once")
        assert vault.ledger.charged("once") == 1
        with pytest.raises(BudgetExceeded):
            ask(vault, "once")


@pytest.mark.parametrize("damage", ["cut", "flipped", "garbage", "half a header"])
def test_an_incomplete_tail_is_removed(damage: str, tmp_path: Path, noised: list[str]) -> None:
    with run(tmp_path) as vault:
        answers = [ask(vault, "often") for _ in range(3)]
    path = tmp_path / LOG
    data = bytearray(path.read_bytes())
    intact = 3
    if damage == "cut":
        del data[-5:]
        intact = 2
    elif damage == "flipped":
        data[-3] ^= 1
        intact = 2
    else:
        data += b"\x00\n\xff\n" if damage == "garbage" else json.dumps({"name": "often"}).encode()
    path.write_bytes(data)
    with run(tmp_path) as vault:
        found = [ask(vault, "often") for _ in range(3)]
    assert [torch.equal(a, b) for a, b in zip(answers, found, strict=True)] == [True, True, intact == 3]
    assert len(noised) == 6 - intact
    with run(tmp_path) as vault:  # the new results are intact
        assert all(torch.equal(each, ask(vault, "often")) for each in found)


def test_a_deleted_log_is_refused(tmp_path: Path) -> None:
    with run(tmp_path) as vault:
        pass
    (tmp_path / LOG).unlink()
    with run(tmp_path) as vault:  # nothing was charged yet
        ask(vault, "often")
    (tmp_path / LOG).unlink()
    with pytest.raises(LedgerError, match="is gone"), run(tmp_path):
        pass


def test_results_before_forget_are_refused(tmp_path: Path) -> None:
    """A forgotten result that is drawn again would be a second draw for one charge."""
    with run(tmp_path) as vault:
        for _ in range(3):
            ask(vault, "often")
        vault.forget()
        ask(vault, "often")
    with run(tmp_path) as vault, pytest.raises(LedgerError, match="handed out"):
        ask(vault, "often")


def test_forgotten_results_are_never_drawn_again(tmp_path: Path, noised: list[str]) -> None:
    with run(tmp_path) as vault:
        kept = ask(vault, "once")
        for _ in range(3):
            ask(vault, "often")
        large = (tmp_path / LOG).stat().st_size
        vault.forget()
        assert (tmp_path / LOG).stat().st_size < large
        asked = vault.asked
        later = ask(vault, "often")
    assert asked == {"once": 1, "often": 3, "gradients": 0}
    noised.clear()
    with run(tmp_path) as vault:
        assert torch.equal(ask(vault, "once"), kept)  # releases made once are never forgotten
        with pytest.raises(LedgerError, match="handed out"):
            ask(vault, "often")
        vault.skip(asked)
        assert torch.equal(ask(vault, "often"), later)
        assert not noised
        assert vault.asked["often"] == 4


def test_forgetting_twice_and_after_a_restart(tmp_path: Path) -> None:
    for count in (2, 3, 4):
        with run(tmp_path) as vault:
            vault.skip({"often": max(0, count - 1) if count > 2 else 0})
            while vault.asked.get("often", 0) < count:
                ask(vault, "often")
            vault.forget()
    with run(tmp_path) as vault:
        for number in range(4):
            with pytest.raises(LedgerError, match=f"result {number} "):
                vault._kept.get("often", number)
        assert vault._kept.get("often", 4) is None


def test_a_crash_while_forgetting_leaves_the_old_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with run(tmp_path) as vault:
        answers = [ask(vault, "often") for _ in range(3)]
        monkeypatch.setattr(module.os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            vault.forget()
        monkeypatch.undo()
    with run(tmp_path) as vault:
        assert all(torch.equal(each, ask(vault, "often")) for each in answers)


def test_without_stored_results_everything_charged_is_spent(tmp_path: Path) -> None:
    with run(tmp_path, keep=False) as vault:
        ask(vault, "once")
        ask(vault, "often")
        vault.forget()
    with run(tmp_path, keep=False) as vault:
        assert (vault.asked["once"], vault.asked["often"]) == (1, 3)  # a block of three
        with pytest.raises(BudgetExceeded):
            ask(vault, "once")
    assert not (tmp_path / LOG).exists()


def test_nothing_is_returned_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(tmp_path) as vault:
        write = os.write
        monkeypatch.setattr(
            module.os, "write", lambda fd, data: write(fd, data[:9]) if b'"sha256"' in data else write(fd, data)
        )
        with pytest.raises(LedgerError, match="not released"):
            ask(vault, "often")
        monkeypatch.undo()
    with run(tmp_path) as vault:
        ask(vault, "often")
        assert vault.ledger.charged("often") == 3


def test_exact_sums_are_not_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact: list[torch.Tensor] = []
    draw = GradientVault._noised

    def watched(self: GradientVault, release: Release, total: torch.Tensor, *args: Any) -> torch.Tensor:
        exact.append(total.clone())
        return draw(self, release, total, *args)

    monkeypatch.setattr(GradientVault, "_noised", watched)
    with run(tmp_path) as vault:
        ask(vault, "often")
    data = (tmp_path / LOG).read_bytes()
    for kind in (torch.float32, torch.float64):
        assert exact[0].to(kind).numpy().tobytes() not in data


def test_results_are_stored_bit_for_bit(tmp_path: Path) -> None:
    for result in (torch.randn(3, 4), torch.tensor(2.5), torch.tensor([math.nan, math.inf, -0.0])):
        ledger = Ledger()
        kept = KeptResults(tmp_path, ledger)
        ledger.append("charge", name="x", times=1)
        kept.put("x", 0, result)
        again = KeptResults(tmp_path, ledger)
        found = again.get("x", 0)
        assert found is not None
        assert found.shape == result.shape
        assert found.numpy().tobytes() == result.numpy().tobytes()
        kept.close()
        again.close()
        (tmp_path / LOG).unlink()


def test_a_mapped_vault_shares_stored_results(tmp_path: Path, noised: list[str]) -> None:
    answers = []
    for _ in range(2):
        with run(tmp_path) as vault:
            mapped = vault.map(lambda images: images.flatten(1)[:, :5])
            answers.append([mapped.sum(pixels, release="often", bound=1.0), vault.asked["often"]])
    assert torch.equal(answers[0][0], answers[1][0])
    assert noised == ["often"]
    assert answers[0][1] == 1
