"""Track descendant processes and their timers for a timer server without an agent. The server may signal only
descendants of its process.
"""

from __future__ import annotations

import os

from elasticrs._engine.process.procfs import started_at, stat_fields
from elasticrs.timer.api import SteadyClock, _logger

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


class Descendants:
    """Holds a pidfd for each descendant. A pidfd never refers to another process that later gets the same
    pid.
    """

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}

    def pidfds(self) -> Iterable[int]:
        """Return the pidfds. Each becomes readable when its process exits."""
        return self._pidfds.values()

    def bind(self, pid: int, started: int = 0) -> bool:
        """Open and hold a pidfd of a process. Return false if the process has exited or is not a descendant
        of the current process. ``started`` is its start time (:func:`started_at`), or 0 if unknown. ``pid``
        may be any value, because it comes from an unchecked request.
        """
        if pid not in self._pidfds:
            try:
                pidfd = os.pidfd_open(pid)
            except (OSError, OverflowError, TypeError, ValueError):
                return False
            if not descends_from_us(pid) or started not in (0, started_at(str(pid))):
                os.close(pidfd)
                return False
            self._pidfds[pid] = pidfd
        return True

    def holds(self, pid: int) -> bool:
        """Return true if this object holds a pidfd of the process."""
        return pid in self._pidfds

    def send(self, pid: int, signum: int) -> bool:
        """Send a signal to a process whose pidfd is held. Return true if the signal was sent or the process
        has already exited.
        """
        import signal

        try:
            signal.pidfd_send_signal(self._pidfds[pid], signum)
        except ProcessLookupError:
            _logger().info("pid %s has already exited", pid)
        except OSError:
            _logger().exception("pid %s could not be signalled", pid)
            return False
        return True

    def forget_the_dead(self) -> set[int]:
        """Close the pidfds of processes that have exited. Return their pids."""
        from select import POLLIN, poll

        watch = poll()
        for pidfd in self._pidfds.values():
            watch.register(pidfd, POLLIN)
        ended = {pidfd for pidfd, _ in watch.poll(0)}
        dead = {pid for pid, pidfd in self._pidfds.items() if pidfd in ended}
        for pid in dead:
            os.close(self._pidfds.pop(pid))
        return dead

    def close(self) -> None:
        """Close all pidfds."""
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])


class DescendantTimers:
    """Base class of timer servers without an agent. Holds the live timers by pid and scope, and a pidfd for
    each process that owns timers.
    """

    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        self._timers: dict[tuple[Any, str], Any] = {}
        self._descendants = Descendants()
        self._clock = SteadyClock()

    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        """Return the timers that have expired, by pid.

        Args:
            deadline: time in seconds since 1970. Timers that expire then or earlier are due.
        """
        expired: dict[Any, list[Any]] = {}
        for (pid, _), timer in self._timers.items():
            if timer.expiration_time <= deadline:
                expired.setdefault(pid, []).append(timer)
        return expired

    def _seconds_until_due(self) -> float:
        soonest = min((timer.expiration_time for timer in self._timers.values()), default=float("inf"))
        return max(0.0, soonest - self._clock.now())

    def _forget(self, pids: set[Any]) -> None:
        for key in [key for key in self._timers if key[0] in pids]:
            del self._timers[key]


def descends_from_us(pid: int) -> bool:
    """Return true if the process is alive and a descendant of the current process, but not the current
    process itself.
    """
    own = os.getpid()
    for _ in range(64):
        if pid <= 1 or pid == own:
            return False
        fields = stat_fields(str(pid))
        if not fields:
            return False
        parent = int(fields[1])
        if parent == own:
            # A process whose main thread has exited appears as a zombie, even if its other threads are still
            # running.
            return fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
        pid = parent
    return False
