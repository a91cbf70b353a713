"""What the rendezvous gives for an attempt."""

from __future__ import annotations

from elasticrs._value import Record, fresh

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from dataclasses import KW_ONLY

    from elasticrs.node_page import AgentPage
    from elasticrs.ports import StorePort
    from elasticrs.ranks import WorkerRanks


class Plan(Record):
    """Ranks and addresses of an attempt.

    Args:
        ranks: of this node's workers.
        master_addr: where the workers' store listens.
        master_port: its port.
        port: holds the port for as long as the attempt lasts, where that falls to this agent.
        use_agent_store: true if an agent hosts the store; otherwise rank 0 does.
        variables: what else all workers of the attempt have in their environment.
        members: how their registrations begin, by local rank, where they are members of the rendezvous
            themselves; of those that do not run yet, the names of the processes before them.
        page: where those write in which meeting they are.
    """

    ranks: Sequence[WorkerRanks]
    master_addr: str
    master_port: int
    port: StorePort | None = None
    _: KW_ONLY
    use_agent_store: bool = False
    variables: Mapping[str, str] = fresh(factory=dict)
    members: dict[int, str] | None = None
    page: AgentPage | None = None

    def close(self) -> None:
        """Give the port back, and end the store with its connections. Idempotent."""
        if self.port is not None:
            self.port.close()
