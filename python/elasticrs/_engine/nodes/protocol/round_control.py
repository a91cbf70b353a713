"""Leader tasks: end rounds, form new ones, and close the job. The leader itself need not take part in a
round.

:func:`decide` runs after every event that can change the decision.
"""

from __future__ import annotations

from elasticrs._engine.nodes.protocol import formation
from elasticrs._engine.nodes.protocol.connecting import fence
from elasticrs._engine.nodes.protocol.keys import agent_of, workers_keys, workers_of
from elasticrs._engine.nodes.protocol.leader import close, forget, forget_timers, has_passed, write
from elasticrs._engine.nodes.protocol.leader_view import View
from elasticrs._engine.nodes.protocol.member import Purpose
from elasticrs._engine.nodes.protocol.messages import Announce
from elasticrs._engine.nodes.protocol.rounds import GONE
from elasticrs._engine.nodes.transport.coordination import Missing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs._engine.nodes.protocol.member import Leader, Member
    from elasticrs._engine.nodes.protocol.records import Head
    from elasticrs._engine.nodes.transport.coordination import Changes, Reply


def snapshot(member: Member, leader: Leader, reply: Reply) -> None:
    """Handle the store snapshot that this agent requested when it became the leader."""
    view = leader.view = View(member.keys, reply.revision, reply.entries())
    early, leader.early = leader.early, []
    for event in early:
        if event.revision > reply.revision:
            view.apply(event.revision, event.changes)
    _seen(member, leader, view)


def changed(member: Member, leader: Leader, event: Changes) -> None:
    """Handle the changes that the store made in one revision."""
    view = leader.view
    if view is None:
        leader.early.append(event)
        return
    if event.revision > view.revision:
        view.apply(event.revision, event.changes)
        leader.stalled = False
    _seen(member, leader, view)


def _seen(member: Member, leader: Leader, view: View) -> None:
    registration = member.registered
    if registration is None or registration.member not in view.nodes:
        fence(member, GONE)
        return
    for text in list(view.damaged.values())[leader.told_damaged :]:
        member.do(Announce(f"{text}; it is ignored"))
    leader.told_damaged = len(view.damaged)
    decide(member, leader)


def timer_fired(member: Member, leader: Leader, name: str) -> None:
    """Handle an expired timer if it is one of the leader's."""
    if name in leader.timers:
        leader.timers[name] = True
        decide(member, leader)


def written(member: Member, leader: Leader, reply: Reply) -> None:
    """Handle the store's reply to a write by the leader."""
    if leader.answered(reply):
        decide(member, leader)


# --- deciding ---


def decide(member: Member, leader: Leader) -> None:
    """Choose and execute the leader's next action. The leader makes no further decision until the store has
    answered its writes.
    """
    view, link = leader.view, member.link
    # Wait until the leader's copy of the store and this agent's watch have the same state of the job. The
    # copy may be newer than the last change that the watch has delivered.
    if view is None or link is None or not leader.is_free() or view.head_revision != link.head_revision:
        return
    if view.head_revision != leader.of_head:
        forget_timers(member, leader)
        leader.of_head = view.head_revision
    head = view.head
    if head is not None and head.state != "CLOSED" and len(view.seats) != head.size:
        # Close the job, because the list of the round's members is damaged. Without the list, no agent can
        # tell which nodes are lost and which have finished.
        table = f"the table {member.keys.table(head.form)} of round {head.round} is damaged"
        close(member, leader, view, head.replaced(outcome="failed", reason=table))
    elif head is None or head.state == "ENDED":
        formation.decide(member, leader, view)
    elif head.state == "RUNNING":
        _running(member, leader, view, head)


# --- while a round is running ---


def missing_ranks(view: View) -> set[int]:
    """Return the group ranks whose registration disappeared before their workers finished."""
    return view.missing


def may_grow(member: Member, view: View, head: Head) -> bool:
    """Return true if the running round should end so that a waiting node can join."""
    is_wanted = head.size < member.rendezvous.max_nodes and bool(view.waiting)
    return member.settings.scale_up and is_wanted and not view.done


def _forget_workers(member: Member, view: View, gone: set[int]) -> None:
    """Delete the store entries of workers whose agents are lost. These workers are dead: the nursery (their
    parent process) kills them before the agent's session is closed or its lease expires.
    """
    keys = workers_keys(member.rendezvous, member.agent.job, member.joining.job_revision)
    for seat in (view.seats[rank] for rank in gone):
        if seat.member not in view.farewells:
            workers = workers_of(agent_of(seat.member))
            member.txn(Purpose.NOTHING, [], keys.forget_members(workers))


def _running(member: Member, leader: Leader, view: View, head: Head) -> None:
    gone = missing_ranks(view)
    if gone:
        rank = min(gone)
        seat = view.seats[rank]
        kind = "left" if seat.member in view.farewells else "lost"
        end = {"kind": kind, "node": seat.name, "group_rank": rank, "member": seat.member}
        ended = head.replaced(state="ENDED", end=end, cause=None)
        not_done = Missing(member.keys.done(head.round, rank))
        if member.agent.keeps_workers:
            _forget_workers(member, view, gone)
        write(member, leader, view, [member.put_head(ended)], [not_done])
    elif len(view.done) == len(view.seats):
        close(member, leader, view, head.replaced(outcome="succeeded", reason=None, end=None, cause=None))
    elif may_grow(member, view, head):
        if has_passed(member, leader, "scale", member.settings.scale_up_delay):
            ended = head.replaced(state="ENDED", end={"kind": "scale"}, cause=None)
            write(member, leader, view, [member.put_head(ended)])
    else:
        forget(member, leader, "scale")
        if view.waiting:
            formation.tell_of_crowd(member, leader, view)
