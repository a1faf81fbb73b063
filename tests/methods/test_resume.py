"""Every method goes on after an interruption: nothing is paid or drawn twice, and the model is the same."""

from __future__ import annotations

import math
import os
import random
import signal
import time
import traceback
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import opendp.prelude  # noqa: F401  (before a fork)
import pytest
import torch

import sfumato as sf
from sfumato.data import DataError, ImageSet
from sfumato.engine import GradientVault
from sfumato.methods import base as base_module
from sfumato.methods import checkpoints as module
from sfumato.methods.base import Synthesizer
from sfumato.methods.checkpoints import Checkpoints
from sfumato.methods.dp_lflow import LatentFlow
from sfumato.methods.generator_method import GeneratorSizes
from sfumato.methods.kernel_painter import PainterSettings
from sfumato.methods.pge import SamplerSettings
from sfumato.methods.prior_painter import PainterTraining
from sfumato.methods.teacher import TeacherSettings
from sfumato.methods.tuned import ScoringSettings
from sfumato.methods.warm_start import WarmStartSettings
from sfumato.privacy import Ledger, Release
from sfumato.testing import build

SIZES = GeneratorSizes(width=8)
PRIOR = str(Path(__file__).parents[1] / "priors" / "tiny.safetensors")  # random weights
CONDITIONED = str(Path(PRIOR).with_name("conditioned.safetensors"))  # also random, with an embedding
ADAPTATION = PainterTraining(pool=12, rounds=2, practice_steps=3, practice_batch=4, levels=2)
PAINTER = PainterSettings(features=20, features_per_step=10, cnn_images=20)
SMALL: dict[str, dict[str, Any]] = {
    "dp-merf": {"features": 60, "steps": 12, "batch_size": 20},
    "dp-mepf": {"encoder": "scattering", "steps": 6, "batch_size": 20, "snapshots": 1, "generator": SIZES},
    "dp-kernel": {"steps": 9, "paths": 3, "batch_size": 40, "painter": PAINTER, "generator": SIZES},
    "atelier": {
        "steps": 6,
        "paths": 2,
        "batch_size": 20,
        "painter": replace(PAINTER, common_share=0.5),
        "teacher": TeacherSettings(steps=6, cnn_images=20),
        "generator": SIZES,
    },
    "dp-diffusion": {"prior": PRIOR, "steps": 4, "sampling_prob": 0.5, "adaptation": ADAPTATION},
    "private-evolution": {"prior": PRIOR, "rounds": 2, "candidates": 3, "adaptation": ADAPTATION},
    "dp-lflow": {
        "warm": "none", "steps": 8, "sampling_prob": 0.5, "code": 3, "width": 2, "couplings": 1, "hidden": 4,
        "procedural_batches": 2,
    },
    "pge": {
        "warm": "none", "steps": 6, "sampling_prob": 0.3, "width": 8,
        "sampling": SamplerSettings(levels=2, leapfrogs=1),
    },
    "ndpdc": {"images_per_class": 6, "iterations": 8, "width": 8, "sampling_prob": 0.5, "passes": 2},
    "ldpdc": {"images_per_class": 6, "sampling_prob": 0.5},
    "dpmix": {"images_per_class": 6, "sampling_prob": 0.5},
    "tuned": {
        "base": "dp-merf",
        "grid": '[{"features": 60, "steps": 6, "batch_size": 20}, {"features": 40, "steps": 4, "batch_size": 20}]',
        "scoring": ScoringSettings(images=20, epochs=1),
    },
}  # fmt: skip
NOT_PRIVATE: dict[str, dict[str, Any]] = {
    "dm": {"epsilon": math.inf, "images_per_class": 3, "iterations": 8, "batch_size": 4, "width": 8},
    "dp-kernel-as-published": {"steps": 8, "generator": SIZES},
    "pge-as-published": {"steps": 8, "width": 8, "sampling": SamplerSettings(levels=2, leapfrogs=1)},
}


class WarmFlow(LatentFlow):
    """A flow that begins with the images of a small dp-merf."""

    warm_parameters = {"features": 20, "steps": 6, "batch_size": 20}  # noqa: RUF012


def small(key: str, **params: Any) -> Synthesizer:
    if key == "warm flow":
        own = {"warm": "dp-merf", "warm_start": WarmStartSettings(images=40, steps=6, batch_size=4)}
        return build(WarmFlow, **{**SMALL["dp-lflow"], "device": "cpu", "epsilon": 10.0, **own, **params})
    if key in PRIORS:
        own = {**SMALL["dp-diffusion"], "prior": PRIORS[key], "teacher": TeacherSettings(steps=4)}
        return build("atelier", **{"device": "cpu", "epsilon": 10.0, **own, **params})
    return build(key, **{"device": "cpu", "epsilon": 10.0, **(SMALL | NOT_PRIVATE)[key], **params})


PRIORS = {"atelier with a prior": PRIOR, "atelier with a conditioned prior": CONDITIONED}
METHODS = [
    *SMALL,
    "warm flow",
    pytest.param("atelier with a prior", marks=pytest.mark.slow),  # the curriculum of dp-diffusion, atelier's teacher
    "atelier with a conditioned prior",
]


def assert_finished(folder: Path, model: Synthesizer, images: ImageSet, *, clean: bool = True) -> None:
    """The run is whole: one opening, charges within the plan, nothing left that served to resume it."""
    plan = model.plan(model.public_facts(images))
    assert sf.verify(folder / "certificate.json").ok
    with Ledger(folder / "ledger.jsonl") as ledger:
        kinds = Counter(entry["kind"] for entry in ledger.entries)
        assert kinds["open"] == 1
        assert kinds["unprotected"] == 0
        for release in plan.releases:
            assert ledger.charged(release.name) <= release.times
    certificate = sf.Certificate.load(folder / "certificate.json")
    assert certificate.epsilon is not None
    assert certificate.epsilon <= model.epsilon
    if clean:
        assert not (folder / "releases.log").exists()
        assert not (folder / "checkpoint.safetensors").exists()
        assert not list(folder.glob("*.partial"))
    sf.load(folder, device="cpu").sample(4)


# -- interrupted on purpose ---------------------------------------------------------------------------------


class Interrupter:
    """Stops a fit after its event of that number: a result that was handed out, or a state that was stored."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.stages: list[str] = []  # of the events: the name of the loop whose state was stored, else ""
        self.drawn: Counter[tuple[str, int]] = Counter()
        self.stop_after: int | None = None
        self._current = ("", 0)
        answer, keep = GradientVault._answer, Checkpoints._keep

        def answered(vault: GradientVault, *args: Any) -> torch.Tensor:
            result = answer(vault, *args)
            self._happened("result", "")
            return result

        def stored(checkpoints: Checkpoints, *args: Any) -> None:
            keep(checkpoints, *args)
            self._happened("state", args[0])

        def exact(vault: GradientVault, release: Release, total: torch.Tensor, *_: Any) -> torch.Tensor:
            self.drawn[release.name, vault._asked[release.name] - 1] += 1
            return total.double()

        def sample(vault: GradientVault, release: Release, *_: Any) -> torch.Tensor:
            self._current = release.name, vault._asked[release.name] - 1
            generator = torch.Generator().manual_seed(self._seed(0))
            there = torch.rand(vault._units, generator=generator) < release.sampling_prob
            return vault._chosen[there[vault._unit_of[vault._chosen]]]

        def normals(vault: GradientVault, index: torch.Tensor, count: int) -> torch.Tensor:
            own = [torch.Generator().manual_seed(self._seed(2 + int(record))) for record in index.flatten()]
            return torch.stack([torch.randn(count, generator=each) for each in own])

        monkeypatch.setattr(GradientVault, "_answer", answered)
        monkeypatch.setattr(Checkpoints, "_keep", stored)
        monkeypatch.setattr(GradientVault, "_noised", exact)
        monkeypatch.setattr(GradientVault, "_drawn", sample)
        monkeypatch.setattr(GradientVault, "_normals", normals)
        for place in ("vault", "sampling"):  # sums are then the same to the bit
            monkeypatch.setattr(f"sfumato.privacy.{place}.shuffled", lambda index, *_: index, raising=False)

    def _seed(self, more: int) -> int:
        return zlib.crc32(repr((*self._current, more)).encode())

    def _happened(self, what: str, stage: str) -> None:
        self.events.append(what)
        self.stages.append(stage)
        if len(self.events) == self.stop_after:
            raise KeyboardInterrupt

    def begin(self, stop_after: int | None) -> None:
        self.events, self.stages, self.stop_after = [], [], stop_after


def assert_same_model(one: Synthesizer, other: Synthesizer) -> None:
    a, b = one._state(), other._state()
    assert a.keys() == b.keys()
    for name in a:
        if name.endswith("num_batches_tracked"):  # a number that nothing depends on
            continue
        assert a[name].shape == b[name].shape
        assert torch.allclose(a[name].double(), b[name].double(), rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("key", [*SMALL, "warm flow"])  # each stage of atelier with a prior: the next test
@pytest.mark.parametrize("parts", [(0, 1 / 2, 1), pytest.param((1 / 8, 1 / 4, 3 / 4), marks=pytest.mark.slow)])
def test_a_resumed_run_asks_for_no_result_twice_and_ends_with_the_same_model(
    parts: tuple[float, ...], key: str, fewer_digits: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after its first event, in the middle, and before its last event; slow: at three more places."""
    monkeypatch.setattr(module, "INTERVALS", 2)  # so that results are answered from the log, too
    interrupter = Interrupter(monkeypatch)
    interrupter.begin(None)
    whole = small(key).fit(fewer_digits, run_dir=tmp_path / "whole")
    total, results = len(interrupter.events), dict(interrupter.drawn)
    assert set(results.values()) == {1}
    assert_finished(tmp_path / "whole", whole, fewer_digits)
    for stop in sorted({max(1, min(int(part * total), total - 1)) for part in parts}):
        folder = tmp_path / f"stopped {stop}"
        interrupter.drawn.clear()
        interrupter.begin(stop)
        with pytest.raises(KeyboardInterrupt):
            small(key).fit(fewer_digits, run_dir=folder)
        interrupter.begin(None)
        resumed = small(key).fit(fewer_digits, run_dir=folder, resume=True)
        assert dict(interrupter.drawn) == results, stop  # each once, over both runs
        assert_finished(folder, resumed, fewer_digits)
        assert_same_model(whole, resumed)


STAGES = ["teacher", "moments", "common moments", "gradients", "correction"]


def test_atelier_with_a_conditioned_prior_goes_on_from_each_stage(
    fewer_digits: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after the first state of a stage: in the middle of it, if there are more."""
    key = "atelier with a conditioned prior"
    monkeypatch.setattr("sfumato.methods.embedding_painter.MIN_IMAGES_PER_CLASS", 1)  # images, for a correction
    interrupter = Interrupter(monkeypatch)
    interrupter.begin(None)
    whole = small(key).fit(fewer_digits, run_dir=tmp_path / "whole")
    results, stages = dict(interrupter.drawn), list(interrupter.stages)
    assert list(dict.fromkeys(filter(None, stages))) == STAGES
    for stage in STAGES:
        folder, stop = tmp_path / stage, stages.index(stage) + 1
        assert (stages.count(stage) > 1) == ("moments" not in stage)
        interrupter.drawn.clear()
        interrupter.begin(stop)
        with pytest.raises(KeyboardInterrupt):
            small(key).fit(fewer_digits, run_dir=folder)
        interrupter.begin(None)
        resumed = small(key).fit(fewer_digits, run_dir=folder, resume=True)
        assert list(filter(None, interrupter.stages)) == list(filter(None, stages[stop:]))  # nothing is done twice
        assert dict(interrupter.drawn) == results
        assert_finished(folder, resumed, fewer_digits)
        assert_same_model(whole, resumed)


@pytest.mark.parametrize("key", NOT_PRIVATE)
def test_a_method_without_guarantee_goes_on_from_its_last_state(
    key: str, fewer_digits: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for no results, so nothing is answered from the log. Both fits stay without a guarantee."""
    monkeypatch.setattr(module, "INTERVALS", 4)
    interrupter = Interrupter(monkeypatch)
    interrupter.begin(None)
    whole = small(key).fit(fewer_digits, run_dir=tmp_path / "whole")
    assert interrupter.events == ["state"] * 4
    for stop in (1, 3, 4):
        folder = tmp_path / f"stopped {stop}"
        interrupter.begin(stop)
        with pytest.raises(KeyboardInterrupt):
            small(key).fit(fewer_digits, run_dir=folder)
        interrupter.begin(None)
        resumed = small(key).fit(fewer_digits, run_dir=folder, resume=True)
        assert interrupter.events == ["state"] * (4 - stop)  # finished steps are not repeated
        assert_same_model(whole, resumed)
        assert not (folder / "checkpoint.safetensors").exists()
        verified = sf.verify(folder / "certificate.json", allow_none=True)
        assert verified.ok, verified.problems
        assert (verified.guarantee, verified.epsilon) == ("none", None)
        assert not sf.verify(folder / "certificate.json").ok
        with Ledger(folder / "ledger.jsonl") as ledger:
            assert {entry["kind"] for entry in ledger.entries} == {"open", "unprotected"}
    assert not interrupter.drawn


@pytest.mark.parametrize("key", ["dp-kernel", "pge", "ndpdc", "warm flow"])
def test_a_run_may_be_interrupted_at_every_step(
    key: str, fewer_digits: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again, after two events each time, until it ends."""
    monkeypatch.setattr(module, "INTERVALS", 3)
    interrupter = Interrupter(monkeypatch)
    interrupter.begin(None)
    whole, results = small(key).fit(fewer_digits, run_dir=tmp_path / "whole"), dict(interrupter.drawn)
    interrupter.drawn.clear()
    for attempt in range(200):
        interrupter.begin(2 + attempt)
        try:
            resumed = small(key).fit(fewer_digits, run_dir=tmp_path / "run", resume=True)
            break
        except KeyboardInterrupt:
            continue
    assert attempt > 2
    assert dict(interrupter.drawn) == results
    assert_finished(tmp_path / "run", resumed, fewer_digits)
    assert_same_model(whole, resumed)


def test_a_checkpoint_that_is_gone_is_noticed(
    fewer_digits: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results were handed out and forgotten: they are not drawn again."""
    interrupter = Interrupter(monkeypatch)
    interrupter.begin(8)
    with pytest.raises(KeyboardInterrupt):
        small("pge").fit(fewer_digits, run_dir=tmp_path / "run")
    assert "state" in interrupter.events
    interrupter.begin(None)
    (tmp_path / "run" / "checkpoint.safetensors").unlink()
    with pytest.raises(sf.LedgerError, match="handed out"):
        small("pge").fit(fewer_digits, run_dir=tmp_path / "run", resume=True)


def test_a_finished_run_is_not_resumed(fewer_digits: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was killed when all was written, before it tidied up."""

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(base_module, "remove_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            small("dp-merf").fit(fewer_digits, run_dir=tmp_path)
    with pytest.raises(DataError, match="finished run"):
        small("dp-merf").fit(fewer_digits, run_dir=tmp_path, resume=True)
    assert_finished(tmp_path, small("dp-merf"), fewer_digits, clean=False)


@pytest.mark.parametrize("key", ["pge", "atelier with a conditioned prior", *NOT_PRIVATE])
def test_a_fault_is_found(key: str, fewer_digits: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that forgets to restore its state: the tests above can fail."""
    monkeypatch.setattr(module, "INTERVALS", 2)
    interrupter = Interrupter(monkeypatch)
    interrupter.begin(None)
    whole = small(key).fit(fewer_digits, run_dir=tmp_path / "whole")
    interrupter.begin(max(1, len(interrupter.events) - 2))
    with pytest.raises(KeyboardInterrupt):
        small(key).fit(fewer_digits, run_dir=tmp_path / "run")
    monkeypatch.setattr(module, "restore", lambda part, state: None)
    interrupter.begin(None)
    resumed = small(key).fit(fewer_digits, run_dir=tmp_path / "run", resume=True)
    with pytest.raises(AssertionError):
        assert_same_model(whole, resumed)


# -- killed at any instant ------------------------------------------------------------------------------------


def fit_in_a_child(key: str, images: ImageSet, folder: Path, after: float | None) -> int | None:
    """Fit in a forked process, killed after so many seconds; return its exit status, None if it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            null = os.open(os.devnull, os.O_RDWR)
            for standard in (0, 1, 2):
                os.dup2(null, standard)
            small(key).fit(images, run_dir=folder, resume=True)
            code = 0
        except BaseException:
            (folder.parent / "error.txt").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    until = None if after is None else time.monotonic() + after
    while until is None or time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def kill_and_resume(key: str, images: ImageSet, folder: Path, kills: int, seed: int) -> None:
    instants = random.Random(seed)
    for _ in range(kills):
        if (folder / "certificate.json").exists():
            break
        status = fit_in_a_child(key, images, folder, instants.uniform(0.01, 0.6))
        assert status in (0, None), (folder.parent / "error.txt").read_text()
    if not (folder / "certificate.json").exists():
        status = fit_in_a_child(key, images, folder, None)
        assert status == 0, (folder.parent / "error.txt").read_text()
    assert_finished(folder, small(key), images, clean=status == 0)


@pytest.mark.parametrize("key", METHODS)
def test_a_run_that_is_killed_goes_on(key: str, fewer_digits: ImageSet, tmp_path: Path) -> None:
    kill_and_resume(key, fewer_digits, tmp_path / "run", kills=3, seed=random.SystemRandom().randrange(10**6))


@pytest.mark.slow
@pytest.mark.parametrize("key", METHODS)
def test_runs_that_are_killed_at_a_hundred_instants_go_on(key: str, fewer_digits: ImageSet, tmp_path: Path) -> None:
    for number in range(4):
        kill_and_resume(key, fewer_digits, tmp_path / str(number) / "run", kills=3, seed=number)
