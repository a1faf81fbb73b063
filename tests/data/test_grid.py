"""The contact sheet: geometry, choice of images, row names."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from sfumato.data import DataError, ImageSet, contact_sheet
from sfumato.data.grid import GAP


def sheet_of(images, path, **options):
    with Image.open(contact_sheet(images, path, **options)) as sheet:
        return np.asarray(sheet)


def test_rows_are_classes_in_order(tmp_path, digits):
    sheet = sheet_of(digits, tmp_path / "sheet.png", per_class=3)
    enlarged = np.kron(digits.images[digits.labels == 0][1, 0].numpy(), np.ones((7, 7), np.uint8))
    cell = 56 + GAP
    assert sheet.shape[0] == 10 * cell + GAP
    margin = sheet.shape[1] - 3 * cell - GAP
    assert margin > 8
    left = margin + GAP + cell
    assert np.array_equal(sheet[GAP : GAP + 56, left : left + 56, 0], enlarged)
    assert (sheet[:, margin + GAP + 56 : margin + GAP + 56 + GAP] == 255).all()  # The gap between two cells.
    for row in range(10):  # Each row has its name.
        assert sheet[row * cell : (row + 1) * cell, :margin].min() < 100
    assert [file.name for file in tmp_path.iterdir()] == ["sheet.png"]


def test_many_classes_are_subsampled_evenly(tmp_path):
    images = np.repeat(np.arange(100, dtype=np.uint8), 2)[:, None, None] * np.ones((1, 8, 8), np.uint8)
    sheet = sheet_of(ImageSet.from_arrays(images, np.repeat(np.arange(100), 2), 100), tmp_path / "x.png", scale=2)
    row_height = 18  # a line of text needs more than the 16 pixels of the image
    assert sheet.shape[0] == 20 * row_height + GAP
    shown = [int(sheet[GAP + row * row_height, -GAP - 1, 0]) for row in range(20)]
    assert shown[0] == 0
    assert shown[-1] == 99
    assert set(np.diff(shown)) <= {5, 6}


def test_unlabelled_is_square(tmp_path, digits):
    sheet = sheet_of(ImageSet(digits.images), tmp_path / "x.png", per_class=5, scale=1)
    assert sheet.shape == (5 * 10 + GAP, 5 * 10 + GAP, 3)
    assert np.array_equal(sheet[GAP : GAP + 8, 12 : 12 + 8, 0], digits.images[1, 0].numpy())


def test_missing_images_and_odd_names(tmp_path, digits):
    names = ["line\nbreak", "", "x" * 200, "日本", *"456789"]
    few = ImageSet(digits.images[:3], digits.labels[:3], names)
    sheet = sheet_of(few, tmp_path / "x.png")
    assert sheet.shape[1] < 400


def test_large_images_are_not_enlarged(tmp_path):
    images = ImageSet.from_arrays(np.zeros((4, 3, 64, 80), np.uint8), [0, 1, 0, 1], ["a", "b"])
    assert sheet_of(images, tmp_path / "x.png").shape[0] == 2 * (64 + GAP) + GAP


def test_failure_leaves_the_old_sheet(tmp_path, digits, monkeypatch):
    (tmp_path / "x.png").write_bytes(b"old")

    def fail(_, path, __):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(DataError, match=r"x\.png cannot be written: no space left"):
        contact_sheet(digits, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["x.png"]


def test_bad_options(tmp_path, digits):
    with pytest.raises(DataError, match="per_class=0"):
        contact_sheet(digits, tmp_path / "x.png", per_class=0)


def test_accents_are_drawn_or_replaced(digits, tmp_path, monkeypatch):
    """Without a system font, names are converted to ASCII, because the built-in font would draw empty boxes."""
    from sfumato.data import grid

    assert grid._to_ascii("méningiome à β") == "meningiome a ?"
    monkeypatch.setattr(grid, "FONTS", ())
    assert grid.load_font()[1] is False
    names = [f"é{number}" for number in range(len(digits.classes))]
    accented = contact_sheet(ImageSet(digits.images, digits.labels, names), tmp_path / "a.png")
    plain_names = [name.replace("é", "e") for name in names]
    plain = contact_sheet(ImageSet(digits.images, digits.labels, plain_names), tmp_path / "b.png")
    assert accented.read_bytes() == plain.read_bytes()
