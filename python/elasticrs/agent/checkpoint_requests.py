"""Checkpoints that somebody asks the agent for: it passes that on to its workers, and tells what came of it.

The workers hear of it by the page that they share with the agent (:mod:`elasticrs.node_page`), at the end of
a step; one of them is enough for all workers of the job to save.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from threading import Lock

from elasticrs import texts
from elasticrs.node_page import VARIABLE, AgentPage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

TICK = 0.02
"""Seconds between two looks for what has come of a request."""

PATIENCE = 60.0
"""Seconds after which the user is told that nothing has come of it yet."""


class CheckpointRequests:
    """Of the workers of one agent.

    Args:
        workers: how many they are.
        say: tells the user a line.

    Attributes:
        fd: readable when somebody has asked.
        page: shared with the workers.

    Raises:
        OSError: no memory, no descriptor.
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
        """What workers find in their environment."""
        return {VARIABLE: self.page.variable}

    def ask(self) -> None:
        """Ask for a checkpoint; from any thread.

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
        """Take note that somebody has asked."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    @property
    def are_open(self) -> bool:
        """True if something may come of a request."""
        return self.page.asked > self._told

    def look(self) -> float:
        """Tell the user what has come of the requests, once for those that are served together; return the
        seconds until the next look.
        """
        served, result, served_ns = self.page.answer()
        first = self._asked_ns.get(self._told + 1)
        if served > self._told and first is not None:
            self._say(texts.checkpoint_line(result, served_ns - first))
            for number in range(self._told + 1, served + 1):
                self._asked_ns.pop(number, None)
            self._told, self._is_late = served, False
        elif first is not None and not self._is_late and time.monotonic_ns() - first > PATIENCE * 1e9:
            self._is_late = True
            self._say(texts.checkpoint_is_late(PATIENCE, len(self.page.standings())))
        return TICK if self.are_open else float("inf")

    def close(self) -> None:
        """Release everything. Idempotent."""
        with self._lock:
            self.page.close()
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
