"""The command line as a person meets it: what is printed, which files appear, which status is left."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import sfumato as sf
from sfumato import cli
from sfumato.data import ImageSet, save_images
from sfumato.evaluate import PROFILES, Recipe

QUICK = ["--set", "features=60", "--set", "steps=3", "--set", "batch_size=20", "--device", "cpu"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process: (status, output, errors)."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sfumato", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, few_digits: ImageSet) -> Path:
    """Class folders of PNG files, with a space and an accent."""
    images = ImageSet(few_digits.images, few_digits.labels, ("zéro", "le un", "two", "three"))
    return save_images(images, tmp_path_factory.mktemp("private") / "scans à moi")


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    target = tmp_path_factory.mktemp("out") / "shared"
    # One class has one image: with more noise its number could become none.
    command = [sys.executable, "-m", "sfumato", "synth", folder, "--epsilon", "500", "-n", "40", "--test", folder]
    subprocess.run([*map(str, [*command, *QUICK]), "--out", str(target)], check=True, capture_output=True)
    return target


def test_synth_fills_its_folder(synthetic: Path, run: Any) -> None:
    names = {path.name for path in synthetic.iterdir()}
    assert names >= {
        "images",
        "images.npz",
        "certificate.json",
        "metrics.json",
        "config.json",
        "ledger.jsonl",
        "samples.png",
    }
    assert {path.name for path in (synthetic / "images").iterdir()} <= {"zéro", "le un", "two", "three"}
    assert len(list((synthetic / "images").rglob("*.png"))) == 40
    images = sf.load_images(synthetic / "images.npz")
    assert len(images) == 40
    assert images.shape == (1, 8, 8)
    assert 0 <= json.loads((synthetic / "metrics.json").read_text())["utility"]["small_cnn"]["mean"] <= 100
    with Image.open(synthetic / "samples.png") as picture:
        assert min(picture.size) > 100
    status, out, _ = run("verify", synthetic / "certificate.json")
    assert status == 0
    assert "holds" in out
    assert run("verify", synthetic, "--json")[0] == 0


def test_sampling_goes_on_for_ever(synthetic: Path, tmp_path: Path, run: Any) -> None:
    for target in ("more.npz", "more.parquet", "more"):
        status, out, _ = run("sample", synthetic, "-n", "25", "--out", tmp_path / target, "--json")
        assert status == 0
        assert json.loads(out)["images"] == 25
        assert len(sf.load_images(tmp_path / target)) == 25
    status, _, err = run("sample", synthetic, "-n", "5", "--out", tmp_path / "more.npz")
    assert status == 1
    assert "exists already" in err
    status, _, err = run("sample", synthetic, "-n", "5", "--label", "two", "--out", tmp_path / "two.npz")
    assert set(np.load(tmp_path / "two.npz")["labels"]) == {2}
    assert run("sample", synthetic, "--label", "five", "--out", tmp_path / "five.npz")[0] == 2


def test_evaluate_compares_sets_in_one_table(
    synthetic: Path, folder: Path, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = PROFILES["quick"]
    monkeypatch.setitem(PROFILES, "quick", replace(quick, classifiers=("logistic", "small_cnn"), recipe=Recipe(1)))
    options = ["--test", folder, "--network", "none", "--device", "cpu"]
    status, out, err = run("evaluate", synthetic, synthetic / "images", *options, "--out", tmp_path / "all.json")
    assert status == 0, err
    assert "logistic" in out
    content = json.loads((tmp_path / "all.json").read_text())
    assert list(content) == [str(synthetic), str(synthetic / "images")]
    assert {path.name for path in tmp_path.glob("*.png")} == {"all_1.png", "all_2.png"}
    assert set(content[str(synthetic)]["utility"]) == {"logistic", "small_cnn", "convolutional"}
    status, out, err = run(
        "evaluate", synthetic, *options, "--train", folder, "--out", tmp_path / "one" / "metrics.json", "--json"
    )
    assert status == 0
    assert "private" in err
    assert "distance" not in out
    assert (tmp_path / "one" / "private" / "neighbours.png").exists()
    for bad, message in (
        (["evaluate", synthetic, "--test", "digits", "--network", "none"], "classes"),
        (["evaluate", synthetic, *options, "--profile", "fast"], "no profile"),
        (["evaluate", tmp_path / "absent", *options], "does not exist"),
    ):
        status, _, err = run(*bad)
        assert status == 1
        assert message in err


def test_soft_labels_are_written_where_a_file_can_hold_them(folder: Path, tmp_path: Path, run: Any) -> None:
    settings = ("steps=2", "paths=1", "features=20", "batch_size=20", "width=8", "lessons=20", "teacher_steps=2")
    options = [
        *(f"--set={setting}" for setting in settings),
        "--set=soft_labels=true",
        "--device=cpu",
        "--epsilon=20",
        "--number=20",
    ]
    status, out, err = run("synth", folder, "--method", "atelier", *options, "--out", tmp_path / "run")
    assert status == 0, err
    assert "soft labels are in images.npz" in out
    assert len(list((tmp_path / "run" / "images").rglob("*.png"))) == 20
    for target in ("run/images.npz", "more.parquet"):
        if target == "more.parquet":
            assert run("sample", tmp_path / "run", "-n", "25", "--out", tmp_path / target)[0] == 0
        images = sf.load_images(tmp_path / target)
        assert images.soft_labels is not None
        assert images.soft_labels.shape == (len(images), 4)
    status, _, err = run("sample", tmp_path / "run", "-n", "5", "--out", tmp_path / "more")
    assert status == 1
    assert "cannot hold soft labels" in err
    assert run("sample", tmp_path / "run", "-n", "5", "--out", tmp_path / "hard", "--set=soft_labels=false")[0] == 0


def test_an_edited_certificate_fails(synthetic: Path, tmp_path: Path, run: Any) -> None:
    content = json.loads((synthetic / "certificate.json").read_text())
    content["epsilon"] = 0.1
    (tmp_path / "certificate.json").write_text(json.dumps(content))
    status, out, _ = run("verify", tmp_path / "certificate.json")
    assert status == 1
    assert "epsilon" in out
    assert run("verify", tmp_path / "absent.json")[0] == 1


def test_plan_spends_nothing(folder: Path, run: Any) -> None:
    before = sorted(folder.parent.rglob("*"))
    status, out, _ = run("plan", folder, "--epsilon", "1")
    assert status == 0
    assert "embedding" in out
    assert "3.84" in out
    status, out, _ = run("plan", folder, "--epsilon", "1", "--set", "public_size=True", "--json")
    content = json.loads(out)
    assert [release["name"] for release in content["releases"]] == ["embedding"]
    assert content["epsilon"] == pytest.approx(1, rel=1e-3)
    assert content["notes"] == []
    status, out, _ = run("plan", folder, "--method", "dp-mepf", "--set", "encoder=scattering")
    assert status == 0
    assert "Prop. 4.1" in out
    assert sorted(folder.parent.rglob("*")) == before


def test_account_solves_both_ways(run: Any) -> None:
    status, out, _ = run("account", "--epsilon", "1", "--sampling-prob", "0.01", "--steps", "2000", "--json")
    assert status == 0
    noise = json.loads(out)["noise_multiplier"]
    status, out, _ = run("account", "-s", str(noise), "-q", "0.01", "-t", "2000", "--json")
    assert json.loads(out)["epsilon"] == pytest.approx(1, rel=1e-3)
    assert "exact" in run("account", "-s", "3.731")[1]


def test_lists(run: Any) -> None:
    assert "dp-merf" in run("methods")[1]
    assert json.loads(run("methods", "--json")[1])[0]["key"] == "dp-merf"
    assert "digits" in run("data", "list")[1]
    assert any(item["name"] == "digits" and item["found"] for item in json.loads(run("data", "list", "--json")[1]))


FLOW = [
    f"--set={name}" for name in ("steps=20", "warm=none", "code=4", "width=4", "couplings=1", "hidden=8", "lessons=5")
]


@pytest.fixture(scope="module")
def flow_run(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    target = tmp_path_factory.mktemp("flow") / "run"
    command = [sys.executable, "-m", "sfumato", "fit", folder, "--method", "dp-lflow", "--epsilon", "500", *FLOW]
    subprocess.run([*map(str, command), "--device", "cpu", "--out", str(target)], check=True, capture_output=True)
    return target


def test_ood_scores_images(flow_run: Path, folder: Path, synthetic: Path, tmp_path: Path, run: Any) -> None:
    status, out, err = run("ood", flow_run, folder, "--out", tmp_path / "found", "--samples", "50", "--device", "cpu")
    assert status == 0, err
    assert "all classes" in out
    assert "5.0% of synthetic images" in out
    assert {path.name for path in (tmp_path / "found").iterdir()} == {"scores.json", "scores.png", "least_likely.png"}
    content = json.loads((tmp_path / "found" / "scores.json").read_text())["all classes"]
    assert len(content["scores"]) == content["images"] == 61
    assert "auroc" not in content  # nobody said what belongs
    options = ["--samples", "50", "--device", "cpu", "--json"]
    status, out, _ = run("ood", flow_run, folder, "--label", "two", *options, "--set", "likelihood=image")
    assert 0 <= json.loads(out)["two"]["auroc"] <= 1
    status, out, _ = run("ood", flow_run, folder, "--inliers", "two", "--inliers", "le un", *options)
    assert json.loads(out)["all classes"]["flagged_outliers"] >= 0
    assert "average AUROC" in run("ood", flow_run, folder, "--each", *options[:-1])[1]
    for bad, code, message in (
        (["ood", flow_run, folder, "--label", "five"], 2, "there is no class 'five'"),
        (["ood", flow_run, folder, "--inliers", "five"], 1, "no class 'five'"),
        (["ood", flow_run, folder, "--false-alarms", "1.5"], 2, "strictly between 0 and 1"),
        (["ood", flow_run, folder, "--each", "--label", "two"], 2, "leave out"),
        (["ood", flow_run, folder, "--set", "code=9"], 2, "cannot be changed after fit"),
        (["ood", synthetic, folder], 2, "dp-merf has no likelihood"),
        (["ood", tmp_path, folder], 1, "holds no finished model"),
        (["ood", flow_run, folder, "--unlabelled", "--inliers", "two"], 1, "no labels"),
    ):
        status, _, err = run(*bad, "--device", "cpu")
        assert status == code, err
        assert message in " ".join(err.replace("│", " ").split())


def test_sampling_options_are_those_of_the_method(flow_run: Path, synthetic: Path, tmp_path: Path, run: Any) -> None:
    for name, options in (("plain", []), ("sharp", ["--set", "sharpness=5"])):
        assert run("sample", flow_run, "-n", "20", "--out", tmp_path / f"{name}.npz", *options)[0] == 0
    plain, sharp = (np.load(tmp_path / f"{name}.npz")["images"] for name in ("plain", "sharp"))
    assert not np.array_equal(plain, sharp)
    status, _, err = run("sample", synthetic, "-n", "5", "--out", tmp_path / "x.npz", "--set", "steps=3")
    assert status == 2
    assert "none can" in err


COMMANDS = ["methods", "plan", "fit", "sample", "synth", "evaluate", "ood", "account", "verify", "data", "demo"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, run: Any) -> None:
    status, out, _ = run(command, "--help")
    assert status == 0
    assert "Usage" in out


BAD: list[tuple[list[str], int, str]] = [
    (["synth", "DATA", "--epsilon", "0", "--out", "OUT"], 2, "epsilon must be greater than 0"),
    (["synth", "DATA", "--epsilon", "-1", "--out", "OUT"], 2, "epsilon must be greater than 0"),
    (["synth", "DATA", "--delta", "0", "--out", "OUT"], 2, "delta must lie strictly between 0 and 1"),
    (["synth", "DATA", "--delta", "1", "--out", "OUT"], 2, "delta must lie strictly between 0 and 1"),
    (["synth", "DATA", "--adjacency", "swap", "--out", "OUT"], 2, "adjacency must be one of"),
    (["synth", "DATA", "--method", "dp-murf", "--out", "OUT"], 2, "did you mean 'dp-merf'?"),
    (["synth", "DATA", "--set", "stepz=3", "--out", "OUT"], 2, "did you mean 'steps'?"),
    (["synth", "DATA", "--set", "steps", "--out", "OUT"], 2, "name=value"),
    (["synth", "DATA", "--set", "steps=many", "--out", "OUT"], 2, "steps"),
    (["synth", "DATA", "--set", "steps=0", "--out", "OUT"], 2, "steps"),
    (["synth", "DATA", "--out", "OUT", "-n", "0"], 2, "-n"),
    (["synth", "DATA", "--out", "OUT", "--device", "gpu"], 2, "device"),
    (["synth", "/absent/folder", "--out", "OUT"], 1, "does not exist"),
    (["synth", "mnits", "--out", "OUT"], 1, "mnist"),
    (["synth", "DATA", "--out", "FILE/sub"], 1, "cannot be written"),
    (["synth", "DATA", "--out", "FULL"], 1, "not empty"),
    (["synth", "DATA", "--out", "OUT", "--test", "digits"], 1, "classes"),
    (["sample", "FULL", "--out", "OUT"], 1, "holds no finished model"),
    (["account", "--epsilon", "1", "-s", "1"], 2, "one of the two"),
    (["account", "-s", "1", "--sampling-prob", "2"], 2, "sampling_prob"),
    (["account", "-s", "1", "--steps", "0"], 2, "times"),
    (["data", "get", "mnits"], 1, "mnist"),
    (["unknown"], 2, "unknown"),
]


@pytest.mark.parametrize(("arguments", "status", "message"), BAD)
def test_bad_input_ends_in_a_line(
    arguments: list[str], status: int, message: str, folder: Path, tmp_path: Path, run: Any
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    places = {"DATA": folder, "OUT": tmp_path / "out", "FILE/sub": tmp_path / "file" / "sub", "FULL": tmp_path / "full"}
    code, out, err = run(*[str(places.get(argument, argument)) for argument in arguments])
    assert code == status
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert not out
    assert (tmp_path / "full" / "mine.txt").read_text() == "x"
    assert not (tmp_path / "out" / "ledger.jsonl").exists()  # nothing was spent


def test_an_interrupted_run_can_be_resumed(
    folder: Path, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sfumato.methods.dp_merf import MeanEmbedding

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    target = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(MeanEmbedding, "_fit_generator", interrupt)
        status, _, err = run("fit", folder, "--out", target, *QUICK)
    assert status == 1
    assert "--resume" in err
    charges = (target / "ledger.jsonl").read_text().count('"charge"')
    assert charges == 2
    status, _, err = run("fit", folder, "--out", target, *QUICK)
    assert status == 1
    assert "holds a run already" in err
    assert run("fit", folder, "--out", target, *QUICK, "--resume")[0] == 0
    assert (target / "ledger.jsonl").read_text().count('"charge"') == charges
    assert run("verify", target)[0] == 0


def test_demo_works_on_the_embedded_digits(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sfumato import demo

    monkeypatch.setattr(demo, "find_named", lambda name: None)
    quick = {"features": 60, "steps": 3, "batch_size": 20}
    monkeypatch.setattr(demo, "create", lambda key, **params: sf.create(key, **{**params, **quick}))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    status, out, _ = run("demo", "--json")
    assert status == 0
    content = json.loads(out)
    assert content["out"] == "demo-2"
    assert content["guarantee"] == "differential-privacy"
    assert content["accuracy"] > 0
    assert run("verify", "demo-2")[0] == 0
