"""Gradients of the vault: equal to those of a plain loop, clipped, noised and charged; invalid models are refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from sfumato.data import ImageSet
from sfumato.engine import GradientVault, Performance, calibrate
from sfumato.engine import gradients as gradients_module
from sfumato.engine.cuda_graph import CapturedQuery
from sfumato.engine.layers import Call, LayerGradient
from sfumato.nets.stacked import stacked, unstack
from sfumato.nets.unet import UNet
from sfumato.privacy import Budget, BudgetExceeded, Ledger, LedgerError, Release
from sfumato.privacy import records as module
from sfumato.testing import check_unit_variance

BOUNDS = {"front": 0.3, "back": 2.0}


@dataclass
class Floats:
    images: torch.Tensor
    labels: torch.Tensor | None
    classes: tuple[str, ...] = ("a", "b", "c")


class Net(nn.Module):
    """Layers with and without rules: convolutions, a group norm, a bare parameter, a layer that is called twice."""

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


class FixedNormals(GradientVault):
    """A vault that gives each record the same normal numbers each time."""

    def _normals(self, index: torch.Tensor, count: int) -> torch.Tensor:
        own = [numbers(int(record), count) if record >= 0 else torch.zeros(count) for record in index.flatten()]
        return torch.stack(own)


def numbers(record: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(record))


def records(count: int = 23, seed: int = 0) -> Floats:
    generator = torch.Generator().manual_seed(seed)
    return Floats(torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 3)


def network(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def opened(
    data: Any,
    *releases: Release,
    epsilon: float = 1.0,
    size: int | None = 7,
    kind: type[GradientVault] = GradientVault,
    **options: Any,
) -> GradientVault:
    """Return a vault with a plan for these releases. With epsilon = inf there is no noise and no guarantee."""
    plan = calibrate(releases or [Release("g", 5)], Budget(epsilon))
    return kind(data, plan, performance=Performance(batch_size=size), **options)


def exact(data: Any, model: nn.Module, loss: Any = squares, **options: Any) -> dict[str, torch.Tensor]:
    vault = opened(data, epsilon=math.inf, kind=FixedNormals)
    return vault.gradient(model, loss, release="g", **{"bound": 1.0, **options})


def loop_gradients(
    data: Any,
    model: nn.Module,
    loss: Any,
    bounds: Mapping[str, float],
    draws: int = 0,
    views: int = 1,
    label: Any = None,
) -> dict[str, torch.Tensor]:
    """Return the clipped sum of gradients by autograd, image by image."""
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
        gradients = dict(zip(total, torch.autograd.grad(loss(model, *inputs).mean(), chosen), strict=True))
        for prefix, bound in bounds.items():
            names = [name for name in total if name.startswith(prefix)]
            norm = math.sqrt(sum(float(gradients[name].double().square().sum()) for name in names))
            for name in names:
                total[name] += gradients[name] * min(1, bound / norm)
    return total


def flat(some: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.detach().flatten().double() for value in some.values()])


def assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], margin: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    slack = 1e-6 * float(flat(other).norm())  # some gradients are zero up to rounding
    for name in one:
        assert one[name].shape == other[name].shape
        assert one[name].dtype == torch.float32
        assert float((one[name] - other[name]).norm()) <= margin * float(other[name].norm()) + slack, name


# -- what is summed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [{"": 1.0}, {"": 1e6}, BOUNDS])
@pytest.mark.parametrize("size", [1, 5, 100])
def test_gradients_equal_those_of_a_loop(bound: dict[str, float], size: int) -> None:
    data, model = records(), network()
    asked = bound.get("", bound)
    assert_same(
        exact(data, model, bound=asked, performance=Performance(batch_size=size)),
        loop_gradients(data, model, squares, bound),
    )


@pytest.mark.parametrize("views", [1, 3])
def test_views_are_averaged_before_they_are_clipped(views: int) -> None:
    data, model = records(), network()
    got = exact(data, model, jittered, bound=BOUNDS, draws=64, views=views)
    assert_same(got, loop_gradients(data, model, jittered, BOUNDS, 64, views))


def test_labels_and_real_images(few_digits: ImageSet) -> None:
    model = network()
    scaled = Floats(few_digits.images / 127.5 - 1, few_digits.labels, tuple("abcd"))
    got = exact(few_digits, model, labelled, with_labels=True)
    assert_same(got, loop_gradients(scaled, model, labelled, {"": 1.0}))


@pytest.mark.parametrize("views", [1, 2])
def test_by_class_each_image_uses_the_network_of_its_class(views: int) -> None:
    data, models = records(), [network(seed) for seed in range(3)]
    stacked_model = stacked(models)
    got = exact(data, stacked_model, jittered, bound=BOUNDS, by_class=True, draws=64, views=views)
    for label, model in enumerate(models):
        alone = {name: value[label] for name, value in got.items()}
        assert_same(alone, loop_gradients(data, model, jittered, BOUNDS, 64, views, label))
        pairs = zip(unstack(stacked_model, label).parameters(), model.parameters(), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)


def test_a_class_without_images_has_a_zero_sum() -> None:
    data = records()
    data.labels = torch.arange(23) % 2
    got = exact(data, stacked([network(seed) for seed in range(3)]), by_class=True)
    assert all(not value[2].any() and value[1].any() for value in got.values())


def test_frozen_parameters_are_excluded() -> None:
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
    assert_same(got, loop_gradients(data, model, squares, {"": 1.0}))


class Tied(nn.Module):
    """A weight that is used by a layer and in a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(64, 64, bias=False), nn.Linear(64, 30)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images.flatten(1)
        return self.other(torch.tanh(self.layer(x)) + x @ self.layer.weight)  # type: ignore[no-any-return]


def sliced(model: nn.Module, images: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
    """Sliced score matching, which differentiates the network."""
    slices = normals.view_as(images)
    score, slope = torch.func.jvp(model, (images,), (slices,))
    return (slices * slope).flatten(1).sum(1) + score.flatten(1).square().sum(1) / 2


@pytest.mark.filterwarnings("ignore:.*jit.script:DeprecationWarning")
def test_a_loss_may_differentiate_its_network() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 1, 3, padding=1))
    assert_same(exact(records(), model, sliced, draws=64), loop_gradients(records(), model, sliced, {"": 1.0}, 64))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 4, 3, stride=(1, 2), padding=(2, 1), dilation=(2, 1)),
        nn.Conv2d(2, 4, 2, stride=3),
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Conv2d(2, 4, (3, 2), padding=(0, 2), dilation=(2, 3)),
        nn.Conv2d(2, 4, (1, 5)),
        nn.Conv2d(2, 4, 3, padding="same"),
        nn.Conv2d(2, 4, 3, groups=2, bias=False),
        nn.ConvTranspose2d(2, 3, (3, 2), stride=(3, 2), padding=1, output_padding=(2, 1)),
        nn.ConvTranspose2d(2, 3, 3, dilation=2, bias=False),
        nn.ConvTranspose2d(2, 3, 3, padding=1),
        nn.Sequential(nn.Unflatten(3, (2, 4)), nn.Linear(4, 50), nn.Flatten(2), nn.Linear(800, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("views", [1, 2])
def test_layer_gradients_equal_those_of_a_loop(layer: nn.Module, views: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.engine.layers.MAX_PATCH_OVERLAP", 100)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 1), layer, nn.Tanh(), nn.Flatten())
    assert_same(
        exact(records(9), model, jittered, draws=64, views=views),
        loop_gradients(records(9), model, jittered, {"": 1.0}, 64, views),
    )


def test_gradients_of_a_u_net() -> None:
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


# -- clipping and sensitivity -----------------------------------------------------------------------------


@contextmanager
def recorded_sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[torch.Tensor, float]]]:
    seen: list[tuple[torch.Tensor, float]] = []

    def record(
        self: GradientVault, release: Release, total: torch.Tensor, sensitivity: float, form: bool
    ) -> torch.Tensor:
        assert not form
        seen.append((total.clone(), sensitivity))
        return torch.zeros_like(total)

    with monkeypatch.context() as patch:
        patch.setattr(GradientVault, "_noised", record)
        yield seen


def with_one(data: Floats, image: torch.Tensor, label: int) -> Floats:
    assert data.labels is not None
    return Floats(torch.cat([data.images, image]), torch.cat([data.labels, torch.tensor([label])]))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e8, math.nan, math.inf])
@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("bound", [0.7, BOUNDS])
def test_one_record_moves_a_sum_by_at_most_the_sensitivity(
    bound: Any, by_class: bool, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra image has a huge or non-finite gradient; the order of records is random."""
    model = stacked([network(seed) for seed in range(3)]) if by_class else network()
    image = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(9)) * scale
    with recorded_sums(monkeypatch) as seen:
        for data in (records(), with_one(records(), image, 2)):
            vault = opened(data, size=4, kind=FixedNormals)
            vault.gradient(model, steep, release="g", bound=bound, by_class=by_class, draws=64)
    (a, sensitivity), (b, same) = seen
    declared = math.hypot(*bound.values()) if isinstance(bound, dict) else bound
    assert sensitivity == same
    assert declared < sensitivity < 1.01 * declared
    assert float((a - b).norm()) <= sensitivity
    if 1 <= scale < math.inf:
        assert float((a - b).norm()) >= 0.99 * declared  # clipped, not dropped
    if by_class:
        assert float((a - b)[:2].norm()) < 1e-4 * declared


def test_sums_ignore_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bfloat16 sum of 2,100 records would change by 4.6 clipping norms when one record is removed."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 8))
    data = Floats(0.3 * records(2100).images + 1, torch.arange(2100) % 3)
    with recorded_sums(monkeypatch) as seen, torch.autocast("cpu", torch.bfloat16):
        for kept in (2100, 2099):
            vault = opened(Floats(data.images[:kept], torch.arange(kept) % 3), size=2048)
            vault.gradient(model, lambda m, x: 1e3 * squares(m, x), release="g", bound=1.0)
    (a, sensitivity), (b, _) = seen
    assert 0.9 < float((a - b).norm()) <= sensitivity


@pytest.mark.parametrize(("slope", "size", "bounds"), [(37, 7, [1.0]), (-44.15, 37, [b * 1e-7 for b in range(2, 60)])])
def test_underflow_does_not_exceed_the_bound(slope: float, size: float, bounds: list[float]) -> None:
    """A clipping factor or gradient below the smallest float32 would be rounded up, to twice the bound."""
    layer = nn.Linear(64, 1600, bias=False)
    nn.init.zeros_(layer.weight)

    def loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        hot = (images.flatten(1).mean(1, keepdim=True) - 0.6).clamp_min(0) / 0.4  # nonzero for the private image only
        half = 10.0 ** (slope * hot / 2)  # applied twice, since the product is not a normal float32 number
        made: torch.Tensor = half * (half * model(images.flatten(1) * 10.0 ** (size * hot)))
        return made.sum(1)

    for bright, bound in itertools.product(torch.linspace(0.95, 1.05, 20).tolist() if slope > 0 else [1.0], bounds):
        data = Floats(torch.full((1, 1, 8, 8), bright), torch.zeros(1, dtype=torch.int64))
        assert float(flat(exact(data, layer, loss, bound=bound)).norm()) <= 1.001 * bound


def test_a_parameter_may_be_a_single_number() -> None:
    model = small()
    model.register_parameter("heat", nn.Parameter(torch.tensor(0.5)))
    data = records()
    made = exact(data, model, lambda m, x: squares(m, x) * m.heat, bound=1.0)
    assert_same(made, loop_gradients(data, model, lambda m, x: squares(m, x) * m.heat, {"": 1.0}))


def test_rows_that_are_not_finite_count_as_zero() -> None:
    data, model = records(), network()
    before = exact(data, model, bound=BOUNDS)
    for bad in (math.nan, math.inf, 1e38):
        assert_same(exact(with_one(data, torch.full((1, 1, 8, 8), bad), 0), model, bound=BOUNDS), before)


def test_padding_adds_exactly_zero() -> None:
    """Without records, or with zero gradients, the sum is exactly zero."""
    empty = Floats(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))
    assert not flat(exact(empty, network())).any()

    def blind(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        return squares(model, images) * (images.flatten(1).sum(1) > 1e4)  # false for the probe images

    assert not flat(exact(records(), network(), blind)).any()


def test_an_empty_poisson_sample_gives_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "poisson_sample", lambda units, probability: torch.arange(0))
    vault = opened(records(), Release("g", 300, 0.01))
    noise = flat(vault.gradient(network(), squares, release="g", bound=BOUNDS))
    check_unit_variance(noise / (vault.plan["g"].noise * math.hypot(*BOUNDS.values())))


def test_noise_covers_all_groups_together() -> None:
    """Each parameter has noise for the joint clipping norm, not for that of its group. All gradients are zero."""
    data = Floats(torch.zeros(3, 1, 8, 8), torch.arange(3))
    vault = opened(data, Release("g", 50, 0.5))
    model = stacked([network(seed) for seed in range(3)])

    def nothing(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        return squares(model, images) * (images.flatten(1).amax(1) > 0)

    for by_class, asked in ((True, model), (False, network())):
        answer = vault.gradient(asked, nothing, release="g", bound=BOUNDS, by_class=by_class)
        for name, value in answer.items():
            if value.numel() > 500:
                check_unit_variance(value.double() / (vault.plan["g"].noise * math.hypot(*BOUNDS.values())), name)


def test_samples_are_fresh_poisson_samples() -> None:
    """Bias gradients are sample sizes; their variance distinguishes Poisson sampling from shuffled batches."""
    model = nn.Linear(64, 1)

    def loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        return model(0 * images.flatten(1))[:, 0]  # type: ignore[no-any-return]

    vault = opened(records(200), Release("g", 300, 0.2), epsilon=math.inf)
    sizes = torch.stack([vault.gradient(model, loss, release="g", bound=9.0)["bias"][0] for _ in range(300)])
    check_unit_variance((sizes.double() - 40) / math.sqrt(32))


def test_records_have_fresh_independent_normals() -> None:
    model = nn.Linear(1, 1, bias=False)
    data = Floats(torch.zeros(400, 1, 1, 1), None, ("all",))
    vault = opened(data, Release("g", 5, 1.0), epsilon=math.inf)

    def loss(model: nn.Module, images: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
        return model(normals[:, 1:])[:, 0]  # type: ignore[no-any-return]

    sums = [vault.gradient(model, loss, release="g", bound=1e6, draws=2, views=views)["weight"] for views in (1, 1, 4)]
    assert not torch.equal(sums[0], sums[1])
    spread = torch.stack(
        [value.flatten() / math.sqrt(400 / views) for value, views in zip(sums, (1, 1, 4), strict=True)]
    )
    assert float(spread.abs().max()) < 6.5  # exceeded by standard normal numbers with probability 1e-9


# -- charges ----------------------------------------------------------------------------------------------


def test_charges_are_made_in_blocks_of_a_hundredth(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        vault = opened(records(), Release("g", 200, 0.5), ledger=ledger)
        for _ in range(2):
            vault.gradient(network(), squares, release="g", bound=1.0)
        assert ledger.charged("g") == 2
        assert vault.asked["g"] == 2
        line = ledger.entries[-1]
        assert (line["kind"], line["name"], line["noise"], line["sampling_prob"]) == ("charge", "g", "fast", 0.5)
    with pytest.raises(LedgerError, match="closed"):
        vault.gradient(network(), squares, release="g", bound=1.0)


def test_nothing_is_read_when_the_budget_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    vault = opened(records(), Release("g", 2))
    for _ in range(2):
        vault.gradient(network(), squares, release="g", bound=1.0)
    looked: list[torch.Tensor] = []
    monkeypatch.setattr(GradientVault, "_pixels", lambda self, index: looked.append(index))
    for release in ("g", "h"):
        with pytest.raises(BudgetExceeded):
            vault.gradient(network(), squares, release=release, bound=1.0)
    assert not looked


def test_gradients_need_repeated_signed_releases() -> None:
    for release in (Release("g"), Release("g", 5, nonnegative=True)):
        with pytest.raises(ValueError, match="times > 1"):
            opened(records(), release).gradient(network(), squares, release="g", bound=1.0)


def test_answers_carry_no_derivative() -> None:
    model = network()
    answer = opened(records(), Release("g", 5)).gradient(model, squares, release="g", bound=1.0)
    assert all(not value.requires_grad and value.grad_fn is None for value in answer.values())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


# -- refused ----------------------------------------------------------------------------------------------


def refused(model: nn.Module, loss: Any = squares, match: str = "", **options: Any) -> None:
    vault = opened(records(), Release("g", 5))
    with pytest.raises(ValueError, match=match):
        vault.gradient(model, loss, release="g", **{"bound": 1.0, **options})
    assert vault.ledger.charged("g") == 0


def small(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), *layers, nn.Flatten(), nn.Linear(144, 3))


def test_losses_must_be_one_per_image() -> None:
    refused(small(), lambda model, x: model(x).square().sum(), "one number per image")
    refused(small(), lambda model, x: model(x).square(), "one number per image")


def test_every_parameter_must_be_in_one_group() -> None:
    refused(network(), bound={"front": 1.0}, match="it is in none")
    refused(network(), bound={"front": 1.0, "back": 1.0, "back.first": 1.0}, match="it is in back, back.first")
    refused(network(), bound={"front": 1.0, "back": 1.0, "fro": 1.0}, match="begin with fro")
    for bad in (0.0, -1.0, math.nan, math.inf, 1e-12, torch.tensor(1.0), None):
        refused(network(), bound=bad, match="a bound must be a number")
        refused(network(), bound={"front": 1.0, "back": bad}, match="a bound must be a number")


def test_invalid_models_and_views_are_refused() -> None:
    refused(network().requires_grad_(False), match="no trainable parameters")
    refused(network().double(), match="float32")
    refused(network(), by_class=True, match="stacked")
    refused(stacked([network(), network()]), by_class=True, match="each of 3 classes")
    refused(network(), views=2, match="would be equal")


# -- layer rules ------------------------------------------------------------------------------------------


@pytest.fixture
def ruled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the parameters whose gradients used a rule when the loss was traced."""
    used: set[str] = set()
    rule, chosen = gradients_module.closed_form_gradients, gradients_module._choose_rules
    watching = False

    def watched(call: Call, *args: torch.Tensor) -> Iterator[tuple[str, LayerGradient]]:
        if watching:
            used.update(call.names)
        return rule(call, *args)

    def choose(*args: Any) -> tuple[Call, ...]:
        nonlocal watching
        found = chosen(*args)
        watching = True
        return found

    monkeypatch.setattr(gradients_module, "closed_form_gradients", watched)
    monkeypatch.setattr(gradients_module, "_choose_rules", choose)
    return used


def test_rules_are_used_and_do_not_change_gradients(ruled: set[str]) -> None:
    data, model = records(), network()
    with_rules = exact(data, model)
    assert ruled == {name for name in with_rules if "front.2" not in name and "scale" not in name}
    ruled.clear()
    assert_same(with_rules, exact(data, model, performance=Performance(batch_size=7, layer_rules=False)))
    assert not ruled


def test_a_weight_with_other_uses_has_no_rule(ruled: set[str]) -> None:
    torch.manual_seed(0)
    data, model = records(), Tied()
    assert_same(exact(data, model), loop_gradients(data, model, squares, {"": 1.0}))
    assert ruled == {"other.weight", "other.bias"}


def test_a_rule_that_is_wrong_on_probes_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = gradients_module.closed_form_gradients

    def doubled(call: Call, layer_input: torch.Tensor, slope: torch.Tensor) -> Iterator[tuple[str, LayerGradient]]:
        return rule(call, layer_input, 2 * slope)

    monkeypatch.setattr(gradients_module, "closed_form_gradients", doubled)
    data, model = records(), network()
    assert_same(exact(data, model), loop_gradients(data, model, squares, {"": 1.0}))


def scaled(by: float) -> Callable[..., Any]:
    def wrong(rule: Any, call: Call, layer_input: torch.Tensor, slope: torch.Tensor) -> Any:
        return rule(call, layer_input * by, slope * by)

    return wrong


def nonsense(rule: Any, call: Call, layer_input: torch.Tensor, slope: torch.Tensor) -> Any:
    return rule(call, (layer_input * 1e3).sin() * 1e6, (slope * 77).exp())


def out_of_range(rule: Any, call: Call, layer_input: torch.Tensor, slope: torch.Tensor) -> Any:
    """Return NaN and infinity for some of the images."""
    bright = layer_input.amax() > layer_input.mean() + 2
    return rule(call, layer_input / torch.where(bright, 0.0, 1.0), slope * 1e20)


def all_nan(rule: Any, call: Call, layer_input: torch.Tensor, slope: torch.Tensor) -> Any:
    return rule(call, layer_input * math.nan, slope)


def other_shapes(rule: Any, call: Call, layer_input: torch.Tensor, slope: torch.Tensor) -> Any:
    """Return additional pieces of other lengths for each parameter."""
    for name, part in rule(call, layer_input, slope):
        extra = layer_input.flatten()[:7] * 1e9
        yield name, LayerGradient([*part.pieces, extra, torch.cat([extra, extra])], part.columns)


@pytest.mark.parametrize("wrong", [scaled(1e3), scaled(1e15), nonsense, out_of_range, all_nan, other_shapes])
@pytest.mark.parametrize("by_class", [False, True])
def test_a_wrong_rule_does_not_increase_the_sensitivity(
    wrong: Callable[..., Any], by_class: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are chosen with the correct rule and computed with a wrong one; the result is still clipped."""
    rule, chosen = gradients_module.closed_form_gradients, gradients_module._choose_rules
    turned = 0

    def choose(*args: Any) -> tuple[Call, ...]:
        nonlocal turned
        monkeypatch.setattr(gradients_module, "closed_form_gradients", rule)
        found = chosen(*args)
        turned += len(found)
        monkeypatch.setattr(gradients_module, "closed_form_gradients", lambda *given: wrong(rule, *given))
        return found

    monkeypatch.setattr(gradients_module, "_choose_rules", choose)
    model = stacked([network(seed) for seed in range(3)]) if by_class else network()
    image = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(9)) * 30
    with recorded_sums(monkeypatch) as seen:
        for data in (records(), with_one(records(), image, 2)):
            vault = opened(data, size=4)
            try:
                vault.gradient(model, squares, release="g", bound=BOUNDS, by_class=by_class)
            except (RuntimeError, ValueError):  # when the noised sum is assembled, or before anything is charged
                assert vault.ledger.void is None
                if not seen:
                    assert vault.ledger.charged("g") == 0
                    return
    assert turned
    (a, sensitivity), (b, same) = seen
    assert sensitivity == same == pytest.approx(math.hypot(*BOUNDS.values()), rel=0.01)
    assert float((a - b).norm()) <= sensitivity
    assert a.isfinite().all()


def test_a_wrong_engine_does_not_increase_the_sensitivity(monkeypatch: pytest.MonkeyPatch) -> None:
    """`vectors` clips the result of any function."""
    weight = torch.ones(64)

    def wild(shared: dict[str, torch.Tensor], image: torch.Tensor) -> list[Any]:
        flat = image.flatten() * shared["weight"]
        return [flat.exp() * 1e9, (flat[None, :8] / (flat[0] - flat[0]).abs(), flat[None]), flat.sum()]

    with recorded_sums(monkeypatch) as seen:
        for data in (records(), with_one(records(), torch.full((1, 1, 8, 8), 3.0), 1)):
            vault = opened(data, size=4)
            vault.vectors(wild, {"weight": weight}, release="g", groups=[(1.0, [0, 2]), (0.5, [1])])
    (a, sensitivity), (b, same) = seen
    assert sensitivity == same == pytest.approx(math.hypot(1.0, 0.5), rel=0.01)
    assert float((a - b).norm()) <= sensitivity
    assert a.isfinite().all()


# -- performance options ----------------------------------------------------------------------------------


def test_lower_precision_needs_a_gpu() -> None:
    refused(network(), performance=Performance(precision=torch.bfloat16), match="on a CPU")


def test_a_captured_query_on_a_cpu_calls_the_function() -> None:
    calls = []

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        calls.append(inputs)
        return inputs[0] + 1

    made = Performance(record=True).accelerate(function)
    for _ in range(5):
        assert torch.equal(made(torch.ones(2)), torch.full((2,), 2.0))
    assert len(calls) == 5
    assert Performance(record=False).accelerate(function) is function
    data, model = records(), network()
    assert_same(*(exact(data, model, performance=Performance(batch_size=7, record=record)) for record in (True, False)))


def test_another_bound_is_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clipping norm and the noise always use the same bound."""
    model, calls = network(), 0

    def loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return squares(model, images)

    with recorded_sums(monkeypatch) as seen:
        vault, counted = opened(records()), []
        for bound in (10.0, 0.1, 0.1, 0.1):
            vault.gradient(model, loss, release="g", bound=bound)
            counted.append(calls)
    assert counted[0] < counted[1] == counted[2] == counted[3]  # traced once per bound
    assert [sensitivity for _, sensitivity in seen] == pytest.approx([10, 0.1, 0.1, 0.1], rel=0.02)
    for total, sensitivity in seen[1:]:
        assert float(total.norm()) <= len(records().images) * sensitivity


def test_a_parameter_that_is_frozen_later_is_excluded() -> None:
    model = network()
    vault = opened(records(), epsilon=math.inf)
    all_gradients = vault.gradient(model, squares, release="g", bound=1.0)
    model.front.requires_grad_(False)
    assert set(vault.gradient(model, squares, release="g", bound=1.0)) == {n for n in all_gradients if "front" not in n}


GPU = pytest.mark.gpu


@GPU
@pytest.mark.parametrize("by_class", [False, True])
def test_a_captured_query_equals_the_plain_function(by_class: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = (stacked([small() for _ in range(3)]) if by_class else small()).cuda()
    sums = []
    for record in (False, True):
        with recorded_sums(monkeypatch) as seen:
            vault = GradientVault(records(), calibrate([Release("g", 9)], Budget(1)), device="cuda")
            performance = Performance(batch_size=7, record=record)
            for _ in range(3):
                vault.gradient(model, squares, release="g", bound=0.5, by_class=by_class, performance=performance)
        sums.append(seen)
    for plain, replayed in zip(*sums, strict=True):
        assert torch.allclose(plain[0], replayed[0], rtol=1e-2, atol=1e-3)


@GPU
def test_a_captured_query_uses_new_inputs() -> None:
    made = CapturedQuery(lambda x, y: x * y)
    for number in range(6):
        x, y = torch.full((3,), float(number), device="cuda"), torch.arange(3.0, device="cuda")
        assert torch.equal(made(x, y), x * y)
