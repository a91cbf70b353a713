"""Curves as SVG, with logarithmic axes. The text is readable on dark and on light pages."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

LARGER = {"ms": "s", "B": "kB"}
"""What a thousand of a unit is called."""

TEXT, PAGE, GRID = "#24292f", "#ffffff", "#d1d5da"
OURS = ("#0969da", "#1a7f37", "#8250df", "#bf3989")
OTHERS = ("#bc4c00", "#9a6700")
DARK = dict(
    zip(
        (TEXT, PAGE, GRID, *OURS, *OTHERS),
        ("#e6edf3", "#0d1117", "#3d444d", "#58a6ff", "#3fb950", "#bc8cff", "#f778ba", "#f0883e", "#d29922"),
        strict=True,
    )
)
"""Each colour on a dark page."""

LINE = 14.0
"""Points between two names."""


STYLE: dict[Any, Any] = {
    # Keep text as text, and always produce the same file from the same figures.
    "svg.fonttype": "none",
    "svg.hashsalt": "",
    "font.family": "sans-serif",
    "font.size": 12,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
}


class Curve(NamedTuple):
    """One curve of a plot.

    Args:
        name: written at its end.
        points: x and y, both positive.
        is_other: drawn dashed.
    """

    name: str
    points: Sequence[tuple[float, float]]
    is_other: bool = False


class Plot(NamedTuple):
    title: str
    unit: str
    curves: Sequence[Curve]


def draw(plots: Sequence[Plot], ticks: Sequence[int], columns: int = 2) -> str:
    """Draw all plots in one picture, and return it as SVG.

    Args:
        plots: in reading order.
        ticks: of the horizontal axis.
        columns: how many side by side.
    """
    rows = -(-len(plots) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.8 * columns, 5.4 * rows), dpi=72, facecolor=PAGE)
        places = list(figure.subplots(rows, columns, squeeze=False).flat)
        figure.subplots_adjust(left=0.06, right=0.87, top=0.95, bottom=0.07, wspace=0.55, hspace=0.3)
        for plot, axes in zip(plots, places, strict=False):
            _plot(axes, plot, ticks)
        for axes in places[len(plots) :]:
            axes.remove()
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    rules = "".join(
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}\n'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    dark = f"<style>@media (prefers-color-scheme: dark) {{\n{rules}}}</style>\n</svg>"
    return "\n".join(line.rstrip() for line in out.getvalue().replace("</svg>", dark).splitlines()) + "\n"


def _plot(axes: Axes, plot: Plot, ticks: Sequence[int]) -> None:
    axes.set_title(plot.title, loc="left", fontsize=14, fontweight="bold")
    powers = [math.log10(y) for each in plot.curves for _, y in each.points]
    low = math.floor(min(powers))
    whole = (10.0**low, 10.0 ** max(math.ceil(max(powers)), low + 1))
    axes.set(xscale="log", yscale="log", xlabel="agents", xlim=(ticks[0], ticks[-1]), ylim=whole)
    axes.xaxis.set(major_locator=FixedLocator(ticks), major_formatter=FuncFormatter(_short))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _value(value, plot.unit)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(color=GRID)
    axes.tick_params(length=0, pad=8)
    axes.spines[:].set_visible(False)
    colours = {False: iter(OURS), True: iter(OTHERS)}
    ends = []
    for curve in plot.curves:
        colour, dashes = next(colours[curve.is_other]), "--" if curve.is_other else "-"
        axes.plot(
            *zip(*curve.points, strict=True), dashes, color=colour, marker="o", markersize=5, clip_on=False
        )
        ends.append((curve.points[-1], curve.name, colour))
    last = float("-inf")
    for end, name, colour in sorted(ends, key=lambda each: each[0][1]):
        # Move the name upwards if it would overlap the previous one.
        at = float(axes.transData.transform(end)[1])
        last = max(at, last + LINE)
        axes.annotate(
            name,
            end,
            (8, last - at),
            textcoords="offset points",
            color=colour,
            va="center",
            annotation_clip=False,
        )


def _short(value: float, _: int) -> str:
    return f"{value / 1000:g}k" if value % 1000 == 0 else f"{value:g}"


def _value(value: float, unit: str) -> str:
    """Format a power of ten, in the larger unit if the unit has one."""
    if value >= 1000 and unit in LARGER:
        return f"{value / 1000:g} {LARGER[unit]}"
    return f"{value:g} {unit}"


def curve(
    name: str,
    figures: Mapping[int, Mapping[str, float]],
    key: str,
    scale: float = 1.0,
    *,
    is_other: bool = False,
) -> Curve | None:
    """Return the curve of one figure; ``None`` if it was not measured."""
    points = [(n, values[key] * scale) for n, values in sorted(figures.items()) if values.get(key, 0) > 0]
    return Curve(name, points, is_other) if points else None
