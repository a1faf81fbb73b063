"""Named data sets: search order, download, and how `load_images` distinguishes names from paths."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
import urllib.error

import numpy as np
import pytest
import torch

from sfumato.data import DataError, find_named, get_named, load_images, named, named_sets

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 100:sfumato.data.DataWarning")


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """Isolate the search folders: no user data, no cache, no system folder."""
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(named, "SYSTEM_FOLDER", tmp_path / "system")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def network(monkeypatch):
    """Serve downloads from a dictionary (URL to content); other URLs fail."""
    served = {}

    def urlopen(address, timeout):
        assert timeout > 0
        if address not in served:
            raise urllib.error.URLError(OSError(-2, "Name or service not known"))
        return io.BytesIO(served[address])

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    return served


def idx(array):
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def idx_files(pixels, targets):
    return {
        f"{part}-{name}-ubyte.gz": gzip.compress(idx(array), mtime=0)
        for part in ("train", "t10k")
        for name, array in (("images-idx3", pixels), ("labels-idx1", targets))
    }


def test_digits_are_available_and_split_by_class():
    train, test = load_images("digits"), load_images("digits", split="test")
    assert train.shape == (1, 8, 8)
    assert train.classes == tuple("0123456789")
    assert len(train) + len(test) == 1797
    assert int(train.images.max()) == 255
    for label in range(10):
        counts = int((train.labels == label).sum()), int((test.labels == label).sum())
        assert counts[1] == sum(counts) // 5
    assert torch.equal(load_images("digits", split="test").images, test.images)
    seen = {image.numpy().tobytes() for image in train.images}
    assert sum(image.numpy().tobytes() in seen for image in test.images) < 5
    assert load_images("digits", size=16, labels=False).shape == (1, 16, 16)


def test_get_digits_writes_the_same_images(places):
    path = get_named("digits", places / "own")
    assert path == places / "own" / "digits.npz" == find_named("digits")
    again = load_images("digits", split="test")
    path.unlink()
    assert torch.equal(load_images("digits", split="test").images, again.images)


def test_search_order(places, pixels, targets):
    for place in ("system", "cache/sfumato", "own"):
        folder = places / place / "fashion-mnist"
        folder.mkdir(parents=True)
        for name, content in idx_files(pixels, targets).items():
            (folder / name).write_bytes(content)
        assert find_named("fashion-mnist") == folder
    got = load_images("fashion-mnist")
    assert got.classes[0] == "t-shirt"
    assert got.classes[9] == "ankle boot"
    assert len(got.classes) == 10
    assert np.array_equal(got.images[:, 0].numpy(), pixels)
    assert {known.name: known.found for known in named_sets()}["fashion-mnist"] == folder
    np.savez(places / "own" / "fashion-mnist.npz", train_images=pixels[:20], train_labels=targets[:20])
    assert len(load_images("fashion-mnist")) == 20


def test_batches_of_a_named_set_need_no_meta_file(places):
    folder = places / "own" / "cifar10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [3, 5]}
    (folder / "data_batch_1").write_bytes(pickle.dumps(batch))
    got = load_images("cifar10")
    assert [got.classes[label] for label in got.labels] == ["cat", "dog"]
    assert len(got.classes) == 10


def test_get_copies_from_the_system_folder(places, pixels, targets):
    folder = places / "system" / "fashion-mnist"
    folder.mkdir(parents=True)
    for name, content in idx_files(pixels, targets).items():
        (folder / name).write_bytes(content)
    assert get_named("fashion-mnist") == folder
    copy = get_named("fashion-mnist", places / "copies")
    assert copy == places / "copies" / "fashion-mnist"
    assert sorted(file.name for file in copy.iterdir()) == sorted(idx_files(pixels, targets))
    with pytest.raises(DataError, match="exists already"):
        get_named("fashion-mnist", places / "copies")


def test_a_path_takes_precedence_over_a_name(places, class_folder):
    class_folder.rename(places / "mnist")
    assert load_images("mnist").classes == ("a", "b")


def test_wrong_number_of_classes_is_refused(places, pixels):
    (places / "own").mkdir()
    np.savez(places / "own" / "mnist.npz", train_images=pixels[:2], train_labels=[0, 1], classes=["a", "b"])
    with pytest.raises(DataError, match="2 classes, but mnist has 10"):
        load_images("mnist")


def test_unknown_names_and_paths(places):
    with pytest.raises(DataError, match=r"'minst' is neither.*the nearest name is 'mnist'"):
        load_images("minst")
    with pytest.raises(DataError, match="the nearest name is 'fashion-mnist'"):
        get_named("fashon_mnist")
    for missing in ("scans/", "no/where", "x.npz", places / "gone"):
        with pytest.raises(DataError, match=r"does not exist|neither an existing path"):
            load_images(missing)
    (places / "x.docx").write_bytes(b"x")
    with pytest.raises(DataError, match=r"x\.docx: unknown file type; expected a folder, \.npz"):
        load_images("x.docx")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size=0"),
        ({"size": 2.5}, "size=2.5"),
        ({"mode": "gray"}, "mode='gray': expected 'grey'"),
        ({"split": "val"}, "split='val'"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"workers": 0, "size": 4}, "workers=0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(DataError, match=message):
        load_images("digits", **options)


def test_a_missing_set_explains_how_to_get_it():
    with pytest.raises(DataError, match=r"sfumato data get mnist.*mnist\.npz.*train-images-idx3-ubyte\.gz.*own"):
        load_images("mnist")


def test_download(places, pixels, targets, network, monkeypatch):
    files = idx_files(pixels, targets)
    known = named.KNOWN["mnist"]
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    replaced = named.NamedSet(known.name, known.description, known.licence, known.classes, known.address, sums)
    monkeypatch.setitem(named.KNOWN, "mnist", replaced)
    network |= {known.address + name: content for name, content in files.items()}
    assert get_named("mnist") == places / "own" / "mnist"
    assert np.array_equal(load_images("mnist", split="test").images[:, 0].numpy(), pixels)


def test_download_with_another_checksum_leaves_nothing(places, pixels, targets, network):
    network |= {named.KNOWN["mnist"].address + name: data for name, data in idx_files(pixels, targets).items()}
    with pytest.raises(DataError, match=r"does not match its SHA-256.*put mnist\.npz"):
        get_named("mnist")
    assert list((places / "own").iterdir()) == []


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
@pytest.mark.usefixtures("network")
def test_no_network_leaves_nothing(places, name):
    with pytest.raises(DataError, match=f"cannot be downloaded .*not known.*put {name}.npz") as caught:
        get_named(name)
    assert all(file in str(caught.value) for file in named.KNOWN[name].checksums)
    assert list((places / "own").iterdir()) == []


def test_every_download_has_a_checksum_and_a_safe_address():
    for known in named.KNOWN.values():
        assert all(len(bytes.fromhex(checksum)) == 32 for checksum in known.checksums.values())
        assert known.address.startswith("https://") or known.name == "digits"
