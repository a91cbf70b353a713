"""Two programs on hosts with a connection between them, both controlled by the test."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.control import INSIDE
from helpers.hosts import Host
from helpers.launcher import Launched
from helpers.procs import bystanders


class End:
    """One end of the connection; see `inside/talk.py`.

    Args:
        host: where it runs.
        role: ``"serve"`` or ``"connect"``.
        address: to listen on, or to connect to.
    """

    def __init__(self, host: Host, role: str, address: str, port: int = 7000) -> None:
        program = (sys.executable, "-I", "-S", str(INSIDE / "talk.py"), role, address, str(port))
        argv = [*host.prefix(), *program]
        self.launched = Launched(argv, env=os.environ, cwd=Path("/"), stdin=subprocess.PIPE)
        bystanders.add(self.pid)
        self._heard = 0

    @property
    def pid(self) -> int:
        return self.launched.pid

    def order(self, command: str) -> None:
        """Send a command to the program, without waiting for its answer."""
        self.launched.feed(command.encode() + b"\n")

    def tell(self, command: str) -> str:
        self.order(command)
        return self.hear()

    def hear(self) -> str:
        self._heard += 1
        return self.launched.wait_for_lines("", self._heard, "stdout")[-1].string

    def close(self) -> None:
        """Stop the program if it is still running."""
        bystanders.discard(self.pid)
        self.launched.close()


@contextmanager
def serving(host: Host, port: int = 7000) -> Iterator[End]:
    """Run an end that listens for a connection."""
    end = End(host, "serve", host.address, port)
    try:
        assert end.hear() == "LISTENING"
        yield end
    finally:
        end.close()


@contextmanager
def connecting(host: Host, address: str, port: int = 7000, peer: End | None = None) -> Iterator[End]:
    """Run an end that connects. If ``peer`` is given, wait until it is connected, too."""
    end = End(host, "connect", address, port)
    try:
        for each in (end, *((peer,) if peer else ())):
            assert each.hear() == "CONNECTED"
        yield end
    finally:
        end.close()
