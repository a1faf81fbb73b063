"""Methods of other packages: found by their entry points, without being installed by pip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sfumato.methods.dp_merf import MeanEmbedding

EXAMPLES = Path(__file__).parents[2] / "examples"
GROUP = "sfumato.methods"
PROGRAM = """
import json, sys, warnings
import sfumato as sf

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    keys = [info.key for info in sf.list_methods()]
    types = {key: [type(sf.create(key)).__module__, type(sf.create(key)).__name__] for key in sys.argv[1:]}
print(json.dumps({"keys": keys, "types": types, "warnings": [str(each.message) for each in caught]}))
"""


def install(folder: Path, name: str, points: dict[str, str]) -> None:
    """Write what pip would write for a distribution with these entry points."""
    info = folder / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    lines = [f"{key} = {value}" for key, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))


def found(*folders: Path, create: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what a new process finds with these folders on its path."""
    path = os.pathsep.join([str(folder) for folder in folders] + [os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *create],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def test_the_example_is_found_by_its_entry_point(tmp_path: Path) -> None:
    project = tomllib.loads((EXAMPLES / "plugin" / "pyproject.toml").read_text("utf-8"))
    points = project["project"]["entry-points"][GROUP]
    assert list(points) == ["cosine-gaussian"]
    install(tmp_path, project["project"]["name"], points)
    answer = found(tmp_path, EXAMPLES, create=("cosine-gaussian", "dp-merf"))
    assert "cosine-gaussian" in answer["keys"]
    assert answer["types"]["cosine-gaussian"] == ["add_a_method", "CosineGaussian"]
    assert answer["types"]["dp-merf"] == [MeanEmbedding.__module__, MeanEmbedding.__name__]
    assert not answer["warnings"]
    assert answer["keys"].count("cosine-gaussian") == 1


BROKEN = {
    "no module": ("broken-plugin", "no_such_module:Method", ""),
    "no class": ("broken-plugin", "broken_plugin:Method", "x = 1"),
    "error on import": ("broken-plugin", "broken_plugin:Method", "raise RuntimeError('this plugin is broken')"),
    "not a method": ("broken-plugin", "broken_plugin:Method", "class Method:\n    key = 'broken-plugin'"),
    "not a class": ("broken-plugin", "broken_plugin:Method", "Method = 3"),
    "no summary": (
        "broken-plugin",
        "broken_plugin:Method",
        "import add_a_method\n"
        "methods = {n: v for n, v in vars(add_a_method.CosineGaussian).items() if n.startswith('_') and callable(v)}\n"
        "Method = type('Method', (add_a_method.Synthesizer,), {**methods, 'key': 'broken-plugin'})",
    ),
    "abstract": (
        "broken-plugin",
        "broken_plugin:Method",
        "from sfumato.methods import Synthesizer\nclass Method(Synthesizer):\n"
        "    key = 'broken-plugin'\n    paper = ''\n    summary = ''",
    ),
    "another key": (
        "broken-plugin",
        "broken_plugin:Method",
        "from add_a_method import CosineGaussian\nclass Method(CosineGaussian):\n    key = 'other-key'",
    ),
    "a built-in key": (
        "dp-merf",
        "broken_plugin:Method",
        "from add_a_method import CosineGaussian\nclass Method(CosineGaussian):\n    key = 'dp-merf'",
    ),
}


@pytest.fixture(scope="module")
def with_broken_ones(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All broken plugins and the sound one on one path: what `sf.list_methods()` and `sf.create()` say."""
    folder = tmp_path_factory.mktemp("plugins")
    for number, (name, value, source) in enumerate(BROKEN.values()):
        module = f"broken_plugin_{number}"
        (folder / f"{module}.py").write_text(source)
        install(folder, f"plugin-{number}", {name: value.replace("broken_plugin", module)})
    install(folder, "sound", {"cosine-gaussian": "add_a_method:CosineGaussian"})
    return found(folder, EXAMPLES, create=("cosine-gaussian", "dp-merf"))


@pytest.mark.parametrize("number", range(len(BROKEN)), ids=list(BROKEN))
def test_a_broken_plugin_is_a_warning_that_names_it(number: int, with_broken_ones: dict[str, Any]) -> None:
    name, value, _ = list(BROKEN.values())[number]
    module = value.partition(":")[0].replace("broken_plugin", f"broken_plugin_{number}")
    said = [text for text in with_broken_ones["warnings"] if name in text and module in text]
    assert len(said) == 1, with_broken_ones["warnings"]


def test_a_broken_plugin_changes_nothing_else(with_broken_ones: dict[str, Any]) -> None:
    """No crash, no key of a broken plugin, the built-in method under its key, and the sound plugin still there."""
    keys = with_broken_ones["keys"]
    assert not {"broken-plugin", "other-key"} & set(keys)
    assert keys.count("dp-merf") == keys.count("cosine-gaussian") == 1
    assert with_broken_ones["types"]["dp-merf"] == [MeanEmbedding.__module__, MeanEmbedding.__name__]
    assert with_broken_ones["types"]["cosine-gaussian"] == ["add_a_method", "CosineGaussian"]
