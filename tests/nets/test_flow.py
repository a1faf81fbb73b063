"""RealNVP is a bijection with an exact density; autoencoders keep shapes; both work one image at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import functional_call, grad, vmap

from sfumato.nets.autoencoder import Decoder, Encoder, halvings
from sfumato.nets.flow import RealNVP
from sfumato.nets.pictures import random_pictures


def shaken(size: int, context: int = 0, couplings: int = 5) -> RealNVP:
    """A flow far from the identity that it begins with, in float64."""
    torch.manual_seed(0)
    flow = RealNVP(size, couplings=couplings, hidden=16, context=context).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return flow


@pytest.mark.parametrize(("size", "context"), [(2, 0), (7, 0), (6, 3)])
def test_the_inverse_is_one_and_the_determinant_that_of_the_jacobian(size: int, context: int) -> None:
    flow = shaken(size, context)
    x = 2 * torch.randn(20, size, dtype=torch.float64)
    told = torch.eye(context, dtype=torch.float64)[torch.arange(20) % context] if context else None
    z, log_determinant = flow(x, told)
    assert (z - x).abs().max() > 0.5
    assert torch.allclose(flow.inverse(z, told), x)
    for row in range(5):
        own = None if told is None else told[row : row + 1]
        jacobian = torch.autograd.functional.jacobian(lambda v, own=own: flow(v[None], own)[0][0], x[row])
        assert torch.allclose(torch.linalg.slogdet(jacobian)[1], log_determinant[row])


def test_the_density_integrates_to_one() -> None:
    flow = shaken(2)
    side = torch.linspace(-80, 80, 2001, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    with torch.no_grad():
        density = flow.log_prob(grid).exp()
    assert float(density.sum() * (side[1] - side[0]) ** 2) == pytest.approx(1, abs=5e-3)


def test_it_begins_as_the_standard_normal_and_an_affine_map_is_known() -> None:
    flow = RealNVP(4, couplings=3, hidden=8).double()
    assert flow.mix is not None
    x = torch.randn(9, 4, dtype=torch.float64)
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    assert torch.allclose(flow.log_prob(x), normal.log_prob(x).sum(1))
    with torch.no_grad():
        flow.log_scale.fill_(math.log(3.0))
        flow.shift.fill_(5.0)
    wide = torch.distributions.Normal(torch.tensor(5.0, dtype=torch.float64), 3.0)
    assert torch.allclose(flow.log_prob(x), wide.log_prob(x).sum(1))
    with torch.no_grad():
        flow.mix.copy_(torch.randn(1, 4, 4))
    matrix = flow.mix[0].detach().tril(-1) + torch.eye(4, dtype=torch.float64) / 3
    tilted = torch.distributions.MultivariateNormal(torch.full((4,), 5.0).double(), precision_matrix=matrix.T @ matrix)
    assert torch.allclose(flow.log_prob(x), tilted.log_prob(x))


def test_classes_have_densities_of_their_own() -> None:
    flow, x = shaken(4, context=2), torch.zeros(1, 4, dtype=torch.float64)
    one, other = torch.eye(2, dtype=torch.float64)[:, None]
    assert not torch.allclose(flow.log_prob(x, one), flow.log_prob(x, other))


def test_a_flow_learns_what_is_not_normal() -> None:
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
    drawn = flow.inverse(torch.randn(1000, 2)).norm(dim=1)
    assert (drawn - 2).abs().median() < 0.3  # of the standard normal it is 0.9
    assert loss < 2.7  # the best normal has 3.5


@pytest.mark.parametrize(
    ("shape", "times"), [((1, 28, 28), 2), ((3, 32, 32), 3), ((3, 64, 64), 4), ((1, 256, 256), 6), ((1, 8, 8), 1)]
)
def test_autoencoders_are_for_all_sizes(shape: tuple[int, int, int], times: int) -> None:
    assert halvings(shape) == times
    images = torch.rand(2, *shape) * 2 - 1
    encoder, decoder = Encoder(shape, code=5, width=4), Decoder(shape, code=5, width=4, context=3)
    codes = encoder(images)
    assert codes.shape == (2, 5)
    assert decoder(codes, torch.eye(3)[:2]).shape == images.shape
    assert Decoder((1, 20, 30), code=5, width=4)(codes).shape == (2, 1, 20, 30)


def test_gradients_one_image_at_a_time_are_those_of_the_sum() -> None:
    torch.manual_seed(0)
    flow, encoder = RealNVP(4, couplings=2, hidden=8), Encoder((1, 8, 8), code=4, width=2)
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


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 20, 30)])
def test_random_pictures_vary_and_come_from_the_seed(shape: tuple[int, int, int]) -> None:
    pictures = random_pictures(200, shape, torch.Generator().manual_seed(0))
    assert pictures.shape == (200, *shape)
    assert -1 <= float(pictures.min()) < -0.9 < 0.9 < float(pictures.max()) <= 1
    assert torch.equal(pictures, random_pictures(200, shape, torch.Generator().manual_seed(0)))
    assert float(pictures.std(0).mean()) > 0.5  # from picture to picture
    neighbours = (pictures[..., 1:] - pictures[..., :-1]).abs().mean()
    assert float(neighbours) < 0.3 * float((pictures[1:] - pictures[:-1]).abs().mean())  # and smooth within
