"""Tracks what an agent that calls torch's hooks is doing, and when its next progress report is due.

The agent's thread writes this state, and its health check server reads it. A running hook cannot be asked for
its progress. The agent knows only the time of the call and the maximum time for which the hook may block.
Activities that may wait without limit, such as a rendezvous, have no deadline.
"""

from __future__ import annotations

import time
from math import inf

from elasticrs.job.value import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["START_ALLOWANCE", "UNLIMITED", "Place", "Progress"]

UNLIMITED = inf

START_ALLOWANCE = 600.0
"""Seconds that the start of workers may take. This may include waiting for machines or downloading images."""


class Progress:
    """Current activity of an agent, and its deadline for reporting progress."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._place: Place | None = None

    def within(self, name: str, allowance: float) -> Place:
        """Return a context manager for the call of a hook. The hook must finish or report progress within
        ``allowance`` seconds.

        Activities can be nested. When an inner activity ends, the full allowance of the outer activity starts
        again.
        """
        return Place(self, name, allowance)

    def tell(self, seconds: float = 0.0) -> None:
        """Report progress of the current activity. The next report is due in ``seconds``. Can be called from
        any thread.
        """
        place = self._place
        if place is not None:
            place.silent_until = self._clock() + seconds

    def renew(self) -> None:
        """Restart the time limit of the current activity, because the process was paused."""
        place = self._place
        if place is not None:
            self.tell(place.allowance)

    def overdue(self) -> tuple[float, str | None]:
        """Return the number of seconds by which a progress report is overdue (0 if it is not), and the name
        of the current activity. Can be called from any thread.
        """
        place = self._place
        if place is None:
            return 0.0, None
        return max(0.0, self._clock() - place.silent_until), place.name


class Place(Record):
    """Context manager for one activity, created by :meth:`Progress.within`."""

    _progress: Progress
    name: str
    allowance: float
    silent_until: float = inf
    _outer: Place | None = None

    def __enter__(self) -> None:
        progress = self._progress
        self._outer = progress._place
        self.silent_until = progress._clock() + self.allowance
        progress._place = self

    def __exit__(self, *_error: object) -> None:
        # Restore the previous activity, even if a signal has interrupted the `__exit__` of a nested activity.
        self._progress._place = self._outer
        self._progress.renew()
