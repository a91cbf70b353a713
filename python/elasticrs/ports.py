"""Who hosts the workers' store, and a port for it when rank 0 of an attempt does.

Choosing a free port and closing it again leaves a moment in which anybody may take it. So the port stays
*bound* for the whole attempt, with SO_REUSEADDR and never listening: the kernel then hands it to nobody as an
ephemeral port and refuses whoever binds it without SO_REUSEADDR, while the TCPStore of torch, which sets
SO_REUSEADDR (libuv and the older server alike), binds and listens on it.
"""

from __future__ import annotations

import _socket
import errno

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrs import _core


def agent_hosts_store(environ: Mapping[str, str]) -> bool:
    """True if the agent hosts the workers' store when no port is given: unless, as in torch, the environment
    has ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``.
    """
    return environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


class StorePort:
    """The port of a workers' store for one attempt: bound at once, and ours until :meth:`close`.

    Args:
        ports: the first and the last that will do; any one when ``None``.
        is_served: this process serves the store; otherwise the port is kept for rank 0.

    Attributes:
        store: the store that is served; ``None`` when rank 0 hosts it.
        number: the port.

    Raises:
        OSError: no port is free, or no descriptor.
    """

    __slots__ = ("_reserved", "number", "store")

    def __init__(self, ports: tuple[int, int] | None = None, *, is_served: bool) -> None:
        self.store: _core.WorkerStore | None = None
        self._reserved: ReservedPort | None = None
        if is_served:
            from elasticrs import _core

            self.store = _core.WorkerStore(None, ports or 0)
            self.number = self.store.port
        else:
            self._reserved = ReservedPort(ports)
            self.number = self._reserved.number

    def serve(self, supervisor: _core.Supervisor | None) -> None:
        """Begin to serve, on this supervisor's thread or one of its own, if that falls to this process."""
        if self.store is not None:
            self.store.serve(supervisor)

    def close(self) -> None:
        """Give the port back, and end the store with its connections. Idempotent."""
        for held in (self.store, self._reserved):
            if held is not None:
                held.close()


class ReservedPort:
    """A port that is kept for the workers until :meth:`close`.

    Bound dual stack where IPv6 is available, as torch's store binds, else on IPv4.

    Args:
        ports: the first and the last that will do; any one when ``None``.

    Raises:
        OSError: no port is free, or no descriptor.
    """

    __slots__ = ("_socket", "number")

    def __init__(self, ports: tuple[int, int] | None = None) -> None:
        self._socket = _bind(0) if ports is None else _bind_one_of(*ports)
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back. Idempotent."""
        self._socket.close()


def _bind_one_of(first: int, last: int) -> _socket.socket:
    for port in range(first, last):
        try:
            return _bind(port)
        except OSError as error:  # noqa: PERF203 -- a system call costs more
            if error.errno != errno.EADDRINUSE:
                raise
    return _bind(last)


def _bind(port: int) -> _socket.socket:
    try:
        return _bind_family(_socket.AF_INET6, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        # No IPv6 in this kernel, or switched off by sysctl. Running out of descriptors raises again.
        return _bind_family(_socket.AF_INET, port)


def _bind_family(family: int, port: int) -> _socket.socket:
    sock = _socket.socket(family, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        if family == _socket.AF_INET6:
            sock.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
        sock.bind(("", port))
    except BaseException:
        sock.close()
        raise
    return sock
