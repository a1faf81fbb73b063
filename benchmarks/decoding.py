"""How fast `load_images` decodes a folder, against a plain sequential Pillow loop that does the same work.

    python benchmarks/decoding.py [--images N] [--json FILE]

Real images (CIFAR-10 or Fashion-MNIST where found, else scikit-learn's digits) are enlarged to 256 px and saved as
JPEG and PNG files; both readers bring them to 32×32. Runs alternate, so that a busy machine slows both alike.
Two loops are timed: a full decode of every file, and one that also uses JPEG's reduced-size decoding ("draft").
`cores_used` is CPU time over wall time while `load_images` ran: near 1, its threads had only one core to share.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL
from PIL import Image

from sfumato.data import ImageSet, find_named, load_images

SIZE = 32
PIXELS = 256


def source_images(count: int) -> tuple[str, ImageSet]:
    name = next((name for name in ("cifar10", "fashion-mnist") if find_named(name)), "digits")
    images = load_images(name, mode="rgb")
    return name, images.subset(np.arange(count) % len(images))


def write_files(images: ImageSet, folder: Path, kind: str) -> None:
    for index, pixels in enumerate(images.images.permute(0, 2, 3, 1).numpy()):
        picture = Image.fromarray(pixels).resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)
        picture.save(folder / f"{index:06}.{kind}", quality=90)


def plain_loop(folder: Path, draft: bool) -> np.ndarray:
    pictures = []
    for path in sorted(folder.iterdir()):
        with Image.open(path) as picture:
            if draft:
                picture.draft("RGB", (2 * SIZE, 2 * SIZE))
            pictures.append(np.asarray(picture.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BOX)))
    return np.stack(pictures).transpose(0, 3, 1, 2)


def ours(folder: Path) -> np.ndarray:
    return load_images(folder, labels=False, size=SIZE, mode="rgb").images.numpy()


def compare(folder: Path, count: int, repeats: int) -> dict[str, float]:
    """Median images per second of each reader; all read the same folder in turn."""
    readers: dict[str, Callable[[], np.ndarray]] = {
        "load_images": lambda: ours(folder),
        "plain_loop": lambda: plain_loop(folder, draft=False),
        "plain_loop_with_draft": lambda: plain_loop(folder, draft=True),
    }
    if not np.array_equal(readers["load_images"](), readers["plain_loop_with_draft"]()):
        raise SystemExit("the readers disagree, so their speeds cannot be compared")
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    busy: dict[str, float] = dict.fromkeys(readers, 0.0)
    for _ in range(repeats):
        for name, read in readers.items():
            start, start_busy = time.perf_counter(), time.process_time()
            read()
            seconds[name].append(time.perf_counter() - start)
            busy[name] += time.process_time() - start_busy
    speed = {name: round(count / statistics.median(times), 1) for name, times in seconds.items()}
    speed["ratio"] = round(speed["load_images"] / speed["plain_loop"], 2)
    speed["ratio_with_draft"] = round(speed["load_images"] / speed["plain_loop_with_draft"], 2)
    speed["cores_used"] = round(busy["load_images"] / sum(seconds["load_images"]), 2)
    return speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=1000, help="files of each kind")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    name, images = source_images(arguments.images)
    results = {}
    for kind in ("jpg", "png"):
        with tempfile.TemporaryDirectory() as folder:
            write_files(images, Path(folder), kind)
            results[kind] = compare(Path(folder), arguments.images, arguments.repeats)
        print(f"{kind}: " + ", ".join(f"{reader} {value}" for reader, value in results[kind].items()))
    setting = {
        "images": arguments.images, "repeats": arguments.repeats, "source": name, "from": PIXELS, "to": SIZE,
        "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "pillow": PIL.__version__,
    }  # fmt: skip
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"setting": setting, "images_per_second": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
