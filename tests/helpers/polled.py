"""Nodes with an agent that polls its workers. A node prints ``ROUND …`` for each round, and ``RESULT …`` and
``SHUT …`` as its last lines. A digit on its stdin makes its workers exit with that code.
"""

from helpers.launcher import Launched


class PolledNode:
    """A node whose agent polls its workers."""

    def __init__(self, launched: Launched) -> None:
        """Control a node whose stdin is :data:`subprocess.PIPE`."""
        self.launched = launched
        self._rounds = 0

    def round(self) -> str:
        """Wait for the next round, and return what the node prints about it."""
        self._rounds += 1
        return self.launched.wait_for_lines(r"^ROUND (.*)$", self._rounds)[-1][1]

    def workers_exit(self, code: int) -> None:
        """Make the current workers exit with this code, which must be below 10."""
        self.launched.feed(str(code).encode())

    def result(self) -> str:
        """Wait until the node exits, and return the result of its agent. Its rendezvous handler must have
        been shut down.
        """
        assert self.launched.wait() == 0, self.launched.stderr
        *_, result, shut = self.launched.stdout.splitlines()
        assert shut == "SHUT True True", self.launched.stderr
        return result.removeprefix("RESULT ")
