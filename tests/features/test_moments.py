"""Class means of normalised moments: agreement with the rows, gradients, precision."""

import pytest
import torch

from sfumato.features.moments import class_means, moment


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("moments", [1, 2])
def test_class_means_and_gradients_equal_those_of_the_rows(moments: int, balanced: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((3, 5, 4), (6, 2, 2))
    maps = [torch.rand(12, *size, generator=generator, dtype=torch.float32).sub(0.3).relu() for size in sizes]
    maps[0][2], maps[1][2] = 0, 0  # one image without any activation
    maps = [values.requires_grad_() for values in maps]
    weights = [torch.randn(4, 84, generator=generator) for _ in range(moments)]

    def gradients(means: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        loss = torch.stack([(w * mean).sum() + mean.square().sum() for w, mean in zip(weights, means, strict=True)])
        return torch.autograd.grad(loss.sum(), maps)

    by_rows = [moment(maps, power, balanced).view(4, 3, -1).mean(1) for power in range(1, moments + 1)]
    found = class_means(maps, 4, moments, balanced)
    for mean, expected in zip(found, by_rows, strict=True):
        assert torch.allclose(mean, expected, atol=1e-6)
    for gradient, expected in zip(gradients(found), gradients(by_rows), strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_class_means_of_bfloat16_are_accumulated_in_float32() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    maps = [torch.rand(40, 8, 6, 6, generator=generator, device="cuda").bfloat16() for _ in range(2)]
    for power, means in enumerate(class_means(maps, 4, 2, True), 1):
        by_rows = moment(maps, power, True).view(4, 10, -1).mean(1)
        assert means.dtype == torch.float32
        assert torch.allclose(means, by_rows, rtol=0.01, atol=1e-4)
