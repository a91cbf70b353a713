"""Plan of an attempt: the result of its rendezvous."""

from __future__ import annotations

from elasticrs.job.value import Record, fresh

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from dataclasses import KW_ONLY

    from elasticrs.job.ranks import WorkerRanks
    from elasticrs.workers.node_page import AgentPage
    from elasticrs.workers.ports import StorePort


class Plan(Record):
    """Ranks and addresses of an attempt.

    Args:
        ranks: ranks of this node's workers.
        master_addr: address of the workers' store.
        master_port: port of the workers' store.
        port: holds the port during the attempt, if this agent is responsible for it.
        use_agent_store: true if an agent hosts the store; otherwise rank 0 does.
        variables: further environment variables of all workers of the attempt.
        members: prefixes of the workers' registrations by local rank, if the workers are members of a
            rendezvous themselves. For a worker that does not run yet, it is the name of the process before
            it.
        member_prefix: prefix of the names in ``members``.
        page: memory page in which such workers publish their meetings.
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
        """Release the port, and close the store and its connections. Idempotent."""
        if self.port is not None:
            self.port.close()
