"""Manages the file descriptors of a warm nursery (the process that forks workers) during the imports. Loaded
by ``nursery.py``.
"""

from __future__ import annotations

import os
import sys


class Captured:
    """Captures stdout and stderr until :meth:`end` is called.

    Args:
        lowest: lowest file descriptor that may be used to keep the original streams.
    """

    def __init__(self, lowest: int) -> None:
        import fcntl

        self._kept = {}
        for fd in (1, 2):
            memory = os.memfd_create("imports")
            # Keep a descriptor of the memory file, because an import may close or replace the descriptor of
            # the stream.
            self._kept[fd] = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, lowest) for each in (fd, memory)]
            os.dup2(memory, fd)
            os.close(memory)

    def end(self) -> dict[int, bytes]:
        """Restore the streams. Return the captured output, keyed by file descriptor."""
        from contextlib import suppress

        printed = {}
        for fd, (kept, memory) in self._kept.items():
            # Ignore errors, because an import may have closed the stream or its descriptor.
            with suppress(ValueError, OSError):
                (sys.stdout if fd == 1 else sys.stderr).flush()
            printed[fd] = os.pread(memory, os.fstat(memory).st_size, 0)
            os.dup2(kept, fd)
            os.close(kept)
            os.close(memory)
        return printed


def reserve(limit: int) -> list[int]:
    """Open all free descriptors below ``limit``, so that imported modules cannot get them. Return the
    descriptors.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    free = [fd for fd in range(3, limit) if fd != null and not os.path.exists(f"/proc/self/fd/{fd}")]
    for fd in free:
        os.dup2(null, fd, inheritable=False)
    return [null, *free]
