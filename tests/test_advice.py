"""Warnings about weak settings, and none for ordinary sets."""

from __future__ import annotations

import math

import pytest

from sfumato.advice import warnings_for
from sfumato.data import PublicFacts
from sfumato.privacy.budget import Budget

DIGITS = tuple("0123456789")


def warn(classes: tuple[str, ...] = DIGITS, sizes: tuple[float, ...] | None = None, **budget: float) -> str:
    facts = PublicFacts((1, 28, 28), classes, True, sizes)
    return "\n".join(warnings_for(facts, Budget(**{"epsilon": 1.0, **budget})))  # type: ignore[arg-type]


def test_ordinary_settings_give_no_warning() -> None:
    assert warn() == ""
    assert warn(sizes=(4000,) * 10) == ""
    assert warn(epsilon=20) == ""


def test_a_weak_budget_gives_a_warning() -> None:
    assert "epsilon 21" in warn(epsilon=21)
    assert "nothing is protected" in warn(epsilon=math.inf)
    assert "1/n" in warn(delta=1e-3)
    assert "1/n" in warn(sizes=(6000,) * 10, delta=1e-5 * 0.9)
    assert "1/n" not in warn(sizes=(4000,) * 10, delta=1e-5)


def test_few_images_give_a_warning() -> None:
    assert "fewer than 100" in warn(("a", "b"), (30, 60))
    assert "fewer than 20 images in b" in warn(("a", "b"), (3000, 19))
    assert warn(("a", "b"), (3000, 20)) == ""


PERSONS = [
    ("Anna Schmidt", "Ben Kaya", "Carla Rossi", "Dmitri Ivanov", "Eva Novak", "Farid Haddad"),
    ("schmidt_anna", "kaya_ben", "rossi_carla", "ivanov_dmitri", "novak_eva"),
    ("Schmidt, Anna", "Kaya, Ben", "Rossi, Carla", "Ivanov, Dmitri", "Novak, Eva"),
    ("George_W_Bush", "Aaron_Eckhart", "Xu_Li", "Serena_Williams", "Colin_Powell", "Hugo_Chavez"),
    ("anna", "ben", "carla", "david", "eva"),
    tuple(f"P{number:05d}" for number in range(120)),
    tuple(f"{number:06d}" for number in range(7)),
    tuple(f"patient_{number}" for number in range(12)),
    tuple(f"AB-{number}" for number in range(10000, 10007)),
]


@pytest.mark.parametrize("classes", PERSONS)
def test_class_names_of_persons_give_a_warning(classes: tuple[str, ...]) -> None:
    assert "look like persons" in warn(classes)
    assert "not protected" in warn(classes)


THINGS = [
    ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    tuple(f"n{1440764 + 37 * number:08d}" for number in range(1000)),
    tuple(str(number) for number in range(1000)),
    ("AbdomenCT", "BreastMRI", "CXR", "ChestCT", "Hand", "HeadCT"),
    ("glioma", "meningioma", "no tumor", "pituitary"),
    ("Actinic Keratosis", "Basal Cell Carcinoma", "Melanoma", "Nevus", "Vascular Lesion", "Seborrheic Keratosis"),
    ("Golden Retriever", "Irish Setter", "Maine Coon", "German Shepherd", "Border Collie", "Saint Bernard"),
    ("apple_pie", "baby_back_ribs", "beef_carpaccio", "caesar_salad", "cheese_plate", "eggs_benedict", "fried_rice"),
    ("golden_retriever", "lawn_mower", "aquarium_fish", "maple_tree", "pickup_truck", "sweet_pepper"),
    ("Annual Crop", "Herbaceous Vegetation", "Permanent Crop", "Sea Lake", "Industrial Area", "River Bank"),
    ("2016", "2017", "2018", "2019", "2020", "2021"),
    ("benign", "malignant"),
    ("Anna Schmidt", "Ben Kaya"),  # too few to be a pattern
]


@pytest.mark.parametrize("classes", THINGS)
def test_class_names_of_things_give_no_warning(classes: tuple[str, ...]) -> None:
    assert warn(classes) == ""


def test_many_classes_give_a_warning_unless_their_sizes_are_public() -> None:
    classes = tuple(f"street {chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(101))
    assert "101 classes" in warn(classes)
    assert warn(classes, (1000,) * 101, delta=1e-6) == ""
    assert warn(classes[:100]) == ""
