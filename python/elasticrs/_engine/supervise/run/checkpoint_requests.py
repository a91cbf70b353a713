"""Passes checkpoint requests to the agent's workers, through the memory page that they share with it.

As soon as one worker sees a request after a training step, all workers of the job save.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from threading import Lock

from elasticrs._engine.job import phrases
from elasticrs._engine.workers.node_page import VARIABLE, AgentPage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

TICK = 0.02
"""Seconds between two checks for the result of a request."""

PATIENCE = 60.0
"""Seconds after a checkpoint request after which the agent warns the user if there is no result yet."""


class CheckpointRequests:
    """Checkpoint requests to the workers of one agent. ``fd`` is readable after a request."""

    def __init__(self, workers: int, say: Callable[[str], None]) -> None:
        self.page = AgentPage(workers)
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._say = say
        self._lock = Lock()
        self._told = 0
        self._asked_ns: dict[int, int] = {}
        self._is_late = False

    @property
    def variables(self) -> dict[str, str]:
        return {VARIABLE: self.page.variable}

    def ask(self) -> None:
        """Request a checkpoint, from any thread. Raises ``RuntimeError`` if the agent has stopped."""
        with self._lock:
            if self.fd < 0:
                raise RuntimeError("the agent has ended")
            asked_ns = time.monotonic_ns()
            self._asked_ns[self.page.ask()] = asked_ns
            os.eventfd_write(self.fd, 1)

    def take(self) -> None:
        """Clear ``fd``. No request is lost, because the shared memory page counts them."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    @property
    def are_open(self) -> bool:
        return self.page.asked > self._told

    def look(self) -> float:
        """Print a line about each checkpoint request that has a result. Return the seconds until this method
        must be called again; infinity if no request is open.
        """
        served, result, served_ns = self.page.answer()
        first = self._asked_ns.get(self._told + 1)
        if served > self._told and first is not None:
            self._say(phrases.checkpoint_line(result, served_ns - first))
            for number in range(self._told + 1, served + 1):
                self._asked_ns.pop(number, None)
            self._told, self._is_late = served, False
        elif first is not None and not self._is_late and time.monotonic_ns() - first > PATIENCE * 1e9:
            self._is_late = True
            self._say(phrases.checkpoint_is_late(PATIENCE, len(self.page.standings())))
        return TICK if self.are_open else float("inf")

    def close(self) -> None:
        with self._lock:
            self.page.close()
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
