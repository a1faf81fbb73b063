"""Runs the example scripts as a reader would, with `--quick`."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sfumato as sf
from sfumato.methods.registry import METHODS

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
MAX_LINES = 60  # that are not blank


@pytest.fixture(autouse=True)
def same_methods() -> Iterator[None]:
    """Forget what an example registers."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr(sys, "argv", [name, "--quick"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_there_are_five() -> None:
    assert [path.stem for path in SCRIPTS] == ["add_a_method", "compare_methods", "dp_sgd", "quickstart", "your_folder"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_says_what_it_does(path: Path) -> None:
    source = path.read_text("utf-8")
    assert 20 <= sum(bool(line.strip()) for line in source.splitlines()) <= MAX_LINES
    said = ast.get_docstring(ast.parse(source)) or ""
    assert f"Run: `python examples/{path.name}`" in said
    assert "minute" in said or "second" in said


def test_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("quickstart.py", tmp_path, monkeypatch)
    assert "certificate valid: epsilon" in capsys.readouterr().out
    (out,) = tmp_path.glob("sfumato-*")
    assert {path.name for path in out.iterdir()} == {"run", "images.npz", "samples.png"}
    assert len(sf.load_images(out / "images.npz")) == 1000


def test_your_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("your_folder.py", tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert printed.count("for each person") == 2
    assert "third run refused: scans.budget" in printed


def test_dp_sgd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("dp_sgd.py", tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert "certificate valid: epsilon" in printed
    assert float(printed.partition("test accuracy ")[2].partition("%")[0]) > 50  # of ten classes


def test_compare_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("compare_methods.py", tmp_path, monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["dp-merf", "dp-mepf", "dp-kernel"]
    assert lines[0].split()[-3:] == ["logistic", "mlp", "small_cnn"]
    assert next(tmp_path.rglob("methods.png")).stat().st_size > 1000


def test_add_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The script itself calls `check_synthesizer`."""
    run("add_a_method.py", tmp_path, monkeypatch)
    (out,) = tmp_path.glob("sfumato-*")
    assert sf.verify(out / "certificate.json")
    assert sf.load(out).key == "cosine-gaussian"
    assert len(sf.load_images(out / "images.npz")) == 1000
