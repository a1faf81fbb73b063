"""RealNVP: inverse, determinant, density, training, per-example gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import functional_call, grad, vmap

from sfumato.nets.conv_autoencoder import ConvEncoder
from sfumato.nets.flow import RealNVP


def perturbed_flow(size: int, context: int = 0, couplings: int = 5) -> RealNVP:
    """Return a flow in float64 with perturbed weights; the initial flow is a permutation."""
    torch.manual_seed(0)
    flow = RealNVP(size, couplings=couplings, hidden=16, context=context).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return flow


@pytest.mark.parametrize(("size", "context"), [(2, 0), (7, 0), (6, 3)])
def test_inverse_and_log_determinant(size: int, context: int) -> None:
    flow = perturbed_flow(size, context)
    x = 2 * torch.randn(20, size, dtype=torch.float64)
    one_hot = torch.eye(context, dtype=torch.float64)[torch.arange(20) % context] if context else None
    z, log_determinant = flow(x, one_hot)
    assert (z - x).abs().max() > 0.5
    assert torch.allclose(flow.inverse(z, one_hot), x)
    for row in range(5):
        label = None if one_hot is None else one_hot[row : row + 1]
        jacobian = torch.autograd.functional.jacobian(lambda v, label=label: flow(v[None], label)[0][0], x[row])
        assert torch.allclose(torch.linalg.slogdet(jacobian)[1], log_determinant[row])


def test_density_integrates_to_one() -> None:
    flow = perturbed_flow(2)
    side = torch.linspace(-80, 80, 1001, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    with torch.no_grad():
        density = flow.log_prob(grid).exp()
    assert float(density.sum() * (side[1] - side[0]) ** 2) == pytest.approx(1, abs=5e-3)


def test_density_of_the_initial_flow_and_of_affine_maps() -> None:
    flow = RealNVP(4, couplings=3, hidden=8).double()
    assert flow.mix is not None
    x = torch.randn(9, 4, dtype=torch.float64)
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    assert torch.allclose(flow.log_prob(x), normal.log_prob(x).sum(1))
    with torch.no_grad():
        flow.log_scale.fill_(math.log(3.0))
        flow.shift.fill_(5.0)
    scaled = torch.distributions.Normal(torch.tensor(5.0, dtype=torch.float64), 3.0)
    assert torch.allclose(flow.log_prob(x), scaled.log_prob(x).sum(1))
    with torch.no_grad():
        flow.mix.copy_(torch.randn(1, 4, 4))
    matrix = flow.mix[0].detach().tril(-1) + torch.eye(4, dtype=torch.float64) / 3
    correlated = torch.distributions.MultivariateNormal(
        torch.full((4,), 5.0).double(), precision_matrix=matrix.T @ matrix
    )
    assert torch.allclose(flow.log_prob(x), correlated.log_prob(x))


def test_density_depends_on_the_context() -> None:
    flow, x = perturbed_flow(4, context=2), torch.zeros(1, 4, dtype=torch.float64)
    first, second = torch.eye(2, dtype=torch.float64)[:, None]
    assert not torch.allclose(flow.log_prob(x, first), flow.log_prob(x, second))


def test_training_on_a_ring() -> None:
    torch.manual_seed(0)
    flow = RealNVP(2, couplings=4, hidden=32)
    angle = 2 * math.pi * torch.rand(2000)
    ring = torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.1 * torch.randn(2000, 2)
    optimizer = torch.optim.Adam(flow.parameters(), 5e-3)
    for _ in range(300):
        loss = -flow.log_prob(ring[torch.randint(2000, (256,))]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    radius = flow.inverse(torch.randn(1000, 2)).norm(dim=1)
    assert (radius - 2).abs().median() < 0.3  # 0.9 for the standard normal distribution
    assert loss < 2.7  # 3.5 for the best normal distribution


def test_per_example_gradients_sum_to_the_gradient() -> None:
    torch.manual_seed(0)
    flow, encoder = RealNVP(4, couplings=2, hidden=8), ConvEncoder((1, 8, 8), code=4, width=2)
    network = torch.nn.ModuleDict({"encoder": encoder, "flow": flow})
    images = torch.randn(6, 1, 8, 8)
    weights = {name: value.detach() for name, value in flow.named_parameters()}

    def loss(own: dict[str, torch.Tensor], code: torch.Tensor) -> torch.Tensor:
        z, growth = functional_call(flow, own, (code[None],))
        return (z.square().sum() / 2 - growth.sum()).sum()

    codes = encoder(images).detach()
    each = vmap(grad(loss), in_dims=(None, 0))(weights, codes)
    z, growth = flow(codes)
    (z.square().sum() / 2 - growth.sum()).backward()
    for name, parameter in network["flow"].named_parameters():
        assert torch.allclose(each[name].sum(0), parameter.grad, atol=1e-5), name
