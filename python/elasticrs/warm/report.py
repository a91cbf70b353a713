"""What the process that imports for the workers tells, as JSON lines in a file.

::

    {"importing": name}                                     before each module
    {"imported": name, "seconds": s}                        after it
    {"left_out": name, "why": text, "traceback": text}      in place of that; the traceback may be null
    {"ready": {"seconds": s, "files": [...], "prefixes": [...], "threads": 1}}      at the end

It begins again when it has to do without a module, so a name may come more than once. A line that is torn,
because its writer was killed, and one that is none of these says nothing.
"""

from __future__ import annotations

import json

from elasticrs._value import Value
from elasticrs.texts import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

NOT_FOUND = "it was not found"
"""Why a module was left out that does not exist; told only if the user has named it."""

_TOLD = 3
"""Modules whose time is told: the slowest ones, and each took a tenth of a second at least."""
_SLOW = 0.1
_LAST_LINES = 20


class LeftOut(Value):
    """A module that is not preloaded.

    Args:
        name: of it.
        why: a sentence about "it".
        traceback: of what it raised.
    """

    name: str
    why: str
    traceback: str | None = None


class Ready(Value):
    """What is known when all modules are imported.

    Args:
        seconds: that this took.
        files: of all modules.
        prefixes: folders of the interpreter's library and of installed packages, and no others: an
            application may lie below the folder that the interpreter is installed in, as in ``/usr/src``.
        threads: of the process.
    """

    seconds: float
    files: tuple[str, ...]
    prefixes: tuple[str, ...]
    threads: int


class Report(Value):
    """What was told so far.

    Args:
        imported: the seconds that each module took, in order.
        left_out: in order.
        importing: the module that it is at.
        ready: ``None`` until all modules are imported.
    """

    imported: Mapping[str, float]
    left_out: tuple[LeftOut, ...] = ()
    importing: str | None = None
    ready: Ready | None = None


def read(data: bytes) -> Report:
    """Read what the file holds.

    Args:
        data: all of it.
    """
    imported: dict[str, float] = {}
    left_out: dict[str, LeftOut] = {}
    importing: str | None = None
    ready: Ready | None = None
    for record in _records(data):
        match record:
            case {"importing": str(name)}:
                importing, ready = _shown(name), None
            case {"imported": str(name), "seconds": float(seconds) | int(seconds)}:
                importing = None
                imported[_shown(name)] = float(seconds)
            case {"left_out": str(name), "why": str(why)}:
                importing = None
                imported.pop(_shown(name), None)
                traceback = record.get("traceback")
                text = traceback if isinstance(traceback, str) and traceback else None
                left_out[_shown(name)] = LeftOut(_shown(name), printable(why), text)
            case {"ready": {"seconds": float(seconds) | int(seconds), "files": list(files), **more}}:
                importing = None
                prefixes, threads = more.get("prefixes"), more.get("threads")
                ready = Ready(
                    float(seconds),
                    _texts(files),
                    _texts(prefixes if isinstance(prefixes, list) else []),
                    threads if isinstance(threads, int) else 0,
                )
    return Report(imported, tuple(left_out.values()), importing, ready)


def _records(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _texts(values: list[Any]) -> tuple[str, ...]:
    return tuple(value for value in values if isinstance(value, str))


def _shown(name: str) -> str:
    """A module for people, without the form that :mod:`elasticrs.warm` gives to ``from a import b``."""
    return printable(name).replace(":", ".")


def left_out_lines(report: Report, *, is_explicit: bool) -> list[str]:
    """Lines for the user: which modules were left out, and why.

    Args:
        report: what was told.
        is_explicit: the user has named the modules: then those that were not found are told, and tracebacks.
    """
    lines: list[str] = []
    for one in report.left_out:
        if not is_explicit and one.why == NOT_FOUND:
            continue
        lines.append(f"{one.name} was left out: {one.why}")
        if is_explicit and one.traceback is not None:
            last = one.traceback.rstrip().splitlines()[-_LAST_LINES:]
            lines += [f"  {printable(line)}" for line in last]
    return lines


def stage(report: Report) -> str:
    """How far it came, to follow "the limit of 120 s passed" or "it was killed".

    Args:
        report: what was told.
    """
    if report.importing is not None:
        return f"while importing {report.importing}"
    if report.ready is not None:
        return "after all modules were imported"
    return f"after importing {list(report.imported)[-1]}" if report.imported else "before the first import"


def summary(report: Report) -> str:
    """What was imported, for the user.

    Args:
        report: of a process that is ready.
    """
    count = len(report.imported)
    slowest = sorted(report.imported.items(), key=lambda item: -item[1])[:_TOLD]
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in slowest if seconds >= _SLOW)
    total = report.ready.seconds if report.ready is not None else sum(report.imported.values())
    modules = f"{count} module{'s' if count != 1 else ''} imported in {total:.1f} s"
    return f"{modules} ({times})" if times and count > 1 else modules
