"""Leave the job: after a signal to drain this node, if this node's workers are stuck, or when the job ends.

- **LEAVE-1** The other nodes are notified before the workers of this node have stopped.
- **LEAVE-2** A member that has written its farewell (a key that says that it leaves on purpose) takes part in
  no further rounds, and is not counted as lost.
- **LEAVE-3** Leaving takes no longer than stopping the workers plus ``close_timeout``.
"""

from __future__ import annotations

from elasticrs._engine.nodes.protocol.member import Leaving, Phase, Purpose
from elasticrs._engine.nodes.protocol.messages import Outcome
from elasticrs._engine.nodes.protocol.records import Head, cut, encode
from elasticrs._engine.nodes.protocol.round_outcome import INDEPENDENT
from elasticrs._engine.nodes.transport.coordination import Get, ModifiedAt, Put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs._engine.nodes.protocol.member import Link, Member, Registration
    from elasticrs._engine.nodes.protocol.messages import Leave
    from elasticrs._engine.nodes.transport.coordination import Entry, Reply

MAX_REASON = 256


def leave(member: Member, event: Leave) -> None:
    reason = cut(event.reason, MAX_REASON)
    if event.close:
        _close_job(member, reason)
    elif member.leaving is None:
        leave_with(member, Outcome("left", reason))


def leave_with(member: Member, outcome: Outcome) -> None:
    member.set_outcome(outcome)
    registration = member.registered
    if registration is None:
        if member.workers is None:
            member.exit(outcome)
        return
    member.arm("leave", member.settings.close_timeout)
    reason = outcome.message or outcome.kind
    if member.workers is not None and member.runs(member.workers.round):
        # End the round before the workers have stopped, so that the other nodes can react immediately.
        farewell = _farewell(member, registration, reason)
        member.end_round(Purpose.END_ROUND, {"kind": "left", "message": reason}, None, farewell)
    else:
        _say_farewell(member, registration, reason)
    member.stop("this node leaves the job", planned=True)


def round_ended(member: Member, reply: Reply) -> None:
    """Handle the reply to this agent's request that ends the round and announces that the agent leaves."""
    if reply.ok:
        farewell_known(member)
        return
    registration = member.registration
    outcome = None if member.leaving is None else member.leaving.outcome
    if registration is not None and outcome is not None:
        # Record only this agent's departure, because another node has already ended the round.
        _say_farewell(member, registration, outcome.message or "")


def _say_farewell(member: Member, registration: Registration, reason: str) -> None:
    farewell = _farewell(member, registration, reason)
    member.txn(Purpose.SAY_FAREWELL, [member.exists(registration)], [farewell])


def _farewell(member: Member, registration: Registration, reason: str) -> Put:
    return Put(member.keys.farewell(registration.member), encode(reason), False)


def farewell_known(member: Member) -> None:
    if member.leaving is not None:
        member.leaving.is_known = True
    go_on(member)


def go_on(member: Member) -> None:
    """Exit once this node has no workers left, and the store has confirmed the farewell or its reply is
    overdue.
    """
    leaving = member.leaving
    if member.workers is not None or leaving is None:
        return
    if leaving.closing is not None and leaving.is_overdue:
        member.exit(Outcome("aborted", leaving.closing))
    elif leaving.outcome is not None and (leaving.is_known or leaving.is_overdue):
        member.exit(leaving.outcome)


def timeout(member: Member) -> None:
    if member.leaving is not None:
        member.leaving.is_overdue = True
    go_on(member)


# --- closing the job (transaction T10) ---


def _close_job(member: Member, reason: str) -> None:
    leaving = member.leaving = member.leaving or Leaving()
    if leaving.closing is not None:
        return
    leaving.closing = reason
    member.arm("leave", member.settings.close_timeout)
    if member.link is not None:
        abort(member, member.link)
    elif member.workers is None:
        member.exit(Outcome("aborted", reason))
        return
    if member.phase is not Phase.FENCED:
        member.stop("the job ends")


def abort(member: Member, link: Link) -> None:
    """Close the job, unless it is already closed (transaction T10)."""
    _abort_from(member, link.head, link.head_revision)


def _abort_from(member: Member, head: Head | None, revision: int) -> None:
    if (head is not None and head.state == "CLOSED") or member.leaving is None:
        return
    last, key = head or Head("ENDED", 0), member.keys.head
    closed = last.replaced(
        state="CLOSED", outcome="aborted", reason=member.leaving.closing, time_ns=member.now
    )
    then = [member.put_head(closed), *member.keys.forget_rounds(), Get(key)]
    member.txn(Purpose.ABORT, [ModifiedAt(key, revision)], then, [Get(key)])


def aborted(member: Member, reply: Reply) -> Entry | None:
    """Handle the reply to the request that closes the job (T10). Return the entry of the head (the state of
    the job) if the job is closed now. Otherwise, repeat the request.
    """
    entry = reply.entry(-1)
    head = None if entry is None else Head.read(entry)
    if reply.ok or (head is not None and head.state == "CLOSED"):
        return entry
    _abort_from(member, head, 0 if entry is None else entry.mod_revision)
    return None


# --- a closed job ---


def _unused(member: Member) -> Outcome:
    """Return the outcome for a node that a successful job did not need, usually a spare.

    Report a failure if another launch on this machine was part of the job and the number of nodes is fixed,
    because the user has probably started two jobs that share a rendezvous, and the second one has not run.
    """
    text = "the job has succeeded without this node"
    is_fixed = member.rendezvous.min_nodes == member.rendezvous.max_nodes
    if not (member.joining.has_twin and is_fixed):
        return Outcome("spare", text)
    return Outcome("spare", f"{text}, by another launch on this machine: {INDEPENDENT}", has_failed=True)


def outcome_of(member: Member, head: Head) -> Outcome:
    own = None if member.leaving is None else member.leaving.outcome
    if own is not None and own.kind in ("stuck", "excluded"):
        return own
    if head.outcome == "succeeded":
        if member.finished_round == head.round:
            return Outcome("succeeded")
        return _unused(member)
    if head.outcome == "aborted":
        return Outcome("aborted", f"the job was ended: {head.reason}")
    if head.outcome == "timeout":
        return Outcome("timeout", head.reason)
    return Outcome("failed", head.reason, head.cause, is_permanent=head.permanent)
