"""Interface between the agent's loop and the code that decides how the agent reacts, and the implementations
of this interface that use the state machine of one agent.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

from elasticrs._engine.failures.failure import Clock
from elasticrs._engine.job.config import SAFETY_TICK
from elasticrs._engine.job.restart_policy import FailureHistory
from elasticrs._engine.process.background_call import BackgroundCall
from elasticrs._engine.supervise import state_machine as machine
from elasticrs._engine.supervise.failed_attempt import evidence
from elasticrs._engine.workers.plan import NodeShare, Plan, StorePort, agent_hosts_store, assign

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from elasticrs import _core
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.job.restart_policy import Cause
    from elasticrs._engine.nodes.calls import Calls, Exchange, Serve
    from elasticrs._engine.nodes.rendezvous_store import KeptState
    from elasticrs._engine.nodes.transport.store import Store
    from elasticrs._engine.process.signals import SignalPipe
    from elasticrs._engine.supervise.attempt import Attempt


class Decisions(ABC):
    """Decides how an agent reacts to events. The agent's loop executes the returned actions in order.

    Attributes:
        signum: first signal that asked the agent to stop.
        plan: plan of the attempt that :class:`.Start` requests.
        first_cause: first failure of the job, over all nodes, if it has several.
        clock: wall clock of the nodes' store, as estimated on this node.
        has_taken_part: true if workers of this node ran in the last round.
        planned: function that may change a round's plan before the workers start. It is called with the plan,
            and a function that opens the round's store, or ``None`` on a single node.
        kept: state that an agent of a multi-node job keeps from one run of the agent to the next.
        begin_exchange: function that begins to exchange a value with the agents of the running round (an
            attempt of all nodes). It gets the name of the exchange and this agent's value, and does not
            block. ``None`` if the agents cannot exchange values.
        failed_elsewhere: true if this node's workers were stopped because workers on another node failed.
        can_end_job: true if a request to stop can also end the job on the other nodes.
        ends_elsewhere: true if this node's workers are being stopped because another node ends the job.
        leaves: true if this node was asked to leave the job, which other nodes can continue.
        serve: function that carries out requests of other nodes' agents. It is set before :meth:`open`.
    """

    phase = machine.Phase.INIT
    signum: int | None = None
    plan: Plan | None = None
    first_cause: Cause | None = None
    clock = Clock()
    has_taken_part = True
    planned: Callable[[Plan, Callable[[], Store] | None], None] | None = None
    kept: KeptState | None = None
    failed_elsewhere = False
    begin_exchange: Callable[[str, bytes], Exchange] | None = None
    can_end_job = True
    ends_elsewhere = False
    leaves = False
    serve: Serve | None = None
    _supervisor: _core.Supervisor
    _call: BackgroundCall | None = None
    _take: Callable[[BackgroundCall], list[machine.Action]]

    @abstractmethod
    def step(self, event: machine.Event) -> list[machine.Action]: ...

    def open(self, supervisor: _core.Supervisor) -> None:
        """Set the process supervisor. Called once, before any event except a signal."""
        self._supervisor = supervisor

    def _ask(
        self,
        ask: Callable[[], Any],
        take: Callable[[BackgroundCall], list[machine.Action]],
        *,
        blocks_signals: bool = True,
    ) -> None:
        """Call ``ask`` on a thread, because it may block. Later, ``take`` turns its result into actions."""
        self._call, self._take = BackgroundCall(ask, blocks_signals=blocks_signals), take
        self._supervisor.watch_fd(self._call.fd)

    def shared_cause(self) -> Mapping[str, Any] | None:
        """Return the fields of the :class:`.Cause` of the last failed round across all nodes, if any."""
        return None

    @property
    def is_ending(self) -> bool:
        """True if a user has asked to end the job, or this node's part of it, and it has not ended yet."""
        return (self.signum is not None or self.ends_elsewhere) and not self.phase.is_terminal

    @property
    def can_be_stopped(self) -> bool:
        """True if no user has asked to end the job. This node may be leaving it."""
        return not self.is_ending or (self.leaves and not self.ends_elsewhere)

    @property
    def others_running(self) -> int:
        """Number of nodes on which the job runs now without this node; 0 if this node takes part."""
        return 0

    def waits_for(self) -> str | None:
        """Return what this node waits for before it starts workers; ``None`` if it does not wait."""
        return None

    def node_names(self, *, asks: bool = False) -> Sequence[str] | None:  # noqa: ARG002 -- subclasses use it
        """Return the nodes' names by group rank; ``None`` if unknown. With ``asks``, then request them."""
        return (os.uname().nodename,)

    @property
    def calls(self) -> Calls | None:
        """Object that sends requests to the other nodes' agents; ``None`` if they cannot get any."""
        return None

    def claim_drain(self, *, stays_out: bool, take: Callable[[bool | None], bool]) -> None:  # noqa: ARG002
        """Record that a user drains this node (removes it from the job) in the running round, as
        :meth:`.Driver.claim_drain` describes.
        """
        raise RuntimeError("only a job of several nodes can be drained")

    @property
    def hosts_store(self) -> bool:
        """True if this process hosts the store in which the nodes meet."""
        return False

    def find_overdue(self) -> tuple[float, str | None]:
        """Return how long the agent has waited for code that should not wait, in seconds, and its name."""
        return 0.0, None

    def read_history(self) -> FailureHistory:
        """Return the history of the job's failures. Times are in seconds on this node's monotonic clock."""
        return FailureHistory()

    def seconds_left(self) -> float:
        return SAFETY_TICK

    def look_around(self) -> list[machine.Action]:
        """Return the actions that are due because time has passed."""
        return []

    def fd_ready(self, fd: int) -> list[machine.Action] | None:
        """Handle a readable file descriptor. Return the actions; ``None`` if it belongs to another object."""
        call = self._call
        if call is None or fd != call.fd:
            return None
        self._call = None
        self._supervisor.unwatch_fd(fd)
        call.close()
        return self._take(call)

    def fenced(self) -> list[machine.Action]:
        """Return the actions after this node's lease in the store has expired. They need not kill the
        workers: the nursery (the process that starts the workers) already does.
        """
        return []

    def observe(self, attempt: Attempt) -> None:  # noqa: B027 -- nothing to do for one node
        """Set the attempt to which all later events belong."""

    def next_plan(self, supervisor: _core.Supervisor) -> machine.Event | None:  # noqa: ARG002 -- subclasses use it
        """Plan the next attempt. Return the resulting event; ``None`` if :meth:`fd_ready` gets it later."""
        raise RuntimeError("plans come with the rounds")

    def _set_plan(self, plan: Plan, open_store: Callable[[], Store] | None = None) -> None:
        self.plan = plan
        if self.planned is not None:
            self.planned(plan, open_store)

    def release_plan(self) -> None:
        plan, self.plan = self.plan, None
        if plan is not None:
            plan.close()

    def close(self) -> None:
        """Release all resources, after the loop and the supervisor have stopped. Idempotent."""
        if self._call is not None:
            self._call.close()
        # Drop the supervisor: a reference would keep its file descriptors open until garbage collection.
        vars(self).pop("_supervisor", None)

    def leave(self, signals: SignalPipe | None) -> None:  # noqa: B027 -- nothing to wait for on one node
        """End what may take seconds, once the caller has reported how the job ended. Idempotent."""


class OneAgent(Decisions):
    """Makes the decisions of an agent that has a restart budget of its own. Subclasses plan the attempts."""

    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self._state = machine.AgentState(
            job.restart_settings, job.shutdown_timeout, replaces=job.on_failure == "replace"
        )
        self._attempt: Attempt | None = None

    def read_history(self) -> FailureHistory:
        return self._state.history

    def observe(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def step(self, event: machine.Event) -> list[machine.Action]:
        self._state, actions = machine.step(self._state, self._with_evidence(event))
        self.phase, self.signum = self._state.phase, self._state.signum
        return actions

    def _with_evidence(self, event: machine.Event) -> machine.Event:
        if self._attempt is None:
            return event
        match event:
            case machine.GroupEnded(outcome="succeeded") | machine.WorkerExited(exitcode=0):
                return event
            case machine.WorkerExited() if not self._state.replaces:
                return event
            case machine.GroupEnded() | machine.WorkerExited() | machine.StartFailed():
                return event.replaced(evidence=evidence(self._attempt, self._job.fatal_codes))
        return event


class OneNode(OneAgent):
    def next_plan(self, supervisor: _core.Supervisor) -> machine.Event | None:
        self.release_plan()
        try:
            self._set_plan(plan_one_node(self._job, supervisor))
        except OSError as error:
            return machine.RendezvousFailed(f"cannot reserve a port for the workers: {error}")
        return machine.RendezvousCompleted()


def plan_one_node(job: JobSpec, supervisor: _core.Supervisor) -> Plan:
    """Plan the next attempt on a single node: the ranks, and the address of the workers' store.
    Rank 0 hosts the store on ``master_port``. Without ``master_port``, any free port is used, and this
    process hosts the store if :func:`.agent_hosts_store` is true. Raises ``OSError`` without a free port.
    """
    ranks = assign([NodeShare(job.role, job.nproc)], 0)
    if job.master_port is not None:
        return Plan(ranks, job.master_addr, job.master_port)
    is_served = agent_hosts_store(os.environ)
    port = StorePort(is_served=is_served)
    port.serve(supervisor)
    return Plan(ranks, job.master_addr, port.number, port, use_agent_store=is_served)
