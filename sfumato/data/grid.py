"""A contact sheet: one picture that shows what an image set looks like."""

from __future__ import annotations

import math
import unicodedata
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from .atomic import replacing
from .decode import to_picture
from .errors import DataError
from .imageset import ImageSet

CELL = 56
GAP = 2
MOST_ROWS = 20
LONGEST_NAME = 24
FONT_SIZE = 14
FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "Arial.ttf")


def contact_sheet(images: ImageSet, path: str | Path, *, per_class: int = 10, scale: int | None = None) -> Path:
    """Write a PNG with one row per class (at most 20, evenly spaced), or a square grid if unlabelled."""
    if per_class < 1 or (scale is not None and scale < 1):
        raise DataError(f"per_class={per_class}, scale={scale}: both must be at least 1")
    path = Path(path)
    _, height, width = images.shape
    enlarge = scale or max(1, math.ceil(CELL / min(height, width)))
    rows, names = _rows(images, per_class)
    columns = max(len(row) for row in rows)
    font, every_letter = _font()
    names = names if every_letter else [_plain(name) for name in names]
    margin = max((math.ceil(font.getlength(name)) for name in names), default=0)
    margin = margin + 4 * GAP if margin else 0
    tall, wide = height * enlarge + GAP, width * enlarge + GAP
    tall = max(tall, FONT_SIZE + 4) if margin else tall
    sheet = Image.new("RGB", (margin + columns * wide + GAP, len(rows) * tall + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for number, row in enumerate(rows):
        top = GAP + number * tall
        if names:
            draw.text((2 * GAP, top + (tall - GAP) // 2), names[number], fill="black", font=font, anchor="lm")
        for column, index in enumerate(row):
            cell = _cell(images.images[index], enlarge)
            sheet.paste(cell, (margin + GAP + column * wide, top))
    with replacing(path, overwrite=True) as temporary:
        sheet.save(temporary, "png")
    return path


def _rows(images: ImageSet, per_class: int) -> tuple[list[list[int]], list[str]]:
    """The indices to show, row by row, and the names of the rows (none if unlabelled)."""
    if images.labels is None:
        side = min(per_class, math.ceil(math.sqrt(len(images))))
        shown = list(range(min(len(images), side * side)))
        return [shown[start : start + side] for start in range(0, len(shown), side)], []
    chosen = range(len(images.classes))
    if len(chosen) > MOST_ROWS:
        chosen_labels = [int(label) for label in np.linspace(0, len(chosen) - 1, MOST_ROWS).round()]
    else:
        chosen_labels = list(chosen)
    rows = [torch.nonzero(images.labels == label)[:per_class, 0].tolist() for label in chosen_labels]
    return rows, [_short(images.classes[label]) for label in chosen_labels]


def _font() -> tuple[ImageFont.FreeTypeFont | ImageFont.ImageFont, bool]:
    """A font of the system that knows accents and alphabets, or Pillow's own, which does not."""
    for name in FONTS:
        try:
            return ImageFont.truetype(name, FONT_SIZE), True
        except OSError:
            continue
    return ImageFont.load_default(size=FONT_SIZE), False


def _plain(name: str) -> str:
    """The name in ASCII: é becomes e, what has no such letter a question mark."""
    letters = (letter for letter in unicodedata.normalize("NFKD", name) if not unicodedata.combining(letter))
    return "".join(letter if letter.isascii() else "?" for letter in letters)


def _short(name: str) -> str:
    printable = "".join(letter if letter.isprintable() else "?" for letter in name)
    return printable if len(printable) <= LONGEST_NAME else printable[: LONGEST_NAME - 1] + "…"


def _cell(image: torch.Tensor, enlarge: int) -> Image.Image:
    cell = to_picture(image.numpy())
    return cell.resize((cell.width * enlarge, cell.height * enlarge), Image.Resampling.NEAREST)
