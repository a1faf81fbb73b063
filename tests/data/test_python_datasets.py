"""Data sets that are objects: Hugging Face `datasets`, PyTorch datasets; and public facts without decoding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset

from sfumato.data import (
    DataError,
    DataWarning,
    ImageSet,
    decode,
    load_images,
    read_outline,
    save_images,
    to_hugging_face,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 100:sfumato.data.DataWarning")


class ImageFolder(Dataset):
    """The interface of torchvision's ImageFolder: (Pillow image, index), and `classes`."""

    classes = ("cat", "dog")

    def __init__(self, pixels, convert=Image.fromarray):
        self.pixels, self.convert = pixels, convert

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return self.convert(self.pixels[index]), index % 2


def to_tensor(pixels):
    return torch.from_numpy(pixels)[None] / 255


@pytest.mark.parametrize("convert", [Image.fromarray, to_tensor, np.asarray])
def test_a_torch_data_set(pixels, convert):
    got = load_images(ImageFolder(pixels[:6], convert))
    assert got.classes == ("cat", "dog")
    assert got.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert np.array_equal(got.images[:, 0].numpy(), pixels[:6])
    assert load_images(Subset(ImageFolder(pixels, convert), [1, 3, 4]), size=16).shape == (1, 16, 16)
    assert load_images(ImageFolder(pixels, convert), labels=False).labels is None


def test_torch_data_sets_that_cannot_be_read(pixels):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from pixels

    with pytest.raises(DataError, match="needs a length"):
        load_images(Stream())
    with pytest.raises(DataError, match=r"item 0 of the data set: float images have values below 0.*normalisation"):
        load_images(ImageFolder(pixels, lambda image: to_tensor(image) * 2 - 1))
    with pytest.raises(DataError, match="does not store persons"):
        load_images(ImageFolder(pixels), person="patient")
    with pytest.raises(DataError, match="cannot be read from a int"):
        load_images(7)


@pytest.fixture
def hugging_face(digits):
    pytest.importorskip("datasets")
    return to_hugging_face(digits)


def test_hugging_face_data_sets_come_in_and_go_out(hugging_face, digits, tmp_path):
    import datasets

    got = load_images(hugging_face)
    assert got.classes == digits.classes
    assert got.labels.tolist() == digits.labels.tolist()
    assert bool((got.images == digits.images).all())
    datasets.DatasetDict({"train": hugging_face, "test": hugging_face.select(range(5))}).save_to_disk(tmp_path / "both")
    assert len(load_images(tmp_path / "both")) == 60
    assert len(load_images(tmp_path / "both", split="test")) == 5
    hugging_face.save_to_disk(tmp_path / "one")
    assert load_images(tmp_path / "one", labels=False).labels is None
    parquet = datasets.Dataset.from_parquet(str(save_images(digits, tmp_path / "x.parquet")), cache_dir=tmp_path / "c")
    assert parquet.features["label"].names == list(digits.classes)


def test_columns_of_a_hugging_face_data_set(hugging_face):
    import datasets

    several = datasets.Sequence(datasets.ClassLabel(names=["cyst", "edema"]))
    rows = hugging_face.add_column("patient", [f"p{number // 3}" for number in range(60)])
    rows = rows.add_column("finding", [[0, 1] if number % 2 else [1] for number in range(60)]).cast_column(
        "finding", several
    )
    got = load_images(rows, person="patient", label_column="finding", classes=["edema", "cyst|edema"])
    assert got.labels.tolist() == [0, 1] * 30
    assert got.persons.bincount().tolist() == [3] * 20
    first = load_images(rows, label_column="finding", several_labels="first")
    assert first.classes == ("cyst", "edema")
    assert first.labels.tolist() == [1, 0] * 30
    with pytest.raises(DataError, match=r"no column 'nothing', only image, label, patient, finding"):
        load_images(rows, label_column="nothing")
    with pytest.raises(DataError, match="no split 'train', only test"):
        load_images(datasets.DatasetDict({"test": rows}))


def test_public_facts_decode_nothing_that_is_not_needed(class_folder, monkeypatch):
    opened = []
    real = decode._open_images
    monkeypatch.setattr(decode, "_open_images", lambda *given: opened.append(given[1]) or real(*given))
    declared = read_outline(class_folder, size=16, mode="rgb").public()
    assert not opened
    assert declared == load_images(class_folder, size=16, mode="rgb").public()
    opened.clear()
    assert read_outline(class_folder).public(declare_size=True).sizes == (2.0, 2.0)
    assert opened == ["a/0.png"]


def test_public_facts_report_what_was_left_out(class_folder):
    (class_folder / "notes.txt").write_text("x")
    with pytest.warns(DataWarning, match=r"1 in all: \.txt \(1\)"):
        read_outline(class_folder)


def test_public_facts_of_arrays(tmp_path, digits):
    path = save_images(ImageSet(digits.images, digits.labels, digits.classes), tmp_path / "x.npz")
    assert read_outline(path, size=4).public(declare_size=True) == load_images(path, size=4).public(declare_size=True)
