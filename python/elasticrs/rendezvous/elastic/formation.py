"""The leader between rounds: verdict on the last one, then the next one, or the end of the job."""

from __future__ import annotations

from elasticrs.ranks import NodeShare, node_ranks
from elasticrs.rendezvous.elastic import by_hand, seating, verdict
from elasticrs.rendezvous.elastic.addresses import master_addr
from elasticrs.rendezvous.elastic.keys import agent_of
from elasticrs.rendezvous.elastic.leader import close, forget, guards, has_passed, write
from elasticrs.rendezvous.elastic.messages import Announce
from elasticrs.rendezvous.elastic.records import Head, Slot, encode
from elasticrs.rendezvous.elastic.texts import named, nodes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elasticrs.rendezvous.elastic.leader import Lead
    from elasticrs.rendezvous.elastic.member_settings import MemberSettings
    from elasticrs.rendezvous.elastic.state import Member
    from elasticrs.rendezvous.elastic.view import View

MEMBERS_PER_TXN = 99
"""With their part of the table, 100 operations; etcd's default limit is 128."""

FIRST_NEWS, LATER_NEWS = 5.0, 30.0
"""Seconds of waiting before the user is told of it, and until that is said again with other numbers."""


def slow_members(view: View) -> set[str]:
    """Return the members that may still have workers of the last round; the leader waits for them."""
    return view.slow


def decide(member: Member, lead: Lead, view: View) -> None:
    """Decide what to do while no round runs."""
    settings, head = member.settings, view.head
    is_settled = not slow_members(view) or has_passed(member, lead, "settle", settings.settle)
    if head is not None and not is_settled:
        return
    alive: list[str] = []
    if head is not None:
        judged = _judged(member, lead, view, head)
        alive, head = judged.alive, judged.head
        if judged.reason is not None:
            close(member, lead, view, head.next(reason=judged.reason), alive, "failed")
            return
    if _is_time(member, lead, view):
        _form(member, lead, view, head, alive)
        return
    count = len(view.candidates)
    if count < settings.min_nodes and has_passed(member, lead, "join", settings.join_timeout):
        reason = _too_few(view, settings)
        last = view.head or Head("ENDED", 0)
        close(member, lead, view, last.next(reason=reason), (), "timeout")
    elif count < settings.min_nodes and has_passed(member, lead, "waiting", FIRST_NEWS):
        _tell_of_waiting(member, lead, view)


def _tell_of_waiting(member: Member, lead: Lead, view: View) -> None:
    settings, count = member.settings, len(view.candidates)
    forget(member, lead, "waiting")
    has_passed(member, lead, "waiting", LATER_NEWS)
    if lead.told != count:
        lead.told = count
        here = named(_shown(view, settings))
        text = f"waiting for nodes: {count} of at least {settings.min_nodes} have joined"
        member.do(Announce(f"{text}: {here}" if count else text))


def _judged(member: Member, lead: Lead, view: View, head: Head) -> verdict.Verdict:
    """Return the verdict on the ended round; judged again only when its inputs have changed.

    Nodes that come one by one to replace many lost ones do not change it, and finding it looks at every
    member. Until the next round, members only stop and go: each of the first three sets only grows, or only
    shrinks, so that its size tells whether it is the same.
    """
    sizes = len(view.slow), len(view.missing), len(view.absent)
    rests_on = (view.head_revision, member.was_short, sizes, frozenset(view.farewells))
    if lead.judged is None or lead.judged[0] != rests_on:
        lead.judged = rests_on, verdict.judge(view, head, member.settings, member.was_short)
    return lead.judged[1]


def _is_time(member: Member, lead: Lead, view: View) -> bool:
    """True if enough candidates are there, and have been for long enough."""
    settings, count = member.settings, len(view.candidates)
    if count >= settings.max_nodes:
        return True
    if count < settings.min_nodes:
        forget(member, lead, "last_call")
        return False
    if view.head is None or view.head.round == 0:
        return has_passed(member, lead, "last_call", settings.last_call_timeout)
    if count < view.head.size and settings.restart_call_timeout > 0:
        return has_passed(member, lead, "restart_call", settings.restart_call_timeout)
    return True


def _shown(view: View, settings: MemberSettings) -> list[str]:
    if settings.node_rank is not None:
        return by_hand.shown(view)
    return sorted(view.nodes[each].shown for each in view.candidates)


def _too_few(view: View, settings: MemberSettings) -> str:
    count = len(view.candidates)
    limit = f"{settings.join_timeout:g} s (join_timeout)"
    text = f"only {count} of at least {nodes(settings.min_nodes)} joined within {limit}"
    if count:
        text += f": {named(_shown(view, settings))}"
    if settings.node_rank is not None:
        text += f"; no node has node rank {by_hand.missing(view, settings.max_nodes)}"
    lost = [view.seats[rank].name for rank in sorted(view.missing)]
    if lost:
        text += f"; lost in round {view.round}: {named(lost)}"
    return text


def _form(member: Member, lead: Lead, view: View, ended: Head | None, alive: list[str]) -> None:
    """Propose the next round: slots and table, then the head, all sent at once.

    The guards of all of them are monotone (once false, false for ever): if one of the first is refused, so is
    the head, and slots of a form that no head names mean nothing.
    """
    members = _members(view, member.settings)
    lead.count += 1
    form = f"{member.create_revision}.{lead.count}"
    number = view.round + 1
    shares = [view.nodes[each] for each in members]
    ranks = node_ranks([NodeShare(node.role, node.nproc) for node in shares])
    guard = guards(member, view)
    keys = member.keys
    for first in range(0, len(members), MEMBERS_PER_TXN):
        part = range(first, min(first + MEMBERS_PER_TXN, len(members)))
        slots = [
            Slot(number, form, r, ranks[r].first_rank, ranks[r].first_role_rank, ranks[r].role_world_size)
            for r in part
        ]
        lines = [(members[r], shares[r].name, shares[r].local_addr or shares[r].address) for r in part]
        puts: list[tuple[Any, ...]] = [
            ("put", keys.slot(members[slot.group_rank]), slot.encode(), False) for slot in slots
        ]
        puts.append(("put", f"{keys.table(form)}{first // MEMBERS_PER_TXN}", encode(lines), False))
        member.txn(guard, puts)
    old = ended or Head("ENDED", 0)
    head = old.next(
        state="RUNNING",
        round=number,
        form=form,
        size=len(members),
        world_size=ranks[0].world_size,
        master=(master_addr(shares), shares[0].port),
    )
    ops: list[tuple[Any, ...]] = [("put", keys.head, head.encode(), False), ("delete_prefix", keys.dones)]
    ops += [("delete_prefix", keys.table(each)) for each in view.forms if each != form][:10]
    stale = [each for each in view.slots if each not in view.nodes]
    ops += [("delete", keys.slot(each)) for each in stale[: 100 - len(ops)]]
    gone = [each for each in view.farewells if each not in view.nodes]
    ops += [("delete", keys.farewell(each)) for each in gone[: 120 - len(ops)]]
    here = [("exists", keys.node(each)) for each in alive]
    write(member, lead, [*guard, *here], ops)


def _members(view: View, settings: MemberSettings) -> list[str]:
    """Return the members of the next round, by group rank."""
    of_agent = {agent_of(each): each for each in view.candidates}
    offered = []
    for agent, each in of_agent.items():
        node = view.nodes[each]
        offered.append(seating.Candidate(agent, view.joined[each], node.hint, node.name))
    previous = [agent_of(seat.member) for seat in view.seats]
    return [of_agent[agent] for agent in seating.seat(previous, offered, settings.max_nodes)]
