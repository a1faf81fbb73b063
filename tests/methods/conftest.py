"""What the tests of methods share."""

from __future__ import annotations

import pytest
import torch

from sfumato.encoders import PerceptualCard, save_perceptual
from sfumato.encoders.perceptual import NETWORKS

CARD = PerceptualCard("tiny", "small", "random numbers", "Apache-2.0", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small network with random weights, as a file with its card."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = NETWORKS["small"]().state_dict()
    path = tmp_path_factory.mktemp("encoder") / "tiny.safetensors"
    save_perceptual(path, CARD, state)
    return str(path)
