"""Checkpoint requests: the agent passes them on to its workers and reports the result to the user.

Workers see a request at the end of a step, in the memory page that they share with the agent
(:mod:`elasticrs.workers.node_page`). It is enough if one worker sees the request: all workers of the job then
save.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from threading import Lock

from elasticrs.report import phrases
from elasticrs.workers.node_page import VARIABLE, AgentPage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

TICK = 0.02
"""Seconds between two checks for the result of a request."""

PATIENCE = 60.0
"""Seconds after which the user is told that a request has no result yet."""


class CheckpointRequests:
    """Checkpoint requests to the workers of one agent.

    Args:
        workers: number of workers.
        say: prints a line for the user.

    Attributes:
        fd: descriptor that is readable after a request.
        page: memory page that is shared with the workers.

    Raises:
        OSError: memory or file descriptors have run out.
    """

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
        """The environment variable through which workers find the page."""
        return {VARIABLE: self.page.variable}

    def ask(self) -> None:
        """Request a checkpoint. May be called from any thread.

        Raises:
            RuntimeError: the agent has ended.
        """
        with self._lock:
            if self.fd < 0:
                raise RuntimeError("the agent has ended")
            asked_ns = time.monotonic_ns()
            self._asked_ns[self.page.ask()] = asked_ns
            os.eventfd_write(self.fd, 1)

    def take(self) -> None:
        """Record a new request."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    @property
    def are_open(self) -> bool:
        """True if a request has no reported result yet."""
        return self.page.asked > self._told

    def look(self) -> float:
        """Report results of requests to the user, with one line for all requests that the same save served.
        Return the seconds until the next call.
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
        """Release everything. Idempotent."""
        with self._lock:
            self.page.close()
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
