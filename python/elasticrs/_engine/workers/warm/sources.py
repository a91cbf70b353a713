"""Detect changes to the source files of preloaded modules.

The user's own code (an editable install, a folder in ``PYTHONPATH``) is compared file by file before each
attempt. The interpreter's library and the installed packages consist of thousands of files, so they are
compared only after a package was installed or removed. An installer replaces the folder
``NAME-VERSION.dist-info``, which changes the modification time of its parent folder. Copy programs such as
``rsync -a`` may restore that modification time, so the ``RECORD`` file of each preloaded distribution is
compared as well. Edits inside an installed package are not detected.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    Stamp = tuple[int, int] | None
    """Modification time in nanoseconds, and size; ``None`` if the file does not exist."""


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
    """Record the stamps (times and sizes) of these files, so that later changes can be detected.

    Args:
        stamps: known stamps of the files of preloaded modules and of ``prefixes``, by path.
        prefixes: folders of the interpreter's library and of installed packages.
        names: names of the preloaded modules.
    """
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
    return Sources(own, installed, {**signs, **{path: stamp(path) for path in _records(folders, tops)}})


def touched(stamps: Mapping[str, Stamp]) -> list[str]:
    """Return the files that changed while modules were being imported. An invalid modification time is
    recorded for these files, so that every later check considers them changed.
    """
    return [path for path, found in stamps.items() if found is not None and found[0] == TOUCHED]


TOUCHED = -1
"""Recorded instead of the modification time if a file changed while the nursery imported modules."""


def stamp(path: str) -> Stamp:
    """Return a file's current modification time and size; ``None`` if it does not exist."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        # `os.stat` raises `ValueError` if the string cannot be a path.
        return None
    return found.st_mtime_ns, found.st_size


def _changes(stamps: Mapping[str, Stamp]) -> dict[str, Stamp]:
    found = {path: stamp(path) for path in stamps}
    return {path: now for path, now in found.items() if now != stamps[path]}


def _records(folders: Sequence[str], tops: set[str]) -> Iterator[str]:
    for folder in folders:
        try:
            names = os.listdir(folder)
        except (OSError, ValueError):
            continue
        for name in sorted(names):
            distribution = name.partition("-")[0].replace(".", "_").lower()
            if name.endswith(".dist-info") and distribution in tops:
                yield os.path.join(folder, name, "RECORD")
