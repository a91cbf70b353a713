"""What goes into the rendezvous machine and what comes out of it, besides what goes to and from the store.

That is in :mod:`elasticrs.store.coordination`: its requests are actions, and what it tells are events.
"""

from __future__ import annotations

from elasticrs.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Literal, TypeAlias

    from elasticrs.job.ranks import NodeRanks
    from elasticrs.store.coordination import Request, StoreEvent

    Cause: TypeAlias = Mapping[str, Any]
    # fmt: off
    OutcomeKind: TypeAlias = Literal[
        "succeeded", "failed", "closed", "aborted", "timeout", "left", "lost", "stuck", "refused", "spare"
    ]
    # fmt: on

# --- events ---


class Begin(Value):
    """The loop is ready."""


class StartFailed(Value):
    """The workers of this node could not be started, and why; nothing of them is left. ``transient``: the
    same start may succeed a moment later.
    """

    message: str
    transient: bool = False


class WorkerFailed(Value):
    """A worker of this node has failed; others may still run. In the cause, ``time_ns`` is on the store's
    wall clock.
    """

    cause: Cause


class WorkersDone(Value):
    """All workers of this node have exited with 0, and nothing of them is left."""


class GroupEnded(Value):
    """Nothing of this node's workers is left, apart from what is stuck.

    Without an earlier :class:`Stop` or :class:`WorkerFailed` it counts as a failure.

    Args:
        cause: the first failure on this node, better known than in :class:`WorkerFailed`.
        stuck: what SIGKILL did not end, for the user.
    """

    cause: Cause | None = None
    stuck: str | None = None


class TimerFired(Value):
    """The time of :class:`Arm` has passed."""

    name: str


class Leave(Value):
    """Somebody asked this agent to stop; with ``close`` the whole job ends, else only this node leaves it."""

    reason: str
    close: bool = False


class AskForRound(Value):
    """The workers of this node want another round though all are well: the present one ends, as planned, and
    nobody is charged for it.
    """

    reason: str


class StoreHosted(Value):
    """The process has begun to serve the coordination store, which it did not at first. ``fallback_addr`` as
    in :class:`~.settings.ThisAgent`, now that it is known.
    """

    fallback_addr: str | None = None


class StorePort(Value):
    """A fresh listener for a round's worker store is bound."""

    port: int


class StorePortFailed(Value):
    """No listener for the worker store could be bound, and why, for the user: this node is of no use."""

    message: str


# --- actions ---


class Connect(Value):
    """Begin a new session for this incarnation of the agent, from 1; answered by ``Connected`` or
    ``ConnectionLost``.
    """

    incarnation: int


class Disconnect(Value):
    """Close the connection and drop what it still has to say."""


class Start(Value):
    """Start the workers of a round.

    Args:
        round: its number, from 1 (``ELASTICRS_ROUND``).
        restarts: charged restarts of the job (``TORCHELASTIC_RESTART_COUNT``).
        group_rank: of this node.
        ranks: what its workers count from.
        master_addr: of group rank 0.
        master_port: of the round's worker store.
        serves_store: this node serves it: on the listener of the latest :class:`StorePort`, or, with a fixed
            port, on one that its workers bind (:class:`StartFailed` when it cannot be lent to them).
        earlier: reason for the end of the previous round. Empty for the first round.
        after_loss: the previous round ended because a node was lost.
    """

    round: int
    restarts: int
    group_rank: int
    ranks: NodeRanks
    master_addr: str
    master_port: int
    serves_store: bool
    earlier: str = ""
    after_loss: bool = False


class Stop(Value):
    """Stop the workers; answered by :class:`GroupEnded` (or by :class:`WorkersDone` when that came first).

    Args:
        round: whose workers.
        why: for the log.
        fenced: SIGKILL at once; else the usual signal and grace.
        hung: the reason is this worker of another node, which hangs: what it waits for may be here.
        planned: nobody has failed: a node comes or goes.
    """

    round: int
    why: str
    fenced: bool = False
    hung: Cause | None = None
    planned: bool = False


class BindStore(Value):
    """Bind a fresh listener for the worker store; answered by :class:`StorePort` or
    :class:`StorePortFailed`.
    """


class CloseStore(Value):
    """Close this node's worker store or listener, if there is one."""


class Arm(Value):
    """Set a timer, or set it anew; :class:`TimerFired` follows once."""

    name: str
    seconds: float


class Disarm(Value):
    """Forget a timer; one that is not set is no error."""

    name: str


class Announce(Value):
    """Tell the user one line."""

    text: str


class Outcome(Value):
    """How the job ended for this agent.

    Args:
        kind: ``succeeded``; ``failed`` (budget, losses, set-up: ``cause`` and ``message`` say why);
            ``closed`` (joined too late); ``aborted`` (somebody closed the job); ``timeout`` (not enough
            nodes, or no store); ``left`` (asked to leave); ``lost`` (the store is gone); ``stuck`` (workers
            that SIGKILL does not end); ``refused`` (settings, token, version or run differ); ``spare`` (the
            job succeeded without this node).
        message: one line for the user.
        cause: the job's first failure.
        has_failed: for ``closed``: the job had not succeeded, and nobody had closed it.
    """

    kind: OutcomeKind
    message: str | None = None
    cause: Cause | None = None
    has_failed: bool = False


class Exit(Value):
    """The end; nothing follows."""

    outcome: Outcome


if TYPE_CHECKING:
    WorkersEvent: TypeAlias = StartFailed | WorkerFailed | WorkersDone | GroupEnded
    ListenerEvent: TypeAlias = StoreHosted | StorePort | StorePortFailed
    Event: TypeAlias = StoreEvent | Begin | WorkersEvent | ListenerEvent | TimerFired | Leave | AskForRound
    LoopAction: TypeAlias = Start | Stop | Announce | Exit
    """What concerns workers and the user."""
    Action: TypeAlias = Request | Connect | Disconnect | BindStore | CloseStore | Arm | Disarm | LoopAction
