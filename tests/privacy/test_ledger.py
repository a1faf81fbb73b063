"""The ledger: flushed before `append` returns, intact after a crash, locked for other processes, edits detected."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sfumato.privacy import ledger as module
from sfumato.privacy.ledger import Ledger, LedgerError


def written(path: Path) -> Path:
    with Ledger(path) as ledger:
        ledger.append("open", delta=1e-5)
        ledger.append("charge", name="a", times=2)
        ledger.append("charge", name="a", times=3)
        ledger.append("charge", name="other", times=4)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "ledger.jsonl")


def test_charges_and_voids_are_stored(path: Path) -> None:
    with Ledger(path) as ledger:
        assert ledger.charged("a") == 5
        assert ledger.charged("b") == 0
        assert ledger.void is None
        ledger.append("unprotected", reason="as published")
        ledger.append("unprotected", reason="another")
    with Ledger(path) as ledger:
        assert ledger.void == "as published"


def test_a_ledger_in_memory_counts_charges() -> None:
    ledger = Ledger()
    ledger.append("charge", name="a", times=2)
    assert ledger.charged("a") == 2


def test_each_line_is_flushed_before_append_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(
        module.os, "fsync", lambda descriptor: synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    with Ledger(path) as ledger:
        synced.clear()
        ledger.append("charge", name="b", times=1)
        assert synced == [str(path), str(path.with_suffix(".lock"))]
        assert json.loads(path.read_text().splitlines()[-1])["name"] == "b"


def test_a_failed_flush_raises(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with Ledger(path) as ledger:
        monkeypatch.setattr(module.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            ledger.append("charge", name="b", times=1)
        monkeypatch.undo()
        with pytest.raises(LedgerError, match="closed"):  # the state of the disk is unknown
            ledger.append("charge", name="b", times=1)


@pytest.mark.parametrize("line", [0, 1, 3])
def test_an_edited_line_is_named(path: Path, line: int) -> None:
    lines = path.read_text().splitlines()
    entry = json.loads(lines[line])
    entry["times"] = 1
    lines[line] = json.dumps(entry)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(LedgerError, match=f"line {line + 1}: edited"):
        Ledger(path)
    with pytest.raises(LedgerError, match=f"line {line + 1}: edited"):
        Ledger.read(path)


def test_rehashing_one_line_breaks_the_chain(path: Path) -> None:
    lines = path.read_text().splitlines()
    entry = json.loads(lines[1])
    del entry["hash"]
    entry["times"] = 1
    entry["hash"] = module.digest(entry)
    lines[1] = json.dumps(entry)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(LedgerError, match="line 3: edited"):
        Ledger(path)


@pytest.mark.parametrize("change", ["swap", "drop-middle", "drop-last", "drop-all", "garbage", "cut-last"])
def test_other_edits_are_detected(path: Path, change: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    new = {
        "swap": [lines[0], lines[2], lines[1], lines[3]],
        "drop-middle": [lines[0], lines[2], lines[3]],
        "drop-last": lines[:-1],
        "drop-all": [],
        "garbage": [*lines[:3], "not json\n"],
        "cut-last": [*lines[:3], lines[3][:20]],
    }[change]
    path.write_text("".join(new))
    with pytest.raises(LedgerError, match="start a new run"):
        Ledger(path)


@pytest.mark.parametrize("content", [None, "", "000000000002 abc\n", "x", "\xff"])
def test_a_missing_or_edited_head_is_detected(path: Path, content: str | None) -> None:
    lock = path.with_suffix(".lock")
    lock.unlink() if content is None else lock.write_text(content)
    with pytest.raises(LedgerError, match="start a new run"):
        Ledger(path)


def test_an_incomplete_line_is_removed(path: Path) -> None:
    """An incomplete line was never flushed, so nothing was drawn for it; every complete line stays charged."""
    with path.open("a") as file:
        file.write('{"seq": 4, "kind": "charge", "name": "b", "ti')
    with Ledger(path) as ledger:
        assert ledger.charged("a") == 5
        assert ledger.charged("b") == 0
        ledger.append("charge", name="b", times=1)
    with Ledger(path) as ledger:
        assert ledger.charged("b") == 1


def test_a_line_whose_head_was_not_written_is_charged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash between the two flushes, the charge counts."""
    with Ledger(path) as ledger:

        def crash(count: int, head: str) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(ledger, "_write_head", crash)
        with pytest.raises(KeyboardInterrupt):
            ledger.append("charge", name="b", times=7)
    with Ledger(path) as ledger:
        assert ledger.charged("b") == 7


def test_two_processes_cannot_spend_from_one_ledger(path: Path) -> None:
    script = (  # tries twice: at once, and when it is told to
        "import sys\nfrom sfumato.privacy.ledger import Ledger, LedgerError\n"
        "try:\n    Ledger(sys.argv[1]).close()\n    print('not locked', flush=True)\n"
        "except LedgerError as error:\n    print(error, flush=True)\n"
        "sys.stdin.readline()\nLedger(sys.argv[1])\n"
    )
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        with Ledger(path):
            with pytest.raises(LedgerError, match="in use by another process"):
                Ledger(path)
            assert "in use by another process" in other.stdout.readline()
            assert Ledger.read(path)  # reading is allowed
        other.stdin.write("again\n")
        other.stdin.flush()
        assert other.wait() == 0


def test_symbolic_links_share_one_lock(path: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to(path)
    (tmp_path / "b.jsonl").symlink_to(path)
    with Ledger(tmp_path / "a.jsonl"), pytest.raises(LedgerError, match="in use"):
        Ledger(tmp_path / "b.jsonl")
    with pytest.raises(LedgerError, match=r"suffix \.lock"):
        Ledger(tmp_path / "c.lock")


def test_a_deleted_ledger_refuses_charges(path: Path) -> None:
    with Ledger(path) as ledger:
        path.unlink()
        with pytest.raises(LedgerError, match="deleted"):
            ledger.append("charge", name="a", times=1)


def test_repeated_keys_are_refused(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace('"times": 2', '"times": 9, "times": 2')
    path.write_text("".join(lines))
    with pytest.raises(LedgerError, match="line 2: edited"):
        Ledger(path)


def test_a_closed_ledger_refuses_charges(path: Path) -> None:
    ledger = Ledger(path)
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.append("charge", name="a", times=1)


def test_a_killed_process_loses_no_charge(tmp_path: Path) -> None:
    """A process appends, reports each charge and is killed; every reported charge is in the ledger."""
    path = tmp_path / "ledger.jsonl"
    for _ in range(3):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:  # not a new Python, which would take seconds to import PyTorch
            try:
                ledger = Ledger(path)
                while True:
                    ledger.append("charge", name="a", times=1)
                    os.write(writer, f"{ledger.charged('a')}\n".encode())
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader) as report:  # counts confirmations, not seconds: the machine may be busy
            lines = [report.readline() for _ in range(5)]
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            confirmed = [int(line) for line in [*lines, *report] if line.endswith("\n")]
        assert len(confirmed) >= 5
        with Ledger(path) as ledger:
            assert ledger.charged("a") >= max(confirmed)
