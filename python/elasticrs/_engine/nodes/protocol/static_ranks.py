"""Static rendezvous, in which the user assigns the node ranks and the port of the workers' store.

- **HAND-1** At any time, at most one registration has a given node rank. The transaction that registers an
  agent (T1) also creates the key of the rank, on the same lease, only if no other agent has the rank.
- **HAND-2** If another node has the rank, that node may be dead, and its lease may not have expired yet.
  Therefore the agent retries until the lease of a dead node would have expired.
- **HAND-3** During a round, the port of the store is lent to the workers of rank 0. An agent that connects
  then is refused, or reaches a program that is not the rendezvous store. The job may still be configured
  correctly, so the agent retries.
"""

from __future__ import annotations

from elasticrs._engine.nodes.protocol.announcements import named
from elasticrs._engine.nodes.protocol.messages import Announce, Disconnect, Outcome
from elasticrs._engine.nodes.protocol.records import damage, encode, holder_of
from elasticrs._engine.nodes.protocol.validation import DamagedError
from elasticrs._engine.nodes.transport.coordination import HasValue, Missing, Put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs._engine.nodes.protocol.leader_view import View
    from elasticrs._engine.nodes.protocol.member import Member, Registration
    from elasticrs._engine.nodes.protocol.records import Head
    from elasticrs._engine.nodes.transport.coordination import Compare, ConnectionLost, Entry


def claim(member: Member, registration: Registration, node_rank: int) -> tuple[Compare, Put]:
    """Return the condition and the write with which an agent reserves its node rank when it registers
    (transaction T1).
    """
    key, earlier = member.keys.rank(node_rank), member.joining.claim
    value = encode([member.agent.agent, registration.member, member.node().shown])
    return Missing(key) if earlier is None else HasValue(key, earlier), Put(key, value, True)


def refused(member: Member, entry: Entry | None) -> None:
    """Handle a registration (transaction T1) that was rejected because its node rank is taken. Close the
    connection, so that the agent retries on a new one. ``entry`` is the store entry of the rank, or ``None``
    if the rank is free again.
    """
    joining = member.joining
    joining.claim = None
    if entry is not None:
        agent, shown = _holder(entry)
        if agent == member.agent.agent:
            joining.claim = entry.value
        else:
            if joining.rank_holder is None:
                member.arm("rank", member.settings.rank_timeout + member.more_lease)
            joining.rank_holder = shown
    member.do(Disconnect())
    member.forget_connection()


def _holder(entry: Entry) -> tuple[str | None, str]:
    """Return the agent that holds a node rank (``None`` if unknown), and a description of the agent to show
    to the user.
    """
    try:
        return holder_of(entry.value or b"")
    except DamagedError as error:
        # The record is unreadable, so treat the rank as taken: the agent that holds it may still be alive.
        return None, f"one that is not known ({damage(entry.key, error)})"


def registered(member: Member) -> None:
    """Record that this agent is registered and holds its node rank."""
    joining = member.joining
    joining.claim = None
    joining.told_of_port = False
    if joining.rank_holder is not None:
        joining.rank_holder = None
        member.disarm("rank")


def timeout(member: Member) -> None:
    """Exit with an error, because another node still holds this node's rank. If that node were dead, its
    lease would have expired by now.
    """
    holder = member.joining.rank_holder
    if holder is None or member.registered is not None:
        return
    rendezvous = member.rendezvous
    text = (
        f"node rank {rendezvous.node_rank} was given to two nodes, {holder} and {member.node().shown}: give "
        f"each node its own --node-rank, from 0 to {rendezvous.max_nodes - 1}"
    )
    member.exit(Outcome("refused", text))


# --- the port ---


def may_be_lent(member: Member, kind: str) -> bool:
    """Return true if an unknown program that responds at the store's port may be a worker of this job. With
    ``static``, workers use the same port during a round.
    """
    return kind == "not_ours" and member.rendezvous.is_static


def why_lost(member: Member, event: ConnectionLost) -> str:
    """Return the reason for the failed or lost connection. If another program responds at the store's port,
    also notify the user, but only once.
    """
    message = event.message
    if not may_be_lent(member, event.kind):
        return message
    if not member.joining.told_of_port:
        member.joining.told_of_port = True
        member.do(Announce(f"{message}; trying again: a running round of this job may be using the port"))
    return f"{message}; an earlier round of this job may still be using it"


def master(member: Member, head: Head) -> tuple[str, int]:
    """Return the address and port at which this node's workers reach their store.

    With ``static``, this is the endpoint that the user has given to this node, as under torchrun, because
    nodes may reach rank 0 over different routes. The endpoint is reachable, because this agent has joined the
    rendezvous through it.
    """
    rendezvous = member.rendezvous
    return (rendezvous.host, rendezvous.port) if rendezvous.is_static else head.master


# --- ranks that are taken or missing ---


def shown(view: View) -> list[str]:
    """Return a description of each candidate node with its node rank, sorted by rank."""
    nodes = sorted(
        (view.nodes[each] for each in view.candidates), key=lambda node: (node.hint or 0, node.name)
    )
    return [f"node rank {node.hint} is {node.shown}" for node in nodes]


def missing(view: View, size: int) -> str:
    """Return the node ranks that no candidate node has, formatted for a message."""
    here = {view.nodes[each].hint for each in view.candidates}
    return named([str(rank) for rank in range(size) if rank not in here])
