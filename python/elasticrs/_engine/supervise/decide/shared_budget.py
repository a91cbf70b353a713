"""State machine (a pure function) of an agent whose workers keep running when workers on other nodes fail.

The agents have a rendezvous of their own (:mod:`.machine`), separate from that of the workers, to count
restarts: a failure of a worker ends the agents' round. Then their leader charges a restart to the budget of
the job, and starts the next round. No worker is stopped for a new round. Invariants, each tested by a
property test:

- **SHARE-1** A failed worker is replaced only after all its processes have exited and its restart has been
  charged. The charge is made by a round that started after the failure, or was made for an earlier failure.
- **SHARE-2** A failure ends the agents' round in which it is seen. A single restart is charged for all
  failures before the start of the next round. It also covers later failures of workers that have not taken
  part in a new rendezvous since then. A local rank that has already failed does not count again until its
  worker is replaced.
- **SHARE-3** A group of workers is started only after all processes of an earlier group have exited, and
  never after a group has succeeded.
- **SHARE-4** The agent exits once, and only after all processes of its workers have exited.
"""

from __future__ import annotations

from elasticrs._engine.job.restart_policy import has_not_met_since, without
from elasticrs._engine.job.value import Value
from elasticrs._engine.nodes.protocol import messages
from elasticrs._engine.supervise.state_machine import (
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    from elasticrs._engine.job.restart_policy import Meetings

    Group: TypeAlias = Literal["none", "running", "stopping"]
    Answer: TypeAlias = "Report | SayIdle | SayEnded | messages.WorkersDone | messages.StartFailed"
    Effect: TypeAlias = Start | Replace | Stop | Answer | "Finish"


class NodeState(Value):
    """State of a node's workers, and of the node's membership in the rendezvous of the agents.

    Args:
        grace: seconds between the first signal and SIGKILL.
        group: state of this node's workers. ``running`` includes workers that are being started.
        in_round: true if the node takes part in a round of the agents' rendezvous.
        restarts: number of restarts charged so far on all nodes.
        failed: local ranks of failed workers that have no running replacement yet.
        swept: those of ``failed`` whose workers have no processes left.
        paid: those of ``failed`` whose restart was charged. Their workers may be replaced.
        met: each worker's last rendezvous at the time when a failure ended the last round; without workers
            that were replaced since then.
        unfit: reason why this node cannot take part in another round.
        has_ended: true if the job has ended for this node.
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


# --- events, in addition to those in :mod:`.state_machine` ---


class WorkerFailed(Event):
    """A worker failed. ``met`` has the number of each worker's last rendezvous round, by local rank."""

    local_rank: int
    met: Meetings = ()


class RoundBegan(Event):
    round: int
    restarts: int


class RoundEnded(Event):
    """The agents' round has ended. After a failure, ``met`` has the same data as in :class:`WorkerFailed`."""

    met: Meetings = ()


class MustStop(Event):
    """Workers must stop. With ``is_fence``, kill them at once, because this node's lease has expired."""

    signum: int
    is_fence: bool = False


class JobEnded(Event):
    """The job has ended for this node. Workers that are still running are sent ``signum``."""

    signum: int = SIGTERM


class Report(Value):
    local_rank: int


class SayIdle(Value):
    """Report that this node is ready for the next round."""


class SayEnded(Value):
    """Report that no worker processes are left. ``unfit`` is the reason if this node joins no more rounds."""

    unfit: str | None = None


class Finish(Value): ...


def step(state: NodeState, event: Event) -> tuple[NodeState, list[Effect]]:
    """Handle an event. Return the node's new state and actions in order. Ignore events that do not fit."""
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
            return _gone(state, messages.StartFailed(event.message, event.transient))
        case Started() | WorkerExited() | _:
            return state, []


def _begin(state: NodeState, event: RoundBegan) -> tuple[NodeState, list[Effect]]:
    if state.has_succeeded:
        return state, [messages.WorkersDone()]
    if state.group == "none" and state.unfit is not None:
        return state.replaced(in_round=False), [SayEnded(state.unfit)]
    if state.group == "none":
        return state.replaced(group="running", met=()), [Start(event.round, event.restarts)]
    if state.group == "stopping" or not state.failed:
        return state, []
    if state.met:
        return _pay(state, state.failed)
    # One report is enough, because a single restart is charged for all failed workers.
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
        # The next round counts this failure against the restart budget.
        return state, []
    if has_not_met_since(state.met, event.met, place):
        return _pay(state, frozenset({place}))
    return state, [Report(place)]


def _swept(state: NodeState, event: WorkerSwept) -> tuple[NodeState, list[Effect]]:
    place = event.local_rank
    effects: list[Effect] = []
    if place not in state.failed:
        # The worker exceeded a timer before it exited with 0, so treat it as failed.
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
    return _gone(state.replaced(has_succeeded=True), messages.WorkersDone())


def _gone(state: NodeState, say: Answer) -> tuple[NodeState, list[Effect]]:
    """Update the node's state after its workers have ended. Unless they succeeded, it leaves the round."""
    state = state.replaced(group="none", failed=frozenset(), swept=frozenset(), paid=frozenset(), met=())
    if state.has_ended:
        return state.replaced(has_finished=True), [Finish()]
    if isinstance(say, SayEnded):
        state = state.replaced(unfit=say.unfit)
    if not state.in_round:
        return state, []
    return state.replaced(in_round=isinstance(say, messages.WorkersDone)), [say]
