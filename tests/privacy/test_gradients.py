"""Gradients from the vault: those of a plain loop, clipped, noised, charged; and models that are refused."""

from __future__ import annotations

import copy
import itertools
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from sfumato.data import ImageSet
from sfumato.methods.check import check_unit_variance
from sfumato.nets.stacked import one, stacked
from sfumato.nets.unet import UNet
from sfumato.privacy import Budget, BudgetExceeded, Ledger, LedgerError, Release, Vault
from sfumato.privacy import vault as module
from sfumato.privacy.gradients import Gradients
from sfumato.privacy.layers import Products, Written

CPU = torch.device("cpu")
BOUNDS = {"front": 0.3, "back": 2.0}


@dataclass
class Floats:
    images: torch.Tensor
    labels: torch.Tensor | None
    classes: tuple[str, ...] = ("a", "b", "c")


class Net(nn.Module):
    """Layers with rules and without: convolutions, a group norm, a bare parameter, a layer that is used twice."""

    def __init__(self, outputs: int = 5) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv2d(1, 6, 3, 2, 1), nn.SiLU(), nn.GroupNorm(2, 6), nn.ConvTranspose2d(6, 4, 3, 2, 1, 1), nn.SiLU()
        )
        self.back = nn.ModuleDict(
            {"first": nn.Linear(4 * 64, 40), "twice": nn.Linear(40, 40), "last": nn.Linear(40, outputs, bias=False)}
        )
        self.back["first"].register_parameter("scale", nn.Parameter(torch.rand(40)))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.back["first"](self.front(images).flatten(1)) * self.back["first"].scale
        for _ in range(2):
            x = functional.silu(self.back["twice"](x))
        return self.back["last"](x)  # type: ignore[no-any-return]


def squares(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return model(images).square().sum(1)  # type: ignore[no-any-return]


def labelled(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(images), labels, reduction="none")


def jittered(model: nn.Module, images: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
    return squares(model, images + 0.3 * normals.view_as(images))


def steep(model: nn.Module, images: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
    return 1e4 * jittered(model, images, normals)


class Repeating(Vault):
    """Records have the same numbers each time."""

    def _normals(self, index: torch.Tensor, count: int) -> torch.Tensor:
        return torch.stack([torch.zeros(count), *(numbers(int(record), count) for record in index)])[1:]


def numbers(record: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(record))


def records(count: int = 23, seed: int = 0) -> Floats:
    generator = torch.Generator().manual_seed(seed)
    return Floats(torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 3)


def network(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def exact(data: Any, model: nn.Module, loss: Any = squares, **options: Any) -> dict[str, torch.Tensor]:
    """Without noise; such a vault promises nothing."""
    vault = Repeating(data, Budget(math.inf), [Release("g", 5, 1.0, 0.0)], batch_size=7)
    return vault.gradient(model, loss, release="g", **{"bound": 1.0, **options})


def by_loop(
    data: Any,
    model: nn.Module,
    loss: Any,
    bounds: Mapping[str, float],
    draws: int = 0,
    views: int = 1,
    label: Any = None,
) -> dict[str, torch.Tensor]:
    """The same by plain automatic differentiation, image by image."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for record, image in enumerate(data.images):
        if label is not None and data.labels[record] != label:
            continue
        inputs = [image.expand(views, *image.shape)]
        if loss is labelled:
            inputs.append(data.labels[record].expand(views))
        if draws:
            inputs.append(numbers(record, views * draws).view(views, draws))
        chosen = [p for p in model.parameters() if p.requires_grad]
        slopes = dict(zip(total, torch.autograd.grad(loss(model, *inputs).mean(), chosen), strict=True))
        for prefix, bound in bounds.items():
            names = [name for name in total if name.startswith(prefix)]
            norm = math.sqrt(sum(float(slopes[name].double().square().sum()) for name in names))
            for name in names:
                total[name] += slopes[name] * min(1, bound / norm)
    return total


def flat(some: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.detach().flatten().double() for value in some.values()])


def assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], margin: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    slack = 1e-6 * float(flat(other).norm())  # some gradients are zero but for rounding
    for name in one:
        assert one[name].shape == other[name].shape
        assert one[name].dtype == torch.float32
        assert float((one[name] - other[name]).norm()) <= margin * float(other[name].norm()) + slack, name


# -- what is summed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [{"": 1.0}, {"": 1e6}, BOUNDS])
@pytest.mark.parametrize("at_once", [1, 5, 100])
def test_gradients_are_those_of_a_loop(bound: dict[str, float], at_once: int) -> None:
    data, model = records(), network()
    asked = bound.get("", bound)
    assert_same(exact(data, model, bound=asked, at_once=at_once), by_loop(data, model, squares, bound))


@pytest.mark.parametrize("views", [1, 3])
def test_views_are_averaged_before_they_are_clipped(views: int) -> None:
    data, model = records(), network()
    got = exact(data, model, jittered, bound=BOUNDS, draws=64, views=views)
    assert_same(got, by_loop(data, model, jittered, BOUNDS, 64, views))


def test_labels_and_real_images(few_digits: ImageSet) -> None:
    model = network()
    scaled = Floats(few_digits.images / 127.5 - 1, few_digits.labels, tuple("abcd"))
    got = exact(few_digits, model, labelled, with_labels=True)
    assert_same(got, by_loop(scaled, model, labelled, {"": 1.0}))


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("views", [1, 2])
def test_by_class_each_image_goes_through_its_own_network(
    side_by_side: bool, views: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, models = records(), [network(seed) for seed in range(3)]
    whole = stacked(models)
    if side_by_side:  # as on an accelerator
        monkeypatch.setattr(Gradients, "_apart", property(lambda self: False, lambda self, value: None), raising=False)
    got = exact(data, whole, jittered, bound=BOUNDS, by_class=True, draws=64, views=views)
    for label, model in enumerate(models):
        alone = {name: value[label] for name, value in got.items()}
        assert_same(alone, by_loop(data, model, jittered, BOUNDS, 64, views, label))
        taken = zip(one(whole, label).parameters(), model.parameters(), strict=True)
        assert all(torch.equal(left, right) for left, right in taken)


def test_a_class_without_images_gets_nothing_but_noise() -> None:
    data = records()
    data.labels = torch.arange(23) % 2
    got = exact(data, stacked([network(seed) for seed in range(3)]), by_class=True)
    assert all(not value[2].any() and value[1].any() for value in got.values())


def test_frozen_parameters_are_left_out() -> None:
    data, model = records(), network()
    model.front.requires_grad_(False)
    model.back["twice"].bias.requires_grad_(False)
    got = exact(data, model)
    assert set(got) == {
        "back.first.weight",
        "back.first.bias",
        "back.first.scale",
        "back.twice.weight",
        "back.last.weight",
    }
    assert_same(got, by_loop(data, model, squares, {"": 1.0}))


def test_rules_are_used_and_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    data, model = records(), network()
    vault = Vault(data, Budget(math.inf), [Release("g", 5, 1.0, 0.0)])
    ruled = vault.gradient(model, squares, release="g", bound=1.0)
    used = {name for call in vault._rules["g"][1] for name in call.names}
    assert used == {name for name in ruled if "front.2" not in name and "scale" not in name}
    monkeypatch.setattr(Gradients, "_pays", lambda self, call: False)
    assert_same(ruled, exact(data, model))


class Tied(nn.Module):
    """A weight that is used by a layer and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(64, 64, bias=False), nn.Linear(64, 30)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images.flatten(1)
        return self.other(torch.tanh(self.layer(x)) + x @ self.layer.weight)  # type: ignore[no-any-return]


def test_a_weight_that_is_used_in_other_ways_too_has_no_rule() -> None:
    torch.manual_seed(0)
    data, model = records(), Tied()
    vault = Vault(data, Budget(math.inf), [Release("g", 5, 1.0, 0.0)])
    assert_same(vault.gradient(model, squares, release="g", bound=1.0), by_loop(data, model, squares, {"": 1.0}))
    assert [call.weight for call in vault._rules["g"][1]] == ["other.weight"]


def sliced(model: nn.Module, images: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
    """Sliced score matching: the network is itself differentiated."""
    slices = normals.view_as(images)
    score, slope = torch.func.jvp(model, (images,), (slices,))
    return (slices * slope).flatten(1).sum(1) + score.flatten(1).square().sum(1) / 2


@pytest.mark.filterwarnings("ignore:.*jit.script:DeprecationWarning")
def test_a_loss_may_differentiate_its_network() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 1, 3, padding=1))
    assert_same(exact(records(), model, sliced, draws=64), by_loop(records(), model, sliced, {"": 1.0}, 64))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 4, 3, stride=(1, 2), padding=(2, 1), dilation=(2, 1)),
        nn.Conv2d(2, 4, 2, stride=3),
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Conv2d(2, 4, (3, 2), padding=(0, 2), dilation=(2, 3)),
        nn.Conv2d(2, 4, (1, 5)),
        nn.Conv2d(2, 4, 3, padding="same"),
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(2, 4, 3, groups=2, bias=False),
        nn.ConvTranspose2d(2, 3, (3, 2), stride=(3, 2), padding=1, output_padding=(2, 1)),
        nn.ConvTranspose2d(2, 3, 3, dilation=2, bias=False),
        nn.ConvTranspose2d(2, 3, 3, padding=1),
        nn.Sequential(nn.Unflatten(3, (2, 4)), nn.Linear(4, 50), nn.Flatten(2), nn.Linear(800, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("views", [1, 2])
def test_layers(layer: nn.Module, views: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.privacy.gradients.SPREAD", 100)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 1), layer, nn.Tanh(), nn.Flatten())
    assert_same(
        exact(records(9), model, jittered, draws=64, views=views),
        by_loop(records(9), model, jittered, {"": 1.0}, 64, views),
    )


def test_the_u_net_has_gradients() -> None:
    torch.manual_seed(0)
    model = UNet(1, 3, widths=(8, 16), context=8)

    def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
        noise = normals[:, 1:].view_as(images)
        return (model(images + noise, normals[:, 0], labels) - noise).square().mean((1, 2, 3))

    got = exact(records(9), model, loss, with_labels=True, draws=65, views=2)
    inputs = [
        records(9).images[:1].expand(2, -1, -1, -1),
        torch.zeros(2, dtype=torch.int64),
        numbers(0, 130).view(2, 65),
    ]
    plain = torch.autograd.grad(loss(model, *inputs).mean(), list(model.parameters()))
    alone = exact(
        Floats(records(1).images, torch.zeros(1, dtype=torch.int64)),
        model,
        loss,
        with_labels=True,
        draws=65,
        views=2,
        bound=1e6,
    )
    assert got.keys() == dict(model.named_parameters()).keys()
    assert_same(alone, dict(zip(alone, plain, strict=True)), 1e-4)


def test_half_precision_is_for_the_network_only() -> None:
    data, model = records(), network()
    full, half = (exact(data, model, precision=kind) for kind in (torch.float32, torch.bfloat16))
    joined, other = (torch.cat([value.flatten() for value in some.values()]) for some in (full, half))
    assert 1e-5 < float((joined - other).norm() / joined.norm()) < 0.1
    assert other.dtype == torch.float32


def test_precision_of_products_is_the_vaults_own_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    total = Products.total

    def watched(self: Products, factors: torch.Tensor) -> torch.Tensor:
        seen.append(torch.backends.cuda.matmul.fp32_precision == "tf32")
        return total(self, factors)

    monkeypatch.setattr(Products, "total", watched)
    try:
        torch.set_float32_matmul_precision("high")
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        exact(records(), network())
        assert torch.get_float32_matmul_precision() == "high"
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        exact(records(), network())
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {False}


# -- clipping, and what one record moves ------------------------------------------------------------------


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[torch.Tensor, float]]]:
    seen: list[tuple[torch.Tensor, float]] = []

    def record(self: Vault, release: Release, total: torch.Tensor, radius: float, form: bool) -> torch.Tensor:
        assert not form
        seen.append((total.clone(), radius))
        return torch.zeros_like(total)

    with monkeypatch.context() as patch:
        patch.setattr(Vault, "_noised", record)
        yield seen


def with_one(data: Floats, image: torch.Tensor, label: int) -> Floats:
    assert data.labels is not None
    return Floats(torch.cat([data.images, image]), torch.cat([data.labels, torch.tensor([label])]))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e8, math.nan, math.inf])
@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("bound", [0.7, BOUNDS])
def test_one_record_moves_a_sum_by_at_most_what_is_declared(
    bound: Any, by_class: bool, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image with a huge gradient, or none that is a number; for each class; in another order each time."""
    model = stacked([network(seed) for seed in range(3)]) if by_class else network()
    image = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(9)) * scale
    with recorded(monkeypatch) as seen:
        for data in (records(), with_one(records(), image, 2)):
            vault = Repeating(data, Budget(1), [Release("g", 5)], batch_size=4)
            vault.gradient(model, steep, release="g", bound=bound, by_class=by_class, draws=64)
    (a, radius), (b, same) = seen
    declared = math.hypot(*bound.values()) if isinstance(bound, dict) else bound
    assert radius == same
    assert declared < radius < 1.01 * declared
    assert float((a - b).norm()) <= radius
    if 1 <= scale < math.inf:
        assert float((a - b).norm()) >= 0.99 * declared  # it is clipped, not dropped
    if by_class:
        assert float((a - b)[:2].norm()) < 1e-4 * declared


@pytest.mark.parametrize("views", [1, 4])
@pytest.mark.parametrize("sides", [(6, 5), (40, 50)])
def test_norms_hold_where_terms_cancel(views: int, sides: tuple[int, int]) -> None:
    """A gradient that is a small difference of huge products: what is added up is still within the bound."""
    p, d = sides
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(1, 7, 1, p, generator=generator) * 1e6
    right = torch.randn(1, 7, 1, d, generator=generator) * 1e6
    small = torch.randn(1, 7, views, p, generator=generator)
    left = torch.cat([left, -left + small[:, :, :1], small], 2)
    right = torch.cat([right, right, torch.randn(1, 7, views, d, generator=generator)], 2)
    whole = Products(left, right, torch.Size((p, d)))
    for part in (whole, Written(whole.whole())):
        factors = (1.0 / part.squares().sqrt().clamp_min(1)).float()
        for record in range(7):
            only = torch.zeros(1, 7)
            only[0, record] = factors[0, record]
            assert float(part.total(only).double().norm()) <= 1.001


def test_sums_are_exact_under_a_users_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 one record more would turn the rounding of all the sum: 4.6 times its bound, for 2,100 records."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 8))
    data = Floats(0.3 * records(2100).images + 1, torch.arange(2100) % 3)
    with recorded(monkeypatch) as seen, torch.autocast("cpu", torch.bfloat16):
        for kept in (2100, 2099):
            vault = Vault(Floats(data.images[:kept], torch.arange(kept) % 3), Budget(1), [Release("g", 5)])
            vault.gradient(model, lambda m, x: 1e3 * squares(m, x), release="g", bound=1.0, at_once=2048)
    (a, radius), (b, _) = seen
    assert 0.9 < float((a - b).norm()) <= radius


@pytest.mark.parametrize(("slope", "size", "bounds"), [(37, 7, [1.0]), (-44.15, 37, [b * 1e-7 for b in range(2, 60)])])
def test_numbers_too_large_or_small_for_float32_are_not_rounded_up(
    slope: float, size: float, bounds: list[float]
) -> None:
    """A factor that clips, or a slope, below the smallest float32 would be rounded up, to twice the bound."""
    layer = nn.Linear(64, 1600, bias=False)
    nn.init.zeros_(layer.weight)

    def loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        hot = (images.flatten(1).mean(1, keepdim=True) - 0.6).clamp_min(0) / 0.4  # of the private image only
        half = 10.0 ** (slope * hot / 2)  # twice, since the whole is no plain float32
        made: torch.Tensor = half * (half * model(images.flatten(1) * 10.0 ** (size * hot)))
        return made.sum(1)

    for bright, bound in itertools.product(torch.linspace(0.95, 1.05, 20).tolist() if slope > 0 else [1.0], bounds):
        data = Floats(torch.full((1, 1, 8, 8), bright), torch.zeros(1, dtype=torch.int64))
        assert float(flat(exact(data, layer, loss, bound=bound)).norm()) <= 1.001 * bound


def test_norms_of_long_gradients_are_not_lost_in_rounding() -> None:
    each = torch.full((1, 1, 4_000_000), 0.1)
    assert float(Written(each).squares()) == pytest.approx(4e4, rel=1e-6)


def test_a_parameter_may_be_a_single_number() -> None:
    model = small()
    model.register_parameter("heat", nn.Parameter(torch.tensor(0.5)))
    data = records()
    made = exact(data, model, lambda m, x: squares(m, x) * m.heat, bound=1.0)
    assert_same(made, by_loop(data, model, lambda m, x: squares(m, x) * m.heat, {"": 1.0}))


def test_rows_that_are_not_finite_count_as_zero() -> None:
    data, model = records(), network()
    before = exact(data, model, bound=BOUNDS)
    for bad in (math.nan, math.inf, 1e38):
        assert_same(exact(with_one(data, torch.full((1, 1, 8, 8), bad), 0), model, bound=BOUNDS), before)


def test_filling_up_adds_exactly_nothing() -> None:
    """No record, or one whose gradient is zero: zero to the last bit, whatever stands beside it."""
    empty = Floats(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))
    assert not flat(exact(empty, network())).any()

    def blind(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        return squares(model, images) * (images.flatten(1).sum(1) > 1e4)  # public images are darker

    assert not flat(exact(records(), network(), blind)).any()


def test_an_empty_poisson_sample_is_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "poisson_sample", lambda records, probability: torch.arange(0))
    vault = Vault(records(), Budget(1), [Release("g", 300, 0.01)])
    noise = flat(vault.gradient(network(), squares, release="g", bound=BOUNDS))
    check_unit_variance(noise / (vault.plan["g"].noise * math.hypot(*BOUNDS.values())))


def test_noise_is_for_all_groups_together() -> None:
    """On each parameter: the joint bound's, not its own group's. Images without gradient leave nothing else."""
    data = Floats(torch.zeros(3, 1, 8, 8), torch.arange(3))
    vault = Vault(data, Budget(1), [Release("g", 50, 0.5)])
    model = stacked([network(seed) for seed in range(3)])

    def nothing(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        return squares(model, images) * (images.flatten(1).amax(1) > 0)

    for by_class, asked in ((True, model), (False, network())):
        answer = vault.gradient(asked, nothing, release="g", bound=BOUNDS, by_class=by_class)
        for name, value in answer.items():
            if value.numel() > 500:
                check_unit_variance(value.double() / (vault.plan["g"].noise * math.hypot(*BOUNDS.values())), name)


def test_samples_are_poisson_and_fresh() -> None:
    """Gradients of a bias under a linear loss are sample sizes: their variance tells Poisson from shuffling."""
    model = nn.Linear(64, 1)

    def loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        return model(0 * images.flatten(1))[:, 0]  # type: ignore[no-any-return]

    vault = Vault(records(200), Budget(math.inf), [Release("g", 300, 0.2, 0.0)])
    sizes = torch.stack([vault.gradient(model, loss, release="g", bound=9.0)["bias"][0] for _ in range(300)])
    check_unit_variance((sizes.double() - 40) / math.sqrt(32))


def test_records_have_fresh_numbers_of_their_own() -> None:
    model = nn.Linear(1, 1, bias=False)
    data = Floats(torch.zeros(400, 1, 1, 1), None, ("all",))
    vault = Vault(data, Budget(math.inf), [Release("g", 5, 1.0, 0.0)])

    def loss(model: nn.Module, images: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
        return model(normals[:, 1:])[:, 0]  # type: ignore[no-any-return]

    sums = [vault.gradient(model, loss, release="g", bound=1e6, draws=2, views=views)["weight"] for views in (1, 1, 4)]
    assert not torch.equal(sums[0], sums[1])
    spread = torch.stack(
        [value.flatten() / math.sqrt(400 / views) for value, views in zip(sums, (1, 1, 4), strict=True)]
    )
    assert float(spread.abs().max()) < 6.5  # standard normal numbers: beyond with probability 1e-9


# -- charges ----------------------------------------------------------------------------------------------


def test_the_charge_is_on_disk_before_a_record_is_read(tmp_path: Path) -> None:
    path, states = tmp_path / "ledger.jsonl", []

    def loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        states.append('"charge"' in path.read_text())
        return squares(model, images)

    with Ledger(path) as ledger:
        vault = Vault(records(), Budget(1), [Release("g", 200, 0.5)], ledger=ledger)
        vault.gradient(network(), loss, release="g", bound=1.0)
        tried = states.index(True)
        assert tried > 0
        assert all(states[tried:])
        vault.gradient(network(), loss, release="g", bound=1.0)
        assert ledger.charged("g") == 2  # a block of two, a hundredth of all, has paid for both
        assert vault.remaining("g") == 198
        line = ledger.entries[-1]
        assert (line["kind"], line["name"], line["noise"], line["sampling_prob"]) == ("charge", "g", "fast", 0.5)
    with pytest.raises(LedgerError, match="closed"):
        vault.gradient(network(), loss, release="g", bound=1.0)


def test_a_spent_budget_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vault = Vault(records(), Budget(1), [Release("g", 2)])
    for _ in range(2):
        vault.gradient(network(), squares, release="g", bound=1.0)
    looked: list[torch.Tensor] = []
    monkeypatch.setattr(Vault, "_batch", lambda self, index: looked.append(index))
    for release in ("g", "h"):
        with pytest.raises(BudgetExceeded):
            vault.gradient(network(), squares, release=release, bound=1.0)
    assert not looked


def test_gradients_are_not_kept_nor_exact() -> None:
    for release in (Release("g"), Release("g", 5, nonnegative=True)):
        with pytest.raises(ValueError, match="fast noise"):
            Vault(records(), Budget(1), [release]).gradient(network(), squares, release="g", bound=1.0)


def test_nothing_that_leaves_carries_a_derivative() -> None:
    model = network()
    answer = Vault(records(), Budget(1), [Release("g", 5)]).gradient(model, squares, release="g", bound=1.0)
    assert all(not value.requires_grad and value.grad_fn is None for value in answer.values())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


# -- refused ----------------------------------------------------------------------------------------------


def refused(model: nn.Module, loss: Any = squares, match: str = "one by one", **options: Any) -> None:
    vault = Vault(records(), Budget(1), [Release("g", 5)])
    with pytest.raises(ValueError, match=match):
        vault.gradient(model, loss, release="g", **{"bound": 1.0, **options})
    assert vault.ledger.charged("g") == 0


def small(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), *layers, nn.Flatten(), nn.Linear(144, 3))


def test_networks_that_mix_images_or_draw_are_refused() -> None:
    refused(small(nn.BatchNorm2d(4)))
    refused(small(nn.BatchNorm2d(4, track_running_stats=False)), match="mixes the images")
    refused(small(nn.Dropout(0.5)))
    refused(small(), lambda model, x: model(x + torch.randn_like(x)).square().sum(1))
    refused(small(), lambda model, x: model(x - x.mean(0)).square().sum(1), "mixes the images")
    exact(records(), small(nn.BatchNorm2d(4)).eval())
    exact(records(), small(nn.Dropout(0.5)).eval())


def test_a_refused_network_is_left_as_it_was() -> None:
    model = small(nn.BatchNorm2d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refused(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_losses_must_be_one_per_image() -> None:
    refused(small(), lambda model, x: model(x).square().sum(), "one number per image")
    refused(small(), lambda model, x: model(x).square(), "one number per image")
    refused(small(), lambda model, x: squares(model, x) * math.nan, "NaN or infinity")


def test_every_parameter_is_in_one_group() -> None:
    refused(network(), bound={"front": 1.0}, match="it is in none")
    refused(network(), bound={"front": 1.0, "back": 1.0, "back.first": 1.0}, match="it is in back, back.first")
    refused(network(), bound={"front": 1.0, "back": 1.0, "fro": 1.0}, match="begin with fro")
    for bad in (0.0, -1.0, math.nan, math.inf, 1e-12, torch.tensor(1.0), None):
        refused(network(), bound=bad, match="a bound must be a number")
        refused(network(), bound={"front": 1.0, "back": bad}, match="a bound must be a number")


def test_what_cannot_be_asked_for() -> None:
    refused(network().requires_grad_(False), match="no trainable parameters")
    refused(network().double(), match="float32")
    refused(network(), by_class=True, match="stacked")
    refused(stacked([network(), network()]), by_class=True, match="each of 3 classes")
    refused(network(), views=2, match="differ by something")
    refused(network(), at_once=0, match="at_once")


def test_a_loss_that_counts_its_calls_is_refused() -> None:
    calls = 0

    def counting(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return squares(model, images) * (1 + 1e-3 * calls)

    refused(small(), counting, "another gradient when it is asked again")


def test_a_loss_that_changes_within_a_sum_is_refused() -> None:
    calls = 0

    def schedule(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return squares(model, images) * (1 + calls // 10)

    vault = Vault(records(200), Budget(1), [Release("g", 100)], batch_size=10)
    with pytest.raises(RuntimeError, match="changes from call to call"):
        vault.gradient(small(), schedule, release="g", bound=1.0)


def test_a_constant_does_not_hide_a_change() -> None:
    calls = 0

    def schedule(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return squares(model, images) * (1 + calls // 10) + 1e6

    vault = Vault(records(200), Budget(1), [Release("g", 100)], batch_size=10)
    with pytest.raises(RuntimeError, match="changes from call to call"):
        vault.gradient(small(), schedule, release="g", bound=1.0)


def test_no_tensor_passes_from_class_to_class() -> None:
    """A network that keeps what it saw last, and adds it where it fits: it never fits, and that is noticed."""

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(64, 3, bias=False), [torch.zeros(1)]

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            x = images.flatten(1)
            change = torch.zeros_like(x)
            with suppress(RuntimeError):
                change = x - self.last[0]
            self.last[0] = x
            bright = (x.mean(1, keepdim=True) - 0.6).clamp_min(0)
            return self.layer(0.01 * x + 10 * bright * change)  # type: ignore[no-any-return]

    with pytest.raises((ValueError, RuntimeError), match=r"one by one|failed on private images"):
        Vault(records(), Budget(1), [Release("g", 5)]).gradient(
            stacked([Keeping() for _ in range(3)]), squares, release="g", bound=1.0, by_class=True
        )


def test_a_tensor_kept_from_an_earlier_batch_is_refused() -> None:
    kept: list[torch.Tensor] = []

    def remembering(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        kept.append(images)
        return squares(model, images + (kept[-2] if len(kept) > 12 else 0))

    vault = Vault(records(200), Budget(1), [Release("g", 100)], batch_size=10)
    with pytest.raises(RuntimeError, match=r"failed on private images|changes from call to call"):
        vault.gradient(small(), remembering, release="g", bound=1.0)


def test_what_a_loss_says_of_private_images_is_not_passed_on() -> None:
    vault = Vault(records(), Budget(1), [Release("g", 100)])
    model = small()
    told = False

    def telling(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        if told:
            raise ValueError("this image: 123.25")
        return squares(model, images)

    vault.gradient(model, telling, release="g", bound=1.0)
    told = True
    with pytest.raises(RuntimeError, match="failed on private images with a ValueError") as caught:
        vault.gradient(model, telling, release="g", bound=1.0)
    assert "123.25" not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None


# -- recordings, on a GPU ---------------------------------------------------------------------------------------


class Frozen:
    """What a recording is, without a GPU: the engine as it was."""

    def __init__(self, engine: Gradients, inputs: list[torch.Tensor], size: int) -> None:
        self.groups, self._engine = engine.groups, copy.copy(engine)
        self._shapes = [part[:, :size].shape for part in inputs]

    def __call__(self, inputs: list[torch.Tensor], present: torch.Tensor) -> Any:
        assert [part.shape for part in inputs] == self._shapes
        return self._engine.clipped(inputs, present)


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Recorded", Frozen)
    monkeypatch.setattr(Vault, "_replays", True)


@pytest.mark.usefixtures("frozen")
def test_another_bound_is_another_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound that clips is the one that the noise is for."""
    model = network()
    with recorded(monkeypatch) as seen:
        vault = Vault(records(), Budget(1), [Release("g", 5)])
        for bound in (10.0, 0.1, 0.1):
            vault.gradient(model, squares, release="g", bound=bound, record=True)
        kept = vault._recordings["g"][1]
        vault.gradient(model, squares, release="g", bound=0.1, record=True)
        assert vault._recordings["g"][1] is kept
        vault.gradient(model, lambda net, x: squares(net, x), release="g", bound=0.1, record=True)
        assert vault._recordings["g"][1] is not kept
    assert [radius for _, radius in seen] == pytest.approx([10, *[0.1] * 4], rel=0.02)
    layer = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    engines = [
        Gradients(nn.Sequential(layer, last), squares, 1.0, classes=None, views=1, precision=torch.float32, device=CPU)
        for last in (nn.ReLU(), nn.Tanh())
    ]
    assert engines[0].frozen != engines[1].frozen
    for total, radius in seen[1:]:
        assert float(total.norm()) <= len(records().images) * radius


@pytest.mark.usefixtures("frozen")
def test_a_recording_is_for_batches_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    for record in (False, True):
        with recorded(monkeypatch) as seen:
            vault = Vault(records(), Budget(1), [Release("g", 5)])
            vault.gradient(network(), squares, release="g", bound=0.5, at_once=7, record=record)
        sums.append(seen[0][0])
    assert torch.allclose(sums[0], sums[1], atol=1e-5)


class Scaled(torch.autograd.Function):
    generate_vmap_rule = True
    by = torch.full((1,), 2.0)

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * Scaled.by


def test_what_a_loss_reads_is_held_for_a_recording() -> None:
    table = torch.rand(1, 4)

    def loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Scaled.apply(model(images))  # type: ignore[no-untyped-call]
        return (made - table).square().sum(1)

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    engine = Gradients(model, loss, 1.0, classes=None, views=1, precision=torch.float32, device=torch.device("cpu"))
    engine.held = list(engine.state().values())
    engine._parts([torch.rand(1, 5, 1, 8, 8)])
    for tensor in (table, Scaled.by):
        assert any(held.data_ptr() == tensor.data_ptr() for held in engine.held)
    assert len({held.data_ptr() for held in engine.held}) < 12  # and not all that it makes


class Sly(torch.autograd.Function):
    """Its backward pass catches an operation that fails on one image, and does something else to all."""

    generate_vmap_rule = True

    @staticmethod
    def forward(made: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        return made.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (images,) = ctx.saved_tensors
        try:
            torch.linalg.cholesky(images.mean((1, 2, 3)).view(-1, 1, 1) + 1)
        except RuntimeError:
            return -gradient, None
        return gradient, None


def test_an_error_that_is_caught_in_a_backward_pass_is_noticed() -> None:
    def loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Sly.apply(model(images), images)  # type: ignore[no-untyped-call]
        return made.square().sum(1)

    images = torch.rand(9, 1, 8, 8)
    images[4] = -1.5
    vault = Vault(Floats(images, torch.arange(9) % 3), Budget(1), [Release("g", 5)])
    with pytest.raises(RuntimeError, match="failed on private images"):
        vault.gradient(small(), loss, release="g", bound=1.0)
    assert vault.ledger.void


def test_a_device_that_fails_later_voids_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    vault = Vault(records(), Budget(1), [Release("g", 5)])
    seated = Vault._seated

    def late(self: Vault, *args: Any) -> Iterator[Any]:
        yield next(seated(self, *args))
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(Vault, "_seated", late)
    with pytest.raises(RuntimeError, match="failed on private images"):
        vault.gradient(network(), squares, release="g", bound=1.0, at_once=5)
    assert vault.ledger.void


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("by_class", [False, True])
def test_a_recording_gives_what_the_engine_gives(by_class: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = (stacked([small() for _ in range(3)]) if by_class else small()).cuda()
    sums = []
    for record in (False, True):
        with recorded(monkeypatch) as seen:
            vault = Vault(records(), Budget(1), [Release("g", 5)], device="cuda")
            for _ in range(3):
                vault.gradient(model, squares, release="g", bound=0.5, by_class=by_class, at_once=7, record=record)
            assert (vault._recordings["g"][1] is not None) if record else not vault._recordings
        sums.append(seen)
    for plain, replayed in zip(*sums, strict=True):
        assert torch.allclose(plain[0], replayed[0], rtol=1e-2, atol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_recording_follows_the_parameters_and_bounds_every_image(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small().cuda()
    with recorded(monkeypatch) as seen:
        vault = Vault(records(), Budget(1), [Release("g", 5)], device="cuda")
        for _ in range(2):
            vault.gradient(model, squares, release="g", bound=0.5, record=True)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
        images = torch.full((1, 1, 8, 8), float("nan"))
        Vault(
            Floats(images, torch.zeros(1, dtype=torch.int64), ("a",)), Budget(1), [Release("g", 5)], device="cuda"
        ).gradient(model, squares, release="g", bound=0.5, record=True)
    assert not torch.allclose(seen[0][0], seen[1][0], rtol=1e-2)
    assert float(seen[2][0].abs().max()) == 0
