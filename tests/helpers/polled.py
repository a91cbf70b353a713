"""Processes with an agent that polls: it tells of each round in a line ``ROUND …``, its workers exit with the
digit that comes over its stdin, and its last lines are ``RESULT …`` and ``SHUT …``.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from helpers.launcher import Launched


class PolledNode:
    """One of them."""

    def __init__(self, launched: Launched, writer: socket.socket) -> None:
        self.launched, self._writer = launched, writer
        self._rounds = 0

    def round(self) -> str:
        """What it says of the next round."""
        self._rounds += 1
        return self.launched.wait_for_lines(r"^ROUND (.*)$", self._rounds)[-1][1]

    def workers_exit(self, code: int) -> None:
        """Those that run now, with this code, below 10."""
        self._writer.send(str(code).encode())

    def result(self) -> str:
        """How its agent ended; its handler has then been shut down in order."""
        assert self.launched.wait() == 0, self.launched.stderr
        *_, result, shut = self.launched.stdout.splitlines()
        assert shut == "SHUT True True", self.launched.stderr
        return result.removeprefix("RESULT ")


@contextlib.contextmanager
def polled_nodes(launch: Callable[..., Launched]) -> Iterator[Callable[..., PolledNode]]:
    """Gives a function that starts a node by its command line."""
    with contextlib.ExitStack() as opened:

        def start(argv: Sequence[Any], **options: Any) -> PolledNode:
            reader, writer = socket.socketpair()
            opened.enter_context(writer)
            with reader:
                return PolledNode(launch(argv=argv, stdin=reader.fileno(), **options), writer)

        yield start
