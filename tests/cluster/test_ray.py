"""A real local Ray cluster: the same bytes for any number of workers, killed workers, a full store, silence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sfumato
from sfumato import sweep
from sfumato.certificate.dataset_budget import DatasetBudget
from sfumato.cluster import ClusterVault, connect, open_shards, ray_cluster
from sfumato.cluster.ray_cluster import warn_about_security
from sfumato.cluster.worker import ShardError
from sfumato.data import DataError, DataWarning, ImageSet
from sfumato.privacy.vault import RedactedError
from tests.cluster.conftest import make_answers, vault_of

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


def kill_a_worker_during(cluster: Any, seconds: float, number: int = 0) -> threading.Thread:
    victim = cluster.pids()[number]

    def kill() -> None:
        time.sleep(seconds)
        os.kill(victim, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.usefixtures("replayed")
def test_a_killed_worker_changes_no_byte(shards: Path, cluster: Any, capfd: pytest.CaptureFixture[str]) -> None:
    expected = vault_of(open_shards(shards, classes=10)).sum(slowly, release="sum", bound=1.0)
    images = open_shards(shards, classes=10, cluster=cluster)
    vault, before = vault_of(images), cluster.pids()
    thread = kill_a_worker_during(cluster, 0.2)
    answer = vault.sum(slowly, release="sum", bound=1.0)
    thread.join()
    assert torch.equal(answer, expected)
    assert cluster.pids() != before
    assert vault.ledger.charged("sum") == 1
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""  # Ray's own messages are not shown


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


@pytest.mark.slow
def test_an_image_that_ends_each_worker_voids_the_run(
    shards: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers load a crash by the pickle of the query, which tracing would never let through."""
    vault = vault_of(open_shards(shards, classes=10, cluster=cluster))
    monkeypatch.setattr(cluster, "_pack", lambda _: CRASH)
    with pytest.raises(RedactedError, match="WorkersDied"):
        vault.counts()
    assert vault.ledger.void is not None


@pytest.mark.slow
@pytest.mark.usefixtures("replayed")
def test_both_workers_killed_change_no_byte(shards: Path, cluster: Any) -> None:
    expected = vault_of(open_shards(shards, classes=10)).sum(slowly, release="sum", bound=1.0)
    vault = vault_of(open_shards(shards, classes=10, cluster=cluster))
    threads = [kill_a_worker_during(cluster, 0.2, number) for number in range(2)]
    answer = vault.sum(slowly, release="sum", bound=1.0)
    for thread in threads:
        thread.join()
    assert torch.equal(answer, expected)


DRIVER = """
import os, signal, sys
import sfumato as sf
from sfumato.cluster import ClusterVault
from sfumato.engine.kept_results import KeptResults
folder, source, cluster, when = sys.argv[1:]
if when == "before noise":
    ClusterVault._noised = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if when == "before commit":
    KeptResults.put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
model = sf.create("dp-merf", epsilon=5.0, features=40, steps=2, batch_size=10)
with sf.open_shards(source, classes=10, cluster=None if cluster == "none" else cluster) as images:
    model.fit(images, run_dir=folder, resume=when == "resume")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "where"), [("before noise", "none"), ("before commit", "none"), ("before noise", "local")]
)
def test_a_killed_driver_loses_no_charge(shards: Path, tmp_path: Path, when: str, where: str) -> None:
    folder = tmp_path / "run"

    def run(moment: str) -> int:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {"PYTHONPATH": str(Path(sfumato.__file__).parents[1])}
        command = [sys.executable, "-W", "ignore", "-c", DRIVER, str(folder), str(shards), where, moment]
        return subprocess.run(command, env=environment, check=False).returncode

    assert run(when) == -signal.SIGKILL
    charged = (folder / "ledger.jsonl").read_text().count('"charge"')
    assert charged == 1
    assert (folder / "releases.log").read_bytes() == b""  # no exact or partial sum is on disk
    assert run("resume") == 0
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    names = [line["name"] for line in lines if line["kind"] == "charge"]
    assert sorted(names) == sorted(release["name"] for release in lines[0]["plan"])  # each is charged once
    assert sfumato.verify(folder / "certificate.json")


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
