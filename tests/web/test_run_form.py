"""Fields of a browser become options of a command, or a mistake in words."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import typer

from sfumato.certificate.dataset_budget import DatasetBudget
from sfumato.cli import app
from sfumato.cli_options import DataOptions, MethodOptions, RunOptions, to_arguments
from sfumato.data import DataError
from sfumato.web.allowed_folders import AllowedFolders
from sfumato.web.run_form import read_form

HOSTILE = [
    "; rm -rf /",
    "$(id)",
    "--out=/tmp/x",
    "-o",
    "`id`",
    "a\nb",
    "x' OR 1",
    "{{7*7}}",
    "<script>alert(1)</script>",
]


@pytest.fixture
def folders(data_root, tmp_path):
    return AllowedFolders(data_root, tmp_path / "runs")


def parsed(arguments: list[str]) -> dict:
    """Return the parameters of `sfumato synth` as the command parses them."""
    command = typer.main.get_command(app).commands["synth"]
    return command.make_context("synth", list(arguments)).params


def test_arguments_are_the_options_again(tmp_path):
    data = DataOptions("--help", size=8, mode="grey", unlabelled=True, person="-x", value_range="-5,9", on_error="skip")
    method = MethodOptions(method="atelier", epsilon=0.5, delta=1e-6, params=["steps=3", "features=-1"], seed=-3)
    run = RunOptions(budget=tmp_path / "--json", issuer="--resume", resume=True)
    arguments = [*to_arguments(method), *to_arguments(run), f"--out={tmp_path}", *to_arguments(data)]
    found = parsed(arguments)
    for group in (data, method, run):
        for field in fields(group):
            value, got = getattr(group, field.name), found[field.name]
            assert got == value or list(got or []) == (value or []), field.name


def test_a_form_becomes_a_command(folders, data_root, tmp_path):
    given = {"folder": "ward/scans", "epsilon": "2", "size": "8", "mode": "grey", "public_size": "1", "number": "50"}
    form = read_form({**given, "unit": "person", "person": "folder:1", "test": "held-out", "skip": "1"}, folders)
    found = parsed(form.arguments(tmp_path)[1:])
    assert found["data"] == str(data_root / "ward" / "scans")
    assert (found["epsilon"], found["number"], found["person"], found["on_error"]) == (2.0, 50, "folder:1", "skip")
    assert found["test"] == str(data_root / "held-out")
    assert found["params"] == ["public_size=true"] or tuple(found["params"]) == ("public_size=true",)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("name", ["person", "issuer", "classes", "label_column", "method", "epsilon", "size", "prior"])
def test_a_value_stays_a_value(folders, tmp_path, name, text):
    """Nothing that somebody types becomes an option, a command or a path."""
    try:
        form = read_form({"folder": "ward/scans", "unit": "person", "person": "folder:1", name: text}, folders)
    except DataError:
        return
    found = parsed(form.arguments(tmp_path)[1:])
    assert found[name] == text
    assert found["target"] == tmp_path
    assert found["data"].endswith("ward/scans")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epsilon": "inf"}, "epsilon: expected a number"),
        ({"epsilon": "nan"}, "epsilon: expected a number"),
        ({"epsilon": "-1"}, "epsilon"),
        ({"delta": "1"}, "delta"),
        ({"number": "1e9"}, "number: expected a whole number"),
        ({"size": "100000"}, "size"),
        ({"method": "dm"}, "method: expected one of auto, dp-merf"),
        ({"method": "pge-as-published"}, "method"),
        ({"prior": "/etc"}, "prior"),
        ({"test": "../x"}, "below the root"),
        ({"budget": "../x.budget"}, "below the root"),
        ({"budget": "ward/nothing.budget"}, "no budget file"),
        ({"unit": "person"}, "say where the person"),
        ({"unit": "person", "person": "regex:(a+)+$"}, "for the command line"),
        ({"label_column": "regex:(a+)+$"}, "for the command line"),
        ({"issuer": "x" * 301}, "at most 300"),
    ],
)
def test_a_mistake_is_named(folders, given, message):
    with pytest.raises(DataError, match=re.escape(message)):
        read_form({"folder": "ward/scans", **given}, folders)


def test_the_plan_follows_the_fields(served):
    person = served.person()
    path = "/plan?folder=ward/scans&size=8&mode=grey&method=dp-merf&epsilon="
    small, large = (person.client.get(path + epsilon).text for epsilon in ("0.5", "4"))
    multiplier = [float(re.findall(r"noise multiplier ([\d.]+)", text)[0]) for text in (small, large)]
    assert multiplier[0] > 4 * multiplier[1]
    for text in ("8 × 8 pixels, grey", "4 (0, 1, 2, 3)", "one image", "For you only"):
        assert text in large
    assert "hardly any protection" in person.client.get(path + "100").text
    assert "one person" in person.client.get(path + "1&unit=person&person=file").text
    assert "has no columns" in person.client.get(path + "1&label_column=finding").text


def test_a_mistake_starts_nothing(served):
    person = served.person()
    for data in ({"folder": "ward", "size": "8"}, {"folder": "ward/scans", "epsilon": "x"}, {"folder": "../x"}):
        answer = person.post("/runs", data={"request": "a" * 32, **data})
        assert answer.status_code == 400
        assert "The run was not started" in answer.text
    assert person.post("/runs", data={"folder": "ward/scans", "size": "8"}).status_code == 400  # without a request
    assert list(served.runs.iterdir()) == []
    assert str(served.root) not in person.client.get("/plan?folder=ward&size=8").text


def test_a_run_that_exceeds_the_budget_of_the_data_is_not_started(served, data_root):
    DatasetBudget.open(data_root / "small.budget", 0.5, 1e-5)
    person = served.person()
    data = {"request": "b" * 32, "folder": "ward/scans", "size": "8", "mode": "grey", "budget": "small.budget"}
    answer = person.post("/runs", data={**data, "epsilon": "1"})
    assert answer.status_code == 400
    assert "small.budget allows epsilon 0.5" in answer.text
    picture = next((data_root / "ward").rglob("*.png"))
    before = picture.read_bytes()
    answer = person.post("/runs", data={**data, "budget": picture.relative_to(data_root).as_posix()})
    assert "The run was not started" in answer.text
    assert picture.read_bytes() == before  # a file that is no budget stays as it is
    assert not picture.with_suffix(".lock").exists()
    assert list(served.runs.iterdir()) == []


def test_typed_text_comes_back_as_text(served):
    person = served.person()
    text = '"><script>alert(1)</script>'
    answer = person.client.get("/new", params={"folder": text, "issuer": text, "epsilon": text, "classes": text})
    assert "<script>alert" not in answer.text
    assert "&lt;script&gt;" in answer.text


def test_no_route_sends_a_private_image(served):
    """Every path of the images, in every form that a browser could ask for it."""
    person = served.person()
    for path in (served.root / "ward" / "scans").rglob("*.png"):
        private, name = path.read_bytes(), path.relative_to(served.root).as_posix()
        for wanted in (f"/{name}", f"/static/../{name}", f"/static/..%2f{name}", f"/runs/{name}", f"/runs/..%2f{name}"):
            answer = person.client.get(wanted)
            assert answer.status_code in (403, 404)
            assert private not in answer.content
        break
    page = person.client.get("/new?folder=ward/scans&size=8").text
    assert "<img" not in page
