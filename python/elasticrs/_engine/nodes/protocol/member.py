"""State of one agent in the rendezvous, with its basic operations.

Parts of the state that exist only temporarily are separate objects, and ``None`` otherwise: a :class:`Link`
while there is a connection, in it a :class:`Registration`, and in that a :class:`Leader` while this agent
leads; :class:`RoundWorkers` while this node may have workers; :class:`Done` while a node that has finished
waits for the others; :class:`Leaving` once the agent leaves the job. :attr:`Member.phase` is derived from
these objects.

The state is modified in place, because with thousands of agents the leader's view is too large to copy for
every event. After passing a state to :func:`.step`, the caller must use
only the returned state.
"""

from __future__ import annotations

from enum import Enum

from elasticrs._engine.job.value import Record, fresh
from elasticrs._engine.nodes.protocol.keys import Keys
from elasticrs._engine.nodes.protocol.messages import Arm, Disarm, Disconnect, Exit, Stop
from elasticrs._engine.nodes.protocol.records import MAX_TEXT, Node, bound_cause, cut
from elasticrs._engine.nodes.transport.coordination import CreatedAt, Exists, ModifiedAt, Put, Txn, Watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TypeAlias

    from elasticrs._engine.nodes.protocol.leader_view import View
    from elasticrs._engine.nodes.protocol.messages import Action, Cause, Outcome
    from elasticrs._engine.nodes.protocol.records import Head, Slot
    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous, ThisAgent
    from elasticrs._engine.nodes.protocol.round_outcome import RoundVerdict
    from elasticrs._engine.nodes.transport.coordination import Changes, Compare, Operation, Reply

    RestsOn: TypeAlias = tuple[int, bool | None, tuple[int, int, int], bool, frozenset[str]]


class Phase(Enum):
    NEW = "new"
    CONNECTING = "connecting"
    IDLE = "idle"
    RUN = "run"
    STOP = "stop"
    DONE = "done"
    FENCED = "fenced"
    LEAVING = "leaving"
    EXIT = "exit"


class Purpose(Enum):
    """Purpose of a request to the store, which determines the function that handles the reply. See
    :mod:`~.machine`.
    """

    NOTHING = "its effect is seen elsewhere"
    FIND_JOB = "find the job, or begin it"
    FIND_JOB_AGAIN = "find the job that this agent took part in"
    FORGET_JOB = "forget an earlier job of this name"
    TELL_REFUSAL = "tell the nodes that wait that this node was refused"
    REGISTER = "T1"
    SEE_SLOT = "watch the own slot"
    FIND_SLOT = "read the own slot, which may come later than the head"
    SEE_HEAD = "watch the head"
    SEE_JOB = "watch the record of the job"
    SEE_PREDECESSOR = "watch the registration before this one"
    FIND_PREDECESSOR = "find the registration before this one"
    FIND_BEFORE_STRANGER = "find the one before an entry that is no registration"
    SEE_ALL = "watch the whole job, to lead it"
    LEAD = "a write of the leader"
    TELL_DONE = "T5"
    TELL_IDLE = "T4"
    END_ROUND = "T2 with a farewell"
    SAY_FAREWELL = "a farewell"
    ABORT = "T10"


class Registration(Record):
    """Registration of this agent, including the slot that the leader has assigned to it.

    Args:
        member: name of the registration.
        create_revision: create revision of the registration's key; 0 until the store has confirmed it.
        idle: last round after which this agent reported that it has no workers.
        slot, slot_revision: last slot from the leader, and the store revision at which it was written.
        slot_asked: revision of the head for which this agent last read its slot.
        slot_known: store revision of the reply to that read.
        predecessor: key of the registration before this one. When it is deleted, this agent checks whether it
            is now the leader.
        leader: state of this agent as the leader; ``None`` while another agent leads.
    """

    member: str
    create_revision: int = 0
    idle: int = 0
    slot: Slot | None = None
    slot_revision: int = 0
    slot_asked: int = 0
    slot_known: int = 0
    predecessor: str | None = None
    leader: Leader | None = None


class Link(Record):
    """Connection to the store, including the data received over it.

    Args:
        purposes: purpose of each request that is not answered yet, by tag.
        job_revision: create revision of the job's record; 0 until the record was checked.
        head, head_revision: state of the job, and the revision at which it was written.
        registration: registration that was requested over this connection; ``None`` before the request.
    """

    purposes: dict[int, Purpose] = fresh(factory=dict)
    job_revision: int = 0
    head: Head | None = None
    head_revision: int = 0
    registration: Registration | None = None


class Leader(Record):
    """State that an agent keeps while it leads the job.

    Args:
        view: the leader's view of the store; ``None`` until the snapshot of the store has arrived.
        early: changes that arrived before the snapshot.
        pending: tag of the write that is not answered yet and delays the next decision; ``None`` if there is
            none.
        sent_at: revision of the view when the last write was sent.
        wait_for: revision that the view must reach before the next decision.
        stalled: true if the last write was rejected, and the view has not changed since it was sent.
        timers: names of the timers that were set in the current state of the job. The value is true if the
            timer has fired.
        of_head: revision of the state of the job to which the timers belong.
        count: number of rounds that this leader has proposed.
        judged: inputs of the last verdict on an ended round, and that verdict.
        told: latest value of each kind of news that the user was told; see :meth:`is_news`.
    """

    view: View | None = None
    early: list[Changes] = fresh(factory=list)
    pending: int | None = None
    sent_at: int = 0
    wait_for: int = 0
    stalled: bool = False
    timers: dict[str, bool] = fresh(factory=dict)
    of_head: int = -1
    count: int = 0
    judged: tuple[RestsOn, RoundVerdict] | None = None
    told: dict[str, int] = fresh(factory=dict)

    def is_news(self, what: str, value: int = 1) -> bool:
        """Return true unless this value was the latest of its kind. The caller then tells the user."""
        is_known = self.told.get(what) == value
        self.told[what] = value
        return not is_known

    def is_free(self) -> bool:
        """Return true if all writes were answered and are reflected in the view."""
        is_settled = self.view is not None and self.view.revision >= self.wait_for
        return is_settled and self.pending is None and not self.stalled

    def answered(self, reply: Reply) -> bool:
        if self.pending != reply.tag:
            return False
        self.pending = None
        if reply.ok:
            self.wait_for = reply.revision
        else:
            # The write was rejected because of a change that the leader has not received yet. Wait for any
            # change of this job's keys.
            #
            # Do not wait for the reply's store revision, because it may belong to a change of another job's
            # keys.
            self.stalled = self.view is None or self.view.revision <= self.sent_at
        return True


class Joining(Record):
    """Data that an agent needs to connect to the store and to join the job, kept across connections.

    Args:
        begun: time at which the agent started to join, on the store's wall clock in nanoseconds; ``None``
            before that.
        delay: seconds until the next attempt to connect.
        trouble: reason why there is no connection; ``None`` if there is none.
        address: local address of the last connection.
        ttl: time to live of the lease that the store has granted, in seconds. It may exceed the requested
            time.
        incarnation: incarnation number of the next registration.
        revision: highest revision of the store that the agent has seen.
        job: value of the job's record that was checked.
        job_revision: store revision at which that record was created, as read on the last connection.
        was_registered: true if the agent has been registered before.
        has_seen_round: true if the agent has seen a round of this job. Such an agent does not join another
            job of the same name.
        claim: value of the node rank's key if an earlier registration of this agent still has the rank;
            otherwise ``None``.
        rank_holder: another node that has this node's rank; ``None`` if there is none.
        told_of_port: true if the user was told that another program responds at the port of the store.
        refusal: reason why this agent may not take part in the job; ``None`` if it may. The agent reports the
            reason to the other nodes before it exits.
        found_round: number of the job's round when this agent found the job; 0 if no round had started.
        has_twin: true if another launch on this host already took part in the job when this agent joined the
            job. The two launches may be independent runs of the same command.
    """

    begun: int | None = None
    delay: float = 0.0
    trouble: str | None = None
    address: str = ""
    ttl: float = 0.0
    incarnation: int = 1
    revision: int = 0
    job: bytes = b""
    job_revision: int = 0
    was_registered: bool = False
    has_seen_round: bool = False
    claim: bytes | None = None
    rank_holder: str | None = None
    told_of_port: bool = False
    refusal: str | None = None
    found_round: int = 0
    has_twin: bool = False

    def seen(self, revision: int) -> None:
        self.revision = max(self.revision, revision)


class Listener(Record):
    """Listener that is reserved for the workers' store of the next round.

    Args:
        port: port of the listener; ``None`` until it is bound.
        has_served: true if the listener has served a round.
        idle_after: round after which this node is idle, if this agent has not reported that yet; otherwise
            ``None``. The agent sends the report as soon as there is a new listener.
    """

    port: int | None
    has_served: bool = False
    idle_after: int | None = None


class RoundWorkers(Record):
    """Workers of one round that may be running on this node. ``is_stopping`` is true once this agent has told
    them to stop.
    """

    round: int
    is_stopping: bool = False


class Done(Record):
    """State of a node whose workers have finished before the round has ended.

    Args:
        is_known: true once the store has recorded that the workers have finished.
        is_over: true once this node no longer waits for the other nodes.
    """

    is_known: bool = False
    is_over: bool = False


class RoundAge(Record):
    """Tracks whether the last round lasted at least ``short_round`` seconds.

    Args:
        seen: last round whose start this agent has seen.
        aged: last round that has run for at least ``short_round`` seconds, as seen by this agent.
        was_short: true if the last round ended before it had run for ``short_round`` seconds; ``None`` if
            this agent did not see the start of that round.
    """

    seen: int = 0
    aged: int = 0
    was_short: bool | None = None


class Findings(Record):
    """What this node has found out about a round in which it had workers.

    Args:
        round: number of the round.
        cause: cause of the failure on this node; ``None`` if there was none, or if it is unknown.
        evidence: diagnostic data that this node has not yet written to the store; ``None`` if there are none.
        unfit: reason why a check found this node unfit after the round; ``None`` if no check did.
    """

    round: int
    cause: Cause | None = None
    evidence: bytes | None = None
    unfit: str | None = None


class Leaving(Record):
    """State of an agent that is leaving the job.

    Args:
        outcome: outcome with which the agent exits, once its workers have exited and the farewell is in the
            store; ``None`` if it is not known yet.
        closing: reason why this agent ends the whole job; ``None`` if only this node leaves.
        is_known: true once the store has recorded that this agent leaves.
        is_overdue: true once this agent no longer waits for the store's reply.
    """

    outcome: Outcome | None = None
    closing: str | None = None
    is_known: bool = False
    is_overdue: bool = False


class Member:
    """State of one agent in the rendezvous.

    Args:
        rendezvous: description of the rendezvous.
        agent: description of the agent and its workers.

    Attributes:
        joining, listener, age: parts of the state that always exist.
        link: connection to the store; ``None`` without a connection.
        last_head: last state of the job received over any connection; ``None`` if none has been received yet.
        workers: workers that may be running on this node; ``None`` if there are none.
        done: set while this node has finished and waits for the other nodes.
        started_round: last round whose workers were started on this node.
        finished_round: last round whose workers finished on this node.
        findings: what this node has found out about the last round in which it had workers.
        serves_only: true if this node has been excluded from the job, but this agent stays to host the store.
        told_end: number of the last round whose workers were stopped gracefully on this node, and the reason
            that the user has seen.
        judged_round: last round whose evaluation by the leader this agent has seen.
        leaving: set once the agent is leaving the job.
        has_exited: true once the agent has left the rendezvous.
        now: the store's wall clock at the current event, in nanoseconds. It is only reported, never compared.
    """

    def __init__(self, rendezvous: Rendezvous, agent: ThisAgent) -> None:
        self.rendezvous = rendezvous
        self.settings = rendezvous.settings
        self.agent = agent
        self.keys = Keys(agent.job)
        self.joining = Joining()
        self.listener = Listener(rendezvous.master_port)
        self.age = RoundAge()
        self.link: Link | None = None
        self.last_head: Head | None = None
        self.workers: RoundWorkers | None = None
        self.done: Done | None = None
        self.started_round = self.finished_round = 0
        self.findings = Findings(0)
        self.serves_only = False
        self.told_end = 0, ""
        self.judged_round = 0
        self.leaving: Leaving | None = None
        self.now = 0
        self.has_exited = False
        self._tag = 0
        self._actions: list[Action] = []

    @property
    def phase(self) -> Phase:
        if self.has_exited:
            return Phase.EXIT
        if self.workers is not None:
            if self.link is None:
                return Phase.FENCED
            return Phase.STOP if self.workers.is_stopping else Phase.RUN
        if self.registered is None:
            return Phase.NEW if self.joining.begun is None else Phase.CONNECTING
        if self.done is not None:
            return Phase.DONE
        return Phase.IDLE if self.leaving is None else Phase.LEAVING

    @property
    def registration(self) -> Registration | None:
        """Registration requested over the current connection."""
        return None if self.link is None else self.link.registration

    @property
    def registered(self) -> Registration | None:
        """Registration that the store has confirmed over the current connection."""
        registration = self.registration
        return registration if registration is not None and registration.create_revision else None

    @property
    def leader(self) -> Leader | None:
        registration = self.registration
        return None if registration is None else registration.leader

    @property
    def head(self) -> Head | None:
        """State of the job that was last received over the current connection."""
        return None if self.link is None else self.link.head

    @property
    def more_lease(self) -> float:
        """Seconds by which the lease granted by the store is longer than the lease time in the settings."""
        return max(0.0, self.joining.ttl - self.settings.ttl)

    @property
    def patience(self) -> float:
        """Seconds that this agent waits for a new round before it gives up. The maximum restart delay is
        added twice, because a leader elected during the delay waits for the full delay again.
        """
        policy = self.agent.policy
        return self.settings.patience + 2 * max(policy.first_delay, policy.longest_delay)

    # --- actions ---

    def do(self, action: Action) -> None:
        self._actions.append(action)

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def arm(self, name: str, seconds: float) -> None:
        self.do(Arm(name, seconds))

    def disarm(self, name: str) -> None:
        self.do(Disarm(name))

    # --- requests ---

    def txn(
        self,
        purpose: Purpose,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> int:
        """Send a transaction. Return its tag."""
        tag = self._ask(purpose)
        self.do(Txn(tag, compares, then, otherwise))
        return tag

    def watch(self, purpose: Purpose, prefix: str, *, exact: bool = True) -> None:
        """Watch a key or, unless ``exact``, a prefix. The reply contains the existing keys."""
        self.do(Watch(self._ask(purpose), prefix, exact, True))

    def _ask(self, purpose: Purpose) -> int:
        self._tag += 1
        if self.link is not None:
            self.link.purposes[self._tag] = purpose
        return self._tag

    # --- common operations ---

    def runs(self, number: int) -> bool:
        head = self.head
        return head is not None and head.state == "RUNNING" and head.round == number

    def node(self, cause: Cause | None = None) -> Node:
        """Return the record to store as this agent's registration. ``cause`` is the cause of this node's
        failure, if any, in the last round whose workers have exited.
        """
        agent, registration, findings = self.agent, self.registration, self.findings
        idle = 0 if registration is None else registration.idle
        return Node(
            agent.node,
            agent.host,
            self.joining.address,
            agent.role,
            agent.nproc,
            self.listener.port or 0,
            idle,
            self.rendezvous.given_addr,
            agent.fallback_addr,
            self.settings.order_hint,
            bound_cause(cause),
            cut(findings.unfit, MAX_TEXT) if findings.unfit is not None and findings.round == idle else None,
            self.serves_only or None,
        )

    def end_round(
        self, purpose: Purpose, end: dict[str, Any], cause: Cause | None = None, *more: Operation
    ) -> None:
        """End the round that is running and in which this agent takes part, unless another agent has already
        ended it (transaction T2).
        """
        link, registration = self.link, self.registration
        assert link is not None
        assert link.head is not None
        assert registration is not None
        assert registration.slot is not None
        told = {**end, "node": self.agent.node, "group_rank": registration.slot.group_rank}
        told["member"] = registration.member
        ended = link.head.replaced(state="ENDED", end=told, cause=bound_cause(cause))
        compares = [ModifiedAt(self.keys.head, link.head_revision), self.exists(registration)]
        self.txn(purpose, compares, [self.put_head(ended), *more])

    def put_head(self, head: Head) -> Put:
        return Put(self.keys.head, head.encode(), False)

    def exists(self, registration: Registration) -> Exists:
        """Return the condition of every write of a member."""
        return Exists(self.keys.node(registration.member))

    def stop(
        self,
        why: str,
        *,
        fenced: bool = False,
        hung: Cause | None = None,
        planned: bool = False,
        after_failure: bool = False,
    ) -> None:
        """Stop the workers: with SIGKILL if ``fenced`` is true, otherwise gracefully. A graceful stop has no
        effect if the workers are already being stopped. ``why`` is shown to the user for a graceful stop.
        """
        workers = self.workers
        if workers is None or (workers.is_stopping and not fenced):
            return
        workers.is_stopping = True
        if not fenced:
            self.told_end = workers.round, why
        self.do(Stop(workers.round, why, fenced, hung, planned, after_failure))

    def forget_connection(self) -> None:
        leader = self.leader
        if leader is not None:
            for name in leader.timers:
                self.disarm(name)
        self.link = self.done = None

    def set_outcome(self, outcome: Outcome) -> None:
        self.leaving = self.leaving or Leaving()
        self.leaving.outcome = outcome

    def exit(self, outcome: Outcome) -> None:
        """Disconnect, and exit with this outcome. This is the last action."""
        if self.link is not None:
            self.do(Disconnect())
        self.forget_connection()
        self.has_exited = True
        self.do(Exit(outcome))


# --- timers ---


def forget_timers(member: Member, leader: Leader) -> None:
    for name, fired in leader.timers.items():
        if not fired:
            member.disarm(name)
    leader.timers.clear()


def has_passed(member: Member, leader: Leader, name: str, seconds: float) -> bool:
    """Return true if the timer ``name`` has expired. The first call starts the timer, which runs for
    ``seconds``. A change of the job's state cancels all timers.
    """
    timer = _timer(leader, name)
    if timer not in leader.timers:
        leader.timers[timer] = False
        member.arm(timer, seconds)
    return leader.timers[timer]


def forget(member: Member, leader: Leader, name: str) -> None:
    timer = _timer(leader, name)
    if timer in leader.timers and not leader.timers.pop(timer):
        member.disarm(timer)


def _timer(leader: Leader, name: str) -> str:
    return f"{name}/{leader.view.round if leader.view else 0}"


# --- writes ---


def guards(member: Member, view: View) -> list[Compare]:
    registration, keys = member.registered, member.keys
    assert registration is not None
    return [
        CreatedAt(keys.node(registration.member), registration.create_revision),
        ModifiedAt(keys.head, view.head_revision),
    ]


def write(
    member: Member, leader: Leader, view: View, then: Sequence[Operation], compares: Sequence[Compare] = ()
) -> None:
    """Write to the store if :func:`guards` and ``compares`` hold. The leader decides nothing more until the
    reply has arrived.
    """
    leader.sent_at = view.revision
    leader.pending = member.txn(Purpose.LEAD, [*guards(member, view), *compares], then)


def close(member: Member, leader: Leader, view: View, closed: Head, alive: Sequence[str] = ()) -> None:
    """Close the job. ``closed`` is the state to write, with outcome and reason. The reason is valid while the
    members in ``alive`` are registered.
    """
    closed = closed.replaced(state="CLOSED", time_ns=member.now)
    write(member, leader, view, [member.put_head(closed), *member.keys.forget_rounds()], here(member, alive))


def here(member: Member, alive: Sequence[str]) -> list[Compare]:
    return [Exists(member.keys.node(each)) for each in alive]
