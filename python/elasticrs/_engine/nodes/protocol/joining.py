"""Join a job and leave it. To join, an agent connects to the rendezvous store, finds or creates the job's
record, and registers itself. It leaves after a signal to drain this node, if this node's workers are stuck,
or when the job ends.

An agent that loses its connection is *fenced*: its workers must have exited before it registers again,
because the other nodes may already count it as lost.

- **JOIN-1** An agent registers only without workers. Each registration has a new incarnation number.
- **JOIN-2** Registering deletes the agent's earlier registrations by name, so that a delayed request from an
  earlier connection cannot delete a later registration.
- **JOIN-3** Settings that affect the decisions of a leader are the same on all nodes of a job.
- **JOIN-4** The commands of all nodes are the same, unless the user sets ``same_command=0``.
- **HAND-1** With ``static``, at most one registration has a node rank: the transaction that registers an
  agent (T1) also creates a key for the rank, and fails if another agent has created that key. The
  registration and the rank's key share a lease.
- **HAND-2** If another node has the rank, that node may be dead. So the agent retries until a dead node's
  lease would have expired.
- **HAND-3** During a round, the rendezvous store's port is lent to the workers of rank 0. An agent therefore
  retries if its connection to the port is refused, or if another program answers.
- **LEAVE-1** The other nodes are notified before the workers of this node have stopped.
- **LEAVE-2** A member that has written its farewell (a key that says that it leaves on purpose) takes part in
  no further rounds, and is not counted as lost.
- **LEAVE-3** Leaving takes no longer than stopping the workers plus ``close_timeout``.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticrs._engine.job.phrases import local_time
from elasticrs._engine.nodes.protocol.member import Leaving, Phase, Purpose
from elasticrs._engine.nodes.protocol.messages import (
    Announce,
    BindStore,
    CloseStore,
    Connect,
    Disconnect,
    Outcome,
)
from elasticrs._engine.nodes.protocol.records import (
    MAX_NAME,
    PROTOCOL,
    DamagedError,
    Head,
    cut,
    damage,
    encode,
    holder_of,
    job_of,
    text_of,
)
from elasticrs._engine.nodes.protocol.rendezvous import difference
from elasticrs._engine.nodes.protocol.round_outcome import INDEPENDENT, TWIN, closed_line
from elasticrs._engine.nodes.transport.coordination import (
    CreatedAt,
    Delete,
    DeletePrefix,
    Get,
    HasValue,
    Missing,
    ModifiedAt,
    Predecessor,
    Put,
    Range,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elasticrs._engine.nodes.protocol.member import Link, Member
    from elasticrs._engine.nodes.protocol.messages import Leave
    from elasticrs._engine.nodes.transport.coordination import (
        Compare,
        ConnectionLost,
        Entry,
        Operation,
        Reply,
    )

FORGET_EARLIER = 60
"""Number of its earlier registrations that an agent deletes when it registers. Older ones are already
deleted, and a delayed request that creates one again would have arrived by now.
"""

MAX_REFUSAL = MAX_NAME - 8
"""Maximum size, in bytes, of the reason that a refused agent reports to the other nodes."""

REFUSAL_TIMEOUT = 2.0
"""Seconds for which a refused agent waits until the store has accepted the reason."""

MAX_NEIGHBORS = 16
"""Maximum number of other agents on the same host that an agent considers when it registers."""

OTHER_JOB = "another job was started with this id"

_NOBODY_LEFT = "; no agent of that job is there: if it is over, use a different id, or fresh=1"


# --- the job's record ---


def check_job(member: Member) -> None:
    keys = member.keys
    if member.joining.has_seen_round:
        known = [Get(keys.job), Get(keys.head)]
        member.txn(Purpose.FIND_JOB_AGAIN, [HasValue(keys.job, member.joining.job)], known)
        return
    member.joining.job = encode(job_record(member))
    put = Put(keys.job, member.joining.job, False)
    gets = [Get(keys.job), Get(keys.head), Range(keys.nodes, 1), Get(keys.bar(member.agent.node))]
    member.txn(Purpose.FIND_JOB, [Missing(keys.job)], [put], gets)


def job_record(member: Member) -> dict[str, Any]:
    agent, command = member.agent, member.rendezvous.command
    return {
        "uuid": f"{agent.agent}.{member.joining.incarnation}",
        "node": member.node().shown,
        **agreed(member),
        "role": agent.role,
        "nproc": agent.nproc,
        "host": agent.host,
        "is_hosted": agent.hosts_store,
        "command": None if command is None else command.fields(),
    }


def agreed(member: Member) -> dict[str, Any]:
    rendezvous, settings, policy = member.rendezvous, member.settings, member.agent.policy
    return {
        "protocol": PROTOCOL,
        "on_failure": "replace" if member.agent.keeps_workers else "restart",
        "backend": rendezvous.backend,
        "min_nodes": rendezvous.min_nodes,
        "max_nodes": rendezvous.max_nodes,
        "max_restarts": policy.max_restarts,
        "restart_window": None if policy.window is None else f"{policy.window:g}",
        "restart_delay": f"{policy.first_delay:g}..{policy.longest_delay:g}",
        "max_same_failures": policy.max_same_failures,
        "max_excluded_nodes": policy.max_excluded_nodes,
        "fatal_exit_codes": member.agent.fatal_exit_codes,
        "scale_up": settings.scale_up,
        "max_node_losses": settings.max_node_losses,
        "homogeneous": settings.homogeneous,
        "same_command": settings.same_command,
    }


def mismatch(member: Member, job: dict[str, Any]) -> str | None:
    ours = agreed(member)
    if member.settings.homogeneous and job.get("homogeneous"):
        ours.update(role=member.agent.role, nproc=member.agent.nproc)
    for name, value in ours.items():
        if job.get(name) != value:
            return (
                f"node {member.node().shown}: {name}={value},"
                f" but node {job.get('node')} started this job with {name}={job.get(name)}"
            )
    return other_command(member, job) if member.settings.same_command else None


def other_command(member: Member, job: dict[str, Any]) -> str | None:
    ours, theirs = member.rendezvous.command, job.get("command")
    if ours is None or theirs is None:
        return None
    found = difference(ours, theirs, is_same_host=job.get("host") == member.agent.host)
    if found is None:
        return None
    own, other = found
    return (
        f"node {member.node().shown}: {own}, but node {job.get('node')} started this job with {other};"
        f" {INDEPENDENT}, or, if the commands of one job differ on purpose, --rdzv-conf same_command=0 on all"
        " of its nodes"
    )


def _is_not_needed(member: Member, job: dict[str, Any]) -> str | None:
    """Return an error message if the job has one node, which hosts the store, so a spare node cannot help."""
    is_taken = member.rendezvous.needs_no_other_node and job.get("is_hosted") is True
    if not is_taken or member.agent.hosts_store:
        return None
    return (
        f"node {member.node().shown}: the job at {member.rendezvous.endpoint} has one node, which is"
        f" {job.get('node')}, so this node would never run it; {INDEPENDENT}"
    )


def job_found_again(member: Member, link: Link, reply: Reply) -> None:
    job, head = (reply.entry(0), reply.entry(1)) if reply.ok else (None, None)
    if job is None or head is None:
        text = "the store was restarted and no longer knows this job; start the job again"
        if member.rendezvous.etcd is not None:
            text = "the record of this job is gone (removed, or etcd was restored); start the job again"
        member.exit(Outcome("lost", f"{member.rendezvous.store}: {text}"))
        return
    member.joining.job_revision, link.has_job = job.create_revision, True
    if not _is_closed(member, head):
        register(member, link)


def job_found(member: Member, link: Link, reply: Reply) -> None:
    if reply.ok:
        member.joining.job_revision, link.has_job = reply.revision, True
        register(member, link)
        return
    job, head = reply.entry(0), reply.entry(1)
    assert job is not None
    value = job.value or b""
    difference = _difference(member, job.key, value, is_alone=not reply.results[2])
    if member.settings.fresh and not reply.results[2] and (head is not None or difference is not None):
        _forget_job(member, job, 0 if head is None else head.mod_revision)
        return
    member.joining.job, member.joining.job_revision, link.has_job = value, job.create_revision, True
    if difference is None and reply.entry(3) is not None:
        difference = f"node {member.agent.node} has left this job for good (elasticctl drain --stay-out)"
    if difference is not None:
        _refuse(member, difference, is_alone=not reply.results[2])
    elif not _is_closed(member, head):
        member.joining.found_round = 0 if head is None else Head.read(head).round
        register(member, link)


def _refuse(member: Member, why: str, *, is_alone: bool) -> None:
    member.joining.refusal = why
    if is_alone:
        leave_refused(member)
        return
    put = Put(member.keys.refusal, encode(cut(why, MAX_REFUSAL)), False)
    member.txn(Purpose.TELL_REFUSAL, [CreatedAt(member.keys.job, member.joining.job_revision)], [put])
    member.arm("refused", REFUSAL_TIMEOUT)


def leave_refused(member: Member) -> None:
    """Exit once the other nodes know that the job refused this agent, or after :data:`REFUSAL_TIMEOUT`."""
    if member.joining.refusal is not None:
        member.exit(Outcome("refused", member.joining.refusal))


def _difference(member: Member, key: str, value: bytes, *, is_alone: bool) -> str | None:
    try:
        job = job_of(value)
    except DamagedError as error:
        return f"{damage(key, error)}; use a different id for another job"
    found = mismatch(member, job)
    if found is None and not is_alone:
        return _is_not_needed(member, job)
    # If no agent of the job is registered, all its agents may have been killed before they could close it.
    return f"{found}{_NOBODY_LEFT}" if found is not None and is_alone else found


def _forget_job(member: Member, job: Entry, head_revision: int) -> None:
    """Delete an earlier job of this name. Agents that have registered meanwhile notice it and join again."""
    keys = member.keys
    compares = [CreatedAt(keys.job, job.create_revision), ModifiedAt(keys.head, head_revision)]
    member.txn(Purpose.FORGET_JOB, compares, [DeletePrefix(keys.prefix)])


def _is_closed(member: Member, entry: Entry | None) -> bool:
    if entry is None:
        return False
    head = Head.read(entry)
    if head.state != "CLOSED":
        return False
    if member.joining.has_seen_round:
        member.exit(outcome_of(member, head))
    else:
        has_failed = head.outcome not in {"succeeded", "aborted"}
        member.exit(Outcome("closed", closed_line(member.agent.job, head), head.cause, has_failed))
    return True


# --- the registration ---


def register(member: Member, link: Link) -> None:
    if member.listener.port is None:
        return
    keys, joining = member.keys, member.joining
    incarnation = joining.incarnation
    joining.incarnation += 1
    link.member = f"{member.agent.agent}/{incarnation}"
    own = keys.node(link.member)
    ops = earlier_registrations(member, incarnation)
    neighbors = keys.host(member.agent.host)
    launch = Put(neighbors + member.agent.agent, encode(cut(member.agent.launch, MAX_NAME)), True)
    ops += [launch, Put(own, member.node().encode(), True), Get(own), Predecessor(keys.nodes, own)]
    compares: list[Compare] = [CreatedAt(keys.job, member.joining.job_revision)]
    otherwise: list[Operation] = []
    node_rank = member.rendezvous.node_rank
    if node_rank is not None:
        is_mine, claim = claim_rank(member, link, node_rank)
        compares.append(is_mine)
        # Insert the claim of the node rank at the front: the reply's handler reads the last two results.
        ops.insert(0, claim)
        otherwise = [Get(keys.job), Get(claim.key), Get(own)]
    ops.insert(0, Range(neighbors, MAX_NEIGHBORS))
    member.txn(Purpose.REGISTER, compares, ops, otherwise)
    member.watch(Purpose.SEE_SLOT, keys.slot(link.member))
    member.watch(Purpose.SEE_HEAD, keys.head)
    member.watch(Purpose.SEE_JOB, keys.job)


def earlier_registrations(member: Member, incarnation: int) -> list[Operation]:
    """Return operations to delete this agent's earlier registrations, and those of a process it replaces."""
    earlier = range(max(1, incarnation - FORGET_EARLIER), incarnation)
    names = [f"{member.agent.agent}/{each}" for each in earlier]
    kinds = (member.keys.node, member.keys.slot)
    replaces = member.rendezvous.replaces
    gone = [] if replaces is None else member.keys.forget_process(replaces)
    return [*gone, *(Delete(key(name)) for name in names for key in kinds)]


def look_for_twin(member: Member, reply: Reply) -> None:
    """Check whether a separately started launcher on this host also takes part in the job, because the user
    may want two independent jobs. Tell the user only if the job is already running. Before its first round,
    the other launcher may be meant as another node of this job.
    """
    neighbors = reply.results[0]
    if member.joining.was_registered or not isinstance(neighbors, Sequence):
        return
    launches = [_launch_of(entry) for entry in neighbors]
    member.joining.has_twin = any(each not in (None, member.agent.launch) for each in launches)
    number = member.joining.found_round
    if member.joining.has_twin and number:
        member.do(Announce(f"this node joins job {member.agent.job}, which already runs (round {number})"))
        member.do(Announce(TWIN))


def _launch_of(entry: Entry) -> str | None:
    try:
        return text_of(entry.value)
    except DamagedError:
        return None  # The record does not show to which launch the agent belongs.


def registered(member: Member, link: Link, own: Entry | None) -> None:
    """Handle a confirmed registration. Take its revision from the key ``own``: if the transaction (T1) was
    sent twice, the reply may have a later revision.
    """
    assert own is not None
    joining = member.joining
    joining.claim, joining.rank_holder, joining.told_of_port = None, None, False
    joining.was_registered, joining.trouble = True, None
    link.create_revision = own.create_revision
    for timer in ("connect", "connect_news", "store_lost", "rank"):
        member.disarm(timer)
    member.arm("give_up", member.patience)


def refused(member: Member, link: Link, reply: Reply) -> bool:
    """Handle a rejected registration (T1). Return true if T1 was executed earlier, but its reply was lost."""
    job = reply.entry(0) if reply.results else None
    if job is None or job.create_revision != member.joining.job_revision:
        fence(member, OTHER_JOB)
        return False
    own = own_registration(reply)
    if own is not None:
        registered(member, link, own)
        return True
    rank_refused(member, reply.entry(1))
    retry(member)
    return False


def own_registration(reply: Reply) -> Entry | None:
    return reply.entry(2)


def job_seen(member: Member, entry: Entry | None) -> None:
    if entry is None or entry.value is None:
        fence(member, "the record of this job was removed")
    elif entry.create_revision != member.joining.job_revision:
        fence(member, OTHER_JOB)


FIRST_DELAY = 0.02
LONGEST_DELAY = 0.5
"""Minimum (constant above) and maximum seconds between two attempts to connect."""

FIRST_NEWS = 5.0
"""Seconds without a connection after which the reason is reported to the user."""

OTHER = "other"
"""Kind of connection loss: the store was replaced by one without data, or with another copy of the data."""

FINAL = frozenset({"version", "token", "not_ours", "run", "cannot_host", "tls", "denied", OTHER})
"""Kinds of connection loss that retrying cannot resolve."""


def begin(member: Member) -> None:
    if member.phase is not Phase.NEW:
        return
    member.joining.begun = member.now
    member.arm("connect", member.settings.join_timeout)
    member.arm("connect_news", FIRST_NEWS)
    if member.listener.port is None:
        member.do(BindStore())
    retry(member)


def retry(member: Member) -> None:
    joining = member.joining
    if joining.delay:
        member.arm("reconnect", joining.delay)
    else:
        member.do(Connect(joining.incarnation))
    joining.delay = min(max(FIRST_DELAY, joining.delay * 2), LONGEST_DELAY)


def reconnect(member: Member) -> None:
    if member.phase is Phase.CONNECTING and member.link is None:
        member.do(Connect(member.joining.incarnation))


def connection_lost(member: Member, event: ConnectionLost) -> None:
    if member.phase in (Phase.NEW, Phase.FENCED):
        return
    if member.joining.refusal is not None:
        member.exit(Outcome("refused", member.joining.refusal))
        return
    is_final = event.kind in FINAL and not may_be_lent(member, event.kind)
    if is_final and not member.joining.was_registered:
        member.link = None
        member.exit(Outcome("refused", event.message))
        return
    if event.kind == OTHER and member.leaving is None:
        # Leave the job. A store without the job's data would count rounds and restarts from zero again, but
        # users' scripts rely on increasing numbers to detect outdated processes.
        _give_up(member, Outcome("lost", event.message))
        if member.has_exited:
            return
    lose(member, why_lost(member, event))


def fence(member: Member, why: str) -> None:
    member.do(Disconnect())
    lose(member, why)


def lose(member: Member, why: str) -> None:
    """Fence this agent after a lost connection: all its workers must exit before it registers again."""
    was_registered = member.registered is not None
    if was_registered:
        member.arm("store_lost", member.rendezvous.store_lost_timeout)
        member.disarm("give_up")
        member.disarm("barrier")
    member.forget_connection()
    member.joining.trouble = why
    member.listener.idle_after = None
    text = f"lost {member.rendezvous.store}: {why}"
    if may_rejoin(member):
        if was_registered and member.leaving is None:
            member.do(Announce(f"{text}; trying to join again"))
        without_workers(member)
    else:
        member.stop(text, fenced=True)


def may_rejoin(member: Member) -> bool:
    return member.workers is None


def without_workers(member: Member) -> None:
    if member.leaving is not None:
        member.exit(member.leaving.outcome or Outcome("aborted", member.leaving.closing))
        return
    fresh_listener(member)
    retry(member)


def fresh_listener(member: Member) -> bool:
    """Replace the workers' store listener if a round has used it. Return true if an unused one is ready."""
    listener = member.listener
    if not listener.has_served:
        return listener.port is not None
    listener.has_served = False
    member.do(CloseStore())
    if member.rendezvous.master_port is None:
        listener.port = None
        member.do(BindStore())
    return listener.port is not None


# --- timeouts ---


def store_lost(member: Member) -> None:
    if member.registered is not None:
        return
    where = f"lost {member.rendezvous.store} in round {member.age.seen}"
    seconds, why = member.rendezvous.store_lost_timeout, member.joining.trouble
    todo = (
        "start the job again; it outlives the loss of any node with --rdzv-backend etcd, or with a store on a"
        " machine of its own (python -m elasticrs.store --state FILE)"
    )
    if member.rendezvous.etcd is not None:
        todo = "start the job again when etcd answers; most of its members must be up"
    text = f"{where} and could not reach it again within {seconds:g} s ({why}); {todo}"
    _give_up(member, Outcome("lost", text))


def connect_timeout(member: Member) -> None:
    joining = member.joining
    if joining.was_registered:
        return
    why = f": {joining.trouble}" if joining.trouble else ""
    within = f"within {member.settings.join_timeout:g} s{why}"
    _give_up(
        member, Outcome("timeout", f"could not join the rendezvous at {member.rendezvous.endpoint} {within}")
    )


def _give_up(member: Member, outcome: Outcome) -> None:
    if member.workers is None:
        member.exit(outcome)
    else:
        member.set_outcome(outcome)


def connect_news(member: Member) -> None:
    joining, seconds = member.joining, member.settings.join_timeout
    if joining.was_registered or member.phase is not Phase.CONNECTING or joining.trouble is None:
        return
    begun = joining.begun or 0
    since = f"cannot reach {member.rendezvous.store} since {local_time(begun)}"
    limit = f"trying until {local_time(begun + int(seconds * 1e9))} (join_timeout={seconds:g})"
    member.do(Announce(f"{since}; {limit}: {joining.trouble}"))


def claim_rank(member: Member, link: Link, node_rank: int) -> tuple[Compare, Put]:
    key, earlier = member.keys.rank(node_rank), member.joining.claim
    value = encode([member.agent.agent, link.member, member.node().shown])
    return Missing(key) if earlier is None else HasValue(key, earlier), Put(key, value, True)


def rank_refused(member: Member, entry: Entry | None) -> None:
    """Connect again, because the node rank is taken. ``entry`` is its key; ``None`` if it is free by now."""
    joining = member.joining
    joining.claim = None
    if entry is not None:
        agent, shown = _holder(entry)
        if agent == member.agent.agent:
            joining.claim = entry.value
        else:
            if joining.rank_holder is None:
                member.arm("rank", member.settings.rank_timeout + member.more_lease)
            joining.rank_holder = shown
    member.do(Disconnect())
    member.forget_connection()


def _holder(entry: Entry) -> tuple[str | None, str]:
    """Return the agent that holds a node rank (``None`` if unknown), and its description for the user."""
    try:
        return holder_of(entry.value or b"")
    except DamagedError as error:
        # The record is unreadable, so treat the rank as taken: the agent that holds it may still be alive.
        return None, f"one that is not known ({damage(entry.key, error)})"


def rank_timeout(member: Member) -> None:
    holder = member.joining.rank_holder
    if holder is None or member.registered is not None:
        return
    rendezvous = member.rendezvous
    text = (
        f"node rank {rendezvous.node_rank} was given to two nodes, {holder} and {member.node().shown}: give "
        f"each node its own --node-rank, from 0 to {rendezvous.max_nodes - 1}"
    )
    member.exit(Outcome("refused", text))


# --- the port ---


def may_be_lent(member: Member, kind: str) -> bool:
    """Return true if another program at the store's port may be a worker: ``static`` lends it to workers."""
    return kind == "not_ours" and member.rendezvous.is_static


def why_lost(member: Member, event: ConnectionLost) -> str:
    """Return why the connection was lost. Tell the user once if another program uses the store's port."""
    message = event.message
    if not may_be_lent(member, event.kind):
        return message
    if not member.joining.told_of_port:
        member.joining.told_of_port = True
        member.do(Announce(f"{message}; trying again: a running round of this job may be using the port"))
    return f"{message}; an earlier round of this job may still be using it"


# --- leaving ---

MAX_REASON = 256


def leave(member: Member, event: Leave) -> None:
    reason = cut(event.reason, MAX_REASON)
    if event.close:
        _close_job(member, reason)
    elif member.leaving is None:
        leave_with(member, Outcome("left", reason))


def leave_with(member: Member, outcome: Outcome) -> None:
    member.set_outcome(outcome)
    link = member.registered
    if link is None:
        if member.workers is None:
            member.exit(outcome)
        return
    member.arm("leave", member.settings.close_timeout)
    reason = outcome.message or outcome.kind
    if member.workers is not None and member.runs(member.workers.round):
        # End the round before the workers have stopped, so that the other nodes can react immediately.
        farewell = _farewell(member, link, reason)
        member.end_round(Purpose.END_ROUND, {"kind": "left", "message": reason}, None, farewell)
    else:
        _say_farewell(member, link, reason)
    member.stop("this node leaves the job", planned=True, node_leaves=True)


def round_ended(member: Member, link: Link, reply: Reply) -> None:
    """Handle the reply to this agent's request that ends the round and announces that the agent leaves."""
    outcome = None if member.leaving is None else member.leaving.outcome
    if reply.ok:
        farewell_known(member)
    elif outcome is not None:
        # Record only this agent's departure, because another node has already ended the round.
        _say_farewell(member, link, outcome.message or "")


def _say_farewell(member: Member, link: Link, reason: str) -> None:
    farewell = _farewell(member, link, reason)
    member.txn(Purpose.SAY_FAREWELL, [member.exists(link)], [farewell])


def _farewell(member: Member, link: Link, reason: str) -> Put:
    return Put(member.keys.farewell(link.member), encode(reason), False)


def farewell_known(member: Member) -> None:
    if member.leaving is not None:
        member.leaving.is_known = True
    go_on(member)


def go_on(member: Member) -> None:
    """Exit if no workers are left, and the store has confirmed the farewell or exceeded its time limit."""
    leaving = member.leaving
    if member.workers is not None or leaving is None:
        return
    if leaving.closing is not None and leaving.is_overdue:
        member.exit(Outcome("aborted", leaving.closing))
    elif leaving.outcome is not None and (leaving.is_known or leaving.is_overdue):
        member.exit(leaving.outcome)


def leave_timeout(member: Member) -> None:
    if member.leaving is not None:
        member.leaving.is_overdue = True
    go_on(member)


# --- closing the job (transaction T10) ---


def _close_job(member: Member, reason: str) -> None:
    leaving = member.leaving = member.leaving or Leaving()
    if leaving.closing is not None:
        return
    if leaving.outcome is not None and leaving.outcome.kind == "left":
        # This node has written that it leaves. It must not exit as soon as the store has recorded that,
        # because the store may reject the first attempt to close the job.
        leaving.outcome, leaving.is_overdue = None, False
    leaving.closing = reason
    member.arm("leave", member.settings.close_timeout)
    if member.link is not None:
        abort(member, member.link)
    elif member.workers is None:
        member.exit(Outcome("aborted", reason))
        return
    if member.phase is not Phase.FENCED:
        member.stop("the job ends", asked=True)


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
    """Return the entry of the head (job state) if the job is closed. Otherwise, ask again to close it."""
    entry = reply.entry(-1)
    head = None if entry is None else Head.read(entry)
    if reply.ok or (head is not None and head.state == "CLOSED"):
        return entry
    _abort_from(member, head, 0 if entry is None else entry.mod_revision)
    return None


# --- a closed job ---


def _unused(member: Member) -> Outcome:
    """Return the outcome for a node that the job did not need in order to succeed, usually a spare. It is a
    failure if the user has probably started two jobs that share a rendezvous: this node's job has not run.
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
    end = head.end or {}
    is_explained = end.get("kind") in ("lost", "failure") and not end.get("charged")
    return Outcome("failed", head.reason, head.cause, is_permanent=head.permanent, is_explained=is_explained)
