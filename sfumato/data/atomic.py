"""Atomic writes: a target is either replaced completely or left unchanged."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sfumato.data.errors import DataError, reason


@contextmanager
def replacing(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary path next to `target`, and rename it to `target` at the end.

    The caller writes a file or a folder to the temporary path. If anything fails before the rename, the temporary path
    is removed and an existing target stays unchanged.
    """
    if not overwrite and os.path.lexists(target):
        raise DataError(f"{target} exists already; choose another name, or pass overwrite=True (--overwrite)")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _move(temporary, target)
    except OSError as error:
        raise DataError(f"{target} cannot be written: {reason(error)}; nothing was changed") from error
    finally:
        _remove(temporary)


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON and replace an existing file."""
    with replacing(path, overwrite=True) as temporary:
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _move(temporary: Path, target: Path) -> None:
    if not (temporary.is_dir() and target.is_dir()):
        os.replace(temporary, target)
        return
    # A folder cannot be replaced in one step, so the old one is kept until the new one is in place.
    backup = temporary.with_suffix(".old")
    target.rename(backup)
    try:
        temporary.rename(target)
    except BaseException:
        backup.rename(target)
        raise
    _remove(backup)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
