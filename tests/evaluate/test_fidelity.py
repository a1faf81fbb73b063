"""Fidelity measures: comparison with torchmetrics, prdc and SciPy, and known values, on projected digits."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn

from sfumato.data import DataError, ImageSet
from sfumato.evaluate.fidelity import (
    SmallSampleWarning,
    _nuclear_norm,
    density_coverage,
    fidelity,
    frechet_distance,
    inception_score,
    kernel_distance,
    precision_recall,
)
from sfumato.features import CARDS, FeatureNetwork, Features, features

DIMENSION = 24


class Projection(nn.Module):
    """A fixed random projection of the pixels, used as a feature network."""

    num_features = DIMENSION

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(192, DIMENSION, generator=torch.Generator().manual_seed(0))
        self.register_buffer("weight", weight.double() / 192**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.flatten(1).double() / 128 @ self.weight)


class WithLogits(Projection):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = super().forward(x * 128)
        return y, y[:, :10]


@pytest.fixture(scope="module")
def halves(digits: ImageSet) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two halves of the digits; the second is blurred."""
    images = digits.images.expand(-1, 3, -1, -1)
    blurred = nn.functional.avg_pool2d(images[1::2].float(), 3, 1, 1).to(torch.uint8)
    return images[::2], blurred


@pytest.fixture(scope="module")
def pair(halves: tuple[torch.Tensor, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    a, b = (Projection()(half).numpy() for half in halves)
    return a, b


@pytest.fixture
def gaussians() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(500, 6)), 1 + 2 * generator.normal(size=(700, 6))


def test_frechet_distance_agrees_with_torchmetrics(halves, pair) -> None:
    image = pytest.importorskip("torchmetrics.image.fid", reason="torchmetrics is not installed")
    metric = image.FrechetInceptionDistance(feature=Projection()).set_dtype(torch.float64)
    metric.update(halves[0], real=True)
    metric.update(halves[1], real=False)
    assert frechet_distance(*pair) == pytest.approx(float(metric.compute()), rel=1e-6)


def test_frechet_distance_agrees_with_the_matrix_square_root(pair) -> None:
    a, b = pair
    one, two = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = np.real(scipy.linalg.sqrtm(one @ two))
    expected = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(one + two - 2 * root)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(torch.from_numpy(b), torch.from_numpy(a)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("rank", "tolerance"), [(40, 1e-10), (25, 1e-6)])
def test_singular_values_from_the_gram_matrix(rank: int, tolerance: float) -> None:
    """The form for a GPU; of a singular matrix, each zero has an error of up to 1e-6 of the largest value."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(2, 40, rank, generator=generator, dtype=torch.float64)
    matrix = parts[0] @ torch.diag(torch.logspace(0, -4, rank, dtype=torch.float64)) @ parts[1].T
    expected = float(torch.linalg.svdvals(matrix).sum())
    assert float(_nuclear_norm(matrix, by_gram=False)) == pytest.approx(expected, rel=1e-12)
    assert float(_nuclear_norm(matrix, by_gram=True)) == pytest.approx(expected, rel=tolerance)


def test_frechet_distance_in_closed_form() -> None:
    """Orthonormal columns scaled by s have covariance s^2 I exactly: the distance is |shift|^2 + D (s - t)^2."""
    generator = np.random.default_rng(0)
    columns = np.linalg.qr(generator.normal(size=(400, 10)))[0]
    columns = np.linalg.qr(columns - columns.mean(0))[0]  # columns that sum to zero
    unit = columns * np.sqrt(399)
    assert frechet_distance(2 * unit, 5 * unit + 0.5) == pytest.approx(10 * 0.25 + 10 * 9, rel=1e-9)


def test_frechet_distance_of_identical_sets_is_zero(pair, gaussians) -> None:
    generator = np.random.default_rng(0)
    for x in (pair[0], gaussians[0], 1e4 + gaussians[0], gaussians[0].astype(np.float32)):
        assert frechet_distance(x, x) == 0
        assert frechet_distance(x, generator.permutation(x)) == pytest.approx(0, abs=1e-9)


def test_frechet_distance_with_constant_and_repeated_features(gaussians) -> None:
    a, b = gaussians
    dead = [np.concatenate([x, np.zeros((len(x), 3)), x[:, :1]], 1) for x in (a, b)]
    alive = [x * ([2**0.5] + [1] * 5) for x in (a, b)]  # a repeated column equals one column times sqrt(2)
    assert frechet_distance(*dead) == pytest.approx(frechet_distance(*alive), rel=1e-6)


def test_fewer_images_than_features_give_a_warning_and_the_same_formula() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(20, 50)), generator.normal(size=(30, 50))
    one, two = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    overlap = np.sqrt(np.clip(scipy.linalg.eigvals(one @ two).real, 0, None)).sum()
    expected = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(one + two) - 2 * overlap
    with pytest.warns(SmallSampleWarning, match="50 features from 20 images"):
        assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-6)
    with pytest.warns(SmallSampleWarning):
        assert frechet_distance(a, a) == 0


def test_kernel_distance_agrees_with_torchmetrics(halves, pair) -> None:
    """Subsets as large as the set make the result deterministic."""
    image = pytest.importorskip("torchmetrics.image.kid", reason="torchmetrics is not installed")
    size = min(len(part) for part in pair)
    with warnings.catch_warnings(action="ignore"):  # torchmetrics warns about its buffers
        metric = image.KernelInceptionDistance(feature=Projection(), subsets=2, subset_size=size)
    metric.update(halves[0][:size], real=True)
    metric.update(halves[1][:size], real=False)
    mean, sd = kernel_distance(pair[0][:size], pair[1][:size], subsets=2, subset_size=size)
    assert mean == pytest.approx(float(metric.compute()[0]), rel=1e-6)
    assert sd == pytest.approx(0, abs=1e-12)


def test_kernel_distance_by_hand() -> None:
    """For x = 0, 1 and y = 2, 3 the kernel (xy + 1)^3 is 1 within x, 7^3 within y, and 1, 1, 3^3, 4^3 across."""
    x, y = np.array([[0.0], [1.0]]), np.array([[2.0], [3.0]])
    assert kernel_distance(x, y, subsets=3, subset_size=2) == pytest.approx((1 + 343 - 2 * 93 / 4, 0))


def test_kernel_distance_is_unbiased_and_reproducible(gaussians) -> None:
    a, b = gaussians
    same = kernel_distance(a[:250], a[250:], subsets=50, subset_size=100)
    assert abs(same[0]) < same[1]  # zero within the spread of a single subset
    assert kernel_distance(a, b, 10, 100) == kernel_distance(a, b, 10, 100)
    assert kernel_distance(a, b, 10, 100) != kernel_distance(a, b, 10, 100, seed=1)
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    kernel_distance(a, b, 2, 10)
    assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002


def test_inception_score_known_answers() -> None:
    uniform = np.full((40, 10), 0.1)
    assert inception_score(uniform) == pytest.approx((1, 0))
    balanced = np.eye(10)[np.arange(1000) % 10]
    assert inception_score(balanced, splits=1) == pytest.approx((10, 0))
    sorted_by_class = np.repeat(np.eye(10), 100, 0)
    assert inception_score(sorted_by_class)[0] > 9  # each split contains all classes


def test_precision_recall_density_coverage_agree_with_prdc(pair) -> None:
    prdc = pytest.importorskip("prdc", reason="prdc is not installed")
    real, fake = pair
    for k in (1, 3, 5):
        with contextlib.redirect_stdout(io.StringIO()):
            expected = prdc.compute_prdc(real, fake, k)
        assert precision_recall(real, fake, k) == (expected["precision"], expected["recall"])
        assert density_coverage(real, fake, k) == pytest.approx((expected["density"], expected["coverage"]), rel=1e-12)


def test_the_result_does_not_depend_on_the_block_size(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = precision_recall(*pair), density_coverage(*pair)
    module = importlib.import_module("sfumato.evaluate.fidelity")  # the attribute of the package is the function
    monkeypatch.setattr(module, "BLOCK_VALUES", 7000)
    assert (precision_recall(*pair), density_coverage(*pair)) == whole


def test_manifold_measures_of_shifted_and_collapsed_sets(pair) -> None:
    real = pair[0]
    far = real + 100
    assert precision_recall(real, far) == (0, 0)
    assert density_coverage(real, far) == (0, 0)
    collapsed = np.repeat(real[:1], 50, 0) + 1e-6 * np.random.default_rng(0).normal(size=(50, DIMENSION))
    precision, recall = precision_recall(real, collapsed)
    assert precision == 1
    assert recall < 0.01
    assert density_coverage(real, collapsed)[1] < 0.05
    shuffled = np.random.default_rng(0).permutation(pair[1])
    assert precision_recall(real, shuffled) == precision_recall(real, pair[1])


def test_bad_features_are_refused(gaussians) -> None:
    a, b = gaussians
    broken = a.copy()
    broken[3, 2] = np.nan
    for measure in (frechet_distance, kernel_distance, precision_recall, density_coverage):
        with pytest.raises(DataError, match="NaN"):
            measure(broken, b)
        with pytest.raises(DataError, match="6 and 5 features"):
            measure(a, b[:, :5])
        with pytest.raises(DataError, match=r"at least \d images"):
            measure(a, b[:0])
        with pytest.raises(DataError, match="shape"):
            measure(a, b[0])
    with pytest.raises(DataError, match="at least 4 images"):
        precision_recall(a[:3], b)
    with pytest.raises(DataError, match="at least 6 images"):
        density_coverage(a, b[:5])
    with pytest.raises(DataError, match="at least 2 images"):
        frechet_distance(a[:1], b)
    with pytest.raises(DataError, match="subset_size"):
        kernel_distance(a, b, subset_size=501)
    with pytest.raises(DataError, match="sum to 1"):
        inception_score(a)
    with pytest.raises(DataError, match="splits"):
        inception_score(np.full((4, 2), 0.5), splits=5)
    with pytest.raises(DataError, match="k must be"):
        precision_recall(a, b, k=0)


@pytest.fixture(scope="module")
def encoder() -> FeatureNetwork:
    card = replace(CARDS["inception"], size=8, dimension=DIMENSION, classes=10)
    return FeatureNetwork(card, WithLogits())


def test_fidelity_of_image_sets(digits: ImageSet, encoder: FeatureNetwork) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (500, 8, 8), dtype=np.uint8)
    good, bad = digits.subset(range(0, 1400, 2)), ImageSet.from_arrays(noise)
    real = features(digits.subset(range(1, 1400, 2)), encoder)
    measures = [fidelity(images, real, encoder, progress=False) for images in (good, bad)]
    names = "fid kid_mean kid_sd precision recall density coverage inception_score_mean inception_score_sd"
    assert list(measures[0]) == names.split()
    assert measures[0]["fid"] < measures[1]["fid"]
    assert measures[0]["kid_mean"] < measures[1]["kid_mean"]
    for name in ("precision", "recall", "density", "coverage"):
        assert measures[0][name] > measures[1][name]
    assert all(isinstance(value, float) for value in measures[0].values())


def test_names_of_other_networks(digits: ImageSet, encoder: FeatureNetwork) -> None:
    other = FeatureNetwork(replace(encoder.card, name="effnet_lite0"), encoder.network)
    measures = fidelity(digits.subset(range(100)), digits.subset(range(100, 220)), other)
    kinds = ("fd_{}", "kd_{}_mean", "kd_{}_sd", "precision_{}", "recall_{}", "density_{}", "coverage_{}")
    assert list(measures) == [kind.format("effnet_lite0") for kind in kinds]


def test_fidelity_samples_by_seed(digits: ImageSet, encoder: FeatureNetwork) -> None:
    a, b = digits.subset(range(600)), digits.subset(range(600, 1400))
    first = fidelity(a, b, encoder, sample=100, seed=1)
    assert first == fidelity(a, b, encoder, sample=100, seed=1)
    assert first["fid"] != fidelity(a, b, encoder, sample=100, seed=2)["fid"]
    assert first["fid"] > fidelity(a, b, encoder, sample=None)["fid"]  # fewer images give a larger distance


def test_features_of_another_network_are_refused(digits: ImageSet, encoder: FeatureNetwork) -> None:
    foreign = Features("effnet_lite0", torch.zeros(10, DIMENSION))
    with pytest.raises(DataError, match="features come from 'effnet_lite0', but the measure uses 'inception'"):
        fidelity(digits, foreign, encoder)
