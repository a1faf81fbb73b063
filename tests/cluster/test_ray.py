"""A real local Ray cluster: the same bytes for any number of workers, killed workers, a full store, silence."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import sfumato
from sfumato import sweep
from sfumato.certificate.dataset_budget import DatasetBudget
from sfumato.cluster import ClusterVault, connect, open_shards, ray_cluster
from sfumato.cluster.ray_cluster import warn_about_security
from sfumato.cluster.worker import Entry, ShardError, WorkersDied
from sfumato.data import DataError, DataWarning, ImageSet
from sfumato.privacy import Ledger
from sfumato.privacy.vault import RedactedError
from tests.cluster.conftest import make_answers, pixels, vault_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*holds fewer than:sfumato.data.DataWarning",
    "ignore::ResourceWarning",  # sockets of Ray
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


CRASH = b"cos\nabort\n(tR."  # a pickle that ends the process


def slowly(images: torch.Tensor) -> torch.Tensor:
    """Take most of a second for a shard of 20 images."""
    rows = images.flatten(1).repeat(1, 8)
    for _ in range(60):
        rows = torch.tanh(rows @ torch.eye(512))
    return rows


def busy_workers(method: str) -> set[int]:
    """Return the workers of this process's clusters that are in the middle of a call; Ray names processes by it."""
    parents, busy = {}, set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (folder / "cmdline").read_bytes().startswith(f"ray::_Actor.{method}".encode()):
                busy.add(int(folder.name))
    return {pid for pid in busy if parents.get(parents[pid]) == os.getpid()}  # a child of the raylet, which is ours


class Killer(threading.Thread):
    """Kill a worker in the middle of a call, and so many others: those that were started again."""

    def __init__(self, method: str, cluster: Any, times: int = 1) -> None:
        super().__init__()
        self.method, self.times, self.others, self.killed = method, times, set(cluster.pids()), list[int]()
        self.start()

    def run(self) -> None:
        end = time.monotonic() + 300
        while len(self.killed) < self.times and time.monotonic() < end:
            busy = busy_workers(self.method)
            if found := busy - self.others if self.killed else busy & self.others:
                time.sleep(0.05)
                os.kill(min(found), signal.SIGKILL)
                self.killed.append(min(found))
                self.others.add(min(found))
            time.sleep(0.005)


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_worker_killed_in_the_middle_of_a_shard_changes_no_byte(
    shards: Path, cluster: Any, times: int, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = vault_of(open_shards(shards, classes=10)).sum(slowly, release="sum", bound=1.0)
    images = open_shards(shards, classes=10, cluster=cluster)
    vault, killer = vault_of(images), Killer("total", cluster, times)
    answer = vault.sum(slowly, release="sum", bound=1.0)
    killer.join()
    assert len(killer.killed) == times
    assert not set(killer.killed) & set(cluster.pids())
    assert torch.equal(answer, expected)
    assert vault.ledger.charged("sum") == 1
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""  # Ray's own messages are not shown


def test_partials_of_real_workers_count_once(shards: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker returns the sum of an earlier query again, and then one sum twice."""
    vault, original, seen = vault_of(open_shards(shards, classes=10, cluster=cluster)), cluster.total, list[Any]()

    def total(*given: Any) -> Iterator[Any]:
        seen.append(list(original(*given)))
        return iter([*seen[0][:1], *seen[1][1:]] if len(seen) == 2 else [*seen[-1], seen[-1][0]])

    def kept(*given: Any) -> Iterator[Any]:
        seen.append(list(original(*given)))
        return iter(seen[0])

    monkeypatch.setattr(cluster, "total", kept)
    vault.counts()
    monkeypatch.setattr(cluster, "total", total)
    with pytest.raises(ShardError, match=r"sum of another query.*Nothing was released"):
        vault.sum(pixels, release="sum", bound=1.0)
    with pytest.raises(ShardError, match=r"a shard twice.*Nothing was released"):
        vault.sum(pixels, release="sampled", bound=1.0)
    assert [vault.ledger.charged(name) for name in ("counts", "sum", "sampled")] == [1, 1, 10]
    assert vault.ledger.void is None


def test_workers_leave_nothing_in_the_log_files_of_ray(shards: Path, cluster: Any, tmp_path: Path) -> None:
    """Also not of libtiff, which prints to file descriptor 2 what is wrong with a file."""
    vault = vault_of(open_shards(shards, classes=10, cluster=cluster))
    make_answers()(vault)
    with pytest.warns(DataWarning, match="left out"):
        assert len(open_shards(broken_tiff(tmp_path), classes=2, cluster=cluster, on_error="skip")) == 11
    assert list(cluster.compute(warn, [("60 images",)])) == [0]
    folder = Path(cluster._ray._private.worker._global_node.get_session_dir_path()) / "logs"
    logs = [path for pid in cluster.pids() for path in folder.glob(f"worker-*-{pid}.*")]
    assert {path.suffix for path in logs} == {".out", ".err"}
    lines = [line for path in logs for line in path.read_text().splitlines()]
    assert [line for line in lines if not line.startswith((":job_id:", ":actor_name:"))] == []


def broken_tiff(folder: Path) -> Path:
    """Write a shard of twelve TIFF files, the sixth of which is truncated."""
    with tarfile.open(folder / "w-0.tar", "w") as archive:
        for number in range(12):
            buffer = io.BytesIO()
            Image.fromarray(np.full((8, 8), number, np.uint8)).save(buffer, "TIFF", compression="tiff_lzw")
            content = buffer.getvalue()[: -30 if number == 5 else None]
            label = json.dumps({"label": number % 2}).encode()
            for suffix, data in (("tif", content), ("json", label)):
                member = tarfile.TarInfo(f"{number:05}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return folder


def warn(text: str) -> int:
    """Warn, and return the limit on the size of a core dump."""
    warnings.warn(text, stacklevel=1)
    return resource.getrlimit(resource.RLIMIT_CORE)[0]


def test_core_dumps_are_forbidden() -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    if before[1] == 0:
        pytest.skip("this process may not have core dumps")
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        ray_cluster.forbid_core_dumps()
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


def test_images_that_fill_the_store_are_refused_before_the_ledger_is_open(
    digits: ImageSet, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query that failed for want of room would tell how many images there are, after a charge."""
    images = open_shards(digits.subset(range(30)), cluster=cluster)
    stored: list[Any] = []
    put = cluster._ray.put

    def counted(value: Any) -> Any:
        stored.append(value)
        return put(value)

    monkeypatch.setattr(cluster._ray, "put", counted)
    vault = vault_of(images)
    assert any(isinstance(value, Entry) for value in stored)
    stored.clear()
    vault.counts()
    assert not any(isinstance(value, Entry) for value in stored)

    def full(value: Any) -> Any:
        raise cluster._ray.exceptions.ObjectStoreFullError

    monkeypatch.setattr(cluster._ray, "put", full)
    ledger = Ledger()
    with pytest.raises(ShardError, match="memory of the cluster is full"):
        vault_of(images, ledger=ledger)
    assert ledger.entries == []


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("unit", ["image", "person"])
def test_workers_in_processes_give_the_same_bytes(shards: Path, cluster: Any, unit: Any) -> None:
    person, ask = "person" if unit == "person" else None, make_answers()
    expected = ask(vault_of(open_shards(shards, classes=10, person=person), unit))
    found = ask(vault_of(open_shards(shards, classes=10, person=person, cluster=cluster), unit))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_two_image_sets_on_one_cluster_are_not_mixed_up(shards: Path, digits: ImageSet, cluster: Any) -> None:
    first, second = (
        open_shards(each, cluster=cluster) for each in (digits.subset(range(30)), digits.subset(range(20)))
    )
    assert [float(vault_of(each).counts().sum()) for each in (first, second, first)] == [30, 20, 30]
    first.close()
    assert float(vault_of(second).counts().sum()) == 20


def test_a_full_object_store_stops_the_run_in_words(shards: Path, cluster: Any) -> None:
    vault = vault_of(open_shards(shards, classes=10, cluster=cluster))
    large = torch.zeros(400_000_000, dtype=torch.uint8)
    with pytest.raises(ShardError, match=r"memory of the cluster is full.*Nothing was released"):
        vault.sum(lambda images, constant: images.flatten(1) + constant[0], release="sum", bound=1.0, constants=[large])
    assert vault.ledger.charged("sum") == 1
    assert vault.ledger.void is None
    assert vault.counts().shape == (10,)  # the cluster works on


def test_a_shard_that_is_gone_stops_the_run_in_words(shards: Path, cluster: Any) -> None:
    images = open_shards(shards, classes=10, cluster=cluster)
    vault = vault_of(images)
    cluster._ray.get([actor.forget.remote(images.entries[0].owner) for actor in cluster._actors])
    (shards / "w-002.tar").unlink()
    with pytest.raises(ShardError, match=r"w-002\.tar cannot be read.*Nothing was released"):
        vault.counts()


def test_a_ray_of_other_code_is_not_used(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster._ray.is_initialized()
    monkeypatch.setattr(ray_cluster, "_started", set())  # as if other code had called ray.init
    for address in ("local", "auto"):
        with pytest.raises(DataError, match=r"already initialised in this process.*Call ray\.shutdown"):
            connect(address)


def test_a_small_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would put its object store on disk, and say so in a warning that is not shown."""
    monkeypatch.setattr(ray_cluster.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    monkeypatch.setattr(ray_cluster, "SHARED_MEMORY", Path("/"))
    with pytest.raises(DataError, match=r"has 64 MiB free, and a local cluster needs 256 MiB.*--shm-size"):
        ray_cluster.check_shared_memory(256 << 20)
    ray_cluster.check_shared_memory(64 << 20)


def test_weights_that_change_in_place_travel_again(digits: ImageSet, cluster: Any) -> None:
    vault, weight = vault_of(open_shards(digits, cluster=cluster)), torch.ones(64)
    mapped = vault.map(lambda images: images.flatten(1) * 0 + weight)

    def feature(images: torch.Tensor) -> torch.Tensor:
        return (images.flatten(1) * 0 + weight)[:, :1]

    def ask(which: ClusterVault) -> float:  # a sample may be empty
        return max(round(float(which.sum(feature, release="sampled", bound=100.0)), 3) for _ in range(2)) / 18

    assert 0 < ask(vault) < 3
    weight.fill_(50.0)
    assert ask(vault) > 10
    cluster._ray.get([actor.forget.remote(vault._entries[0].owner) for actor in cluster._actors])
    again = mapped.sum(lambda rows: rows[:, :1], release="sum", bound=100.0)
    assert float(again) == pytest.approx(60, abs=0.1)  # a map that is repeated is the map that was applied


@pytest.mark.parametrize(
    ("tls", "mode", "words"),
    [
        ("0", "", r"without TLS .* and a token"),
        ("1", "", "without a token"),
        ("0", "token", "without TLS"),
        ("1", "token", ""),
    ],
)
def test_an_open_cluster_gives_a_warning(tls: str, mode: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", tls)
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    if not words:
        return warn_about_security("ray://head:10001")
    with pytest.warns(DataWarning, match=words):
        warn_about_security("ray://head:10001")


def test_a_connection_gives_that_warning_and_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try for minutes; so it is not called."""
    monkeypatch.setattr(ray_cluster, "_import_ray", lambda _: SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # it does not listen
        for scheme in ("ray://", ""):
            with (
                pytest.warns(DataWarning, match="without TLS.* can read private images"),
                pytest.raises(DataError, match=r"cannot be reached or started: .*refused"),
            ):
                connect(f"{scheme}127.0.0.1:{closed.getsockname()[1]}")


def test_what_ray_prints_when_it_connects_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: Any) -> None:
        os.write(2, b"gcs_client.cc:210: Unauthenticated")  # as compiled code does
        raise ConnectionError("it has another token")

    fake = SimpleNamespace(is_initialized=lambda: False, init=refuse)
    monkeypatch.setattr(ray_cluster, "_import_ray", lambda _: fake)
    monkeypatch.setattr(ray_cluster, "warn_about_security", lambda _: None)
    with pytest.raises(DataError, match="the cluster auto cannot be reached or started: it has another token"):
        connect("auto")
    os.write(2, b"shown")
    assert capfd.readouterr().err == "shown"


def test_the_token_of_a_local_cluster_is_not_one_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RAY_USE_TLS", "1"), ("RAY_AUTH_MODE", "token"), ("RAY_AUTH_TOKEN", ray_cluster.TOKEN)):
        monkeypatch.setenv(name, value)
    with pytest.warns(DataWarning, match="without a token"):
        warn_about_security("auto")


@pytest.mark.slow
@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("workers", [1, 7])
def test_one_and_seven_workers_give_the_same_bytes(
    digits: ImageSet, cluster: Any, workers: int, tmp_path: Path
) -> None:
    ask = make_answers()
    expected = ask(vault_of(open_shards(digits, manifest=tmp_path / "manifest.json")))
    cluster.pids()
    more = connect("local", workers=workers)
    try:
        found = ask(vault_of(open_shards(digits, cluster=more, manifest=tmp_path / "manifest.json")))
    finally:
        more.close()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["ActorDiedError", "OutOfMemoryError"])
def test_the_end_of_workers_is_not_taken_for_a_fault_of_machines(name: str) -> None:
    """An image may cause it, by the memory that it takes: the run is then void, which a `ShardError` would not do."""
    errors = pytest.importorskip("ray").exceptions
    with pytest.raises(WorkersDied), ray_cluster._translate_ray_errors():
        raise getattr(errors, name)("")


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_an_image_that_ends_each_worker_voids_the_run(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers load a crash by the pickle of the query, which tracing would never let through."""
    monkeypatch.setattr(ray_cluster, "RETRIES", 1)
    fragile = connect("local", workers=1)
    try:
        vault = vault_of(open_shards(shards, classes=10, cluster=fragile))
        monkeypatch.setattr(fragile, "_pack", lambda _: CRASH)
        with pytest.raises(RedactedError, match="WorkersDied"):
            vault.counts()
        assert vault.ledger.void is not None
    finally:
        fragile.close()


DRIVER = """
import os, signal, sys
from pathlib import Path
import sfumato as sf
from sfumato.cluster import ClusterVault, cluster_vault
from sfumato.engine.kept_results import KeptResults
folder, source, cluster, when, seen = sys.argv[1:]
collect = cluster_vault.collect
def watched(*given):
    partials = collect(*given)
    for partial in partials:
        Path(seen, str(len(os.listdir(seen)))).write_bytes(partial.numpy().tobytes())
    return partials
cluster_vault.collect = watched
if when == "before noise":
    ClusterVault._noised = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if when == "before commit":
    KeptResults.put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
model = sf.create("dp-merf", epsilon=5.0, features=40, steps=2, batch_size=10)
with sf.open_shards(source, classes=10, cluster=None if cluster == "none" else cluster) as images:
    model.fit(images, run_dir=folder, resume=when == "resume")
"""


def mentioned(text: str) -> bool:
    """Return whether the command line of a process contains a text."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "where"), [("before noise", "none"), ("before noise", "local"), ("before commit", "local")]
)
def test_a_killed_driver_loses_no_charge_and_leaves_no_sum(
    shards: Path, tmp_path_factory: pytest.TempPathFactory, when: str, where: str
) -> None:
    disk, seen = tmp_path_factory.mktemp("d"), tmp_path_factory.mktemp("s")  # short names: Ray makes sockets there
    folder = disk / "run"

    def run(moment: str) -> int:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {"PYTHONPATH": str(Path(sfumato.__file__).parents[1])}
        environment |= {"TMPDIR": str(disk), "RAY_TMPDIR": str(disk)}
        command = [sys.executable, "-W", "ignore", "-c", DRIVER, str(folder), str(shards), where, moment, str(seen)]
        return subprocess.run(command, env=environment, check=False).returncode

    assert run(when) == -signal.SIGKILL
    charged = (folder / "ledger.jsonl").read_text().count('"charge"')
    assert charged == 1
    assert (folder / "releases.log").read_bytes() == b""
    end = time.monotonic() + 120
    while mentioned(str(disk)):
        assert time.monotonic() < end, "the cluster outlives its driver"
        time.sleep(0.5)
    written = b"".join(path.read_bytes() for path in disk.rglob("*") if path.is_file())
    assert bool(list(disk.glob("ray/session_*/logs/raylet.out"))) == (where == "local")
    partials = [path.read_bytes() for path in seen.iterdir()]
    assert len(partials) == 3
    assert not [each for each in partials if each in written]  # no exact sum is on disk
    assert run("resume") == 0
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    names = [line["name"] for line in lines if line["kind"] == "charge"]
    assert sorted(names) == sorted(release["name"] for release in lines[0]["plan"])  # each is charged once
    assert sfumato.verify(folder / "certificate.json")


@pytest.mark.slow
def test_runs_of_a_comparison_are_spread_over_workers(digits: ImageSet, cluster: Any, tmp_path: Path) -> None:
    """Private images: each run is charged to the budget of the data set once, also when the sweep is made again."""
    quick = {"features": 60, "steps": 3, "batch_size": 20, "device": "cpu"}
    chosen = sweep.cells(tmp_path / "out", ["dp-merf"], [1.0], 2, quick, {})
    (tmp_path / "out").mkdir()
    DatasetBudget.open(tmp_path / "b.budget", 10.0, 1e-5)
    held_out = sfumato.load_images("digits", split="test").subset(range(50))
    options: dict[str, Any] = {"number": 20, "budget": tmp_path / "b.budget"}
    lines: list[str] = []
    for _ in range(2):
        assert sweep.run_cells(chosen, digits, held_out, report=lines.append, executor=cluster, **options) == {}
    assert [line.endswith("already there") for line in lines] == [False, False, True, True]
    assert all(sfumato.verify(cell.folder / "certificate.json") for cell in chosen)
    assert len(DatasetBudget(tmp_path / "b.budget").rows()) == 2
