"""Curves as SVG: logarithmic axes, text that reads on dark and on light pages."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 560, 400
LEFT, RIGHT, TOP, BOTTOM = 66, 150, 44, 46

LARGER = {"ms": "s", "B": "kB"}
"""What a thousand of a unit is called."""

STYLE = """
  text { font: 12px sans-serif; fill: #24292f; }
  .title { font-size: 14px; font-weight: bold; }
  .grid { stroke: #8c959f; stroke-opacity: 0.35; }
  .page { fill: #ffffff; }
  .c0 { color: #0969da; }
  .c1 { color: #1a7f37; }
  .c2 { color: #8250df; }
  .c3 { color: #bf3989; }
  .c4 { color: #bc4c00; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .page { fill: #0d1117; }
    .c0 { color: #58a6ff; }
    .c1 { color: #3fb950; }
    .c2 { color: #bc8cff; }
    .c3 { color: #f778ba; }
    .c4 { color: #f0883e; }
  }
  .curve { fill: none; stroke: currentColor; stroke-width: 2; }
  .dot, .name { fill: currentColor; }
  .other { stroke-dasharray: 6 4; }
"""


class Curve(NamedTuple):
    """One line of a plot.

    Args:
        name: written at its end.
        points: x and y, both positive.
        is_other: drawn dashed.
    """

    name: str
    points: Sequence[tuple[float, float]]
    is_other: bool = False


class Plot(NamedTuple):
    """One diagram."""

    title: str
    unit: str
    curves: Sequence[Curve]


def draw(plots: Sequence[Plot], ticks: Sequence[int], columns: int = 2) -> str:
    """All plots in one picture.

    Args:
        plots: in reading order.
        ticks: of the horizontal axis.
        columns: how many side by side.
    """
    rows = -(-len(plots) // columns)
    width, height = WIDTH * columns, HEIGHT * rows
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
    ]
    for place, plot in enumerate(plots):
        x, y = place % columns * WIDTH, place // columns * HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_plot(plot, ticks), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _plot(plot: Plot, ticks: Sequence[int]) -> list[str]:
    values = [y for curve in plot.curves for _, y in curve.points]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    x_low, x_high = math.log10(ticks[0]), math.log10(ticks[-1])

    def at_x(value: float) -> float:
        return LEFT + (math.log10(value) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def at_y(value: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text class="title" x="{LEFT}" y="24">{escape(plot.title)}</text>']
    for power in range(low, high + 1):
        y = at_y(10.0**power)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_value(power, plot.unit)}</text>'
        )
    for tick in ticks:
        x = at_x(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_short(tick)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">agents</text>')
    ends = _apart([at_y(curve.points[-1][1]) for curve in plot.curves])
    for number, curve in enumerate(plot.curves):
        line = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in curve.points)
        style = "curve other" if curve.is_other else "curve"
        colour = 4 - number % 2 if curve.is_other else number % 4
        parts.append(f'<g class="c{colour}"><polyline class="{style}" points="{line}"/>')
        parts += [
            f'<circle class="dot" cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3"/>' for x, y in curve.points
        ]
        x = at_x(curve.points[-1][0]) + 8
        parts.append(
            f'<text class="name" x="{x:.1f}" y="{ends[number] + 4:.1f}">{escape(curve.name)}</text></g>'
        )
    return parts


def _apart(places: Sequence[float], least: float = 14.0) -> dict[int, float]:
    """Where to write, so that no two lie on each other."""
    moved: dict[int, float] = {}
    last = -math.inf
    for number in sorted(range(len(places)), key=places.__getitem__):
        moved[number] = last = max(places[number], last + least)
    return moved


def _short(value: int) -> str:
    return f"{value // 1000}k" if value % 1000 == 0 else f"{value}"


def _value(power: int, unit: str) -> str:
    """A power of ten, in the larger unit where there is one."""
    if power >= 3 and unit in LARGER:
        return f"{10 ** (power - 3)} {LARGER[unit]}"
    return f"{10.0**power:g} {unit}"


def curve(
    name: str,
    figures: Mapping[int, Mapping[str, float]],
    key: str,
    scale: float = 1.0,
    *,
    is_other: bool = False,
) -> Curve | None:
    """The line of one figure; ``None`` where it was not measured."""
    points = [(n, values[key] * scale) for n, values in sorted(figures.items()) if values.get(key, 0) > 0]
    return Curve(name, points, is_other) if points else None
