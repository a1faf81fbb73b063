"""Structural checks: every certified method passes, every planted fault and every published form fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sfumato.audit.faults import FAULTS, fault_named
from sfumato.audit.neighbours import neighbours, small_set
from sfumato.audit.small_settings import SMALL_SETTINGS, small
from sfumato.audit.structural import check_structure, structure_to_dict
from sfumato.audit.white_box import white_box
from sfumato.methods.registry import METHODS
from sfumato.testing import RULES

PRIORS = Path(__file__).parents[1] / "priors"  # random weights; the second is conditioned on an embedding

# The rule that finds a fault. In `dp-merf` rows have norm 1 and there are no samples: other methods show two faults.
IN = {"no-clipping": "ndpdc", "shuffled": "ndpdc"}
FOUND_BY = {
    "half-noise": "noise",
    "no-noise": "seed",
    "no-clipping": "sensitivity",
    "private-mean": "sensitivity",
    "batch-statistics": "sensitivity",
    "no-charge": "charges",
    "shuffled": "sampling",
    "differentiable": "derivatives",
    "printed-loss": "printed text",
    "exact-counts": "outputs",
    "batch-norm": "control flow",
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_planted_fault_is_found_by_its_rule(name: str) -> None:
    fault = FAULTS[name]
    findings = check_structure(small(fault.method or IN.get(name, "dp-merf")), vault=fault.vault)
    assert [each.rule for each in findings if each.result == "fail"] == [FOUND_BY[name]]
    assert not structure_to_dict(findings)["sound"]
    assert fault.description.endswith(".")


@pytest.mark.parametrize("persons", [False, True])
def test_a_method_passes_without_a_fault(persons: bool) -> None:
    """`tests/test_testing.py` runs the same checks for every method."""
    findings = check_structure(small("dp-merf"), small_set(persons=persons))
    assert [each.rule for each in findings] == list(RULES)
    assert all(each.passed for each in findings)
    assert structure_to_dict(findings)["sound"]


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key, method in METHODS.items() if method.guarantee != "none"])
def test_every_certified_method_passes(key: str) -> None:
    assert all(each.passed for each in check_structure(small(key)))


@pytest.fixture(params=["tiny", "conditioned"])
def atelier_with_a_prior(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sfumato.methods.embedding_painter.MIN_IMAGES_PER_CLASS", 1)  # images, for a correction
    return small("atelier", prior=str(PRIORS / f"{request.param}.safetensors"))


@pytest.mark.slow
def test_atelier_with_a_prior_passes_and_fails_with_a_fault(atelier_with_a_prior: Any) -> None:
    """It fails by the rule of the fault, and by no other one."""
    assert all(each.passed for each in check_structure(atelier_with_a_prior))
    for name in ("half-noise", "private-mean"):
        findings = check_structure(atelier_with_a_prior, vault=FAULTS[name].vault)
        assert [each.rule for each in findings if each.result == "fail"] == [FOUND_BY[name]]


@pytest.mark.slow
def test_atelier_with_a_prior_stays_below_its_epsilon(atelier_with_a_prior: Any) -> None:
    """In white box; the bound is too large with a probability below 0.1 %."""

    def make(**params: Any) -> Any:
        return atelier_with_a_prior(**{"secure": False, "epsilon": 1.0, **params})

    bound = white_box(make, neighbours("outlier"), trials=1600).bounds(confidence=0.999).bound
    assert bound < 1.0
    assert white_box(make, neighbours("outlier"), trials=8000, vault=FAULTS["half-noise"].vault).bounds().bound > 1.0


@pytest.mark.parametrize("key", [key for key, method in METHODS.items() if method.guarantee == "none"])
def test_forms_without_guarantee_fail(key: str) -> None:
    failed = {each.rule for each in check_structure(small(key)) if each.result == "fail"}
    assert {"outputs", "raw images"} <= failed


def test_every_built_in_method_has_small_settings() -> None:
    built_in = {key for key, method in METHODS.items() if method.__module__.startswith("sfumato.")}
    assert built_in == set(SMALL_SETTINGS)


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="no fault 'full-noise'; there are half-noise"):
        fault_named("full-noise")
