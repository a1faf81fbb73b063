"""Certificates: what is in them, and that every edit that matters is named."""

from __future__ import annotations

import json
import math
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato.data import ImageSet
from sfumato.privacy import Budget, Certificate, Ledger, Release, Vault, verify
from sfumato.privacy.certificate import FORMAT
from sfumato.privacy.ledger import digest


@pytest.fixture
def folder(tmp_path: Path, few_digits: ImageSet) -> Path:
    """A released folder: two kinds of events, files, the ledger."""
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        facts = {"method": "test", "parameters": {"epsilon": 1.0}, "public_facts": {"classes": ["a"]}}
        releases = [Release("counts", weight=4, nonnegative=True), Release("steps", 20, 0.1)]
        vault = Vault(few_digits, Budget(1), releases, ledger=ledger, facts=facts)
        vault.counts()
        for _ in range(20):
            vault.sum(lambda images: images.flatten(1), release="steps", bound=1.0)
        certificate = Certificate.from_ledger(ledger)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "été 1.png").write_bytes(b"one")
    (tmp_path / "images.npz").write_bytes(b"two")
    certificate.with_outputs(tmp_path, ["images", "images.npz"]).save(tmp_path / "certificate.json")
    return tmp_path


def test_it_holds(folder: Path) -> None:
    result = verify(folder / "certificate.json")
    assert result.ok, result.problems
    assert result.guarantee == "differential-privacy"
    assert result.epsilon == pytest.approx(1, rel=2e-3)
    assert result.epsilon <= 1
    assert set(result.checked) == {"seal", "epsilon", "images", "images.npz", "ledger.jsonl"}
    content = json.loads((folder / "certificate.json").read_text())
    assert content["format"] == FORMAT
    assert content["noise"]["counts"] == "secure"
    assert content["noise"]["steps"] == "fast"
    assert content["method"] == "test"


def test_a_package_without_a_version_does_not_lose_what_was_paid_for(
    few_digits: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name in ("sfumato", "opendp"):
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    ledger = Ledger()
    Vault(few_digits, Budget(1), [Release("counts")], ledger=ledger, secure=False).counts()
    software = Certificate.from_ledger(ledger).software
    assert software["sfumato"] == software["opendp"] == "not installed"
    assert software["torch"] == "1.0"


def test_it_says_nothing_private(few_digits: ImageSet) -> None:
    """A run on a neighbouring set gives the same certificate: no size, no hash of the input."""

    def made(images: ImageSet) -> dict[str, Any]:
        ledger = Ledger()
        Vault(images, Budget(1), [Release("counts")], ledger=ledger).counts()
        return Certificate.from_ledger(ledger).to_dict()

    assert made(few_digits) == made(few_digits.subset(torch.arange(len(few_digits) - 1)))


def edit(folder: Path, change: Any, *, reseal: bool = False) -> list[str]:
    path = folder / "certificate.json"
    content = json.loads(path.read_text())
    change(content)
    if reseal:
        content["seal"] = {name: digest(value) for name, value in content.items() if name != "seal"}
    path.write_text(json.dumps(content))
    result = verify(path)
    assert not result
    return result.problems


FIELDS = {
    "epsilon": 0.5,
    "delta": 1e-6,
    "adjacency": "replace-one",
    "guarantee": "none",
    "void": "nothing",
    "method": "other",
    "bounds": {"exact": None, "rdp": 0.1, "pld": 0.1},
    "public_facts": {},
    "parameters": {},
    "noise": {},
    "software": {},
    "claimed": {"epsilon": 1},
    "format": "sfumato-certificate/0",
    "ledger": "0" * 64,
    "outputs": {},
    "events": [],
}


@pytest.mark.parametrize("field", FIELDS)
def test_every_edited_field_is_named(folder: Path, field: str) -> None:
    problems = edit(folder, lambda content: content.__setitem__(field, FIELDS[field]))
    assert any(problem.startswith(f"{field}:") for problem in problems), problems


@pytest.mark.parametrize("field", FIELDS)
def test_every_missing_field_is_named(folder: Path, field: str) -> None:
    assert edit(folder, lambda content: content.pop(field)) == [f"{field}: missing"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.update(epsilon=0.5), "epsilon"),
        (lambda c: c.update(epsilon=c["epsilon"] * 0.999), "epsilon"),
        (lambda c: c.update(delta=1e-7), "epsilon"),
        (lambda c: c.update(adjacency="replace-one"), "epsilon"),
        (lambda c: c.update(adjacency="none"), "events"),
        (lambda c: c["events"][0].update(noise_multiplier=50.0), "epsilon"),
        (lambda c: c["events"][1].update(times=1), "epsilon"),
        (lambda c: c["events"][1].update(sampling_prob=0.01), "epsilon"),
        (lambda c: c["events"][1].update(noise_multiplier=0.0), "guarantee"),
        (lambda c: c["events"][1].update(noise_multiplier="x"), "events"),
        (lambda c: c["events"].pop(), "epsilon"),
        (lambda c: c.update(guarantee="none"), "guarantee"),
        (lambda c: c["outputs"].update({"images.npz": "0"}), "outputs"),
        (lambda c: c["outputs"].update({"more.npz": "0"}), "outputs"),
        (lambda c: c["events"][1].update(name="other"), "events"),
        (lambda c: c.update(ledger="0" * 64), "ledger"),
        (lambda c: c.update(extra=1), "extra"),
        (lambda c: c.update(epsilon=True), "epsilon"),
        (lambda c: c["events"][1].update(times=True), "events"),
        (lambda c: c["events"][1].update(times=1e30), "events"),
        (lambda c: c["events"][1].update(noise_multiplier=1e-300), "events"),
        (lambda c: c["events"][1].update(more=1), "events"),
        (lambda c: c.update(method="other"), "method"),
        (lambda c: c.update(public_facts={}), "public_facts"),
        (lambda c: c.update(parameters={}), "parameters"),
        (lambda c: c.update(noise={}), "noise"),
        (lambda c: c["outputs"].update({"/dev/zero": "0"}), "outputs"),
        (lambda c: c["outputs"].update({"../x": "0"}), "outputs"),
        (lambda c: c["outputs"].update({"x" * 500: "0"}), "outputs"),
        (lambda c: c.update(outputs=[1]), "outputs"),
    ],
)
def test_resealing_does_not_help_a_liar(folder: Path, change: Any, named: str) -> None:
    problems = edit(folder, change, reseal=named != "extra")
    assert any(problem.startswith(f"{named}:") for problem in problems), problems


def test_released_files_are_checked(folder: Path) -> None:
    (folder / "images.npz").write_bytes(b"other")
    assert verify(folder / "certificate.json").problems == ["outputs: images.npz is not what was certified"]
    (folder / "images.npz").unlink()
    (folder / "images" / "more.png").write_bytes(b"three")
    assert verify(folder / "certificate.json").problems == [
        "outputs: images is not what was certified",
        "outputs: images.npz is missing",
    ]


def test_a_folder_is_hashed_as_a_folder(folder: Path) -> None:
    """Neither a link inside it nor a file that spells its listing passes."""
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "private.png").write_bytes(b"x")
    (folder / "images" / "more").symlink_to(outside)
    assert "link" in verify(folder / "certificate.json").problems[0]
    (folder / "images" / "more").unlink()
    assert verify(folder / "certificate.json").ok
    (folder / "images").rename(folder / "kept")
    (folder / "images").write_text("[]")
    assert "images is not what was certified" in verify(folder / "certificate.json").problems[0]


def honest(few_digits: ImageSet, folder: Path, adjacency: str, reason: str | None) -> dict[str, Any]:
    """A certificate with its ledger beside it, as it should be."""
    with Ledger(folder / "ledger.jsonl") as ledger:
        vault = Vault(few_digits, Budget(1, adjacency=adjacency), [Release("counts")], ledger=ledger)  # type: ignore[arg-type]
        vault.counts()
        if reason:
            vault.unprotected(reason)
        Certificate.from_ledger(ledger).save(folder / "certificate.json")
    assert verify(folder / "certificate.json").ok
    content: dict[str, Any] = json.loads((folder / "certificate.json").read_text())
    return content


@pytest.mark.parametrize("lie", ["void", "adjacency", "delta"])
def test_a_consistent_lie_is_caught_by_the_ledger(lie: str, few_digits: ImageSet, tmp_path: Path) -> None:
    content = honest(few_digits, tmp_path, "replace-one", "as published" if lie == "void" else None)
    (other := tmp_path / "other").mkdir()
    liar = honest(few_digits, other, "add-remove" if lie == "adjacency" else "replace-one", None)
    liar["ledger"] = content["ledger"]
    if lie == "delta":
        liar |= {"delta": 0.5, "epsilon": 0.0, "bounds": dict.fromkeys(liar["bounds"], 0.0)}
    liar["seal"] = {name: digest(value) for name, value in liar.items() if name != "seal"}
    (tmp_path / "certificate.json").write_text(json.dumps(liar))
    problems = verify(tmp_path / "certificate.json").problems
    assert any(problem.startswith(f"{lie}: ledger.jsonl says otherwise") for problem in problems), problems


def test_stopping_early_earns_no_smaller_epsilon(few_digits: ImageSet) -> None:
    """When to stop may depend on what was seen; then only the whole plan's epsilon holds."""
    ledger = Ledger()
    vault = Vault(few_digits, Budget(1), [Release("steps", 1000)], ledger=ledger)
    vault.sum(lambda images: images.flatten(1), release="steps", bound=1.0)
    certificate = Certificate.from_ledger(ledger)
    assert certificate.epsilon == pytest.approx(1, rel=1e-3)
    assert certificate.events[0]["times"] == 1000


def test_verify_never_raises(folder: Path) -> None:
    """Random damage, resealed or not, ends in problems or changes nothing that is checked."""
    import random

    chance = random.Random(0)
    original = (folder / "certificate.json").read_text()
    odd = [None, True, -1, 0, 1.5, 1e30, "", "x", [], {}, [1], {"a": 1}, "\ud800", float("nan"), float("inf")]
    for _ in range(50):
        content = json.loads(original)
        place: Any = content
        while True:
            key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or not place[key] or chance.random() < 0.3:
                break
            place = place[key]
        place[key] = chance.choice(odd)
        (folder / "certificate.json").write_text(json.dumps(content))
        assert json.loads(original) == content or not verify(folder / "certificate.json").ok


def test_links_and_repeated_keys_are_refused(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    (folder.parent / "elsewhere" / "s").write_bytes(b"x")
    (folder / "l").symlink_to(folder.parent / "elsewhere")
    assert any("'l/s' is not inside" in p for p in edit(folder, lambda c: c["outputs"].update({"l/s": "0"})))
    path = folder / "certificate.json"
    path.write_text(path.read_text().replace("{", '{"epsilon": 0.01, ', 1))
    assert "twice" in verify(path).problems[0]


def test_a_guarantee_of_zero_verifies(few_digits: ImageSet, tmp_path: Path) -> None:
    ledger = Ledger()
    Vault(few_digits, Budget(1, 1e-3), [Release("a", noise_multiplier=1e6)], ledger=ledger)
    result = verify(Certificate.from_ledger(ledger).save(tmp_path / "certificate.json"))
    assert result.ok, result.problems
    assert result.epsilon == 0.0


def test_an_edited_or_foreign_ledger_is_noticed(folder: Path) -> None:
    ledger = folder / "ledger.jsonl"
    text = ledger.read_text()
    ledger.write_text(text.replace('"times": 1,', '"times": 2,', 1))
    assert "edited after it was written" in verify(folder / "certificate.json").problems[0]
    ledger.write_text("".join(text.splitlines(keepends=True)[:-1]))
    assert verify(folder / "certificate.json").problems == ["ledger: ledger.jsonl is not the ledger that was certified"]
    ledger.unlink()
    assert verify(folder / "certificate.json").ok  # it may be left out; the events speak for themselves


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"x"', "null", "[" * 100_000, '{"a": NaN}', '{"a": "\\ud800"}'])
def test_what_is_no_certificate_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "certificate.json"
    path.write_text(text)
    assert not verify(path).ok
    assert not verify(tmp_path / "absent.json").ok


def test_no_noise_is_no_guarantee(few_digits: ImageSet, tmp_path: Path) -> None:
    ledger = Ledger()
    Vault(few_digits, Budget(math.inf), [Release("counts")], ledger=ledger).counts()
    certificate = Certificate.from_ledger(ledger)
    assert certificate.guarantee == "none"
    assert "no noise" in str(certificate.void)
    result = verify(certificate.save(tmp_path / "certificate.json"))
    assert result.ok, result.problems
    assert result.epsilon is None


def test_it_reads_what_it_wrote(folder: Path) -> None:
    certificate = Certificate.load(folder / "certificate.json")
    assert certificate.to_dict() == json.loads((folder / "certificate.json").read_text())
