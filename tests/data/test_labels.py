"""Classes must be declared: labels do not define them. Very small sets give a warning."""

from __future__ import annotations

import io
import struct
import tarfile
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from sfumato.data import DataError, DataWarning, ImageSet, load_images, save_images

NUMBERS = [0, 2, 1, 2]
FEW = pytest.mark.filterwarnings("ignore:.*fewer than 100:sfumato.data.DataWarning")


def png(picture):
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "png")
    return buffer.getvalue()


def write_csv(folder, pixels):
    for number, picture in enumerate(pixels):
        Image.fromarray(picture).save(folder / f"{number}.png")
    lines = [f"{number}.png,{label}" for number, label in enumerate(NUMBERS)]
    (folder / "labels.csv").write_text("\n".join(["file,label", *lines]))
    return folder


def write_npz(folder, pixels):
    np.savez(folder / "x.npz", images=pixels, labels=NUMBERS)
    return folder / "x.npz"


def write_idx(folder, pixels):
    for name, array in (("images-idx3", pixels), ("labels-idx1", np.array(NUMBERS, np.uint8))):
        header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
        (folder / f"train-{name}-ubyte").write_bytes(header + array.tobytes())
    return folder


def write_parquet(folder, pixels):
    pq.write_table(pa.table({"image": [png(picture) for picture in pixels], "label": NUMBERS}), folder / "x.parquet")
    return folder / "x.parquet"


def write_tar(folder, pixels):
    with tarfile.open(folder / "x.tar", "w") as archive:
        for number, picture in enumerate(pixels):
            for suffix, content in (("png", png(picture)), ("cls", str(NUMBERS[number]).encode())):
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return folder / "x.tar"


@FEW
@pytest.mark.parametrize("write", [write_csv, write_npz, write_idx, write_parquet, write_tar])
def test_labels_do_not_define_the_classes(tmp_path, pixels, write):
    source = write(tmp_path, pixels[:4])
    says = r"does not declare its classes, and labels must not define them; pass classes=3 \(--classes 3\)"
    with pytest.raises(DataError, match=says):
        load_images(source)
    got = load_images(source, classes=4)
    assert got.classes == ("0", "1", "2", "3")  # The last class has no image.
    assert got.labels.tolist() == NUMBERS
    with pytest.raises(DataError, match=r"label 2 has no class name|label '2' is not among"):
        load_images(source, classes=2)
    assert load_images(source, labels=False).classes == ("all",)
    with pytest.raises(DataError, match="cannot be combined with labels=False"):
        load_images(source, labels=False, classes=3)


@FEW
def test_the_error_suggests_class_names(tmp_path, pixels):
    folder = write_csv(tmp_path, pixels[:4])
    table = folder / "labels.csv"
    table.write_text("file,label\n0.png,dog\n1.png,cat\n2.png,dog\n3.png,cat\n")
    with pytest.raises(
        DataError, match=r"labels\.csv does not .*; pass classes=\['cat', 'dog'\] \(--classes cat,dog\)"
    ):
        load_images(folder)
    got = load_images(folder, classes=["dog", "bird", "cat"])
    assert got.classes == ("dog", "bird", "cat")
    assert got.labels.tolist() == [0, 2, 0, 2]


@FEW
@pytest.mark.parametrize("classes", ["ab", 0, True, 1.5, ["a", "a"], ["a", 3]])
def test_bad_declarations(class_folder, classes):
    with pytest.raises(DataError, match=r"expected a list of names|appears twice|must be strings"):
        load_images(class_folder, classes=classes)


@FEW
def test_a_declaration_reorders_and_extends_the_classes_of_folders(class_folder):
    got = load_images(class_folder, classes=["c", "b", "a"])
    assert got.classes == ("c", "b", "a")
    assert got.labels.tolist() == [2, 2, 1, 1]
    with pytest.raises(DataError, match=r"classes that classes= \(--classes\) does not name: b"):
        load_images(class_folder, classes=["a", "c"])
    (class_folder / "b").rename(class_folder / "a" / "b")
    assert load_images(class_folder, classes=["a", "b"]).labels.tolist() == [0] * 4


@FEW
@pytest.mark.parametrize("target", ["set.npz", "set.parquet"])
def test_a_declaration_reorders_soft_labels(tmp_path, digits, target):
    soft_labels = torch.rand(60, 10).softmax(1)
    save_images(ImageSet(digits.images, digits.labels, digits.classes, soft_labels), tmp_path / target)
    got = load_images(tmp_path / target, classes=["none", *reversed(digits.classes)])
    assert torch.equal(got.labels, 10 - digits.labels)
    assert torch.equal(got.soft_labels[:, 1:].flip(1), soft_labels)
    assert (got.soft_labels[:, 0] == 0).all()


def test_named_sets_declare_their_classes():
    assert load_images("digits").classes == load_images("digits", classes=10).classes
    with pytest.raises(DataError, match=r"digits has classes that classes= \(--classes\) does not name: 0"):
        load_images("digits", classes=["a", "b"])


@FEW
@pytest.mark.parametrize("target", ["set", "set.npz", "set.parquet"])
def test_saved_sets_keep_classes_without_images(tmp_path, digits, target):
    save_images(digits.subset(digits.labels == 3), tmp_path / target)
    again = load_images(tmp_path / target)
    assert again.classes == digits.classes
    assert set(again.labels.tolist()) == {3}


def test_the_warning_about_few_images_does_not_contain_their_number(tmp_path):
    images = ImageSet(torch.randint(0, 256, (100, 1, 8, 8), dtype=torch.uint8))
    save_images(images, tmp_path / "enough.npz")
    save_images(images.subset(range(99)), tmp_path / "few.npz")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_images(tmp_path / "enough.npz", labels=False)
        load_images(tmp_path / "few.npz", labels=False, split="test")
    with pytest.warns(DataWarning, match="fewer than 100 images; .* the noise dominates") as caught:
        load_images(tmp_path / "few.npz", labels=False)
    assert "99" not in str(caught[0].message)
    assert caught[0].filename == __file__
