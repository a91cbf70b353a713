"""Where an agent whose hooks decide is, and how long it may be there without a sign of life.

Written by the agent's thread, read by its health check server. A hook cannot be asked: all that is known
is when it was called, and for how long hooks of its kind may wait. What may wait for as long as it likes, as
a rendezvous for other nodes, has no limit.
"""

from __future__ import annotations

import time
from math import inf

from elasticrs._value import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["START_ALLOWANCE", "UNLIMITED", "Place", "Progress"]

UNLIMITED = inf

START_ALLOWANCE = 600.0
"""Seconds for starting workers: machines may be waited for, or images fetched."""


class Progress:
    """The place in which an agent is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._place: Place | None = None

    def within(self, name: str, allowance: float) -> Place:
        """For ``with``: a hook is called there, of which nothing need be heard for ``allowance`` seconds.

        What it calls in turn may be a place of its own; when that is left, the allowance of this one begins
        anew.
        """
        return Place(self, name, allowance)

    def tell(self, seconds: float = 0.0) -> None:
        """Whatever is being done goes on, and nothing need be heard for so many seconds. From any thread."""
        place = self._place
        if place is not None:
            place.silent_until = self._clock() + seconds

    def renew(self) -> None:
        """The process was stopped for a while: the allowance begins anew."""
        place = self._place
        if place is not None:
            self.tell(place.allowance)

    def overdue(self) -> tuple[float, str | None]:
        """Say for how many seconds something should have been heard, and of what; 0 when all is well. From
        any thread.
        """
        place = self._place
        if place is None:
            return 0.0, None
        return max(0.0, self._clock() - place.silent_until), place.name


class Place(Record):
    """What :meth:`Progress.within` returns."""

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
        # Also out of a place that a signal has left without its `__exit__`.
        self._progress._place = self._outer
        self._progress.renew()
