"""Runs on disk: started once, stopped, resumed, found by another server, downloaded."""

from __future__ import annotations

import io
import json
import shutil
import time
import zipfile

import pytest

from sfumato.certificate import verify
from sfumato.cli import app
from sfumato.data import DataError
from sfumato.data.atomic import write_json
from sfumato.web import runs as runs_module
from sfumato.web.runs import RunStore

QUICK = ["--method=dp-merf", "--epsilon=500", "--number=40", "--device=cpu", "--set=features=60", "--set=steps=3"]
REQUEST = "0123456789abcdef" * 2
ABOUT = {"method": "dp-merf", "epsilon": 500.0, "delta": 1e-5, "unit": "image", "prior": None}
# Sets the handler itself: a shell that starts the tests in the background has interrupts ignored.
SLEEP = (
    "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "print('begun', flush=True)\ntime.sleep(7200)"
)


@pytest.fixture(scope="session")
def finished(data_root, tmp_path_factory):
    """A folder of runs with one that is finished, made by the command in this process."""
    folder = tmp_path_factory.mktemp("runs")
    run = folder / "scans-0123456789ab"
    run.mkdir()
    arguments = ["synth", f"--out={run / 'synthetic-012345'}", *QUICK, "--", str(data_root / "ward" / "scans")]
    app(arguments, standalone_mode=False)
    job = {"name": "synthetic-012345", "source": "ward/scans", "created": "2026-01-01", "arguments": arguments, **ABOUT}
    write_json(run / "job.json", job)
    return folder


@pytest.fixture
def sleeper(monkeypatch):
    """Replace the command of a run by a process that waits."""
    real = runs_module.subprocess.Popen

    def start(command, **options):
        assert command[1:4] == ["-P", "-m", "sfumato"]
        return real([command[0], "-c", SLEEP, *command[4:]], **options)

    monkeypatch.setattr(runs_module.subprocess, "Popen", start)


def wait(condition, seconds=1800):  # a ceiling for a busy machine only
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_run_is_started_once_stopped_and_resumed(tmp_path, sleeper):
    runs = RunStore(tmp_path, limit=1)
    run = runs.start(REQUEST, "ward/My Scans!", ABOUT, lambda target: ["synth", f"--out={target}"])
    assert run.identifier == "my-scans-0123456789ab"
    assert run.state == "running"
    again = runs.start(REQUEST, "ward/My Scans!", ABOUT, lambda target: ["synth", "other"])
    assert again == run  # a form that was sent twice
    assert "other" not in again.job["arguments"]
    with pytest.raises(DataError, match="which is the limit"):
        runs.start("f" * 32, "x", ABOUT, lambda target: [])
    with pytest.raises(DataError, match="under way"):
        runs.resume(run)
    wait(lambda: "begun" in run.log)

    other = RunStore(tmp_path, limit=1)  # another server, which is not the parent of the process
    assert [each.state for each in other.list()] == ["running"]
    other.cancel(other.get(run.identifier))
    wait(lambda: run.state == "stopped")
    wait(lambda: (run.folder / "exit.json").exists())

    other.resume(other.get(run.identifier))
    assert run.state == "running"
    assert run.log.count("KeyboardInterrupt") == 1
    runs.cancel(run, at_once=True)
    wait(lambda: run.state == "stopped")
    runs.cancel(run)  # of a run that ended: nothing happens


def test_a_server_that_dies_does_not_end_its_runs(tmp_path, sleeper):
    """The lock belongs to the process of the run: it holds while that lives, and no longer."""
    run = RunStore(tmp_path, limit=1).start(REQUEST, "a", ABOUT, lambda target: [])
    lock = runs_module.os.open(run.folder / "worker.lock", runs_module.os.O_RDWR)
    with pytest.raises(BlockingIOError):
        runs_module.fcntl.flock(lock, runs_module.fcntl.LOCK_EX | runs_module.fcntl.LOCK_NB)
    RunStore(tmp_path, limit=1).cancel(run, at_once=True)
    wait(lambda: not run.alive)
    runs_module.fcntl.flock(lock, runs_module.fcntl.LOCK_EX | runs_module.fcntl.LOCK_NB)
    runs_module.os.close(lock)


def test_a_run_that_failed_shows_what_it_printed(tmp_path, monkeypatch):
    real = runs_module.subprocess.Popen
    code = "print('error: no images'); raise SystemExit(1)"
    monkeypatch.setattr(runs_module.subprocess, "Popen", lambda command, **rest: real([command[0], "-c", code], **rest))
    run = RunStore(tmp_path, limit=1).start(REQUEST, "a", ABOUT, lambda target: ["synth"])
    wait(lambda: run.state == "failed")
    assert "error: no images" in run.log
    assert run.stages == []


@pytest.mark.parametrize("name", ["..", ".", "", "x", "../x", "a/b", "scans-0123456789ab/..", "A", "a" * 90, "a\0"])
def test_a_name_that_is_no_run_is_refused(finished, name):
    with pytest.raises(DataError, match="no such run"):
        RunStore(finished, limit=1).get(name)


def test_a_link_is_no_run(finished, tmp_path):
    (tmp_path / "link").symlink_to(finished / "scans-0123456789ab")
    with pytest.raises(DataError, match="no such run"):
        RunStore(tmp_path, limit=1).get("link")


def test_a_finished_run_is_shown_and_downloaded(finished, data_root, tmp_path):
    from tests.web.conftest import Served

    person = Served(data_root, finished).person()
    assert "finished" in person.client.get("/").text
    page = person.client.get("/runs/scans-0123456789ab")
    assert "Budget spent" in page.text
    assert "ε 500 of 500" in page.text
    status = person.client.get("/runs/scans-0123456789ab/status")
    assert status.headers["x-state"] == "finished"
    report = person.client.get("/runs/scans-0123456789ab/report.html")
    assert "What the guarantee means" in report.text
    assert "sandbox" in report.headers["content-security-policy"]
    stored = next(finished.glob("*/*/certificate.json")).read_bytes()
    assert person.client.get("/runs/scans-0123456789ab/certificate.json").content == stored
    picture = person.client.get("/runs/scans-0123456789ab/samples.png")
    assert picture.headers["content-type"] == "image/png"
    answer = person.client.get("/runs/scans-0123456789ab/all.zip")
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        archive.extractall(tmp_path)
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert "synthetic-012345/ledger.lock" not in names
    assert verify(tmp_path / "synthetic-012345" / "certificate.json", max_epsilon=500).ok
    assert person.post("/runs/scans-0123456789ab/resume").status_code == 409
    assert "ε 500 so far" in person.client.get("/new?folder=ward/scans&size=8").text


@pytest.mark.parametrize("name", ["report.html", "samples.png"])
def test_a_file_that_was_exchanged_is_not_sent(finished, data_root, tmp_path, name):
    """Also one that was exchanged for a link to another file."""
    from tests.web.conftest import Served

    runs = shutil.copytree(finished, tmp_path / "runs")
    path = runs / "scans-0123456789ab" / "synthetic-012345" / name
    person = Served(data_root, runs).person()
    for content in (b"<script>alert(1)</script>", None):
        path.unlink()
        if content is None:
            path.symlink_to(next((data_root / "ward" / "scans").rglob("*.png")))
            assert person.client.get("/runs/scans-0123456789ab/all.zip").status_code == 404
        else:
            path.write_bytes(content)
        answer = person.client.get(f"/runs/scans-0123456789ab/{name}")
        assert answer.status_code == 404
        assert "not what the certificate covers" in answer.text


def test_other_files_of_a_run_are_not_served(finished, data_root):
    from tests.web.conftest import Served

    person = Served(data_root, finished).person()
    inside = [path.relative_to(finished).as_posix() for path in finished.rglob("*") if path.is_file()]
    wanted = {"report.html", "samples.png", "certificate.json"}
    for name in [*inside, "scans-0123456789ab/../../x", "scans-0123456789ab/job.json", "..%2f..%2fetc/passwd"]:
        answer = person.client.get(f"/runs/{name}")
        assert answer.status_code == 404 or name.rpartition("/")[2] in wanted, name


def test_the_job_of_a_run_is_on_disk_before_it_starts(tmp_path, sleeper):
    run = RunStore(tmp_path, limit=1).start(REQUEST, "a", ABOUT, lambda target: ["synth", str(target)])
    job = json.loads((run.folder / "job.json").read_text("utf-8"))
    assert job["arguments"][1] == str(run.output)
    runs_module.os.kill(json.loads((run.folder / "worker.pid").read_text("utf-8")), 9)
    wait(lambda: run.state == "stopped")
