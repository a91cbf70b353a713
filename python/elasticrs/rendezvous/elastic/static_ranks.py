"""Node ranks and the port of the workers' store given by hand: the static rendezvous.

- **HAND-1** at any time at most one registration has a node rank: T1 takes the key of the rank, on the same
  lease, only if nobody has it, or an earlier registration of the same agent.
- **HAND-2** a rank that somebody has may be one that died just now, so it is asked for again until a lease
  would have ended.
- **HAND-3** the port of the store is lent to the workers of rank 0 while a round runs. Who comes then is
  refused, or meets a program that is not ours; that says nothing about the job, so it comes again.
"""

from __future__ import annotations

from elasticrs.rendezvous.elastic.member import Phase
from elasticrs.rendezvous.elastic.messages import Announce, Disconnect, Outcome
from elasticrs.rendezvous.elastic.records import damage, encode, holder_of
from elasticrs.rendezvous.elastic.validation import DamagedError
from elasticrs.store.coordination import HasValue, Missing, Put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.rendezvous.elastic.leader_view import View
    from elasticrs.rendezvous.elastic.member import Member, Registration
    from elasticrs.store.coordination import Compare, ConnectionLost, Entry


def claim(member: Member, registration: Registration, node_rank: int) -> tuple[Compare, Put]:
    """The part of T1 that takes the node rank of a registration: under which condition, and with what."""
    key, earlier = member.keys.rank(node_rank), member.joining.claim
    value = encode([member.agent.agent, registration.member, member.node().shown])
    return Missing(key) if earlier is None else HasValue(key, earlier), Put(key, value, True)


def refused(member: Member, entry: Entry | None) -> None:
    """T1 was refused because another node has the node rank (``entry``; ``None``: nobody any more): try again
    on a new connection.
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
    """Who has a node rank: the agent, and what to tell the user."""
    try:
        return holder_of(entry.value or b"")
    except DamagedError as error:
        # Whoever has it may be alive.
        return None, f"one that is not known ({damage(entry.key, error)})"


def registered(member: Member) -> None:
    """The registration holds, and with it the node rank."""
    joining = member.joining
    joining.claim = None
    joining.told_of_port = False
    if joining.rank_holder is not None:
        joining.rank_holder = None
        member.disarm("rank")


def timeout(member: Member) -> None:
    """Another node has had the node rank for longer than a dead one could."""
    holder = member.joining.rank_holder
    if holder is None or member.registered is not None or member.phase is Phase.EXIT:
        return
    rendezvous = member.rendezvous
    text = (
        f"node rank {rendezvous.node_rank} was given to two nodes, {holder} and {member.node().shown}: give "
        f"each node its own --node-rank, from 0 to {rendezvous.max_nodes - 1}"
    )
    member.exit(Outcome("refused", text))


# --- the port ---


def may_be_lent(member: Member, kind: str) -> bool:
    """True if what answers at the port of the store may be the workers of a round."""
    return kind == "not_ours" and member.rendezvous.is_static


def why_lost(member: Member, event: ConnectionLost) -> str:
    """Say why there is no connection; the user is told once that something else answers."""
    message = event.message
    if not may_be_lent(member, event.kind):
        return message
    if not member.joining.told_of_port:
        member.joining.told_of_port = True
        member.do(Announce(f"{message}; trying again: a running round of this job may be using the port"))
    return f"{message}; an earlier round of this job may still be using it"


# --- who is there ---


def shown(view: View) -> list[str]:
    """The candidates with their node ranks, in that order."""
    nodes = sorted(
        (view.nodes[each] for each in view.candidates), key=lambda node: (node.hint or 0, node.name)
    )
    return [f"node rank {node.hint} is {node.shown}" for node in nodes]


def missing(view: View, size: int) -> str:
    """Return the node ranks that no node has."""
    here = {view.nodes[each].hint for each in view.candidates}
    ranks = [str(rank) for rank in range(size) if rank not in here]
    return ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
