"""Score network: energy and score agree; the score-matching losses agree on a Gaussian."""

from __future__ import annotations

import copy

import pytest
import torch

from sfumato.nets.score import SCORE_KINDS, SIGMA_DATA, ScoreNetwork, denoising_loss, sliced_loss
from sfumato.nets.unet import middle_size


def small_network(kind: str, code: int = 0) -> ScoreNetwork:
    torch.manual_seed(0)
    return ScoreNetwork(1, 3, kind=kind, widths=(8, 16), code=code)


def noisy(count: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 1, 8, 8), torch.tensor([0.1, 0.5, 1.0, 5.0])[:count], torch.arange(count) % 3


def test_score_is_minus_the_gradient_of_the_energy() -> None:
    network, (x, levels, labels) = small_network("energy"), noisy()
    x = x.requires_grad_(True)
    score, energy = network.with_energy(x, levels, labels)
    assert energy is not None
    (gradient,) = torch.autograd.grad(energy.sum(), x)
    assert torch.allclose(score, -gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))
    assert small_network("score").with_energy(*noisy())[1] is None


@pytest.mark.parametrize("kind", SCORE_KINDS)
def test_rows_are_independent_and_depend_on_label_and_code(kind: str) -> None:
    network, (x, levels, labels) = small_network(kind, code=5), noisy()
    code = torch.randn(4, 5, *middle_size((8, 8), (8, 16)))
    batch = network(x, levels, labels, code)
    rows = torch.cat([network(x[i : i + 1], levels[i : i + 1], labels[i : i + 1], code[i : i + 1]) for i in range(4)])
    assert torch.allclose(batch, rows, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(batch, network(x, levels, (labels + 1) % 3, code), rtol=1e-2)
    assert not torch.allclose(batch, network(x, levels, labels, code + 1), rtol=1e-2)


@pytest.mark.parametrize("kind", SCORE_KINDS)
def test_scores_and_losses_take_an_embedding(kind: str) -> None:
    torch.manual_seed(0)
    network, (x, levels, labels) = ScoreNetwork(1, 3, kind=kind, widths=(8, 16), condition=5), noisy()
    rows, noise = torch.randn(4, 5), torch.randn_like(x)
    for run in (
        lambda given: network(x, levels, labels, condition=given),
        lambda given: denoising_loss(network, x, noise, levels, labels, condition=given),
    ):
        assert torch.equal(run(torch.zeros_like(rows)), run(None))
        assert not torch.allclose(run(rows), run(None), rtol=1e-3)


def test_other_classes_keep_the_weights_of_the_embedding() -> None:
    torch.manual_seed(0)
    network, (x, levels, labels) = ScoreNetwork(1, 3, widths=(8, 16), condition=5), noisy()
    rows, changed = torch.randn(4, 5), network.with_classes(torch.eye(3)[[2, 1, 0, 0]])
    with torch.no_grad():
        got = changed(x, levels, 2 - labels, condition=rows)
        assert torch.allclose(got, network(x, levels, labels, condition=rows), atol=1e-5)
        assert not torch.allclose(got, changed(x, levels, 2 - labels), atol=1e-2)


@pytest.mark.parametrize("kind", SCORE_KINDS)
def test_sliced_loss_equals_the_jacobian_vector_product(kind: str) -> None:
    network, (x, levels, labels) = small_network(kind), noisy(2)
    v, u = torch.randn_like(x), torch.randn_like(x)
    score, product = torch.autograd.functional.jvp(lambda x: network(x, levels, labels), x, v)
    weight = levels.square() / 64
    first = (v * product).flatten(1).sum(1)
    for projected, second in ((None, score.square().flatten(1).sum(1)), (u, (u * score).flatten(1).sum(1).square())):
        loss = sliced_loss(network, x, v, levels, labels, projected=projected)
        assert torch.allclose(loss, weight * (first + second / 2), rtol=1e-4, atol=1e-5)


class LinearScore(ScoreNetwork):
    """F is a multiple of the noisy image; for Gaussian images the optimal factor is known."""

    def __init__(self) -> None:
        super().__init__(1, 1, widths=(8, 8))
        self.factor = torch.nn.Parameter(torch.tensor(0.3))

    def field(
        self,
        noisy: torch.Tensor,
        levels: torch.Tensor,
        labels: torch.Tensor,
        code: torch.Tensor | None = None,
        condition: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.factor * noisy, None


def test_sliced_and_denoising_score_matching_agree_on_a_gaussian() -> None:
    """The losses are quadratic in the factor, with the same minimum and second derivatives of known ratio."""
    scale, level, count = 1.3, 0.7, 4000
    torch.manual_seed(2)
    images, noise, v = scale * torch.randn(count, 1, 4, 4), torch.randn(count, 1, 4, 4), torch.randn(count, 1, 4, 4)
    levels, labels = torch.full((count,), level), torch.zeros(count, dtype=torch.int64)
    network = LinearScore()
    losses = {
        "denoising": lambda: denoising_loss(network, images, noise, levels, labels),
        "sliced": lambda: sliced_loss(network, images + level * noise, v, levels, labels),
        "projected": lambda: sliced_loss(network, images + level * noise, v, levels, labels, projected=v),
    }
    total, data = level**2 + scale**2, level**2 + SIGMA_DATA**2
    # -x / total = d / (s sqrt(data)) factor x - x / data
    optimum = (1 / data - 1 / total) * level * data**0.5 / SIGMA_DATA
    for name, loss in losses.items():
        (slope,) = torch.autograd.grad(loss().mean(), network.factor, create_graph=True)
        (curvature,) = torch.autograd.grad(slope, network.factor)
        found = float((network.factor - slope / curvature).detach())
        assert found == pytest.approx(optimum, abs=0.05), name
        weight = 1 if name == "denoising" else SIGMA_DATA**2 / data
        assert float(curvature.detach()) == pytest.approx(weight * total, rel=0.1), name


def test_bfloat16_approximates_float32() -> None:
    """Sampling on a GPU uses bfloat16."""
    network, (x, levels, labels) = small_network("score", code=4), noisy()
    code = torch.randn(4, 4, 4, 4)
    with torch.no_grad():
        exact, _ = network.field(x, levels, labels, code)
        rough, _ = copy.deepcopy(network).bfloat16().field(x, levels, labels, code)
    assert rough.dtype == torch.float32
    assert 0 < float((rough - exact).norm()) < 0.03 * float(exact.norm())
