"""Every Python block and every `sfumato` command of README and docs runs, page by page, on small images.

A page runs from top to bottom in its own folder and its own namespace. Training loops take two steps here, classifiers
one epoch. A block after `<!-- not tested: reason -->` is left out.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

from sfumato import cli, priors, synthesize
from sfumato.data import DataWarning, ImageSet, PublicFacts, load
from sfumato.data.named import read_digits
from sfumato.evaluate import Accuracy, Recipe, downstream_accuracy, protocol
from sfumato.methods import METHODS, Synthesizer
from sfumato.methods.checkpoints import Checkpoints
from sfumato.priors import Prior, train_prior
from sfumato.priors.denoising import PriorTraining

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)``` *(?:\{ *\.)?(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
NOT_TESTED = re.compile(r"<!-- not tested: \S[^>]+ -->\s*$")
INCLUDE = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
SHOWN = {"text", "toml", "json", "csv"}  # languages of blocks that are no code to run
SKIPPED = ("make ", "pip ", ". ", "python -m benchmarks ")  # other programs
STEPS = 2  # of every training loop
SMALL = {"features": 100, "features_per_step": 50, "cnn_images": 50, "batch_size": 20, "images": 100, "levels": 2}
SMALL |= {"pool": 20, "practice_batch": 4}
IMAGES = 300  # of the digits


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page that run."""
    text = page.read_text("utf-8")
    for match in FENCE.finditer(text):
        line = text[: match.start()].count("\n") + 1
        assert match[2] in SHOWN | {"python", "bash", "console"}, f"{page.name}:{line}: a block without known language"
        if match[2] not in SHOWN and not NOT_TESTED.search(text[: match.start()]):
            code = INCLUDE.sub(lambda include: (ROOT / include[1]).read_text("utf-8"), match[3])
            yield Block(match[2], re.sub(f"^{match[1]}", "", code, flags=re.MULTILINE), line)


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each `sfumato` command; refuse commands that nobody expected."""
    for text in block.code.replace("\\\n", " ").splitlines():
        if block.language == "console" and not text.startswith("$ "):
            continue  # output
        line = text.removeprefix("$ ").strip()
        if line.startswith("sfumato "):
            yield shlex.split(line, comments=True)
        elif line and not line.startswith(("#", *SKIPPED)):
            raise AssertionError(f"line {block.line}: {line!r} is no sfumato command; mark the block as not tested")


@pytest.fixture
def folder(tmp_path: Path, digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folders that pages name, with class folders: scans/, held-out/, new-scans/, public-…/; and flat/."""
    (tmp_path / "flat").mkdir()
    lines = ["file,label,patient"]
    sources = ("scans", "held-out", "new-scans", "public-scans", "public-validation")
    for number in range(330):
        name = ("healthy", "glioma", "other")[number % 3]
        source = sources[(number > 149) + (number > 199) + (number > 239) + (number > 299)]
        target = tmp_path / source / name / f"patient{number % 60:02}" / f"{number}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(digits.images[number, 0].numpy()).resize((32, 32))
        picture.save(target)
        if source == "scans":
            picture.save(tmp_path / "flat" / target.name)
            lines.append(f"{target.name},{name},{number % 60}")
    (tmp_path / "flat" / "labels.csv").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten all loops and shrink all settings; what a page says about accuracy is not tested here."""
    loop, resolved = Checkpoints.loop, Synthesizer._resolved

    def short_loop(self: Checkpoints, name: str, total: int, **parts: Any) -> Iterator[int]:
        return loop(self, name, min(total, STEPS), **parts)

    def small_resolved(self: Synthesizer, public: PublicFacts) -> Synthesizer:
        model = resolved(self, public)
        for name, value in smaller(model).items():
            setattr(model, name, value)
        return model

    def few_digits(split: str) -> ImageSet:
        return read_digits(split).subset(torch.arange(IMAGES))

    def small_prior(*given: Any, settings: PriorTraining, **options: Any) -> Prior:
        small = replace(settings, steps=STEPS, batch_size=4, widths=(8, 8), context=8, attention=1)
        return train_prior(*given, settings=small, **options)

    monkeypatch.setattr(priors, "train_prior", small_prior)
    monkeypatch.setattr(Checkpoints, "loop", short_loop)
    monkeypatch.setattr(Synthesizer, "_resolved", small_resolved)
    monkeypatch.setattr(load, "read_digits", few_digits)
    monkeypatch.setattr(synthesize, "DEFAULT_IMAGES", 100)
    for module in (protocol, synthesize):
        monkeypatch.setattr(module, "downstream_accuracy", one_epoch)


def smaller(settings: Any) -> dict[str, Any]:
    """Return the fields of settings that `SMALL` limits, also inside of settings that they hold."""
    found = {}
    for each in fields(settings):
        value = getattr(settings, each.name)
        if each.name in SMALL and isinstance(value, int):
            found[each.name] = min(value, SMALL[each.name])
        elif is_dataclass(value) and not isinstance(value, type):
            found[each.name] = replace(value, **smaller(value))
    return found


def one_epoch(synthetic: ImageSet, test: ImageSet, *names: str, **options: Any) -> Accuracy:
    """Train a classifier for one epoch."""
    recipe = replace(options.pop("recipe", Recipe()), epochs=1)
    return downstream_accuracy(synthetic, test, *names, recipe=recipe, **options)


def run_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command line in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", words)
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, folder: Path, short_runs: None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look their module up
    registered = set(METHODS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataWarning)  # the folders are small
            for block in blocks(page):
                if block.language == "python":
                    exec(compile(block.code, f"{page.name}:{block.line}", "exec"), vars(module))
                    continue
                for words in commands(block):
                    status = run_command(words, monkeypatch)
                    assert status == 0, f"{page.name}:{block.line}: {shlex.join(words)}\n{capsys.readouterr().err}"
    finally:
        for key in set(METHODS) - registered:
            del METHODS[key]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```\nsfumato methods\n```\n", "without known language"),
        ("```bash\nrm -rf scans/\n```\n", "no sfumato command"),
    ],
)
def test_a_block_that_nobody_runs_is_refused(text: str, message: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(AssertionError, match=message):
        [list(commands(block)) for block in blocks(page)]


def test_a_block_is_left_out_with_a_reason_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- not tested: needs a GPU -->\n\n```python\n1 / 0\n```\n\n```python\n1 / 1\n```\n")
    assert [block.code for block in blocks(page)] == ["1 / 1\n"]


BENCHMARK = re.compile(r"python -m benchmarks ([\w-]+)")


def unknown_benchmarks(text: str, known: set[str]) -> list[str]:
    """Return the names after `python -m benchmarks` that are no table, command, option or placeholder."""
    names = BENCHMARK.findall(text)
    return [
        name
        for name in names
        if name not in known and not name.startswith("-") and not name.removeprefix("speed-").isupper()
    ]


def test_every_benchmark_that_a_page_names_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)  # the benchmarks are not installed
    front = importlib.import_module("benchmarks.__main__")
    known = {*front.tables(), *front.COMMANDS, "list", "all", "render", "merge"}
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        assert not unknown_benchmarks(page.read_text("utf-8"), known), page.name
    assert unknown_benchmarks("`python -m benchmarks encoders`", known) == ["encoders"]
    assert not unknown_benchmarks("`python -m benchmarks TABLE`, `python -m benchmarks --help`", known)
