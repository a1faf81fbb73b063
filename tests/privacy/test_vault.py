"""The vault: clips, charges before it looks, noises, hands out nothing else."""

from __future__ import annotations

import copy
import math
import pickle
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato.data import ImageSet
from sfumato.methods.check import check_unit_variance
from sfumato.privacy import Budget, BudgetExceeded, Certificate, Ledger, LedgerError, Release, Vault
from sfumato.privacy import vault as module
from sfumato.privacy.sampling import shuffled


@dataclass
class Floats:
    """Records that are not uint8, so that NaN can occur."""

    images: torch.Tensor
    labels: torch.Tensor | None
    classes: tuple[str, ...] = ("a", "b", "c")


def records(count: int = 40, seed: int = 0) -> Floats:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, 4, 4, generator=generator) * 5
    return Floats(images, torch.arange(count) % 2)


def pixels(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1)


def silent(release: Release) -> Release:
    """No noise, so that exact sums can be looked at; such a vault promises nothing."""
    return Release(release.name, release.times, release.sampling_prob, 0.0, nonnegative=release.nonnegative)


def exact(data: Any, feature: Any = pixels, *, secure: bool = False, **options: Any) -> torch.Tensor:
    release = Release("x", noise_multiplier=0.0, nonnegative=options.pop("nonnegative", False))
    vault = Vault(data, Budget(math.inf), [release], secure=secure, batch_size=7)
    return vault.sum(feature, release="x", bound=1.0, **options)


# -- what is summed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True])
def test_sums_are_sums_of_clipped_rows(secure: bool) -> None:
    data = records()
    rows = data.images.flatten(1).double()
    rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1)
    assert torch.allclose(exact(data, secure=secure).double(), rows.sum(0), atol=1e-3)
    by_class = exact(data, secure=secure, by_class=True).double()
    assert by_class.shape == (3, 16)
    for label in range(3):
        assert torch.allclose(by_class[label], rows[data.labels == label].sum(0), atol=1e-3)


def test_uint8_images_arrive_as_pixels_between_minus_one_and_one(few_digits: ImageSet) -> None:
    kinds = []

    def feature(images: torch.Tensor) -> torch.Tensor:
        kinds.append(images.dtype)
        return images.flatten(1) / 100

    expected = (few_digits.images.flatten(1).double() / 127.5 - 1).sum(0) / 100
    assert torch.allclose(exact(few_digits, feature).double(), expected, atol=1e-3)
    assert set(kinds) == {torch.float32}


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_count_as_zero(bad: float, secure: bool) -> None:
    data = records()
    more = Floats(torch.cat([data.images, torch.full((1, 1, 4, 4), bad)]), torch.cat([data.labels, torch.tensor([1])]))
    for options in ({}, {"nonnegative": True}):
        before, after = (exact(d, secure=secure, by_class=True, **options) for d in (data, more))
        assert torch.equal(before, after)


@pytest.mark.parametrize("secure", [False, True])
def test_nonnegative_is_enforced(secure: bool) -> None:
    assert (exact(records(), nonnegative=True, secure=secure) >= 0).all()
    assert (exact(records(), secure=secure) < 0).any()


def test_counts_are_counts() -> None:
    release = Release("counts", noise_multiplier=0.0, nonnegative=True)
    assert Vault(records(41), Budget(math.inf), [release]).counts() == pytest.approx([21, 20, 0], abs=1e-2)
    unlabelled = Floats(records().images, None, ("all",))
    assert Vault(unlabelled, Budget(math.inf), [release]).counts() == pytest.approx([40], abs=1e-2)


def test_map_is_a_vault_over_transformed_records() -> None:
    data = records()
    vault = Vault(data, Budget(1), [Release("x")])
    mapped = vault.map(lambda images: images.flatten(1)[:, :3] * 2)
    assert mapped.ledger is vault.ledger
    mapped.sum(pixels, release="x", bound=1.0)
    with pytest.raises(BudgetExceeded):  # one ledger for both
        vault.sum(pixels, release="x", bound=1.0)
    silent_vault = Vault(data, Budget(math.inf), [Release("x", noise_multiplier=0.0)])
    direct = exact(data, lambda images: images.flatten(1)[:, :3] * 2)
    through = silent_vault.map(lambda images: images.flatten(1)[:, :3] * 2).sum(pixels, release="x", bound=1.0)
    assert torch.allclose(direct, through, atol=1e-3)


# -- neighbours: record and replay at the vault ---------------------------------------------------------


def neighbours() -> list[tuple[str, Floats, Floats, str]]:
    data = records()
    image = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(9)) * 100

    def with_one(base: Floats, extra: torch.Tensor, label: int) -> Floats:
        assert base.labels is not None
        return Floats(torch.cat([base.images, extra]), torch.cat([base.labels, torch.tensor([label])]))

    assert data.labels is not None
    less = Floats(data.images[:-1], data.labels[:-1])
    nothing = Floats(data.images[:0], data.labels[:0])
    return [
        ("add", data, with_one(data, image, 1), "add-remove"),
        ("remove", data, less, "add-remove"),
        ("add to an empty class", data, with_one(data, image, 2), "add-remove"),
        ("a NaN image", data, with_one(data, torch.full((1, 1, 4, 4), math.nan), 0), "add-remove"),
        ("one against none", with_one(nothing, image, 0), nothing, "add-remove"),
        ("replace", data, with_one(less, image, 1), "replace-one"),
        ("replace by the opposite", with_one(less, image, 1), with_one(less, -image, 1), "replace-one"),
        ("replace and change class", data, with_one(less, image, 2), "replace-one"),
    ]


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize("case", neighbours(), ids=lambda case: case[0])
def test_one_record_moves_a_sum_by_at_most_what_is_declared(
    case: Any, nonnegative: bool, by_class: bool, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, one, other, adjacency = case
    seen: list[tuple[torch.Tensor, float]] = []

    def record(self: Vault, release: Release, total: torch.Tensor, radius: float, form: bool) -> torch.Tensor:
        seen.append((total.clone(), radius))
        return torch.zeros_like(total)

    monkeypatch.setattr(Vault, "_noised", record)
    release = Release("x", nonnegative=nonnegative)
    for data in (one, other):
        vault = Vault(data, Budget(1, adjacency=adjacency), [release], secure=secure, batch_size=7)
        vault.sum(pixels, release="x", bound=0.7, by_class=by_class)
    (a, radius), (b, same) = seen
    assert radius == same
    assert float((a - b).norm()) <= radius * release.shift(adjacency)


def test_an_empty_poisson_sample_is_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "poisson_sample", lambda records, probability: torch.arange(0))
    vault = Vault(records(), Budget(1), [Release("x", 300, 0.01)])
    answer = vault.sum(pixels, release="x", bound=1.0, by_class=True)
    assert answer.shape == (3, 16)
    noise = torch.cat([vault.sum(pixels, release="x", bound=1.0) for _ in range(100)])
    check_unit_variance(noise.double() / vault.plan["x"].noise)


def test_sampled_sums_use_a_fresh_poisson_sample_each_time() -> None:
    """Sums of ones are sample sizes: their variance tells Poisson from shuffling."""
    vault = Vault(records(500), Budget(math.inf), [Release("x", 300, 0.2, 0.0)])
    sizes = torch.tensor(
        [float(vault.sum(lambda i: torch.ones(len(i), 1), release="x", bound=1.0)) for _ in range(300)]
    )
    check_unit_variance((sizes.double() - 100) / math.sqrt(80))


# -- noise ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True])
def test_noise_is_what_the_plan_says(secure: bool) -> None:
    data = Floats(torch.zeros(3, 1, 20, 20), torch.zeros(3, dtype=torch.int64))
    vault = Vault(data, Budget(1), [Release("x"), Release("y", weight=3)], secure=secure)
    for name in ("x", "y"):
        answer = vault.sum(pixels, release=name, bound=0.5, by_class=True)
        check_unit_variance(answer.double() / (0.5 * vault.plan[name].noise))


def test_nothing_that_leaves_carries_a_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(16))
    data = records()
    data.images.requires_grad_(True)
    vault = Vault(data, Budget(1), [Release("x"), Release("counts"), Release("y", 5, 0.5)])
    for answer in (
        vault.sum(lambda images: images.flatten(1) * weight, release="x", bound=1.0),
        vault.counts(),
        vault.sum(lambda images: images.flatten(1) * weight, release="y", bound=1.0),
    ):
        assert not answer.requires_grad
        assert answer.grad_fn is None


@pytest.mark.filterwarnings("ignore:.*jit.script:DeprecationWarning")
def test_no_derivative_passes_the_vault() -> None:
    """A graph that the feature turns on, a forward-mode tangent, a differentiable bound: none gets through."""
    import torch.autograd.forward_ad as forward

    weight = torch.nn.Parameter(torch.ones(16))
    vault = Vault(records(), Budget(1), [Release("x", 10, 0.5), Release("y")])

    def graph(images: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return images.flatten(1) * weight

    for name in ("x", "y"):
        assert not vault.sum(graph, release=name, bound=1.0).requires_grad
    with forward.dual_level():
        dual = forward.make_dual(torch.ones(16), torch.ones(16))
        answer = vault.sum(lambda images: images.flatten(1) * dual, release="x", bound=1.0)
        assert forward.unpack_dual(answer).tangent is None
    _, tangent = torch.func.jvp(
        lambda w: vault.sum(lambda images: images.flatten(1) * w, release="x", bound=1.0),
        (torch.ones(16),),
        (torch.ones(16),),
    )
    assert not tangent.any()
    bound = torch.nn.Parameter(torch.tensor(100.0))
    with pytest.raises(ValueError, match="bound must be a number"):
        vault.sum(pixels, release="x", bound=bound)  # type: ignore[arg-type]


# -- charges ----------------------------------------------------------------------------------------------


class Untouchable:
    """Images that tell when they are read."""

    classes = ("a", "b")

    def __init__(self) -> None:
        self.labels = torch.zeros(5, dtype=torch.int64)
        self.touched = False
        outer = self

        class Guard(torch.Tensor):
            def __getitem__(self, index: Any) -> torch.Tensor:
                outer.touched = True
                return super().__getitem__(index)

        self.images = torch.zeros(5, 1, 4, 4).as_subclass(Guard)


def test_budget_overrun_raises_before_a_pixel_is_read() -> None:
    data = Untouchable()
    with pytest.raises(BudgetExceeded, match="need epsilon"):
        Vault(data, Budget(1), [Release("x", noise_multiplier=1.0)])
    vault = Vault(data, Budget(1), [Release("x", 2)])
    for _ in range(2):
        vault.sum(pixels, release="x", bound=1.0)
    assert data.touched
    data.touched = False
    for attempt in (
        lambda: vault.sum(pixels, release="x", bound=1.0),
        lambda: vault.sum(pixels, release="z", bound=1.0),
        lambda: vault.sum(pixels, release="x", bound=1.0, noise_multiplier=0.1),
        lambda: vault.sum(pixels, release="x", bound=1.0, sampling_prob=0.5),
    ):
        with pytest.raises(BudgetExceeded):
            attempt()
    assert not data.touched


def test_the_charge_is_on_disk_before_a_record_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    state = []

    def feature(images: torch.Tensor) -> torch.Tensor:
        state.append('"charge"' in path.read_text())
        return images.flatten(1)

    with Ledger(path) as ledger:
        Vault(records(), Budget(1), [Release("x")], ledger=ledger).sum(feature, release="x", bound=1.0)
    assert state[:4] == [False] * 4  # public probes come first
    assert len(state) > 4
    assert all(state[4:])


def test_a_failing_ledger_stops_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Untouchable()
    vault = Vault(data, Budget(1), [Release("x")])

    def full(kind: str, **fields: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(vault.ledger, "append", full)
    with pytest.raises(OSError, match="disk full"):
        vault.sum(pixels, release="x", bound=1.0)
    assert not data.touched


def test_long_runs_reserve_blocks_and_forfeit_at_most_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        vault = Vault(records(), Budget(1), [Release("x", 1000, 0.1)], ledger=ledger)
        for _ in range(25):
            vault.sum(pixels, release="x", bound=1.0)
        assert vault.remaining("x") == 975
        assert len(ledger.entries) == 1 + 3
    with Ledger(path) as ledger:
        vault = Vault(records(), Budget(1), [Release("x", 1000, 0.1)], ledger=ledger)
        assert ledger.charged("x") == 30
        assert vault.remaining("x") == 970
        for _ in range(970):
            vault.sum(pixels, release="x", bound=1.0)
        with pytest.raises(BudgetExceeded):
            vault.sum(pixels, release="x", bound=1.0)
        assert Certificate.from_ledger(ledger).events[0]["times"] == 1000


def test_resuming_pays_once_and_keeps_the_noise(tmp_path: Path) -> None:
    path, keep = tmp_path / "ledger.jsonl", tmp_path / "releases"
    answers = []
    for _ in range(2):
        with Ledger(path) as ledger:
            vault = Vault(records(), Budget(1), [Release("x")], ledger=ledger, keep=keep)
            answers.append(vault.sum(pixels, release="x", bound=1.0))
            assert ledger.charged("x") == 1
    assert torch.equal(*answers)
    (keep / "x.safetensors").write_bytes(b"edited")
    with Ledger(path) as ledger, pytest.raises(LedgerError, match="not what was stored"):
        Vault(records(), Budget(1), [Release("x")], ledger=ledger, keep=keep).sum(pixels, release="x", bound=1.0)


def test_a_kept_result_answers_its_own_question_only(tmp_path: Path) -> None:
    vault = Vault(records(), Budget(1), [Release("x")], ledger=Ledger(tmp_path / "l.jsonl"), keep=tmp_path / "kept")
    vault.sum(pixels, release="x", bound=1.0)
    vault.sum(pixels, release="x", bound=1.0)
    for other in ({"bound": 2.0}, {"bound": 1.0, "by_class": True}):
        with pytest.raises(BudgetExceeded, match="another question"):
            vault.sum(pixels, release="x", **other)  # type: ignore[arg-type]
    vault.ledger.close()


def test_rows_may_be_plain_numbers() -> None:
    vault = Vault(records(), Budget(1), [Release("x")])
    assert vault.sum(lambda images: images.flatten(1).sum(1), release="x", bound=1.0).shape == (1,)


def test_a_result_lost_in_a_crash_stays_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, keep = tmp_path / "ledger.jsonl", tmp_path / "releases"

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with Ledger(path) as ledger, monkeypatch.context() as patch:
        vault = Vault(records(), Budget(1), [Release("x")], ledger=ledger, keep=keep)
        patch.setattr(vault, "_noised", crash)
        with pytest.raises(KeyboardInterrupt):
            vault.sum(pixels, release="x", bound=1.0)
    with Ledger(path) as ledger:
        vault = Vault(records(), Budget(1), [Release("x")], ledger=ledger, keep=keep)
        with pytest.raises(BudgetExceeded, match="lost in a crash"):
            vault.sum(pixels, release="x", bound=1.0)
        assert Certificate.from_ledger(ledger).epsilon == pytest.approx(1, rel=1e-3)


def test_a_closed_or_forked_ledger_pays_for_nothing() -> None:
    """Not even for what a block has reserved."""
    ledger = Ledger()
    vault = Vault(records(), Budget(1), [Release("x", 1000, 0.1)], ledger=ledger)
    vault.sum(pixels, release="x", bound=1.0)
    ledger._owner += 1  # as a forked process sees it
    with pytest.raises(LedgerError, match="forked"):
        vault.sum(pixels, release="x", bound=1.0)
    ledger._owner -= 1
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        vault.sum(pixels, release="x", bound=1.0)
    with pytest.raises(LedgerError, match="closed"):
        vault.unprotected("late")


def test_threads_do_not_share_a_charge() -> None:
    from concurrent.futures import ThreadPoolExecutor

    vault = Vault(records(), Budget(1), [Release("x", 60, 0.1)])

    def ask(_: int) -> bool:
        try:
            vault.sum(pixels, release="x", bound=1.0)
        except BudgetExceeded:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, range(100))) == 60


def test_a_ledger_serves_one_plan_only(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        Vault(records(), Budget(1), [Release("x")], ledger=ledger)
    for budget, release, field in (
        (Budget(2), Release("x"), "epsilon"),
        (Budget(1, 1e-6), Release("x"), "delta"),
        (Budget(1), Release("x", 2), "plan"),
    ):
        with Ledger(path) as ledger, pytest.raises(LedgerError, match=f"another {field}"):
            Vault(records(), budget, [release], ledger=ledger)


def test_unprotected_voids_the_guarantee_for_good(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        vault = Vault(records(), Budget(1), [Release("x")], ledger=ledger)
        with pytest.raises(ValueError, match="say why"):
            vault.unprotected("")
        images, labels = vault.unprotected("as published")
        assert "as published" in path.read_text()
        assert images.shape == (40, 1, 4, 4)
        assert labels is not None
    with Ledger(path) as ledger:
        Vault(records(), Budget(1), [Release("x")], ledger=ledger).sum(pixels, release="x", bound=1.0)
        certificate = Certificate.from_ledger(ledger)
    assert certificate.guarantee == "none"
    assert certificate.epsilon is None
    assert certificate.void == "as published"


# -- row-wise ---------------------------------------------------------------------------------------------


def by_class(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Centred by the batch's own class means, as somebody may write who means public ones."""
    rows = images.flatten(1)
    members = torch.nn.functional.one_hot(labels, 7).float()
    means = members.T @ rows / members.sum(0).clamp_min(1)[:, None]
    return rows - means[labels]


def attention(images: torch.Tensor) -> torch.Tensor:
    rows = images.flatten(1)
    return (rows @ rows.T).softmax(1) @ rows


def mixing() -> dict[str, Any]:
    norm = torch.nn.BatchNorm2d(1)
    frozen = torch.nn.BatchNorm2d(1, momentum=0.0)
    return {
        "batch norm in training mode": lambda images: norm(images).flatten(1),
        "batch norm that remembers nothing": lambda images: frozen(images).flatten(1),
        "centring by the batch": lambda images: (images - images.mean(0)).flatten(1),
        "centring by the median": lambda images: (images - images.median(0).values).flatten(1),
        "centring by one median": lambda images: (images - images.median()).flatten(1),
        "scaling by the maximum": lambda images: (images / images.abs().max()).flatten(1),
        "scaling along the batch": lambda images: torch.nn.functional.normalize(images.flatten(1), dim=0),
        "the neighbour's row": lambda images: images.roll(1, 0).flatten(1),
        "the other end's row": lambda images: images.flip(0).flatten(1),
        "mixup": lambda images: (0.5 * images + 0.5 * images.flip(0)).flatten(1),
        "attention": attention,
        "sorting": lambda images: images.flatten(1).sort(0).values,
        "sums of those before": lambda images: images.flatten(1).cumsum(0),
        "fresh randomness": lambda images: images.flatten(1) + torch.randn_like(images.flatten(1)),
        "one row for all": lambda images: images.flatten(1).sum(0, keepdim=True),
        "the darkest pixel": lambda images: (images - images.min()).flatten(1),
        "constant pixels": lambda images: (images * (images.std(0, correction=0) > 1e-6)).flatten(1),
        "a guess at the range": lambda images: ((images + 1) / 2 if images.min() < 0 else images).flatten(1),
        "class centring": by_class,
        "class present": lambda images, labels: (
            torch.nn.functional.one_hot(labels, 7).amax(0).expand(len(images), 7) * 5.0
        ),
    }


@pytest.mark.parametrize("classes", [1, 2, 7])
@pytest.mark.parametrize("size", [1, 7, 128])
@pytest.mark.parametrize("name", mixing())
def test_features_that_mix_records_are_refused_or_made_harmless(name: str, size: int, classes: int) -> None:
    """Refused before anything is read or charged; or one record moves the sum by its own row only."""
    data = Floats(records(60).images, torch.arange(60) % classes, tuple("abcdefg"[:classes]))
    data.images[7] = 50  # one that would be seen in any statistic
    others = torch.arange(60) != 7
    less = Floats(data.images[others], (torch.arange(60) % classes)[others], data.classes)
    options: dict[str, Any] = {"with_labels": True} if name.startswith("class") else {}

    def total(private: Floats) -> torch.Tensor:
        release = Release("x", noise_multiplier=0.0)
        vault = Vault(private, Budget(math.inf), [release], secure=False, batch_size=size)
        try:
            return vault.sum(mixing()[name], release="x", bound=1.0, **options)
        except ValueError:
            assert vault.ledger.charged("x") == 0
            return torch.zeros(1)

    assert (total(data) - total(less)).norm() <= 1 + 1e-4


def test_plain_mistakes_are_told() -> None:
    """Rows are computed one by one anyway; somebody who thought otherwise should hear of it."""
    for name in ("batch norm in training mode", "centring by the batch", "mixup", "attention", "fresh randomness"):
        data = Untouchable()
        vault = Vault(data, Budget(1), [Release("x")])
        with pytest.raises(ValueError, match="one by one"):
            vault.sum(mixing()[name], release="x", bound=1.0)
        assert not data.touched
        assert vault.ledger.charged("x") == 0


class LastBatch:
    """Mixes with the batch before, unless its shape has changed."""

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if self.kept is None or self.kept.shape != images.shape:
            self.kept = images
        mixed = ((images + self.kept) / 2).flatten(1)
        self.kept = images
        return mixed


class Average(LastBatch):
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        mean = images.flatten(1).mean(0)
        self.kept = mean if self.kept is None else 0.9999 * self.kept + 0.0001 * mean
        return images.flatten(1) - self.kept


@pytest.mark.parametrize("memory", [LastBatch, Average])
def test_a_memory_of_earlier_images_is_refused(memory: Any) -> None:
    with pytest.raises(ValueError, match="one by one"):
        Vault(records(), Budget(1), [Release("x")]).sum(memory(), release="x", bound=1.0)


@pytest.mark.parametrize("memory", [LastBatch, Average])
@pytest.mark.parametrize("count", [40, 300])
def test_a_memory_that_comes_within_a_block_is_refused_too(memory: Any, count: int) -> None:
    vault = Vault(records(count), Budget(1), [Release("x", 1000)])
    vault.sum(pixels, release="x", bound=1.0)
    late = memory()

    def ask(times: int) -> None:
        for _ in range(times):
            vault.sum(late, release="x", bound=1.0)

    with pytest.raises(RuntimeError, match="failed on private images"):
        ask(3)


def test_what_a_feature_says_of_private_images_is_not_passed_on() -> None:
    data = records()
    calls = 0

    def telling(images: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise ValueError(f"what is this? {images.shape} 123.25")
        return images.flatten(1)

    with pytest.raises(RuntimeError, match="failed on private images with a ValueError") as caught:
        Vault(data, Budget(1), [Release("x")]).sum(telling, release="x", bound=1.0)
    assert calls == 5
    assert "123.25" not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


class Lazy:
    """Computes rows at every tenth step and gives the old ones in between."""

    def __init__(self) -> None:
        self.step, self.rows = 0, torch.zeros(0)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if self.step % 10 == 0:
            self.rows = images.flatten(1)
        return self.rows


@pytest.mark.parametrize("beside", [False, True])
def test_rows_of_an_earlier_call_are_refused(beside: bool) -> None:
    """Also where another release between them takes every second turn."""
    vault = Vault(records(), Budget(1), [Release("x", 1000), Release("y", 1000)])
    lazy = Lazy()

    def ask() -> None:
        for lazy.step in range(9):
            vault.sum(lazy, release="x", bound=1.0)
            if beside:
                vault.sum(lambda images: images.flatten(1), release="y", bound=1.0)

    with pytest.raises(RuntimeError, match="failed on private images"):
        ask()


def test_a_feature_that_counts_its_calls_is_refused() -> None:
    calls = 0

    def counting(images: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.softmax(images.flatten(1) * (1 + 1e-3 * calls), 1)

    state = torch.ones(16)  # as networks in training mode have one

    def turning(images: torch.Tensor) -> torch.Tensor:
        state.mul_(1.001)
        return images.flatten(1) * state

    for feature in (counting, turning):
        with pytest.raises(ValueError, match="another row when it is asked again"):
            Vault(records(), Budget(1), [Release("x")]).sum(feature, release="x", bound=1.0)


def test_a_feature_is_tried_on_every_class() -> None:
    """So that a table that is too short fails before an image is read, whichever classes there are."""
    data = Floats(torch.zeros(3, 1, 4, 4), torch.tensor([0, 1, 2]), tuple("abcdefghij"))
    table = torch.zeros(6, 16)
    vault = Vault(data, Budget(1), [Release("x")])
    with pytest.raises(ValueError, match="out of bounds"):
        vault.sum(lambda x, labels: x.flatten(1) + table[labels], release="x", bound=1.0, with_labels=True)
    assert vault.ledger.charged("x") == 0


def test_a_feature_that_makes_rounding_large_is_refused() -> None:
    """Filters that sum to zero leave nothing of plain images but rounding, and normalising makes that a direction."""
    filters = torch.randn(784, 11, generator=torch.Generator().manual_seed(0))
    filters -= filters.mean(0)
    plain = torch.rand(300, 1, 1, 1, generator=torch.Generator().manual_seed(1)).expand(-1, 1, 28, 28)
    vault = Vault(Floats(plain, None, ("all",)), Budget(1), [Release("x")])

    def sensitive(images: torch.Tensor) -> torch.Tensor:
        """As a device would round that works otherwise at another place: by what is nothing but rounding."""
        return torch.nn.functional.normalize(pixels(images) @ filters, eps=0.0)

    rows = [sensitive(plain[:size])[-1] for size in (1, 7, 64, 300)]
    if all(torch.equal(rows[0], row) for row in rows):
        pytest.skip("this machine rounds alike at all places")
    with pytest.raises(ValueError, match="rounding errors large"):
        vault.sum(sensitive, release="x", bound=1.0)
    assert vault.ledger.charged("x") == 0


class Longer:
    """Adds the images of three calls ago: batches of a pass have every third size again."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.kept.append(images)
        far = len(self.kept) > 8
        return pixels(images + self.kept[-4] if far else images)


def test_a_longer_memory_meets_the_public_image_and_shows() -> None:
    vault = Vault(records(200), Budget(1), [Release("x")], batch_size=10)
    with pytest.raises(RuntimeError, match=r"changes from call to call|failed on private images"):
        vault.sum(Longer(), release="x", bound=1.0)


def test_a_feature_may_write_to_what_it_is_given() -> None:
    def halved(images: torch.Tensor) -> torch.Tensor:
        return pixels(images.clone().mul_(0.5))

    def in_place(images: torch.Tensor) -> torch.Tensor:
        return pixels(images.mul_(0.5))

    assert torch.allclose(exact(records(), in_place), exact(records(), halved), atol=1e-5)


def test_a_newcomer_displaces_one_record() -> None:
    """What the proof says of a random order: that of n + 1 is that of n with one moved to the end."""
    orders = {tuple(shuffled(torch.arange(4)).tolist()) for _ in range(2000)}
    assert len(orders) == 24
    made = set()
    for order in {tuple(o for o in longer if o != 3) for longer in orders}:
        for place in range(4):
            longer = [*order, -1]
            longer[-1], longer[place] = longer[place], 3
            made.add(tuple(o for o in longer if o != -1))
    assert made == orders


class Schedule:
    """Another filter at every tenth call, by an author who takes a call for a query."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return pixels(images).roll(self.calls // 10, 1)


def test_a_feature_that_changes_within_a_sum_is_refused() -> None:
    vault = Vault(records(200), Budget(1), [Release("x", 100)], batch_size=10)
    with pytest.raises(RuntimeError, match="changes from call to call"):
        vault.sum(Schedule(), release="x", bound=1.0)


def test_batch_norm_in_eval_mode_is_fine() -> None:
    norm = torch.nn.BatchNorm2d(1).eval()
    exact(records(), lambda images: norm(images).flatten(1))


@pytest.mark.parametrize("secure", [False, True])
def test_a_features_own_tensors_are_left_alone(secure: bool) -> None:
    """Rows may be a view of something that the feature keeps."""
    kept = torch.full((100, 16), 5.0, dtype=torch.float64)
    exact(records(), lambda images: kept[: len(images)], secure=secure)
    assert (kept == 5).all()


def test_a_feature_may_not_change_its_width() -> None:
    calls = 0

    def changing(images: torch.Tensor, after: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return images.flatten(1) if calls <= 4 else after(images.flatten(1))  # four for the check

    vault = Vault(records(), Budget(1), [Release("x", 5)])
    with pytest.raises(ValueError, match="rows are 3 wide, 16 on random images"):
        vault.sum(lambda i: changing(i, lambda rows: rows[:, :3]), release="x", bound=1.0)
    calls = 0
    with pytest.raises(RuntimeError, match="failed on private images with a ValueError"):
        vault.sum(lambda i: changing(i, lambda rows: rows[:0]), release="x", bound=1.0)


@pytest.mark.parametrize("count", [1, 7, 8, 20])
def test_blank_images_that_fill_a_batch_do_not_count(count: int) -> None:
    rows = records(count).images.flatten(1) + 3
    rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1)
    assert torch.allclose(exact(records(count), lambda images: images.flatten(1) + 3), rows.sum(0), atol=1e-3)


def test_long_runs_are_checked_when_a_block_begins() -> None:
    vault = Vault(records(), Budget(1), [Release("x", 300)])
    calls = []

    def counting(images: torch.Tensor) -> torch.Tensor:
        calls.append(len(images))
        return pixels(images)

    for queries, charged, called in ((1, 3, 5), (2, 3, 6), (3, 3, 7), (4, 6, 12)):  # the check calls four times
        vault.sum(counting, release="x", bound=1.0)
        assert (queries, vault.ledger.charged("x"), len(calls)) == (queries, charged, called)
    between = vault.sum(lambda images: (images - images.mean(0)).flatten(1), release="x", bound=1e-6)
    assert vault.ledger.charged("x") == 6  # not tried out, and harmless: an image less itself is nothing
    assert between.shape == (16,)


def test_a_network_that_is_put_into_training_mode_is_refused_within_a_block() -> None:
    network = torch.nn.Sequential(torch.nn.BatchNorm2d(1), torch.nn.Flatten())
    for feature in (network, network.forward, lambda images: network(images)):
        vault = Vault(records(), Budget(1), [Release("x", 300)])
        network.eval()
        vault.sum(feature, release="x", bound=1.0)
        network.train()
        with pytest.raises(RuntimeError, match="failed on private images"):
            vault.sum(feature, release="x", bound=1.0)
        assert torch.equal(network[0].running_mean, torch.zeros(1))


# -- labels, and a probability per class --------------------------------------------------------------------


def test_features_may_see_labels() -> None:
    data = records()

    def feature(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) * (labels == 1)[:, None]

    by_label = exact(data, feature, by_class=True, with_labels=True)
    assert torch.equal(by_label[0], torch.zeros(16))
    assert torch.allclose(by_label[1], exact(data, by_class=True)[1], atol=1e-4)
    unlabelled = Floats(data.images, None, ("all",))
    assert torch.equal(exact(unlabelled, feature, with_labels=True), torch.zeros(16))
    with pytest.raises(ValueError, match="one by one"):
        exact(data, lambda images, labels: images.flatten(1) - labels.float().mean(), with_labels=True)


def shared_vault(probability: float = 0.5, times: int = 400) -> Vault:
    count = 200
    data = Floats(torch.ones(count, 1, 1, 1), torch.arange(count) % 2, ("a", "b"))
    return Vault(data, Budget(math.inf), [Release("x", times, probability, 0.0)])


def test_a_probability_for_each_class_is_the_one_that_is_drawn_with() -> None:
    vault = shared_vault()
    sums = [
        vault.sum(pixels, release="x", bound=1.0, by_class=True, sampling_prob=[0.5, 0.1])[:, 0] for _ in range(400)
    ]
    mean = torch.stack(sums).mean(0)  # of 100 images a class: 50 and 10, with deviations of .25 and .15
    assert mean == pytest.approx([50, 10], abs=1.6)


@pytest.mark.parametrize("shares", [[0.5, 0.6], [0.5], [0.5, 0.0], [0.5, -0.1], [0.5, math.nan], [0.2, 0.2, 0.2]])
def test_no_class_may_be_drawn_more_often_than_planned(shares: list[float]) -> None:
    vault = shared_vault()
    with pytest.raises(BudgetExceeded, match="probability for each of 2 classes"):
        vault.sum(pixels, release="x", bound=1.0, by_class=True, sampling_prob=shares)
    assert vault.ledger.charged("x") == 0


def test_drawing_a_class_less_often_is_no_less_private() -> None:
    """The lemma of the vault's docstring, in numbers: a smaller probability has the smaller divergence everywhere."""
    grid = torch.linspace(-12, 14, 20001, dtype=torch.float64)
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)
    density = normal.log_prob(grid).exp()
    shifted = normal.log_prob(grid - 1).exp()
    back = normal.log_prob(grid + 1).exp()

    def divergence(p: torch.Tensor, q: torch.Tensor, ratio: float) -> float:
        return float(torch.trapezoid((p - ratio * q).clamp_min(0), grid))

    def mixed(share: float, other: torch.Tensor) -> torch.Tensor:
        return (1 - share) * density + share * other

    for ratio in (0.3, 0.8, 1.0, 1.2, 2.0):
        for small in (0.01, 0.1, 0.2):
            added = divergence(mixed(0.3, shifted), density, ratio) + 1e-12
            assert divergence(mixed(small, shifted), density, ratio) <= added
            removed = divergence(density, mixed(0.3, shifted), ratio) + 1e-12
            assert divergence(density, mixed(small, shifted), ratio) <= removed
            most = divergence(mixed(0.3, shifted), mixed(0.3, back), ratio)  # replace-one
            for one, other in ((0.3, small), (small, 0.3), (small, small)):
                assert divergence(mixed(one, shifted), mixed(other, back), ratio) <= most + 1e-12


def test_every_query_is_checked_and_infinity_hides_nothing() -> None:
    vault = Vault(records(), Budget(1), [Release("x", 5)])
    vault.sum(pixels, release="x", bound=1.0)
    with pytest.raises(ValueError, match="mixes the images"):
        vault.sum(lambda images: (images - images.mean(0)).flatten(1), release="x", bound=1.0)

    def infinite(images: torch.Tensor) -> torch.Tensor:
        rows = (images - images.mean(0)).flatten(1)
        rows[0, 0] = math.inf
        return rows

    with pytest.raises(ValueError, match="NaN or infinity on random images"):
        vault.sum(infinite, release="x", bound=1.0)


def test_a_transform_may_not_drop_records() -> None:
    """Labels would then belong to other images."""
    data = records()
    data.images[3] = 0
    with pytest.raises(ValueError, match="one by one"):
        Vault(data, Budget(1), [Release("x")]).map(lambda images: images[images.flatten(1).std(1) > 1e-3])


def test_modules_that_keep_statistics_are_refused() -> None:
    norm = torch.nn.Sequential(torch.nn.InstanceNorm2d(1, track_running_stats=True, momentum=1.0), torch.nn.Flatten())
    with pytest.raises(ValueError, match="one by one"):
        Vault(records(), Budget(1), [Release("x")]).sum(norm, release="x", bound=1.0)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (None, ("a", "b")),
        (torch.zeros(39, dtype=torch.int64), ("a",)),
        (torch.zeros(40), ("a",)),
        (torch.full((40,), 3), ("a", "b", "c")),
        (torch.full((40,), -1), ("a", "b", "c")),
    ],
)
def test_labels_must_put_each_record_into_one_class(labels: torch.Tensor | None, classes: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="labels"):
        Vault(Floats(records().images, labels, classes), Budget(1), [Release("x")])


def test_facts_cannot_speak_for_the_plan() -> None:
    with pytest.raises(ValueError, match="delta"):
        Vault(records(), Budget(1), [Release("x")], facts={"delta": 1e-3})


@pytest.mark.parametrize("name", ["../x", "a/b", "", "a b", "x" * 65])
def test_release_names_are_plain(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        Release(name)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf, 1e-300, 1e300])
def test_bad_bounds_are_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="bound"):
        Vault(records(), Budget(1), [Release("x")]).sum(pixels, release="x", bound=bound)


def test_a_vault_does_not_travel() -> None:
    vault = Vault(records(), Budget(1), [Release("x")])
    for leave in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="private images"):
            leave(vault)
    assert "40" not in repr(vault)


@pytest.mark.parametrize("query", ["map", "sum", "gradient"])
def test_code_that_fails_on_an_image_voids_the_promise(query: str, few_digits: ImageSet, tmp_path: Path) -> None:
    """An error is an answer without noise: whether a certain image is there could be asked that way."""
    target = few_digits.images[7].float() / 127.5 - 1
    table = torch.zeros(2)

    def picky(images: torch.Tensor) -> torch.Tensor:
        there = ((images - target).abs().sum((1, 2, 3)) < 1e-3).long()
        return table[there * 5][:, None] + images.flatten(1)[:, :1]

    model = torch.nn.Linear(1, 1)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        vault = Vault(few_digits, Budget(1.0, 1e-5), [Release("r", 5)], ledger=ledger)
        ask = {
            "map": lambda: vault.map(picky),
            "sum": lambda: vault.sum(picky, release="r", bound=1.0),
            "gradient": lambda: vault.gradient(model, lambda m, x: m(picky(x))[:, 0], release="r", bound=1.0),
        }
        with pytest.raises(RuntimeError, match="failed on private images"):
            ask[query]()
        assert Certificate.from_ledger(ledger).guarantee == "none"
    others = few_digits.subset(torch.tensor([place for place in range(61) if place != 7]))
    Vault(others, Budget(1.0, 1e-5), [Release("r", 5)]).map(picky)


@pytest.mark.parametrize("query", ["sum", "gradient"])
@pytest.mark.parametrize("way", ["quietly", "as too little memory"])
def test_an_error_that_is_caught_is_noticed(query: str, way: str, few_digits: ImageSet) -> None:
    """What is done about an operation that fails on one image is done to all of a batch: 60 bounds in place of one."""
    target = few_digits.images[7].float() / 127.5 - 1
    table = torch.zeros(2)

    def sly(images: torch.Tensor) -> torch.Tensor:
        there = ((images - target).abs().sum((1, 2, 3)) < 1e-3).long()
        try:
            table[there * 5]
        except IndexError:
            if way != "quietly":
                raise MemoryError from None
            return images.flatten(1)[:, :1] * 0
        return images.flatten(1)[:, :1] * 0 + 1

    vault = Vault(few_digits, Budget(1.0, 1e-5), [Release("r", 5)])
    model = torch.nn.Linear(1, 1)
    ask = {
        "sum": lambda: vault.sum(sly, release="r", bound=1.0),
        "gradient": lambda: vault.gradient(model, lambda m, x: m(sly(x))[:, 0], release="r", bound=1.0),
    }
    with pytest.raises(RuntimeError, match="failed on private images with a IndexError"):
        ask[query]()
    assert Certificate.from_ledger(vault.ledger).guarantee == "none"


def test_too_little_memory_tells_nothing(few_digits: ImageSet) -> None:
    calls = 0

    def greedy(images: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise MemoryError("allocate 123.25")
        return images.flatten(1)

    vault = Vault(few_digits, Budget(1.0, 1e-5), [Release("r", 5)])
    with pytest.raises(MemoryError, match="more memory") as caught:
        vault.sum(greedy, release="r", bound=1.0)
    assert "123.25" not in str(caught.value)
    assert Certificate.from_ledger(vault.ledger).guarantee != "none"


class BatchWide(torch.autograd.Function):
    """With a rule for vmap of its own, which is given all images."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
        return torch.ones_like(x) * torch.where((x.flatten(1).mean(1) < -0.9).any(), -1.0, 1.0), 0


class Around(torch.autograd.Function):
    """Calls that from inside, forward or backward, and catches what comes of it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, quiet: bool) -> torch.Tensor:
        try:
            return BatchWide.apply(x)  # type: ignore[no-untyped-call, no-any-return]
        except RuntimeError:
            if not quiet:
                raise
            return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * BatchWide.apply(x), None  # type: ignore[no-untyped-call]


class Late(Around):
    """In its backward pass only."""

    @staticmethod
    def forward(x: torch.Tensor, quiet: bool) -> torch.Tensor:
        return x.clone()


class Caught(torch.autograd.Function):
    """Catches an operation that fails on one image, out of sight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.linalg.cholesky(x.mean((1, 2, 3)).view(-1, 1, 1) + 0.9)[:, 0]
        except RuntimeError:
            return x.flatten(1)[:, :1] * 0 - 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


def test_functions_hide_nothing_from_the_vault() -> None:
    images = torch.rand(9, 1, 4, 4)
    images[3] = -1
    vault = Vault(Floats(images, None, ("a",)), Budget(1), [Release("r", 5)])
    with pytest.raises(ValueError, match="rule for vmap"):
        vault.sum(lambda x: BatchWide.apply(x).flatten(1), release="r", bound=1.0)  # type: ignore[no-untyped-call]
    assert not vault.ledger.void
    with pytest.raises(RuntimeError, match="failed on private images"):
        vault.sum(Caught.apply, release="r", bound=1.0)
    assert vault.ledger.void


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("function", [Around, Late])
def test_nor_do_functions_in_functions(function: Any, quiet: bool) -> None:
    """A rule for vmap that is given all images is refused wherever it stands."""
    vault = Vault(Floats(torch.rand(9, 1, 4, 4), None, ("a",)), Budget(1), [Release("r", 5)])
    model = torch.nn.Conv2d(1, 1, 1)

    def loss(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
        return function.apply(model(images), quiet).sum((1, 2, 3))

    with pytest.raises(ValueError, match=r"rule for vmap|kept quiet"):
        vault.gradient(model, loss, release="r", bound=1.0)
    if function is Around:
        with pytest.raises(ValueError, match=r"rule for vmap|kept quiet"):
            vault.sum(lambda x: function.apply(x, quiet).flatten(1), release="r", bound=1.0)


def test_nor_do_operators() -> None:
    @torch.library.custom_op("sfumato_test::wide", mutates_args=())
    def wide(x: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(x)

    wide.register_vmap(lambda info, dims, x: (torch.ones_like(x) * x.mean(), 0))
    vault = Vault(Floats(torch.rand(9, 1, 4, 4), None, ("a",)), Budget(1), [Release("r", 5)])
    with pytest.raises(ValueError, match="rule for vmap"):
        vault.sum(lambda x: wide(x).flatten(1), release="r", bound=1.0)
    assert torch.vmap(wide)(torch.ones(3, 2)).shape == (3, 2)  # elsewhere it may


def _cond(x: torch.Tensor) -> torch.Tensor:
    """PyTorch's rule for it does not look at levels: out of an inner vmap come all images."""

    def same(y: torch.Tensor) -> tuple[torch.Tensor]:
        return (y.clone(),)

    choose = torch.ops.higher_order.cond
    inner = torch.vmap(lambda _: choose(x.sum() > -1e9, same, same, (x,))[0])
    return inner(torch.arange(2)).flatten(1)[:1]


@pytest.mark.parametrize(
    "feature",
    [
        lambda x: x.flatten(1) if len(x) != 1 else _cond(x),
        lambda x: torch.zeros(len(x), 1).index_fill(1, torch.zeros(1, dtype=torch.int64), x.mean()),
    ],
    ids=["cond", "index_fill"],
)
def test_operations_that_mix_images_are_refused(feature: Any) -> None:
    vault = Vault(Floats(torch.rand(9, 1, 4, 4), None, ("a",)), Budget(1), [Release("r", 5)])
    with pytest.raises(ValueError, match=r"operator on functions|index_fill|kept quiet"):
        vault.sum(feature, release="r", bound=1.0)


def test_nor_in_hooks() -> None:
    vault = Vault(Floats(torch.rand(9, 1, 4, 4), None, ("a",)), Budget(1), [Release("r", 5)])
    model = torch.nn.Conv2d(1, 1, 1)

    def hooked(show: Any) -> Any:
        def loss(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
            made = model(images)
            made.register_hook(lambda slope: slope * len(str(show(images))))
            losses: torch.Tensor = made.sum((1, 2, 3))
            return losses

        return loss

    for show in (repr, _cond):
        with pytest.raises(ValueError, match=r"must not be printed|operator on functions|kept quiet"):
            vault.gradient(model, hooked(show), release="r", bound=1.0)


def test_images_cannot_be_printed() -> None:
    """Under vmap a tensor shows the whole batch: a decision, or a log, could hold every image."""
    vault = Vault(Floats(torch.rand(9, 1, 4, 4), None, ("a",)), Budget(1), [Release("r", 5)])
    for show in (repr, str, "{}".format):
        with pytest.raises(ValueError, match="must not be printed"):
            vault.sum(lambda x, show=show: x.flatten(1) * len(show(x)), release="r", bound=1.0)
