"""Write tables and plots into README.md and docs/ from the result files.

A table stands between `<!-- BEGIN TABLE name -->` and `<!-- END TABLE name -->`; what is between them is replaced.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from benchmarks.layouts import LAYOUTS
from benchmarks.plots import PLOTS, fingerprint
from benchmarks.store import ROOT

BLOCK = re.compile(r"(<!-- BEGIN TABLE ([\w-]+) -->\n)(.*?)(<!-- END TABLE \2 -->)", re.DOTALL)


def pages(root: Path = ROOT) -> list[Path]:
    """Return the pages that may hold tables."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def rendered(text: str, results: str = "benchmarks/results") -> str:
    """Return a page with its tables replaced. `results` is the path of the result files from the page."""
    begins = re.findall(r"<!-- BEGIN TABLE ([^>]*?) -->", text)
    if begins != [match[2] for match in BLOCK.finditer(text)]:
        raise ValueError(f"a BEGIN TABLE marker has no END TABLE marker of the same name: {begins}")
    if unknown := sorted(set(begins) - LAYOUTS.keys()):
        raise KeyError(f"no table {', '.join(unknown)}; tables are {', '.join(LAYOUTS)}")

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}\n{LAYOUTS[match[2]]().replace('](results:', f']({results}/')}\n\n{match[4]}"

    return BLOCK.sub(block, text)


def render(root: Path = ROOT, *, check: bool = False) -> list[Path]:
    """Rewrite what is out of date, or with `check` only find it; return those files."""
    stale = []
    for page in pages(root):
        text = page.read_text()
        if (new := rendered(text, os.path.relpath(root / "benchmarks" / "results", page.parent))) != text:
            stale.append(page)
            if not check:
                page.write_text(new)
    for name, (data, draw) in PLOTS.items():
        path = root / "docs" / "results" / name
        if fingerprint(path) != (mark := data()):
            stale.append(path)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                draw(path, mark)
    return stale
