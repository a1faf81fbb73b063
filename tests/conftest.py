"""Real small images for all tests: scikit-learn's digits."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from sfumato.data import ImageSet, load_images

torch.set_num_threads(1)  # the data are small: threads would only wait for each other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that are marked `gpu` where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking through all imported modules again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Files outlive a killed process without `fsync`, which takes milliseconds and is called thousands of times."""
    with mock.patch.object(os, "fsync"):
        yield


@pytest.fixture(scope="session")
def digits() -> ImageSet:
    return load_images("digits")


@pytest.fixture(scope="session")
def few_digits(digits: ImageSet) -> ImageSet:
    """Sixty images of three classes and one of a fourth, at the end."""
    return _of_each(digits, (20, 20, 20, 1))


@pytest.fixture(scope="session")
def fewer_digits(digits: ImageSet) -> ImageSet:
    """A few of three classes and one of a fourth, at the end: for runs by the dozen."""
    return _of_each(digits, (7, 7, 7, 1))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs the command in this process and returns (status, output, errors)."""

    from sfumato import cli

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sfumato", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


def _of_each(digits: ImageSet, counts: tuple[int, ...]) -> ImageSet:
    assert digits.labels is not None
    index = torch.cat([(digits.labels == c).nonzero()[:n, 0] for c, n in enumerate(counts)])
    return ImageSet(digits.images[index], digits.labels[index], digits.classes[: len(counts)])
