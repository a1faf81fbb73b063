"""Certificates: their content, the detection of every relevant edit, and robustness to hostile files."""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sfumato.certificate import Certificate, issue, verify
from sfumato.certificate.issue import FORMAT
from sfumato.certificate.statement import rounded_up
from sfumato.engine.calibration import calibrate
from sfumato.privacy.accounting import Release
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import Ledger, LedgerError, digest

STEPS = [Release("counts", weight=4, nonnegative=True), Release("steps", 20, 0.1)]
FACTS = {"method": "test", "parameters": {"epsilon": 1.0}, "public_facts": {"classes": ["a"], "sizes": None}}


def written(ledger: Ledger, budget: Budget, releases: list[Release], **facts: Any) -> Ledger:
    """Write the lines of a vault: the plan, and a charge for each of its releases."""
    plan = calibrate(releases, budget)
    events = [
        {
            "name": release.name,
            "times": release.times,
            "sampling_prob": release.sampling_prob,
            "noise_multiplier": release.noise,
            "nonnegative": release.nonnegative,
            "noise": "secure" if release.times == 1 else "fast",
        }
        for release in plan.releases
    ]
    ledger.append("open", delta=budget.delta, adjacency=budget.adjacency, unit=budget.unit, plan=events, **facts)
    for event in events:
        ledger.append("charge", **event)
    return ledger


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create the folder of a run: certificate, images, ledger."""
    (place := tmp_path / "run").mkdir()
    with Ledger(place / "ledger.jsonl") as ledger:
        certificate = Certificate.from_ledger(written(ledger, Budget(1), STEPS, **FACTS), issuer="me", subject="scans")
    (place / "images").mkdir()
    (place / "images" / "été 1.png").write_bytes(b"one")
    (place / "images.npz").write_bytes(b"two")
    certificate.covering(place, ["images", "images.npz", "ledger.jsonl"]).save(place / "certificate.json")
    return place


def test_a_valid_certificate_verifies(folder: Path) -> None:
    result = verify(folder / "certificate.json")
    assert result.ok, result.problems
    assert result.guarantee == "differential-privacy"
    assert result.epsilon is not None
    assert 0.998 < result.epsilon <= 1
    assert (result.delta, result.unit, result.adjacency) == (1e-5, "image", "add-remove")
    assert (result.issuer, result.subject, result.signer, result.caveats) == ("me", "scans", None, [])
    assert set(result.checked) == {"digest", "epsilon", "images", "images.npz", "ledger.jsonl", "ledger.lock"}
    assert result.missing == result.uncovered == result.not_checked == []
    content = json.loads((folder / "certificate.json").read_text())
    assert content["format"] == FORMAT
    assert content["noise"]["counts"] == "secure"
    assert content["noise"]["steps"] == "fast"
    assert content["method"] == "test"
    assert set(content["outputs"]) == {"images", "images.npz", "ledger.jsonl"}
    assert content["account"] is None


def test_unit_account_and_caveats_come_from_the_ledger(tmp_path: Path) -> None:
    facts = {**FACTS, "public_facts": {"sizes": [3, 4]}, "caveats": ["A cap of 7."], "account": "hospital.budget"}
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        made = Certificate.from_ledger(written(ledger, Budget(1, unit="person"), STEPS, **facts))
    assert made.unit == "person"
    assert made.account == "hospital.budget"
    assert made.caveats[0] == "A cap of 7."
    assert "one person more or less" in made.caveats[1]
    path = made.save(tmp_path / "certificate.json")
    assert verify(path).ok
    assert verify(path).caveats == made.caveats
    (tmp_path / "ledger.jsonl").unlink()
    replace(made, caveats=["A cap of 7."]).save(path)
    assert verify(path).problems == ["caveats: class sizes are public facts, but the caveat that says so is missing"]


def test_a_package_without_metadata_does_not_prevent_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("sfumato", "opendp"):
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(issue, "_version", issue._version.__wrapped__)  # without its cache
    software = Certificate.from_ledger(written(Ledger(), Budget(1), STEPS)).software
    assert software["sfumato"] == software["opendp"] == "not installed"
    assert software["torch"] == "1.0"


def test_epsilon_is_rounded_up() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        value = math.exp(generator.uniform(-20, 20))
        assert value <= rounded_up(value) <= value * (1 + 1.1e-5)
        assert float(f"{rounded_up(value):.6g}") == rounded_up(value)
    assert rounded_up(1.0) == 1.0
    assert rounded_up(0.0) == 0.0


def edit(folder: Path, change: Any, *, forged: bool = False, **options: Any) -> list[str]:
    path = folder / "certificate.json"
    content = json.loads(path.read_text())
    change(content)
    if forged:
        content["digest"] = digest({k: v for k, v in content.items() if k not in ("digest", "signature")})
    path.write_text(json.dumps(content))
    result = verify(path, **options)
    assert not result
    return result.problems


FIELDS = {
    "epsilon": 0.5,
    "delta": 1e-6,
    "adjacency": "replace-one",
    "unit": "person",
    "caveats": ["none"],
    "guarantee": "none",
    "void": "nothing",
    "method": "other",
    "bounds": {"exact": None, "rdp": 0.1, "pld": 0.1},
    "public_facts": {},
    "parameters": {},
    "account": "other",
    "noise": {},
    "software": {},
    "claimed": {"epsilon": 1},
    "issuer": "another",
    "subject": None,
    "issued": "2020-01-01T00:00:00+00:00",
    "derived_from": "0" * 64,
    "ledger": "0" * 64,
    "outputs": {},
    "events": [],
}


@pytest.mark.parametrize("field", FIELDS)
def test_every_edit_is_detected(folder: Path, field: str) -> None:
    problems = edit(folder, lambda content: content.__setitem__(field, FIELDS[field]))
    assert "digest: the certificate was edited after it was made" in problems


@pytest.mark.parametrize("field", [*FIELDS, "format", "digest", "signature"])
def test_every_missing_field_is_named(folder: Path, field: str) -> None:
    assert edit(folder, lambda content: content.pop(field)) == [f"{field}: missing"]


def test_an_older_format_is_named(folder: Path) -> None:
    (problem,) = edit(folder, lambda content: content.update(format="sfumato-certificate/1", seal={}))
    assert problem.startswith("format: 'sfumato-certificate/1', made by an older version")
    (problem,) = edit(folder, lambda content: content.update(format="sfumato-certificate/9"))
    assert problem.startswith("format: 'sfumato-certificate/9'")


def _understate(content: dict[str, Any], amount: float) -> None:
    content["epsilon"] *= 1 - amount


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.update(epsilon=0.5), "epsilon"),
        (lambda c: _understate(c, 1e-5), "epsilon"),
        (lambda c: c.update(epsilon=c["epsilon"] * 1.02), "epsilon"),
        (lambda c: c["bounds"].update(pld=c["bounds"]["pld"] * 0.9999), "bounds"),
        (lambda c: c.update(delta=1e-7), "epsilon"),
        (lambda c: c.update(adjacency="replace-one"), "epsilon"),
        (lambda c: c.update(adjacency="none"), "events"),
        (lambda c: c.update(unit="house"), "unit"),
        (lambda c: c.update(unit="person"), "unit"),
        (lambda c: c.update(caveats=["x"]), "caveats"),
        (lambda c: c.update(account="x"), "account"),
        (lambda c: c["events"][0].update(noise_multiplier=50.0), "epsilon"),
        (lambda c: c["events"][1].update(times=1), "epsilon"),
        (lambda c: c["events"][1].update(sampling_prob=0.01), "epsilon"),
        (lambda c: c["events"][1].update(noise_multiplier=0.0), "guarantee"),
        (lambda c: c["events"][1].update(noise_multiplier="x"), "events"),
        (lambda c: c["events"].pop(), "epsilon"),
        (lambda c: c["events"].extend([c["events"][1]] * 2000), "events"),
        (lambda c: c.update(guarantee="none"), "guarantee"),
        (lambda c: c["outputs"].update({"images.npz": "0"}), "outputs"),
        (lambda c: c["events"][1].update(name="other"), "events"),
        (lambda c: c.update(ledger="0" * 64), "ledger"),
        (lambda c: c.update(extra=1), "extra"),
        (lambda c: c.update(epsilon=True), "epsilon"),
        (lambda c: c.update(epsilon=1), "epsilon"),
        (lambda c: c["events"][1].update(times=True), "events"),
        (lambda c: c["events"][1].update(times=1e30), "events"),
        (lambda c: c["events"][1].update(times=10**30), "events"),
        (lambda c: c["events"][1].update(noise_multiplier=1e-300), "events"),
        (lambda c: c["events"][1].update(more=1), "events"),
        (lambda c: c.update(method="other"), "method"),
        (lambda c: c.update(public_facts={}), "public_facts"),
        (lambda c: c.update(parameters={}), "parameters"),
        (lambda c: c.update(noise={}), "noise"),
        (lambda c: c["outputs"].update({"/dev/zero": "0"}), "outputs"),
        (lambda c: c["outputs"].update({"../x": "0"}), "outputs"),
        (lambda c: c["outputs"].update({"x" * 500: "0"}), "outputs"),
        (lambda c: c["outputs"].update({"a\0b": "0"}), "outputs"),
        (lambda c: c["outputs"].update({"": "0"}), "outputs"),
        (lambda c: c["outputs"].update({".": "0"}), "outputs"),
        (lambda c: c["outputs"].update({"images.npz": 7}), "outputs"),
        (lambda c: c.update(outputs=[1]), "outputs"),
        (lambda c: c.update(caveats="x"), "caveats"),
        (lambda c: c.update(issuer=7), "issuer"),
        (lambda c: c.update(signature={}), "signature"),
        (lambda c: c.update(signature={"algorithm": "ed25519", "public_key": "zz", "value": None}), "signature"),
    ],
)
def test_edits_with_a_recomputed_digest_are_detected(folder: Path, change: Any, named: str) -> None:
    problems = edit(folder, change, forged=True)
    assert any(problem.startswith(f"{named}:") for problem in problems), problems


def test_released_files_are_checked(folder: Path) -> None:
    (folder / "images.npz").write_bytes(b"other")
    assert verify(folder / "certificate.json").problems == ["outputs: images.npz is not what was certified"]
    (folder / "images" / "more.png").write_bytes(b"three")
    assert verify(folder / "certificate.json").problems == [
        "outputs: images is not what was certified",
        "outputs: images.npz is not what was certified",
    ]


def test_a_subset_of_the_files_may_be_shared(folder: Path, tmp_path: Path) -> None:
    """A certificate may come with images.npz alone; without any certified file the result says so."""
    (other := tmp_path / "other").mkdir()
    for name in ("certificate.json", "images.npz"):
        (other / name).write_bytes((folder / name).read_bytes())
    result = verify(other / "certificate.json")
    assert result.ok
    assert result.missing == ["images", "ledger.jsonl"]
    assert "images.npz" in result.checked
    (other / "images.npz").unlink()
    result = verify(other / "certificate.json")
    assert result.ok
    assert result.not_checked == ["outputs: none of the 3 certified files is in this folder"]


def test_uncovered_files_are_listed(folder: Path) -> None:
    for name in ("raw.npz", "signature", "epsilon", "ledger.lock"):
        (folder / name).write_bytes(b"x")
    (folder / "private").mkdir()
    assert verify(folder / "certificate.json").uncovered == [
        "epsilon",
        "ledger.lock",
        "private",
        "raw.npz",
        "signature",
    ]
    for number in range(30):
        (folder / f"z{number:02d}").write_bytes(b"x")
    uncovered = verify(folder / "certificate.json").uncovered
    assert len(uncovered) == 21
    assert uncovered[-1] == "and 15 more"


def test_folders_are_hashed_with_their_structure(folder: Path) -> None:
    """A link in the folder, or a file in place of the folder, is detected."""
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


def test_links_and_devices_are_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(folder / "certificate.json")
    assert "link" in verify(tmp_path / "link.json").problems[0]
    os.mkfifo(tmp_path / "pipe.json")
    assert not verify(tmp_path / "pipe.json").ok
    (folder / "ledger.jsonl").rename(tmp_path / "elsewhere.jsonl")
    (folder / "ledger.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    assert any(problem.startswith("ledger:") for problem in verify(folder / "certificate.json").problems)
    (folder / "ledger.jsonl").unlink()
    os.mkfifo(folder / "ledger.jsonl")
    assert any(problem.startswith("ledger:") for problem in verify(folder / "certificate.json").problems)


def valid_certificate(folder: Path, adjacency: str, reason: str | None) -> dict[str, Any]:
    """Write and return a valid certificate with its ledger."""
    with Ledger(folder / "ledger.jsonl") as ledger:
        written(ledger, Budget(1, adjacency=adjacency), [Release("counts")])  # type: ignore[arg-type]
        if reason:
            ledger.append("unprotected", reason=reason)
        Certificate.from_ledger(ledger).save(folder / "certificate.json")
    assert verify(folder / "certificate.json", allow_none=True).ok
    content: dict[str, Any] = json.loads((folder / "certificate.json").read_text())
    return content


@pytest.mark.parametrize("field", ["void", "adjacency", "delta"])
def test_a_consistent_forgery_is_detected_by_the_ledger(field: str, tmp_path: Path) -> None:
    content = valid_certificate(tmp_path, "replace-one", "as published" if field == "void" else None)
    (other := tmp_path / "other").mkdir()
    forged = valid_certificate(other, "add-remove" if field == "adjacency" else "replace-one", None)
    forged["ledger"] = content["ledger"]
    if field == "delta":
        forged |= {"delta": 0.5, "epsilon": 0.0, "bounds": dict.fromkeys(forged["bounds"], 0.0)}
    forged["digest"] = digest({name: value for name, value in forged.items() if name not in ("digest", "signature")})
    (tmp_path / "certificate.json").write_text(json.dumps(forged))
    problems = verify(tmp_path / "certificate.json").problems
    assert any(problem.startswith(f"{field}: differs from ledger.jsonl") for problem in problems), problems


def test_the_plan_is_certified_and_limits_the_charges() -> None:
    """A run may stop because of its results; then only the epsilon of the whole plan holds."""
    complete = written(Ledger(), Budget(1), [Release("steps", 1000)])
    stopped = Ledger()
    for entry in complete.entries[:1]:
        stopped.append(**{k: v for k, v in entry.items() if k not in ("seq", "previous", "hash")})
    stopped.append("checkpoint", used={"steps": 0}, sha256="0")
    assert Certificate.from_ledger(stopped).epsilon == Certificate.from_ledger(complete).epsilon
    event = complete.entries[0]["plan"][0]
    for charge in ({**event, "times": 1}, {**event, "noise_multiplier": 0.1}, {**event, "name": "other"}):
        ledger = written(Ledger(), Budget(1), [Release("steps", 1000)])
        ledger.append("charge", **charge)
        with pytest.raises(LedgerError):
            Certificate.from_ledger(ledger)
    with pytest.raises(LedgerError, match="empty"):
        Certificate.from_ledger(Ledger())


ODD = [None, True, -1, 0, 1.5, 1e300, 10**400, "", "x", [], {}, [1], {"a": 1}, "\ud800", float("nan"), float("inf")]


@pytest.mark.parametrize("forged", [False, True])
def test_verify_never_raises(folder: Path, forged: bool) -> None:
    """Random damage gives problems. With a recomputed digest, only fields without consequences may change."""
    generator = random.Random(0)
    original = (folder / "certificate.json").read_text()
    free = ("software", "claimed", "issuer", "subject", "issued", "derived_from", "outputs")
    for _ in range(150):
        content = json.loads(original)
        place: Any = content
        path = []
        while True:
            key = generator.choice(list(place) if isinstance(place, dict) else range(len(place)))
            path.append(key)
            if not isinstance(place[key], dict | list) or not place[key] or generator.random() < 0.3:
                break
            place = place[key]
        place[key] = generator.choice(ODD)
        try:
            if forged and path[0] != "digest":
                content["digest"] = digest({k: v for k, v in content.items() if k not in ("digest", "signature")})
        except ValueError:
            pass
        (folder / "certificate.json").write_text(json.dumps(content))
        result = verify(folder / "certificate.json")
        assert not result.ok or json.loads(original) == content or (forged and path[0] in free), path


@pytest.mark.parametrize(
    ("times", "q", "z", "delta"),
    [(10**7, 0.5, 1e-3, 1e-5), (10**7, 1e-9, 1e9, 1e-300), (1, 1.0, 1e-3, 0.999), (3, 1e-300, 1.0, 1e-12)],
)
def test_extreme_numbers_are_accounted_or_refused(folder: Path, times: int, q: float, z: float, delta: float) -> None:
    def change(content: dict[str, Any]) -> None:
        content["events"][1].update(times=times, sampling_prob=q, noise_multiplier=z)
        content.update(delta=delta)

    assert edit(folder, change, forged=True)


def test_repeated_keys_are_refused(folder: Path) -> None:
    path = folder / "certificate.json"
    path.write_text(path.read_text().replace("{", '{"epsilon": 0.01, ', 1))
    assert "twice" in verify(path).problems[0]


def test_limits_on_epsilon_and_delta(folder: Path) -> None:
    path = folder / "certificate.json"
    assert verify(path, max_epsilon=1, max_delta=1e-5).ok
    assert verify(path, max_epsilon=0.9).problems[0].startswith("epsilon:")
    assert verify(path, max_delta=1e-6).problems[0].startswith("delta:")
    assert not verify(path, max_epsilon=math.nan).ok


def test_epsilon_zero_verifies(tmp_path: Path) -> None:
    ledger = written(Ledger(), Budget(1, 1e-3), [Release("a", noise_multiplier=1e6)])
    result = verify(Certificate.from_ledger(ledger).save(tmp_path / "certificate.json"))
    assert result.ok, result.problems
    assert result.epsilon == 0.0


def test_an_edited_or_other_ledger_is_detected(folder: Path) -> None:
    (folder / "certificate.json").write_text((folder / "certificate.json").read_text())
    ledger = folder / "ledger.jsonl"
    text = ledger.read_text()
    ledger.write_text(text.replace('"times": 1,', '"times": 2,', 1))
    assert any("edited after it was written" in problem for problem in verify(folder / "certificate.json").problems)
    ledger.write_text("".join(text.splitlines(keepends=True)[:-1]))
    problems = verify(folder / "certificate.json").problems
    assert "ledger: ledger.jsonl is not the ledger that was certified" in problems
    ledger.unlink()
    assert verify(folder / "certificate.json").ok  # the ledger may be omitted


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"x"', "null", "[" * 100_000, '{"a": NaN}', '{"a": "\\ud800"}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "certificate.json"
    path.write_text(text)
    assert not verify(path).ok
    assert not verify(tmp_path / "absent.json").ok
    path.write_bytes(b"\xff\xfe")
    assert not verify(path).ok


def test_without_noise_there_is_no_guarantee(tmp_path: Path) -> None:
    certificate = Certificate.from_ledger(written(Ledger(), Budget(math.inf), [Release("counts")]))
    assert certificate.guarantee == "none"
    assert certificate.epsilon is None
    path = certificate.save(tmp_path / "certificate.json")
    result = verify(path)
    assert not result.ok
    assert "no noise was asked for" in result.problems[0]
    assert verify(path, allow_none=True).ok
    assert not verify(path, allow_none=True, max_epsilon=1000).ok


def test_samples_drawn_later_refer_to_the_run(folder: Path, tmp_path: Path) -> None:
    run = Certificate.load(folder / "certificate.json")
    (tmp_path / "more.npz").write_bytes(b"more")
    made = run.derived(tmp_path, ["more.npz"])
    assert made.derived_from == run.digest == json.loads((folder / "certificate.json").read_text())["digest"]
    assert (made.epsilon, made.events, made.ledger) == (run.epsilon, run.events, run.ledger)
    path = made.save(tmp_path / "more.certificate.json")
    assert verify(path).ok
    assert verify(path).uncovered == ["run"]
    with Ledger(tmp_path / "ledger.jsonl") as ledger:  # in the folder of another run
        written(ledger, Budget(2), STEPS)
    assert verify(path).ok
    assert verify(path).uncovered == ["ledger.jsonl", "ledger.lock", "run"]
    (tmp_path / "more.npz").write_bytes(b"raw")
    assert not verify(path).ok


def test_a_saved_certificate_loads(folder: Path) -> None:
    certificate = Certificate.load(folder / "certificate.json")
    assert certificate.to_dict() == json.loads((folder / "certificate.json").read_text())
