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
    """True if the agent hosts the workers' store when no port is given: ``False`` with
    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``, as in torch.

    Args:
        environ: the agent's environment.
    """
    return environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


def worker_store(ports: tuple[int, int] | None = None) -> _core.WorkerStore:
    """Bind a port for a workers' store that this process will serve.

    Args:
        ports: the first and the last that will do; any one when ``None``.

    Raises:
        OSError: no port is free, or no descriptor.
    """
    from elasticrs import _core

    return _core.WorkerStore(None, ports or 0)


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
        sock = _socket.socket(_socket.AF_INET6, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        address = "::"
    except OSError:
        # No IPv6 in this kernel. Running out of descriptors raises again below.
        sock = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        address = ""
    try:
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        if sock.family == _socket.AF_INET6:
            sock.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
        try:
            sock.bind((address, port))
        except OSError as error:
            if sock.family != _socket.AF_INET6 or error.errno == errno.EADDRINUSE:
                raise
            # IPv6 is compiled in, but switched off by sysctl.
            sock.close()
            sock = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
            sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            sock.bind(("", port))
    except BaseException:
        sock.close()
        raise
    return sock
