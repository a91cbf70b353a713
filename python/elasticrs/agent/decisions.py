"""What the loop asks what to do: one interface, for a node by itself and for one among several."""

from __future__ import annotations

from abc import ABC, abstractmethod

from elasticrs.agent import state as machine
from elasticrs.clock import Clock
from elasticrs.config import SAFETY_TICK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from elasticrs import _core
    from elasticrs.agent.attempt import Attempt
    from elasticrs.agent.cause import Cause
    from elasticrs.config import JobConfig
    from elasticrs.plan import Plan

    class Planner(Protocol):
        """Where plans come from."""

        def next(self, supervisor: _core.Supervisor) -> Plan: ...

        def close(self) -> None: ...


class Decisions(ABC):
    """Decides for the loop, which tells it of everything and carries its actions out in order.

    Attributes:
        plan: of the attempt that :class:`~elasticrs.agent.state.Start` asks for.
        first_cause: the first failure of a job on several nodes; see :mod:`elasticrs.agent.cause`.
        clock: of the store in which the nodes met.
        has_taken_part: true if workers of this node ran in the last round.
        has_peers: other nodes wait for what becomes of this one.
    """

    plan: Plan | None = None
    first_cause: Cause | None = None
    clock = Clock()
    has_taken_part = True
    has_peers = False

    @property
    @abstractmethod
    def phase(self) -> machine.Phase:
        """Where the agent stands."""

    @property
    @abstractmethod
    def signum(self) -> int | None:
        """The first signal that asked the agent to stop."""

    @abstractmethod
    def step(self, event: machine.Event) -> list[machine.Action]:
        """What follows from an event on this node."""

    def open(self, supervisor: _core.Supervisor) -> None:  # noqa: B027 -- nothing to do for one node
        """The supervisor is there; called once, before anything else but a signal."""

    def seconds_left(self) -> float:
        """How long the loop may sleep."""
        return SAFETY_TICK

    def look_around(self) -> list[machine.Action]:
        """What follows from the passing of time."""
        return []

    def fd_ready(self, fd: int) -> list[machine.Action] | None:  # noqa: ARG002 -- for others
        """What follows from a descriptor's being readable; ``None`` when it is none of ours."""
        return None

    def fenced(self) -> list[machine.Action]:
        """What follows from the end of this node's lease: the nursery kills the workers already."""
        return []

    def observe(self, attempt: Attempt) -> None:  # noqa: B027 -- nothing to do for one node
        """The attempt that the following events are about."""

    def next_plan(self, supervisor: _core.Supervisor) -> machine.Event:  # noqa: ARG002 -- for others
        """Agree on ranks and addresses: the answer to :class:`~elasticrs.agent.state.Rendezvous`. The
        supervisor serves the workers' store, where that falls to this agent.

        Raises:
            Exception: of a user's rendezvous handler.
        """
        raise RuntimeError("plans come with the rounds")

    def release_plan(self) -> None:
        """The attempt is over: give its port back. Idempotent."""
        plan, self.plan = self.plan, None
        if plan is not None:
            plan.close()

    def close_rendezvous(self) -> None:  # noqa: B027 -- not everybody has one
        """No further attempt follows."""

    def close(self) -> None:  # noqa: B027 -- nothing to do for one node
        """The loop has ended, and the supervisor with it: release everything. Idempotent."""


class OneNode(Decisions):
    """A node by itself: :func:`elasticrs.agent.state.step` decides."""

    def __init__(self, job: JobConfig, planner: Planner) -> None:
        self._state = machine.AgentState(
            job.max_restarts, job.shutdown_timeout, replaces=job.on_failure == "replace"
        )
        self._planner = planner

    @property
    def phase(self) -> machine.Phase:
        return self._state.phase

    @property
    def signum(self) -> int | None:
        return self._state.signum

    def step(self, event: machine.Event) -> list[machine.Action]:
        self._state, actions = machine.step(self._state, event)
        return actions

    def next_plan(self, supervisor: _core.Supervisor) -> machine.Event:
        self.release_plan()
        try:
            self.plan = self._planner.next(supervisor)
        except OSError as error:
            return machine.RendezvousFailed(f"cannot reserve a port for the workers: {error}")
        return machine.RendezvousCompleted()

    def close_rendezvous(self) -> None:
        self._planner.close()
