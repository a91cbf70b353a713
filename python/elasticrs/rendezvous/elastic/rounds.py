"""The member's part in the rounds: start, stop, report, say that it is idle.

- **ROUND-1** workers start only with none left, and only when the head and the own slot name the same
  proposal.
- **ROUND-2** a failure is reported before the workers are stopped, and only for the round that runs.
- **ROUND-3** an agent says that it is idle of a round only when nothing of that round's workers is left.
- **ROUND-4** it exits only without workers, apart from those that SIGKILL does not end.
"""

from __future__ import annotations

from elasticrs.ranks import NodeRanks
from elasticrs.rendezvous.elastic import joining, leaving
from elasticrs.rendezvous.elastic.checked import DamagedError
from elasticrs.rendezvous.elastic.messages import Announce, Outcome, Start
from elasticrs.rendezvous.elastic.records import (
    Head,
    Slot,
    bound_cause,
    damage,
    encode,
    may_be_first,
    silence_of,
)
from elasticrs.rendezvous.elastic.state import Phase
from elasticrs.rendezvous.elastic.texts import end_of, failure_of, round_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elasticrs.rendezvous.elastic.messages import Cause
    from elasticrs.rendezvous.elastic.state import Member


# --- what the store tells ---


def take_slot(member: Member, entry: Any) -> None:
    """Take in what the leader wrote for this member."""
    if entry.value is None or entry.mod_revision <= member.slot_revision:
        return
    member.slot_revision = entry.mod_revision
    try:
        member.slot = Slot.decode(entry.value)
    except DamagedError as error:
        _slot_damaged(member, error)
        return
    look(member)


def _slot_damaged(member: Member, error: DamagedError) -> None:
    """Without its ranks for the next round an agent registers again; one in a round has them already."""
    text = damage(member.keys.slot(member.member), error)
    if member.phase in (Phase.IDLE, Phase.CONNECTING):
        member.fence(text)
    else:
        member.do(Announce(f"{text}; it is ignored"))


def take_head(member: Member, entry: Any) -> None:
    """Take in a new state of the job."""
    if entry.value is None or entry.mod_revision <= member.head_revision:
        return
    head = Head.read(entry)
    is_news = member.head is not None
    member.head, member.head_revision = head, entry.mod_revision
    if head.round:
        member.has_seen_round = True
    if head.state == "CLOSED":
        _closed(member, head)
    elif head.state == "ENDED":
        _ended(member, head)
    else:
        _running(member, head, is_news)


def _closed(member: Member, head: Head) -> None:
    if member.held is None:
        member.exit(outcome_of(member, head))
        return
    if member.outcome is None:
        # Final, whatever becomes of the connection until the workers have stopped.
        member.outcome = outcome_of(member, head)
    member.phase = Phase.STOP
    member.stop("the job ends")


def _ended(member: Member, head: Head) -> None:
    if member.seen_round == head.round:
        member.was_short = member.aged_round != head.round
        member.disarm("round_age")
    else:
        member.was_short = None
    member.disarm("barrier")
    if member.registered:
        member.arm("give_up", member.settings.patience)
    if member.held is not None:
        member.phase = Phase.STOP
        _stop(member, end_of(head), head.cause if silence_of(head.cause) is not None else None)
        return
    look(member)


def _running(member: Member, head: Head, is_news: bool) -> None:
    if member.seen_round != head.round:
        member.seen_round = head.round
        member.arm("round_age", member.settings.short_round)
        if head.round > 1 and is_news:
            number, told = member.told_end
            known = told if number == head.round - 1 else None
            member.do(Announce(round_line(head, member.settings.max_restarts, known)))
    member.disarm("give_up")
    look(member)
    if member.phase is Phase.IDLE and head.size >= member.settings.max_nodes and not _is_mine(member):
        member.do(
            Announce(f"waiting as a spare: round {head.round} already runs with all of its {head.size} nodes")
        )


def _stop(member: Member, why: str, hung: Cause | None = None) -> None:
    """Stop the workers, if they are not stopping already, and remember what the user was told."""
    if member.held is not None and not member.stopping:
        member.told_end = member.held, why
        member.stop(why, hung=hung)


def _is_mine(member: Member) -> bool:
    """True if this member is part of the running round."""
    head, slot = member.head, member.slot
    if head is None or slot is None or head.state != "RUNNING":
        return False
    return slot.round == head.round and slot.form == head.form


def look(member: Member) -> None:
    """Start what is to be started; else say that nothing of the last slot's round is here."""
    if member.phase not in (Phase.IDLE, Phase.DONE) or member.head is None or member.slot is None:
        return
    if is_leaving(member):
        return
    if member.held is not None or member.idle >= member.slot.round or member.slot.round > member.head.round:
        return
    if _is_mine(member):
        if member.phase is Phase.IDLE and member.slot.fits(member.head, member.settings.nproc):
            _start(member, member.head, member.slot)
        elif member.phase is Phase.IDLE:
            _slot_damaged(member, DamagedError("its ranks are beyond those of the round"))
    elif member.head.state != "CLOSED":
        member.phase = Phase.IDLE
        idle(member, member.slot.round)


def is_leaving(member: Member) -> bool:
    """True if this agent takes part in no further round."""
    return member.outcome is not None or member.closing is not None


def _start(member: Member, head: Head, slot: Slot) -> None:
    member.held, member.phase, member.stopping = head.round, Phase.RUN, False
    member.is_done_known = member.barrier_over = False
    member.delay = 0.0
    serves = slot.group_rank == 0
    member.port_used = member.port_used or serves
    ranks = NodeRanks(
        slot.group_rank,
        head.size,
        slot.first_rank,
        head.world_size,
        slot.first_role_rank,
        slot.role_world_size,
    )
    member.do(Start(head.round, head.used, slot.group_rank, ranks, *head.master, serves))


# --- what the workers do ---


def worker_failed(member: Member, event: Any) -> None:
    """A worker has failed: tell everybody, then stop the others."""
    if member.phase is not Phase.RUN or member.held is None or member.stopping:
        return
    _report_failure(member, event.cause)
    member.phase = Phase.STOP
    _stop(member, failure_of(event.cause, member.settings.node))


def _report_failure(member: Member, cause: Cause | None) -> None:
    end = {"kind": "failure", "message": (cause or {}).get("message")}
    _report(member, end, cause)


def start_failed(member: Member, event: Any) -> None:
    """The workers could not be started; nothing of them is left."""
    if member.held is None:
        return
    if member.phase is Phase.RUN:
        end = {"kind": "setup", "message": event.message, "fatal": not event.transient}
        _report(member, end, None)
    workers_gone(member)


def _report(member: Member, end: dict[str, Any], cause: Cause | None) -> None:
    """T2: the round has ended, for this reason, if nobody has ended it before."""
    number = member.held
    assert number is not None
    member.own_round, member.own_cause = number, cause
    if not member.runs(number):
        return
    head = member.head
    assert head is not None
    assert member.slot is not None
    told = {**end, "node": member.settings.node, "group_rank": member.slot.group_rank}
    ended = head.next(state="ENDED", end={**told, "member": member.member}, cause=bound_cause(cause))
    compares = [("mod", member.keys.head, member.head_revision), *own_registration(member)]
    member.txn(compares, [("put", member.keys.head, ended.encode(), False)])


def own_registration(member: Member) -> list[tuple[Any, ...]]:
    """Return the condition of what a member writes: its own registration."""
    return [("exists", member.keys.node(member.member))]


def workers_done(member: Member, event: Any) -> None:
    """All workers here have finished: T5, and wait for the others."""
    if member.held is None:
        return
    if member.stopping or member.phase is not Phase.RUN:
        workers_gone(member)
        return
    number, member.held = member.held, None
    member.phase, member.done_round = Phase.DONE, number
    head, slot = member.head, member.slot
    assert head is not None
    assert slot is not None
    put = ("put", member.keys.done(number, slot.group_rank), encode(event.summary or {}), False)
    member.txn([("mod", member.keys.head, member.head_revision)], [put], _done_known)
    if slot.group_rank != 0 and not member.settings.hosts_store:
        # Those two serve others: they stay.
        member.arm("barrier", member.settings.exit_barrier_timeout)


def _done_known(member: Member, reply: Any) -> None:
    if reply.ok:
        member.is_done_known = True
        leave_barrier(member)


def barrier(member: Member) -> None:
    """A finished node has waited long enough for the others."""
    member.barrier_over = True
    leave_barrier(member)


def leave_barrier(member: Member) -> None:
    """Exit with success, if the store knows that this node has finished and the round goes on without it."""
    if (
        member.phase is Phase.DONE
        and member.barrier_over
        and member.is_done_known
        and member.runs(member.done_round)
    ):
        member.exit(Outcome("succeeded", "this node has finished; other nodes are still running"))


def group_ended(member: Member, event: Any) -> None:
    """Nothing of the workers is left, apart from what is stuck."""
    if member.held is None:
        return
    if member.phase is Phase.RUN and not member.stopping and event.stuck is None:
        _report_failure(member, event.cause)
    elif event.cause is not None:
        member.own_round, member.own_cause = member.held, event.cause
    if event.stuck is not None:
        _stuck(member, event)
        return
    workers_gone(member)


def _stuck(member: Member, event: Any) -> None:
    """Leave: this node cannot take part in another round, and the others go on without it."""
    if member.phase is Phase.RUN:
        _report_failure(member, event.cause)
    text = f"{event.stuck}; this node cannot take part in another round"
    member.held, member.stopping = None, False
    leaving.leave_with(member, Outcome("stuck", text, event.cause))


def workers_gone(member: Member) -> None:
    """Decide what follows once the workers that were being stopped are gone."""
    number, member.held, member.stopping = member.held, None, False
    assert number is not None
    if member.phase is Phase.FENCED:
        joining.without_workers(member)
    elif member.head is not None and member.head.state == "CLOSED":
        member.exit(outcome_of(member, member.head))
    elif is_leaving(member):
        member.phase = Phase.STOP
        leaving.go_on(member)
    else:
        member.phase = Phase.IDLE
        idle(member, number)


# --- being idle ---


def idle(member: Member, number: int) -> None:
    """T4, as soon as there is a listener that has not served yet."""
    if joining.fresh_listener(member):
        say_idle(member, number)
    else:
        member.idle_after_port = number


def say_idle(member: Member, number: int) -> None:
    """T4: nothing of that round's workers is here, and this is the port for the next one."""
    if is_leaving(member):
        return
    member.idle = number
    put = ("put", member.keys.node(member.member), member.node(_earlier_cause(member, number)).encode(), True)
    member.txn(own_registration(member), [put], _idle_known)


def _earlier_cause(member: Member, number: int) -> Cause | None:
    """Return this node's failure in that round, unless the recorded one came first."""
    if member.own_round != number or member.own_cause is None or member.head is None:
        return None
    # The head of a round that runs tells of the round before.
    is_recorded = member.head.round == number and member.head.state == "ENDED"
    recorded = member.head.cause if is_recorded else None
    return member.own_cause if may_be_first(member.own_cause, recorded) else None


def _idle_known(member: Member, reply: Any) -> None:
    if not reply.ok:
        member.fence("the store no longer has this node's registration")


# --- the end ---


def outcome_of(member: Member, head: Head) -> Outcome:
    """Return what a closed job means for this agent."""
    if member.outcome is not None and member.outcome.kind == "stuck":
        return member.outcome
    if head.outcome == "succeeded":
        if member.done_round == head.round:
            return Outcome("succeeded")
        return Outcome("spare", "the job has succeeded without this node")
    if head.outcome == "aborted":
        return Outcome("aborted", f"the job was ended: {head.reason}")
    if head.outcome == "timeout":
        return Outcome("timeout", head.reason)
    return Outcome("failed", head.reason, head.cause)


def give_up(member: Member) -> None:
    """Give up: no round was formed within the time-out, and no leader has said so."""
    if member.phase is Phase.IDLE and not (member.head is not None and member.head.state == "RUNNING"):
        seconds = member.settings.patience
        member.exit(
            Outcome("timeout", f"no round was formed within {seconds:g} s, and no leader gave a reason")
        )
