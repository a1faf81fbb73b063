"""Fidelity: how close the distribution of synthetic images is to that of real ones, in a network's features.

Functions of feature arrays first (numpy or torch [N, D]; arithmetic in float64, on the array's device), then
`fidelity`, which measures two image sets. The real images must be public (a benchmark's test split), or the results
kept private: measuring is a disclosure. All distances depend on the number of images: compare like with like.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch

from sfumato.data import DataError, ImageSet
from sfumato.encoders import Encoder, Features, features, load_encoder

SAMPLE = 10_000
SUBSETS, SUBSET_SIZE = 100, 1000  # Binkowski et al. 2018
NEIGHBOURS_PRECISION, NEIGHBOURS_DENSITY = 3, 5  # as in the two papers
BLOCK_VALUES = 1 << 24  # pairwise distances held at a time: 128 MiB

Array = np.ndarray[Any, Any] | torch.Tensor


class SmallSampleWarning(UserWarning):
    """There are no more images than features, so covariances are singular and the distance is far too large."""


def frechet_distance(a: Array, b: Array) -> float:
    """Squared Fréchet distance of the Gaussians with the sets' moments (Heusel et al. 2017, equation 6).

    tr (S1 S2)^1/2 is the sum of singular values of R1 R2^T for any R with R^T R = S. This needs no root of a
    matrix that is not symmetric, and holds for singular covariances as well.
    """
    one, two = _pair(a, b, least=2)
    if min(len(one), len(two)) <= one.shape[1]:
        warnings.warn(
            f"a Fréchet distance in {one.shape[1]} features from {min(len(one), len(two))} images is too large; "
            "use more images than features, and compare equal numbers only",
            SmallSampleWarning,
            stacklevel=2,
        )
    (mean_one, root_one), (mean_two, root_two) = _mean_and_root(one), _mean_and_root(two)
    shift = (mean_one - mean_two).square().sum()
    overlap = torch.linalg.svdvals(root_one @ root_two.T).sum()
    # In exact arithmetic the distance is never negative; of identical sets, rounding leaves about 1e-13 of the trace.
    trace = root_one.square().sum() + root_two.square().sum()
    spread = trace - 2 * overlap
    return float(shift + (spread if spread > 1e-12 * trace else 0))


def kernel_distance(
    a: Array, b: Array, subsets: int = SUBSETS, subset_size: int = SUBSET_SIZE, seed: int = 0
) -> tuple[float, float]:
    """Kernel distance (KID, Binkowski et al. 2018): mean and standard deviation over random subsets.

    The unbiased estimate of the squared MMD under (x.y / D + 1)^3; so it is 0 on average for equal distributions, and
    a little below zero as often as above.
    """
    if subsets < 1:
        raise DataError(f"subsets must be at least 1, got {subsets}")
    one, two = _pair(a, b, least=2)
    if not 2 <= subset_size <= min(len(one), len(two)):
        raise DataError(f"subset_size must lie between 2 and the number of images, got {subset_size}")
    generator = np.random.default_rng(seed)
    values = []
    for _ in range(subsets):
        x, y = (
            part[torch.from_numpy(generator.choice(len(part), subset_size, replace=False)).to(part.device)].double()
            for part in (one, two)
        )
        within = sum(kernel.sum() - kernel.diagonal().sum() for kernel in (_cubic(x, x), _cubic(y, y)))
        values.append(float(within / (subset_size * (subset_size - 1)) - 2 * _cubic(x, y).mean()))
    return float(np.mean(values)), float(np.std(values))


def inception_score(probabilities: Array, splits: int = 10, seed: int = 0) -> tuple[float, float]:
    """Inception Score (Salimans et al. 2016), exp E KL(p(y|x) || p(y)): mean and standard deviation over splits.

    Images are shuffled first: sets often come sorted by class, and a split of one class would score 1.
    """
    rows = _matrix(probabilities, least=1).double()
    if not 1 <= splits <= len(rows):
        raise DataError(f"splits must lie between 1 and the number of images, got {splits}")
    if bool((rows < 0).any()) or not bool(torch.isclose(rows.sum(1), rows.new_ones(()), atol=1e-4).all()):
        raise DataError("probabilities must be non-negative and sum to 1 for each image")
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows))).to(rows.device)
    scores = []
    for part in torch.tensor_split(rows[order], splits):
        # xlogy takes 0 log 0 as 0.
        divergence = (torch.xlogy(part, part) - torch.xlogy(part, part.mean(0))).sum(1)
        scores.append(float(divergence.mean().exp()))
    return float(np.mean(scores)), float(np.std(scores))


def precision_recall(real: Array, fake: Array, k: int = NEIGHBOURS_PRECISION) -> tuple[float, float]:
    """Improved precision and recall (Kynkäänniemi et al. 2019, equation 2).

    Precision: the share of fake images within some real image's k-th neighbour distance. Recall: the reverse.
    """
    one, two = _pair(real, fake, least=_neighbours(k))
    fake_in_real, _ = _balls(one, two, k)
    real_in_fake, _ = _balls(two, one, k)
    return _mean(fake_in_real > 0), _mean(real_in_fake > 0)


def density_coverage(real: Array, fake: Array, k: int = NEIGHBOURS_DENSITY) -> tuple[float, float]:
    """Density and coverage (Naeem et al. 2020, section 3).

    Density: how many real images' k-th neighbour balls hold a fake image, on average, over k; it may exceed 1.
    Coverage: the share of those balls that hold any.
    """
    one, two = _pair(real, fake, least=_neighbours(k))
    fake_in_real, filled = _balls(one, two, k)
    return _mean(fake_in_real) / k, _mean(filled)


def fidelity(
    synthetic: ImageSet | Features,
    real: ImageSet | Features,
    network: str | Encoder = "effnet_lite0",
    *,
    device: str | torch.device = "cpu",
    seed: int = 0,
    sample: int | None = SAMPLE,
    progress: bool = True,
) -> dict[str, float]:
    """Every fidelity measure of `synthetic` against `real`, from one pass of the network over each.

    At most `sample` images of each set are used, drawn by `seed` (None: all). To compare several sets with the same
    real images, pass `features(real, …)` in their place. Names end in the network's name; the plain `fid`, `kid_mean`,
    `inception_score_mean`, … are those of `inception`, the published protocol.
    """
    encoder = network
    if isinstance(network, str) and (isinstance(synthetic, ImageSet) or isinstance(real, ImageSet)):
        encoder = load_encoder(network)
    name = encoder if isinstance(encoder, str) else encoder.card.name
    inception = name.startswith("inception")
    generator = np.random.default_rng(seed)

    def measured(images: ImageSet | Features, probabilities: bool) -> Features:
        if isinstance(images, Features):
            if images.network != name:
                raise DataError(f"features of the network {images.network!r} were given where {name!r} is measured")
            return images
        if sample is not None and sample < len(images):
            images = images.subset(generator.choice(len(images), sample, replace=False))
        return features(images, encoder, device=device, probabilities=probabilities, progress=progress)

    fake, true = measured(synthetic, inception), measured(real, False)
    place = torch.device(device)
    # Apple's devices have no float64.
    place = torch.device("cpu") if place.type == "mps" else place
    a, b = fake.values.to(place), true.values.to(place)
    subset_size = min(SUBSET_SIZE, len(a), len(b))
    measures = {"fd": frechet_distance(b, a)}
    measures["kd_mean"], measures["kd_sd"] = kernel_distance(b, a, subset_size=subset_size, seed=seed)
    measures["precision"], measures["recall"] = precision_recall(b, a)
    measures["density"], measures["coverage"] = density_coverage(b, a)
    if fake.probabilities is not None:
        mean, sd = inception_score(fake.probabilities, min(10, len(fake)), seed)
        measures["inception_score_mean"], measures["inception_score_sd"] = mean, sd
    return {_named(measure, name): value for measure, value in measures.items()}


def _named(measure: str, network: str) -> str:
    if network == "inception":
        return {"fd": "fid", "kd_mean": "kid_mean", "kd_sd": "kid_sd"}.get(measure, measure)
    stem, _, statistic = measure.rpartition("_")
    return f"{stem}_{network}_{statistic}" if stem else f"{measure}_{network}"


def _matrix(values: Array, least: int) -> torch.Tensor:
    matrix = torch.as_tensor(values)
    if matrix.ndim != 2 or not matrix.is_floating_point():
        raise DataError(f"features must be floats of shape [images, features], not {list(matrix.shape)}")
    if len(matrix) < least or matrix.shape[1] == 0:
        raise DataError(f"this measure needs at least {least} images in each set, and one feature")
    if not bool(torch.isfinite(matrix).all()):
        raise DataError("features contain NaN or infinite values; the network or its weights are broken")
    return matrix


def _pair(a: Array, b: Array, least: int) -> tuple[torch.Tensor, torch.Tensor]:
    one, two = _matrix(a, least), _matrix(b, least)
    if one.shape[1] != two.shape[1]:
        raise DataError(f"the sets have {one.shape[1]} and {two.shape[1]} features; use one network for both")
    return one, two


def _mean_and_root(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean, and some R with R^T R = covariance."""
    mean = x.mean(0, dtype=torch.float64)
    if len(x) <= x.shape[1]:
        return mean, (x.double() - mean) / math.sqrt(len(x) - 1)
    covariance = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    for part in x.split(4096):
        covariance += _gram(part.to(torch.float64, copy=True).sub_(mean))
    covariance /= len(x) - 1
    root, failed = torch.linalg.cholesky_ex(covariance, upper=True)
    if int(failed):  # singular: dead features, or fewer different images than features
        eigenvalues, vectors = torch.linalg.eigh(covariance)
        root = eigenvalues.clamp(min=0).sqrt()[:, None] * vectors.T
    return mean, root


def _gram(x: torch.Tensor) -> torch.Tensor:
    """x^T x. On a CPU by numpy, which knows that it is symmetric and does half the work."""
    return torch.from_numpy(x.numpy().T @ x.numpy()) if x.device.type == "cpu" else x.T @ x


def _cubic(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    kernel: torch.Tensor = (x @ y.T / x.shape[1] + 1) ** 3
    return kernel


def _neighbours(k: int) -> int:
    if k < 1:
        raise DataError(f"k must be at least 1, got {k}")
    return k + 1


def _balls(centres: torch.Tensor, points: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Around each centre lies a ball that reaches to its k-th nearest other centre (open, as in both papers' code).

    Returns for each point how many balls hold it, and for each ball whether it holds any point.
    """
    origin = centres.mean(0, dtype=torch.float64)  # near the data: distances lose fewer digits
    centres, points = centres.double() - origin, points.double() - origin
    held = torch.zeros(len(points), dtype=torch.int64, device=points.device)
    filled = []
    for part in centres.split(max(1, BLOCK_VALUES // max(len(centres), len(points)))):
        radius = torch.cdist(part, centres).kthvalue(k + 1, 1).values  # the first is the centre itself
        inside = torch.cdist(part, points) < radius[:, None]
        held += inside.sum(0)
        filled.append(inside.any(1))
    return held, torch.cat(filled)


def _mean(values: torch.Tensor) -> float:
    return float(values.double().mean())
