"""Create a folder of synthetic images to share: fit, sample, evaluate, certify."""

from __future__ import annotations

import math
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.certificate import Certificate, signing
from sfumato.certificate.dataset_budget import DatasetBudget
from sfumato.cluster import ShardedImages, connect
from sfumato.data import DataError, ImageSet, PublicFacts, contact_sheet, save_images, shared_images
from sfumato.data.atomic import write_json
from sfumato.data.errors import first_few
from sfumato.data.storage import available_memory
from sfumato.evaluate import Accuracy, check_comparable, downstream_accuracy
from sfumato.evaluate.measure_descriptions import chance_level
from sfumato.evaluate.utility import Recipe
from sfumato.methods.base import Synthesizer
from sfumato.methods.checkpoints import started
from sfumato.methods.registry import load
from sfumato.privacy.budget import BudgetExceeded
from sfumato.privacy.vault import MAX_PER_PERSON
from sfumato.report import ReportRun, write_report
from sfumato.report.card import write_card

DEFAULT_IMAGES = 10_000  # of `synthesize`
DEFAULT_SAMPLES = 1000  # of `sample_to_file`
CONDENSED_RECIPE = Recipe(300, condensed=True)  # for methods that create few images per class
BYTES_PER_PIXEL = 3  # of samples in memory: batches, and the whole set twice
RUN_BYTES = 64 << 20  # of model, checkpoint and log
FILE_SUFFIXES = (".npz", ".parquet")
MODEL_FILES = ("model.safetensors", "config.json", "certificate.json", "ledger.jsonl")
CERTIFIED_FILES = ("images", "images.npz", "samples.png", "metrics.json", "README.md", "croissant.json", "report.html")
SAMPLE_PART = 5000  # images that a worker draws at once


@dataclass(frozen=True)
class Synthesis:
    """Result of `synthesize`.

    - folder: folder that was written.
    - number: number of synthetic images.
    - certificate: certificate of the folder.
    - accuracy: accuracy of a small CNN on the test images, or None without test images.
    - soft_labels: whether `images.npz` contains soft labels.
    - seconds: time that it took; private, because it depends on the number of images.
    """

    folder: Path
    number: int
    certificate: Certificate
    accuracy: Accuracy | None
    soft_labels: bool = False
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the result, ready for JSON."""
        return {
            "out": str(self.folder),
            "images": self.number,
            "guarantee": self.certificate.guarantee,
            "epsilon": self.certificate.epsilon,
            "delta": self.certificate.delta,
            "accuracy": None if self.accuracy is None else self.accuracy.mean,
            "chance": None if self.accuracy is None else chance_level(self.accuracy.confusion),
            "report": str(self.folder / "report.html"),
        }


def synthesize(
    model: Synthesizer,
    images: ImageSet | ShardedImages,
    folder: Path,
    *,
    number: int | None = None,
    test: ImageSet | None = None,
    reference: ImageSet | None = None,
    show_test: bool = False,
    licence: str | None = None,
    resume: bool = False,
    budget: str | Path | None = None,
    max_per_person: int = MAX_PER_PERSON,
    sign: str | Path | None = None,
    issuer: str | None = None,
    subject: str | None = None,
) -> Synthesis:
    """Fit `model` on private `images` and write synthetic images, metrics, report, card and certificate to `folder`.

    - number: number of synthetic images; default: 10,000, or all that the method can create.
    - test: real images, which this call declares public, to measure the accuracy on. Test images that contain a
      private image are refused before any privacy budget is spent.
    - reference: public real images to train the same classifier on, for comparison; refused like `test`.
    - show_test: show some test images in the report, beside the synthetic ones.
    - licence: licence of the synthetic images, for the data-set card.
    - resume: continue an interrupted run.
    - budget, max_per_person, sign, issuer, subject: see `Synthesizer.fit`.
    """
    start, public = time.monotonic(), model.public_facts(images)
    for given in (test, reference):
        if given is not None:
            check_comparable(given, public)
            check_disjoint(images, given)
    max_samples = model.max_samples(public)
    if number is not None and max_samples is not None and number > max_samples:
        raise DataError(
            f"{model.key} creates at most {max_samples} images; request fewer, or increase images_per_class"
        )
    check_memory(number or max_samples or DEFAULT_IMAGES, public)
    check_disk(folder, number or max_samples or DEFAULT_IMAGES, public)
    if resume and (folder / "certificate.json").exists():  # the model is fitted; only samples and metrics are missing
        model = _finished_run(folder, model, public, budget)
    else:
        model.fit(
            images,
            run_dir=folder,
            resume=resume,
            budget=budget,
            max_per_person=max_per_person,
            issuer=issuer,
            subject=subject,
        )
    synthetic = model.sample(number or max_samples or DEFAULT_IMAGES, seed=model.seed)
    save_images(
        replace(synthetic, soft_labels=None), folder / "images", overwrite=True
    )  # PNG files hold no soft labels
    save_images(synthetic, folder / "images.npz", overwrite=True)
    contact_sheet(synthetic, folder / "samples.png")
    accuracy = None
    metrics: dict[str, Any] = {}
    if test is not None:
        recipe = Recipe() if max_samples is None else CONDENSED_RECIPE
        accuracy = downstream_accuracy(synthetic, test, recipe=recipe, device=model.torch_device)
        metrics = {
            "utility": {"small_cnn": accuracy.to_dict()},
            "chance": {"accuracy": chance_level(accuracy.confusion)},
        }
    if test is not None and reference is not None:
        real = downstream_accuracy(reference, test, device=model.torch_device)
        metrics["reference"] = {"utility": {"small_cnn": real.to_dict()}, "images": len(reference)}
    write_json(folder / "metrics.json", metrics)
    write_card(folder, model.certificate_, synthetic, metrics, licence)
    shown = test if show_test else None
    report = ReportRun(folder.resolve().name, model.certificate_, synthetic, metrics, test=shown)
    write_report([report], folder / "report.html", overwrite=True)
    certificate = model.certificate_.covering(folder, {*model.certificate_.outputs, *CERTIFIED_FILES})
    if sign is not None:
        certificate = certificate.signed(sign)
    certificate.save(folder / "certificate.json")
    soft_labels, seconds = synthetic.soft_labels is not None, time.monotonic() - start
    return Synthesis(folder, len(synthetic), certificate, accuracy, soft_labels, seconds)


def sample_to_file(
    run: Path,
    target: Path,
    *,
    number: int | None = None,
    label: str | None = None,
    seed: int = 0,
    device: str = "auto",
    overwrite: bool = False,
    sign: Path | None = None,
    options: dict[str, Any] | None = None,
    cluster: Any = None,
    workers: int | None = None,
) -> tuple[ImageSet, Path]:
    """Draw images from the model in `run`, save them, and write a certificate that refers to that of the run.

    - number: number of images; default: 1,000, or all that the method can create.
    - label: draw only this class.
    - sign: private key that signs the certificate.
    - options: parameters of the method that may change after `fit`.
    - cluster, workers: draw on this cluster (`cluster.connect`), default: in this process. The images of a seed are the
      same for any number of workers, but differ from those drawn without a cluster.

    Return the images and the path of the certificate, which is next to `target`.
    """
    name = target.stem if target.suffix in FILE_SUFFIXES else target.name
    certificate_path = target.with_name(f"{name}.certificate.json")
    if certificate_path.exists() and not overwrite:
        raise DataError(f"{certificate_path} exists already; choose another name, or pass --overwrite")
    model = load(run, device=device)
    classes = len(model.public_.classes)
    max_samples = model.max_samples(model.public_) or DEFAULT_SAMPLES * classes
    number = number or min(DEFAULT_SAMPLES, max_samples // (classes if label else 1))
    check_memory(number, model.public_)
    if cluster is None:
        images = model.sample(number, labels=label, seed=seed, **(options or {}))
    else:
        images = _sample_on_cluster(model, run, number, label, seed, options or {}, cluster, workers)
    save_images(images, target, overwrite=overwrite)
    certificate = model.certificate_.derived(target.parent, [target.name])
    (certificate if sign is None else certificate.signed(sign)).save(certificate_path)
    return images, certificate_path


def new_seed() -> int:
    """Return a random seed."""
    return secrets.randbits(31)


def _finished_run(folder: Path, model: Synthesizer, public: PublicFacts, budget: str | Path | None) -> Synthesizer:
    """Return the fitted model of a folder. Raise `DataError` if it was made with other settings or another budget."""
    found = load(folder, device=model.device)
    certificate = found.certificate_
    check_settings(certificate, model, public, folder)
    if certificate.account != (None if budget is None else Path(budget).name):
        raise DataError(f"{folder} holds a finished run that was not charged to this budget; choose another folder")
    return found


def _sample_on_cluster(
    model: Synthesizer,
    run: Path,
    number: int,
    label: str | None,
    seed: int,
    options: dict[str, Any],
    cluster: Any,
    workers: int | None,
) -> ImageSet:
    """Draw parts of fixed size on the workers of a cluster. The model is a release, so it may be sent to them."""
    files = {path.name: path.read_bytes() for path in run.iterdir() if path.name in MODEL_FILES}
    whole = model.class_labels(number, label).split(SAMPLE_PART)
    seeds = [int(np.random.SeedSequence([seed, part]).generate_state(1)[0]) for part in range(len(whole))]
    executor = connect(cluster, **({} if workers is None else {"workers": workers}))
    try:
        calls = [(files, part, own, model.device, options) for part, own in zip(whole, seeds, strict=True)]
        pixels = list(executor.compute(_draw_part, calls))
    finally:
        if executor is not cluster:
            executor.close()
    public = model.public_
    return ImageSet(torch.cat(pixels), torch.cat(whole) if public.labelled else None, public.classes)


def _draw_part(
    files: dict[str, bytes], labels: torch.Tensor, seed: int, device: str, options: dict[str, Any]
) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        model = load(Path(folder), device=device)
        return model.sample(len(labels), labels=labels.tolist(), seed=seed, **options).images


# -- checks before a run -----------------------------------------------------------------------------------


def check_output(folder: Path, resume: bool = False) -> None:
    """Create the output folder. Raise `DataError` if it is not writable, not empty, or holds another run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".sfumato-probe"
        probe.touch()
        probe.unlink()
        occupied = any(path.name != "ledger.lock" for path in folder.iterdir() if path.stat().st_size or path.is_dir())
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror}") from error
    has_run = started(folder)
    if has_run and not resume:
        raise DataError(f"{folder} already holds a run; continue it with --resume, or choose another folder")
    if occupied and not has_run:
        raise DataError(f"{folder} is not empty; choose another folder")


def check_sources(private: str, split: str, test: str) -> None:
    """Raise `DataError` if the private images are read from the split `test` of the test source, before any is read."""
    if split == "test" and (private == test or Path(private).resolve() == Path(test).resolve()):
        raise DataError(
            f"--test {test} is the private set itself; results on it must not be shared. Give public test images"
        )


def check_disjoint(private: ImageSet | ShardedImages, test: ImageSet) -> None:
    """Raise `DataError` if the test images contain a private image."""
    shared = private.contains(test) if isinstance(private, ShardedImages) else shared_images(private, test)
    if shared:
        where = first_few([str(index) for index in shared], limit=5)
        raise DataError(
            f"the test images contain a private image: {len(shared)} of {len(test)} are also in the private set "
            f"(numbers {where}, from 0), so results on them would disclose private information. Give other test "
            "images, or remove these from the private set or from the test images"
        )


def check_memory(number: int, public: PublicFacts) -> None:
    """Raise `DataError` if so many images do not fit in memory. Called before any privacy budget is spent."""
    needed = BYTES_PER_PIXEL * number * math.prod(public.shape)
    if needed > available_memory():
        limit = available_memory() // (BYTES_PER_PIXEL * math.prod(public.shape))
        raise DataError(f"{number} images need {needed / 2**30:.1f} GiB of memory; request at most {limit} at a time")


def check_disk(folder: Path, number: int, public: PublicFacts) -> None:
    """Raise `DataError` if a run does not fit on the disk. Called before any privacy budget is spent."""
    needed = RUN_BYTES + 2 * number * math.prod(public.shape)  # image files and arrays, uncompressed
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DataError(f"{folder} needs up to {needed / 2**20:.0f} MiB of disk, and {free / 2**20:.0f} MiB are free")


def check_signing_key(key: Path | None) -> None:
    """Raise an error if the key cannot sign. Called before any privacy budget is spent."""
    if key is not None:
        signing.sign("", key)


def check_budget(model: Synthesizer, public: PublicFacts, budget: Path | None) -> None:
    """Raise `BudgetExceeded` if the run does not fit into the budget of the data set."""
    refusal = None if budget is None else DatasetBudget(budget).refusal(model.plan(public))
    if refusal is not None:
        raise BudgetExceeded(refusal)


def check_settings(certificate: Certificate, model: Synthesizer, public: PublicFacts, folder: Path) -> None:
    """Raise `DataError` if a finished run in `folder` was made with other settings."""
    wanted, free = model.json_settings(public), {*model.adjustable, "device"}
    other = [name for name, value in wanted.items() if name not in free and certificate.parameters.get(name) != value]
    if certificate.method != model.key or other:
        what = "method" if certificate.method != model.key else other[0]
        raise DataError(f"{folder} holds a finished run with another {what}; choose another folder")
