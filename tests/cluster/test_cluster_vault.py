"""The vault over shards in this process: the sums of the plain vault, samples by key, persons over shards, faults."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sfumato as sf
from sfumato.cluster import ClusterVault, open_shards, ray_cluster
from sfumato.cluster.executors import InProcess
from sfumato.cluster.shard_records import ShardRecords, keyed_generator, keyed_uniforms
from sfumato.cluster.worker import Entry, Partial, ShardError, Task, Worker, code_digest
from sfumato.data import DataError, ImageSet
from sfumato.data import shards as shards_module
from sfumato.engine import GradientVault
from sfumato.privacy import Budget, Plan, Release
from sfumato.privacy.vault import RedactedError, Vault
from sfumato.testing import check_unit_variance
from tests.cluster.conftest import RELEASES, make_answers, pixels, vault_of

pytestmark = pytest.mark.filterwarnings("ignore:.*holds fewer than:sfumato.data.DataWarning")


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "SHARDS", 5)


def people(digits: ImageSet, persons: torch.Tensor) -> ImageSet:
    return ImageSet(digits.images, digits.labels, digits.classes, persons=persons)


@pytest.mark.parametrize("unit", ["image", "person"])
def test_sums_are_those_of_the_plain_vault(digits: ImageSet, unit: Any) -> None:
    data = people(digits, torch.arange(60) % 11) if unit == "person" else digits
    plain = GradientVault(data, Plan(RELEASES, Budget(math.inf, unit=unit)))
    sharded = vault_of(open_shards(data), unit)
    assert torch.equal(plain.counts(), sharded.counts())
    one, other = (vault.sum(pixels, release="sum", bound=4.0, by_class=True) for vault in (plain, sharded))
    assert torch.allclose(one, other, atol=1e-4)
    one, other = (vault.map(pixels).sum(torch.sin, release="sampled", bound=9.0) for vault in (plain, sharded))
    assert one.shape == other.shape


def test_gradients_are_those_of_the_plain_vault(digits: ImageSet) -> None:
    plan = Plan((Release("g", 9, noise_multiplier=0.0),), Budget(math.inf))
    network = torch.nn.Linear(64, 10)

    def loss(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(images.flatten(1)), labels, reduction="none")

    vaults = GradientVault(digits, plan), ClusterVault(open_shards(digits), plan)
    one, other = (vault.gradient(network, loss, release="g", bound=0.5, with_labels=True) for vault in vaults)
    for name in one:
        assert torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("replayed")
def test_the_order_of_shards_and_repeated_work_change_no_byte(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = make_answers()
    expected = ask(vault_of(open_shards(shards, classes=10, person="person"), "person"))

    class Restless(InProcess):
        def total(self, task: Task, entries: Any) -> Iterator[Any]:
            for entry in reversed(entries):
                Worker().total(task, entry)  # lost
                yield Worker().total(task, entry)  # of a worker that holds nothing yet

    images = open_shards(shards, classes=10, person="person")
    images.executor = Restless()
    for one, other in zip(expected, ask(vault_of(images, "person")), strict=True):
        assert torch.equal(one, other)


# -- samples ----------------------------------------------------------------------------------------------


def test_uniforms_are_a_function_of_key_and_unit() -> None:
    key, units = b"k" * 16, torch.tensor([5, 300, 5, 7, 100_000])
    found = keyed_uniforms(key, units)
    assert found[0] == found[2]
    assert torch.equal(keyed_uniforms(key, units.flip(0)), found.flip(0))
    assert torch.equal(keyed_uniforms(key, units[3:]), found[3:])
    assert not torch.isin(keyed_uniforms(b"l" * 16, units), found).any()
    assert len(keyed_uniforms(key, units[:0])) == 0
    many = torch.cat([keyed_uniforms(bytes([number] * 16), torch.arange(2000)) for number in range(20)])
    check_unit_variance((many - 0.5) * math.sqrt(12) * 1.0)
    by_key = many.reshape(20, 2000)
    pairs = torch.corrcoef(torch.cat([by_key, by_key.roll(1, 1)]))[:20]
    assert float((pairs - torch.eye(40)[:20]).abs().max()) < 0.15


def test_a_generator_depends_on_its_purpose() -> None:
    draws = {float(keyed_generator(b"k" * 16, *purpose).random()) for purpose in (("a", 1), ("a", 2), ("b", 1))}
    assert len(draws) == 3


def test_each_query_has_a_fresh_poisson_sample(digits: ImageSet) -> None:
    """Sums of ones are sample sizes; a key that is used twice would give the same size each time."""
    vault = vault_of(open_shards(digits))

    def ones(images: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(images), 1)

    sizes = torch.tensor([float(vault.sum(ones, release="sampled", bound=1.0)) for _ in range(150)])
    check_unit_variance((sizes.double() - 18) / math.sqrt(60 * 0.3 * 0.7))
    assert len(sizes.unique()) > 5


def test_a_person_is_in_a_sample_with_all_images_in_all_shards(digits: ImageSet) -> None:
    marked = ImageSet(torch.zeros(60, 1, 8, 8, dtype=torch.uint8), digits.labels, digits.classes)
    persons = torch.arange(60) % 6
    marked.images.flatten(1)[torch.arange(60), persons] = 255
    vault = vault_of(open_shards(people(marked, persons)), "person")
    assert len(vault._entries) == 5
    for _ in range(30):
        share = (vault.sum(lambda images: (images.flatten(1) + 1) / 2, release="sampled", bound=8.0)).round(decimals=3)
        assert set(share[:6].tolist()) <= {0.0, 1.0}
        assert not share[6:].any()


def test_draws_of_a_query_share_no_numbers() -> None:
    rows = shards_module.FileRows((1,), "float32")
    rows.write(0, torch.zeros(4, 1).numpy())
    ones = torch.ones(4, dtype=torch.float64)
    some = ShardRecords(rows, None, torch.arange(4), ones, None, 0, b"k" * 16, torch.device("cpu"))
    other = ShardRecords(rows, None, torch.arange(4), ones, None, 1, b"k" * 16, torch.device("cpu"))
    draws = [some._generator().random(), some._generator().random(), other._generator().random()]
    assert len(set(draws)) == 3


# -- sensitivity ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("secure", [True, False])
def test_one_person_over_several_shards_moves_a_sum_by_at_most_the_sensitivity(
    digits: ImageSet, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.Tensor, float]] = []

    def noised(self: ClusterVault, release: Release, exact: torch.Tensor, sensitivity: float, _: bool) -> torch.Tensor:
        seen.append((exact.double(), sensitivity))
        return exact.double()

    monkeypatch.setattr(ClusterVault, "_noised", noised)
    generator = torch.Generator().manual_seed(3)
    largest = 0.0
    for _ in range(12):
        persons = torch.randint(0, 9, (60,), generator=generator)
        persons[:9] = torch.arange(9)
        extreme = torch.where(persons == 8, 255, 0)[:, None, None, None].byte()
        images = digits.images * (persons != 8)[:, None, None, None] + extreme
        data = ImageSet(images, digits.labels, digits.classes, persons=persons)
        seen.clear()
        for some in (data, data.subset(persons != 8)):
            vault = vault_of(open_shards(some), "person", secure=secure, max_per_person=60)
            vault.sum(pixels, release="sum", bound=1.0, by_class=True)
        (one, sensitivity), (other, same) = seen
        assert sensitivity == same
        moved = float((one - other).norm()) / sensitivity
        assert moved <= 1
        largest = max(largest, moved)
    assert largest > 0.3


# -- faults -----------------------------------------------------------------------------------------------


def stale(results: list[Any]) -> list[Any]:
    return [Partial("an earlier query", results[0].number, results[0].sha256, results[0].total), *results[1:]]


def other_content(results: list[Any]) -> list[Any]:
    return [Partial(results[0].task, results[0].number, "0" * 64, results[0].total), *results[1:]]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda results: [*results, results[0]], "twice"),
        (lambda results: results[1:], "the sums of 1 shards are missing"),
        (stale, "another query"),
        (other_content, "another shard"),
        (lambda results: [replace(results[0], total=torch.zeros(1)), *results[1:]], "another shape"),
    ],
)
def test_a_wrong_set_of_partials_releases_nothing(digits: ImageSet, fault: Any, words: str) -> None:
    class Faulty(InProcess):
        def total(self, task: Task, entries: Any) -> Iterator[Any]:
            return iter(fault(list(super().total(task, entries))))

    images = open_shards(digits)
    images.executor = Faulty()
    vault = vault_of(images)
    with pytest.raises(ShardError, match=f"{words}.*Nothing was released"):
        vault.sum(pixels, release="sum", bound=1.0)
    assert vault.ledger.charged("sum") == 1
    assert vault.ledger.void is None
    with pytest.raises(sf.BudgetExceeded):
        vault.sum(pixels, release="sum", bound=1.0)


def test_an_error_on_an_image_voids_the_run_and_is_withheld(digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    vault = vault_of(open_shards(digits))

    def fail(*_: Any) -> None:
        raise ValueError("pixel 17 is 254")

    monkeypatch.setattr(ShardRecords, "_pixels", fail)
    with pytest.raises(RedactedError) as caught:
        vault.sum(pixels, release="sum", bound=1.0)
    assert "254" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert vault.ledger.void is not None


def test_a_worker_with_another_program_is_refused(digits: ImageSet) -> None:
    images = open_shards(digits)
    images.executor._worker = Worker("another digest")  # type: ignore[attr-defined]
    with pytest.raises(ShardError, match="another version of sfumato, Python, torch"):
        vault_of(images).counts()
    with pytest.raises(DataError, match="another version of sfumato, Python, torch"):
        ray_cluster._Actor.compute(images.executor._worker, b"")  # type: ignore[attr-defined]


@pytest.mark.parametrize("version", ["numpy.__version__", "PIL.__version__", "torch.__version__", "platform"])
def test_the_program_includes_its_libraries(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another NumPy may draw other numbers from the same key, and another Pillow may skip other files."""
    before = code_digest.__wrapped__()
    assert code_digest.__wrapped__() == before
    if version == "platform":
        monkeypatch.setattr("platform.python_version", lambda: "4.0.0")
    else:
        monkeypatch.setattr(version, "0.0")
    assert code_digest.__wrapped__() != before


def test_a_worker_computes_under_the_flags_of_the_vault(digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    original = ShardRecords._pixels

    def look(self: ShardRecords, index: torch.Tensor) -> torch.Tensor:
        seen.append((torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark))
        return original(self, index)

    vault = vault_of(open_shards(digits))
    monkeypatch.setattr(ShardRecords, "_pixels", look)
    monkeypatch.setattr(Vault, "_void_on_failure", lambda _, compute: compute())  # as on a worker of a cluster
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False):
        vault.counts()
    assert set(seen) == {(True, False)}


def test_two_maps_at_once_do_not_mix_rows(digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads ask one worker; maps are traced before, because PyTorch traces in one thread only."""
    images = open_shards(digits)
    steps = [vault_of(images).map(each)._images.steps for each in (pixels, torch.square)]
    worker, entry = Worker(), vault_of(images)._entries[0]
    inside, most = threading.Semaphore(2), [0]
    original = ShardRecords.map_to_file

    def watch(self: ShardRecords, *args: Any) -> Any:
        inside.acquire()
        time.sleep(0.01)  # time for the other thread to enter
        most[0] = max(most[0], 2 - inside._value)
        inside.release()
        return original(self, *args)

    monkeypatch.setattr(ShardRecords, "map_to_file", watch)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda each: worker.map(each, "cpu", entry), steps))
    assert most == [1]
    assert all(isinstance(each, Partial) for each in found)
    held = worker._held[entry.owner, entry.number]
    plain = held.pixels[torch.arange(entry.records)].float() / 127.5 - 1
    for (step,), expected in zip(steps, (plain.flatten(1), plain.square()), strict=True):
        assert torch.equal(held.mapped[step.identity][torch.arange(entry.records)], expected)


def test_a_worker_without_a_gpu_stops_the_run_in_words(digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    vault = vault_of(open_shards(digits))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sfumato.cluster.cluster_vault.Task", lambda *args: Task(*args[:8], "cuda", *args[9:]))
    with pytest.raises(ShardError, match="is on a worker without a GPU"):
        vault.counts()
    assert vault.ledger.void is None


def test_raw_images_are_not_handed_out(digits: ImageSet) -> None:
    vault = vault_of(open_shards(digits))
    with pytest.raises(ValueError, match="cannot use shards"):
        vault.unprotected("to look at them")
    assert vault.ledger.void is None
    with pytest.raises(ValueError, match="cannot use shards"):
        sf.create("dm").fit(open_shards(digits))


def test_another_number_of_records_in_the_same_bytes_voids_the_run(digits: ImageSet) -> None:
    """A worker that was started again skipped an image that it could read before: that depends on the image."""
    images = open_shards(digits)
    wrong = [Entry(e.owner, e.number, e.shard, e.reading, e.on_error, e.sha256, e.records - 1) for e in images.entries]
    images.entries = tuple(wrong)
    vault = vault_of(images)
    with pytest.raises(RedactedError):
        vault.sum(pixels, release="sum", bound=1.0)
    assert vault.ledger.void is not None


# -- a whole run ------------------------------------------------------------------------------------------


def test_a_method_on_shards(shards: Path, tmp_path: Path) -> None:
    model = sf.create("dp-merf", epsilon=5.0, features=40, steps=2, batch_size=10)
    model.fit(sf.open_shards(shards, classes=10), run_dir=tmp_path / "run")
    assert sf.verify(tmp_path / "run" / "certificate.json")
    assert model.sample(10).shape == (1, 8, 8)
    assert not list((tmp_path / "run").glob("*partial*"))


def test_a_person_has_at_most_so_many_images_over_all_shards(digits: ImageSet) -> None:
    vault = vault_of(open_shards(people(digits, torch.arange(60) % 6)), "person", max_per_person=4)
    units = torch.cat([entry.units for entry in vault._entries])  # type: ignore[misc]
    weights = torch.cat([entry.weights for entry in vault._entries])  # type: ignore[misc]
    for person in range(6):
        own = weights[units == person]
        assert int((own > 0).sum()) == 4
        assert float(own.sum()) == pytest.approx(1)
    assert float(vault.counts().sum()) == pytest.approx(6, abs=1e-3)
