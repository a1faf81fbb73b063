"""Progress: bars on a terminal, and a file for programs that watch."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from sfumato import progress
from sfumato.progress import FILE_VARIABLE, StageProgress, bar, show_spending, track


class Terminal(io.StringIO):
    """A standard error stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_spending(monkeypatch):
    monkeypatch.setattr(progress, "_spending", [])


def test_stages_are_drawn_with_time_and_spending(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    show_spending(lambda: "ε 0.25 of 1 spent")
    with bar("fitting"), bar("generator") as advance:  # a stage of unknown length, and one inside it
        advance(3, 4)
        progress._drawing[0].refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "fitting" in text
    assert "3/4" in text
    assert "ε 0.25 of 1 spent" in text
    assert re.search(r"generator.*\d:\d\d:\d\d|generator.*-:--:--", text)


def test_stages_are_written_to_a_file(monkeypatch, tmp_path):
    path = tmp_path / "progress.json"
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    monkeypatch.setattr(progress, "FILE_INTERVAL", 0)
    with bar("fitting"):
        for step in track(4, "generator"):
            if step == 2:
                outer, inner = json.loads(path.read_text("utf-8"))
    assert (outer["name"], outer["total"]) == ("fitting", None)
    assert (inner["name"], inner["done"], inner["total"]) == ("generator", 2, 4)
    assert inner["seconds_left"] >= 0
    assert json.loads(path.read_text("utf-8")) == []


def test_a_full_disk_stops_no_run(monkeypatch, tmp_path):
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "no" / "folder" / "progress.json"))
    assert list(track(2, "generator")) == [0, 1]


def test_the_time_left_of_a_resumed_loop_counts_its_own_steps():
    stage = StageProgress("x", started=progress.time.monotonic() - 10)
    stage.first, stage.done, stage.total = 90, 95, 100  # five steps in ten seconds
    assert stage.seconds_left == pytest.approx(10, abs=0.5)


def test_nothing_is_drawn_without_a_terminal(capsys, monkeypatch):
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    assert list(track(2, "generator")) == [0, 1]
    assert capsys.readouterr().err == ""
