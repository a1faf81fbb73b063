"""Training of encoders: augmentation, statistics, averaging, and a small run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sfumato.data import DataError, ImageSet
from sfumato.features import load_perceptual, save_perceptual
from sfumato.features.resnet import small_resnet
from sfumato.features.train_encoder import augmented_batches, channel_statistics, train_encoder, update_average


@pytest.fixture(scope="module")
def colour_digits(digits: ImageSet) -> ImageSet:
    return ImageSet(digits.images.expand(-1, 3, -1, -1).contiguous(), digits.labels, digits.classes)


def test_an_epoch_contains_every_image_once_shifted_and_mirrored() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 6, 8, 3), dtype=torch.uint8, generator=generator)
    batches = list(augmented_batches(images, torch.arange(40), 10, 2, 3, generator))
    assert torch.cat([labels for _, _, labels in batches]).sort().values.tolist() == list(range(40))
    padded = torch.nn.functional.pad(images.permute(0, 3, 1, 2).float(), (2, 2, 2, 2), mode="reflect").byte()
    mirrored = 0
    for pixels, hidden, labels in batches:
        assert pixels.shape == (10, 3, 6, 8)
        assert pixels.is_contiguous(memory_format=torch.channels_last)
        assert 1 <= int(hidden.sum((1, 2, 3)).min()) <= int(hidden.sum((1, 2, 3)).max()) == 9
        for image, label in zip(pixels, labels, strict=True):
            windows = [padded[label, :, y : y + 6, x : x + 8] for y in range(5) for x in range(5)]
            unmirrored = any(torch.equal(image, window) for window in windows)
            assert unmirrored or any(torch.equal(image.flip(2), window) for window in windows)
            mirrored += not unmirrored
    assert 8 <= mirrored <= 32  # of 40


def test_channel_statistics() -> None:
    images = torch.randint(0, 256, (50, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = channel_statistics(images)
    pixels = images.double() / 255
    torch.testing.assert_close(mean.double(), pixels.mean((0, 2, 3)), atol=1e-4, rtol=0)
    torch.testing.assert_close(std.double(), pixels.std((0, 2, 3), unbiased=False), atol=1e-4, rtol=0)


def test_update_average() -> None:
    average, network = small_resnet(), small_resnet()
    before = average.conv1.weight.detach().clone()
    for module in (*average.modules(), *network.modules()):
        if isinstance(module, torch.nn.BatchNorm2d):
            module.num_batches_tracked = None
    update_average(average, network, 0.25)
    torch.testing.assert_close(average.conv1.weight, 0.75 * before + 0.25 * network.conv1.weight)


@pytest.mark.parametrize("network", ["small", "resnet18_cifar"])
def test_trained_encoder_can_be_saved_and_loaded(network: str, colour_digits: ImageSet, tmp_path: Path) -> None:
    images, test = colour_digits.subset(range(48)), colour_digits.subset(range(48, 96))
    options = {"epochs": 1, "batch_size": 16, "max_shift": 1, "cutout": 2}
    card, state = train_encoder(
        images, test, name="mine", trained_on="digits", network=network, notes={"command": "train"}, **options
    )
    assert 0 <= card.notes["test_accuracy"] <= 100
    assert (card.notes["images"], card.notes["test_images"], card.notes["command"]) == (48, 48, "train")
    save_perceptual(tmp_path / "mine.safetensors", card, state)
    encoder = load_perceptual(tmp_path / "mine.safetensors")
    assert encoder.card == card
    assert encoder.card.notes == card.notes
    with torch.no_grad():
        assert all(values.isfinite().all() for values in encoder(torch.zeros(1, 1, 28, 28)))


def test_training_learns_and_is_reproducible(colour_digits: ImageSet) -> None:
    images, test = colour_digits.subset(range(512)), colour_digits.subset(range(512, 768))
    options = {"epochs": 4, "batch_size": 32, "max_shift": 1, "cutout": 0}
    runs = [train_encoder(images, test, name="mine", trained_on="digits", **options) for _ in range(2)]
    assert runs[0][0].notes["test_accuracy"] > 50  # chance is 10
    assert all(torch.equal(runs[0][1][name], value) for name, value in runs[1][1].items())


def test_invalid_arguments_raise_errors(digits: ImageSet, colour_digits: ImageSet) -> None:
    with pytest.raises(DataError, match="colour images"):
        train_encoder(digits, name="mine", trained_on="digits")
    with pytest.raises(DataError, match="test images measure a classifier"):
        train_encoder(ImageSet(colour_digits.images), colour_digits, name="mine", trained_on="digits")
    with pytest.raises(DataError, match="unknown network 'vgg11'"):
        train_encoder(colour_digits, name="mine", trained_on="digits", network="vgg11")
