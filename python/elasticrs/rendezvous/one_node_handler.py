"""The rendezvous handler for one node."""

from __future__ import annotations

import os

from elasticrs.job.config import DEFAULT_MASTER_PORT
from elasticrs.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from elasticrs.rendezvous.endpoint import parse_endpoint
from elasticrs.rendezvous.own_store import OwnStore
from elasticrs.workers.ports import StorePort, agent_hosts_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs import _core
    from elasticrs.store import Store

__all__ = ["OneNodeRendezvous"]


class OneNodeRendezvous(RendezvousHandler):
    """``static`` and ``c10d`` for one node.

    With ``static`` and an endpoint that has a port, workers get just that, and rank 0 hosts their store.
    Otherwise every round has a fresh store, which this process serves until the next round; with
    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` a fresh port, which stays reserved until then for rank 0.

    Attributes:
        store_port: that of the present round, when it is ours.

    Raises:
        ValueError: more than one node, or a malformed endpoint.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        if params.max_nodes != 1:
            raise ValueError(f"{params.min_nodes}:{params.max_nodes} nodes, expected one, which meets nobody")
        self._backend = params.backend
        self._run_id = params.run_id
        self._address = params.local_addr or "localhost"
        self._port: int | None = None
        if params.backend == "static" and params.endpoint.strip():
            host, port = parse_endpoint("endpoint", params.endpoint.strip())
            self._address = host
            # As in torch, port 0 asks for a free one.
            self._port = DEFAULT_MASTER_PORT if port is None else port or None
        self.store_port: StorePort | None = None
        self._own_store = OwnStore(params.run_id)
        self._round = 0
        self._is_closed = False

    def get_backend(self) -> str:
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        return self._port is None and agent_hosts_store(os.environ)

    def next_rendezvous(self) -> RendezvousInfo:
        """See :class:`RendezvousHandler`; never waits."""
        address = self.next_served_by(None)
        return RendezvousInfo(self.open_shared_store(), 0, 1, address)

    def open_shared_store(self) -> Store:
        """The store of the present round, as :class:`RendezvousInfo` has it; served when it is used first."""
        return self._own_store.of_round(self._round)

    def next_served_by(self, supervisor: _core.Supervisor | None) -> RendezvousStoreInfo:
        """Return where the workers' store listens: :meth:`next_rendezvous` for an agent that knows its rank.

        Args:
            supervisor: serves the store, and tells what that has to say to the user; ``None``: a thread of
                its own.

        Raises:
            RendezvousClosedError: see :meth:`set_closed`.
            OSError: no port or descriptor is free.
        """
        if self._is_closed:
            raise RendezvousClosedError(f"the rendezvous of job {self._run_id} is closed")
        self._release()
        self._round += 1
        port = self._port
        if port is None:
            self.store_port = StorePort(is_served=self.use_agent_store)
            self.store_port.serve(supervisor)
            port = self.store_port.number
        return RendezvousStoreInfo(self._address, port)

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """See :class:`RendezvousHandler`; nobody ever waits."""
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self.set_closed()
        self._release()
        self._own_store.close()
        return True

    def _release(self) -> None:
        if self.store_port is not None:
            self.store_port.close()
            self.store_port = None
