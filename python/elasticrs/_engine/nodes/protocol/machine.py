"""State machine of the elastic rendezvous for one agent, without I/O, clocks or randomness, so that a
sequence of events can be replayed. Requirements on the caller:

- After :class:`.Disconnect` or a lost connection, no more events of the old connection are delivered.
- Replies arrive in the order of requests, changes of a watch in the order of revisions, and all changes of a
  revision together. The order between watches, or between watches and replies, is not specified.
- Timers may fire late or early. That may cause a delay or an unnecessary round, but never violates a rule.
"""

from __future__ import annotations

from elasticrs._engine.nodes.protocol import formation, joining, messages, rounds
from elasticrs._engine.nodes.protocol.member import Link, Member, Phase, Purpose
from elasticrs._engine.nodes.protocol.messages import Outcome
from elasticrs._engine.nodes.transport.coordination import Changes, Connected, ConnectionLost, Reply

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from elasticrs._engine.nodes.protocol.member import Registration
    from elasticrs._engine.nodes.protocol.messages import Action, Event
    from elasticrs._engine.nodes.transport.coordination import Entry

__all__ = ["Member", "Phase", "step"]


def step(member: Member, event: Event, now: int = 0) -> tuple[Member, list[Action]]:
    """Handle one event. Return this agent's new state, and the actions to execute in order.

    ``member`` is modified in place, so use only the returned state. ``now`` is the store's wall clock in
    nanoseconds. It is used only in records for the user, and never compared.
    """
    member.now = now
    if not member.has_exited:
        _EVENTS[type(event)](member, event)
    return member, member.take_actions()


# --- the store ---


def _connected(member: Member, event: Connected) -> None:
    if member.phase is not Phase.CONNECTING or member.link is not None:
        return
    member.joining.address, member.joining.ttl = event.local_address, event.ttl
    link = member.link = Link()
    if member.joining.has_seen_round and event.revision < member.joining.revision:
        text = "it continues from an older copy of its state; start the job again"
        member.exit(Outcome("lost", f"{member.rendezvous.store}: {text}"))
    elif member.leaving is not None and member.leaving.closing is not None:
        joining.abort(member, link)
    else:
        joining.check_job(member)


def _changes(member: Member, event: Changes) -> None:
    link, registration = member.link, member.registration
    if link is None or registration is None:
        return
    member.joining.seen(event.revision)
    _take_in(member, link, registration, event.changes)
    if member.leader is not None:
        formation.changed(member, member.leader, event)


def _snapshot(member: Member, link: Link, registration: Registration, reply: Reply) -> None:
    """Handle the snapshot of all keys that this agent has requested as a new leader. Some of the keys also
    concern this agent as a member.
    """
    entries = {entry.key: entry for entry in reply.entries()}
    joining.job_seen(member, link, entries.get(member.keys.job))
    _take_in(member, link, registration, entries.values())
    if member.leader is not None:
        formation.snapshot(member, member.leader, reply)


def _take_in(member: Member, link: Link, registration: Registration, entries: Iterable[Entry]) -> None:
    keys = member.keys
    own_slot = keys.slot(registration.member)
    for change in entries:
        key = change.key
        if member.registration is not registration:
            # Ignore the remaining changes, because handling an earlier change has dropped this registration.
            return
        if key == keys.head:
            rounds.take_head(member, link, change)
        elif key == own_slot:
            rounds.take_slot(member, registration, change)
        elif key == registration.predecessor:
            if change.value is None:
                rounds.predecessor_gone(member, registration)
        elif key == keys.job:
            joining.job_seen(member, link, change)


def _reply(member: Member, reply: Reply) -> None:  # noqa: PLR0912 -- a table of cases
    link = member.link
    if link is None:
        return
    member.joining.seen(reply.revision)
    purpose = link.purposes.pop(reply.tag, None)
    match purpose:
        case None | Purpose.NOTHING:
            pass
        case Purpose.FIND_JOB:
            joining.job_found(member, link, reply)
        case Purpose.FIND_JOB_AGAIN:
            joining.job_found_again(member, link, reply)
        case Purpose.FORGET_JOB:
            joining.check_job(member)
        case Purpose.TELL_REFUSAL:
            joining.leave_refused(member)
        case Purpose.SEE_HEAD:
            for entry in reply.entries():
                rounds.take_head(member, link, entry)
        case Purpose.SEE_JOB:
            joining.job_seen(member, link, next(iter(reply.entries()), None))
        case Purpose.TELL_DONE:
            if reply.ok:
                rounds.done_known(member)
        case Purpose.SAY_FAREWELL:
            joining.farewell_known(member)
        case Purpose.END_ROUND:
            joining.round_ended(member, reply)
        case Purpose.ABORT:
            closed = joining.aborted(member, reply)
            if closed is not None:
                rounds.take_head(member, link, closed)
        case _ if link.registration is not None:
            _registration_reply(member, link, link.registration, purpose, reply)


def _registration_reply(  # noqa: PLR0912 -- a table of cases
    member: Member, link: Link, registration: Registration, purpose: Purpose, reply: Reply
) -> None:
    match purpose:
        case Purpose.REGISTER:
            if reply.ok:
                joining.look_for_twin(member, reply)
                joining.registered(member, registration, reply.entry(-2))
                rounds.follow(member, registration, reply.entry(-1))
                rounds.look(member)
            elif joining.refused(member, link, registration, reply):
                rounds.find_predecessor(member, registration)
                rounds.look(member)
        case Purpose.SEE_SLOT:
            for entry in reply.entries():
                rounds.take_slot(member, registration, entry)
        case Purpose.FIND_SLOT:
            rounds.slot_found(member, link, registration, reply)
        case Purpose.TELL_IDLE:
            if not reply.ok:
                joining.fence(member, rounds.GONE)
        case Purpose.SEE_PREDECESSOR:
            if not reply.results:
                rounds.predecessor_gone(member, registration)
        case Purpose.FIND_PREDECESSOR | Purpose.FIND_BEFORE_STRANGER:
            is_before = purpose is Purpose.FIND_BEFORE_STRANGER
            rounds.predecessor_found(member, registration, reply, is_before)
        case Purpose.SEE_ALL:
            _snapshot(member, link, registration, reply)
        case Purpose.LEAD if registration.leader is not None:
            formation.written(member, registration.leader, reply)


# --- listener and timers ---


def _store_hosted(member: Member, event: messages.StoreHosted) -> None:
    # Only update the description of this agent, because the agent is not connected to the store yet.
    member.agent = member.agent.replaced(
        hosts_store=True, fallback_addr=event.fallback_addr, why_hosts=event.why_hosts
    )


def _store_port_failed(member: Member, event: messages.StorePortFailed) -> None:
    text = f"node {member.agent.node}: no port for the workers' store: {event.message}"
    joining.leave_with(member, Outcome("failed", text))


def _store_port(member: Member, event: messages.StorePort) -> None:
    listener, link = member.listener, member.link
    listener.port, listener.has_served = event.port, False
    if link is None or not link.job_revision:
        return
    if link.registration is None:
        joining.register(member, link)
    elif listener.idle_after is not None:
        number, listener.idle_after = listener.idle_after, None
        rounds.say_idle(member, link.registration, number)


def _timer_fired(member: Member, event: messages.TimerFired) -> None:
    handler = _TIMERS.get(event.name)
    if handler is not None:
        handler(member)
    elif member.leader is not None:
        formation.timer_fired(member, member.leader, event.name)


_TIMERS: dict[str, Callable[[Member], None]] = {
    "reconnect": joining.reconnect,
    "connect": joining.connect_timeout,
    "connect_news": joining.connect_news,
    "store_lost": joining.store_lost,
    "refused": joining.leave_refused,
    "give_up": rounds.give_up,
    "barrier": rounds.barrier,
    "round_age": rounds.age_reached,
    "leave": joining.leave_timeout,
    "rank": joining.rank_timeout,
}

_EVENTS: dict[type[Event], Callable[[Member, Any], None]] = {
    Changes: _changes,
    Reply: _reply,
    Connected: _connected,
    ConnectionLost: joining.connection_lost,
    messages.Begin: lambda member, _: joining.begin(member),
    messages.TimerFired: _timer_fired,
    messages.StartFailed: rounds.start_failed,
    messages.WorkerFailed: rounds.worker_failed,
    messages.WorkersDone: lambda member, _: rounds.workers_done(member),
    messages.GroupEnded: rounds.group_ended,
    messages.AskForRound: rounds.ask_for_round,
    messages.StoreHosted: _store_hosted,
    messages.StorePort: _store_port,
    messages.StorePortFailed: _store_port_failed,
    messages.Leave: joining.leave,
}
