"""Nodes with an agent that polls its workers. A node prints ``ROUND …`` for each round, and ``RESULT …`` and
``SHUT …`` as its last lines. A digit on its stdin makes its workers exit with that code.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from helpers.launcher import Launched


class PolledNode:
    """A node whose agent polls its workers."""

    def __init__(self, launched: Launched, writer: socket.socket) -> None:
        self.launched, self._writer = launched, writer
        self._rounds = 0

    def round(self) -> str:
        """Wait for the next round, and return what the node prints about it."""
        self._rounds += 1
        return self.launched.wait_for_lines(r"^ROUND (.*)$", self._rounds)[-1][1]

    def workers_exit(self, code: int) -> None:
        """Make the current workers exit with this code, which must be below 10."""
        self._writer.send(str(code).encode())

    def result(self) -> str:
        """Wait until the node exits, and return the result of its agent. Its rendezvous handler must have
        been shut down.
        """
        assert self.launched.wait() == 0, self.launched.stderr
        *_, result, shut = self.launched.stdout.splitlines()
        assert shut == "SHUT True True", self.launched.stderr
        return result.removeprefix("RESULT ")


@contextlib.contextmanager
def polled_nodes(launch: Callable[..., Launched]) -> Iterator[Callable[..., PolledNode]]:
    """Yield a function that starts a node with a given command line."""
    with contextlib.ExitStack() as opened:

        def start(argv: Sequence[Any], **options: Any) -> PolledNode:
            reader, writer = socket.socketpair()
            opened.enter_context(writer)
            with reader:
                return PolledNode(launch(argv=argv, stdin=reader.fileno(), **options), writer)

        yield start
