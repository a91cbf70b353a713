"""Reads the report of the nursery (the process that imports modules and then forks workers), and detects
changes to the files of these modules. If a file has changed, the next attempt gets a new nursery.

- **AGAIN-1** If a file has changed before an attempt begins, the workers of the attempt run the new code.
  This covers all changes that :class:`Sources` can detect.
- **AGAIN-2** A failed import is not repeated. Workers start without imported modules for the rest of the job.

Each line of the report is a JSON object::

    {"importing": name}                                     before each module
    {"imported": name, "seconds": s}                        after the module was imported
    {"left_out": name, "why": text, "traceback": text}      if it was left out; the traceback may be null
    {"ready": {"seconds": s, "prefixes": [...], "stamps": {path: [time, size]}}}
    {"failed": text, "traceback": text}                     if the process cannot continue
    {"ended": how}                                          from the Rust extension, before a new start

``how`` is an exit code, the negative number of a signal, ``null``, ``"executes"`` (the process has become
another program), or ``"closes"`` (it has closed its file descriptors). The module that the process was
importing is then left out. The process may start again after each such module, so a module may appear twice.
Unknown and incomplete lines are ignored.

The user's own code is compared before each attempt. Installed packages, which have thousands of files, are
compared only after an installer has changed their folder's modification time. Copy programs may restore that
time, so the ``RECORD`` files are compared as well. Edits inside a package are not detected.
"""

from __future__ import annotations

import json
import os

from elasticrs._engine.job.phrases import describe_exit, how_it_ended, printable
from elasticrs._engine.job.value import Value, fresh
from elasticrs._engine.process.background_call import FileAccess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from elasticrs._core import Supervisor, Warmed

    Stamp = tuple[int, int] | None
    """Modification time of a file in nanoseconds, and its size; ``None`` if the file does not exist."""


_PATIENCE = 0.5
"""Time limit in seconds for checking the modules' files. A network file system may not respond."""

_MOST_TOUCHED = 3
"""Number of imports in a row with changed files after which workers start without preloaded modules."""


class LeftOut(Value):
    """A module that was not preloaded. ``why`` is a clause with the reason, in which "it" is the module."""

    name: str
    why: str
    traceback: Sequence[str] = ()


class Ready(Value):
    """Result of preloading modules. ``prefixes`` are the folders of the standard library and installed
    packages, but not the interpreter's own folder, because applications may be below it, as in ``/usr/src``.
    """

    seconds: float
    prefixes: tuple[str, ...]
    stamps: Mapping[str, Stamp] = fresh(factory=dict)


class Report(Value):
    """State of the preloading, as reported so far. ``imported`` has modules' import times in seconds."""

    imported: Mapping[str, float] = fresh(factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    importing: str | None = None
    ready: Ready | None = None
    failed: tuple[str, Sequence[str]] | None = None


def read(data: bytes) -> Report:
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
            case {"ready": {"seconds": float(seconds) | int(seconds), **more}}:
                importing = None
                ready = Ready(float(seconds), _texts(more, "prefixes"), _stamps(more))
            case {"failed": str(why)}:
                failed = printable(why), _lines(record)
    return Report(imported, tuple(left_out), importing, ready, failed)


def _why_ended(how: object) -> str:
    if how == "executes":
        return "it executes another program at import"
    if how == "closes":
        return "it closes file descriptors of other code at import"
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
    """Return a module's name as the user knows it: ``a.b`` for ``from a import b``."""
    return printable(name).replace(":", ".")


class Sources:
    """Times and sizes of files, kept in order to detect later changes. ``own`` are the user's modules,
    ``installed`` are installed modules, and ``signs`` are files and folders that every installation changes.
    The constructor gets the times and sizes that the nursery (the process that imports modules) has reported,
    as ``stamps``, the folders of installed modules, and the names of the imported modules.
    """

    def __init__(self, stamps: Mapping[str, Stamp], prefixes: Iterable[str], names: Iterable[str]) -> None:
        folders = [prefix.rstrip(os.sep) for prefix in dict.fromkeys(prefixes)]
        inside = tuple(folder + os.sep for folder in folders)
        files = {path: found for path, found in stamps.items() if path.rstrip(os.sep) not in folders}
        # Check files that changed during the imports in each call: `signs`, read later, would not show it.
        always = touched(files)
        self.installed = {
            path: found for path, found in files.items() if path.startswith(inside) and path not in always
        }
        self.own = {path: found for path, found in files.items() if path not in self.installed}
        tops = {name.partition(".")[0].lower() for name in names}
        signs = [*folders, *_package_records(folders, tops)]
        self.signs = {path: stamps[path] if path in stamps else stamp(path) for path in signs}

    def changes(self) -> dict[str, Stamp]:
        """Return the changed files with their current stamps, the user's own files first."""
        changes = _changes(self.own)
        signs = {path: stamp(path) for path in self.signs}
        if signs != self.signs:
            installed = _changes(self.installed)
            if not installed:
                # Something was installed, but no preloaded module has changed. Update `signs`, so that the
                # next call does not check all files again.
                self.signs = signs
            changes |= installed
        return changes


def touched(stamps: Mapping[str, Stamp]) -> list[str]:
    """Return the files that changed during the imports. :class:`Sources` always reports them as changed."""
    return [path for path, found in stamps.items() if found is not None and found[0] == TOUCHED]


TOUCHED = -1
"""Time recorded for a file that changed during the imports of the nursery, which forks the workers."""


def stamp(path: str) -> Stamp:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None  # `os.stat` raises `ValueError` if the string cannot be a path.
    return found.st_mtime_ns, found.st_size


def _changes(stamps: Mapping[str, Stamp]) -> dict[str, Stamp]:
    found = {path: stamp(path) for path in stamps}
    return {path: now for path, now in found.items() if now != stamps[path]}


def _package_records(folders: Sequence[str], tops: set[str]) -> Iterator[str]:
    for folder in folders:
        try:
            names = os.listdir(folder)
        except (OSError, ValueError):
            continue
        for name in sorted(names):
            distribution = name.partition("-")[0].replace(".", "_").lower()
            if name.endswith(".dist-info") and distribution in tops:
                yield os.path.join(folder, name, "RECORD")


class Warming:
    """Decides whether workers may be forked from the nursery (the process that has imported their modules).
    ``limit`` is the time limit in seconds for its imports. ``report`` is the descriptor of the file to which
    nurseries write what they have imported.
    """

    def __init__(self, say: Callable[[str], None], limit: float) -> None:
        self._say = say
        self._limit = limit
        self._read = 0
        self.report = os.memfd_create("warm-report", os.MFD_CLOEXEC)
        self.is_warm = False
        self.why_cold: str | None = None
        self.found = Report()
        self._sources: Sources | None = None
        self._never_again: str | None = None
        self._touched = 0
        self._files = FileAccess(self._tell_slow_files, _PATIENCE)

    def ended(self, event: Warmed) -> None:
        """Handle the event that the nursery (which forks workers) has ended its imports, or has exited."""
        told = os.pread(self.report, os.fstat(self.report).st_size - self._read, self._read)
        self._read += len(told)
        self.found = found = read(told)
        for one in found.left_out:
            self._say(f"warm: {one.name} was left out: {one.why}")
            self._say_all(one.traceback)
        self.is_warm, self._sources, self.why_cold = event.is_ready, None, None
        if not event.is_ready:
            self.start_cold(_why_cold(found, event, self._limit))
            if found.failed is not None:
                self._say_all(found.failed[1])
        elif found.ready is not None:
            ready, imported = found.ready, found.imported
            self._sources = self._files.run(lambda: Sources(ready.stamps, ready.prefixes, imported), None)
            self._limit_touched(touched(ready.stamps))

    def _limit_touched(self, paths: Sequence[str]) -> None:
        self._touched = self._touched + 1 if paths else 0
        if self._touched >= _MOST_TOUCHED:
            self._never_again = f"{paths[0]} has changed during each of the last {_MOST_TOUCHED} imports"
            self._say(f"warm: workers start cold from the next restart on: {self._never_again}")

    def start_cold(self, why: str) -> None:
        """Tell the user that the workers of this attempt start without preloaded modules."""
        self.is_warm, self.why_cold = False, why
        self._say(f"warm: workers start cold: {why}")

    def may_fork(self, supervisor: Supervisor) -> bool:
        """Return true if workers may be forked. If imported files have changed, import them again."""
        if self._never_again is not None:
            self.is_warm, self.why_cold = False, self._never_again
            return False
        if self._sources is None:
            return True  # Assume that no file has changed, because the times of the files are unknown.
        changed = self._files.run(self._sources.changes, None)
        path = next(iter(changed or ()), None)
        self.is_warm, self.why_cold = path is None, None
        if path is None:
            return True
        if not supervisor.renew_nursery():
            self.start_cold(f"{path} has changed since it was imported")
            return False
        self._sources = None
        self._say(f"warm: {path} has changed: the modules are imported again before the workers start")
        return True

    def _tell_slow_files(self) -> None:
        self._say(
            f"warm: the files of imported modules could not be checked within {_PATIENCE:g} s; "
            "edits may go undetected"
        )

    def _say_all(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._say(f"  {line}")

    def close(self) -> None:
        if self.report != -1:
            os.close(self.report)
            self.report = -1


def _why_cold(found: Report, event: Warmed, limit: float) -> str:
    if found.failed is not None:
        return found.failed[0]
    what = f"the import of {found.importing}" if found.importing else "its start"
    if event.hung:
        return f"{what} did not end within {limit:g} s"
    return f"{what} {how_it_ended(event.exitcode)}"
