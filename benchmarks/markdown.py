"""Parts of rendered tables that all layouts share."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from benchmarks.store import load

CAPTION = "Mean ± sd of 3 seeds, in brackets the number of seeds where it is not 3; δ = 10⁻⁵."

table = cache(load)


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    header = list(header)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])


def source(note: str, *names: str, seeds: bool = True) -> str:
    """Return the lines below a table: what it shows, and the commands and files of its figures."""
    files = ", ".join(f"[`{name}.json`](results:{name}.json)" for name in names)
    command = names[0] if len(names) == 1 else "NAME"
    caption = f" {CAPTION}" if seeds else ""
    return f"{note}{caption} `python -m benchmarks {command}` → {files}."
