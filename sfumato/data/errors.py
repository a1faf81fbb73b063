"""What goes wrong with image sets: bad input is a `DataError`, what can be gone on with is a `DataWarning`."""

from __future__ import annotations

from collections.abc import Sequence


class DataError(ValueError):
    """Images or labels that cannot be read, written or used; the message says what, why and how to go on."""


class DataWarning(UserWarning):
    """Images were left out because the caller asked for `on_error="skip"`, or there are very few."""


UNLABELLED = "pass labels=False (--unlabelled) to read the images as one unlabelled collection"


def first_few(names: Sequence[str], limit: int = 3) -> str:
    """Name the first few culprits and count the others."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def reason(error: BaseException) -> str:
    """The plain words of an exception, without the path that an OSError repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
