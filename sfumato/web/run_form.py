"""The form of a run: from the fields of a browser to the options of `sfumato synth`, and what they would release."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.cli_options import DataOptions, MethodOptions, RunOptions, load_options, to_arguments
from sfumato.data import DataError, DataWarning, ImageSet, read_outline
from sfumato.data.persons import REGEX
from sfumato.methods.registry import list_methods
from sfumato.preview import Preview, preview
from sfumato.priors import list_priors
from sfumato.web.allowed_folders import AllowedFolders

DEFAULTS = {"size": "32", "epsilon": "1", "delta": "1e-5", "number": "1000", "method": "auto", "unit": "image"}
MAX_EPSILON, MAX_NUMBER, MAX_TEXT = 1000.0, 1_000_000, 300
CACHE_SECONDS, CACHE_ENTRIES = 60.0, 8


@dataclass(frozen=True)
class RunForm:
    """What somebody asks for: the options of `sfumato synth`, and the fields as they were given."""

    data: DataOptions
    method: MethodOptions
    run: RunOptions
    number: int
    test: Path | None
    fields: dict[str, str]

    def arguments(self, target: Path) -> list[str]:
        """Return the arguments of `sfumato`."""
        own = ["synth", f"--out={target}", f"--number={self.number}"]
        own += [] if self.test is None else [f"--test={self.test}"]
        return [*own, *to_arguments(self.method), *to_arguments(self.run), *to_arguments(self.data)]


def choices() -> dict[str, list[Any]]:
    """Return the methods with a guarantee, and the shipped priors."""
    methods = [info for info in list_methods() if info.guarantee == "differential-privacy"]
    return {"methods": methods, "priors": [card.name for card in list_priors()]}


def read_form(given: Mapping[str, Any], folders: AllowedFolders) -> RunForm:
    """Check the fields of a form. Raise `DataError` that names a field that cannot be used."""
    fields = {name: str(value).strip() for name, value in {**DEFAULTS, **given}.items()}
    text = {name: _text(fields, name) for name in ("label_column", "person", "classes", "issuer", "subject", "budget")}
    if any((text[name] or "").startswith(REGEX) for name in ("person", "label_column")):
        raise DataError("regular expressions are for the command line, since one can keep a server busy for ever")
    person = text["person"] if fields["unit"] == "person" else None
    if fields["unit"] == "person" and person is None:
        raise DataError("say where the person of an image stands, for example folder:1")
    unlabelled = fields.get("labels") == "none"
    data = DataOptions(
        data=str(folders.find(fields.get("folder", ""))),
        size=_number(fields, "size", 1, 1024, whole=True),
        mode=_choice(fields, "mode", ("grey", "rgb")),
        unlabelled=unlabelled,
        classes=None if unlabelled else text["classes"],
        on_error="skip" if fields.get("skip") else "raise",
        person=person,
        label_column=None if unlabelled else text["label_column"],
        frames=_choice(fields, "frames", ("first", "middle", "all")),
    )
    known = choices()
    method = MethodOptions(
        method=_choice(fields, "method", ("auto", *(info.key for info in known["methods"]))) or "auto",
        prior=_choice(fields, "prior", known["priors"]),
        epsilon=_number(fields, "epsilon", 1e-3, MAX_EPSILON),
        delta=_number(fields, "delta", 1e-15, 0.5),
        adjacency=_choice(fields, "adjacency", ("add-remove", "replace-one")),
        params=["public_size=true"] if fields.get("public_size") else None,
    )
    run = RunOptions(
        budget=None if text["budget"] is None else _budget(folders, text["budget"]),
        issuer=text["issuer"],
        subject=text["subject"],
    )
    number = _number(fields, "number", 1, MAX_NUMBER, whole=True) or int(DEFAULTS["number"])
    test = folders.find(fields["test"]) if fields.get("test") else None
    return RunForm(data, method, run, number, test, fields)


class Previews:
    """Previews of runs. Outlines of folders are kept for a minute, so that a slider does not list them each time."""

    def __init__(self, folders: AllowedFolders) -> None:
        self._folders = folders
        self._outlines: dict[DataOptions, tuple[float, ImageSet, list[str]]] = {}
        self._lock = threading.Lock()  # Python's warning filters and the accountant are not made for threads

    def preview(self, form: RunForm) -> tuple[Preview, list[str]]:
        """Return what a run would release, and remarks about the folder, which are for the owner's eyes."""
        with self._lock:
            outline, remarks = self._outline(form.data)
            declared = form.data.size is not None and form.data.mode is not None
            model = form.method.create(outline.shape[0])
            found = preview(model, outline, max_per_person=form.data.max_per_person, shape_declared=declared)
        return found, remarks

    def _outline(self, options: DataOptions) -> tuple[ImageSet, list[str]]:
        now = time.monotonic()
        self._outlines = {key: value for key, value in self._outlines.items() if now - value[0] < CACHE_SECONDS}
        if options not in self._outlines:
            self._folders.check_links(Path(options.data))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", DataWarning)
                images = read_outline(options.data, **load_options(**options.reading()))
            remarks = [str(each.message) for each in caught if issubclass(each.category, DataWarning)]
            for oldest in list(self._outlines)[: len(self._outlines) - CACHE_ENTRIES + 1]:
                del self._outlines[oldest]
            self._outlines[options] = (now, images, remarks)
        return self._outlines[options][1:]


def _text(fields: Mapping[str, str], name: str) -> str | None:
    value = fields.get(name, "")
    if len(value) > MAX_TEXT or not value.isprintable():
        raise DataError(f"{name}: at most {MAX_TEXT} printable characters")
    return value or None


def _choice(fields: Mapping[str, str], name: str, allowed: Any) -> str | None:
    value = fields.get(name, "")
    if value and value not in allowed:
        raise DataError(f"{name}: expected one of {', '.join(allowed)}")
    return value or None


def _number(fields: Mapping[str, str], name: str, low: float, high: float, *, whole: bool = False) -> Any:
    value = fields.get(name, "")
    if not value:
        return None
    try:
        number = int(value) if whole else float(value)
    except ValueError:
        number = math.nan
    if not low <= number <= high:
        raise DataError(f"{name}: expected a {'whole ' * whole}number from {low:g} to {high:g}, got {value[:30]!r}")
    return number


def _budget(folders: AllowedFolders, name: str) -> Path:
    """Return a budget file below the root."""
    folder, _, file = name.rpartition("/")
    path = folders.find(folder) / file
    if path.is_symlink() or not path.is_file():
        raise DataError(f"there is no budget file {name!r} below the root; create it with: sfumato budget open")
    return path
