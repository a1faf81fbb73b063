"""Uploads: certificates and zip files, honest and hostile."""

from __future__ import annotations

import io
import json
import os
import stat
import zipfile
from contextlib import nullcontext

import pytest

from sfumato.certificate import Certificate
from sfumato.data import DataError
from sfumato.privacy import Budget, Ledger, Plan, Release
from sfumato.privacy.vault import Vault
from sfumato.web import server, uploads
from sfumato.web.uploads import check_folder, check_upload, unpack


@pytest.fixture(scope="module")
def shared(tmp_path_factory, few_digits):
    """A small certified folder."""
    folder = tmp_path_factory.mktemp("shared")
    with Ledger(folder / "ledger.jsonl") as ledger:
        plan = Plan((Release("counts", noise_multiplier=5.0),), Budget(1.0))
        vault = Vault(few_digits, plan, ledger=ledger, facts={"method": "x", "parameters": {}, "public_facts": {}})
        vault.counts()
        certificate = Certificate.from_ledger(ledger)
    (folder / "images.txt").write_text("synthetic", "utf-8")
    certificate.covering(folder, ["images.txt", "ledger.jsonl"]).save(folder / "certificate.json")
    return folder


def zipped(folder, extra=(), prefix="set/"):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in sorted(folder.iterdir()):
            if path.suffix != ".lock":
                archive.write(path, prefix + path.name)
        for member, content in extra:
            archive.writestr(member, content)
    buffer.seek(0)
    return buffer


def test_a_folder_holds(shared, tmp_path):
    (tmp_path / uploads.UPLOAD).write_bytes(zipped(shared, [("set/more.txt", "x")]).getvalue())
    (found,) = check_folder(tmp_path, {"max_epsilon": 1})
    assert found["ok"], found["problems"]
    assert {"images.txt", "epsilon", "digest"} <= set(found["checked"])
    assert found["uncovered"] == ["more.txt"]


def _here(upload, key, limits):
    """Check an upload in this process, which is faster."""
    with uploads.tempfile.TemporaryDirectory() as folder:
        path = uploads.Path(folder)
        (path / uploads.UPLOAD).write_bytes(upload.read())
        return check_folder(path, limits)


def test_an_upload_is_shown_with_what_was_not_checked(served, shared, monkeypatch):
    person = served.person()
    alone = {"file": ("c.json", (shared / "certificate.json").read_bytes())}
    answer = person.post("/verify", files=alone)
    assert "The guarantee holds" in answer.text
    assert "none of the 2 certified files" in answer.text
    monkeypatch.setattr(server, "check_upload", _here)
    changed = json.loads((shared / "certificate.json").read_text("utf-8"))
    changed |= {"epsilon": 0.01, "issuer": "<script>alert(1)</script>"}
    answer = person.post("/verify", files={"file": ("<b>.json", json.dumps(changed))}, data={"max_epsilon": "0.001"})
    assert "does not hold" in answer.text
    assert "edited after it was made" in answer.text
    assert "<script>alert" not in answer.text
    assert "<b>" not in answer.text
    assert person.post("/verify").status_code == 400
    assert person.post("/verify", files=alone, data={"max_epsilon": "much"}).status_code == 400


def link(name):
    member = zipfile.ZipInfo(name)
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    return member


@pytest.mark.parametrize(
    "member",
    ["../x", "/etc/x", "a/../../x", "..\\x", "C:x", link("set/link"), "set/images.txt", "set/images.txt/x"],
    ids=str,
)
def test_a_hostile_member_is_refused(shared, tmp_path, member):
    archive = tmp_path / "x.zip"
    with pytest.warns(UserWarning, match="Duplicate") if member == "set/images.txt" else nullcontext():
        archive.write_bytes(zipped(shared, [(member, "/etc/passwd")]).getvalue())
    with pytest.raises((DataError, OSError)):
        unpack(archive, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "x.zip"]


def test_a_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "MAX_UNPACKED", 1 << 20)
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", bytes(2 << 20))
    with pytest.raises(DataError, match="holds more than"):
        unpack(tmp_path / "x.zip", tmp_path / "out")
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) <= 1 << 20
    monkeypatch.setattr(uploads, "MAX_MEMBERS", 0)
    with pytest.raises(DataError, match="members"):
        unpack(tmp_path / "x.zip", tmp_path / "out-2")


@pytest.mark.parametrize(
    "content",
    [b"{}", b"", b"PK\x03\x04", b'{"format": ' + b"9" * 100_000 + b"}", os.urandom(1000)],
    ids=["empty object", "empty", "cut zip", "huge number", "noise"],
)
def test_what_is_no_certificate_does_not_hold(tmp_path, content):
    (tmp_path / uploads.UPLOAD).write_bytes(content)
    (found,) = check_folder(tmp_path, {})
    assert not found["ok"]
    assert str(tmp_path) not in str(found)


def test_what_breaks_the_process_is_refused():
    """JSON that is nested so deep that Python's parser gives up, and a zip file without a certificate."""
    (found,) = check_upload(io.BytesIO(b"[" * 1_000_000))
    assert not found["ok"]
    assert uploads.tempfile.gettempdir() not in str(found)


def test_a_zip_without_a_certificate_is_refused(tmp_path):
    (tmp_path / uploads.UPLOAD).write_bytes(zipped(tmp_path, [("x", "y")]).getvalue())
    with pytest.raises(DataError, match=r"holds no certificate\.json"):
        check_folder(tmp_path, {})


def test_a_process_that_takes_too_long_is_ended(monkeypatch, shared):
    monkeypatch.setattr(uploads, "MAX_SECONDS", 0.01)
    with pytest.raises(DataError, match="limits of time"):
        check_upload(io.BytesIO(b"{}"))


def test_a_huge_upload_is_refused_before_it_is_read(served):
    person = served.person()
    huge = {"content-length": str(uploads.MAX_UPLOAD + 1), "content-type": "multipart/form-data; boundary=x"}
    assert person.client.post("/verify", content=b"", headers=huge).status_code == 413
    long = b"csrf=" + person.csrf.encode() + b"&x=" + b"a" * 300_000
    kind = {"content-type": "application/x-www-form-urlencoded"}
    for path in ("/runs", "/invite", "/enter"):
        assert person.client.post(path, content=long, headers=kind).status_code == 413
