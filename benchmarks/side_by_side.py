"""Contact sheets of several methods as one picture: a row for each, the first images of every class beside each other.

    cd docs/methods; python ../../benchmarks/side_by_side.py --out side_by_side_fashion-mnist_1.png fashion-mnist \\
        {atelier,dp-kernel,pge,dp-lflow,dp-mepf,dp-merf,ndpdc}_fashion-mnist_1.png

What is no file is the name of a data set, whose test images are shown. Sheets are as `contact_sheet` makes them of ten
classes, with tiles at their right; a row is named by its file up to the first underscore.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import sfumato as sf
from sfumato.data import contact_sheet
from sfumato.data.grid import FONT_SIZE, GAP

CLASSES, ACROSS = 10, 10  # rows of a sheet, and tiles in a row


def tiles(sheet: Image.Image, each: int) -> list[Image.Image]:
    """The first tiles of every class."""
    side = (sheet.height - GAP) // CLASSES
    left = sheet.width - ACROSS * side
    places = [(left + column * side, GAP + row * side) for row in range(CLASSES) for column in range(each)]
    return [sheet.crop((x, y, x + side - GAP, y + side - GAP)) for x, y in places]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--each", type=int, default=2, help="images of a class")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows: list[tuple[str, list[Image.Image]]] = []
    for source in options.sources:
        if Path(source).exists():
            rows.append((Path(source).name.partition("_")[0], tiles(Image.open(source).convert("RGB"), options.each)))
            continue
        with tempfile.TemporaryDirectory() as folder:
            sheet = contact_sheet(sf.load_images(source, split="test"), Path(folder) / "real.png")
            rows.append(("real", tiles(Image.open(sheet).convert("RGB"), options.each)))
    font = ImageFont.load_default(FONT_SIZE)
    margin = max(round(font.getlength(name)) for name, _ in rows) + 4 * GAP
    side = rows[0][1][0].width + GAP
    picture = Image.new("RGB", (margin + side * len(rows[0][1]) + GAP, side * len(rows) + GAP), "white")
    draw = ImageDraw.Draw(picture)
    for number, (name, some) in enumerate(rows):
        top = GAP + number * side
        draw.text((2 * GAP, top + side // 2), name, fill="black", font=font, anchor="lm")
        for column, tile in enumerate(some):
            picture.paste(tile, (margin + GAP + column * side, top))
    picture.save(options.out, optimize=True)


if __name__ == "__main__":
    main()
