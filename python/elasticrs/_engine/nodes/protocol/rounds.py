"""A member's part in rounds, and the election of the leader: the agent with the oldest registration leads,
and every other agent watches the registration just before its own.

An agent that is *idle* after a round has no workers of that round or of earlier rounds.

- **ROUND-1** Workers start only when no earlier workers remain, and only when the head (the state of the job)
  and the member's own slot (its ranks) name the same proposed round.
- **ROUND-2** A member reports a failure before it stops its workers, and only for the running round.
- **ROUND-3** An agent reports that it is idle only when no processes of that round's workers remain.
- **ROUND-4** An agent exits only when none of its workers remain, except those that survive SIGKILL.
"""

from __future__ import annotations

from elasticrs._engine.job.phrases import duration
from elasticrs._engine.nodes.protocol.joining import (
    MAX_REASON,
    fence,
    fresh_listener,
    go_on,
    leave_with,
    outcome_of,
    without_workers,
)
from elasticrs._engine.nodes.protocol.member import Done, Findings, Phase, Purpose, RoundWorkers
from elasticrs._engine.nodes.protocol.messages import Announce, Outcome, Start
from elasticrs._engine.nodes.protocol.records import (
    DamagedError,
    Head,
    Slot,
    cut,
    damage,
    encode,
    is_member,
    may_be_first,
    silence_of,
)
from elasticrs._engine.nodes.protocol.round_outcome import (
    TWIN,
    diagnosis_line,
    end_of,
    failure_of,
    round_line,
)
from elasticrs._engine.nodes.transport.coordination import (
    CreatedAt,
    Get,
    ModifiedAt,
    Predecessor,
    Put,
    Unwatch,
)
from elasticrs._engine.workers.plan import NodeRanks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elasticrs._engine.nodes.protocol.member import Link, Member
    from elasticrs._engine.nodes.protocol.messages import (
        AskForRound,
        Cause,
        GroupEnded,
        StartFailed,
        WorkerFailed,
    )
    from elasticrs._engine.nodes.transport.coordination import Compare, Entry, Reply

GONE = "the store no longer has this node's registration"
REMOVED = "the state of this job was removed"


# --- changes in the store ---


def take_slot(member: Member, link: Link, entry: Entry) -> None:
    if entry.value is None or entry.mod_revision <= link.slot_revision:
        return
    link.slot_revision = entry.mod_revision
    try:
        link.slot = Slot.decode(entry.value)
    except DamagedError as error:
        _slot_damaged(member, link, error)
        return
    look(member)


def _slot_damaged(member: Member, link: Link, error: DamagedError) -> None:
    """Handle a damaged slot (this member's ranks). Register again to get another, unless workers run."""
    text = damage(member.keys.slot(link.member), error)
    if member.phase in (Phase.IDLE, Phase.CONNECTING):
        fence(member, text)
    else:
        member.do(Announce(f"{text}; it is ignored"))


def take_head(member: Member, link: Link, entry: Entry) -> None:
    if entry.mod_revision <= link.head_revision:
        return
    if entry.value is None:
        if link.head is not None:
            # Stop the workers, because without the head (the state of the job) no agent can end the round.
            fence(member, REMOVED)
        return
    head = Head.read(entry)
    is_news = link.head is not None
    link.head, link.head_revision = head, entry.mod_revision
    member.last_head = head
    if head.round:
        member.joining.has_seen_round = True
    if head.state == "CLOSED":
        _closed(member, head)
    elif head.state == "ENDED":
        _ended(member, head)
    else:
        _running(member, link, head, is_news)


def _closed(member: Member, head: Head) -> None:
    if member.workers is None:
        member.exit(outcome_of(member, head))
        return
    if member.leaving is None or member.leaving.outcome is None:
        # Set the outcome now, because the connection may be lost before the workers have stopped.
        member.set_outcome(outcome_of(member, head))
    member.stop("the job ends", asked=head.outcome == "aborted")


def _ended(member: Member, head: Head) -> None:
    age = member.age
    age.was_short = age.aged != head.round if age.seen == head.round else None
    if age.seen == head.round:
        member.disarm("round_age")
    member.disarm("barrier")
    if member.registered is not None:
        member.arm("give_up", member.patience)
    if member.workers is not None:
        hung = head.cause if silence_of(head.cause) is not None else None
        kind = (head.end or {}).get("kind")
        member.stop(
            end_of(head),
            hung=hung,
            planned=kind in ("scale", "left", "asked"),
            after_failure=kind == "failure",
            node_leaves=kind == "left",
        )
    else:
        look(member)
    if head.is_judged and member.judged_round < head.round:
        member.judged_round = head.round
        _announce_verdict(member, head)


def _announce_verdict(member: Member, head: Head) -> None:
    """Tell the user the leader's verdict. If that excludes this agent, take part in no further rounds."""
    if head.excluded_agent == member.agent.agent:
        _excluded(member, head)
    elif head.note:
        member.do(Announce(head.note))
    if head.delay > 0 and member.leaving is None:
        member.do(Announce(f"the next round starts in {duration(head.delay)} (restart delay)"))


def _excluded(member: Member, head: Head) -> None:
    """Leave the job, because this node is excluded. If this agent hosts the store, stay without workers."""
    if member.leaving is not None or member.serves_only:
        return
    if not member.agent.hosts_store:
        leave_with(member, Outcome("excluded", head.note, head.cause))
        return
    member.serves_only = True
    member.do(Announce(f"{head.note}; this agent stays without workers, because it hosts the store"))
    if member.registered is not None:
        say_idle(member, member.registered, member.registered.idle)


def _running(member: Member, link: Link, head: Head, is_news: bool) -> None:
    stop_earlier(member, head)
    if head.excluded_agent == member.agent.agent:
        # The exclusion was announced while this agent was disconnected.
        _excluded(member, head)
    if member.age.seen != head.round:
        member.age.seen = head.round
        member.arm("round_age", member.settings.short_round)
        tells = member.leaving is None and not member.agent.keeps_workers
        if head.round > 1 and is_news and tells:
            number, told = member.told_end
            known = told if number == head.round - 1 else None
            diagnosis = diagnosis_line(head)
            if diagnosis is not None:
                member.do(Announce(diagnosis))
            member.do(Announce(round_line(head, member.agent.policy, known)))
    member.disarm("give_up")
    look(member)
    if _is_spare(member, head):
        _find_slot(member, link)


def stop_earlier(member: Member, head: Head) -> None:
    """Stop workers of an earlier round, whose end this agent may have missed while disconnected."""
    if member.workers is not None and member.workers.round < head.round:
        member.stop(end_of(head))


def _is_spare(member: Member, head: Head) -> bool:
    is_idle = member.phase is Phase.IDLE and head.state == "RUNNING"
    return is_idle and head.size >= member.rendezvous.max_nodes and not is_mine(member.link, head)


def others_running(member: Member) -> int:
    """Return on how many nodes the job runs without this member, which waits as a spare. Return 0 if this
    member takes part, or if the job does not run.
    """
    link, head = member.link, member.head
    if link is None or head is None or not is_slot_known(link):
        return 0
    return head.size if _is_spare(member, head) else 0


def _find_slot(member: Member, link: Link) -> None:
    """Read this member's ranks from the store, because the watch of their key may deliver them late. Do this
    only once for each state of the job.
    """
    if link.slot_asked < link.head_revision:
        link.slot_asked = link.head_revision
        member.txn(Purpose.FIND_SLOT, [], [Get(member.keys.slot(link.member))])


def slot_found(member: Member, link: Link, reply: Reply) -> None:
    """Handle the reply with this member's ranks. Tell the user if a round starts without this member."""
    link.slot_known = reply.revision
    entry, head = reply.entry(0), link.head
    if entry is not None and entry.mod_revision > link.slot_revision:
        take_slot(member, link, entry)
    elif head is not None and not is_mine(link, head):
        look(member)
    if head is not None and is_slot_known(link) and _is_spare(member, head):
        if head.round == member.findings.round:
            text = f"waiting for the end of round {head.round}, where this node was a member before its loss"
        else:
            text = f"waiting as a spare: round {head.round} already runs with all of its {head.size} nodes"
        member.do(Announce(text))
        if head.round != member.findings.round and member.joining.has_twin and not member.joining.found_round:
            member.do(Announce(TWIN))


def is_slot_known(link: Link) -> bool:
    """Return true if this member's slot (its ranks) was read after the head (the job's state) was written.
    The slot is then final, because leaders write slots before the head.
    """
    return link.slot_known >= link.head_revision


def age_reached(member: Member) -> None:
    member.age.aged = member.age.seen


def is_mine(link: Link | None, head: Head) -> bool:
    slot = None if link is None else link.slot
    if slot is None or head.state != "RUNNING":
        return False
    return slot.round == head.round and slot.form == head.form


def look(member: Member) -> None:
    """Start workers if the running round includes this member. If its ranks are outdated, report it idle."""
    link, phase = member.registered, member.phase
    if link is None or link.slot is None or link.head is None or member.leaving is not None:
        return
    head, slot = link.head, link.slot
    if phase not in (Phase.IDLE, Phase.DONE) or link.idle >= slot.round or slot.round > head.round:
        return
    if is_mine(link, head):
        if phase is Phase.DONE:
            return
        if slot.fits(head, member.agent.nproc):
            _start(member, head, slot)
        else:
            _slot_damaged(member, link, DamagedError("its ranks are beyond those of the round"))
    elif head.state == "RUNNING" and slot.round == head.round and not is_slot_known(link):
        # The slot (this member's place in the round) is of an earlier proposal for this round, which was not
        # accepted. A newer slot may still arrive.
        _find_slot(member, link)
    elif head.state != "CLOSED":
        member.done = None
        idle(member, link, slot.round)


def _start(member: Member, head: Head, slot: Slot) -> None:
    member.workers, member.findings = RoundWorkers(head.round), Findings(head.round)
    member.joining.delay = 0.0
    serves = slot.group_rank == 0
    member.listener.has_served = member.listener.has_served or serves
    ranks = NodeRanks(
        *(slot.group_rank, head.size, slot.first_rank, head.world_size),
        *(slot.first_role_rank, slot.role_world_size),
    )
    reasons = (end_of(head, names_pid=False), (head.cause or {}).get("diagnosis")) if head.round > 1 else ()
    earlier = "; ".join(filter(None, reasons))
    after_loss = (head.end or {}).get("kind") == "lost"
    member.do(
        Start(
            *(head.round, head.used, slot.group_rank, ranks, *_master(member, head), serves),
            *(earlier, after_loss, head.delay),
        )
    )


def _master(member: Member, head: Head) -> tuple[str, int]:
    """Return the address and port at which this node's workers reach their store. With ``static``, that is
    this node's own endpoint, as under torchrun, because nodes may reach rank 0 over different routes.
    """
    rendezvous = member.rendezvous
    return (rendezvous.host, rendezvous.port) if rendezvous.is_static else head.master


# --- events of the workers ---


def worker_failed(member: Member, event: WorkerFailed) -> None:
    if member.phase is not Phase.RUN:
        return
    _report_failure(member, event.cause)
    hung = event.cause if silence_of(event.cause) is not None else None
    member.stop(failure_of(event.cause, member.agent.node), hung=hung)


def ask_for_round(member: Member, event: AskForRound) -> None:
    """End the running round (transaction T2), as healthy workers have requested, unless it has ended."""
    workers = member.workers
    if member.phase is Phase.RUN and workers is not None and member.runs(workers.round):
        end = {"kind": "asked", "message": cut(event.reason, MAX_REASON)}
        member.end_round(Purpose.NOTHING, end)


def _report_failure(member: Member, cause: Cause | None) -> None:
    _report(member, {"kind": "failure", "message": (cause or {}).get("message")}, cause)


def start_failed(member: Member, event: StartFailed) -> None:
    if member.phase is Phase.RUN:
        _report(member, {"kind": "setup", "message": event.message, "fatal": not event.transient}, None)
    workers_gone(member)


def _report(member: Member, end: dict[str, Any], cause: Cause | None) -> None:
    workers = member.workers
    assert workers is not None
    member.findings.cause = cause
    if member.runs(workers.round):
        member.end_round(Purpose.NOTHING, end, cause)


def workers_done(member: Member) -> None:
    """Record that this node's workers have succeeded (transaction T5), and wait for the other nodes."""
    workers, link = member.workers, member.link
    if workers is None:
        return
    if link is None or workers.is_stopping:
        workers_gone(member)
        return
    slot = link.slot
    assert slot is not None
    member.workers, member.done, member.finished_round = None, Done(), workers.round
    put = Put(member.keys.done(workers.round, slot.group_rank), encode({}), False)
    member.txn(Purpose.TELL_DONE, [ModifiedAt(member.keys.head, link.head_revision)], [put])
    if slot.group_rank != 0 and not member.agent.hosts_store:
        # Limit the time to wait for the other nodes. Only hosts of the workers' store (group rank 0) or of
        # the rendezvous store must stay until the job ends.
        member.arm("barrier", member.settings.exit_barrier_timeout)


def done_known(member: Member, _: Link, reply: Reply) -> None:
    if reply.ok and member.done is not None:
        member.done.is_known = True
    leave_barrier(member)


def barrier(member: Member) -> None:
    if member.done is not None:
        member.done.is_over = True
    leave_barrier(member)


def leave_barrier(member: Member) -> None:
    """Exit with success if the wait for other nodes is over and the store has recorded the success."""
    done = member.done
    if done is not None and done.is_over and done.is_known and member.runs(member.finished_round):
        member.exit(Outcome("succeeded", "this node has finished; other nodes are still running"))


def group_ended(member: Member, event: GroupEnded) -> None:
    if member.workers is None:
        return
    if member.phase is Phase.RUN:
        _report_failure(member, event.cause)
    elif event.cause is not None:
        member.findings.cause = event.cause
    member.findings.evidence, member.findings.unfit = event.evidence, event.unfit
    if event.stuck is not None:
        member.workers = None
        text = f"{event.stuck}; this node cannot take part in another round"
        leave_with(member, Outcome("stuck", text, event.cause))
        return
    workers_gone(member)


def workers_gone(member: Member) -> None:
    workers, member.workers = member.workers, None
    if workers is None:
        return
    head, link = member.head, member.link
    if link is None:
        without_workers(member)
    elif head is not None and head.state == "CLOSED":
        member.exit(outcome_of(member, head))
    elif member.leaving is not None:
        go_on(member)
    else:
        idle(member, link, workers.round)


# --- being idle ---


def idle(member: Member, link: Link, number: int) -> None:
    """Report that no workers of a round are left on this node. First listen on a port for the next round."""
    if fresh_listener(member):
        say_idle(member, link, number)
    else:
        member.listener.idle_after = number


def say_idle(member: Member, link: Link, number: int) -> None:
    if member.leaving is not None:
        return
    link.idle = number
    node = member.node(_earlier_cause(member, number))
    put = Put(member.keys.node(link.member), node.encode(), True)
    member.txn(Purpose.TELL_IDLE, [member.exists(link)], [put, *_evidence(member, number)])


def _evidence(member: Member, number: int) -> list[Put]:
    """Return the write of this node's evidence about its ranks, if there is any. It is a part of the report
    that the node is idle (T4), for which the leader waits before it decides.
    """
    evidence, member.findings.evidence = member.findings.evidence, None
    slot = None if member.link is None else member.link.slot
    if evidence is None or slot is None or not member.findings.round == number == slot.round:
        return []
    return [Put(member.keys.evidence(number, slot.group_rank), evidence, False)]


def _earlier_cause(member: Member, number: int) -> Cause | None:
    """Return the failure on this node if it may precede the one in the job's state, or would always recur."""
    own, head = member.findings, member.head
    if own.round != number or own.cause is None or head is None:
        return None
    # While a round is running, the head (the job's state) still has the cause of the previous round's end.
    recorded = head.cause if head.round == number and head.state == "ENDED" else None
    is_permanent = own.cause.get("permanence") is not None
    return own.cause if is_permanent or may_be_first(own.cause, recorded) else None


def give_up(member: Member) -> None:
    head = member.head
    if member.phase is Phase.IDLE and not (head is not None and head.state == "RUNNING"):
        seconds = member.patience
        member.exit(
            Outcome("timeout", f"no round was formed within {seconds:g} s, and no leader gave a reason")
        )


# --- election of the leader ---


def follow(member: Member, link: Link, predecessor: Entry | None) -> None:
    if predecessor is None:
        link.predecessor = None
        link.early = []
        end_own_watches(member, link)
        member.watch(Purpose.SEE_ALL, member.keys.prefix, exact=False)
    elif is_member(predecessor.key[len(member.keys.nodes) :]):
        link.predecessor = predecessor.key
        member.watch(Purpose.SEE_PREDECESSOR, predecessor.key)
    else:
        # The key before this agent's is of another program, which may never delete it. Take the one before.
        before = CreatedAt(predecessor.key, predecessor.create_revision)
        _ask(member, link, Purpose.FIND_BEFORE_STRANGER, predecessor.key, before)


def end_own_watches(member: Member, link: Link) -> None:
    """End this agent's watches of single keys. As the leader it watches all keys of the job, and with a
    second watch, the changes of one transaction could arrive separately.
    """
    keys = member.keys
    for key in (keys.slot(link.member), keys.head, keys.job):
        member.do(Unwatch(key, True))


def predecessor_gone(member: Member, link: Link) -> None:
    if link.predecessor is None:
        return
    member.do(Unwatch(link.predecessor, True))
    link.predecessor = None
    find_predecessor(member, link)


def find_predecessor(member: Member, link: Link) -> None:
    _ask(member, link, Purpose.FIND_PREDECESSOR, member.keys.node(link.member))


def _ask(member: Member, link: Link, purpose: Purpose, key: str, *more: Compare) -> None:
    own = CreatedAt(member.keys.node(link.member), link.create_revision)
    member.txn(purpose, [own, *more], [Predecessor(member.keys.nodes, key)])


def predecessor_found(member: Member, link: Link, reply: Reply) -> None:
    if reply.ok:
        follow(member, link, reply.entry(0))
    else:
        fence(member, GONE)


def before_stranger_found(member: Member, link: Link, reply: Reply) -> None:
    if reply.ok:
        follow(member, link, reply.entry(0))
    else:
        # The foreign key was deleted meanwhile.
        find_predecessor(member, link)
