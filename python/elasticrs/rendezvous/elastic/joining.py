"""From a connection to a registration.

- **JOIN-1** an agent registers only when it has no workers; each registration has a new incarnation.
- **JOIN-2** what is left of its earlier registrations is deleted with the new one, by name: a late request
  of an earlier connection can never delete a later registration.
- **JOIN-3** settings that decide what a leader does are the same on all nodes of a job.
"""

from __future__ import annotations

from elasticrs.rendezvous.elastic import static_ranks
from elasticrs.rendezvous.elastic.announcements import closed_line
from elasticrs.rendezvous.elastic.connecting import fence, retry
from elasticrs.rendezvous.elastic.leaving import outcome_of
from elasticrs.rendezvous.elastic.member import Purpose, Registration
from elasticrs.rendezvous.elastic.messages import Outcome
from elasticrs.rendezvous.elastic.records import PROTOCOL, Head, damage, encode, job_of
from elasticrs.rendezvous.elastic.validation import DamagedError
from elasticrs.store.coordination import (
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

    from elasticrs.rendezvous.elastic.member import Link, Member
    from elasticrs.store.coordination import Compare, Entry, Operation, Reply

FORGET_EARLIER = 60
"""How many of its earlier registrations an agent deletes; a late request comes within seconds."""

OTHER_JOB = "another job was started with this id"

_NOBODY_LEFT = "; no agent of that job is there: if it is over, use a different id, or fresh=1"


# --- the job's record ---


def check_job(member: Member) -> None:
    """Read the job's record, or write it."""
    keys = member.keys
    if member.joining.has_seen_round:
        known = [Get(keys.job), Get(keys.head)]
        member.txn(Purpose.FIND_JOB_AGAIN, [HasValue(keys.job, member.joining.job)], known)
        return
    put = _put_job(member)
    gets = [Get(keys.job), Get(keys.head), Range(keys.nodes, 1)]
    member.txn(Purpose.FIND_JOB, [Missing(keys.job)], [put], gets)


def _put_job(member: Member) -> Put:
    member.joining.job = encode(job_record(member))
    return Put(member.keys.job, member.joining.job, False)


def job_record(member: Member) -> dict[str, Any]:
    """Return what is the same for all nodes of a job."""
    agent = member.agent
    return {
        "uuid": f"{agent.agent}.{member.joining.incarnation}",
        "node": member.node().shown,
        **agreed(member),
        "role": agent.role,
        "nproc": agent.nproc,
    }


def agreed(member: Member) -> dict[str, Any]:
    """Return the settings that must be equal on all nodes."""
    rendezvous, settings = member.rendezvous, member.settings
    return {
        "protocol": PROTOCOL,
        "on_failure": "replace" if member.agent.keeps_workers else "restart",
        "backend": rendezvous.backend,
        "min_nodes": rendezvous.min_nodes,
        "max_nodes": rendezvous.max_nodes,
        "max_restarts": member.agent.max_restarts,
        "scale_up": settings.scale_up,
        "max_node_losses": settings.max_node_losses,
        "homogeneous": settings.homogeneous,
    }


def mismatch(member: Member, job: dict[str, Any]) -> str | None:
    """Say what differs from the job that another node started, by its record; ``None`` if nothing important
    does.
    """
    ours = agreed(member)
    if member.settings.homogeneous and job.get("homogeneous"):
        ours.update(role=member.agent.role, nproc=member.agent.nproc)
    for name, value in ours.items():
        if job.get(name) != value:
            return (
                f"node {member.node().shown}: {name}={value},"
                f" but node {job.get('node')} started this job with {name}={job.get(name)}"
            )
    return None


def job_found_again(member: Member, link: Link, reply: Reply) -> None:
    """Go on in the job that this agent took part in, if the store still knows it."""
    job, head = (reply.entry(0), reply.entry(1)) if reply.ok else (None, None)
    if job is None or head is None:
        text = "the store was restarted and no longer knows this job; start the job again"
        if member.rendezvous.etcd is not None:
            text = "the record of this job is gone (removed, or etcd was restored); start the job again"
        member.exit(Outcome("lost", f"{member.rendezvous.store}: {text}"))
        return
    link.job_revision = member.joining.job_revision = job.create_revision
    if not _is_closed(member, head):
        register(member, link)


def job_found(member: Member, link: Link, reply: Reply) -> None:
    """Take part in the job that is there, if it is ours and goes on."""
    if reply.ok:
        link.job_revision = member.joining.job_revision = reply.revision
        register(member, link)
        return
    job, head = reply.entry(0), reply.entry(1)
    assert job is not None
    value = job.value or b""
    difference = _difference(member, job.key, value, is_alone=not reply.results[2])
    if member.settings.fresh and not reply.results[2] and (head is not None or difference is not None):
        _forget_job(member, job, 0 if head is None else head.mod_revision)
        return
    member.joining.job, link.job_revision = value, job.create_revision
    member.joining.job_revision = link.job_revision
    if difference is not None:
        member.exit(Outcome("refused", difference))
    elif not _is_closed(member, head):
        register(member, link)


def _difference(member: Member, key: str, value: bytes, *, is_alone: bool) -> str | None:
    try:
        found = mismatch(member, job_of(value))
    except DamagedError as error:
        return f"{damage(key, error)}; use a different id for another job"
    # A job may be over that was not closed: all its agents were stopped, or have died.
    return f"{found}{_NOBODY_LEFT}" if found is not None and is_alone else found


def _forget_job(member: Member, job: Entry, head_revision: int) -> None:
    """Forget an earlier job of this name, then look again: somebody else may begin it first. Who registered
    meanwhile sees that, and comes again.
    """
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
    """T1: this registration in place of all earlier ones of this agent, and the watches of a member."""
    if member.listener.port is None:
        return
    keys, joining = member.keys, member.joining
    incarnation = joining.incarnation
    joining.incarnation += 1
    link.registration = registration = Registration(f"{member.agent.agent}/{incarnation}")
    own = keys.node(registration.member)
    ops = earlier_registrations(member, incarnation)
    ops += [Put(own, member.node().encode(), True), Get(own), Predecessor(keys.nodes, own)]
    compares: list[Compare] = [CreatedAt(keys.job, link.job_revision)]
    otherwise: list[Operation] = []
    node_rank = member.rendezvous.node_rank
    if node_rank is not None:
        is_mine, claim = static_ranks.claim(member, registration, node_rank)
        compares.append(is_mine)
        # The last results are the registration and its predecessor.
        ops.insert(0, claim)
        otherwise = [Get(keys.job), Get(claim.key), Get(own)]
    member.txn(Purpose.REGISTER, compares, ops, otherwise)
    member.watch(Purpose.SEE_SLOT, keys.slot(registration.member))
    member.watch(Purpose.SEE_HEAD, keys.head)
    member.watch(Purpose.SEE_JOB, keys.job)


def earlier_registrations(member: Member, incarnation: int) -> list[Operation]:
    """Return deletions of what a lost connection may have left, or a process that this one replaces; its
    lease would end later.
    """
    earlier = range(max(1, incarnation - FORGET_EARLIER), incarnation)
    names = [f"{member.agent.agent}/{each}" for each in earlier]
    kinds = (member.keys.node, member.keys.slot)
    replaces = member.rendezvous.replaces
    gone = [] if replaces is None else member.keys.forget_members(f"{replaces}.")
    return [*gone, *(Delete(key(name)) for name in names for key in kinds)]


def registered(member: Member, registration: Registration, own: Entry | None) -> None:
    """The registration is confirmed: T1 may have been carried out more than once, with the last put here."""
    assert own is not None
    static_ranks.registered(member)
    registration.create_revision = own.create_revision
    member.joining.was_registered = True
    member.joining.trouble = None
    for timer in ("connect", "connect_news", "store_lost"):
        member.disarm(timer)
    member.arm("give_up", member.settings.patience)


def refused(member: Member, link: Link, registration: Registration, reply: Reply) -> bool:
    """T1 was refused: the job is another one, or somebody has the node rank. Return true if that is this very
    registration: T1 was carried out before, and the answer lost with a connection.
    """
    job = reply.entry(0) if reply.results else None
    if job is None or job.create_revision != link.job_revision:
        fence(member, OTHER_JOB)
        return False
    own = own_registration(reply)
    if own is not None:
        registered(member, registration, own)
        return True
    static_ranks.refused(member, reply.entry(1))
    retry(member)
    return False


def own_registration(reply: Reply) -> Entry | None:
    """Return the registration that a refused T1 has made before, if it has."""
    return reply.entry(2)


def job_seen(member: Member, link: Link, entry: Entry | None) -> None:
    """The job's record: is it still the one that was checked?"""
    if entry is None or entry.value is None:
        fence(member, "the record of this job was removed")
    elif entry.create_revision != link.job_revision:
        fence(member, OTHER_JOB)
