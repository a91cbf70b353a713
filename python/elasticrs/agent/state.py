"""What the agent of one node decides, as a pure function: no I/O, no clock, no randomness.

:func:`step` takes a state and an event and returns the next state and the actions that the loop has to carry
out, in order. The order of phases::

    INIT → RENDEZVOUS → STARTING → RUNNING → STOPPING → RENDEZVOUS …  (a restart)
                                                      → SUCCEEDED | FAILED | STOPPED

Invariants, each held by a property test:

- **AGENT-1** :class:`Start` is asked for only when nothing of an earlier group is left.
- **AGENT-2** no more than ``max_restarts`` restarts are charged; only a port conflict is repeated without a
  charge, and that at most :data:`MAX_PORT_RETRIES` times.
- **AGENT-3** the terminal phases are final, and each is entered with exactly one :class:`Exit`, which comes
  last.
- **AGENT-4** exit code 0 is given only when every worker of the last group exited 0 and nobody asked to stop.
- **AGENT-5** after the first signal nothing is started any more, and the agent exits when the group has
  ended.
- **AGENT-6** a node with workers that SIGKILL did not end, or that hung in the kernel, is not used again.
- **AGENT-7** with ``replaces`` a worker that fails is replaced, once nothing of it is left, and the others
  are left alone, for as long as the budget lasts. Workers that fail before the place of an earlier one is
  taken share its charge, and so does each that has not met the others again since.
"""

from __future__ import annotations

from enum import Enum

from elasticrs import texts
from elasticrs._value import Value
from elasticrs.budget import has_not_met_since, used_after, without

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal, TypeAlias

    from elasticrs.budget import Meetings

    Outcome: TypeAlias = Literal["succeeded", "failed", "stopped", "lost"]

MAX_PORT_RETRIES = 3

SIGTERM = 15
SIGKILL = 9


class Phase(Enum):
    """Where the agent stands."""

    INIT = "init"
    RENDEZVOUS = "rendezvous"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_terminal(self) -> bool:
        """True if nothing can follow."""
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED)


class AgentState(Value):
    """Everything that decisions depend on.

    Args:
        max_restarts: how many restarts may be charged.
        shutdown_timeout: seconds between the first signal and SIGKILL.
        phase: where the agent stands.
        round: number of the attempt, from 1, counting every one that was begun.
        restarts: charged restarts; what workers see as ``TORCHELASTIC_RESTART_COUNT``.
        port_retries: attempts repeated because another process took the port of the workers' store.
        signum: the first signal that asked the agent to stop.
        worker_failed: a worker of the present group has failed.
        group_exists: processes of a group may be there: from :class:`Start` until its failure or
            :class:`GroupEnded`.
        replaces: a worker that fails is replaced; the others go on.
        replacing: the local ranks whose place is not taken yet.
        met: the last meetings of the workers when a failure was charged, but of those replaced since.
    """

    max_restarts: int
    shutdown_timeout: float
    phase: Phase = Phase.INIT
    round: int = 1
    restarts: int = 0
    port_retries: int = 0
    signum: int | None = None
    worker_failed: bool = False
    group_exists: bool = False
    replaces: bool = False
    replacing: frozenset[int] = frozenset()
    met: Meetings = ()

    @property
    def restarts_left(self) -> int:
        """Restarts that may still be charged."""
        return self.max_restarts - self.restarts

    def _next(self, phase: Phase, **changes: Any) -> AgentState:
        same = {name: getattr(self, name) for name in self._names}
        return AgentState(**{**same, **changes, "phase": phase})


# --- events ---


class Event(Value):
    """Something that happened."""


class Begin(Event):
    """The loop is ready."""


class RendezvousCompleted(Event):
    """Ranks and addresses of the next attempt are known."""


class RendezvousFailed(Event):
    """There will be no next attempt, and why, for the user."""

    message: str


class Started(Event):
    """All workers of the attempt run."""


class StartFailed(Event):
    """The attempt could not be started, and why; nothing of it is left. ``transient``: the same start may
    succeed a moment later (no memory, no process slots, a killed nursery).
    """

    message: str
    transient: bool = False


class FailureSeen(Event):
    """A worker has failed first; its siblings have been signalled."""

    local_rank: int


class WorkerExited(Event):
    """A worker has ended; its exit code is the negative number of a signal, or ``None`` when nobody
    can tell. ``met``: the last meetings of all workers of the node.
    """

    local_rank: int
    exitcode: int | None
    met: Meetings = ()


class WorkerSwept(Event):
    """Nothing is left of a worker that failed, apart from what is stuck: another one may take its place."""

    local_rank: int
    is_stuck: bool = False


class WorkerReplaced(Event):
    """Another process has taken the place of a worker that failed."""

    local_rank: int


class ReplaceFailed(Event):
    """No other process could take the place of a worker."""

    local_rank: int


class GroupEnded(Event):
    """Nothing of the group is left, apart from what is stuck.

    Args:
        outcome: how it ended.
        stuck_ranks: workers that SIGKILL did not end.
        port_conflict: the workers' store could not have the port that we had chosen.
        unfit: why this node cannot be used again, when it is not for ``stuck_ranks``.
    """

    outcome: Outcome
    stuck_ranks: tuple[int, ...] = ()
    port_conflict: bool = False
    unfit: str | None = None

    @property
    def why_unfit(self) -> str | None:
        """What makes this node unfit for another attempt; ``None`` when it is fit."""
        return texts.stuck(self.stuck_ranks) if self.stuck_ranks else self.unfit


class SignalReceived(Event):
    """Somebody asks the agent to stop, by this signal."""

    signum: int


# --- actions ---


class Action(Value):
    """Something that the loop has to do."""


class Rendezvous(Action):
    """Agree on ranks and addresses for an attempt; answered by one of the two rendezvous events."""

    round: int


class Start(Action):
    """Start the workers; answered by :class:`Started`, :class:`StartFailed` or :class:`GroupEnded`."""

    round: int
    restarts: int


class HungElsewhere(Value):
    """A worker that hangs on another node, as that node names it.

    Args:
        silence: for how many seconds it has given no sign of life.
        step: that it was in, if it said so.
        frame: where its main thread stands, as in ``RankSeen``, if that is known.
    """

    silence: float
    step: int | None = None
    frame: str | None = None


class Stop(Action):
    """Stop the group; :class:`GroupEnded` follows.

    Args:
        signum: the first signal.
        grace: seconds until SIGKILL.
        is_announced: the user knows why already.
        hung: the reason is a worker of another node, which hangs: the evidence of what it may wait for is
            taken first.
    """

    signum: int
    grace: float
    is_announced: bool = False
    hung: HungElsewhere | None = None


class CollectEvidence(Action):
    """Keep what tells why the attempt failed, before the next one begins."""


class AnnounceRestart(Action):
    """Tell the user, in one line, what died and that the workers start again; ``charged``: it was taken from
    the budget.
    """

    restarts_left: int
    charged: bool = True


class Replace(Action):
    """Start a process in the place of a worker; answered by :class:`WorkerReplaced` or
    :class:`ReplaceFailed`.
    """

    local_rank: int
    restarts: int


class ReportFailure(Action):
    """Tell the user why the job failed; ``message``: the reason when it is not a worker's failure."""

    message: str | None = None


class CloseRendezvous(Action):
    """No further attempt of this job will follow, on any node."""


class Exit(Action):
    """The end, with the exit code of the launcher."""

    code: int


# --- the function ---


def step(state: AgentState, event: Event) -> tuple[AgentState, list[Action]]:
    """Return where the agent stands after an event, and what to do, in order.

    Events that have no meaning in a phase (an exit reported after the end, a late answer) change nothing.
    """
    if state.phase.is_terminal:
        return state, []
    if isinstance(event, SignalReceived):
        return _on_signal(state, event)
    if isinstance(event, (WorkerExited, FailureSeen, GroupEnded)):
        return _on_group(state, event) if state.group_exists else (state, [])
    if isinstance(event, (WorkerSwept, WorkerReplaced, ReplaceFailed)):
        is_for_us = state.replaces and state.phase is Phase.RUNNING
        return _on_replacement(state, event) if is_for_us else (state, [])
    if isinstance(event, StartFailed):
        return _on_start_failed(state, event) if state.group_exists else (state, [])
    if isinstance(event, Started):
        return (state._next(Phase.RUNNING) if state.phase is Phase.STARTING else state), []
    if isinstance(event, Begin) and state.phase is Phase.INIT:
        return state._next(Phase.RENDEZVOUS), [Rendezvous(state.round)]
    if isinstance(event, RendezvousCompleted) and state.phase is Phase.RENDEZVOUS:
        new = state._next(
            Phase.STARTING, worker_failed=False, group_exists=True, replacing=frozenset(), met=()
        )
        return new, [Start(state.round, state.restarts)]
    if isinstance(event, RendezvousFailed) and state.phase is Phase.RENDEZVOUS:
        return _fail(state, event.message)
    return state, []


def _on_signal(state: AgentState, event: SignalReceived) -> tuple[AgentState, list[Action]]:
    if state.signum is not None:
        # Whoever asks twice wants it now.
        return state, [Stop(SIGKILL, 0.0)]
    if not state.group_exists:
        return state._next(Phase.STOPPED, signum=event.signum), [Exit(1)]
    return state._next(Phase.STOPPING, signum=event.signum), [Stop(event.signum, state.shutdown_timeout)]


def _on_start_failed(state: AgentState, event: StartFailed) -> tuple[AgentState, list[Action]]:
    ended = state._next(state.phase, group_exists=False)
    if state.signum is not None:
        return ended._next(Phase.STOPPED), [Exit(1)]
    if event.transient:
        return _restart(ended, event.message)
    return _fail(ended, event.message)


def _on_group(
    state: AgentState, event: WorkerExited | FailureSeen | GroupEnded
) -> tuple[AgentState, list[Action]]:
    if isinstance(event, WorkerExited):
        if state.replaces and state.phase is Phase.RUNNING and event.exitcode != 0:
            return _on_worker_to_replace(state, event.local_rank, event.met)
        failed = state.worker_failed or event.exitcode != 0
        return state._next(state.phase, worker_failed=failed), []
    if isinstance(event, FailureSeen):
        return state._next(Phase.STOPPING, worker_failed=True), []
    ended = state._next(state.phase, group_exists=False)
    if state.signum is not None:
        return ended._next(Phase.STOPPED), [CollectEvidence(), Exit(1)]
    if event.why_unfit is not None:
        return _fail(ended, texts.not_restarted(event.why_unfit), evidence=True)
    if event.outcome == "succeeded" and not state.worker_failed and not state.replacing:
        return ended._next(Phase.SUCCEEDED), [CloseRendezvous(), Exit(0)]
    if event.port_conflict and state.port_retries < MAX_PORT_RETRIES:
        again = ended._next(
            Phase.RENDEZVOUS, round=state.round + 1, port_retries=state.port_retries + 1, worker_failed=False
        )
        announce = AnnounceRestart(state.restarts_left, charged=False)
        return again, [CollectEvidence(), announce, Rendezvous(again.round)]
    return _restart(ended, evidence=True)


def _on_worker_to_replace(
    state: AgentState, local_rank: int, met: Meetings = ()
) -> tuple[AgentState, list[Action]]:
    restarts: int | None = state.restarts
    if not (state.replacing or has_not_met_since(state.met, met, local_rank)):
        restarts, state = used_after(state.restarts, state.max_restarts), state._next(state.phase, met=met)
    if restarts is None:
        return _stop_all(state)
    new = state._next(state.phase, restarts=restarts, replacing=state.replacing | {local_rank})
    return new, []


def _on_replacement(
    state: AgentState, event: WorkerSwept | WorkerReplaced | ReplaceFailed
) -> tuple[AgentState, list[Action]]:
    if event.local_rank not in state.replacing:
        if isinstance(event, ReplaceFailed):
            # It has exited with 0, and must not have.
            return _stop_all(state)
        if not isinstance(event, WorkerSwept):
            return state, []
        # It has exited with 0 when its timer had expired: it has failed all the same.
        state, stop = _on_worker_to_replace(state, event.local_rank)
        if stop:
            return state, stop
    if isinstance(event, WorkerReplaced):
        place = event.local_rank
        return state._next(
            state.phase, replacing=state.replacing - {place}, met=without(state.met, place)
        ), []
    if isinstance(event, ReplaceFailed) or event.is_stuck:
        return _stop_all(state)
    return state, [Replace(event.local_rank, state.restarts)]


def _stop_all(state: AgentState) -> tuple[AgentState, list[Action]]:
    """A worker has failed, and its place stays empty: what follows is as without ``replaces``."""
    return state._next(Phase.STOPPING, worker_failed=True), [Stop(SIGTERM, state.shutdown_timeout, True)]


def _restart(
    state: AgentState, message: str | None = None, *, evidence: bool = False
) -> tuple[AgentState, list[Action]]:
    """Start again if the budget allows it; otherwise the job fails, for this reason."""
    restarts = used_after(state.restarts, state.max_restarts)
    if restarts is None:
        return _fail(state, message, evidence=evidence)
    new = state._next(Phase.RENDEZVOUS, round=state.round + 1, restarts=restarts, worker_failed=False)
    collect: list[Action] = [CollectEvidence()] if evidence else []
    return new, [*collect, AnnounceRestart(new.restarts_left), Rendezvous(new.round)]


def _fail(
    state: AgentState, message: str | None = None, *, evidence: bool = False
) -> tuple[AgentState, list[Action]]:
    collect: list[Action] = [CollectEvidence()] if evidence else []
    return state._next(Phase.FAILED), [*collect, ReportFailure(message), CloseRendezvous(), Exit(1)]
