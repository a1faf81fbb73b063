"""Warnings: loud where they should be, silent on ordinary sets."""

from __future__ import annotations

import math

import pytest

from sfumato.advice import warnings_for
from sfumato.data import PublicFacts
from sfumato.privacy.budget import Budget

DIGITS = tuple("0123456789")


def said(classes: tuple[str, ...] = DIGITS, sizes: tuple[float, ...] | None = None, **budget: float) -> str:
    facts = PublicFacts((1, 28, 28), classes, True, sizes)
    return "\n".join(warnings_for(facts, Budget(**{"epsilon": 1.0, **budget})))  # type: ignore[arg-type]


def test_an_ordinary_run_is_silent() -> None:
    assert said() == ""
    assert said(sizes=(4000,) * 10) == ""
    assert said(epsilon=20) == ""


def test_a_weak_budget_is_named() -> None:
    assert "epsilon 21" in said(epsilon=21)
    assert "nothing is protected" in said(epsilon=math.inf)
    assert "1/n" in said(delta=1e-3)
    assert "1/n" in said(sizes=(6000,) * 10, delta=1e-5 * 0.9)
    assert "1/n" not in said(sizes=(4000,) * 10, delta=1e-5)


def test_few_images_are_named() -> None:
    assert "fewer than 100" in said(("a", "b"), (30, 60))
    assert "fewer than 20 images in b" in said(("a", "b"), (3000, 19))
    assert said(("a", "b"), (3000, 20)) == ""


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
def test_names_of_persons_are_noticed(classes: tuple[str, ...]) -> None:
    assert "look like persons" in said(classes)
    assert "not protected" in said(classes)


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
def test_names_of_things_are_not(classes: tuple[str, ...]) -> None:
    assert said(classes) == ""


def test_many_classes_are_named_unless_their_sizes_are_known() -> None:
    classes = tuple(f"street {chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(101))
    assert "101 classes" in said(classes)
    assert said(classes, (1000,) * 101, delta=1e-6) == ""
    assert said(classes[:100]) == ""
