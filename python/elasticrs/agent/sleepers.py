"""Workers in uninterruptible sleep: state ``D`` in ``/proc``, in which a process cannot be signalled.

A worker that stays there waits for a device or a file system that does not answer. What it holds is in the
way of any successor on this node, so the job ends as failed and no restart follows; torch ends it as a
success. Short visits are normal: only an unbroken stay counts, as far as looks at intervals can tell.

:func:`since` and :func:`overdue` decide; :class:`Sleepers` reads the clock and ``/proc``.
"""

from __future__ import annotations

import time

from elasticrs.utils.process_state import read_state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_LOOKS = 4
"""At least so many in the time that a worker may sleep."""

_LONGEST = 1.0
"""Seconds between two looks at most."""


def since(earlier: Mapping[int, float], states: Mapping[int, str], now: float) -> dict[int, float]:
    """Return when each process that sleeps now was first seen to.

    Args:
        earlier: the same, of the look before.
        states: of the processes that are there, by pid: one letter as in ``/proc/PID/stat``.
        now: on the clock of ``earlier``.
    """
    return {pid: earlier.get(pid, now) for pid, state in states.items() if state == "D"}


def overdue(first_seen: Mapping[int, float], now: float, limit: float) -> dict[int, float]:
    """Return the processes that have slept for ``limit`` seconds (nothing is too long when it is not
    positive), and for how many.
    """
    if limit <= 0:
        return {}
    return {pid: now - start for pid, start in first_seen.items() if now - start >= limit}


class Sleepers:
    """Looks for workers that sleep too long.

    Args:
        limit: seconds; not looked at when 0 or negative.
        proc: where ``/proc`` is mounted.
    """

    def __init__(self, limit: float, proc: str = "/proc") -> None:
        self._limit = limit
        self._proc = proc
        self._next = 0.0
        self._first_seen: dict[int, float] = {}
        self.interval = min(_LONGEST, limit / _LOOKS) if limit > 0 else float("inf")
        """Seconds between two looks."""

    def look(self, pids: Mapping[int, int]) -> dict[int, float]:
        """Return those of these pids that have slept too long, by local rank, and for how many seconds. Looks
        only when the last look is long enough ago.
        """
        now = time.monotonic()
        if self._limit <= 0 or now < self._next:
            return {}
        self._next = now + self.interval
        states = {pid: state for pid in pids.values() if (state := read_state(pid, self._proc))}
        self._first_seen = since(self._first_seen, states, now)
        slept = overdue(self._first_seen, now, self._limit)
        return {local_rank: slept[pid] for local_rank, pid in pids.items() if pid in slept}
