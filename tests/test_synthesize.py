"""`synthesize`: checks before any privacy budget is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sfumato as sf
from sfumato.certificate.dataset_budget import DatasetBudget
from sfumato.data import DataError, ImageSet
from sfumato.synthesize import check_output, check_sources, synthesize


@pytest.mark.parametrize("present", [False, True])
def test_incompatible_test_sets_are_refused_by_public_facts_alone(
    present: bool, few_digits: ImageSet, tmp_path: Path
) -> None:
    """The refusal must not depend on whether the private set has an image of a class."""
    last = len(few_digits) - 1  # the only image of its class
    private = few_digits if present else few_digits.subset(torch.arange(last))
    assert few_digits.labels is not None
    known = few_digits.labels < 3
    test = ImageSet(few_digits.images[known], few_digits.labels[known], few_digits.classes[:3])
    with pytest.raises(DataError, match="the test set does not have the classes"):
        synthesize(sf.create("dp-merf"), private, tmp_path / "out", number=10, test=test)
    assert not (tmp_path / "out").exists()


def test_an_output_folder_is_checked(tmp_path: Path) -> None:
    check_output(tmp_path / "new")
    (tmp_path / "new" / "ledger.lock").write_text("000000000000\n")  # a run that was killed before its first line
    (tmp_path / "new" / "ledger.jsonl").touch()
    check_output(tmp_path / "new")
    (tmp_path / "new" / "ledger.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="--resume"):
        check_output(tmp_path / "new")
    check_output(tmp_path / "new", resume=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(DataError, match="not empty"):
        check_output(tmp_path / "full")


def test_the_private_source_is_refused_as_test_source(tmp_path: Path) -> None:
    (tmp_path / "scans").mkdir()
    check_sources("digits", "train", "digits")  # another split of the same set
    check_sources("digits", "test", "mnist")
    for private, test in (("digits", "digits"), (f"{tmp_path}/scans", f"{tmp_path}/scans/../scans")):
        with pytest.raises(DataError, match="the private set itself"):
            check_sources(private, "test", test)


def test_a_finished_run_is_resumed_with_its_own_settings_only(few_digits: ImageSet, tmp_path: Path) -> None:
    options: dict[str, Any] = {"features": 50, "steps": 2, "batch_size": 20, "device": "cpu"}
    synthesize(sf.create("dp-merf", epsilon=3.0, **options), few_digits, tmp_path / "run", number=20)
    (tmp_path / "run" / "scans.json").write_text("private")  # a file of somebody else is not certified
    again = synthesize(
        sf.create("dp-merf", epsilon=3.0, **options), few_digits, tmp_path / "run", number=30, resume=True
    )
    assert again.number == 30
    assert "scans.json" not in again.certificate.outputs
    assert sf.verify(tmp_path / "run" / "certificate.json").uncovered == ["scans.json"]
    budget = tmp_path / "b.budget"
    DatasetBudget.open(budget, 10.0, 1e-5)
    for model, given, message in (
        (sf.create("dp-merf", epsilon=2.0, **options), {}, "another epsilon"),
        (sf.create("dp-merf", epsilon=3.0, **{**options, "steps": 3}), {}, "another steps"),
        (sf.create("ldpdc", epsilon=3.0), {}, "another method"),
        (sf.create("dp-merf", epsilon=3.0, **options), {"budget": budget}, "not charged to this budget"),
    ):
        with pytest.raises(sf.DataError, match=message):
            synthesize(model, few_digits, tmp_path / "run", number=20, resume=True, **given)
