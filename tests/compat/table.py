"""The tables of docs/api/names.md, which list the intentional differences from torch and their reasons.

A table is below a heading that names its place, with the columns name, state and reason. Names of one state
and reason may share a row. Everything else in the file is prose and left alone.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from .names import Differences

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "api" / "names.md"
HEAD = ("| name | state | reason |", "| --- | --- | --- |")
FIRST, LAST = "<!-- names: begin -->", "<!-- names: end -->"

Rows = dict[tuple[str, str], tuple[str, str]]
"""State and reason, by place and name."""


def read(text: str) -> Rows:
    """Return all table rows between the two marks in the document.

    Raises:
        ValueError: a name is listed twice, or a row cannot be read.
    """
    rows: Rows = {}
    place = ""
    for line in _between(text).splitlines():
        if line.startswith("#"):
            place = line.lstrip("#").strip().strip("`")
        elif line.startswith("|") and line not in HEAD:
            names, state, reason = (cell.strip() for cell in line.strip("|").split("|"))
            for name in re.findall(r"`([^`]+)`", names):
                if (place, name) in rows:
                    raise ValueError(f"listed twice: {place} {name}")
                rows[place, name] = state, reason
    return rows


def problems(found: Differences, rows: Rows) -> Iterator[str]:
    """Yield a message for each difference that the tables omit or describe wrongly."""
    for key in sorted(found.keys() | rows.keys()):
        place, name = key
        state, reason = rows.get(key, ("not listed", ""))
        if key not in found:
            yield f"{place}: {name}: listed as {state}, but torch has no such name, or nothing differs"
        elif state != found[key]:
            yield f"{place}: {name}: is {found[key]}; the table says {state}"
        elif state != "same" and not reason:
            yield f"{place}: {name}: is {state}, and the table gives no reason"


def written(text: str, found: Differences, default_reasons: Mapping[str, str]) -> str:
    """Return the document with updated tables. Rows that still hold keep their reasons.

    Args:
        text: the document.
        found: the comparison's result.
        default_reasons: by state, for what was not listed.
    """
    rows = read(text)
    lines: list[str] = []
    for place in dict.fromkeys(place for place, _ in found):
        lines += ["", f"### `{place}`" if "." in place else f"### {place}", "", *HEAD]
        grouped: dict[tuple[str, str], list[str]] = {}
        for (where, name), state in found.items():
            if where == place:
                before, reason = rows.get((place, name), ("", ""))
                kept = reason if before == state else default_reasons.get(state, "")
                grouped.setdefault((state, kept), []).append(name)
        for (state, reason), names in sorted(grouped.items(), key=lambda row: row[0][0] != "same"):
            lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {state} | {reason} |")
    before, first, rest = text.partition(FIRST)
    _, last, after = rest.partition(LAST)
    return "".join([before, first, "\n", "\n".join(lines), "\n\n", last, after])


def _between(text: str) -> str:
    return text.partition(FIRST)[2].partition(LAST)[0]
