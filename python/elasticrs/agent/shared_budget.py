"""State machine, as a pure function, of an agent whose workers keep running when workers on other nodes fail.

The agents are members of a rendezvous of their own (:mod:`elasticrs.rendezvous.elastic.machine`), separate
from that of their workers. Its rounds serve as accounts of the restart budget: a failure ends a round, and
the leader charges the budget and begins the next round. No worker is stopped for that. Invariants, each
tested by a property test:

- **SHARE-1** a replacement is started only when no process of the failed worker is left, and the restart has
  been charged, either by the round that began since, or together with an earlier failure.
- **SHARE-2** a failure ends the round in which it is seen. Failures before the next round begins belong to
  the same charge, and so do failures of workers that have not met again since. Each place counts once.
- **SHARE-3** a group is started only when no process of an earlier group is left, and never after a group has
  succeeded.
- **SHARE-4** the agent ends once, and only when no process of its workers is left.
"""

from __future__ import annotations

from elasticrs.agent.state_machine import (
    SIGKILL,
    SIGTERM,
    Event,
    GroupEnded,
    Replace,
    ReplaceFailed,
    Start,
    Started,
    StartFailed,
    Stop,
    WorkerExited,
    WorkerReplaced,
    WorkerSwept,
)
from elasticrs.job.restart_budget import has_not_met_since, without
from elasticrs.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    from elasticrs.job.restart_budget import Meetings

    Group: TypeAlias = Literal["none", "running", "stopping"]
    Effect: TypeAlias = (
        "Start | Replace | Stop | Report | SayIdle | SayDone | SayEnded | SayNotStarted | Finish"
    )


class NodeState(Value):
    """State of this node.

    Args:
        grace: seconds between the first signal and SIGKILL.
        group: state of this node's workers: none, running (or being started), or being stopped.
        has_succeeded: true if all workers have exited with 0.
        in_round: true if the node takes part in a round of the rendezvous.
        restarts: number of restarts charged so far on all nodes.
        failed: local ranks of failed workers that have no running replacement yet.
        swept: those of the failed workers of which no process is left.
        paid: those of the failed workers whose restart was charged, so that they may be replaced.
        met: last meetings of the workers when a failure ended the last round, except for workers that were
            replaced since.
        unfit: reason why this node cannot take part in another round; ``None`` if it can.
        has_ended: true if the job has ended for this node.
        has_finished: true if the agent has ended.
    """

    grace: float
    group: Group = "none"
    has_succeeded: bool = False
    in_round: bool = False
    restarts: int = 0
    failed: frozenset[int] = frozenset()
    swept: frozenset[int] = frozenset()
    paid: frozenset[int] = frozenset()
    met: Meetings = ()
    unfit: str | None = None
    has_ended: bool = False
    has_finished: bool = False


# --- events, besides those of the workers in :mod:`elasticrs.agent.state_machine` ---


class WorkerFailed(Event):
    """A worker ended and its exit code is not 0. ``met`` holds the last meetings of all workers of the
    node.
    """

    local_rank: int
    met: Meetings = ()


class RoundBegan(Event):
    """The leader has begun a round with this node."""

    round: int
    restarts: int


class RoundEnded(Event):
    """The round has ended. ``met`` holds the last meetings of the workers, and is empty if no worker has
    failed.
    """

    met: Meetings = ()


class MustStop(Event):
    """The workers must be stopped with this signal, or be killed at once if the lease of this node has
    expired.
    """

    signum: int
    is_fence: bool = False


class JobEnded(Event):
    """The job has ended for this node. ``signum`` is sent to workers that are still running."""

    signum: int = SIGTERM


# --- effects, besides the actions in :mod:`elasticrs.agent.state_machine` ---


class Report(Value):
    """Report to the rendezvous that this worker has failed."""

    local_rank: int


class SayIdle(Value):
    """Report to the rendezvous that its next round need not wait for this node."""


class SayDone(Value):
    """Report to the rendezvous that the workers of this node have succeeded."""


class SayEnded(Value):
    """Report to the rendezvous that no process of the workers is left. ``unfit`` is the reason why this node
    cannot take part in another round; ``None`` if it can.
    """

    unfit: str | None = None


class SayNotStarted(Value):
    """Report to the rendezvous that the workers could not be started."""

    message: str
    transient: bool


class Finish(Value):
    """The end of the agent."""


def step(state: NodeState, event: Event) -> tuple[NodeState, list[Effect]]:
    """Return the new state of this node after an event, and the actions to execute, in order.

    Events that have no meaning in the current state change nothing.
    """
    if state.has_finished:
        return state, []
    match event:
        case RoundBegan():
            return _begin(state.replaced(in_round=True, restarts=event.restarts), event)
        case RoundEnded() if state.in_round:
            return state.replaced(in_round=False, met=event.met), [SayIdle()]
        case MustStop():
            return _must_stop(state, event)
        case JobEnded():
            return _end(state.replaced(has_ended=True, in_round=False), event)
        case WorkerFailed() if state.group == "running":
            return _fail(state, event)
        case WorkerSwept() if state.group == "running":
            return _swept(state, event)
        case WorkerReplaced():
            return _taken(state, event.local_rank), []
        case ReplaceFailed() if state.group == "running":
            return _stop(state, SIGTERM)
        case GroupEnded() if state.group != "none":
            return _group_ended(state, event)
        case StartFailed() if state.group != "none":
            return _gone(state, SayNotStarted(event.message, event.transient))
        case Started() | WorkerExited() | _:
            return state, []


def _begin(state: NodeState, event: RoundBegan) -> tuple[NodeState, list[Effect]]:
    if state.has_succeeded:
        return state, [SayDone()]
    if state.group == "none" and state.unfit is not None:
        return state.replaced(in_round=False), [SayEnded(state.unfit)]
    if state.group == "none":
        return state.replaced(group="running", met=()), [Start(event.round, event.restarts)]
    if state.group == "stopping" or not state.failed:
        return state, []
    if state.met:
        return _pay(state, state.failed)
    # The last round ended for another reason, so no restart was charged for these failures. Report one of
    # them now.
    return state, [Report(min(state.failed))]


def _pay(state: NodeState, places: frozenset[int]) -> tuple[NodeState, list[Effect]]:
    ready = sorted((places & state.swept) - state.paid)
    return state.replaced(paid=state.paid | places), [Replace(place, state.restarts) for place in ready]


def _fail(state: NodeState, event: WorkerFailed) -> tuple[NodeState, list[Effect]]:
    place = event.local_rank
    if place in state.failed:
        return state, []
    state = state.replaced(failed=state.failed | {place})
    if not state.in_round:
        # Wait for the next round, which decides about this failure.
        return state, []
    if has_not_met_since(state.met, event.met, place):
        return _pay(state, frozenset({place}))
    return state, [Report(place)]


def _swept(state: NodeState, event: WorkerSwept) -> tuple[NodeState, list[Effect]]:
    place = event.local_rank
    effects: list[Effect] = []
    if place not in state.failed:
        # The worker's timer expired but the worker exited with 0. It counts as failed.
        state, effects = _fail(state, WorkerFailed(place))
    if event.is_stuck:
        return _stop(state, SIGTERM, effects)
    state = state.replaced(swept=state.swept | {place})
    return state, [*effects, *([Replace(place, state.restarts)] if place in state.paid else [])]


def _taken(state: NodeState, place: int) -> NodeState:
    only = {place}
    return state.replaced(
        failed=state.failed - only,
        swept=state.swept - only,
        paid=state.paid - only,
        met=without(state.met, place),
    )


def _must_stop(state: NodeState, event: MustStop) -> tuple[NodeState, list[Effect]]:
    if state.group == "none":
        return state.replaced(in_round=False), [SayEnded()] if state.in_round else []
    if event.is_fence:
        return state.replaced(group="stopping"), [Stop(SIGKILL, 0.0, is_announced=True)]
    return _stop(state, event.signum)


def _stop(
    state: NodeState, signum: int, effects: list[Effect] | None = None
) -> tuple[NodeState, list[Effect]]:
    if state.group == "stopping":
        return state, effects or []
    return state.replaced(group="stopping"), [*(effects or []), Stop(signum, state.grace, is_announced=True)]


def _end(state: NodeState, event: JobEnded) -> tuple[NodeState, list[Effect]]:
    if state.group == "none":
        return state.replaced(has_finished=True), [Finish()]
    return _stop(state, event.signum)


def _group_ended(state: NodeState, event: GroupEnded) -> tuple[NodeState, list[Effect]]:
    has_succeeded = event.outcome == "succeeded" and state.group == "running" and not state.failed
    if not has_succeeded:
        return _gone(state, SayEnded(event.why_unfit))
    return _gone(state.replaced(has_succeeded=True), SayDone())


def _gone(state: NodeState, say: SayDone | SayEnded | SayNotStarted) -> tuple[NodeState, list[Effect]]:
    """Handle the end of the group, of which no process is left. If the workers have succeeded, this node
    remains part of the running round.
    """
    state = state.replaced(group="none", failed=frozenset(), swept=frozenset(), paid=frozenset(), met=())
    if state.has_ended:
        return state.replaced(has_finished=True), [Finish()]
    if isinstance(say, SayEnded):
        state = state.replaced(unfit=say.unfit)
    if not state.in_round:
        return state, []
    return state.replaced(in_round=isinstance(say, SayDone)), [say]
