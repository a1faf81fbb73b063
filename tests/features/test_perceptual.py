"""Perceptual encoders: dimensions, precision, row independence, gradients, and sources of weights."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sfumato.data import DataError, ImageSet
from sfumato.engine import Performance, calibrate
from sfumato.features import PERCEPTUAL, FeatureNetwork, Perceptual, PerceptualCard, load_perceptual, save_perceptual
from sfumato.features import perceptual as module
from sfumato.features.perceptual import ENCODER_NETWORKS, PUBLISHED, activations
from sfumato.features.resnet import small_resnet
from sfumato.features.weights import Weights, find_weights, sha256_of
from sfumato.privacy import Budget, Release, Vault

CARD = PerceptualCard(
    "mine", "small", "random numbers", "Apache-2.0", (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), {"accuracy": 10.5}
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Search for weights in one empty folder only."""
    monkeypatch.setenv("SFUMATO_WEIGHTS", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1


def seeded(name: str, **options: int) -> module.Network:
    torch.manual_seed(0)
    return ENCODER_NETWORKS[name](**options)


@pytest.mark.parametrize(
    ("name", "size", "dimension"),
    [
        # Table 17 of the DP-MEPF paper, and 64 pixels
        ("vgg11", 32, 151_552),
        ("vgg13", 32, 249_856),
        ("vgg16", 32, 276_480),
        ("vgg19", 32, 303_104),
        ("vgg19", 64, 1_212_416),
        ("vgg19_bn", 32, 303_104),
        ("resnet18", 32, 47_104),
        ("resnet34", 32, 72_704),
        ("resnet50", 32, 196_096),
    ],
)
def test_dimensions_match_the_paper(name: str, size: int, dimension: int) -> None:
    card = PUBLISHED[name][0]
    assert card.dimension((3, size, size)) == dimension
    assert card.dimension((1, size, size)) == dimension


@pytest.mark.parametrize("name", ["small", "resnet18_cifar", "effnet_lite0", "vgg11_bn"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 20, 64)])
def test_predicted_shapes_match_the_output(name: str, shape: tuple[int, int, int]) -> None:
    perceptual = Perceptual(replace(CARD, network=name), seeded(name))
    with torch.no_grad():
        outputs = perceptual(torch.zeros(1, *shape))
    assert perceptual.shapes(shape) == [tuple(values.shape[1:]) for values in outputs]
    assert perceptual.dimension(shape) == sum(values.numel() for values in outputs)
    assert all(values.min() >= 0 for values in outputs)


def test_images_are_normalised(images: torch.Tensor) -> None:
    perceptual = Perceptual(CARD, seeded("small"))
    mean, std = torch.tensor(CARD.mean).view(3, 1, 1), torch.tensor(CARD.std).view(3, 1, 1)
    with torch.no_grad():
        expected = activations(perceptual.network, ((images + 1) / 2 - mean) / std)
        for values, reference in zip(perceptual(images), expected, strict=True):
            torch.testing.assert_close(values, reference, atol=1e-5, rtol=1e-4)
        grey = images[:, :1]
        for values, reference in zip(perceptual(grey), perceptual(grey.repeat(1, 3, 1, 1)), strict=True):
            assert torch.equal(values, reference)


@pytest.mark.parametrize("name", ["small", "resnet18", "resnet50", "vgg11_bn", "effnet_lite0"])
def test_rows_are_independent_under_vmap(name: str, images: torch.Tensor) -> None:
    perceptual = Perceptual(replace(CARD, network=name), seeded(name))

    def row(image: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[0].flatten() for values in perceptual(image[None])])

    with torch.no_grad():
        rows = torch.vmap(row, randomness="error")(images)
        batch = torch.cat([values.flatten(1) for values in perceptual(images)], 1)
        assert rows.shape == (4, perceptual.dimension((3, 32, 32)))
        torch.testing.assert_close(rows, batch, atol=1e-5, rtol=1e-4)
        grey = torch.vmap(row, randomness="error")(images[:, :1])
        torch.testing.assert_close(grey[2], row(images[2, :1]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["small", "vgg11", "resnet18", "effnet_lite0"])
def test_gradients_reach_images_but_not_weights(name: str, images: torch.Tensor) -> None:
    perceptual = Perceptual(replace(CARD, network=name), seeded(name)).double()
    x = images[:1].double().requires_grad_(True)

    def total(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([values.square().mean() for values in perceptual(x)]).sum()

    (gradient,) = torch.autograd.grad(total(x), x)
    direction = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    step = 1e-6
    with torch.no_grad():
        slope = (total(x + step * direction) - total(x - step * direction)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-4, atol=1e-8)
    assert not any(parameter.requires_grad for parameter in perceptual.parameters())


def test_bfloat16_approximates_float32(own_folder: Path, images: torch.Tensor) -> None:
    save_perceptual(own_folder / "mine.safetensors", CARD, seeded("small").state_dict())
    exact, rough = load_perceptual("mine"), load_perceptual("mine", "cpu", torch.bfloat16)
    with torch.no_grad():
        for one, other in zip(exact(images), rough(images), strict=True):
            assert one.dtype == torch.float32
            assert other.dtype == torch.bfloat16
            assert float((one - other).norm() / one.norm()) < 0.02
    assert rough.gain.dtype == torch.float32


def test_saved_encoder_contains_its_card(tmp_path: Path, own_folder: Path, images: torch.Tensor) -> None:
    network = small_resnet(classes=7)
    network(images)
    path = own_folder / "mine.safetensors"
    save_perceptual(path, CARD, network.state_dict())
    loaded = load_perceptual(path)
    assert loaded.card == CARD
    assert loaded.card.notes == {"accuracy": 10.5}
    assert loaded.sha256 == sha256_of(path)
    with torch.no_grad():
        expected = Perceptual(CARD, network)(images)
        for one, other in zip(loaded(images), expected, strict=True):
            torch.testing.assert_close(one, other, atol=5e-3, rtol=1e-2)  # weights in half precision
    for source in ("mine", f"sha256:{loaded.sha256}", f"sha256:{loaded.sha256[:8].upper()}"):
        assert load_perceptual(source).sha256 == loaded.sha256


def test_published_file_is_identified_by_its_checksum(
    own_folder: Path, tmp_path: Path, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in torchvision's format, with a classifier, replaces the published one."""
    network = seeded("resnet18", classes=1000)
    path = tmp_path / "anything.pth"
    torch.save(network.state_dict(), path)
    digest = sha256_of(path)
    card, _ = PUBLISHED["resnet18"]
    monkeypatch.setitem(PUBLISHED, "resnet18", (card, Weights("resnet18.pth", digest)))
    by_path = load_perceptual(path)
    assert by_path.card is card
    assert "fc.weight" not in by_path.network.state_dict()
    shutil.copy(path, own_folder / "resnet18.pth")
    by_name, by_checksum = load_perceptual("resnet18"), load_perceptual(f"sha256:{digest[:12]}")
    assert by_name.sha256 == by_checksum.sha256 == digest
    with torch.no_grad():
        expected = Perceptual(card, network)(images)
        for loaded in (by_path, by_name, by_checksum):
            for one, other in zip(loaded(images), expected, strict=True):
                assert torch.equal(one, other)


def test_dense_layers_of_torchvision_are_skipped(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {
        **seeded("vgg11").state_dict(),
        "classifier.0.weight": torch.zeros(2, 2),
        "classifier.6.bias": torch.zeros(2),
    }
    path = own_folder / "vgg11.pth"
    torch.save(state, path)
    monkeypatch.setitem(PUBLISHED, "vgg11", (PUBLISHED["vgg11"][0], Weights("vgg11.pth", sha256_of(path))))
    loaded = load_perceptual("vgg11")
    assert torch.equal(loaded.network.state_dict()["features.18.weight"], state["features.18.weight"])


def test_efficientnet_from_published_file(effnet: FeatureNetwork, images: torch.Tensor) -> None:
    loaded = load_perceptual(find_weights(effnet.card.weights))
    assert loaded.card.name == "effnet_lite0"
    large = torch.nn.functional.interpolate(images[:1], (224, 224))
    with torch.no_grad():
        found = loaded(large)
        expected, _ = effnet.network(((large + 1) * 127.5 - 127) / 128)
    assert len(found) == 1 + 15 + 16 + 1  # stem, expansion (not in the first block), depthwise, head
    torch.testing.assert_close(found[-1].mean((2, 3)), expected, atol=1e-4, rtol=1e-4)


def test_missing_encoders_raise_errors(own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"small_cifar10", "small_tinyimagenet", "vgg19", "resnet18", "effnet_lite0"} <= set(PERCEPTUAL)
    monkeypatch.setattr("sfumato.features.weights.SHIPPED", tmp_path / "nothing")
    with pytest.raises(DataError, match=r"small_cifar10 is missing from this installation.*train_encoder"):
        load_perceptual("small_cifar10")
    with pytest.raises(DataError, match="unknown encoder 'vgg18'; did you mean 'vgg1"):
        load_perceptual("vgg18")
    with pytest.raises(DataError, match=r"there is no weight file .*gone\.safetensors"):
        load_perceptual(tmp_path / "gone.safetensors")
    with pytest.raises(DataError, match=r"there is no weight file .*gone\.pth"):
        load_perceptual(tmp_path / "gone.pth")
    with pytest.raises(DataError, match="no weight file with SHA-256 0123456789"):
        load_perceptual("sha256:0123456789")
    with pytest.raises(DataError, match="expected 8 to 64 hexadecimal digits"):
        load_perceptual("sha256:xyz")


def test_files_of_other_networks_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    state = small_resnet().state_dict()
    with pytest.raises(DataError, match=r"weights\.safetensors does not fit the ResNet network: bn1\.bias"):
        save_perceptual(path, replace(CARD, network="resnet18"), state)
    module.save_with_card(path, state, {"name": "mine", "network": "resnet18"})
    with pytest.raises(DataError, match=r"card in .*weights\.safetensors is incomplete or invalid: 'mean'"):
        load_perceptual(path)
    metadata = {"name": "x", "network": "reznet", "trained_on": "", "licence": "", "mean": [0] * 3, "std": [1] * 3}
    module.save_with_card(path, state, metadata)
    with pytest.raises(DataError, match=r"weights\.safetensors is incomplete or invalid: unknown network 'reznet'"):
        load_perceptual(path)
    module.save_with_card(path, {**state, "layer1.0.conv1.weight": torch.zeros(1)}, {**metadata, "network": "small"})
    with pytest.raises(DataError, match=r"does not fit the ResNet network: layer1\.0\.conv1\.weight differ"):
        load_perceptual(path)
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(DataError, match=r"weights\.pth is not a published weight file .*save_perceptual"):
        load_perceptual(tmp_path / "weights.pth")


def test_changed_and_foreign_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_perceptual(path, CARD, small_resnet().state_dict())
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"weights\.safetensors was changed after it was written"):
        load_perceptual(path)
    path.write_bytes(content[:-100])
    with pytest.raises(DataError, match=r"weights\.safetensors is not a safetensors file"):
        load_perceptual(path)
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(DataError, match=r"weights\.safetensors has no sfumato-encoder-1 metadata"):
        load_perceptual(path)


def test_shipped_encoders_load() -> None:
    """The encoders of the package have a card and finite activations."""
    for name in module.SHIPPED_NAMES:
        if (module.SHIPPED / f"{name}.safetensors").exists():
            loaded = load_perceptual(name)
            assert loaded.card.name == name
            with torch.no_grad():
                assert all(values.isfinite().all() for values in loaded(torch.zeros(1, 1, 28, 28)))


def test_vault_sums_activations(few_digits: ImageSet) -> None:
    """The vault can trace an encoder as a feature of private images."""
    perceptual = Perceptual(CARD, seeded("small"))

    def feature(images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.cat([values.flatten(1) for values in perceptual(images)], 1))

    vault = Vault(
        few_digits,
        calibrate([Release("x")], Budget(math.inf)),
        secure=False,
        performance=Performance(batch_size=16),
    )
    found = vault.sum(feature, release="x", bound=1.0)
    with torch.no_grad():
        expected = feature(few_digits.images / 127.5 - 1).sum(0)
    torch.testing.assert_close(found.float().flatten(), expected, atol=1e-4, rtol=1e-3)
