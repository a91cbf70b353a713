"""Who leads: the agent with the oldest registration. Each watches the registration before its own."""

from __future__ import annotations

from elasticrs.rendezvous.elastic.connecting import fence
from elasticrs.rendezvous.elastic.keys import is_member
from elasticrs.rendezvous.elastic.leader_state import Leader
from elasticrs.rendezvous.elastic.member import Purpose
from elasticrs.rendezvous.elastic.rounds import GONE
from elasticrs.store.coordination import CreatedAt, Predecessor, Unwatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.rendezvous.elastic.member import Member, Registration
    from elasticrs.store.coordination import Compare, Entry, Reply


def follow(member: Member, registration: Registration, predecessor: Entry | None) -> None:
    """Wait for the end of the registration before this one, or lead."""
    if predecessor is None:
        registration.predecessor = None
        registration.leader = Leader()
        end_own_watches(member, registration)
        member.watch(Purpose.SEE_ALL, member.keys.prefix, exact=False)
    elif is_member(predecessor.key[len(member.keys.nodes) :]):
        registration.predecessor = predecessor.key
        member.watch(Purpose.SEE_PREDECESSOR, predecessor.key)
    else:
        # Another program's: nobody would ever end it.
        before = CreatedAt(predecessor.key, predecessor.create_revision)
        _ask(member, registration, Purpose.FIND_BEFORE_STRANGER, predecessor.key, before)


def end_own_watches(member: Member, registration: Registration) -> None:
    """Leave it to the watch of the whole job to tell of this member, too: a store may tell of each watch
    apart, and only one that covers all keys tells all of a revision.
    """
    keys = member.keys
    for key in (keys.slot(registration.member), keys.head, keys.job):
        member.do(Unwatch(key, True))


def predecessor_gone(member: Member, registration: Registration) -> None:
    """The registration before this one is gone; ask which one precedes it now."""
    if registration.predecessor is None:
        return
    member.do(Unwatch(registration.predecessor, True))
    registration.predecessor = None
    find_predecessor(member, registration)


def find_predecessor(member: Member, registration: Registration) -> None:
    """Ask who is before this registration."""
    _ask(member, registration, Purpose.FIND_PREDECESSOR, member.keys.node(registration.member))


def _ask(member: Member, registration: Registration, purpose: Purpose, key: str, *more: Compare) -> None:
    own = CreatedAt(member.keys.node(registration.member), registration.create_revision)
    member.txn(purpose, [own, *more], [Predecessor(member.keys.nodes, key)])


def predecessor_found(member: Member, registration: Registration, reply: Reply, is_before: bool) -> None:
    """Follow it, unless the own registration, or the stranger that it ``is_before``, is gone."""
    if reply.ok:
        follow(member, registration, reply.entry(0))
    elif is_before:
        find_predecessor(member, registration)
    else:
        fence(member, GONE)
