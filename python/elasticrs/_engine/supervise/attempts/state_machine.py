"""Pure function that decides how one node's agent reacts to events, without I/O, clocks or randomness.

:func:`step` takes a state and an event. It returns the next state, and the actions that the loop must
execute, in order. The order of phases::

    INIT → RENDEZVOUS → STARTING → RUNNING → STOPPING → RENDEZVOUS …  (a restart)
                                                      → SUCCEEDED | FAILED | STOPPED

Invariants, each tested by a property test:

- **AGENT-1** :class:`Start` is requested only after all processes of an earlier group have exited.
- **AGENT-2** A failure is followed by a restart only if the restart policy allows it, so the charged restarts
  stay within the budget. Only a port conflict is retried without a charge, at most :data:`MAX_PORT_RETRIES`
  times.
- **AGENT-3** The terminal phases are final. Each is entered with exactly one :class:`Exit`, which is the last
  action.
- **AGENT-4** The exit code is 0 only if every worker of the last group exited with 0 and no stop was
  requested.
- **AGENT-5** After the first stop signal, no process is started, and the agent exits when the group has
  ended.
- **AGENT-6** A node is not used again if a worker survived SIGKILL or hung in the kernel.
- **AGENT-7** With ``replaces``, a failed worker is replaced after all its processes have exited, and the
  other workers keep running, as long as the restart budget lasts. A single restart is charged for all workers
  that fail before the replacements are running. It also covers later failures of workers that have not met
  the others in a rendezvous since then.
"""

from __future__ import annotations

import signal
from enum import Enum

from elasticrs._engine.job import phrases
from elasticrs._engine.job.failure_cause import Verdict
from elasticrs._engine.job.restart_policy import (
    NO_EVIDENCE,
    Evidence,
    FailureHistory,
    RestartDecision,
    RestartSettings,
    StopKind,
    decide,
    has_not_met_since,
    recent,
    why_permanent,
    without,
)
from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    from elasticrs._engine.job.restart_policy import Meetings

    Outcome: TypeAlias = Literal["succeeded", "failed", "stopped", "lost"]

MAX_PORT_RETRIES = 3

SIGTERM: int = signal.SIGTERM
SIGKILL: int = signal.SIGKILL


class Phase(Enum):
    """Phase of the agent of one node."""

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
        """True if no other phase can follow this one."""
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED)


class AgentState(Value):
    """State of the agent, on which all its decisions depend.

    Args:
        policy: settings of the restart policy.
        shutdown_timeout: seconds between the first signal and SIGKILL.
        phase: phase of the agent.
        round: number of the attempt, from 1. Every attempt counts.
        history: failures so far.
        stopped_by: decision of the restart policy to stop the job while workers are still running; ``None``
            if there is none.
        is_delayed: true while the next attempt waits for the delay of the restart policy.
        port_retries: number of attempts that were repeated because another process took the port of the
            workers' store.
        signum: the first signal that asked the agent to stop; ``None`` if there was none.
        worker_failed: true if a worker of the current group has failed.
        group_exists: true if processes of a group may exist: after :class:`Start`, until the start fails or
            :class:`GroupEnded`.
        replaces: true if a failed worker is replaced while the others continue.
        replacing: local ranks of failed workers that have no running replacement yet.
        met: last rendezvous of each worker at the time when a failure was charged, except for workers that
            have been replaced since then.
    """

    policy: RestartSettings
    shutdown_timeout: float
    phase: Phase = Phase.INIT
    round: int = 1
    history: FailureHistory = FailureHistory()
    stopped_by: RestartDecision | None = None
    is_delayed: bool = False
    port_retries: int = 0
    signum: int | None = None
    worker_failed: bool = False
    group_exists: bool = False
    replaces: bool = False
    replacing: frozenset[int] = frozenset()
    met: Meetings = ()

    @property
    def restarts(self) -> int:
        """Number of restarts that were counted against the restart budget. Workers see this number as
        ``TORCHELASTIC_RESTART_COUNT``.
        """
        return self.history.charged

    def restarts_left(self, now: float) -> int:
        """Return the number of restarts that the budget still allows. ``now`` is the time in seconds."""
        used = self.restarts
        if self.policy.window is not None:
            used = len(recent(self.policy, self.history, now))
        return self.policy.max_restarts - used


# --- events ---


class Event(Value):
    """Base class of the events that the agent reacts to."""


class Begin(Event):
    """The agent's loop is ready."""


class RendezvousCompleted(Event):
    """Ranks and addresses of the next attempt are known."""


class RendezvousFailed(Event):
    """The rendezvous failed, so no further attempt is possible. ``message`` tells the user the reason."""

    message: str


class Started(Event):
    """All workers of the attempt are running."""


class StartFailed(Event):
    """The workers could not be started, for the reason ``message``, and all their processes have exited.
    ``transient`` is true if another try may succeed soon (no memory, no process slots, a killed nursery).
    ``has_no_program`` is true if the program cannot be executed on this node, although other nodes may be
    able to execute it.
    """

    message: str
    transient: bool = False
    evidence: Evidence = NO_EVIDENCE
    has_no_program: bool = False


class DelayOver(Event):
    """The delay before the next attempt is over."""


class HangSeen(Event):
    """A worker of a multi-node job has hung but has not been killed yet."""

    local_rank: int


class FailureSeen(Event):
    """The first failure of a worker in this attempt. The other workers have already been signalled."""

    local_rank: int


class WorkerExited(Event):
    """A worker has exited. The exit code is negative if a signal killed the worker, and ``None`` if it is
    unknown.

    ``met`` lists the number of each worker's last rendezvous round, by local rank.
    """

    local_rank: int
    exitcode: int | None
    met: Meetings = ()
    evidence: Evidence = NO_EVIDENCE


class WorkerSwept(Event):
    """All processes of a failed worker have exited, so the worker can be replaced. If ``is_stuck`` is true,
    some processes survived SIGKILL instead, and the worker cannot be replaced.
    """

    local_rank: int
    is_stuck: bool = False


class WorkerReplaced(Event):
    """The replacement for a failed worker is running."""

    local_rank: int


class ReplaceFailed(Event):
    """The replacement for a failed worker could not be started."""

    local_rank: int


class GroupEnded(Event):
    """All processes of the group have exited, except processes that cannot be killed.

    Args:
        outcome: outcome of the group.
        stuck_ranks: local ranks of the workers that survived SIGKILL.
        port_conflict: true if the workers' store could not bind the port that the agent had chosen.
        unfit: reason other than ``stuck_ranks`` why this node cannot be used again; ``None`` if there is
            none.
        evidence: evidence about the failure; empty if the group succeeded.
        found_unfit: reason why a check found this node unfit; ``None`` if no check did.
    """

    outcome: Outcome
    stuck_ranks: tuple[int, ...] = ()
    port_conflict: bool = False
    unfit: str | None = None
    evidence: Evidence = NO_EVIDENCE
    found_unfit: str | None = None

    @property
    def why_stuck(self) -> str | None:
        """Reason why this node cannot run another attempt even if its checks pass. ``None`` if there is no
        such reason.
        """
        return phrases.stuck(self.stuck_ranks) if self.stuck_ranks else self.unfit

    @property
    def why_unfit(self) -> str | None:
        """Reason why this node should not run another attempt, such as a failed node check. ``None`` if there
        is no such reason.
        """
        return self.why_stuck or self.found_unfit


class SignalReceived(Event):
    """The agent received the signal ``signum`` as a request to stop."""

    signum: int


# --- actions ---


class Action(Value):
    """Base class of the actions that the agent's loop executes."""


class Rendezvous(Action):
    """Agree on ranks and addresses for an attempt. The loop responds with :class:`RendezvousCompleted` or
    :class:`RendezvousFailed`.
    """

    round: int


class Delay(Action):
    """Wait for a number of seconds before the next attempt. The loop responds with :class:`DelayOver`."""

    seconds: float


class Start(Action):
    """Start the workers. The loop responds with :class:`Started`, :class:`StartFailed` or
    :class:`GroupEnded`.
    """

    round: int
    restarts: int


class HungElsewhere(Value):
    """A worker that hangs on another node, as reported by that node.

    Args:
        silence: seconds since the worker's last heartbeat.
        step: training step of the worker; ``None`` if its heartbeats had no steps.
        frame: stack frame of the worker's main thread, as in ``RankSeen``; ``None`` if unknown.
    """

    silence: float
    step: int | None = None
    frame: str | None = None


class Stop(Action):
    """Stop the workers. The loop responds with :class:`GroupEnded`.

    Args:
        signum: signal to send first.
        grace: seconds from the first signal until SIGKILL.
        is_announced: true if the user has already been told the reason.
        hung: hung worker on another node that is the reason for the stop; ``None`` otherwise. Before the
            stop, this node collects evidence about the ranks for which the hung worker may be waiting.
    """

    signum: int
    grace: float
    is_announced: bool = False
    hung: HungElsewhere | None = None


class CollectEvidence(Action):
    """Read the OOM kill counters after the workers have exited, and release the workers' store port."""


class AnnounceRestart(Action):
    """Print a line that says what failed and that the workers are restarted after ``delay`` seconds.
    ``charged`` is true if the restart was charged to the budget.
    """

    restarts_left: int
    charged: bool = True
    delay: float = 0.0


class Replace(Action):
    """Start a replacement for a failed worker. The loop responds with :class:`WorkerReplaced` or
    :class:`ReplaceFailed`.
    """

    local_rank: int
    restarts: int


class ReportFailure(Action):
    """Report why the job failed. ``message`` is the reason, or ``None`` if a worker's failure is
    the reason.
    """

    message: str | None = None
    verdict: Verdict = Verdict.FAILED


class Exit(Action):
    """Exit the launcher with the exit code ``code``."""

    code: int


# --- the transition function ---


def step(state: AgentState, event: Event) -> tuple[AgentState, list[Action]]:
    """Return the new state of the agent after an event, and the actions to execute, in order.

    An event that has no meaning in the current phase, such as a late response, changes nothing.
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
        return (state.replaced(phase=Phase.RUNNING) if state.phase is Phase.STARTING else state), []
    if isinstance(event, DelayOver) and state.is_delayed:
        return state.replaced(is_delayed=False), [Rendezvous(state.round)]
    if isinstance(event, Begin) and state.phase is Phase.INIT:
        return state.replaced(phase=Phase.RENDEZVOUS), [Rendezvous(state.round)]
    if state.phase is not Phase.RENDEZVOUS or state.is_delayed:
        return state, []
    if isinstance(event, RendezvousCompleted):
        new = state.replaced(
            phase=Phase.STARTING, worker_failed=False, group_exists=True, replacing=frozenset(), met=()
        )
        return new, [Start(state.round, state.restarts)]
    if isinstance(event, RendezvousFailed):
        return _fail(state, event.message)
    return state, []


def _on_signal(state: AgentState, event: SignalReceived) -> tuple[AgentState, list[Action]]:
    if state.signum is not None:
        # A second stop request kills the workers at once.
        return state, [Stop(SIGKILL, 0.0)]
    if not state.group_exists:
        return state.replaced(phase=Phase.STOPPED, signum=event.signum), [Exit(1)]
    stop = Stop(event.signum, state.shutdown_timeout)
    return state.replaced(phase=Phase.STOPPING, signum=event.signum), [stop]


def _on_start_failed(state: AgentState, event: StartFailed) -> tuple[AgentState, list[Action]]:
    ended = state.replaced(group_exists=False)
    if state.signum is not None:
        return ended.replaced(phase=Phase.STOPPED), [Exit(1)]
    if event.transient:
        return _restart(ended, event.evidence, event.message)
    return _fail(ended, event.message, Verdict.PERMANENT)


def _on_group(
    state: AgentState, event: WorkerExited | FailureSeen | GroupEnded
) -> tuple[AgentState, list[Action]]:
    if isinstance(event, WorkerExited):
        if state.replaces and state.phase is Phase.RUNNING and event.exitcode != 0:
            return _on_worker_to_replace(state, event.local_rank, event.met, event.evidence)
        return state.replaced(worker_failed=state.worker_failed or event.exitcode != 0), []
    if isinstance(event, FailureSeen):
        return state.replaced(phase=Phase.STOPPING, worker_failed=True), []
    ended = state.replaced(group_exists=False)
    has_succeeded = event.outcome == "succeeded" and not state.worker_failed and not state.replacing
    if has_succeeded and state.signum is None and event.why_unfit is None:
        return ended.replaced(phase=Phase.SUCCEEDED), [Exit(0)]
    new, actions = _on_unsuccessful_end(ended, event)
    return new, [CollectEvidence(), *actions]


def _on_unsuccessful_end(state: AgentState, event: GroupEnded) -> tuple[AgentState, list[Action]]:
    if state.signum is not None:
        return state.replaced(phase=Phase.STOPPED), [Exit(1)]
    if event.why_unfit is not None:
        return _fail(state, phrases.not_restarted(event.why_unfit), Verdict.UNFIT)
    if event.port_conflict and state.stopped_by is None and state.port_retries < MAX_PORT_RETRIES:
        retries = state.port_retries + 1
        again = state.replaced(phase=Phase.RENDEZVOUS, round=state.round + 1, port_retries=retries)
        announce = AnnounceRestart(state.restarts_left(event.evidence.now), charged=False)
        return again, [announce, Rendezvous(again.round)]
    return _restart(state, event.evidence)


def _on_worker_to_replace(
    state: AgentState, local_rank: int, met: Meetings = (), evidence: Evidence = NO_EVIDENCE
) -> tuple[AgentState, list[Action]]:
    history = state.history
    if not (state.replacing or has_not_met_since(state.met, met, local_rank)):
        decision = decide(state.policy, history, evidence)
        history, state = decision.history, state.replaced(met=met)
        if decision.stop is not None:
            return _stop_all(state.replaced(stopped_by=decision))
    elif (reason := why_permanent(evidence, history)) is not None:
        return _stop_all(state.replaced(stopped_by=RestartDecision(history, StopKind.PERMANENT, reason)))
    return state.replaced(history=history, replacing=state.replacing | {local_rank}), []


def _on_replacement(
    state: AgentState, event: WorkerSwept | WorkerReplaced | ReplaceFailed
) -> tuple[AgentState, list[Action]]:
    if event.local_rank not in state.replacing:
        if isinstance(event, ReplaceFailed):
            # Stop all workers, because this worker exited with 0 in the middle of the training.
            return _stop_all(state)
        if not isinstance(event, WorkerSwept):
            return state, []
        # The worker exceeded a timer before it exited with 0, so treat it as failed.
        state, stop = _on_worker_to_replace(state, event.local_rank)
        if stop:
            return state, stop
    if isinstance(event, WorkerReplaced):
        place = event.local_rank
        return state.replaced(replacing=state.replacing - {place}, met=without(state.met, place)), []
    if isinstance(event, ReplaceFailed) or event.is_stuck:
        return _stop_all(state)
    return state, [Replace(event.local_rank, state.restarts)]


def _stop_all(state: AgentState) -> tuple[AgentState, list[Action]]:
    """Stop all workers, because a failed worker cannot be replaced. After that, either all workers are
    restarted or the job fails.
    """
    stop = Stop(SIGTERM, state.shutdown_timeout, is_announced=True)
    return state.replaced(phase=Phase.STOPPING, worker_failed=True), [stop]


def _restart(
    state: AgentState, evidence: Evidence, message: str | None = None
) -> tuple[AgentState, list[Action]]:
    """Restart all workers if the restart policy allows it. Otherwise, fail the job.

    ``message`` is reported as the reason for the failure, unless the policy has found that another attempt
    would fail in the same way.
    """
    decision = state.stopped_by or decide(state.policy, state.history, evidence)
    if decision.stop is not None:
        if decision.stop is StopKind.PERMANENT:
            return _fail(state, decision.reason, Verdict.PERMANENT)
        return _fail(state, message)
    delay = decision.delay
    new = state.replaced(
        phase=Phase.RENDEZVOUS,
        round=state.round + 1,
        history=decision.history,
        is_delayed=delay > 0,
    )
    announce = AnnounceRestart(new.restarts_left(evidence.now), delay=delay)
    return new, [announce, Delay(delay) if delay > 0 else Rendezvous(new.round)]


def _fail(
    state: AgentState, message: str | None = None, verdict: Verdict = Verdict.FAILED
) -> tuple[AgentState, list[Action]]:
    return state.replaced(phase=Phase.FAILED), [ReportFailure(message, verdict), Exit(1)]
