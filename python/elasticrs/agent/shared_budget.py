"""What the agent of one of several nodes decides whose workers stay when others fail, as a pure function.

The agents are members of a rendezvous of their own (:mod:`elasticrs.rendezvous.elastic.machine`), beside that
of their workers. Its rounds are accounts: a failure ends one, its leader charges the budget and begins the
next, and no worker is stopped for that. Invariants, each held by a property test:

- **SHARE-1** a process is started in a place only when nothing of the worker that failed there is left, and
  the account that began since, or that its failure belongs to, has paid for it.
- **SHARE-2** a failure ends the account in which it is seen. Those that come before the next one begins, or
  of workers that have not met again since a failure ended the last one, belong to that: each place once.
- **SHARE-3** a group is started only when nothing of an earlier one is left, and no more once it has
  succeeded.
- **SHARE-4** the agent ends once, and only when nothing of its workers is left.
"""

from __future__ import annotations

from elasticrs._value import Value
from elasticrs.agent.state import (
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
from elasticrs.budget import has_not_met_since, without

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    from elasticrs.budget import Meetings

    Group: TypeAlias = Literal["none", "running", "stopping"]
    Effect: TypeAlias = (
        "Start | Replace | Stop | Report | SayIdle | SayDone | SayEnded | SayNotStarted | Finish"
    )


class NodeState(Value):
    """Where this node stands.

    Args:
        grace: seconds between the first signal and SIGKILL.
        group: its workers: none, running (or being started), being stopped.
        has_succeeded: all of them have exited with 0.
        in_round: the rendezvous counts on them.
        restarts: charged so far, over all nodes.
        failed: the local ranks whose places are not taken yet.
        swept: those of them of which nothing is left.
        paid: those of them that may be replaced.
        met: the last meetings of workers when a failure ended the last round, but of those replaced since.
        unfit: why this node can take part in no other round, as it has to say.
        has_ended: the job has, for this node.
        has_finished: the agent has.
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


# --- events, besides those of the workers in :mod:`elasticrs.agent.state` ---


class WorkerFailed(Event):
    """A worker has ended otherwise than by exiting with 0; ``met``: the last meetings of all of the node."""

    local_rank: int
    met: Meetings = ()


class RoundBegan(Event):
    """The leader has begun a round with this node."""

    round: int
    restarts: int


class RoundEnded(Event):
    """The round has ended; ``met``: the last meetings of the workers; empty when nobody has failed."""

    met: Meetings = ()


class MustStop(Event):
    """The workers have to go: by this signal, or at once when the lease of this node ends."""

    signum: int
    is_fence: bool = False


class JobEnded(Event):
    """The job has ended for this node; ``signum``: for workers that still run."""

    signum: int = SIGTERM


# --- effects, besides the actions in :mod:`elasticrs.agent.state` ---


class Report(Value):
    """Tell the rendezvous that this worker has failed."""

    local_rank: int


class SayIdle(Value):
    """Tell it that its next round need not wait for this node."""


class SayDone(Value):
    """Tell it that the workers of this node have succeeded."""


class SayEnded(Value):
    """Tell it that nothing of the workers is left; ``unfit``: why this node can take part in no other
    round.
    """

    unfit: str | None = None


class SayNotStarted(Value):
    """Tell it that the workers could not be started."""

    message: str
    transient: bool


class Finish(Value):
    """The end of the agent."""


def step(state: NodeState, event: Event) -> tuple[NodeState, list[Effect]]:
    """Return where this node stands after an event, and what to do, in order.

    Events that have no meaning where it stands change nothing.
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
    # The round before ended for another reason, and has paid for nobody.
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
        # The next round tells what becomes of it.
        return state, []
    if has_not_met_since(state.met, event.met, place):
        return _pay(state, frozenset({place}))
    return state, [Report(place)]


def _swept(state: NodeState, event: WorkerSwept) -> tuple[NodeState, list[Effect]]:
    place = event.local_rank
    effects: list[Effect] = []
    if place not in state.failed:
        # It has exited with 0 when its timer had expired: it has failed all the same.
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
    """Nothing of the group is left. A round that goes on with workers that have succeeded counts on this
    node.
    """
    state = state.replaced(group="none", failed=frozenset(), swept=frozenset(), paid=frozenset(), met=())
    if state.has_ended:
        return state.replaced(has_finished=True), [Finish()]
    if isinstance(say, SayEnded):
        state = state.replaced(unfit=say.unfit)
    if not state.in_round:
        return state, []
    return state.replaced(in_round=isinstance(say, SayDone)), [say]
