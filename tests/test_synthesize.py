"""`synthesize`: checks before any privacy budget is spent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sfumato as sf
from sfumato.data import DataError, ImageSet
from sfumato.synthesize import check_output, synthesize


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
