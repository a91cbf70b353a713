"""A relay that delays, stalls and resets TCP connections, on this machine or on a host."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from helpers.control import Program
from helpers.hosts import Host


class TcpRelay:
    """Change settings of the relay; see `inside/tcp_relay.py`.

    Args:
        target: the address and port to which it forwards.
        address: the address at which it listens, on any free port.
        prefix: before its command line, to run it on a host.
    """

    def __init__(
        self, target: tuple[str, int], address: str = "127.0.0.1", prefix: Sequence[str] = ()
    ) -> None:
        self._program = Program("tcp_relay", address, "0", target[0], str(target[1]), prefix=prefix)
        self.port = int(self._program.greeting.split()[1])
        self.endpoint = (address, self.port)
        self.close = self._program.close

    def set(self, **settings: float | bool | str) -> None:
        """Change any of the settings `delay_up`, `delay_down`, `rate`, `is_stalled_up`, `is_stalled_down` and
        `new`.
        """
        self._program.ask("set", **settings)

    def stall(self) -> None:
        """Stop forwarding in both directions. Both sides keep their connections."""
        self.set(is_stalled_up=True, is_stalled_down=True)

    def resume(self) -> None:
        """Continue after :meth:`stall`, and forward everything that was sent in the meantime."""
        self.set(is_stalled_up=False, is_stalled_down=False)

    def reset(self) -> int:
        """Send RST to both sides of every connection, and return the number of connections."""
        return int(self._program.ask("reset")["connections"])

    def counts(self) -> dict[str, Any]:
        """Return the bytes forwarded ``up`` and ``down``, and the numbers of ``connections`` accepted so far
        and of those still ``open``.
        """
        return self._program.ask("counts")


def relay_on(host: Host, target: Host, port: int) -> closing[TcpRelay]:
    """Start a relay on a host, which forwards to a port of another host. Return a context manager that stops
    it.
    """
    return closing(TcpRelay((target.address, port), host.address, host.prefix()))
