"""The elastic rendezvous of one agent as a function: no I/O, no clock, no randomness.

:func:`step` takes a state and an event and returns the state and the actions that the loop has to carry
out, in order. What happens depends on nothing but the events, so a schedule can be played again.

What the loop has to keep:

- after :class:`~elasticrs.rendezvous.elastic.messages.Disconnect` or a lost connection, nothing of the old
  connection is delivered any more;
- replies come in the order of their requests, changes in the order of revisions, each revision whole;
  replies may overtake changes;
- timers may fire late, or early: that costs time or a needless round, never safety.

The parts: ``joining`` (connection, registration, who leads), ``rounds`` (a member's part), ``leaving``,
``oversight`` and ``leader`` with ``formation``, ``verdict`` and ``view`` (what ends, forms and closes rounds).
"""

from __future__ import annotations

from elasticrs.rendezvous.elastic import by_hand, joining, leaving, oversight, rounds
from elasticrs.rendezvous.elastic.messages import Outcome
from elasticrs.rendezvous.elastic.state import Member, Phase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elasticrs.rendezvous.elastic.messages import Action

__all__ = ["Member", "Phase", "step"]


def step(member: Member, event: Any, now: int = 0) -> tuple[Member, list[Action]]:
    """Return what follows from an event.

    Args:
        member: where this agent stands; it is changed and given back, do not use it otherwise.
        event: what happened; types are told apart by name, so that the native client's own serve as well.
        now: the store's wall clock, in ns; it is only written into records for the user, never compared.

    Returns:
        Where it stands then, and what to do, in order.
    """
    member.now = now
    if member.phase is not Phase.EXIT:
        handler = _HANDLERS.get(type(event).__name__)
        if handler is None:
            raise TypeError(f"no event of the rendezvous: {event!r}")
        handler(member, event)
    return member, member.take_actions()


def _reply(member: Member, event: Any) -> None:
    if member.connected:
        member.answer(event)


def _changes(member: Member, event: Any) -> None:
    if not member.connected or not member.member:
        return
    keys = member.keys
    own_slot = keys.slot(member.member)
    for change in event.changes:
        key = change.key
        if key == keys.head:
            rounds.take_head(member, change)
        elif key == own_slot:
            rounds.take_slot(member, change)
        elif key == member.predecessor:
            if change.value is None:
                joining.predecessor_gone(member)
        elif key == keys.job:
            joining.job_changed(member, change)
    if member.connected:
        oversight.changed(member, event)


def _timer_fired(member: Member, event: Any) -> None:
    handler = _TIMERS.get(event.name)
    if handler is not None:
        handler(member)
    else:
        oversight.timer_fired(member, event.name)


def _round_age(member: Member) -> None:
    member.aged_round = member.seen_round


def _store_port_failed(member: Member, event: Any) -> None:
    text = f"node {member.settings.node}: no port for the workers' store: {event.message}"
    leaving.leave_with(member, Outcome("failed", text))


def _nothing(member: Member, event: Any) -> None:
    """Ignore an event."""


_HANDLERS: dict[str, Callable[[Member, Any], None]] = {
    "Begin": lambda member, _: joining.begin(member),
    "Connected": joining.connected,
    "ConnectionLost": joining.connection_lost,
    "Reply": _reply,
    "Changes": _changes,
    "GroupStarted": _nothing,
    "StartFailed": rounds.start_failed,
    "WorkerFailed": rounds.worker_failed,
    "WorkersDone": rounds.workers_done,
    "GroupEnded": rounds.group_ended,
    "TimerFired": _timer_fired,
    "Leave": leaving.leave,
    "StoreHosted": joining.store_hosted,
    "StorePort": joining.store_port,
    "StorePortFailed": _store_port_failed,
}

_TIMERS: dict[str, Callable[[Member], None]] = {
    "reconnect": joining.reconnect,
    "connect": joining.connect_timeout,
    "connect_news": joining.connect_news,
    "store_lost": joining.store_lost,
    "give_up": rounds.give_up,
    "barrier": rounds.barrier,
    "round_age": _round_age,
    "leave": leaving.timeout,
    "rank": by_hand.timeout,
}
