"""Torch's names for the static rendezvous, in which the user assigns a rank to each node."""

from __future__ import annotations

import datetime
from typing import Any

from elasticrs._engine.nodes.transport.addresses import parse_endpoint, shown_endpoint
from elasticrs.rendezvous.api import RendezvousHandler, RendezvousParameters
from elasticrs.rendezvous.registry import get_rendezvous_handler

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]

_DEFAULT_TIMEOUT = 600


def _asked(name: str) -> Any:
    """Return a method that delegates to the wrapped handler's method of the same name."""
    return lambda self: getattr(self._handler, name)()


class StaticTCPRendezvous(RendezvousHandler):
    """Handler of the backend ``static``. Raise ``ValueError`` if the endpoint or a number is invalid.

    Args:
        master_addr: host of the node with rank 0.
        master_port: port of the rendezvous, and of the workers' store that rank 0 serves.
        rank: rank of this node.
        world_size: number of nodes.
        run_id: name of the job.
        timeout: seconds to wait until all nodes have joined.
    """

    def __init__(
        self, master_addr: str, master_port: int, rank: int, world_size: int, run_id: str, timeout: int
    ) -> None:
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout = datetime.timedelta(seconds=timeout)
        self._handler = get_rendezvous_handler(
            RendezvousParameters(
                "static",
                shown_endpoint(master_addr, master_port),
                run_id,
                world_size,
                world_size,
                rank=rank,
                join_timeout=timeout,
            )
        )

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """True only if the port is 0. On a given port, rank 0 hosts the workers' store itself."""
        return self._handler.use_agent_store

    next_rendezvous = _asked("next_rendezvous")
    is_closed = _asked("is_closed")
    set_closed = _asked("set_closed")
    num_nodes_waiting = _asked("num_nodes_waiting")
    shutdown = _asked("shutdown")

    def get_run_id(self) -> str:
        return self.run_id


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create a ``static`` handler. Settings: ``rank``, and ``timeout`` in seconds (600 by default).

    Raise ``ValueError`` if the endpoint, its port or the rank is missing.
    """
    if "rank" not in params.config:
        raise ValueError("rank is absent in RendezvousParameters. Try add --node-rank to the cmd request")
    endpoint = params.endpoint.strip()
    if not endpoint:
        raise ValueError(
            "endpoint is absent in RendezvousParameters. Try add --master-port and --master-addr to the cmd "
            "request"
        )
    host, port = parse_endpoint("endpoint", endpoint)
    if port is None:
        raise ValueError(f"Port is absent in endpoint: {endpoint}. Try launching with --master-port")
    rank, timeout = params.get_as_int("rank", 0), params.get_as_int("timeout", _DEFAULT_TIMEOUT)
    return StaticTCPRendezvous(
        host, port, rank or 0, params.max_nodes, params.run_id, timeout or _DEFAULT_TIMEOUT
    )
