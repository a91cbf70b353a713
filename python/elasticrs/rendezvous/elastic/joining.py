"""From no connection to a registration, and back again.

- **JOIN-1** an agent registers only when it has no workers; each registration has a new incarnation.
- **JOIN-2** what is left of its earlier registrations is deleted with the new one, by name: a late request
  of an earlier connection can never delete a later registration.
- **JOIN-3** settings that decide what a leader does are the same on all nodes of a job.
"""

from __future__ import annotations

from functools import partial

from elasticrs.rendezvous.elastic import by_hand, oversight, rounds
from elasticrs.rendezvous.elastic.checked import DamagedError
from elasticrs.rendezvous.elastic.keys import is_member
from elasticrs.rendezvous.elastic.messages import (
    Announce,
    BindStore,
    CloseStore,
    Connect,
    Outcome,
    Unwatch,
    Watch,
)
from elasticrs.rendezvous.elastic.records import PROTOCOL, Head, damage, encode, job_of
from elasticrs.rendezvous.elastic.state import Phase
from elasticrs.rendezvous.elastic.texts import closed_line, utc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elasticrs.rendezvous.elastic.member_settings import MemberSettings
    from elasticrs.rendezvous.elastic.state import Member

FIRST_DELAY = 0.02
LONGEST_DELAY = 0.5
"""Seconds between attempts to connect."""

FIRST_NEWS = 5.0
"""Seconds without a connection before the user is told why."""

FINAL = frozenset({"version", "token", "not_ours", "run", "cannot_host"})
"""Losses of a connection that no waiting cures."""

FORGET_EARLIER = 64
"""How many of its earlier registrations an agent deletes; a late request comes within seconds."""


def begin(member: Member) -> None:
    """Begin to join."""
    if member.phase is not Phase.NEW:
        return
    member.begun = member.now
    member.arm("connect", member.settings.join_timeout)
    member.arm("connect_news", FIRST_NEWS)
    if member.port is None:
        member.do(BindStore())
    retry(member)


# --- connections ---


def retry(member: Member) -> None:
    """Connect, after a while if that has failed before."""
    member.phase = Phase.CONNECTING
    if member.delay:
        member.arm("reconnect", member.delay)
    else:
        member.do(Connect(member.incarnation))
    member.delay = min(max(FIRST_DELAY, member.delay * 2), LONGEST_DELAY)


def connection_lost(member: Member, event: Any) -> None:
    """Connecting failed, or the connection is lost."""
    if member.phase in (Phase.NEW, Phase.EXIT, Phase.FENCED):
        return
    is_final = event.kind in FINAL and not by_hand.may_be_lent(member, event.kind)
    if is_final and not member.was_registered:
        member.connected = False
        member.exit(Outcome("refused", event.message))
        return
    lose(member, by_hand.why_lost(member, event))


def lose(member: Member, why: str) -> None:
    """Fence an agent that lost its connection: its workers must be gone before it registers again."""
    was_registered = member.registered
    if was_registered:
        member.arm("store_lost", member.settings.store_lost_timeout)
        member.disarm("give_up")
        member.disarm("barrier")
    member.forget_connection()
    member.lost = why
    member.idle_after_port = None
    text = f"lost the rendezvous store {member.settings.endpoint}: {why}"
    if may_rejoin(member):
        if was_registered and not rounds.is_leaving(member):
            member.do(Announce(f"{text}; trying to join again"))
        without_workers(member)
    else:
        member.phase = Phase.FENCED
        member.stop(text, fenced=True)


def may_rejoin(member: Member) -> bool:
    """True if nothing of a round is left here."""
    return member.held is None


def without_workers(member: Member) -> None:
    """A fenced agent has no workers any more."""
    if member.outcome is not None or member.closing is not None:
        member.exit(member.outcome or Outcome("aborted", member.closing))
        return
    fresh_listener(member)
    retry(member)


def fresh_listener(member: Member) -> bool:
    """Replace a listener that has served a round; returns whether there is one to announce."""
    if not member.port_used:
        return member.port is not None
    member.port_used = False
    member.do(CloseStore())
    if member.settings.master_port is None:
        member.port = None
        member.do(BindStore())
    return member.port is not None


def reconnect(member: Member) -> None:
    """The time between two attempts has passed."""
    if member.phase is Phase.CONNECTING and not member.connected:
        member.do(Connect(member.incarnation))


def store_lost(member: Member) -> None:
    """The store could not be reached again in time."""
    if member.registered or member.phase is Phase.EXIT:
        return
    settings = member.settings
    where = f"lost the rendezvous store {settings.endpoint} in round {member.seen_round}"
    todo = "start the job again, or put its store on a node that stays: python -m elasticrs.store"
    _give_up(
        member,
        Outcome(
            "lost",
            f"{where} and could not reach it again within {settings.store_lost_timeout:g} s"
            f" ({member.lost}); {todo}",
        ),
    )


def connect_timeout(member: Member) -> None:
    """The first registration has taken too long."""
    if member.registered or member.was_registered or member.phase is Phase.EXIT:
        return
    settings = member.settings
    why = f": {member.lost}" if member.lost else ""
    text = f"could not join the rendezvous at {settings.endpoint} within {settings.join_timeout:g} s{why}"
    _give_up(member, Outcome("timeout", text))


def connect_news(member: Member) -> None:
    """Tell the user why nothing happens."""
    if member.was_registered or member.phase is not Phase.CONNECTING or member.lost is None:
        return
    settings = member.settings
    until = utc(member.begun + int(settings.join_timeout * 1e9))
    text = f"cannot reach the rendezvous store {settings.endpoint} since {utc(member.begun)}"
    limit = f"trying until {until} (join_timeout={settings.join_timeout:g})"
    member.do(Announce(f"{text}; {limit}: {member.lost}"))


def _give_up(member: Member, outcome: Outcome) -> None:
    if member.held is None:
        member.exit(outcome)
    else:
        member.outcome = outcome


def store_hosted(member: Member, event: Any) -> None:
    """The store is here after all, before anybody was connected to it."""
    member.settings = member.settings.replaced(hosts_store=True, fallback_addr=event.fallback_addr)


# --- the job's record ---


def connected(member: Member, event: Any) -> None:
    """Connected: check that the job is ours."""
    if member.phase is not Phase.CONNECTING or member.connected:
        return
    member.connected = True
    member.address = event.local_address
    if member.closing is not None:
        from elasticrs.rendezvous.elastic import leaving

        leaving.abort(member)
        return
    check_job(member)


def check_job(member: Member) -> None:
    """Read the job's record, or write it."""
    keys = member.keys
    if member.has_seen_round:
        known = [("get", keys.job), ("get", keys.head)]
        member.txn([("value", keys.job, member.job)], known, _same_job)
        return
    member.job = encode(job_record(member))
    put = ("put", keys.job, member.job, False)
    gets: list[tuple[Any, ...]] = [("get", keys.job), ("get", keys.head), ("range", keys.nodes, 1)]
    member.txn([("missing", keys.job)], [put], _job_known, gets)


def job_record(member: Member) -> dict[str, Any]:
    """Return what is the same for all nodes of a job."""
    settings = member.settings
    return {
        "uuid": f"{settings.agent}.{member.incarnation}",
        "node": member.node().shown,
        **agreed(settings),
        "role": settings.role,
        "nproc": settings.nproc,
    }


def agreed(settings: MemberSettings) -> dict[str, Any]:
    """Return the settings that must be equal on all nodes."""
    return {
        "protocol": PROTOCOL,
        "backend": settings.backend,
        "min_nodes": settings.min_nodes,
        "max_nodes": settings.max_nodes,
        "max_restarts": settings.max_restarts,
        "scale_up": settings.scale_up,
        "max_node_losses": settings.max_node_losses,
        "homogeneous": settings.homogeneous,
    }


def mismatch(settings: MemberSettings, shown: str, job: dict[str, Any]) -> str | None:
    """Say what differs from the job that another node started; ``None`` if nothing important does.

    Args:
        settings: of this node.
        shown: its name and address, for the user.
        job: the record of the job.
    """
    ours = agreed(settings)
    if settings.homogeneous and job.get("homogeneous"):
        ours.update(role=settings.role, nproc=settings.nproc)
    for name, value in ours.items():
        if job.get(name) != value:
            return (
                f"node {shown}: {name}={value},"
                f" but node {job.get('node')} started this job with {name}={job.get(name)}"
            )
    return None


def _same_job(member: Member, reply: Any) -> None:
    if not reply.ok:
        text = "the store was restarted and no longer knows this job; start the job again"
        member.exit(Outcome("lost", f"rendezvous store {member.settings.endpoint}: {text}"))
        return
    member.job_revision = reply.results[0].create_revision
    if not _is_closed(member, reply.results[1]):
        register(member)


def _job_known(member: Member, reply: Any) -> None:
    if reply.ok:
        member.job_revision = reply.revision
        register(member)
        return
    job, head, nodes = reply.results
    difference = _difference(member, job)
    if member.settings.fresh and not nodes and (head is not None or difference is not None):
        _start_anew(member, job, 0 if head is None else head.mod_revision)
        return
    member.job, member.job_revision = job.value, job.create_revision
    if difference is not None:
        member.exit(Outcome("refused", difference))
    elif not _is_closed(member, head):
        register(member)


def _difference(member: Member, job: Any) -> str | None:
    try:
        return mismatch(member.settings, member.node().shown, job_of(job.value))
    except DamagedError as error:
        return f"{damage(job.key, error)}; use a different id for another job"


def _start_anew(member: Member, job: Any, head_revision: int) -> None:
    """Forget an earlier job of this name; who registered meanwhile sees that, and comes again."""
    keys = member.keys
    compares = [("create", keys.job, job.create_revision), ("mod", keys.head, head_revision)]
    put = ("put", keys.job, encode(job_record(member)), False)
    member.txn(compares, [("delete_prefix", keys.prefix), put], _started_anew)


def _started_anew(member: Member, reply: Any) -> None:
    if not reply.ok:
        check_job(member)
        return
    member.job_revision = reply.revision
    register(member)


def _is_closed(member: Member, entry: Any) -> bool:
    if entry is None:
        return False
    head = Head.read(entry)
    if head.state != "CLOSED":
        return False
    if member.has_seen_round:
        member.exit(rounds.outcome_of(member, head))
    else:
        member.exit(Outcome("closed", closed_line(member.settings.run_id, head), head.cause))
    return True


# --- the registration ---


def store_port(member: Member, event: Any) -> None:
    """A listener is bound: it can be announced."""
    if member.phase is Phase.EXIT or member.settings.master_port is not None:
        return
    member.port, member.port_used = event.port, False
    if member.job_revision and not member.member:
        register(member)
    elif member.idle_after_port is not None:
        number, member.idle_after_port = member.idle_after_port, None
        rounds.say_idle(member, number)


def register(member: Member) -> None:
    """T1: this registration in place of all earlier ones of this agent, and the watches of a member."""
    if member.port is None:
        member.member = ""
        return
    keys, agent, incarnation = member.keys, member.settings.agent, member.incarnation
    member.member, member.incarnation = f"{agent}/{incarnation}", incarnation + 1
    member.idle, member.slot = 0, None
    own = keys.node(member.member)
    ops = earlier_registrations(member, incarnation)
    ops += [("put", own, member.node().encode(), True), ("predecessor", keys.nodes, own)]
    compares: list[tuple[Any, ...]] = [("create", keys.job, member.job_revision)]
    otherwise: list[tuple[Any, ...]] = []
    if member.settings.node_rank is not None:
        claim = by_hand.claim(member, member.settings.node_rank)
        compares.append(claim.compare)
        # The last result is the predecessor.
        ops.insert(0, claim.put)
        otherwise = [("get", keys.job), claim.get]
    member.txn(compares, ops, _registered, otherwise)
    member.do(Watch(member.ask(_slot_seen), keys.slot(member.member), exact=True, snapshot=True))
    member.do(Watch(member.ask(_head_seen), keys.head, exact=True, snapshot=True))
    member.do(Watch(member.ask(_job_seen), keys.job, exact=True, snapshot=True))


def earlier_registrations(member: Member, incarnation: int) -> list[tuple[Any, ...]]:
    """Return deletions of what a lost connection may have left; its lease would end later."""
    earlier = range(max(1, incarnation - FORGET_EARLIER), incarnation)
    names = [f"{member.settings.agent}/{each}" for each in earlier]
    return [("delete", key(name)) for name in names for key in (member.keys.node, member.keys.slot)]


def _registered(member: Member, reply: Any) -> None:
    if not reply.ok:
        job = reply.results[0] if reply.results else None
        if job is not None and job.create_revision == member.job_revision:
            by_hand.refused(member, reply.results[1])
            retry(member)
        else:
            member.fence("another job was started with this id")
        return
    by_hand.registered(member)
    member.registered = member.was_registered = True
    member.create_revision = reply.revision
    member.lost = None
    member.phase = Phase.IDLE
    for timer in ("connect", "connect_news", "store_lost"):
        member.disarm(timer)
    member.arm("give_up", member.settings.patience)
    follow(member, reply.results[-1])
    rounds.look(member)


def _slot_seen(member: Member, reply: Any) -> None:
    for entry in reply.results:
        rounds.take_slot(member, entry)


def _head_seen(member: Member, reply: Any) -> None:
    for entry in reply.results:
        rounds.take_head(member, entry)


def _job_seen(member: Member, reply: Any) -> None:
    if not reply.results:
        member.fence("another job was started with this id")
    for entry in reply.results:
        job_changed(member, entry)


def job_changed(member: Member, entry: Any) -> None:
    """The job's record: is it still the one that was checked?"""
    if entry.value is None or entry.create_revision != member.job_revision:
        member.fence("another job was started with this id")


# --- who leads ---


def follow(member: Member, predecessor: Any) -> None:
    """Wait for the end of the registration before this one, or lead."""
    if predecessor is None:
        member.predecessor = None
        oversight.begin(member)
        return
    name = predecessor.key[len(member.keys.nodes) :]
    if not is_member(name):
        # Another program's: nobody would ever end it.
        _ask_for_predecessor(member, predecessor)
        return
    member.predecessor = predecessor.key
    member.do(Watch(member.ask(_predecessor_seen), predecessor.key, exact=True, snapshot=True))


def _predecessor_seen(member: Member, reply: Any) -> None:
    if not reply.results:
        predecessor_gone(member)


def predecessor_gone(member: Member) -> None:
    """The registration before this one is gone; ask which one precedes it now."""
    if member.predecessor is None:
        return
    member.do(Unwatch(member.predecessor, exact=True))
    member.predecessor = None
    _ask_for_predecessor(member)


def _ask_for_predecessor(member: Member, of: Any = None) -> None:
    """Ask who is before this registration, or before an entry that is none."""
    own = member.keys.node(member.member)
    compares = [("create", own, member.create_revision)]
    if of is not None:
        compares.append(("create", of.key, of.create_revision))
    before = ("predecessor", member.keys.nodes, own if of is None else of.key)
    member.txn(compares, [before], partial(_predecessor_known, is_own=of is None))


def _predecessor_known(member: Member, reply: Any, *, is_own: bool) -> None:
    if reply.ok:
        follow(member, reply.results[0])
    elif not is_own:
        _ask_for_predecessor(member)
    else:
        member.fence("the store no longer has this node's registration")
