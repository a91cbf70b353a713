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

    from elasticrs._engine.nodes.protocol.messages import Action, Event
    from elasticrs._engine.nodes.transport.coordination import Entry

__all__ = ["Member", "Phase", "step"]


def step(member: Member, event: Event, now: int = 0) -> tuple[Member, list[Action]]:
    """Handle one event. Return the agent's new state (``member`` is modified in place), and the actions that
    the caller executes in order. ``now`` is the store's wall clock in nanoseconds. Only messages and the
    restart policy use it.
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
    link = member.link
    if link is None:
        return
    member.joining.seen(event.revision)
    _take_in(member, link, event.changes)
    if member.leader is not None:
        formation.changed(member.leader, event)
    elif link.early is not None:
        link.early.append(event)


def _take_in(member: Member, link: Link, entries: Iterable[Entry]) -> None:
    keys = member.keys
    own_slot = keys.slot(link.member)
    for change in entries:
        key = change.key
        if member.link is not link:
            # Ignore the remaining changes, because handling an earlier change has dropped this connection.
            return
        if key == keys.head:
            rounds.take_head(member, link, change)
        elif key == own_slot:
            rounds.take_slot(member, link, change)
        elif key == link.predecessor:
            if change.value is None:
                rounds.predecessor_gone(member, link)
        elif key == keys.job:
            joining.job_seen(member, change)


def _reply(member: Member, reply: Reply) -> None:
    link = member.link
    if link is None:
        return
    member.joining.seen(reply.revision)
    handler = _REPLIES.get(link.purposes.pop(reply.tag, Purpose.NOTHING))
    if handler is not None:
        handler(member, link, reply)


def _registered(member: Member, link: Link, reply: Reply) -> None:
    if reply.ok:
        joining.look_for_twin(member, reply)
        joining.registered(member, link, reply.entry(-2))
        rounds.follow(member, link, reply.entry(-1))
        rounds.look(member)
    elif joining.refused(member, link, reply):
        rounds.find_predecessor(member, link)
        rounds.look(member)


def _seen(member: Member, link: Link, reply: Reply) -> None:
    """Handle the first reply to a watch of a single key. It contains the key, if the key exists."""
    _take_in(member, link, reply.entries())


def _job_seen(member: Member, _: Link, reply: Reply) -> None:
    joining.job_seen(member, next(iter(reply.entries()), None))


def _predecessor_seen(member: Member, link: Link, reply: Reply) -> None:
    if not reply.results:
        rounds.predecessor_gone(member, link)


def _idle_told(member: Member, _: Link, reply: Reply) -> None:
    if not reply.ok:
        joining.fence(member, rounds.GONE)


def _aborted(member: Member, link: Link, reply: Reply) -> None:
    closed = joining.aborted(member, reply)
    if closed is not None:
        rounds.take_head(member, link, closed)


def _all_seen(member: Member, link: Link, reply: Reply) -> None:
    """Handle the snapshot of all keys of the job, first as any member does, then as the job's new leader."""
    entries = {entry.key: entry for entry in reply.entries()}
    joining.job_seen(member, entries.get(member.keys.job))
    _take_in(member, link, entries.values())
    if member.link is link:
        formation.snapshot(member, link, reply)


_REPLIES: dict[Purpose, Callable[[Member, Link, Reply], None]] = {
    Purpose.FIND_JOB: joining.job_found,
    Purpose.FIND_JOB_AGAIN: joining.job_found_again,
    Purpose.FORGET_JOB: lambda member, *_: joining.check_job(member),
    Purpose.TELL_REFUSAL: lambda member, *_: joining.leave_refused(member),
    Purpose.REGISTER: _registered,
    Purpose.SEE_SLOT: _seen,
    Purpose.SEE_HEAD: _seen,
    Purpose.SEE_JOB: _job_seen,
    Purpose.FIND_SLOT: rounds.slot_found,
    Purpose.SEE_PREDECESSOR: _predecessor_seen,
    Purpose.FIND_PREDECESSOR: rounds.predecessor_found,
    Purpose.FIND_BEFORE_STRANGER: rounds.before_stranger_found,
    Purpose.SEE_ALL: _all_seen,
    Purpose.LEAD: lambda _, link, reply: formation.written(link, reply),
    Purpose.TELL_DONE: rounds.done_known,
    Purpose.TELL_IDLE: _idle_told,
    Purpose.END_ROUND: joining.round_ended,
    Purpose.SAY_FAREWELL: lambda member, *_: joining.farewell_known(member),
    Purpose.ABORT: _aborted,
}


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
    if link is None or not link.has_job:
        return
    if not link.member:
        joining.register(member, link)
    elif listener.idle_after is not None:
        number, listener.idle_after = listener.idle_after, None
        rounds.say_idle(member, link, number)


def _timer_fired(member: Member, event: messages.TimerFired) -> None:
    handler = _TIMERS.get(event.name)
    if handler is not None:
        handler(member)
    elif member.leader is not None:
        formation.timer_fired(member.leader, event.name)


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
