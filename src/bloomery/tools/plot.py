"""Line charts as SVG text, so that a plan or a report needs no plotting library. Knows numbers and labels, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH = 640
HEIGHT = 380
LEFT = 64
RIGHT = 16
TOP = 36
BOTTOM = 48
# names of lines in a row, their width, and letters of each
ABREAST = 4
COLUMN = 140
LONGEST = 18
COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#475569", "#0891b2", "#db2777", "#a3a30f")


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()  # beside each point
    dashed: bool = False
    colour: str | None = None


class Axis:
    """Values to pixels, linear or logarithmic, with round ticks."""

    def __init__(self, values: Sequence[float], start: float, end: float, log: bool):
        values = [value for value in values if value > 0] if log else [0.0, *values]
        low = min(values, default=1.0)
        high = max(values, default=1.0)
        if log:
            low = low / 1.15
            high = high * 1.15
        self.low = low
        self.high = high if high > low else low + 1
        self.start = start
        self.end = end
        self.log = log

    def place(self, value: float) -> float:
        if self.log:
            share = (log10(max(value, self.low)) - log10(self.low)) / (
                log10(self.high) - log10(self.low)
            )
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            powers = range(floor(log10(self.low)), floor(log10(self.high)) + 1)
            found = [m * 10.0**p for p in powers for m in ((1,) if len(powers) > 3 else (1, 2, 5))]
            inside = [tick for tick in found if self.low <= tick <= self.high]
            if len(inside) > 2:
                return inside
        unit = 10.0 ** floor(log10((self.high - self.low) / 4))
        step = next(unit * m for m in (1, 2, 5, 10) if (self.high - self.low) / (unit * m) <= 6)
        return [step * i for i in range(ceil(self.low / step), int(self.high / step) + 1)]


def chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """An <svg> element; every text in it is escaped."""
    x = Axis([p[0] for s in series for p in s.points], LEFT, WIDTH - RIGHT, log_x)
    y = Axis([p[1] for s in series for p in s.points], HEIGHT - BOTTOM, TOP, log_y)
    tall = HEIGHT + 16 * -(-len(series) // ABREAST) + 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" font-family="sans-serif" '
        f'font-size="11" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{tall}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for tick in x.ticks():
        at = x.place(tick)
        parts.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#e5e7eb"/>')
        parts.append(
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{number(tick)}</text>'
        )
    for tick in y.ticks():
        at = y.place(tick)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}</text>'
        )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(y_label)}</text>'
    )
    colours = [line.colour or COLOURS[i % len(COLOURS)] for i, line in enumerate(series)]
    for line, colour in zip(series, colours):
        parts += _line(line, colour, x, y)
    parts += _legend(series, colours)
    return "\n".join([*parts, "</svg>"])


def _dash(line: Series) -> str:
    return ' stroke-dasharray="5 4"' if line.dashed else ""


def _legend(series: Sequence[Series], colours: Sequence[str]) -> list[str]:
    """Below everything, so that it hides nothing."""
    parts = []
    for i, (line, colour) in enumerate(zip(series, colours)):
        left = LEFT + i % ABREAST * COLUMN
        at = HEIGHT + 6 + 16 * (i // ABREAST)
        parts.append(f'<path d="M{left} {at}h20" stroke="{colour}" stroke-width="2"{_dash(line)}/>')
        name = line.name if len(line.name) <= LONGEST else line.name[: LONGEST - 1] + "…"
        parts.append(f'<text x="{left + 25}" y="{at + 4}">{escape(name)}</text>')
    return parts


def _line(line: Series, colour: str, x: Axis, y: Axis) -> list[str]:
    dash = _dash(line)
    places = [(x.place(a), y.place(b)) for a, b in line.points]
    path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places) if places else ""
    parts = (
        [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
        if places
        else []
    )
    if len(places) <= 24:
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places]
    for (a, b), label in zip(places, line.labels, strict=False):
        parts.append(f'<text x="{a + 5:.1f}" y="{b - 5:.1f}" fill="#4b5563">{escape(label)}</text>')
    return parts


def number(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.3g}"
