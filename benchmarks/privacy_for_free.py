"""Is condensation private for free? The experiment of "Differentially Private Dataset Condensation", section 3.1.

    python benchmarks/privacy_for_free.py --data cifar10 --iterations 20000 --flip --json FILE --picture FILE

The claim rests on images of a known form, "noise in a basis of the class, plus the class mean" (Eq. 8), being what
distribution matching ends with. From the same noise we make both: that construction, and the images that matching with
non-linear networks makes. Compared are their matching loss (Eq. 3) in fresh random networks, their class means and
spreads (the test of Bai and Saranadasa), and the accuracy of a ConvNet trained on them, in 8 bits as they would be
handed out. The noise itself and as many real images stand beside them. Nothing here is private.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import sfumato as sf
from sfumato.data import contact_sheet
from sfumato.evaluate import Recipe, downstream_accuracy
from sfumato.evaluate.two_sample import bai_saranadasa
from sfumato.methods.condensation import Views
from sfumato.methods.dm import class_batches, initial_noise, mean_embeddings


def basis_of(rows: torch.Tensor) -> torch.Tensor:
    """An orthogonal matrix [d, d] whose first columns span the rows [n, d], however many there are.

    The paper says X = QR, which for rows that are images cannot be meant: Q must act on images. Q R = X^T would do if X
    had full rank; it has not where a pixel is the same in all images. So: eigenvectors of X^T X, the largest first,
    which are the right singular vectors of X, completed to a basis. Any other such basis differs by a rotation within
    the span and one of the rest, which the noise does not notice.
    """
    vectors = torch.linalg.eigh(rows.T.double() @ rows.double()).eigenvectors
    return vectors.flip(1)


def linear_construction(noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Eq. 8 for one class: s* = Q s + mean, of noise [m, ...] and real images [n, ...] in [-1, 1]."""
    rows = real.flatten(1).double()
    images = noise.flatten(1).double() @ basis_of(rows).T + rows.mean(0)
    return images.view_as(noise).to(noise.dtype)


def outside_span(basis: torch.Tensor, rank: int, images: torch.Tensor) -> torch.Tensor:
    """Share of each image's length that lies outside the first `rank` vectors of a basis, [n]."""
    rows = images.flatten(1).double()
    inside = rows @ basis[:, :rank]
    return (rows - inside @ basis[:, :rank].T).norm(dim=1) / rows.norm(dim=1)


def matching_losses(
    sets: dict[str, torch.Tensor],
    real: sf.ImageSet,
    *,
    networks: int,
    seed: int,
    device: torch.device,
    batch_size: int = 256,
    width: int = 128,
) -> dict[str, list[float]]:
    """Eq. 3, summed over classes, in each of some fresh networks: the same ones, and the same real images, for all."""
    public = real.public()
    assert real.labels is not None
    generator = torch.Generator(device).manual_seed(seed)
    views = Views(public, generator, width=width, flip=None)
    batches = class_batches(real.images, real.labels.to(device), public, batch_size, generator)
    losses: dict[str, list[float]] = {name: [] for name in sets}
    for _ in range(networks):
        view = views.next()
        targets = mean_embeddings(view, *next(batches), len(public.classes))
        for name, images in sets.items():
            labels = torch.arange(len(public.classes), device=device).repeat_interleave(len(images) // len(targets))
            means = mean_embeddings(view, images, labels, len(public.classes))
            losses[name].append(float((means - targets).square().sum()))
    return losses


def leak(real: torch.Tensor, others: torch.Tensor) -> dict[str, Any]:
    """Membership read off the basis of half as many images as there are pixels, or as there are images."""
    count = min(len(real), real[0].numel()) // 2
    basis = basis_of(real[:count].flatten(1))
    return {
        "images": count,
        "members_outside_most": float(outside_span(basis, count, real[:count]).max()),
        "others_outside_least": float(outside_span(basis, count, others).min()),
    }


def compare(linear: torch.Tensor, learned: torch.Tensor, real: torch.Tensor) -> dict[str, Any]:
    """Of one class: are the means the same, and are the squared deviations from the real mean (1 in Eq. 8)?"""
    found: dict[str, Any] = {}
    for what, pair in (
        ("means", (linear, learned)),
        ("spreads", [(images - real.mean(0)).square() for images in (linear, learned)]),
    ):
        z, p = bai_saranadasa(*pair)
        found[what] = {"z": round(z, 2), "p": float(f"{p:.2g}")}
    return found


def as_images(pixels: torch.Tensor, classes: Sequence[str]) -> sf.ImageSet:
    """As they would be handed out: 8 bits, cut off at black and white; as many of each class, class by class."""
    labels = torch.arange(len(classes)).repeat_interleave(len(pixels) // len(classes))
    return sf.ImageSet(((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().cpu(), labels, classes)


def summary(values: list[float], digits: int) -> dict[str, float]:
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": round(statistics.fmean(values), digits), "sd": round(sd, digits)}


def run(options: argparse.Namespace) -> dict[str, Any]:
    real, test = sf.load_images(options.data), sf.load_images(options.data, split="test")
    assert real.labels is not None
    assert test.labels is not None
    public, per_class = real.public(), options.per_class
    model = sf.create(
        "dm",
        images_per_class=per_class,
        iterations=options.iterations,
        batch_size=options.batch_size,
        width=options.width,
        flip=options.flip,
        device=options.device,
        seed=options.seed,
    )
    device = model.torch_device
    noise = initial_noise(public, per_class, torch.Generator(device).manual_seed(options.seed))

    pixels = real.images.to(device).float() / 127.5 - 1
    by_class = [pixels[(real.labels == label).to(device)] for label in range(len(public.classes))]
    started = time.perf_counter()
    starts = zip(noise.split(per_class), by_class, strict=True)
    linear = torch.cat([linear_construction(*pair) for pair in starts])
    constructed = time.perf_counter()
    learned = model.fit(real).images_  # type: ignore[attr-defined]
    fitted = time.perf_counter()
    print(f"linear construction {constructed - started:.0f} s, matching {fitted - constructed:.0f} s", flush=True)

    generator = torch.Generator(device).manual_seed(options.seed + 1)
    chosen = next(class_batches(real.images, real.labels.to(device), public, per_class, generator))[0]
    sets = {"noise": noise, "linear": linear, "linear, cut": linear.clamp(-1, 1), "dm": learned, "real": chosen}
    losses = matching_losses(
        sets, real, networks=options.networks, seed=options.seed + 1, device=device, width=options.width
    )
    recipe = Recipe(options.epochs, condensed=True, flip=options.flip)
    rows: list[dict[str, Any]] = []
    for name, images in sets.items():
        row: dict[str, Any] = {"images": name, "loss": summary(losses[name], 2)}
        if name not in ("noise", "linear, cut"):  # the one teaches nothing, the other is `linear` in 8 bits
            handed_out = as_images(images, public.classes)
            accuracy = downstream_accuracy(
                handed_out, test, "convnet", seeds=range(options.seeds), recipe=recipe, device=device
            )
            row["accuracy"] = summary(accuracy.values, 2)
        print(json.dumps(row), flush=True)
        rows.append(row)

    tests = []
    split = zip(public.classes, linear.split(per_class), learned.split(per_class), by_class, strict=True)
    for name, one, other, members in split:
        tests.append({"class": name, **compare(one, other, members)})
        print(json.dumps(tests[-1]), flush=True)

    if options.picture:
        names = [f"{name}, {kind}" for name in public.classes for kind in ("Eq. 8", "DM")]
        pairs = zip(linear.split(per_class), learned.split(per_class), strict=True)
        contact_sheet(as_images(torch.cat([part for pair in pairs for part in pair]), names), options.picture)
    others = (test.images[test.labels == 0].to(device).float() / 127.5 - 1)[:1000]
    return {
        "rows": rows,
        "tests": tests,
        "span": leak(by_class[0], others),
        "fit_s": round(fitted - constructed, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--per-class", type=int, default=50)
    parser.add_argument("--iterations", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=256, help="real images of each class in an iteration")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--flip", action="store_true", help="mirror images, too; not for digits")
    parser.add_argument("--networks", type=int, default=20, help="fresh ones, for the loss")
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3, help="classifiers trained on each set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()

    content = run(options)
    if options.json:
        cuda = torch.cuda.is_available() and options.device != "cpu"
        header = {
            "command": f"python benchmarks/privacy_for_free.py {shlex.join(sys.argv[1:])}",
            "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, CPU",
            "torch": torch.__version__,
            "data": options.data,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**header, **content}, indent=1) + "\n")


if __name__ == "__main__":
    main()
