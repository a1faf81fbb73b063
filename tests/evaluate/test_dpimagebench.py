"""Accuracy in the manner of DPImageBench: what is selected, averaged and returned."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sfumato.data import DataError, ImageSet
from sfumato.evaluate import bench_accuracy
from sfumato.evaluate.dpimagebench import BenchResult
from sfumato.nets.deep_classifiers import residual_network, wide_network

SMALL = {"resnet": partial(residual_network, depth=8), "wrn": partial(wide_network, depth=10, factor=1)}


def test_it_learns_digits_and_keeps_the_best_epoch(digits: ImageSet) -> None:
    train, test = digits.subset(range(900)), digits.subset(range(900, 1200))
    found = bench_accuracy(train, test, epochs=8, networks=SMALL)
    assert set(found.each) == set(SMALL)
    assert found.mean > 80
    assert found.best == max(found.each.values())


def test_the_settings_for_cifar_use_sgd(digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    sgd = torch.optim.SGD
    monkeypatch.setattr(torch.optim, "SGD", lambda *given, **options: made.append(options) or sgd(*given, **options))
    one = {"resnet": SMALL["resnet"]}
    bench_accuracy(digits.subset(range(300)), digits.subset(range(300, 400)), cifar=True, epochs=1, networks=one)
    assert made == [{"momentum": 0.9, "weight_decay": 5e-4}]


def test_mean_and_best() -> None:
    result = BenchResult({"a": 1.0, "b": 3.0})
    assert (result.mean, result.best) == (2.0, 3.0)


def test_few_images_are_refused(digits: ImageSet) -> None:
    with pytest.raises(DataError, match="at least 24"):
        bench_accuracy(digits.subset(range(20)), digits)
