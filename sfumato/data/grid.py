"""Draw a contact sheet: one PNG that shows some images of a set."""

from __future__ import annotations

import math
import unicodedata
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from sfumato.data.atomic import replacing
from sfumato.data.decode import to_pil_image
from sfumato.data.errors import DataError
from sfumato.data.imageset import ImageSet

MIN_CELL_SIZE = 56
GAP = 2
MAX_ROWS = 20
MAX_NAME_LENGTH = 24
FONT_SIZE = 14
FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "Arial.ttf")


def contact_sheet(images: ImageSet, path: str | Path, *, per_class: int = 10, scale: int | None = None) -> Path:
    """Write a PNG with one row for each class (at most 20, evenly spaced), or a square grid if unlabelled.

    - per_class: images in a row.
    - scale: integer enlargement; by default, images become at least 56 pixels high and wide.
    """
    if per_class < 1 or (scale is not None and scale < 1):
        raise DataError(f"per_class={per_class}, scale={scale}: both must be at least 1")
    path = Path(path)
    _, height, width = images.shape
    scale = scale or max(1, math.ceil(MIN_CELL_SIZE / min(height, width)))
    rows, names = _rows(images, per_class)
    columns = max(len(row) for row in rows)
    font, has_unicode = load_font()
    names = names if has_unicode else [_to_ascii(name) for name in names]
    margin = max((math.ceil(font.getlength(name)) for name in names), default=0)
    margin = margin + 4 * GAP if margin else 0
    row_height, column_width = height * scale + GAP, width * scale + GAP
    row_height = max(row_height, FONT_SIZE + 4) if margin else row_height
    sheet = Image.new("RGB", (margin + columns * column_width + GAP, len(rows) * row_height + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for number, row in enumerate(rows):
        top = GAP + number * row_height
        if names:
            draw.text((2 * GAP, top + (row_height - GAP) // 2), names[number], fill="black", font=font, anchor="lm")
        for column, index in enumerate(row):
            cell = _cell(images.images[index], scale)
            sheet.paste(cell, (margin + GAP + column * column_width, top))
    with replacing(path, overwrite=True) as temporary:
        sheet.save(temporary, "png")
    return path


def _rows(images: ImageSet, per_class: int) -> tuple[list[list[int]], list[str]]:
    """Return the indices of the images in each row, and the row names (none if unlabelled)."""
    if images.labels is None:
        side = min(per_class, math.ceil(math.sqrt(len(images))))
        shown = list(range(min(len(images), side * side)))
        return [shown[start : start + side] for start in range(0, len(shown), side)], []
    count = len(images.classes)
    labels = [int(label) for label in np.linspace(0, count - 1, min(count, MAX_ROWS)).round()]
    rows = [torch.nonzero(images.labels == label)[:per_class, 0].tolist() for label in labels]
    return rows, [_truncate(images.classes[label]) for label in labels]


def load_font() -> tuple[ImageFont.FreeTypeFont | ImageFont.ImageFont, bool]:
    """Return a font, and whether it covers Unicode: a system font does, Pillow's built-in font does not."""
    for name in FONTS:
        try:
            return ImageFont.truetype(name, FONT_SIZE), True
        except OSError:
            continue
    return ImageFont.load_default(size=FONT_SIZE), False


def _to_ascii(name: str) -> str:
    """Remove accents, and replace other non-ASCII letters by question marks."""
    letters = (letter for letter in unicodedata.normalize("NFKD", name) if not unicodedata.combining(letter))
    return "".join(letter if letter.isascii() else "?" for letter in letters)


def _truncate(name: str) -> str:
    printable = "".join(letter if letter.isprintable() else "?" for letter in name)
    return printable if len(printable) <= MAX_NAME_LENGTH else printable[: MAX_NAME_LENGTH - 1] + "…"


def _cell(image: torch.Tensor, scale: int) -> Image.Image:
    cell = to_pil_image(image.numpy())
    return cell.resize((cell.width * scale, cell.height * scale), Image.Resampling.NEAREST)
