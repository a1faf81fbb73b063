"""Writing: round trips, file names, and failures that must leave nothing behind."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from sfumato.data import DataError, ImageSet, load_images, save, save_images

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 100:sfumato.data.DataWarning")

TARGETS = ["set", "set.npz", "set.parquet"]


def contents(folder):
    """Map every file below a folder to its bytes, including hidden files."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def by_class(digits):
    """Return the digits in the order in which a folder is read back."""
    return digits.subset(torch.argsort(digits.labels, stable=True))


@pytest.fixture
def colourful():
    """More than one Parquet row group of RGB noise, 12 classes whose names are numbers."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (1030, 3, 4, 5), dtype=np.uint8)
    return ImageSet.from_arrays(images, np.sort(np.arange(1030) % 12), 12)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("which", ["by_class", "colourful"])
def test_round_trip(tmp_path, request, target, which):
    images = request.getfixturevalue(which)
    assert save_images(images, tmp_path / target) == tmp_path / target
    again = load_images(tmp_path / target)
    assert torch.equal(again.images, images.images)
    assert torch.equal(again.labels, images.labels)
    assert again.classes == images.classes
    assert names_in(tmp_path) == [target]


@pytest.mark.parametrize("target", TARGETS)
def test_round_trip_unlabelled(tmp_path, digits, target):
    save_images(ImageSet(digits.images), tmp_path / target)
    again = load_images(tmp_path / target, labels=False)
    assert torch.equal(again.images, digits.images)
    assert again.classes == ("all",)
    with pytest.raises(DataError, match="--unlabelled"):
        load_images(tmp_path / target)


@pytest.mark.parametrize("target", TARGETS)
def test_awkward_class_names_stay_distinct(tmp_path, digits, target):
    names = ["", "..", "a/b", "a%2Fb", "a\\b", ".hidden", "tab\t", "é 日本", "Thumbs.db", "x."]
    save_images(ImageSet(digits.images, digits.labels, names), tmp_path / target)
    again = load_images(tmp_path / target)
    assert sorted(again.classes) == sorted(names)
    pairs = zip(digits.images, digits.labels, strict=True)
    expected = {image.numpy().tobytes(): names[label] for image, label in pairs}
    for image, label in zip(again.images, again.labels, strict=True):
        assert expected[image.numpy().tobytes()] == again.classes[label]
    assert names_in(tmp_path) == [target]


def test_order_of_classes_and_images_is_kept_by_single_files(tmp_path, digits):
    shuffled = ImageSet(digits.images, digits.labels, tuple("jihgfedcba"))
    for target in TARGETS[1:]:
        save_images(shuffled, tmp_path / target)
        again = load_images(tmp_path / target)
        assert again.classes == shuffled.classes
        assert torch.equal(again.labels, shuffled.labels)
        assert torch.equal(again.images, shuffled.images)


@pytest.mark.parametrize("target", TARGETS[1:])
def test_single_files_hold_soft_labels(tmp_path, colourful, target):
    soft_labels = torch.rand(1030, 12).softmax(1)
    save_images(replace(colourful, soft_labels=soft_labels), tmp_path / target)
    assert torch.equal(load_images(tmp_path / target).soft_labels, soft_labels)
    assert torch.equal(load_images(tmp_path / target, size=8).soft_labels, soft_labels)
    assert load_images(tmp_path / target, labels=False).soft_labels is None


def test_a_folder_cannot_hold_soft_labels(tmp_path, colourful):
    with pytest.raises(DataError, match=r"cannot hold soft labels; save them as \.npz or \.parquet"):
        save_images(replace(colourful, soft_labels=torch.ones(1030, 12) / 12), tmp_path / "set")
    assert names_in(tmp_path) == []


def test_shards_agree_on_soft_labels(tmp_path, colourful):
    save_images(colourful, tmp_path / "0.parquet")
    save_images(replace(colourful, soft_labels=torch.ones(1030, 12) / 12), tmp_path / "1.parquet")
    with pytest.raises(DataError, match="only some of the shards"):
        load_images(tmp_path)


def test_folder_layout(tmp_path, digits):
    save_images(digits, tmp_path / "set")
    assert names_in(tmp_path / "set") == list("0123456789")
    label = int(digits.labels[7])
    assert (tmp_path / "set" / str(label) / "00007.png").is_file()
    save_images(ImageSet(digits.images), tmp_path / "flat")
    assert names_in(tmp_path / "flat") == [f"{number:05}.png" for number in range(60)]


def test_npz_needs_no_pickle_and_parquet_names_its_classes(tmp_path, digits):
    save_images(digits, tmp_path / "set.npz")
    with np.load(tmp_path / "set.npz", allow_pickle=False) as archive:
        assert archive["images"].shape == (60, 1, 8, 8)
        assert archive["classes"].dtype.kind == "U"
        assert archive["labels"].dtype == np.int64
    save_images(digits, tmp_path / "set.parquet")
    schema = pq.read_schema(tmp_path / "set.parquet")
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert features["label"] == {"names": list("0123456789"), "_type": "ClassLabel"}
    assert features["image"] == {"_type": "Image"}
    assert str(schema.field("image").type) == "struct<bytes: binary, path: string>"


@pytest.mark.parametrize("target", TARGETS)
def test_existing_target_needs_overwrite(tmp_path, digits, by_class, target):
    save_images(digits.subset(range(20)), tmp_path / target)
    before = contents(tmp_path)
    with pytest.raises(DataError, match=f"{target} exists already.*overwrite=True"):
        save_images(digits, tmp_path / target)
    assert contents(tmp_path) == before
    save_images(by_class, tmp_path / target, overwrite=True)
    assert torch.equal(load_images(tmp_path / target).images, by_class.images)
    assert names_in(tmp_path) == [target]


def test_a_folder_with_other_files_is_never_replaced(tmp_path, digits):
    (tmp_path / "home" / "letters").mkdir(parents=True)
    (tmp_path / "home" / "letters" / "to-mother.txt").write_text("dear")
    with pytest.raises(DataError, match=r"it also holds letters/to-mother\.txt"):
        save_images(digits, tmp_path / "home", overwrite=True)
    assert contents(tmp_path) == {"home/letters/to-mother.txt": b"dear"}


def test_a_folder_is_not_replaced_by_a_file(tmp_path, digits):
    (tmp_path / "set.npz").mkdir()
    with pytest.raises(DataError, match=r"set\.npz cannot be written: is a directory"):
        save_images(digits, tmp_path / "set.npz", overwrite=True)
    assert names_in(tmp_path) == ["set.npz"]


def test_unknown_extension(tmp_path, digits):
    with pytest.raises(DataError, match=r"unknown extension '\.zip'"):
        save_images(digits, tmp_path / "set.zip")
    assert names_in(tmp_path) == []


FAILURES = {
    "full disk": (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), DataError, "no space left on device"),
    "no permission": (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), DataError, "permission denied"),
    "interrupt": (KeyboardInterrupt(), KeyboardInterrupt, None),
    "defect": (RuntimeError("boom"), RuntimeError, "boom"),
}


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("target", TARGETS)
def test_a_failure_keeps_the_old_target_and_leaves_nothing_else(tmp_path, digits, monkeypatch, target, failure, exists):
    raised, expected, message = FAILURES[failure]
    if exists:
        save_images(digits.subset(range(20)), tmp_path / target)
    before = contents(tmp_path)
    leftovers = []

    def fail(*_, **__):
        leftovers.extend(names_in(tmp_path))
        raise raised

    if target.endswith(".npz"):
        # The archive exists on disk before the arrays are written.
        monkeypatch.setattr("numpy.lib.format.write_array", fail)
    else:
        encode, calls = save.encode_png, iter(range(100))
        monkeypatch.setattr(save, "encode_png", lambda pixels: fail() if next(calls) == 30 else encode(pixels))
    with pytest.raises(expected, match=message) as caught:
        save_images(digits, tmp_path / target, overwrite=True)
    if expected is DataError:
        assert target in str(caught.value)
    assert any(name.endswith(".part") for name in leftovers)  # The failure happened after writing had started.
    assert contents(tmp_path) == before
    assert names_in(tmp_path) == ([target] if exists else [])


def test_failing_rename_restores_the_old_folder(tmp_path, digits, monkeypatch):
    save_images(digits.subset(range(20)), tmp_path / "set")
    before = contents(tmp_path)
    rename = Path.rename

    def fail_on_new(source, target):
        if source.suffix == ".part":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fail_on_new)
    with pytest.raises(DataError, match="input/output error; nothing was changed"):
        save_images(digits, tmp_path / "set", overwrite=True)
    assert contents(tmp_path) == before
    assert names_in(tmp_path) == ["set"]


def test_target_below_a_file_raises_data_error(tmp_path, digits):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"set\.npz cannot be written"):
        save_images(digits, tmp_path / "file" / "set.npz")
    assert contents(tmp_path) == {"file": b"x"}


def test_parent_folders_are_created(tmp_path, digits):
    assert save_images(digits, tmp_path / "new" / "place" / "set.npz").is_file()
