"""Computes stamps (modification times and sizes) of files. The agent compares the stamps to detect changed
files. Loaded by ``nursery.py``.
"""

from __future__ import annotations

import os


def stamp(file: str, since: int | None = None) -> list[int]:
    """Return the modification time and the size of a file, or an empty list if the file is missing.

    If the file has changed since the imports started, the nursery may have imported the old contents. In this
    case, return an impossible time, so that the agent treats the file as changed. Ignore a change time in the
    future, because the clock of the file system may be wrong.

    Args:
        file: path of the file.
        since: wall-clock time at which the imports started, in nanoseconds. ``None`` if changes during the
            imports do not matter.
    """
    import time

    try:
        found = os.stat(file)
    except OSError:
        return []
    is_new = since is not None and since <= found.st_ctime_ns <= time.time_ns()
    return [-1 if is_new else found.st_mtime_ns, found.st_size]
