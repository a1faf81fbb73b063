"""The script that trains encoders: its augmentation, and a run from end to end on few, small images."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sfumato.encoders import load_perceptual
from sfumato.encoders.resnet import small

SCRIPT = Path(__file__).parents[2] / "benchmarks/train_encoder.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_encoder", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_image_comes_once_shifted_and_mirrored(script: ModuleType) -> None:
    images = torch.randint(0, 256, (40, 6, 8, 3), dtype=torch.uint8)
    batches = list(script.epoch(images, torch.arange(40), 10, 2, 3, torch.Generator().manual_seed(0)))
    assert torch.cat([labels for _, _, labels in batches]).sort().values.tolist() == list(range(40))
    padded = torch.nn.functional.pad(images.permute(0, 3, 1, 2).float(), (2, 2, 2, 2), mode="reflect").byte()
    mirrored = 0
    for pixels, hidden, labels in batches:
        assert pixels.shape == (10, 3, 6, 8)
        assert pixels.is_contiguous(memory_format=torch.channels_last)
        assert 1 <= int(hidden.sum((1, 2, 3)).min()) <= int(hidden.sum((1, 2, 3)).max()) == 9
        for one, label in zip(pixels, labels, strict=True):
            windows = [padded[label, :, y : y + 6, x : x + 8] for y in range(5) for x in range(5)]
            as_is = any(torch.equal(one, window) for window in windows)
            assert as_is or any(torch.equal(one.flip(2), window) for window in windows)
            mirrored += not as_is
    assert 8 <= mirrored <= 32  # of 40: outside with probability below 1e-4; the seed is fixed


def test_colours(script: ModuleType) -> None:
    images = torch.randint(0, 256, (50, 3, 5, 7), dtype=torch.uint8)
    mean, std = script.colours(images)
    pixels = images.double() / 255
    torch.testing.assert_close(mean.double(), pixels.mean((0, 2, 3)), atol=1e-4, rtol=0)
    torch.testing.assert_close(std.double(), pixels.std((0, 2, 3), unbiased=False), atol=1e-4, rtol=0)


def test_average_of_weights(script: ModuleType) -> None:
    average, network = small(), small()
    before = average.conv1.weight.detach().clone()
    for module in (average, network):
        for part in module.modules():
            if isinstance(part, torch.nn.BatchNorm2d):
                part.num_batches_tracked = None
    script.update(average, network, 0.25)
    torch.testing.assert_close(average.conv1.weight, 0.75 * before + 0.25 * network.conv1.weight)


@pytest.mark.parametrize("network", ["small", "resnet18"])
def test_from_images_to_an_encoder(
    script: ModuleType, network: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "folder/mine.safetensors", tmp_path / "report.json"
    script.main(
        [
            *("--data", "digits", "--network", network, "--limit", "48", "--epochs", "1", "--batch-size", "16"),
            *("--shift", "1", "--cut", "2", "--device", "cpu", "--out", str(out), "--json", str(report)),
        ]
    )
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line == json.loads(report.read_text())
    assert 0 <= line["test_accuracy"] <= 100
    assert str(tmp_path) not in line["command"]
    encoder = load_perceptual(out)
    assert encoder.card.name == "mine"
    assert encoder.card.notes["test_accuracy"] == line["test_accuracy"]
    assert encoder.card.notes["images"] == 48
    with torch.no_grad():
        assert all(values.isfinite().all() for values in encoder(torch.zeros(1, 1, 28, 28)))
