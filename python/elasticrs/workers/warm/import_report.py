"""What the process that imports for the workers tells, as JSON lines in a file.

::

    {"importing": name}                                     before each module
    {"imported": name, "seconds": s}                        after it
    {"left_out": name, "why": text, "traceback": text}      in place of that; the traceback may be null
    {"ready": {"seconds": s, "prefixes": [...], "stamps": {path: [time, size]}, "threads": 1}}
                                                            at the end; an empty list: nothing is there
    {"failed": text, "traceback": text}                     when it cannot go on
    {"ended": how}                                          it has ended, and is started again

The agent's core writes the last one: an exit code, the negative number of a signal, ``null``, ``"executes"``
(another program in its place), or ``"closes"`` (descriptors that it needs). The module that it was at is left
out. After each that is left out it may begin again, so that a name comes twice. A line that is torn, because
its writer was killed, and one that is none of these says nothing.
"""

from __future__ import annotations

import json

from elasticrs.job.value import Value, fresh
from elasticrs.report.phrases import describe_exit, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from elasticrs.workers.warm.sources import Stamp


class LeftOut(Value):
    """A module that is not preloaded.

    Args:
        name: of it.
        why: a sentence about "it".
        traceback: of what it raised, in lines.
    """

    name: str
    why: str
    traceback: Sequence[str] = ()


class Ready(Value):
    """What is known when all modules are imported.

    Args:
        seconds: that this took.
        prefixes: folders of the interpreter's library and of installed packages, and no others: an
            application may lie below the folder that the interpreter is installed in, as in ``/usr/src``.
        threads: of the process.
        stamps: times and sizes of the files of all modules and of the prefixes, read after the imports. See
            :mod:`elasticrs.workers.warm.sources`.
    """

    seconds: float
    prefixes: tuple[str, ...]
    threads: int
    stamps: Mapping[str, Stamp] = fresh(factory=dict)


class Report(Value):
    """What was told so far.

    Args:
        imported: the seconds that each module took, in order.
        left_out: in order.
        importing: the module that it is at.
        ready: ``None`` until all modules are imported.
        failed: why it could not go on, and the traceback of that.
    """

    imported: Mapping[str, float] = fresh(factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    importing: str | None = None
    ready: Ready | None = None
    failed: tuple[str, Sequence[str]] | None = None


def read(data: bytes) -> Report:
    """Read what the file holds.

    Args:
        data: all of it, or what one process has written.
    """
    imported: dict[str, float] = {}
    left_out: list[LeftOut] = []
    importing = ready = failed = None
    for record in _records(data):
        match record:
            case {"importing": str(name)}:
                importing = _shown(name)
            case {"imported": str(name), "seconds": float(seconds) | int(seconds)}:
                importing = None
                imported[_shown(name)] = float(seconds)
            case {"left_out": str(name), "why": str(why)}:
                importing = None
                left_out.append(LeftOut(_shown(name), printable(why), _lines(record)))
            case {"ended": how} if importing is not None:
                left_out.append(LeftOut(importing, _why_ended(how)))
                importing = None
            case {"ready": {"seconds": float(seconds) | int(seconds), "threads": int(threads), **more}}:
                importing = None
                ready = Ready(float(seconds), _texts(more, "prefixes"), threads, _stamps(more))
            case {"failed": str(why)}:
                failed = printable(why), _lines(record)
    return Report(imported, tuple(left_out), importing, ready, failed)


def _why_ended(how: object) -> str:
    if how == "executes":
        return "it executes another program at import"
    if how == "closes":
        return "it closes descriptors of others at import"
    return f"it ends the process at import ({describe_exit(how if isinstance(how, int) else None)})"


def _records(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _texts(values: Mapping[Any, Any], name: str) -> tuple[str, ...]:
    found = values.get(name)
    return tuple(value for value in found if isinstance(value, str)) if isinstance(found, list) else ()


def _stamps(values: Mapping[Any, Any]) -> dict[str, Stamp]:
    found = values.get("stamps")
    stamps: dict[str, Stamp] = {}
    for path, stamp in found.items() if isinstance(found, dict) else ():
        match stamp:
            case [int(time), int(size)]:
                stamps[path] = time, size
            case []:
                stamps[path] = None
    return stamps


def _lines(record: Mapping[str, Any]) -> list[str]:
    text = record.get("traceback")
    return [printable(line) for line in text.splitlines()] if isinstance(text, str) else []


def _shown(name: str) -> str:
    """Return the name of a module in the form that the user knows: ``a.b`` for ``from a import b``."""
    return printable(name).replace(":", ".")
