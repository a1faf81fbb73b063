"""Add a method: a Gaussian per class in a public low-frequency cosine basis (DCT). `plugin/` makes it a package.

Run: `python examples/add_a_method.py`: registers the method, checks that it is sound, draws images; ten seconds.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import normalize

import sfumato as sf
from sfumato.data import PublicFacts
from sfumato.methods import Synthesizer, register


@dataclass(kw_only=True, eq=False)
class CosineGaussian(Synthesizer):
    """Releases class counts, class sums of cosine coefficients, and the sum of their squares over all classes.

    - frequencies: cosine functions along each side, default 6; more frequencies give sharper images and more noise.
    """

    key: ClassVar[str] = "cosine-gaussian"
    paper: ClassVar[str] = "none (an example)"
    summary: ClassVar[str] = "fit a Gaussian per class in a low-frequency cosine basis"
    frequencies: int = 6

    def _releases(self, public: PublicFacts) -> list[sf.Release]:
        counts = [] if public.sizes else [sf.Release("counts", weight=4.0, nonnegative=True)]
        return [*counts, sf.Release("means"), sf.Release("squares")]

    def _fit(self, vault: sf.Vault, public: PublicFacts) -> None:
        self.basis_ = basis = self._basis(public.shape)
        counts = torch.tensor(public.sizes).to(basis) if public.sizes else vault.counts().clamp_min(1)
        sums = vault.sum(lambda images: images.flatten(1) @ basis.T, release="means", bound=1.0, by_class=True)
        squares = vault.sum(lambda images: (images.flatten(1) @ basis.T).square(), release="squares", bound=1.0)
        self.means_ = sums / counts[:, None]
        variance = (squares - (sums * self.means_).sum(0)) / counts.sum()
        self.deviation_ = variance.clamp_min(1e-4).sqrt()  # noise can make an estimate negative

    def _sample(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        shape, means = self._fitted().shape, self.means_[labels]
        coefficients = means + self.deviation_ * torch.randn(means.shape, generator=generator, device=means.device)
        return (coefficients @ self.basis_).view(-1, *shape) * math.prod(shape)

    def _basis(self, shape: tuple[int, int, int]) -> torch.Tensor:
        """Return orthogonal rows, [coefficients, pixels], of length 1 / sqrt(pixels): no image exceeds `bound=1.0`."""
        waves = [torch.cos(math.pi / n * torch.outer(torch.arange(n), torch.arange(n) + 0.5)) for n in shape[1:]]
        rows, columns = (normalize(wave[: self.frequencies], dim=1) for wave in waves)
        basis = torch.kron(torch.eye(shape[0]), torch.kron(rows, columns)) / math.sqrt(math.prod(shape))
        return basis.to(self.torch_device)

    def _state(self) -> dict[str, torch.Tensor]:
        return {"means": self.means_, "deviation": self.deviation_}

    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        self.basis_, self.means_, self.deviation_ = self._basis(public.shape), state["means"], state["deviation"]


if __name__ == "__main__":
    import tempfile

    from sfumato.testing import check_synthesizer

    register(CosineGaussian)
    digits = sf.load_images("digits")
    ten = sf.ImageSet(digits.images[:10], digits.labels[:10], digits.classes)  # one image of each class
    check_synthesizer(CosineGaussian, ten)  # raises if the method is unsound
    out = tempfile.mkdtemp(prefix="sfumato-method-")
    synthetic = sf.create("cosine-gaussian", epsilon=4.0).fit(digits, run_dir=out).sample(1000)
    print(f"results: {sf.save_images(synthetic, out + '/images.npz')}")
