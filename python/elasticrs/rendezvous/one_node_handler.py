"""Rendezvous handler for jobs on a single node."""

from __future__ import annotations

import os

from elasticrs._engine.job.config import DEFAULT_MASTER_PORT
from elasticrs._engine.nodes.transport.addresses import parse_endpoint
from elasticrs._engine.nodes.transport.coordination import Client, NativeSession, Server
from elasticrs._engine.workers.plan import StorePort, agent_hosts_store
from elasticrs.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrs.store import Store

__all__ = ["OneNodeRendezvous"]

_HOST = "127.0.0.1"


class OneNodeRendezvous(RendezvousHandler):
    """Rendezvous handler for a single-node job, with any back end.

    With ``static`` and an endpoint, rank 0 hosts the workers' store there. Otherwise, this process serves a
    new store in every round, or, with ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``, reserves a port for rank 0.

    Attributes:
        address: address of the workers' store.
        port: port of the workers' store that the user has chosen; ``None`` for a new port in every round.
        store_port: port that :meth:`next_rendezvous` has reserved for the current round.

    Raises:
        ValueError: the job may have more than one node, or the endpoint is malformed.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        if params.max_nodes != 1:
            raise ValueError(f"{params.min_nodes}:{params.max_nodes} nodes, expected one node")
        self._backend = params.backend
        self._run_id = params.run_id
        self.address = params.local_addr or "localhost"
        self.port: int | None = None
        if params.backend == "static" and params.endpoint.strip():
            host, port = parse_endpoint("endpoint", params.endpoint.strip())
            self.address = host
            # Port 0 means any free port, as in torch.
            self.port = DEFAULT_MASTER_PORT if port is None else port or None
        self.store_port: StorePort | None = None
        self._server: Server | None = None
        self._store: Store | None = None
        self._round = 0
        self._is_closed = False

    def get_backend(self) -> str:
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        return self.port is None and agent_hosts_store(os.environ)

    def next_rendezvous(self) -> RendezvousInfo:
        open_store = self.next_round()
        port = self.port
        if port is None:
            self.store_port = StorePort(is_served=self.use_agent_store)
            self.store_port.serve(None)
            port = self.store_port.number
        return RendezvousInfo(open_store(), 0, 1, RendezvousStoreInfo(self.address, port))

    def open_shared_store(self) -> Store:
        """Return the current round's store. The first call starts its server, because few jobs need one."""
        if self._store is None:
            from elasticrs._engine.nodes.transport.store import Requests
            from elasticrs.store import Store

            self._store = Store(Requests(self._connect))
        return self._store.with_prefix(f"torch.rendezvous.{self._run_id}.{self._round}/")

    def _connect(self) -> NativeSession:
        from elasticrs.store import DistNetworkError

        # Require a token, because other users of this machine can also connect to the port.
        token = os.urandom(16)
        try:
            if self._server is not None:
                # An earlier call has started this server, but could not connect to it. Replace it.
                self._server.close()
            self._server = Server([(_HOST, 0)], run_id=self._run_id, token=token)
            client = Client(_HOST, self._server.port, run_id=self._run_id, token=token, stall_timeout=None)
            return NativeSession(client)
        except OSError as error:
            raise DistNetworkError(f"the store of this node cannot be served: {error}") from error

    def next_round(self) -> Callable[[], Store]:
        """Begin a round. Return the function that opens the round's store. The caller must assign the ranks.
        Raise ``RendezvousClosedError`` after :meth:`set_closed`.
        """
        if self._is_closed:
            raise RendezvousClosedError(f"the rendezvous of job {self._run_id} is closed")
        self._release()
        self._round += 1
        return self.open_shared_store

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self.set_closed()
        self._release()
        if self._store is not None:
            self._store.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        return True

    def _release(self) -> None:
        if self.store_port is not None:
            self.store_port.close()
            self.store_port = None
