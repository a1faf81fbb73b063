"""The vault: it charges before it reads an image, clips, weights, adds noise and returns nothing else."""

from __future__ import annotations

import copy
import math
import pickle
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sfumato import Certificate
from sfumato.data import ImageSet
from sfumato.engine import GradientVault, Performance, calibrate
from sfumato.nets.stacked import stacked
from sfumato.privacy import Budget, BudgetExceeded, Ledger, LedgerError, Plan, Release
from sfumato.privacy import records as module
from sfumato.privacy.budget import ADJACENCIES
from sfumato.privacy.randomness import host_generator
from sfumato.privacy.sampling import assign_slots, cap_per_person, person_weights, poisson_sample, shuffled
from sfumato.privacy.vault import RedactedError
from sfumato.testing import check_unit_variance


@dataclass
class Floats:
    """Float records, which can contain NaN."""

    images: torch.Tensor
    labels: torch.Tensor | None
    classes: tuple[str, ...] = ("a", "b", "c")
    persons: torch.Tensor | None = None


def records(count: int = 40, seed: int = 0) -> Floats:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, 4, 4, generator=generator) * 5
    return Floats(images, torch.arange(count) % 2)


def pixels(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1)


def opened(data: Any, *releases: Release, epsilon: float = 1.0, size: int = 7, **options: Any) -> GradientVault:
    """Return a vault with a plan for these releases. With epsilon = inf there is no noise and no guarantee."""
    given = {key: options.pop(key) for key in ("adjacency", "unit", "delta") if key in options}
    plan = calibrate(releases or [Release("x")], Budget(epsilon, **given))
    return GradientVault(data, plan, performance=Performance(batch_size=size), **options)


def exact(data: Any, feature: Any = pixels, *, secure: bool = False, **options: Any) -> torch.Tensor:
    release = Release("x", nonnegative=options.pop("nonnegative", False))
    vault = opened(data, release, epsilon=math.inf, secure=secure, unit=options.pop("unit", "image"))
    return vault.sum(feature, release="x", **{"bound": 1.0, **options})


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, float]]:
    """Record (exact sum, sensitivity) of each query; the answers are zeros."""
    seen: list[tuple[torch.Tensor, float]] = []

    def record(
        self: GradientVault, release: Release, total: torch.Tensor, sensitivity: float, secure: bool
    ) -> torch.Tensor:
        seen.append((total.clone(), sensitivity))
        return torch.zeros_like(total)

    monkeypatch.setattr(GradientVault, "_noised", record)
    return seen


class Untouchable:
    """Images that record whether they are read."""

    classes = ("a", "b")

    def __init__(self, count: int = 5) -> None:
        self.labels = torch.zeros(count, dtype=torch.int64)
        self.touched = False
        outer = self

        class Guard(torch.Tensor):
            def __getitem__(self, index: Any) -> torch.Tensor:
                outer.touched = True
                return super().__getitem__(index)

        self.images = torch.zeros(count, 1, 4, 4).as_subclass(Guard)


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


def test_uint8_images_are_scaled_to_minus_one_and_one(few_digits: ImageSet) -> None:
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
        assert torch.allclose(before, after, atol=1e-6)


@pytest.mark.parametrize("secure", [False, True])
def test_nonnegative_is_enforced(secure: bool) -> None:
    assert (exact(records(), nonnegative=True, secure=secure) >= 0).all()
    assert (exact(records(), secure=secure) < 0).any()


def test_counts_are_units_per_class() -> None:
    release = Release("counts", nonnegative=True)
    assert opened(records(41), release, epsilon=math.inf).counts() == pytest.approx([21, 20, 0], abs=1e-2)
    unlabelled = Floats(records().images, None, ("all",))
    assert opened(unlabelled, release, epsilon=math.inf).counts() == pytest.approx([40], abs=1e-2)


def test_map_is_a_vault_over_transformed_records() -> None:
    data = records()
    vault = opened(data)
    mapped = vault.map(lambda images: images.flatten(1)[:, :3] * 2)
    assert mapped.ledger is vault.ledger
    mapped.sum(pixels, release="x", bound=1.0)
    with pytest.raises(BudgetExceeded):  # one ledger for both
        vault.sum(pixels, release="x", bound=1.0)
    direct = exact(data, lambda images: images.flatten(1)[:, :3] * 2)
    noiseless = opened(data, epsilon=math.inf).map(lambda images: images.flatten(1)[:, :3] * 2)
    assert torch.allclose(direct, noiseless.sum(pixels, release="x", bound=1.0), atol=1e-3)


def test_rows_may_be_plain_numbers_and_of_any_shape() -> None:
    assert opened(records()).sum(lambda images: images.flatten(1).sum(1), release="x", bound=1.0).shape == (1,)
    assert opened(records()).sum(lambda images: images, release="x", bound=1.0).shape == (16,)


def test_features_may_take_labels() -> None:
    data = records()

    def feature(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) * (labels == 1)[:, None]

    by_label = exact(data, feature, by_class=True, with_labels=True)
    assert torch.equal(by_label[0], torch.zeros(16))
    assert torch.allclose(by_label[1], exact(data, by_class=True)[1], atol=1e-4)
    unlabelled = Floats(data.images, None, ("all",))
    assert torch.equal(exact(unlabelled, feature, with_labels=True), torch.zeros(16))
    with pytest.raises(ValueError, match="mixes the images"):
        exact(data, lambda images, labels: images.flatten(1) - labels.float().mean(), with_labels=True)


def test_batch_norm_in_eval_mode_is_accepted() -> None:
    norm = nn.BatchNorm2d(1).eval()
    exact(records(), lambda images: norm(images).flatten(1))


@pytest.mark.parametrize("secure", [False, True])
def test_tensors_of_a_feature_are_not_modified(secure: bool) -> None:
    """Rows may be a view of a tensor that the feature stores."""
    kept = torch.full((100, 16), 5.0, dtype=torch.float64)
    exact(records(), lambda images: kept[: len(images)], secure=secure)
    assert (kept == 5).all()


@pytest.mark.parametrize("count", [1, 7, 8, 20])
@pytest.mark.parametrize("secure", [False, True])
def test_padding_does_not_count(count: int, secure: bool) -> None:
    rows = records(count).images.flatten(1) + 3
    rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1)
    found = exact(records(count), lambda images: images.flatten(1) + 3, secure=secure)
    assert torch.allclose(found, rows.sum(0), atol=1e-3)


# -- caching of traces ------------------------------------------------------------------------------------


def test_constants_may_change_without_a_new_trace() -> None:
    calls = 0
    vault = opened(records(), Release("x", 25), epsilon=math.inf)

    def feature(images: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return images.flatten(1) * weight + shift

    used = set()
    for step in range(20):
        weight, shift = torch.full((16,), 0.01 * step), torch.tensor(0.001 * step)
        found = vault.sum(feature, release="x", bound=10.0, constants=[weight, shift])
        used.add(calls)
        rows = records().images.flatten(1) * weight + shift
        assert torch.allclose(found, rows.sum(0), atol=1e-3)
    assert len(used) == 1  # the feature ran for the first query only
    assert 1 <= calls <= 3
    vault.sum(feature, release="x", bound=10.0, constants=[torch.ones(1, 16), torch.tensor(0.0)])
    assert calls > max(used)  # another shape needs another graph


def test_a_new_function_is_traced_again() -> None:
    vault = opened(records(), Release("x", 5), epsilon=math.inf)
    total = exact(records(), bound=1e3)
    for scale in (1.0, 2.0, 3.0):
        found = vault.sum(lambda images, scale=scale: images.flatten(1) * scale, release="x", bound=1e3)
        assert torch.allclose(found, scale * total, rtol=1e-4, atol=1e-2)


def test_a_bound_method_is_traced_once_per_object() -> None:
    class Scaled:
        def __init__(self, scale: float) -> None:
            self.scale, self.calls = scale, 0

        def rows(self, images: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return images.flatten(1) * self.scale

    vault = opened(records(), Release("x", 9), epsilon=math.inf)
    one, other = Scaled(1.0), Scaled(-1.0)
    first = vault.sum(one.rows, release="x", bound=1e3)
    before = one.calls
    assert torch.allclose(vault.sum(one.rows, release="x", bound=1e3), first, atol=1e-3)
    assert one.calls == before
    assert torch.allclose(vault.sum(other.rows, release="x", bound=1e3), -first, atol=1e-3)


def test_a_new_bound_is_used_for_clipping_and_noise(sums: list[tuple[torch.Tensor, float]]) -> None:
    vault = opened(records(), Release("x", 9))
    for bound in (10.0, 0.1, 0.1):
        vault.sum(pixels, release="x", bound=bound)
    assert [sensitivity for _, sensitivity in sums] == pytest.approx([10, 0.1, 0.1], rel=1e-3)
    for total, sensitivity in sums:
        assert float(total.norm()) <= 40 * sensitivity


# -- sensitivity on neighbouring data sets ----------------------------------------------------------------


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
def test_one_record_moves_a_sum_by_at_most_the_sensitivity(
    case: Any, nonnegative: bool, by_class: bool, secure: bool, sums: list[tuple[torch.Tensor, float]]
) -> None:
    _, one, other, adjacency = case
    release = Release("x", nonnegative=nonnegative)
    for data in (one, other):
        vault = opened(data, release, adjacency=adjacency, secure=secure)
        vault.sum(pixels, release="x", bound=0.7, by_class=by_class)
    (a, sensitivity), (b, same) = sums
    assert sensitivity == same
    assert float((a - b).norm()) <= sensitivity * release.shift(adjacency)


def test_an_empty_poisson_sample_gives_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "poisson_sample", lambda units, probability: torch.arange(0))
    vault = opened(records(), Release("x", 300, 0.01))
    answer = vault.sum(pixels, release="x", bound=1.0, by_class=True)
    assert answer.shape == (3, 16)
    noise = torch.cat([vault.sum(pixels, release="x", bound=1.0) for _ in range(100)])
    check_unit_variance(noise.double() / vault.plan["x"].noise)


def test_sampled_sums_use_a_fresh_poisson_sample_each_time() -> None:
    """Sums of ones are sample sizes; their variance distinguishes Poisson sampling from shuffled batches."""
    vault = opened(records(500), Release("x", 300, 0.2), epsilon=math.inf, size=128)

    def ones(images: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(images), 1)

    sizes = torch.tensor([float(vault.sum(ones, release="x", bound=1.0)) for _ in range(300)])
    check_unit_variance((sizes.double() - 100) / math.sqrt(80))


def test_one_more_record_displaces_one_other() -> None:
    """Check proof 4: a random order of n + 1 records is one of n with one record moved to the end."""
    orders = {tuple(shuffled(torch.arange(4), host_generator()).tolist()) for _ in range(2000)}
    assert len(orders) == 24
    made = set()
    for order in {tuple(o for o in longer if o != 3) for longer in orders}:
        for place in range(4):
            longer = [*order, -1]
            longer[-1], longer[place] = longer[place], 3
            made.add(tuple(o for o in longer if o != -1))
    assert made == orders


def test_records_of_a_person_displace_others_of_little_weight() -> None:
    """Check proof 4 for persons: m new records take the slots of at most m others, of weights below 2/m."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        sizes = torch.randint(1, 20, (12,), generator=generator)
        persons = torch.repeat_interleave(torch.arange(12), sizes)
        everyone = torch.arange(len(persons))
        weights, groups = person_weights(persons, everyone, 12)
        new = persons == 11
        m = int(new.sum())
        longer = assign_slots(everyone, groups, 4, host_generator())
        assert sorted(longer[longer >= 0].tolist()) == everyone.tolist()
        starts = longer.reshape(-1, 4)
        assert all(len(groups[row[row >= 0]].unique()) <= 1 for row in starts)  # a batch has one group
        shorter = without(longer, new, groups, 4)
        before, after = slots_of(shorter, groups), slots_of(longer, groups)
        moved = [record for record in before if before[record] != after[record]]
        assert len(moved) <= m
        assert float(weights[moved].sum()) < 2
        changed = {after[record][:2] for record in (*moved, *everyone[new].tolist())}
        assert len(changed | {before[record][:2] for record in moved}) <= 2 * m
        assert float(weights[new].sum()) == pytest.approx(1)


def slots_of(order: torch.Tensor, groups: torch.Tensor, size: int = 4) -> dict[int, tuple[int, int, int]]:
    """Return group, batch within the group, and slot of each record in an assignment."""
    found: dict[int, tuple[int, int, int]] = {}
    seen: Counter[int] = Counter()
    for batch in order.reshape(-1, size).tolist():
        group = int(groups[next((record for record in batch if record >= 0), 0)])
        found |= {record: (group, seen[group], slot) for slot, record in enumerate(batch) if record >= 0}
        seen[group] += 1
    return found


def without(order: torch.Tensor, new: torch.Tensor, groups: torch.Tensor, size: int) -> torch.Tensor:
    """Return the assignment that proof 4 couples with `order` where the new records, all of one group, are missing.

    Old records at positions that exist without the new ones stay; those behind move to the positions of new records.
    """
    parts = []
    for group in groups.unique().tolist():
        part = order[(order >= 0) & (groups[order.clamp_min(0)] == group)]
        left = part[~new[part]]
        if group == groups[new][0]:
            old, free = part[: len(left)].clone(), part[len(left) :]
            old[new[old]] = free[~new[free]]
            left = old
        if len(left):
            parts.append(nn.functional.pad(left, (0, -len(left) % size), value=-1))
    return torch.cat(parts)


def test_the_coupled_order_is_uniform() -> None:
    """Check proof 4: without two new records, a uniform order of five is a uniform order of three."""
    groups, new = torch.zeros(5, dtype=torch.int64), torch.tensor([False, False, True, False, True])
    found = Counter(
        tuple(without(assign_slots(torch.arange(5), groups, 5, host_generator()), new, groups, 3).tolist())
        for _ in range(3000)
    )
    assert set(found) == set(permutations((0, 1, 3)))
    assert sum((count - 500) ** 2 / 500 for count in found.values()) < 35  # chi-squared with 5 degrees of freedom


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_replaced_person_has_the_margins_of_two(
    sums: list[tuple[torch.Tensor, float]], secure: bool, mapped: bool
) -> None:
    """A replaced person moves others twice, also where the sum of non-negative rows moves by sqrt(2) only."""
    data, margins = marked([1, 4, 9]), {}
    for adjacency in ADJACENCIES:
        vault = opened(
            data, Release("x", nonnegative=True), unit="person", adjacency=adjacency, secure=secure, max_per_person=9
        )
        (vault.map(pixels) if mapped else vault).sum(pixels, release="x", bound=1.0)
        norm = math.ceil(2**20 * 4) + 1 if secure else 1.0  # in steps of the grid
        shift = vault.plan["x"].shift(adjacency)
        margins[adjacency] = sums[-1][1] * shift - norm * shift
    assert margins["replace-one"] >= 2 * margins["add-remove"] * (1 - 1e-9) > 0


# -- persons ----------------------------------------------------------------------------------------------


def random_persons(generator: torch.Generator, persons: int = 6) -> Floats:
    """Return persons with one to five images of any class."""
    sizes = torch.randint(1, 6, (persons,), generator=generator)
    owners = torch.repeat_interleave(torch.arange(persons), sizes)
    images = torch.randn(len(owners), 1, 4, 4, generator=generator)
    return Floats(images, torch.randint(0, 3, (len(owners),), generator=generator), persons=owners)


def one_more_person(generator: torch.Generator, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels of one more person, ordinary or extreme."""
    count = int(torch.randint(1, 31, (1,), generator=generator))
    images = torch.randn(count, 1, 4, 4, generator=generator)
    labels = torch.randint(0, 3, (count,), generator=generator)
    chosen = torch.rand(count, generator=generator) < 0.5
    match kind % 7:
        case 0:
            images[chosen] = math.nan
        case 1:
            images[chosen] *= 1e30
        case 2:
            images = torch.cat([images, -images]) * 100
            labels = torch.cat([labels, labels])
        case 3:
            images, labels = images[:1].expand(count, -1, -1, -1) * 50, labels[:1].expand(count)
        case 4:
            images = images[:1].expand(count, -1, -1, -1) * 50  # one direction, several classes
        case 5:
            images[chosen] *= 1e-30
        case _:
            images[:, 0, 0, 0] = math.inf * chosen.float().nan_to_num()
    return images, labels


def with_person(base: Floats, person: tuple[torch.Tensor, torch.Tensor] | None) -> Floats:
    if person is None:
        return base
    assert base.labels is not None
    assert base.persons is not None
    owner = torch.full((len(person[0]),), int(base.persons.max()) + 1)
    return Floats(
        torch.cat([base.images, person[0]]),
        torch.cat([base.labels, person[1]]),
        persons=torch.cat([base.persons, owner]),
    )


def steep(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return 1e3 * model(images.flatten(1)).square().sum(1)  # type: ignore[no-any-return]


def ask_everything(vault: GradientVault, model: nn.Module, stacked_model: nn.Module) -> None:
    vault.counts()
    vault.sum(pixels, release="sum", bound=0.7)
    vault.sum(pixels, release="classes", bound=0.7, by_class=True)
    vault.sum(pixels, release="often", bound=3.0, by_class=True)
    vault.map(lambda images: images.flatten(1).tanh()).sum(pixels, release="mapped", bound=0.5, by_class=True)
    vault.gradient(model, steep, release="gradient", bound=1.0)
    vault.gradient(stacked_model, steep, release="stacked", bound={"weight": 1.0, "bias": 0.1}, by_class=True)


EVERYTHING = [
    Release("counts", nonnegative=True),
    Release("sum"),
    Release("classes", nonnegative=True),
    Release("often", 2),
    Release("mapped"),
    Release("gradient", 2),
    Release("stacked", 2),
]


def relative_shifts(number: int, sums: list[tuple[torch.Tensor, float]]) -> list[float]:
    """Return, for each kind of query, how far one person moves the exact sum, relative to the sensitivity."""
    generator = torch.Generator().manual_seed(number)
    adjacency = ADJACENCIES[number % 2]
    base = random_persons(generator)
    people: list[Any] = [one_more_person(generator, number // 2), None]
    if adjacency == "replace-one":
        people[1] = one_more_person(generator, number // 3) if number % 3 else (-people[0][0], people[0][1].flip(0))
    torch.manual_seed(0)
    model = nn.Linear(16, 2)
    stacked_model = stacked([nn.Linear(16, 2) for _ in range(3)])
    found = []
    for person in people:
        plan = PLANS.setdefault(adjacency, calibrate(EVERYTHING, Budget(1, adjacency=adjacency, unit="person")))
        vault = GradientVault(
            with_person(base, person), plan, secure=number % 4 < 2, performance=Performance(batch_size=8)
        )
        sums.clear()
        ask_everything(vault, model, stacked_model)
        found.append(list(sums))
    shares = []
    for (a, sensitivity), (b, same), release in zip(*found, EVERYTHING, strict=True):
        assert sensitivity == same
        shares.append(float((a.double() - b.double()).norm()) / (sensitivity * release.shift(adjacency)))
    return shares


PLANS: dict[str, Plan] = {}


@pytest.mark.parametrize("pairs", [24, pytest.param(120, marks=pytest.mark.slow)])
def test_one_person_moves_any_sum_by_at_most_the_sensitivity(
    pairs: int, sums: list[tuple[torch.Tensor, float]]
) -> None:
    """Fuzz neighbouring pairs: NaN, 1e30, cancelling rows, several labels, up to sixty images."""
    shares = torch.tensor([relative_shifts(number, sums) for number in range(pairs)])
    assert float(shares.max()) <= 1
    assert (shares.amax(0) > 0.9).all()  # the fuzzing reaches the bound for each kind of query


def test_without_weights_a_person_exceeds_the_sensitivity(
    sums: list[tuple[torch.Tensor, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant a fault, to show that the test above can fail."""
    set_units = GradientVault._set_units

    def unweighted(self: GradientVault, *args: Any) -> None:
        set_units(self, *args)
        self._weights = torch.ones_like(self._weights)

    monkeypatch.setattr(GradientVault, "_set_units", unweighted)
    shares = torch.tensor([relative_shifts(number, sums) for number in range(6, 10)])
    assert (shares.amax(0) > 1.5).all()


def marked(sizes: list[int]) -> Floats:
    """Return images that are the one-hot code of their person."""
    owners = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    images = nn.functional.one_hot(owners, 16).float().reshape(-1, 1, 4, 4)
    return Floats(images, torch.arange(len(owners)) % 3, persons=owners)


@pytest.mark.parametrize("secure", [False, True])
def test_all_persons_have_equal_weight(secure: bool) -> None:
    data = marked([1, 4, 9])
    assert exact(data, secure=secure, unit="person")[:4] == pytest.approx([1, 1, 1, 0], abs=1e-4)
    assert exact(data, secure=secure)[:4] == pytest.approx([1, 4, 9, 0], abs=1e-4)
    counts = opened(data, Release("counts"), epsilon=math.inf, unit="person", secure=secure).counts()
    assert float(counts.sum()) == pytest.approx(3, abs=1e-3)
    assert counts == pytest.approx([1 + 1 / 4 + 3 / 9, 2 / 4 + 3 / 9, 1 / 4 + 3 / 9], abs=1e-3)


def test_persons_are_sampled_with_all_images_and_independently() -> None:
    vault = opened(marked([1, 2, 5, 9]), Release("x", 400, 0.3), epsilon=math.inf, unit="person")
    found = torch.stack([vault.sum(pixels, release="x", bound=1.0)[:4] for _ in range(400)]).double()
    assert torch.allclose(found, found.round(), atol=1e-5)
    assert set(found.round().flatten().tolist()) == {0.0, 1.0}
    for one in range(4):
        assert abs(float(found[:, one].mean()) - 0.3) < 6.2 * math.sqrt(0.21 / 400)
        for other in range(one):
            joint = float((found[:, one] * found[:, other]).mean())
            assert abs(joint - 0.09) < 6.2 * math.sqrt(0.09 * 0.91 / 400)


def test_max_per_person_limits_the_images_in_use() -> None:
    data = marked([1, 4, 9])
    vault = opened(data, Release("x", 2), epsilon=math.inf, unit="person", max_per_person=3)
    assert vault.ledger.entries[0]["max_per_person"] == 3
    assert Counter(data.persons[vault._chosen].tolist()) == {0: 1, 1: 3, 2: 3}  # type: ignore[index]
    assert vault.sum(pixels, release="x", bound=1.0)[:4] == pytest.approx([1, 1, 1, 0], abs=1e-4)
    for bad in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="max_per_person >= 1"):
            opened(data, unit="person", max_per_person=bad)


def test_the_cap_chooses_uniformly_and_per_person() -> None:
    persons = torch.tensor([0, 1, 1, 1, 1, 2, 1])
    seen: Counter[int] = Counter()
    for _ in range(600):
        chosen = cap_per_person(persons, 2).tolist()
        assert chosen == sorted(chosen)
        assert Counter(persons[chosen].tolist()) == {0: 1, 1: 2, 2: 1}
        seen.update(chosen)
    for place in (1, 2, 3, 4, 6):
        assert abs(seen[place] - 240) < 6.2 * math.sqrt(600 * 0.4 * 0.6)
    assert cap_per_person(torch.zeros(0, dtype=torch.int64), 3).tolist() == []
    assert cap_per_person(persons, 9).tolist() == list(range(7))


@pytest.mark.parametrize("persons", [None, torch.zeros(13, dtype=torch.int64), torch.zeros(14, 1, dtype=torch.int64)])
def test_the_unit_person_needs_persons(persons: torch.Tensor | None) -> None:
    data = marked([1, 4, 9])
    data.persons = persons
    with pytest.raises(ValueError, match="give persons"):
        opened(data, unit="person")


def test_person_numbers_may_be_any_integers_in_any_order() -> None:
    data = marked([2, 3, 1])
    data.persons = torch.tensor([-7, -7, 10**12, 10**12, 10**12, 4])
    order = torch.tensor([3, 0, 5, 2, 1, 4])
    mixed = Floats(data.images[order], data.labels[order], persons=data.persons[order])  # type: ignore[index]
    for each in (data, mixed):
        assert exact(each, unit="person")[:4] == pytest.approx([1, 1, 1, 0], abs=1e-5)


def test_a_data_set_without_persons_is_accepted() -> None:
    nobody = Floats(
        torch.zeros(0, 1, 4, 4), torch.zeros(0, dtype=torch.int64), persons=torch.zeros(0, dtype=torch.int64)
    )
    assert not exact(nobody, unit="person").any()


@pytest.mark.parametrize("secure", [False, True])
def test_the_sensitivity_has_a_margin_for_each_record_of_a_person(
    secure: bool, sums: list[tuple[torch.Tensor, float]]
) -> None:
    for unit, most in (("image", 1000), ("person", 1), ("person", 1000)):
        opened(marked([2, 3]), unit=unit, max_per_person=most, secure=secure).sum(pixels, release="x", bound=1.0)
    image, one, many = (sensitivity for _, sensitivity in sums)
    assert image == one < many < 1.01 * one


# -- noise ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True])
def test_noise_has_the_planned_scale(secure: bool) -> None:
    data = Floats(torch.zeros(3, 1, 20, 20), torch.zeros(3, dtype=torch.int64))
    vault = opened(data, Release("x"), Release("y", weight=3), secure=secure)
    for name in ("x", "y"):
        answer = vault.sum(pixels, release=name, bound=0.5, by_class=True)
        check_unit_variance(answer.double() / (0.5 * vault.plan[name].noise))


def test_answers_carry_no_gradient() -> None:
    weight = nn.Parameter(torch.ones(16))
    data = records()
    data.images.requires_grad_(True)
    vault = opened(data, Release("x"), Release("counts"), Release("y", 5, 0.5))
    for answer in (
        vault.sum(lambda images: images.flatten(1) * weight, release="x", bound=1.0),
        vault.counts(),
        vault.sum(lambda images, w: images.flatten(1) * w, release="y", bound=1.0, constants=[weight]),
    ):
        assert not answer.requires_grad
        assert answer.grad_fn is None


@pytest.mark.filterwarnings("ignore:.*jit.script:DeprecationWarning")
def test_answers_carry_no_derivative() -> None:
    """Not by enable_grad in a feature, a forward-mode tangent or a differentiable bound."""
    import torch.autograd.forward_ad as forward

    weight = nn.Parameter(torch.ones(16))
    vault = opened(records(), Release("x", 10, 0.5), Release("y"))

    def graph(images: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return images.flatten(1) * weight

    for name in ("x", "y"):
        assert not vault.sum(graph, release=name, bound=1.0).requires_grad
    with forward.dual_level():
        dual = forward.make_dual(torch.ones(16), torch.ones(16))
        answer = vault.sum(lambda images, w: images.flatten(1) * w, release="x", bound=1.0, constants=[dual])
        assert forward.unpack_dual(answer).tangent is None
    bound = nn.Parameter(torch.tensor(100.0))
    with pytest.raises(ValueError, match="bound must be a number"):
        vault.sum(pixels, release="x", bound=bound)  # type: ignore[arg-type]


# -- charges ----------------------------------------------------------------------------------------------


def test_budget_overrun_raises_before_a_pixel_is_read() -> None:
    data = Untouchable()
    with pytest.raises(BudgetExceeded, match="need epsilon"):
        opened(data, Release("x", noise_multiplier=1.0))
    vault = opened(data, Release("x", 2))
    assert not data.touched
    for _ in range(2):
        vault.sum(pixels, release="x", bound=1.0)
    assert data.touched
    data.touched = False
    for attempt in (
        lambda: vault.sum(pixels, release="x", bound=1.0),
        lambda: vault.sum(pixels, release="z", bound=1.0),
        lambda: vault.counts(),
    ):
        with pytest.raises(BudgetExceeded):
            attempt()
    assert not data.touched


@pytest.mark.parametrize("query", ["sum", "gradient"])
def test_the_charge_is_on_disk_before_a_record_is_read(
    query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, state = tmp_path / "ledger.jsonl", []
    read = GradientVault._pixels

    def watched(self: GradientVault, index: torch.Tensor) -> torch.Tensor:
        state.append('"charge"' in path.read_text())
        return read(self, index)

    monkeypatch.setattr(GradientVault, "_pixels", watched)
    with Ledger(path) as ledger:
        vault = opened(records(), Release("x", 2), ledger=ledger)
        if query == "sum":
            vault.sum(pixels, release="x", bound=1.0)
        else:
            vault.gradient(nn.Linear(16, 1), steep, release="x", bound=1.0)
    assert state == [True] * 6  # batches of seven


def test_nothing_is_read_if_the_ledger_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Untouchable()
    vault = opened(data)

    def full(kind: str, **fields: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(vault.ledger, "append", full)
    with pytest.raises(OSError, match="disk full"):
        vault.sum(pixels, release="x", bound=1.0)
    assert not data.touched


def test_long_runs_charge_blocks_and_lose_at_most_one(tmp_path: Path) -> None:
    """Without stored results, everything charged is spent: it may have been handed out."""
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        vault = opened(records(), Release("x", 1000, 0.1), ledger=ledger)
        for _ in range(25):
            vault.sum(pixels, release="x", bound=1.0)
        assert vault.asked["x"] == 25
        assert len(ledger.entries) == 1 + 3
    with Ledger(path) as ledger:
        vault = opened(records(), Release("x", 1000, 0.1), ledger=ledger)
        assert ledger.charged("x") == 30
        assert vault.asked["x"] == 30
        for _ in range(970):
            vault.sum(pixels, release="x", bound=1.0)
        with pytest.raises(BudgetExceeded):
            vault.sum(pixels, release="x", bound=1.0)
        assert Certificate.from_ledger(ledger).events[0]["times"] == 1000


def test_a_closed_or_forked_ledger_refuses_charges() -> None:
    """This includes results of a block that is already charged."""
    ledger = Ledger()
    vault = opened(records(), Release("x", 1000, 0.1), ledger=ledger)
    vault.sum(pixels, release="x", bound=1.0)
    ledger._owner_pid += 1  # as in a forked process
    with pytest.raises(LedgerError, match="forked"):
        vault.sum(pixels, release="x", bound=1.0)
    ledger._owner_pid -= 1
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        vault.sum(pixels, release="x", bound=1.0)
    with pytest.raises(LedgerError, match="closed"):
        vault.unprotected("late")


def test_threads_do_not_share_a_charge() -> None:
    vault = opened(records(), Release("x", 60, 0.1))
    vault.sum(pixels, release="x", bound=1.0)

    def ask(_: int) -> bool:
        try:
            vault.sum(pixels, release="x", bound=1.0)
        except BudgetExceeded:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, range(100))) == 59


def test_a_ledger_accepts_one_plan_only(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    data = marked([2, 3])
    with Ledger(path) as ledger:
        opened(data, Release("x"), ledger=ledger)
    for changes, release, field in (
        ({"epsilon": 2.0}, Release("x"), "epsilon"),
        ({"delta": 1e-6}, Release("x"), "delta"),
        ({"unit": "person"}, Release("x"), "unit"),
        ({"adjacency": "replace-one"}, Release("x"), "adjacency"),
        ({}, Release("x", 2), "plan"),
        ({"secure": False}, Release("x"), "plan"),
        ({"facts": {"method": "other"}}, Release("x"), "method"),
    ):
        with Ledger(path) as ledger, pytest.raises(LedgerError, match=f"another {field}"):
            opened(data, release, ledger=ledger, **changes)  # type: ignore[arg-type]


def test_unprotected_voids_the_guarantee_permanently(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        vault = opened(records(), ledger=ledger)
        with pytest.raises(ValueError, match="reason"):
            vault.unprotected("")
        assert ledger.void is None
        images, labels = vault.unprotected("as published")
        assert "as published" in path.read_text()
        assert images.shape == (40, 1, 4, 4)
        assert labels is not None
    with Ledger(path) as ledger:
        opened(records(), ledger=ledger).sum(pixels, release="x", bound=1.0)
        certificate = Certificate.from_ledger(ledger)
    assert certificate.guarantee == "none"
    assert certificate.epsilon is None
    assert certificate.void == "as published"


class StubAccount:
    """A stub of the data set's budget."""

    path = Path("budget.jsonl")

    def __init__(self) -> None:
        self.reserved: list[Any] = []
        self.voided: list[tuple[str, str]] = []

    def reserve(self, run: str, plan: Plan, method: str | None) -> None:
        self.reserved.append((run, plan, method))

    def void(self, run: str, reason: str) -> None:
        self.voided.append((run, reason))


def test_the_data_sets_budget_is_charged_first_and_voided_with_the_run() -> None:
    account = StubAccount()
    vault = opened(records(), account=account, facts={"method": "mine"})
    run = vault.ledger.entries[0]["run"]
    assert account.reserved == [(run, vault.plan, "mine")]
    assert vault.ledger.entries[0]["account"] == "budget.jsonl"
    vault.unprotected("as published")
    assert account.voided == [(run, "as published")]


def test_no_vault_opens_if_the_data_sets_budget_refuses() -> None:
    account = StubAccount()

    def refuse(*_: Any) -> None:
        raise BudgetExceeded("nothing is left")

    account.reserve = refuse  # type: ignore[method-assign]
    data = Untouchable()
    with pytest.raises(BudgetExceeded, match="nothing is left"):
        opened(data, account=account)
    assert not data.touched


# -- failures on private images ---------------------------------------------------------------------------


def out_of_range(images: torch.Tensor) -> torch.Tensor:
    """Index a table by the brightness of an image; one image is out of range."""
    table = torch.zeros(2)
    return table[(images.amax((1, 2, 3)) > 40).long() * 5][:, None] + images.flatten(1)[:, :1]


def not_positive(images: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cholesky((60 - images.amax((1, 2, 3))).reshape(-1, 1, 1))[:, 0]


def ask(vault: GradientVault, query: str, feature: Any) -> Any:
    if query == "map":
        return vault.map(feature)
    if query == "sum":
        return vault.sum(feature, release="x", bound=1.0)
    torch.manual_seed(0)
    return vault.gradient(nn.Linear(1, 1), lambda m, x: m(feature(x)[:, :1])[:, 0], release="x", bound=1.0)


def bright() -> Floats:
    data = records()
    data.images[17] = 99.25
    return data


@pytest.mark.parametrize("query", ["map", "sum", "gradient"])
@pytest.mark.parametrize("feature", [out_of_range, not_positive])
def test_an_operator_that_fails_on_an_image_voids_the_guarantee(query: str, feature: Any, tmp_path: Path) -> None:
    """An error is an answer without noise: it could reveal whether an image is present."""
    path, account = tmp_path / "ledger.jsonl", StubAccount()
    with Ledger(path) as ledger:
        vault = opened(bright(), Release("x", 5), ledger=ledger, account=account)
        with pytest.raises(RedactedError, match="failed on private images") as caught:
            ask(vault, query, feature)
        assert '"unprotected"' in path.read_text()  # before the error is visible
        assert Certificate.from_ledger(ledger).guarantee == "none"
        assert [run for run, _ in account.voided] == [ledger.entries[0]["run"]]
    traceback_text = "".join(traceback.format_exception(caught.value))
    assert "index" not in str(caught.value)
    assert "cholesky" not in str(caught.value)
    for secret in ("99.25", "out of bounds", "cholesky: ", "positive-definite"):
        assert secret not in traceback_text
    assert caught.value.__cause__ is None
    ask(opened(records(), Release("x", 5)), query, feature)  # without that image nothing fails


def test_the_original_error_is_not_reachable() -> None:
    with pytest.raises(RedactedError) as caught:
        ask(opened(bright()), "sum", out_of_range)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("query", ["map", "sum", "gradient"])
@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, OSError, ValueError, AssertionError])
def test_any_error_voids_the_guarantee_before_it_is_visible(
    query: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    vault, account = opened(records(), Release("x", 5), account=(stub := StubAccount())), stub
    order: list[str] = []
    void = GradientVault._void

    def fail(self: GradientVault, index: torch.Tensor) -> torch.Tensor:
        order.append("failed")
        raise error("tried to allocate 123.25 for the image of Ada")

    def noted(self: GradientVault, reason: str) -> None:
        order.append("void")
        void(self, reason)

    monkeypatch.setattr(GradientVault, "_pixels", fail)
    monkeypatch.setattr(GradientVault, "_void", noted)
    with pytest.raises(RedactedError, match=error.__name__) as caught:
        ask(vault, query, pixels)
    assert order == ["failed", "void"]
    assert vault.ledger.void is not None
    assert len(account.voided) == 1
    for said in (str(caught.value), vault.ledger.void, account.voided[0][1]):
        assert "123.25" not in said
        assert "Ada" not in said


@pytest.mark.parametrize("query", ["map", "sum", "gradient"])
def test_a_keyboard_interrupt_voids_nothing(query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vault = opened(records(), Release("x", 5))

    def interrupt(self: GradientVault, index: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(GradientVault, "_pixels", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ask(vault, query, pixels)
    assert vault.ledger.void is None


def test_an_assertion_in_the_graph_is_removed_or_voids() -> None:
    """`torch._assert_async` could reveal whether an image is present."""

    def asserting(images: torch.Tensor) -> torch.Tensor:
        torch._assert_async((images < 40).all())
        return images.flatten(1)

    vault = opened(bright())
    try:
        vault.sum(asserting, release="x", bound=1.0)
    except RedactedError:
        assert vault.ledger.void
    except ValueError:
        assert vault.ledger.charged("x") == 0
    else:
        assert vault.ledger.void is None


# -- samples ----------------------------------------------------------------------------------------------


def test_samples_have_the_given_probability() -> None:
    for bad in (0.0, 1.5, -0.1, math.nan):
        with pytest.raises(ValueError, match="sampling probability"):
            poisson_sample(3, bad)
    assert poisson_sample(3, 1.0).tolist() == [0, 1, 2]
    assert poisson_sample(0, 0.5).tolist() == []
    sizes = torch.tensor([len(poisson_sample(100, 0.3)) for _ in range(600)]).double()
    check_unit_variance((sizes - 30) / math.sqrt(21))


# -- invalid arguments ------------------------------------------------------------------------------------


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
def test_invalid_labels_are_refused(labels: torch.Tensor | None, classes: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="labels"):
        opened(Floats(records().images, labels, classes))


@pytest.mark.parametrize("field", ["delta", "unit", "max_per_person", "plan", "account", "run", "kind", "hash"])
def test_facts_cannot_override_the_plan(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        opened(records(), facts={field: 1e-3})


@pytest.mark.parametrize("name", ["../x", "a/b", "", "a b", "x" * 65])
def test_invalid_release_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        Release(name)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf, 1e-300, 1e300, torch.tensor(1.0)])
def test_invalid_bounds_are_refused(bound: Any) -> None:
    vault = opened(records())
    with pytest.raises(ValueError, match="bound"):
        vault.sum(pixels, release="x", bound=bound)
    assert vault.ledger.charged("x") == 0


def test_a_vault_cannot_be_pickled_or_copied() -> None:
    vault = opened(records())
    for leave in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="private images"):
            leave(vault)
    assert "40" not in repr(vault)


def test_the_vault_copies_labels() -> None:
    """Labels cannot change after they were checked."""
    data = SimpleNamespace(images=records().images, labels=torch.zeros(40, dtype=torch.int64), classes=("a", "b"))
    vault = opened(data, Release("counts"), epsilon=math.inf)
    data.labels.fill_(7)
    assert vault.counts() == pytest.approx([40, 0], abs=1e-2)


def test_batch_sizes_do_not_change_sums() -> None:
    expected = exact(records())
    for size in (1, 3, 40, 1000):
        vault = opened(records(), epsilon=math.inf, size=size, secure=False)
        assert torch.allclose(vault.sum(pixels, release="x", bound=1.0), expected, atol=1e-5)
    with pytest.raises(ValueError, match="batch_size"):
        Performance(batch_size=0)
