"""Signatures: only the key's owner can sign, keys are never overwritten, a missing package has a helpful error."""

from __future__ import annotations

import importlib
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sfumato.certificate import Certificate, signing, verify
from sfumato.privacy.accounting import Release
from sfumato.privacy.ledger import Ledger

pytest.importorskip("cryptography")


@pytest.fixture
def certificate() -> Certificate:
    release = Release("counts", noise_multiplier=4.0)
    event = {name: getattr(release, name) for name in ("name", "times", "sampling_prob", "nonnegative")}
    ledger = Ledger()
    plan = [{**event, "noise_multiplier": 4.0, "noise": "secure"}]
    ledger.append("open", delta=1e-5, adjacency="add-remove", unit="image", plan=plan)
    return Certificate.from_ledger(ledger)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    (tmp_path / "keys").mkdir()
    signing.new_key(tmp_path / "keys" / "mine")
    return tmp_path / "keys" / "mine"


def test_keys_are_private_and_never_overwritten(key: Path) -> None:
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert b"BEGIN PRIVATE KEY" in key.read_bytes()
    assert signing.public_key_of(key) == signing.public_key_of(f"{key}.pub")
    before = key.read_bytes()
    with pytest.raises(FileExistsError):
        signing.new_key(key)
    assert key.read_bytes() == before
    key.unlink()
    with pytest.raises(FileExistsError):
        signing.new_key(key)
    assert not key.exists()


def test_only_the_right_key_verifies(certificate: Certificate, key: Path, tmp_path: Path) -> None:
    path = certificate.signed(key).save(tmp_path / "certificate.json")
    result = verify(path, signed_by=f"{key}.pub")
    assert result.ok, result.problems
    assert result.signer == f"ed25519:{signing.public_key_of(key)}"
    assert "signature" in result.checked
    assert verify(path).signer == result.signer
    other = key.with_name("other")
    signing.new_key(other)
    assert result.signature == "valid"
    refused = verify(path, signed_by=f"{other}.pub")
    assert "another key" in refused.problems[0]
    assert (refused.signature, refused.signer) == ("by another key", None)
    unread = verify(path, signed_by=tmp_path / "absent.pub")
    assert not unread.ok
    assert unread.signature == "not checked"
    assert not verify(path, signed_by=path).ok


def test_an_edited_or_copied_signature_fails(certificate: Certificate, key: Path, tmp_path: Path) -> None:
    signature = certificate.signed(key).signature
    assert signature is not None
    path = tmp_path / "certificate.json"
    replace(certificate, issuer="somebody else", signature=signature).save(path)
    assert verify(path).problems == ["signature: not valid for this certificate"]
    for change in ({"value": "00" * 64}, {"value": "x"}, {"algorithm": "none"}, {"more": "1"}, {"public_key": ""}):
        replace(certificate, signature={**signature, **change}).save(path)
        result = verify(path)
        assert not result.ok
        assert (result.signature, result.signer) == ("invalid", None)
    certificate.save(path)
    assert verify(path).ok
    assert (verify(path).signature, verify(path).signer) == ("missing", None)
    assert verify(path, signed_by=f"{key}.pub").problems == ["signature: missing"]


def test_changing_the_content_removes_the_signature(certificate: Certificate, key: Path, tmp_path: Path) -> None:
    assert certificate.signed(key).covering(tmp_path, []).signature is None
    assert certificate.signed(key).derived(tmp_path, []).signature is None


def test_a_file_without_a_key_is_named_in_the_error(key: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("PRIVATE")
    for bad in (tmp_path / "text", Path(f"{key}.pub")):
        with pytest.raises(ValueError, match=str(bad)):
            signing.sign("00", bad)


def test_a_missing_package_is_named_in_the_error(
    certificate: Certificate, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = certificate.signed(key).save(tmp_path / "certificate.json")
    real = importlib.import_module

    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(signing, "import_module", absent)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'sfumato\[sign\]'"):
        signing.new_key(tmp_path / "new")
    result = verify(path)
    assert result.ok
    assert (result.signature, result.signer) == ("not checked", None)
    assert "sfumato[sign]" in result.not_checked[-1]
    assert not verify(path, signed_by=f"{key}.pub").ok
