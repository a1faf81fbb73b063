"""MkDocs hooks: put the files of the repository that pages link to into the site.

A page links to `../benchmarks/results/dp_merf.json` as on a code host. The site holds a copy of that file, so that
the link works without a network. A link to a file that does not exist is a warning, and warnings are errors.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()(?P<target>\.\./[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
log = get_plugin_logger(__name__)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Point links to files outside docs/ to copies of these files in the site."""
    folder = PurePosixPath(page.file.src_uri).parent

    def pointed(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match["target"]))
        if path.startswith("docs/"):
            return match[0]
        if not (ROOT / path).is_file():
            log.warning("%s links to %s, which is not a file of the repository", page.file.src_uri, path)
            return match[0]
        copy = f"repository/{path}"
        if copy not in files.src_uris:
            files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
        return posixpath.relpath(copy, str(folder))

    return LINK.sub(pointed, markdown)
