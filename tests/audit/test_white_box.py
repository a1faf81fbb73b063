"""White-box audits: below epsilon for methods, close to it in power, above it for planted faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sfumato.audit import white_box as module
from sfumato.audit.faults import FAULTS, HalfNoise
from sfumato.audit.mechanism import audit_mechanism
from sfumato.audit.neighbours import KINDS, neighbours, small_set
from sfumato.audit.reference import SmallClassifier
from sfumato.audit.small_settings import SMALL_SETTINGS, small
from sfumato.audit.white_box import exact_sums, white_box
from sfumato.methods.registry import METHODS
from sfumato.testing import check_synthesizer

CERTIFIED = [key for key in SMALL_SETTINGS if METHODS[key].guarantee != "none"]


@pytest.mark.parametrize("true", [1.0, 4.0])
def test_the_mechanism_is_audited_to_80_percent(true: float) -> None:
    """With default settings: fractions of a second. It exceeds the truth with a probability of 5 %, by little."""
    found = audit_mechanism(true)
    assert 0.8 * true < found.gaussian < 1.03 * true
    assert found.clopper_pearson < true


def test_the_discrete_mechanism_is_audited() -> None:
    assert 0.7 * 4 < audit_mechanism(4.0, secure=True).gaussian < 4.2


@pytest.mark.parametrize("secure", [False, True])
def test_half_of_the_noise_is_shown_for_the_mechanism(secure: bool) -> None:
    found = audit_mechanism(1.0, secure=secure, vault=HalfNoise)
    assert found.gaussian > 1.5
    if not secure:  # the discrete form has a tenth of the trials: its bound without an assumption is at times below 1
        assert found.clopper_pearson > 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_differ_by_one_unit_and_move_each_sum_in_full(kind: str) -> None:
    pair = neighbours(kind)
    units = [
        len(part) if part.persons is None else len(part.persons.unique()) for part in (pair.with_unit, pair.without)
    ]
    assert units[0] == units[1] + 1
    assert len(pair.canaries) == len(pair.with_unit) - len(pair.without)
    for with_unit, without in zip(*exact_sums(small("dp-merf", secure=False), pair, seed=0), strict=True):
        moved = float((with_unit.exact - without.exact).norm()) / with_unit.sensitivity
        assert moved == pytest.approx(1.0, abs=1e-3)


def test_unknown_neighbours_are_refused() -> None:
    with pytest.raises(ValueError, match="there are worst-case, outlier, mislabelled"):
        neighbours("twin")


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_is_audited_close_to_its_epsilon(kind: str) -> None:
    found = white_box(small("dp-merf", secure=False, epsilon=4.0), neighbours(kind), trials=16_000).bounds()
    assert 0.8 * 4 < found.gaussian < 4.15
    assert found.clopper_pearson < 4


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.statistical])
def test_a_planted_fault_is_shown_with_confidence(name: str) -> None:
    """The lower bound exceeds the epsilon that the faulty program claims."""
    make, trials = small("dp-merf", secure=False, epsilon=1.0), 8000
    if (
        name == "no-clipping"
    ):  # rows of dp-merf are no longer than the clipping norm; those of ndpdc are ten times this one
        make, trials = small("ndpdc", secure=False, epsilon=1.0, bound=0.1), 2000
    pair = neighbours("duplicate" if name == "batch-statistics" else "outlier")
    faulty = white_box(make, pair, trials=trials, vault=FAULTS[name].vault)
    assert faulty.bounds().bound > 1.0


def test_without_a_fault_the_bound_stays_below() -> None:
    """The bound is too large with a probability below 0.1 %."""
    found = white_box(small("dp-merf", secure=False, epsilon=1.0), neighbours("outlier"), trials=4000)
    assert found.bounds(confidence=0.999).bound < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 10.0])
@pytest.mark.parametrize("key", CERTIFIED)
def test_every_certified_method_stays_below_its_epsilon(key: str, epsilon: float) -> None:
    found = white_box(small(key, secure=False, epsilon=epsilon), neighbours("outlier"), trials=4000)
    assert found.bounds(confidence=0.999).gaussian <= epsilon


def test_gradients_of_the_worst_case_are_as_long_as_the_bound() -> None:
    """A real image's gradient may be short; the canary's is stretched, and then clipped by the vault.

    Little noise: much of it can drive the weights to where the canary's gradient is zero.
    """
    lengths = {}
    for kind in ("outlier", "worst-case"):
        pairs = zip(*exact_sums(small(SmallClassifier, epsilon=100.0), neighbours(kind), seed=0), strict=True)
        lengths[kind] = [float((a.exact - b.exact).norm()) / a.sensitivity for a, b in pairs]
    assert lengths["worst-case"] == pytest.approx([1.0] * 50, abs=2e-3)
    assert min(lengths["outlier"]) < 0.9


@pytest.mark.parametrize("key", ["dp-lflow", "dp-mepf"])
def test_the_worst_case_stays_within_the_sensitivity(key: str) -> None:
    """Groups with bounds of their own, and features of mapped images."""
    for a, b in zip(*exact_sums(small(key, secure=False), neighbours("worst-case"), seed=0), strict=True):
        assert float((a.exact - b.exact).norm()) / a.sensitivity == pytest.approx(1.0, abs=2e-3)


def test_the_worst_case_shows_missing_clipping_that_an_image_does_not() -> None:
    """Features of dp-merf have norm 1: an image cannot show that nothing clips them."""
    moved = {}
    for kind in ("outlier", "worst-case"):
        pairs = zip(
            *exact_sums(small("dp-merf"), neighbours(kind), seed=0, vault=FAULTS["no-clipping"].vault), strict=True
        )
        moved[kind] = max(float((a.exact - b.exact).norm()) / a.sensitivity for a, b in pairs)
    assert moved["outlier"] < 1.01
    assert moved["worst-case"] > 100


@pytest.mark.slow
def test_dp_sgd_is_audited_to_half_of_its_epsilon() -> None:
    found = white_box(small(SmallClassifier, epsilon=4.0), neighbours("worst-case"), trials=8000).bounds()
    assert 2.0 < found.gaussian < 4.0


@pytest.mark.slow
def test_the_reference_is_a_sound_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, SmallClassifier.key, SmallClassifier)  # it is not for users
    check_synthesizer(small(SmallClassifier, steps=3), small_set())


def test_ctrl_c_keeps_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = module.score_trials

    def interrupted(*given: Any) -> np.ndarray:
        calls.append(1)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return original(*given)

    monkeypatch.setattr(module, "score_trials", interrupted)
    found = white_box(small("dp-merf", secure=False), neighbours("outlier"), trials=8000)
    assert found.interrupted
    assert [len(part) for part in found.present] == [1000, 1000]
    assert found.bounds().trials == 1500


def test_time_is_bounded() -> None:
    found = white_box(small("dp-merf", secure=False), neighbours("outlier"), trials=8000, seconds=0)
    assert found.interrupted
    assert len(found.present) == 1


def test_what_cannot_be_audited_in_white_box_is_refused() -> None:
    with pytest.raises(ValueError, match="add-remove"):
        white_box(small("dp-merf", adjacency="replace-one"), neighbours("outlier"))
    with pytest.raises(ValueError, match="no noised releases"):
        white_box(small("pge-as-published"), neighbours("outlier"))
