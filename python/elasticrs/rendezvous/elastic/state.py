"""What one agent knows of the job, and the elementary things it does.

The state is changed in place: with thousands of agents the leader's view is too large to copy for every
event. Whoever hands a state to :func:`elasticrs.rendezvous.elastic.machine.step` gives it away.
"""

from __future__ import annotations

from enum import Enum

from elasticrs.rendezvous.elastic.keys import Keys
from elasticrs.rendezvous.elastic.messages import Arm, Disarm, Disconnect, Exit, Outcome, Stop, Txn
from elasticrs.rendezvous.elastic.records import Head, Node, bound_cause

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeAlias

    from elasticrs.rendezvous.elastic.leader import Lead
    from elasticrs.rendezvous.elastic.member_settings import MemberSettings
    from elasticrs.rendezvous.elastic.messages import Action, Cause
    from elasticrs.rendezvous.elastic.records import Slot

    Answered: TypeAlias = Callable[["Member", Any], None]


class Phase(Enum):
    """The phase of an agent."""

    NEW = "new"
    CONNECTING = "connecting"
    IDLE = "idle"
    RUN = "run"
    STOP = "stop"
    DONE = "done"
    FENCED = "fenced"
    EXIT = "exit"


class Member:
    """One agent.

    Args:
        settings: what it was started with.

    Attributes:
        phase: where it stands.
        incarnation: of its registration; the next one while it has none.
        member: its present registration.
        connected: there is a connection.
        registered: there is a registration, as far as this agent knows.
        create_revision: of the registration.
        job, job_revision: value and create revision of the job's record that was checked.
        head, head_revision: the job's state.
        slot, slot_revision: the last one that the leader gave to this registration.
        idle: the last round after which this registration said that it has no workers.
        held: the round whose workers may be here.
        stopping: they have been told to stop.
        done_round: the last round that finished here.
        is_done_known: the store has the record of that.
        own_round, own_cause: the last failure on this node.
        told_end: the last round whose end the user was told of here, and in which words.
        was_short: whether the last round ended soon after its start; ``None`` when its start was not seen.
        port: of the listener for the next round's store.
        port_used: that listener has served a round.
        idle_after_port: the round to be idle of once there is a fresh listener.
        outcome: what to exit with, once workers are gone and the store knows; set when this agent leaves.
        farewell_known: the store knows that this agent leaves.
        give_up: this agent does not wait for the store's answer any longer.
        predecessor: the key whose end makes this agent ask whether it leads.
        lead: what it knows as a leader.
        lost: why there is no connection.
        begun: ``now`` when it began to join.
        delay: seconds until the next attempt to connect.
        was_registered: there was a registration once.
        claim: an earlier registration of this agent that still has its node rank, as the store has it.
        rank_holder: the node that was found with the node rank of this one.
        told_of_port: the user knows that something else answers at the port of the store.
        barrier_over: a finished node does not wait for the others any longer.
        seen_round, aged_round: the last round whose start was seen, and which of them has run for a while.
        closing: why this agent ends the whole job.
        address: this end of the connection.
        settings, keys: what does not change.
        has_seen_round: a head of this job was seen: another job of the same name is not ours.
        now: the store's wall clock at the present event, in ns; only told, never compared.
    """

    __slots__ = (
        "_actions",
        "_answers",
        "_tag",
        "address",
        "aged_round",
        "barrier_over",
        "begun",
        "claim",
        "closing",
        "connected",
        "create_revision",
        "delay",
        "done_round",
        "farewell_known",
        "give_up",
        "has_seen_round",
        "head",
        "head_revision",
        "held",
        "idle",
        "idle_after_port",
        "incarnation",
        "is_done_known",
        "job",
        "job_revision",
        "keys",
        "lead",
        "lost",
        "member",
        "now",
        "outcome",
        "own_cause",
        "own_round",
        "phase",
        "port",
        "port_used",
        "predecessor",
        "rank_holder",
        "registered",
        "seen_round",
        "settings",
        "slot",
        "slot_revision",
        "stopping",
        "told_end",
        "told_of_port",
        "was_registered",
        "was_short",
    )

    def __init__(self, settings: MemberSettings) -> None:
        self.settings = settings
        self.keys = Keys(settings.run_id)
        self.phase = Phase.NEW
        self.incarnation = 1
        self.member = ""
        self.address = ""
        self.connected = False
        self.registered = False
        self.create_revision = 0
        self.job: bytes | None = None
        self.job_revision = 0
        self.head: Head | None = None
        self.head_revision = 0
        self.slot: Slot | None = None
        self.slot_revision = 0
        self.idle = 0
        self.held: int | None = None
        self.stopping = False
        self.done_round = 0
        self.is_done_known = False
        self.own_round = 0
        self.own_cause: Cause | None = None
        self.told_end = 0, ""
        self.was_short: bool | None = None
        self.seen_round = 0
        self.aged_round = 0
        self.port = settings.master_port
        self.port_used = False
        self.idle_after_port: int | None = None
        self.outcome: Outcome | None = None
        self.closing: str | None = None
        self.farewell_known = False
        self.give_up = False
        self.predecessor: str | None = None
        self.lead: Lead | None = None
        self.lost: str | None = None
        self.delay = 0.0
        self.has_seen_round = False
        self.was_registered = False
        self.claim: bytes | None = None
        self.rank_holder: str | None = None
        self.told_of_port = False
        self.barrier_over = False
        self.now = 0
        self.begun = 0
        self._tag = 0
        self._answers: dict[int, Answered] = {}
        self._actions: list[Action] = []

    # --- actions ---

    def do(self, action: Action) -> None:
        """Ask the loop for something."""
        self._actions.append(action)

    def take_actions(self) -> list[Action]:
        """What was asked for since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def ask(self, answered: Answered) -> int:
        """A fresh tag for a request; ``answered`` gets the reply."""
        self._tag += 1
        self._answers[self._tag] = answered
        return self._tag

    def txn(
        self,
        compares: Sequence[tuple[Any, ...]],
        then: Sequence[tuple[Any, ...]],
        answered: Answered | None = None,
        otherwise: Sequence[tuple[Any, ...]] = (),
    ) -> int:
        """Send a transaction; returns its tag."""
        tag = self.ask(answered or ignore)
        self.do(Txn(tag, compares, then, otherwise))
        return tag

    def answer(self, reply: Any) -> None:
        """Pass a reply to the request's callback; replies of an earlier connection have none."""
        answered = self._answers.pop(reply.tag, None)
        if answered is not None:
            answered(self, reply)

    def arm(self, name: str, seconds: float) -> None:
        """Set a timer."""
        self.do(Arm(name, seconds))

    def disarm(self, name: str) -> None:
        """Forget a timer."""
        self.do(Disarm(name))

    # --- common steps ---

    def runs(self, number: int) -> bool:
        """True if the head says that this round runs."""
        return self.head is not None and self.head.state == "RUNNING" and self.head.round == number

    def node(self, cause: Cause | None = None) -> Node:
        """The registration of this agent."""
        settings = self.settings
        return Node(
            settings.node,
            settings.host,
            self.address,
            settings.role,
            settings.nproc,
            self.port or 0,
            self.idle,
            settings.local_addr,
            settings.fallback_addr,
            settings.order_hint,
            bound_cause(cause),
        )

    def stop(self, why: str, *, fenced: bool = False, hung: Cause | None = None) -> None:
        """Stop the workers, if there are any; SIGKILL follows a gentler stop."""
        if self.held is None or (self.stopping and not fenced):
            return
        self.stopping = True
        self.do(Stop(self.held, why, fenced, hung))

    def forget_connection(self) -> None:
        """Forget everything of the old connection: requests, registration, leadership."""
        self.connected = self.registered = False
        self.member, self.job_revision = "", 0
        self._answers.clear()
        if self.lead is not None:
            for name in self.lead.timers:
                self.disarm(name)
        self.lead = None
        self.predecessor = None
        self.slot, self.slot_revision = None, 0
        self.head, self.head_revision = None, 0

    def fence(self, why: str) -> None:
        """Stop the workers before registering again: the others may have counted this agent as gone."""
        from elasticrs.rendezvous.elastic import joining

        self.do(Disconnect())
        joining.lose(self, why)

    def exit(self, outcome: Outcome) -> None:
        """The end."""
        self.phase = Phase.EXIT
        if self.connected:
            self.do(Disconnect())
        self.forget_connection()
        self.do(Exit(outcome))


def ignore(member: Member, reply: Any) -> None:
    """For requests whose effect is seen elsewhere."""
