"""Summarize a traceback in one line, for error messages.

Import this module only after a failure, because most runs do not need it.
"""

from __future__ import annotations

import os

from elasticrs.report.phrases import printable

LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
"""Path fragments that identify files outside the user's own code."""

_LIMIT = 300
"""Maximum number of characters of the exception's text."""


def headline(text: str) -> str | None:
    """Return the exception and its location in the user's code, such as ``FileNotFoundError: data.bin
    (train.py:41)``.

    The location is the innermost frame outside of installed packages and the standard library, or the
    innermost frame if there is no such frame. The text may be a traceback as Python prints it, the end of a
    traceback, or any other message. Return ``None`` if the text is empty.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    last = max((number for number, line in enumerate(lines) if _begins(line)), default=-1)
    block = lines[last + 1 :]
    frames = [frame for frame in map(_frame, block) if frame is not None]
    is_traceback = last >= 0 or bool(frames)
    # The most informative line is the first one of an exception's text, and the last one of any other
    # message.
    said = next((line for line in block if not line.startswith((" ", "…"))), None) if is_traceback else None
    said = printable((said or lines[-1]).strip(), _LIMIT)
    if not frames:
        return said
    own = [frame for frame in frames if not any(part in frame[0] for part in LIBRARIES)]
    path, number = (own or frames)[-1]
    return f"{said} ({printable(os.path.basename(path), _LIMIT)}:{number})"


def _begins(line: str) -> bool:
    return line.startswith("Traceback (most recent call last)")


def _frame(line: str) -> tuple[str, str] | None:
    if not line.startswith('  File "'):
        return None
    path, found, rest = line[len('  File "') :].rpartition('", line ')
    return (path, rest.partition(",")[0]) if found else None
