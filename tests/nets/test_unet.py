"""U-Net: image sizes, row independence, noise level, class and embedding, attention, per-example gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from sfumato.data import ImageSet
from sfumato.data.pixels import to_unit_range
from sfumato.engine import GradientVault, calibrate
from sfumato.nets import unet as module
from sfumato.nets.unet import AttentionBlock, UNet
from sfumato.privacy import Budget, Release


def attentive(seed: int = 0, attention: int = 2) -> UNet:
    """Return a U-Net whose attention does not start at zero."""
    torch.manual_seed(seed)
    network = UNet(1, 4, widths=(8, 16), context=8, attention=attention)
    for block in network.modules():
        if isinstance(block, AttentionBlock):
            nn.init.normal_(block.projection.weight, std=0.5)
    return network


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 9, 13)])
def test_output_has_the_shape_of_the_input(shape: tuple[int, int, int]) -> None:
    network = UNet(shape[0], 4, widths=(8, 16, 16), context=8)
    output = network(torch.randn(5, *shape), torch.rand(5), torch.arange(5) % 4)
    assert output.shape == (5, *shape)


def test_rows_are_independent_and_depend_on_level_and_class() -> None:
    torch.manual_seed(0)
    network = UNet(1, 4, widths=(8, 16), context=8)
    images, levels, labels = torch.randn(6, 1, 8, 8), torch.rand(6), torch.arange(6) % 4
    output = network(images, levels, labels)
    for row in range(6):
        single = network(images[row : row + 1], levels[row : row + 1], labels[row : row + 1])
        assert torch.allclose(single[0], output[row], atol=1e-5)
    assert not torch.allclose(network(images, levels + 0.5, labels), output, atol=1e-3)
    assert not torch.allclose(network(images, levels, 3 - labels), output, atol=1e-3)


@pytest.mark.parametrize(("attention", "blocks"), [(0, 0), (1, 1), (2, 3), (3, 5)])
def test_attention_is_at_the_lowest_resolutions(attention: int, blocks: int) -> None:
    network = UNet(1, 2, widths=(8, 16, 16), context=8, attention=attention)
    assert sum(isinstance(part, AttentionBlock) for part in network.modules()) == blocks
    assert isinstance(network.middle, AttentionBlock) == (attention > 0)
    assert isinstance(network.down[0], AttentionBlock) == isinstance(network.up[-1], AttentionBlock) == (attention == 3)
    assert network(torch.randn(2, 1, 9, 13), torch.rand(2), torch.zeros(2)).shape == (2, 1, 9, 13)


def independent(network: UNet) -> bool:
    images, levels, labels = torch.randn(5, 1, 8, 8), torch.rand(5), torch.arange(5) % 4
    with torch.no_grad():
        together = network(images, levels, labels)
        alone = torch.cat([network(*(part[row : row + 1] for part in (images, levels, labels))) for row in range(5)])
    return torch.allclose(alone, together, atol=1e-5)


def test_rows_are_independent_with_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert independent(attentive())
    plain = AttentionBlock.forward

    def mixing(self: AttentionBlock, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        maps = plain(self, x, context)
        return maps + 0.1 * maps.mean(0, keepdim=True)

    monkeypatch.setattr(AttentionBlock, "forward", mixing)
    assert not independent(attentive())


@pytest.mark.parametrize("width", [8, 128, 200])  # one head, two heads of 64, and channels that 3 heads do not divide
def test_attention_equals_that_of_pytorch(width: int) -> None:
    torch.manual_seed(0)
    block, maps, context = AttentionBlock(width, width, 4), torch.randn(2, width, 3, 5), torch.randn(2, 4)
    nn.init.normal_(block.projection.weight)
    assert block.heads == {8: 1, 128: 2, 200: 2}[width]
    with torch.no_grad():
        before = super(AttentionBlock, block).forward(maps, context)
        parts = block.queries_keys_values(block.attention_norm(before)).chunk(3, 1)
        queries, keys, values = (
            part.reshape(2, block.heads, width // block.heads, 15).transpose(2, 3) for part in parts
        )
        mixed = functional.scaled_dot_product_attention(queries, keys, values).transpose(2, 3).reshape(2, width, 3, 5)
        expected = before + block.projection(mixed)
        assert torch.allclose(block(maps, context), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, expected, atol=1e-2)


def test_attention_starts_without_effect_up_to_a_constant() -> None:
    """Only the bias of the projection remains; with none, the block is a residual block."""
    torch.manual_seed(0)
    block, maps, context = AttentionBlock(8, 16, 4), torch.randn(2, 8, 4, 4), torch.randn(2, 4)
    block.projection.bias = None
    assert torch.equal(block(maps, context), super(AttentionBlock, block).forward(maps, context))


@pytest.mark.parametrize("attention", [0, 1])
def test_label_minus_one_is_no_class(attention: int) -> None:
    """No class adds nothing to the context: the weights of the classes have no effect, and each class differs."""
    network = attentive(attention=attention)
    images, levels = torch.randn(1, 1, 8, 8).expand(5, -1, -1, -1), torch.full((5,), 0.3)
    labels = torch.tensor([-1, 0, 1, 2, 3])
    with torch.no_grad():
        before = network(images, levels, labels)
        network.context[0].weight[:, -4:] = 0.0
        after = network(images, levels, labels)
    assert torch.allclose(after[0], before[0], atol=1e-6)
    assert torch.allclose(after, after[:1].expand_as(after), atol=1e-6)
    assert all((before[row] - before[0]).abs().max() > 1e-3 for row in range(1, 5))


def test_the_vault_gives_per_example_gradients_with_attention() -> None:
    """Each image's gradient is clipped on its own: the sum equals that of a loop, the unclipped sum does not."""
    network, bound = attentive(), 0.05
    pixels = torch.randint(256, (5, 1, 8, 8), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    images = ImageSet(pixels, torch.arange(5) % 4, tuple("abcd"))

    def loss(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (model(x, x.mean((1, 2, 3)), labels) - x).square().mean((1, 2, 3))

    vault = GradientVault(images, calibrate([Release("g", 2)], Budget(math.inf)))
    got = vault.gradient(network, loss, release="g", bound=bound, with_labels=True)
    clipped, plain = ({name: torch.zeros_like(value) for name, value in got.items()} for _ in range(2))
    norms = []
    for row in range(5):
        inputs = to_unit_range(pixels[row : row + 1]), images.labels[row : row + 1]  # type: ignore[index]
        gradients = torch.autograd.grad(loss(network, *inputs).sum(), list(network.parameters()))
        norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm())
        for name, gradient in zip(got, gradients, strict=True):
            clipped[name] += gradient * (bound / norms[-1]).clamp(max=1)
            plain[name] += gradient
    assert min(norms) > 2 * bound
    assert got.keys() == dict(network.named_parameters()).keys()
    assert distance(got, clipped) < 1e-4 * bound
    assert distance(got, plain) > bound


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one))


def test_wide_blocks_have_heads_of_the_stated_width() -> None:
    assert AttentionBlock(8, 4 * module.HEAD_WIDTH, 4).heads == 4


# -- an embedding of the image ------------------------------------------------------------------------------

CONDITION = 5


def conditioned(seed: int = 0) -> UNet:
    torch.manual_seed(seed)
    return UNet(1, 4, widths=(8, 16), context=8, attention=1, condition=CONDITION)


def given(count: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return images, noise levels, labels and embeddings of norm one."""
    generator = torch.Generator().manual_seed(1)
    images, levels = torch.randn(count, 1, 8, 8, generator=generator), torch.rand(count, generator=generator)
    rows = functional.normalize(torch.randn(count, CONDITION, generator=generator), dim=1)
    return images, levels, torch.arange(count) % 4, rows


def test_zeros_are_no_embedding_and_every_embedding_matters() -> None:
    network, (images, levels, labels, rows) = conditioned(), given()
    with torch.no_grad():
        none = network(images, levels, labels)
        assert torch.equal(network(images, levels, labels, condition=torch.zeros_like(rows)), none)
        known = network(images, levels, labels, condition=rows)
        assert (known - none).abs().amax((1, 2, 3)).min() > 1e-2
        assert not torch.allclose(network(images, levels, labels, condition=rows.flip(0)), known, atol=1e-2)
        alone = [network(*(part[row : row + 1] for part in (images, levels, labels)), condition=rows[row : row + 1])
                 for row in range(6)]  # fmt: skip
    assert torch.allclose(torch.cat(alone), known, atol=1e-5)


def test_the_context_network_and_every_block_see_the_embedding() -> None:
    """The weights of the embedding have a gradient everywhere if it is known, and nowhere if it is not."""
    network, (images, levels, labels, rows) = conditioned(), given()
    weights = {name: value for name, value in network.named_parameters() if name.endswith("scale_shift.weight")}
    assert len(weights) == 3  # down, middle, up
    first = network.context[0].weight
    for condition, there in ((rows, True), (None, False)):
        network.zero_grad()
        network(images, levels, labels, condition=condition).square().sum().backward()
        for name, value in weights.items():
            assert value.grad is not None
            assert bool(value.grad[:, -CONDITION:].any()) == there, name
            assert value.grad[:, :-CONDITION].any()
        assert bool(first.grad[:, 8 : 8 + CONDITION].any()) == there
        assert first.grad[:, 8 + CONDITION :].any()  # labels are the last columns


def test_an_embedding_is_enlarged_to_the_scale_of_the_other_inputs() -> None:
    """An embedding of norm one gets the norm sqrt(width), so that its entries are about one."""
    network, (images, levels, labels, rows) = conditioned(), given()
    seen: list[torch.Tensor] = []
    network.middle.scale_shift.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    network(images, levels, labels, condition=rows)
    assert torch.allclose(seen[0][:, -CONDITION:], math.sqrt(CONDITION) * rows)


def test_the_vault_gives_per_example_gradients_with_an_embedding() -> None:
    """Records are pixels and an embedding: the sum of clipped gradients equals that of a loop."""
    network, bound = conditioned(), 0.05
    images, _, labels, _ = given(5)
    pixels = (255 * images.sigmoid()).byte()
    held = ImageSet(pixels, labels, tuple("abcd"))
    matrix = torch.randn(64, CONDITION, generator=torch.Generator().manual_seed(2)) / 8

    def record(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.flatten(1), functional.normalize(x.flatten(1) @ matrix, dim=1)], 1)

    def loss(model: nn.Module, records: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, rows = records[:, :64].unflatten(1, (1, 8, 8)), records[:, 64:]
        return (model(x, x.mean((1, 2, 3)), labels, condition=rows) - x).square().mean((1, 2, 3))

    vault = GradientVault(held, calibrate([Release("g", 2)], Budget(math.inf))).map(record)
    got = vault.gradient(network, loss, release="g", bound=bound, with_labels=True)
    expected, other = ({name: torch.zeros_like(value) for name, value in got.items()} for _ in range(2))
    records = record(to_unit_range(pixels))
    for row in range(5):
        for target, wrong in ((expected, 0), (other, 1)):
            inputs = torch.cat([records[row, :64], records[(row + wrong) % 5, 64:]])[None]  # another image's embedding
            gradients = torch.autograd.grad(loss(network, inputs, labels[row : row + 1]).sum(), network.parameters())
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            assert norm > bound
            for name, gradient in zip(got, gradients, strict=True):
                target[name] += gradient * bound / norm
    assert distance(got, expected) < 1e-3 * bound
    assert distance(got, other) > 0.1 * bound
