"""The registry: what may be registered, and which folders `load` takes. Entry points: tests/examples/test_plugin.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import sfumato as sf
from sfumato.data import DataError, ImageSet
from sfumato.methods import registry
from sfumato.methods.base import FORMAT, Synthesizer
from sfumato.methods.dp_merf import MeanEmbedding
from sfumato.methods.registry import METHODS, choose, list_methods, register

QUICK: dict[str, Any] = {"features": 20, "steps": 2, "batch_size": 10, "device": "cpu"}


class Visitor(MeanEmbedding):
    """A method of another package."""

    key: ClassVar[str] = "visitor"


@pytest.fixture
def visitor() -> Iterator[type[Synthesizer]]:
    yield register(Visitor)
    METHODS.pop("visitor", None)


def test_a_registered_method_is_listed_and_created(visitor: type[Synthesizer]) -> None:
    assert [info.key for info in list_methods()].count("visitor") == 1
    assert type(sf.create("visitor")) is visitor
    with pytest.raises(ValueError, match="did you mean 'visitor'"):
        sf.create("visiter")


def test_a_key_belongs_to_one_class(visitor: type[Synthesizer]) -> None:
    """The same class twice is no conflict: a module may be imported again."""

    class Other(MeanEmbedding):
        key: ClassVar[str] = "visitor"

    assert register(visitor) is visitor
    with pytest.raises(ValueError, match=r"there is a method 'visitor' already \(Visitor\)"):
        register(Other)
    assert METHODS["visitor"] is visitor


def test_only_complete_methods_are_registered() -> None:
    class WithoutKey(MeanEmbedding):
        key: ClassVar[str] = None  # type: ignore[assignment]

    before = dict(METHODS)
    for bad in (Synthesizer, int, MeanEmbedding()):
        with pytest.raises(TypeError, match="not a complete subclass"):
            register(bad)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="WithoutKey has no 'key'"):
        register(WithoutKey)
    assert before == METHODS


@pytest.mark.parametrize(
    "config",
    [{"model_type": "unet", "hidden_size": 64}, {"format": FORMAT}, ["format"], "format", None],
    ids=["of another library", "only the format", "a list", "a text", "null"],
)
def test_a_folder_of_another_program_is_refused(config: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="does not hold a model of this package"):
        sf.load(tmp_path)


def test_a_model_of_a_method_that_is_not_installed_is_refused(
    visitor: type[Synthesizer], few_digits: ImageSet, tmp_path: Path
) -> None:
    visitor(epsilon=3.0, **QUICK).fit(few_digits, run_dir=tmp_path)
    assert type(sf.load(tmp_path, device="cpu")) is visitor
    del METHODS["visitor"]
    with pytest.raises(ValueError, match="there is no method 'visitor'"):
        sf.load(tmp_path, device="cpu")


def test_auto_chooses_by_public_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {
        (prior, channels): choose("cpu", prior=prior, channels=channels)
        for prior in ("", "p")
        for channels in (1, 3, None)
    }
    assert {key: choice.method for key, choice in chosen.items() if not key[0]} == {
        ("", 1): "dp-merf",
        ("", 3): "atelier",
        ("", None): "dp-merf",
    }
    assert {choice.method for key, choice in chosen.items() if key[0]} == {"atelier"}
    assert len({choice.reason for choice in chosen.values()}) == 4
    model = sf.create("auto", device="cpu", channels=3)
    assert (model.key, model.prior) == ("atelier", "")  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "chosen_device", lambda device: torch.device("cuda"))
    assert {choose(channels=channels).method for channels in (1, 3, None)} == {"atelier"}
