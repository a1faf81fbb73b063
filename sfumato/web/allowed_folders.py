"""Folders and files below an allowed root, by names that come from a browser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sfumato.data import DataError
from sfumato.data.folders import RUNS_FOLDER

FILE_SUFFIXES = (".npz", ".parquet", ".tar")
MAX_ENTRIES = 500  # of a folder that are shown


@dataclass(frozen=True)
class FolderEntry:
    """A folder or file that can be chosen: its name, its path below the root, and whether it can be opened."""

    name: str
    path: str
    folder: bool


class AllowedFolders:
    """The folders below `root` that may be read. `hidden` is one that is not shown: the folder of the runs.

    Links are allowed if they stay below the root. Whoever can write below the root is trusted: a link that is exchanged
    after it was checked is not noticed.
    """

    def __init__(self, root: Path, hidden: Path) -> None:
        self.root = root.resolve(strict=True)
        self.hidden = hidden.resolve()

    def find(self, name: str) -> Path:
        """Return the real path of a folder or file below the root. Raise `DataError` for every other name."""
        parts = Path(name).parts
        if "\0" in name or Path(name).is_absolute() or ".." in parts or any(part[0] == "~" for part in parts):
            raise DataError("choose a folder below the root of this server")
        try:
            found = (self.root / name).resolve(strict=True)
        except (OSError, RuntimeError):
            raise DataError(f"there is no folder {name!r} below the root of this server") from None
        if found in self.hidden.parents and self.hidden.name != RUNS_FOLDER:
            raise DataError("the runs of this server lie in that folder; start it with --out elsewhere")
        if not self._allowed(found) or not (found.is_dir() or found.suffix.lower() in FILE_SUFFIXES):
            raise DataError("choose a folder below the root of this server")
        return found

    def name_of(self, path: Path) -> str:
        """Return the name of a path below the root, for people and links."""
        return path.relative_to(self.root).as_posix()

    def entries(self, folder: Path) -> list[FolderEntry]:
        """List the folders and data files in a folder, at most `MAX_ENTRIES`."""
        try:
            children = sorted(folder.iterdir())
        except OSError as error:
            raise DataError(f"{self.name_of(folder)} cannot be read: {error.strerror}") from None
        found = []
        for child in children:
            usable = child.is_dir() or child.suffix.lower() in FILE_SUFFIXES
            if child.name[0] != "." and usable and self._allowed(child.resolve()):
                found.append(
                    FolderEntry(child.name, (folder / child.name).relative_to(self.root).as_posix(), child.is_dir())
                )
        return found[:MAX_ENTRIES]

    def check_links(self, path: Path) -> None:
        """Raise `DataError` if a link below `path` leads out of the root."""
        for link in _links(path):
            if not self._allowed(link.resolve()):
                raise DataError(f"{self.name_of(link)} is a link that leads out of the root of this server; remove it")

    def _allowed(self, path: Path) -> bool:
        inside = path == self.root or self.root in path.parents
        return inside and path != self.hidden and self.hidden not in path.parents


def _links(path: Path) -> Iterator[Path]:
    """Yield all links below a folder."""
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            child = Path(folder) / name
            if child.is_symlink():
                yield child
