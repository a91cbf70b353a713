"""Named deadlines, on the clock that also counts while the machine is suspended."""

from __future__ import annotations

import time


def now() -> float:
    """Seconds on the boot clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Timers:
    """A few deadlines by name."""

    __slots__ = ("_deadlines",)

    def __init__(self) -> None:
        self._deadlines: dict[str, float] = {}

    def arm(self, name: str, seconds: float) -> None:
        """Set a deadline in so many seconds, or set it anew."""
        self._deadlines[name] = now() + seconds

    def disarm(self, name: str) -> None:
        """Forget a deadline; one that is not set is no error."""
        self._deadlines.pop(name, None)

    def take_due(self) -> list[str]:
        """Remove and return the names whose time has passed, the earliest first."""
        moment = now()
        due = sorted((at, name) for name, at in self._deadlines.items() if at <= moment)
        for _, name in due:
            del self._deadlines[name]
        return [name for _, name in due]

    def seconds_left(self, limit: float) -> float:
        """Seconds until the next one, at most ``limit``."""
        if not self._deadlines:
            return limit
        return max(0.0, min(limit, min(self._deadlines.values()) - now()))
