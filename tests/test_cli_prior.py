"""The commands `sfumato prior list` and `sfumato prior train`, and `--prior`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sfumato as sf
from sfumato import cli, cli_prior, priors
from sfumato.data import ImageSet, save_images
from sfumato.priors import load_prior, train_prior
from sfumato.priors.denoising import PriorTraining
from sfumato.priors.random_process import random_process


@pytest.fixture
def public(tmp_path: Path) -> Path:
    save_images(random_process(60, 16), tmp_path / "public.npz")
    return tmp_path / "public.npz"


@pytest.fixture(autouse=True)
def small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(*given: Any, settings: Any, **options: Any) -> Any:
        return train_prior(*given, settings=replace(settings, widths=(8, 8), context=8, attention=1), **options)

    monkeypatch.setattr(priors, "train_prior", small)


def run(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["sfumato", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_list(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert run(monkeypatch, "prior", "list", "--json") == 0
    cards = {card["name"]: card for card in json.loads(capsys.readouterr().out)}
    assert set(cards) == {"random-process", "tiny-imagenet"}
    assert "procedural" in cards["random-process"]["trained_on"]
    assert run(monkeypatch, "prior", "list") == 0
    assert "tiny-imagenet" in capsys.readouterr().out


def test_train_then_use(public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    target = tmp_path / "mine"
    words = ("prior", "train", public, "--size", "16", "--steps", "2", "--batch-size", "4", "--device", "cpu")
    assert run(monkeypatch, *words, "--out", target, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    prior = load_prior(target)
    assert (printed["sha256"], prior.card.name, prior.card.size) == (prior.sha256, "mine", 16)
    assert prior.card.trained_on == "public.npz, 60 images"
    assert (target / "samples.png").exists()
    assert not (target / "checkpoint.safetensors").exists()

    private = random_process(40, 16, seed=1)
    save_images(private, tmp_path / "private.npz")
    settings = ("--set", "steps=2", "--set", "public_size=true", "--device", "cpu", "--prior", target)
    assert run(monkeypatch, "plan", tmp_path / "private.npz", *settings, "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["method"] == "atelier"
    assert any("public.npz, 60 images" in note for note in planned["notes"])
    assert run(monkeypatch, *words, "--out", target) == 1
    assert "finished prior" in capsys.readouterr().err


def test_train_continues_another_prior(public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its network and its encoder, which need not be given again."""
    words = ("prior", "train", public, "--size", "16", "--steps", "2", "--batch-size", "4", "--device", "cpu")
    assert run(monkeypatch, *words, "--encoder", "small_tinyimagenet", "--out", tmp_path / "first") == 0
    assert run(monkeypatch, *words, "--start", tmp_path / "first", "--out", tmp_path / "second") == 0
    first, second = (load_prior(tmp_path / name) for name in ("first", "second"))
    assert second.card.encoder == first.card.encoder == "small_tinyimagenet"
    assert second.card.widths == first.card.widths
    assert (first.card.notes["images_seen"], second.card.notes["images_seen"]) == (8, 16)
    assert all((second.embedding[name] == value).all() for name, value in first.embedding.items())


def test_errors_are_one_line(public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    train = ("prior", "train", public, "--out", tmp_path / "p")
    for words, status, message in (
        ((*train, "--size", "128"), 1, "16 to 64 pixels"),
        ((*train, "--size", "16", "--width", "12"), 2, "multiple of 8"),
        ((*train, "--size", "16", "--start", "nowhere"), 1, "there is no prior 'nowhere'"),
        (("plan", public, "--prior", "nowhere"), 1, "there is no prior 'nowhere'"),
        (("plan", public, "--prior", "tiny-imagenet", "--method", "dp-merf"), 2, "no parameter 'prior'"),
    ):
        assert run(monkeypatch, *words) == status
        error = capsys.readouterr().err
        assert message in " ".join(error.split())
        assert "Traceback" not in error
    assert not (tmp_path / "p").exists()


def test_an_interrupted_training_says_how_to_go_on(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(priors, "train_prior", interrupted)
    assert run(monkeypatch, "prior", "train", public, "--size", "16", "--out", tmp_path / "p") == 130
    assert "--resume" in capsys.readouterr().err


def test_a_run_with_a_prior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fewer_digits: ImageSet) -> None:
    """`synth` writes images and a certificate that names the prior."""
    prior = Path(__file__).parent / "priors" / "tiny.safetensors"
    save_images(fewer_digits, tmp_path / "digits.npz")
    options = ("--method", "dp-diffusion", "--prior", prior, "--set", "curriculum=false", "--set", "steps=2")
    words = ("synth", tmp_path / "digits.npz", *options, "--set", "sampling_prob=0.5", "--device", "cpu")
    assert run(monkeypatch, *words, "--out", tmp_path / "out", "-n", "10") == 0
    certificate = sf.Certificate.load(tmp_path / "out" / "certificate.json")
    assert certificate.public_facts["prior"]["sha256"] == load_prior(prior).sha256
    assert run(monkeypatch, "verify", tmp_path / "out") == 0


def test_the_options_have_the_defaults_of_the_training() -> None:
    defaults = PriorTraining()
    stated = (cli_prior.STEPS, cli_prior.BATCH_SIZE, cli_prior.WIDTH, cli_prior.LEVELS)
    assert stated == (defaults.steps, defaults.batch_size, defaults.widths[0], len(defaults.widths))
