"""Port numbers for tests that need to know a port before anything listens on it, and the sockets of ports."""

import os
import random
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_SHARE = 22_000 // _PROCESSES & ~1
_FIRST = 10_000 + _SHARE * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""The ports of this process. Two processes of one test run never choose the same port."""

_recent = deque[int](maxlen=100)
"""Ports that have been chosen, but may not be in use yet."""


def free() -> int:
    """Return a free port below the ephemeral ports, because any of those could be taken a moment later."""
    # Do not use the generator that hypothesis seeds, because it would choose the same ports in each run.
    numbers = random.SystemRandom()
    while True:
        port = numbers.randrange(_FIRST, _FIRST + _SHARE)
        if port not in _recent and is_free(port):
            _recent.append(port)
            return port


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET6) as sock:
        return sock.connect_ex(("::ffff:127.0.0.1", port)) != 0


class TcpSocket(NamedTuple):
    """The local port of a TCP socket, its state, and its link target in ``/proc/PID/fd``."""

    port: int
    state: str
    link: str


ESTABLISHED, LISTENS = "01", "0A"


def sockets() -> Iterator[TcpSocket]:
    """Yield all TCP sockets of this network namespace."""
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = row.split()
            yield TcpSocket(int(fields[1].rpartition(":")[2], 16), fields[3], f"socket:[{fields[9]}]")


def is_listening(port: int) -> bool:
    """Return true if a process of this network namespace listens on this port. No connection is made."""
    return any(each.port == port and each.state == LISTENS for each in sockets())


def listens(pid: int, port: int) -> bool:
    links = {each.link for each in sockets() if each.port == port and each.state == LISTENS}
    return not links.isdisjoint(links_of(pid))


def sessions(port: int) -> int:
    """Return the number of open connections that a server on this port has accepted."""
    found = [each.link for each in sockets() if each.port == port and each.state == ESTABLISHED]
    return len(found) - found.count("socket:[0]")


def links_of(pid: int) -> Iterator[str]:
    """Yield the targets of the descriptors of a process, except for those that it closes meanwhile."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{fd}")
