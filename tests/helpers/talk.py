"""Two programs on hosts with a connection between them, both told what to do."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.control import INSIDE
from helpers.hosts import Host
from helpers.launcher import Launched


class End:
    """One end: see `inside/talk.py`.

    Args:
        host: where it runs.
        role: ``"serve"`` or ``"connect"``.
        address: to listen on, or to connect to.
    """

    def __init__(self, host: Host, role: str, address: str, port: int = 7000) -> None:
        theirs, self._input = os.pipe()
        program = (sys.executable, "-I", "-S", str(INSIDE / "talk.py"), role, address, str(port))
        argv = [*host.prefix(), *program]
        try:
            self.launched = Launched(argv, env=dict(os.environ), cwd=Path("/"), stdin=theirs)
        finally:
            os.close(theirs)
        self._heard = 0

    @property
    def pid(self) -> int:
        """Of the program."""
        return self.launched.pid

    def order(self, command: str) -> None:
        """Tell it what to do, without waiting until it is done."""
        os.write(self._input, command.encode() + b"\n")

    def tell(self, command: str) -> str:
        """Tell it what to do; returns what it says then."""
        self.order(command)
        return self.hear()

    def hear(self) -> str:
        """The next line that it says."""
        self._heard += 1
        return self.launched.wait_for_lines("", self._heard, "stdout")[-1].string

    def close(self) -> None:
        """End it, if it has not ended."""
        os.close(self._input)
        self.launched.close()


@contextmanager
def serving(host: Host, port: int = 7000) -> Iterator[End]:
    """An end that waits for a connection."""
    end = End(host, "serve", host.address, port)
    try:
        assert end.hear() == "LISTENING"
        yield end
    finally:
        end.close()


@contextmanager
def connecting(host: Host, address: str, port: int = 7000, peer: End | None = None) -> Iterator[End]:
    """An end that is connected, to ``peer`` if that is given."""
    end = End(host, "connect", address, port)
    try:
        for each in (end, *((peer,) if peer else ())):
            assert each.hear() == "CONNECTED"
        yield end
    finally:
        end.close()
