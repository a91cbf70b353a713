"""Connect to the rendezvous store, and reconnect after losing the connection.

An agent that loses its connection is *fenced*: its workers must have exited before the agent registers again
(**JOIN-1**), because the other nodes may already count the agent as lost.
"""

from __future__ import annotations

from elasticrs._engine.job.phrases import local_time
from elasticrs._engine.nodes.protocol import static_ranks
from elasticrs._engine.nodes.protocol.member import Phase
from elasticrs._engine.nodes.protocol.messages import (
    Announce,
    BindStore,
    CloseStore,
    Connect,
    Disconnect,
    Outcome,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs._engine.nodes.protocol.member import Member
    from elasticrs._engine.nodes.transport.coordination import ConnectionLost

FIRST_DELAY = 0.02
LONGEST_DELAY = 0.5
"""Minimum and maximum number of seconds between two attempts to connect."""

FIRST_NEWS = 5.0
"""Seconds without a connection after which the reason is reported to the user."""

OTHER = "other"
"""Kind of connection loss where the store that this agent used before was replaced by one that was started
without data, or from another copy of the data.
"""

FINAL = frozenset({"version", "token", "not_ours", "run", "cannot_host", "tls", "denied", OTHER})
"""Kinds of connection loss that retrying cannot resolve."""


def begin(member: Member) -> None:
    """Start to join the rendezvous. Only the first call has an effect."""
    if member.phase is not Phase.NEW:
        return
    member.joining.begun = member.now
    member.arm("connect", member.settings.join_timeout)
    member.arm("connect_news", FIRST_NEWS)
    if member.listener.port is None:
        member.do(BindStore())
    retry(member)


def retry(member: Member) -> None:
    """Connect to the store, after a delay if the previous attempt failed."""
    joining = member.joining
    if joining.delay:
        member.arm("reconnect", joining.delay)
    else:
        member.do(Connect(joining.incarnation))
    joining.delay = min(max(FIRST_DELAY, joining.delay * 2), LONGEST_DELAY)


def reconnect(member: Member) -> None:
    """Try to connect again after the delay that follows a failed attempt."""
    if member.phase is Phase.CONNECTING and member.link is None:
        member.do(Connect(member.joining.incarnation))


def connection_lost(member: Member, event: ConnectionLost) -> None:
    """Handle a failed connection attempt or a lost connection."""
    if member.phase in (Phase.NEW, Phase.FENCED):
        return
    if member.joining.refusal is not None:
        member.exit(Outcome("refused", member.joining.refusal))
        return
    is_final = event.kind in FINAL and not static_ranks.may_be_lent(member, event.kind)
    if is_final and not member.joining.was_registered:
        member.link = None
        member.exit(Outcome("refused", event.message))
        return
    if event.kind == OTHER and member.leaving is None:
        # Leave the job, because the replaced store may have lost the job's data. The round and restart
        # numbers could then start at zero again, but user scripts rely on increasing numbers to detect
        # outdated processes.
        _give_up(member, Outcome("lost", event.message))
        if member.has_exited:
            return
    lose(member, static_ranks.why_lost(member, event))


def fence(member: Member, why: str) -> None:
    """Close the connection and fence this agent, because the other nodes may already consider it lost."""
    member.do(Disconnect())
    lose(member, why)


def lose(member: Member, why: str) -> None:
    """Fence this agent because its connection was lost: stop its workers. All of them must have exited before
    the agent may register again.
    """
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
    """Return true if the agent may register again, because this node has no workers left."""
    return member.workers is None


def without_workers(member: Member) -> None:
    """Continue once the workers of a fenced agent have exited: exit if the agent is leaving the job;
    otherwise, reconnect.
    """
    if member.leaving is not None:
        member.exit(member.leaving.outcome or Outcome("aborted", member.leaving.closing))
        return
    fresh_listener(member)
    retry(member)


def fresh_listener(member: Member) -> bool:
    """Replace the listener for the workers' store if a round has already used it. Return true if a listener
    is ready to be announced to the other nodes.
    """
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
    """Give up, because this agent could not reconnect to the store in time."""
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
    """Give up, because this agent could not register within ``join_timeout``."""
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
        member.leave_with(outcome)


def connect_news(member: Member) -> None:
    """Tell the user why this agent is still not connected."""
    joining, seconds = member.joining, member.settings.join_timeout
    if joining.was_registered or member.phase is not Phase.CONNECTING or joining.trouble is None:
        return
    begun = joining.begun or 0
    since = f"cannot reach {member.rendezvous.store} since {local_time(begun)}"
    limit = f"trying until {local_time(begun + int(seconds * 1e9))} (join_timeout={seconds:g})"
    member.do(Announce(f"{since}; {limit}: {joining.trouble}"))
