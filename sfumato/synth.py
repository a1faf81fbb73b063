"""The main job: fit, sample, and everything that goes into the folder to be shared."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sfumato.certificate import Certificate
from sfumato.data import DataError, ImageSet, contact_sheet, save_images, shared_images
from sfumato.data.atomic import replacing
from sfumato.evaluate import Accuracy, check_comparable, downstream_accuracy
from sfumato.evaluate.classifiers import Recipe
from sfumato.methods.base import Synthesizer, started
from sfumato.methods.registry import load
from sfumato.privacy.vault import MAX_PER_PERSON

NUMBER = 10_000  # images, when nobody says how many
CONDENSED = Recipe(300, condensed=True)  # for a few images per class


@dataclass(frozen=True)
class Synthesis:
    """A finished folder."""

    folder: Path
    number: int
    certificate: Certificate
    accuracy: Accuracy | None
    soft_labels: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "out": str(self.folder),
            "images": self.number,
            "guarantee": self.certificate.guarantee,
            "epsilon": self.certificate.epsilon,
            "delta": self.certificate.delta,
            "accuracy": None if self.accuracy is None else self.accuracy.mean,
        }


def check_output(folder: Path, resume: bool = False) -> None:
    """Refuses a folder that cannot be written or is taken, before anything is spent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".sfumato-probe"
        probe.touch()
        probe.unlink()
        taken = any(path.name != "ledger.lock" for path in folder.iterdir() if path.stat().st_size or path.is_dir())
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror}") from error
    begun = started(folder)
    if begun and not resume:
        raise DataError(f"{folder} holds a run already; go on with --resume or choose another folder")
    if taken and not begun:
        raise DataError(f"{folder} is not empty; choose another folder")


def check_apart(private: ImageSet, test: ImageSet) -> None:
    """Refuse test images of which one is private too."""
    if test.shape == private.shape and shared_images(private, test):
        raise DataError(
            "the test images share an image with the private ones: measuring on it would put private facts into a file "
            "that is shared. Give test images that are public and apart (another folder, or another split)"
        )


def synthesize(
    model: Synthesizer,
    images: ImageSet,
    folder: Path,
    *,
    number: int | None = None,
    test: ImageSet | None = None,
    resume: bool = False,
    budget: str | Path | None = None,
    max_per_person: int = MAX_PER_PERSON,
    sign: str | Path | None = None,
    issuer: str | None = None,
    subject: str | None = None,
) -> Synthesis:
    """Fit `model` on private `images` and fill `folder`; `test` images are declared public by being given.

    Refuses, before anything is spent, test images of which one is private too: a private image must never be measured
    into a file that is shared. `budget`, `max_per_person`, `sign`, `issuer`, `subject`: see `Synthesizer.fit`.
    """
    public = model.public_facts(images)
    if test is not None:
        check_comparable(test, public)
        check_apart(images, test)
    most = model.most(public)
    if number is not None and most is not None and number > most:
        raise DataError(
            f"{model.key} makes {most} images and no more; ask for at most that many, or set images_per_class higher"
        )
    if resume and (folder / "certificate.json").exists():  # fitted; only samples and figures are missing
        model = load(folder, device=model.device)
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
    synthetic = model.sample(number or most or NUMBER, seed=model.seed)
    save_images(replace(synthetic, soft_labels=None), folder / "images", overwrite=True)  # images.npz has them
    save_images(synthetic, folder / "images.npz", overwrite=True)
    contact_sheet(synthetic, folder / "samples.png")
    accuracy = None
    metrics: dict[str, Any] = {}
    if test is not None:
        recipe = Recipe() if most is None else CONDENSED
        accuracy = downstream_accuracy(synthetic, test, recipe=recipe, device=model.torch_device)
        metrics["utility"] = {"small_cnn": accuracy.to_dict()}
    with replacing(folder / "metrics.json", overwrite=True) as partial:
        partial.write_text(json.dumps(metrics, indent=2) + "\n", "utf-8")
    certificate = model.certificate_.covering(folder)
    if sign is not None:
        certificate = certificate.signed(sign)
    certificate.save(folder / "certificate.json")
    return Synthesis(folder, len(synthetic), certificate, accuracy, synthetic.soft_labels is not None)
