"""Priors trained on several workers are those of one process up to rounding; a killed worker changes nothing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato import cli, priors
from sfumato.cluster.executors import InProcess
from sfumato.data import save_images
from sfumato.engine.state import read_tensors
from sfumato.priors import Prior, denoising, train_prior
from sfumato.priors.denoising import CHECKPOINT, PriorTraining
from sfumato.priors.random_process import random_process
from tests.cluster.test_ray import Killer

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
TINY = PriorTraining(steps=6, batch_size=8, learning_rate=2e-3, widths=(8, 16), context=8, attention=1, flip=True)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denoising, "SHOWN", 9)
    monkeypatch.setattr(denoising, "EMBEDDED_AT_ONCE", 17)


class Three(InProcess):
    """Three workers in this process: a batch of 8 has parts of 3, 3 and 2."""

    number = 3


def train(folder: Path, workers: Any = None, **changes: Any) -> Prior:
    settings = replace(TINY, **changes)
    return train_prior(random_process(60, 16), folder, name="p", trained_on="t", settings=settings, workers=workers)


def distance(one: Prior, other: Prior) -> float:
    assert one.card == other.card
    return sum(float((one.state[name] - value).square().sum()) for name, value in other.state.items()) ** 0.5


def test_parts_of_a_batch_give_the_prior_of_one_process(tmp_path: Path) -> None:
    one, three = train(tmp_path / "one"), train(tmp_path / "three", Three())
    a_step = distance(one, train(tmp_path / "fewer", steps=5))
    assert distance(one, three) < a_step / 5  # a file holds half precision, and Adam enlarges what rounding changes
    assert torch.allclose(one.embedding["spread"], three.embedding["spread"])


def test_gradients_of_parts_are_those_of_the_batch() -> None:
    torch.manual_seed(0)
    card = replace(priors.list_priors()[0], widths=(8, 16), context=8, attention=1, condition=4, channels=1, classes=2)
    network = card.new_network()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    batch = (torch.rand(8, 1, 16, 16), torch.randn(8, 1, 16, 16), torch.rand(8) + 0.1, torch.arange(8) % 2)
    batch = (*batch, torch.randn(8, 4))
    loss = denoising.mean_denoising_loss(network, *batch)
    expected = dict(zip(dict(network.named_parameters()), torch.autograd.grad(loss, network.parameters()), strict=True))
    found = denoising.batch_gradients(Three(), denoising.mean_denoising_loss, card, network, batch)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_a_training_may_continue_on_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in one process, and resumed on three workers."""
    expected, drawn = train(tmp_path / "whole"), denoising.PublicBatches.draw
    steps = iter(range(4))

    def interrupted(self: Any) -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return drawn(self)

    with monkeypatch.context() as patch:
        patch.setattr(denoising.PublicBatches, "draw", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "prior")
    assert read_tensors(tmp_path / "prior" / CHECKPOINT)[1]["step"] == 4
    settings: dict[str, Any] = {"settings": TINY, "workers": Three(), "resume": True}
    found = train_prior(random_process(60, 16), tmp_path / "prior", name="p", trained_on="t", **settings)
    assert distance(found, expected) < distance(expected, train(tmp_path / "fewer", steps=5)) / 5


@pytest.mark.slow
def test_a_killed_worker_changes_no_prior(tmp_path: Path, cluster: Any) -> None:
    expected = train(tmp_path / "one", cluster, steps=40)
    killer = Killer("compute", cluster)
    found = train(tmp_path / "two", cluster, steps=40)
    killer.join()
    assert len(killer.killed) == 1
    assert distance(found, expected) == 0  # not a bit


def test_results_of_many_calls_come_in_order(cluster: Any) -> None:
    shared = cluster.share(torch.ones(3))
    calls = [(number, shared) for number in range(11)]
    assert [int(each.sum()) for each in cluster.compute(scaled, calls)] == [3 * number for number in range(11)]
    assert list(cluster.compute(scaled, [])) == []


def scaled(number: int, value: torch.Tensor) -> torch.Tensor:
    assert torch.get_num_threads() == 1  # of each worker, so that their number changes no rounding
    return number * value


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def small(*given: Any, settings: Any, **options: Any) -> Any:
        assert options["workers"].number == 2
        return train_prior(*given, settings=replace(settings, widths=(8, 8), context=8, attention=1), **options)

    monkeypatch.setattr(priors, "train_prior", small)
    save_images(random_process(60, 16), tmp_path / "public.npz")
    words = ["prior", "train", str(tmp_path / "public.npz"), "--size", "16", "--steps", "2", "--batch-size", "4"]
    words += ["--cluster", "local", "--workers", "2", "--device", "cpu", "--out", str(tmp_path / "prior")]
    monkeypatch.setattr(sys, "argv", ["sfumato", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0, capsys.readouterr()
    assert priors.load_prior(tmp_path / "prior").card.notes["images_seen"] == 8
