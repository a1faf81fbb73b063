"""The claim that condensation is private for free (Dong, Zhao and Lyu, ICML 2022), and why it does not hold.

The claim rests on condensed images of one form: noise in a basis of the class, plus the class mean (Eq. 8 of
"Differentially Private Dataset Condensation"). That basis is computed from the private images and gives them away.
Nothing here is private.
"""

from __future__ import annotations

import torch

from sfumato.data import ImageSet
from sfumato.methods.condensation import RandomViews
from sfumato.methods.dm import class_batches, mean_embeddings


def basis_of(rows: torch.Tensor) -> torch.Tensor:
    """Return an orthogonal matrix [d, d] whose first columns span the rows [n, d].

    The paper says X = QR, but Q must act on images, and X need not have full rank. So: eigenvectors of X^T X, the
    largest first. Any other such basis differs by a rotation within the span and one of the rest, which leaves the law
    of the noise as it is.
    """
    vectors: torch.Tensor = torch.linalg.eigh(rows.T.double() @ rows.double()).eigenvectors
    return vectors.flip(1)


def linear_construction(noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return Eq. 8 for one class: s* = Q s + mean, of noise [m, ...] and real images [n, ...] in [-1, 1]."""
    rows = real.flatten(1).double()
    images = noise.flatten(1).double() @ basis_of(rows).T + rows.mean(0)
    return images.view_as(noise).to(noise.dtype)


def outside_span(basis: torch.Tensor, rank: int, images: torch.Tensor) -> torch.Tensor:
    """Return the share of each image's norm outside the first `rank` vectors of a basis, [n]."""
    rows = images.flatten(1).double()
    inside = rows @ basis[:, :rank]
    share: torch.Tensor = (rows - inside @ basis[:, :rank].T).norm(dim=1) / rows.norm(dim=1)
    return share


def matching_losses(
    sets: dict[str, torch.Tensor],
    real: ImageSet,
    *,
    networks: int,
    seed: int,
    device: torch.device,
    batch_size: int = 256,
    width: int = 128,
) -> dict[str, list[float]]:
    """Return Eq. 3, summed over classes, in the same fresh networks and on the same real images for all sets."""
    public = real.public()
    assert real.labels is not None
    generator = torch.Generator(device).manual_seed(seed)
    views = RandomViews(public, generator, width=width, flip=None)
    batches = class_batches(real.images, real.labels.to(device), public, batch_size, generator)
    losses: dict[str, list[float]] = {name: [] for name in sets}
    for _ in range(networks):
        view = views.next()
        targets = mean_embeddings(view, *next(batches), len(public.classes))
        for name, images in sets.items():
            labels = torch.arange(len(public.classes), device=device).repeat_interleave(len(images) // len(targets))
            means = mean_embeddings(view, images, labels, len(public.classes))
            losses[name].append(float((means - targets).square().sum()))
    return losses
