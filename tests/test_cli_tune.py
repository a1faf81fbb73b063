"""`sfumato tune`: what it chooses, charges and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import sfumato as sf
from sfumato.cli import app

SMALL = ("--set", "batch_size=20", "--set", "features=60", "--device", "cpu", "-n", "60")


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_private_images_pay_for_all_candidates(tmp_path: Path) -> None:
    account = tmp_path / "all.budget"
    assert run("budget", "open", account, "--epsilon", "5").exit_code == 0
    command = ("tune", "digits", "-m", "dp-merf", "--try", "steps=1,40", "--epsilon", "4", "--out", tmp_path / "out")
    result = run(*command, "--budget", account, "--json", *SMALL)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["candidates"] == 2
    assert found["chosen"] in ({"steps": 1}, {"steps": 40})
    certificate = sf.Certificate.load(tmp_path / "out" / "certificate.json")
    assert {event["name"] for event in certificate.events} >= {"try1-embedding", "try2-embedding", "scores"}
    assert sf.verify(tmp_path / "out" / "certificate.json", max_epsilon=4.0)
    grid = json.loads(certificate.parameters["grid"])
    assert [each["steps"] for each in grid] == [1, 40]
    assert all(each["features"] == 60 for each in grid)  # what --set gives applies to all
    refused = run(*command[:-1], tmp_path / "again", "--budget", account, *SMALL)
    assert refused.exit_code == 1
    assert not (tmp_path / "again").exists()


def test_public_images_cost_nothing(tmp_path: Path) -> None:
    command = ("tune", "digits", "--public", "--test", "digits", "-m", "dp-merf", "--try", "steps=1,60", "--json")
    result = run(*command, "--epsilon", "10", *SMALL)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["parameters"]["steps"] for row in found["rows"]] == [1, 60]
    assert found["best"] == max(found["rows"], key=lambda row: row["accuracy"])["parameters"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--try", "steps=1,2"), "--out"),
        (("--try", "steps=1,2", "--public"), "--test"),
        (("--try", "steps=1", "--out", "x"), "nothing to choose"),
        (("--try", "steps", "--out", "x"), "NAME=VALUE"),
        (("--try", "steps=1,2", "--try", "steps=3,4", "--out", "x"), "once for each name"),
        (("--try", "steps=1,2", "--set", "steps=3", "--out", "x"), "only one of them"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    result = run("tune", "digits", "-m", "dp-merf", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_unknown_parameters_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    result = run("tune", tmp_path / "nowhere", "-m", "dp-merf", "--try", "stepz=1,2", "--out", tmp_path / "out")
    assert result.exit_code != 0
    assert "stepz" in str(result.exception or result.output)
