"""Leader election. The agent with the oldest registration leads, and every other agent watches the
registration just before its own.
"""

from __future__ import annotations

from elasticrs._engine.nodes.protocol.connecting import fence
from elasticrs._engine.nodes.protocol.keys import is_member
from elasticrs._engine.nodes.protocol.member import Leader, Purpose
from elasticrs._engine.nodes.protocol.rounds import GONE
from elasticrs._engine.nodes.transport.coordination import CreatedAt, Predecessor, Unwatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs._engine.nodes.protocol.member import Member, Registration
    from elasticrs._engine.nodes.transport.coordination import Compare, Entry, Reply


def follow(member: Member, registration: Registration, predecessor: Entry | None) -> None:
    """Watch the registration just before this agent's own. If there is none, become the leader."""
    if predecessor is None:
        registration.predecessor = None
        registration.leader = Leader()
        end_own_watches(member, registration)
        member.watch(Purpose.SEE_ALL, member.keys.prefix, exact=False)
    elif is_member(predecessor.key[len(member.keys.nodes) :]):
        registration.predecessor = predecessor.key
        member.watch(Purpose.SEE_PREDECESSOR, predecessor.key)
    else:
        # Skip this key, because another program wrote it and may never delete it. Look for the next earlier
        # registration instead.
        before = CreatedAt(predecessor.key, predecessor.create_revision)
        _ask(member, registration, Purpose.FIND_BEFORE_STRANGER, predecessor.key, before)


def end_own_watches(member: Member, registration: Registration) -> None:
    """Stop watching single keys, because the leader watches all keys of the job. With several watches, the
    changes of one transaction could arrive at different times.
    """
    keys = member.keys
    for key in (keys.slot(registration.member), keys.head, keys.job):
        member.do(Unwatch(key, True))


def predecessor_gone(member: Member, registration: Registration) -> None:
    """Handle the deletion of the registration just before this agent's own, and look up the new
    predecessor.
    """
    if registration.predecessor is None:
        return
    member.do(Unwatch(registration.predecessor, True))
    registration.predecessor = None
    find_predecessor(member, registration)


def find_predecessor(member: Member, registration: Registration) -> None:
    """Look up the newest registration that is older than this agent's registration."""
    _ask(member, registration, Purpose.FIND_PREDECESSOR, member.keys.node(registration.member))


def _ask(member: Member, registration: Registration, purpose: Purpose, key: str, *more: Compare) -> None:
    own = CreatedAt(member.keys.node(registration.member), registration.create_revision)
    member.txn(purpose, [own, *more], [Predecessor(member.keys.nodes, key)])


def predecessor_found(member: Member, registration: Registration, reply: Reply, is_before: bool) -> None:
    """Handle the result of the predecessor lookup, and watch the predecessor. If this agent's own
    registration no longer exists, fence this agent (stop its workers).

    Args:
        member: state of this agent.
        registration: registration of this agent.
        reply: reply of the store.
        is_before: true if the predecessor of this agent's registration is a key that another program has
            written, so that the request was for the registration before that key. If the key was deleted in
            the meantime, request the predecessor of this agent's registration again.
    """
    if reply.ok:
        follow(member, registration, reply.entry(0))
    elif is_before:
        find_predecessor(member, registration)
    else:
        fence(member, GONE)
