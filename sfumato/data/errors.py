"""Errors and warnings about image sets, and helpers for their messages."""

from __future__ import annotations

from collections.abc import Sequence


class DataError(ValueError):
    """Raised if images or labels cannot be read, written or used. The message says what is wrong and what to do."""


class DataWarning(UserWarning):
    """Issued if files were left out (`on_error="skip"`), or if a set has very few images."""


UNLABELLED_HINT = "pass labels=False (--unlabelled) to read the images without labels"


def first_few(names: Sequence[str], limit: int = 3) -> str:
    """List the first names and count the others."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def reason(error: BaseException) -> str:
    """Return the message of an exception in one line, without the path that an OSError repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return " ".join(str(error).split()) or type(error).__name__
