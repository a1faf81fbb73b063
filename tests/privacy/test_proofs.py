"""Every function, file and test that the proofs name exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("proofs.md", "limitations.md", "persons.md")]
MODULES = ("data", "privacy", "engine", "cluster", "certificate")
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}


def quoted(pages: list[Path]) -> list[str]:
    """List the code spans of pages that look like names of functions, tests or files of the project."""
    spans = re.findall(r"`([^`\s]+)`", "".join(page.read_text() for page in pages))
    prefixes = r"test_|tests/|sfumato/|Vault\.|Ledger\.|KeptResults\.|DatasetBudget\.|Certificate\.|[a-z_]+\._?[a-zA-Z]"
    return sorted(
        {span for span in spans if re.match(prefixes, span) and not re.match(r"torch\.|\w+\.(log|csv|json)", span)}
    )


def exists(name: str) -> bool:
    if "/" in name:
        return (ROOT / name).exists()
    if name.startswith("test_"):
        return name in TESTS
    if name.endswith(".py"):
        return any((ROOT / "sfumato").rglob(name))
    owner, _, attribute = name.partition(".")
    modules = [
        f"sfumato.{folder}.{path.stem}" for folder in MODULES for path in (ROOT / "sfumato" / folder).glob("*.py")
    ]
    for path in [*modules, "sfumato.testing"]:
        module = importlib.import_module(path.removesuffix(".__init__"))
        holder = module if path.rsplit(".", 1)[1] == owner else getattr(module, owner, None)
        if holder is not None and hasattr(holder, attribute):
            return True
    return False


@pytest.mark.parametrize("name", quoted(PAGES))
def test_a_name_in_the_proofs_exists(name: str) -> None:
    assert exists(name)


def test_a_wrong_name_is_found() -> None:
    for name in ("test_nothing", "Vault.absent", "clipping.absent", "sfumato/absent.py", "absent.py"):
        assert not exists(name)
