"""Events and actions of the rendezvous state machine. Those about the store are in :mod:`.coordination`."""

from __future__ import annotations

from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Literal, TypeAlias

    from elasticrs._engine.nodes.transport.coordination import Request, StoreEvent
    from elasticrs._engine.workers.plan import NodeRanks

    Cause: TypeAlias = Mapping[str, Any]
    # fmt: off
    OutcomeKind: TypeAlias = Literal[
        "succeeded", "failed", "closed", "aborted", "timeout", "left", "lost", "stuck", "refused", "spare",
        "excluded"
    ]
    # fmt: on

# --- events ---


class Begin(Value):
    """Event: the agent is ready to join the rendezvous."""


class StartFailed(Value):
    """Event: this node's workers could not be started; none runs. ``transient``: true if a retry may help."""

    message: str
    transient: bool = False


class WorkerFailed(Value):
    """Event: a worker failed. Others may still run. The cause's ``time_ns`` is on the store's wall clock."""

    cause: Cause


class WorkersDone(Value):
    """Event: all workers on this node have exited with code 0, and none of their processes are left."""


class GroupEnded(Value):
    """Event: all processes of this node's workers have exited, except ``stuck`` ones that survive SIGKILL. If
    neither :class:`Stop` nor :class:`WorkerFailed` came before, this counts as a failure.

    Args:
        cause: first failure on this node, with more details than in :class:`WorkerFailed`.
        evidence: facts about this node's ranks, to diagnose a hang or a failed collective.
        unfit: why a check found this node unfit. The leader decides whether to exclude the node.
    """

    cause: Cause | None = None
    stuck: str | None = None
    evidence: bytes | None = None
    unfit: str | None = None


class TimerFired(Value):
    name: str


class Leave(Value):
    """Event: this agent was asked to leave the job, or with ``close`` to end it for all nodes."""

    reason: str
    close: bool = False


class AskForRound(Value):
    """Event: healthy workers on this node request a new round, which does not count as a restart."""

    reason: str


class StoreHosted(Value):
    """Event: this process has started to serve the rendezvous store, after the rendezvous had begun."""

    fallback_addr: str | None = None
    why_hosts: str | None = None


class StorePort(Value):
    """Event: a new listener for the workers' store is bound to this port."""

    port: int


class StorePortFailed(Value):
    """Event: no listener for the workers' store could be bound, so this node cannot take part in rounds."""

    message: str


# --- actions ---


class Connect(Value):
    """Action: connect to the store, for this agent's registration with the number ``incarnation`` (1, 2, …).
    The event ``Connected`` or ``ConnectionLost`` follows.
    """

    incarnation: int


class Disconnect(Value):
    """Action: close the connection, and drop all its events that were not delivered."""


class Start(Value):
    """Action: start the workers of a round.

    Args:
        round: number of the round, from 1 (``ELASTICRS_ROUND``).
        restarts: number of restarts that the job has used (``TORCHELASTIC_RESTART_COUNT``).
        ranks: ranks of this node's first worker, and the world sizes of the round.
        serves_store: true if this node serves the workers' store, with the listener of the latest
            :class:`StorePort`. With a fixed port, one of its workers serves the store instead, and
            :class:`StartFailed` follows if the port cannot be lent.
        earlier: why the previous round ended; empty for the first round.
        after_loss: true if the previous round ended because a node was lost.
        delay: restart delay before this round, in seconds.
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
    delay: float = 0.0


class Stop(Value):
    """Action: stop the workers. :class:`GroupEnded` follows, or :class:`WorkersDone` if they finish earlier.

    Args:
        fenced: true to send SIGKILL immediately.
        hung: failure of a hung worker on another node, which may be waiting for a worker of this node.
        planned: true if there is no failure, for example because a node joins or leaves.
        after_failure: true if workers failed, usually on another node.
        asked: true if an agent was asked to end the job.
        node_leaves: true if a node leaves the job, which the others continue.
    """

    round: int
    why: str
    fenced: bool = False
    hung: Cause | None = None
    planned: bool = False
    after_failure: bool = False
    asked: bool = False
    node_leaves: bool = False


class BindStore(Value):
    """Action: bind a listener for the workers' store. Event ``StorePort`` or ``StorePortFailed`` follows."""


class CloseStore(Value):
    """Action: close the workers' store if this node hosts it; otherwise, close the reserved listener."""


class Arm(Value):
    """Action: set or reset a timer. When it expires, a single :class:`TimerFired` event follows."""

    name: str
    seconds: float


class Disarm(Value):
    """Action: cancel a timer. This has no effect if the timer is not set."""

    name: str


class Announce(Value):
    """Action: show the user a one-line message."""

    text: str


class Outcome(Value):
    """Outcome of the job for this agent.

    Args:
        kind: ``closed``: this agent joined after the end; ``aborted``: an agent closed the job; ``timeout``:
            too few nodes, or no store; ``left``: this agent was asked to leave; ``lost``: the store was lost;
            ``stuck``: workers survived SIGKILL; ``refused``: settings, command, token, version or run id
            differ; ``spare``: the job succeeded without this node; ``excluded``: this node appears to be
            unfit.
        message: one line for the user.
        cause: first failure of the job.
        has_failed: for ``closed``, true unless the job had succeeded or an agent had closed it; for
            ``spare``, true if this agent was probably started as a job of its own.
        is_permanent: for ``failed``, true if another attempt would fail in the same way.
        is_explained: for ``failed``, true if the loss of a node explains the failures of workers.
    """

    kind: OutcomeKind
    message: str | None = None
    cause: Cause | None = None
    has_failed: bool = False
    is_permanent: bool = False
    is_explained: bool = False


class Exit(Value):
    """Final action: exit with this outcome."""

    outcome: Outcome


if TYPE_CHECKING:
    WorkersEvent: TypeAlias = StartFailed | WorkerFailed | WorkersDone | GroupEnded
    ListenerEvent: TypeAlias = StoreHosted | StorePort | StorePortFailed
    Event: TypeAlias = StoreEvent | Begin | WorkersEvent | ListenerEvent | TimerFired | Leave | AskForRound
    LoopAction: TypeAlias = Start | Stop | Announce | Exit
    """Actions that concern the workers or the user."""
    Action: TypeAlias = Request | Connect | Disconnect | BindStore | CloseStore | Arm | Disarm | LoopAction
