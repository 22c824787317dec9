"""Line charts as SVG text, so that plans and reports need no plotting library.

Knows numbers and labels only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

# Pixels.
WIDTH = 640
HEIGHT = 380
LEFT_MARGIN = 64
RIGHT_MARGIN = 16
TOP_MARGIN = 36
BOTTOM_MARGIN = 48
LEGEND_COLUMN_WIDTH = 140
LEGEND_ROW_HEIGHT = 16
LEGEND_COLUMNS = 4
MAX_NAME_LENGTH = 18  # characters of a name in the legend
MAX_MARKED_POINTS = 24  # longer lines have no circles
COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#475569", "#0891b2", "#db2777", "#a3a30f")
GRID_COLOUR = "#e5e7eb"
LABEL_COLOUR = "#4b5563"


@dataclass(frozen=True)
class ChartSeries:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()  # next to each point
    dashed: bool = False
    colour: str | None = None


class ChartAxis:
    """Maps values to pixels, linearly or logarithmically, and chooses round ticks."""

    def __init__(self, values: Sequence[float], start: float, end: float, log: bool):
        if log:
            shown = [value for value in values if value > 0]
            low = min(shown, default=1.0) / 1.15
            high = max(shown, default=1.0) * 1.15
        else:
            low = min([0.0, *values])
            high = max([0.0, *values])
        self.low = low
        self.high = high if high > low else low + 1
        self.start = start
        self.end = end
        self.log = log

    def to_pixel(self, value: float) -> float:
        if self.log:
            log_range = log10(self.high) - log10(self.low)
            share = (log10(max(value, self.low)) - log10(self.low)) / log_range
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            ticks = self._log_ticks()
            if len(ticks) > 2:
                return ticks
        value_range = self.high - self.low
        unit = 10.0 ** floor(log10(value_range / 4))
        step = next(unit * factor for factor in (1, 2, 5, 10) if value_range / (unit * factor) <= 6)
        return [step * i for i in range(ceil(self.low / step), int(self.high / step) + 1)]

    def _log_ticks(self) -> list[float]:
        powers = range(floor(log10(self.low)), floor(log10(self.high)) + 1)
        factors = (1,) if len(powers) > 3 else (1, 2, 5)
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        return [tick for tick in ticks if self.low <= tick <= self.high]


def draw_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[ChartSeries],
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Draw lines as an <svg> element. All text in it is escaped."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    x_axis = ChartAxis(xs, LEFT_MARGIN, WIDTH - RIGHT_MARGIN, log_x)
    y_axis = ChartAxis(ys, HEIGHT - BOTTOM_MARGIN, TOP_MARGIN, log_y)
    legend_rows = ceil(len(series) / LEGEND_COLUMNS)
    height = HEIGHT + LEGEND_ROW_HEIGHT * legend_rows + 2
    colours = [line.colour or COLOURS[i % len(COLOURS)] for i, line in enumerate(series)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="11" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT_MARGIN}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        *_draw_grid(x_axis, y_axis),
        *_draw_axis_labels(x_label, y_label),
    ]
    for line, colour in zip(series, colours):
        parts += _draw_line(line, colour, x_axis, y_axis)
    parts += _draw_legend(series, colours)
    return "\n".join([*parts, "</svg>"])


def _draw_grid(x_axis: ChartAxis, y_axis: ChartAxis) -> list[str]:
    parts = []
    bottom = HEIGHT - BOTTOM_MARGIN
    for tick in x_axis.ticks():
        x = x_axis.to_pixel(tick)
        parts.append(f'<path d="M{x:.1f} {TOP_MARGIN}V{bottom}" stroke="{GRID_COLOUR}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{format_tick(tick)}</text>'
        )
    for tick in y_axis.ticks():
        y = y_axis.to_pixel(tick)
        parts.append(
            f'<path d="M{LEFT_MARGIN} {y:.1f}H{WIDTH - RIGHT_MARGIN}" stroke="{GRID_COLOUR}"/>'
        )
        parts.append(
            f'<text x="{LEFT_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{format_tick(tick)}</text>"
        )
    return parts


def _draw_axis_labels(x_label: str, y_label: str) -> list[str]:
    center_x = (LEFT_MARGIN + WIDTH - RIGHT_MARGIN) / 2
    center_y = (TOP_MARGIN + HEIGHT - BOTTOM_MARGIN) / 2
    return [
        f'<text x="{center_x}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text x="14" y="{center_y}" text-anchor="middle" '
        f'transform="rotate(-90 14 {center_y})">{escape(y_label)}</text>',
    ]


def _dash_attribute(line: ChartSeries) -> str:
    return ' stroke-dasharray="5 4"' if line.dashed else ""


def _draw_line(line: ChartSeries, colour: str, x_axis: ChartAxis, y_axis: ChartAxis) -> list[str]:
    parts = []
    pixels = [(x_axis.to_pixel(x), y_axis.to_pixel(y)) for x, y in line.points]
    if pixels:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in pixels)
        dash = _dash_attribute(line)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
    if len(pixels) <= MAX_MARKED_POINTS:
        for x, y in pixels:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    for (x, y), label in zip(pixels, line.labels, strict=False):
        parts.append(
            f'<text x="{x + 5:.1f}" y="{y - 5:.1f}" fill="{LABEL_COLOUR}">{escape(label)}</text>'
        )
    return parts


def _draw_legend(series: Sequence[ChartSeries], colours: Sequence[str]) -> list[str]:
    """The names of the lines, below the chart, where they hide nothing."""
    parts = []
    for i, (line, colour) in enumerate(zip(series, colours)):
        row, column = divmod(i, LEGEND_COLUMNS)
        x = LEFT_MARGIN + column * LEGEND_COLUMN_WIDTH
        y = HEIGHT + 6 + LEGEND_ROW_HEIGHT * row
        name = line.name
        if len(name) > MAX_NAME_LENGTH:
            name = name[: MAX_NAME_LENGTH - 1] + "…"
        dash = _dash_attribute(line)
        parts.append(f'<path d="M{x} {y}h20" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{x + 25}" y="{y + 4}">{escape(name)}</text>')
    return parts


def format_tick(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.3g}"
