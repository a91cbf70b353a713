"""A relay of TCP connections on a host: it delays, stalls and resets what goes through it."""

from typing import Any

from helpers.control import Program
from helpers.hosts import Host


class TcpRelay:
    """See `inside/tcp_relay.py`.

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
        """Change some of `delay_up`, `delay_down`, `rate`, `is_stalled_up`, `is_stalled_down`, `new`."""
        self._program.ask("set", **settings)

    def stall(self) -> None:
        """Forward nothing any more, in either direction. Both sides still have their connections."""
        self.set(is_stalled_up=True, is_stalled_down=True)

    def resume(self) -> None:
        """After :meth:`stall`: nothing of what was sent meanwhile is missing."""
        self.set(is_stalled_up=False, is_stalled_down=False)

    def reset(self) -> int:
        """RST to both sides of every connection; returns how many there were."""
        return int(self._program.ask("reset")["connections"])

    def counts(self) -> dict[str, Any]:
        """Bytes forwarded ``up`` and ``down``, ``connections`` ever accepted, and those ``open``."""
        return self._program.ask("counts")

    def close(self) -> None:
        """End it; its connections are closed."""
        self._program.close()
