"""The EfficientNet-Lite0 encoder, loaded once; tests that need it skip where its weights are not installed."""

from __future__ import annotations

import importlib.util

import pytest

from sfumato.encoders import Encoder, load_encoder
from sfumato.encoders.efficientnet import WEIGHTS


@pytest.fixture(scope="session")
def effnet() -> Encoder:
    if importlib.util.find_spec(WEIGHTS.package) is None:
        pytest.skip(f"{WEIGHTS.package} (extra 'fidelity'), which carries the weights, is not installed")
    return load_encoder("effnet_lite0")
