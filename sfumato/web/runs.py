"""Runs: processes of their own (`sfumato synth`), with their state on disk.

A run has a folder: `job.json` (what was asked for), `worker.lock` (locked while the process lives; the process inherits
the lock, so it holds without the server), `worker.pid`, `progress.json`, `log.txt`, `exit.json` (status, if the
server saw the end), and the folder to share. A server that starts later finds all of it. Nothing deletes a run: its
ledger is the record of what was spent.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from sfumato.certificate import Certificate
from sfumato.certificate.spending import Spending, spending
from sfumato.data import DataError
from sfumato.data.atomic import write_json
from sfumato.privacy.ledger import Ledger, LedgerError
from sfumato.progress import FILE_VARIABLE

IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9-]{0,79}")
REQUEST = re.compile(r"[0-9a-f]{32}")
MAX_SERVED = 64 << 20  # bytes of one file that is shown in the browser
LOG_TAIL = 4000
FINISHED, RUNNING, STOPPED, FAILED = "finished", "running", "stopped", "failed"


@dataclass(frozen=True)
class WebRun:
    """A run on disk. All properties are read from its files, each time."""

    folder: Path

    @property
    def identifier(self) -> str:
        return self.folder.name

    @property
    def job(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "job.json").read_text("utf-8"))
        return content

    @property
    def output(self) -> Path:
        """The folder to share."""
        return self.folder / str(self.job["name"])

    @property
    def alive(self) -> bool:
        """Whether the process holds its lock."""
        try:
            lock = os.open(self.folder / "worker.lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    @property
    def certificate(self) -> Certificate | None:
        """The certificate of the finished folder, or None."""
        try:
            found = Certificate.load(self.output / "certificate.json")
        except (OSError, ValueError, KeyError):
            return None
        return found if "report.html" in found.outputs else None

    @property
    def certificate_file(self) -> bytes:
        """The certificate as it is on disk, so that `verify` finds whatever was changed."""
        with _regular(self.output / "certificate.json") as file:
            return file.read(MAX_SERVED)

    @property
    def state(self) -> str:
        if self.alive:
            return RUNNING
        if self.certificate is not None:
            return FINISHED
        return (
            STOPPED if self._read("exit.json").get("status") in (None, 130, -signal.SIGINT, -signal.SIGKILL) else FAILED
        )

    @property
    def stages(self) -> list[dict[str, Any]]:
        """What is under way, the innermost stage last."""
        found = self._read("progress.json") if self.alive else []
        return found if isinstance(found, list) else []

    @property
    def spending(self) -> Spending | None:
        """What was charged so far; None if nothing was, or the ledger cannot be read."""
        try:
            return spending(Ledger.read(self.output / "ledger.jsonl"))
        except (LedgerError, OSError, KeyError, ValueError):
            return None

    @property
    def log(self) -> str:
        """The end of what the process printed, for the owner's eyes."""
        try:
            with (self.folder / "log.txt").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def file(self, name: str) -> bytes:
        """Return a certified file. Raise `DataError` unless it is exactly what the certificate covers."""
        certificate = self.certificate
        expected = None if certificate is None else certificate.outputs.get(name)
        if expected is None:
            raise DataError(f"this run has no certified {name}")
        try:
            with _regular(self.output / name) as file:
                content = file.read(MAX_SERVED + 1)
        except OSError:
            content = b""
        if hashlib.sha256(content).hexdigest() != expected:
            raise DataError(f"{name} is not what the certificate covers; nothing is shown")
        return content

    def write_zip(self, target: IO[bytes]) -> None:
        """Write the certified files and the certificate as a zip file."""
        certificate = self.certificate
        if certificate is None:
            raise DataError("this run is not finished")
        prefix = self.output.name
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED, strict_timestamps=False) as archive:
            for name in ("certificate.json", *certificate.outputs):
                top = self.output / name
                paths = sorted(path for path in top.rglob("*") if not path.is_dir()) if top.is_dir() else [top]
                for path in paths:
                    with _regular(path) as file:
                        member = zipfile.ZipInfo(f"{prefix}/{path.relative_to(self.output).as_posix()}")
                        with archive.open(member, "w", force_zip64=True) as packed:
                            while block := file.read(1 << 20):
                                packed.write(block)

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.folder / name).read_text("utf-8"))
        except (OSError, ValueError):
            return {}


class RunStore:
    """All runs of a folder. `limit` of them may run at a time."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder.resolve(), limit
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()

    def list(self) -> list[WebRun]:
        """Return all runs, the newest first."""
        found = [WebRun(path) for path in self.folder.iterdir() if (path / "job.json").is_file()]
        return sorted(found, key=lambda run: str(run.job["created"]), reverse=True)

    def get(self, identifier: str) -> WebRun:
        """Return a run. Raise `DataError` if there is none of that name."""
        run = WebRun(self.folder / identifier)
        if not IDENTIFIER.fullmatch(identifier) or run.folder.is_symlink() or not (run.folder / "job.json").is_file():
            raise DataError("there is no such run")
        return run

    def start(self, request: str, source: str, about: dict[str, Any], arguments: Any) -> WebRun:
        """Start a run, once for each request: a form that is sent twice spends the budget once.

        - request: 32 hexadecimal digits that the form carries.
        - source: name of the data below the root.
        - about: what else the page shows.
        - arguments: function of the output folder that returns the arguments of `sfumato`.
        """
        if not REQUEST.fullmatch(request):
            raise DataError("the form is not complete; reload the page")
        name = re.sub(r"[^a-z0-9]+", "-", Path(source).stem.lower()).strip("-")[:40] or "images"
        folder = self.folder / f"{name}-{request[:12]}"
        with self._lock:
            if not folder.exists():
                self._check_limit()
                folder.mkdir()
                target = f"synthetic-{request[:6]}"  # it is published, and the name of the data may be private
                job = {"name": target, "source": source, "created": datetime.now(UTC).isoformat(), **about}
                write_json(folder / "job.json", {**job, "arguments": arguments(folder / target)})
                self._launch(WebRun(folder), resume=False)
        return self.get(folder.name)

    def resume(self, run: WebRun) -> None:
        """Continue a run that was stopped. What was charged is not charged again."""
        with self._lock:
            if run.alive:
                raise DataError("this run is under way")
            if run.certificate is not None:
                raise DataError("this run is finished")
            self._check_limit()
            self._launch(run, resume=True)

    def cancel(self, run: WebRun, *, at_once: bool = False) -> None:
        """Interrupt a run; `at_once` ends the process without waiting. Either way, `resume` can continue it."""
        pid = run._read("worker.pid")
        if run.alive and isinstance(pid, int) and pid > 1:  # the holder of the lock is this process
            os.kill(pid, signal.SIGKILL if at_once else signal.SIGINT)

    def _check_limit(self) -> None:
        running = sum(run.alive for run in self.list())
        if running >= self.limit:
            raise DataError(f"{running} runs are under way, which is the limit of this server; wait, or stop one")

    def _launch(self, run: WebRun, *, resume: bool) -> None:
        folder = run.folder
        lock = os.open(folder / "worker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another server was faster
                raise DataError("this run is under way") from None
            for name in ("exit.json", "progress.json"):
                (folder / name).unlink(missing_ok=True)
            arguments = [*run.job["arguments"][:1], *(["--resume"] if resume else []), *run.job["arguments"][1:]]
            with (folder / "log.txt").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "sfumato", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folder,
                    env={**os.environ, FILE_VARIABLE: str(folder / "progress.json"), "NO_COLOR": "1"},
                    pass_fds=(lock,),
                    start_new_session=True,  # Ctrl-C in the server's terminal does not reach it
                )
            write_json(folder / "worker.pid", process.pid)
        finally:
            os.close(lock)
        threading.Thread(target=_await_end, args=(process, folder), daemon=True).start()


def _await_end(process: subprocess.Popen[bytes], folder: Path) -> None:
    status = process.wait()
    write_json(folder / "exit.json", {"status": status, "time": time.time()})


def _regular(path: Path) -> IO[bytes]:
    """Open a regular file. Follow no link at its end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb")
