"""Pure function that decides how one node's agent reacts to events, without I/O, clocks or randomness.

:func:`step` returns the next state, and the actions that the loop must execute, in order. The phases::

    INIT → RENDEZVOUS → STARTING → RUNNING → STOPPING → RENDEZVOUS …  (a restart)
                                                      → SUCCEEDED | FAILED | STOPPED

Invariants, each tested by a property test:

- **AGENT-1** :class:`Start` is requested only after all processes of the previous workers have exited.
- **AGENT-2** A failure is followed by a restart only if the restart policy and the restart budget allow it.
  Workers are restarted without a charge to the budget only after a port conflict, at most
  :data:`MAX_PORT_RETRIES` times, and after a change of the nodes that take part.
- **AGENT-3** Terminal phases are final. Each is entered with exactly one :class:`Exit`, the last action.
- **AGENT-4** The agent's exit code is 0 only if nothing asked the agent to stop, and each worker of the last
  group exited with 0 or the rendezvous does not need this node.
- **AGENT-5** After the first signal to stop, no process is started, and the agent exits when all workers have
  ended. A request to stop at once, or a second request, kills them.
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
from elasticrs._engine.job.restart_policy import (
    NO_EVIDENCE,
    Evidence,
    FailureHistory,
    RestartDecision,
    RestartSettings,
    Verdict,
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
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED)

    @property
    def has_workers(self) -> bool:
        """True if workers have been started and some of them may still be running."""
        return self in (Phase.RUNNING, Phase.STOPPING)


class AgentState(Value):
    """State of the agent, on which all its decisions depend.

    Args:
        shutdown_timeout: seconds between the first signal and SIGKILL.
        round: number of the attempt, from 1. Every attempt counts.
        stopped_by: the restart policy's decision to stop the job, while workers are still running.
        port_retries: number of attempts that were repeated because another process had taken the port of the
            workers' store.
        signum: first signal that asked the agent to stop.
        worker_failed: true if a worker of the current group has failed.
        group_exists: true if a group of workers may have processes: from :class:`Start` until the start fails
            or the group ends.
        regroups: true if the workers are being stopped because the nodes that take part have changed, or
            because a user wants a restart.
        lost: reason why the rendezvous failed while workers were running.
        leaves: true if the workers are being stopped because the rendezvous does not need this node any more.
        replaces: true if a failed worker is replaced while the others continue.
        replacing: local ranks of failed workers that have no running replacement yet.
        met: last rendezvous of each worker at the time when a restart was charged; without workers that were
            replaced since then.
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
    regroups: bool = False
    lost: str | None = None
    leaves: bool = False
    replaces: bool = False
    replacing: frozenset[int] = frozenset()
    met: Meetings = ()

    @property
    def restarts(self) -> int:
        """Number of charged restarts, which workers see as ``TORCHELASTIC_RESTART_COUNT``."""
        return self.history.charged

    def restarts_left(self, now: float) -> int:
        """Return the restarts that the budget still allows at ``now`` (seconds)."""
        used = self.restarts
        if self.policy.window is not None:
            used = len(recent(self.policy, self.history, now))
        return self.policy.max_restarts - used


class Event(Value): ...


class Begin(Event):
    """The agent's loop is ready."""


class RendezvousCompleted(Event):
    """Ranks and addresses of the next attempt are known."""


class RendezvousFailed(Event):
    """The rendezvous failed, so no further attempt is possible. ``message`` tells the user the reason."""

    message: str


class NotNeeded(Event):
    """The rendezvous does not need this node any more, because the other nodes have finished the job."""


class MembershipChanged(Event):
    """Nodes wait to join the job, so the workers of all nodes must be restarted, to form a larger group."""


class Started(Event): ...


class StartFailed(Event):
    """The start failed, and no worker process is left. ``transient``: another try may succeed soon, because
    memory or process slots had run out, or the nursery (the process that starts the workers) was killed.
    ``has_no_program``: this node cannot execute the program, but other nodes may.
    """

    message: str
    transient: bool = False
    evidence: Evidence = NO_EVIDENCE
    has_no_program: bool = False


class DelayOver(Event): ...


class HangSeen(Event):
    """A worker of a multi-node job has hung but has not been killed yet."""

    local_rank: int


class FailureSeen(Event):
    """First failure of a worker in this attempt. The others have already been signalled."""

    local_rank: int


class WorkerExited(Event):
    """A worker has exited. A negative exit code is the number of a signal. ``met`` has the number of each
    worker's last rendezvous round, by local rank.
    """

    local_rank: int
    exitcode: int | None
    met: Meetings = ()
    evidence: Evidence = NO_EVIDENCE


class WorkerSwept(Event):
    """All processes of a failed worker have exited, or some survived SIGKILL (``is_stuck``)."""

    local_rank: int
    is_stuck: bool = False


class WorkerReplaced(Event):
    """The replacement for a failed worker is running."""

    local_rank: int


class ReplaceFailed(Event):
    local_rank: int


class GroupEnded(Event):
    """All processes of the group have exited, except processes that cannot be killed (``stuck_ranks``).

    Args:
        port_conflict: true if the workers' store could not bind the port that the agent had chosen.
        unfit: reason other than ``stuck_ranks`` why this node cannot be used again.
        evidence: facts about the failure for the restart policy; empty if the group succeeded.
        found_unfit: reason why a check found this node unfit.
    """

    outcome: Outcome
    stuck_ranks: tuple[int, ...] = ()
    port_conflict: bool = False
    unfit: str | None = None
    evidence: Evidence = NO_EVIDENCE
    found_unfit: str | None = None

    @property
    def why_stuck(self) -> str | None:
        """Reason why this node cannot run another attempt even if its checks pass."""
        return phrases.stuck(self.stuck_ranks) if self.stuck_ranks else self.unfit

    @property
    def why_unfit(self) -> str | None:
        """Reason why this node should not run another attempt."""
        return self.why_stuck or self.found_unfit


class SignalReceived(Event):
    """The agent received a request to stop the job. ``ends_job``: stop on all nodes; ``None``: as configured.
    ``now``: kill the workers immediately, as after a second request. ``order``: the ``elasticctl`` command
    that made the request; empty if the request was a signal.
    """

    signum: int
    ends_job: bool | None = None
    now: bool = False
    order: str = ""


class RestartRequested(Event):
    """A user wants all workers of the job to be restarted. This costs no restart of the budget."""

    reason: str


class Action(Value):
    """Base class of the actions that the agent's loop executes."""


class Rendezvous(Action):
    """Agree on ranks and addresses. Answered by :class:`RendezvousCompleted` or :class:`RendezvousFailed`."""

    round: int


class Delay(Action):
    """Wait before the next attempt. Answered by :class:`DelayOver`."""

    seconds: float


class Start(Action):
    """Start the workers. Answered by :class:`Started`, :class:`StartFailed` or :class:`GroupEnded`."""

    round: int
    restarts: int


class HungElsewhere(Value):
    """Hung worker of another node: the seconds since its last heartbeat, its step, its innermost frame."""

    silence: float
    step: int | None = None
    frame: str | None = None


class Stop(Action):
    """Stop the workers. SIGKILL follows after ``grace`` seconds. Answered by :class:`GroupEnded`.
    ``is_announced``: the user knows the reason. ``hung``: a worker on another node that may be waiting for
    ranks here, so this node first collects evidence. ``is_planned``: nothing has failed, so the workers may
    first go on to a common step (:mod:`.agreed_step`). ``node_leaves``: a node leaves the job, which the
    others continue.
    """

    signum: int
    grace: float
    is_announced: bool = False
    hung: HungElsewhere | None = None
    is_planned: bool = False
    node_leaves: bool = False


class AnnounceRestart(Action):
    """Tell the user what failed and that the workers are restarted after ``delay`` seconds."""

    restarts_left: int
    charged: bool = True
    delay: float = 0.0


class Replace(Action):
    """Replace a failed worker. Answered by :class:`WorkerReplaced` or :class:`ReplaceFailed`."""

    local_rank: int
    restarts: int


class ReportFailure(Action):
    """Report why the job failed. ``message`` is ``None`` if a worker's failure is the reason. ``is_outside``:
    the reason is an error outside of the workers, for example of the rendezvous.
    """

    message: str | None = None
    verdict: Verdict = Verdict.FAILED
    is_outside: bool = False


class Exit(Action):
    code: int


def step(state: AgentState, event: Event) -> tuple[AgentState, list[Action]]:
    """Return the state after an event, and the actions to execute in order. Ignore unexpected events."""
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
    return _on_rendezvous(state, event)


def _on_rendezvous(state: AgentState, event: Event) -> tuple[AgentState, list[Action]]:
    ends = (MembershipChanged, RestartRequested, RendezvousFailed, NotNeeded)
    if state.phase is Phase.RUNNING and isinstance(event, ends):
        stopping = state.replaced(
            phase=Phase.STOPPING,
            regroups=isinstance(event, (MembershipChanged, RestartRequested)),
            lost=event.message if isinstance(event, RendezvousFailed) else None,
            leaves=isinstance(event, NotNeeded),
        )
        is_planned = stopping.regroups
        return stopping, [Stop(SIGTERM, state.shutdown_timeout, is_announced=True, is_planned=is_planned)]
    if state.phase is not Phase.RENDEZVOUS or state.is_delayed:
        return state, []
    if isinstance(event, RendezvousCompleted):
        new = state.replaced(
            phase=Phase.STARTING,
            worker_failed=False,
            group_exists=True,
            regroups=False,
            replacing=frozenset(),
            met=(),
        )
        return new, [Start(state.round, state.restarts)]
    if isinstance(event, RendezvousFailed):
        return _fail(state, event.message, is_outside=True)
    if isinstance(event, NotNeeded):
        return state.replaced(phase=Phase.SUCCEEDED), [Exit(0)]
    return state, []


def _on_signal(state: AgentState, event: SignalReceived) -> tuple[AgentState, list[Action]]:
    if state.signum is not None:
        # A second stop request kills the workers at once.
        return state, [Stop(SIGKILL, 0.0)]
    if not state.group_exists:
        return state.replaced(phase=Phase.STOPPED, signum=event.signum), [Exit(1)]
    is_planned = state.phase is Phase.RUNNING and not state.worker_failed
    stop = Stop(event.signum, state.shutdown_timeout, is_planned=is_planned)
    if event.now:
        stop = Stop(SIGKILL, 0.0)
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
    return _on_unsuccessful_end(ended, event)


def _on_unsuccessful_end(state: AgentState, event: GroupEnded) -> tuple[AgentState, list[Action]]:
    if state.signum is not None:
        return state.replaced(phase=Phase.STOPPED), [Exit(1)]
    if event.why_unfit is not None:
        return _fail(state, phrases.not_restarted(event.why_unfit), Verdict.UNFIT)
    if state.lost is not None:
        return _fail(state, state.lost, is_outside=True)
    if state.leaves:
        return state.replaced(phase=Phase.SUCCEEDED), [Exit(0)]
    if state.regroups and event.outcome == "stopped":
        again = state.replaced(phase=Phase.RENDEZVOUS, round=state.round + 1)
        return again, [Rendezvous(again.round)]
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
        return _stop_all(state.replaced(stopped_by=RestartDecision(history, Verdict.PERMANENT, reason)))
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
    """Stop all workers, because a failed one cannot be replaced. Then all are restarted, or the job fails."""
    stop = Stop(SIGTERM, state.shutdown_timeout, is_announced=True)
    return state.replaced(phase=Phase.STOPPING, worker_failed=True), [stop]


def _restart(
    state: AgentState, evidence: Evidence, message: str | None = None
) -> tuple[AgentState, list[Action]]:
    """Restart all workers if the restart policy allows it. Otherwise, the job fails (reason: ``message``)."""
    decision = state.stopped_by or decide(state.policy, state.history, evidence)
    if decision.stop is not None:
        if decision.stop is Verdict.PERMANENT:
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
    state: AgentState,
    message: str | None = None,
    verdict: Verdict = Verdict.FAILED,
    *,
    is_outside: bool = False,
) -> tuple[AgentState, list[Action]]:
    report = ReportFailure(message, verdict, is_outside=is_outside)
    return state.replaced(phase=Phase.FAILED), [report, Exit(1)]
