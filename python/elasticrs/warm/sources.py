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
    files: Iterable[str],
    prefixes: Iterable[str],
    names: Iterable[str],
    look: Callable[[str], Stamp] | None = None,
) -> Sources:
    """Look at all that is compared.

    Args:
        files: of preloaded modules.
        prefixes: folders of the interpreter's library and of installed packages; files below them are not
            compared.
        names: of preloaded modules.
        look: see :meth:`Sources.changed`.
    """
    look = look or stamp
    folders = [prefix.rstrip(os.sep) for prefix in dict.fromkeys(prefixes)]
    installed = tuple(folder + os.sep for folder in folders)
    own = [path for path in dict.fromkeys(files) if not path.startswith(installed)]
    tops = {name.partition(".")[0].lower() for name in names}
    return Sources({path: look(path) for path in [*own, *folders, *_records(folders, tops)]})


def stamp(path: str) -> Stamp:
    """Look at a path."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        # The second: not a path at all.
        return None
    return found.st_mtime_ns, found.st_size


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
