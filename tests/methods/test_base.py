"""The estimator: parameters, registry, saving, sampling."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sfumato as sf
from sfumato.data import DataError, ImageSet
from sfumato.engine import GradientVault
from sfumato.methods.base import NotFittedError, Synthesizer
from sfumato.methods.class_counts import allocate
from sfumato.methods.parameters import list_settings
from sfumato.methods.registry import METHODS, create
from sfumato.privacy import BudgetExceeded

QUICK: dict[str, Any] = {"features": 50, "steps": 2, "batch_size": 20, "device": "cpu"}


def test_a_preset_changes_no_budget_and_nothing_that_was_given(
    few_digits: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(METHODS["dp-merf"], "presets", {"tiny": {"steps": 3, "learning_rate": 1e-2}})
    model = sf.create("dp-merf", epsilon=3.0, preset="tiny", **QUICK)
    parameters = model.fit(few_digits).certificate_.parameters
    assert (parameters["steps"], parameters["learning_rate"]) == (QUICK["steps"], 1e-2)
    assert model.get_params()["learning_rate"] == 5e-3, "a fit changes no parameter"
    found = {setting.name: (setting.value, setting.source) for setting in model.settings(few_digits.public())}
    assert found["steps"] == (QUICK["steps"], "given")
    assert found["learning_rate"] == (1e-2, "preset tiny")
    assert found["delta"] == (1e-5, "default")
    with pytest.raises(ValueError, match="preset must be one of auto, default, tiny, got 'huge'"):
        sf.create("dp-merf", preset="huge")
    monkeypatch.setattr(METHODS["dp-merf"], "presets", {"tiny": {"epsilon": 30.0}})
    model = sf.create("dp-merf", preset="tiny", **QUICK)
    for act in (lambda: model.plan(few_digits.public()), lambda: model.fit(few_digits)):
        with pytest.raises(ValueError, match="must not change epsilon"):
            act()


@pytest.fixture(scope="module")
def fitted(few_digits: ImageSet) -> Synthesizer:
    return sf.create("dp-merf", epsilon=3.0, **QUICK).fit(few_digits)


def test_parameters_are_stored_and_set() -> None:
    model = sf.create("dp-merf", epsilon=2.0)
    assert model.get_params()["epsilon"] == 2.0
    assert model.set_params(steps=7).get_params()["steps"] == 7
    with pytest.raises(ValueError, match="did you mean 'steps'"):
        model.set_params(step=7)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"epsilom": 1}, "did you mean 'epsilon'"),
        ({"epsilon": 0}, "epsilon must be greater than 0"),
        ({"delta": 1.0}, "delta must lie"),
        ({"adjacency": "swap"}, "adjacency must be one of"),
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"steps": "many"}, "steps must be a whole number"),
        ({"steps": True}, "steps must be a whole number"),
        ({"learning_rate": "x"}, "learning_rate must be a number"),
        ({"ema": 0.5}, "has no parameter 'ema'"),
        ({"secure": 1}, "secure must be True or False"),
        ({"device": "gpu"}, "device must be"),
        ({"device": 3}, "device must be text"),
    ],
)
def test_bad_parameters_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sf.create("dp-merf", **params)


def test_constants_are_named_checked_and_recorded(few_digits: ImageSet) -> None:
    model = sf.create("dp-merf", epsilon=3.0, **QUICK).with_constants(ema=0.5, window=(0.1, 1.0))
    parameters = model.fit(few_digits).certificate_.parameters
    assert (parameters["ema"], parameters["window"]) == (0.5, [0.1, 1.0])
    assert "ema" not in model.get_params()
    for values, message in (
        ({"emma": 1}, "no constant 'emma'; it has .*ema"),
        ({"steps": 3}, "no constant 'steps'"),
        ({"ema": "x"}, "ema must be a number"),
        ({"window": (1,)}, "window must be 2 numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            sf.create("dp-merf").with_constants(**values)


def test_what_may_be_zero_may_not_be_less() -> None:
    assert sf.create("atelier", variety=0.0).get_params()["variety"] == 0
    with pytest.raises(ValueError, match="variety must be 0 or greater, got -1"):
        sf.create("atelier", variety=-1)
    with pytest.raises(ValueError, match="variety must be a number, got False"):
        sf.create("atelier", variety=False)


def test_presets_name_settings_of_their_method(few_digits: ImageSet) -> None:
    public = replace(few_digits.public(), shape=(1, 28, 28))  # not too small for the priors of the package
    for method in METHODS.values():
        names = {each.name for each in fields(method)}
        for name, values in method.presets.items():
            assert values.keys() <= names, (method.key, name)
            given = {"epsilon": math.inf} if method.key == "dm" else {}
            given |= {"prior": "random-process"} if name.startswith("prior") else {}
            method(**given, preset=name).plan(public)


def test_presets_apply_by_device_and_by_what_is_given(few_digits: ImageSet) -> None:
    public = few_digits.public()

    def settings(key: str, **params: Any) -> dict[str, Any]:
        return {setting.name: setting.value for setting in create(key, device="cpu", **params).settings(public)}

    assert settings("dp-kernel")["steps"] == METHODS["dp-kernel"].presets["cpu"]["steps"]
    assert settings("dp-kernel", steps=7)["steps"] == 7
    assert settings("dp-kernel", preset="default")["steps"] == 4500
    cold = METHODS["dp-lflow"].presets["no-warm-start"]
    assert settings("dp-lflow", warm="none")["steps"] == cold["steps"]
    assert settings("dp-lflow", warm="none", steps=7)["steps"] == 7
    assert settings("pge")["warm"] == "dp-merf"
    assert settings("pge", autoencoder="taef2")["warm"] == "none"
    assert settings("pge-as-published")["warm"] == "none"


@pytest.mark.parametrize("key", sorted(METHODS))
def test_what_a_plan_says_of_settings_names_settings(few_digits: ImageSet, key: str) -> None:
    public = replace(few_digits.public(), shape=(1, 28, 28))
    given = {"epsilon": math.inf} if key == "dm" else {}
    start = {"prior": "random-process"} if "prior" in create(key).get_params() else {}
    models = [create(key, **given, **start)]
    for name in ("auto", *METHODS[key].presets):
        models.append(create(key, **given, **(start if name.startswith("prior") else {}), preset=name))
    for model in models:
        listed = {each.name for each in list_settings(model, frozenset(), {})}
        known = listed | {name.partition(".")[0] for name in listed}
        assert model._resolved(public)._in_use(public).keys() <= known
        assert {each.name for each in model.settings(public)} <= listed


def test_the_class_and_the_registry_give_the_same_model() -> None:
    for key, method in METHODS.items():
        assert method().get_params() == create(key).get_params()


def test_the_default_method_is_that_of_the_device() -> None:
    assert create(device="cpu").key == "dp-merf"
    assert create(device="cuda").key == "atelier"
    with pytest.raises(ValueError, match="device must be"):
        create(device="abacus")


def test_unknown_methods_are_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'dp-merf'"):
        sf.create("dp-mref")
    with pytest.raises(ValueError, match="there are dp-merf"):
        sf.create("zzz")


def test_an_unfitted_model_says_so() -> None:
    with pytest.raises(NotFittedError, match="call fit first"):
        sf.create("dp-merf").sample(3)


def test_sampling(fitted: Synthesizer) -> None:
    assert fitted.sample(7).images.shape == (7, 1, 8, 8)
    assert fitted.sample(5, labels=2).labels.tolist() == [2] * 5  # type: ignore[union-attr]
    assert fitted.sample(5, labels="3").labels.tolist() == [3] * 5  # type: ignore[union-attr]
    assert fitted.sample(3, labels=[2, 0, 1]).labels.tolist() == [2, 0, 1]  # type: ignore[union-attr]
    assert torch.equal(fitted.sample(9, seed=1).images, fitted.sample(9, seed=1).images)
    for bad in ({"n": 0}, {"n": 2, "labels": [1]}, {"n": 2, "labels": 9}, {"n": 2, "labels": "x"}):
        with pytest.raises(ValueError, match=r"at least 1|labels|no class"):
            fitted.sample(**bad)  # type: ignore[arg-type]


def test_allocation_adds_up() -> None:
    for n in (1, 7, 100):
        labels = allocate(n, torch.tensor([3.0, -2.0, 1.5, 0.2]))
        assert len(labels) == n
        assert 1 not in labels
    assert torch.bincount(allocate(10, torch.zeros(5))).tolist() == [2] * 5


def test_saving_and_loading(fitted: Synthesizer, tmp_path: Path) -> None:
    again = sf.load(fitted.save(tmp_path / "model"), device="cpu")
    assert torch.equal(again.sample(9).images, fitted.sample(9).images)
    assert again.get_params() == fitted.get_params()
    assert again.certificate_ == fitted.certificate_
    assert not list(tmp_path.rglob("*.pkl"))


@pytest.mark.parametrize("damage", ["absent", "no-config", "not-json", "other-format", "0.1.0", "no-weights"])
def test_what_is_no_model_is_refused(damage: str, fitted: Synthesizer, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if damage != "absent":
        fitted.save(folder)
    config = folder / "config.json"
    if damage == "no-config":
        config.unlink()
    elif damage == "not-json":
        config.write_text("{")
    elif damage in ("other-format", "0.1.0"):
        version = "x" if damage == "other-format" else "sfumato-model/1"
        config.write_text(json.dumps({**json.loads(config.read_text()), "format": version}))
    elif damage == "no-weights":
        (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"of sfumato 0\.1\.0; fit again" if damage == "0.1.0" else r"model|format"):
        sf.load(folder)


def test_networks_of_another_version_are_refused_in_words(
    fitted: Synthesizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fitted.save(tmp_path / "model")
    other = torch.nn.Linear(1, 1)
    monkeypatch.setattr(type(fitted), "_restore", lambda self, public, state: other.load_state_dict(state))
    with pytest.raises(DataError, match="not those of this version; fit again"):
        sf.load(folder, device="cpu")


def test_a_run_folder_is_used_once(few_digits: ImageSet, tmp_path: Path) -> None:
    model = sf.create("dp-merf", epsilon=3.0, **QUICK).fit(few_digits, run_dir=tmp_path)
    with pytest.raises(DataError, match="holds a run already"):
        sf.create("dp-merf", epsilon=3.0, **QUICK).fit(few_digits, run_dir=tmp_path)
    with pytest.raises(DataError, match="holds a finished run"):
        sf.create("dp-merf", epsilon=3.0, **QUICK).fit(few_digits, run_dir=tmp_path, resume=True)
    assert torch.equal(model.sample(5).images, sf.load(tmp_path, device="cpu").sample(5).images)


def interrupted(images: ImageSet, folder: Path, monkeypatch: pytest.MonkeyPatch, **params: Any) -> None:
    """A run that is stopped when its first result was handed out."""
    answer = GradientVault._answer

    def stop(*args: Any) -> torch.Tensor:
        answer(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GradientVault, "_answer", stop)
        with pytest.raises(KeyboardInterrupt):
            sf.create("dp-merf", **{**QUICK, **params}).fit(images, run_dir=folder)


def test_an_interrupted_run_is_resumed_with_equal_settings_only(
    few_digits: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(few_digits, tmp_path, monkeypatch, epsilon=3, learning_rate=0.005)
    same = {**QUICK, "epsilon": 3.0, "learning_rate": 5e-3}
    with pytest.raises(DataError, match="holds a run already"):
        sf.create("dp-merf", **same).fit(few_digits, run_dir=tmp_path)
    for other, field in (({"epsilon": 4.0}, "epsilon"), ({"features": 51}, "parameters"), ({"delta": 1e-6}, "delta")):
        with pytest.raises(sf.LedgerError, match=f"another {field}"):
            sf.create("dp-merf", **{**same, **other}).fit(few_digits, run_dir=tmp_path, resume=True)
    model = sf.create("dp-merf", **same).fit(few_digits, run_dir=tmp_path, resume=True)
    assert sf.verify(tmp_path / "certificate.json").ok
    assert [event["times"] for event in model.certificate_.events] == [1, 1]
    assert not (tmp_path / "releases.log").exists()


def test_a_model_that_its_certificate_does_not_cover_is_refused(fitted: Synthesizer, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        folder = fitted.save(tmp_path / name)
        data = bytearray((folder / name).read_bytes())
        data[-2:] = b" }" if name == "config.json" else bytes([data[-2] ^ 1, data[-1]])
        (folder / name).write_bytes(data)
        with pytest.raises(DataError, match="not the file that the run's certificate covers"):
            sf.load(folder, device="cpu")


def test_a_plan_that_fails_leaves_no_ledger(tmp_path: Path) -> None:
    large = ImageSet(torch.zeros(4, 1, 200, 200).byte(), torch.arange(4) % 2, ("a", "b"))
    with pytest.raises(DataError, match="--size"):
        sf.create("dp-merf", **QUICK).fit(large, run_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_fit_leaves_no_stale_certificate(
    few_digits: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sf.create("dp-merf", epsilon=0.5, **QUICK).fit(few_digits)
    model.set_params(epsilon=50.0)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(model), "_fit_generator", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.fit(few_digits)
    with pytest.raises(NotFittedError):
        model.save(tmp_path)


def test_a_vault_outlives_no_fit(few_digits: ImageSet) -> None:
    """A method that keeps its vault cannot spend after the certificate was made."""
    kept: list[Any] = []

    class Late(sf.methods.dp_merf.MeanEmbedding):  # type: ignore[name-defined, misc]
        def _fit(self, vault: Any, public: Any) -> None:
            kept.append(vault)
            super()._fit(vault, public)

    Late(epsilon=3.0, **QUICK).fit(few_digits)
    with pytest.raises((BudgetExceeded, sf.LedgerError)):
        kept[0].counts()
    with pytest.raises(sf.LedgerError, match="closed"):
        kept[0].unprotected("late")


def test_no_noise_is_said_plainly(few_digits: ImageSet, tmp_path: Path) -> None:
    model = sf.create("dp-merf", epsilon=math.inf, **QUICK).fit(few_digits, run_dir=tmp_path)
    assert model.certificate_.guarantee == "none"
    assert sf.load(tmp_path).get_params()["epsilon"] == math.inf
    assert not sf.verify(tmp_path / "certificate.json").ok
    assert sf.verify(tmp_path / "certificate.json", allow_none=True).ok


def test_fitting_leaves_the_users_generator_alone(few_digits: ImageSet) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    sf.create("dp-merf", epsilon=3.0, **QUICK).fit(few_digits).sample(3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("left", ["releases.log", "checkpoint.safetensors"])
def test_results_of_another_run_are_refused(
    left: str, few_digits: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run at epsilon 50 is stopped and its ledger deleted: its results must not be certified for epsilon 0.1."""
    with monkeypatch.context() as patch:
        patch.setattr("sfumato.methods.dp_merf.refresh_batch_norm", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sf.create("dp-merf", epsilon=50.0, **QUICK).fit(few_digits, run_dir=tmp_path)
    assert (tmp_path / left).stat().st_size > 0
    for path in tmp_path.iterdir():
        if path.name != left:
            path.unlink()
    with pytest.raises(sf.LedgerError, match=r"not charged for|another run"):
        sf.create("dp-merf", epsilon=0.1, **QUICK).fit(few_digits, run_dir=tmp_path)


def test_a_saved_model_is_not_overwritten_by_a_run(fitted: Synthesizer, few_digits: ImageSet, tmp_path: Path) -> None:
    fitted.save(tmp_path)
    with pytest.raises(DataError, match="holds a saved model"):
        sf.create("dp-merf", **QUICK).fit(few_digits, run_dir=tmp_path)


def test_presets_of_unknown_settings_are_refused(few_digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS["dp-merf"], "presets", {"tiny": {"step": 3}})
    with pytest.raises(ValueError, match="names 'step', which is no setting"):
        sf.create("dp-merf", preset="tiny", **QUICK).plan(few_digits.public())


def test_what_is_assigned_is_used(few_digits: ImageSet) -> None:
    model: Any = create("dp-lflow", device="cpu")
    model.steps = 77
    found = {setting.name: (setting.value, setting.source) for setting in model.settings(few_digits.public())}
    assert found["steps"] == (77, "given")
    assert found["sampling_prob"] == (0.1, "preset cpu")
