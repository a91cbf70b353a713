"""Read the report of the process that imports modules for the workers, and detect later changes to the source
files of these modules. Each line of the report is a JSON object.

::

    {"importing": name}                                     before each module
    {"imported": name, "seconds": s}                        after the module was imported
    {"left_out": name, "why": text, "traceback": text}      if it was left out; the traceback may be null
    {"ready": {"seconds": s, "prefixes": [...], "stamps": {path: [time, size]}}}
                                                            at the end; the stamp of a missing file is []
    {"failed": text, "traceback": text}                     if the process cannot continue
    {"ended": how}                                          the process has exited, and is started again

The agent's core writes the last kind of line. Its value is an exit code, the negative number of a signal,
``null``, ``"executes"`` (the process executed another program), or ``"closes"`` (the process closed file
descriptors that it needs). If a process has exited, the module that it was importing is left out. The process
may start over after each module that is left out, so a module may appear twice. Lines of an unknown form are
ignored. An incomplete line is ignored as well, because it means that its writer was killed.

The user's own code (an editable install, a folder in ``PYTHONPATH``) is compared file by file before each
attempt. The interpreter's library and the installed packages consist of thousands of files, so they are
compared only after a package was installed or removed. An installer replaces the folder
``NAME-VERSION.dist-info``, which changes the modification time of its parent folder. Copy programs such as
``rsync -a`` may restore that modification time, so the ``RECORD`` file of each preloaded distribution is
compared as well. Edits inside an installed package are not detected.
"""

from __future__ import annotations

import json
import os

from elasticrs._engine.job.phrases import describe_exit, printable
from elasticrs._engine.job.value import Value, fresh

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    Stamp = tuple[int, int] | None
    """Modification time in nanoseconds, and size; ``None`` if the file does not exist."""


class LeftOut(Value):
    """A module that was not preloaded.

    Args:
        name: name of the module.
        why: reason, as a clause in which "it" is the module, such as "it was not found".
        traceback: lines of the traceback of the exception that the module raised; empty if it raised none.
    """

    name: str
    why: str
    traceback: Sequence[str] = ()


class Ready(Value):
    """Result of the imports, available after all modules have been imported.

    Args:
        seconds: duration of the imports.
        prefixes: folders of the interpreter's library and of installed packages. The list does not contain
            the folder in which the interpreter is installed, because an application may be below that folder,
            as in ``/usr/src``.
        stamps: times and sizes of the files of all modules and of the prefixes, read after the imports. See
            :class:`Sources`.
    """

    seconds: float
    prefixes: tuple[str, ...]
    stamps: Mapping[str, Stamp] = fresh(factory=dict)


class Report(Value):
    """Contents of the report so far.

    Args:
        imported: seconds that the import of each module took, in order of the imports.
        left_out: modules that were left out, in order.
        importing: module that is being imported; ``None`` if there is none.
        ready: facts about the imports; ``None`` until all modules have been imported.
        failed: reason why the process could not continue, and the lines of the traceback; ``None`` otherwise.
    """

    imported: Mapping[str, float] = fresh(factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    importing: str | None = None
    ready: Ready | None = None
    failed: tuple[str, Sequence[str]] | None = None


def read(data: bytes) -> Report:
    """Read the lines of the report."""
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
    """Stamps (times and sizes) recorded for the files from which modules were preloaded.

    Args:
        own: stamps of the user's own files, by path.
        installed: stamps of the files of the interpreter's library and of installed packages, by path.
        signs: stamps of folders and files that change whenever a package is installed or removed, by path.
    """

    def __init__(
        self, own: Mapping[str, Stamp], installed: Mapping[str, Stamp], signs: Mapping[str, Stamp]
    ) -> None:
        self.own, self.installed, self.signs = own, installed, signs

    def changes(self) -> dict[str, Stamp]:
        """Return the changed files with their current stamps (times and sizes).

        The user's own files come first.
        """
        changes = _changes(self.own)
        signs = {path: stamp(path) for path in self.signs}
        if signs != self.signs:
            installed = _changes(self.installed)
            if not installed:
                # A package was installed or removed, but no preloaded module has changed. Store the new
                # modification times of the package folders, so that later calls need not check every file
                # again.
                self.signs = signs
            changes |= installed
        return changes


def remember(stamps: Mapping[str, Stamp], prefixes: Iterable[str], names: Iterable[str]) -> Sources:
    """Record the stamps (times and sizes) of these files, so that later changes can be detected."""
    folders = [prefix.rstrip(os.sep) for prefix in dict.fromkeys(prefixes)]
    inside = tuple(folder + os.sep for folder in folders)
    files = {path: found for path, found in stamps.items() if path.rstrip(os.sep) not in folders}
    # Always check the files that changed during the imports, because `signs` may have been read after the
    # change and would not reveal it.
    always = touched(files)
    installed = {
        path: found for path, found in files.items() if path.startswith(inside) and path not in always
    }
    own = {path: found for path, found in files.items() if path not in installed}
    signs = {folder: stamps[folder] if folder in stamps else stamp(folder) for folder in folders}
    tops = {name.partition(".")[0].lower() for name in names}
    return Sources(
        own, installed, {**signs, **{path: stamp(path) for path in _package_records(folders, tops)}}
    )


def touched(stamps: Mapping[str, Stamp]) -> list[str]:
    """Return the files that changed while modules were being imported. An invalid modification time is
    recorded for these files, so that every later check considers them changed.
    """
    return [path for path, found in stamps.items() if found is not None and found[0] == TOUCHED]


TOUCHED = -1
"""Recorded instead of the modification time if a file changed while the nursery imported modules."""


def stamp(path: str) -> Stamp:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        # `os.stat` raises `ValueError` if the string cannot be a path.
        return None
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
