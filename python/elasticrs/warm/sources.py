"""The files from which preloaded modules were made, so that an edited one is noticed.

Code of the user's (an editable install, a folder of ``PYTHONPATH``) is compared file by file. The library of
the interpreter and installed packages are not: torch alone has thousands of files. An installer that changes
a package replaces its folder ``NAME-VERSION.dist-info``, and with it the time of the folder that holds it. So
these folders are compared, and the ``RECORD`` of each distribution that has the name of a preloaded package,
in case the time of a folder was restored (by ``rsync -a``, say). A package that is edited where it is
installed goes unnoticed.
"""

from __future__ import annotations

import os

from elasticrs._value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Stamp = tuple[int, int] | None
    """Time of the last change in nanoseconds, and size; ``None`` where nothing is."""


class Sources(Value):
    """What the files were when they were looked at.

    Args:
        stamps: by path.
    """

    stamps: Mapping[str, Stamp]

    def changed(self, look: Callable[[str], Stamp] | None = None) -> str | None:
        """Return the first path that differs now, or ``None``.

        Args:
            look: at a path; the file system's :func:`stamp` by default.
        """
        look = look or stamp
        return next((path for path, before in self.stamps.items() if look(path) != before), None)


def remember(
    files: Iterable[str], prefixes: Sequence[str], look: Callable[[str], Stamp] | None = None
) -> Sources:
    """Look at all that is compared.

    Args:
        files: of preloaded modules.
        prefixes: folders of the interpreter's library and of installed packages.
        look: see :meth:`Sources.changed`.
    """
    look = look or stamp
    paths = list(dict.fromkeys(files))
    # The folder of installed packages is often below that of the library.
    folders = sorted({os.path.join(prefix, "") for prefix in prefixes}, key=len, reverse=True)
    own = [path for path in paths if not path.startswith(tuple(folders))]
    tops = {_top(path, folders) for path in paths}
    watched = [*own, *(folder.rstrip(os.sep) for folder in folders), *_records(folders, tops)]
    return Sources({path: look(path) for path in watched})


def stamp(path: str) -> Stamp:
    """Look at a path."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        # The second: not a path at all.
        return None
    return found.st_mtime_ns, found.st_size


def _top(path: str, folders: Sequence[str]) -> str:
    """The top-level package or module of an installed file, in lower case."""
    for folder in folders:
        if path.startswith(folder):
            return path[len(folder) :].partition(os.sep)[0].partition(".")[0].lower()
    return ""


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
