"""Folders: class sub-folders, labels.csv, unlabelled sets, and invalid input."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from sfumato.data import DataError, DataWarning, load_images
from sfumato.data.folders import class_name, folder_name

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 100:sfumato.data.DataWarning")


def write_csv(folder, text, names=("x.png", "y.png"), encoding="utf-8"):
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        Image.new("L", (8, 8), number).save(folder / name)
    (folder / "labels.csv").write_text(text, encoding=encoding)
    return folder


def test_class_folders(class_folder, pixels):
    got = load_images(class_folder)
    assert got.classes == ("a", "b")
    assert got.labels.tolist() == [0, 0, 1, 1]
    assert np.array_equal(got.images[:, 0].numpy(), pixels[:4])


def test_nested_files_unicode_names_and_system_files(class_folder, pixels):
    odd = class_folder / "Zoë 日本 🙂" / "série 1"
    odd.mkdir(parents=True)
    Image.fromarray(pixels[9]).save(odd / "é à.png")
    for name in ("Thumbs.db", ".DS_Store", "desktop.ini", "a/.hidden.png", "a/Thumbs.db"):
        (class_folder / name).write_bytes(b"system")
    (class_folder / "__MACOSX").mkdir()
    (class_folder / "__MACOSX" / "a.png").write_bytes(b"system")
    (class_folder / ".git").mkdir()
    with pytest.warns(DataWarning, match=r"7 in all: \.db \(2\), \.DS_Store"):
        got = load_images(class_folder)
    assert got.classes == ("Zoë 日本 🙂", "a", "b")
    assert got.labels.tolist() == [0, 1, 1, 2, 2]
    assert np.array_equal(got.images[0, 0].numpy(), pixels[9])


def test_numeric_folder_names_are_sorted_as_numbers(tmp_path):
    for number in (10, 9, 2):
        (tmp_path / str(number)).mkdir()
        Image.new("L", (8, 8), number).save(tmp_path / str(number) / "x.png")
    got = load_images(tmp_path)
    assert got.classes == ("2", "9", "10")
    assert got.images[:, 0, 0, 0].tolist() == [2, 9, 10]


def test_unlabelled_reads_recursively(class_folder):
    got = load_images(class_folder, labels=False)
    assert len(got) == 4
    assert got.labels is None
    assert got.classes == ("all",)


def test_train_and_test_sub_folders_are_splits(class_folder, tmp_path):
    split_folder = tmp_path / "split_folder"
    split_folder.mkdir()
    class_folder.rename(split_folder / "train")
    (split_folder / "test").mkdir()
    for name in ("a", "b"):
        (split_folder / "test" / name).mkdir()
        Image.new("L", (8, 8), 7).save(split_folder / "test" / name / "x.png")
    with pytest.warns(DataWarning, match="split_folder: train is read, test not"):
        assert len(load_images(split_folder)) == 4
    with pytest.warns(DataWarning, match="split_folder: test is read, train not"):
        assert load_images(split_folder, split="test").images.unique().tolist() == [7]


def test_classes_called_train_and_test_are_classes(class_folder):
    (class_folder / "a").rename(class_folder / "train")
    (class_folder / "b").rename(class_folder / "test")
    assert load_images(class_folder).classes == ("test", "train")


def test_csv_with_byte_order_mark_and_string_labels(tmp_path):
    folder = write_csv(tmp_path / "c", "file,label,note\nx.png,zebra,1\n./y.png, ant ,2\n\n", encoding="utf-8-sig")
    got = load_images(folder, classes=["ant", "zebra"])
    assert got.classes == ("ant", "zebra")
    assert got.labels.tolist() == [1, 0]
    assert got.images[:, 0, 0, 0].tolist() == [0, 1]
    assert len(load_images(folder, labels=False)) == 2


def test_csv_with_numeric_labels(tmp_path):
    folder = write_csv(tmp_path / "c", "label,file\n10,x.png\n9,y.png\n")
    with pytest.raises(DataError, match=r"pass classes=\['9', '10'\] \(--classes 9,10\)"):
        load_images(folder)
    assert load_images(folder, classes=11).labels.tolist() == [10, 9]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\nx.png,a\n", r"no label for y\.png"),
        ("file,label\nx.png,a\ny.png,b\nz.png,a\n", r"do not exist: z\.png"),
        ("file,label\nx.png,a\ny.png,b\n../c/x.png,a\n", r"do not exist: \.\./c/x\.png"),
        ("file,label\nx.png,a\ny.png,b\nx.png,b\n", r"line 4 lists x\.png twice"),
        ("file,label\nx.png,a\ny.png,\n", "line 3 has an empty label"),
        ("file,label\nx.png,a\n,b\n", "line 3 has an empty file name"),
        ("file,label\nx.png,a\ny.png\n", "line 3 has 1 columns"),
        ("name,kind\nx.png,a\ny.png,b\n", "file,label, not 'name,kind'"),
        ("file;label\nx.png;a\n", "file;label"),
        ("", "columns file,label"),
        ("file,label\n", "lists no files"),
        ("file,label\nx.png,a\ny.png,a\n", r"does not declare.*--classes.*--unlabelled"),
        ('file,label\nx.png,"a\n', "cannot be read as CSV"),
    ],
)
def test_inconsistent_csv_is_refused(tmp_path, text, message):
    with pytest.raises(DataError, match=message) as caught:
        load_images(write_csv(tmp_path / "c", text))
    assert "labels.csv" in str(caught.value)


def test_csv_must_be_utf8(tmp_path):
    with pytest.raises(DataError, match="UTF-8"):
        load_images(write_csv(tmp_path / "c", "file,label\nx.png,é\ny.png,b\n", encoding="latin-1"))


def test_long_lists_of_files_are_shortened(tmp_path):
    names = [f"{number}.png" for number in range(6)]
    with pytest.raises(DataError, match=r"no label for 1\.png, 2\.png, 3\.png and 2 more"):
        load_images(write_csv(tmp_path / "c", "file,label\n0.png,a\n", names=names))


def test_empty_folder(tmp_path):
    with pytest.raises(DataError, match="is empty"):
        load_images(tmp_path)
    with pytest.raises(DataError, match="no images"):
        load_images(tmp_path, labels=False)


def test_images_without_classes(class_folder):
    with pytest.raises(DataError, match=r"neither class sub-folders nor labels\.csv; pass .* \(--unlabelled\)"):
        load_images(class_folder / "a")


def test_a_single_class_is_refused(class_folder):
    (class_folder / "b").rename(class_folder / "a" / "b")
    with pytest.raises(DataError, match=r"only one class \(a\).*--unlabelled"):
        load_images(class_folder)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_images_beside_class_folders(class_folder, on_error):
    Image.new("L", (8, 8)).save(class_folder / "stray.png")
    with pytest.raises(DataError, match=r"images outside its class folders \(stray\.png\)"):
        load_images(class_folder, on_error=on_error)


def test_files_that_are_not_images_are_left_out_by_name(class_folder, pixels):
    for name in ("README.txt", "a/notes.txt", "a/table.csv", "b/checksums", "b/slide.svs"):
        (class_folder / name).write_bytes(b"no picture")
    Image.fromarray(pixels[5]).save(class_folder / "b" / "2", "png")  # an image without a suffix
    with pytest.warns(DataWarning, match=r"5 in all: \.txt \(2\), \.csv \(1\), checksums \(1\), \.svs \(1\)"):
        got = load_images(class_folder)
    assert got.labels.tolist() == [0, 0, 1, 1, 1]
    assert np.array_equal(got.images[4, 0].numpy(), pixels[5])


def test_a_folder_without_images_names_what_it_holds(tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(DataError, match=r"no images; files that are not images: a\.pdf"):
        load_images(tmp_path, labels=False)


@pytest.mark.parametrize("names", [("seg_train", "seg_test"), ("Training", "Testing"), ("train", "validation", "test")])
def test_split_folders_of_other_names_are_no_classes(class_folder, tmp_path, names):
    whole = tmp_path / "whole"
    for name in names:
        for kind in ("a", "b"):
            (whole / name / name / kind).mkdir(parents=True)  # some archives repeat the name
            Image.new("L", (8, 8), 9).save(whole / name / name / kind / "x.png")
    with pytest.warns(DataWarning, match="whole: .* is read"):
        assert load_images(whole).classes == ("a", "b")
    with pytest.warns(DataWarning, match="whole: .* is read"):
        assert len(load_images(whole, split="test")) == 2


def test_a_table_of_another_name_above_the_images_is_found_by_its_column(tmp_path):
    """As the archive of CelebA: a table beside a folder of images, with names but no folders in it."""
    (tmp_path / "img").mkdir()
    for number in range(4):
        Image.new("L", (8, 8), number).save(tmp_path / "img" / f"{number:06}.png")
    rows = [f"{number:06}.jpg,{number % 2}" for number in range(4)]
    table = tmp_path / "list_attr.csv"
    table.write_text("\n".join(["image_id,Male", *(row.replace("jpg", "png") for row in rows)]), "utf-8")
    options = {"label_column": "Male", "classes": ["0", "1"]}
    images = load_images(tmp_path, **options)
    assert images.labels.tolist() == [0, 1, 0, 1]
    with pytest.raises(DataError, match="has only one class"):
        load_images(tmp_path)  # not without a column
    table.write_text(table.read_text("utf-8") + "\nimg/000001.png,0", "utf-8")
    with pytest.raises(DataError, match=r"lists img/000001\.png twice, by different names"):
        load_images(tmp_path, **options)
    (tmp_path / "more.csv").write_text("x", "utf-8")
    with pytest.raises(DataError, match=r"several tables \(list_attr\.csv, more\.csv\)"):
        load_images(tmp_path, **options)


def test_the_parent_of_class_folders_is_named(class_folder, tmp_path):
    (tmp_path / "archive").mkdir()
    class_folder.rename(tmp_path / "archive" / "scans")
    with pytest.raises(DataError, match=r"if the classes are a, b, pass .*archive/scans; else name all classes"):
        load_images(tmp_path / "archive")


def test_labels_from_a_folder_level_or_a_pattern(tmp_path, pixels):
    for number, name in enumerate(("north/cyst", "north/none", "south/cyst")):
        (tmp_path / name).mkdir(parents=True)
        Image.fromarray(pixels[number]).save(tmp_path / name / f"{number}.png")
    for rule in ("folder:2", "regex:/(cyst|none)/", "folder"):
        with pytest.raises(DataError, match=r"does not declare its classes.*--classes cyst,none"):
            load_images(tmp_path, label_column=rule)
        got = load_images(tmp_path, label_column=rule, classes=["none", "cyst"])
        assert got.labels.tolist() == [1, 0, 1]
    with pytest.raises(DataError, match=r"has no label: its path does not match label_column= \(--label-column\)"):
        load_images(tmp_path, label_column="folder:4", classes=2)
    with pytest.raises(DataError, match=r"has no columns; it needs a table labels\.csv"):
        load_images(tmp_path, label_column="diagnosis", classes=2)


def test_a_label_column_by_name_and_combinations(tmp_path):
    text = "file_name,sex,finding\nx,f,cyst|edema\ny,m,edema\n"  # without the suffix .png
    folder = write_csv(tmp_path / "c", text)
    (folder / "labels.csv").rename(folder / "metadata.csv")
    assert load_images(folder, label_column="Sex", classes=["f", "m"]).labels.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"--classes 'cyst\|edema,edema'"):
        load_images(folder, label_column="finding")
    combined = load_images(folder, label_column="finding", classes=["edema", "cyst", "cyst|edema"])
    assert combined.labels.tolist() == [2, 0]
    first = {"label_column": "finding", "several_labels": "first"}
    assert load_images(folder, classes=["cyst", "edema"], **first).labels.tolist() == [0, 1]
    assert load_images(folder, classes=["edema", "cyst"], **first).labels.tolist() == [0, 0]
    with pytest.raises(DataError, match=r"labels 'edema', and none of them is a declared class"):
        load_images(folder, classes=["cyst", "none"], **first)
    both = load_images(folder, label_column="sex,finding", classes=["sex=m|finding=edema", "sex=f|finding=cyst|edema"])
    assert both.labels.tolist() == [1, 0]


def test_a_table_that_does_not_match_the_folder_can_be_skipped(tmp_path):
    folder = write_csv(tmp_path / "c", "file,label\nx.png,a\ngone.png,b\n")
    with (
        pytest.warns(DataWarning, match=r"skipped 2 unreadable: gone\.png, y\.png"),
        pytest.raises(DataError, match="single image"),
    ):
        load_images(folder, classes=["a", "b"], on_error="skip")


def test_an_empty_class_folder_is_a_class(class_folder):
    """The list of classes must not reveal whether a class has an image."""
    (class_folder / "aa").mkdir()
    got = load_images(class_folder)
    assert got.classes == ("a", "aa", "b")
    assert got.labels.tolist() == [0, 0, 2, 2]


def test_only_empty_class_folders(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="no images, only empty folders"):
        load_images(tmp_path, on_error="skip")


@pytest.mark.parametrize("target", ["..", ".", "../b"])
@pytest.mark.parametrize("labels", [True, False])
def test_link_loops_are_refused(class_folder, target, labels):
    (class_folder / "a" / "loop").symlink_to(target)
    with pytest.raises(DataError, match="a link to a folder that was already read"):
        load_images(class_folder, labels=labels)


def test_links_to_folders_elsewhere_are_followed(class_folder, tmp_path):
    (class_folder / "b").rename(tmp_path / "elsewhere")
    (class_folder / "b").symlink_to(tmp_path / "elsewhere")
    assert load_images(class_folder).labels.tolist() == [0, 0, 1, 1]


def test_broken_link_is_named(class_folder):
    (class_folder / "a" / "gone.png").symlink_to("nowhere.png")
    with pytest.raises(DataError, match=r"a/gone\.png cannot be read: no such file"):
        load_images(class_folder)


def test_single_image(tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    with pytest.raises(DataError, match="single image; differential privacy needs several"):
        load_images(tmp_path, labels=False)


@pytest.mark.parametrize(
    "name", ["cat", "", ".", "..", "../up", "a/b", "a\\b", ".hidden", "50%", "%41", "a\nb", "é 日本", "end.", "end ",
             "Thumbs.db", "__MACOSX", "con:", "%", "a\u2028b", "🙂"],
)  # fmt: skip
def test_class_names_survive_as_folder_names(name):
    folder = folder_name(name)
    assert class_name(folder) == name
    assert folder not in ("", ".", "..")
    assert not folder.startswith(".")
    assert folder[-1] not in ". "
    assert not set(folder) & set('/\\\n:*?"<>|')
    assert folder.isprintable()


def test_other_folder_names_are_unchanged():
    for folder in ("a%20b", "100%", "%zz", "%41"):
        assert class_name(folder) == folder
