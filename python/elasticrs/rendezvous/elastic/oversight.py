"""The leader's part: it ends, forms and closes rounds. The agent with the oldest registration leads.

It need not be a member of a round. :func:`decide` runs after everything that can change its mind.
"""

from __future__ import annotations

from elasticrs.rendezvous.elastic import formation
from elasticrs.rendezvous.elastic import leader as leads
from elasticrs.rendezvous.elastic.leader import Lead, answered, forget, forget_timers, guards, has_passed, write
from elasticrs.rendezvous.elastic.messages import Announce, Watch
from elasticrs.rendezvous.elastic.view import View

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elasticrs.rendezvous.elastic.records import Head
    from elasticrs.rendezvous.elastic.state import Member


def begin(member: Member) -> None:
    """The agent has become the leader."""
    member.lead = Lead(_written)
    member.do(Watch(member.ask(_snapshot), member.keys.prefix, exact=False, snapshot=True))


def _snapshot(member: Member, reply: Any) -> None:
    lead = member.lead
    if lead is None:
        return
    lead.view = View(member.keys, reply.revision, reply.results)
    early, lead.early = lead.early, []
    for event in early:
        if event.revision > reply.revision:
            lead.view.apply(event.revision, event.changes)
    _check_registration(member, lead)


def changed(member: Member, event: Any) -> None:
    """Handle one revision of the store."""
    lead = member.lead
    if lead is None:
        return
    if lead.view is None:
        lead.early.append(event)
        return
    if event.revision > lead.view.revision:
        lead.view.apply(event.revision, event.changes)
        lead.stalled = False
    _check_registration(member, lead)


def _check_registration(member: Member, lead: Lead) -> None:
    if lead.view is not None and member.member not in lead.view.nodes:
        member.fence("the store no longer has this node's registration")
        return
    if lead.view is not None and len(lead.view.damaged) > lead.told_damaged:
        for text in list(lead.view.damaged.values())[lead.told_damaged :]:
            member.do(Announce(f"{text}; it is ignored"))
        lead.told_damaged = len(lead.view.damaged)
    decide(member)


def timer_fired(member: Member, name: str) -> bool:
    """A timer has fired; returns whether it was the leader's."""
    lead = member.lead
    if lead is None or name not in lead.timers:
        return False
    lead.timers[name] = True
    decide(member)
    return True


def resign(member: Member) -> None:
    """The agent does not lead any more."""
    lead, member.lead = member.lead, None
    if lead is not None:
        forget_timers(member, lead)


def _written(member: Member, reply: Any) -> None:
    if member.lead is not None and answered(member.lead, reply):
        decide(member)


# --- deciding ---


def decide(member: Member) -> None:
    """Do what the view calls for: at most one write."""
    lead = member.lead
    if (
        lead is None
        or lead.view is None
        or lead.pending is not None
        or lead.stalled
        or not leads.is_settled(lead)
    ):
        return
    view = lead.view
    if view.head_revision != member.head_revision:
        # The snapshot was ahead of this agent's own watch.
        return
    if view.head_revision != lead.of_head:
        forget_timers(member, lead)
        lead.of_head = view.head_revision
    if view.head is not None and view.head.state != "CLOSED" and len(view.seats) != view.head.size:
        # Nobody can tell any more who is gone, or has finished.
        table = f"the table {member.keys.table(view.head.form)} of round {view.head.round} is damaged"
        leads.close(member, lead, view, view.head.next(reason=table), (), "failed")
        return
    if view.head is None or view.head.state == "ENDED":
        formation.decide(member, lead, view)
    elif view.head.state == "RUNNING":
        _running(member, lead, view, view.head)


# --- a round that runs ---


def missing_ranks(view: View) -> set[int]:
    """Return the members that are gone and had not finished."""
    return view.missing


def may_grow(member: Member, view: View, head: Head) -> bool:
    """True if a waiting node is a reason to end the round."""
    is_wanted = head.size < member.settings.max_nodes and bool(view.waiting)
    return member.settings.scale_up and is_wanted and not view.done


def _running(member: Member, lead: Lead, view: View, head: Head) -> None:
    keys = member.keys
    gone = missing_ranks(view)
    if gone:
        rank = min(gone)
        seat = view.seats[rank]
        kind = "left" if seat.member in view.farewells else "lost"
        ended = head.next(
            state="ENDED",
            end={"kind": kind, "node": seat.name, "group_rank": rank, "member": seat.member},
            cause=None,
        )
        not_done = ("missing", keys.done(head.round, rank))
        write(member, lead, [*guards(member, view), not_done], [("put", keys.head, ended.encode(), False)])
    elif len(view.done) == len(view.seats):
        closed = head.next(
            state="CLOSED", outcome="succeeded", reason=None, end=None, cause=None, time_ns=member.now
        )
        write(member, lead, guards(member, view), [("put", keys.head, closed.encode(), False)])
    elif may_grow(member, view, head):
        if has_passed(member, lead, "scale", member.settings.scale_up_delay):
            end = {"kind": "scale"}
            ended = head.next(state="ENDED", end=end, cause=None)
            write(member, lead, guards(member, view), [("put", keys.head, ended.encode(), False)])
    else:
        forget(member, lead, "scale")
