"""Named timers on the boot clock, which keeps running while the machine is suspended."""

from __future__ import annotations

import time


def now() -> float:
    """Return the current time of the boot clock, in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Timers:
    """Named timers."""

    __slots__ = ("_deadlines",)

    def __init__(self) -> None:
        self._deadlines: dict[str, float] = {}

    def arm(self, name: str, seconds: float) -> None:
        """Set a timer that expires after ``seconds``. If the timer is already set, replace its deadline."""
        self._deadlines[name] = now() + seconds

    def disarm(self, name: str) -> None:
        """Cancel a timer. Do nothing if it is not set."""
        self._deadlines.pop(name, None)

    def take_due(self) -> list[str]:
        """Remove all timers that are due and return their names, earliest first."""
        moment = now()
        due = sorted((at, name) for name, at in self._deadlines.items() if at <= moment)
        for _, name in due:
            del self._deadlines[name]
        return [name for _, name in due]

    def seconds_left(self, limit: float) -> float:
        """Return the seconds until the next timer is due, but at most ``limit``."""
        if not self._deadlines:
            return limit
        return max(0.0, min(limit, min(self._deadlines.values()) - now()))
