"""What one agent knows of the job, and the elementary things it does.

What exists only for a while is an object of its own, and ``None`` at other times: a :class:`Link` as long as
there is a connection, in it a :class:`Registration`; :class:`Workers` while some may be here; :class:`Done`
while a node that has finished waits for the others; :class:`Leaving` once it takes part in nothing new.
:attr:`Member.phase` follows from which of them are there.

The state is changed in place: with thousands of agents the leader's view is too large to copy for every
event. Whoever hands a state to :func:`elasticrs.rendezvous.elastic.machine.step` gives it away.
"""

from __future__ import annotations

from enum import Enum

from elasticrs.job.value import Record, Value, fresh
from elasticrs.rendezvous.elastic.keys import Keys
from elasticrs.rendezvous.elastic.messages import Arm, Disarm, Disconnect, Exit, Stop
from elasticrs.rendezvous.elastic.records import Node, bound_cause
from elasticrs.store.coordination import Exists, ModifiedAt, Put, Txn, Watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from elasticrs.rendezvous.elastic.leader_state import Leader
    from elasticrs.rendezvous.elastic.messages import Action, Cause, Outcome
    from elasticrs.rendezvous.elastic.records import Head, Slot
    from elasticrs.rendezvous.elastic.rendezvous import Rendezvous, ThisAgent
    from elasticrs.store.coordination import Compare, Operation


class Phase(Enum):
    """The phase of an agent."""

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
    """What a request is for; :mod:`~.machine` passes its answer to the function for this purpose."""

    NOTHING = "its effect is seen elsewhere"
    FIND_JOB = "find the job, or begin it"
    FIND_JOB_AGAIN = "find the job that this agent took part in"
    FORGET_JOB = "forget an earlier job of this name"
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
    """A registration of this agent, and what the leader tells it.

    Args:
        member: its name.
        create_revision: of its key; 0 until the store has confirmed it.
        idle: the last round after which it said that it has no workers.
        slot, slot_revision: the last one that the leader gave to it.
        slot_asked: the head's revision for which it was last asked whether there is a newer slot.
        slot_known: the store's revision up to which that was answered.
        predecessor: the key whose end makes this agent ask whether it leads.
        leader: what it knows as a leader; ``None`` while another one leads.
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
    """A connection to the store, and what was heard on it.

    Args:
        purposes: of the requests that are not answered yet, by tag.
        job_revision: create revision of the job's record; 0 until it was checked.
        head, head_revision: the job's state.
        registration: the one that was asked for on it.
    """

    purposes: dict[int, Purpose] = fresh(factory=dict)
    job_revision: int = 0
    head: Head | None = None
    head_revision: int = 0
    registration: Registration | None = None


class Joining(Record):
    """How this agent gets to the store.

    Args:
        begun: ``now`` when it began.
        delay: seconds until the next attempt to connect.
        trouble: why there is no connection.
        address: this end of the last connection.
        ttl: of the lease, in seconds, if the store grants a longer one than was asked for.
        incarnation: of the next registration.
        revision: the highest of the store that was told.
        job: value of the job's record that was checked.
        job_revision: store revision at which that record was created, as read on the last connection.
        was_registered: there was a registration once.
        has_seen_round: a head of this job was seen: another job of the same name is not ours.
        claim: an earlier registration of this agent that still has its node rank, as the store has it.
        rank_holder: the node that was found with the node rank of this one.
        told_of_port: the user knows that something else answers at the port of the store.
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

    def seen(self, revision: int) -> None:
        """The store was at this revision."""
        self.revision = max(self.revision, revision)


class Listener(Record):
    """The listener for the next round's worker store.

    Args:
        port: its port; ``None`` until it is bound.
        has_served: it has served a round.
        idle_after: the round to be idle of once there is a fresh listener.
    """

    port: int | None
    has_served: bool = False
    idle_after: int | None = None


class Workers(Record):
    """Workers of a round that may be here; ``is_stopping``: they have been told to stop."""

    round: int
    is_stopping: bool = False


class Done(Record):
    """The workers here have finished, the round has not. The store has the record of that if it ``is_known``;
    when it ``is_over``, this node does not wait for the others any longer.
    """

    is_known: bool = False
    is_over: bool = False


class RoundAge(Record):
    """How long rounds take.

    Args:
        seen: the last round whose start was seen.
        aged: the last of them that has run for a while.
        was_short: the last round ended soon after its start; ``None`` when its start was not seen.
    """

    seen: int = 0
    aged: int = 0
    was_short: bool | None = None


class OwnFailure(Value):
    """The last failure on this node: in which round, and what is known of it."""

    round: int
    cause: Cause | None


class Leaving(Record):
    """Set for an agent that takes part in no further round.

    Args:
        outcome: what to exit with, once workers are gone and the store knows.
        closing: why this agent ends the whole job.
        is_known: the store knows that this agent leaves.
        is_overdue: this agent does not wait for the store's answer any longer.
    """

    outcome: Outcome | None = None
    closing: str | None = None
    is_known: bool = False
    is_overdue: bool = False


class Member:
    """One agent.

    Args:
        rendezvous: with whom it meets, where and how.
        agent: what it is.

    Attributes:
        joining, listener, age: what it keeps all the time.
        link: the connection.
        workers: those that may be here.
        done: set while this node has finished and waits for the others.
        started_round: the last round whose workers were started here.
        finished_round: the last round that finished here.
        own_failure: the last one.
        told_end: the last round whose end the user was told of here, and in which words.
        leaving: set once it takes part in nothing new.
        has_exited: nothing follows.
        now: the store's wall clock at the present event, in ns; only told, never compared.
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
        self.workers: Workers | None = None
        self.done: Done | None = None
        self.started_round = self.finished_round = 0
        self.own_failure: OwnFailure | None = None
        self.told_end = 0, ""
        self.leaving: Leaving | None = None
        self.now = 0
        self.has_exited = False
        self._tag = 0
        self._actions: list[Action] = []

    @property
    def phase(self) -> Phase:
        """Where it stands."""
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
        """The registration that was asked for on this connection."""
        return None if self.link is None else self.link.registration

    @property
    def registered(self) -> Registration | None:
        """The registration, as far as this agent knows; ``None`` until the store has confirmed it."""
        registration = self.registration
        return registration if registration is not None and registration.create_revision else None

    @property
    def leader(self) -> Leader | None:
        """What this agent knows as a leader; ``None`` while it does not lead."""
        registration = self.registration
        return None if registration is None else registration.leader

    @property
    def head(self) -> Head | None:
        """The job's state, as far as it was heard on this connection."""
        return None if self.link is None else self.link.head

    @property
    def more_lease(self) -> float:
        """Seconds by which the lease is longer than the settings say."""
        return max(0.0, self.joining.ttl - self.settings.ttl)

    # --- actions ---

    def do(self, action: Action) -> None:
        """Ask the loop for something."""
        self._actions.append(action)

    def take_actions(self) -> list[Action]:
        """What was asked for since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def arm(self, name: str, seconds: float) -> None:
        """Set a timer."""
        self.do(Arm(name, seconds))

    def disarm(self, name: str) -> None:
        """Forget a timer."""
        self.do(Disarm(name))

    # --- requests ---

    def txn(
        self,
        purpose: Purpose,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> int:
        """Send a transaction; return its tag."""
        tag = self._ask(purpose)
        self.do(Txn(tag, compares, then, otherwise))
        return tag

    def watch(self, purpose: Purpose, prefix: str, *, exact: bool = True) -> None:
        """Watch a key, or all that begin like this; the answer has what is there."""
        self.do(Watch(self._ask(purpose), prefix, exact, True))

    def _ask(self, purpose: Purpose) -> int:
        self._tag += 1
        if self.link is not None:
            self.link.purposes[self._tag] = purpose
        return self._tag

    # --- what many do ---

    def runs(self, number: int) -> bool:
        """True if the head says that this round runs."""
        head = self.head
        return head is not None and head.state == "RUNNING" and head.round == number

    def node(self, cause: Cause | None = None) -> Node:
        """Return the registration of this agent; ``cause``: of its own failure in the round that it is idle
        of.
        """
        agent, registration = self.agent, self.registration
        return Node(
            agent.node,
            agent.host,
            self.joining.address,
            agent.role,
            agent.nproc,
            self.listener.port or 0,
            0 if registration is None else registration.idle,
            self.rendezvous.given_addr,
            agent.fallback_addr,
            self.settings.order_hint,
            bound_cause(cause),
        )

    def end_round(
        self, purpose: Purpose, end: dict[str, Any], cause: Cause | None = None, *more: Operation
    ) -> None:
        """T2: end the round that runs, in which this agent takes part, if nobody has ended it before."""
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
        """Return the write of a new state of the job."""
        return Put(self.keys.head, head.encode(), False)

    def exists(self, registration: Registration) -> Exists:
        """Return the condition of what a member writes: its own registration."""
        return Exists(self.keys.node(registration.member))

    def stop(
        self, why: str, *, fenced: bool = False, hung: Cause | None = None, planned: bool = False
    ) -> None:
        """Stop the workers, if there are any; SIGKILL follows a gentler stop."""
        workers = self.workers
        if workers is None or (workers.is_stopping and not fenced):
            return
        workers.is_stopping = True
        self.do(Stop(workers.round, why, fenced, hung, planned))

    def forget_connection(self) -> None:
        """Forget everything of the old connection: requests, registration, leadership."""
        leader = self.leader
        if leader is not None:
            for name in leader.timers:
                self.disarm(name)
        self.link = self.done = None

    def leave_with(self, outcome: Outcome) -> None:
        """Set what to exit with: this agent takes part in nothing new."""
        self.leaving = self.leaving or Leaving()
        self.leaving.outcome = outcome

    def exit(self, outcome: Outcome) -> None:
        """The end."""
        if self.link is not None:
            self.do(Disconnect())
        self.forget_connection()
        self.has_exited = True
        self.do(Exit(outcome))
