"""Draw line charts as SVG text.

Colours come from the style sheet of the page, so they follow its light or dark mode. A chart that `standalone` turns
into a file has its own colours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 440, 280
STANDALONE_COLOURS = ("#1f5fa8", "#c2410c", "#15803d", "#7e22ce", "#b45309", "#0e7490", "#be185d", "#525252")
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 46


@dataclass(frozen=True)
class Series:
    """A line: its name, and points (x, y, half length of the error bar)."""

    name: str
    points: Sequence[tuple[float, float, float]]


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis from `low` to `high`."""

    label: str
    low: float
    high: float
    log: bool = False

    def fraction(self, value: float) -> float:
        """Return the position of a value as a fraction of the axis, from 0 to 1."""
        low, high, value = (math.log10(each) if self.log else each for each in (self.low, self.high, value))
        return (value - low) / ((high - low) or 1)

    @property
    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 3 else (1,)
            every = max(1, (last - first) // 6)
            found = [step * 10.0**power for power in range(first, last + 1, every) for step in steps]
        else:
            step = _nice((self.high - self.low) / 5)
            found = [step * index for index in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]


def axis(label: str, values: Sequence[float], *, log: bool = False, zero: bool = False) -> Axis:
    """Return an axis that holds all values; `zero`: a linear axis that starts at 0."""
    low, high = min(values), max(values)
    if log:
        return Axis(label, low / 1.15, high * 1.15, log=True)
    low = 0.0 if zero else low
    margin = 0.05 * ((high - low) or abs(high) or 1)
    return Axis(label, low if zero else low - margin, high + margin)


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    title: str,
    marks: Sequence[tuple[float, str]] = (),
    points: bool = True,
) -> Markup:
    """Return a chart. `marks`: horizontal lines as (value, name); `points`: whether to draw the points of lines."""
    parts = [Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(WIDTH, HEIGHT, title)]
    parts.append(Markup("<title>{}</title>").format(title))
    for tick in x.ticks:
        parts.append(_line(_x(x, tick), TOP, _x(x, tick), HEIGHT - BOTTOM, "grid"))
        parts.append(_text(_x(x, tick), HEIGHT - BOTTOM + 16, _number(tick), "middle"))
    for tick in y.ticks:
        parts.append(_line(LEFT, _y(y, tick), WIDTH - RIGHT, _y(y, tick), "grid"))
        parts.append(_text(LEFT - 6, _y(y, tick) + 4, _number(tick), "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x.label, "middle"))
    parts.append(
        Markup('<text transform="translate(13 {:.1f}) rotate(-90)" text-anchor="middle">{}</text>').format(
            (TOP + HEIGHT - BOTTOM) / 2, y.label
        )
    )
    for value, name in marks:
        parts.append(_line(LEFT, _y(y, value), WIDTH - RIGHT, _y(y, value), "mark"))
        parts.append(_text(WIDTH - RIGHT - 4, _y(y, value) - 5, name, "end"))
    for number, each in enumerate(series):
        parts.append(_series(each, x, y, number % 8, points))
    return Markup("").join([*parts, Markup("</svg>")])


def standalone(chart: Markup) -> str:
    """Return a chart as an SVG file with its own colours."""
    rules = ["text{font:12px sans-serif}", ".grid{stroke:#ddd}", ".mark{stroke:#777;stroke-dasharray:5 4}"]
    rules += ["polyline{fill:none;stroke-width:2}", "svg{background:#fff}"]
    for number, colour in enumerate(STANDALONE_COLOURS):
        rules.append(f".s{number}{{stroke:{colour}}}.s{number} circle{{fill:{colour}}}")
    text = str(chart).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return text.replace("<title>", f"<style>{''.join(rules)}</style><title>", 1)


def _series(series: Series, x: Axis, y: Axis, number: int, points: bool) -> Markup:
    places = [(_x(x, a), _y(y, b), error) for a, b, error in series.points]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in places)
    found = [Markup('<g class="series s{}"><title>{}</title><polyline points="{}"/>').format(number, series.name, path)]
    for (a, b, _), (_, value, error) in zip(places, series.points, strict=True):
        if error > 0:
            found.append(_line(a, _y(y, value - error), a, _y(y, value + error), "error"))
        if points or len(places) == 1:
            found.append(Markup('<circle cx="{:.1f}" cy="{:.1f}" r="3.5"/>').format(a, b))
    return Markup("").join([*found, Markup("</g>")])


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.fraction(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - min(max(axis.fraction(value), 0), 1) * (HEIGHT - TOP - BOTTOM)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(x1, y1, x2, y2, kind)


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, escape(text))


def _number(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:g}"


def _nice(step: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)
