"""The walk-through of docs/cluster.md runs as it stands there, on the cluster of these tests."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sfumato import cli

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*holds fewer than:sfumato.data.DataWarning",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


def block(language: str) -> str:
    """Return the block of the walk-through in a language."""
    text = PAGE.read_text("utf-8")
    text = text[text.index("## Without a cluster") :]
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_walk_through(shards: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(shards.parent)
    commands = [line for line in block("bash").splitlines() if line.startswith("sfumato")]
    assert len(commands) == 6
    for command in commands:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 0, (command, capsys.readouterr())
    with np.load("more.npz") as drawn:
        assert len(next(iter(drawn.values()))) == 20


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_python_walk_through(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shards.parent)
    code = block("python").replace("epsilon=5.0)", "epsilon=5.0, features=40, steps=2, batch_size=10)")
    space: dict[str, Any] = {}
    exec(code, space)
    assert space["model"].sample(3).shape == (1, 8, 8)
    assert Path("runs/a/certificate.json").exists()
