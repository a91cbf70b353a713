"""What the rendezvous gives for an attempt."""

from __future__ import annotations

from elasticrs._value import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from dataclasses import KW_ONLY

    from elasticrs._core import WorkerStore
    from elasticrs.ports import ReservedPort
    from elasticrs.ranks import WorkerRanks


class Plan(Record):
    """Ranks and addresses of an attempt.

    Args:
        ranks: of this node's workers.
        master_addr: where the workers' store listens.
        master_port: its port.
        reserved: holds a port of ours for as long as the attempt lasts, when rank 0 hosts the store.
        store: the workers' store, served, when this agent hosts it.
        use_agent_store: true if an agent hosts the store; otherwise rank 0 does.
    """

    ranks: Sequence[WorkerRanks]
    master_addr: str
    master_port: int
    reserved: ReservedPort | None = None
    _: KW_ONLY
    store: WorkerStore | None = None
    use_agent_store: bool = False

    def close(self) -> None:
        """Give the port back, and end the store with its connections. Idempotent."""
        if self.reserved is not None:
            self.reserved.close()
        if self.store is not None:
            self.store.close()
