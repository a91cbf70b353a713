"""An agent that goes: drained by a signal, with stuck workers, or to end the whole job.

- **LEAVE-1** the others hear of it at once, before the workers here have stopped.
- **LEAVE-2** who has said farewell is no candidate any more, and is not counted as lost.
- **LEAVE-3** it takes no longer than the stop of the workers and ``close_timeout``.
"""

from __future__ import annotations

from elasticrs.rendezvous.elastic import rounds
from elasticrs.rendezvous.elastic.messages import Outcome
from elasticrs.rendezvous.elastic.records import Head, cut, encode
from elasticrs.rendezvous.elastic.state import Phase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elasticrs.rendezvous.elastic.state import Member

MAX_REASON = 256


def leave(member: Member, event: Any) -> None:
    """Somebody asked this agent to stop."""
    if member.phase is Phase.EXIT:
        return
    reason = cut(event.reason, MAX_REASON)
    if event.close:
        _close_job(member, reason)
    elif member.outcome is None and member.closing is None:
        leave_with(member, Outcome("left", reason))


def leave_with(member: Member, outcome: Outcome) -> None:
    """Leave with this outcome: end this node's round, stop the workers, write the farewell."""
    member.outcome = outcome
    if not member.registered:
        if member.held is None:
            member.exit(outcome)
        return
    member.arm("leave", member.settings.close_timeout)
    reason = outcome.message or outcome.kind
    if member.held is not None and member.runs(member.held):
        _end_round(member, reason)
    else:
        _farewell(member, reason)
    if member.held is not None:
        member.phase = Phase.STOP
        member.stop("this node leaves the job")


def _end_round(member: Member, reason: str) -> None:
    """The round ends now, not when the workers here have stopped."""
    head, slot, keys = member.head, member.slot, member.keys
    assert head is not None
    assert slot is not None
    end = {
        "kind": "left",
        "node": member.settings.node,
        "group_rank": slot.group_rank,
        "member": member.member,
        "message": reason,
    }
    ended = head.next(state="ENDED", end=end, cause=None)
    compares = [("mod", keys.head, member.head_revision), *rounds.own_registration(member)]
    puts = [
        ("put", keys.head, ended.encode(), False),
        ("put", keys.farewell(member.member), encode(reason), False),
    ]
    member.txn(compares, puts, _round_ended)


def _round_ended(member: Member, reply: Any) -> None:
    if reply.ok:
        _farewell_known(member, reply)
    elif member.outcome is not None:
        # Somebody else has ended the round.
        _farewell(member, member.outcome.message or "")


def _farewell(member: Member, reason: str) -> None:
    put = ("put", member.keys.farewell(member.member), encode(reason), False)
    member.txn(rounds.own_registration(member), [put], _farewell_known)


def _farewell_known(member: Member, _: Any) -> None:
    member.farewell_known = True
    go_on(member)


def go_on(member: Member) -> None:
    """Exit once the workers are gone and the store knows, or does not answer."""
    if member.held is not None or member.phase is Phase.EXIT:
        return
    if member.closing is not None and member.give_up:
        member.exit(Outcome("aborted", member.closing))
    elif member.outcome is not None and (member.farewell_known or member.give_up):
        member.exit(member.outcome)


def timeout(member: Member) -> None:
    """The store has not answered in time."""
    member.give_up = True
    go_on(member)


# --- T10 ---


def _close_job(member: Member, reason: str) -> None:
    if member.closing is not None:
        return
    member.closing = reason
    member.arm("leave", member.settings.close_timeout)
    if member.connected:
        abort(member)
    elif member.held is None:
        member.exit(Outcome("aborted", reason))
        return
    if member.held is not None and member.phase is not Phase.FENCED:
        member.phase = Phase.STOP
        member.stop("the job ends")


def abort(member: Member) -> None:
    """T10: the job ends, whatever its state, unless it has ended already."""
    _abort_from(member, member.head, member.head_revision)


def _abort_from(member: Member, head: Head | None, revision: int) -> None:
    if head is not None and head.state == "CLOSED":
        return
    last = head or Head("ENDED", 0)
    closed = last.next(state="CLOSED", outcome="aborted", reason=member.closing, time_ns=member.now)
    key = member.keys.head
    put = ("put", key, closed.encode(), False)
    member.txn([("mod", key, revision)], [put, ("get", key)], _aborted, [("get", key)])


def _aborted(member: Member, reply: Any) -> None:
    entry = reply.results[-1]
    head = None if entry is None else Head.read(entry)
    if reply.ok or (head is not None and head.state == "CLOSED"):
        rounds.take_head(member, entry)
        return
    _abort_from(member, head, 0 if entry is None else entry.mod_revision)
