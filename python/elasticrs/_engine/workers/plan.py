"""Plan of an attempt to run the workers, as determined by the rendezvous, and the port of their store."""

from __future__ import annotations

import _socket
import errno

from elasticrs._engine.job.value import Record, fresh

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from dataclasses import KW_ONLY

    from elasticrs import _core
    from elasticrs._engine.job.ranks import WorkerRanks
    from elasticrs._engine.workers.node_page import AgentPage


class Plan(Record):
    """Ranks and addresses of the workers in an attempt.

    ``port`` reserves the port of the workers' store; it is ``None`` if another agent does so. ``members`` are
    the names under which the workers register in a rendezvous of their own, by local rank; ``None`` if they
    have none. A worker that is replaced keeps its name until its replacement has been started.
    """

    ranks: Sequence[WorkerRanks]
    master_addr: str
    master_port: int
    port: StorePort | None = None
    _: KW_ONLY
    use_agent_store: bool = False
    variables: Mapping[str, str] = fresh(factory=dict)
    members: dict[int, str] | None = None
    member_prefix: str = ""
    page: AgentPage | None = None

    def close(self) -> None:
        if self.port is not None:
            self.port.close()


def agent_hosts_store(environ: Mapping[str, str]) -> bool:
    """Return true if the agent hosts the workers' store when no port is given.

    A variable of torch decides this.
    """
    return environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


class StorePort:
    """Port for the workers' store, reserved until :meth:`close`. ``store`` is ``None`` if rank 0 hosts it.

    To keep other processes from taking the port, it stays *bound* with SO_REUSEADDR, but does not listen. The
    kernel then does not assign it as an ephemeral port, and refuses a ``bind`` without SO_REUSEADDR. Torch's
    TCPStore sets SO_REUSEADDR (both with libuv and in the older server), so it can bind the port.
    """

    __slots__ = ("_socket", "number", "store")

    def __init__(self, ports: tuple[int, int] | None = None, *, is_served: bool) -> None:
        self.number: int
        self.store: _core.WorkerStore | None = None
        self._socket: _socket.socket | None = None
        if is_served:
            from elasticrs import _core

            self.store = _core.WorkerStore(None, ports or 0)
            self.number = self.store.port
        else:
            self._socket = bind(0) if ports is None else _bind_one_of(*ports)
            self.number = self._socket.getsockname()[1]

    def serve(self, supervisor: _core.Supervisor | None) -> None:
        """Start answering the store's clients if this process hosts it.

        The supervisor reports the store's messages.
        """
        if self.store is not None:
            self.store.serve(supervisor)

    def close(self) -> None:
        for held in (self.store, self._socket):
            if held is not None:
                held.close()


def _bind_one_of(first: int, last: int) -> _socket.socket:
    for port in range(first, last):
        try:
            return bind(port)
        except OSError as error:  # noqa: PERF203 -- the system call costs more than `try`
            if error.errno != errno.EADDRINUSE:
                raise
    return bind(last)


def bind(port: int, *, reuses_address: bool = True) -> _socket.socket:
    """Return a socket bound to a port (0 for any) on all IPv6 and IPv4 addresses. It does not listen.

    Raise ``OSError`` if the port is taken, or if no port or descriptor is free.
    """
    try:
        return _bind_family(_socket.AF_INET6, port, reuses_address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        # The kernel has no IPv6, so try IPv4. If there was no free descriptor instead, this call raises the
        # same error again.
        return _bind_family(_socket.AF_INET, port, reuses_address)


def _bind_family(family: int, port: int, reuses_address: bool) -> _socket.socket:
    sock = _socket.socket(family, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, reuses_address)
        if family == _socket.AF_INET6:
            sock.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
        sock.bind(("", port))
    except BaseException:
        sock.close()
        raise
    return sock
