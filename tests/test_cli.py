"""The command line: output, files and exit status."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image

import sfumato as sf
from sfumato import cli
from sfumato.data import ImageSet, save_images
from sfumato.evaluate import PROFILES, Recipe
from sfumato.methods.atelier import Atelier
from sfumato.methods.generator_method import GeneratorSizes
from sfumato.methods.kernel_painter import PainterSettings
from sfumato.methods.teacher import TeacherSettings

pytestmark = pytest.mark.filterwarnings("ignore:.*holds fewer than:sfumato.data.DataWarning")
QUICK = ["--set", "features=60", "--set", "steps=3", "--set", "batch_size=20", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, few_digits: ImageSet) -> Path:
    """Write class folders of PNG files, with spaces and accents in their names."""
    images = ImageSet(few_digits.images, few_digits.labels, ("zéro", "le un", "two", "three"))
    return save_images(images, tmp_path_factory.mktemp("private") / "scans à moi")


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory, digits: ImageSet) -> Path:
    """Write test images of the same classes."""
    assert digits.labels is not None
    index = torch.cat([(digits.labels == c).nonzero()[40:52, 0] for c in range(4)])
    images = ImageSet(digits.images[index], digits.labels[index], ("zéro", "le un", "two", "three"))
    return save_images(images, tmp_path_factory.mktemp("public") / "test")


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory, folder: Path, held_out: Path) -> Path:
    target = tmp_path_factory.mktemp("out") / "shared"
    # A large epsilon, because one class has a single image and noise could make its count zero.
    command = [sys.executable, "-m", "sfumato", "synth", folder, "--epsilon", "500", "-n", "40", "--test", held_out]
    command += ["--issuer", "the clinic", "--subject", "scans [2025]", "--method", "dp-merf"]
    subprocess.run([*map(str, [*command, *QUICK]), "--out", str(target)], check=True, capture_output=True)
    return target


def test_synth_writes_the_folder(synthetic: Path, run: Any) -> None:
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
    for part in (
        "holds",
        "the clinic",
        "scans [2025]",
        "one image",
        "add-remove",
        "1e-05",
        "images.npz",
        "config.json",
    ):
        assert part in out
    assert "unsigned: anybody could have made it" in out
    status, out, _ = run("verify", synthetic, "--json")
    assert status == 0
    content = json.loads(out)
    assert content["ok"] is True
    assert content["unit"] == "image"
    assert content["missing"] == content["uncovered"] == []


def test_sample_writes_images_with_a_certificate(synthetic: Path, tmp_path: Path, run: Any) -> None:
    for target in ("a.npz", "b.parquet", "more"):
        status, out, _ = run("sample", synthetic, "-n", "25", "--out", tmp_path / target, "--json")
        assert status == 0
        assert json.loads(out)["images"] == 25
        assert len(sf.load_images(tmp_path / target)) == 25
        certificate = tmp_path / f"{Path(target).stem}.certificate.json"
        assert json.loads(out)["certificate"] == str(certificate)
        status, out, _ = run("verify", certificate, "--json")
        assert status == 0
        assert target in json.loads(out)["checked"]
        pinned = json.loads((synthetic / "certificate.json").read_text())["digest"]
        assert json.loads(certificate.read_text())["derived_from"] == pinned
    for target in ("a.npz", "a.parquet"):  # both have the same certificate file
        status, _, err = run("sample", synthetic, "-n", "5", "--out", tmp_path / target)
        assert status == 1
        assert "exists already" in err
    assert run("sample", synthetic, "-n", "5", "--out", tmp_path / "a.npz", "--overwrite")[0] == 0
    assert run("verify", tmp_path / "a.certificate.json")[0] == 0
    (tmp_path / "a.npz").write_bytes(b"raw")
    assert run("verify", tmp_path / "a.certificate.json")[0] == 1
    status, _, err = run("sample", synthetic, "-n", "5", "--label", "two", "--out", tmp_path / "two.npz")
    assert set(np.load(tmp_path / "two.npz")["labels"]) == {2}
    assert run("sample", synthetic, "--label", "five", "--out", tmp_path / "five.npz")[0] == 2


def test_evaluate_compares_sets_in_one_table(
    synthetic: Path, folder: Path, held_out: Path, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = PROFILES["quick"]
    monkeypatch.setitem(PROFILES, "quick", replace(quick, classifiers=("logistic", "small_cnn"), recipe=Recipe(1)))
    options = ["--test", held_out, "--network", "none", "--device", "cpu"]
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
        (["evaluate", synthetic, *options, "--train", held_out], "private"),
        (["evaluate", synthetic, "--test", "digits", "--network", "none"], "classes"),
        (["evaluate", synthetic, *options, "--profile", "fast"], "no profile"),
        (["evaluate", tmp_path / "absent", *options], "does not exist"),
    ):
        status, _, err = run(*bad)
        assert status == 1
        assert message in err


def test_soft_labels_are_written_to_npz_and_parquet(
    folder: Path, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {
        "steps": 2,
        "paths": 1,
        "batch_size": 20,
        "painter": PainterSettings(features=20, cnn_images=20),
        "teacher": TeacherSettings(steps=2, cnn_images=20),
        "generator": GeneratorSizes(width=8),
    }
    monkeypatch.setattr(Atelier, "presets", {"tiny": tiny})
    options = ["--set=preset=tiny", "--set=soft_labels=true", "--device=cpu", "--epsilon=20", "--number=20"]
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
    status, _, err = run("sample", tmp_path / "run", "-n", "5", "--out", tmp_path / "soft")
    assert status == 1
    assert "cannot hold soft labels" in err
    assert run("sample", tmp_path / "run", "-n", "5", "--out", tmp_path / "hard", "--set=soft_labels=false")[0] == 0


def test_an_edited_certificate_fails(synthetic: Path, tmp_path: Path, run: Any) -> None:
    content = json.loads((synthetic / "certificate.json").read_text())
    content["epsilon"] = 0.1
    (tmp_path / "certificate.json").write_text(json.dumps(content))
    status, out, _ = run("verify", tmp_path / "certificate.json")
    assert status == 1
    assert "edited" in out
    assert "epsilon: 0.1" in out
    assert run("verify", tmp_path / "absent.json")[0] == 1


def test_verify_enforces_limits(synthetic: Path, tmp_path: Path, run: Any) -> None:
    assert run("verify", synthetic, "--max-epsilon", "1000", "--max-delta", "1e-5")[0] == 0
    for option, value in (("--max-epsilon", "1"), ("--max-delta", "1e-6"), ("--signed-by", tmp_path / "absent.pub")):
        status, out, _ = run("verify", synthetic, option, value)
        assert status == 1
        assert "does not hold" in out
    (tmp_path / "certificate.json").write_bytes((synthetic / "certificate.json").read_bytes())
    (tmp_path / "raw.npz").write_bytes(b"x")
    status, out, _ = run("verify", tmp_path)
    assert status == 0
    assert "none of the" in out
    assert "raw.npz" in out


def test_verify_fails_without_a_guarantee(folder: Path, tmp_path: Path, run: Any) -> None:
    status, out, err = run("fit", folder, "--epsilon", "inf", "--out", tmp_path / "run", "--method", "dp-merf", *QUICK)
    assert status == 0
    assert "guarantee: none" in out
    assert "warning" in err
    status, out, _ = run("verify", tmp_path / "run")
    assert status == 1
    assert "nothing is protected" in out
    assert json.loads(run("verify", tmp_path / "run", "--json")[1])["ok"] is False
    status, out, _ = run("verify", tmp_path / "run", "--allow-none")
    assert status == 0
    assert "holds" not in out


def test_untrusted_text_is_sanitized(synthetic: Path, tmp_path: Path, run: Any) -> None:
    certificate = sf.Certificate.load(synthetic / "certificate.json")
    replace(certificate, issuer="\x1b[2J[green]holds[/green]", outputs={}).save(tmp_path / "certificate.json")
    status, out, _ = run("verify", tmp_path)
    assert status == 0
    assert "\x1b[2J" not in out
    assert "[green]holds[/green]" in out


def test_certificates_can_be_signed(folder: Path, tmp_path: Path, run: Any) -> None:
    key, target = tmp_path / "clinic.key", tmp_path / "run"
    status, out, _ = run("key", "new", key)
    assert status == 0
    assert "ed25519:" in out
    assert run("key", "new", key)[0] == 1
    options = ["--method", "dp-merf", *QUICK, "--epsilon", "5"]
    status, _, err = run("synth", folder, "--out", tmp_path / "x", *options, "--sign", f"{key}.pub")
    assert status == 2
    assert "public key" in err
    assert not (tmp_path / "x" / "ledger.jsonl").exists()
    assert run("fit", folder, "--out", target, *options, "--sign", key, "--issuer", "clinic")[0] == 0
    status, out, _ = run("verify", target, "--signed-by", f"{key}.pub")
    assert status == 0
    assert "ed25519:" in out
    assert "unsigned" not in out
    run("sample", target, "-n", "5", "--out", tmp_path / "more.npz", "--sign", key)
    assert run("verify", tmp_path / "more.certificate.json", "--signed-by", f"{key}.pub")[0] == 0
    run("key", "new", tmp_path / "other.key")
    status, out, _ = run("verify", target, "--signed-by", tmp_path / "other.key.pub")
    assert status == 1
    assert re.search(r"signature +signed by another key\n", out)
    assert "unsigned" not in out


def test_one_budget_over_many_runs(folder: Path, tmp_path: Path, run: Any) -> None:
    path = tmp_path / "hospital.budget"
    status, out, _ = run("budget", "open", path, "--epsilon", "3", "--delta", "1e-5", "--note", "scans")
    assert status == 0
    assert "one image" in out
    assert run("budget", "open", path, "--epsilon", "9")[0] == 1
    options = ["--method", "dp-merf", "--budget", path]
    status, out, _ = run("plan", folder, *options, "--epsilon", "2")
    assert "fits into" in out
    assert "one image" in out
    assert run("fit", folder, *options, *QUICK, "--epsilon", "2", "--out", tmp_path / "a")[0] == 0
    assert run("synth", folder, *options, *QUICK, "--epsilon", "1", "-n", "20", "--out", tmp_path / "b")[0] == 0
    assert json.loads((tmp_path / "b" / "certificate.json").read_text())["account"] == "hospital.budget"
    status, out, _ = run("plan", folder, *options, "--epsilon", "2", "--json")
    assert json.loads(out)["fits"] is False
    status, out, err = run("fit", folder, *options, *QUICK, "--epsilon", "2", "--out", tmp_path / "c")
    assert status == 1
    for part in ("is reserved (2 runs)", "this run needs 2", "is left"):
        assert part in err
    assert not (tmp_path / "c" / "ledger.jsonl").exists()
    status, out, _ = run("budget", "show", path, "--json")
    content = json.loads(out)
    assert [round(line["epsilon"], 2) for line in content["runs"]] == [2, 1]
    assert 2 < content["spent"] <= 3
    status, out, _ = run("budget", "show", path)
    assert "dp-merf" in out
    assert "room for one more" in out
    assert run("budget", "show", tmp_path / "absent.budget")[0] == 1
    persons = tmp_path / "persons.budget"
    run("budget", "open", persons, "--epsilon", "3", "--unit", "person")
    status, _, err = run("fit", folder, "--method", "dp-merf", "--budget", persons, "--out", tmp_path / "d", *QUICK)
    assert status == 1
    assert "one person" in err


def test_private_test_images_are_refused(folder: Path, held_out: Path, tmp_path: Path, run: Any) -> None:
    """Refuse the private folder, a link to it, and a test folder with one private image."""
    mixed = tmp_path / "mixed"
    shutil.copytree(held_out, mixed)
    private = next((folder / "two").glob("*.png"))
    shutil.copy(private, mixed / "two" / "zz.png")
    (tmp_path / "link").symlink_to(folder)
    for number, test in enumerate((folder, tmp_path / "link", mixed)):
        target = tmp_path / f"out-{number}"
        options = ["--method", "dp-merf", *QUICK, "--out", target]
        status, _, err = run("synth", folder, "--test", test, *options)
        assert status == 1
        assert "private" in err
        assert not (target / "ledger.jsonl").exists()
    status, _, err = run("synth", "digits", "--split", "test", "--test", "digits", "--out", tmp_path / "x", *QUICK)
    assert status == 1
    assert "private set itself" in err


def test_person_sets_the_unit_of_privacy(folder: Path, tmp_path: Path, run: Any) -> None:
    options = ["--method", "dp-merf", "--person", "regex:([0-9]+)[.]png$"]
    status, out, err = run("plan", folder, *options, "--max-per-person", "7")
    assert status == 0, err
    assert "one person" in out
    assert "at most 7 images of each person" in out
    options += ["--max-per-person", "7", "--epsilon", "5"]
    status, out, err = run("fit", folder, *options, *QUICK, "--out", tmp_path / "run")
    assert status == 0, err
    assert "one person" in out
    status, out, _ = run("verify", tmp_path / "run")
    assert status == 0
    assert "one person" in out


def test_classes_must_be_declared(tmp_path: Path, run: Any, few_digits: ImageSet) -> None:
    assert few_digits.labels is not None
    np.savez(tmp_path / "x.npz", images=few_digits.images.numpy(), labels=few_digits.labels.numpy())
    status, _, err = run("plan", tmp_path / "x.npz", "--method", "dp-merf")
    assert status == 1
    assert "--classes" in err
    for declared, names in (("5", ["0", "1", "2", "3", "4"]), ("a, b,c,d", ["a", "b", "c", "d"])):
        status, out, err = run("plan", tmp_path / "x.npz", "--method", "dp-merf", "--classes", declared, "--json")
        assert status == 0, err
        assert json.loads(out)["classes"] == names


def test_weak_settings_give_warnings(folder: Path, tmp_path: Path, run: Any) -> None:
    options = ["--method", "dp-merf", "--epsilon", "30", "--delta", "0.01", "--set", "public_size=True"]
    for command in (["plan", folder], ["fit", folder, "--out", tmp_path / "run", *QUICK]):
        status, _, err = run(*command, *options)
        assert status == 0
        for part in ("warning", "epsilon 30", "1/n", "fewer than 100", "fewer than 20 images in three"):
            assert part in err
    assert "Class sizes" in run("verify", tmp_path / "run")[1]


def test_plan_spends_nothing(folder: Path, run: Any) -> None:
    before = sorted(folder.parent.rglob("*"))
    status, out, _ = run("plan", folder, "--epsilon", "1")
    assert status == 0
    assert "embedding" in out
    assert "3.84" in out
    status, out, _ = run(
        "plan", folder, "-e", "1", "--size", "8", "--mode", "grey", "--set", "public_size=True", "--json"
    )
    content = json.loads(out)
    assert [release["name"] for release in content["releases"]] == ["embedding"]
    assert content["epsilon"] == pytest.approx(1, rel=1e-3)
    assert content["notes"] == []
    sources = {setting["name"]: (setting["value"], setting["source"]) for setting in content["settings"]}
    assert sources["epsilon"] == (1, "given")
    assert sources["public_size"] == (True, "given")
    assert sources["delta"] == (1e-5, "default")
    assert sources["seed"] == (0, "default")
    status, out, _ = run("plan", folder, "--method", "dp-mepf", "--set", "encoder=scattering")
    assert status == 0
    assert "Prop. 4.1" in out
    assert sorted(folder.parent.rglob("*")) == before


def test_plan_lists_settings_and_their_sources(folder: Path, run: Any) -> None:
    status, out, _ = run("plan", folder, "--method", "dp-kernel", "--device", "cpu", "--set", "batch_size=77")
    assert status == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["batch_size", "77", "given"] in lines
    assert ["delta", "1e-05", "default"] in lines
    assert any(line[:1] == ["steps"] and line[2:] == ["preset", "cpu"] for line in lines)
    assert any(line[:1] == ["painter.features"] for line in lines)  # fields of a setting with several values
    content = json.loads(run("plan", folder, "--method", "dp-kernel", "--set", "preset=default", "--json")[1])
    assert {setting["source"] for setting in content["settings"]} == {"given", "default"}


def test_account_solves_both_ways(run: Any) -> None:
    status, out, _ = run("account", "--epsilon", "1", "--sampling-prob", "0.01", "--steps", "2000", "--json")
    assert status == 0
    noise = json.loads(out)["noise_multiplier"]
    status, out, _ = run("account", "-s", str(noise), "-q", "0.01", "-t", "2000", "--json")
    assert json.loads(out)["epsilon"] == pytest.approx(1, rel=1e-3)
    assert "exact" in run("account", "-s", "3.731")[1]


def test_methods_and_data_list(run: Any) -> None:
    assert "dp-merf" in run("methods")[1]
    assert json.loads(run("methods", "--json")[1])[0]["key"] == "dp-merf"
    assert "digits" in run("data", "list")[1]
    assert any(item["name"] == "digits" and item["found"] for item in json.loads(run("data", "list", "--json")[1]))


TINY_FLOW = {"code": 4, "width": 4, "couplings": 1, "hidden": 8, "procedural_batches": 5}


@pytest.fixture(scope="module")
def flow_run(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    target = tmp_path_factory.mktemp("flow") / "run"
    model = sf.create("dp-lflow", epsilon=500, steps=20, warm="none", device="cpu").with_constants(**TINY_FLOW)
    model.fit(sf.load_images(folder), run_dir=target)
    return target


def test_ood_scores_images(flow_run: Path, folder: Path, synthetic: Path, tmp_path: Path, run: Any) -> None:
    status, out, err = run("ood", flow_run, folder, "--out", tmp_path / "found", "--samples", "50", "--device", "cpu")
    assert status == 0, err
    assert "all classes" in out
    assert "5.0% of synthetic images" in out
    assert {path.name for path in (tmp_path / "found").iterdir()} == {"scores.json", "scores.png", "least_likely.png"}
    content = json.loads((tmp_path / "found" / "scores.json").read_text())["all classes"]
    assert len(content["scores"]) == content["images"] == 61
    assert "auroc" not in content  # the inliers are unknown
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
        (["ood", flow_run, folder, "--set", "steps=9"], 2, "cannot change after fit"),
        (["ood", synthetic, folder], 2, "dp-merf has no likelihood"),
        (["ood", tmp_path, folder], 1, "holds no finished model"),
        (["ood", flow_run, folder, "--unlabelled", "--inliers", "two"], 1, "no labels"),
    ):
        status, _, err = run(*bad, "--device", "cpu")
        assert status == code, err
        assert message in " ".join(err.replace("│", " ").split())


def test_sample_sets_parameters_of_the_method(flow_run: Path, synthetic: Path, tmp_path: Path, run: Any) -> None:
    for name, options in (("plain", []), ("sharp", ["--set", "sharpness=5"])):
        assert run("sample", flow_run, "-n", "20", "--out", tmp_path / f"{name}.npz", *options)[0] == 0
    plain, sharp = (np.load(tmp_path / f"{name}.npz")["images"] for name in ("plain", "sharp"))
    assert not np.array_equal(plain, sharp)
    status, _, err = run("sample", synthetic, "-n", "5", "--out", tmp_path / "x.npz", "--set", "steps=3")
    assert status == 2
    assert "cannot change after fit" in err


COMMANDS = ["methods", "plan", "fit", "sample", "synth", "evaluate", "ood", "account", "verify", "data", "demo"]
COMMANDS += ["key", "budget"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, run: Any) -> None:
    status, out, _ = run(command, "--help")
    assert status == 0
    assert "Usage" in out


def test_every_command_and_option_has_a_help_text() -> None:
    def check(command: Any, name: str) -> None:
        assert command.help, name
        for parameter in command.params:
            assert parameter.help, f"{name} {parameter.name}"
        for key, child in getattr(command, "commands", {}).items():
            check(child, f"{name} {key}")

    check(typer.main.get_command(cli.app), "sfumato")


BAD: list[tuple[list[str], int, str]] = [
    (["synth", "DATA", "--epsilon", "0", "--out", "OUT"], 2, "epsilon must be greater than 0"),
    (["synth", "DATA", "--epsilon", "-1", "--out", "OUT"], 2, "epsilon must be greater than 0"),
    (["synth", "DATA", "--delta", "0", "--out", "OUT"], 2, "delta must lie strictly between 0 and 1"),
    (["synth", "DATA", "--delta", "1", "--out", "OUT"], 2, "delta must lie strictly between 0 and 1"),
    (["synth", "DATA", "--adjacency", "swap", "--out", "OUT"], 2, "adjacency must be one of"),
    (["synth", "DATA", "--method", "dp-murf", "--out", "OUT"], 2, "did you mean 'dp-merf'?"),
    (["synth", "DATA", "--set", "stepz=3", "--out", "OUT"], 2, "did you mean 'steps'?"),
    (["synth", "DATA", "--set", "steps", "--out", "OUT"], 2, "NAME=VALUE"),
    (["synth", "DATA", "--epsilon", "1", "--set", "epsilon=2", "--out", "OUT"], 2, "pass only one"),
    (["synth", "DATA", "--set", "steps=many", "--out", "OUT"], 2, "steps"),
    (["synth", "DATA", "--set", "steps=0", "--out", "OUT"], 2, "steps"),
    (["synth", "DATA", "--out", "OUT", "-n", "0"], 2, "-n"),
    (["synth", "DATA", "--out", "OUT", "--device", "gpu"], 2, "device"),
    (["synth", "/absent/folder", "--out", "OUT"], 1, "does not exist"),
    (["synth", "mnits", "--out", "OUT"], 1, "mnist"),
    (["synth", "DATA", "--out", "FILE/sub"], 1, "cannot be written"),
    (["synth", "DATA", "--out", "FULL"], 1, "not empty"),
    (["synth", "DATA", "--out", "OUT", "--test", "digits"], 1, "classes"),
    (["synth", "DATA", "--out", "OUT", "--test", "DATA"], 1, "private"),
    (["synth", "DATA", "--out", "OUT", "--budget", "absent.budget"], 1, "budget open"),
    (["synth", "DATA", "--out", "OUT", "--sign", "absent.key"], 1, "absent.key"),
    (["budget", "open", "OUT.budget", "--epsilon", "inf"], 2, "several runs"),
    (["budget", "open", "OUT.budget", "--epsilon", "1", "--unit", "house"], 2, "unit must be one of"),
    (["sample", "FULL", "--out", "OUT"], 1, "holds no finished model"),
    (["account", "--epsilon", "1", "-s", "1"], 2, "one of the two"),
    (["account", "-s", "1", "--sampling-prob", "2"], 2, "sampling_prob"),
    (["account", "-s", "1", "--steps", "0"], 2, "times"),
    (["data", "get", "mnits"], 1, "mnist"),
    (["unknown"], 2, "unknown"),
]


@pytest.mark.parametrize(("arguments", "status", "message"), BAD)
def test_bad_input_gives_an_error_without_traceback(
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
    assert status == 130
    assert f"sfumato fit --resume {shlex.quote(str(folder))} --out {target}" in err
    charges = (target / "ledger.jsonl").read_text().count('"charge"')
    assert charges == 2
    status, _, err = run("fit", folder, "--out", target, *QUICK)
    assert status == 1
    assert "already holds a run" in err
    assert run("fit", folder, "--out", target, *QUICK, "--resume")[0] == 0
    assert (target / "ledger.jsonl").read_text().count('"charge"') == charges
    assert run("verify", target)[0] == 0


def test_demo_uses_the_bundled_digits(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
