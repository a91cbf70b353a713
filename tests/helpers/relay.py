"""A relay on a host that delays, stalls and resets TCP connections."""

from typing import Any

from helpers.control import Program
from helpers.hosts import Host


class TcpRelay:
    """Change settings of the relay; see `inside/tcp_relay.py`.

    Args:
        host: where it runs and listens, on all its addresses.
        target: the host it forwards to.
        target_port: and its port.
        port: to listen on; 0 for any.
    """

    def __init__(self, host: Host, target: Host, target_port: int, port: int = 0) -> None:
        arguments = (host.address, str(port), target.address, str(target_port))
        self._program = Program("tcp_relay", *arguments, prefix=host.prefix())
        self.port = int(self._program.greeting.split()[1])
        self.endpoint = host.endpoint(self.port)

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

    def close(self) -> None:
        """Stop the relay and close its connections."""
        self._program.close()
