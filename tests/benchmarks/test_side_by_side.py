"""Contact sheets of one data set and epsilon become one picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks import side_by_side
from benchmarks.side_by_side import join_each, name_of
from sfumato.data import ImageSet, contact_sheet


def sheet(path: Path, value: int) -> Path:
    images = torch.full((100, 1, 28, 28), value, dtype=torch.uint8)
    return contact_sheet(ImageSet(images, torch.arange(100) % 10, tuple("0123456789")), path)


def test_rows_are_named_by_method() -> None:
    assert name_of(Path("default_dp-merf_mnist_1.0.png")) == "dp-merf"
    assert name_of(Path("tiny-imagenet_atelier_cifar10_1.0.png")) == "atelier, tiny-imagenet"
    assert name_of(Path("dp-kernel_fashion-mnist_1.png")) == "dp-kernel"


def test_sheets_are_joined_by_data_and_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sheets, real = (
        tmp_path / "sheets",
        ImageSet(torch.full((100, 1, 28, 28), 9, dtype=torch.uint8), torch.arange(100) % 10, tuple("0123456789")),
    )
    sheets.mkdir()
    for name, value in (("default_dp-merf_mnist_1.0", 100), ("default_atelier_mnist_1.0", 200), ("x_dm_mnist_2.0", 0)):
        sheet(sheets / f"{name}.png", value)
    monkeypatch.setattr(side_by_side.sf, "load_images", lambda *_, **__: real)
    (made,) = join_each(sheets, tmp_path)
    assert made.name == "side_by_side_mnist_1.png"
    with Image.open(made) as picture:
        grey = picture.convert("L")
    side = grey.height // 3
    middles = [grey.getpixel((grey.width - side // 2, row * side + side // 2)) for row in range(3)]
    assert middles == [9, 200, 100]  # real images, then methods in the order of the tables
