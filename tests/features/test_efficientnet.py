"""EfficientNet-Lite0: agreement with the reference package, and predictions for photographs."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_image

from sfumato.data import ImageSet
from sfumato.features import FeatureNetwork, features
from sfumato.features.efficientnet import WEIGHTS, EfficientNetLite0
from sfumato.features.weights import find_weights, load_weights

PALACE, DAISY = 698, 985  # ImageNet classes


def test_number_of_parameters() -> None:
    assert sum(parameter.numel() for parameter in EfficientNetLite0().parameters()) == 4_652_008


def test_output_equals_reference_package(effnet: FeatureNetwork) -> None:
    reference_package = pytest.importorskip("efficientnet_lite_pytorch", reason="the reference is not installed")
    path = str(find_weights(WEIGHTS))
    with contextlib.redirect_stdout(io.StringIO()):
        reference = reference_package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    ours = EfficientNetLite0().eval()
    load_weights(ours, find_weights(WEIGHTS))
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, pooled = reference(x), reference.extract_features(x).mean((2, 3))
        for network in (ours, effnet.network):  # with and without batch norms
            our_features, our_logits = network(x)
            torch.testing.assert_close(our_features, pooled, atol=1e-4, rtol=0)
            torch.testing.assert_close(our_logits, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [(28, 28), (32, 64), (45, 30)])
def test_activations_of_other_sizes_equal_reference_package(effnet: FeatureNetwork, size: tuple[int, int]) -> None:
    reference_package = pytest.importorskip("efficientnet_lite_pytorch", reason="the reference is not installed")
    reference = reference_package.EfficientNet.from_name("efficientnet-lite0", image_size=size).eval()
    reference.load_state_dict(torch.load(find_weights(WEIGHTS), weights_only=True))
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(effnet.network.trunk(x), reference.extract_features(x), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("file", "expected"), [("china.jpg", PALACE), ("flower.jpg", DAISY)])
def test_classifies_photographs(effnet: FeatureNetwork, file: str, expected: int) -> None:
    """End-to-end check of weights, resizing and normalisation with the photographs of scikit-learn."""
    photograph = np.array(load_sample_image(file))[:, 106:533]
    found = features(ImageSet.from_arrays(photograph[None]), effnet, probabilities=True)
    assert found.probabilities is not None
    assert int(found.probabilities.argmax()) == expected
