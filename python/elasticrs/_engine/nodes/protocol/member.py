"""State of one agent in the rendezvous, with its basic operations. The state is modified in place: with
thousands of agents, the leader's view (its copy of the job's keys) is too large to copy for every event.
"""

from __future__ import annotations

from enum import Enum

from elasticrs._engine.job.value import Record, fresh
from elasticrs._engine.nodes.protocol.messages import Arm, Disarm, Disconnect, Exit, Stop
from elasticrs._engine.nodes.protocol.records import MAX_TEXT, Keys, Node, bound_cause, cut
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
    """Purpose of a request to the store, which selects the handler of the reply in :mod:`~.machine`."""

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


class Link(Record):
    """Connection to the store, and this agent's registration over it.

    Args:
        purposes: purpose of each unanswered request, by tag.
        has_job: true once the job's record has been checked over this connection.
        head, head_revision: state of the job, as received over this connection.
        member: name of the registration; empty until this agent requests it.
        create_revision: 0 until the store has confirmed the registration.
        idle: last round after which this agent reported that it has no workers.
        slot_asked: revision of the head (the state of the job) for which this agent last read its slot.
        slot_known: store revision of the reply to that read.
        predecessor: key of the previous registration. If it is deleted, this agent may become the leader.
        early: changes of keys before the snapshot of the store that a new leader has requested; ``None``
            unless it waits for that.
        leader: ``None`` while another agent leads, and until the snapshot has arrived.
    """

    purposes: dict[int, Purpose] = fresh(factory=dict)
    has_job: bool = False
    head: Head | None = None
    head_revision: int = 0
    member: str = ""
    create_revision: int = 0
    idle: int = 0
    slot: Slot | None = None
    slot_revision: int = 0
    slot_asked: int = 0
    slot_known: int = 0
    predecessor: str | None = None
    early: list[Changes] | None = None
    leader: Leader | None = None


class Joining(Record):
    """Data that an agent needs to connect to the store and to join the job, kept across connections.

    Args:
        begun: start of joining on the store's wall clock, in nanoseconds.
        delay: seconds until the next attempt to connect.
        trouble: why there is no connection.
        ttl: granted lease time in seconds, which may exceed the requested time.
        incarnation: number of the next registration.
        revision: highest store revision that the agent has seen.
        job, job_revision: value and create revision of the job's record, which this agent has checked.
        has_seen_round: true after a round of this job. The agent then joins no other job of the same name.
        claim: value of the node rank's key, if an earlier registration of this agent still has the rank.
        rank_holder: another node that has the node rank that this node wants.
        told_of_port: true if the user knows that another program responds at the store's port.
        refusal: why this agent may not join. It reports that to the other nodes before it exits.
        found_round: round of the job when this agent found it; 0 before the first round.
        has_twin: true if another launch on this host, perhaps an independent job, had joined before.
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
    """Listener that is reserved for the workers' store of the next round. Without one, the report that this
    node is idle (has no workers left) after round ``idle_after`` waits until there is a new listener.
    """

    port: int | None
    has_served: bool = False
    idle_after: int | None = None


class RoundWorkers(Record):
    """Workers of one round that may be running on this node."""

    round: int
    is_stopping: bool = False


class Done(Record):
    """State of a node whose workers have succeeded. ``is_known``: the store has recorded that. ``is_over``:
    the time limit to wait for the other nodes (exit barrier) is over.
    """

    is_known: bool = False
    is_over: bool = False


class RoundAge(Record):
    """Data that show whether a round was short. ``seen`` is the last round whose start this agent saw, and
    ``aged`` the last round that ran for at least ``short_round`` seconds. ``was_short`` is about the round
    that has ended last. It is ``None`` if this agent did not see that round's start.
    """

    seen: int = 0
    aged: int = 0
    was_short: bool | None = None


class Findings(Record):
    """What this node found out about a round. ``evidence`` is diagnostic data to be written to the store."""

    round: int
    cause: Cause | None = None
    evidence: bytes | None = None
    unfit: str | None = None


class Leaving(Record):
    """State of an agent that leaves the job, or with ``closing`` ends it for all nodes. The agent exits once
    the store has confirmed that (``is_known``), or the confirmation is overdue (``is_overdue``).
    """

    outcome: Outcome | None = None
    closing: str | None = None
    is_known: bool = False
    is_overdue: bool = False


class Member:
    """State of one agent in the rendezvous. Parts that exist only at times are ``None`` otherwise.

    Attributes:
        last_head: last state of the job received over any connection.
        done: set while this node has finished and waits for the other nodes.
        findings: what this node found out about the last round in which it had workers.
        serves_only: true if this node has been excluded, but stays to host the store.
        told_end: last round whose workers were stopped gracefully, and the reason that the user has seen.
        judged_round: last round whose verdict this agent has seen.
        now: the store's wall clock at the current event, in nanoseconds.
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
        self.finished_round = 0
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
    def registered(self) -> Link | None:
        """Connection over which the store has confirmed this agent's registration; ``None`` before that."""
        return self.link if self.link is not None and self.link.create_revision else None

    @property
    def leader(self) -> Leader | None:
        return None if self.link is None else self.link.leader

    @property
    def head(self) -> Head | None:
        """State of the job that was last received over the current connection."""
        return None if self.link is None else self.link.head

    @property
    def more_lease(self) -> float:
        """Seconds by which the granted lease is longer than the lease time in the settings."""
        return max(0.0, self.joining.ttl - self.settings.ttl)

    @property
    def patience(self) -> float:
        """Seconds to wait for a round. The restart delay counts twice: a new leader waits for it again."""
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
        tag = self._ask(purpose)
        self.do(Txn(tag, compares, then, otherwise))
        return tag

    def watch(self, purpose: Purpose, prefix: str, *, exact: bool = True) -> None:
        """Watch a key or, if ``exact`` is false, all keys with a prefix. The reply has those that exist."""
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
        """Return this agent's registration record. ``cause``: this node's failure in its last ended round."""
        agent, findings = self.agent, self.findings
        idle = 0 if self.link is None else self.link.idle
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
        """End the running round, unless another agent has already ended it (transaction T2)."""
        link = self.link
        assert link is not None
        assert link.head is not None
        assert link.slot is not None
        told = {**end, "node": self.agent.node, "group_rank": link.slot.group_rank, "member": link.member}
        ended = link.head.replaced(state="ENDED", end=told, cause=bound_cause(cause))
        compares = [ModifiedAt(self.keys.head, link.head_revision), self.exists(link)]
        self.txn(purpose, compares, [self.put_head(ended), *more])

    def put_head(self, head: Head) -> Put:
        return Put(self.keys.head, head.encode(), False)

    def exists(self, link: Link) -> Exists:
        """Return the condition under which a member may write to the store: that its registration exists."""
        return Exists(self.keys.node(link.member))

    def stop(
        self,
        why: str,
        *,
        fenced: bool = False,
        hung: Cause | None = None,
        planned: bool = False,
        after_failure: bool = False,
        asked: bool = False,
        node_leaves: bool = False,
    ) -> None:
        """Stop this node's workers, with SIGKILL if ``fenced``. ``why`` is the reason to show to the user."""
        workers = self.workers
        if workers is None or (workers.is_stopping and not fenced):
            return
        workers.is_stopping = True
        if not fenced:
            self.told_end = workers.round, why
        self.do(Stop(workers.round, why, fenced, hung, planned, after_failure, asked, node_leaves))

    def forget_connection(self) -> None:
        if self.leader is not None:
            for name in self.leader.timers:
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


class Leader(Record):
    """State of an agent that leads the job.

    Args:
        pending: tag of the unanswered write that delays the next decision.
        sent_at: revision of the view when the last write was sent.
        wait_for: revision that the view must reach before the next decision.
        stalled: true if the store has rejected the last write, and the view has not changed since then.
        timers: whether each timer has fired, by name. They belong to the head with revision ``of_head``.
        count: number of rounds that this leader has proposed.
        judged: inputs of the last verdict on an ended round, and that verdict.
        told: latest value of each kind of news; see :meth:`is_news`.
    """

    member: Member
    view: View
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
        """Return true if the user must be told: ``value`` is not the last one for the message ``what``."""
        is_known = self.told.get(what) == value
        self.told[what] = value
        return not is_known

    # --- timers ---

    def has_passed(self, name: str, seconds: float) -> bool:
        """Return true if the timer has expired. The first call starts it. A new job state cancels it."""
        timer = f"{name}/{self.view.round}"
        if timer not in self.timers:
            self.timers[timer] = False
            self.member.arm(timer, seconds)
        return self.timers[timer]

    def forget(self, name: str) -> None:
        timer = f"{name}/{self.view.round}"
        if timer in self.timers and not self.timers.pop(timer):
            self.member.disarm(timer)

    def forget_timers(self) -> None:
        for name, fired in self.timers.items():
            if not fired:
                self.member.disarm(name)
        self.timers.clear()

    # --- writes ---

    def is_free(self) -> bool:
        """Return true if the leader may act: all its writes are answered, and its view has their results."""
        return self.view.revision >= self.wait_for and self.pending is None and not self.stalled

    def answered(self, reply: Reply) -> bool:
        if self.pending != reply.tag:
            return False
        self.pending = None
        if reply.ok:
            self.wait_for = reply.revision
        else:
            # A change that the view does not contain yet has caused the rejection, so wait for the next
            # change of this job. Do not wait for the revision in the reply, which may belong to another job.
            self.stalled = self.view.revision <= self.sent_at
        return True

    def guards(self) -> list[Compare]:
        link, keys = self.member.link, self.member.keys
        assert link is not None
        return [
            CreatedAt(keys.node(link.member), link.create_revision),
            ModifiedAt(keys.head, self.view.head_revision),
        ]

    def write(self, then: Sequence[Operation], *compares: Compare) -> None:
        """Send writes, which the store executes only if all ``compares`` and :meth:`guards` hold. The leader
        decides nothing more until the reply arrives.
        """
        self.sent_at = self.view.revision
        self.pending = self.member.txn(Purpose.LEAD, [*self.guards(), *compares], then)

    def close(self, closed: Head, alive: Sequence[str] = ()) -> None:
        """Close the job with ``closed`` as its final state, if all members in ``alive`` are registered."""
        closed = closed.replaced(state="CLOSED", time_ns=self.member.now)
        then = [self.member.put_head(closed), *self.member.keys.forget_rounds()]
        self.write(then, *self.here(alive))

    def here(self, alive: Sequence[str]) -> list[Compare]:
        return [Exists(self.member.keys.node(each)) for each in alive]
