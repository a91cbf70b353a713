"""Detects workers in uninterruptible sleep (``D`` in ``/proc``), which cannot be killed.

Such workers wait for a device or file system that does not respond, and hold resources that replacements
need, so the job fails and is not restarted. Torch reports success in this case. Short waits are normal, so a
worker counts only if it was in this state at every check for a certain time.
"""

from __future__ import annotations

import time

from elasticrs._engine.process.other_processes import has_own_proc, read_state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_LOOKS = 4
"""Minimum number of checks within the time limit."""

_LONGEST = 1.0
"""Maximum number of seconds between two checks."""


def since(earlier: Mapping[int, float], states: Mapping[int, str], now: float) -> dict[int, float]:
    """Return the time at which each sleeping process was first seen asleep, by pid. ``states`` has the
    letters of the current process states in ``/proc``, by pid. ``earlier`` is the last result.
    """
    return {pid: earlier.get(pid, now) for pid, state in states.items() if state == "D"}


def overdue(first_seen: Mapping[int, float], now: float, limit: float) -> dict[int, float]:
    """Return the processes that have slept for at least ``limit`` seconds, and for how many seconds."""
    if limit <= 0:
        return {}
    return {pid: now - start for pid, start in first_seen.items() if now - start >= limit}


class Sleepers:
    """Finds workers that have slept for more than ``limit`` seconds; none if ``limit`` is not positive."""

    def __init__(self, limit: float, proc: str = "/proc") -> None:
        # Disable the check if /proc belongs to another pid namespace, because the pids there refer to other
        # processes.
        self._limit = limit = limit if has_own_proc() else 0.0
        self._proc = proc
        self._next = 0.0
        self._first_seen: dict[int, float] = {}
        self.interval = min(_LONGEST, limit / _LOOKS) if limit > 0 else float("inf")

    def look(self, pids: Mapping[int, int]) -> dict[int, float]:
        """Return the sleep times that exceed the limit, by local rank; empty between two checks."""
        now = time.monotonic()
        if self._limit <= 0 or now < self._next:
            return {}
        self._next = now + self.interval
        states = {pid: state for pid in pids.values() if (state := read_state(pid, self._proc))}
        self._first_seen = since(self._first_seen, states, now)
        slept = overdue(self._first_seen, now, self._limit)
        return {local_rank: slept[pid] for local_rank, pid in pids.items() if pid in slept}
