"""Fidelity: distances between the distributions of synthetic and real images, in the features of a network.

The functions of feature arrays take numpy or torch arrays [N, D] and compute in float64 on the device of the array.
`fidelity` compares two image sets. The real images must be public (for example a test split), or the results must be
kept private, because they disclose information about the real images. All distances depend on the number of images, so
compare only sets of equal size.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch

from sfumato.data import DataError, ImageSet
from sfumato.features import FeatureNetwork, Features, features, load_feature_network

MAX_IMAGES = 10_000
SUBSETS, SUBSET_SIZE = 100, 1000  # as in Binkowski et al. 2018
NEIGHBOURS_PRECISION, NEIGHBOURS_DENSITY = 3, 5  # as in Kynkäänniemi et al. 2019 and Naeem et al. 2020
BLOCK_VALUES = 1 << 24  # pairwise distances in memory at a time: 128 MiB

Array = np.ndarray[Any, Any] | torch.Tensor


class SmallSampleWarning(UserWarning):
    """Issued if there are not more images than features: covariances are singular and the distance is too large."""


def frechet_distance(a: Array, b: Array) -> float:
    """Return the squared Fréchet distance between Gaussians fitted to the sets (Heusel et al. 2017, equation 6).

    tr (S1 S2)^1/2 is the sum of the singular values of R1 R2^T, for any R with R^T R = S. This avoids the root of a
    non-symmetric matrix, and also works for singular covariances.
    """
    one, two = _check_pair(a, b, min_rows=2)
    if min(len(one), len(two)) <= one.shape[1]:
        warnings.warn(
            f"the Fréchet distance in {one.shape[1]} features from {min(len(one), len(two))} images is too large; "
            "use more images than features, and compare only sets of equal size",
            SmallSampleWarning,
            stacklevel=2,
        )
    (mean_one, root_one), (mean_two, root_two) = _mean_and_root(one), _mean_and_root(two)
    shift = (mean_one - mean_two).square().sum()
    overlap = _nuclear_norm(root_one @ root_two.T, by_gram=one.device.type != "cpu")
    # For identical sets, rounding errors are about 1e-13 of the trace; values below 1e-12 count as zero.
    trace = root_one.square().sum() + root_two.square().sum()
    spread = trace - 2 * overlap
    return float(shift + (spread if spread > 1e-12 * trace else 0))


def kernel_distance(
    a: Array, b: Array, subsets: int = SUBSETS, subset_size: int = SUBSET_SIZE, seed: int = 0
) -> tuple[float, float]:
    """Return the kernel distance (KID, Binkowski et al. 2018): mean and standard deviation over random subsets.

    This is the unbiased estimate of the squared MMD with the kernel (x.y / D + 1)^3. For equal distributions its
    expectation is 0, so it can be slightly negative.
    """
    if subsets < 1:
        raise DataError(f"subsets must be at least 1, got {subsets}")
    one, two = _check_pair(a, b, min_rows=2)
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
    """Return the Inception Score (Salimans et al. 2016), exp E KL(p(y|x) || p(y)): mean and sd over splits.

    The images are shuffled first, because sets are often sorted by class and a split of one class would score 1.
    """
    rows = _check_features(probabilities, min_rows=1).double()
    if not 1 <= splits <= len(rows):
        raise DataError(f"splits must lie between 1 and the number of images, got {splits}")
    if bool((rows < 0).any()) or not bool(torch.isclose(rows.sum(1), rows.new_ones(()), atol=1e-4).all()):
        raise DataError("probabilities must be non-negative and sum to 1 for each image")
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows))).to(rows.device)
    scores = []
    for part in torch.tensor_split(rows[order], splits):
        # xlogy defines 0 log 0 as 0
        divergence = (torch.xlogy(part, part) - torch.xlogy(part, part.mean(0))).sum(1)
        scores.append(float(divergence.mean().exp()))
    return float(np.mean(scores)), float(np.std(scores))


def precision_recall(real: Array, fake: Array, k: int = NEIGHBOURS_PRECISION) -> tuple[float, float]:
    """Return improved precision and recall (Kynkäänniemi et al. 2019, equation 2).

    Precision is the share of fake images that lie within the k-nearest-neighbour distance of some real image. Recall is
    the same with real and fake images exchanged.
    """
    one, two = _check_pair(real, fake, min_rows=_min_images(k))
    fake_in_real, _ = _count_in_balls(one, two, k)
    real_in_fake, _ = _count_in_balls(two, one, k)
    return _mean(fake_in_real > 0), _mean(real_in_fake > 0)


def density_coverage(real: Array, fake: Array, k: int = NEIGHBOURS_DENSITY) -> tuple[float, float]:
    """Return density and coverage (Naeem et al. 2020, section 3).

    Each real image has a ball that reaches to its k-th nearest neighbour. Density is the mean number of balls that
    contain a fake image, divided by k; it may exceed 1. Coverage is the share of balls that contain a fake image.
    """
    one, two = _check_pair(real, fake, min_rows=_min_images(k))
    fake_in_real, filled = _count_in_balls(one, two, k)
    return _mean(fake_in_real) / k, _mean(filled)


def fidelity(
    synthetic: ImageSet | Features,
    real: ImageSet | Features,
    network: str | FeatureNetwork = "effnet_lite0",
    *,
    device: str | torch.device = "cpu",
    seed: int = 0,
    sample: int | None = MAX_IMAGES,
    progress: bool = True,
) -> dict[str, float]:
    """Return all fidelity measures of `synthetic` against `real`, from one pass of the network over each set.

    - synthetic, real: image sets, or their features. To compare several sets with the same real images, pass
      `features(real, …)` once computed.
    - network: name of a feature network, or a loaded one.
    - seed: seed of the random subsets.
    - sample: maximum number of images used of each set; None for all.

    The names of the measures end in the name of the network. Only the published protocol, `inception`, gives `fid`,
    `kid_mean` and `inception_score_mean`.
    """
    encoder = network
    if isinstance(network, str) and (isinstance(synthetic, ImageSet) or isinstance(real, ImageSet)):
        encoder = load_feature_network(network)
    name = encoder if isinstance(encoder, str) else encoder.card.name
    inception = name.startswith("inception")
    generator = np.random.default_rng(seed)

    def compute_features(images: ImageSet | Features, probabilities: bool) -> Features:
        if isinstance(images, Features):
            if images.network != name:
                raise DataError(
                    f"the features come from {images.network!r}, but the measure uses {name!r}; use one network"
                )
            return images
        if sample is not None and sample < len(images):
            images = images.subset(generator.choice(len(images), sample, replace=False))
        return features(images, encoder, device=device, probabilities=probabilities, progress=progress)

    fake, true = compute_features(synthetic, inception), compute_features(real, False)
    target = torch.device(device)
    # MPS devices do not support float64
    target = torch.device("cpu") if target.type == "mps" else target
    a, b = fake.values.to(target), true.values.to(target)
    subset_size = min(SUBSET_SIZE, len(a), len(b))
    measures = {"fd": frechet_distance(b, a)}
    measures["kd_mean"], measures["kd_sd"] = kernel_distance(b, a, subset_size=subset_size, seed=seed)
    measures["precision"], measures["recall"] = precision_recall(b, a)
    measures["density"], measures["coverage"] = density_coverage(b, a)
    if fake.probabilities is not None:
        mean, sd = inception_score(fake.probabilities, min(10, len(fake)), seed)
        measures["inception_score_mean"], measures["inception_score_sd"] = mean, sd
    return {_measure_name(measure, name): value for measure, value in measures.items()}


def _measure_name(measure: str, network: str) -> str:
    if network == "inception":
        return {"fd": "fid", "kd_mean": "kid_mean", "kd_sd": "kid_sd"}.get(measure, measure)
    stem, _, statistic = measure.rpartition("_")
    return f"{stem}_{network}_{statistic}" if stem else f"{measure}_{network}"


def _check_features(values: Array, min_rows: int) -> torch.Tensor:
    matrix = torch.as_tensor(values)
    if matrix.ndim != 2 or not matrix.is_floating_point():
        raise DataError(f"features must be floats of shape [images, features], not {list(matrix.shape)}")
    if len(matrix) < min_rows or matrix.shape[1] == 0:
        raise DataError(f"this measure needs at least {min_rows} images in each set, and one feature")
    if not bool(torch.isfinite(matrix).all()):
        raise DataError("features contain NaN or infinite values; the network or its weights are broken")
    return matrix


def _check_pair(a: Array, b: Array, min_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    one, two = _check_features(a, min_rows), _check_features(b, min_rows)
    if one.shape[1] != two.shape[1]:
        raise DataError(f"the sets have {one.shape[1]} and {two.shape[1]} features; use one network for both")
    return one, two


def _mean_and_root(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean, and a matrix R with R^T R = covariance."""
    mean = x.mean(0, dtype=torch.float64)
    if len(x) <= x.shape[1]:
        return mean, (x.double() - mean) / math.sqrt(len(x) - 1)
    covariance = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    for part in x.split(4096):
        covariance += _gram(part.to(torch.float64, copy=True).sub_(mean))
    covariance /= len(x) - 1
    root, failed = torch.linalg.cholesky_ex(covariance, upper=True)
    if int(failed):  # singular covariance: constant features, or fewer distinct images than features
        eigenvalues, vectors = torch.linalg.eigh(covariance)
        root = eigenvalues.clamp(min=0).sqrt()[:, None] * vectors.T
    return mean, root


def _nuclear_norm(matrix: torch.Tensor, by_gram: bool) -> torch.Tensor:
    """Return the sum of the singular values.

    - by_gram: as roots of the eigenvalues of the Gram matrix, which needs no SVD: those are slow on a GPU. A singular
      value that is 1e-6 of the largest, or less, then has an error of up to 1e-6 of the largest; others far less.
    """
    found: torch.Tensor = torch.linalg.svdvals(matrix) if not by_gram else torch.linalg.eigvalsh(matrix @ matrix.T)
    return (found.clamp_min(0).sqrt() if by_gram else found).sum()


def _gram(x: torch.Tensor) -> torch.Tensor:
    """Return x^T x. On a CPU, numpy uses the symmetry and does half the work."""
    return torch.from_numpy(x.numpy().T @ x.numpy()) if x.device.type == "cpu" else x.T @ x


def _cubic(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    kernel: torch.Tensor = (x @ y.T / x.shape[1] + 1) ** 3
    return kernel


def _min_images(k: int) -> int:
    """Return the number of images that k nearest neighbours need."""
    if k < 1:
        raise DataError(f"k must be at least 1, got {k}")
    return k + 1


def _count_in_balls(centres: torch.Tensor, points: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each point how many balls contain it, and for each ball whether it contains a point.

    The ball of a centre reaches to its k-th nearest other centre. Balls are open, as in the code of both papers.
    """
    origin = centres.mean(0, dtype=torch.float64)  # centring reduces rounding errors of the distances
    centres, points = centres.double() - origin, points.double() - origin
    balls_per_point = torch.zeros(len(points), dtype=torch.int64, device=points.device)
    filled = []
    for part in centres.split(max(1, BLOCK_VALUES // max(len(centres), len(points)))):
        radius = torch.cdist(part, centres).kthvalue(k + 1, 1).values  # the first is the centre itself
        inside = torch.cdist(part, points) < radius[:, None]
        balls_per_point += inside.sum(0)
        filled.append(inside.any(1))
    return balls_per_point, torch.cat(filled)


def _mean(values: torch.Tensor) -> float:
    return float(values.double().mean())
