"""Parquet in the Hugging Face layout, and WebDataset tar shards."""

from __future__ import annotations

import io
import json
import sys
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from sfumato.data import DataError, DataWarning, load_images

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 100:sfumato.data.DataWarning")


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def write_parquet(path, pixels, labels=None, *, raw=False, metadata=None, label="label", image="image"):
    cells = [png(picture) for picture in pixels]
    columns = {image: cells if raw else [{"bytes": cell, "path": None} for cell in cells]}
    if labels is not None:
        columns[label] = labels
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path, row_group_size=7)
    return path


def hugging_face(names):
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    return {"huggingface": json.dumps({"info": {"features": features}})}


@pytest.mark.parametrize("raw", [False, True])
def test_parquet(tmp_path, pixels, targets, raw):
    got = load_images(write_parquet(tmp_path / "x.parquet", pixels, targets.tolist(), raw=raw), classes=10)
    assert np.array_equal(got.images[:, 0].numpy(), pixels)
    assert got.labels.tolist() == targets.tolist()
    assert got.classes == tuple("0123456789")


@pytest.mark.parametrize("metadata", [hugging_face(["yes", "no", "maybe"]), {"classes": "yes,no,maybe"}])
def test_parquet_class_names(tmp_path, pixels, metadata):
    got = load_images(write_parquet(tmp_path / "x.parquet", pixels[:4], [1, 0, 1, 1], metadata=metadata))
    assert got.classes == ("yes", "no", "maybe")
    assert got.labels.tolist() == [1, 0, 1, 1]


def test_parquet_string_labels_and_other_column_names(tmp_path, pixels):
    path = write_parquet(tmp_path / "x.parquet", pixels[:4], list("baab"), label="labels", image="img")
    got = load_images(path, classes=["a", "b"])
    assert got.classes == ("a", "b")
    assert got.labels.tolist() == [1, 0, 0, 1]


def test_parquet_shards_and_splits(tmp_path, pixels, targets):
    for number in range(3):
        part = slice(20 * number, 20 * number + 20)
        write_parquet(tmp_path / f"{number}.parquet", pixels[part], targets[part].tolist())
    assert np.array_equal(load_images(tmp_path, classes=10).images[:, 0].numpy(), pixels)
    (tmp_path / "2.parquet").rename(tmp_path / "test-0.parquet")
    for number in range(2):
        (tmp_path / f"{number}.parquet").rename(tmp_path / f"train-{number}.parquet")
    assert np.array_equal(load_images(tmp_path, classes=10).images[:, 0].numpy(), pixels[:40])
    test = load_images(tmp_path, split="test", classes=10)
    assert np.array_equal(test.images[:, 0].numpy(), pixels[40:])
    braces = load_images(tmp_path / "train-{0..1}.parquet", classes=10)
    assert np.array_equal(braces.images[:, 0].numpy(), pixels[:40])


def test_parquet_shards_must_agree_on_names(tmp_path, pixels):
    write_parquet(tmp_path / "0.parquet", pixels[:2], [0, 1], metadata=hugging_face(["a", "b"]))
    write_parquet(tmp_path / "1.parquet", pixels[:2], [0, 1], metadata=hugging_face(["b", "a"]))
    with pytest.raises(DataError, match="have different class names"):
        load_images(tmp_path)


@pytest.mark.parametrize(
    ("labels", "metadata", "message"),
    [
        ([0, -1, 1, 0], None, "label -1 is negative"),
        ([0, None, 1, 0], None, r"row 1 of .*x\.parquet has no label"),
        ([0, 1, 2, 0], hugging_face(["a", "b"]), "label 2 has no class name"),
        ([0, 1, 1, 0], {"huggingface": "{"}, "unreadable schema metadata"),
        ([0.5, 1.0, 1.0, 0.0], None, "fractions"),
        (None, None, r"no column 'label', only image; pass labels=False"),
    ],
)
def test_bad_parquet_labels(tmp_path, pixels, labels, metadata, message):
    path = write_parquet(tmp_path / "x.parquet", pixels[:4], labels, metadata=metadata)
    with pytest.raises(DataError, match=message):
        load_images(path)
    assert len(load_images(path, labels=False)) == 4


def test_bad_parquet_files(tmp_path, pixels):
    path = tmp_path / "x.parquet"
    for content in (b"", b"PAR1 and nothing", write_parquet(path, pixels).read_bytes()[:-100]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"x\.parquet is not a readable Parquet file"):
            load_images(path, labels=False)
    pq.write_table(pa.table({"picture": [b"x"]}), path)
    with pytest.raises(DataError, match="no column 'image', only picture"):
        load_images(path)
    pq.write_table(pa.table({"image": pa.array([], pa.binary())}), path)
    with pytest.raises(DataError, match="holds no images"):
        load_images(path, labels=False)


def test_parquet_broken_rows(tmp_path, pixels):
    path = tmp_path / "x.parquet"
    cells = [png(pixels[0]), b"junk", png(pixels[1])]
    pq.write_table(pa.table({"image": cells, "label": [0, 1, 1]}), path)
    with pytest.raises(DataError, match=r"x\.parquet row 1 is not an image"):
        load_images(path, classes=2)
    with pytest.warns(DataWarning, match=r"skipped 1 unreadable: x\.parquet row 1"):
        assert load_images(path, on_error="skip", classes=2).labels.tolist() == [0, 1]
    pq.write_table(pa.table({"image": [{"bytes": None, "path": "elsewhere.png"}]}), path)
    with pytest.raises(DataError, match=r"x\.parquet row 0 holds no image bytes"):
        load_images(path, labels=False)


def test_parquet_without_pyarrow(tmp_path, pixels, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet", pixels)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'sfumato\[parquet\]'"):
        load_images(path, labels=False)


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def samples(pixels, labels, suffix="cls"):
    for number, (picture, label) in enumerate(zip(pixels, labels, strict=True)):
        yield f"{number:04}.png", png(picture)
        text = json.dumps({"label": label}) if suffix == "json" else str(label)
        yield f"{number:04}.{suffix}", text.encode()


@pytest.mark.parametrize("suffix", ["cls", "json", "txt"])
def test_webdataset(tmp_path, pixels, targets, suffix):
    path = write_tar(tmp_path / "x.tar", samples(pixels, targets.tolist(), suffix))
    got = load_images(path, classes=10)
    assert np.array_equal(got.images[:, 0].numpy(), pixels)
    assert got.labels.tolist() == targets.tolist()
    assert load_images(path, labels=False, size=4).shape == (1, 4, 4)


def test_webdataset_names_as_labels(tmp_path, pixels):
    path = write_tar(tmp_path / "x.tar", samples(pixels[:3], ["b", "a", "b"], "json"))
    got = load_images(path, classes=["a", "b"])
    assert got.classes == ("a", "b")
    assert got.labels.tolist() == [1, 0, 1]


def test_webdataset_shards(tmp_path, pixels, targets):
    for number in range(3):
        part = slice(20 * number, 20 * number + 20)
        write_tar(tmp_path / f"shard-{number:03}.tar", samples(pixels[part], targets[part].tolist()))
    whole = load_images(tmp_path, classes=10)
    assert np.array_equal(whole.images[:, 0].numpy(), pixels)
    assert torch.equal(load_images(str(tmp_path / "shard-{000..002}.tar"), classes=10).images, whole.images)
    assert len(load_images(str(tmp_path / "shard-{000,002}.tar"), classes=10)) == 40
    with pytest.raises(DataError, match=r"shard-003\.tar does not exist"):
        load_images(str(tmp_path / "shard-{000..003}.tar"))


def test_webdataset_prefers_the_class_to_the_caption(tmp_path, pixels):
    members = [(f"{n}.{kind}", text) for n in range(2) for kind, text in
               (("txt", b"a caption"), ("png", png(pixels[n])), ("cls", str(n).encode()))]  # fmt: skip
    assert load_images(write_tar(tmp_path / "x.tar", members), classes=2).labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.png", b"x")], r"sample 'a' has no label.*--unlabelled"),
        ([("a.cls", b"1")], r"sample 'a' has no image among \.cls"),
        ([("a.png", b"x"), ("a.json", b"{")], r"a\.json cannot be read"),
        ([("a.png", b"x"), ("a.json", b'{"kind": 1}')], r"a\.json cannot be read"),
        ([("a.png", b"x"), ("a.json", b'{"label": {}}')], r"a\.json is neither"),
        ([("a.png", b"x"), ("a.cls", b"")], r"a\.cls is neither"),
        ([("a.png", b"x"), ("a.cls", b"-1")], "label -1 is negative"),
        ([("a.png", b"x"), ("a.cls", b"1"), ("b.png", b"x"), ("b.cls", b"cat")], "mixes numbers and names"),
        ([("a.png", b"x"), ("a.png", b"x")], r"holds a\.png twice"),
        ([("a.png", b"x"), ("a.cls", b"1")], r"x\.tar:a\.png is not an image"),
        ([], "holds no images"),
    ],
)
def test_bad_webdataset(tmp_path, members, message):
    with pytest.raises(DataError, match=message) as caught:
        load_images(write_tar(tmp_path / "x.tar", members), classes=2)
    assert "x.tar" in str(caught.value) or "label -1" in str(caught.value)


def test_damaged_tar(tmp_path, pixels, targets):
    path = write_tar(tmp_path / "x.tar", samples(pixels, targets.tolist()))
    for content in (path.read_bytes()[:700], b"not a tar file", b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"x\.tar"):
            load_images(path)
