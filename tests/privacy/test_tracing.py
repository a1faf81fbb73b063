"""Tracing: a method's code runs on public input only; code that cannot be a safe graph is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from sfumato.engine import GradientVault, Performance, calibrate
from sfumato.privacy import Budget, Release
from sfumato.privacy.tracing import PROBES, check_on_probes, check_same_rows, per_record, probe_records, trace

CPU = torch.device("cpu")
SECRET = 123.25  # a pixel of every private image, and of nothing else


@dataclass
class Floats:
    images: torch.Tensor
    labels: torch.Tensor | None = None
    classes: tuple[str, ...] = ("all",)


def private(count: int = 40) -> Floats:
    images = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    images[:, 0, 0, 0] = SECRET
    return Floats(images)


def opened(data: Any, *, epsilon: float = 1.0, **options: Any) -> GradientVault:
    plan = calibrate([Release("x", 50)], Budget(epsilon))
    return GradientVault(data, plan, performance=Performance(batch_size=7), **options)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the reads of private records."""
    seen: list[int] = []
    read = GradientVault._pixels

    def watched(self: GradientVault, index: torch.Tensor) -> torch.Tensor:
        seen.append(index.numel())
        return read(self, index)

    monkeypatch.setattr(GradientVault, "_pixels", watched)
    return seen


# -- refused before anything is charged or read -----------------------------------------------------------


class WithState(nn.Module):
    """A network that changes a buffer or a parameter at each call."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16))
        self.scale, self.what = nn.Parameter(torch.ones(16)), what

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.flatten(1)
        if self.what == "buffer":
            self.seen.add_(rows.sum(0))
        else:
            self.scale.data.add_(rows.sum(0))
        return rows * self.scale + self.seen


@torch.library.custom_op("sfumato_test::wide", mutates_args=())
def wide(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x)


wide.register_fake(lambda x: torch.empty_like(x))
wide.register_vmap(lambda info, dims, x: (torch.ones_like(x) * x.mean(), 0))


def cholesky_else(x: torch.Tensor) -> torch.Tensor:
    def same(y: torch.Tensor) -> tuple[torch.Tensor]:
        return (y.clone(),)

    return torch.ops.higher_order.cond(x.sum() > 0, same, same, (x,))[0].flatten(1)  # type: ignore[no-any-return]


CAPTURED = torch.ones(16)
BATCH_NORM = r"has batch norm in training mode.*call \.eval\(\).*group norm"
DATA_DEPENDENT = "branches on pixel values|takes a value out"


def refused() -> dict[str, tuple[Callable[..., Any], str]]:
    drop, norm = nn.Dropout(0.5), nn.BatchNorm2d(1)
    instance = nn.InstanceNorm2d(1, track_running_stats=True)
    return {
        "a branch": (lambda x: x.flatten(1) if x.mean() > 0 else -x.flatten(1), DATA_DEPENDENT),
        "a loop": (lambda x: x.flatten(1) * next(n for n in range(9) if x.amax() < n), DATA_DEPENDENT),
        "item": (lambda x: x.flatten(1) * x.mean().item(), "item"),
        "float": (lambda x: x.flatten(1) * float(x.mean()), DATA_DEPENDENT),
        "numpy": (lambda x: torch.from_numpy(x.numpy()).flatten(1), DATA_DEPENDENT),
        "tolist": (lambda x: torch.tensor(x.flatten(1).tolist()), DATA_DEPENDENT),
        "a boolean mask": (lambda x: x[x > 0][None], DATA_DEPENDENT),
        "dropped images": (lambda x: x[x.flatten(1).std(1) > 0].flatten(1), DATA_DEPENDENT),
        "nonzero": (lambda x: x.nonzero().float(), DATA_DEPENDENT),
        "unique": (lambda x: x.unique()[None], DATA_DEPENDENT),
        "randn": (lambda x: x.flatten(1) + torch.randn(16), "random numbers.*constants.*draws="),
        "randn_like": (lambda x: x.flatten(1) + torch.randn_like(x.flatten(1)), "random numbers"),
        "randperm": (lambda x: x.flatten(1)[:, torch.randperm(16)], "random numbers"),
        "dropout": (lambda x: drop(x).flatten(1), "random numbers.*eval mode"),
        "functional dropout": (lambda x: functional.dropout(x).flatten(1), "random numbers.*eval mode"),
        "batch norm": (lambda x: norm(x).flatten(1), BATCH_NORM),
        "batch norm without running statistics": (
            lambda x: functional.batch_norm(x, None, None, training=True).flatten(1),
            "mixes the images",
        ),
        "instance norm with running statistics": (lambda x: instance(x).flatten(1), BATCH_NORM),
        "a captured tensor": (lambda x: x.flatten(1) * CAPTURED.mul_(2), "outlives the call"),
        "a copy into a captured tensor": (
            lambda x: (CAPTURED.copy_(x.flatten(1)[0]), x.flatten(1))[1],
            "outlives the call",
        ),
        "a view of a captured tensor": (lambda x: x.flatten(1) + CAPTURED[:4].add_(1).sum(), "outlives the call"),
        "the input": (lambda x: x.mul_(2).flatten(1), "outlives the call"),
        "a buffer": (WithState("buffer"), "outlives the call"),
        "a parameter": (WithState("parameter"), "outlives the call"),
        "uninitialised memory": (lambda x: torch.empty(1, 16) + x.flatten(1), "uninitialised memory.*use zeros"),
        "empty_like": (lambda x: torch.empty_like(x).flatten(1), "uninitialised memory"),
        "new_empty": (lambda x: x.new_empty(1, 16) + 0, "uninitialised memory"),
        "a custom operator": (lambda x: wide(x).flatten(1), "leaves the graph"),
        "cond": (cholesky_else, "leaves the graph"),
        "index_fill": (
            lambda x: torch.zeros(len(x), 1).index_fill(1, torch.zeros(1, dtype=torch.int64), x.mean()),
            "mixes records under torch.vmap",
        ),
        "centring": (lambda x: (x - x.mean(0)).flatten(1), "mixes the images"),
        "mixup": (lambda x: (x + x.flip(0)).flatten(1), "mixes the images"),
        "attention": (lambda x: (x.flatten(1) @ x.flatten(1).T).softmax(1) @ x.flatten(1), "mixes the images"),
        "roll": (lambda x: x.roll(1, 0).flatten(1), "mixes the images"),
        "a scalar": (lambda x: x.sum(), "one row per image"),
        "one row for all": (lambda x: x.flatten(1).sum(0, keepdim=True), "mixes the images"),
        "two rows": (lambda x: torch.cat([x.flatten(1), x.flatten(1)]), "one row per image"),
        "repr": (lambda x: x.flatten(1) * len(repr(x)), "mixes the images|cannot be traced"),
    }


@pytest.mark.parametrize("query", ["sum", "map"])
@pytest.mark.parametrize("name", refused())
def test_unsafe_features_are_refused_before_anything_is_read(name: str, query: str, reads: list[int]) -> None:
    feature, message = refused()[name]
    vault = opened(private())
    kept = CAPTURED.clone()
    with pytest.raises(ValueError, match=f"(?s){message}"):
        vault.sum(feature, release="x", bound=1.0) if query == "sum" else vault.map(feature)
    CAPTURED.copy_(kept)
    assert vault.ledger.charged("x") == 0
    assert vault.ledger.void is None
    assert not reads


def losses() -> dict[str, tuple[nn.Module, Callable[..., Any], str]]:
    def net(*layers: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3), *layers, nn.Flatten(), nn.Linear(8, 3))

    def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum(1)  # type: ignore[no-any-return]

    return {
        "batch norm": (net(nn.BatchNorm2d(2)), squares, f"mixes the images.*{BATCH_NORM}"),
        "batch norm without running statistics": (
            net(nn.BatchNorm2d(2, track_running_stats=False)),
            squares,
            f"mixes the images.*{BATCH_NORM}",
        ),
        "dropout": (net(nn.Dropout(0.5)), squares, "random numbers|mixes the images"),  # its losses may agree by chance
        "randomness": (net(), lambda m, x: squares(m, x + 1e-4 * torch.randn_like(x)), "random numbers"),
        "centring": (net(), lambda m, x: squares(m, x - x.mean(0)), "mixes the images"),
        "a branch": (net(), lambda m, x: squares(m, x if x.amax() < 100 else -x), DATA_DEPENDENT),
        "item": (net(), lambda m, x: squares(m, x) * (0 if (x.amax() > 100).item() else 1), DATA_DEPENDENT),
        "a scalar": (net(), lambda m, x: squares(m, x).sum(), "one number per image"),
        "a mean": (net(), lambda m, x: squares(m, x).mean(0, keepdim=True), "one number per image"),
        "a row": (net(), lambda m, x: m(x).square(), "one number per image"),
        "a custom operator": (
            net(),
            lambda m, x: squares(m, x) * wide(x).mean((1, 2, 3)),
            "leaves the graph|cannot be",
        ),
        "a captured tensor": (net(), lambda m, x: squares(m, x) * CAPTURED[:1].mul_(1.0), "outlives the call|captured"),
    }


@pytest.mark.parametrize("name", losses())
def test_unsafe_losses_are_refused_before_anything_is_read(name: str, reads: list[int]) -> None:
    model, loss, message = losses()[name]
    vault = opened(private())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises((ValueError, RuntimeError), match=f"(?s){message}"):
        vault.gradient(model, loss, release="x", bound=1.0)
    assert vault.ledger.charged("x") == 0
    assert not reads
    if name != "batch norm":  # its running statistics may contain probe images
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_same_networks_in_eval_mode_are_accepted() -> None:
    for layer in (nn.BatchNorm2d(2), nn.Dropout(0.5)):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), layer, nn.Flatten()).eval()
        opened(private()).sum(model, release="x", bound=1.0)
        opened(private()).gradient(model, lambda m, x: m(x).square().sum(1), release="x", bound=1.0)


def test_new_memory_that_is_filled_before_it_is_read_is_accepted() -> None:
    def filled(images: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(images), 16).fill_(2.0) * images.flatten(1)

    def assigned(images: torch.Tensor) -> torch.Tensor:
        rows = images.flatten(1).clone()
        rows[:, 0] = 0.0
        return rows

    found = opened(private(), epsilon=math.inf).sum(filled, release="x", bound=1e6)
    assert torch.allclose(found, 2 * private().images.flatten(1).sum(0), rtol=1e-4, atol=1e-3)
    assert float(opened(private(), epsilon=math.inf).sum(assigned, release="x", bound=1e6)[0]) == 0


def test_probes_cover_the_first_classes() -> None:
    """An embedding table that is too short fails before an image is read."""
    data = Floats(torch.zeros(3, 1, 4, 4), torch.tensor([0, 1, 2]), tuple("abc"))
    short = torch.zeros(2, 16)
    vault = opened(data)
    with pytest.raises((ValueError, IndexError), match=r"out of (bounds|range)"):
        vault.sum(lambda x, labels: x.flatten(1) + short[labels], release="x", bound=1.0, with_labels=True)
    assert vault.ledger.charged("x") == 0
    assert vault.ledger.void is None


class BatchWide(torch.autograd.Function):
    """An operator with a custom vmap rule, which would receive all images."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
        return torch.tanh(x) * torch.where((x.flatten(1).amax(1) > 9).any(), -1.0, 1.0), 0


def test_custom_vmap_rules_are_not_used() -> None:
    """The graph contains only what the function does to one image."""
    vault = opened(private(), epsilon=math.inf)
    found = vault.sum(lambda x: BatchWide.apply(x).flatten(1), release="x", bound=1e6)  # type: ignore[no-untyped-call]
    assert torch.allclose(found, private().images.flatten(1).tanh().sum(0), atol=1e-3)


# -- side effects see public input only -------------------------------------------------------------------


def stored_tensors(value: Any) -> list[torch.Tensor]:
    found = [value] if isinstance(value, torch.Tensor) else []
    if isinstance(value, dict):
        found += [each for one in value.values() for each in stored_tensors(one)]
    if isinstance(value, list | tuple):
        found += [each for one in value for each in stored_tensors(one)]
    return found


def assert_public(held: list[torch.Tensor]) -> None:
    """Check that tensors have no values, or those of few probe images, without the secret of private images."""
    for each in held:
        if not isinstance(each, FakeTensor):
            plain = (
                torch._C._functorch.get_unwrapped(each)
                if torch._C._functorch.is_functorch_wrapped_tensor(each)
                else each
            )
            if isinstance(plain, FakeTensor):
                continue
            assert plain.numel() == 0 or float(plain.detach().abs().max()) < SECRET / 2
            assert plain.ndim == 0 or plain.shape[0] <= 16


class Careless(nn.Module):
    """A careless network that stores, prints, appends and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3)
        self.last: Any = None
        self.seen: list[torch.Tensor] = []
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        made: torch.Tensor = self.layer(images.flatten(1))
        self.last = {"made": made.detach(), "images": images}
        self.seen.append(images)
        print("the largest pixel is", images.abs().max().detach())
        return made


def careless_loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    losses: torch.Tensor = model(images).square().sum(1)
    model.loss = losses.detach()
    return losses


@pytest.mark.parametrize("query", ["sum", "map", "gradient"])
def test_stored_and_printed_values_are_public(query: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed, calls = [], []
    for data in (private(), private(400), Floats(torch.full((3, 1, 4, 4), math.nan))):
        torch.manual_seed(0)
        model = Careless()
        vault = opened(data)
        if query == "sum":
            vault.sum(model, release="x", bound=1.0)
        elif query == "map":
            vault.map(model)
        else:
            vault.gradient(model, careless_loss, release="x", bound=1.0)
        assert_public(stored_tensors([model.last, model.seen, model.__dict__.get("loss")]))
        printed.append(capsys.readouterr().out)
        calls.append(model.calls)
        assert str(SECRET) not in printed[-1]
    assert len(set(calls)) == 1
    assert len(set(printed)) == 1


@pytest.mark.parametrize("query", ["sum", "map", "gradient"])
def test_a_methods_code_does_not_run_on_private_images(
    query: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, calls, first = Careless(), [], []
    read = GradientVault._pixels

    def watched(self: GradientVault, index: torch.Tensor) -> torch.Tensor:
        if not first:
            first.append(model.calls)
            capsys.readouterr()
        calls.append(model.calls)
        return read(self, index)

    monkeypatch.setattr(GradientVault, "_pixels", watched)
    vault = opened(private(100))
    for _ in range(1 if query == "map" else 3):
        if query == "sum":
            vault.sum(model, release="x", bound=1.0)
        elif query == "map":
            vault.map(model)
        else:
            vault.gradient(model, careless_loss, release="x", bound=1.0)
    assert len(calls) >= 15
    assert set(calls) == {model.calls} == set(first)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("query", ["sum", "gradient"])
def test_a_feature_cannot_raise_on_a_pixel(query: str, reads: list[int]) -> None:
    def picky(images: torch.Tensor) -> torch.Tensor:
        if images.max() > 100:
            raise RuntimeError(f"too bright: {images.max()}")
        return images.flatten(1)

    vault = opened(private())
    ask = {
        "sum": lambda: vault.sum(picky, release="x", bound=1.0),
        "gradient": lambda: vault.gradient(nn.Linear(16, 1), lambda m, x: m(picky(x))[:, 0], release="x", bound=1.0),
    }
    with pytest.raises(ValueError, match=DATA_DEPENDENT):
        ask[query]()
    assert not reads


def test_hooks_see_public_input_only() -> None:
    seen: list[torch.Tensor] = []
    model = nn.Linear(16, 2)
    model.register_forward_hook(lambda module, given, made: seen.extend([*given, made]))

    def loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = model(images.flatten(1))
        if made.requires_grad:
            made.register_hook(lambda slope: seen.append(slope))
        return made.square().sum(1)

    opened(private()).gradient(model, loss, release="x", bound=1.0)
    assert seen
    assert_public(seen)


def test_python_state_is_frozen_by_tracing() -> None:
    """A counter of calls has no effect within a query or on later queries."""
    calls = 0

    def schedule(images: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return images.flatten(1)

    vault = opened(private(), epsilon=math.inf)
    first = vault.sum(schedule, release="x", bound=1.0)
    for _ in range(5):
        assert torch.allclose(vault.sum(schedule, release="x", bound=1.0), first, atol=1e-4)
    assert calls <= 3


def test_updated_parameters_are_used() -> None:
    """Captured tensors are read when the graph runs, so an optimiser step changes the answer."""
    model = nn.Linear(16, 1, bias=False)

    def loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        return model(images.flatten(1)).square()[:, 0] / 2  # type: ignore[no-any-return]

    data = private()
    vault = opened(data, epsilon=math.inf)
    for scale in (0.0, 0.1, 0.3):
        with torch.no_grad():
            model.weight.fill_(scale)
        rows = data.images.flatten(1)
        expected = (rows * (rows @ model.weight.detach().T)).sum(0)
        found = vault.gradient(model, loss, release="x", bound=1e6)["weight"][0]
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-2)


# -- single functions -------------------------------------------------------------------------------------


def test_a_graph_of_one_record_maps_over_batches() -> None:
    probes = probe_records((1, 4, 4), CPU)
    graph = trace(lambda shift, x: (x + shift).tanh().flatten(), torch.ones(1), probes[0])
    rows = check_on_probes(graph, [torch.ones(1)], [probes], "it")[0]
    assert torch.allclose(rows, (probes + 1).tanh().flatten(1))
    many = torch.randn(9, 1, 4, 4)
    assert torch.allclose(per_record(graph, 1, 1)(torch.zeros(1), many), many.tanh().flatten(1))


def test_dead_code_is_removed_from_the_graph() -> None:
    graph = trace(lambda x: (x.exp().sum(), x + 1)[1], torch.zeros(3))
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [torch.ops.aten.add.Tensor]


def test_probe_records_are_fixed_and_distinct() -> None:
    images = probe_records((3, 8, 8), CPU)
    assert images.shape == (PROBES, 3, 8, 8)
    assert torch.equal(images, probe_records((3, 8, 8), CPU))
    assert -1 <= float(images.min()) < -0.9
    assert 0.9 < float(images.max()) <= 1
    assert len(images.flatten().unique()) == images.numel()


def test_same_rows_allows_rounding_only() -> None:
    rows = torch.randn(3, 5)
    check_same_rows(rows, rows + 1e-5, "differ")
    check_same_rows(rows * math.nan, rows * math.nan, "differ")
    for other in (rows + 1, rows[:, :4], rows.flip(0), rows * math.nan):
        with pytest.raises(ValueError, match="differ"):
            check_same_rows(rows, other, "differ")


def test_queries_do_not_change_the_global_random_state() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    opened(private()).sum(lambda x: x.flatten(1), release="x", bound=1.0)
    opened(private()).gradient(nn.Linear(16, 1).eval(), lambda m, x: m(x.flatten(1))[:, 0], release="x", bound=1.0)
    torch.manual_seed(3)
    nn.Linear(16, 1)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    nn.Linear(16, 1)
    assert torch.equal(after, torch.get_rng_state())
