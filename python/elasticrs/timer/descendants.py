"""The descendants of this process and their timers: whom a server without an agent may signal, and when."""

from __future__ import annotations

import os

from elasticrs.timer.api import SteadyClock, _logger

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


class Descendants:
    """Holds a descriptor of each, so that nobody else who gets its pid is taken for it."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}

    def pidfds(self) -> Iterable[int]:
        """One is readable when its process has ended."""
        return self._pidfds.values()

    def bind(self, pid: int, started: int = 0) -> bool:
        """Hold a process, which began at ``started`` (:func:`started_at`; 0 when that is not known). False if
        it has ended, or is none of this one's descendants. A writer may have sent anything as its ``pid``.
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
        """True if :meth:`bind` took it, and it has not been let go."""
        return pid in self._pidfds

    def send(self, pid: int, signum: int) -> bool:
        """Send a signal to one that is held; False if it could not be sent."""
        import signal

        try:
            signal.pidfd_send_signal(self._pidfds[pid], signum)
        except ProcessLookupError:
            _logger().info("pid %s has ended meanwhile", pid)
        except OSError:
            _logger().exception("pid %s could not be signalled", pid)
            return False
        return True

    def forget_the_dead(self) -> set[int]:
        """Let go of those that have ended, and return their pids."""
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
        """Let go of all."""
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])


class DescendantTimers:
    """What both servers have in common: the live timers by pid and scope, and the processes that
    have them.
    """

    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        self._timers: dict[tuple[Any, str], Any] = {}
        self._descendants = Descendants()
        self._clock = SteadyClock()

    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        """The timers that are due, by pid.

        Args:
            deadline: in seconds since 1970; what expires then or earlier is due.
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
    """True if a living process is a descendant of this one; itself it is not."""
    own = os.getpid()
    for _ in range(64):
        if pid <= 1 or pid == own:
            return False
        fields = stat_fields(str(pid))
        if not fields:
            return False
        parent = int(fields[1])
        if parent == own:
            # A main thread that has ended is shown as a zombie, while others go on.
            return fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
        pid = parent
    return False


def started_at(pid: str) -> int:
    """Say when a process (or ``self``) began, in clock ticks since boot; 0 when that cannot be read."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def stat_fields(pid: str, proc: str = "/proc") -> list[bytes]:
    """Read ``/proc/PID/stat`` from the third field on, the state; empty when it cannot be read."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            # The name before it stands in parentheses and may hold any byte.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []
