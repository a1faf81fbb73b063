"""Comparing methods: runs, results, resuming, budgets and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sfumato as sf
from sfumato import sweep
from sfumato.certificate.dataset_budget import DatasetBudget
from sfumato.data import ImageSet, save_images
from sfumato.privacy import RedactedError
from sfumato.privacy.accounting import bounds, tightest

pytestmark = pytest.mark.filterwarnings("ignore:.*holds fewer than:sfumato.data.DataWarning")
QUICK = ["--set", "features=60", "--set", "steps=3", "--set", "batch_size=20", "--device", "cpu", "-n", "20"]


@pytest.fixture
def data(tmp_path: Path, few_digits: ImageSet) -> Path:
    return save_images(few_digits, tmp_path / "data.npz")


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    images = sf.load_images("digits", split="test")
    assert images.labels is not None
    few = images.subset(images.labels < 4)
    return save_images(ImageSet(few.images, few.labels, few.classes[:4]), tmp_path / "test.npz")


def test_a_comparison_of_public_data(data: Path, held_out: Path, tmp_path: Path, run: Any) -> None:
    command = ["compare", data, "--public", "--methods", "dp-merf", "--epsilons", "100,500", "--seeds", "2", "--test"]
    command += [held_out, "--out", tmp_path / "out", *QUICK]
    status, out, err = run(*command, "--shard", "1/2", "--json")
    assert status == 0, err
    assert json.loads(out)["missing"] == 2
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/certificate.json")}
    assert len(before) == 2
    status, out, err = run(*command, "--json")
    assert status == 0
    assert err.count("already there") == 2
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    found = json.loads(out)
    assert found["missing"] == 0
    assert found["cost"] is None
    assert [(row["method"], row["epsilon"], row["seeds"]) for row in found["rows"]] == [
        ("dp-merf", 100.0, 2),
        ("dp-merf", 500.0, 2),
    ]
    metrics = [
        json.loads(path.read_text()) for path in sorted((tmp_path / "out").glob("dp-merf-epsilon100-*/metrics.json"))
    ]
    mean = sum(each["utility"]["small_cnn"]["mean"] for each in metrics) / 2
    assert found["rows"][0]["accuracy"] == pytest.approx(mean)
    assert "ε = 100 | ε = 500" in (tmp_path / "out" / "results.md").read_text()
    assert (tmp_path / "out" / "plot.svg").read_text().startswith("<svg xmlns=")
    assert "Comparison of 4 runs" in (tmp_path / "out" / "report.html").read_text()
    assert all(sf.verify(path) for path in (tmp_path / "out").glob("*/certificate.json"))
    repeated = run("compare", "--config", tmp_path / "out.toml", "--json")
    assert repeated[0] == 0
    assert json.loads(repeated[1])["rows"] == found["rows"]
    changed = run("compare", "--config", tmp_path / "out.toml", "--set", "steps=4", "--set", "features=60")
    assert changed[0] == 1
    assert "finished run with another" in changed[2]


def test_private_data_cost_all_runs_together(data: Path, held_out: Path, tmp_path: Path, run: Any) -> None:
    command = ["compare", data, "--methods", "dp-merf", "--epsilons", "100,200", "--test", held_out]
    command += ["--out", tmp_path / "out", *QUICK]
    status, _, err = run(*command)
    assert status == 2
    assert "--budget" in err
    small, large = tmp_path / "small.budget", tmp_path / "large.budget"
    DatasetBudget.open(small, 220.0, 1e-5)
    status, _, err = run(*command, "--budget", small)
    assert status == 1
    assert "these 2 runs need more than is left" in " ".join(err.split())
    assert not (tmp_path / "out").exists()
    assert DatasetBudget(small).rows() == []
    DatasetBudget.open(large, 2000.0, 1e-5)
    status, out, err = run(*command, "--budget", large, "--json")
    assert status == 0, err
    assert len(DatasetBudget(large).rows()) == 2
    assert run(*command, "--budget", large)[0] == 0
    assert len(DatasetBudget(large).rows()) == 2  # nothing is charged twice
    stated = [json.loads(path.read_text()) for path in sorted((tmp_path / "out").glob("*/certificate.json"))]
    names = ("name", "times", "sampling_prob", "noise_multiplier", "nonnegative")
    events = [event for content in stated for event in content["events"]]
    releases = [sf.Release(**{name: event[name] for name in names}) for event in events]
    assert json.loads(out)["cost"]["epsilon"] == pytest.approx(tightest(bounds(releases, 1e-5)), rel=1e-3)


def test_a_run_that_fails_does_not_stop_the_others(data: Path, held_out: Path, tmp_path: Path, run: Any) -> None:
    command = ["compare", data, "--public", "--methods", "dp-merf,ldpdc", "--epsilons", "500", "--test", held_out]
    status, out, _ = run(
        *command, "--out", tmp_path / "out", *QUICK[:-1], "39", "--set", "images_per_class=1", "--json"
    )
    assert status == 1
    found = json.loads(out)
    assert list(found["failed"]) == ["ldpdc, epsilon 500, seed 0"]
    assert [row["method"] for row in found["rows"]] == ["dp-merf"]


def test_a_void_run_does_not_stop_the_others(digits: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def void(model: Any, images: ImageSet, folder: Path, **_: Any) -> Any:
        if not lines:  # the first run
            raise RedactedError("a computation on private images failed")
        return SimpleNamespace(accuracy=None)

    monkeypatch.setattr(sweep, "synthesize", void)
    chosen = sweep.cells(tmp_path, ["dp-merf"], [1.0], 2, {"device": "cpu"}, {})
    failed = sweep.run_cells(chosen, digits, digits, report=lines.append)
    assert list(failed) == [chosen[0].name]
    assert [line.partition(": ")[2] for line in lines] == ["failed: a computation on private images failed", "done"]


def test_parameters_go_to_the_methods_that_have_them(tmp_path: Path) -> None:
    found = sweep.cells(
        tmp_path, ["dp-merf", "ldpdc"], [1.0], 1, {"delta": 1e-6}, {"steps": 7, "dp-merf.features": 9, "group_size": 2}
    )
    assert found[0].params == {"delta": 1e-6, "steps": 7, "features": 9}
    assert found[1].params["delta"] == 1e-6
    assert "steps" not in found[1].params
    with pytest.raises(ValueError, match="has a parameter 'nonsense'"):
        sweep.cells(tmp_path, ["dp-merf"], [1.0], 1, {}, {"nonsense": 1})
    with pytest.raises(ValueError, match="given twice"):
        sweep.cells(tmp_path, ["dp-merf", "dp-merf"], [1.0], 1, {}, {})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--shard", "3/2", "I from 1 to N"),
        ("--epsilons", "1,x", "numbers separated by commas"),
        ("--methods", "dp-murf", "dp-merf"),
    ],
)
def test_mistakes(option: str, value: str, message: str, data: Path, held_out: Path, tmp_path: Path, run: Any) -> None:
    options = {"--methods": "dp-merf", "--test": str(held_out), "--out": str(tmp_path / "out"), option: value}
    status, _, err = run("compare", data, "--public", *[part for pair in options.items() for part in pair])
    assert status == 2
    assert message in " ".join(err.replace("│", " ").split())
