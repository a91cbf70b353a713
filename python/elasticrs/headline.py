"""A traceback in one line, for people; pure. Imported only when something went wrong."""

from __future__ import annotations

import os

from elasticrs.texts import printable

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
"""In paths of code that is hardly the user's."""

_LIMIT = 300
"""Characters of the exception."""


def headline(text: str) -> str | None:
    """Return the exception and where the user's code was: ``FileNotFoundError: data.bin (train.py:41)``.

    The place is the innermost frame outside of installed packages and the standard library, or the innermost
    one where there is no other. ``None`` when there is no text. That may be a traceback as Python prints it,
    or the end of one, or another message.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    last = max((number for number, line in enumerate(lines) if _begins(line)), default=-1)
    block = lines[last + 1 :]
    frames = [frame for frame in map(_frame, block) if frame is not None]
    is_traceback = last >= 0 or bool(frames)
    # The first line of the exception says most; of another message the last one does.
    said = next((line for line in block if not line.startswith((" ", "…"))), None) if is_traceback else None
    said = printable((said or lines[-1]).strip(), _LIMIT)
    if not frames:
        return said
    own = [frame for frame in frames if not any(part in frame[0] for part in _LIBRARIES)]
    path, number = (own or frames)[-1]
    return f"{said} ({printable(os.path.basename(path), _LIMIT)}:{number})"


def _begins(line: str) -> bool:
    return line.startswith("Traceback (most recent call last)")


def _frame(line: str) -> tuple[str, str] | None:
    if not line.startswith('  File "'):
        return None
    path, found, rest = line[len('  File "') :].rpartition('", line ')
    return (path, rest.partition(",")[0]) if found else None
