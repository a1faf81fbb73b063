"""Pages are short and up to date, links and pictures exist, the site builds and loads nothing from a network."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sfumato
from sfumato.methods import METHODS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SHORT = [ROOT / "README.md", DOCS / "priors.md", *sorted((DOCS / "methods").glob("*.md"))]
MAX_WORDS = 900
GENERATED = re.compile(r"<!-- BEGIN (\w+) ([\w-]+) -->.*?<!-- END \1 \2 -->", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
# What a browser loads by itself: scripts, styles, fonts, pictures. Links that a reader follows are allowed.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*?\bsrc=["']?(?:https?:)?//|<link\b[^>]*?\bhref=["']?(?:https?:)?//"""
)
STYLED = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//")


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", SHORT, ids=relative)
def test_short_pages_are_short(page: Path) -> None:
    assert len(GENERATED.sub("", page.read_text("utf-8")).split()) <= MAX_WORDS


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_and_pictures_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    targets = [target for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_generated_block_is_filled(page: Path) -> None:
    empty = [match[2] for match in GENERATED.finditer(page.read_text("utf-8")) if match[0].count("\n") < 3]
    assert empty == []


def test_every_picture_is_used() -> None:
    used = {(page.parent / target).resolve() for page in PAGES for target in LINK.findall(page.read_text("utf-8"))}
    assert [path for path in DOCS.rglob("*.png") if path.resolve() not in used] == []


def test_every_method_is_documented() -> None:
    text = "".join(page.read_text("utf-8") for page in SHORT)
    assert [key for key in METHODS if f"`{key}`" not in text] == []


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "reference" / "api.md").read_text("utf-8")
    elsewhere = {"Vault": "sfumato.engine.GradientVault"}  # functions that have a module of their name:
    elsewhere |= {"evaluate": "sfumato.evaluate.evaluate", "verify": "sfumato.certificate.verify.verify"}
    names = {name: elsewhere.get(name, f"sfumato.{name}") for name in sfumato.__all__}
    assert [name for name, path in names.items() if f"::: {path}\n" not in text] == []


def test_generated_parts_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.stale(write=False) == [], "run: python docs/generate.py"


def test_the_site_builds_and_loads_nothing_remote(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for path in (tmp_path / "site").rglob("*"):
        if path.suffix in (".html", ".css"):
            text = path.read_text("utf-8")
            assert not LOADED.search(text), path
            assert not STYLED.search(text), path
