"""Detects workers in uninterruptible sleep. A process in this state (``D`` in ``/proc``) cannot be killed.

A worker stays in this state while it waits for a device or a file system that does not respond. The worker
holds resources that a replacement on this node would need, so the job fails and is not restarted. Torch
treats this case as a success. Short waits are normal, so a worker counts only if it was in this state at
every check for a certain time.

The functions :func:`since` and :func:`overdue` decide. The class :class:`Sleepers` reads the clock and
``/proc``.
"""

from __future__ import annotations

import time

from elasticrs._engine.process.procfs import has_own_proc, read_state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_LOOKS = 4
"""Minimum number of checks within the time limit for a sleeping worker."""

_LONGEST = 1.0
"""Maximum number of seconds between two checks for sleeping workers."""


def since(earlier: Mapping[int, float], states: Mapping[int, str], now: float) -> dict[int, float]:
    """Return the time at which each process that now sleeps was first seen sleeping.

    Args:
        earlier: result of the previous check.
        states: states of the existing processes by pid, as letters from ``/proc/PID/stat``.
        now: current time, on the clock of ``earlier``.
    """
    return {pid: earlier.get(pid, now) for pid, state in states.items() if state == "D"}


def overdue(first_seen: Mapping[int, float], now: float, limit: float) -> dict[int, float]:
    """Return the processes that have slept for at least ``limit`` seconds, and for how many seconds. Return
    an empty result if ``limit`` is not positive.
    """
    if limit <= 0:
        return {}
    return {pid: now - start for pid, start in first_seen.items() if now - start >= limit}


class Sleepers:
    """Finds workers that have been in uninterruptible sleep for too long.

    Args:
        limit: maximum number of seconds in uninterruptible sleep; no check is made if it is 0 or negative, or
            without a ``/proc`` of this pid namespace.
        proc: mount point of ``/proc``.
    """

    def __init__(self, limit: float, proc: str = "/proc") -> None:
        # Do not search for sleeping workers if /proc belongs to another pid namespace, because the workers'
        # pids would refer to other processes in /proc.
        self._limit = limit = limit if has_own_proc() else 0.0
        self._proc = proc
        self._next = 0.0
        self._first_seen: dict[int, float] = {}
        self.interval = min(_LONGEST, limit / _LOOKS) if limit > 0 else float("inf")
        """Seconds between two checks for sleeping workers."""

    def look(self, pids: Mapping[int, int]) -> dict[int, float]:
        """Return the workers that have been in uninterruptible sleep for too long, as a mapping from local
        rank to seconds.

        Check only if ``interval`` seconds have passed since the last check. Otherwise, return an empty
        mapping.
        """
        now = time.monotonic()
        if self._limit <= 0 or now < self._next:
            return {}
        self._next = now + self.interval
        states = {pid: state for pid in pids.values() if (state := read_state(pid, self._proc))}
        self._first_seen = since(self._first_seen, states, now)
        slept = overdue(self._first_seen, now, self._limit)
        return {local_rank: slept[pid] for local_rank, pid in pids.items() if pid in slept}
