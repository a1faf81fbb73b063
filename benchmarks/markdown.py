"""Parts of rendered tables that all layouts share."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from functools import cache

from benchmarks.store import load

CAPTION = "Mean ± sd of 3 seeds, in brackets the number of seeds where it is not 3; δ = 10⁻⁵."

WIDTH = 140  # characters in a line below a table

table = cache(load)


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    header = list(header)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])


def wrapped(text: str) -> str:
    """Return a paragraph in lines of at most `WIDTH` characters. Code spans and links stay in one line."""
    whole = re.sub(r"`[^`]*`|\]\([^)]*\)", lambda match: match[0].replace(" ", "\0"), text)
    return textwrap.fill(whole, WIDTH, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def source(note: str, *names: str, seeds: bool = True) -> str:
    """Return the lines below a table: what it shows, and the commands and files of its figures."""
    files = ", ".join(f"[`{name}.json`](results:{name}.json)" for name in names)
    command = names[0] if len(names) == 1 else "NAME"
    caption = f" {CAPTION}" if seeds else ""
    return wrapped(f"{note}{caption} `python -m benchmarks {command}` → {files}.")
