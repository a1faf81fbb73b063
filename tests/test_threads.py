"""Threads: chosen from affinity and quota, before PyTorch is imported, unless the user has chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sfumato import threads

PROGRAM = """
import os, sfumato
print(os.environ["OMP_NUM_THREADS"], os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))
"""


def started(*arguments: str, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "SFUMATO_"))}
    kept["PYTHONPATH"] = str(Path(threads.__file__).parents[1])
    done = subprocess.run([*arguments], env={**kept, **variables}, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr


def test_an_import_chooses_threads_that_sleep() -> None:
    assert started(sys.executable, "-c", PROGRAM) == f"{threads.usable_cores()} PASSIVE None"


def test_what_the_user_has_set_is_kept() -> None:
    assert started(sys.executable, "-c", PROGRAM, OMP_NUM_THREADS="7", GOMP_SPINCOUNT="9") == "7 None 9"
    assert started(sys.executable, "-c", PROGRAM, OMP_WAIT_POLICY="ACTIVE").endswith("ACTIVE None")
    assert started(sys.executable, "-c", PROGRAM, SFUMATO_THREADS="3", OMP_NUM_THREADS="7") == "3 PASSIVE None"
    assert "must be an integer from 1, got 'many'" in started(sys.executable, "-c", PROGRAM, SFUMATO_THREADS="many")


def test_the_option_wins() -> None:
    program = (
        "import sys; from sfumato import cli; cli.data_list = None; sys.argv[1:] = ['--threads', '2', 'data', 'list']"
    )
    program += "\ntry: cli.main()\nexcept SystemExit: pass\nimport torch; print('threads', torch.get_num_threads())"
    assert started(sys.executable, "-c", program, SFUMATO_THREADS="1").endswith("threads 2")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_affinity_counts() -> None:
    def on_one_core() -> None:
        os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])

    command = [sys.executable, "-c", "from sfumato.threads import usable_cores; print(usable_cores())"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=on_one_core)
    assert done.stdout == "1\n"


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/gone/elsewhere\n", {"cpu.max": "200000 100000"}, 2.0),
        ("4:memory:/a\n2:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000"}, 0.5),
        ("1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_quota_us": "300000"}, 3.0),
        ("1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "nonsense"}, None),
        ("", {}, None),
    ],
)
def test_quotas(tmp_path: Path, membership: str, files: dict[str, str], cores: float | None) -> None:
    root = tmp_path / "cgroup"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
        if "quota" in name:
            (root / name).with_name("cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "self").write_text(membership)
    assert threads._quota(tmp_path / "self", root) == cores
    assert threads._quota(tmp_path / "missing", root) is None


def test_threads_are_lowered_where_pytorch_is_imported_already(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", threads.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: 1)
    torch.set_num_threads(2)
    try:
        assert threads.choose_threads() == 1 == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
