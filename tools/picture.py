"""Draw the parts of the Python package and the imports between them: ``docs/parts.svg``.

A part stands one floor above the highest part that it uses. An arrow that other arrows imply is left out:
when ``cli`` uses ``supervise`` and ``supervise`` uses ``nodes``, no arrow says that ``cli`` uses ``nodes``.

``--check`` writes nothing. The exit code is then 1 if the picture differs from the one in the repository.
"""

import argparse
import sys
from itertools import groupby
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "parts.svg"
ENGINE = "elasticrs._engine"

BOX_HEIGHT, GAP, FLOOR_HEIGHT, MARGIN, WIDTH = 30, 14, 60, 20, 760
CHARACTER_WIDTH = 7.6
"""Width in pixels of a character of the font at 13 pixels."""

Uses = dict[str, set[str]]
"""For each part, the parts that it uses."""


def parts(graph: grimp.ImportGraph) -> list[str]:
    """Return the public modules and the subpackages of the engine, without the extension module."""
    top = graph.find_children("elasticrs") - {ENGINE, "elasticrs._core"}
    return sorted(top | graph.find_children(ENGINE))


def uses(graph: grimp.ImportGraph) -> Uses:
    """Return the parts that each part imports directly, even if only for type checkers."""
    names = parts(graph)
    return {
        importer: {
            imported
            for imported in names
            if imported != importer
            and not importer.startswith(ENGINE) > imported.startswith(ENGINE)  # import-linter checks these
            and graph.direct_import_exists(importer=importer, imported=imported, as_packages=True)
        }
        for importer in names
    }


def floors(edges: Uses) -> dict[str, int]:
    """Return each part's floor, from 0. All subpackages of the engine are below the public modules.

    Raises:
        SystemExit: the imports form a cycle.
    """
    found: dict[str, int] = {}

    def floor(part: str, above: tuple[str, ...]) -> int:
        if part in above:
            sys.exit(f"these parts use each other: {', '.join(above[above.index(part) :])}")
        if part not in found:
            found[part] = max((floor(used, (*above, part)) + 1 for used in edges[part]), default=0)
        return found[part]

    for part in edges:
        floor(part, ())
    rooms = [part for part in edges if part.startswith(ENGINE)]
    lowest = max((found[room] for room in rooms), default=-1) + 1
    for part in sorted(edges, key=found.__getitem__):
        if part not in rooms:
            found[part] = max([lowest, *(found[used] + 1 for used in edges[part] if used not in rooms)])
    return found


def arrows(edges: Uses) -> list[tuple[str, str]]:
    """Return the arrows, as pairs of parts, without those that other arrows imply.

    Imports of the engine by public modules get no arrows.
    """

    def reach(part: str) -> set[str]:
        return edges[part].union(*(reach(used) for used in edges[part]))

    return sorted(
        (part, used)
        for part, direct in edges.items()
        for used in direct
        if part.startswith(ENGINE) == used.startswith(ENGINE)
        and not any(used in reach(other) for other in direct - {used})
    )


def draw(edges: Uses) -> str:
    """Return the picture as SVG."""
    levels = floors(edges)
    top = max(levels.values())
    in_order = sorted(levels, key=lambda part: (levels[part], part))
    by_floor = {level: list(on_floor) for level, on_floor in groupby(in_order, key=levels.__getitem__)}
    place: dict[str, tuple[float, float, float]] = {}
    for level, on_floor in by_floor.items():
        widths = [label_width(part) for part in on_floor]
        x = (WIDTH - sum(widths) - GAP * (len(widths) - 1)) / 2
        for part, width in zip(on_floor, widths, strict=True):
            place[part] = (x, MARGIN + (top - level) * FLOOR_HEIGHT, width)
            x += width + GAP
    engine_top = min(place[part][1] for part in place if part.startswith(ENGINE)) - FLOOR_HEIGHT * 0.3
    height = 2 * MARGIN + top * FLOOR_HEIGHT + BOX_HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="monospace" font-size="13">',
        '<marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#888"/></marker>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<rect y="{engine_top:.0f}" width="{WIDTH}" height="{height - engine_top:.0f}" fill="#eef3f8"/>',
        f'<text x="8" y="{MARGIN - 4}" fill="#666">what users import</text>',
        f'<text x="8" y="{engine_top + 16:.0f}" fill="#666">_engine</text>',
    ]
    for user, used in arrows(edges):
        (from_x, from_y, from_width), (to_x, to_y, to_width) = place[user], place[used]
        start, end = from_x + from_width / 2, to_x + to_width / 2
        lines.append(
            f'<line x1="{start:.0f}" y1="{from_y + BOX_HEIGHT:.0f}" x2="{end:.0f}" y2="{to_y:.0f}" '
            'stroke="#888" marker-end="url(#end)"/>'
        )
    for part, (x, y, width) in place.items():
        fill = "#fff" if part.startswith(ENGINE) else "#fdf6e3"
        lines += [
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}" rx="4" fill="{fill}" '
            'stroke="#446"/>',
            f'<text x="{x + width / 2:.0f}" y="{y + 20:.0f}" text-anchor="middle">{label(part)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def label(part: str) -> str:
    """Return the last part of the name."""
    return part.rpartition(".")[2]


def label_width(part: str) -> float:
    """Return the width of the box of a part, in pixels."""
    return len(label(part)) * CHARACTER_WIDTH + 20


def main() -> int:
    """Draw the picture, or check it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the file, and write nothing")
    check = parser.parse_args().check
    graph = grimp.build_graph("elasticrs", cache_dir=None)
    picture = draw(uses(graph))
    if not check:
        PICTURE.write_text(picture, encoding="utf-8")
    elif not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != picture:
        print("docs/parts.svg does not show the imports as they are: run `.venv/bin/python tools/picture.py`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
