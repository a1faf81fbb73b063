"""Join contact sheets of several methods: a row for each, with the first images of every class.

    python -m benchmarks.side_by_side --out FILE.png fashion-mnist {atelier,dp-kernel,dp-merf}_fashion-mnist_1.png

A source that is no file is the name of a data set, whose test images are shown. Sheets have ten classes and ten tiles
in a row, as `contact_sheet` makes them; a row is named by its file up to the first underscore.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import sfumato as sf
from sfumato.data import contact_sheet
from sfumato.data.grid import FONT_SIZE, GAP

CLASSES, COLUMNS, EACH = 10, 10, 2


def tiles(path: Path) -> list[Image.Image]:
    """Return the first tiles of every class."""
    with Image.open(path) as picture:
        sheet = picture.convert("RGB")
    side = (sheet.height - GAP) // CLASSES
    left = sheet.width - COLUMNS * side
    corners = [(left + column * side, GAP + row * side) for row in range(CLASSES) for column in range(EACH)]
    return [sheet.crop((x, y, x + side - GAP, y + side - GAP)) for x, y in corners]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows: dict[str, list[Image.Image]] = {}
    for source in options.sources:
        if Path(source).exists():
            rows[Path(source).name.partition("_")[0]] = tiles(Path(source))
        else:
            with tempfile.TemporaryDirectory() as folder:
                sheet = contact_sheet(sf.load_images(source, split="test"), Path(folder) / "real.png")
                rows["real"] = tiles(sheet)
    font = ImageFont.load_default(FONT_SIZE)
    margin = max(round(font.getlength(name)) for name in rows) + 4 * GAP
    side = next(iter(rows.values()))[0].width + GAP
    picture = Image.new("RGB", (margin + side * CLASSES * EACH + GAP, side * len(rows) + GAP), "white")
    draw = ImageDraw.Draw(picture)
    for number, (name, some) in enumerate(rows.items()):
        draw.text((2 * GAP, GAP + number * side + side // 2), name, fill="black", font=font, anchor="lm")
        for column, tile in enumerate(some):
            picture.paste(tile, (margin + GAP + column * side, GAP + number * side))
    picture.save(options.out, optimize=True)


if __name__ == "__main__":
    main()
