"""Array files: .npz, IDX and CIFAR batches."""

from __future__ import annotations

import gzip
import os
import pickle
import struct

import numpy as np
import pytest
import torch

from sfumato.data import DataError, load_images

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 100:sfumato.data.DataWarning")


NAMES = ["a", "b", "c", "d"]


def idx(array):
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx(folder, pixels, targets, compressed=False):
    folder.mkdir(exist_ok=True)
    for part, chosen in (("train", slice(0, 40)), ("t10k", slice(40, 60))):
        for name, array in (("images-idx3", pixels[chosen]), ("labels-idx1", targets[chosen])):
            content = idx(array)
            path = folder / (f"{part}-{name}-ubyte" + (".gz" if compressed else ""))
            path.write_bytes(gzip.compress(content) if compressed else content)
    return folder


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (("train_images", "train_labels"), ("test_images", "test_labels")),
        (("x_train", "y_train"), ("x_test", "y_test")),
    ],
)
def test_npz_with_splits(tmp_path, pixels, targets, train, test):
    path = tmp_path / "x.npz"
    arrays = {train[0]: pixels[:40], train[1]: targets[:40, None], test[0]: pixels[40:], test[1]: targets[40:]}
    np.savez(path, **arrays, val_images=pixels[:1], val_labels=targets[:1])
    got = load_images(path, classes=10)
    assert np.array_equal(got.images[:, 0].numpy(), pixels[:40])
    assert got.labels.tolist() == targets[:40].tolist()
    got = load_images(path, split="test", classes=10)
    assert np.array_equal(got.images[:, 0].numpy(), pixels[40:])
    assert got.labels.tolist() == targets[40:].tolist()


@pytest.mark.parametrize("names", [("images", "labels"), ("x", "y")])
def test_npz_without_splits(tmp_path, pixels, targets, names):
    path = tmp_path / "x.npz"
    np.savez(path, **dict(zip(names, (pixels, targets), strict=True)), classes=np.array(list("abcdefghij")))
    got = load_images(path)
    assert got.classes == tuple("abcdefghij")
    assert got.labels.tolist() == targets.tolist()
    assert load_images(path, labels=False).labels is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": np.zeros((4, 8, 8), np.uint8)}, "it has pictures"),
        ({"images": np.zeros((4, 8, 8), np.uint8)}, r"no 'labels'; pass labels=False \(--unlabelled\)"),
        ({"train_images": np.zeros((4, 8, 8), np.uint8)}, "no 'train_labels'"),
        ({"images": np.full((4, 8, 8), np.nan), "labels": np.arange(4), "classes": NAMES}, "NaN"),
        ({"images": np.full((4, 8, 8), 7.0), "labels": np.arange(4), "classes": NAMES}, "above 1"),
        ({"images": np.zeros((4, 8, 8), np.uint8), "labels": np.arange(3), "classes": NAMES}, "4 images but 3 labels"),
        (
            {"images": np.zeros((4, 8, 8), np.uint8), "labels": np.zeros(4, int), "classes": ["0"]},
            r"only one class \(0\)",
        ),
        ({"images": np.zeros((4, 8, 8), np.uint8), "labels": np.arange(4), "classes": ["0", "1"]}, "label 3 has no"),
        ({"images": np.zeros((1, 8, 8), np.uint8), "labels": np.zeros(1, int), "classes": NAMES}, "single image"),
        ({"images": np.zeros((0, 8, 8), np.uint8), "labels": np.zeros(0, int), "classes": NAMES}, "no images"),
        ({"images": np.array([{}, {}], dtype=object), "labels": np.arange(2), "classes": NAMES}, "Python objects"),
    ],
)
def test_bad_npz(tmp_path, arrays, message):
    path = tmp_path / "x.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=message) as caught:
        load_images(path)
    assert "x.npz" in str(caught.value)


def test_npz_split_that_is_missing(tmp_path, pixels, targets):
    np.savez(tmp_path / "x.npz", train_images=pixels, train_labels=targets)
    with pytest.raises(DataError, match=r"none of the arrays test_images.*it has train_images"):
        load_images(tmp_path / "x.npz", split="test")


def test_damaged_npz(tmp_path, pixels):
    np.savez_compressed(tmp_path / "whole.npz", images=pixels)
    whole = (tmp_path / "whole.npz").read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 255
    unknown = bytearray(whole)
    unknown[whole.index(b"PK\x01\x02") + 10] = 99  # A compression method that zipfile does not have.
    np.save(tmp_path / "array.npy", pixels)
    contents = {
        "cut": whole[: len(whole) // 2],
        "changed": bytes(damaged),
        "unknown": bytes(unknown),
        "empty": b"",
        "text": b"hello",
        "pickle": pickle.dumps({"images": 1}),
        "array": (tmp_path / "array.npy").read_bytes(),
    }
    for name, content in contents.items():
        path = tmp_path / f"{name}.npz"
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{name}.npz"):
            load_images(path, labels=False)


@pytest.mark.parametrize("compressed", [False, True])
def test_idx_folder_and_file(tmp_path, pixels, targets, compressed):
    folder = write_idx(tmp_path / "m", pixels, targets, compressed)
    train = load_images(folder, classes=10)
    assert np.array_equal(train.images[:, 0].numpy(), pixels[:40])
    assert train.labels.tolist() == targets[:40].tolist()
    test = load_images(folder, split="test", classes=10)
    assert test.labels.tolist() == targets[40:].tolist()
    file = folder / ("t10k-images-idx3-ubyte" + (".gz" if compressed else ""))
    assert torch.equal(load_images(file, classes=10).images, test.images)
    assert load_images(file, labels=False, size=4).shape == (1, 4, 4)


def test_bad_idx(tmp_path, pixels, targets):
    folder = write_idx(tmp_path / "m", pixels, targets)
    images, labels = folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte"
    images.write_bytes(idx(pixels[:40])[:-1])
    with pytest.raises(DataError, match="train-images-idx3-ubyte is damaged"):
        load_images(folder)
    images.write_bytes(b"\0\0\x0d\x03" + bytes(100))
    with pytest.raises(DataError, match="train-images-idx3-ubyte is not an IDX file"):
        load_images(folder)
    images.write_bytes(idx(pixels[:40]))
    labels.write_bytes(idx(targets[:39]))
    with pytest.raises(DataError, match="40 images but 39 labels"):
        load_images(folder, classes=10)
    labels.unlink()
    with pytest.raises(DataError, match=r"no label file next to it \(train-labels-idx1-ubyte\).*--unlabelled"):
        load_images(folder)
    (folder / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(DataError, match="no IDX images for split 'test'"):
        load_images(folder, split="test")


@pytest.mark.parametrize("content", [b"not gzip", gzip.compress(bytes(5000), mtime=0)[:-20], b""])
def test_damaged_gzip(tmp_path, pixels, targets, content):
    folder = write_idx(tmp_path / "m", pixels, targets, compressed=True)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz"):
        load_images(folder)


def cifar_rows(count, seed):
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


@pytest.mark.parametrize("protocol", [2, 5])
def test_cifar10_pickles(tmp_path, protocol):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number in (1, 2):
        batch = {b"data": cifar_rows(4, number), b"labels": [0, 1, 1, 0], b"filenames": [b"x"] * 4}
        (folder / f"data_batch_{number}").write_bytes(pickle.dumps(batch, protocol))
    (folder / "test_batch").write_bytes(pickle.dumps({b"data": cifar_rows(2, 3), b"labels": [1, 0]}, protocol))
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"airplane", b"bird"]}, protocol))
    got = load_images(folder)
    assert got.classes == ("airplane", "bird")
    assert got.labels.tolist() == [0, 1, 1, 0] * 2
    assert np.array_equal(got.images[4].numpy(), cifar_rows(4, 2)[0].reshape(3, 32, 32))
    assert load_images(tmp_path, split="test").labels.tolist() == [1, 0]


def test_cifar10_pickle_of_python_two(tmp_path):
    """The official batches: protocol 2 from Python 2, with numpy's old module names."""
    data = cifar_rows(2, 1)
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I2\nI3072\nt"
    kind = b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntb"
    text = b"T" + struct.pack("<I", data.size) + data.tobytes()
    batch = b"(dS'data'\n" + array + kind + b"I00\n" + text + b"tbsS'labels'\n(lI1\naI0\nas."
    (tmp_path / "data_batch_1").write_bytes(batch)
    with pytest.raises(DataError, match=r"does not declare its classes.*pass classes=2 \(--classes 2\)"):
        load_images(tmp_path)
    got = load_images(tmp_path, classes=2)
    assert np.array_equal(got.images.numpy().reshape(2, 3072), data)
    assert got.labels.tolist() == [1, 0]


def test_cifar100_pickles(tmp_path):
    for name in ("train", "test"):
        batch = {b"data": cifar_rows(2, 1), b"fine_labels": [1, 0], b"coarse_labels": [0, 0]}
        (tmp_path / name).write_bytes(pickle.dumps(batch, 2))
    (tmp_path / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"apple", b"bee"]}, 2))
    assert load_images(tmp_path).classes == ("apple", "bee")


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("wrap", [lambda evil: evil, lambda evil: {b"data": evil, b"labels": [0]}])
def test_pickles_cannot_call_anything(tmp_path, wrap):
    proof = tmp_path / "proof"
    content = pickle.dumps(wrap(Evil(str(proof))))
    pickle.loads(content)
    proof.rmdir()  # An ordinary unpickler does run it.
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_1.*it loads .*mkdir"):
        load_images(tmp_path)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps([1, 2]), "not a dictionary"),
        (pickle.dumps({b"labels": [1]}), "no uint8 array 'data'"),
        (pickle.dumps({b"data": np.zeros((2, 3072)), b"labels": [0, 1]}), "no uint8 array 'data'"),
        (pickle.dumps({b"data": np.zeros((2, 3072), np.uint8)}), "no list 'labels'"),
        (pickle.dumps({b"data": np.zeros((2, 3072), np.uint8)})[:-50], "not a readable CIFAR batch"),
        (b"", "not a readable CIFAR batch"),
    ],
)
def test_bad_cifar_pickles(tmp_path, content, message):
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_images(tmp_path)
    assert "data_batch_1" in str(caught.value)


def test_cifar10_binary(tmp_path):
    table = np.concatenate([np.array([[1], [0]], np.uint8), cifar_rows(2, 5)], axis=1)
    (tmp_path / "data_batch_1.bin").write_bytes(table.tobytes())
    (tmp_path / "batches.meta.txt").write_text("airplane\nbird\n\n")
    got = load_images(tmp_path)
    assert got.labels.tolist() == [1, 0]
    assert got.classes == ("airplane", "bird")
    assert np.array_equal(got.images.numpy().reshape(2, -1), cifar_rows(2, 5))
    with pytest.raises(DataError, match="no batches for split 'test'"):
        load_images(tmp_path, split="test")
    (tmp_path / "data_batch_1.bin").write_bytes(table.tobytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_1\.bin is damaged"):
        load_images(tmp_path)
