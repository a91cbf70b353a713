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
    """Ranks and addresses of an attempt.

    Args:
        ranks: ranks of this node's workers.
        master_addr: address of the workers' store.
        master_port: port of the workers' store.
        port: object that keeps the port reserved during the attempt; ``None`` if this agent is not
            responsible for the port.
        use_agent_store: true if an agent hosts the store; otherwise rank 0 does.
        variables: further variables for the environment of all workers.
        members: names under which the workers register in their rendezvous, by local rank; ``None`` if they
            are not members of one. A replaced worker keeps its entry until its replacement has been started.
        member_prefix: prefix of the names in ``members``.
        page: memory page in which the workers publish their rendezvous; ``None`` if they are not members of
            one.
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
    """Return true if the agent hosts the workers' store when no port is given. Setting
    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` disables this, as in torch.
    """
    return environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


class StorePort:
    """Port for the workers' store, reserved until :meth:`close` is called.

    If this process chose a free port and released it again, another process could take the port before rank 0
    binds it. So the port stays *bound* for the whole attempt, with SO_REUSEADDR but without listening. The
    kernel then does not assign the port to another process as an ephemeral port, and does not let any other
    process bind it without SO_REUSEADDR. Torch's TCPStore sets SO_REUSEADDR (both with libuv and in the older
    server), so it can bind the port and listen on it.

    The socket that reserves the port for rank 0 is dual stack if IPv6 is available, as in torch's store, and
    otherwise IPv4.

    Args:
        ports: first and last allowed port; any port if ``None``.
        is_served: true if this process hosts the store. Otherwise the port is reserved for rank 0.

    Attributes:
        store: store that this process hosts; ``None`` if rank 0 hosts it.
        number: number of the port.

    Raises:
        OSError: no port is free, or the process has run out of file descriptors.
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
        """Start answering clients if this process hosts the store. If a supervisor is given, it reports
        messages to the user as events.
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
    """Return a socket that is bound to a port on all IPv6 and IPv4 addresses, and does not listen.

    Args:
        port: number of the port; 0 for any free port.
        reuses_address: true to set SO_REUSEADDR.

    Raises:
        OSError: the port is taken, no port is free, or the process has run out of file descriptors.
    """
    try:
        return _bind_family(_socket.AF_INET6, port, reuses_address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        # Fall back to IPv4: the kernel has no IPv6, or sysctl disables it. If file descriptors have run out
        # instead, this call raises the same error again.
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
