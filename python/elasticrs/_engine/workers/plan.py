"""Plan of an attempt to run the workers: ranks and addresses, as determined by the rendezvous."""

from __future__ import annotations

from elasticrs._engine.job.value import Record, fresh

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from dataclasses import KW_ONLY

    from elasticrs._engine.job.ranks import WorkerRanks
    from elasticrs._engine.workers.node_page import AgentPage
    from elasticrs._engine.workers.ports import StorePort


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
