"""Persons of images, from columns, arrays, keys, folders and patterns; and images that two sets share."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from sfumato.data import DataError, DataWarning, ImageSet, PublicFacts, load_images, save_images, shared_images

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 100:sfumato.data.DataWarning")


def write(folder, names, pixels):
    for name, picture in zip(names, pixels, strict=False):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / name)
    return folder


@pytest.fixture
def scans(tmp_path, pixels):
    """Two classes, three persons; `ann` is in both classes."""
    names = ["cyst/ann/p1_1.png", "cyst/bob/p2_1.png", "cyst/bob/p2_2.png", "none/ann/p1_2.png", "none/eve/p3_1.png"]
    return write(tmp_path / "patients", names, pixels)


@pytest.fixture
def table(tmp_path, pixels):
    """A flat folder with labels.csv; person 7 has two images."""
    folder = write(tmp_path / "flat", ["x.png", "y.png", "z.png"], pixels)
    (folder / "labels.csv").write_text("file,label,Patient\nz.png,a,7\nx.png,b,8\ny.png,b,7\n")
    return folder


def png(picture):
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "png")
    return buffer.getvalue()


@pytest.mark.parametrize("person", ["folder", "folder:2", r"regex:/p(\d+)_", r"regex:^[^/]+/([^/]+)/"])
@pytest.mark.parametrize("labels", [True, False])
def test_persons_from_paths(scans, person, labels):
    got = load_images(scans, person=person, labels=labels)
    assert got.persons.tolist() == [0, 1, 1, 0, 2]
    assert got.public().unit == "person"
    assert load_images(scans, labels=labels).persons is None


def test_levels_of_deeper_folders(scans):
    (scans / "cyst/ann/day2").mkdir()
    (scans / "cyst/ann/p1_1.png").rename(scans / "cyst/ann/day2/p1_1.png")
    assert load_images(scans, person="folder:2").persons.tolist() == [0, 1, 1, 0, 2]
    assert load_images(scans, person="folder").persons.tolist() == [2, 1, 1, 0, 3]
    with pytest.raises(DataError, match=r"cyst/bob/p2_1\.png has no person"):
        load_images(scans, person="folder:3")


def test_a_class_is_not_a_person(scans, class_folder):
    for source, person in ((scans, "folder:1"), (class_folder, "folder")):
        with pytest.raises(DataError, match=r"takes the class folder of .* as a person; .*--unlabelled"):
            load_images(source, person=person)
    assert load_images(class_folder, person="folder", labels=False).persons.tolist() == [0, 0, 1, 1]


def test_split_folders_do_not_count_as_a_level(scans, tmp_path):
    (tmp_path / "whole").mkdir()
    scans.rename(tmp_path / "whole" / "train")
    assert load_images(tmp_path / "whole", person="folder:2").persons.tolist() == [0, 1, 1, 0, 2]


@pytest.mark.parametrize(
    ("person", "message"),
    [
        ("regex:p1_", "exactly one group"),
        ("regex:(p)(1)", "exactly one group"),
        ("regex:(p", "not a regular expression"),
        (r"regex:(p1)_", r"cyst/bob/p2_1\.png has no person"),
        (r"regex:cyst/|none/(p9)?", r"cyst/ann/p1_1\.png has no person"),
        ("folder:0", "an integer from 1"),
        ("folder:x", "an integer from 1"),
        ("patient", r"names a column, and this folder has no labels\.csv; pass person='folder'"),
        ("", "names a column"),
    ],
)
@pytest.mark.parametrize("labels", [True, False])
def test_bad_rules(scans, person, message, labels):
    with pytest.raises(DataError, match=message):
        load_images(scans, person=person, labels=labels)


def test_files_outside_any_folder_have_no_person(table):
    for labels in ({"classes": ["a", "b"]}, {"labels": False}):
        with pytest.raises(DataError, match=r"[xz]\.png has no person"):
            load_images(table, person="folder", **labels)


def test_column_of_labels_csv(table):
    got = load_images(table, person="Patient", classes=["a", "b"])
    assert got.persons.tolist() == [0, 1, 0]
    assert got.labels.tolist() == [0, 1, 1]
    assert load_images(table, person="patient", labels=False).persons.tolist() == [0, 1, 0]
    assert load_images(table, person=r"regex:^(\w)", classes=["a", "b"]).persons.tolist() == [2, 0, 1]
    assert load_images(table, person=r"regex:^(\w)", labels=False).persons.tolist() == [0, 1, 2]
    with pytest.raises(DataError, match="columns file,label,doctor, not 'file,label,patient'"):
        load_images(table, person="doctor", classes=["a", "b"])
    (table / "labels.csv").write_text("file,label,patient\nz.png,a,7\nx.png,b,\ny.png,b,7\n")
    with pytest.raises(DataError, match="line 3 has an empty patient"):
        load_images(table, person="patient", labels=False)


def test_a_column_of_persons_needs_no_labels(table):
    (table / "labels.csv").write_text("file,patient\nx.png,8\nz.png,7\n")
    with pytest.raises(DataError, match=r"has no patient for y\.png"):
        load_images(table, person="patient", labels=False)
    (table / "y.png").unlink()
    assert load_images(table, person="patient", labels=False).persons.tolist() == [1, 0]


@pytest.mark.parametrize("name", ["patient", "train_patient", "patient_train"])
@pytest.mark.parametrize("ids", [np.array([70, 3, 70, 5]), np.array(["p", "a", "p", "b"])])
def test_array_of_npz(tmp_path, pixels, name, ids):
    path = tmp_path / "x.npz"
    np.savez(path, train_images=pixels[:4], train_labels=[0, 1, 0, 1], classes=["a", "b"], **{name: ids})
    assert load_images(path, person="patient").persons.tolist() == [2, 0, 2, 1]
    assert load_images(path, person="patient", labels=False, size=4).persons.tolist() == [2, 0, 2, 1]
    with pytest.raises(DataError, match=r"x\.npz has no array 'doctor' of persons; it has train_images"):
        load_images(path, person="doctor")
    with pytest.raises(DataError, match=r"reads the paths of image files, which .*x\.npz does not have"):
        load_images(path, person="folder")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1.0, 2.0, 1.0, 2.0], "float64; expected integers or strings"),
        ([1, 2, 1], "4 images but 3 persons"),
        (["a", "", "b", "a"], "no person"),
        (np.ones((4, 2), int), r"shape \[4, 2\]"),
    ],
)
def test_bad_arrays_of_persons(tmp_path, pixels, ids, message):
    with pytest.raises(DataError, match=message):
        ImageSet.from_arrays(pixels[:4], persons=ids)
    np.savez(tmp_path / "x.npz", images=pixels[:4], patient=ids)
    with pytest.raises(DataError, match=message):
        load_images(tmp_path / "x.npz", labels=False, person="patient")


def test_column_of_parquet_shards(tmp_path, pixels):
    for shard, ids in enumerate((["p", "a"], ["p", "b"])):
        cells = [png(picture) for picture in pixels[2 * shard : 2 * shard + 2]]
        pq.write_table(pa.table({"image": cells, "label": [0, 1], "patient": ids}), tmp_path / f"{shard}.parquet")
    assert load_images(tmp_path, person="patient", classes=2).persons.tolist() == [2, 0, 2, 1]
    assert load_images(tmp_path, person="patient", labels=False).persons.tolist() == [2, 0, 2, 1]
    with pytest.raises(DataError, match=r"0\.parquet has no column 'doctor', only image, label, patient"):
        load_images(tmp_path, person="doctor", classes=2)
    pq.write_table(pa.table({"image": cells, "label": [0, 1], "patient": [7, None]}), tmp_path / "1.parquet")
    with pytest.raises(DataError, match=r"1\.parquet row 1 has no person"):
        load_images(tmp_path, person="patient", classes=2)


def test_key_of_webdataset(tmp_path, pixels):
    def written(contents):
        with tarfile.open(tmp_path / "x.tar", "w") as archive:
            for number, content in enumerate(contents):
                files = {"png": png(pixels[number]), "cls": b"1"}
                files |= {} if content is None else {"json": json.dumps(content).encode()}
                for suffix, data in files.items():
                    member = tarfile.TarInfo(f"{number}.{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        return tmp_path / "x.tar"

    path = written([{"patient": 7}, {"patient": 8}, {"patient": "7"}])
    assert load_images(path, person="patient", classes=2).persons.tolist() == [0, 1, 0]
    assert load_images(path, person="patient", labels=False).persons.tolist() == [0, 1, 0]
    for content in ({"doctor": 1}, [1], {"patient": None}, {"patient": 1.5}, {"patient": ""}):
        with pytest.raises(DataError, match=r"1\.json has no person"):
            load_images(written([{"patient": 7}, content]), person="patient", labels=False)
    with pytest.raises(DataError, match=r"sample '1' has no \.json member"):
        load_images(written([{"patient": 7}, None]), person="patient", labels=False)


def test_persons_of_skipped_files_are_left_out(scans):
    (scans / "cyst/bob/p2_1.png").write_bytes(b"junk")
    with pytest.warns(DataWarning, match="skipped 1"):
        got = load_images(scans, person="folder", on_error="skip")
    assert got.persons.tolist() == [0, 1, 0, 2]
    assert got.labels.tolist() == [0, 0, 1, 1]


def test_sources_without_persons(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"")
    (tmp_path / "idx").mkdir()
    (tmp_path / "idx" / "train-images-idx3-ubyte").write_bytes(b"")
    for source in (tmp_path, tmp_path / "idx", "digits"):
        with pytest.raises(DataError, match="does not store persons"):
            load_images(source, person="folder")


def test_few_persons_are_few_however_many_their_images(tmp_path):
    images = ImageSet(torch.zeros(300, 1, 4, 4, dtype=torch.uint8))
    np.savez(tmp_path / "x.npz", images=images.images, patient=np.arange(300) // 4, one=np.zeros(300, int))
    with pytest.warns(DataWarning, match="fewer than 100 persons"):
        load_images(tmp_path / "x.npz", labels=False, person="patient")
    with pytest.raises(DataError, match="single person; differential privacy needs several"):
        load_images(tmp_path / "x.npz", labels=False, person="one")


@pytest.mark.parametrize("target", ["set", "set.npz", "set.parquet"])
def test_persons_are_never_written(tmp_path, digits, target):
    with_persons = replace(digits, persons=torch.arange(60) % 7)
    save_images(digits, tmp_path / "without" / target)
    save_images(with_persons, tmp_path / "with" / target)
    files = [
        {
            path.relative_to(tmp_path / kind): path.read_bytes()
            for path in (tmp_path / kind).rglob("*.*")
            if path.is_file()
        }
        for kind in ("without", "with")
    ]
    if target == "set.npz":  # An archive contains the time of writing.
        with np.load(tmp_path / "with" / target) as archive:
            assert set(archive.files) == {"images", "labels", "classes"}
    else:
        assert files[0] == files[1]


def test_a_person_counts_as_one_in_sizes(digits):
    persons = torch.tensor([0, 0, 0, 0, 1, 9])
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    images = ImageSet(digits.images[:6], labels, ("a", "b"), persons=persons)
    assert images.public(declare_size=True) == PublicFacts((1, 8, 8), ("a", "b"), True, (0.75, 2.25), "person")
    assert images.public() == PublicFacts((1, 8, 8), ("a", "b"), True, None, "person")
    assert images.subset([3, 5]).persons.tolist() == [0, 9]
    assert images.subset(labels == 0).public(declare_size=True).sizes == (1.0, 0.0)
    unlabelled = ImageSet(images.images, persons=persons)
    assert unlabelled.public(declare_size=True).sizes == (3.0,)
    sizes = digits.public(declare_size=True).sizes
    assert all(isinstance(size, int) for size in sizes)
    assert digits.public().unit == "image"


def test_persons_are_checked_and_not_shown(digits):
    for persons, message in (
        (torch.zeros(60), "int64"),
        (torch.zeros(60, 1, dtype=torch.int64), r"shape \[N\]"),
        (torch.zeros(59, dtype=torch.int64), "60 images but 59 persons"),
        (torch.arange(60) - 1, "negative"),
        ([0] * 60, "int64"),
    ):
        with pytest.raises(DataError, match=message):
            replace(digits, persons=persons)
    assert repr(replace(digits, persons=torch.arange(60) % 37)) == repr(digits)


def test_persons_of_arrays_are_encoded(pixels):
    for persons in (
        [9, 5, 9, -4],
        ["c", "b", "c", "a"],
        np.array([b"c", b"b", b"c", b"a"]),
        torch.tensor([9, 5, 9, -4]),
    ):
        assert ImageSet.from_arrays(pixels[:4], persons=persons).persons.tolist() == [2, 1, 2, 0]
    objects = np.array(["c", "b", "c", "a"], dtype=object)
    assert ImageSet.from_arrays(pixels[:4], persons=objects[:, None]).persons.tolist() == [2, 1, 2, 0]


def test_shared_images(digits):
    first, second = digits.subset(range(30)), digits.subset(range(30, 60))
    assert not shared_images(first, second)
    assert shared_images(first, digits.subset([59, 58, 29]))
    almost = first.images.clone()
    almost[:, 0, 7, 7] ^= 1
    assert not shared_images(first, ImageSet(almost))
    assert not shared_images(first, ImageSet(first.images.reshape(30, 1, 4, 16)))
    assert shared_images(first, ImageSet(first.images.transpose(2, 3)[:1].transpose(2, 3)))
