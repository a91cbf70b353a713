"""In which meeting of :mod:`elasticrs.train` each worker of a node is, as the worker itself has written it.

One small file in memory, which the workers inherit: a few bytes for each place, written once per meeting.
:mod:`elasticrs.train.place` has the other end.
"""

from __future__ import annotations

import os
import struct

from elasticrs._value import Value

VARIABLE = "ELASTICRS_TRAIN_PLACE"
"""Where a worker writes: descriptor, inode and offset."""

LAYOUT = struct.Struct("=4q")
"""Round, rank, world size, and the round again: what is read while it is written is not taken for whole."""


class Met(Value):
    """A worker's last meeting.

    Args:
        round: its number, from 1.
        rank: of the worker.
        world_size: how many workers met.
    """

    round: int
    rank: int
    world_size: int


class Places:
    """The file.

    Args:
        count: of workers.

    Attributes:
        fd: the descriptor, for the workers; ``None`` where there are no such files. Then nobody knows ranks.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.fd: int | None = None
        try:
            self.fd = os.memfd_create("elasticrs-places")
            os.truncate(self.fd, count * LAYOUT.size)
        except (AttributeError, OSError):
            # A Python without that call, or a system that denies it.
            self.close()

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return what tells a worker where to write."""
        if self.fd is None:
            return {}
        return {VARIABLE: f"{self.fd}:{os.fstat(self.fd).st_ino}:{local_rank * LAYOUT.size}"}

    def read(self, local_rank: int) -> Met | None:
        """Return the last meeting of a worker; ``None`` before the first."""
        if self.fd is None:
            return None
        first, rank, world_size, last = LAYOUT.unpack(
            os.pread(self.fd, LAYOUT.size, local_rank * LAYOUT.size)
        )
        return Met(first, rank, world_size) if first == last > 0 else None

    def meetings(self) -> tuple[int | None, ...]:
        """Return the numbers of the last meetings of all workers."""
        found = map(self.read, range(self._count))
        return tuple(None if met is None else met.round for met in found)

    def clear(self, local_rank: int) -> None:
        """Another process takes this place."""
        if self.fd is not None:
            os.pwrite(self.fd, bytes(LAYOUT.size), local_rank * LAYOUT.size)

    def close(self) -> None:
        """Release the file. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
