"""Detect changes to the source files of preloaded modules.

The user's own code (an editable install, a folder of ``PYTHONPATH``) is compared file by file before each
attempt. The interpreter's library and installed packages are thousands of files, so they are compared only
after a package was installed or removed. An installer replaces the folder ``NAME-VERSION.dist-info``, which
changes the modification time of its parent folder. In case that time was restored (for example by ``rsync
-a``), the ``RECORD`` file of each preloaded distribution is compared as well. Edits inside an installed
package are not detected.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Stamp = tuple[int, int] | None
    """Time of the last change in nanoseconds, and size; ``None`` where nothing is."""


class Sources:
    """Recorded stamps of the files from which modules were preloaded.

    Args:
        own: stamps of the user's own files, by path.
        installed: stamps of the files of the interpreter's library and of installed packages, by path.
        signs: stamps of folders and files that change whenever a package is installed or removed, by path.
    """

    def __init__(
        self, own: Mapping[str, Stamp], installed: Mapping[str, Stamp], signs: Mapping[str, Stamp]
    ) -> None:
        self.own, self.installed, self.signs = own, installed, signs

    def changed(self, look: Callable[[str], Stamp] | None = None) -> str | None:
        """Return the first file that differs now, or ``None``.

        Args:
            look: at a path; the file system's :func:`stamp` by default.
        """
        look = look or stamp
        if (path := _first_changed(self.own, look)) is not None:
            return path
        signs = {path: look(path) for path in self.signs}
        if signs == self.signs:
            return None
        path = _first_changed(self.installed, look)
        if path is None:
            # An unrelated package was installed. Store the stamps to avoid another full check.
            self.signs = signs
        return path


def remember(
    stamps: Mapping[str, Stamp],
    prefixes: Iterable[str],
    names: Iterable[str],
    look: Callable[[str], Stamp] | None = None,
) -> Sources:
    """Return the stamps that later comparisons use.

    Args:
        stamps: known stamps of the files of preloaded modules and of ``prefixes``, by path.
        prefixes: folders of the interpreter's library and of installed packages.
        names: of preloaded modules.
        look: see :meth:`Sources.changed`.
    """
    look = look or stamp
    folders = [prefix.rstrip(os.sep) for prefix in dict.fromkeys(prefixes)]
    inside = tuple(folder + os.sep for folder in folders)
    files = {path: found for path, found in stamps.items() if path.rstrip(os.sep) not in folders}
    installed = {path: found for path, found in files.items() if path.startswith(inside)}
    own = {path: found for path, found in files.items() if path not in installed}
    signs = {folder: stamps[folder] if folder in stamps else look(folder) for folder in folders}
    tops = {name.partition(".")[0].lower() for name in names}
    return Sources(own, installed, {**signs, **{path: look(path) for path in _records(folders, tops)}})


def stamp(path: str) -> Stamp:
    """Look at a path."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        # The second: not a path at all.
        return None
    return found.st_mtime_ns, found.st_size


def _first_changed(stamps: Mapping[str, Stamp], look: Callable[[str], Stamp]) -> str | None:
    return next((path for path, before in stamps.items() if look(path) != before), None)


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
