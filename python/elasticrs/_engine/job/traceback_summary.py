"""Summarize a traceback in one line for error messages. The summary contains the type of the exception and
the place where it was raised.

The exception that a worker raises may only report another exception. In these cases, the summary describes
the other exception:

- For an exception group, the summary describes a member of the group.
- For an error of a data loader worker or a spawned process, the summary describes the exception of that
  process. The error's text contains the traceback of the process.
- For an error of a process pool, the place is taken from the ``RemoteTraceback`` that caused the error.

This module does not import :mod:`re` or :mod:`typing`, because their imports take milliseconds and would
delay the restart after a failure.
"""

from __future__ import annotations

import builtins
import os

from elasticrs._engine.job.phrases import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
"""Path fragments that identify files outside the user's own code."""

_OWN_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + "/"

_LIMIT = 300
"""Maximum number of characters of the exception's text."""
_HEAD, _TAIL = 1 << 14, 1 << 16
"""Number of characters that are used from the start and from the end of a long text."""
_MAX_KINDS = 4
"""Maximum number of exception types in the summary of an exception group."""
_MAX_DEPTH = 10
"""Maximum nesting depth of tracebacks inside the texts of other tracebacks."""

_CAUSED = "The above exception was the direct cause of the following exception:"
_CHAINED = (_CAUSED, "During handling of the above exception, another exception occurred:")
_BEGINS = ("Traceback (most recent call last)", "Original Traceback (most recent call last)")
_REMOTE = 'RemoteTraceback: \n"""'
"""Text that precedes the traceback of a process in a process pool."""


class Summary:
    """Summary of an exception.

    Args:
        said: type and first line of the exception's text.
        place: file name and line in the user's code, such as ``train.py:41``; ``None`` if it is unknown.
        exception: qualified name of the exception's type; ``None`` if the text is not a traceback.
        more: number of further members if the exception is a member of an exception group; 0 otherwise.
    """

    __slots__ = ("exception", "more", "place", "said")

    def __init__(self, said: str, place: str | None, exception: str | None, more: int = 0) -> None:
        self.said = said
        self.place = place
        self.exception = exception
        self.more = more


def headline(text: str, more: int = 0) -> str | None:
    """Return the exception and its location in the user's code, such as ``FileNotFoundError: data.bin
    (train.py:41)``.

    The location is the innermost frame outside of installed packages and the standard library, or the
    innermost frame if there is no such frame. The text may be a traceback as Python prints it, the end of a
    traceback, or any other message. Return ``None`` if the text is empty.

    Args:
        text: the text.
        more: number of the exception group's other members, if the text describes only one member.
    """
    found = summarize(text)
    if found is None:
        return None
    place = f" ({found.place})" if found.place else ""
    more = more or found.more
    return f"{found.said}{place}{f', and {more} more' if more else ''}"


def shortened(text: str, limit: int) -> str:
    """Return the end of a text, with at most ``limit`` characters. If the end of a traceback does not contain
    the exception and its place, return only the exception and its place.
    """
    if len(text) <= limit:
        return text
    end = "…" + text[-limit + 1 :]
    told, kept = summarize(text), summarize(end)
    if told is None or told.exception is None or told.place is None:
        return end
    if kept is not None and (kept.said, kept.place) == (told.said, told.place):
        return end
    path, _, number = told.place.rpartition(":")
    return f'…\n  File "{path}", line {number}\n{told.said}'


def summarize(text: str) -> Summary | None:
    """Summarize a traceback, the end of a traceback, or any other message. Return ``None`` if the text is
    empty.

    The summary of an exception group does not depend on the order of its members, because this order may
    differ from one attempt to the next. Its field ``exception`` names the types of the members.
    """
    if len(text) > _HEAD + _TAIL:
        text = f"{text[:_HEAD]}\n{text[-_TAIL:]}"
    return _summarize(text, _MAX_DEPTH)


def _summarize(text: str, depth: int, *, is_exception: bool = False) -> Summary | None:
    """Summarize a text. ``depth`` is the maximum nesting depth of tracebacks. ``is_exception`` is true if the
    text is known to describe an exception, even if it contains no traceback.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    if depth and _is_end_of_group(lines[-1]):
        header, members, more = _members(lines)
        told = (_summarize("\n".join(each), depth - 1, is_exception=True) for each in members)
        found = [each for each in told if each is not None]
        if found:
            return _of_group(found, _own_place(_frames(header)), more + sum(each.more for each in found))
    outer = _of_traceback(lines, is_exception)
    remote = _remote(text)
    if depth and _own_place(_frames(remote.splitlines())) is not None:
        inner = _summarize(remote, depth - 1)
        outer.place = outer.place if inner is None or inner.place is None else inner.place
    return outer


def _remote(text: str) -> str:
    """Return the traceback of another process, if its exception directly caused the last exception in the
    text.
    """
    before, found, own = text.rpartition(f'\n"""\n\n{_CAUSED}\n')
    if not found or any(line in _CHAINED for line in own.splitlines()):
        return ""
    return before.rpartition(_REMOTE)[2] if _REMOTE in before else ""


def _of_traceback(lines: Sequence[str], is_exception: bool) -> Summary:
    begins = [number for number, line in enumerate(lines) if line.startswith(_BEGINS)]
    block = lines[begins[-1] + 1 if begins else 0 :]
    frames = _frames(block)
    is_traceback = bool(is_exception or begins or frames)
    # The most informative line is the first one of an exception's text, and the last one of any other
    # message.
    at = next((n for n, line in enumerate(block) if not line.startswith((" ", "…"))), None)
    if not is_traceback or at is None:
        said, name = lines[-1].strip(), None
    else:
        said, name = block[at].strip(), _type(block[at])
        if name is not None and said == f"{name}:" and at + 1 < len(block):
            # Add the next line, because the exception's text begins with a newline.
            said = f"{said} {block[at + 1].strip()}"
    place = _own_place(frames)
    if place is None and frames:
        # The last traceback contains only library code. It may be part of the exception's text and come from
        # another process, so search the traceback of the exception itself, too.
        since = max((n for n, line in enumerate(lines) if line in _CHAINED), default=-1) + 1
        place = _own_place(_frames(lines[since:])) or _place(frames[-1])
    return Summary(printable(said, _LIMIT), place, None if name is None else _qualified(name))


def _of_group(members: Sequence[Summary], place: str | None, more: int) -> Summary:
    """Summarize an exception group by one of its members (``more`` others are not in ``members``),
    independently of their order. If the chosen member was never raised itself, ``place`` is where the group
    was raised.
    """
    told = min(members, key=lambda each: (each.exception or "", each.place or ""))
    kinds = sorted({each.exception or "" for each in members} - {""})
    exception = kinds[0] if len(kinds) == 1 else None
    if len(kinds) > 1:
        names = ", ".join(kind.rpartition(".")[2] for kind in kinds[:_MAX_KINDS])
        exception = f"builtins.ExceptionGroup[{names}]"
    return Summary(told.said, told.place or place, exception, len(members) - 1 + more)


def _members(lines: Sequence[str]) -> tuple[list[str], list[list[str]], int]:
    """Split the traceback of an exception group. Return the lines above its members, the lines of each member
    that is not itself a group, and the number of members that Python has omitted. Remove the border that
    Python draws beside the members.
    """
    sections: list[list[str]] = [[]]
    more = 0
    for line in lines:
        bare = line.lstrip(" ")
        if bare.startswith("|"):
            sections[-1].append(bare[2:])
        elif bare.startswith("+-+--") and len(sections) > 1:
            # Discard the previous section, because it is the header of an inner group and not a member.
            sections[-1] = []
        elif bare.startswith("+-") and not _is_end_of_group(line):
            sections.append([])
    leaves = []
    for section in sections[1:] or sections:
        left_out = _left_out(section)
        more += left_out
        if section and not left_out:
            leaves.append(section)
    return sections[0], leaves, more


def _left_out(section: Sequence[str]) -> int:
    """Return the number of omitted members if the section is a line such as ``and 3 more exceptions``."""
    words = section[0].split() if len(section) == 1 else []
    is_number = len(words) == 4 and words[0] == "and" and words[2] == "more" and words[1].isdecimal()
    return int(words[1]) if is_number else 0


def _is_end_of_group(line: str) -> bool:
    """Return true if the line ends an exception group. Python writes a plus sign and a row of minus signs."""
    bare = line.lstrip(" ")
    return len(bare) > 8 and bare.rstrip("-") == "+"


def _frames(lines: Sequence[str]) -> list[tuple[str, str]]:
    return [frame for frame in map(_frame, lines) if frame is not None]


def _frame(line: str) -> tuple[str, str] | None:
    if not line.startswith('  File "'):
        return None
    path, found, rest = line[len('  File "') :].rpartition('", line ')
    return (path, rest.partition(",")[0]) if found else None


def _own_place(frames: Sequence[tuple[str, str]]) -> str | None:
    """Return the innermost place in the user's code, outside of libraries and of this package."""
    for frame in reversed(frames):
        path = frame[0]
        if not path.startswith(_OWN_PACKAGE) and not any(part in path for part in LIBRARIES):
            return _place(frame)
    return None


def _place(frame: tuple[str, str]) -> str:
    return f"{printable(os.path.basename(frame[0]), _LIMIT)}:{frame[1]}"


def _type(line: str) -> str | None:
    """Return the name of the type at the start of an exception's text."""
    name = line.partition(":")[0].strip()
    parts = name.split(".")
    return name if all(part.isidentifier() or part == "<locals>" for part in parts) else None


def _qualified(name: str) -> str:
    """Return the qualified name of a type that a traceback names. Tracebacks omit the module of built-in
    types and of types that the script itself defines.
    """
    if "." in name:
        return name
    return f"builtins.{name}" if isinstance(getattr(builtins, name, None), type) else f"__main__.{name}"
