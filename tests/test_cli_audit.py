"""The command `sfumato audit`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sfumato import cli, cli_audit
from sfumato.audit import method_audit
from sfumato.audit.faults import FAULTS
from sfumato.audit.method_audit import AuditOptions, audit_method, estimate_seconds
from sfumato.audit.neighbours import KINDS
from sfumato.data import ImageSet, save_images

pytestmark = pytest.mark.filterwarnings("ignore:.*holds fewer than:sfumato.data.DataWarning")

NO_LIMIT = ("--seconds", "1000000")  # the default, two minutes, is too short on a busy machine


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs the command in this process and returns (status, output, errors)."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sfumato", "audit", *map(str, arguments), *NO_LIMIT])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


def test_names_and_defaults_are_those_of_the_package() -> None:
    options = AuditOptions()
    assert (tuple(FAULTS), tuple(KINDS)) == (cli_audit.FAULTS, cli_audit.KINDS)
    assert method_audit.MECHANISMS == cli_audit.MECHANISMS
    assert (options.trials, options.runs, options.seconds) == (cli_audit.TRIALS, cli_audit.RUNS, cli_audit.SECONDS)
    assert (options.epsilon, options.delta, options.kind) == (1.0, 1e-5, cli_audit.KINDS[0])
    assert options.confidence == cli_audit.CONFIDENCE


def test_a_method_is_audited_in_text_and_json(run: Any, tmp_path: Path) -> None:
    status, out, err = run(
        "dp-merf", "--trials", "2000", "--runs", "8", "--neighbours", "person", "--json", "--out", tmp_path / "results"
    )
    assert status == 0
    assert "about" in err  # the cost, beforehand
    content = json.loads(out)
    assert content == json.loads((tmp_path / "results" / "audit.json").read_text())
    assert content["structure"]["sound"]
    assert content["bounds"]["white-box"]["trials"] == 1500
    assert content["bounds"]["black-box"]["trials"] == 4
    assert content["confidence"] == 0.95  # of both bounds together, as either may refute the claim
    assert [each["confidence"] for each in content["bounds"].values()] == pytest.approx([0.975, 0.975])
    assert content["violations"] == []
    assert any("no proof" in note for note in content["notes"])
    assert any("no power" in note for note in content["notes"])


def test_rules_are_printed(run: Any) -> None:
    status, out, _ = run("dp-merf", "--structural")
    assert status == 0
    assert "pinned files" in out
    assert "no violation found" in out
    assert "at least" not in out


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("dp-merf", "--fault", "half-noise", "--trials", "8000", "--runs", "0"), "white-box: epsilon is at least"),
        (("dp-merf", "--fault", "printed-loss", "--structural"), "rule 'printed text'"),
        (("dp-kernel-as-published", "--runs", "0"), "rule 'raw images'"),
        (("gaussian", "--fault", "half-noise"), "white-box: epsilon is at least"),
    ],
)
def test_a_violation_is_printed_and_the_status_is_1(arguments: tuple[str, ...], found: str, run: Any) -> None:
    status, out, _ = run(*arguments)
    assert status == 1
    assert "the claim is violated" in out
    assert found in out
    assert "loss 1" not in out  # what the faulty method prints


def test_atelier_is_audited_with_a_prior() -> None:
    prior = Path(__file__).parent / "priors" / "conditioned.safetensors"
    make, _ = method_audit.prepare("atelier", AuditOptions(settings={"prior": str(prior)}))
    assert make().get_params()["prior"] == str(prior)


def test_references_are_audited(run: Any) -> None:
    for target in ("gaussian", "discrete-gaussian"):
        status, out, _ = run(target, "--epsilon", "4", "--trials", "4000")
        assert status == 0
        assert "every release" in out
    assert audit_method("dp-sgd", AuditOptions(trials=200, runs=0, settings={"steps": 4})).certified is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "there is no method 'nothing'"),
        (("dp-merf", "--neighbours", "twin"), "there are no neighbours 'twin'"),
        (("dp-merf", "--fault", "typo"), "there is no fault 'typo'"),
        (("ndpdc", "--fault", "exact-counts"), "is planted in dp-merf"),
        (("dp-merf", "--train", "digits"), "give both --train and --held-out"),
        (("gaussian", "--canaries", "100"), "--canaries audits a method"),
        (("dp-merf", "--canaries", "1000"), "need at least 2000 images"),
        (("dp-merf", "--epsilon", "-1"), "epsilon must be greater than 0"),
    ],
)
def test_wrong_usage_is_refused(arguments: tuple[str, ...], message: str, run: Any) -> None:
    status, _, err = run(*arguments)
    assert status == 2
    assert message in " ".join(err.replace("│", " ").split())


def test_ctrl_c_reports_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(method_audit, "distinguish", interrupted)
    report = audit_method("dp-merf", AuditOptions(trials=1000))
    assert report.interrupted
    assert report.structure is not None
    assert report.bounds is not None
    assert list(report.bounds) == ["white-box"]
    assert any("ended early" in note for note in report.notes)


def test_canaries_are_hidden_in_one_run(run: Any, tmp_path: Path, digits: ImageSet) -> None:
    images = save_images(digits.subset(range(600)), tmp_path / "own.npz")
    settings = ("--set", "images_per_class=200", "--set", "sampling_prob=0.002", "--images", images)
    status, out, err = run("dpmix", "--canaries", "250", *settings, "--fault", "no-noise", "--out", tmp_path / "found")
    assert status == 1
    assert "about" in err
    assert "the claim is violated: epsilon is at least" in out
    content = json.loads((tmp_path / "found" / "audit.json").read_text())
    assert content["violated"]
    assert content["fault"] == "no-noise"
    assert content["canaries"] == 250
    few = ("--set", "images_per_class=20", "--images", images)
    status, out, _ = run("dpmix", "--canaries", "20", "--per-person", "5", "--no-detail", *few, "--json")
    assert status == 0
    content = json.loads(out)
    assert content["per_person"] == 5
    assert {each["name"] for each in content["attacks"]} == {"nearest", "density", "loss"}
    assert not content["violated"]


def test_the_cost_grows_with_the_trials_and_is_bounded() -> None:
    few, many = (estimate_seconds("dp-merf", AuditOptions(trials=n, seconds=1e9)) for n in (1000, 10**8))
    assert many > few
    assert estimate_seconds("dp-merf", AuditOptions(trials=10**8, seconds=5)) < few + 60


def test_released_images_are_attacked_for_the_owner_only(run: Any, tmp_path: Path, digits: ImageSet) -> None:
    names = {"train": range(0, 200), "held-out": range(200, 400), "shared": range(0, 150)}
    paths = {name: save_images(digits.subset(index), tmp_path / f"{name}.npz") for name, index in names.items()}
    options = ("--train", paths["train"], "--held-out", paths["held-out"], "--out", tmp_path / "mine")
    status, out, err = run(paths["shared"], *options)
    assert status == 0
    assert "training images can be told from others" in out  # they are copies
    assert "do not share it" in err
    content = json.loads((tmp_path / "mine" / "private" / "membership.json").read_text())
    assert content["memorisation"]["copies"] == 150
    assert "attacked: 200 of 200 training and 150 held-out images" in " ".join(out.split())
    assert "about" in err  # the cost, beforehand
    status, out, _ = run(paths["shared"], *options, "--json")
    assert json.loads(out) == {"private": str(tmp_path / "mine" / "private" / "membership.json")}
