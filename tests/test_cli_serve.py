"""The command `sfumato serve`: its link, and its mistakes."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from typer.testing import CliRunner

from sfumato import cli_serve
from sfumato.cli import app
from sfumato.data import DataError


def test_the_server_prints_a_link_and_ends_at_ctrl_c(tmp_path):
    command = [sys.executable, "-m", "sfumato", "serve", "--root", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        link = next(line for line in process.stdout if line.startswith("http://"))
        found = re.fullmatch(r"(http://127\.0\.0\.1:\d+/enter)#([\w-]{43})\n", link)
        assert found is not None
        with urllib.request.urlopen(found[1]) as answer:
            assert answer.status == 200
            assert found[2] not in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(found[1].replace("/enter", "/"))
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=1800)
    assert "Runs that are under way go on" in out
    assert process.returncode == 0
    assert err == ""
    assert (tmp_path / "sfumato-runs").is_dir()


def test_a_port_in_use_and_a_missing_root_are_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DataError, match="choose another port with --port"):
            app(["serve", "--root", str(tmp_path), "--port", str(port)], standalone_mode=False)
    result = CliRunner().invoke(app, ["serve", "--root", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "is not a folder" in re.sub(r"[│\s]+", " ", result.output)


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(cli_serve, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'sfumato\[web\]'"):
        app(["serve", "--root", str(tmp_path)], standalone_mode=False)
