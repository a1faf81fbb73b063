"""EfficientNet-Lite0, loaded once; tests that need it are skipped if its weights are not installed."""

from __future__ import annotations

import importlib.util

import pytest

from sfumato.features import FeatureNetwork, load_feature_network
from sfumato.features.efficientnet import WEIGHTS


@pytest.fixture(scope="session")
def effnet() -> FeatureNetwork:
    if importlib.util.find_spec(WEIGHTS.package) is None:
        pytest.skip(f"{WEIGHTS.package} (extra 'fidelity'), which contains the weights, is not installed")
    return load_feature_network("effnet_lite0")
