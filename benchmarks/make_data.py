"""Make the data files of the tables, NAME.npz with training and test images, from public sets as they are published.

    python -m benchmarks make-data SOURCES --folder DATA

Of what SOURCES (a folder) holds:

- mnist.npz, fashion-mnist.npz, cifar10.npz: arrays train_images, train_labels, test_images, test_labels; names of
  classes are added.
- mednist32.npz: MedNIST, six kinds of scan, the same arrays.
- celeba10k.parquet: faces by gender. The first 8,000 are training images, the rest test images: 32, 64, 256 pixels.
- tiny_imagenet32_train.parquet, tiny_imagenet32_val.parquet: Tiny-ImageNet at 32 pixels, for training and tuning.
- brain_mri_training.parquet, brain_mri_testing.parquet: scans by diagnosis, grey: 64 and 256 pixels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import sfumato as sf
from sfumato.data import ImageSet
from sfumato.data.named import KNOWN

TRAINING_FACES = 8000
GENDERS = ("female", "male")
DIAGNOSES = ("glioma", "meningioma", "notumor", "pituitary")
Sets = tuple[ImageSet, ImageSet]


def arrays(name: str) -> Callable[[Path], Sets]:
    """Return a reader of NAME.npz that names the classes as the named data set does."""

    def read(sources: Path) -> Sets:
        path, classes = sources / f"{name}.npz", KNOWN[name].classes
        return sf.load_images(path, classes=classes), sf.load_images(path, split="test", classes=classes)

    return read


def mednist(sources: Path) -> Sets:
    return sf.load_images(sources / "mednist32.npz"), sf.load_images(sources / "mednist32.npz", split="test")


def faces(size: int) -> Callable[[Path], Sets]:
    def read(sources: Path) -> Sets:
        images = sf.load_images(sources / "celeba10k.parquet", size=size, mode="rgb", classes=GENDERS)
        return images.subset(range(TRAINING_FACES)), images.subset(range(TRAINING_FACES, len(images)))

    return read


def scans(size: int) -> Callable[[Path], Sets]:
    def read(sources: Path) -> Sets:
        paths = (sources / "brain_mri_training.parquet", sources / "brain_mri_testing.parquet")
        train, test = (sf.load_images(path, size=size, mode="grey", classes=DIAGNOSES) for path in paths)
        return train, test

    return read


def tiny_imagenet(sources: Path) -> Sets:
    paths = (sources / f"tiny_imagenet32_{part}.parquet" for part in ("train", "val"))
    train, test = (sf.load_images(path, mode="rgb", classes=200) for path in paths)
    return train, test


MAKERS: dict[str, tuple[str, Callable[[Path], Sets]]] = {
    **{name: (f"{name}.npz", arrays(name)) for name in ("mnist", "fashion-mnist", "cifar10")},
    "tiny_imagenet32_train": ("tiny_imagenet32_train.parquet", tiny_imagenet),
    "mednist": ("mednist32.npz", mednist),
    "celeba": ("celeba10k.parquet", faces(32)),
    "celeba64": ("celeba10k.parquet", faces(64)),
    "celeba256": ("celeba10k.parquet", faces(256)),
    "brain_mri64": ("brain_mri_training.parquet", scans(64)),
    "brain_mri256": ("brain_mri_training.parquet", scans(256)),
}


def write(train: ImageSet, test: ImageSet, path: Path) -> None:
    """Write both splits; grey images without an axis of channels, colour images with channels last."""
    held = {"classes": np.array(train.classes)}
    for name, images in (("train", train), ("test", test)):
        assert images.labels is not None
        pixels = images.images.permute(0, 2, 3, 1).numpy()
        held[f"{name}_images"] = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
        held[f"{name}_labels"] = images.labels.numpy().astype(np.uint8)
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(partial, **held)
    partial.replace(path)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks make-data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", type=Path)
    parser.add_argument("--folder", type=Path, required=True, metavar="DATA")
    parser.add_argument("--only", nargs="+", choices=list(MAKERS), default=list(MAKERS), metavar="NAME")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    made = 0
    for name in options.only:
        needed, read = MAKERS[name]
        target = options.folder / f"{name}.npz"
        if target.exists() or not (options.sources / needed).exists():
            print(f"{name}: {'is there' if target.exists() else f'left out, no {needed}'}")
            continue
        train, test = read(options.sources)
        write(train, test, target)
        print(f"{name}: {len(train):,} training and {len(test):,} test images, {train.shape}", flush=True)
        made += 1
    return 0 if made or all((options.folder / f"{name}.npz").exists() for name in options.only) else 1
