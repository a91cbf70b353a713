"""Tracks what an agent that calls torch's hooks is doing, and when its next progress report is due.

The agent's thread writes this state, and its health check server reads it. A running hook cannot be asked for
its progress. The agent knows only the time of the call and the maximum time for which the hook may block.
Activities that may wait without limit, such as a rendezvous, have no deadline.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from math import inf

from elasticrs._engine.job.value import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["START_ALLOWANCE", "UNLIMITED", "Progress"]

UNLIMITED = inf

START_ALLOWANCE = 600.0
"""Seconds that the start of workers may take. This may include waiting for machines or downloading images."""


class Progress:
    """Current activity of an agent, and its deadline for reporting progress."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._place: _Place | None = None

    @contextmanager
    def within(self, name: str, allowance: float) -> Iterator[None]:
        """Return a context manager for the call of a hook. The hook must finish or report progress within
        ``allowance`` seconds.

        Activities can be nested. When an inner activity ends, the full allowance of the outer activity starts
        again.
        """
        outer = self._place
        try:
            self._place = _Place(name, allowance, self._clock() + allowance)
            yield
        finally:
            # Do not rely on inner activities to restore `_place`, because an exception from a signal handler
            # may have interrupted them.
            self._place = outer
            self.renew()

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


class _Place(Record):
    """What an agent is doing. The agent must report progress before the time ``silent_until``."""

    name: str
    allowance: float
    silent_until: float
