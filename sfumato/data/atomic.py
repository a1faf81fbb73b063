"""Writing that happens wholly or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import DataError, reason


@contextmanager
def replacing(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a temporary path beside `target`, to be written as a file or a folder, and rename it at the end.

    Whatever happens before the rename, the temporary is removed and an existing target stays as it was.
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


def _move(temporary: Path, target: Path) -> None:
    if not (temporary.is_dir() and target.is_dir()):
        os.replace(temporary, target)
        return
    # A folder cannot be replaced in one step: the old one is set aside until the new one stands.
    aside = temporary.with_suffix(".old")
    target.rename(aside)
    try:
        temporary.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
