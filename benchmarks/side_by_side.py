"""Join contact sheets of several methods: a row for each, with the first images of every class.

    python -m benchmarks.side_by_side --out FILE.png fashion-mnist {atelier,dp-kernel,dp-merf}_fashion-mnist_1.png
    python -m benchmarks field --pictures SHEETS --folder DATA   # draws the sheets, beside the figures
    python -m benchmarks.side_by_side --sheets SHEETS            # one picture for each data set and epsilon

A source that is no file is the name of a data set, whose test images are shown. Sheets have ten classes and ten tiles
in a row, as `contact_sheet` makes them; a row is named by its file up to the first underscore.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import sfumato as sf
from benchmarks.layouts import DATA, METHODS
from benchmarks.store import ROOT
from sfumato.data import contact_sheet
from sfumato.data.grid import FONT_SIZE, GAP

CLASSES, COLUMNS, EACH = 10, 10, 2
PICTURES = ROOT / "docs" / "images"


def tiles(path: Path) -> list[Image.Image]:
    """Return the first tiles of every class."""
    with Image.open(path) as picture:
        sheet = picture.convert("RGB")
    side = (sheet.height - GAP) // CLASSES
    left = sheet.width - COLUMNS * side
    corners = [(left + column * side, GAP + row * side) for row in range(CLASSES) for column in range(EACH)]
    return [sheet.crop((x, y, x + side - GAP, y + side - GAP)) for x, y in corners]


def join(sources: Sequence[str | Path], out: Path) -> None:
    """Write one picture of the sources, contact sheets or names of data sets."""
    rows: dict[str, list[Image.Image]] = {}
    for source in sources:
        if Path(source).exists():
            rows[name_of(Path(source))] = tiles(Path(source))
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
    picture.save(out, optimize=True)


def name_of(sheet: Path) -> str:
    """Return the method of a sheet; the runner names sheets JOB_METHOD_DATA_EPSILON."""
    first, second = f"{sheet.stem}_".split("_")[:2]
    return second if second in METHODS and first == "default" else f"{second}, {first}" if second in METHODS else first


def join_each(sheets: Path, out: Path) -> list[Path]:
    """Join the sheets of the runner that are of one data set and epsilon, with real images above; return the files."""
    made = []
    for data in DATA:
        for epsilon in ("1.0", "10.0"):
            found = sorted(sheets.glob(f"**/*_{data}_{epsilon}.png"), key=_place)
            if found:
                made.append(out / f"side_by_side_{data}_{float(epsilon):g}.png")
                join([data, *found], made[-1])
    return made


def _place(sheet: Path) -> tuple[int, str]:
    method = name_of(sheet).partition(",")[0]
    return METHODS.index(method) if method in METHODS else len(METHODS), sheet.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sheets", type=Path, help="folder of sheets that `python -m benchmarks --pictures` wrote")
    options = parser.parse_args()
    if bool(options.sheets) == bool(options.out):
        parser.error("give --sheets FOLDER, or sources and --out FILE.png")
    if options.sheets:
        for path in join_each(options.sheets, PICTURES):
            print(path)
    else:
        join(options.sources, options.out)


if __name__ == "__main__":
    main()
