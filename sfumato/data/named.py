"""Find and download public data sets by name."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data.atomic import replacing
from sfumato.data.errors import DataError, reason
from sfumato.data.imageset import ImageSet

SYSTEM_FOLDER = Path("/usr/share/datasets")  # used by Debian packages such as dataset-fashion-mnist
TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class NamedSet:
    """A public data set.

    - address: URL of the folder that holds the files of `checksums`.
    - checksums: SHA-256 of each file.
    - found: path on this machine, or None.
    """

    name: str
    description: str
    licence: str
    classes: tuple[str, ...]
    address: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)
    found: Path | None = None


DIGIT_CLASSES = tuple("0123456789")
FASHION_CLASSES = (
    *("t-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _idx_files(*checksums: str) -> dict[str, str]:
    parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return {f"{part}-ubyte.gz": checksum for part, checksum in zip(parts, checksums, strict=True)}


KNOWN = {
    known.name: known
    for known in (
        NamedSet("digits", "1,797 handwritten digits, 8×8 grey (scikit-learn)", "CC BY 4.0", DIGIT_CLASSES),
        NamedSet(
            "mnist",
            "60,000 + 10,000 handwritten digits, 28×28 grey",
            "CC BY-SA 3.0",
            DIGIT_CLASSES,
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            _idx_files(
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
        NamedSet(
            "fashion-mnist",
            "60,000 + 10,000 pieces of clothing, 28×28 grey",
            "MIT",
            FASHION_CLASSES,
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            _idx_files(
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
        NamedSet(
            "cifar10",
            "50,000 + 10,000 photographs of objects, 32×32 RGB",
            "none stated",
            CIFAR10_CLASSES,
            "https://www.cs.toronto.edu/~kriz/",
            {"cifar-10-python.tar.gz": "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"},
        ),
    )
}


def named_sets() -> list[NamedSet]:
    """List the known data sets, with the path of each on this machine."""
    return [
        NamedSet(k.name, k.description, k.licence, k.classes, k.address, k.checksums, find_named(k.name))
        for k in KNOWN.values()
    ]


def find_named(name: str) -> Path | None:
    """Return the path of a known data set, or None if it is not on this machine.

    Search for NAME.npz or NAME/ in $SFUMATO_DATA, in the user's cache and in the system folder, in this order.
    """
    known = _lookup(name)
    for place in _search_folders():
        for path in (place / f"{known.name}.npz", place / known.name):
            if path.exists():
                return path
    return _bundled_digits() if known.name == "digits" else None


def get_named(name: str, target: Path | None = None) -> Path:
    """Download a known data set if it is not on this machine, and return its path.

    With `target` (a folder), copy the data set to target/NAME.npz or target/NAME/. Otherwise, download it to the first
    search folder. Downloads are checked against a SHA-256.
    """
    known = _lookup(name)
    found = find_named(name)
    if found is not None and target is None:
        return found
    folder = _search_folders()[0] if target is None else Path(target)
    if known.name == "digits":
        return _write_digits(folder / "digits.npz")
    if found is not None:
        with replacing(folder / found.name, overwrite=False) as temporary:
            shutil.copytree(found, temporary) if found.is_dir() else shutil.copyfile(found, temporary)
        return folder / found.name
    with replacing(folder / known.name, overwrite=False) as temporary:
        temporary.mkdir()
        for file, checksum in known.checksums.items():
            _download(known, file, checksum, temporary)
    return folder / known.name


def resolve(source: str) -> tuple[NamedSet, Path]:
    """Return a known data set and its path. Raise `DataError` if it is unknown or not on this machine."""
    if source not in KNOWN:
        raise DataError(f"{source!r} is neither an existing path nor a named data set; {_suggest_name(source)}")
    found = find_named(source)
    if found is None:
        how = f"run 'sfumato data get {source}', or {_manual_download(KNOWN[source])}"
        raise DataError(f"{source} is not on this machine; {how}")
    return KNOWN[source], found


def read_digits(split: str) -> ImageSet:
    """Read scikit-learn's digits, scaled from 0..16 to 0..255. Every fifth image of a class is a test image."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the data set 'digits' comes with scikit-learn: pip install scikit-learn") from error
    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    labels = np.asarray(bunch.target)
    index_in_class = np.array([np.count_nonzero(labels[:index] == label) for index, label in enumerate(labels)])
    chosen = (index_in_class % 5 == 4) == (split == "test")
    return ImageSet.from_arrays(images[chosen], labels[chosen], DIGIT_CLASSES)


def _lookup(name: str) -> NamedSet:
    if name not in KNOWN:
        raise DataError(f"there is no data set {name!r}; {_suggest_name(name)}")
    return KNOWN[name]


def _suggest_name(name: str) -> str:
    near = get_close_matches(name.lower(), KNOWN, n=1)
    nearest = f"the nearest name is {near[0]!r}; " if near else ""
    return f"{nearest}the named data sets are {', '.join(KNOWN)}"


def _search_folders() -> list[Path]:
    own = [Path(os.environ["SFUMATO_DATA"])] if os.environ.get("SFUMATO_DATA") else []
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return [*own, Path(cache) / "sfumato", SYSTEM_FOLDER]


def _manual_download(known: NamedSet) -> str:
    files = ", ".join(known.checksums)
    return f"put {known.name}.npz or a folder {known.name} with {files} into {_search_folders()[0]}"


def _bundled_digits() -> Path | None:
    try:
        import sklearn.datasets
    except ImportError:
        return None
    path = Path(sklearn.datasets.__file__).parent / "data" / "digits.csv.gz"
    return path if path.is_file() else None


def _write_digits(target: Path) -> Path:
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for split in ("train", "test"):
        images = read_digits(split)
        assert images.labels is not None
        arrays |= {f"{split}_images": images.images[:, 0].numpy(), f"{split}_labels": images.labels.numpy()}
    arrays["classes"] = np.array(DIGIT_CLASSES)
    with replacing(target, overwrite=False) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return target


def _download(known: NamedSet, file: str, checksum: str, folder: Path) -> None:
    path = folder / file
    digest = hashlib.sha256()
    try:
        reply = urllib.request.urlopen(known.address + file, timeout=TIMEOUT_SECONDS)
        with reply, path.open("wb") as out:
            while block := reply.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        cause = getattr(error, "reason", None) or reason(error)
        raise DataError(f"{known.address}{file} cannot be downloaded ({cause}); {_manual_download(known)}") from error
    if digest.hexdigest() != checksum:
        raise DataError(f"{known.address}{file} does not match its SHA-256; {_manual_download(known)}")
    if file.endswith(".tar.gz"):
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
        path.unlink()
